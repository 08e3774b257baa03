"""The O-operators three times on the same named inputs: as patched, in torch's own kernels, and evaluated directly.

The formula of an operator (docs/theory.md, section 2) is written once, on top of a few functions: those of `Direct` are
plain numpy and share no code with `patches`; those of `Stock` are torch's kernels. A stock operator has no presence:
every p is 1 (`tau=None`), so it sees zero tokens as ordinary ones. Stock attention gets the masses of the sources as
its mask, see `stock_inputs`.

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

NORM_EPS = 1e-5  # as torch's

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Inputs:
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

    def with_arrays(self, **arrays: np.ndarray) -> Inputs:
        """The inputs with some arrays changed."""
        return replace(self, arrays={**self.arrays, **arrays})

    def rounded(self, dtype: torch.dtype) -> Inputs:
        """The inputs with every number rounded to dtype, weights too."""
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
    def per_query(x_BKJD: np.ndarray, heads: int) -> np.ndarray:
        """Keys or values for each query head, (B, K, J, D) -> (B, H, J, D)."""
        return np.repeat(x_BKJD, heads // x_BKJD.shape[1], axis=1)

    @staticmethod
    def scores(q_BHSD: np.ndarray, k_BHJD: np.ndarray, additive: np.ndarray | None) -> np.ndarray:
        """`q k^T / sqrt(D) + additive`, (B, H, S, J)."""
        score = q_BHSD @ k_BHJD.swapaxes(-1, -2) / math.sqrt(q_BHSD.shape[-1])
        return score if additive is None else score + additive

    @staticmethod
    def shares(score_BHSJ: np.ndarray, p_BJ: np.ndarray, *, visible: np.ndarray | None, eps_den: float) -> np.ndarray:
        """`m_ij p_j exp(s_ij)` over their sum and eps_den, (B, H, S, J); 0 where nothing with mass is visible."""
        mass = np.broadcast_to(p_BJ[:, None, None, :], score_BHSJ.shape)
        if visible is not None:
            mass = mass * visible
        # Numerator and denominator times exp(-top), so that no exponential overflows.
        top = np.where(mass > 0, score_BHSJ, -np.inf).max(axis=-1, keepdims=True)
        if eps_den > 0:
            top = np.maximum(top, math.log(eps_den))
        top = np.where(np.isfinite(top), top, 0.0)
        weight = mass * np.exp(np.minimum(score_BHSJ - top, 0.0))
        total = weight.sum(axis=-1, keepdims=True)
        if eps_den > 0:
            total = total + eps_den * np.exp(-top)
        return weight / np.where(total > 0, total, 1.0)

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
        k_BHJD, v_BHJD = (Direct.per_query(x, q_BHSD.shape[1]) for x in (k_BKJD, v_BKJD))
        share = Direct.shares(Direct.scores(q_BHSD, k_BHJD, additive), p_BJ, visible=visible, eps_den=eps_den)
        return p_BS[:, None, :, None] * (share @ v_BHJD)

    @staticmethod
    def norm(x: np.ndarray, a: Arrays, name: str) -> np.ndarray:
        """LayerNorm over the last dim, or RMSNorm if there is no bias of that name; (..., E) -> (..., E)."""
        if f"{name}.bias" in a:
            x = x - x.mean(axis=-1, keepdims=True)
        x = x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + NORM_EPS)
        return x * a[f"{name}.weight"] + a.get(f"{name}.bias", 0)

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
        return p * centered / np.sqrt(var + NORM_EPS)


class Stock:
    """The same functions in torch's kernels, which know no presence: it is 1."""

    presence = staticmethod(lambda h, tau: h.new_ones(h.shape[:-1]))
    linear = staticmethod(lambda x, t, name: F.linear(x, t[f"{name}.weight"], t.get(f"{name}.bias")))
    gelu = staticmethod(F.gelu)
    standardize = staticmethod(lambda x_SE, p_S: F.layer_norm(x_SE.mT, x_SE.mT.shape[-1:], eps=NORM_EPS).mT)

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
            return F.rms_norm(x, weight.shape, weight, NORM_EPS)
        return F.layer_norm(x, weight.shape, weight, bias, NORM_EPS)


def stock_inputs(operator: Operator, inputs: Inputs) -> Inputs:
    """What the stock operator is given: of an attention, `log p_j` in `additive` too.

    Masses concentrate the weights on fewer sources, which makes the kernel's own error larger: without them it would
    be the error of an easier problem.
    """
    if not operator.sources:
        return inputs
    with np.errstate(divide="ignore"):
        log_p = np.log(Direct.presence(inputs.arrays[inputs.source_carrier], inputs.tau))[:, None, None, :]
    return inputs.with_arrays(additive=log_p + inputs.arrays.get("additive", 0.0))


# --- Formulas: `m` is Direct or Stock, `a` arrays or tensors; tau is None for Stock and for its exact values. ---


def _masks(a: dict, inputs: Inputs, tau: float | None) -> dict[str, Any]:
    eps_den = 0.0 if tau is None else inputs.eps_den
    return {"visible": a.get("visible"), "additive": a.get("additive"), "eps_den": eps_den}


def _heads(m: Any, a: dict, inputs: Inputs, tau: float | None) -> Any:
    p_BS, p_BJ = m.presence(a["h_i"], tau), m.presence(a["h_j"], tau)
    return m.attention(a["q"], a["k"], a["v"], p_BS, p_BJ, **_masks(a, inputs, tau))


def _projected(m: Any, a: dict, name: str, x: Any, context: Any, masses: Any, heads: int, masks: dict) -> Any:
    def split(x_BSE: Any, projection: str) -> Any:
        y_BSE = m.linear(x_BSE, a, f"{name}.{projection}")
        return y_BSE.reshape(*y_BSE.shape[:2], -1, x_BSE.shape[-1] // heads).swapaxes(1, 2)

    q, k, v = split(x, "q_projection"), split(context, "k_projection"), split(context, "v_projection")
    out_BSHD = m.attention(q, k, v, *masses, **masks).swapaxes(1, 2)
    return m.linear(out_BSHD.reshape(x.shape), a, f"{name}.out_projection")


def _attention_module(m: Any, a: dict, inputs: Inputs, tau: float | None) -> Any:
    h, context = a["h"], a.get("context", a["h"])
    masses = m.presence(h, tau), m.presence(context, tau)
    return _projected(m, a, "attention", h, context, masses, inputs.heads, _masks(a, inputs, tau))


def _mlp(m: Any, x: Any, a: dict, first: str, second: str) -> Any:
    return m.linear(m.gelu(m.linear(x, a, first)), a, second)


def _transformer(m: Any, a: dict, inputs: Inputs, tau: float | None) -> Any:
    h, masks = a["h"], _masks(a, inputs, tau)
    for block in (f"model.blocks.{i}" for i in range(BLOCKS)):
        p, x = m.presence(h, tau), m.norm(h, a, f"{block}.norm")
        h = h + _projected(m, a, f"{block}.attention", x, x, (p, p), inputs.heads, masks)
        p = m.presence(h, tau)[..., None]
        x = p * m.norm(h, a, f"{block}.ffn.ffn.0.norm")
        h = h + p * _mlp(m, x, a, f"{block}.ffn.ffn.1", f"{block}.ffn.ffn.3")
    return m.presence(h, tau)[..., None] * m.norm(h, a, "model.norm.norm")


# --- Operators as patched ---


def _load(module: nn.Module, t: Tensors, prefix: str) -> nn.Module:
    weights = {name.removeprefix(prefix): x for name, x in t.items() if name.startswith(prefix)}
    module.to(t["h"].device, t["h"].dtype).load_state_dict(weights)
    return module


def _run_heads(t: Tensors, inputs: Inputs) -> Tensor:
    p_BS, log_p_BJ = presence(t["h_i"], inputs.tau), log_presence(t["h_j"], inputs.tau)
    options = _masks(t, inputs, inputs.tau)
    return oattention(t["q"], t["k"], t["v"], presence_BS=p_BS, log_presence_BJ=log_p_BJ, **options)


def _record(module: nn.Module, prefix: str, layers: Tensors | None) -> None:
    """Have each linear layer and norm leave its output in `layers`, if there is one, under the name of its weights."""
    if layers is None:
        return

    def keep(name: str) -> Callable[..., None]:
        return lambda _layer, _x, out: layers.update({name: out})

    for name, layer in module.named_modules(prefix=prefix):
        if isinstance(layer, nn.Linear | nn.LayerNorm):
            layer.register_forward_hook(keep(name))


def _run_attention_module(t: Tensors, inputs: Inputs, layers: Tensors | None = None) -> Tensor:
    width = t["h"].shape[-1]
    kv_heads = t["attention.k_projection.weight"].shape[0] * inputs.heads // width
    module = OAttention(width, inputs.heads, inputs.tau, num_kv_heads=kv_heads, eps_den=inputs.eps_den)
    _record(_load(module, t, "attention."), "attention", layers)
    return module(t["h"], t.get("context"), visible=t.get("visible"))


def _run_transformer(t: Tensors, inputs: Inputs, layers: Tensors | None = None) -> Tensor:
    model = _load(OTransformer(t["h"].shape[-1], inputs.heads, BLOCKS, inputs.tau), t, "model.")
    _record(model, "model", layers)
    return model(t["h"], visible=t.get("visible"))


class Operator(NamedTuple):
    """How to run one operator. `receivers` and `sources` name the inputs that have a row per token.

    One with many layers is run by `run_layers`, which also hands out what each linear layer and norm gave, by the
    names of their weights.
    """

    name: str
    run: Callable[[Tensors, Inputs], Tensor]
    formula: Callable[[Any, dict, Inputs, float | None], Any]
    receivers: tuple[str, ...] = ("h",)
    sources: tuple[str, ...] = ()
    run_layers: Callable[[Tensors, Inputs, Tensors], Tensor] | None = None

    def stock(self, t: Tensors, inputs: Inputs) -> Tensor:
        """The stock operator."""
        return self.formula(Stock, t, inputs, None)


OPERATORS = (
    Operator("oattention", _run_heads, _heads, ("h_i", "q"), ("k", "v", "h_j")),
    Operator(
        "OAttention", _run_attention_module, _attention_module, sources=("context",), run_layers=_run_attention_module
    ),
    Operator(
        "OFFN",
        lambda t, inputs: OFFN(lambda h: _mlp(Stock, h, t, "ffn.0", "ffn.2"), inputs.tau)(t["h"]),
        lambda m, a, inputs, tau: a["h"] + m.presence(a["h"], tau)[..., None] * _mlp(m, a["h"], a, "ffn.0", "ffn.2"),
    ),
    Operator(
        "ONorm",
        lambda t, inputs: ONorm(lambda h: Stock.norm(h, t, "norm"), inputs.tau)(t["h"]),
        lambda m, a, inputs, tau: m.presence(a["h"], tau)[..., None] * m.norm(a["h"], a, "norm"),
    ),
    Operator(
        "OInject",
        lambda t, inputs: oinject(t["h"], t["u"], inputs.tau),
        lambda m, a, inputs, tau: a["h"] + m.presence(a["h"], tau)[..., None] * a["u"],
        ("h", "u"),
    ),
    Operator(
        "OStandardize",
        lambda t, inputs: ostandardize(t["x"], presence(t["h"], inputs.tau), NORM_EPS),
        lambda m, a, inputs, tau: m.standardize(a["x"], m.presence(a["h"], tau)),
        ("h", "x"),
    ),
    Operator("OTransformer", _run_transformer, _transformer, run_layers=_run_transformer),
)
