"""How far ragged prediction is from `fit` and `predict`, one table at a time."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs

from ..calibration import settings
from ..calibration.prior import draw_sizes, draw_table
from ..retrofit.api import Retrofit, calibrate, patch
from ..retrofit.hosts import Host

# A table as the methods take it: X_train, y_train, X_test.
RawTable = tuple[Any, np.ndarray, Any]

# Sizes of the tables: rows and columns, log-uniform.
ROWS, COLUMNS = (5, 400), 30
_SEED = 60_000

# So small that the retrofit predicts as its host.
SMALLEST_DELTA = 1e-9

QUANTILES = [0.01, 0.1, 0.5, 0.9, 0.99]

_SPREAD = "spread of means"


def mixed_tables(count: int) -> list[RawTable]:
    """Synthetic tables of 5 to 400 rows and 1 to 30 columns: numbers, categories, strings, flags; missing cells."""
    tables = []
    for i in range(count):
        rng = np.random.default_rng([_SEED, i])
        rows, columns = draw_sizes(rng, ROWS[1], COLUMNS, min_rows=ROWS[0])
        table = draw_table(rng, rows, columns)
        missing = rng.random((rows, columns)) < rng.uniform(0.02, 0.2)
        X = {}
        for c in range(columns):
            values = pd.Series(table.X[:, c])
            kind = rng.choice(["number", "category", "string", "flag"], p=[0.7, 0.1, 0.1, 0.1])
            if kind == "flag":  # TabPFN takes no flag that is missing
                X[f"x{c}"] = values > values.median()
            elif kind == "number":
                X[f"x{c}"] = values.mask(missing[:, c])
            else:
                words = values.rank(method="dense").mask(missing[:, c]) % 7
                words = words.map(lambda level: f"level {level:.0f}", na_action="ignore")
                X[f"x{c}"] = words.astype("category" if kind == "category" else object)
        frame, n = pd.DataFrame(X), max(2, rows * 2 // 3)
        tables.append((frame.iloc[:n], table.y[:n], frame.iloc[n:]))
    return tables


def compare_equality(
    host: Host,
    tables: Sequence[RawTable],
    *,
    device: str = "cpu",
    calibration_tables: int = settings.TABLES,
    on_calibrated: Callable[[], None] | None = None,
    on_tables: Callable[[int], None] = lambda done: None,
    **options: Any,
) -> pd.DataFrame:
    """How far ragged prediction of all tables at once is from `fit` and `predict` one by one, in float32.

    The reference is the retrofit itself (`closed`, at the default delta), and at the smallest delta, where
    the retrofit is its host, the host.

    Args:
        host: The host.
        tables: What to predict.
        device: `cpu` or `cuda`.
        calibration_tables: Synthetic tables to calibrate on.
        on_calibrated: Called after each of these.
        on_tables: Called now and then with the number of predictions done, four a table.
        options: Of `TabPFNRegressor`, for both ways.

    Returns:
        A row a quantity: `quantity` (the mean, each of `QUANTILES`, logits), and for `closed` and `host` the
        median over tables (`closed_median`) and the largest (`closed_worst`) of a table's largest
        difference: in standard deviations of its training target, or, for logits, as they are. The last
        row, `spread of means`, is what the mean's differences are to be seen against: the standard
        deviation of a table's predicted means in that unit, its median and its smallest.
    """
    options = {"device": device, "inference_precision": torch.float32, **options}
    calibration = calibrate(host, tables=calibration_tables, device=device, on_table=on_calibrated)
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    finished = 0

    def advance(done: int) -> None:
        on_tables(finished + done)

    for name, delta in (("closed", settings.DELTA), ("host", SMALLEST_DELTA)):
        retrofit = patch(host, "closed", delta=delta, calibration=calibration)
        specs = retrofit.specs if name == "closed" else retrofit.host_specs
        differences = _differences(retrofit, specs, tables, options, advance)
        finished += 2 * len(tables)
        for quantity, values in differences.items():
            worst = np.min(values) if quantity == _SPREAD else np.max(values)
            rows[quantity] |= {f"{name}_median": float(np.median(values)), f"{name}_worst": float(worst)}
    return pd.DataFrame({"quantity": quantity, **row} for quantity, row in rows.items())


def _differences(
    retrofit: Retrofit,
    specs: ModelSpecs,
    tables: Sequence[RawTable],
    options: dict[str, Any],
    on_tables: Callable[[int], None],
) -> dict[str, list[float]]:
    """By quantity, each table's largest difference between ragged prediction and `fit` and `predict` on `specs`."""
    output: dict[str, Any] = {"output_type": "full", "quantiles": QUANTILES}
    X_trains, y_trains, X_tests = map(list, zip(*tables, strict=True))
    many = retrofit.predict_ragged(X_trains, y_trains, X_tests, **output, **options, on_tables=on_tables)
    regressor = TabPFNRegressor(model_path=specs, **options)
    found: dict[str, list[float]] = defaultdict(list)
    for i, ((X, y, X_test), ours) in enumerate(zip(tables, many, strict=True)):
        theirs = regressor.fit(X, y).predict(X_test, **output)
        found["mean"].append(largest_shift(ours["mean"], theirs["mean"], y))
        for q, a, b in zip(QUANTILES, ours["quantiles"], theirs["quantiles"], strict=True):
            found[f"quantile {q:g}"].append(largest_shift(a, b, y))
        found["logits"].append(_logit_shift(ours["logits"], theirs["logits"]))
        found[_SPREAD].append(float(theirs["mean"].std() / y.std()))
        on_tables(len(tables) + i + 1)
    return found


def largest_shift(a: Any, b: Any, y: np.ndarray) -> float:
    """The largest difference of two predictions of a table, in standard deviations of its training target."""
    return float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max() / y.std())


def _logit_shift(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; buckets that both give no probability (-inf) are equal."""
    return float((a - b).where(a != b, 0).abs().max())


def equality_notes() -> str:
    """What a reader of the table has to know."""
    return (
        "Of each table's largest difference the median over tables and the largest, in standard deviations of its "
        "training target (logits: as they are). closed: against the retrofit's own fit and predict at the default "
        f"delta; host: against the unpatched host's at delta {SMALLEST_DELTA:g}. The last row is the standard "
        "deviation of a table's predicted means, its median and its smallest."
    )
