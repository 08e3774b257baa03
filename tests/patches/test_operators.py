"""The O-operators against plain float64 loops over their formulas, and the laws they must keep."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd import gradcheck

from oretrofit.patches import (
    OFFN,
    OAttention,
    ONorm,
    OTransformer,
    OTransformerBlock,
    log_presence,
    oattention,
    oinject,
    ostandardize,
    presence,
)

HALVES = [torch.float16, torch.bfloat16]
FULLS = [torch.float32, torch.float64]
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
    """sum_j m p_j exp(s) v_j / (eps_den + sum_j m p_j exp(s)), times p_i; an empty sum gives 0."""
    batch, heads, receivers, width = q.shape
    sources = k.shape[2]
    scale = 1 / math.sqrt(width) if scale is None else scale
    full = (batch, heads, receivers, sources)
    m = np.broadcast_to(True if visible is None else visible, full)
    a = np.broadcast_to(0.0 if additive is None else additive, full)
    out = np.zeros((batch, heads, receivers, v.shape[-1]))
    for b, head, i in np.ndindex(full[:3]):
        group = head // (heads // k.shape[1])
        numerator, denominator, support = np.zeros(v.shape[-1]), eps_den, False
        for j in range(sources):
            score = scale * sum(x * y for x, y in zip(q[b, head, i], k[b, group, j], strict=True)) + a[b, head, i, j]
            if m[b, head, i, j] and p_j[b, j] > 0 and score > -math.inf:
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

    def rounding(self, dtype):
        """A bound on the error that computing in dtype may make.

        A score that sums terms of total size M carries about M rounding errors of eps / 2, and its
        exponential as much relatively; so does the share of each value, and the output, a gated convex
        combination of values. Sums over some ten keys and the presences add a few errors more.
        """
        scale = self.q.shape[-1] ** -0.5 if self.scale is None else self.scale
        size = abs(scale) * (self.q.norm(dim=-1).amax() * self.k.norm(dim=-1).amax() if self.k.numel() else 0.0)
        if self.additive is not None:
            size += self.additive.nan_to_num(neginf=0).abs().amax()
        log_p = log_presence(self.h_j, self.tau)
        size += log_p[log_p.isfinite()].abs().amax() if log_p.isfinite().any() else 0.0
        size += abs(math.log(self.eps_den)) if self.eps_den else 0.0
        largest = self.v.abs().amax() if self.v.numel() else 0.0
        return float(eps_of(dtype) / 2 * (size + 8) * largest)


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
        [(batch, heads, receivers, sources), (batch, 1, 1, sources), (1, heads, receivers, 1), (receivers, sources)]
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
    # Each is within the kernel's rounding of the same exact value; in float64 this is 1e-12 or less.
    bound = call.rounding(dtype) + longer.rounding(dtype)
    if dtype == torch.float64:
        bound = min(bound, 1e-12 * call.v.abs().max().item())
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
    assert max_error(call.run(dtype), host.double()) <= call.rounding(dtype)


def test_full_presence_is_the_hosts_attention():
    call = fixed_call(masks=False)
    ones, zeros = torch.ones(1, 24), torch.zeros(1, 30)
    out = oattention(call.q, call.k, call.v, presence_BS=ones, log_presence_BJ=zeros)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(call.q, call.k, call.v), rtol=0, atol=1e-15)


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
    torch.testing.assert_close(call.run(dtype), expected.to(dtype))


@pytest.mark.parametrize("dtype", FULLS)
def test_tau_below_the_dtypes_range(dtype):
    call = fixed_call(receivers=5, sources=6, width=4, tau=1e-60)
    assert max_error(call.run(dtype), replace(call, tau=1e-300).loop()) <= call.rounding(dtype)


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("dtype", HALVES)
def test_oattention_in_half_precision(dtype, train, eps_den):
    """At most twice the stock kernel's own error on the same heads, plus one unit in the last place.

    `train` lets gradients flow into the presences, which makes torch take another kernel.
    """
    call = fixed_call(eps_den=eps_den).rounded(dtype)
    call = replace(call, additive=call.additive.to(dtype).double())
    host = replace(call, h_i=torch.ones_like(call.h_i), h_j=torch.ones_like(call.h_j), tau=1e-300, eps_den=0.0)
    mask = host.additive.masked_fill(~host.visible, -math.inf)
    stock = F.scaled_dot_product_attention(*(x.to(dtype) for x in (call.q, call.k, call.v, mask)))
    stock_error = max_error(stock, host.loop())

    leaves = replace(call, h_i=call.h_i.requires_grad_(train), h_j=call.h_j.requires_grad_(train))
    out, expected = leaves.run(dtype), call.loop()
    assert out.dtype == dtype
    unit = eps_of(dtype) * 2.0 ** math.floor(math.log2(expected.abs().max()))
    assert max_error(out, expected) <= 2 * stock_error + unit
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
    # The kernel's mean of equal values, then one rounding of the product.
    assert torch.all((gated - exact).abs() <= 0.505 * eps * exact)

    log_p = torch.linspace(-9, -7, 200)[:, None] + torch.tensor([0.0, -0.013])
    pairs = torch.zeros(200, 1, 2, 8, dtype=dtype)
    values = torch.tensor([1.0, 0.0], dtype=dtype)[:, None].expand_as(pairs)
    with torch.autocast("cpu", dtype, enabled=autocast):
        out = oattention(pairs, pairs, values, presence_BS=torch.ones(200, 2), log_presence_BJ=log_p)
    # One rounding of the weights in the kernel and one of the output; log p itself would be off by 4 eps.
    exact = log_p.double().softmax(-1)[:, 0]
    assert torch.all((out[:, 0, 0, 0].double() - exact).abs() <= eps * exact)


def test_float32_error_is_that_of_the_stock_kernel():
    """At most twice the stock kernel's, plus one unit in the last place."""
    call = fixed_call().rounded(torch.float32)
    call = replace(call, additive=call.additive.float().double())
    host = replace(call, h_i=torch.ones_like(call.h_i), h_j=torch.ones_like(call.h_j), tau=1e-300)
    mask = host.additive.masked_fill(~host.visible, -math.inf)
    stock = F.scaled_dot_product_attention(*(x.float() for x in (call.q, call.k, call.v, mask)))
    expected = call.loop()
    unit = eps_of(torch.float32) * 2.0 ** math.floor(math.log2(expected.abs().max()))
    assert max_error(call.run(torch.float32), expected) <= 2 * max_error(stock, host.loop()) + unit


@pytest.mark.parametrize("eps_den", EPS_DEN)
@pytest.mark.parametrize("dtype", [*FULLS, *HALVES])
@pytest.mark.parametrize("device", DEVICES)
def test_oattention_on_each_device(device, dtype, eps_den):
    call = fixed_call(batch=2, heads=4, eps_den=eps_den).rounded(dtype)
    out, expected = call.run(dtype, device), call.loop()
    assert out.device.type == device and out.dtype == dtype
    assert max_error(out, expected) <= call.rounding(dtype)
    assert torch.all(out[(expected == 0).to(device)] == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_more_batch_x_heads_than_cudas_grid(device, masks, dtype):
    call = fixed_call(batch=33_000, receivers=3, sources=4, width=8, masks=masks).rounded(dtype)
    out = call.run(dtype, device)
    assert max_error(out, call.run(torch.float64)) <= call.rounding(dtype)
    null = (call.h_i == 0).all(dim=-1).to(device)
    assert torch.all(out.transpose(1, 2)[null] == 0)


def test_oattention_refuses():
    call = fixed_call(heads=3, kv_heads=2)
    with pytest.raises(ValueError, match="3 query heads"):
        call.run(torch.float32)
    with pytest.raises(ValueError, match="eps_den"):
        fixed_call(eps_den=-1e-9).run(torch.float32)
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
    # Another token count may sum in another order, and each layer passes on the roundings before it: scores
    # here are sums of size up to ~100, each rounded by eps / 2.
    bound = 200 * eps_of(dtype) * max(1.0, before.abs().max().item())
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
    np.testing.assert_allclose(as_array(out), expected, rtol=0, atol=1e-13)


def test_block_is_its_formula():
    """h + OAttention(h), then h + p(h) FFN(p(h) LayerNorm(h)), each presence that of its own input."""
    block = randomized(OTransformerBlock(8, 2, tau=0.3))
    h = zeroed(randn(np.random.default_rng(6), 1, 5, 8), [2])
    norm, *layers = block.ffn.ffn
    h = h + block.attention(h, norm=block.norm)
    normed = torch.tensor(onorm_loop(as_array(h), as_array(norm.norm(h)), 0.3))
    expected = offn_loop(as_array(h), as_array(nn.Sequential(*layers)(normed)), 0.3)
    out = block(zeroed(randn(np.random.default_rng(6), 1, 5, 8), [2]))
    np.testing.assert_allclose(as_array(out), expected, rtol=0, atol=1e-13 * np.abs(expected).max())


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", MODULES)
def test_modules_in_half_precision_keep_zeros(name, dtype):
    h = zeroed(randn(np.random.default_rng(7), 2, 6, 8), [0, 3])
    full, half = (randomized(MODULES[name](), kind)(h.to(kind)) for kind in (torch.float64, dtype))
    assert half.dtype == dtype and torch.all(half[:, [0, 3]] == 0)
    # Weights, heads and sums are all rounded: a loose check that nothing is off by more than roundings.
    assert max_error(half, full) <= 20 * eps_of(dtype) * full.abs().max()


@pytest.mark.parametrize("name", MODULES)
def test_autocast_keeps_zeros_and_agrees_with_float32(name):
    """bfloat16 autocast: at most twice as far from float32 as the same module without presence."""
    rng = np.random.default_rng(2)
    h = zeroed(randn(rng, 2, 12, 8), [0, 5, 11]).float()
    live = [i for i in range(12) if i not in (0, 5, 11)]
    module = randomized(MODULES[name](), torch.float32)

    def error_under_autocast(module, h):
        with torch.no_grad():
            full = module(h)
            with torch.autocast("cpu", torch.bfloat16):
                half = module(h)
        return max_error(half, full.double()), full, half

    error, full, half = error_under_autocast(module, h)
    assert torch.all(full[:, [0, 5, 11]] == 0) and torch.all(half[:, [0, 5, 11]] == 0)
    for part in module.modules():
        if hasattr(part, "tau"):
            part.tau = 1e-30
        if hasattr(part, "eps_den"):
            part.eps_den = 0.0
    host_error, host, _ = error_under_autocast(module, h[:, live])
    unit = eps_of(torch.bfloat16) * 2.0 ** math.floor(math.log2(max(full.abs().max(), host.abs().max())))
    assert error <= 2 * host_error + unit


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
