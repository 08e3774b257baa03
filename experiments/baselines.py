"""How good a host is: its error beside ridge regression and a random forest on the same cases."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler

from ..calibration.cases import Case
from ..calibration.predicting import predict_case, rmse, train_mean_rmse
from ..retrofit.hosts import Host
from .datasets import load_dataset, make_case
from .style import short_datasets


def compare_baselines(
    host: Host,
    datasets: Sequence[str],
    seeds: int,
    *,
    device: str = "cpu",
    max_train_rows: int = 500,
    max_test_rows: int = 300,
    on_case: Callable[[str], None] | None = None,
    **estimator: Any,
) -> pd.DataFrame:
    """RMSE / RMSE(predict the train mean), averaged over seeds.

    The host runs through `TabPFNRegressor` with default settings, or those in `estimator`; ridge on
    one-hot encoded, imputed and standardised columns, its penalty by cross-validation; the forest
    (200 trees) on ordinal codes and imputed columns.

    Returns:
        A row a dataset, and one of their means: `dataset`, `ridge`, `random_forest`, `host`.
    """
    # All of them first: what cannot be split is said before the first minute is spent.
    cases = [
        make_case(dataset, seed, max_train_rows, max_test_rows)
        for dataset in map(load_dataset, datasets)
        for seed in range(seeds)
    ]
    names, rows = short_datasets(datasets), []
    for case in cases:
        means = {
            "ridge": _predict(_ridge(case.X_train), case),
            "random_forest": _predict(_forest(case.X_train, case.seed), case),
            "host": predict_case(host.specs, case, device=device, inference_precision="auto", **estimator),
        }
        error = train_mean_rmse(case) or math.nan
        errors = {label: rmse(mean, case.y_test) / error for label, mean in means.items()}
        rows.append({"dataset": case.dataset, **errors})
        if on_case is not None:
            on_case(f"{names[case.dataset]} seed {case.seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in errors.items()))
    table = pd.DataFrame(rows).groupby("dataset", sort=False).mean().reset_index()
    mean = {"dataset": "mean", **table.drop(columns="dataset").mean()}
    return pd.concat([table, pd.DataFrame([mean])], ignore_index=True)


def _predict(model: Pipeline, case: Case) -> np.ndarray:
    return model.fit(case.X_train, case.y_train).predict(case.X_test)


def _split_columns(X: pd.DataFrame) -> tuple[list[str], list[str]]:
    numeric = list(X.select_dtypes("number").columns)
    return numeric, [column for column in X.columns if column not in numeric]


def _as_strings(X: pd.DataFrame) -> pd.DataFrame:
    """Levels as text, a missing one as a level of its own: scikit-learn's encoders refuse pandas' NA."""
    return X.astype(object).where(X.notna(), "missing").astype(str)


def _ridge(X: pd.DataFrame) -> Pipeline:
    numeric, categorical = _split_columns(X)
    columns = make_column_transformer(
        (make_pipeline(SimpleImputer(), StandardScaler()), numeric),
        (make_pipeline(FunctionTransformer(_as_strings), OneHotEncoder(handle_unknown="ignore")), categorical),
        sparse_threshold=0,
    )
    return make_pipeline(columns, RidgeCV(np.logspace(-3, 4, 22)))


def _forest(X: pd.DataFrame, seed: int) -> Pipeline:
    numeric, categorical = _split_columns(X)
    codes = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    columns = make_column_transformer(
        (SimpleImputer(), numeric),
        (make_pipeline(FunctionTransformer(_as_strings), codes), categorical),
    )
    return make_pipeline(columns, RandomForestRegressor(200, random_state=seed))
