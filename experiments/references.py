"""The O-operators three times on the same named inputs: as patched, in torch's own kernels, and evaluated directly.

The formula of an operator (docs/theory.md, section 2) is written once, on top of a few functions: those of `Direct` are
plain numpy and share no code with `patches`; those of `Stock` are torch's kernels. A stock operator has no presence:
every p is 1 (`tau=None`), so it sees zero tokens as ordinary ones. Stock attention gets the masses of the sources as
its mask, see `stock_case`.

Shape suffixes: B batch, H query heads, K key/value heads, S receivers or tokens, J sources, D head width, E hidden
width. The token axis is always the last but one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import OFFN, OAttention, ONorm, OTransformer, log_presence, oattention, oinject, ostandardize, presence

BLOCKS = 2  # of the OTransformer
CARRIERS = ("h", "h_i", "h_j", "context")

_EPS = 1e-5  # in norms, as torch's

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Case:
    """One set of inputs, in float64 (bool for `visible`). Carriers are the arrays named in `CARRIERS`."""

    arrays: Arrays
    tau: float = 1.0
    heads: int = 1
    eps_den: float = 0.0
    large: bool = False  # its exact value takes seconds

    @property
    def source_carrier(self) -> str:
        """The name of the carrier of the sources."""
        return next(name for name in ("h_j", "context", "h") if name in self.arrays)

    def with_arrays(self, **arrays: np.ndarray) -> Case:
        """The case with some arrays changed."""
        return replace(self, arrays={**self.arrays, **arrays})

    def rounded(self, dtype: torch.dtype) -> Case:
        """The case with every number rounded to dtype, weights too."""
        numbers = {name: torch.from_numpy(x) for name, x in self.arrays.items() if x.dtype != bool}
        return self.with_arrays(**{name: x.to(dtype).double().numpy() for name, x in numbers.items()})


class Direct:
    """Direct evaluation in numpy, in the precision of the inputs."""

    linear = staticmethod(lambda x, a, name: x @ a[f"{name}.weight"].T + a.get(f"{name}.bias", 0.0))

    @staticmethod
    def presence(h: np.ndarray, tau: float | None) -> np.ndarray:
        """`||h||^2 / (tau + ||h||^2)`, (..., E) -> (...); 1 everywhere without a tau."""
        n = (h * h).sum(axis=-1)
        return np.ones_like(n) if tau is None else n / (tau + n)

    @staticmethod
    def attention(
        q_BHSD: np.ndarray,
        k_BKJD: np.ndarray,
        v_BKJD: np.ndarray,
        p_BS: np.ndarray,
        p_BJ: np.ndarray,
        *,
        visible: np.ndarray | None = None,
        additive: np.ndarray | None = None,
        eps_den: float = 0.0,
    ) -> np.ndarray:
        """OAttention on heads, (B, H, S, D); 0 where nothing with mass is visible. Masks broadcast to (B, H, S, J)."""
        group = q_BHSD.shape[1] // k_BKJD.shape[1]
        k_BHJD, v_BHJD = (np.repeat(x, group, axis=1) for x in (k_BKJD, v_BKJD))
        score = q_BHSD @ k_BHJD.swapaxes(-1, -2) / math.sqrt(q_BHSD.shape[-1])
        if additive is not None:
            score = score + additive
        mass = np.broadcast_to(p_BJ[:, None, None, :], score.shape)
        if visible is not None:
            mass = mass * visible
        # Numerator and denominator times exp(-top), so that no exponential overflows.
        top = np.where(mass > 0, score, -np.inf).max(axis=-1, keepdims=True)
        if eps_den > 0:
            top = np.maximum(top, math.log(eps_den))
        top = np.where(np.isfinite(top), top, 0.0)
        weight = mass * np.exp(np.minimum(score - top, 0.0))
        total = weight.sum(axis=-1, keepdims=True)
        if eps_den > 0:
            total = total + eps_den * np.exp(-top)
        return p_BS[:, None, :, None] * (weight @ v_BHJD) / np.where(total > 0, total, 1.0)

    @staticmethod
    def norm(x: np.ndarray, a: Arrays, name: str) -> np.ndarray:
        """LayerNorm over the last dim, or RMSNorm if there is no bias of that name; (..., E) -> (..., E)."""
        if f"{name}.bias" in a:
            x = x - x.mean(axis=-1, keepdims=True)
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS) * a[f"{name}.weight"] + a.get(f"{name}.bias", 0)

    @staticmethod
    def gelu(x: np.ndarray) -> np.ndarray:
        """`x * Phi(x)`, Phi the normal distribution function."""
        return x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2

    @staticmethod
    def standardize(x_SE: np.ndarray, p_S: np.ndarray) -> np.ndarray:
        """OStandardize, (..., S, E) -> (..., S, E); 0 where there is no mass."""
        p = p_S[..., None]
        mass = p.sum(axis=-2, keepdims=True)
        mass = np.where(mass > 0, mass, 1.0)
        x = x_SE - x_SE[..., :1, :]  # so that tokens that are all alike have a mean without rounding
        centered = x - (p * x).sum(axis=-2, keepdims=True) / mass
        var = (p * centered * centered).sum(axis=-2, keepdims=True) / mass
        return p * centered / np.sqrt(var + _EPS)


class Stock:
    """The same functions in torch's kernels, which know no presence: it is 1."""

    presence = staticmethod(lambda h, tau: h.new_ones(h.shape[:-1]))
    linear = staticmethod(lambda x, t, name: F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")))
    gelu = staticmethod(F.gelu)
    standardize = staticmethod(lambda x_SE, p_S: F.layer_norm(x_SE.mT, x_SE.mT.shape[-1:], eps=_EPS).mT)

    @staticmethod
    def attention(
        q: Tensor, k: Tensor, v: Tensor, *_: Tensor, visible: Tensor | None, additive: Tensor | None, eps_den: float
    ) -> Tensor:
        """`scaled_dot_product_attention` with both masks; 0 where nothing is visible."""
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
        mask = visible
        if additive is not None:
            mask = additive if visible is None else additive.masked_fill(~visible, -math.inf)
        # Where nothing is visible, kernels differ: some say NaN.
        return torch.nan_to_num(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))

    @staticmethod
    def norm(x: Tensor, t: Tensors, name: str) -> Tensor:
        """`layer_norm`, or `rms_norm` if there is no bias of that name."""
        weight, bias = t[f"{name}.weight"], t.get(f"{name}.bias")
        if bias is None:
            return F.rms_norm(x, weight.shape, weight, _EPS)
        return F.layer_norm(x, weight.shape, weight, bias, _EPS)


def stock_case(operator: Operator, case: Case) -> Case:
    """What the stock operator is given: of an attention, the case with `log p_j` in `additive`.

    Masses concentrate the weights on fewer sources, which makes the kernel's own error larger: without them it would
    be the error of an easier problem.
    """
    if not operator.sources:
        return case
    with np.errstate(divide="ignore"):
        log_p = np.log(Direct.presence(case.arrays[case.source_carrier], case.tau))[:, None, None, :]
    return case.with_arrays(additive=log_p + case.arrays.get("additive", 0.0))


# --- Formulas: `m` is Direct or Stock, `a` arrays or tensors; tau is None for Stock and for its exact values. ---


def _masks(a: dict, case: Case, tau: float | None) -> dict[str, Any]:
    eps_den = 0.0 if tau is None else case.eps_den
    return {"visible": a.get("visible"), "additive": a.get("additive"), "eps_den": eps_den}


def _heads(m: Any, a: dict, case: Case, tau: float | None) -> Any:
    p_BS, p_BJ = m.presence(a["h_i"], tau), m.presence(a["h_j"], tau)
    return m.attention(a["q"], a["k"], a["v"], p_BS, p_BJ, **_masks(a, case, tau))


def _projected(m: Any, a: dict, name: str, x: Any, context: Any, masses: Any, heads: int, masks: dict) -> Any:
    def split(x_BSE: Any, projection: str) -> Any:
        y_BSE = m.linear(x_BSE, a, f"{name}.{projection}")
        return y_BSE.reshape(*y_BSE.shape[:2], -1, x_BSE.shape[-1] // heads).swapaxes(1, 2)

    q, k, v = split(x, "q_projection"), split(context, "k_projection"), split(context, "v_projection")
    out_BSHD = m.attention(q, k, v, *masses, **masks).swapaxes(1, 2)
    return m.linear(out_BSHD.reshape(x.shape), a, f"{name}.out_projection")


def _attention_module(m: Any, a: dict, case: Case, tau: float | None) -> Any:
    h, context = a["h"], a.get("context", a["h"])
    masses = m.presence(h, tau), m.presence(context, tau)
    return _projected(m, a, "attention", h, context, masses, case.heads, _masks(a, case, tau))


def _mlp(m: Any, x: Any, a: dict, first: str, second: str) -> Any:
    return m.linear(m.gelu(m.linear(x, a, first)), a, second)


def _transformer(m: Any, a: dict, case: Case, tau: float | None) -> Any:
    h, masks = a["h"], _masks(a, case, tau)
    for block in (f"model.blocks.{i}" for i in range(BLOCKS)):
        p, x = m.presence(h, tau), m.norm(h, a, f"{block}.norm")
        h = h + _projected(m, a, f"{block}.attention", x, x, (p, p), case.heads, masks)
        p = m.presence(h, tau)[..., None]
        x = p * m.norm(h, a, f"{block}.ffn.ffn.0.norm")
        h = h + p * _mlp(m, x, a, f"{block}.ffn.ffn.1", f"{block}.ffn.ffn.3")
    return m.presence(h, tau)[..., None] * m.norm(h, a, "model.norm.norm")


# --- Operators as patched ---


def _load(module: nn.Module, t: Tensors, prefix: str) -> nn.Module:
    weights = {name.removeprefix(prefix): x for name, x in t.items() if name.startswith(prefix)}
    module.to(t["h"].device, t["h"].dtype).load_state_dict(weights)
    return module


def _run_heads(t: Tensors, case: Case) -> Tensor:
    p_BS, log_p_BJ = presence(t["h_i"], case.tau), log_presence(t["h_j"], case.tau)
    options = _masks(t, case, case.tau)
    return oattention(t["q"], t["k"], t["v"], presence_BS=p_BS, log_presence_BJ=log_p_BJ, **options)


def _run_attention_module(t: Tensors, case: Case) -> Tensor:
    width = t["h"].shape[-1]
    kv_heads = t["attention.k_projection.weight"].shape[0] * case.heads // width
    module = OAttention(width, case.heads, case.tau, num_kv_heads=kv_heads, eps_den=case.eps_den)
    return _load(module, t, "attention.")(t["h"], t.get("context"), visible=t.get("visible"))


def _run_transformer(t: Tensors, case: Case) -> Tensor:
    model = OTransformer(t["h"].shape[-1], case.heads, BLOCKS, case.tau)
    return _load(model, t, "model.")(t["h"], visible=t.get("visible"))


class Operator(NamedTuple):
    """How to run one operator. `receivers` and `sources` name the inputs that have a row per token."""

    name: str
    run: Callable[[Tensors, Case], Tensor]
    formula: Callable[[Any, dict, Case, float | None], Any]
    receivers: tuple[str, ...] = ("h",)
    sources: tuple[str, ...] = ()

    def stock(self, t: Tensors, case: Case) -> Tensor:
        """The stock operator."""
        return self.formula(Stock, t, case, None)


OPERATORS = (
    Operator("oattention", _run_heads, _heads, ("h_i", "q"), ("k", "v", "h_j")),
    Operator("OAttention", _run_attention_module, _attention_module, sources=("context",)),
    Operator(
        "OFFN",
        lambda t, case: OFFN(lambda h: _mlp(Stock, h, t, "ffn.0", "ffn.2"), case.tau)(t["h"]),
        lambda m, a, case, tau: a["h"] + m.presence(a["h"], tau)[..., None] * _mlp(m, a["h"], a, "ffn.0", "ffn.2"),
    ),
    Operator(
        "ONorm",
        lambda t, case: ONorm(lambda h: Stock.norm(h, t, "norm"), case.tau)(t["h"]),
        lambda m, a, case, tau: m.presence(a["h"], tau)[..., None] * m.norm(a["h"], a, "norm"),
    ),
    Operator(
        "OInject",
        lambda t, case: oinject(t["h"], t["u"], case.tau),
        lambda m, a, case, tau: a["h"] + m.presence(a["h"], tau)[..., None] * a["u"],
        ("h", "u"),
    ),
    Operator(
        "OStandardize",
        lambda t, case: ostandardize(t["x"], presence(t["h"], case.tau), _EPS),
        lambda m, a, case, tau: m.standardize(a["x"], m.presence(a["h"], tau)),
        ("h", "x"),
    ),
    Operator("OTransformer", _run_transformer, _transformer),
)
