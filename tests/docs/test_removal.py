"""examples/removal.py: Shapley values against their definition."""

from __future__ import annotations

import itertools
import runpy
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def removal() -> dict:
    return runpy.run_path(str(ROOT / "examples/removal.py"))


def by_all_orders(columns: int, values: dict[int, np.ndarray]) -> np.ndarray:
    """The definition: the mean gain of each column over all orders in which columns may come."""
    orders = list(itertools.permutations(range(columns)))
    found = np.zeros((columns, len(values[0])))
    for order in orders:
        S = 0
        for j in order:
            found[j] += (values[S | 1 << j] - values[S]) / len(orders)
            S |= 1 << j
    return found


def test_shapley_values_are_the_mean_gain_over_all_orders(removal):
    rng = np.random.default_rng(0)
    values = {S: rng.standard_normal(3) for S in range(2**5)}
    steps = removal["steps_of"](5, 0, rng)
    found = removal["shapley"](steps, 5, values)
    # Sums of 32 products of numbers of size 1: rounding far below 1e-12.
    np.testing.assert_allclose(found, by_all_orders(5, values), rtol=0, atol=1e-12)


def test_along_random_orders_they_add_up_to_the_whole_gain(removal):
    rng = np.random.default_rng(1)
    steps = removal["steps_of"](10, 4, rng)
    values = {S: rng.standard_normal(2) for S in {S for _, _, S in steps} | {S | 1 << j for _, j, S in steps}}
    found = removal["shapley"](steps, 10, values)
    np.testing.assert_allclose(found.sum(axis=0), values[2**10 - 1] - values[0], rtol=0, atol=1e-12)


def test_removal_and_refit_agree_and_filling_does_not(removal):
    found = removal["compare"]("diabetes", rows=40, explained=6, members=1, permutations=1, rounds=1)
    assert 10 + 9 <= found["coalitions"] <= 10 + 10  # along one order, and all but one column each
    # Forward passes of other shapes round otherwise: some 1e-6 of a standard deviation (results/ragged-equality.json).
    assert found["largest difference of removal and refit, sd"] < 1e-3
    shares = np.array([[f["shapley, removal"], f["shapley, fill mean"]] for f in found["features"]])
    assert np.abs(shares[:, 0] - shares[:, 1]).max() > 0.1


def test_tabpfn_refuses_to_fill_with_infinity(tiny_host, regressor, table):
    """As docs/removal.md says; the example could show that way of filling, too, if it did not."""
    X, y, X_test = table
    fitted = regressor(tiny_host.specs).fit(X, y)
    X_test = X_test.copy()
    X_test[:, 0] = np.inf
    with pytest.raises(ValueError, match="infinity"):
        fitted.predict(X_test)
