"""How large a change a design of so many tables and seeds could have missed, to go by the deviations that a run had."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.stats.power import TTestPower

from ..retrofit.files import replacing
from .statistics import ALPHA, MEASURES
from .style import OTHER_STYLE, STYLES

DESIGNS = ((6, 3), (30, 3), (100, 3))  # tables and seeds: 18, 90 and 300 cases
POWER = 0.8  # what counts as finding something

_LINES: tuple[Any, ...] = (":", "--", "-")
_GREY = "#8c8c8c"
_QUANTILES = 2000


def design_power(statistics: pd.DataFrame) -> pd.DataFrame:
    """What each design would find of each variant's change.

    Args:
        statistics: Of `statistics.compare_variants`.

    Returns:
        A row a variant, measure and design, for those whose tables differ: `variant`, `measure`, `unit`; `tables`,
        `seeds`, `cases`; `table_sd`, the standard deviation of a table's mean change, by the mixed model
        sqrt(between^2 + within^2 / seeds), without one that of the run's table means; `detectable`, the smallest true
        mean change that a two-sided t test over table means (at 5 %) finds with a power of 80 %; `margin`;
        `equivalence_power`, the probability that the test of equivalence succeeds where there is no change at all,
        without Holm's correction.
    """
    rows = []
    deviations = ["between_sd", "within_sd", "table_sd"]  # None, perhaps, where they come from JSON
    known = statistics.astype(dict.fromkeys(deviations, float)) if len(statistics) else statistics
    for row in known.to_dict("records"):
        for tables, seeds in DESIGNS:
            sd = math.hypot(row["between_sd"], row["within_sd"] / math.sqrt(seeds))
            sd = row["table_sd"] if math.isnan(sd) else sd
            if not sd > 0:
                continue
            rows.append(
                {
                    **{name: row[name] for name in ("variant", "measure", "unit")},
                    "tables": tables,
                    "seeds": seeds,
                    "cases": tables * seeds,
                    "table_sd": sd,
                    "detectable": sd * float(TTestPower().solve_power(nobs=tables, alpha=0.05, power=POWER)),
                    "margin": row["margin"],
                    "equivalence_power": float(equivalence_power(0.0, sd, tables, row["margin"])),
                }
            )
    return pd.DataFrame(rows)


def difference_power(change: Any, sd: float, tables: int) -> Any:
    """The probability that a two-sided t test over table means, at 5 %, finds a true mean change (or each of many)."""
    # Not statsmodels', which is NaN far out, where SciPy's noncentral t is.
    error, errors = _standard_errors(sd, tables)
    critical, away = stats.t.ppf(0.975, tables - 1) * errors, np.abs(change)[..., None]
    return (stats.norm.sf((critical - away) / error) + stats.norm.cdf((-critical - away) / error)).mean(axis=-1)


def equivalence_power(change: Any, sd: float, tables: int, margin: float) -> Any:
    """The probability that both one-sided t tests over table means put a true mean change (or each) within the margin.

    They do where |mean| < margin - t s / sqrt(tables).
    """
    error, errors = _standard_errors(sd, tables)
    room = np.clip(margin - stats.t.ppf(1 - ALPHA, tables - 1) * errors, 0, None)
    away = np.asarray(change)[..., None]
    return (stats.norm.cdf((room - away) / error) - stats.norm.cdf((-room - away) / error)).mean(axis=-1)


def _standard_errors(sd: float, tables: int) -> tuple[float, np.ndarray]:
    """The standard error of the mean, and so many equally probable values of what a study takes it for.

    That is independent of the study's mean: (tables - 1) s^2 / sd^2 is chi-squared.
    """
    error, at = sd / math.sqrt(tables), (np.arange(_QUANTILES) + 0.5) / _QUANTILES
    return error, error * np.sqrt(stats.chi2.ppf(at, tables - 1) / (tables - 1))


def plot_power(statistics: pd.DataFrame, file: Path, measure: str = "rmse") -> None:
    """Draw the power of each design against the true mean change, a panel a variant (without the control), as a PNG.

    Args:
        statistics: Of `statistics.compare_variants`.
        file: Where to.
        measure: Of `statistics.MEASURES`.

    Raises:
        ValueError: No variant has tables that differ in that measure.
        OSError: The file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose
    from matplotlib.lines import Line2D

    found = without_control(design_power(statistics), measure)
    if not len(found):
        raise ValueError("power needs a variant with two tables that differ")
    variants, margin, unit = list(found["variant"].unique()), float(found["margin"].iloc[0]), found["unit"].iloc[0]
    least, most = min(found["detectable"].min(), margin) / 5, 2 * max(found["detectable"].max(), margin)
    changes = np.geomspace(least, most, 200)
    figure = Figure(figsize=(1.0 + 3.4 * max(2, len(variants)), 3.9), dpi=160, layout="constrained")
    panels: Any = figure.subplots(1, len(variants), sharey=True, squeeze=False)[0]
    for axes, variant in zip(panels, variants, strict=True):
        designs = found[found["variant"] == variant].to_dict("records")
        for design, line in zip(designs, _LINES, strict=True):
            sd, tables = design["table_sd"], design["tables"]
            style: dict[str, Any] = {"linestyle": line, "linewidth": 1.5}
            color = STYLES.get(variant, OTHER_STYLE)[1]
            axes.plot(changes, difference_power(changes, sd, tables), color=color, **style)
            axes.plot(changes, equivalence_power(changes, sd, tables, margin), color=_GREY, **style)
        axes.axvline(margin, color="black", linewidth=0.8)
        axes.axhline(POWER, color="#dddddd", linewidth=0.8, zorder=0)
        axes.set_xscale("log")
        axes.set_xlabel(f"true mean change of {MEASURES[measure].name}, {unit}")
        axes.set_title(f"{variant} (tables vary by {designs[0]['table_sd']:.2g} {unit})", fontsize=10)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("probability")
    lines = [
        Line2D([], [], color="black", linestyle=line, label=f"{tables * seeds} cases of {tables} tables")
        for (tables, seeds), line in zip(DESIGNS, _LINES, strict=True)
    ]
    figure.legend(handles=lines, loc="outside upper center", ncols=len(lines), frameon=False, fontsize=9)
    words = f"colour: a change is found (t test, 5 %); grey: equivalence within {margin:g} {unit} is shown"
    figure.supxlabel(words, fontsize=9)
    with replacing(file) as part:
        figure.savefig(part, format="png")


def without_control(power: pd.DataFrame, measure: str = "rmse") -> pd.DataFrame:
    """The rows of `design_power` of a measure, without the control, whose change is rounding."""
    return power[(power["measure"] == measure) & (power["variant"] != "identity")] if len(power) else power
