"""What a patch costs: paired times of host and variants on one large table."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from scipy.stats import quantile_test
from torch import nn

from ..calibration.variants import VARIANTS
from ..retrofit.api import patch
from ..retrofit.hosts import Host

# What a gate is worth does not change what it costs, so nothing is calibrated here.
_TAU = 1e-3

# Unless they are given: so many rounds at least and at most, and no more than it takes until every ratio is known to
# within this.
_FEWEST, _MOST, _ENOUGH = 10, 100, 0.01


def measure_overhead(
    host: Host,
    *,
    rows: int,
    columns: int,
    rounds: int | None = None,
    test_rows: int = 100,
    device: str = "cpu",
    on_round: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Time forward passes of host and variants, alternating, on random data.

    Each round runs host and every variant once, in an order drawn anew (in a fixed one, each would
    always meet the caches that the same other model left); a ratio is the median over rounds of
    variant / host within a round. One round before them is not counted.

    Args:
        host: Any v3 regressor.
        rows: Train rows.
        columns: Feature columns, as the model sees them.
        rounds: Counted rounds; by default as many as put the interval of each ratio within 0.01 of it, 10 to 100.
        test_rows: Test rows.
        device: `cpu` or `cuda`.
        on_round: Called with a line of text after each round.

    Returns:
        A row a variant: `variant`, `ratio`, `low` and `high` (its 95 % interval, by order statistics: for a median it
        assumes nothing of how times are distributed), `host_seconds` and `variant_seconds` (medians), `rounds`.
    """
    models: dict[str, nn.Module] = {"host": host.specs.model}
    models |= {variant: patch(host, variant, tau=_TAU).model for variant in VARIANTS}
    models = {name: model.to(device).eval() for name, model in models.items()}
    rng = np.random.default_rng(0)
    x_RBC = torch.tensor(rng.standard_normal((rows + test_rows, 1, columns)), dtype=torch.float32, device=device)
    y_N = torch.tensor(rng.standard_normal(rows), dtype=torch.float32, device=device)

    seconds: dict[str, list[float]] = {name: [] for name in models}
    names, i = list(models), 0
    while i <= (_MOST if rounds is None else rounds):
        for name in rng.permutation(names):
            took = _forward_seconds(models[name], x_RBC, y_N)
            if i > 0:
                seconds[name].append(took)
        if on_round is not None:
            on_round((f"round {i}" if rounds is None else f"round {i} of {rounds}") if i else "warm-up")
        if rounds is None and i >= _FEWEST and _is_known(_compared(seconds)):
            break
        i += 1
    return _compared(seconds)


def _compared(seconds: dict[str, list[float]]) -> pd.DataFrame:
    host_seconds = np.array(seconds["host"])
    rows = []
    for variant in VARIANTS:
        ratios = np.array(seconds[variant]) / host_seconds
        interval = quantile_test(ratios, q=1.0, p=0.5).confidence_interval(0.95)
        rows.append(
            {
                "variant": variant,
                "ratio": float(np.median(ratios)),
                # Of fewer than six rounds not even the extremes are one.
                "low": float(interval.low) if np.isfinite(interval.low) else None,
                "high": float(interval.high) if np.isfinite(interval.high) else None,
                "host_seconds": float(np.median(host_seconds)),
                "variant_seconds": float(np.median(seconds[variant])),
                "rounds": len(ratios),
            }
        )
    return pd.DataFrame(rows)


def _is_known(table: pd.DataFrame) -> bool:
    far = np.maximum(table["high"] - table["ratio"], table["ratio"] - table["low"])
    return bool((far <= _ENOUGH).all())


def _forward_seconds(model: nn.Module, x_RBC: torch.Tensor, y_N: torch.Tensor) -> float:
    def synchronize() -> None:
        if x_RBC.is_cuda:
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    with torch.inference_mode():
        model(x_RBC, y_N)
    synchronize()
    return time.perf_counter() - start
