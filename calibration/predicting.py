"""Fitting and predicting a table through TabPFN, and how far off the predictions are: one place for both."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs

from .cases import Case
from .settings import DEVICES

Precision = torch.dtype | Literal["auto", "autocast"]

# By the names in `settings.PRECISIONS`.
PRECISIONS: dict[str, Precision] = {
    "auto": "auto",
    "float32": torch.float32,
    "float64": torch.float64,
    "autocast": "autocast",
}


def resolve_device(name: str) -> str:
    """`cpu` or `cuda`; `auto` is `cuda` where there is one.

    Raises `ValueError` for another name, or for `cuda` without a GPU.
    """
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; there are: {', '.join(DEVICES)}")
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError("there is no CUDA device, or this build of torch cannot use it; use --device cpu")
    return "cuda" if found and name != "cpu" else "cpu"


def fit_and_predict(
    specs: ModelSpecs,
    X_train: Any,
    y_train: Any,
    X_test: Any,
    *,
    output_type: str = "mean",
    device: str = "cpu",
    inference_precision: Precision = torch.float32,
    **estimator: Any,
) -> Any:
    """What TabPFN predicts for the test rows with a model, by default their means, (rows,), float64.

    Args:
        specs: A host's or a retrofit's; used up, as TabPFN's engines change the model that they are given.
        X_train: Train rows, as `TabPFNRegressor.fit` takes them.
        y_train: Their targets.
        X_test: Test rows.
        output_type: As of `TabPFNRegressor.predict`.
        device: `cpu` or `cuda`.
        inference_precision: As of `TabPFNRegressor`; see `PRECISIONS`.
        **estimator: More options of `TabPFNRegressor`, such as `n_estimators`.
    """
    regressor = TabPFNRegressor(model_path=specs, device=device, inference_precision=inference_precision, **estimator)
    return regressor.fit(X_train, y_train).predict(X_test, output_type=output_type)  # type: ignore[call-overload]


def predict_case(specs: ModelSpecs, case: Case, **options: Any) -> Any:
    """`fit_and_predict` of a case, with its seed and its categorical columns; options as there."""
    return fit_and_predict(
        specs,
        case.X_train,
        case.y_train,
        case.X_test,
        categorical_features_indices=case.categorical,
        random_state=case.seed,
        **options,
    )


def rmse(predicted: Any, y: np.ndarray) -> float:
    """The root of the mean squared difference, in the target's unit; `predicted` is (rows,) like `y`, or one value."""
    return float(np.sqrt(np.mean((predicted - y) ** 2)))


def train_mean_rmse(case: Case) -> float:
    """What predicting the train rows' mean for every test row would give."""
    return rmse(case.y_train.mean(), case.y_test)
