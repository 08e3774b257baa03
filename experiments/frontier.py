"""How far tau may go: prediction change against delta, on synthetic tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from ..calibration.carriers import calibration_tables, predict_table, split_table
from ..calibration.prior import Table
from ..retrofit.api import measure, patch
from ..retrofit.hosts import Host

DELTAS = (1e-6, 1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 1e-1)

# Held out from calibration, whose tables have another seed.
HELD_OUT_SEED = 30_000


def compare_predictions(
    host: Sequence[np.ndarray], variant: Sequence[np.ndarray], tables: Sequence[Table]
) -> dict[str, float]:
    """Mean and worst RMSE change in percent, and the largest change of a prediction in target sds."""
    deltas, shifts = [], []
    for a, b, table in zip(host, variant, tables, strict=True):
        y_test = split_table(table)[3]
        rmse_host, rmse_variant = (np.sqrt(np.mean((p - y_test) ** 2)) for p in (a, b))
        deltas.append(100 * (rmse_variant / rmse_host - 1))
        shifts.append(np.abs(a - b).max() / split_table(table)[1].std())
    return {
        "mean_rmse_delta_pct": float(np.mean(deltas)),
        "worst_rmse_delta_pct": float(np.max(deltas)),
        "mean_abs_rmse_delta_pct": float(np.mean(np.abs(deltas))),
        "max_abs_diff_sd": float(np.max(shifts)),
    }


def sweep_delta(
    host: Host,
    variant: str,
    *,
    tables: int = 24,
    deltas: Sequence[float] = DELTAS,
    device: str = "cpu",
    on_step: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Compare variant and host on held-out synthetic tables for each delta.

    Returns:
        A row a delta: `delta`, `mean_rmse_delta_pct`, `worst_rmse_delta_pct`,
        `mean_abs_rmse_delta_pct`, `max_abs_diff_sd`.
    """
    held_out = calibration_tables(tables, HELD_OUT_SEED)
    host_specs = host.specs()
    reference = [predict_table(host_specs, table, device) for table in held_out]
    squared_norms = measure(host, device=device)
    rows = []
    for delta in deltas:
        retrofit = patch(host, variant, delta=delta, squared_norms=squared_norms)
        specs = retrofit.specs
        predicted = [predict_table(specs, table, device) for table in held_out]
        compared = compare_predictions(reference, predicted, held_out)
        rows.append({"delta": delta, **compared})
        if on_step is not None:
            on_step(f"delta {delta:g}: mean RMSE change {compared['mean_rmse_delta_pct']:+.4f} %")
    return pd.DataFrame(rows)
