"""How far tau may go: what predictions lose and what the gate buys, against delta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs

from ..calibration.carriers import calibration_tables, split_table
from ..calibration.settings import DELTA
from ..calibration.variants import VARIANTS
from ..retrofit.api import Retrofit, calibrate, patch
from ..retrofit.hosts import Host
from .datasets import Case, load_dataset, make_case
from .report import STYLES, Cells, bootstrap_ci, percent, set_change_scale

DELTAS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)

# Held out from calibration, whose tables have another seed.
HELD_OUT_SEED = 30_000


def synthetic_cases(count: int, seed: int = HELD_OUT_SEED) -> list[Case]:
    """Synthetic tables as cases: the first two thirds of the rows to fit, the rest to predict."""
    cases = []
    for i, table in enumerate(calibration_tables(count, seed)):
        X_train, y_train, X_test, y_test = split_table(table)
        X_train, X_test = pd.DataFrame(X_train), pd.DataFrame(X_test)
        cases.append(Case(f"synthetic {seed}/{i}", 0, X_train, y_train, X_test, y_test, table.categorical))
    return cases


def suite_cases(specs: Sequence[str], seeds: int) -> list[Case]:
    """The cases of `oretrofit eval` with its default sizes; raises `DatasetError` as its tables do."""
    datasets = map(load_dataset, specs)
    return [make_case(dataset, seed) for dataset in datasets for seed in range(seeds)]


def predict_cases(
    specs: ModelSpecs, cases: Sequence[Case], device: str = "cpu", on_case: Callable[[], None] | None = None
) -> list[np.ndarray]:
    """Predicted means of each case's test rows, in float32; `on_case` is called after each case."""
    predicted = []
    for case in cases:
        regressor = TabPFNRegressor(
            model_path=specs,
            device=device,
            inference_precision=torch.float32,
            categorical_features_indices=case.categorical,
            random_state=case.seed,
        )
        predicted.append(regressor.fit(case.X_train, case.y_train).predict(case.X_test))
        if on_case is not None:
            on_case()
    return predicted


def compare_predictions(
    host: Sequence[np.ndarray], variant: Sequence[np.ndarray], cases: Sequence[Case]
) -> dict[str, float]:
    """What became of the predictions of `cases`, given host's and variant's from `predict_cases`.

    Returns:
        Of the RMSE changes in percent `mean_rmse_delta_pct`, its interval `ci95_low_pct` and
        `ci95_high_pct` (as of `report.bootstrap_ci`, over cases), `worst_rmse_delta_pct` (the
        largest) and `mean_abs_rmse_delta_pct`; `max_abs_diff_sd`, the largest change of a predicted
        mean in standard deviations of the training target.
    """
    changes, shifts = [], []
    for a, b, case in zip(host, variant, cases, strict=True):
        rmse_host, rmse_variant = (np.sqrt(np.mean((p - case.y_test) ** 2)) for p in (a, b))
        changes.append(100 * (rmse_variant / rmse_host - 1))
        shifts.append(np.abs(a - b).max() / case.y_train.std())
    low, high = bootstrap_ci(np.array(changes))
    return {
        "mean_rmse_delta_pct": float(np.mean(changes)),
        "ci95_low_pct": low,
        "ci95_high_pct": high,
        "worst_rmse_delta_pct": float(np.max(changes)),
        "mean_abs_rmse_delta_pct": float(np.mean(np.abs(changes))),
        "max_abs_diff_sd": float(np.max(shifts)),
    }


def near_identity(
    retrofit: Retrofit, cases: Sequence[Case], device: str = "cpu", on_case: Callable[[], None] | None = None
) -> dict[str, float]:
    """`compare_predictions` of a retrofit and its host; `on_case` is called twice a case."""
    host, variant = (predict_cases(s, cases, device, on_case) for s in (retrofit.host_specs, retrofit.specs))
    return compare_predictions(host, variant, cases)


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
    cases: Sequence[Case],
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    deltas: Sequence[float] = DELTAS,
    device: str = "cpu",
    on_table: Callable[[], None] | None = None,
    on_case: Callable[[], None] | None = None,
) -> pd.DataFrame:
    """Compare variants and host on `cases` for each delta, calibrated on the default tables.

    `on_table` is called after each calibration table, `on_case` after each case predicted, the
    host's included.

    Returns:
        A row a variant and delta: `variant`, `delta`, what `compare_predictions` and
        `half_presence` return.
    """
    calibration = calibrate(host, device=device, on_table=on_table)
    reference = predict_cases(host.specs, cases, device, on_case)
    rows = []
    for variant in variants:
        for delta in deltas:
            retrofit = patch(host, variant, delta=delta, calibration=calibration)
            compared = compare_predictions(reference, predict_cases(retrofit.specs, cases, device, on_case), cases)
            rows.append({"variant": variant, "delta": delta, **compared, **half_presence(retrofit)})
    return pd.DataFrame(rows)


def delta_cells(rows: pd.DataFrame) -> Cells:
    """Header and cells of one variant's rows of `sweep_delta`, to fit a terminal."""
    header = ["delta", "mean", "low", "high", "worst", "size", "half", "range"]
    changes = ["mean_rmse_delta_pct", "ci95_low_pct", "ci95_high_pct", "worst_rmse_delta_pct"]
    cells = []
    for row in rows.to_dict("records"):
        size = percent(row["mean_abs_rmse_delta_pct"]).lstrip("+")
        half, low, high = (f"{100 * row[f'half_presence_norm{end}']:.2g}" for end in ("", "_min", "_max"))
        cells.append([f"{row['delta']:.0e}", *(percent(row[key]) for key in changes), size, half, f"{low}–{high}"])
    return header, cells


def notes() -> str:
    """What a reader of the tables has to know."""
    return (
        "RMSE change against the host in %: mean, low and high end of its 95 % CI (percentile bootstrap over cases), "
        "worst case, size (mean of the absolute value). Half: the ||h|| at which presence is 1/2, in % of the site's "
        "median ||h||, median and range over sites."
    )


def plot_frontier(rows: pd.DataFrame, file: Path) -> None:
    """Draw the RMSE change and the length at half presence against delta, from `sweep_delta`'s rows.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose
    from matplotlib.lines import Line2D

    figure = Figure(figsize=(9.6, 4.2), dpi=160, layout="constrained")
    change, half = figure.subplots(1, 2)
    drawn = rows.melt("variant", ["ci95_low_pct", "ci95_high_pct", "worst_rmse_delta_pct"], value_name="rmse_delta_pct")
    set_change_scale(change, drawn)
    change.axhline(0, color="black", linewidth=0.8)
    half.set_yscale("log")
    half.yaxis.set_major_formatter("{x:g}")
    half.set_ylabel("‖h‖ at presence 1/2, % of the site's median ‖h‖")
    worst: dict[str, Any] = {"linestyle": ":", "markerfacecolor": "white"}
    variants = list(rows["variant"].unique())
    legend = []
    for i, variant in enumerate(variants):
        marker, color = STYLES.get(variant, ("D", "#555555"))
        style: dict[str, Any] = {"marker": marker, "color": color, "markersize": 5, "linewidth": 1.2}
        group = rows[rows["variant"] == variant]
        x = group["delta"] * 10 ** (0.11 * (i - (len(variants) - 1) / 2))  # side by side
        change.plot(x, group["worst_rmse_delta_pct"], **style, **worst)
        change.plot(x, group["mean_rmse_delta_pct"], **style)
        change.vlines(x, group["ci95_low_pct"], group["ci95_high_pct"], color=color, linewidth=1.5)
        middle, low, high = (100 * group[f"half_presence_norm{end}"] for end in ("", "_min", "_max"))
        half.plot(x, middle, **style)
        half.vlines(x, low, high, color=color, linewidth=1.5)
        legend.append(Line2D([], [], label=variant, **style))
    grey: dict[str, Any] = {"marker": "o", "color": "#8c8c8c", "markersize": 5, "linewidth": 1.2}
    legend += [
        Line2D([], [], label="left: mean, 95 % CI; right: median, range over sites", **grey),
        Line2D([], [], label="left: worst case", **grey, **worst),
    ]
    for axes in (change, half):
        axes.set_xscale("log")
        axes.set_xlabel("delta (shaded: the default)")
        axes.axvspan(DELTA / 1.5, DELTA * 1.5, color="#eeeeee", linewidth=0, zorder=0)
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(handles=legend, loc="outside upper center", ncols=len(legend), frameon=False)
    figure.savefig(file, format="png")
