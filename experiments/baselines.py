"""How good a host is: its error beside ridge regression and a random forest on the same cases."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.ensemble import RandomForestRegressor
from sklearn.impute import SimpleImputer
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import Pipeline, make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, OrdinalEncoder, StandardScaler
from tabpfn import TabPFNRegressor

from ..retrofit.hosts import Host
from .datasets import Case, load_dataset, make_case


def compare_baselines(
    host: Host,
    datasets: Sequence[str],
    seeds: int,
    *,
    device: str = "cpu",
    max_train_rows: int = 500,
    max_test_rows: int = 300,
    on_case: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """RMSE / RMSE(predict the train mean), averaged over seeds.

    The host runs through `TabPFNRegressor` with default settings; ridge on one-hot encoded, imputed
    and standardised columns, its penalty by cross-validation; the forest (200 trees) on ordinal
    codes and imputed columns.

    Returns:
        A row a dataset: `dataset`, `ridge`, `random_forest`, `host`.
    """
    rows = []
    for name in datasets:
        dataset = load_dataset(name)
        for seed in range(seeds):
            case = make_case(dataset, seed, max_train_rows, max_test_rows)
            models = {
                "ridge": _ridge(case.X_train),
                "random_forest": _forest(case.X_train, seed),
                "host": TabPFNRegressor(model_path=host.specs, device=device, random_state=seed),
            }
            errors = {label: _relative_rmse(model, case) for label, model in models.items()}
            rows.append({"dataset": name, **errors})
            if on_case is not None:
                on_case(f"{name} seed {seed}: " + ", ".join(f"{k} {v:.3f}" for k, v in errors.items()))
    return pd.DataFrame(rows).groupby("dataset", sort=False).mean().reset_index()


def _relative_rmse(model, case: Case) -> float:
    predicted = model.fit(case.X_train, case.y_train).predict(case.X_test)
    error = np.sqrt(np.mean((predicted - case.y_test) ** 2))
    return float(error / np.sqrt(np.mean((case.y_train.mean() - case.y_test) ** 2)))


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
