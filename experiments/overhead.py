"""What a patch costs: paired times of host and variants on one large table."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from torch import nn

from ..calibration.variants import VARIANTS
from ..retrofit.api import patch
from ..retrofit.hosts import Host

# What a gate is worth does not change what it costs, so nothing is calibrated here.
_TAU = 1e-3


def measure_overhead(
    host: Host,
    *,
    rows: int,
    columns: int,
    rounds: int,
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
        rounds: Counted rounds.
        test_rows: Test rows.
        device: `cpu` or `cuda`.
        on_round: Called with a line of text after each round.

    Returns:
        A row a variant: `variant`, `ratio`, `host_seconds` and `variant_seconds` (medians), `rounds`.
    """
    models: dict[str, nn.Module] = {"host": host.specs.model}
    models |= {variant: patch(host, variant, tau=_TAU).model for variant in VARIANTS}
    models = {name: model.to(device).eval() for name, model in models.items()}
    rng = np.random.default_rng(0)
    x_RBC = torch.tensor(rng.standard_normal((rows + test_rows, 1, columns)), dtype=torch.float32, device=device)
    y_N = torch.tensor(rng.standard_normal(rows), dtype=torch.float32, device=device)

    seconds: dict[str, list[float]] = {name: [] for name in models}
    names = list(models)
    for i in range(rounds + 1):
        for name in rng.permutation(names):
            took = _forward_seconds(models[name], x_RBC, y_N)
            if i > 0:
                seconds[name].append(took)
        if on_round is not None:
            on_round(f"round {i} of {rounds}" if i else "warm-up")

    host_seconds = np.array(seconds.pop("host"))
    return pd.DataFrame(
        {
            "variant": variant,
            "ratio": float(np.median(np.array(took) / host_seconds)),
            "host_seconds": float(np.median(host_seconds)),
            "variant_seconds": float(np.median(took)),
            "rounds": rounds,
        }
        for variant, took in seconds.items()
    )


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
