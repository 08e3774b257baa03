"""The choice of tau: one scale per carrier, relative to that carrier's own `||h||^2`."""

from __future__ import annotations

import numpy as np

from .settings import check_delta

QUANTILES = (0.01, 0.5, 0.99)


def choose_tau(squared_norms: np.ndarray, delta: float, quantile: float = 0.01) -> float:
    """The tau at which the `quantile` of the live carriers has presence `1 - delta`.

    `p = n / (tau + n) = 1 - delta` at `n = n_q` gives `tau = n_q * delta / (1 - delta)`; all carriers
    above the quantile have presence of at least `1 - delta`. Raises `ValueError` unless delta is in
    (0, 1) and quantile in [0, 1].
    """
    check_delta(delta, quantile)
    return float(np.quantile(squared_norms, quantile) * delta / (1 - delta))


def presence_report(squared_norms: np.ndarray, tau: float) -> dict[str, float]:
    """Quantiles of `||h||^2` (1 %, 50 %, 99 %) and smallest and median presence at tau."""
    low, median, high = np.quantile(squared_norms, QUANTILES)
    p = squared_norms / (tau + squared_norms)
    return {
        "sq_norm_q01": float(low),
        "sq_norm_q50": float(median),
        "sq_norm_q99": float(high),
        "presence_min": float(p.min()),
        "presence_median": float(np.median(p)),
    }
