"""Whether a retrofit still predicts as its host does: the one comparison of their predictions.

`oretrofit patch` ends with it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from tabpfn.base import ModelSpecs

from ..calibration import settings
from ..calibration.carriers import calibration_tables, split_table
from ..calibration.cases import Case
from ..calibration.predicting import predict_case, rmse
from .api import Retrofit, patch
from .hosts import load_host
from .terminal import Begin

HELD_OUT_TABLES = 8  # on which `oretrofit patch` compares host and variant


@dataclass(frozen=True)
class Change:
    """What became of a case's predicted means.

    Attributes:
        host_rmse: Of the host's means, in the target's unit.
        variant_rmse: Of the variant's.
        rmse_delta_pct: The change from the one to the other, in percent of the host's.
        max_abs_diff_sd: The largest change of a predicted mean, in standard deviations of the training target.
    """

    host_rmse: float
    variant_rmse: float
    rmse_delta_pct: float
    max_abs_diff_sd: float


def compare(case: Case, host: np.ndarray, variant: np.ndarray) -> Change:
    """Compare host's and variant's predicted means (rows,) of a case.

    Raises `ValueError` where the host's error is exactly zero, so that there is no change in percent.
    """
    before, after = rmse(host, case.y_test), rmse(variant, case.y_test)
    if before == 0:
        raise ValueError(
            f"{case.dataset}, seed {case.seed}: the host's error is exactly zero, so there is no relative change"
        )
    shift = float(np.abs(variant - host).max() / case.y_train.std())
    return Change(before, after, 100 * (after / before - 1), shift)


def largest(values: Iterable[float]) -> float:
    """The value that is furthest from zero, with its sign."""
    return max(values, key=abs)


def summarize(changes: Sequence[Change]) -> dict[str, float]:
    """Several cases' changes in one.

    Returns:
        Of the RMSE changes in percent `mean_rmse_delta_pct`, `largest_rmse_delta_pct` (of either sign),
        `worst_rmse_delta_pct` (the largest increase) and `mean_abs_rmse_delta_pct`; `max_abs_diff_sd`.
    """
    deltas = [change.rmse_delta_pct for change in changes]
    return {
        "mean_rmse_delta_pct": float(np.mean(deltas)),
        "largest_rmse_delta_pct": largest(deltas),
        "worst_rmse_delta_pct": max(deltas),
        "mean_abs_rmse_delta_pct": float(np.mean(np.abs(deltas))),
        "max_abs_diff_sd": max(change.max_abs_diff_sd for change in changes),
    }


def synthetic_cases(count: int, seed: int, **sizes: int) -> list[Case]:
    """Synthetic tables as cases: the first two thirds of the rows to fit, the rest to predict.

    Calibration draws its tables the same way: with another seed than its own they are held out.
    `sizes` are those of `calibration_tables`.
    """
    cases = []
    for i, table in enumerate(calibration_tables(count, seed, **sizes)):
        X_train, y_train, X_test, y_test = split_table(table)
        X_train, X_test = pd.DataFrame(X_train), pd.DataFrame(X_test)
        cases.append(Case(f"synthetic {seed}/{i}", 0, X_train, y_train, X_test, y_test, table.categorical))
    return cases


def predict_cases(
    specs: ModelSpecs, cases: Sequence[Case], on_case: Callable[[], None] | None = None, **options: Any
) -> list[np.ndarray]:
    """Predicted means of each case's test rows, in float32; `on_case` is called after each case.

    `options` are those of `fit_and_predict`.
    """
    predicted = []
    for case in cases:
        predicted.append(predict_case(specs, case, **options))
        if on_case is not None:
            on_case()
    return predicted


def near_identity(
    retrofit: Retrofit, cases: Sequence[Case], on_case: Callable[[], None] | None = None, **options: Any
) -> dict[str, float]:
    """Compare a retrofit with its host, in float32: `summarize` of the cases' changes.

    `on_case` is called twice a case; `options` are those of `fit_and_predict`.
    """
    host, variant = (predict_cases(specs, cases, on_case, **options) for specs in (retrofit.host_specs, retrofit.specs))
    return summarize([compare(*made) for made in zip(cases, host, variant, strict=True)])


def patch_and_check(
    host: str, variant: str, options: dict[str, Any], device: str, begin: Begin
) -> tuple[Retrofit, dict[str, float]]:
    """Patch a host, and compare its predictions before and after on held-out synthetic tables; see `near_identity`."""
    calibrated, count = begin("Calibrating", options["tables"]), itertools.count(1)
    retrofit = patch(load_host(host), variant, **options, device=device, on_table=lambda: calibrated(next(count)))
    checked, checks = begin("Checking", 2 * HELD_OUT_TABLES), itertools.count(1)
    cases = synthetic_cases(HELD_OUT_TABLES, options["seed"] + settings.HELD_OUT)
    return retrofit, near_identity(retrofit, cases, on_case=lambda: checked(next(checks)), device=device)


def checked_summary(retrofit: Retrofit, found: dict[str, float]) -> str:
    """What a user of `patch_and_check` wants to know first."""
    return (
        f"{retrofit!r}\n"
        f"On {HELD_OUT_TABLES} held-out synthetic tables, in float32, against the host:\n"
        f"  RMSE change: mean {found['mean_rmse_delta_pct']:+.4f} %, largest {found['largest_rmse_delta_pct']:+.4f} %\n"
        f"  largest shift of a prediction: {found['max_abs_diff_sd']:.2g} target standard deviations\n"
    )
