"""Carrier statistics: `||h||^2` in front of each norm and at each door, as the host sees it in use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import numpy as np
import torch
from tabpfn.base import ModelSpecs
from torch import nn

from ..patches.architectures import spec_of
from ..patches.presence import squared_norm
from .predicting import fit_and_predict
from .prior import Table, draw_sizes, draw_table

# Values kept of one carrier in one forward pass, evenly spaced: quantiles need no more.
_KEPT = 4096


def calibration_tables(count: int, seed: int, *, max_rows: int = 300, max_columns: int = 20) -> list[Table]:
    """Synthetic tables to calibrate on; the same seed gives the same tables."""
    tables = []
    for i in range(count):
        rng = np.random.default_rng([seed, i])
        tables.append(draw_table(rng, *draw_sizes(rng, max_rows, max_columns)))
    return tables


def split_table(table: Table) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(X_train, y_train, X_test, y_test): the first two thirds of the rows, and the rest."""
    n = max(2, len(table.y) * 2 // 3)
    return table.X[:n], table.y[:n], table.X[n:], table.y[n:]


def predict_table(specs: ModelSpecs, table: Table, device: str = "cpu") -> np.ndarray:
    """Predicted means of a table's last third from its first two thirds, through TabPFN, in float32."""
    X_train, y_train, X_test, _ = split_table(table)
    return fit_and_predict(
        specs, X_train, y_train, X_test, device=device, categorical_features_indices=table.categorical
    )


def measure_carriers(
    specs: ModelSpecs,
    names: Sequence[str],
    tables: Iterable[Table],
    *,
    device: str = "cpu",
    on_table: Callable[[], None] | None = None,
) -> dict[str, np.ndarray]:
    """Collect `||h||^2` of carriers while the host fits and predicts tables through TabPFN.

    Args:
        specs: The unpatched host; used by reference, its modules get hooks for the time of the call.
        names: Norms of the model by name, whose input is the carrier, and doors of its `HostSpec`.
        tables: What to fit and predict on, in float32, with the host's own preprocessing.
        device: Device for TabPFN.
        on_table: Called after each table, to show progress.

    Returns:
        For each name the squared norms of its live (non-zero) carriers, float64, evenly thinned to
        at most 4,096 a forward pass.

    Raises:
        RuntimeError: A carrier was never reached, or has no live token.
    """
    values: dict[str, list[np.ndarray]] = {name: [] for name in names}
    spec = spec_of(specs.model)
    doors = spec.doors if spec is not None else {}

    def watch(name: str):
        at, part, measure = name, "input", cast("Callable[[torch.Tensor], torch.Tensor]", squared_norm)
        if name in doors:
            at, part, measure = doors[name].at, doors[name].part, doors[name].squared_norm

        def hook(module: nn.Module, args: tuple, kwargs: dict, output: torch.Tensor | None = None) -> None:
            carrier: Any = [*args, *kwargs.values()][0] if part == "input" else output
            n = measure(carrier.detach()).flatten()
            kept = torch.linspace(0, n.numel() - 1, min(n.numel(), _KEPT), device=n.device).long()
            values[name].append(n[kept].double().cpu().numpy())

        module = specs.model.get_submodule(at)
        if part == "input":
            return module.register_forward_pre_hook(hook, with_kwargs=True)
        return module.register_forward_hook(hook, with_kwargs=True)

    handles = [watch(name) for name in names]
    try:
        for table in tables:
            predict_table(specs, table, device)
            if on_table is not None:
                on_table()
    finally:
        for handle in handles:
            handle.remove()

    live = {}
    for name, parts in values.items():
        n = np.concatenate(parts) if parts else np.zeros(0)
        live[name] = n[n > 0]
        if not len(live[name]):
            raise RuntimeError(f"no live token passed the carrier of {name} during calibration")
    return live
