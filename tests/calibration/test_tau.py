"""The choice of tau, against the definition of presence, and the report on it."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oretrofit.calibration.tau import choose_tau, presence_report

LENGTHS = st.integers(1, 400)
SEEDS = st.integers(0, 2**32 - 1)
DELTAS = st.floats(1e-9, 1 - 1e-9)


def squared_norms(size, seed):
    rng = np.random.default_rng(seed)
    return np.exp(rng.normal(rng.uniform(-10, 10), rng.uniform(0, 3), size))


@settings(max_examples=100, deadline=None)
@given(LENGTHS, SEEDS, DELTAS, st.floats(0, 1))
def test_presence_at_the_quantile_is_one_minus_delta(size, seed, delta, quantile):
    n = squared_norms(size, seed)
    tau = choose_tau(n, delta, quantile)
    at = np.quantile(n, quantile)
    assert 1 - at / (tau + at) == pytest.approx(delta, rel=1e-9, abs=1e-15)
    # All tokens above the quantile keep at least that: all but `quantile` of them, to the token.
    kept = tau / (tau + n) <= delta * (1 + 1e-9)
    assert kept[n >= at].all()
    assert kept.sum() >= math.floor((1 - quantile) * size)


@pytest.mark.parametrize(("delta", "tau"), [(0.5, 4.0), (0.75, 12.0), (0.2, 1.0), (0.001, 4 / 999)])
def test_tau_by_hand(delta, tau):
    """`4 / (tau + 4) = 1 - delta` solved for tau."""
    assert choose_tau(np.full(5, 4.0), delta) == pytest.approx(tau, rel=1e-12)
    # Unasked at the quantile 1 %, which of 101 values is the second.
    assert choose_tau(np.r_[0.5, 4.0, np.full(99, 9.0)], delta) == pytest.approx(tau, rel=1e-12)


@settings(max_examples=50, deadline=None)
@given(LENGTHS, SEEDS, DELTAS, st.floats(1e-6, 1e6))
def test_tau_scales_with_the_carrier(size, seed, delta, factor):
    n = squared_norms(size, seed)
    assert choose_tau(factor * n, delta) == pytest.approx(factor * choose_tau(n, delta), rel=1e-12)


@pytest.mark.parametrize("delta", [0, 1, -0.1, 1.5, math.nan])
def test_delta_is_checked(delta):
    with pytest.raises(ValueError, match="delta"):
        choose_tau(np.ones(3), delta)


@pytest.mark.parametrize("quantile", [-0.1, 1.1, math.nan])
def test_the_quantile_is_checked(quantile):
    with pytest.raises(ValueError, match="quantile"):
        choose_tau(np.ones(3), 0.1, quantile)


def test_report():
    n = squared_norms(101, 0)
    tau = 3 * n.min()
    ordered = sorted(n)  # 101 values: the quantiles are three of them
    assert presence_report(n, tau) == pytest.approx(
        {
            "sq_norm_q01": ordered[1],
            "sq_norm_q50": ordered[50],
            "sq_norm_q99": ordered[99],
            "presence_min": ordered[0] / (tau + ordered[0]),
            "presence_median": ordered[50] / (tau + ordered[50]),
        },
        rel=1e-12,
    )
