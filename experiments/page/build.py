"""The page from runs to HTML: one file that needs nothing else, the same for the same runs."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from ...retrofit.files import write_text
from ..report import PAPER, cases_csv, notes, without_largest_note
from ..style import short_datasets
from ..verdicts import WHAT_A_VERDICT_SAYS, WHAT_THE_OTHERS_SAY, power_words, verdicts
from . import figures, tables
from .shown import Shown
from .sites import Sites
from .svg import COLORS


def write_page(runs: Sequence[Shown], file: Path) -> None:
    """Write the page. Raises `OSError` where it cannot be."""
    write_text(file, render(runs))


def render(runs: Sequence[Shown]) -> str:
    """The page as HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(_content(runs))
    return page.encode("utf-8", "backslashreplace").decode()  # of names of files that are no UTF-8


def _content(runs: Sequence[Shown]) -> dict[str, Any]:
    names = _short_names(runs)
    return {
        "runs": runs,
        "colors": COLORS,
        "subtitles": [_subtitle(shown) for shown in runs],
        "notices": notices(runs),
        "headline": tables.headline(runs),
        "without_largest": _said_once([(shown.name, without_largest_note(shown.summary)) for shown in runs]),
        "hosts": tables.hosts(runs) if len(runs) > 1 else None,
        "verdicts": [(shown.name, verdicts(shown.summary["statistics"])) for shown in runs],
        "measures": tables.measures(runs),
        "test_notes": [WHAT_A_VERDICT_SAYS, WHAT_THE_OTHERS_SAY],
        "power": _said_once([(shown.name, power_words(shown.summary["power"])) for shown in runs]),
        "notes": _said_once([(shown.name, notes(shown.summary)) for shown in runs]),
        "paper": PAPER if any(shown.paper for shown in runs) else None,
        "forests": _forests(runs, names),
        "cases": tables.cases(runs, names),
        "csv": _csv_link(runs),
        "agreements": _agreements(runs),
        "reliabilities": _reliabilities(runs),
        "sites": _sites(runs),
        "cost": tables.cost(runs),
        "provenance": tables.provenance(runs, names),
    }


def _said_once(words: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What is said of each run by name, without a name where it is the same of all; without what is empty."""
    if len({text for _, text in words}) == 1:
        words = [("", words[0][1])]
    return [(name, text) for name, text in words if text]


def _short_names(runs: Sequence[Shown]) -> dict[str, str]:
    return short_datasets(list(dict.fromkeys(spec for shown in runs for spec in shown.run.settings["datasets"])))


def notices(runs: Sequence[Shown]) -> list[str]:
    """What a reader must know before the figures: what has no result, and what is not shown."""
    names = _short_names(runs)
    return [notice for shown in runs for notice in _notices(shown, names, len(runs) > 1)]


def _subtitle(shown: Shown) -> str:
    settings = shown.run.settings
    finished, held = len(shown.run.results()), shown.rows["dataset"].nunique()
    return (
        f"host {tables.host_of(settings)}, precision {tables.precision_of(settings)}, "
        f"device {tables.device_of(settings)}, "
        f"{finished} cases of {held} table{'s' * (held != 1)}"
    )


def _notices(shown: Shown, names: dict[str, str], is_named: bool) -> Iterable[str]:
    prefix = f"{shown.name}: " if is_named else ""
    missing = shown.run.missing()
    if missing:
        reasons = {(case["dataset"], case["seed"]): case["reason"] for case in shown.summary["failed"]}
        listed = "; ".join(
            f"{names[dataset]} seed {seed}" + (f" ({reasons[dataset, seed]})" if (dataset, seed) in reasons else "")
            for dataset, seed in missing
        )
        yield f"{prefix}{len(missing)} of {shown.planned} cases have no result, and no figure counts them: {listed}."
    if "host_crps" not in shown.rows:
        yield (
            f"{prefix}the run was made by a version that kept neither CRPS nor the coverage of intervals; these are "
            "left out."
        )
    answers = shown.answers
    if not answers.cases:
        yield (
            f"{prefix}the run's folder holds no predictions (a version that kept none, or they were removed), so that "
            "nothing is shown of these and of their quantiles."
        )
    elif len(answers.cases) < len(shown.run.results()):
        yield f"{prefix}predictions are kept for {len(answers.cases)} of {len(shown.run.results())} cases only."
    for unreadable in answers.unreadable:
        yield f"{prefix}{unreadable}."


def _label(shown: Shown, runs: Sequence[Shown], text: str) -> str:
    return f"{shown.name}: {text}" if len(runs) > 1 else text


def _forests(runs: Sequence[Shown], names: dict[str, str]) -> list[tuple[str, str]]:
    statistics = [row for shown in runs for (_, measure), row in shown.statistics.items() if measure == "rmse"]
    ends = ("mean_low", "mean_high", "equivalence_low", "equivalence_high")
    axis = figures.ChangeAxis.of(
        pd.concat([shown.rows for shown in runs], ignore_index=True), [row[end] for row in statistics for end in ends]
    )
    made: list[tuple[str, str]] = []
    for i, (variant, having) in enumerate(tables.by_variant(runs)):
        drawn = [(runs.index(s), s.rows[s.rows["variant"] == variant], s.statistics[variant, "rmse"]) for s in having]
        made.append((variant, figures.forest(f"forest-{i}", variant, drawn, names, axis, alone=len(runs) == 1)))
    return made


def _agreements(runs: Sequence[Shown]) -> list[tuple[str, str, str]]:
    made: list[tuple[str, str, str]] = []
    for variant, having in tables.by_variant(runs):
        for shown in having:
            if not (kept := shown.answers.of(variant)):
                continue
            host, shift = shown.answers.agreement(variant)
            words = f"{len(host):,} test rows of {len(kept)} cases; largest difference {abs(shift).max():.2g} SD"
            drawn = figures.agreement(f"agreement-{len(made)}", variant, host, shift)
            made.append((_label(shown, runs, variant), words, drawn))
    return made


def _reliabilities(runs: Sequence[Shown]) -> list[tuple[str, str, str]]:
    made: list[tuple[str, str, str]] = []
    for i, shown in enumerate(runs):
        variants = [variant for variant in shown.variants if shown.answers.of(variant)]
        below = shown.answers.reliability(variants)
        if not below:
            continue
        levels = shown.answers.levels
        changes = {variant: shown.answers.reliability_change(variant) for variant in variants}
        lines = figures.reliability(f"reliability-{i}", levels, below)
        made.append((_label(shown, runs, ""), lines, figures.reliability_change(f"shares-{i}", levels, changes)))
    return made


def _sites(runs: Sequence[Shown]) -> list[dict[str, Any]]:
    """Of each variant its sites, once for runs that have the same; or why they are not known."""
    made: list[dict[str, Any]] = []
    for variant, having in tables.by_variant(runs):
        groups: list[tuple[Sites | str, list[str]]] = []
        for shown in having:
            found = shown.sites[variant]
            for other, sharing in groups:
                if found == other or (isinstance(found, Sites) and isinstance(other, Sites) and found.same(other)):
                    sharing.append(shown.name)
                    break
            else:
                groups.append((found, [shown.name]))
        for found, sharing in groups:
            title = f"{variant} in {', '.join(sharing)}" if len(runs) > 1 else variant
            if isinstance(found, str):
                made.append({"title": title, "missing": found, "figure": None})
                continue
            calibrated = found.table.dropna()
            drawn = None
            if len(calibrated):
                drawn = figures.lost_presence(f"presence-{len(made)}", variant, calibrated, found.chosen.get("delta"))
            chosen = ", ".join(f"{name} {value}" for name, value in found.chosen.items())
            made.append(
                {"title": title, "missing": "", "chosen": chosen, "figure": drawn, "table": tables.sites(found)}
            )
    return made


def _csv_link(runs: Sequence[Shown]) -> str:
    """The cases as CSV, in the page itself."""
    frames = [shown.rows if len(runs) == 1 else shown.rows.assign(run=shown.name) for shown in runs]
    content = cases_csv(pd.concat(frames, ignore_index=True))
    return "data:text/csv;charset=utf-8;base64," + base64.b64encode(content.encode()).decode()
