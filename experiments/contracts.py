"""The O-operators held to their definitions, beside the error of torch's own kernels.

Every operator runs on the same inputs as the stock operator that it extends, and both are compared with a direct
float64 evaluation of their formula, see `references`. Heads behind zero tokens are not zero, as behind a projection
with a bias. Shape suffixes are those of `references`.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..patches import OAttention, OTransformer
from .references import BLOCKS, CARRIERS, OPERATORS, Arrays, Case, Direct, Operator, Tensors, stock_case

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# How many times the stock kernel's own error an operator may be off, before one unit in the last place is added.
FACTORS = {"fp32": 1.5, "bf16": 2.0, "fp16": 2.0, "fp64": 1.5}

# The properties in the order of their rows, and whether they hold exactly: with the bar 0.
PROPERTIES = {
    "formula": False,  # a row per family: `formula, self`
    "null receiver": True,
    "zero token": True,
    "null source changed": True,
    # `at end` or `elsewhere`: behind all others, most outputs are equal bit for bit, as nothing moves within the
    # kernel's blocks.
    "null source": False,
    "insertion": False,
    "inserted tokens": True,
    "empty support": True,
    "tau -> 0": False,
    "gate in float32": False,
    "bias in float32": False,
}

# The paper's largest error against direct evaluation, on a GPU in FP32, BF16 and FP16; at sizes not known here.
PAPER_ERROR = 8.94e-8

# (B, H, S, J, D) at which ours is shown beside the paper's: a small one that favours small errors, and one as in use.
ANCHOR_SIZES = ((1, 1, 4, 8, 8), (1, 8, 1000, 800, 64))

_TINY_TAU = 1e-30  # a presence of 1 in every dtype, for tokens that are not zero


# --- Inputs ---

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
    zeroed = {name: case.arrays[name].copy() for name in CARRIERS if name in case.arrays}
    for h in zeroed.values():
        h[:, PLACEMENTS[placement](h.shape[1])] = 0
    return case.with_arrays(**zeroed)


def _with_inserted(operator: Operator, case: Case, place: str, *, receivers: bool) -> Case:
    """The case with zero tokens inserted among its sources, and its receivers if asked to.

    Behind a zero carrier there are heads and values that are not zero, and it is visible to some.
    """
    rng = np.random.default_rng(1)
    arrays = dict(case.arrays)
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
    return replace(case, arrays=arrays)


def _attention_case(rng: np.random.Generator, sizes: tuple[int, ...]) -> Case:
    batch, heads, kv_heads, receivers, sources, width = sizes
    h_i = _carrier(rng, batch, receivers, 8)
    arrays = {
        "q": rng.standard_normal((batch, heads, receivers, width)),
        "k": rng.standard_normal((batch, kv_heads, sources, width)),
        "v": rng.standard_normal((batch, kv_heads, sources, width)),
        "h_i": h_i,
        "h_j": h_i if receivers == sources else _carrier(rng, batch, sources, 8),
    }
    return Case(arrays, large=receivers * sources > 10**6)


def _oattention_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(0)
    families = {name: [_attention_case(rng, sizes) for sizes in many] for name, many in ATTENTION_SIZES.items()}
    masked = []
    for case in families["masked"]:
        _, heads, receivers, _ = case.arrays["q"].shape
        sources = case.arrays["k"].shape[2]
        visible = _visible(rng, receivers, sources)
        additive = rng.standard_normal((1, heads, receivers, sources))  # without the 1, torch takes another kernel
        additive[..., 1::5] = -math.inf
        masks = {"visible": visible}, {"additive": additive}, {"visible": visible, "additive": additive}
        masked += [case.with_arrays(**some) for some in masks]
    small = [case for name in ("self", "cross", "grouped heads") for case in families[name]]
    constant = [replace(case, eps_den=eps_den) for case in [*small, *masked] for eps_den in (1e-6, 0.5)]
    return {**families, "masked": masked, "eps_den > 0": constant}


def _attention_module_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(1)
    families = defaultdict(list)
    for name, many in ATTENTION_SIZES.items():
        for batch, heads, kv_heads, receivers, sources, width in many[1:] if name == "thousands" else many:
            module = OAttention(heads * width, heads, 1.0, num_kv_heads=kv_heads)
            arrays = {"h": _carrier(rng, batch, receivers, heads * width), **_weights(rng, module, "attention.")}
            if receivers != sources:
                arrays["context"] = _carrier(rng, batch, sources, heads * width)
            if name == "masked":
                arrays["visible"] = _visible(rng, receivers, sources)
            families[name].append(Case(arrays, heads=heads))
    return families


def _transformer_families() -> dict[str, list[Case]]:
    rng = np.random.default_rng(2)
    families = defaultdict(list)
    for name in ("self", "masked", "one token", "thousands"):
        for batch, heads, _, tokens, sources, width in ATTENTION_SIZES[name]:
            if tokens == sources:
                arrays = _weights(rng, OTransformer(heads * width, heads, BLOCKS), "model.")
                arrays["h"] = _carrier(rng, batch, tokens, heads * width)
                if name == "masked":
                    arrays["visible"] = _visible(rng, tokens, tokens)
                families[name].append(Case(arrays, heads=heads, large=tokens**2 > 10**6))
    return families


def _token_families(draw: Callable[[np.random.Generator, tuple[int, ...]], list[Arrays]]) -> dict[str, list[Case]]:
    """Cases of a carrier h, with the other inputs drawn for its shape."""
    rng = np.random.default_rng(3)
    return {
        name: [Case({"h": _carrier(rng, *sizes), **more}) for more in draw(rng, sizes)]
        for name, sizes in TOKEN_SIZES.items()
    }


def _mlp(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))


def _norms(rng: np.random.Generator, sizes: tuple[int, ...]) -> list[Arrays]:
    return [_weights(rng, norm(sizes[-1]), "norm.") for norm in (nn.LayerNorm, nn.RMSNorm)]


# By operator: its families of cases, a family being those of one kind of shape.
FAMILIES: dict[str, Callable[[], dict[str, list[Case]]]] = {
    "oattention": _oattention_families,
    "OAttention": _attention_module_families,
    "OFFN": partial(_token_families, lambda rng, sizes: [_weights(rng, _mlp(sizes[-1]), "ffn.")]),
    "ONorm": partial(_token_families, _norms),
    "OInject": partial(_token_families, lambda rng, sizes: [{"u": rng.standard_normal(sizes)}]),
    # Columns about zero, and columns with a mean as large as their spread.
    "OStandardize": partial(_token_families, lambda rng, s: [{"x": mean + rng.standard_normal(s)} for mean in (0, 1)]),
    "OTransformer": _transformer_families,
}


def _without_support(case: Case) -> Iterator[Case]:
    """Live receivers that see no source with mass: zero sources, a closed mask, or live sources behind one."""
    a, carrier = case.arrays, case.source_carrier
    if "x" in a:
        yield case.with_arrays(h=np.zeros_like(a["h"]))
        return
    closed = np.zeros((a["h_i" if "h_i" in a else "h"].shape[1], a[carrier].shape[1]), dtype=bool)
    yield case.with_arrays(visible=closed)
    if "q" in a:
        yield case.with_arrays(additive=np.full(closed.shape, -np.inf))
    if carrier != "h":
        yield case.with_arrays(**{carrier: np.zeros_like(a[carrier])})
        half, odd = a[carrier].copy(), closed.copy()
        half[:, ::2], odd[:, ::2] = 0, True
        yield case.with_arrays(visible=odd, **{carrier: half})


def _dead(operator: Operator, case: Case) -> np.ndarray:
    """Which receivers are zero tokens, (B, S)."""
    return (case.arrays[operator.receivers[0]] == 0).all(axis=-1)


def _with_other_null_sources(case: Case) -> Case:
    """The case with other heads behind its zero sources."""
    rng, a = np.random.default_rng(2), case.arrays
    null = (a["h_j"] == 0).all(axis=-1)[:, None, :, None]
    return case.with_arrays(**{name: np.where(null, 3 * rng.standard_normal(a[name].shape), a[name]) for name in "kv"})


def _gate_alone() -> dict[str, Case]:
    """By operator, a case in which only the gate can round: presences just above 0.5, and 1.95 to be gated.

    The products lie just below 1, so a gate rounded to half precision is off by up to a unit in the last place, and
    the product rounded once by half a unit.
    """
    rng, tau = np.random.default_rng(4), 1e-6
    h = _of_length(rng, tau * rng.uniform(1.01, 1.04, (1, 400)))
    zero, full = np.zeros((1, 1, 400, 8)), np.full((1, 1, 400, 8), 1.95)
    matrix, nothing, bias = zero[0, 0, :8], zero[0, 0, 0], full[0, 0, 0]
    ffn = {"ffn.0.weight": matrix, "ffn.0.bias": nothing, "ffn.2.weight": matrix, "ffn.2.bias": bias}
    inputs: dict[str, Arrays] = {
        "oattention": {"q": zero, "k": zero[:, :, :8], "v": full[:, :, :8], "h_i": h, "h_j": h[:, :8]},
        "OFFN": {"h": h, **ffn},
        "ONorm": {"h": h, "norm.weight": nothing, "norm.bias": bias},
        "OInject": {"h": h, "u": full[0]},
    }
    return {name: Case(arrays, tau) for name, arrays in inputs.items()}


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


class Run(NamedTuple):
    """A case before it was rounded, what the operator gives on it, and that against the formula."""

    case: Case
    out: np.ndarray
    result: Result

    def must_be_zero(self, values: np.ndarray) -> Result:
        """Values that are 0 in exact arithmetic and in every dtype."""
        return Result(_largest(values), self.result.stock_error)

    def unchanged(self, old: np.ndarray) -> Result:
        """The outputs of the same tokens on a changed case."""
        return Result(_largest(old - self.out), *self.result[1:3], np.array_equal(old, self.out))


def _largest(x: np.ndarray) -> float:
    """The largest size of a value, NaN if one is NaN."""
    return float(np.abs(x).max(initial=0.0))


def _unit(x: np.ndarray, dtype: torch.dtype) -> float:
    """A unit in the last place of the largest value."""
    largest = _largest(x)
    return torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(largest)) if largest else 0.0


def _computed(function: Callable[[Tensors, Case], Tensor], case: Case, dtype: torch.dtype, device: str) -> np.ndarray:
    tensors = {
        name: torch.from_numpy(x).to(device, torch.bool if x.dtype == bool else dtype)
        for name, x in case.arrays.items()
    }
    with torch.inference_mode():
        return function(tensors, case).double().cpu().numpy()


def _run(operator: Operator, case: Case, dtype: torch.dtype, device: str, *, host: bool = False) -> Run:
    """One case against the formula, on rounded inputs and, in half precision, on unrounded ones too.

    With `host`, tau is so small that every live presence is 1, and the formula is the stock operator's.
    """
    stock = case if host else stock_case(operator, case)
    tau = None if host else case.tau
    case = replace(case, tau=_TINY_TAU) if host else case
    out, stock_out = _computed(operator.run, case, dtype, device), _computed(operator.stock, stock, dtype, device)
    # Float64 itself is held to longdouble, which is wider on most CPUs.
    wide = np.longdouble if dtype == torch.float64 else np.float64

    def formula(case: Case, tau: float | None) -> np.ndarray:
        arrays = {name: x if x.dtype == bool else x.astype(wide) for name, x in case.arrays.items()}
        return operator.formula(Direct, arrays, case, tau)

    exact = formula(case.rounded(dtype), tau)
    stock_exact = exact if host else formula(stock.rounded(dtype), None)
    bit_equal = np.array_equal(out, stock_out) if host else None
    result = Result(_largest(out - exact), _largest(stock_out - stock_exact), _unit(exact, dtype), bit_equal)
    if torch.finfo(dtype).bits == 16:
        unrounded = _largest(out - formula(case, tau)), _largest(stock_out - formula(stock, None))
        result = Result(*result[:4], *unrounded)
    return Run(case, out, result)


def _checks(operator: Operator, dtype: torch.dtype, device: str) -> dict[str, list[Result]]:
    """By property, a result for each of its cases."""
    found = defaultdict(list)

    def family(cases: Iterable[Case], *, host: bool = False) -> list[Run]:
        runs = [_run(operator, case, dtype, device, host=host) for case in cases]
        worst = float(np.max([run.result.stock_error for run in runs], initial=0.0))
        return [run._replace(result=run.result._replace(stock_error=worst)) for run in runs]

    def out(case: Case) -> np.ndarray:
        return _computed(operator.run, case, dtype, device)

    for name, cases in FAMILIES[operator.name]().items():
        runs = family(
            _with_zeros(case, place) for case in cases for place in (("none", "middle") if case.large else PLACEMENTS)
        )
        found[f"formula, {name}"] = [run.result for run in runs]
        alive = []
        for run in runs:
            a, dead = run.case.arrays, _dead(operator, run.case)
            if dead.any():
                zero = run.must_be_zero((run.out.swapaxes(1, 2) if run.out.ndim == 4 else run.out)[dead])
                found["null receiver" if operator.sources else "zero token"].append(zero)
                if "h_j" in a:
                    found["null source changed"].append(run.unchanged(out(_with_other_null_sources(run.case))))
                continue
            alive.append(run.case)
            for place in INSERTIONS:
                where = "at end" if place == "end" else "elsewhere"
                if any(name in a for name in operator.sources):
                    inserted = _with_inserted(operator, run.case, place, receivers=False)
                    found[f"null source {where}"].append(run.unchanged(out(inserted)))
                if "context" not in a and ("k" not in a or a["k"].shape[2] == a["q"].shape[2]):
                    inserted = _with_inserted(operator, run.case, place, receivers=True)
                    after, new = out(inserted), _dead(operator, inserted)[0]
                    found[f"insertion {where}"].append(run.unchanged(after[..., ~new, :]))
                    found["inserted tokens"].append(run.must_be_zero(after[..., new, :]))
            if operator.sources or operator.name == "OStandardize":
                found["empty support"] += [run.must_be_zero(out(case)) for case in _without_support(run.case)]
        hosts = family((case for case in alive if case.eps_den == 0), host=True)
        found["tau -> 0"] += [run.result for run in hosts]

    if torch.finfo(dtype).bits == 16:
        if operator.name in (gate_alone := _gate_alone()):
            found["gate in float32"] = [run.result for run in family([gate_alone[operator.name]])]
        if operator.name == "oattention":
            found["bias in float32"] = [run.result for run in family([_bias_alone()])]
    return {name: found[name] for line in PROPERTIES for name in found if _line(name) == line}


def _line(name: str) -> str:
    """The key in `PROPERTIES` of a row's property."""
    return re.split(",| at end| elsewhere", name)[0]


def _row(operator: str, dtype: str, name: str, results: Sequence[Result]) -> dict[str, Any]:
    """A property's row; it has passed if every case keeps its bar."""
    errors = np.array([result.error for result in results])
    bars = np.array([FACTORS[dtype] * result.stock_error + result.unit for result in results])
    bars = bars * (not PROPERTIES.get(_line(name)))
    equal = [result.bit_equal for result in results if result.bit_equal is not None]

    def largest(field: str) -> float | None:
        known = [getattr(result, field) for result in results if getattr(result, field) is not None]
        return float(np.max(known)) if known else None

    return {
        "operator": operator,
        "dtype": dtype,
        "property": name,
        "cases": len(results),
        "max_error": largest("error"),
        "stock_error": largest("stock_error"),
        "passed": bool((errors <= bars).all()),
        "bar": float(bars[errors.argmax()]),
        "bit_equal": sum(equal) if equal else None,
        "max_error_unrounded": largest("error_unrounded"),
        "stock_error_unrounded": largest("stock_error_unrounded"),
        "paper_error": None,
    }


def _direct(t: Tensors, tau: float | None) -> Tensor:
    """The formula of OAttention as it stands, in the dtype of its inputs; without a tau, the stock operator's."""

    def mass(h: Tensor) -> Tensor:
        n = h.square().sum(-1)
        return torch.ones_like(n) if tau is None else n / (tau + n)

    weight = torch.exp(t["q"] @ t["k"].transpose(-1, -2) / math.sqrt(t["q"].shape[-1]))
    weight = weight * mass(t["h_j"])[:, None, None, :]
    return weight @ t["v"] / weight.sum(-1, keepdim=True) * mass(t["h_i"])[:, None, :, None]


def _anchors(name: str, device: str) -> Iterator[dict[str, Any]]:
    """OAttention against both kinds of direct evaluation, at the sizes named; shown, and not judged."""
    operator, dtype, rng = OPERATORS[0], DTYPES[name], np.random.default_rng(6)
    for batch, heads, receivers, sources, width in ANCHOR_SIZES:
        case = _attention_case(rng, (batch, heads, heads, receivers, sources, width))
        against_float64 = [
            _run(operator, case, dtype, device).result.error,
            _run(operator, case, dtype, device, host=True).result.stock_error,
        ]
        against_same = [
            _largest(_computed(function, case, dtype, device) - _computed(direct, case, dtype, device))
            for function, direct in (
                (operator.run, lambda t, case: _direct(t, case.tau)),
                (operator.stock, lambda t, case: _direct(t, None)),
            )
        ]
        size = ",".join(map(str, (batch, heads, receivers, sources, width)))
        for kind, errors in (("float64", against_float64), (name, against_same)):
            row = _row(operator.name, name, f"anchor ({size}) against {kind}", [Result(errors[0], errors[1])])
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
        arguments = {"scaled_dot_product_attention": (x, x, x), "layer_norm": (x, (8,)), "linear": (x, x[0, 0])}
        for kernel, inputs in arguments.items():
            try:
                getattr(F, kernel)(*inputs)
            except RuntimeError as error:
                raise ValueError(f"torch has no {kernel} in {name} on this {device}: {error}") from error


def check_contracts(
    dtypes: Sequence[str], device: str = "cpu", *, on_step: Callable[[str], None] | None = None
) -> pd.DataFrame:
    """Hold every operator to its definition.

    A case keeps its bar if its error is at most `FACTORS[dtype]` times the stock kernel's largest error in its family,
    plus one unit in the last place of its largest output; of an exact property, if its error is 0. Errors are absolute,
    and the largest of all outputs: against the formula in float64 (for fp64 in longdouble) on the inputs as rounded to
    the dtype; of insertions and changed sources, against the output before.

    The stock kernel of the two OAttentions gets `log p_j` as its mask and no gate; that of the others, and everybody's
    where tau -> 0, knows no presence. A stock OTransformer, whose activations differ, is thus only a like problem.

    Returns:
        A row per operator, dtype (of `DTYPES`) and property: `operator`, `dtype`, `property`, `cases`, `max_error`,
        `stock_error`, `passed` (None for the rows of property `anchor ...`, which stand beside the paper's figure),
        `bar` (of the case with the largest error), `bit_equal` (how many cases were equal bit for bit: after an
        insertion to before it, for tau -> 0 to the stock operator), `max_error_unrounded` and `stock_error_unrounded`
        (half precision against the formula on inputs that were not rounded) and `paper_error`.
    """
    check_kernels(dtypes, device)
    rows = []
    for dtype in dtypes:
        for operator in OPERATORS:
            if on_step is not None:
                on_step(f"{operator.name} in {dtype}")
            found = _checks(operator, DTYPES[dtype], device)
            rows += [_row(operator.name, dtype, name, results) for name, results in found.items()]
        if dtype != "fp64":  # the paper has none
            rows += _anchors(dtype, device)
    return pd.DataFrame(rows, dtype=object)  # object: None stays None


def table_cells(table: pd.DataFrame) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Title, header and cells of one table per dtype, and of one with the paper's figure.

    A line of the tables sums up the rows of one property, with the numbers of that with the largest error, a failed
    one first.
    """

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}" if value else "0"

    tables = {}
    judged, anchors = table[table["passed"].notna()], table[table["passed"].isna()]
    for dtype, part in judged.groupby("dtype", sort=False):
        raw = ["raw"] if part["max_error_unrounded"].notna().any() else []
        cells, above = [], ""
        for (operator, line), rows in part.groupby(["operator", part["property"].map(_line)], sort=False):
            worst = max(rows.itertuples(index=False), key=lambda row: (not row.passed, row.max_error))
            numbers = [worst.max_error, worst.stock_error, *([worst.max_error_unrounded] if raw else [])]
            same = "" if rows["bit_equal"].isna().all() else str(rows["bit_equal"].sum())
            ends = [*map(number, numbers), same, "yes" if worst.passed else "NO"]
            cells.append([operator if operator != above else "", line, str(rows["cases"].sum()), *ends])
            above = operator
        header = ["operator", "property", "cases", "error", "stock", *raw, "same", "ok"]
        tables[f"{dtype}: largest errors; bar {FACTORS[str(dtype)]:g} stock + 1 ulp, or 0"] = header, cells
    if len(anchors):
        cells = [
            [row.dtype, row.property.removeprefix("anchor "), number(row.max_error), number(row.stock_error)]
            for row in anchors.itertuples(index=False)
        ]
        title = f"OAttention beside the paper's {PAPER_ERROR:g}, at (B,H,S,J,D); not judged"
        tables[title] = ["dtype", "direct evaluation", "error", "stock"], cells
    return tables


def failures(table: pd.DataFrame) -> list[str]:
    """What to end with if rows failed, in a line; empty if none did."""
    failed = table[[passed is False for passed in table["passed"]]]
    names = "; ".join(f"{row.operator} {row.dtype} {row.property}" for row in failed.itertuples(index=False))
    return [f"{len(failed)} of {len(table)} rows failed: {names}"] if len(failed) else []


def notes() -> str:
    """What a reader of the tables has to know."""
    return (
        "Each line sums up the rows of one property (--json has them all): its numbers are of the one with the largest "
        "error, a failed one first. error: largest absolute error against the formula in float64 (in fp64: in "
        "longdouble), on inputs rounded to the dtype; of insertions and null sources: largest change of an old output. "
        "stock: the error of torch's own kernel on the same inputs, of attention with log p as its mask. raw: error "
        "against the formula on inputs not rounded. same: cases equal bit for bit, of insertions and null sources to "
        "before, of tau -> 0 to the stock kernel. The paper's figure is its largest error in FP32, BF16 and FP16, on a "
        "GPU, at sizes not known here. `bias in float32` is expected to miss on CUDA: torch's fused attention takes "
        "the bias there in half precision."
    )
