"""The O-operators held to their definitions: every output entry within its rounding error bound.

Each operator's output is compared with a direct evaluation of its formula, see `references`, in float64 or wider. Each
entry of it has a bound of its own, see `contracts_bounds`, that holds on any IEEE machine; what is exact in every
arithmetic has the bound 0. The errors of the stock operators on the same inputs stand beside as information.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from .contracts_checks import Bench, Result, check, largest
from .contracts_inputs import attention_inputs
from .references import OPERATORS, Tensors

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}

# The properties in the order of their rows. `formula, self` and so on is a row per family, `at end` and `elsewhere` one
# for where NULLs are added: behind all others, most outputs are equal bit for bit, as nothing moves within the kernel's
# blocks.
PROPERTIES = (
    "formula",
    "random draws",
    "null receiver",
    "zero token",
    "null source changed",
    "null source",
    "insertion",
    "inserted tokens",
    "empty support",
    "tau -> 0",
    "gate in float32",
    "bias in float32",
)

# The paper's largest error against direct evaluation, on a GPU in FP32, BF16 and FP16; at sizes not known here.
PAPER_ERROR = 8.94e-8

# (B, H, S, J, D) at which ours is shown beside the paper's: a small one that favours small errors, and one as in use.
ANCHOR_SIZES = ((1, 1, 4, 8, 8), (1, 8, 1000, 800, 64))


def _line(name: str) -> str:
    """The entry of `PROPERTIES` of a row's property."""
    return re.split(",| at end| elsewhere", name)[0]


def _row(operator: str, dtype: str, name: str, results: Sequence[Result]) -> dict[str, Any]:
    """A property's row; it has passed if every output of its inputs keeps its bound."""

    def known(field: str) -> list[float]:
        return [getattr(result, field) for result in results if getattr(result, field) is not None]

    def worst(field: str) -> float | None:
        return float(np.max(known(field))) if known(field) else None

    ratio, typical, equal = float(np.max(known("ratio"))), known("typical"), known("bit_equal")
    stock = [result.error / result.stock_error for result in results if result.stock_error]
    compared = bool(stock) and name == "random draws"
    return {
        "operator": operator,
        "dtype": dtype,
        "property": name,
        "cases": len(results),
        "max_error": worst("error"),
        "bound": worst("bound"),
        "ratio": ratio if typical else None,
        "ratio_median": float(np.median(typical)) if typical else None,
        "passed": ratio <= 1,
        "bit_equal": sum(equal) if equal else None,
        "stock_error": worst("stock_error"),
        "stock_ratio_median": float(np.median(stock)) if compared else None,
        "stock_ratio_max": max(stock) if compared else None,
        "max_error_unrounded": worst("error_unrounded"),
        "stock_error_unrounded": worst("stock_error_unrounded"),
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
    operator, rng = OPERATORS[0], np.random.default_rng(6)
    bench = Bench(operator, DTYPES[name], device)
    for batch, heads, receivers, sources, width in ANCHOR_SIZES:
        inputs = attention_inputs(rng, (batch, heads, heads, receivers, sources, width))
        against_float64 = bench.run(inputs).result.error, bench.beside_stock(inputs, host=True).stock_error
        against_same = [
            largest(bench.computed(function, inputs) - bench.computed(direct, inputs))
            for function, direct in (
                (operator.run, lambda t, some: _direct(t, some.tau)),
                (operator.stock, lambda t, _: _direct(t, None)),
            )
        ]
        size = ",".join(map(str, (batch, heads, receivers, sources, width)))
        for kind, (error, stock_error) in (("float64", against_float64), (name, against_same)):
            result = Result(error, math.inf, 0.0, stock_error=stock_error)
            row = _row(operator.name, name, f"anchor ({size}) against {kind}", [result])
            yield row | {"passed": None, "bound": None, "paper_error": PAPER_ERROR}


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

    A row has passed if every entry of every output keeps its own bound. Against the formula in float64 (of fp64, in
    longdouble), on the inputs as rounded to the dtype, that is the bound of `contracts_bounds`; against the output
    before NULLs are added, twice that, as both may be off; and 0 for what is exact in any arithmetic: null receivers,
    zero tokens, empty support, and what stands behind a null source.

    OAttention and OTransformer are held to the formula layer by layer, see `contracts_bounds.Layerwise`: each layer on
    what the layers before it gave, also among NULLs. Their `max_error` is that of the whole.

    The stock kernel of the two OAttentions gets `log p_j` as its mask and no gate; that of the others, and everybody's
    where tau -> 0, knows no presence. A stock OTransformer, whose activations differ, is thus only a like problem. It
    decides nothing.

    Returns:
        A row per operator, dtype (of `DTYPES`) and property: `operator`, `dtype`, `property`, `cases` (sets of
        inputs), `max_error` and `bound` (the largest each), `ratio` (the largest error / bound of an output) and
        `ratio_median` (of the outputs; the median of the cases), None if all bounds are 0, `passed` (None for the
        rows of property `anchor ...`, which stand beside the paper's figure), `bit_equal` (how many cases were equal
        bit for bit: after an insertion to before it, for tau -> 0 to the stock operator); of the random draws and for
        tau -> 0, `stock_error` (the largest of the stock operator on the same inputs), `max_error_unrounded` and
        `stock_error_unrounded` (half precision against the formula on inputs that were not rounded); of the random
        draws, `stock_ratio_median` and `stock_ratio_max` (of largest error, ours / stock); and `paper_error`.
    """
    check_kernels(dtypes, device)
    rows = []
    for dtype in dtypes:
        for operator in OPERATORS:
            if on_step is not None:
                on_step(f"{operator.name} in {dtype}")
            with torch.random.fork_rng(devices=[]):  # modules are built before their weights are put in
                found = check(operator, DTYPES[dtype], device)
            names = sorted(found, key=lambda name: PROPERTIES.index(_line(name)))
            rows += [_row(operator.name, dtype, name, found[name]) for name in names]
        if dtype != "fp64":  # the paper has none
            rows += _anchors(dtype, device)
    return pd.DataFrame(rows, dtype=object)  # object: None stays None


def table_cells(table: pd.DataFrame) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Title, header and cells of one table per dtype, and of two for information: stock kernels, and the paper.

    A line of a dtype's table sums up the rows of one property, with the numbers of that closest to its bounds, a
    failed one first.
    """

    def number(value: float | None) -> str:
        return "" if value is None else f"{value:.1e}" if value else "0"

    def per_cent(value: float | None) -> str:
        return "" if value is None else "<0.1" if 0 < value < 1e-3 else f"{100 * value:.2g}"

    tables = {}
    judged, anchors = table[table["passed"].notna()], table[table["passed"].isna()]
    for dtype, part in judged.groupby("dtype", sort=False):
        cells, above = [], ""
        for (operator, line), rows in part.groupby(["operator", part["property"].map(_line)], sort=False):
            worst = max(rows.itertuples(index=False), key=lambda row: (not row.passed, row.ratio or 0.0))
            numbers = (
                number(worst.max_error),
                f"{worst.bound:.0e}" if worst.bound else "0",
                per_cent(worst.ratio),
                per_cent(worst.ratio_median),
            )
            same = "" if rows["bit_equal"].isna().all() else str(rows["bit_equal"].sum())
            ends = [*numbers, same, "yes" if worst.passed else "NO"]
            cells.append([operator if operator != above else "", line, str(rows["cases"].sum()), *ends])
            above = operator
        header = ["operator", "property", "n", "error", "bound", "max", "med", "same", "ok"]
        tables[f"{dtype}: errors, and how many per cent of the outputs' own bounds they are"] = header, cells
    if len(draws := judged[judged["property"] == "random draws"]):
        cells = [
            [row.operator, row.dtype, number(row.max_error), number(row.stock_error)]
            + [f"{ratio:.2f}" for ratio in (row.stock_ratio_median, row.stock_ratio_max)]
            for row in draws.itertuples(index=False)
        ]
        header = ["operator", "dtype", "error", "stock", "ours / stock: median", "largest"]
        tables[f"For information: beside torch's own kernels, {draws['cases'].iloc[0]} random draws"] = header, cells
    if len(anchors):
        cells = [
            [row.dtype, row.property.removeprefix("anchor "), number(row.max_error), number(row.stock_error)]
            for row in anchors.itertuples(index=False)
        ]
        title = f"For information: OAttention beside the paper's {PAPER_ERROR:g}, at (B,H,S,J,D)"
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
        "Each line sums up the rows of one property (--json has them all), with the numbers of the row closest to its "
        "bounds, a failed one first. n: sets of inputs. error: largest absolute error against the formula in float64 "
        "(in fp64: in longdouble), on inputs rounded to the dtype; of insertions and null sources: largest change of "
        "an old output. bound: the largest of the outputs' own, from a rounding error analysis of the formula; it "
        "holds on any IEEE machine, whatever the order of its sums. max, med: per cent of an output's own bound, the "
        "largest and the median. OAttention and OTransformer are held to the formula layer by layer, each on what the "
        "layers before it gave; error is that of the whole. same: inputs with equal outputs bit for bit, of insertions "
        "and null sources to before, of tau -> 0 to the stock kernel. stock: the error of torch's own kernel on the "
        "same inputs, of attention with log p as its mask. It decides nothing, nor does the paper's figure: that is "
        "its largest error in FP32, BF16 and FP16, on a GPU, at sizes not known here. `bias in float32` is expected to "
        "miss on CUDA: torch's fused attention takes the bias there in half precision."
    )
