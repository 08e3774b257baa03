"""A host's carriers, measured once: tau of any variant and delta follows from that."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tabpfn.base import ModelSpecs

from . import settings
from .carriers import calibration_tables, measure_carriers
from .settings import check_delta
from .tau import choose_tau, presence_report
from .variants import VARIANTS, check_variant


@dataclass(frozen=True, eq=False)
class Calibration:
    """`||h||^2` of a host's carriers on synthetic tables.

    Attributes:
        host_sha256: Of the weights of the host that was measured.
        carriers: What each carrier is (a receiver, the input of an FFN, ...), by its site's name.
        squared_norms: `||h||^2` of each carrier's live tokens, float64, by its site's name.
        tables: How many synthetic tables were predicted.
        seed: Of those tables.
    """

    host_sha256: str
    carriers: Mapping[str, str] = field(repr=False)
    squared_norms: Mapping[str, np.ndarray] = field(repr=False)
    tables: int = settings.TABLES
    seed: int = settings.SEED

    @classmethod
    def measure(
        cls,
        specs: ModelSpecs,
        host_sha256: str,
        carriers: Mapping[str, str],
        *,
        tables: int = settings.TABLES,
        seed: int = settings.SEED,
        device: str = "cpu",
        on_table: Callable[[], None] | None = None,
    ) -> Calibration:
        """Fit and predict synthetic tables with a host through TabPFN, and note what passes its carriers.

        Args:
            specs: The unpatched host, a copy that may be used up.
            host_sha256: Of its weights.
            carriers: What to measure: site names, and what the carriers are.
            tables: Synthetic tables.
            seed: Of those tables.
            device: Where TabPFN runs.
            on_table: Called after each table.

        Raises:
            ValueError: No table, or a seed that is none.
            RuntimeError: A carrier that nothing passes.
        """
        if tables < 1:
            raise ValueError(f"calibration needs at least one table, got {tables}")
        settings.check_seed(seed)
        drawn = calibration_tables(tables, seed)
        squared_norms = measure_carriers(specs, list(carriers), drawn, device=device, on_table=on_table)
        return cls(host_sha256, dict(carriers), squared_norms, tables, seed)

    def taus(
        self, variant: str, delta: float = settings.DELTA, quantile: float = settings.QUANTILE
    ) -> dict[str, float]:
        """tau of each of a variant's sites, in the unit of `||h||^2`; see `choose_tau`.

        Args:
            variant: One of `VARIANTS`.
            delta: 1 minus the presence at the quantile, in (0, 1).
            quantile: Which low quantile of the live carriers' `||h||^2`, in [0, 1].

        Raises:
            ValueError: An unknown variant, or a number out of range.
        """
        check_variant(variant)
        check_delta(delta, quantile)
        return {
            name: choose_tau(self.squared_norms[name], delta, quantile)
            for name, carrier in self.carriers.items()
            if carrier in VARIANTS[variant]
        }

    def statistics(self, taus: Mapping[str, float]) -> dict[str, dict[str, float]]:
        """Per site, quantiles of `||h||^2` and presence at these taus; see `presence_report`."""
        return {name: presence_report(self.squared_norms[name], tau) for name, tau in taus.items()}

    def provenance(self, delta: float, quantile: float) -> dict[str, Any]:
        """What decides the taus beside the host, as a retrofit's file has it."""
        return {"delta": delta, "quantile": quantile, "tables": self.tables, "seed": self.seed}
