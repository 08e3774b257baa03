"""What an audit prints: its tables, and what leaks in words. `found` is what `audit` returned."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd

from ..patches.host_spec import HostSpec
from ..retrofit.printing import Cells, Titled
from .audit import LEAK
from .audit_tables import KINDS


def titled_tables(found: dict[str, Any], spec: HostSpec, device: str) -> Iterator[Titled]:
    """Title, header and cells, and how many columns are text, of all that is printed as a table."""
    title = f"NULLs in the input, {found['tables']} synthetic tables, float32, {device}: shift of a live prediction"
    yield title, summary_cells(found), 1
    title = "NULLs in front of each stage: shift of an old token, norm of a NULL behind it"
    yield title, boundary_cells(found, spec), 1
    for names, rows in leak_rows(found, spec).items():
        if rows:
            yield f"What leaks in {names}", (["at", "what leaks"], rows), 2


def summary_cells(found: dict[str, Any]) -> Cells:
    """Header and cells of the summary table: a row a variant."""
    rows = [
        [name, *(_figure(v["live_shift"][kind]) for kind in (*KINDS, "all")), _figure(v["max_null_norm"])]
        for name, v in found["variants"].items()
    ]
    return ["", *KINDS, "all at once", "NULL norm"], rows


def boundary_cells(found: dict[str, Any], spec: HostSpec) -> Cells:
    """Header and cells of the table by boundary, narrow: shift and NULL norm, the largest over `KINDS`."""
    frames = {name: pd.DataFrame(v["boundaries"]) for name, v in found["variants"].items()}
    figures = pd.concat(
        {name: f.groupby("boundary", sort=False)[["shift", "null_norm"]].max() for name, f in frames.items()}, axis=1
    )
    header = [f"{name}\n{what}" for name in frames for what in ("shift", "NULL")]
    return ["", *header], [
        [spec.shorten(str(boundary)), *map(_figure, row)]
        for boundary, row in zip(figures.index, figures.to_numpy(), strict=True)
    ]


def leak_rows(found: dict[str, Any], spec: HostSpec) -> dict[str, list[list[str]]]:
    """Where and what leaks, in words, by the variants that it is found in.

    Equal findings at consecutive blocks are one.
    """
    variants: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, v in found["variants"].items():
        variants.setdefault(tuple(_leak_rows(v["boundaries"], spec)), []).append(name)
    return {", ".join(names): [list(row) for row in rows] for rows, names in variants.items()}


def _leak_rows(boundaries: Sequence[dict[str, Any]], spec: HostSpec) -> Iterator[tuple[str, str]]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for record in boundaries:
        leaks = kinds.setdefault(record["boundary"], {})
        for leak in record["leaks"]:
            # A part of a stage without the stage's name, which stands beside it.
            leaks.setdefault(leak.removeprefix(record["boundary"]).lstrip(". "), []).append(record["inserted"])

    def of_stack(item: tuple[str, dict[str, list[str]]]) -> tuple[str, Any]:
        stack, _, index = item[0].rpartition(".")
        return (stack if index.isdigit() else item[0]), item[1]

    for (_, leaks), stages_alike in itertools.groupby(kinds.items(), key=of_stack):
        first, *others = [name for name, _ in stages_alike]
        place = spec.shorten(first) + (f" to {others[-1].rpartition('.')[2]}" if others else "")
        for leak, inserted in leaks.items():
            yield place, f"{leak} ({', '.join(inserted)})"


def notes(found: dict[str, Any], spec: HostSpec) -> str:
    """Where nothing leaks, and what a reader of the tables has to know."""
    tight = [f"Nothing leaks in {names}.\n" for names, rows in leak_rows(found, spec).items() if not rows]
    boundaries = " ".join(record["boundary"] for v in found["variants"].values() for record in v["boundaries"])
    short = ", ".join(f"{short} = {name}" for name, short in spec.short_names.items() if name in boundaries)
    return "".join(tight) + (
        "Figures are the largest over tables; NULLs are up to as many again, at random places. Shift of a prediction: "
        "of its mean, in standard deviations of the target; of an old token: relative to the largest entry of its "
        "state. In brackets: the NULLs with which a part leaks. A part is named if it alone lets a NULL through "
        f"in the closed model, with a shift or a norm above {LEAK:g}: a weaker leak is in the figures only."
        + (f" {short}." if short else "")
    )


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
