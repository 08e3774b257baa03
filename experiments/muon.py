"""The optimizer Muon in float32.

torch's own orthogonalises in bfloat16, which on a CPU without instructions for it takes longer than the rest of a
training step.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

MOMENTUM = 0.95
# Of the quintic, and how often it is applied: Keller Jordan, "Muon: an optimizer for hidden layers in neural networks"
# (2024). It brings all singular values to about one.
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ITERATIONS = 4


class Muon(torch.optim.Optimizer):
    """Momentum SGD (Nesterov) on matrices whose updates are orthogonalised and scaled to AdamW's size.

    Args:
        matrices: Parameters (A, B).
        lr: Rate, as of AdamW; the scale is Liu et al., "Muon is scalable for LLM training" (2025), 0.2 sqrt(max(A, B)).
        weight_decay: Decoupled, as AdamW's.
    """

    def __init__(self, matrices: Iterable[Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Update the parameters by their gradients."""
        for group in self.param_groups:
            for p_AB in group["params"]:
                state = self.state[p_AB]
                if not state:
                    state["momentum_buffer"] = torch.zeros_like(p_AB)
                momentum_AB = state["momentum_buffer"].lerp_(p_AB.grad, 1 - MOMENTUM)
                update_AB = orthogonalized(p_AB.grad.lerp(momentum_AB, MOMENTUM))
                p_AB.mul_(1 - group["lr"] * group["weight_decay"])
                p_AB.add_(update_AB, alpha=-group["lr"] * 0.2 * max(p_AB.shape) ** 0.5)


def orthogonalized(m_AB: Tensor) -> Tensor:
    """About `U @ V.T` of the singular value decomposition `U @ S @ V.T`, by Newton-Schulz iterations."""
    x_AB = m_AB.T if m_AB.shape[0] > m_AB.shape[1] else m_AB  # so that the products below are small
    x_AB = x_AB / x_AB.norm().clamp(min=1e-7)
    a, b, c = COEFFICIENTS
    for _ in range(ITERATIONS):
        gram_AA = x_AB @ x_AB.T
        x_AB = torch.addmm(x_AB, torch.addmm(gram_AA, gram_AA, gram_AA, beta=b, alpha=c), x_AB, beta=a)
    return x_AB.T if m_AB.shape[0] > m_AB.shape[1] else x_AB
