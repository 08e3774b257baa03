"""Scores of predicted distributions against numeric integrals of TabPFN's own distribution function."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution

from oretrofit.experiments import distribution
from oretrofit.experiments.distribution import coverage, score
from oretrofit.experiments.predictions import LEVELS

BARS = 9
TARGETS = np.array([-30.0, -4.0, -1.0, -0.2, 0.0, 0.3, 2.0, 5.0, 40.0])  # both tails, and what lies between


@pytest.fixture(scope="module")
def criterion() -> FullSupportBarDistribution:
    rng = np.random.default_rng(0)
    return FullSupportBarDistribution(torch.from_numpy(np.sort(3 * rng.normal(size=BARS + 1))))


@pytest.fixture(scope="module")
def logits() -> torch.Tensor:
    return torch.from_numpy(2 * np.random.default_rng(1).normal(size=(len(TARGETS), BARS)))


def integral(criterion: FullSupportBarDistribution, logits: torch.Tensor, y: float) -> float:
    """Of (F(z) - [y <= z])^2 by quadrature, piece by piece between the kinks."""

    def squared(z: float) -> float:
        return (criterion.cdf(logits[None], torch.tensor([[z]], dtype=torch.float64)).item() - (y <= z)) ** 2

    borders = criterion.borders
    # Both tails are cut where a half-normal of that width has nothing left (8 of its scales, 12 widths, and over).
    ends = (min(y, borders[0].item()) - 50, max(y, borders[-1].item()) + 50)
    kinks = sorted({*borders.tolist(), y, *ends})
    return sum(integrate.quad(squared, a, b, epsabs=1e-11, limit=200)[0] for a, b in itertools.pairwise(kinks))


@pytest.mark.parametrize("row", range(len(TARGETS)))
def test_crps_is_its_integral(criterion, logits, row: int) -> None:
    found = score(criterion, logits[row : row + 1], TARGETS[row : row + 1], LEVELS).crps
    # Eleven pieces, each integrated to 1e-11 or to 1.5e-8 of itself (quad's relative bound).
    assert found == pytest.approx(integral(criterion, logits[row], TARGETS[row]), rel=1.5e-8, abs=1.1e-10)


def test_crps_of_samples() -> None:
    """By its other definition, E|X - y| - E|X - X'| / 2, of points drawn from a half-normal tail and a uniform bar."""
    rng, n = np.random.default_rng(2), 400_000
    scale = 2.0 / stats.halfnorm.ppf(0.5)  # TabPFN's tails have half of their mass inside the bar
    is_tail = rng.random(n) < 0.25
    drawn = np.where(is_tail, 1.0 - stats.halfnorm.rvs(scale=scale, size=n, random_state=rng), 1 + 3 * rng.random(n))
    y = -0.5
    samples = np.abs(drawn - y) - 0.5 * np.abs(drawn - rng.permutation(drawn))
    borders = torch.tensor([-1.0, 1.0, 4.0, 5.0], dtype=torch.float64)
    logits = torch.tensor([[0.25, 0.75, 0.0]], dtype=torch.float64).log()
    found = score(FullSupportBarDistribution(borders), logits, np.array([y]), LEVELS).crps
    assert found == pytest.approx(samples.mean(), abs=5 * samples.std() / math.sqrt(n))


def test_crps_of_a_point_is_its_distance() -> None:
    """Of 10,000 narrow bars one has all: the CRPS is the distance to it, but for a third of its width."""
    borders, logits = torch.linspace(-5, 5, 10_001, dtype=torch.float64), torch.full((1, 10_000), -1e9)
    logits[0, 7500] = 0.0  # [2.5, 2.501]
    found = score(FullSupportBarDistribution(borders), logits, np.array([1.0]), LEVELS)
    assert found.crps == pytest.approx(1.5005 - 0.001 / 6, abs=1e-9)
    assert np.abs(found.quantiles_NL - 2.5005).max() <= 0.0005


def test_bars_without_width_and_rows_beyond_one_chunk(criterion, monkeypatch: pytest.MonkeyPatch) -> None:
    flat = FullSupportBarDistribution(torch.tensor([-2.0, -1.0, 0.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    plain = FullSupportBarDistribution(torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=torch.float64))
    p = torch.tensor([[0.1, 0.4, 0.0, 0.3, 0.2], [0.3, 0.2, 0.0, 0.4, 0.1]], dtype=torch.float64)
    y = np.array([0.3, -1.7])
    one, other = (score(made, logits.log(), y, LEVELS) for made, logits in ((flat, p), (plain, p[:, [0, 1, 3, 4]])))
    assert one.crps == pytest.approx(other.crps, rel=1e-13)
    np.testing.assert_allclose(one.quantiles_NL, other.quantiles_NL, rtol=1e-13)

    logits = torch.from_numpy(np.random.default_rng(3).normal(size=(7, BARS)))
    y = np.random.default_rng(4).normal(size=7)
    whole = score(criterion, logits, y, LEVELS)
    monkeypatch.setattr(distribution, "_ROWS", 3)
    parts = score(criterion, logits, y, LEVELS)
    assert (parts.nll, parts.crps) == pytest.approx((whole.nll, whole.crps), rel=1e-14)
    np.testing.assert_array_equal(parts.quantiles_NL, whole.quantiles_NL)


def test_quantiles_are_tabpfns_and_invert_its_distribution(criterion, logits) -> None:
    found = torch.from_numpy(score(criterion, logits, TARGETS, LEVELS).quantiles_NL)
    levels = torch.tensor(LEVELS, dtype=torch.float64)
    for at, level in enumerate(LEVELS):
        # A rounding of the probability (1e-16, over 9 bars) by the share of the least probable bar, times its width.
        torch.testing.assert_close(found[:, at], criterion.icdf(logits, level), rtol=0, atol=1e-11)
    torch.testing.assert_close(criterion.cdf(logits, found), levels.expand(len(TARGETS), -1), rtol=0, atol=1e-14)


def test_likelihood_by_hand(criterion, logits) -> None:
    total, p = 0.0, logits.softmax(-1).numpy()
    borders = criterion.borders.numpy()
    for n, y in enumerate(TARGETS):
        bar = min(max(int(np.searchsorted(borders, y)) - 1, 0), BARS - 1)
        width = borders[bar + 1] - borders[bar]
        density = 1 / width
        if bar in (0, BARS - 1):
            distance = borders[1] - y if bar == 0 else y - borders[-2]
            density = stats.halfnorm.pdf(distance, scale=width / stats.halfnorm.ppf(0.5))
        total -= math.log(p[n, bar] * density)
    assert score(criterion, logits, TARGETS, LEVELS).nll == pytest.approx(total / len(TARGETS), rel=1e-12)


@pytest.mark.parametrize("share", [0.8, 0.95])
def test_coverage_by_counting(criterion, logits, share: float) -> None:
    quantiles = score(criterion, logits, TARGETS, LEVELS).quantiles_NL
    below = criterion.cdf(logits, torch.from_numpy(TARGETS)[:, None])[:, 0].numpy()
    inside = [abs(probability - 0.5) <= share / 2 for probability in below]
    assert 0 < sum(inside) < len(inside)
    assert coverage(TARGETS, quantiles, LEVELS, share) == sum(inside) / len(inside)
