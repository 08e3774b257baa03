"""How far tau may go: what predictions lose and what the gate buys, against delta."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..calibration.calibration import Calibration
from ..calibration.cases import Case
from ..calibration.settings import DELTA
from ..calibration.variants import VARIANTS
from ..retrofit.api import Retrofit, patch
from ..retrofit.check import Change, compare, predict_cases, summarize
from ..retrofit.files import replacing
from ..retrofit.hosts import Host
from ..retrofit.printing import Cells, Titled
from .datasets import load_dataset, make_case
from .report import percent, set_change_scale
from .statistics import bootstrap_interval
from .style import OTHER_STYLE, STYLES

DELTAS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)


def suite_cases(specs: Sequence[str], seeds: int) -> list[Case]:
    """The cases of `oretrofit eval` with its default sizes; raises `DatasetError` as its tables do."""
    datasets = map(load_dataset, specs)
    return [make_case(dataset, seed) for dataset in datasets for seed in range(seeds)]


def half_presence(retrofit: Retrofit) -> dict[str, float]:
    """Below which length a token fades: the `||h||` at which presence is 1/2.

    `p = n / (tau + n) = 1/2` at `||h||^2 = n = tau` (docs/theory.md, section 2), so a site's is
    `sqrt(tau / median n)`, relative to the median length of its live tokens on the calibration
    tables. Returns `half_presence_norm`, the median over sites, and `_min` and `_max` over them.
    """
    sites = retrofit.table
    norms = np.sqrt(sites["tau"] / sites["sq_norm_q50"])
    return {
        "half_presence_norm": float(norms.median()),
        "half_presence_norm_min": float(norms.min()),
        "half_presence_norm_max": float(norms.max()),
    }


def sweep_delta(
    host: Host,
    calibration: Calibration,
    cases: Sequence[Case],
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    deltas: Sequence[float] = DELTAS,
    on_case: Callable[[], None] | None = None,
    **options: Any,
) -> pd.DataFrame:
    """Compare variants and host on `cases` for each delta, in float32.

    Args:
        host: The host.
        calibration: What was measured on it.
        cases: What to predict.
        variants: Any of `VARIANTS`.
        deltas: What to patch with.
        on_case: Called after each case predicted, the host's included.
        **options: Of `fit_and_predict`.

    Returns:
        A row a variant and delta: `variant`, `delta`, `host_sha256`, what `check.summarize` returns, `ci95_low_pct` and
        `ci95_high_pct` (as of `statistics.bootstrap_interval`), and what `half_presence` returns.
    """
    reference = predict_cases(host.specs, cases, on_case, **options)
    rows = []
    for variant in variants:
        for delta in deltas:
            retrofit = patch(host, variant, delta=delta, calibration=calibration)
            predicted = predict_cases(retrofit.specs, cases, on_case, **options)
            changes = [compare(*made) for made in zip(cases, reference, predicted, strict=True)]
            rows.append(
                {
                    "variant": variant,
                    "delta": delta,
                    "host_sha256": host.sha256,
                    **summarize(changes),
                    **_interval(changes, cases),
                    **half_presence(retrofit),
                }
            )
    return pd.DataFrame(rows)


def _interval(changes: Sequence[Change], cases: Sequence[Case]) -> dict[str, float]:
    deltas, tables = ([change.rmse_delta_pct for change in changes], [case.dataset for case in cases])
    low, high = bootstrap_interval(np.array(deltas), np.array(tables))
    return {"ci95_low_pct": low, "ci95_high_pct": high}


def titled_tables(rows: pd.DataFrame, place: str) -> Iterator[Titled]:
    """A table a variant of the rows of `sweep_delta`, made at `place`."""
    for name, group in rows.groupby("variant", sort=False):
        yield f"{name} on {place}, by delta", delta_cells(group), 1


def delta_cells(rows: pd.DataFrame) -> Cells:
    """Header and cells of one variant's rows of `sweep_delta`, to fit a terminal."""
    header = ["delta", "mean", "low", "high", "largest", "size", "half", "range"]
    changes = ["mean_rmse_delta_pct", "ci95_low_pct", "ci95_high_pct", "largest_rmse_delta_pct"]
    cells = []
    for row in rows.to_dict("records"):
        size = percent(row["mean_abs_rmse_delta_pct"]).lstrip("+")
        half, low, high = (f"{100 * row[f'half_presence_norm{end}']:.2g}" for end in ("", "_min", "_max"))
        cells.append([f"{row['delta']:.0e}", *(percent(row[key]) for key in changes), size, half, f"{low}–{high}"])
    return header, cells


def notes() -> str:
    """What a reader of the tables has to know."""
    return (
        "RMSE change against the host in %: mean, low and high end of its 95 % CI (percentile bootstrap over "
        "tables, then cases), largest change of a case (up or down), size (mean of the absolute value). Half: the "
        "||h|| at which presence is 1/2, in % of the site's median ||h||, median and range over sites."
    )


def plot_frontier(rows: pd.DataFrame, file: Path) -> None:
    """Draw the RMSE change and the length at half presence against delta, from `sweep_delta`'s rows.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.6, 4.2), dpi=160, layout="constrained")
    change, half = figure.subplots(1, 2)
    drawn = rows.melt(
        "variant", ["ci95_low_pct", "ci95_high_pct", "largest_rmse_delta_pct"], value_name="rmse_delta_pct"
    )
    set_change_scale(change, drawn)
    change.axhline(0, color="black", linewidth=0.8)
    half.set_yscale("log")
    half.yaxis.set_major_formatter("{x:g}")
    half.set_ylabel("‖h‖ at presence 1/2, % of the site's median ‖h‖")
    dotted: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "white"}
    variants = list(rows["variant"].unique())
    legend = []
    for i, variant in enumerate(variants):
        marker, color = STYLES.get(variant, OTHER_STYLE)
        style: dict[str, Any] = {"marker": marker, "color": color, "markersize": 5, "linewidth": 1.2}
        group = rows[rows["variant"] == variant]
        x = group["delta"] * 10 ** (0.11 * (i - (len(variants) - 1) / 2))  # side by side
        change.plot(x, group["largest_rmse_delta_pct"], **style, **dotted)
        change.plot(x, group["mean_rmse_delta_pct"], **style)
        change.vlines(x, group["ci95_low_pct"], group["ci95_high_pct"], color=color, linewidth=1.5)
        middle, low, high = (100 * group[f"half_presence_norm{end}"] for end in ("", "_min", "_max"))
        half.plot(x, middle, **style)
        half.vlines(x, low, high, color=color, linewidth=1.5)
        legend.append(Line2D([], [], label=variant, **style))
    grey: dict[str, Any] = {"marker": "o", "color": "#8c8c8c", "markersize": 5, "linewidth": 1.2}
    legend += [
        Line2D([], [], label="left: mean, 95 % CI; right: median, range over sites", **grey),
        Line2D([], [], label="left: largest change of a case", **grey, **dotted),
    ]
    for axes in (change, half):
        axes.set_xscale("log")
        axes.set_xlabel("delta (shaded: the default)")
        axes.axvspan(DELTA / 1.5, DELTA * 1.5, color="#eeeeee", linewidth=0, zorder=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), frameon=False)
    with replacing(file) as part:
        figure.savefig(part, format="png")
