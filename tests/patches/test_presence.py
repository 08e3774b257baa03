"""Presence against plain float64 loops over the formula, over the whole range of carriers and taus."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses import FakeTensorMode
from torch.autograd import gradcheck, gradgradcheck

from oretrofit.patches import gate, log_presence, presence, squared_norm
from oretrofit.patches.presence import add_gated, gate_, log_presence_at, presence_at, tame, zero_at

HALVES = [torch.float16, torch.bfloat16]
GARBAGE = [math.nan, math.inf, -math.inf, 1e38, -1e38, 0.0]
EPS = {dtype: torch.finfo(dtype).eps for dtype in (*HALVES, torch.float32, torch.float64)}


def presence_loop(h, tau):
    """p and log p of each row of h, in float64."""
    p, log_p = np.zeros(len(h)), np.full(len(h), -np.inf)
    for i, row in enumerate(h.tolist()):
        n = sum(x * x for x in row)
        if n > 0:
            p[i] = n / (tau + n)
            log_p[i] = -math.log1p(tau / n)
    return p, log_p


@st.composite
def carriers(draw):
    """(S, E) tokens of lengths 1e-13 to 1e13, some of them exactly zero, and a tau."""
    size, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h = rng.standard_normal((size, width)) * 10.0 ** rng.uniform(-13, 13, (size, 1))
    h[draw(st.lists(st.integers(0, size - 1)))] = 0
    return h, draw(st.floats(1, 10)) * 10.0 ** draw(st.integers(-30, 30))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@settings(max_examples=60, deadline=None)
@given(carriers())
def test_agrees_with_the_loop(dtype, case):
    h, tau = torch.tensor(case[0], dtype=dtype), case[1]
    p, log_p = presence_loop(h.double(), tau)
    # E squares and their sum, a quotient: about one rounding each.
    rtol = EPS[dtype] * (h.shape[1] + 4)
    np.testing.assert_allclose(presence(h, tau).double(), p, rtol=rtol, atol=torch.finfo(dtype).tiny * EPS[dtype])
    actual = log_presence(h, tau).double().numpy()
    assert np.all(actual[p == 0] == -np.inf)
    # Live while tau / n is within the dtype's range. Its size may have been rounded in a logarithm.
    live = p > 0
    ratio = tau / np.square(h.double().numpy()[live]).sum(-1)
    tiny = torch.finfo(dtype).tiny
    close = np.abs(actual[live] - log_p[live]) <= rtol * (1 + np.abs(np.log(ratio))) * np.abs(log_p[live]) + tiny
    assert np.all(close | (ratio > 1 / tiny))


@pytest.mark.parametrize("dtype", EPS)
def test_zero_and_only_zero_has_presence_zero(dtype):
    h = torch.zeros(3, 4, dtype=dtype)
    h[1, 2] = 1e-3
    p, log_p = presence(h, 0.1), log_presence(h, 0.1)
    assert p.tolist()[::2] == [0, 0] and 0 < p[1] < 1
    assert log_p.tolist()[::2] == [-math.inf, -math.inf] and -math.inf < log_p[1] < 0


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_tau_below_the_dtypes_range(dtype):
    h = torch.tensor([[0.0, 0.0], [1.0, 0.0], [1e-3, 2e-3], [50.0, 100.0]], dtype=dtype)
    assert presence(h, 1e-60).tolist() == [0, 1, 1, 1]
    log_p = log_presence(h, 1e-60)
    assert log_p[0] == -math.inf
    # tau is taken for tiny / eps of float32, 1e-31, and the shortest token has ||h||^2 = 5e-6.
    torch.testing.assert_close(log_p[1:], torch.zeros(3), atol=1e-25, rtol=0)


def test_log_presence_is_accurate_near_one():
    h = torch.tensor([[3.0, 4.0]])
    assert presence(h, 1e-12).log() == 0  # what the plain logarithm loses
    # What the logarithm of 25e12 is rounded by is a relative error of its exponential.
    rel = EPS[torch.float32] * (math.log(25e12) + 4)
    assert log_presence(h, 1e-12).item() == pytest.approx(-1e-12 / 25, rel=rel)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_is_widened_before_squaring(dtype, autocast):
    h = torch.tensor([[300.0, 0.0], [0.0, 0.0]], dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        results = squared_norm(h), presence(h, 90_000.0), log_presence(h, 90_000.0)
    n, p, log_p = results
    assert [x.dtype for x in results] == [torch.float32] * 3
    assert n.tolist() == [90_000.0, 0]
    assert p.tolist() == [0.5, 0]
    assert log_p[0].item() == pytest.approx(-math.log(2), rel=4 * EPS[torch.float32]) and log_p[1] == -math.inf


def test_autocast_does_not_round_presence():
    h = torch.randn(7, 5) * 300 / math.sqrt(5)
    with torch.autocast("cpu", torch.bfloat16):
        p, log_p = presence(h, 1e4), log_presence(h, 1e4)
    assert torch.equal(p, presence(h, 1e4)) and torch.equal(log_p, log_presence(h, 1e4))


def test_float64_is_kept():
    h = torch.ones(2, 3, dtype=torch.float64)
    assert presence(h, 1.0).dtype == log_presence(h, 1.0).dtype == torch.float64


def test_from_the_squared_norm():
    h = torch.randn(2, 4, 3) * torch.tensor([0.0, 1e-3, 1.0, 300.0])[:, None]
    n = squared_norm(h)
    assert torch.equal(presence_at(n, 0.3), presence(h, 0.3))
    assert torch.equal(log_presence_at(n, 0.3), log_presence(h, 0.3))


@pytest.mark.parametrize(
    ("wide", "narrow"),
    [(torch.float32, torch.bfloat16), (torch.float16, torch.float16), (torch.float64, torch.float64)],
)
def test_gated_addition(wide, narrow):
    """Rounded once into a wide h; in half precision h, after the branch was rounded as any branch is."""
    h, u, p = torch.randn(7, 3).to(wide), torch.randn(7, 3).to(narrow), torch.rand(7)
    p[[0, 4]] = 0
    p = p.to(torch.promote_types(wide, torch.float32))
    exact = h.double() + p.double()[:, None] * u.double()
    out = add_gated(h, p, u)
    assert out.dtype == h.dtype
    assert torch.equal(out[[0, 4]], h[[0, 4]])
    # The product and the sum, half of an eps each.
    bound = EPS[wide] * (h.abs() + u.abs()).double()
    assert ((out.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("shape", [(5,), (0, 5), (2, 0, 5), (2, 3, 4, 5)])
def test_leading_dims(shape):
    h = torch.randn(shape)
    assert presence(h, 1.0).shape == log_presence(h, 1.0).shape == squared_norm(h).shape == shape[:-1]


@pytest.mark.parametrize("function", [presence, log_presence])
@pytest.mark.parametrize("tau", [0.0, -1.0, math.nan, math.inf, -math.inf])
def test_refuses_tau(function, tau):
    with pytest.raises(ValueError, match="tau"):
        function(torch.ones(2, 3), tau)


def tokens(*, zeros=(1, 3), requires_grad=True):
    h = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    h[list(zeros)] = 0
    return h.requires_grad_(requires_grad)


def test_gradients():
    h = tokens()
    assert gradcheck(lambda h: presence(h, 0.7), h)
    assert gradgradcheck(lambda h: presence(h, 0.7), h)
    live = tokens(zeros=())
    assert gradcheck(lambda h: log_presence(h, 0.7), live)
    assert gradgradcheck(lambda h: log_presence(h, 0.7), live)


def test_gradient_of_log_presence_at_zero_is_zero():
    h = tokens()
    (grad,) = torch.autograd.grad(log_presence(h, 0.7)[[0, 2]].sum() + log_presence(h, 0.7).exp().sum(), h)
    assert torch.all(grad[[1, 3]] == 0) and grad.isfinite().all()
    (grad,) = torch.autograd.grad(log_presence(h, 0.7), h, torch.ones(4, dtype=torch.float64))
    assert torch.all(grad[[1, 3]] == 0) and grad.isfinite().all()


@pytest.mark.parametrize("tau", [1e-60, 1e-30, 1e-3, 1.0, 1e20, 1e30])
@pytest.mark.parametrize("length", [0.0, 1e-15, 1e-10, 1e-5, 1.0, 1e15])
def test_gradients_over_the_range_of_float32(tau, length, incoming=1e3):
    """Finite for every length whose square float32 can hold, exactly 0 at zero."""
    h = torch.tensor([[length, 0.0]], requires_grad=True)
    (grad,) = torch.autograd.grad(presence(h, tau), h, torch.tensor([incoming]))
    (log_grad,) = torch.autograd.grad(log_presence(h, tau), h, torch.tensor([incoming]))
    assert grad.isfinite().all()
    assert log_grad.isfinite().all()
    if length == 0:
        assert torch.all(grad == 0) and torch.all(log_grad == 0)
    elif tau >= 1e-30 and tau / length**2 < 1e35:
        # The factor tau / (tau + n) may come from a logarithm of size up to 80.
        n, rtol = length**2, 80 * EPS[torch.float32]
        expected = incoming * 2 * length * (tau / (tau + n)) / n
        assert log_grad[0].tolist() == [pytest.approx(expected, rel=rtol, abs=1e-15), 0]


@pytest.mark.parametrize("dtype", HALVES)
def test_gate_rounds_once_and_keeps_zeros(dtype):
    p = torch.tensor([0.0, 0.3, 0.999, 1.0])
    y = torch.randn(4, 50).to(dtype)
    out = gate(p, y)
    assert out.dtype == dtype
    assert torch.all(out[0] == 0) and torch.equal(out[3], y[3])
    # Once to dtype, after once to float32.
    exact = p.double()[:, None] * y.double()
    assert torch.all((out.double() - exact).abs() <= 1.001 * EPS[dtype] / 2 * exact.abs() + torch.finfo(dtype).tiny)


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize("wide", [torch.float32, torch.float64])
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), null=st.booleans())
def test_gating_in_place_rounds_as_by_a_copy(dtype, wide, seed, null):
    """To the bit, in numbers of any size: the product in p's dtype at least, rounded once to that of y."""
    rng = np.random.default_rng(seed)
    p = torch.tensor(rng.uniform(0, 1, (3, 7))).to(wide)
    h, y = (torch.tensor(rng.standard_normal((3, 7, 9)) * 10.0 ** rng.uniform(-9, 4, (3, 7, 9))) for _ in range(2))
    h, y = h.to(dtype), y.to(dtype)
    if null:
        p[1, 2:5], y[1, 2:5] = 0, math.nan
    factor = torch.promote_types(wide, dtype)
    product = (p.to(factor)[..., None] * y.to(factor)).masked_fill(p[..., None] == 0, 0).to(dtype)
    own = y.clone()
    assert torch.equal(gate_(p, own), product)
    assert torch.equal(gate(p, y), product)
    assert torch.equal(own, product)  # written over
    added = h + product if dtype != wide else torch.addcmul(h, p[..., None], y.masked_fill(p[..., None] == 0, 0))
    assert torch.equal(add_gated(h, p, y.clone(), own=True), added)
    assert torch.equal(add_gated(h, p, y), added)
    assert torch.equal(y.isnan(), (p[..., None] == 0).expand_as(y) & null)  # not written over


# --- What stands behind a null ---


@st.composite
def garbled(draw):
    """Presences (B, S), some exactly 0, branches (B, S, E) with anything there, and where that is."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(1, 5)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    null = torch.tensor(rng.random(shape[:2]) < draw(st.sampled_from([0.0, 0.3, 1.0])))
    y = torch.tensor(rng.standard_normal(shape))
    y[null] = torch.tensor(rng.choice(GARBAGE, (int(null.sum()), shape[2])))
    return torch.tensor(rng.uniform(0.01, 1, shape[:2])).masked_fill(null, 0), y, null


@pytest.mark.parametrize("dtype", EPS)
@settings(max_examples=30, deadline=None)
@given(garbled())
def test_gates_select(dtype, case):
    """0, or h as it was, at a null, and gradients of 0; at the others the formula, and no bit of them changed."""
    p, y, null = case[0].to(torch.promote_types(dtype, torch.float32)), case[1].to(dtype), case[2]
    h, g = (torch.linspace(*ends, y.numel()).view(y.shape).to(dtype) for ends in ((-2, 2), (1, 2)))
    wide_h, wide_g, wide_p = h.double(), g.double(), p.double()[..., None]
    wide_y = y.double().masked_fill(null[..., None], 0)

    def everything(function, y, with_h):
        inputs = [x.clone().requires_grad_() for x in ([h, p, y] if with_h else [p, y])]
        out = function(*inputs)
        gradients = torch.autograd.grad(out, inputs, g)
        with torch.no_grad():
            return [out, function(*inputs), *reversed(gradients)]

    for function, base in (
        (gate, 0 * wide_h),
        (lambda p, y: gate_(p, 1 * y), 0 * wide_h),
        (lambda h, p, u: add_gated(h, p, u), wide_h),
        (lambda h, p, u: add_gated(h, p, 1 * u, own=True), wide_h),
    ):
        found = everything(function, y, base is wide_h)
        for one, other in zip(found, everything(function, wide_y.to(dtype), base is wide_h), strict=True):
            assert torch.equal(one, other)
        out, again, grad_y, grad_p, *grad_h = found
        for result in (out, again):
            error = (result.double() - (base + wide_p * wide_y)).abs()
            assert torch.all(error <= EPS[dtype] * (base.abs() + wide_y.abs() + torch.finfo(dtype).tiny))
            assert torch.equal(result[null].double(), base[null])
        assert torch.all((grad_y.double() - wide_p * wide_g).abs() <= EPS[dtype] * wide_g)
        exact, size = ((wide_g * t).sum(-1) for t in (wide_y, wide_y.abs()))
        assert torch.all((grad_p.double() - exact).abs() <= (y.shape[-1] + 1) * EPS[p.dtype] * size)
        assert torch.all(grad_y[null] == 0) and torch.all(grad_p[null] == 0)
        assert all(torch.equal(grad, g) for grad in grad_h)  # what is added to is passed through


def test_gate_of_a_branch_that_tokens_share():
    """p with more tokens than y, and y with more than p."""
    p, shared, heads = torch.tensor([[0.0, 0.5], [0.25, 0.0]]), torch.tensor([2.0, 4.0]), torch.ones(2, 3, 2, 4)
    heads[0, 1, 0] = math.nan
    expected = torch.tensor([[[0, 0], [1, 2]], [[0.5, 1], [0, 0]]])
    assert torch.equal(gate(p, shared), expected)
    assert torch.equal(gate(p, shared * math.inf)[p == 0], torch.zeros(2, 2))
    for function in (gate, gate_):
        out = function(p[:, None], heads.clone())
        assert torch.equal(out, p[:, None, :, None].expand_as(out))


@pytest.mark.parametrize("dtype", HALVES)
def test_the_gradient_of_a_shared_branch_is_rounded_once(dtype):
    """The gradients of tokens sum to 0.125, but to 0 if each is rounded to dtype before."""
    p, sign = torch.ones(1025), torch.ones(1025, 1, dtype=dtype)
    p[:512], p[-1], sign[512:] = 1 + 2**-12, 0, -1
    y = torch.tensor([[1.0, 2.0]], dtype=dtype, requires_grad=True)
    (grad,) = torch.autograd.grad(gate(p, y), y, sign.expand(-1, 2))
    assert grad.tolist() == [[0.125, 0.125]]


def test_what_is_not_owned_is_not_written_to():
    p, h, y = torch.tensor([0.0, 0.5]), torch.ones(2, 3), torch.full((2, 3), math.nan)
    gate(p, y), add_gated(h, p, y), zero_at(p == 0, y)
    assert y.isnan().all()
    assert zero_at(p > 1, y) is y  # no null, no pass
    assert zero_at(p == 0, y, own=True) is y and torch.all(y[0] == 0)
    # Nulls of one dim for tokens of two, and a y that tokens share: owned or not.
    heads, shared = torch.ones(2, 4, 3), torch.ones(3)
    zero_at((p == 0)[:, None], heads)
    assert torch.equal(zero_at(p == 0, shared, own=True), torch.tensor([[0.0], [1.0]]).expand(2, 3))
    assert torch.all(heads == 1) and torch.all(shared == 1)
    # Where a gradient is recorded, what made y may need it as it was.
    for function, slopes in (
        (lambda y: zero_at(p == 0, y, own=True), [[0.0], [0.5]]),
        (lambda y: gate_(p, y), [[0.0], [0.25]]),
        (lambda y: gate_(p + 0.5, y), [[0.25], [0.5]]),
    ):
        x = torch.ones(2, 3, requires_grad=True)
        function(x.sqrt()).sum().backward()
        assert torch.equal(x.grad, torch.tensor(slopes).expand(2, 3))


def test_selection_without_a_look_at_values():
    """Compiled, vmapped, on fake tensors: no branch on values, and the same result."""
    p, h, y = torch.tensor([[0.0, 0.5], [0.25, 0.0]]), torch.ones(2, 2, 3), torch.randn(2, 2, 3)
    y[p == 0] = math.nan

    def run(p, h, y):
        return gate(p, y), add_gated(h, p, y, own=True), zero_at(p == 0, y), tame(p.unsqueeze(-1) * h, 0.5)

    expected = run(p, h, y.clone())
    assert not any(out.isnan().any() for out in expected)
    compiled = torch.compile(run, fullgraph=True, backend="eager")
    for out in (compiled(p, h, y), torch.vmap(run)(p, h, y)):
        for a, b in zip(out, expected, strict=True):
            assert torch.equal(a, b)
    slope = torch.vmap(torch.func.grad(lambda y, p: gate(p, y).sum()))(y, p)
    assert torch.equal(slope, p[..., None].expand_as(y))
    with FakeTensorMode() as mode:
        assert run(*(mode.from_tensor(x) for x in (p, h, y)))[1].shape == y.shape


@pytest.mark.parametrize("dtype", EPS)
@pytest.mark.parametrize(
    "function",
    [
        lambda h: h / h.norm(dim=-1, keepdim=True),
        lambda h: torch.nn.functional.layer_norm(h, h.shape[-1:], eps=0.0),
        lambda h: torch.nn.functional.rms_norm(h, h.shape[-1:], eps=0.0),
        lambda h: 1 / h,
    ],
)
def test_tame(function, dtype):
    """Live tokens as they are; in place of the others one at which what divides by zero does not."""
    h = tokens(requires_grad=False).to(dtype)
    assert not function(h)[1].isfinite().any()
    with torch.no_grad():
        assert tame(h, 0.3) is h
    live = h[[0, 2]]
    assert tame(live, 0.3) is live
    h.requires_grad_()
    out = tame(h, 0.3)
    assert out.dtype == dtype
    assert torch.equal(out[[0, 2]], h[[0, 2]])
    assert function(out).isfinite().all()
    (grad,) = torch.autograd.grad(zero_at(presence(h, 0.3) == 0, function(out)).sum(), h)
    assert grad.isfinite().all() and torch.all(grad[[1, 3]] == 0)
