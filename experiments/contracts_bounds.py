"""How far any IEEE machine may be off an operator's formula: a bound for each entry of its output.

`Bounds` has the functions of `references.Direct` and carries, beside each exact value, a bound of the error with which
an operator in a given dtype may have computed it. It is an a-priori rounding analysis (Higham, Accuracy and Stability
of Numerical Algorithms, 2nd ed., chapters 2 to 4): n roundings change a result by a factor of at most 1 +- gamma_n, and
a sum of n terms is off by at most gamma_n times the sum of their sizes, in whatever order it is taken, in blocks of
whatever size, with or without fused multiply-add. So a bound holds for every vector width, thread count and BLAS, if

- float32 and float64 are rounded correctly, and sums in half precision are kept in float32;
- exp in attention errs as `Arithmetic` says, log, logsigmoid and rsqrt by 2 units in the last place at most;
- an attention kernel that renews the maximum of its scores block by block takes at least 32 keys at a time.

A term that is exactly 0 costs no rounding: sources without mass change no bound, and the bound of a null is 0.

Shape suffixes are those of `references`. Bounds are in float64, also where values are wider.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .references import CARRIERS, NORM_EPS, Arrays, Direct, Inputs, Operator

# Units in the last place that torch's exponential in attention on a CPU may be off in float32, by its own comment
# (`exp_u20`); its largest error between -87 and 0 is 3.3.
_EXP_ULPS = 20

# That in half precision (`fexp_u20`) is a cubic, off by a factor of 1 +- 1.13e-4 at most.
_HALF_EXP = 2.0**-12

# How far erf may be off, in unit roundoffs: torch's vectorised float32 (Abramowitz and Stegun 7.1.26) leaves 6.4 for
# it in GELU, over all floats. The reference's own erf is in float64.
_ERF = 8

_GELU_SLOPE = 1.13  # the largest, at x = sqrt(2)
_KEYS_AT_ONCE = 32


@dataclass(frozen=True)
class Arithmetic:
    """How precisely torch computes in one dtype.

    Attributes:
        unit: Unit roundoff of the dtype, in which heads, attention weights and results are kept.
        wide: That of sums, of presence and within a kernel: of float32 at least.
        bias: That in which `log p` is handed to the kernel, if less than `wide`, or 0.
        partial: That of partial sums of a matrix product, if less than `wide`, or 0.
        exp: Relative error of exp in attention.
        tiny: What a number in the dtype may lose where it underflows; `wide_tiny`, in the wide one.
        reference: Unit roundoff of the values that the operator is held to.
    """

    unit: float
    wide: float
    bias: float
    partial: float
    exp: float
    tiny: float
    wide_tiny: float
    reference: float

    @classmethod
    def of(cls, dtype: torch.dtype, device: str, reference: type[np.floating]) -> Arithmetic:
        """That of torch on a kind of device, for values in the numpy dtype `reference`."""
        info, wide = torch.finfo(dtype), torch.finfo(torch.promote_types(dtype, torch.float32))
        half = info.bits == 16
        # On CUDA, attention takes its mask in the heads' dtype, and cuBLAS may add parts of a sum in it.
        low = info.eps / 2 if half and device.startswith("cuda") else 0.0
        float_exp = (_EXP_ULPS if dtype == torch.float32 else 2) * wide.eps
        return cls(
            unit=info.eps / 2,
            wide=wide.eps / 2,
            bias=low,
            partial=low,
            exp=_HALF_EXP if half else float_exp,
            # Subnormals may be flushed to 0, but for those of float16.
            tiny=info.smallest_normal * (info.eps / 2 if dtype == torch.float16 else 1),
            wide_tiny=wide.smallest_normal,
            reference=float(np.finfo(reference).eps) / 2,
        )

    def gamma(self, roundings: Any) -> Any:
        """What so many roundings in the wide precision do to a result: `n u / (1 - n u)`."""
        x = np.asarray(roundings, dtype=float) * self.wide
        return np.where(x < 1, x / np.where(x < 1, 1 - x, 1), np.inf)

    def allowed(self, error: np.ndarray) -> np.ndarray:
        """A bound for the difference from the reference, which is an evaluation too and errs in its own precision."""
        return error * (1 + self.reference / self.wide)

    def stored(self, value: np.ndarray, error: np.ndarray, *, times: int = 1) -> Bounded:
        """Values that are computed up to an error, as rounded to the dtype so many times: by half a unit each."""
        for _ in range(times if self.unit > self.wide else 0):
            size = _size(value) + error
            with np.errstate(divide="ignore"):
                half_unit = self.unit * 2.0 ** np.floor(np.log2(size))
            error = error + np.where(size > 0, np.maximum(half_unit, self.tiny), 0.0)
        return Bounded(value, error, self)


class Bounded:
    """Exact values, and how far from them the computed ones may be, of the same shape."""

    def __init__(self, value: np.ndarray, error: np.ndarray, arithmetic: Arithmetic) -> None:
        self.value, self.error, self.arithmetic = value, error, arithmetic

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return self.value.shape

    @property
    def size(self) -> np.ndarray:
        """The largest absolute values that may have been computed."""
        return _size(self.value) + self.error

    def reshape(self, *shape: Any) -> Bounded:
        """As of an array."""
        return Bounded(self.value.reshape(*shape), self.error.reshape(*shape), self.arithmetic)

    def swapaxes(self, first: int, second: int) -> Bounded:
        """As of an array."""
        axes = first, second
        return Bounded(self.value.swapaxes(*axes), self.error.swapaxes(*axes), self.arithmetic)

    def __getitem__(self, index: Any) -> Bounded:
        """As of an array."""
        return Bounded(self.value[index], self.error[index], self.arithmetic)

    def __add__(self, other: Bounded) -> Bounded:
        """In one rounding."""
        value, error = self.value + other.value, self.error + other.error
        return self.arithmetic.stored(value, error + self.arithmetic.wide * (_size(value) + error))

    def __mul__(self, other: Bounded) -> Bounded:
        """A presence times values, in one rounding of each precision."""
        a, value = self.arithmetic, self.value * other.value
        error = self.error * other.size + _size(self.value) * other.error
        size = _size(value) + error
        return a.stored(value, error + a.wide * size + a.wide_tiny * (size > 0))


def _size(x: np.ndarray) -> np.ndarray:
    return np.abs(x).astype(float)


class Bounds:
    """The functions of `references.Direct` on bounded values. Weights, masks and the x of OStandardize are plain."""

    def __init__(self, arithmetic: Arithmetic) -> None:
        self.arithmetic = arithmetic

    def presence(self, h: Bounded, tau: float | None) -> Bounded:
        """In the wide precision, (..., E) -> (...)."""
        a, value = self.arithmetic, Direct.presence(h.value, tau)
        if tau is None:  # a tau too small to be seen, and the same quotient
            return Bounded(value, a.gamma(3) * value, a)
        size = _size(h.value)
        n = (size * size).sum(axis=-1)
        # E products, E - 1 sums, a root and its square.
        change = (h.error * (2 * size + h.error)).sum(axis=-1) + a.gamma(h.shape[-1] + 4) * (h.size**2).sum(axis=-1)
        below, above = np.minimum(change, n), change
        error = tau * np.maximum(below / (tau + (n - below)), above / (tau + n + above)) / (tau + n)
        return Bounded(value, error + a.gamma(3) * (_size(value) + error), a)  # tau, the sum and the quotient

    def linear(self, x: Bounded, arrays: Arrays, name: str) -> Bounded:
        """A matrix product, and then a bias if there is one."""
        a, value = self.arithmetic, Direct.linear(x.value, arrays, name)
        weight, bias = _size(arrays[f"{name}.weight"]).T, arrays.get(f"{name}.bias")
        size = x.size @ weight + (0.0 if bias is None else np.abs(bias).astype(float))
        error = x.error @ weight + (a.gamma(len(weight) + 1) + a.partial) * size + a.wide_tiny * (size > 0)
        if bias is None:
            return a.stored(value, error)
        error = a.stored(value - bias, error).error
        return a.stored(value, error + a.wide * (_size(value) + error))

    def gelu(self, x: Bounded) -> Bounded:
        """`x * 0.5 * (1 + erf(x / sqrt(2)))`: where that is close to 0, erf is the larger part of the error."""
        a, value = self.arithmetic, Direct.gelu(x.value)
        error = _GELU_SLOPE * x.error
        error = error + a.gamma(4) * (_size(value) + error) + _ERF * a.wide * x.size / 2
        return a.stored(value, error)

    def norm(self, x: Bounded, arrays: Arrays, name: str) -> Bounded:
        """LayerNorm or RMSNorm, by whatever way to the moments.

        A computed mean, of all or of the first entries, is off by gamma times the largest entry. The deviation is a
        seminorm: errors of the entries move it by no more than their own root mean square.
        """
        a, width, size = self.arithmetic, x.shape[-1], x.size
        weight, bias = arrays[f"{name}.weight"], arrays.get(f"{name}.bias")
        centred = x.value - (0 if bias is None else x.value.mean(axis=-1, keepdims=True))
        moved = np.sqrt((x.error**2).mean(axis=-1, keepdims=True))
        off = shift = mean = np.zeros(moved.shape)
        if bias is not None:
            mean = size.mean(axis=-1, keepdims=True)
            off = a.gamma(width + 8) * size.max(axis=-1, keepdims=True)
            shift = x.error.mean(axis=-1, keepdims=True)
        var = (_size(centred) ** 2).mean(axis=-1, keepdims=True)
        spread = np.sqrt(var) + moved
        # Each of the two factors of a summand (x - m)(x - m'), as in Welford's recurrence, may be off.
        var_error = 2 * math.sqrt(2) * off * spread + off**2 + a.gamma(width + 6) * spread**2
        root = np.sqrt(var + NORM_EPS)
        low = root - moved
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = self._of_root(var_error / low**2)
            # x / root - mean / root, as torch has it, rounds both parts.
            parts = off + shift + x.error + a.gamma(4) * (size + mean + off)
            error = (parts * (1 + relative) + _size(centred) / root * (relative * root + moved)) / low
        error = np.where((low > 0) & np.isfinite(error), error, np.inf) * _size(weight)
        value = Direct.norm(x.value, arrays, name)
        scaled = _size(centred) / root * _size(weight) + error
        error = error + a.wide * (scaled + _size(value) + 2 * error)
        return a.stored(value, error, times=2)  # in half precision, torch rounds before the weight or behind it

    def standardize(self, x_SE: np.ndarray, p_S: Bounded) -> Bounded:
        """OStandardize of exact x: errors of the masses move mean and variance as they do a softmax's output."""
        a, p, p_error, size = self.arithmetic, _size(p_S.value)[..., None], p_S.error[..., None], _size(x_SE)
        mass = p.sum(axis=-2, keepdims=True)
        share = p / np.where(mass > 0, mass, 1)
        relative = p_error / np.where(p > 0, p, 1)
        first, second = ((share * relative**power).sum(axis=-2, keepdims=True) for power in (1, 2))
        live = (p > 0).sum(axis=-2, keepdims=True)
        x = x_SE - x_SE[..., :1, :]
        centred = _size(x - (share * x).sum(axis=-2, keepdims=True))
        var = (share * centred**2).sum(axis=-2, keepdims=True)
        weighted = (share * (1 + relative) * size).sum(axis=-2, keepdims=True) / (1 - first)
        moved = np.sqrt(second * var) / (1 - first)
        off = moved + a.gamma(2 * live + 5) * weighted  # of the mean
        masses = (1 + relative.max(axis=-2, keepdims=True)) / (1 - first) - 1
        var_error = masses * var + off**2 + 2 * moved * off
        var_error = var_error + a.gamma(2 * live + 8) * (var + var_error)
        root = np.sqrt(var + NORM_EPS)
        rooted = self._of_root(var_error / root**2)
        far = (1 + rooted) / root
        error = (p + p_error) * (off * far + centred * rooted / root + a.gamma(5) * (centred + off) * far)
        error = error + p_error * centred / root
        return a.stored(Direct.standardize(x_SE, p_S.value), error)

    def _of_root(self, relative: np.ndarray) -> np.ndarray:
        """The relative error of a computed `1 / sqrt(x + eps)`, where x is off by so much of x + eps."""
        relative = relative + self.arithmetic.gamma(2)
        # 1 / sqrt(1 - r) - 1 is at most that
        moved = np.where(relative < 1, relative / (2 * np.where(relative < 1, 1 - relative, 1)), np.inf)
        return moved + self.arithmetic.gamma(5) * (1 + moved)

    def attention(
        self,
        q_BHSD: Bounded,
        k_BKJD: Bounded,
        v_BKJD: Bounded,
        p_BS: Bounded,
        p_BJ: Bounded,
        *,
        visible: np.ndarray | None = None,
        additive: np.ndarray | None = None,
        eps_den: float = 0.0,
    ) -> Bounded:
        """OAttention on heads, by one softmax over `s_ij + log p_j` in the wide precision.

        Weights that are off by factors of 1 + d_j move the output by `sum_j share_j d_j (v_j - out)`: by no more than
        the root mean square of the d_j times the spread of the values. Both count by the shares.
        """
        a, heads = self.arithmetic, q_BHSD.shape[1]
        k, v = (
            Bounded(Direct.per_query(x.value, heads), Direct.per_query(x.error, heads), a) for x in (k_BKJD, v_BKJD)
        )
        score = Direct.scores(q_BHSD.value, k.value, additive)
        exact_share = Direct.shares(score, p_BJ.value, visible=visible, eps_den=eps_den)
        share = exact_share.astype(float)
        rest = np.maximum(1 - share.sum(axis=-1, keepdims=True), 0.0) * (eps_den > 0)  # the constant's
        live = share > 0
        relative, constant = self._weights(q_BHSD, k, p_BJ, score, live, additive, eps_den)

        first = (share * relative).sum(axis=-1, keepdims=True) + rest * constant
        second = (share * relative**2).sum(axis=-1, keepdims=True) + rest * constant**2
        sources = live.sum(axis=-1, keepdims=True)
        out, square = share @ v.value.astype(float), share @ _size(v.value) ** 2
        # Cancellation may leave the difference too small.
        slack = 4 * live.shape[-1] * np.finfo(float).eps * square
        spread = np.sqrt(np.maximum(square - out**2, 0.0) + slack)
        with np.errstate(divide="ignore", invalid="ignore"):
            grown = share * (1 + relative)
            error = (np.sqrt(second) * spread + grown @ v.error) / (1 - first)
            total = grown @ v.size / (1 - first)
            # Weighted sums and the sum of the weights, its reciprocal and the product; blocks are scaled down.
            roundings = sources + _renewals(sources, live.shape[-1]) + (eps_den > 0) + 3
            error = error + a.gamma(roundings) * (total + np.abs(out) + error)
            if a.unit > a.wide:  # weights are rounded before they meet the values; that of a source alone is 1
                error = error + a.unit * np.where((sources > 1) | (eps_den > 0), total, 0.0)
            lost = max(a.tiny, a.wide_tiny) * np.maximum(share.max(axis=-1, keepdims=True), rest)
            error = error + 2 * lost * (live @ v.size + sources * (1 + np.abs(out)))
        error = np.where(sources > 0, np.where(first < 1, error, np.inf), 0.0)
        return p_BS[:, None, :, None] * a.stored(exact_share @ v.value, error)

    def _weights(
        self,
        q: Bounded,
        k: Bounded,
        p_BJ: Bounded,
        score: np.ndarray,
        live: np.ndarray,
        additive: np.ndarray | None,
        eps_den: float,
    ) -> tuple[np.ndarray, np.ndarray]:
        """Relative errors of `exp(s_ij + log p_j - top)`, (B, H, S, J), and of `exp(log(eps_den) - top)`.

        Those of exp are the absolute ones of its argument. What is common to a receiver's weights does not count.
        """
        a, width = self.arithmetic, q.shape[-1]
        off = a.gamma(width + 6) * Direct.scores(q.size, k.size, None)  # either q k^T or q and k may be scaled
        if q.error.any() or k.error.any():
            off += Direct.scores(q.error, k.size, None) + Direct.scores(_size(q.value), k.error, None)
        p = np.where(p_BJ.value > 0, p_BJ.value, 1).astype(float)[:, None, None, :]
        log_p = np.log(p)
        with np.errstate(divide="ignore"):  # infinite if p may be 0
            off_p = -np.log1p(-np.minimum(p_BJ.error[:, None, None, :] / p, 1.0))
        # A logarithm, and a logsigmoid of an exp, a log1p and a sum; then the sum with the mask.
        off_p += a.gamma(8) * (1 - log_p)
        off += off_p + (a.wide + a.bias) * np.abs(log_p + _finite(additive))
        whole = np.where(live, score.astype(float) + log_p, 0.0)  # base 2 would round once more than the sum
        constant = math.log(eps_den) if eps_den > 0 else -math.inf
        top = np.maximum(np.where(live, whole, -np.inf).max(axis=-1, keepdims=True), constant)

        off += a.gamma(3) * np.abs(whole)
        own = np.full(top.shape, (a.gamma(3) + a.bias) * abs(constant) if eps_den > 0 else 0.0)
        furthest = np.maximum(off.max(axis=-1, keepdims=True), own)
        renewed = a.gamma(5 * _renewals(live.sum(axis=-1, keepdims=True), live.shape[-1]))

        def weight(off: np.ndarray, below: np.ndarray) -> np.ndarray:
            """The maxima that are subtracted, block by block, add up to the distance to the last."""
            off = off + a.gamma(2) * (below + off + furthest)
            changed = np.expm1(off, out=off)
            return changed + (1 + changed) * (a.exp + renewed + a.exp * renewed)

        with np.errstate(over="ignore", invalid="ignore"):
            relative = np.where(live, weight(off, top - whole), 0.0)
            return relative, weight(own, top - constant) if eps_den > 0 else own


def _finite(additive: np.ndarray | None) -> Any:
    return 0.0 if additive is None else np.where(additive > -np.inf, additive, 0.0).astype(float)


def _renewals(sources: np.ndarray, keys: int) -> np.ndarray:
    """How often a maximum may be renewed, also if NULLs are inserted beside every key."""
    return np.minimum(sources, -(-2 * (keys + 1) // _KEYS_AT_ONCE))


class Layerwise(Bounds):
    """`Bounds` that go on, behind each linear layer and norm, from what the operator computed there.

    Through many layers the bounds of the first ones grow beyond all sense, as each takes its inputs' errors to add up.
    So each layer is held to its formula on the inputs that it had.

    Attributes:
        layers: What each of them computed, by the name of its weights.
        held: By name, how far that is off, and how far it may be.
    """

    def __init__(self, arithmetic: Arithmetic, layers: Arrays) -> None:
        super().__init__(arithmetic)
        self.layers = layers
        self.held: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def linear(self, x: Bounded, arrays: Arrays, name: str) -> Bounded:
        """A linear layer."""
        return self._hold(super().linear(x, arrays, name), name)

    def norm(self, x: Bounded, arrays: Arrays, name: str) -> Bounded:
        """A norm."""
        return self._hold(super().norm(x, arrays, name), name)

    def _hold(self, layer: Bounded, name: str) -> Bounded:
        computed = self.layers[name].astype(layer.value.dtype)
        self.held[name] = computed - layer.value, self.arithmetic.allowed(layer.error)
        return Bounded(computed, np.zeros(layer.shape), self.arithmetic)


def bounded(operator: Operator, bounds: Bounds, inputs: Inputs, tau: float | None) -> Bounded:
    """The exact output of an operator, in the precision of the inputs, and how far the operator may be off.

    The inputs are exact: round them to the operator's dtype before.
    """
    arrays: dict[str, Any] = dict(inputs.arrays)
    for name in (*CARRIERS, "q", "k", "v", "u"):
        if name in arrays:
            arrays[name] = Bounded(arrays[name], np.zeros(arrays[name].shape), bounds.arithmetic)
    out = operator.formula(bounds, arrays, inputs, tau)
    return Bounded(out.value, bounds.arithmetic.allowed(out.error), bounds.arithmetic)
