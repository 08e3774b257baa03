"""What a patch costs: paired times of host and variants on one large table."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pandas as pd
import torch
from scipy.stats import quantile_test
from torch import nn

from ..calibration.settings import BENCH_PRECISIONS
from ..calibration.variants import VARIANTS
from ..retrofit import tabpfn_api
from ..retrofit.api import patch
from ..retrofit.hosts import Host
from .memory import peak_gpu_mb

# How the operators begin that torch's profiler knows each of its kernels for attention by.
_ATTENTION = "aten::_scaled_dot_product_"

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
    precision: str = "float32",
    on_round: Callable[[str], None] | None = None,
) -> pd.DataFrame:
    """Time forward passes of host and variants, alternating, on random data.

    Each round runs host and every variant once, in an order drawn anew (in a fixed one, each would
    always meet the caches that the same other model left); a ratio is the median over rounds of
    variant / host within a round. Before them each model runs twice: once to see which kernels and how much
    memory it takes, and in a round that is not counted.

    Args:
        host: Any v3 regressor.
        rows: Train rows.
        columns: Feature columns, as the model sees them.
        rounds: Counted rounds; by default as many as put the interval of each ratio within 0.01 of it, 10 to 100.
        test_rows: Test rows.
        device: `cpu` or `cuda`.
        precision: `float32`, or `auto`: autocast, as TabPFN's engines have it, where TabPFN takes that.
        on_round: Called with a line of text after each round.

    Returns:
        A row a variant: `variant`, `ratio`, `low` and `high` (its 95 % interval, by order statistics: for a median it
        assumes nothing of how times are distributed), `host_seconds` and `variant_seconds` (medians), `rounds`,
        `precision` (`float32` or `autocast`), `host_attention` and `variant_attention` (torch's kernels for it), and on
        a GPU `host_peak_mb` and `variant_peak_mb`, what a pass takes there beside weights and input.

    Raises:
        ValueError: Another precision.
        FloatingPointError: An output that is not finite.
    """
    if precision not in BENCH_PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; there are: {', '.join(BENCH_PRECISIONS)}")
    half = precision == "auto" and tabpfn_api.infer_autocast_inference_mode([torch.device(device)], enable=None)
    models: dict[str, nn.Module] = {"host": host.specs.model}
    models |= {variant: patch(host, variant, tau=_TAU).model for variant in VARIANTS}
    models = {name: model.to(device).eval() for name, model in models.items()}
    for model in models.values():
        tabpfn_api.show_nan(model)
    rng = np.random.default_rng(0)
    x_RBC = torch.tensor(rng.standard_normal((rows + test_rows, 1, columns)), dtype=torch.float32, device=device)
    y_N = torch.tensor(rng.standard_normal(rows), dtype=torch.float32, device=device)

    autocast = tabpfn_api.get_autocast_context(torch.device(device), enabled=half)
    facts = {name: _looked_at(model, x_RBC, y_N, autocast, name) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    names, i = list(models), 0
    while i <= (_MOST if rounds is None else rounds):
        for name in rng.permutation(names):
            took = _forward_seconds(models[name], x_RBC, y_N, autocast)
            if i > 0:
                seconds[name].append(took)
        if on_round is not None:
            on_round((f"round {i}" if rounds is None else f"round {i} of {rounds}") if i else "warm-up")
        if rounds is None and i >= _FEWEST and _is_known(_compared(seconds)):
            break
        i += 1
    table = _compared(seconds)
    table["precision"] = "autocast" if half else "float32"
    for fact in facts["host"]:
        table[f"host_{fact}"] = facts["host"][fact]
        table[f"variant_{fact}"] = [facts[variant][fact] for variant in table["variant"]]
    return table


def _looked_at(
    model: nn.Module, x_RBC: torch.Tensor, y_N: torch.Tensor, autocast: AbstractContextManager, name: str
) -> dict[str, Any]:
    """Which kernels of torch's attention a pass runs and, on a GPU, what memory it takes; refuses NaN and inf."""
    outputs = []

    def run() -> None:
        with torch.inference_mode(), autocast:
            outputs.append(model(x_RBC, y_N))

    peak = peak_gpu_mb(x_RBC.device.type, run)
    if not outputs[0].isfinite().all():
        raise FloatingPointError(f"the output of {name} is not finite")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        run()
    calls = {event.name for event in profile.events() if event.name.startswith(_ATTENTION)}
    kernels = sorted(call.removeprefix(_ATTENTION).replace("attention", "").strip("_") for call in calls)
    return {"attention": ", ".join(kernel.replace("__", "_") for kernel in kernels)} | (
        {} if peak is None else {"peak_mb": peak}
    )


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


def _forward_seconds(
    model: nn.Module, x_RBC: torch.Tensor, y_N: torch.Tensor, autocast: AbstractContextManager
) -> float:
    def synchronize() -> None:
        if x_RBC.is_cuda:
            torch.cuda.synchronize()

    synchronize()
    start = time.perf_counter()
    with torch.inference_mode(), autocast:
        model(x_RBC, y_N)
    synchronize()
    return time.perf_counter() - start
