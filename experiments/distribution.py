"""How good a predicted distribution is: TabPFN's bars, uniform inside, the outer two half-normal tails without end.

Shapes: N rows, K bars, L levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

_ROWS = 512  # at once: some ten (rows, bars) tensors in float64


@dataclass(frozen=True)
class Scores:
    """Of a case's predicted distributions.

    Attributes:
        nll: Mean negative log-likelihood of the targets, in nats.
        crps: Mean continuous ranked probability score, in the target's unit.
        quantiles_NL: Of each row at each level.
    """

    nll: float
    crps: float
    quantiles_NL: np.ndarray


def score(criterion: Any, logits_NK: torch.Tensor, y_N: np.ndarray, levels_L: Sequence[float]) -> Scores:
    """Score predicted distributions on their targets, in float64.

    Args:
        criterion: TabPFN's `FullSupportBarDistribution`, in the target's unit.
        logits_NK: As `TabPFNRegressor.predict` returns them with `output_type="full"`.
        y_N: The targets.
        levels_L: Of the quantiles, in (0, 1).
    """
    criterion = criterion.cpu()
    levels = torch.tensor(levels_L, dtype=torch.float64)
    nll, crps, quantiles = [], [], []
    for logits, y in zip(logits_NK.split(_ROWS), torch.as_tensor(y_N, dtype=torch.float64).split(_ROWS), strict=True):
        logits = logits.cpu().double()
        bars = _Bars.of(criterion, logits)
        nll.append(criterion(logits, y))
        crps.append(bars.crps(y))
        quantiles.append(bars.quantiles(levels))
    return Scores(torch.cat(nll).mean().item(), torch.cat(crps).mean().item(), torch.cat(quantiles).numpy())


def coverage(y_N: np.ndarray, quantiles_NL: np.ndarray, levels_L: Sequence[float], share: float) -> float:
    """The fraction of targets inside the central interval of a probability, whose ends are among the quantiles."""
    low, high = (list(levels_L).index(round(0.5 + side * share / 2, 6)) for side in (-1, 1))
    return float(((quantiles_NL[:, low] <= y_N) & (y_N <= quantiles_NL[:, high])).mean())


@dataclass(frozen=True)
class _Bars:
    """Bars of a probability each, and what lies left of them.

    A tail ends where its bar meets the next one: the density falls from there like half of a normal's.
    """

    borders: torch.Tensor  # (K + 1,)
    p_NK: torch.Tensor
    before_NK: torch.Tensor
    left: torch.distributions.HalfNormal
    right: torch.distributions.HalfNormal

    @classmethod
    def of(cls, criterion: Any, logits_NK: torch.Tensor) -> _Bars:
        p_NK = logits_NK.softmax(-1)
        borders = criterion.borders.double()
        width = borders.diff()
        tails = [criterion.halfnormal_with_p_weight_before(width[at]) for at in (0, -1)]
        return cls(borders, p_NK, p_NK.cumsum(-1) - p_NK, *tails)

    def quantiles(self, levels_L: torch.Tensor) -> torch.Tensor:
        """(N, L): the points with these probabilities to the left of them."""
        last = self.p_NK.shape[-1] - 1
        levels_NL = levels_L.expand(len(self.p_NK), -1).contiguous()
        at = torch.searchsorted(self.p_NK.cumsum(-1), levels_NL).clamp(max=last)
        inside = ((levels_NL - self.before_NK.gather(-1, at)) / self.p_NK.gather(-1, at)).clamp(0, 1)
        found = self.borders[at].lerp(self.borders[at + 1], inside)
        found = torch.where(at == 0, self.borders[1] - self.left.icdf(1 - inside), found)
        return torch.where(at == last, self.borders[-2] + self.right.icdf(inside), found)

    def crps(self, y_N: torch.Tensor) -> torch.Tensor:
        """(N,): the integral of (F(z) - [y <= z])^2, exactly.

        Inside a bar F is linear, from a to b over a width w, where the integral of F^2 is w (a^2 + ab + b^2) / 3 and
        that of (1 - F)^2 the same of 1 - a and 1 - b; the bar that holds y is cut there.
        """
        low, high = self.borders[1:-2], self.borders[2:-1]
        p, a = self.p_NK[:, 1:-1], self.before_NK[:, 1:-1]
        cut = torch.clamp(y_N[:, None], low, high)
        at_cut = a + p * torch.nan_to_num((cut - low) / (high - low))  # a bar may have no width
        above = (high - cut) * _mean_square(1 - at_cut, 1 - a - p)
        inner = ((cut - low) * _mean_square(a, at_cut) + above).sum(-1)
        from_left = _tail_crps(self.p_NK[:, 0], y_N - self.borders[1], self.left.scale)
        from_right = _tail_crps(self.p_NK[:, -1], self.borders[-2] - y_N, self.right.scale)
        return inner + from_left + from_right


def _mean_square(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Of what runs evenly from a to b."""
    return (a * a + a * b + b * b) / 3


def _tail_crps(p_N: torch.Tensor, y_N: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """What the left tail, below 0, adds to the CRPS: there F = 2 p Phi(z / scale), and the right one is its mirror.

    Below y the integral is that of F^2, from y to 0 that of (1 - F)^2. The antiderivatives of Phi and Phi^2 are
    u Phi + phi and u Phi^2 + 2 Phi phi - Phi(sqrt(2) u) / sqrt(pi); that of F^2 goes over the whole tail.
    """
    u = (y_N / scale).clamp(max=0)
    phi_0 = 1 / math.sqrt(2 * math.pi)
    phi = phi_0 * torch.exp(-u * u / 2)
    linear = phi_0 - (u * torch.special.ndtr(u) + phi)
    square = phi_0 - 1 / (2 * math.sqrt(math.pi))
    return scale * (-u - 4 * p_N * linear + 4 * p_N**2 * square)
