"""Presence: how much of a token is there, read off its hidden vector.

Shape suffixes: `...` leading dims, S tokens, E hidden width. Definitions: docs/theory.md, section 2
(after Gong, "From Attention Masks to Inert Zero-Vector Tokens", 2026).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def squared_norm(h: Tensor) -> Tensor:
    """`||h||^2` over the last dim: (..., E) -> (...), in float32 at least.

    Half precision is widened before squaring: in float16 the square overflows at `||h|| > 256`.
    """
    dtype = torch.promote_types(h.dtype, torch.float32)
    if torch.is_grad_enabled() and h.requires_grad:
        return h.to(dtype).square().sum(dim=-1)
    # One pass without a copy of h; with gradients, its second derivative at 0 would be wrong.
    return torch.linalg.vector_norm(h, dim=-1, dtype=dtype).square()


def presence(h: Tensor, tau: float) -> Tensor:
    """`p = ||h||^2 / (tau + ||h||^2)`: (..., E) -> (...), in [0, 1], float32 at least.

    Exactly 0 at `h = 0` and nowhere else (short of underflow of the square); tends to 1 for a
    fixed non-zero `h` as tau -> 0. tau has the unit of `||h||^2`. Differentiable everywhere.
    Raises `ValueError` unless tau is positive and finite.
    """
    return presence_at(squared_norm(h), tau)


def log_presence(h: Tensor, tau: float) -> Tensor:
    """`log p = -log1p(tau / ||h||^2)`: (..., E) -> (...), in [-inf, 0], float32 at least.

    -inf at `h = 0`, where the gradient is defined as 0. Accurate where p is close to 1, unlike
    `presence(h, tau).log()`. Raises `ValueError` unless tau is positive and finite.
    """
    return log_presence_at(squared_norm(h), tau)


def presence_at(n: Tensor, tau: float) -> Tensor:
    """`presence` of tokens whose `||h||^2` is n."""
    return n / (_checked(tau, n.dtype) + n)


def log_presence_at(n: Tensor, tau: float) -> Tensor:
    """`log_presence` of tokens whose `||h||^2` is n."""
    ratio = n / _checked(tau, n.dtype)
    # Masked before the logarithm: masking only the result would leave NaN in the gradient at 0.
    live = ratio > torch.finfo(n.dtype).tiny
    safe = torch.where(live, ratio, torch.ones_like(n))
    # -log1p(1 / ratio), in a form whose backward does not square 1 / n.
    return torch.where(live, F.logsigmoid(safe.log()), -torch.inf)


def can_look(x: Tensor) -> bool:
    """Whether the code may branch on values of x: on a CPU, outside compilation and torch's function transforms.

    On a GPU that would stall the device.
    """
    return (
        not torch.compiler.is_compiling()
        and type(x) is Tensor  # a fake tensor has no values
        and x.device.type == "cpu"
        and not torch._C._are_functorch_transforms_active()
    )


def zero_at(null: Tensor, y: Tensor, *, own: bool = False) -> Tensor:
    """y, and exactly 0 at the tokens where null is true, whatever y is there: null (...), y (..., E).

    Selected, as 0 * inf is NaN; the gradient of y there is 0. Without a null to be seen it is y itself, and
    costs no pass over it. `own` allows writing over y where no gradient is recorded: y must be nobody else's.
    """
    if not can_look(null):
        return y.masked_fill(null.unsqueeze(-1), 0)
    at = null.nonzero(as_tuple=True)
    if not len(at[0]):
        return y
    if y.shape[:-1] != null.shape:
        null, _ = torch.broadcast_tensors(null, y[..., 0])
        at, own, y = null.nonzero(as_tuple=True), own and y.shape[:-1] == null.shape, y.expand(*null.shape, -1)
    zero = y.new_zeros(())
    return y.index_put_(at, zero) if own and not y.requires_grad else y.index_put(at, zero)


def tame(h: Tensor, tau: float) -> Tensor:
    """h, for a function of each token whose value is thrown away where presence is 0: (..., E) -> (..., E).

    Where gradients are recorded an ordinary token stands in for those without presence. Selecting among the
    values alone would not do: a norm that divides by zero has the gradient 0 * inf = NaN.
    """
    if not torch.is_grad_enabled():
        return h
    null = presence(h.detach(), tau) == 0
    if can_look(null) and not null.any():
        return h
    # Neither of length 0 nor without variance.
    ordinary = torch.linspace(1, 2, h.shape[-1], device=h.device).to(h.dtype)
    return torch.where(null.unsqueeze(-1), ordinary, h)


def gate(p: Tensor, y: Tensor) -> Tensor:
    """`p * y` per token: p (...), y (..., E) -> (..., E) in y's dtype, rounded once.

    Exactly 0 where p is 0, whatever y is there (NaN and inf too), and so are the gradients of p and y.
    """
    # The gradient of a y that tokens share is summed first and rounded last.
    own = y.ndim > p.ndim and y.shape[:-1] == p.shape  # a compiler would guard on sizes of unequal dimensions, too
    wide = y if own else y.to(torch.promote_types(y.dtype, p.dtype))
    return (p.unsqueeze(-1) * zero_at(p == 0, wide)).to(y.dtype)


def gate_(p: Tensor, y: Tensor) -> Tensor:
    """`gate(p, y)`, written over y where no gradient is recorded: y must be nobody else's.

    Half precision is multiplied by p in float32 and rounded once, on CUDA in one pass without a wider copy.
    """
    if y.requires_grad:
        return gate(p, y)
    return zero_at(p == 0, y, own=True).mul_(p.unsqueeze(-1))


def add_gated(h: Tensor, p: Tensor, u: Tensor, *, own: bool = False) -> Tensor:
    """`h + p * u` per token: h and u (..., E), p (...). Exactly h where p is 0, whatever u is there.

    `own` allows writing over u where no gradient is recorded: u must be nobody else's.
    """
    u = zero_at(p == 0, u, own=own)
    if h.dtype == p.dtype:
        return torch.addcmul(h, p.unsqueeze(-1), u.to(h.dtype))  # in one pass, rounded once
    if own and not u.requires_grad:
        return h + u.mul_(p.unsqueeze(-1))  # without a copy in float32, as in `gate_`
    return h + (p.unsqueeze(-1) * u).to(u.dtype)


def _checked(tau: float, dtype: torch.dtype) -> float:
    limits = torch.finfo(dtype)
    if not 0 < tau <= limits.max:
        raise ValueError(f"tau must be a positive number within {dtype}, not {tau!r}")
    # A tau that underflowed would make p = 0/0 at h = 0; near that, the gradient there overflows.
    return max(tau, limits.tiny / limits.eps)
