"""The O-operators against plain float64 loops over their formulas, and the laws they must keep."""

import copy
import math
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck
from torch.nn.attention import SDPBackend, sdpa_kernel

from oretrofit.patches import (
    OFFN,
    OAttention,
    ONorm,
    OTransformer,
    OTransformerBlock,
    log_presence,
    oattention,
    oinject,
    operators,
    ostandardize,
    presence,
)
from oretrofit.patches.operators import support_moments

HALVES = [torch.float16, torch.bfloat16]
FULLS = [torch.float32, torch.float64]
GARBAGE = [math.nan, math.inf, -math.inf, 1e38, -1e38]
EPS_DEN = [0.0, 1e-6, 0.5]
DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]
FEW = settings(max_examples=50, deadline=None)


def eps_of(dtype):
    return torch.finfo(dtype).eps


# --- The formulas, as float64 loops ---


def as_array(x):
    return x.detach().cpu().double().numpy()


def presence_loop(h, tau):
    """Presence of each token of h (..., E)."""
    p = np.zeros(h.shape[:-1])
    for index in np.ndindex(p.shape):
        n = sum(x * x for x in h[index].tolist())
        p[index] = n / (tau + n)
    return p


def oattention_loop(q, k, v, p_i, p_j, *, visible=None, additive=None, eps_den=0.0, scale=None):
    """sum_j m p_j exp(s) v_j / (eps_den + sum_j m p_j exp(s)), times p_i; an empty sum gives 0.

    Tokens with p = 0 are left out: nothing of theirs is looked at.
    """
    batch, heads, receivers, width = q.shape
    sources = k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    full = (batch, heads, receivers, sources)
    m = np.broadcast_to(True if visible is None else visible, full)
    a = np.broadcast_to(0.0 if additive is None else additive, full)
    out = np.zeros((batch, heads, receivers, v.shape[-1]))
    for b, head, i in np.ndindex(full[:3]):
        if p_i[b, i] == 0:
            continue
        group = head // (heads // k.shape[1])
        numerator, denominator, support = np.zeros(v.shape[-1]), eps_den, False
        for j in np.flatnonzero(p_j[b]):
            score = scale * sum(x * y for x, y in zip(q[b, head, i], k[b, group, j], strict=True)) + a[b, head, i, j]
            if m[b, head, i, j] and score > -math.inf:
                weight = p_j[b, j] * math.exp(score)
                numerator, denominator, support = numerator + weight * v[b, group, j], denominator + weight, True
        if support:
            out[b, head, i] = p_i[b, i] * numerator / denominator
    return out


def onorm_loop(h, y, tau):
    """p(h) y, for the values y that the norm takes."""
    p, out = presence_loop(h, tau), np.zeros_like(h)
    for index in np.ndindex(p.shape):
        out[index] = p[index] * y[index]
    return out


def offn_loop(h, y, tau):
    """h + p(h) y, for the values y that the network takes; OInject as well."""
    return h + onorm_loop(h, y, tau)


def ostandardize_loop(x, p, eps=1e-5):
    """x (S, E) and p (S,), one column at a time."""
    out, mass = np.zeros_like(x), sum(p.tolist())
    if mass == 0:
        return out
    for e in range(x.shape[1]):
        mu = sum(p_s * x_s for p_s, x_s in zip(p, x[:, e], strict=True)) / mass
        var = sum(p_s * (x_s - mu) ** 2 for p_s, x_s in zip(p, x[:, e], strict=True)) / mass
        for s in range(len(x)):
            out[s, e] = p[s] * (x[s, e] - mu) / math.sqrt(var + eps)
    return out


# --- Attention calls ---


@dataclass(frozen=True)
class Call:
    """One call of OAttention, in float64. Zero carriers keep non-zero heads, as behind a biased projection."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    h_i: torch.Tensor
    h_j: torch.Tensor
    tau: float
    visible: torch.Tensor | None = None
    additive: torch.Tensor | None = None
    eps_den: float = 0.0
    scale: float | None = None

    def rounded(self, dtype):
        """The call on inputs rounded to dtype."""
        names = ["q", "k", "v", "h_i", "h_j"]
        return replace(self, **{name: getattr(self, name).to(dtype).double() for name in names})

    def options(self):
        return {"visible": self.visible, "additive": self.additive, "eps_den": self.eps_den, "scale": self.scale}

    def run(self, dtype, device="cpu"):
        q, k, v, h_i, h_j = (x.to(device, dtype) for x in (self.q, self.k, self.v, self.h_i, self.h_j))
        options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in self.options().items()}
        p_i, log_p_j = presence(h_i, self.tau), log_presence(h_j, self.tau)
        return oattention(q, k, v, presence_BS=p_i, log_presence_BJ=log_p_j, **options)

    def loop(self):
        options = {name: as_array(x) if isinstance(x, torch.Tensor) else x for name, x in self.options().items()}
        p_i, p_j = (presence_loop(as_array(h), self.tau) for h in (self.h_i, self.h_j))
        return torch.tensor(oattention_loop(*map(as_array, (self.q, self.k, self.v)), p_i, p_j, **options))

    def rounding(self, dtype, device="cpu"):
        """A bound on the error that computing in dtype may make, to first order, on any IEEE machine.

        In unit roundoffs of float32 at least, in which kernels accumulate. A score is a sum of D products,
        scaled, with two biases added and the largest score taken off; `log p_j` is off by twice itself and
        what its ||h||^2 is off by. That error is a relative one of the exponential, which torch's fastest
        takes to 20 units in the last place. It is in the numerator and in the denominator, two sums over
        the sources. Then there are a quotient, the gate and its product. Half precision rounds the shares,
        the output and the gated output once each, and on CUDA the bias.
        """
        u = eps_of(torch.promote_types(dtype, torch.float32)) / 2
        width, sources, carrier = self.q.shape[-1], self.k.shape[2], self.h_j.shape[-1]
        scale = width**-0.5 if self.scale is None else self.scale
        dot = abs(scale) * (self.q.norm(dim=-1).amax() * self.k.norm(dim=-1).amax() if self.k.numel() else 0.0)
        added = 0.0 if self.additive is None else self.additive.nan_to_num(neginf=0).abs().amax()
        log_p = log_presence(self.h_j, self.tau)
        mass = log_p[log_p.isfinite()].abs().amax() if log_p.isfinite().any() else 0.0
        mass += abs(math.log(self.eps_den)) if self.eps_den else 0.0
        score = (width + 2) * dot + 4 * (dot + added + mass) + 2 * mass + carrier + 4
        bound = (2 * (score + 40 + sources + 1) + carrier + 8) * u
        if dtype in HALVES:
            bound += (3 + 2 * (added + mass) * (device == "cuda")) * eps_of(dtype) / 2
        return float(bound * (self.v.abs().amax() if self.v.numel() else 0.0))


def randn(rng, *shape):
    return torch.tensor(rng.standard_normal(shape))


def lengths(h, rng, low=-2, high=2):
    """Tokens of h scaled over decades."""
    return h * torch.tensor(10.0 ** rng.uniform(low, high, (*h.shape[:-1], 1)))


def zeroed(h, where):
    """h with the tokens of these indices set to zero, in the whole batch."""
    h = h.clone()
    h[..., list(where), :] = 0
    return h


def some_indices(count):
    return st.lists(st.integers(0, count - 1), max_size=count) if count else st.just([])


@st.composite
def calls(draw, max_decade=30):
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    batch, kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 2)), draw(st.integers(1, 3))
    receivers, sources = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    width, value_width = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    value_width = draw(st.sampled_from([width, value_width]))
    heads = kv_heads * group
    masks = st.sampled_from(
        [
            *((batch, heads, receivers, sources), (batch, 1, 1, sources), (1, heads, receivers, 1)),
            *((receivers, sources), (sources,)),
        ]
    )
    visible = additive = None
    if draw(st.booleans()):
        visible = torch.tensor(rng.random(draw(masks)) < draw(st.sampled_from([0.2, 0.7])))
    if draw(st.booleans()):
        additive = randn(rng, *draw(masks))
        additive[torch.tensor(rng.random(additive.shape) < 0.2)] = -math.inf
    return Call(
        q=randn(rng, batch, heads, receivers, width),
        k=randn(rng, batch, kv_heads, sources, width),
        v=randn(rng, batch, kv_heads, sources, value_width),
        h_i=zeroed(lengths(randn(rng, batch, receivers, 4), rng), draw(some_indices(receivers))),
        h_j=zeroed(lengths(randn(rng, batch, sources, 4), rng), draw(some_indices(sources))),
        tau=draw(st.floats(1, 10)) * 10.0 ** draw(st.integers(-max_decade, max_decade)),
        visible=visible,
        additive=additive,
        eps_den=draw(st.sampled_from(EPS_DEN)),
        scale=draw(st.sampled_from([None, 0.0, 0.7, -2.0])),
    )


def fixed_call(*, receivers=24, sources=30, heads=2, kv_heads=2, width=16, tau=3.0, masks=True, batch=1, **options):
    rng = np.random.default_rng(0)
    h_i, h_j = randn(rng, batch, receivers, 4), randn(rng, batch, sources, 4)
    if masks:
        options["visible"] = torch.tensor(rng.random((receivers, sources)) < 0.7)
        options["additive"] = randn(rng, heads, receivers, sources)
    return Call(
        q=randn(rng, batch, heads, receivers, width),
        k=randn(rng, batch, kv_heads, sources, width),
        v=randn(rng, batch, kv_heads, sources, width),
        h_i=zeroed(h_i, [0, receivers - 1]),
        h_j=zeroed(h_j, [1, sources - 1]),
        tau=tau,
        **options,
    )


def max_error(actual, expected):
    return (actual.double().cpu() - expected).abs().max().item() if expected.numel() else 0.0


# --- OAttention ---


@pytest.mark.parametrize("dtype", FULLS)
@FEW
@given(calls())
def test_oattention_agrees_with_the_loop(dtype, call):
    call = call.rounded(dtype)
    out, expected = call.run(dtype), call.loop()
    assert out.dtype == dtype and out.shape == expected.shape
    assert max_error(out, expected) <= call.rounding(dtype)
    # Null receivers and empty support are exact, both ways of counting.
    assert torch.all(out[expected == 0] == 0) and out.isfinite().all()
    null = (call.h_i == 0).all(dim=-1)
    assert torch.all(out.transpose(1, 2)[null] == 0)


@pytest.mark.parametrize("dtype", FULLS)
@FEW
@given(calls(), st.data())
def test_null_sources_change_nothing(dtype, call, data):
    """Zero carriers anywhere among the sources, with heads, scores and visibility of any kind."""
    sources, added = call.k.shape[2], data.draw(st.integers(1, 4))
    order = data.draw(st.permutations(range(sources + added)))
    rng = np.random.default_rng(added)

    def insert(x, dim, fill):
        if x is None or (dim == -1 and x.shape[-1] == 1):
            return x
        shape = list(x.shape)
        shape[dim] = added
        return torch.cat([x, fill(shape)], dim).index_select(dim, torch.tensor(order))

    longer = replace(
        call,
        k=insert(call.k, 2, lambda shape: 3 * randn(rng, *shape)),
        v=insert(call.v, 2, lambda shape: 3 * randn(rng, *shape)),
        h_j=insert(call.h_j, 1, lambda shape: torch.zeros(shape, dtype=torch.float64)),
        visible=insert(call.visible, -1, lambda shape: torch.tensor(rng.random(shape) < 0.5)),
        additive=insert(call.additive, -1, lambda shape: 3 * randn(rng, *shape)),
    )
    # Each is within its rounding of the same exact value.
    bound = call.rounding(dtype) + longer.rounding(dtype)
    before, after = call.run(dtype), longer.run(dtype)
    assert max_error(after, before.double()) <= bound
    assert torch.all(after[before == 0].abs() <= bound)


@pytest.mark.parametrize("dtype", FULLS)
@FEW
@given(calls())
def test_small_tau_is_the_hosts_attention(dtype, call):
    """tau -> 0 with no zero token: F.scaled_dot_product_attention, except that nothing visible gives 0."""
    h_i, h_j = (torch.ones_like(h) for h in (call.h_i, call.h_j))
    call = replace(call, h_i=h_i, h_j=h_j, tau=1e-30, eps_den=0.0)
    shape = (*call.q.shape[:3], call.k.shape[2])
    mask = torch.zeros(shape) if call.additive is None else call.additive.expand(shape)
    if call.visible is not None:
        mask = mask.masked_fill(~call.visible, -math.inf)
    q, k, v, mask = (x.to(dtype) for x in (call.q, call.k, call.v, mask))
    host = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=call.scale, enable_gqa=True)
    host = host.masked_fill((mask == -math.inf).all(dim=-1, keepdim=True), 0)
    assert max_error(call.run(dtype), host.double()) <= 2 * call.rounding(dtype)


def test_full_presence_is_the_hosts_attention():
    call = fixed_call(masks=False)
    ones, zeros = torch.ones(1, 24), torch.zeros(1, 30)
    out = oattention(call.q, call.k, call.v, presence_BS=ones, log_presence_BJ=zeros)
    host = F.scaled_dot_product_attention(call.q, call.k, call.v)
    assert max_error(out, host) <= 2 * call.rounding(torch.float64)


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@pytest.mark.parametrize("support", ["zero sources", "invisible", "-inf scores", "live but invisible", "no sources"])
def test_empty_support_is_exactly_zero(support, dtype, eps_den):
    call = fixed_call(receivers=5, sources=6, width=4, eps_den=eps_den, masks=False)
    live = torch.tensor([True, False, True, True, False, False])
    h_j = torch.randn_like(call.h_j) * live[:, None]
    call = {
        "zero sources": lambda: replace(call, h_j=torch.zeros_like(h_j)),
        "invisible": lambda: replace(call, h_j=h_j, visible=torch.zeros(5, 6, dtype=torch.bool)),
        "-inf scores": lambda: replace(call, h_j=h_j, additive=torch.full((5, 6), -math.inf)),
        "live but invisible": lambda: replace(call, h_j=h_j, visible=~live),
        "no sources": lambda: replace(call, h_j=h_j[:, :0], k=call.k[:, :, :0], v=call.v[:, :, :0]),
    }[support]()
    leaves = {name: getattr(call, name).to(dtype).requires_grad_() for name in ["q", "k", "v", "h_i", "h_j"]}
    out = replace(call, **leaves).run(dtype)
    assert torch.all(out == 0)
    for grad in torch.autograd.grad(out.sum(), list(leaves.values()), allow_unused=True):
        assert grad is None or torch.all(grad == 0)


@pytest.mark.parametrize("dtype", FULLS)
@pytest.mark.parametrize("fill", [-1e4, -1e31, torch.finfo(torch.float32).min])
def test_hugely_negative_scores_do_not_bring_null_sources_back(dtype, fill):
    """Masks that hide by a large finite number leave a row of such numbers as a plain mean of the live."""
    call = fixed_call(receivers=3, sources=6, width=4, tau=1e-30, masks=False)
    call = replace(call, q=0 * call.q, additive=torch.full((3, 6), fill, dtype=dtype))
    live = (call.h_j[0] != 0).any(-1)
    expected = call.v[:, :, live].mean(2, keepdim=True) * presence(call.h_i, call.tau)[:, None, :, None]
    # Equal weights: a sum of six values, its divisor, the presence and the gate.
    bound = 2 * 6 * eps_of(dtype) * call.v.abs().max()
    assert max_error(call.run(dtype), expected) <= bound


@pytest.mark.parametrize("dtype", FULLS)
def test_tau_below_the_dtypes_range(dtype):
    call = fixed_call(receivers=5, sources=6, width=4, tau=1e-60)
    assert max_error(call.run(dtype), replace(call, tau=1e-300).loop()) <= call.rounding(dtype)


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
def test_oattention_with_and_without_gradients(dtype, train, eps_den):
    """`train` lets gradients flow into the presences, which makes torch take another kernel."""
    call = fixed_call(eps_den=eps_den).rounded(dtype)
    call = replace(call, additive=call.additive.to(dtype).double())
    expected = call.loop()
    bound = call.rounding(dtype)
    assert bound < 0.05 * expected.abs().max()
    leaves = replace(call, h_i=call.h_i.requires_grad_(train), h_j=call.h_j.requires_grad_(train))
    out = leaves.run(dtype)
    assert out.dtype == dtype and out.requires_grad == train
    assert max_error(out, expected) <= bound
    assert torch.all(out[expected == 0] == 0)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_gate_and_bias_are_not_rounded_to_half(dtype, autocast):
    """Equal scores and values, so that the gate and the bias decide alone."""
    eps, p = eps_of(dtype), torch.linspace(1e-3, 1, 200)[None]
    zeros = torch.zeros(1, 1, 200, 8, dtype=dtype)
    values = torch.full_like(zeros, 1.3)
    with torch.autocast("cpu", dtype, enabled=autocast):
        gated = oattention(zeros, zeros, values, presence_BS=p, log_presence_BJ=0 * p)[0, 0, :, 0].double()
    exact = p[0].double() * values[0, 0, 0, 0].double()
    # The kernel's mean of equal values is that value. One rounding of the product, after one in float32.
    assert torch.all((gated - exact).abs() <= 0.505 * eps * exact)

    log_p = torch.linspace(-9, -7, 200)[:, None] + torch.tensor([0.0, -0.013])
    pairs = torch.zeros(200, 1, 2, 8, dtype=dtype)
    values = torch.tensor([1.0, 0.0], dtype=dtype)[:, None].expand_as(pairs)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = oattention(pairs, pairs, values, presence_BS=torch.ones(200, 2), log_presence_BJ=log_p)
    # One rounding of the weights in the kernel and one of the output, half of an eps each; a rounded log p would
    # be off by 4 eps.
    exact = log_p.double().softmax(-1)[:, 0]
    assert torch.all((out[:, 0, 0, 0].double() - exact).abs() <= eps * exact)


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@pytest.mark.parametrize("device", DEVICES)
def test_oattention_on_each_device(device, dtype, eps_den):
    call = fixed_call(batch=2, heads=4, eps_den=eps_den).rounded(dtype)
    out, expected = call.run(dtype, device), call.loop()
    assert out.device.type == device and out.dtype == dtype
    assert max_error(out, expected) <= call.rounding(dtype, device)
    assert torch.all(out[(expected == 0).to(device)] == 0)


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("kept", HALVES)
def test_keys_and_values_kept_in_half_precision(kept, eps_den):
    """Beside queries in float32: the result is in the queries' dtype and precision."""
    call = fixed_call(eps_den=eps_den).rounded(torch.float32)
    k, v = call.k.to(kept), call.v.to(kept)
    call = replace(call, k=k.double(), v=v.double())
    p_i, log_p_j = presence(call.h_i.float(), call.tau), log_presence(call.h_j.float(), call.tau)
    out = oattention(call.q.float(), k, v, presence_BS=p_i, log_presence_BJ=log_p_j, **call.options())
    assert out.dtype == torch.float32
    assert max_error(out, call.loop()) <= call.rounding(torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_a_batch_larger_than_cudas_grid(device, masks, dtype):
    call = fixed_call(batch=66_000, receivers=3, sources=4, width=8, masks=masks).rounded(dtype)
    out = call.run(dtype, device)
    assert max_error(out, call.run(torch.float64)) <= call.rounding(dtype, device)
    null = (call.h_i == 0).all(dim=-1).to(device)
    assert torch.all(out.transpose(1, 2)[null] == 0)


# --- Which of CUDA's kernels is asked for, to be seen without one ---

CUDA = torch.backends.cuda
EFFICIENT_OR_MATH = {"flash": False, "cudnn": False, "efficient": True, "math": True}


def allowed():
    """Which kernels torch may choose among."""
    return {
        "flash": CUDA.flash_sdp_enabled(),
        "cudnn": CUDA.cudnn_sdp_enabled(),
        "efficient": CUDA.mem_efficient_sdp_enabled(),
        "math": CUDA.math_sdp_enabled(),
    }


class OnCuda(torch.Tensor):
    """Says that it is on a GPU."""

    device = property(lambda self: torch.device("cuda"))


@pytest.fixture
def calls_on_cuda(monkeypatch):
    """The kernels allowed in each call of torch's attention and its batch, for tensors that say they are on a GPU."""
    seen = []

    def attention(q, k, v, **options):
        seen.append((allowed(), len(q)))
        time.sleep(1e-4)
        return q.new_empty(*q.shape[:-1], v.shape[-1])

    monkeypatch.setattr(F, "scaled_dot_product_attention", attention)

    def run(dtype=torch.bfloat16, batch=2, heads=2):
        x, p = torch.zeros(batch, heads, 3, 8, dtype=dtype).as_subclass(OnCuda), torch.zeros(batch, 3)
        out = oattention(x, x, x, presence_BS=p, log_presence_BJ=p)
        assert (out.shape, out.dtype) == (x.shape, dtype)
        return seen

    return run


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
def test_attention_with_a_bias_keeps_away_from_cudnn(calls_on_cuda, dtype):
    before = allowed()
    assert before["cudnn"] and before["flash"]
    assert calls_on_cuda(dtype) == [(EFFICIENT_OR_MATH, 2)]
    assert allowed() == before


def test_cudnn_can_be_allowed(calls_on_cuda, monkeypatch):
    monkeypatch.setattr(operators, "_CUDA_KERNELS", None)
    assert calls_on_cuda() == [(allowed(), 2)]
    code = "from oretrofit.patches import operators; print(operators._CUDA_KERNELS)"
    environment = {**os.environ, "ORETROFIT_CUDNN_ATTENTION": "1"}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout == "None\n"


def test_the_choice_of_kernels_in_threads(calls_on_cuda):
    """Several devices run in threads; each puts back what was allowed before, not what another one has set."""
    before = allowed()
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda _: calls_on_cuda(), range(100)))[-1]
    assert seen == [(EFFICIENT_OR_MATH, 2)] * 100
    assert allowed() == before


def test_the_choice_of_kernels_can_be_compiled():
    q, bias = torch.randn(3, 2, 5, 8), torch.randn(3, 1, 1, 5)
    compiled = torch.compile(operators._attention_on_cuda, fullgraph=True, backend="aot_eager")
    with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
        expected = F.scaled_dot_product_attention(q, q, q, attn_mask=bias)
    assert torch.equal(compiled(q, q, q, bias, None), expected)
    assert torch.equal(operators._attention_on_cuda(q, q, q, bias, None), expected)


def test_only_the_batch_is_cut_for_cudas_grid(calls_on_cuda):
    """Heads are another dimension of the grid."""
    assert [batch for _, batch in calls_on_cuda(batch=65_535, heads=8)] == [65_535]
    assert [batch for _, batch in calls_on_cuda(batch=140_000, heads=1)][1:] == [46_667, 46_667, 46_666]


def test_oattention_refuses():
    call = fixed_call(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 query heads"):
        call.run(torch.float32)
    for eps_den in (-1e-9, math.inf, math.nan):
        with pytest.raises(ValueError, match="eps_den"):
            fixed_call(eps_den=eps_den).run(torch.float32)
    with pytest.raises(ValueError, match="num_heads"):
        OAttention(10, 3, tau=1.0)
    h = torch.ones(1, 2, 4)
    for tau in (0.0, -1.0, math.nan, math.inf):
        for module in (OAttention(4, 2, tau), ONorm(nn.LayerNorm(4), tau), OFFN(nn.Linear(4, 4), tau)):
            with pytest.raises(ValueError, match="tau"):
                module(h)
        with pytest.raises(ValueError, match="tau"):
            oinject(h, h, tau)


# --- Modules: attention, block, stack ---


def randomized(module, dtype=torch.float64, seed=0):
    """The module with every parameter random: LayerNorm weights and biases too, which start at 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = 0.5 * torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
    return module.to(dtype)


def rounding_of(module, dtype, *inputs, **options):
    """How far rounding in dtype may move the module's output on these inputs.

    A computed sum is the exact one for factors perturbed by a unit roundoff per term. So: the largest change
    in float64 of four random perturbations of all weights and inputs by one unit roundoff, times the longest
    sum, 32 terms (in half precision sums are float32's, and about three tensors are rounded for each weight),
    times 3 as no random perturbation is the worst, or is in a softmax, norm or gate.
    """
    module, inputs = copy.deepcopy(module).double(), [x.double() for x in inputs]
    # In float64 itself nothing smaller can be measured; to first order the change is proportional.
    u, step = eps_of(dtype) / 2, max(eps_of(dtype) / 2, 2.0**-24)
    generator, largest = torch.Generator().manual_seed(0), 0.0

    def perturbed(x):
        return x * (1 + step * (2 * torch.rand(x.shape, dtype=x.dtype, generator=generator) - 1))

    with torch.no_grad():
        exact, weights = module(*inputs, **options), [parameter.clone() for parameter in module.parameters()]
        for _ in range(4):
            for parameter, weight in zip(module.parameters(), weights, strict=True):
                parameter.copy_(perturbed(weight))
            largest = max(largest, max_error(module(*map(perturbed, inputs), **options), exact))
    return largest * u / step * 3 * (32 if dtype in FULLS else 3)


MODULES = {
    "attention": lambda: OAttention(8, 2, tau=0.3),
    "grouped attention with a sink": lambda: OAttention(8, 4, tau=0.3, num_kv_heads=2, eps_den=0.5),
    "block": lambda: OTransformerBlock(8, 2, tau=0.3),
    "stack": lambda: OTransformer(8, 2, num_blocks=2, tau=0.3),
}


@st.composite
def insertions(draw):
    """Tokens (B, S, 8), the same with zeros inserted anywhere, and where the old ones went."""
    batch, size, added = draw(st.integers(1, 2)), draw(st.integers(1, 9)), draw(st.integers(1, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h = randn(rng, batch, size, 8) * draw(st.sampled_from([0.1, 1.0, 3.0]))
    old = sorted(draw(st.permutations(range(size + added)))[:size])
    longer = torch.zeros(batch, size + added, 8, dtype=h.dtype)
    longer[:, old] = h
    visible = visible_longer = None
    if draw(st.booleans()):
        visible = torch.tensor(rng.random((size, size)) < 0.7)
        visible_longer = torch.tensor(rng.random((size + added, size + added)) < 0.7)
        visible_longer[np.ix_(old, old)] = visible
    return h, longer, old, visible, visible_longer


@pytest.mark.parametrize("dtype", FULLS)
@pytest.mark.parametrize("name", MODULES)
@settings(max_examples=40, deadline=None)
@given(insertions())
def test_inserted_zero_tokens_stay_zero_and_change_nobody(name, dtype, case):
    h, longer, old, visible, visible_longer = case
    module = randomized(MODULES[name](), dtype)
    with torch.no_grad():
        before = module(h.to(dtype), visible=visible)
        after = module(longer.to(dtype), visible=visible_longer)
    new = sorted(set(range(longer.shape[1])) - set(old))
    assert torch.all(after[:, new] == 0)
    # Another token count may sum in another order.
    bound = 2 * rounding_of(module, dtype, h, visible=visible)
    assert max_error(after[:, old], before.double()) <= bound


@pytest.mark.parametrize("name", MODULES)
def test_without_presence_a_zero_token_would_not_be_inert(name, monkeypatch):
    """The same check fails on the host's own operators, so it can fail."""
    monkeypatch.setattr("oretrofit.patches.operators.presence", lambda h, tau: torch.ones_like(h[..., 0]))
    monkeypatch.setattr("oretrofit.patches.operators.log_presence", lambda h, tau: torch.zeros_like(h[..., 0]))
    module = randomized(MODULES[name]())
    h = randn(np.random.default_rng(0), 1, 5, 8)
    before, after = module(h), module(torch.cat([h, torch.zeros(1, 1, 8, dtype=h.dtype)], dim=1))
    assert max_error(after[:, :5], before) > 1e-2
    assert after[:, 5].abs().max() > 1e-2


@pytest.mark.parametrize("name", MODULES)
def test_nothing_but_zeros(name):
    module = randomized(MODULES[name]())
    h = torch.zeros(2, 4, 8, dtype=torch.float64, requires_grad=True)
    out = module(h)
    assert torch.all(out == 0)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (h, *module.parameters()))


def test_oattention_module_is_its_formula():
    """Cross-attention through the projections, presence read off the carriers before the norm."""
    module = randomized(OAttention(8, 4, tau=0.3, num_kv_heads=2, eps_den=0.5))
    rng = np.random.default_rng(1)
    h, context = zeroed(randn(rng, 2, 5, 8), [2]), zeroed(randn(rng, 2, 7, 8), [0, 6])
    norm = randomized(nn.LayerNorm(8))
    visible, additive = torch.tensor(rng.random((5, 7)) < 0.7), randn(rng, 4, 5, 7)
    out = module(h, context, norm=norm, visible=visible, additive=additive)

    def heads(linear, x, count):
        projected = as_array(norm(x)) @ as_array(linear.weight).T + as_array(linear.bias)
        return projected.reshape(2, -1, count, 2).transpose(0, 2, 1, 3)

    attended = oattention_loop(
        heads(module.q_projection, h, 4),
        heads(module.k_projection, context, 2),
        heads(module.v_projection, context, 2),
        presence_loop(as_array(h), 0.3),
        presence_loop(as_array(context), 0.3),
        visible=visible.numpy(),
        additive=additive.numpy(),
        eps_den=0.5,
    )
    expected = attended.transpose(0, 2, 1, 3).reshape(2, 5, 8) @ as_array(module.out_projection.weight).T
    bound = rounding_of(module, torch.float64, h, context, norm=norm, visible=visible, additive=additive)
    np.testing.assert_allclose(as_array(out), expected, rtol=0, atol=bound)


def test_block_is_its_formula():
    """h + OAttention(h), then h + p(h) FFN(p(h) LayerNorm(h)), each presence that of its own input."""
    block = randomized(OTransformerBlock(8, 2, tau=0.3))
    h = inputs = zeroed(randn(np.random.default_rng(6), 1, 5, 8), [2])
    norm, *layers = block.ffn.ffn
    h = h + block.attention(h, norm=block.norm)
    normed = torch.tensor(onorm_loop(as_array(h), as_array(norm.norm(h)), 0.3))
    expected = offn_loop(as_array(h), as_array(nn.Sequential(*layers)(normed)), 0.3)
    bound = rounding_of(block, torch.float64, inputs)
    np.testing.assert_allclose(as_array(block(inputs)), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_modules_in_half_precision_keep_zeros(name, autocast, dtype):
    """Cast to it, or under autocast in float32."""
    h = zeroed(randn(np.random.default_rng(7), 2, 12, 8), [0, 5, 11])
    kind = torch.float32 if autocast else dtype
    full, module = randomized(MODULES[name]()), randomized(MODULES[name](), kind)
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=autocast):
        half = module(h.to(kind))
    assert autocast or half.dtype == dtype
    assert torch.all(half[:, [0, 5, 11]] == 0)
    bound = rounding_of(full, dtype, h)
    assert bound < full(h).abs().max()
    assert max_error(half, full(h)) <= bound


# --- Local operators and moments ---


@st.composite
def tokens(draw):
    size, width = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    h = zeroed(lengths(randn(rng, size, width), rng), draw(some_indices(size)))
    return h, randn(rng, size, width), draw(st.floats(1, 10)) * 10.0 ** draw(st.integers(-30, 30))


@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@FEW
@given(tokens())
def test_local_operators_agree_with_the_loop(dtype, case):
    """OFFN, ONorm and OInject with a branch that is not zero at zero, given as its values."""
    h, y = (x.to(dtype) for x in case[:2])
    tau, eps, unit = case[2], eps_of(dtype), torch.finfo(dtype).tiny * eps_of(dtype)
    expected_norm = torch.tensor(onorm_loop(as_array(h), as_array(y), tau))
    # One rounding of p y to dtype and a few of p, in float32 at least; adding it to h is another one.
    presence_eps = (h.shape[1] + 4) * min(eps, eps_of(torch.float32))
    gated = (eps / 2 + presence_eps) * expected_norm.abs() + unit
    norm = ONorm(lambda _: y, tau)(h)
    assert norm.dtype == dtype and torch.all((norm.double() - expected_norm).abs() <= gated)
    expected = torch.tensor(offn_loop(as_array(h), as_array(y), tau))
    for out in (OFFN(lambda _: y, tau)(h), oinject(h, y, tau)):
        assert out.dtype == dtype
        assert torch.all((out.double() - expected).abs() <= 2 * gated + eps * expected.abs())
    null = (h == 0).all(dim=-1)
    assert torch.all(norm[null] == 0) and torch.all(out[null] == 0)


@pytest.mark.parametrize("dtype", FULLS)
@FEW
@given(tokens(), st.data())
def test_ostandardize_agrees_with_the_loop_and_is_closed(dtype, case, data):
    h, x = (part.to(dtype) for part in case[:2])
    p = presence(h, case[2])
    expected = ostandardize_loop(as_array(x), as_array(p))
    # A mean is off by a few eps max|x|; the deviation it is measured in may be as small as sqrt(1e-5).
    bound = 5 * eps_of(dtype) * x.abs().max().item() / math.sqrt(1e-5)
    out = ostandardize(x, p)
    assert out.dtype == dtype
    np.testing.assert_allclose(as_array(out), expected, rtol=0, atol=bound)
    assert torch.all(out[p == 0] == 0)

    at = data.draw(st.integers(0, len(x)))
    wide_x = torch.cat([x[:at], torch.full((2, x.shape[1]), 7.0, dtype=dtype), x[at:]])
    wide_p = torch.cat([p[:at], torch.zeros(2, dtype=dtype), p[at:]])
    wide = ostandardize(wide_x, wide_p)
    assert torch.all(wide[at : at + 2] == 0)
    assert max_error(torch.cat([wide[:at], wide[at + 2 :]]), out.double()) <= bound


@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
def test_ostandardize_without_mass_and_in_half_precision(dtype):
    x = (300 + 5 * torch.randn(2, 6, 3, generator=torch.Generator().manual_seed(0))).to(dtype)
    p = torch.tensor([[0.2, 1.0, 0.0, 0.5, 0.9, 1.0], [0.0] * 6])
    out = ostandardize(x, p)
    assert out.dtype == dtype and torch.all(out[1] == 0) and torch.all(out[0, 2] == 0)
    expected = ostandardize_loop(as_array(x[0]), as_array(p[0]))
    # Rounded once to dtype; computed in float32, where 300 is rounded by 300 eps beside a deviation of ~5.
    bound = eps_of(dtype) * 2 + 300 * eps_of(torch.float32)
    np.testing.assert_allclose(as_array(out[0]), expected, rtol=0, atol=bound)


def test_support_moments_by_hand():
    """Without mass, or with no more than the correction, sums are divided by 1."""
    x = torch.tensor([[1.0, 1.0], [3.0, 7.0]])
    for p, correction, expected in (
        ([[1.0, 0.5], [1.0, 1.0]], 0.0, ([2.0, 1.5], [2.0, 5.0], [1.0, 8.0])),
        ([[1.0, 0.5], [1.0, 1.0]], 1.0, ([2.0, 1.5], [2.0, 5.0], [2.0, 24.0])),
        ([[0.25, 0.5], [0.25, 0.5]], 1.0, ([0.5, 1.0], [2.0, 4.0], [0.5, 9.0])),
        ([[0.0, 0.0], [0.0, 1.0]], 0.0, ([0.0, 1.0], [0.0, 7.0], [0.0, 0.0])),
    ):
        for found, row in zip(support_moments(x, torch.tensor(p), 0, correction), expected, strict=True):
            # A handful of operations on numbers below 24; a share of 1/3 is rounded.
            torch.testing.assert_close(found, torch.tensor([row]), rtol=1e-6, atol=0)


@pytest.mark.parametrize("eps", [0.0, 1e-5])
def test_ostandardize_at_a_null_beside_live_tokens_that_are_not_finite(eps):
    """Or that have no variance, and without mass at all."""
    p = torch.tensor([0.0, 0.5, 1.0, 0.0])
    for live in ([math.inf, 1.0], [math.nan, 1.0], [2.0, 2.0]):
        out = ostandardize(torch.tensor([math.nan, *live, math.inf])[:, None].expand(-1, 3), p, eps)
        assert torch.all(out[[0, 3]] == 0)
    leaves = torch.zeros(4, requires_grad=True), torch.tensor(GARBAGE)[:4, None].requires_grad_()
    out = ostandardize(leaves[1], leaves[0], eps)
    assert torch.all(out == 0)
    assert all(torch.all(grad == 0) for grad in torch.autograd.grad(out.sum(), leaves))


# --- Gradients ---


@pytest.mark.parametrize("eps_den", [0.0, 0.5])
@pytest.mark.parametrize("masks", [False, True])
def test_gradients_of_oattention(masks, eps_den):
    """Zero receivers and zero sources among the inputs, and a receiver that sees live sources only in part."""
    call = fixed_call(receivers=3, sources=4, kv_heads=1, width=2, tau=0.5, masks=False, eps_den=eps_den)
    if masks:
        visible = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1], [0, 1, 1, 1]], dtype=torch.bool)
        call = replace(call, visible=visible, additive=randn(np.random.default_rng(3), 2, 3, 4).requires_grad_())
    names = ["q", "k", "v", "h_i", "h_j"] + ["additive"] * masks

    def run(*leaves):
        return replace(call, **dict(zip(names, leaves, strict=True))).run(torch.float64)

    leaves = [getattr(call, name).detach().requires_grad_() for name in names]
    assert gradcheck(run, leaves)
    # The same with only the heads as inputs, for which torch may take another kernel.
    leaves = [leaf.detach().requires_grad_(name in "qkv") for name, leaf in zip(names, leaves, strict=True)]
    assert gradcheck(run, leaves)


@pytest.mark.parametrize("zeros", [[], [1], [0, 2], [0, 1, 2]])
@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_modules(name, zeros):
    module = randomized(MODULES[name]())
    h = zeroed(randn(np.random.default_rng(4), 1, 3, 8), zeros).requires_grad_()
    assert gradcheck(module, h)
    visible = torch.tensor([[1, 0, 1], [1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert gradcheck(lambda h: module(h, visible=visible), h)


@pytest.mark.parametrize("zeros", [[], [1], [0, 1, 2, 3]])
def test_gradients_of_local_operators(zeros):
    rng = np.random.default_rng(5)
    h = zeroed(randn(rng, 4, 3), zeros).requires_grad_()
    u = randn(rng, 4, 3).requires_grad_()
    norm = randomized(nn.LayerNorm(3))
    ffn = randomized(nn.Sequential(nn.Linear(3, 5), nn.GELU(), nn.Linear(5, 3)))
    assert gradcheck(ONorm(norm, 0.3), h)
    assert gradcheck(OFFN(ffn, 0.3), h)
    assert gradcheck(lambda h, u: oinject(h, u, 0.3), (h, u))
    if len(zeros) < 4:  # without any mass the moments jump, and the output with them
        assert gradcheck(lambda h, u: ostandardize(u, presence(h, 0.3)), (h, u))
    grads = torch.autograd.grad(ostandardize(u, presence(h, 0.3)).sum(), (h, u))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("eps_den", EPS_DEN)
def test_gradients_are_never_nan(dtype, eps_den):
    call = fixed_call(receivers=5, sources=6, width=4, eps_den=eps_den)
    call.visible[1] = False  # empty support
    call.visible[2] = (call.h_j == 0).all(dim=-1)[0]  # sees zero tokens only
    leaves = {name: getattr(call, name).to(dtype).requires_grad_() for name in ["q", "k", "v", "h_i", "h_j"]}
    out = replace(call, **leaves).run(dtype)
    assert torch.all(out[:, :, [0, 1, 2, 4]] == 0)
    for name, grad in zip(leaves, torch.autograd.grad(out.sum(), list(leaves.values())), strict=True):
        assert grad.isfinite().all(), name
        if name in ("k", "v"):
            assert torch.all(grad[:, :, [1, 5]] == 0), name  # nothing flows into the heads of a null source
        if name == "h_j":
            assert torch.all(grad[:, [1, 5]] == 0)


# --- What stands behind a null ---


def garbled(call, rng):
    """The call with anything at all in what its zero carriers bring along, scores included."""
    null_i, null_j = ((h == 0).all(dim=-1)[:, None] for h in (call.h_i, call.h_j))  # (B, 1, S) and (B, 1, J)

    def fill(x, where):
        anything = torch.tensor(rng.choice(GARBAGE, x.shape))
        return torch.where(where.expand(torch.broadcast_shapes(where.shape, x.shape)), anything, x)

    q, k, v = (fill(x, null[..., None]) for x, null in ((call.q, null_i), (call.k, null_j), (call.v, null_j)))
    additive = call.additive
    if additive is not None:
        additive = additive.expand(call.q.shape[0], -1, -1, -1) if additive.ndim == 4 else additive[None, None]
        where = null_j[:, :, None] | (null_i[..., None] & (additive.shape[-2] > 1))
        additive = fill(additive, where) if additive.shape[-1] > 1 else additive
    return replace(call, q=q, k=k, v=v, additive=additive)


@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@FEW
@given(calls(max_decade=3), st.integers(0, 2**32 - 1))
def test_what_stands_behind_a_null_changes_no_bit(dtype, call, seed):
    call = call.rounded(dtype)
    other = garbled(call, np.random.default_rng(seed))
    found = []
    for each in (call, other):
        leaves = {name: getattr(each, name).to(dtype) for name in ("q", "k", "v", "h_i", "h_j")}
        if call.additive is not None:
            leaves["additive"] = each.additive.expand(other.additive.shape).to(dtype)
        with torch.no_grad():
            found.append([replace(each, **leaves).run(dtype)])
        leaves = {name: leaf.requires_grad_() for name, leaf in leaves.items()}
        out = replace(each, **leaves).run(dtype)
        found[-1] += [out, *torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))]
    for clean, garbage in zip(*found, strict=True):
        assert torch.equal(clean, garbage)
        assert garbage.isfinite().all()
    out, _, grad_q, grad_k, grad_v, *_ = found[1]
    assert max_error(out, other.loop()) <= call.rounding(dtype)
    for x, h in ((out, call.h_i), (grad_q, call.h_i), (grad_k, call.h_j), (grad_v, call.h_j)):
        assert torch.all(x.transpose(1, 2)[(h == 0).all(dim=-1)] == 0)


class Direction(nn.Module):
    """`w * h / ||h||`, 0 / 0 at the zero token."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8))

    def forward(self, h):
        return self.weight * h / h.norm(dim=-1, keepdim=True)


class WithNorm(nn.Module):
    """OAttention behind a norm of its input."""

    def __init__(self, attention, norm):
        super().__init__()
        self.attention, self.norm = attention, norm

    def forward(self, h, **options):
        return self.attention(h, norm=self.norm, **options)


def without_eps(module):
    for part in module.modules():
        if isinstance(part, nn.LayerNorm):
            part.eps = 0.0
    return module


# Which of them add to h what they make of it.
DIVIDING = {
    "norm": (lambda: ONorm(Direction(), 0.3), False),
    "layer norm": (lambda: ONorm(nn.LayerNorm(8), 0.3), False),
    "network": (lambda: OFFN(nn.Sequential(Direction(), nn.Linear(8, 8)), 0.3), True),
    "attention": (lambda: WithNorm(OAttention(8, 2, 0.3), Direction()), False),
    "grouped attention": (lambda: WithNorm(OAttention(8, 4, 0.3, num_kv_heads=2, eps_den=0.5), nn.LayerNorm(8)), False),
    "block": (lambda: OTransformerBlock(8, 2, 0.3), True),
    "stack": (lambda: OTransformer(8, 2, 2, 0.3), False),
}


@pytest.mark.parametrize("zeros", [[0], [1, 3], [0, 1, 2, 3, 4, 5]])
@pytest.mark.parametrize("dtype", FULLS)
@pytest.mark.parametrize("name", DIVIDING)
def test_hosts_that_divide_by_zero_at_a_null(name, dtype, zeros):
    """Against the same module on the other tokens alone: outputs, and the gradients of tokens and weights."""
    make, adds = DIVIDING[name]
    module = without_eps(randomized(make(), dtype))
    h = zeroed(randn(np.random.default_rng(8), 2, 6, 8), zeros)
    h[1, 4] = 0  # at another place in the other element of the batch
    live = (h != 0).any(-1)
    h, g = h.to(dtype).requires_grad_(), torch.linspace(1, 2, h.numel()).view(h.shape).to(dtype)
    with torch.no_grad():
        plain = module(h)
    out = module(h)
    gradient, *weights = torch.autograd.grad(out, [h, *module.parameters()], g)
    for result in (plain, out):
        assert torch.all(result[~live] == 0)
    assert torch.equal(gradient[~live], g[~live] if adds else 0 * g[~live])

    total = [torch.zeros_like(weight) for weight in weights]
    for b in range(2):
        if not live[b].any():
            continue
        alone = h[b, live[b]].detach()[None].requires_grad_()
        expected = module(alone)
        gradients = torch.autograd.grad(expected, [alone, *module.parameters()], g[b, live[b]][None])
        bound = 2 * rounding_of(module, dtype, alone.detach())
        for result in (plain, out):
            assert max_error(result[b, live[b]], expected[0].double()) <= bound
        # Roundoff times sums and condition numbers of some 10^4; what leaks is as large as the gradient, or NaN.
        scale = max(part.abs().max() for part in gradients)
        assert max_error(gradient[b, live[b]], gradients[0][0].double()) <= 1e5 * eps_of(dtype) * scale
        for part, weight in zip(total, gradients[1:], strict=True):
            part += weight
    scale = max(part.abs().max() for part in total)
    for weight, expected in zip(weights, total, strict=True):
        assert weight.isfinite().all()
        assert max_error(weight, expected.double()) <= 1e5 * eps_of(dtype) * scale


def test_weights_that_are_not_finite_do_not_wake_a_null():
    h, broken = zeroed(randn(np.random.default_rng(9), 1, 5, 8), [1, 3]), 0
    for name, (make, _) in (DIVIDING | {name: (make, None) for name, make in MODULES.items()}).items():
        for at in range(len(list(make().parameters()))):
            module = randomized(make())
            parameter = list(module.parameters())[at]
            parameter.data.view(-1)[0] = math.inf
            with torch.no_grad():
                out = module(h)
            broken += not out.isfinite().all()
            assert torch.all(out[:, [1, 3]] == 0), (name, at)
    assert broken > 50


@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@FEW
@given(tokens(), st.integers(0, 2**32 - 1))
def test_branches_behind_a_null_change_no_bit(dtype, case, seed):
    """OFFN, ONorm, OInject and OStandardize, given their branch as its values."""
    h, y, tau = case[0].to(dtype), case[1].to(dtype), case[2]
    null = (h == 0).all(-1)
    other = torch.where(null[:, None], torch.tensor(np.random.default_rng(seed).choice(GARBAGE, y.shape)), y)
    found = []
    for branch in (y, other.to(dtype)):
        leaves = [h.clone().requires_grad_(), branch.clone().requires_grad_()]
        outs = []
        for function in (
            lambda h, y: ONorm(lambda _: y, tau)(h),
            lambda h, y: OFFN(lambda _: y, tau)(h),
            lambda h, y: oinject(h, y, tau),
            lambda h, y: ostandardize(y, presence(h, tau)),
        ):
            with torch.no_grad():
                outs.append(function(*leaves))
            out = function(*leaves)
            assert torch.all(out[null] == 0) and torch.all(outs[-1][null] == 0)
            outs += [out, *torch.autograd.grad(out, leaves, torch.ones_like(out))]
            assert torch.all(outs[-1][null] == 0)
        found.append(outs)
    for clean, garbage in zip(*found, strict=True):
        assert torch.equal(torch.nan_to_num(clean, nan=7.0), torch.nan_to_num(garbage, nan=7.0))
        assert garbage[null].isfinite().all()


@pytest.mark.parametrize("name", MODULES)
def test_modules_compiled_and_vmapped(name):
    module = without_eps(randomized(MODULES[name]()))
    h = zeroed(randn(np.random.default_rng(3), 3, 1, 5, 8), [1, 4])
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    with torch.no_grad():
        expected, *found = (torch.stack([f(x) for x in h]) for f in (module, compiled))
        found.append(torch.vmap(module)(h))
    for out in found:
        assert torch.all(out[..., [1, 4], :] == 0)
        assert max_error(out, expected) <= 2 * rounding_of(module, torch.float64, h[:, 0, [0, 2, 3]])
