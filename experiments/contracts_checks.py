"""An operator held to its definition: what it gives on inputs of all kinds, and how far each output may be off."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .contracts_bounds import Arithmetic, Bounded, Bounds, Layerwise, bounded
from .contracts_inputs import (
    FAMILIES,
    GATED,
    INSERTIONS,
    PLACEMENTS,
    bias_alone,
    gate_alone,
    random_draws,
    with_inserted,
    with_other_null_sources,
    with_zeros,
    without_support,
)
from .references import Arrays, Direct, Inputs, Operator, Tensors, stock_inputs

DRAWS = 100  # of random inputs for each operator and dtype, to compare its error with the stock operator's

_TINY_TAU = 1e-30  # a presence of 1 in every dtype, for tokens that are not zero


class Result(NamedTuple):
    """What one set of inputs showed: the largest error and bound, and errors in parts of their own bounds.

    `ratio` is the largest error / bound of all outputs, infinite for an error where the bound is 0; `typical` is the
    median over the outputs with a bound.
    """

    error: float
    bound: float
    ratio: float
    typical: float | None = None
    stock_error: float | None = None
    bit_equal: bool | None = None
    error_unrounded: float | None = None
    stock_error_unrounded: float | None = None


class Computed(NamedTuple):
    """What an operator gave, and its layers if it has many."""

    out: np.ndarray
    layers: Arrays

    def of(self, receivers: np.ndarray, sources: np.ndarray) -> Computed:
        """That for some of the tokens."""
        layers = {
            name: x[..., sources if name.endswith(("k_projection", "v_projection")) else receivers, :]
            for name, x in self.layers.items()
        }
        return Computed(self.out[..., receivers, :], layers)


class Run(NamedTuple):
    """Inputs before they were rounded, what the operator gave, how far that may be off, and how far it is."""

    inputs: Inputs
    out: np.ndarray
    bound: np.ndarray
    result: Result


def judge(difference: np.ndarray, bound: np.ndarray) -> Result:
    """Hold each output to its own bound."""
    error = np.abs(difference).astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where((error == 0) & (bound == 0), 0.0, error / bound)
    ratio = np.where(np.isnan(ratio), np.inf, ratio)
    typical = float(np.median(ratio[bound > 0])) if (bound > 0).any() else None
    return Result(largest(error), largest(bound), largest(ratio), typical)


def must_be_zero(values: np.ndarray) -> Result:
    """Values that are 0 in exact arithmetic and in every dtype."""
    return judge(values, np.zeros(values.shape))


def dead(h_BSE: np.ndarray) -> np.ndarray:
    """Which tokens are zero throughout the batch."""
    return (h_BSE == 0).all(axis=(0, -1))


def largest(x: np.ndarray) -> float:
    """The largest size of a value, NaN if one is NaN."""
    return float(np.abs(x).max(initial=0.0))


class Bench:
    """An operator on a device in one dtype, and its exact values: in float64, of fp64 in longdouble."""

    def __init__(self, operator: Operator, dtype: torch.dtype, device: str) -> None:
        self.operator, self.dtype, self.device = operator, dtype, device
        self.half = torch.finfo(dtype).bits == 16
        # Longdouble is wider on most CPUs; where it is not, the bound counts the reference's own error too.
        self.wide: type[np.floating] = np.longdouble if dtype == torch.float64 else np.float64
        self.arithmetic = Arithmetic.of(dtype, device, self.wide)

    def computed(self, function: Callable[[Tensors, Inputs], Tensor], inputs: Inputs) -> np.ndarray:
        """What a function gives on inputs rounded to the dtype."""
        tensors = {
            name: torch.from_numpy(x).to(self.device, torch.bool if x.dtype == bool else self.dtype)
            for name, x in inputs.arrays.items()
        }
        with torch.inference_mode():
            return function(tensors, inputs).double().cpu().numpy()

    def compute(self, inputs: Inputs) -> Computed:
        """What the operator gives."""
        layers: Tensors = {}
        if (run := self.operator.run_layers) is None:
            return Computed(self.computed(self.operator.run, inputs), {})
        out = self.computed(lambda t, some: run(t, some, layers), inputs)
        return Computed(out, {name: x.double().cpu().numpy() for name, x in layers.items()})

    def exact(self, inputs: Inputs, tau: float | None) -> np.ndarray:
        """The formula's values."""
        return self.operator.formula(Direct, self._widened(inputs).arrays, inputs, tau)

    def bounded(self, inputs: Inputs, tau: float | None, bounds: Bounds) -> Bounded:
        """The formula's values on inputs rounded to the dtype, and how far the operator may be off."""
        return bounded(self.operator, bounds, self._widened(inputs.rounded(self.dtype)), tau)

    def _widened(self, inputs: Inputs) -> Inputs:
        arrays = inputs.arrays
        return inputs.with_arrays(**{name: x.astype(self.wide) for name, x in arrays.items() if x.dtype != bool})

    def _hold(self, inputs: Inputs, tau: float | None, computed: Computed) -> tuple[Bounded, Result]:
        """The output and, in an operator of many layers, each layer held to its formula."""
        if not computed.layers:
            formula = self.bounded(inputs, tau, Bounds(self.arithmetic))
            return formula, judge(computed.out - formula.value, formula.error)
        layerwise = Layerwise(self.arithmetic, computed.layers)
        formula = self.bounded(inputs, tau, layerwise)
        held = [*layerwise.held.values(), (computed.out - formula.value, formula.error)]
        difference, bound = (np.concatenate([x.ravel() for x in each]) for each in zip(*held, strict=True))
        return formula, judge(difference, bound)

    def run(self, inputs: Inputs, *, host: bool = False) -> Run:
        """Inputs, rounded to the dtype, against the formula.

        With `host`, tau is so small that every live presence is 1, and the formula is the stock operator's.
        """
        tau = None if host else inputs.tau
        inputs = replace(inputs, tau=_TINY_TAU) if host else inputs
        computed = self.compute(inputs)
        formula, result = self._hold(inputs, tau, computed)
        # Where there are layers, the formula went on from what they computed.
        exact = self.exact(inputs.rounded(self.dtype), tau) if computed.layers else formula.value
        return Run(inputs, computed.out, formula.error, result._replace(error=largest(computed.out - exact)))

    def beside_stock(self, inputs: Inputs, *, host: bool = False) -> Result:
        """The same, and the stock operator on the same inputs; in half precision against the unrounded ones too."""
        run = self.run(inputs, host=host)
        stock = inputs if host else stock_inputs(self.operator, inputs)
        stock_out = self.computed(self.operator.stock, stock)
        result = run.result._replace(
            stock_error=largest(stock_out - self.exact(stock.rounded(self.dtype), None)),
            bit_equal=np.array_equal(run.out, stock_out) if host else None,
        )
        if not self.half:
            return result
        return result._replace(
            error_unrounded=largest(run.out - self.exact(inputs, None if host else inputs.tau)),
            stock_error_unrounded=largest(stock_out - self.exact(stock, None)),
        )

    def unchanged(self, run: Run, after: Computed) -> Result:
        """The outputs of a run's tokens, as computed among more NULLs: another evaluation of the same exact values.

        Two such are apart by no more than both bounds. Layers are held to the formula without the NULLs.
        """
        difference = after.out - run.out
        if after.layers:
            result = self._hold(run.inputs, run.inputs.tau, after)[1]
        else:
            result = judge(difference, 2 * run.bound)
        return result._replace(error=largest(difference), bit_equal=not difference.any())

    def against(self, inputs: Inputs, bound: np.ndarray) -> Result:
        """Inputs against the formula, held to a bound for some of its roundings."""
        return judge(self.compute(inputs).out - self.exact(inputs.rounded(self.dtype), inputs.tau), bound)

    def gate_bound(self, inputs: Inputs) -> np.ndarray:
        """How far a gate may be off in front of a branch that no kernel can round, `GATED` throughout."""
        h = inputs.rounded(self.dtype).arrays[self.operator.receivers[0]]
        carrier, branch = (Bounded(x, np.zeros(h.shape), self.arithmetic) for x in (h, np.full(h.shape, GATED)))
        gated = Bounds(self.arithmetic).presence(carrier, inputs.tau)[..., None] * branch
        if self.operator.name in ("OFFN", "OInject"):
            gated = carrier + gated
        return gated.error[:, None] if self.operator.name == "oattention" else gated.error


def _nulls(bench: Bench, run: Run) -> Iterator[tuple[str, Result]]:
    """By property, what zero tokens get and do: those among the inputs or, if there are none, inserted ones."""
    operator, a = bench.operator, run.inputs.arrays
    null = (a[operator.receivers[0]] == 0).all(axis=-1)  # (B, S)
    if null.any():
        of_tokens = run.out.swapaxes(1, 2) if run.out.ndim == 4 else run.out
        yield "null receiver" if operator.sources else "zero token", must_be_zero(of_tokens[null])
        if "h_j" in a:
            difference = bench.compute(with_other_null_sources(run.inputs)).out - run.out
            yield "null source changed", must_be_zero(difference)._replace(bit_equal=not difference.any())
        return
    for place in INSERTIONS:
        where = "at end" if place == "end" else "elsewhere"
        if operator.sources and operator.sources[-1] in a:
            inserted = with_inserted(operator, run.inputs, place, receivers=False)
            old = np.ones(run.out.shape[-2], dtype=bool), ~dead(inserted.arrays[operator.sources[-1]])
            yield f"null source {where}", bench.unchanged(run, bench.compute(inserted).of(*old))
        if "context" not in a and ("k" not in a or a["k"].shape[2] == a["q"].shape[2]):
            inserted = with_inserted(operator, run.inputs, place, receivers=True)
            after, new = bench.compute(inserted), dead(inserted.arrays[operator.receivers[0]])
            yield f"insertion {where}", bench.unchanged(run, after.of(~new, ~new))
            yield "inserted tokens", must_be_zero(after.of(new, new).out)
    if operator.sources or operator.name == "OStandardize":
        for inputs in without_support(run.inputs):
            yield "empty support", must_be_zero(bench.compute(inputs).out)


def check(operator: Operator, dtype: torch.dtype, device: str) -> dict[str, list[Result]]:
    """By property, a result for each set of its inputs."""
    bench, found = Bench(operator, dtype, device), defaultdict(list)
    for name, many in FAMILIES[operator.name]().items():
        for inputs in many:
            for place in ("none", "middle") if inputs.large else PLACEMENTS:
                run = bench.run(with_zeros(inputs, place))
                found[f"formula, {name}"].append(run.result)
                for line, result in _nulls(bench, run):
                    found[line].append(result)
            if inputs.eps_den == 0:
                found["tau -> 0"].append(bench.beside_stock(inputs, host=True))
    found["random draws"] = [bench.beside_stock(inputs) for inputs in random_draws(operator.name, DRAWS)]
    if bench.half:
        if operator.name in (gates := gate_alone()):
            inputs = gates[operator.name]
            found["gate in float32"] = [bench.against(inputs, bench.gate_bound(inputs))]
        if operator.name == "oattention":
            inputs, in_float32 = bias_alone(), Bounds(replace(bench.arithmetic, bias=0.0))
            found["bias in float32"] = [bench.against(inputs, bench.bounded(inputs, inputs.tau, in_float32).error)]
    return found
