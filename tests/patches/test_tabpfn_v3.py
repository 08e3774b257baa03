"""The patched blocks and model against the formulas in float64 (`formulas.py`)."""

import copy
import dataclasses
import math

import pytest
import torch

from oretrofit.patches import tabpfn_v3 as o
from oretrofit.retrofit.patcher import carriers, patch_model

from .formulas import at, column_block, cross_block, model_forward, p_of, row_block

VARIANTS = ["oa", "full-o"]
KV_HEADS = [(None, None), (2, None), (None, 1), (2, 1)]
ZEROS = [1, 3]  # tokens that are exactly zero, as receivers and as sources
N = 6  # train rows
# In float64. Of a block: sums of at most 64 terms, softmax over scores below 30, outputs of size 1 to 10, so up to
# some 10^4 unit roundoffs. Of the model: six to ten of them, each passing on what came before it.
EXACT = {"rtol": 1e-12, "atol": 1e-12}
THROUGH_THE_MODEL = {"rtol": 1e-10, "atol": 1e-10}
GRADIENT = {"rtol": 1e-8, "atol": 1e-8}  # where a sum of terms far larger than itself may be among them


# ---- Blocks --------------------------------------------------------------------------------------


def tokens(*shape, seed=0):
    """Tokens of quite different lengths, some exactly zero."""
    g = torch.Generator().manual_seed(seed)
    h = torch.randn(*shape, dtype=torch.float64, generator=g)
    h = h * torch.exp(0.7 * torch.randn(*shape[:-1], 1, dtype=torch.float64, generator=g))
    h[..., ZEROS, :] = 0
    return h


def patched_pair(host, variant, *, count=True):
    """(host in float64, patched copy, taus of all carriers); without the query scaling if not `count`."""
    model = copy.deepcopy(host.model).double()
    if not count:
        for module in model.modules():
            if hasattr(module, "softmax_scaling_layer"):
                module.softmax_scaling_layer = None
    g = torch.Generator().manual_seed(7)
    everywhere = carriers(model, "full-o")
    # Around ||h||^2 of a token of unit variance, so that presence runs from 0.1 to 0.9.
    taus = {
        name: model.get_submodule(name).normalized_shape[0] * math.exp(0.4 * torch.randn((), generator=g))
        for name in everywhere
    }
    patched = copy.deepcopy(model)
    patch_model(patched, variant, {name: taus[name] for name in carriers(model, variant)})
    return model, patched, taus


# kind -> (block's name, forward(model, block, x), reference(host, block, x, taus, gated), shape of x)
SPREAD = "feature_distribution_embedder.layers.0.cross_attn_block"
KINDS = {
    "inducing points from rows": (
        f"{SPREAD}1",
        lambda model, block, x: block(x[:, :5], x[:, 1:]),
        lambda host, block, x, *rest: cross_block(block, x[:, :5], x[:, 1:], *rest),
        (3, 8, 16),
    ),
    "rows from inducing points": (
        f"{SPREAD}2",
        lambda model, block, x: block(x, x.roll(1, 0)),
        lambda host, block, x, *rest: cross_block(block, x, x.roll(1, 0), *rest),
        (3, 8, 16),
    ),
    "columns": (
        "column_aggregator.blocks.0",
        lambda model, block, x: block(x[None], rope=model.column_aggregator.rope)[0],
        lambda host, block, x, *rest: column_block(block, x, x, host.column_aggregator.rope, *rest),
        (3, 6, 16),
    ),
    "columns without positions": (
        "column_aggregator.blocks.0",
        lambda model, block, x: block(x[None])[0],
        lambda host, block, x, *rest: column_block(block, x, x, None, *rest),
        (3, 6, 16),
    ),
    "readout of columns": (
        "column_aggregator.blocks.1",
        lambda model, block, x: block.forward_cross(x[None, :, :2], x[None], model.column_aggregator.rope)[0],
        lambda host, block, x, *rest: column_block(block, x[:, :2], x, host.column_aggregator.rope, *rest),
        (3, 6, 16),
    ),
    "rows": (
        "icl_blocks.0",
        lambda model, block, x: block(x, N)[0],
        lambda host, block, x, *rest: row_block(block, x, N, *rest),
        (2, 9, 32),
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_block_is_its_formula(tiny_host, kind, variant):
    name, forward, reference, shape = KINDS[kind]
    host, patched, taus = patched_pair(tiny_host, variant)
    x, block_taus = tokens(*shape), at(name, taus)
    with torch.no_grad():
        out = forward(patched, patched.get_submodule(name), x)
        expected = reference(host, host.get_submodule(name), x, block_taus, variant == "full-o")
        ungated = reference(host, host.get_submodule(name), x, dict.fromkeys(block_taus, 1e-300), False)
    p = p_of(x, block_taus[min(block_taus)])[x.any(-1)]
    assert p.min() < 0.4
    assert p.max() > 0.6
    torch.testing.assert_close(out, expected, **EXACT)
    assert (out - ungated).abs().max() > 0.1  # the gates matter
    zeros = [i for i in ZEROS if i < out.shape[1]]
    assert not out[:, zeros].any()  # absorbed exactly, branch by branch


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kv_heads", KV_HEADS)
@pytest.mark.parametrize(("n", "rows"), [(N, 9), (9, 9), (34, 37)])
def test_row_block_with_shared_key_value_heads(make_host, kv_heads, variant, n, rows):
    host, patched, taus = patched_pair(
        make_host(icl_num_kv_heads=kv_heads[0], icl_num_kv_heads_test=kv_heads[1]), variant
    )
    x = tokens(2, rows, 32)
    with torch.no_grad():
        out, entry = patched.icl_blocks[1](x, n)
        built, kept = patched.icl_blocks[1](x, n, return_kv=True)
        expected = row_block(host.icl_blocks[1], x, n, at("icl_blocks.1", taus), variant == "full-o")
        # The test rows against what the cache kept of the train rows, those alone seeing all rows.
        cached, _ = patched.icl_blocks[1](x[:, n:], 0, cached_kv=kept)
    assert entry is None
    torch.testing.assert_close(out, expected, **EXACT)
    assert torch.equal(built, out)
    torch.testing.assert_close(cached, expected[:, n:], **EXACT)
    p = p_of(x[:, :n], taus["icl_blocks.1.layernorm"])
    torch.testing.assert_close(kept.log_presence.exp(), p, rtol=1e-12, atol=0)
    # Recorded gradients stay out of a cache, and so do heads that no test row uses.
    _, kept = patched.icl_blocks[1](x, n, return_kv=True)
    assert not any(part.requires_grad for part in (kept.key, kept.value, kept.log_presence))
    assert all(part.untyped_storage().nbytes() == part.nbytes for part in (kept.key, kept.value))


@pytest.mark.parametrize("factor", [1, 3, 100])
@pytest.mark.parametrize("variant", VARIANTS)
def test_chunked_in_place_evaluation_changes_nothing(tiny_host, variant, factor):
    _, patched, _ = patched_pair(tiny_host, variant)
    x, rows, rope = tokens(2, 3, 6, 16), tokens(5, 9, 32), patched.column_aggregator.rope
    with torch.no_grad():
        for whole, chunked in (
            (
                patched.column_aggregator.blocks[0](x, rope),
                patched.column_aggregator.blocks[0](x.clone(), rope, factor),
            ),
            (patched.icl_blocks[0](rows, N)[0], patched.icl_blocks[0](rows.clone(), N, factor)[0]),
        ):
            torch.testing.assert_close(chunked, whole, **EXACT)


def among(x, places):
    """(x with a zero token in front of each of these places, where its own tokens are now)."""
    order = sorted([*range(x.shape[1]), *(place - 0.5 for place in places)])
    keep = [i for i, old in enumerate(order) if old == int(old)]
    longer = x.new_zeros(x.shape[0], len(order), x.shape[2])
    longer[:, keep] = x
    return longer, keep


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("kind", "places"),
    [
        ("inducing points from rows", [0, 2, 5]),
        ("rows from inducing points", [0, 2, 5]),
        ("columns", [6]),  # behind the live ones: RoPE keeps their positions
        ("columns without positions", [0, 2, 5]),
        ("readout of columns", [6]),
        ("rows", [0, 2, 5]),
    ],
)
def test_inserted_zeros_change_no_other_token(tiny_host, kind, places, variant):
    """Without the scaling of queries by the number of keys, which counts zeros too."""
    host, patched, _ = patched_pair(tiny_host, variant, count=False)
    name, forward, _, shape = KINDS[kind]
    x = tokens(*shape, seed=3)
    longer, keep = among(x, places)
    inserted = [i for i in range(longer.shape[1]) if i not in keep]

    def outputs(model):
        block = model.get_submodule(name)
        with torch.no_grad():
            if kind == "rows":
                return block(x, N)[0], block(longer, N + len(places))[0]
            if kind == "inducing points from rows":
                return block(x[:, :5], x), block(x[:, :5], longer)
            return forward(model, block, x), forward(model, block, longer)

    old, new = outputs(patched)
    if new.shape[1] == longer.shape[1]:
        assert not new[:, inserted].any()
        new = new[:, keep]
    torch.testing.assert_close(new, old, **EXACT)
    old, new = outputs(host)
    new = new[:, keep] if new.shape[1] == longer.shape[1] else new
    assert (new - old).abs().max() > 1e-2  # where the host is moved by every one of them


@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_at_zero_tokens_are_finite(tiny_host, variant):
    _, patched, _ = patched_pair(tiny_host, variant)
    for name, forward, _, shape in KINDS.values():
        x = tokens(*shape).requires_grad_()
        forward(patched, patched.get_submodule(name), x).square().sum().backward()
        assert torch.isfinite(x.grad).all(), name
        assert x.grad.any(), name


# ---- What stands behind a null --------------------------------------------------------------------


def set_eps(model, eps):
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("eps", [None, 1e-3, 0.0])
@pytest.mark.parametrize("weight", [None, "of the tokens' dtype", "in float32"])
def test_norms_read_their_carrier(tiny_host, weight, eps, dtype):
    """Each reading of a norm by its formula; exactly 0 at a null, also without eps."""
    _, patched, taus = patched_pair(tiny_host, "full-o")
    set_eps(patched, eps)
    x = tokens(2, 6, 32)
    x[0, 0] *= 1e-5  # short, but live
    x = x.to(dtype)
    null, exact = (x == 0).all(-1), x.double()
    wide = torch.promote_types(dtype, torch.float32)
    factors = torch.linspace(0.5, 2, 32).to(torch.float32 if weight == "in float32" else dtype)
    mean = exact.square().mean(-1, keepdim=True) + (torch.finfo(wide).eps if eps is None else eps)
    expected = (exact * mean.rsqrt()).nan_to_num(0) * (1 if weight is None else factors.to(dtype).double())
    # A mean of 32 squares and a few steps more; half precision rounds the normed value, and its product with the gate.
    rtol = 40 * torch.finfo(wide).eps
    close = {"rtol": rtol + (dtype != wide) * 1.5 * torch.finfo(dtype).eps, "atol": torch.finfo(dtype).smallest_normal}
    for name, gated in (("icl_blocks.0.layernorm", False), ("output_norm", True)):
        norm, p = patched.get_submodule(name), p_of(exact, taus[name])
        norm.weight = None if weight is None else torch.nn.Parameter(factors)
        for grad in (False, True):
            with torch.set_grad_enabled(grad):
                normed, p_read = norm.read(x.clone())
                both, source = (None, None) if gated else (norm.read_both(x.clone()), norm.read_source(x.clone()))
                outs = [normed, norm(x.clone())] if gated else [normed, both[0], source[0]]
            for out in outs:
                assert out.dtype == dtype
                torch.testing.assert_close(out.double(), expected * (p[..., None] if gated else 1), **close)
                assert not out[null].any()
            torch.testing.assert_close(p_read.double(), p, rtol=rtol, atol=0)
            if not gated:
                assert torch.equal(both[1], p_read)
                for log_p in (both[2], source[1]):
                    # Off by what p is, relatively to p; |log p| is at least 0.1 here.
                    torch.testing.assert_close(log_p.double(), p.log(), rtol=10 * rtol, atol=0)


@pytest.mark.parametrize("kind", KINDS)
def test_norms_that_divide_by_zero_at_a_null(tiny_host, kind):
    """Norms without eps, against the formula with an eps that no live token notices: outputs and gradients.

    The gradient of a null is what flows past the branches, and nothing else.
    """
    name, forward, reference, shape = KINDS[kind]
    host, patched, taus = patched_pair(tiny_host, "full-o")
    set_eps(host, 1e-30)
    set_eps(patched, 0.0)
    host_block, block = (model.get_submodule(name) for model in (host, patched))
    x = tokens(*shape)
    x[0, 2] = 0  # at another place in one element of the batch
    null = (x == 0).all(-1)
    with torch.no_grad():
        plain = forward(patched, block, x)
    receivers = plain.shape[1]
    weight = torch.linspace(-1, 1, plain.numel(), dtype=torch.float64).view(plain.shape)

    def gradients(block, run):
        leaf = x.clone().requires_grad_()
        out = run(leaf)
        (weight * out).sum().backward()
        return out.detach(), leaf.grad, {name: p.grad for name, p in block.named_parameters()}

    expected, live_grad, weights = gradients(host_block, lambda x: reference(host, host_block, x, at(name, taus), True))
    out, grad, found = gradients(block, lambda x: forward(patched, block, x))
    for result in (plain, out):
        torch.testing.assert_close(result, expected, **EXACT)
        assert not result[null[:, :receivers]].any()
    torch.testing.assert_close(grad[~null], live_grad[~null], **GRADIENT)
    past = torch.nn.functional.pad(weight, (0, 0, 0, x.shape[1] - receivers))
    assert torch.equal(grad[null], past[null])
    for key, gradient in weights.items():
        scale = gradient.abs().max().item()
        torch.testing.assert_close(found[key], gradient, rtol=1e-8, atol=1e-8 * scale, msg=lambda m, n=key: n + m)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
@pytest.mark.parametrize("kind", KINDS)
def test_norms_without_eps_in_each_precision(tiny_host, kind, dtype):
    """Zeros stay zeros and live tokens finite, in both kinds of forward."""
    name, forward, _, shape = KINDS[kind]
    _, patched, _ = patched_pair(tiny_host, "full-o")
    set_eps(patched, 0.0)
    low = torch.float32 if dtype == "autocast" else dtype
    patched.to(low)
    x = tokens(*shape).to(low)
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=dtype == "autocast"):
            out = forward(patched, patched.get_submodule(name), x)
        assert out.isfinite().all()
        assert not out[:, [i for i in ZEROS if i < out.shape[1]]].any()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_null_stays_null_beside_what_is_not_finite(tiny_host, kind, variant):
    """Weights that are inf or NaN, or a live token that is: nothing comes near a null."""
    name, forward, _, shape = KINDS[kind]
    _, patched, _ = patched_pair(tiny_host, variant)
    with torch.no_grad():
        receivers = forward(patched, patched.get_submodule(name), tokens(*shape)).shape[1]
    zeros = [i for i in ZEROS if i < receivers]
    for at_weight, _ in patched.get_submodule(name).named_parameters():
        if variant == "oa" and ("mlp" in at_weight or at_weight.startswith("layernorm2")):
            continue  # the host's own
        for value in (math.inf, math.nan):
            model = copy.deepcopy(patched)
            block = model.get_submodule(name)
            block.get_parameter(at_weight).data.view(-1)[0] = value
            with torch.no_grad():
                out = forward(model, block, tokens(*shape))
            assert not out[:, zeros].any(), (at_weight, value)
    for value in (math.inf, math.nan, 1e200):
        x = tokens(*shape)
        x[:, 4, 0] = value
        with torch.no_grad():
            out = forward(patched, patched.get_submodule(name), x)
        assert not out[:, zeros].any(), value


def test_gated_norms_are_zero_at_a_null_whatever_their_weights(tiny_host):
    _, patched, _ = patched_pair(tiny_host, "full-o")
    norm, x = patched.output_norm, tokens(2, 6, 32)
    norm.weight.data[:2] = torch.tensor([math.inf, math.nan])
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            out = norm(x)
        assert not out[:, ZEROS].any()
        assert not out[:, 0].isfinite().all()


# ---- The whole model -----------------------------------------------------------------------------


def whole(host, gating_taus, variant, dtype=torch.float64):
    """(host, patched clone, taus, x, y): one batch of two tables of 6 + 8 rows and 4 columns."""
    g = torch.Generator().manual_seed(11)
    x = torch.randn(14, 2, 4, dtype=dtype, generator=g)
    x[3, :, 1] = torch.nan
    y = torch.randn(N, 2, dtype=dtype, generator=g)
    model = copy.deepcopy(host.model).to(dtype)
    taus = gating_taus(host, lambda m: m.to(dtype)(x, y), variant)
    patched = copy.deepcopy(model)
    patch_model(patched, variant, taus)
    return model, patched, taus, x, y


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"icl_num_kv_heads": 2, "icl_num_kv_heads_test": 1},
        {"use_rope": False, "use_nan_indicators": False, "feat_agg_num_blocks": 1, "nlayers": 1},
    ],
)
def test_model_is_its_formulas(make_host, gating_taus, config, variant):
    host, patched, taus, x, y = whole(make_host(**config), gating_taus, variant)
    with torch.no_grad():
        logits, inputs = model_forward(host, x, y, taus, variant == "full-o")
        out = patched(x, y)
        _, cache = patched(x[:N], y, return_kv_cache=True)
        cached = patched(x[N:], y, kv_cache=cache, x_is_test_only=True)
        plain = host(x, y)
    torch.testing.assert_close(out, logits, **THROUGH_THE_MODEL)
    torch.testing.assert_close(cached, logits, **THROUGH_THE_MODEL)
    assert (out - plain).abs().max() > 0.05
    for i, rows in enumerate(inputs):
        tau = taus[f"icl_blocks.{i}.layernorm"]
        expected = -torch.log1p(tau / rows[:, :N].square().sum(-1))
        torch.testing.assert_close(cache.kv[i].log_presence, expected, rtol=1e-9, atol=0)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("variant", VARIANTS)
def test_gradients_are_those_of_the_formulas(tiny_host, gating_taus, variant, recompute):
    """In training mode, with and without recomputing each layer in the backward pass."""
    host, patched, taus, x, y = whole(tiny_host, gating_taus, variant)
    options = dataclasses.replace(patched.get_default_performance_options(), force_recompute_layer=recompute)

    def gradients(model, forward):
        model.train()
        inputs = x.clone().requires_grad_()
        weight = torch.linspace(-1, 1, 8 * 2 * 50, dtype=torch.float64).view(8, 2, 50).roll(7, 0)
        (weight * forward(inputs)).sum().backward()
        return {"x": inputs.grad} | {name: p.grad for name, p in model.named_parameters() if p.requires_grad}

    actual = gradients(patched, lambda inputs: patched(inputs, y, performance_options=options))
    expected = gradients(host, lambda inputs: model_forward(host, inputs, y, taus, variant == "full-o")[0])
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(actual[name], gradient, rtol=1e-8, atol=1e-8 * scale, msg=lambda m, n=name: n + m)


# ---- The cache -----------------------------------------------------------------------------------


def presences(cache):
    return [cache.kv[i].log_presence for i in sorted(cache.kv)]


def entry_types(cache):
    return {type(cache), *map(type, cache.kv.values())}


@pytest.fixture(scope="module")
def caches(make_host, gating_taus):
    """(patched, x, y, plain logits, dense cache of both tables, caches of each alone), Full-O."""
    host = make_host(icl_num_kv_heads=2)
    _, patched, _, x, y = whole(host, gating_taus, "full-o")
    with torch.no_grad():
        plain = patched(x, y)
        _, both = patched(x[:N], y, return_kv_cache=True)
        alone = [patched(x[:N, [i]], y[:, [i]], return_kv_cache=True)[1] for i in range(2)]
    return patched, x, y, plain, both, alone


def predict_from(cache, patched, x, y):
    with torch.no_grad():
        return patched(x[N:], y, kv_cache=cache, x_is_test_only=True)


@pytest.mark.parametrize("dtype", [None, torch.int8, torch.float8_e4m3fn])
def test_presence_stays_beside_keys_and_values(caches, dtype):
    patched, x, y, plain, both, alone = caches
    kept = presences(both)
    cache = both if dtype is None else both.quantize(dtype)
    entry = o.OKVCacheEntry if dtype is None else o.OQuantizedKVCacheEntry
    parts = [copy.deepcopy(c) if dtype is None else c.quantize(dtype) for c in alone]
    joined = o.OTabPFNV3Cache.concatenate(parts)
    # A quantized number is off by 1/254 of the largest of its tensor (int8) or 1/16 of itself (float8); averages
    # of such numbers are off by less.
    atol = {None: 1e-10, torch.int8: 1 / 254, torch.float8_e4m3fn: 1 / 16}[dtype] * plain.abs().max()
    single = o.OTabPFNV3Cache.concatenate([copy.deepcopy(cache)])
    for made in (cache, cache.to("cpu"), joined, joined.to("cpu"), single, copy.deepcopy(cache)):
        assert entry_types(made) == {o.OTabPFNV3Cache, entry}
        assert made.train_shape == (2, N)
        for log_p, expected in zip(presences(made), kept, strict=True):
            torch.testing.assert_close(log_p, expected, **THROUGH_THE_MODEL)
        assert (predict_from(made, patched, x, y) - plain).abs().max() < atol
    moved = cache.to("meta")
    assert {log_p.device.type for log_p in presences(moved)} == {"meta"}
    if dtype is not None:
        assert {e.key.dtype for e in cache.kv.values()} == {dtype}
        for e, expected in zip(cache.kv.values(), kept, strict=True):
            dense = e.dequantize(torch.float64)
            assert type(dense) is o.OKVCacheEntry
            assert dense.key.dtype == torch.float64
            assert torch.equal(dense.log_presence, expected)


def test_cached_rows_would_be_wrong_without_their_presence(caches):
    patched, x, y, plain, both, _ = caches
    close = (predict_from(both, patched, x, y) - plain).abs().max()
    forgetful = copy.deepcopy(both)
    for entry in forgetful.kv.values():
        entry.log_presence = torch.zeros_like(entry.log_presence)
    wrong = (predict_from(forgetful, patched, x, y) - plain).abs().max()
    assert wrong > 1000 * close


def test_a_cache_passes_through_unchanged(caches):
    patched, x, y, plain, both, _ = caches
    with torch.no_grad():
        out, same = patched(x[N:], y, kv_cache=both, x_is_test_only=True, return_kv_cache=True)
    assert same is both
    torch.testing.assert_close(out, plain, **THROUGH_THE_MODEL)


def test_storage_dtype_is_asked_of_the_entry(caches):
    """As the engine stores each layer: `kv_cache_dtype` in the performance options."""
    patched, x, y, _, both, _ = caches
    options = dataclasses.replace(patched.get_default_performance_options(), kv_cache_dtype=torch.int8)
    with torch.no_grad():
        _, cache = patched(x[:N], y, return_kv_cache=True, performance_options=options)
    assert entry_types(cache) == {o.OTabPFNV3Cache, o.OQuantizedKVCacheEntry}
    assert all(torch.equal(a, b) for a, b in zip(presences(cache), presences(both), strict=True))
