"""The inputs on which the operators are held to their contracts: shapes, masks, zero tokens, and where they go.

Heads behind zero tokens are not zero, as behind a projection with a bias. Shape suffixes are those of `references`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn

from ..patches import OAttention, OTransformer
from .references import BLOCKS, CARRIERS, Arrays, Inputs, Operator

# Which of S tokens are zero; with `none`, all are alive.
PLACEMENTS: dict[str, Callable[[int], slice]] = {
    "none": lambda count: slice(0),
    "front": lambda count: slice(0, max(1, count // 8)),
    "middle": lambda count: slice(count // 2, count // 2 + max(1, count // 8)),
    "end": lambda count: slice(count - max(1, count // 8), count),
    "everywhere": lambda count: slice(count),
}

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
    "thousands": [(1, 1, 1, 1100, 1100, 8), (1, 1, 1, 2500, 40, 16), (1, 2, 2, 40, 5000, 32)],
}

# (B, S, E)
TOKEN_SIZES = {"few tokens": (2, 24, 32), "one token": (1, 1, 16), "thousands": (1, 2500, 16)}

GATED = 1.953125  # in `gate_alone`; in every dtype

# Of the random draws.
DRAWN_ATTENTION, DRAWN_TOKENS = (2, 2, 2, 24, 24, 16), (2, 24, 32)


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


def with_zeros(inputs: Inputs, placement: str) -> Inputs:
    """The inputs with zero tokens there in all their carriers."""
    zeroed = {name: inputs.arrays[name].copy() for name in CARRIERS if name in inputs.arrays}
    for h in zeroed.values():
        h[:, PLACEMENTS[placement](h.shape[1])] = 0
    return inputs.with_arrays(**zeroed)


def with_inserted(operator: Operator, inputs: Inputs, place: str, *, receivers: bool) -> Inputs:
    """The inputs with zero tokens inserted among the sources, and the receivers if asked to.

    Behind a zero carrier there are heads and values that are not zero, and it is visible to some.
    """
    rng = np.random.default_rng(1)
    arrays = dict(inputs.arrays)
    axes = [(name, -2) for name in (*operator.sources, *(operator.receivers if receivers else ()))]
    axes += [(name, axis) for name in ("visible", "additive") for axis in ((-1, -2) if receivers else (-1,))]
    for name, axis in axes:
        if name in arrays:
            x = arrays[name]
            at = INSERTIONS[place](x.shape[axis])
            shape = list(x.shape)
            shape[axis] = len(at)
            new = np.zeros(shape) if name in CARRIERS else rng.standard_normal(shape)
            arrays[name] = np.insert(x, at, new > 0 if x.dtype == bool else new, axis=axis)
    return replace(inputs, arrays=arrays)


def attention_inputs(rng: np.random.Generator, sizes: Sequence[int]) -> Inputs:
    """Heads, and the carriers of their tokens, of these `ATTENTION_SIZES`."""
    batch, heads, kv_heads, receivers, sources, width = sizes
    h_i = _carrier(rng, batch, receivers, 8)
    arrays = {
        "q": rng.standard_normal((batch, heads, receivers, width)),
        "k": rng.standard_normal((batch, kv_heads, sources, width)),
        "v": rng.standard_normal((batch, kv_heads, sources, width)),
        "h_i": h_i,
        "h_j": h_i if receivers == sources else _carrier(rng, batch, sources, 8),
    }
    return Inputs(arrays, large=receivers * sources > 10**6)


def _oattention_families() -> dict[str, list[Inputs]]:
    rng = np.random.default_rng(0)
    families = {name: [attention_inputs(rng, sizes) for sizes in many] for name, many in ATTENTION_SIZES.items()}
    masked = []
    for inputs in families["masked"]:
        _, heads, receivers, _ = inputs.arrays["q"].shape
        sources = inputs.arrays["k"].shape[2]
        visible = _visible(rng, receivers, sources)
        additive = rng.standard_normal((1, heads, receivers, sources))  # without the 1, torch takes another kernel
        additive[..., 1::5] = -math.inf
        masks = {"visible": visible}, {"additive": additive}, {"visible": visible, "additive": additive}
        masked += [inputs.with_arrays(**some) for some in masks]
    small = [inputs for name in ("self", "cross", "grouped heads") for inputs in families[name]]
    constant = [replace(inputs, eps_den=eps_den) for inputs in [*small, *masked] for eps_den in (1e-6, 0.5)]
    return {**families, "masked": masked, "eps_den > 0": constant}


def _module_inputs(rng: np.random.Generator, sizes: Sequence[int], *, masked: bool = False) -> Inputs:
    batch, heads, kv_heads, receivers, sources, width = sizes
    module = OAttention(heads * width, heads, 1.0, num_kv_heads=kv_heads)
    arrays = {"h": _carrier(rng, batch, receivers, heads * width), **_weights(rng, module, "attention.")}
    if receivers != sources:
        arrays["context"] = _carrier(rng, batch, sources, heads * width)
    if masked:
        arrays["visible"] = _visible(rng, receivers, sources)
    return Inputs(arrays, heads=heads)


def _attention_module_families() -> dict[str, list[Inputs]]:
    rng = np.random.default_rng(1)
    return {
        name: [
            _module_inputs(rng, sizes, masked=name == "masked") for sizes in (many[1:] if name == "thousands" else many)
        ]
        for name, many in ATTENTION_SIZES.items()
    }


def _transformer_inputs(rng: np.random.Generator, sizes: Sequence[int], *, masked: bool = False) -> Inputs:
    batch, heads, _, tokens, _, width = sizes
    arrays = _weights(rng, OTransformer(heads * width, heads, BLOCKS), "model.")
    arrays["h"] = _carrier(rng, batch, tokens, heads * width)
    if masked:
        arrays["visible"] = _visible(rng, tokens, tokens)
    return Inputs(arrays, heads=heads, large=tokens**2 > 10**6)


def _transformer_families() -> dict[str, list[Inputs]]:
    rng = np.random.default_rng(2)
    return {
        name: [
            _transformer_inputs(rng, sizes, masked=name == "masked")
            for sizes in ATTENTION_SIZES[name]
            if sizes[3] == sizes[4]
        ]
        for name in ("self", "masked", "one token", "thousands")
    }


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


# By operator that maps tokens one by one, or columns of them: its inputs beside a carrier of this shape.
_TOKENS: dict[str, Callable[[np.random.Generator, Sequence[int]], list[Arrays]]] = {
    "OFFN": lambda rng, sizes: [_weights(rng, _mlp(sizes[-1]), "ffn.")],
    "ONorm": lambda rng, sizes: [_weights(rng, norm(sizes[-1]), "norm.") for norm in (nn.LayerNorm, nn.RMSNorm)],
    "OInject": lambda rng, sizes: [{"u": rng.standard_normal(sizes)}],
    # Columns about zero, and columns with a mean as large as their spread.
    "OStandardize": lambda rng, sizes: [{"x": mean + rng.standard_normal(sizes)} for mean in (0, 1)],
}


def _token_inputs(name: str, rng: np.random.Generator, sizes: tuple[int, int, int]) -> list[Inputs]:
    return [Inputs({"h": _carrier(rng, *sizes), **more}) for more in _TOKENS[name](rng, sizes)]


def _token_families(name: str) -> dict[str, list[Inputs]]:
    rng = np.random.default_rng(3)
    return {family: _token_inputs(name, rng, sizes) for family, sizes in TOKEN_SIZES.items()}


# By operator: its families of inputs, a family being those of one kind of shape.
FAMILIES: dict[str, Callable[[], dict[str, list[Inputs]]]] = {
    "oattention": _oattention_families,
    "OAttention": _attention_module_families,
    "OTransformer": _transformer_families,
    **{name: partial(_token_families, name) for name in _TOKENS},
}


def random_draws(name: str, count: int) -> list[Inputs]:
    """As many draws of an operator's inputs, of one small shape: weights, carriers and heads."""
    rng = np.random.default_rng(7)
    if name in _TOKENS:
        return [_token_inputs(name, rng, DRAWN_TOKENS)[0] for _ in range(count)]
    draw = {"oattention": attention_inputs, "OAttention": _module_inputs, "OTransformer": _transformer_inputs}[name]
    return [draw(rng, DRAWN_ATTENTION) for _ in range(count)]


def without_support(inputs: Inputs) -> Iterator[Inputs]:
    """Live receivers that see no source with mass: zero sources, a closed mask, or live sources behind one."""
    a, carrier = inputs.arrays, inputs.source_carrier
    if "x" in a:
        yield inputs.with_arrays(h=np.zeros_like(a["h"]))
        return
    closed = np.zeros((a["h_i" if "h_i" in a else "h"].shape[1], a[carrier].shape[1]), dtype=bool)
    yield inputs.with_arrays(visible=closed)
    if "q" in a:
        yield inputs.with_arrays(additive=np.full(closed.shape, -np.inf))
    if carrier != "h":
        yield inputs.with_arrays(**{carrier: np.zeros_like(a[carrier])})
        half, odd = a[carrier].copy(), closed.copy()
        half[:, ::2], odd[:, ::2] = 0, True
        yield inputs.with_arrays(visible=odd, **{carrier: half})


def with_other_null_sources(inputs: Inputs) -> Inputs:
    """The inputs with other heads behind their zero sources."""
    rng, a = np.random.default_rng(2), inputs.arrays
    null = (a["h_j"] == 0).all(axis=-1)[:, None, :, None]
    return inputs.with_arrays(
        **{name: np.where(null, 3 * rng.standard_normal(a[name].shape), a[name]) for name in "kv"}
    )


def gate_alone() -> dict[str, Inputs]:
    """By operator, inputs on which only the gate can round: presences just above 0.5, and `GATED` to be gated.

    The products lie just below 1, so a gate rounded to half precision is off by up to a unit in the last place, and
    the product rounded once by half a unit. The only source of attention has the weight 1.
    """
    rng, tau = np.random.default_rng(4), 1e-6
    h = _of_length(rng, tau * rng.uniform(1.01, 1.04, (1, 400)))
    zero, full = np.zeros((1, 1, 400, 8)), np.full((1, 1, 400, 8), GATED)
    matrix, nothing, bias = zero[0, 0, :8], zero[0, 0, 0], full[0, 0, 0]
    ffn = {"ffn.0.weight": matrix, "ffn.0.bias": nothing, "ffn.2.weight": matrix, "ffn.2.bias": bias}
    arrays: dict[str, Arrays] = {
        "oattention": {"q": zero, "k": zero[:, :, :1], "v": full[:, :, :1], "h_i": h, "h_j": h[:, :1]},
        "OFFN": {"h": h, **ffn},
        "ONorm": {"h": h, "norm.weight": nothing, "norm.bias": bias},
        "OInject": {"h": h, "u": full[0]},
    }
    return {name: Inputs(some, tau) for name, some in arrays.items()}


def bias_alone() -> Inputs:
    """Pairs of sources with equal scores and presences about 1e-10, in favour of the first by up to a factor of 4.

    log p is about -23 there: rounded to half precision, it would be off by several per cent of a weight.
    """
    rng, tau, pairs = np.random.default_rng(5), 1e4, 400
    h_j = _of_length(rng, rng.uniform(0.5, 2, (pairs, 2)) * 1e-6)
    h_i = _of_length(rng, np.full((pairs, 1), 1e8))
    zero = np.zeros((pairs, 1, 2, 8))
    v = zero + np.array([1.0, 0.0])[:, None]
    return Inputs({"q": zero[:, :, :1], "k": zero, "v": v, "h_i": h_i, "h_j": h_j}, tau)
