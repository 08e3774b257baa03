"""Presence against plain float64 loops over the formula, over the whole range of carriers and taus."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from oretrofit.patches import gate, log_presence, presence, squared_norm
from oretrofit.patches.presence import add_gated, log_presence_at, presence_at

HALVES = [torch.float16, torch.bfloat16]
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
    torch.testing.assert_close(log_p[1:], torch.zeros(3), atol=1e-20, rtol=0)


def test_log_presence_is_accurate_near_one():
    h = torch.tensor([[3.0, 4.0]])
    assert presence(h, 1e-12).log() == 0  # what the plain logarithm loses
    assert log_presence(h, 1e-12).item() == pytest.approx(-1e-12 / 25, rel=1e-5)


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
    assert log_p[0].item() == pytest.approx(-math.log(2)) and log_p[1] == -math.inf


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
    assert torch.equal(out, (p.double()[:, None] * y.double()).to(dtype))
