"""The O-operators held to their definitions, beside the error of torch's own kernels.

Every operator runs on the same inputs as the stock operator that it extends, and both are compared with a direct
float64 evaluation of their formula (docs/theory.md, section 2), written here in numpy and sharing no code with
`patches`. A stock operator has no presence: its formula is the O-operator's with every p = 1, so it sees zero tokens as
ordinary ones, and their heads are not zero (as behind a projection with a bias). Stock attention gets the masses of the
sources as its mask, see `_masses_as_mask`.

Shape suffixes: B batch, H query heads, K key/value heads, S receivers or tokens, J sources, D head width, E hidden
width. The token axis is always the last but one.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import (
    OFFN,
    OAttention,
    ONorm,
    OTransformer,
    log_presence,
    oattention,
    oinject,
    ostandardize,
    presence,
)

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# How many times the stock kernel's own error an operator may be off, before one unit in the last place is added.
FACTORS = {"fp32": 1.5, "bf16": 2.0, "fp16": 2.0, "fp64": 1.5}

# The paper's largest error against direct evaluation, on a GPU in FP32, BF16 and FP16; at sizes not known here.
PAPER_ERROR = 8.94e-8

# (B, H, S, J, D) at which ours is shown beside the paper's: a small one that favours small errors, and one as in use.
ANCHOR_SIZES = ((1, 1, 4, 8, 8), (1, 8, 1000, 800, 64))

_TINY_TAU = 1e-30  # a presence of 1 in every dtype, for tokens that are not zero
_EPS = 1e-5  # in norms, as torch's

Arrays = dict[str, np.ndarray]
Tensors = dict[str, Tensor]


# --- The formulas in numpy. `tau=None` stands for the stock operator: every presence is 1. ---


def reference_presence(h: np.ndarray, tau: float | None) -> np.ndarray:
    """`||h||^2 / (tau + ||h||^2)`, (..., E) -> (...); 1 everywhere without a tau."""
    n = (h * h).sum(axis=-1)
    return np.ones_like(n) if tau is None else n / (tau + n)


def reference_attention(
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


def reference_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """LayerNorm over the last dim, or RMSNorm if there is no bias; (..., E) -> (..., E)."""
    if bias is None:
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + _EPS) * weight
    centered = x - x.mean(axis=-1, keepdims=True)
    return centered / np.sqrt((centered * centered).mean(axis=-1, keepdims=True) + _EPS) * weight + bias


def reference_gelu(x: np.ndarray) -> np.ndarray:
    """`x * Phi(x)`, Phi the normal distribution function."""
    return x * (1 + np.vectorize(math.erf, otypes=[float])(x / math.sqrt(2))) / 2


def reference_standardize(x_SE: np.ndarray, p_S: np.ndarray) -> np.ndarray:
    """OStandardize, (..., S, E) -> (..., S, E); 0 where there is no mass."""
    p = p_S[..., None]
    mass = p.sum(axis=-2, keepdims=True)
    mass = np.where(mass > 0, mass, 1.0)
    x = x_SE - x_SE[..., :1, :]  # so that tokens that are all alike have a mean without rounding
    centered = x - (p * x).sum(axis=-2, keepdims=True) / mass
    var = (p * centered * centered).sum(axis=-2, keepdims=True) / mass
    return p * centered / np.sqrt(var + _EPS)


# --- Operators: each as patched, as torch has it, and as a formula, on the same named inputs. ---

_CARRIERS = ("h", "h_i", "h_j", "context")

# Which of S tokens are zero; with `none`, all are alive.
PLACEMENTS: dict[str, Callable[[int], slice]] = {
    "none": lambda count: slice(0),
    "front": lambda count: slice(0, max(1, count // 8)),
    "middle": lambda count: slice(count // 2, count // 2 + max(1, count // 8)),
    "end": lambda count: slice(count - max(1, count // 8), count),
    "everywhere": lambda count: slice(count),
}


@dataclass(frozen=True)
class Case:
    """One set of inputs, in float64 (bool for `visible`). Carriers are the arrays named h, h_i, h_j and context."""

    arrays: Arrays
    tau: float = 1.0
    heads: int = 1
    eps_den: float = 0.0
    placements: Sequence[str] = tuple(PLACEMENTS)

    def with_arrays(self, **arrays: np.ndarray) -> Case:
        """The case with some arrays changed."""
        return replace(self, arrays={**self.arrays, **arrays})

    def rounded(self, dtype: torch.dtype) -> Case:
        """The case with every number rounded to dtype, weights too."""
        return self.with_arrays(
            **{
                name: torch.from_numpy(x).to(dtype).double().numpy()
                for name, x in self.arrays.items()
                if x.dtype != bool
            }
        )


class Operator(NamedTuple):
    """How to run one operator. `receivers` and `sources` name the inputs that have a row per token."""

    name: str
    run: Callable[[Tensors, Case], Tensor]
    stock: Callable[[Tensors, Case], Tensor]
    reference: Callable[[Arrays, Case, float | None], np.ndarray]
    families: Callable[[], dict[str, list[Case]]]
    receivers: tuple[str, ...] = ("h",)
    sources: tuple[str, ...] = ()
    stock_case: Callable[[Case], Case] = lambda case: case


def _part(values: dict, prefix: str) -> dict:
    return {name.removeprefix(prefix): x for name, x in values.items() if name.startswith(prefix)}


def _load(module: nn.Module, weights: Tensors, like: Tensor) -> nn.Module:
    module.to(like.device, like.dtype).load_state_dict(weights)
    return module


def _run_oattention(t: Tensors, case: Case) -> Tensor:
    p_BS, log_p_BJ = presence(t["h_i"], case.tau), log_presence(t["h_j"], case.tau)
    masks = {name: t.get(name) for name in ("visible", "additive")}
    options: dict[str, Any] = {"presence_BS": p_BS, "log_presence_BJ": log_p_BJ, "eps_den": case.eps_den, **masks}
    return oattention(t["q"], t["k"], t["v"], **options)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, additive: Tensor | None) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    mask = visible
    if additive is not None:
        mask = additive if visible is None else additive.masked_fill(~visible, -math.inf)
    # Where nothing is visible, kernels differ: some say NaN.
    return torch.nan_to_num(F.scaled_dot_product_attention(q, k, v, attn_mask=mask))


def _stock_oattention(t: Tensors, case: Case) -> Tensor:
    return _sdpa(t["q"], t["k"], t["v"], t.get("visible"), t.get("additive"))


def _masses_as_mask(case: Case) -> Case:
    """The case with `log p_j` in `additive`: the attention that is left to the kernel.

    Masses concentrate the weights on fewer sources, which makes the kernel's own error larger: without them it would
    be the error of an easier problem.
    """
    a = case.arrays
    carrier = next(a[name] for name in ("h_j", "context", "h") if name in a)
    with np.errstate(divide="ignore"):
        log_p = np.log(reference_presence(carrier, case.tau))[:, None, None, :]
    return case.with_arrays(additive=log_p + a.get("additive", 0.0))


def _reference_oattention(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    p_BS, p_BJ = reference_presence(a["h_i"], tau), reference_presence(a["h_j"], tau)
    masks = {name: a.get(name) for name in ("visible", "additive")}
    eps_den = 0.0 if tau is None else case.eps_den
    return reference_attention(a["q"], a["k"], a["v"], p_BS, p_BJ, eps_den=eps_den, **masks)


def _split(x: Any, width: int) -> Any:
    """(B, S, H * D) -> (B, H, S, D), of tensors and arrays."""
    return x.reshape(*x.shape[:2], -1, width).swapaxes(1, 2)


def _merge(x: Any) -> Any:
    return x.swapaxes(1, 2).reshape(x.shape[0], x.shape[2], -1)


def _run_attention_module(t: Tensors, case: Case) -> Tensor:
    h, weights = t["h"], _part(t, "attention.")
    kv_heads = weights["k_projection.weight"].shape[0] * case.heads // h.shape[-1]
    module = OAttention(h.shape[-1], case.heads, case.tau, num_kv_heads=kv_heads, eps_den=case.eps_den)
    return _load(module, weights, h)(h, t.get("context"), visible=t.get("visible"))


def _stock_attention_module(t: Tensors, case: Case) -> Tensor:
    masks = t.get("visible"), t.get("additive")
    return _stock_attention(_part(t, "attention."), t["h"], t.get("context", t["h"]), *masks, case.heads)


def _stock_attention(
    w: Tensors, x: Tensor, context: Tensor, visible: Tensor | None, additive: Tensor | None, heads: int
) -> Tensor:
    q, k, v = (
        _split(F.linear(source, w[f"{name}_projection.weight"], w[f"{name}_projection.bias"]), x.shape[-1] // heads)
        for name, source in (("q", x), ("k", context), ("v", context))
    )
    return F.linear(_merge(_sdpa(q, k, v, visible, additive)), w["out_projection.weight"])


def _reference_attention_module(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    h, context = a["h"], a.get("context", a["h"])
    p_BS, p_BJ = reference_presence(h, tau), reference_presence(context, tau)
    eps_den = 0.0 if tau is None else case.eps_den
    options: dict[str, Any] = {"visible": a.get("visible"), "additive": a.get("additive"), "eps_den": eps_den}
    return _reference_projected(_part(a, "attention."), h, context, p_BS, p_BJ, case.heads, **options)


def _reference_projected(
    w: Arrays, x: np.ndarray, context: np.ndarray, p_BS: np.ndarray, p_BJ: np.ndarray, heads: int, **options: Any
) -> np.ndarray:
    q, k, v = (
        _split(source @ w[f"{name}_projection.weight"].T + w[f"{name}_projection.bias"], x.shape[-1] // heads)
        for name, source in (("q", x), ("k", context), ("v", context))
    )
    return _merge(reference_attention(q, k, v, p_BS, p_BJ, **options)) @ w["out_projection.weight"].T


def _ffn(weights: Tensors, like: Tensor) -> nn.Module:
    hidden, width = weights["0.weight"].shape
    return _load(nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width)), weights, like)


def _run_offn(t: Tensors, case: Case) -> Tensor:
    return OFFN(_ffn(_part(t, "ffn."), t["h"]), case.tau)(t["h"])


def _stock_offn(t: Tensors, case: Case) -> Tensor:
    return t["h"] + _ffn(_part(t, "ffn."), t["h"])(t["h"])


def _reference_offn(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    h, w = a["h"], _part(a, "ffn.")
    hidden = reference_gelu(h @ w["0.weight"].T + w["0.bias"])
    return h + reference_presence(h, tau)[..., None] * (hidden @ w["2.weight"].T + w["2.bias"])


def _stock_norm(t: Tensors, case: Case) -> Tensor:
    h, weight, bias = t["h"], t["norm.weight"], t.get("norm.bias")
    if bias is None:
        return F.rms_norm(h, weight.shape, weight, _EPS)
    return F.layer_norm(h, weight.shape, weight, bias, _EPS)


def _run_onorm(t: Tensors, case: Case) -> Tensor:
    return ONorm(lambda h: _stock_norm({**t, "h": h}, case), case.tau)(t["h"])


def _reference_onorm(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    return reference_presence(a["h"], tau)[..., None] * reference_norm(a["h"], a["norm.weight"], a.get("norm.bias"))


def _run_oinject(t: Tensors, case: Case) -> Tensor:
    return oinject(t["h"], t["u"], case.tau)


def _stock_inject(t: Tensors, case: Case) -> Tensor:
    return t["h"] + t["u"]


def _reference_oinject(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    return a["h"] + reference_presence(a["h"], tau)[..., None] * a["u"]


def _run_ostandardize(t: Tensors, case: Case) -> Tensor:
    return ostandardize(t["x"], presence(t["h"], case.tau), _EPS)


def _stock_standardize(t: Tensors, case: Case) -> Tensor:
    """Torch's layer norm over the tokens: the same moments, without presence."""
    x_ES = t["x"].transpose(-1, -2)
    return F.layer_norm(x_ES, x_ES.shape[-1:], eps=_EPS).transpose(-1, -2)


def _reference_ostandardize(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    return reference_standardize(a["x"], reference_presence(a["h"], tau))


_BLOCKS = 2


def _run_otransformer(t: Tensors, case: Case) -> Tensor:
    h = t["h"]
    return _load(OTransformer(h.shape[-1], case.heads, _BLOCKS, case.tau), _part(t, "model."), h)(
        h, visible=t.get("visible")
    )


def _stock_transformer(t: Tensors, case: Case) -> Tensor:
    h, model = t["h"], _part(t, "model.")

    def norm(h: Tensor, w: Tensors) -> Tensor:
        return F.layer_norm(h, h.shape[-1:], w["weight"], w["bias"], _EPS)

    for i in range(_BLOCKS):
        w = _part(model, f"blocks.{i}.")
        x = norm(h, _part(w, "norm."))
        h = h + _stock_attention(_part(w, "attention."), x, x, t.get("visible"), None, case.heads)
        hidden = F.linear(norm(h, _part(w, "ffn.ffn.0.norm.")), w["ffn.ffn.1.weight"], w["ffn.ffn.1.bias"])
        h = h + F.linear(F.gelu(hidden), w["ffn.ffn.3.weight"], w["ffn.ffn.3.bias"])
    return norm(h, _part(model, "norm.norm."))


def _reference_otransformer(a: Arrays, case: Case, tau: float | None) -> np.ndarray:
    h, model = a["h"], _part(a, "model.")

    def norm(h: np.ndarray, w: Arrays) -> np.ndarray:
        return reference_norm(h, w["weight"], w["bias"])

    for i in range(_BLOCKS):
        w = _part(model, f"blocks.{i}.")
        p, x = reference_presence(h, tau), norm(h, _part(w, "norm."))
        h = h + _reference_projected(_part(w, "attention."), x, x, p, p, case.heads, visible=a.get("visible"))
        p = reference_presence(h, tau)[..., None]
        x = p * norm(h, _part(w, "ffn.ffn.0.norm."))
        hidden = reference_gelu(x @ w["ffn.ffn.1.weight"].T + w["ffn.ffn.1.bias"])
        h = h + p * (hidden @ w["ffn.ffn.3.weight"].T + w["ffn.ffn.3.bias"])
    return reference_presence(h, tau)[..., None] * norm(h, _part(model, "norm.norm."))


# --- Inputs ---

# In front of which of S tokens (S: behind the last) a zero token is inserted.
INSERTIONS: dict[str, Callable[[int], list[int]]] = {
    "front": lambda count: [0] * 3,
    "middle": lambda count: [count // 2] * 3,
    "end": lambda count: [count] * 3,
    "everywhere": lambda count: list(range(count + 1)),
}

# (B, H, K, S, J, D); self-attention where S = J.
ATTENTION_SIZES = {
    "self": [(2, 2, 2, 24, 24, 16), (1, 4, 4, 130, 130, 32)],
    "cross": [(2, 2, 2, 24, 30, 16), (1, 2, 2, 7, 300, 64), (1, 2, 2, 300, 7, 8)],
    "masked": [(2, 2, 2, 24, 24, 16), (1, 2, 2, 64, 600, 32)],
    "grouped heads": [(2, 4, 2, 24, 30, 16), (1, 6, 1, 40, 40, 32)],
    "one token": [(1, 2, 2, 1, 1, 16), (8, 2, 2, 1, 1, 16), (1, 2, 2, 1, 50, 16), (1, 2, 2, 50, 1, 16)],
    "thousands": [(1, 1, 1, 2000, 2000, 8), (1, 1, 1, 2500, 40, 16), (1, 2, 2, 40, 5000, 32)],
}

# (B, S, E)
TOKEN_SIZES = {"few tokens": (2, 24, 32), "one token": (1, 1, 16), "thousands": (1, 2500, 16)}


def _carrier(rng: np.random.Generator, batch: int, tokens: int, width: int) -> np.ndarray:
    """Tokens whose lengths spread over two decades: with tau = 1, presences from about 0.01 to 0.99."""
    h = rng.standard_normal((batch, tokens, width)) / math.sqrt(width)
    return h * 10 ** rng.uniform(-1, 1, (batch, tokens, 1))


def _of_length(rng: np.random.Generator, squared: np.ndarray) -> np.ndarray:
    """Tokens of width 8 with these ||h||^2."""
    h = rng.standard_normal((*squared.shape, 8))
    return h * np.sqrt(squared / (h * h).sum(-1))[..., None]


def _visible(rng: np.random.Generator, receivers: int, sources: int) -> np.ndarray:
    """A random mask in which everyone sees somebody."""
    visible = rng.random((receivers, sources)) < 0.6
    visible[:, 0] = True
    return visible


def _weights(rng: np.random.Generator, module: nn.Module, prefix: str) -> Arrays:
    """Random weights for a module's state dict; biases are not zero and norms are affine."""

    def draw(name: str, shape: torch.Size) -> np.ndarray:
        x = rng.standard_normal(shape)
        if len(shape) == 2:
            return x / math.sqrt(shape[1])
        return 0.3 * x if name.endswith("bias") else 1 + 0.2 * x

    return {prefix + name: draw(name, w.shape) for name, w in module.state_dict().items()}


def _with_zeros(case: Case, placement: str) -> Case:
    """The case with zero tokens there in all its carriers."""
    zeroed = {name: case.arrays[name].copy() for name in _CARRIERS if name in case.arrays}
    for h in zeroed.values():
        h[:, PLACEMENTS[placement](h.shape[1])] = 0
    return case.with_arrays(**zeroed)


def _with_inserted(operator: Operator, case: Case, place: str, *, receivers: bool) -> tuple[Case, np.ndarray]:
    """The case with zero tokens inserted among its sources, and its receivers if asked to; and where old ones are now.

    Behind a zero carrier there are heads and values that are not zero, and it is visible to some.
    """
    rng = np.random.default_rng(1)
    arrays = dict(case.arrays)

    def insert(name: str, axis: int) -> None:
        x = arrays[name]
        at = INSERTIONS[place](x.shape[axis])
        shape = list(x.shape)
        shape[axis] = len(at)
        new = np.zeros(shape) if name in _CARRIERS else rng.standard_normal(shape)
        arrays[name] = np.insert(x, at, new > 0 if x.dtype == bool else new, axis=axis)

    for name in (*operator.sources, *(operator.receivers if receivers else ())):
        if name in arrays:
            insert(name, -2)
    for name in ("visible", "additive"):
        if name in arrays:
            insert(name, -1)
            if receivers:
                insert(name, -2)
    count = case.arrays[operator.receivers[0]].shape[-2]
    old = np.ones(count, dtype=bool)
    if receivers:
        old = np.insert(old, INSERTIONS[place](count), False)
    return replace(case, arrays=arrays), old


def _attention_case(rng: np.random.Generator, sizes: tuple[int, ...]) -> Case:
    batch, heads, kv_heads, receivers, sources, width = sizes
    h_i = _carrier(rng, batch, receivers, 8)
    return Case(
        {
            "q": rng.standard_normal((batch, heads, receivers, width)),
            "k": rng.standard_normal((batch, kv_heads, sources, width)),
            "v": rng.standard_normal((batch, kv_heads, sources, width)),
            "h_i": h_i,
            "h_j": h_i if receivers == sources else _carrier(rng, batch, sources, 8),
        },
        placements=_few_where_large(receivers * sources),
    )


def _few_where_large(pairs: int) -> Sequence[str]:
    """All placements; fewer where the exact value takes seconds."""
    return ("none", "middle") if pairs > 10**6 else tuple(PLACEMENTS)


def _oattention_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(0)
    families = {name: [_attention_case(rng, sizes) for sizes in many] for name, many in ATTENTION_SIZES.items()}
    masked = []
    for case in families["masked"]:
        heads, receivers, sources = case.arrays["q"].shape[1], case.arrays["q"].shape[2], case.arrays["k"].shape[2]
        visible = _visible(rng, receivers, sources)
        additive = rng.standard_normal((1, heads, receivers, sources))  # without the 1, torch takes another kernel
        additive[..., 1::5] = -math.inf
        masked += [case.with_arrays(visible=visible), case.with_arrays(additive=additive)]
        masked += [case.with_arrays(visible=visible, additive=additive)]
    small = [case for name in ("self", "cross", "grouped heads") for case in families[name]]
    constant = [replace(case, eps_den=eps_den) for case in [*small, *masked] for eps_den in (1e-6, 0.5)]
    return {**families, "masked": masked, "eps_den > 0": constant}


def _attention_module_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(1)
    families: dict[str, list[Case]] = {}
    for name, many in ATTENTION_SIZES.items():
        for batch, heads, kv_heads, receivers, sources, width in many[1:] if name == "thousands" else many:
            module = OAttention(heads * width, heads, 1.0, num_kv_heads=kv_heads)
            arrays = {"h": _carrier(rng, batch, receivers, heads * width), **_weights(rng, module, "attention.")}
            if receivers != sources:
                arrays["context"] = _carrier(rng, batch, sources, heads * width)
            if name == "masked":
                arrays["visible"] = _visible(rng, receivers, sources)
            families.setdefault(name, []).append(Case(arrays, heads=heads))
    return families


def _transformer_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(2)
    families: dict[str, list[Case]] = {}
    for name in ("self", "masked", "one token", "thousands"):
        for batch, heads, _, tokens, sources, width in ATTENTION_SIZES[name]:
            if tokens != sources:
                continue
            weights = _weights(rng, OTransformer(heads * width, heads, _BLOCKS), "model.")
            arrays = {"h": _carrier(rng, batch, tokens, heads * width), **weights}
            if name == "masked":
                arrays["visible"] = _visible(rng, tokens, tokens)
            case = Case(arrays, heads=heads, placements=_few_where_large(tokens**2))
            families.setdefault(name, []).append(case)
    return families


def _token_families(draw: Callable[[np.random.Generator, tuple[int, ...]], list[Arrays]]) -> dict[str, list[Case]]:
    """Cases of a carrier h, with the other inputs drawn for its shape."""
    rng = np.random.default_rng(3)
    return {
        name: [Case({"h": _carrier(rng, *sizes), **more}) for more in draw(rng, sizes)]
        for name, sizes in TOKEN_SIZES.items()
    }


def _ffn_weights(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[Arrays]:
    width = sizes[-1]
    return [_weights(rng, nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)), "ffn.")]


def _norm_weights(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[Arrays]:
    """An affine LayerNorm, and an RMSNorm."""
    return [_weights(rng, nn.LayerNorm(sizes[-1]), "norm."), _weights(rng, nn.RMSNorm(sizes[-1]), "norm.")]


def _information(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[Arrays]:
    return [{"u": rng.standard_normal(sizes)}]


def _columns(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[Arrays]:
    """Columns about zero, and columns with a mean as large as their spread."""
    return [{"x": rng.standard_normal(sizes)}, {"x": 1 + rng.standard_normal(sizes)}]


OPERATORS = (
    Operator(
        "oattention",
        _run_oattention,
        _stock_oattention,
        _reference_oattention,
        _oattention_families,
        ("h_i", "q"),
        ("k", "v", "h_j"),
        _masses_as_mask,
    ),
    Operator(
        "OAttention",
        _run_attention_module,
        _stock_attention_module,
        _reference_attention_module,
        _attention_module_families,
        sources=("context",),
        stock_case=_masses_as_mask,
    ),
    Operator("OFFN", _run_offn, _stock_offn, _reference_offn, lambda: _token_families(_ffn_weights)),
    Operator("ONorm", _run_onorm, _stock_norm, _reference_onorm, lambda: _token_families(_norm_weights)),
    Operator(
        "OInject",
        _run_oinject,
        _stock_inject,
        _reference_oinject,
        lambda: _token_families(_information),
        ("h", "u"),
    ),
    Operator(
        "OStandardize",
        _run_ostandardize,
        _stock_standardize,
        _reference_ostandardize,
        lambda: _token_families(_columns),
        ("h", "x"),
    ),
    Operator("OTransformer", _run_otransformer, _stock_transformer, _reference_otransformer, _transformer_families),
)


# --- Checks ---


class Result(NamedTuple):
    """What one case showed.

    `stock_error` is the largest of its family, the cases of one kind of shape: that of one case is the largest of few
    roundings, and can by luck be nothing. `unit` is a unit in the last place of the largest output.
    """

    error: float
    stock_error: float
    unit: float = 0.0
    bit_equal: bool | None = None
    error_unrounded: float | None = None
    stock_error_unrounded: float | None = None


class Run:
    """An operator and its stock operator on one case, rounded to a dtype, and their exact values.

    With `host`, tau is so small that every live presence is 1, and the exact value is the stock operator's.
    """

    def __init__(self, operator: Operator, case: Case, dtype: torch.dtype, device: str, *, host: bool = False) -> None:
        self.operator, self.dtype, self.device = operator, dtype, device
        self.tau = None if host else case.tau
        self.unrounded = replace(case, tau=_TINY_TAU) if host else case
        self.unrounded_stock = case if host else operator.stock_case(case)
        self.case, self.stock_case = self.unrounded.rounded(dtype), self.unrounded_stock.rounded(dtype)
        self.stock_error = math.nan  # set by `_family`

    def computed(self, function: Callable[[Tensors, Case], Tensor], case: Case) -> np.ndarray:
        """What a function of tensors gives on a case, in this dtype and on this device."""
        tensors = {
            name: torch.from_numpy(x).to(self.device, torch.bool if x.dtype == bool else self.dtype)
            for name, x in case.arrays.items()
        }
        with torch.inference_mode():
            return function(tensors, case).double().cpu().numpy()

    def _exact(self, case: Case, tau: float | None) -> np.ndarray:
        """The formula in float64; for float64 itself in longdouble, which is wider on most CPUs."""
        wide = np.longdouble if self.dtype == torch.float64 else np.float64
        arrays = {name: x if x.dtype == bool else x.astype(wide) for name, x in case.arrays.items()}
        return self.operator.reference(arrays, case, tau)

    @cached_property
    def out(self) -> np.ndarray:
        """What the operator gives."""
        return self.computed(self.operator.run, self.case)

    @cached_property
    def stock_out(self) -> np.ndarray:
        """What the stock operator gives."""
        return self.computed(self.operator.stock, self.stock_case)

    def own_stock_error(self) -> float:
        """Of the stock operator, against its own formula."""
        exact = self.exact if self.tau is None else self._exact(self.stock_case, None)
        return _largest(self.stock_out - exact)

    @cached_property
    def exact(self) -> np.ndarray:
        """What the formula gives."""
        return self._exact(self.case, self.tau)

    @property
    def unit(self) -> float:
        """A unit in the last place of the largest output."""
        largest = _largest(self.exact)
        return torch.finfo(self.dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0

    def against_formula(self) -> Result:
        """The operator against its formula, on rounded inputs and, in half precision, on unrounded ones too."""
        bit_equal = None if self.tau is not None else np.array_equal(self.out, self.stock_out)
        result = Result(_largest(self.out - self.exact), self.stock_error, self.unit, bit_equal)
        if torch.finfo(self.dtype).bits > 16:
            return result
        return result._replace(
            error_unrounded=_largest(self.out - self._exact(self.unrounded, self.tau)),
            stock_error_unrounded=_largest(self.stock_out - self._exact(self.unrounded_stock, None)),
        )

    def must_be_zero(self, values: np.ndarray) -> Result:
        """Values that are 0 in exact arithmetic and in every dtype."""
        return Result(_largest(values), self.stock_error)

    def unchanged(self, old: np.ndarray) -> Result:
        """The outputs of the same tokens after an insertion."""
        return Result(_largest(old - self.out), self.stock_error, self.unit, np.array_equal(old, self.out))


def _family(runs: list[Run]) -> list[Run]:
    """Runs of one family, each given the largest error of the stock operator in it."""
    stock_error = float(np.max([run.own_stock_error() for run in runs]))
    for run in runs:
        run.stock_error = stock_error
    return runs


def _largest(x: np.ndarray) -> float:
    """The largest size of a value, NaN if one is NaN."""
    return float(np.abs(x).max(initial=0.0))


def _tokens(x: np.ndarray) -> np.ndarray:
    """(B, S, ...) of (B, S, E) or of heads (B, H, S, D)."""
    return x.swapaxes(1, 2) if x.ndim == 4 else x


def _is_self(case: Case) -> bool:
    a = case.arrays
    return "context" not in a and ("k" not in a or a["k"].shape[2] == a["q"].shape[2])


def _without_support(case: Case) -> Iterator[Case]:
    """Live receivers that see no source with mass: zero sources, a closed mask, or live sources behind one."""
    a = case.arrays
    if "x" in a:
        yield case.with_arrays(h=np.zeros_like(a["h"]))
        return
    carrier = next(name for name in ("h_j", "context", "h") if name in a)
    if carrier != "h":
        yield case.with_arrays(**{carrier: np.zeros_like(a[carrier])})
    receivers, sources = a["h_i" if "h_i" in a else "h"].shape[1], a[carrier].shape[1]
    closed = np.zeros((receivers, sources), dtype=bool)
    yield case.with_arrays(visible=closed)
    if "additive" in a or "q" in a:
        yield case.with_arrays(additive=np.full(closed.shape, -np.inf))
    if carrier != "h":
        h = a[carrier].copy()
        h[:, ::2] = 0
        closed[:, ::2] = True
        yield case.with_arrays(visible=closed, **{carrier: h})


def _with_other_null_sources(case: Case) -> Case:
    """The case with other heads behind its zero sources."""
    rng = np.random.default_rng(2)
    null = (case.arrays["h_j"] == 0).all(axis=-1)[:, None, :, None]
    return case.with_arrays(
        **{name: np.where(null, 3 * rng.standard_normal(x.shape), x) for name, x in case.arrays.items() if name in "kv"}
    )


def _gate_alone(operator: Operator) -> Case | None:
    """A case in which only the gate can round: presences just above 0.5, and 1.95 to be gated.

    The products lie just below 1, so a gate rounded to half precision is off by up to a unit in the last place, and
    the product rounded once by half a unit.
    """
    rng, tau, gated = np.random.default_rng(4), 1e-6, 1.95
    h = _of_length(rng, tau * rng.uniform(1.01, 1.04, (1, 400)))
    zero, full = np.zeros((1, 1, 400, 8)), np.full((1, 1, 400, 8), gated)
    matrix, nothing, bias = zero[0, 0, :8], zero[0, 0, 0], full[0, 0, 0]
    ffn = {"ffn.0.weight": matrix, "ffn.0.bias": nothing, "ffn.2.weight": matrix, "ffn.2.bias": bias}
    inputs: dict[str, Arrays] = {
        "oattention": {"q": zero, "k": zero[:, :, :8], "v": full[:, :, :8], "h_i": h, "h_j": h[:, :8]},
        "OFFN": {"h": h, **ffn},
        "ONorm": {"h": h, "norm.weight": nothing, "norm.bias": bias},
        "OInject": {"h": h, "u": full[0]},
    }
    return Case(inputs[operator.name], tau) if operator.name in inputs else None


def _bias_alone() -> Case:
    """Pairs of sources with equal scores and presences about 1e-10, in favour of the first by up to a factor of 4.

    log p is about -23 there: rounded to half precision, it would be off by several per cent of a weight.
    """
    rng, tau, pairs = np.random.default_rng(5), 1e4, 400
    h_j = _of_length(rng, rng.uniform(0.5, 2, (pairs, 2)) * 1e-6)
    h_i = _of_length(rng, np.full((pairs, 1), 1e8))
    zero = np.zeros((pairs, 1, 2, 8))
    v = zero + np.array([1.0, 0.0])[:, None]
    return Case({"q": zero[:, :, :1], "k": zero, "v": v, "h_i": h_i, "h_j": h_j}, tau)


def _checks(operator: Operator, dtype: torch.dtype, device: str) -> Iterator[tuple[str, bool, Iterable[Result]]]:
    """Each property, whether it holds exactly, and a result for each of its cases."""

    def run(case: Case, **options: bool) -> Run:
        return Run(operator, case, dtype, device, **options)

    alive: list[list[Run]] = []
    null_receivers, null_sources = [], []
    carrier = operator.receivers[0]
    for family, cases in operator.families().items():
        placed = [(placement, run(_with_zeros(case, placement))) for case in cases for placement in case.placements]
        runs = _family([one for _, one in placed])
        yield f"formula, {family}", False, [one.against_formula() for one in runs]
        alive.append([one for placement, one in placed if placement == "none"])
        for one in (one for placement, one in placed if placement != "none"):
            null = (one.case.arrays[carrier] == 0).all(axis=-1)
            null_receivers.append(one.must_be_zero(_tokens(one.out)[null]))
            if "h_j" in one.case.arrays:
                other = run(_with_other_null_sources(one.unrounded))
                null_sources.append(one.unchanged(other.out))
    yield "null receiver" if operator.sources else "zero token", True, null_receivers
    if null_sources:
        yield "null source changed", True, null_sources

    # Zeros behind all others move nothing within the kernel's blocks: most outputs are then equal bit for bit.
    at_source: dict[str, list[Result]] = {"at end": [], "elsewhere": []}
    old_tokens: dict[str, list[Result]] = {"at end": [], "elsewhere": []}
    new_tokens = []
    for one, place in itertools.product(itertools.chain(*alive), INSERTIONS):
        kind = "at end" if place == "end" else "elsewhere"
        if any(name in one.case.arrays for name in operator.sources):
            inserted, _ = _with_inserted(operator, one.unrounded, place, receivers=False)
            at_source[kind].append(one.unchanged(run(inserted).out))
        if _is_self(one.case):
            inserted, old = _with_inserted(operator, one.unrounded, place, receivers=True)
            out = run(inserted).out
            old_tokens[kind].append(one.unchanged(out[..., old, :]))
            new_tokens.append(one.must_be_zero(out[..., ~old, :]))
    for kind, results in at_source.items():
        if results:
            yield f"null source {kind}", False, results
    for kind, results in old_tokens.items():
        yield f"insertion {kind}", False, results
    yield "inserted tokens", True, new_tokens

    if operator.sources or operator.name == "OStandardize":
        empty = ((one, run(case)) for one in itertools.chain(*alive) for case in _without_support(one.unrounded))
        yield "empty support", True, [one.must_be_zero(other.out) for one, other in empty]
    hosts = [[run(one.unrounded, host=True) for one in runs if one.case.eps_den == 0] for runs in alive]
    yield "tau -> 0", False, [one.against_formula() for runs in hosts if runs for one in _family(runs)]

    if torch.finfo(dtype).bits == 16:
        gate_alone = _gate_alone(operator)
        if gate_alone is not None:
            yield "gate in float32", False, [one.against_formula() for one in _family([run(gate_alone)])]
        if operator.name == "oattention":
            yield "bias in float32", False, [one.against_formula() for one in _family([run(_bias_alone())])]


def _row(operator: str, dtype: str, name: str, exact: bool, results: Sequence[Result]) -> dict[str, Any]:
    """A property's row; it has passed if every case keeps its bar."""
    errors = np.array([result.error for result in results])
    bars = np.array([0.0 if exact else FACTORS[dtype] * result.stock_error + result.unit for result in results])
    equal = [result.bit_equal for result in results if result.bit_equal is not None]

    def largest(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.max(known)) if known else None

    return {
        "operator": operator,
        "dtype": dtype,
        "property": name,
        "cases": len(results),
        "max_error": largest(errors),
        "stock_error": largest(result.stock_error for result in results),
        "passed": bool((errors <= bars).all()),
        "bar": float(bars[errors.argmax()]),
        "bit_equal": sum(equal) if equal else None,
        "max_error_unrounded": largest(result.error_unrounded for result in results),
        "stock_error_unrounded": largest(result.stock_error_unrounded for result in results),
    }


# --- The paper's figure ---


def _direct(q: Tensor, k: Tensor, v: Tensor, h_i: Tensor | None, h_j: Tensor | None, tau: float) -> Tensor:
    """The formula as it stands, in the dtype of its inputs; without carriers, the stock operator's."""
    weight = torch.exp(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1]))
    if h_j is not None:
        n = h_j.square().sum(-1)
        weight = weight * (n / (tau + n))[:, None, None, :]
    out = weight @ v / weight.sum(-1, keepdim=True)
    if h_i is not None:
        n = h_i.square().sum(-1)
        out = out * (n / (tau + n))[:, None, :, None]
    return out


def _anchors(dtype: str, device: str) -> Iterator[dict[str, Any]]:
    """OAttention against both kinds of direct evaluation, at the sizes named; shown, and not judged."""
    operator, rng = OPERATORS[0], np.random.default_rng(6)
    for batch, heads, receivers, sources, width in ANCHOR_SIZES:
        case = _attention_case(rng, (batch, heads, heads, receivers, sources, width))
        run = Run(operator, case, DTYPES[dtype], device)
        plain = Run(operator, case, DTYPES[dtype], device, host=True)

        def direct(t: Tensors, case: Case, names: Sequence[str | None]) -> Tensor:
            h_i, h_j = (None if name is None else t[name] for name in names)
            return _direct(t["q"], t["k"], t["v"], h_i, h_j, case.tau)

        same = run.computed(lambda t, case: direct(t, case, ("h_i", "h_j")), run.case)
        same_plain = run.computed(lambda t, case: direct(t, case, (None, None)), run.case)
        size = ",".join(map(str, (batch, heads, receivers, sources, width)))
        for kind, ours, stock in (
            ("float64", _largest(run.out - run.exact), plain.own_stock_error()),
            (dtype, _largest(run.out - same), _largest(plain.stock_out - same_plain)),
        ):
            row = _row(operator.name, dtype, f"anchor ({size}) against {kind}", False, [Result(ours, stock)])
            yield row | {"passed": None, "bar": None, "paper_error": PAPER_ERROR}


def parse_dtypes(text: str) -> list[str]:
    """The names in a comma-separated list. Raises `ValueError` for one that is not in `DTYPES`."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in DTYPES:
            raise ValueError(f"unknown dtype {name!r}; there are: {', '.join(DTYPES)}")
    return list(dict.fromkeys(names))


def check_kernels(dtypes: Sequence[str], device: str) -> None:
    """Raise `ValueError` if torch lacks a kernel that the checks need in one of these dtypes."""
    for name in dtypes:
        x = torch.ones(1, 1, 2, 8, device=device, dtype=DTYPES[name])
        kernels: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {
            "scaled_dot_product_attention": (F.scaled_dot_product_attention, (x, x, x)),
            "layer_norm": (F.layer_norm, (x, (8,))),
            "linear": (F.linear, (x, x[0, 0])),
        }
        for kernel, (function, arguments) in kernels.items():
            try:
                function(*arguments)
            except RuntimeError as error:
                raise ValueError(f"torch has no {kernel} in {name} on this {device}: {error}") from error


def check_contracts(
    dtypes: Sequence[str], device: str = "cpu", *, on_step: Callable[[str], None] | None = None
) -> pd.DataFrame:
    """Hold every operator to its definition.

    A case keeps its bar if its error is at most `FACTORS[dtype]` times the stock kernel's largest error on the inputs
    of its family (the cases of one kind of shape, zero tokens at all places), plus one unit in the last place of its
    largest output. Errors are absolute, and the largest of all outputs. Exact properties (null receivers and inserted
    tokens, empty support, other heads behind a zero source) have the bar 0. Insertions compare outputs before and
    after; everything else is against the formula, evaluated in float64 on the inputs as rounded to the dtype, and in
    longdouble for float64 itself.

    The stock kernel of the two OAttentions gets `log p_j` as its mask and no gate; that of the others, and everybody's
    where tau -> 0, knows no presence. A stock OTransformer, whose activations differ, is thus only a like problem.

    Args:
        dtypes: Names out of `DTYPES`.
        device: `cpu` or `cuda`.
        on_step: Called with a line of text before each operator and dtype.

    Returns:
        A row per operator, dtype and property: `operator`, `dtype`, `property`, `cases`, `max_error`, `stock_error`,
        `passed` (None for the rows of property `anchor ...`, which stand beside the paper's figure), `bar` (of the case
        with the largest error), `bit_equal` (how many cases were equal bit for bit: after an insertion to before it,
        for tau -> 0 to the stock operator), `max_error_unrounded` and `stock_error_unrounded` (half precision against
        the formula on inputs that were not rounded) and `paper_error`.
    """
    check_kernels(dtypes, device)
    rows = []
    for dtype in dtypes:
        for operator in OPERATORS:
            if on_step is not None:
                on_step(f"{operator.name} in {dtype}")
            for name, exact, results in _checks(operator, DTYPES[dtype], device):
                rows.append(_row(operator.name, dtype, name, exact, list(results)) | {"paper_error": None})
        if dtype != "fp64":  # the paper has none
            rows += _anchors(dtype, device)
    return pd.DataFrame(rows, dtype=object)  # object: None stays None


def table_cells(table: pd.DataFrame) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Title, header and cells of one table per dtype, and of one with the paper's figure."""

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}" if value else "0"

    verdicts = {True: "yes", False: "NO"}
    tables = {}
    judged = table[table["passed"].notna()]
    for dtype, part in judged.groupby("dtype", sort=False):
        half = part["max_error_unrounded"].notna().any()
        header = ["operator", "property", "cases", "error", "stock", *(["unrounded"] if half else []), "equal", "ok"]
        cells = []
        for row in part.itertuples(index=False):
            equal = "" if row.bit_equal is None else str(row.bit_equal)
            unrounded = [number(row.max_error_unrounded)] if half else []
            numbers = [number(row.max_error), number(row.stock_error), *unrounded]
            cells.append([row.operator, row.property, str(row.cases), *numbers, equal, verdicts[row.passed]])
        tables[f"{dtype}: largest errors; bar {FACTORS[str(dtype)]:g} stock + 1 ulp, or 0"] = header, cells
    anchors = table[table["passed"].isna()]
    if len(anchors):
        cells = [
            [
                r.dtype,
                r.property.removeprefix("anchor "),
                number(r.max_error),
                number(r.stock_error),
                f"{r.paper_error:g}",
            ]
            for r in anchors.itertuples(index=False)
        ]
        title = "OAttention beside the paper's figure, at (B,H,S,J,D); not judged"
        tables[title] = ["dtype", "direct evaluation", "error", "stock", "paper"], cells
    return tables


def notes() -> str:
    """What a reader of the tables has to know."""
    return (
        "error: largest absolute error against the formula in float64 (in fp64: in longdouble), on inputs rounded to "
        "the dtype; of insertions: largest change of an old output. stock: the error of torch's own kernel on the same "
        "inputs, of attention with log p as its mask. unrounded: against the formula on inputs not rounded. equal: "
        "cases equal bit for bit, of insertions to before, of tau -> 0 to the stock kernel. paper: its largest error "
        "in FP32, BF16 and FP16, on a GPU, at sizes not known here."
    )
