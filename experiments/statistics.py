"""What an evaluation's cases say about a variant, knowing that cases share a table.

Cases of one table are not independent: the unit of every test is the table, by the mean of its cases' changes.
A test that cannot be made (one table, no change that differs) is not available, NaN, and said to be.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy import stats
from statsmodels.regression.mixed_linear_model import MixedLM
from statsmodels.stats.multitest import multipletests
from statsmodels.stats.weightstats import DescrStatsW

from ..calibration.settings import MARGIN

# A host whose RMSE is below this fraction of the target's deviation is nearly exact: a change of it that is nothing in
# the target's unit is many percent.
SENSITIVE = 0.02

ALPHA = 0.05  # of each one-sided test of equivalence, after Holm's correction
RESAMPLES = 10_000

_MODEL = ("model_mean", "model_low", "model_high", "between_sd", "within_sd")


@dataclass(frozen=True)
class Measure:
    """How the change of a figure is counted.

    Attributes:
        name: In words.
        unit: Of the change.
        margin: Within which it is equivalent, for a margin of 1 %.
        change: From the rows of `runs.case_rows`.
    """

    name: str
    unit: str
    margin: float
    change: Callable[[pd.DataFrame], pd.Series]


def _points(name: str) -> Callable[[pd.DataFrame], pd.Series]:
    return lambda rows: 100 * (rows[f"variant_{name}"] - rows[f"host_{name}"])


# Stretching a predicted distribution by 1 % changes its log-likelihood by about 0.01 nats. Coverage comes in steps of
# one test row, and so has as many points as the others have percent.
MEASURES: dict[str, Measure] = {
    "rmse": Measure("RMSE", "%", 1.0, lambda rows: rows["rmse_delta_pct"]),
    "crps": Measure("CRPS", "%", 1.0, lambda rows: 100 * (rows["variant_crps"] / rows["host_crps"] - 1)),
    "nll": Measure("NLL", "nats", 0.01, lambda rows: rows["variant_nll"] - rows["host_nll"]),
    "coverage_80": Measure("80 % coverage", "points", 1.0, _points("coverage_80")),
    "coverage_95": Measure("95 % coverage", "points", 1.0, _points("coverage_95")),
}


def compare_variants(rows: pd.DataFrame, margin: float = MARGIN) -> pd.DataFrame:
    """Test each variant against its host.

    Args:
        rows: Of `runs.case_rows`. What they lack (those of earlier versions) is left out.
        margin: Changes of up to so many percent, up or down, count as equivalent; see `MEASURES` for what is not
            counted in percent.

    Returns:
        A row a variant and measure, in the rows' order and that of `MEASURES`:

        - `variant`, `measure` (a key of `MEASURES`), `unit` (of all changes); `cases` and `tables`, how many;
        - `mean`, `mean_low`, `mean_high`, `median`, `median_low`, `median_high`: over cases, each with a 95 %
          percentile interval by `resampled_cases`;
        - `largest`, of either sign, with its `largest_dataset` and `largest_seed`, and `mean_without_largest`, over the
          cases of all other tables: how far one table decides;
        - `sensitive`, how many cases are (`is_sensitive`), and `mean_without_sensitive`;
        - `model_mean`, `model_low`, `model_high`: mean and 95 % interval of a mixed model with a random effect of the
          table (REML; Student's t with tables - 1 degrees of freedom); `between_sd` and `within_sd`, its standard
          deviations of tables and of cases within a table;
        - `table_sd`: the standard deviation of table means;
        - `wilcoxon_p`: of the signed-rank test over them, two-sided;
        - `margin`; `equivalence_low`, `equivalence_high`: the 90 % t interval over table means; `equivalence_p`: of
          the two one-sided t tests (TOST) against the margin; `equivalence_p_holm`: corrected for the number of
          variants; `equivalent`: whether that is below `ALPHA`, None where it is not available;
        - `not_available`: what is not, and why, in words; empty for nothing.
    """
    found = []
    for variant, group in rows.groupby("variant", sort=False) if len(rows) else []:
        for name, measure in MEASURES.items():
            if (changes := _changes(group, name)) is not None:
                row = {"variant": str(variant), "measure": name, "unit": measure.unit}
                found.append(row | _describe(changes) | _test(changes, margin * measure.margin))
    table = pd.DataFrame(found)
    return _correct(table) if len(table) else table


def is_sensitive(rows: pd.DataFrame) -> np.ndarray:
    """Of each row whether its host is nearly exact; see `SENSITIVE`. (In rows of earlier versions unknown: no.)"""
    if "target_sd" not in rows:
        return np.zeros(len(rows), dtype=bool)
    return (rows["host_rmse"] < SENSITIVE * rows["target_sd"].astype(float)).to_numpy()


def resampled_cases(tables: np.ndarray, resamples: int = RESAMPLES) -> np.ndarray:
    """A bootstrap that knows of tables: tables drawn with replacement, then cases within each.

    Args:
        tables: (cases,), which table each is of.
        resamples: How often.

    Returns:
        (resamples, drawn): positions of cases. A resample has as many tables as there are, each with as many cases as
        it has; where tables differ in that, rows end in -1, which is no case. Always the same.
    """
    return _resampled(tuple(pd.factorize(tables)[0].tolist()), resamples)


def bootstrap_interval(
    values: np.ndarray, tables: np.ndarray, statistic: Literal["mean", "median"] = "mean"
) -> tuple[float, float]:
    """The 95 % percentile interval of a statistic of (cases,) values, by `resampled_cases`; NaN for a single one."""
    if len(values) < 2:
        return math.nan, math.nan
    positions = resampled_cases(tables)
    drawn = np.append(values, np.nan)[positions]
    compute = getattr(np, f"nan{statistic}" if positions.min() < 0 else statistic)
    low, high = np.quantile(compute(drawn, axis=1), [0.025, 0.975])
    return float(low), float(high)


@lru_cache(maxsize=1)  # all measures of all variants have the same cases, as a rule
def _resampled(codes: tuple[int, ...], resamples: int) -> np.ndarray:
    rng, order, sizes = np.random.default_rng(0), np.argsort(codes, kind="stable"), np.bincount(codes)
    drawn = rng.integers(0, len(sizes), (resamples, len(sizes)))
    within = np.floor(rng.random((*drawn.shape, sizes.max())) * sizes[drawn][..., None]).astype(int)
    positions = order[(np.cumsum(sizes) - sizes)[drawn][..., None] + within]
    positions[np.arange(sizes.max()) >= sizes[drawn][..., None]] = -1
    positions.flags.writeable = False
    return positions.reshape(resamples, -1)


def _changes(group: pd.DataFrame, name: str) -> pd.DataFrame | None:
    """`dataset`, `seed`, `change` and `sensitive` of a variant's cases that have a measure; None without any."""
    try:
        change = MEASURES[name].change(group).astype(float)
    except KeyError:
        return None
    made = group[["dataset", "seed"]].assign(change=change, sensitive=is_sensitive(group))
    made = made[np.isfinite(made["change"])].reset_index(drop=True)
    return made if len(made) else None


def _describe(changes: pd.DataFrame) -> dict[str, Any]:
    values, tables = changes["change"].to_numpy(), changes["dataset"].to_numpy()
    mean_low, mean_high = bootstrap_interval(values, tables)
    median_low, median_high = bootstrap_interval(values, tables, "median")
    largest = changes.loc[changes["change"].abs().idxmax()]
    return {
        "cases": len(values),
        "tables": changes["dataset"].nunique(),
        "mean": float(values.mean()),
        "mean_low": mean_low,
        "mean_high": mean_high,
        "median": float(np.median(values)),
        "median_low": median_low,
        "median_high": median_high,
        "largest": float(largest["change"]),
        "largest_dataset": str(largest["dataset"]),
        "largest_seed": int(largest["seed"]),
        "mean_without_largest": float(changes.loc[tables != largest["dataset"], "change"].mean()),
        "sensitive": int(changes["sensitive"].sum()),
        "mean_without_sensitive": float(changes.loc[~changes["sensitive"], "change"].mean()),
    }


def _test(changes: pd.DataFrame, margin: float) -> dict[str, Any]:
    means = changes.groupby("dataset", sort=False)["change"].mean().to_numpy()
    missing = []
    table_sd = float(means.std(ddof=1)) if len(means) > 1 else math.nan
    tested = dict.fromkeys(("wilcoxon_p", "equivalence_low", "equivalence_high", "equivalence_p"), math.nan)
    if not changes["change"].any():
        nothing = dict.fromkeys(_MODEL, math.nan)
        return {**nothing, "table_sd": table_sd, **tested, "margin": margin, "not_available": "no case changed"}
    if len(means) < 2:
        missing.append("tests need two tables")
    elif not means.any():
        missing.append("no table's mean changed, which leaves nothing to test")
    else:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")  # of exact p-values where changes are equal or zero
            tested["wilcoxon_p"] = float(stats.wilcoxon(means).pvalue)
        if means.std() > 1e-9 * np.abs(means).max():
            described = DescrStatsW(means)
            tested["equivalence_low"], tested["equivalence_high"] = map(float, described.tconfint_mean(2 * ALPHA))
            tested["equivalence_p"] = float(described.ttost_mean(-margin, margin)[0])
        else:
            missing.append("all tables changed alike, which leaves equivalence without a test")
    model, reason = fit_model(changes)
    reasons = "; ".join([*missing, *([reason] if reason else [])])
    return {**model, "table_sd": table_sd, **tested, "margin": margin, "not_available": reasons}


def fit_model(changes: pd.DataFrame) -> tuple[dict[str, float], str]:
    """A mixed model of `change` with a random effect of `dataset`.

    Returns:
        `model_mean`, `model_low`, `model_high`, `between_sd`, `within_sd` (all NaN where there is none), and the reason
        why there is none.
    """
    nothing = dict.fromkeys(_MODEL, math.nan)
    values, tables = changes["change"].to_numpy(), changes["dataset"].nunique()
    size = values.std()
    if tables < 2 or len(values) == tables:
        return nothing, "a mixed model needs two tables and two cases of a table"
    if not size > 1e-9 * np.abs(values).max():
        return nothing, "no case changed otherwise than another, which leaves a mixed model nothing to explain"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a variance at its bound, zero, which is an answer
        try:
            model = MixedLM(values / size, np.ones(len(values)), groups=changes["dataset"].to_numpy())
            fitted = model.fit(method=["bfgs", "powell"])  # the second where the variance is at its bound
            mean, error = float(fitted.params[0]), float(fitted.bse_fe[0])
            between, within = float(fitted.cov_re[0, 0]), float(fitted.scale)
        except (np.linalg.LinAlgError, ValueError):
            return nothing, "the mixed model did not converge"
    if not fitted.converged or not np.isfinite([mean, error]).all():
        return nothing, "the mixed model did not converge"
    half = float(stats.t.ppf(0.975, tables - 1)) * error
    deviations = (math.sqrt(max(0.0, between)), math.sqrt(within))
    return dict(zip(_MODEL, [float(size * v) for v in (mean, mean - half, mean + half, *deviations)], strict=True)), ""


def _correct(table: pd.DataFrame) -> pd.DataFrame:
    """With Holm's correction of a measure's tests over variants."""
    corrected = pd.Series(math.nan, table.index)
    for _, p in table["equivalence_p"].dropna().groupby(table["measure"]):
        corrected[p.index] = multipletests(p, ALPHA, method="holm")[1]
    at = list(table.columns).index("equivalence_p") + 1
    table.insert(at, "equivalence_p_holm", corrected)
    verdicts = [None if math.isnan(p) else bool(p < ALPHA) for p in corrected]
    table.insert(at + 1, "equivalent", pd.Series(verdicts, dtype=object))
    return table
