"""The rounding error bounds: other evaluations of the same formulas keep them, and the worst come close."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from oretrofit.experiments import contracts_checks
from oretrofit.experiments.contracts import DTYPES
from oretrofit.experiments.contracts_bounds import Arithmetic, Bounded, Bounds, Layerwise, bounded
from oretrofit.experiments.contracts_checks import Bench, judge
from oretrofit.experiments.contracts_inputs import FAMILIES, attention_inputs, random_draws, with_zeros
from oretrofit.experiments.references import OPERATORS, Direct

BY_NAME = {operator.name: operator for operator in OPERATORS}
FP32 = Arithmetic.of(torch.float32, "cpu", np.float64)
U = 2.0**-24


def exactly(x, arithmetic=FP32):
    return Bounded(x, np.zeros(x.shape), arithmetic)


# --- Evaluations in float32, in other orders than torch's and numpy's ---


def forward(x):
    return np.cumsum(x, axis=-1)[..., -1]


def backward(x):
    return forward(x[..., ::-1])


def in_blocks(x):
    """Blocks of 8 by themselves, then the blocks."""
    padded = np.concatenate([x, np.zeros((*x.shape[:-1], -x.shape[-1] % 8), x.dtype)], axis=-1)
    return backward(forward(padded.reshape(*x.shape[:-1], -1, 8)))


ORDERS = {"forward": forward, "backward": backward, "in blocks": in_blocks}


def presence32(h, tau, total):
    n = total(h * h)
    return n / (np.float32(tau) + n)


def attention32(a, tau, total):
    """One softmax over all keys, with the masses inside the exponential."""
    p_i, p_j = presence32(a["h_i"], tau, total), presence32(a["h_j"], tau, total)
    score = total(a["q"][..., :, None, :] * a["k"][..., None, :, :]) / np.float32(math.sqrt(a["q"].shape[-1]))
    score = score + np.log(p_j)[:, None, None, :]
    weight = np.exp(score - score.max(axis=-1, keepdims=True))
    numerator = total(weight[..., None, :] * a["v"].swapaxes(-1, -2)[..., None, :, :])
    return p_i[:, None, :, None] * (numerator / total(weight)[..., None])


def attention32_online(a, tau, total):
    """The keys in blocks of 32, with a running maximum and masses that are factors."""
    p_i, p_j = presence32(a["h_i"], tau, total), presence32(a["h_j"], tau, total)
    top = np.full((*a["q"].shape[:-1], 1), -np.inf, np.float32)
    numerator, denominator = np.zeros_like(a["q"]), np.zeros_like(top)
    for block in (slice(j, j + 32) for j in range(0, a["k"].shape[2], 32)):
        k, v, p = a["k"][:, :, block], a["v"][:, :, block], p_j[:, block]
        score = total(a["q"][..., :, None, :] * k[..., None, :, :]) / np.float32(math.sqrt(k.shape[-1]))
        score = score + np.log(p)[:, None, None, :]
        new = np.maximum(top, score.max(axis=-1, keepdims=True))
        weight, old = np.exp(score - new), np.exp(top - new)
        numerator = old * numerator + total(weight[..., None, :] * v.swapaxes(-1, -2)[..., None, :, :])
        denominator, top = old * denominator + total(weight)[..., None], new
    return p_i[:, None, :, None] * (numerator / denominator)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("evaluate", [attention32, attention32_online])
@pytest.mark.parametrize("scale", [1.0, 8.0])
def test_attention_in_other_orders(order, evaluate, scale):
    rng = np.random.default_rng(0)
    for sizes in ((2, 2, 2, 5, 300, 16), (1, 1, 1, 40, 7, 64), (1, 2, 2, 9, 1, 8)):
        inputs = attention_inputs(rng, sizes)
        inputs = inputs.with_arrays(q=scale * inputs.arrays["q"]).rounded(torch.float32)
        computed = evaluate({name: x.astype(np.float32) for name, x in inputs.arrays.items()}, 1.0, ORDERS[order])
        assert computed.dtype == np.float32
        exact = bounded(BY_NAME["oattention"], Bounds(FP32), inputs, 1.0)
        result = judge(computed - exact.value, exact.error)
        assert 0 < result.ratio <= 1


def layer_norm32(x, weight, bias, total):
    mean = total(x)[..., None] / np.float32(x.shape[-1])
    var = total((x - mean) * (x - mean))[..., None] / np.float32(x.shape[-1])
    return (x - mean) / np.sqrt(var + np.float32(1e-5)) * weight + bias


def welford32(x, weight, bias, total):
    """Mean and variance by Welford's recurrence, and the affine form that torch's CPU kernel has."""
    order = range(x.shape[-1]) if total is forward else range(x.shape[-1])[::-1]
    mean, squares = np.zeros_like(x[..., :1]), np.zeros_like(x[..., :1])
    for count, i in enumerate(order, 1):
        delta = x[..., i : i + 1] - mean
        mean = mean + delta / np.float32(count)
        squares = squares + delta * (x[..., i : i + 1] - mean)
    scale = 1 / np.sqrt(squares / np.float32(x.shape[-1]) + np.float32(1e-5))
    return (x * scale - mean * scale) * weight + bias


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("evaluate", [layer_norm32, welford32])
@pytest.mark.parametrize("mean", [0.0, 30.0])
def test_layer_norm_in_other_orders(order, evaluate, mean):
    rng = np.random.default_rng(1)
    for width in (2, 16, 300):
        x = (mean + rng.standard_normal((50, width))).astype(np.float32)
        weight, bias = (rng.standard_normal(width).astype(np.float32) for _ in range(2))
        arrays = {"n.weight": weight.astype(float), "n.bias": bias.astype(float)}
        exact = Bounds(FP32).norm(exactly(x.astype(float)), arrays, "n")
        result = judge(evaluate(x, weight, bias, ORDERS[order]) - exact.value, exact.error)
        assert 0 < result.ratio <= 1


@pytest.mark.parametrize("order", ORDERS)
def test_standardize_in_other_orders(order):
    rng, total = np.random.default_rng(2), ORDERS[order]
    h, x = (
        rng.standard_normal((1, 500, 4)).astype(np.float32),
        (3 + rng.standard_normal((1, 500, 6))).astype(np.float32),
    )
    p = presence32(h, 2.0, total)
    columns = x.swapaxes(-1, -2)
    mean = total(p[:, None] * columns)[..., None] / total(p)[:, None, None]
    var = total(p[:, None] * (columns - mean) ** 2)[..., None] / total(p)[:, None, None]
    computed = (p[:, None] * (columns - mean) / np.sqrt(var + np.float32(1e-5))).swapaxes(-1, -2)
    bounds = Bounds(FP32)
    exact = bounds.standardize(x.astype(float), bounds.presence(exactly(h.astype(float)), 2.0))
    assert 0 < judge(computed - exact.value, exact.error).ratio <= 1


@pytest.mark.parametrize("order", ORDERS)
def test_linear_and_presence_in_other_orders(order):
    rng, total = np.random.default_rng(3), ORDERS[order]
    x, weight = rng.standard_normal((20, 400)).astype(np.float32), rng.standard_normal((5, 400)).astype(np.float32)
    exact = Bounds(FP32).linear(exactly(x.astype(float)), {"w.weight": weight.astype(float)}, "w")
    assert 0 < judge(total(x[:, None] * weight) - exact.value, exact.error).ratio <= 1
    p = Bounds(FP32).presence(exactly(x.astype(float)), 300.0)
    assert 0 < judge(presence32(x, 300.0, total) - p.value, p.error).ratio <= 1


def test_the_bound_of_a_sum_is_reached():
    """Each 2^-24 that is added to 1 is lost, and all of them to a sum that starts there."""
    x = np.array([[1.0] + [U] * 999])
    exact = Bounds(FP32).linear(exactly(x), {"w.weight": np.ones((1, 1000))}, "w")
    assert forward(x.astype(np.float32)) == 1.0
    lost = judge(1.0 - exact.value, exact.error)
    assert lost.error == 999 * U and 0.99 < lost.ratio < 1


def test_errors_of_the_inputs_are_passed_on():
    """Formulas on perturbed inputs stay within the bounds of inputs with these errors, in float64."""
    rng, tiny = np.random.default_rng(4), Arithmetic.of(torch.float64, "cpu", np.float64)
    bounds, error = Bounds(tiny), 1e-4

    def draw(*shape):
        return rng.standard_normal(shape)

    def vague(x):
        return Bounded(x, np.full(x.shape, error), tiny)

    def moved(x):
        return x + error * rng.choice([-1, 1], x.shape)

    weights = {"n.weight": draw(8), "n.bias": draw(8), "r.weight": draw(8), "w.weight": draw(3, 8), "w.bias": draw(3)}
    x, heads, h = draw(40, 8), [draw(1, 2, 6, 4) for _ in range(3)], draw(1, 6, 8)
    p = bounds.presence(vague(h), 5.0)
    pairs = {
        "presence": (p, lambda: Direct.presence(moved(h), 5.0)),
        "norm": (bounds.norm(vague(x), weights, "n"), lambda: Direct.norm(moved(x), weights, "n")),
        "rms norm": (bounds.norm(vague(x), weights, "r"), lambda: Direct.norm(moved(x), weights, "r")),
        "linear": (bounds.linear(vague(x), weights, "w"), lambda: Direct.linear(moved(x), weights, "w")),
        "gelu": (bounds.gelu(vague(x)), lambda: Direct.gelu(moved(x))),
        "product": (vague(x[:, :1]) * vague(x), lambda: moved(x[:, :1]) * moved(x)),
        "sum": (vague(x) + vague(x), lambda: moved(x) + moved(x)),
        "attention": (
            bounds.attention(*map(vague, heads), p, p),
            lambda: Direct.attention(*map(moved, heads), *2 * [Direct.presence(moved(h), 5.0)]),
        ),
    }
    for name, (exact, perturbed) in pairs.items():
        ratios = [judge(perturbed() - exact.value, exact.error).ratio for _ in range(100)]
        assert 0.03 < max(ratios) <= 1 + 1e-9, (name, max(ratios))  # the perturbed inputs are rounded too


# --- What a bound is made of ---


@pytest.mark.parametrize("name", BY_NAME)
def test_values_are_those_of_direct_evaluation(name):
    operator = BY_NAME[name]
    for many in FAMILIES[name]().values():
        inputs = with_zeros(many[0], "front")
        exact = operator.formula(Direct, inputs.arrays, inputs, inputs.tau)
        with np.errstate(invalid="ignore"):  # the bounds of a whole OTransformer pass all limits
            got = bounded(operator, Bounds(FP32), inputs, inputs.tau)
        np.testing.assert_allclose(got.value, exact, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", BY_NAME)
def test_the_bound_of_a_null_is_zero(name, dtype):
    """And only that: every live entry may be rounded."""
    bench, inputs = Bench(BY_NAME[name], DTYPES[dtype], "cpu"), with_zeros(random_draws(name, 1)[0], "middle")
    if BY_NAME[name].run_layers is None:
        error = bench.bounded(inputs, inputs.tau, Bounds(bench.arithmetic)).error
    else:
        layerwise = Layerwise(bench.arithmetic, bench.compute(inputs).layers)
        error = bench.bounded(inputs, inputs.tau, layerwise).error
        if name == "OAttention":  # it ends in a layer
            error = layerwise.held["attention.out_projection"][1]
    error = error.swapaxes(1, 2) if error.ndim == 4 else error
    dead = contracts_checks.dead(inputs.arrays[BY_NAME[name].receivers[0]])
    assert dead.sum() == 3 and (error[:, dead] == 0).all() and (error[:, ~dead] > 0).all()


def test_half_precision_is_rounded_by_half_a_unit():
    numbers = np.array([0.0, 0.7, 1.0, 1.99, 6e-8])
    for dtype, units in {
        torch.bfloat16: (2.0**-9, 2.0**-8, 2.0**-8),
        torch.float16: (2.0**-12, 2.0**-11, 2.0**-11),
    }.items():
        stored = Arithmetic.of(dtype, "cpu", np.float64).stored(numbers, np.zeros(5)).error
        assert stored[:4].tolist() == [0.0, *units]
        rounded = torch.from_numpy(numbers).to(dtype).double().numpy()
        assert (np.abs(rounded - numbers) <= stored).all()
    assert stored[4] == 2.0**-25  # half the distance of float16's smallest numbers
    assert (FP32.stored(numbers, np.zeros(5)).error == 0).all()  # sums are in float32 already


def test_a_reference_that_is_no_wider_counts_its_own_error():
    """As where longdouble is double."""
    error = np.array([1.0, 0.0])
    assert Arithmetic.of(torch.float64, "cpu", np.float64).allowed(error).tolist() == [2.0, 0.0]
    assert FP32.allowed(error)[0] == 1 + 2.0**-29
    bench = Bench(BY_NAME["OFFN"], torch.float64, "cpu")
    bench.wide, bench.arithmetic = np.float64, Arithmetic.of(torch.float64, "cpu", np.float64)
    assert 0 < max(bench.run(inputs).result.ratio for inputs in random_draws("OFFN", 5)) <= 1


def test_cuda_takes_the_bias_in_half_precision():
    inputs = random_draws("oattention", 1)[0]
    errors = {}
    for device in ("cpu", "cuda:0"):
        for dtype in (torch.float32, torch.float16):
            bounds = Bounds(Arithmetic.of(dtype, device, np.float64))
            errors[device, dtype] = bounded(BY_NAME["oattention"], bounds, inputs, 1.0).error
    assert (errors["cpu", torch.float32] == errors["cuda:0", torch.float32]).all()
    assert (errors["cpu", torch.float16] < errors["cuda:0", torch.float16]).all()


def test_layers_are_held_one_by_one():
    """What one gets wrong is its own fault, and what the next ones make of it is not theirs."""
    bench, inputs = Bench(BY_NAME["OTransformer"], torch.float32, "cpu"), random_draws("OTransformer", 1)[0]
    layers = bench.compute(inputs).layers
    assert len(layers) == 17  # 8 a block, and the last norm
    wrong = {**layers, "model.blocks.0.norm": 1.01 * layers["model.blocks.0.norm"]}
    for given, expected in ((layers, set()), (wrong, {"norm", "q_projection", "k_projection", "v_projection"})):
        layerwise = Layerwise(bench.arithmetic, given)
        bench.bounded(inputs, inputs.tau, layerwise)
        assert set(layerwise.held) == set(layers)
        missed = {name for name, held in layerwise.held.items() if judge(*held).ratio > 1}
        assert {name.rpartition(".")[2] for name in missed} == expected
        assert all(name.startswith("model.blocks.0.") and ".ffn." not in name for name in missed)


# --- What is taken from torch ---


def test_exp_in_torchs_attention_is_as_good_as_said():
    """Weights against those of the largest score, by values that tell them apart."""
    rng, keys = np.random.default_rng(5), 64
    score = torch.from_numpy(rng.uniform(-80, 0, (1, 1, 400, keys)).astype(np.float32))
    score[..., 0] = 0
    q, v = torch.zeros(1, 1, 400, keys), torch.eye(keys)[None, None]
    out = F.scaled_dot_product_attention(q, torch.zeros(1, 1, keys, keys), v, attn_mask=score).double()
    error = out / out[..., :1] / score.double().exp() - 1
    assert error.abs().max() <= FP32.exp + 4 * U


def test_gelu_is_nowhere_steeper_than_said():
    x = torch.linspace(-10, 10, 100_001, dtype=torch.float64, requires_grad=True)
    F.gelu(x).sum().backward()
    assert 1.128 < x.grad.abs().max() < 1.13
