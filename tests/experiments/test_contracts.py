"""The contracts: references against loops, broken operators that must be reported, and the command."""

import json
import math

import numpy as np
import pandas as pd
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.experiments import contracts, contracts_checks, contracts_inputs, references
from oretrofit.experiments.contracts import DTYPES
from oretrofit.experiments.contracts_checks import Bench, Result, dead, judge
from oretrofit.experiments.contracts_inputs import INSERTIONS
from oretrofit.experiments.references import OPERATORS, Direct, Inputs
from oretrofit.patches import (
    OFFN,
    OAttention,
    ONorm,
    OTransformer,
    oattention,
    oinject,
    ostandardize,
    presence,
)

KEYS = {"operator", "dtype", "property", "cases", "max_error", "bound", "ratio", "ratio_median", "passed"}
BY_NAME = {operator.name: operator for operator in OPERATORS}
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


SMALL_SIZES = {
    "self": [(2, 2, 2, 24, 24, 16)],
    "cross": [(2, 2, 2, 7, 40, 16), (2, 2, 2, 40, 7, 16)],
    "masked": [(2, 2, 2, 24, 24, 8)],
    "grouped heads": [(2, 4, 2, 12, 15, 16)],
    "one token": [(1, 2, 2, 1, 1, 16), (8, 2, 2, 1, 1, 16), (1, 2, 2, 1, 50, 16), (1, 2, 2, 50, 1, 16)],
    "thousands": [(1, 1, 1, 150, 150, 8)],
}


@pytest.fixture
def small(monkeypatch):
    """Fewer sizes and draws than the command has, and a hundred tokens instead of thousands."""
    monkeypatch.setattr(contracts_inputs, "ATTENTION_SIZES", SMALL_SIZES)
    monkeypatch.setitem(contracts_inputs.TOKEN_SIZES, "thousands", (1, 150, 16))
    monkeypatch.setattr(contracts_checks, "DRAWS", 5)
    monkeypatch.setattr(contracts, "ANCHOR_SIZES", ((1, 1, 4, 8, 8),))


@pytest.fixture
def check(small, monkeypatch):
    """A function that checks one operator in one dtype: its rows by property."""

    def run(operator, dtype):
        monkeypatch.setattr(contracts, "OPERATORS", (BY_NAME[operator],))
        monkeypatch.setattr(contracts, "_anchors", lambda *_: [])
        table = contracts.check_contracts([dtype])
        return {row["property"]: row for row in table.to_dict("records")}

    return run


def failed(rows):
    return {name for name, row in rows.items() if not row["passed"]}


# --- The references against loops ---


def attention_loop(q, k, v, p_i, p_j, visible, additive, eps_den):
    batch, heads, receivers, width = q.shape
    group, out = heads // k.shape[1], np.zeros((*q.shape[:3], v.shape[-1]))
    for b, h, i in np.ndindex(batch, heads, receivers):
        numerator, denominator = np.zeros(v.shape[-1]), eps_den
        for j in range(k.shape[2]):
            score = sum(x * y for x, y in zip(q[b, h, i], k[b, h // group, j], strict=True)) / math.sqrt(width)
            weight = visible[i, j] * p_j[b, j] * math.exp(score + additive[h, i, j])
            numerator, denominator = numerator + weight * v[b, h // group, j], denominator + weight
        if denominator > 0:
            out[b, h, i] = p_i[b, i] * numerator / denominator
    return out


@pytest.mark.parametrize("eps_den", [0.0, 0.5])
def test_reference_attention_is_the_loop(eps_den):
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal(shape) for shape in [(2, 4, 5, 3), (2, 2, 6, 3), (2, 2, 6, 3)])
    p_i, p_j = rng.random((2, 5)), rng.random((2, 6))
    p_i[:, 1] = p_j[0, 2:4] = p_j[1] = 0
    visible, additive = rng.random((5, 6)) < 0.6, rng.standard_normal((4, 5, 6))
    visible[3], additive[0, 2, 1] = False, -math.inf
    out = Direct.attention(q, k, v, p_i, p_j, visible=visible, additive=additive, eps_den=eps_den)
    expected = attention_loop(q, k, v, p_i, p_j, visible, additive, eps_den)
    np.testing.assert_allclose(out, expected, rtol=1e-13, atol=1e-15)
    assert (out[1] == 0).all() and (out[:, :, [1, 3]] == 0).all() and (out[0, :, 0] != 0).any()


def test_reference_attention_at_hugely_negative_scores():
    """A large common constant changes nothing without eps_den, which otherwise outweighs all sources."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 1, 4, 3)) for _ in range(3))
    p, fill = rng.random((1, 4)), np.full((4, 4), -1e4)
    out = Direct.attention(q, k, v, p, p, additive=fill)
    np.testing.assert_allclose(out, Direct.attention(q, k, v, p, p), rtol=1e-10)
    assert (Direct.attention(q, k, v, p, p, additive=fill, eps_den=1e-6) == 0).all()


def test_reference_standardize_is_the_loop():
    rng = np.random.default_rng(0)
    x, p = 3 + rng.standard_normal((1, 5, 2)), rng.random((1, 5))
    p[0, 0] = 0
    expected = np.zeros_like(x)
    for e in range(2):
        mu = sum(p[0, s] * x[0, s, e] for s in range(5)) / sum(p[0])
        var = sum(p[0, s] * (x[0, s, e] - mu) ** 2 for s in range(5)) / sum(p[0])
        expected[0, :, e] = [p[0, s] * (x[0, s, e] - mu) / math.sqrt(var + 1e-5) for s in range(5)]
    np.testing.assert_allclose(Direct.standardize(x, p), expected, rtol=1e-12)
    assert (Direct.standardize(x, 0 * p) == 0).all()
    assert (Direct.standardize(x[:, :1], p[:, 1:2]) == 0).all()


def test_reference_norm_gelu_and_presence_are_torchs():
    rng = np.random.default_rng(0)
    x, weight, bias = rng.standard_normal((3, 8)), rng.standard_normal(8), rng.standard_normal(8)
    t = [torch.from_numpy(a) for a in (x, weight, bias)]
    affine, scaled = {"n.weight": weight, "n.bias": bias}, {"n.weight": weight}
    np.testing.assert_allclose(Direct.norm(x, affine, "n"), F.layer_norm(t[0], (8,), t[1], t[2]), 1e-12)
    np.testing.assert_allclose(Direct.norm(x, scaled, "n"), F.rms_norm(t[0], (8,), t[1], 1e-5), 1e-12)
    np.testing.assert_allclose(Direct.gelu(x), F.gelu(t[0]), 1e-10)
    assert Direct.presence(np.array([[3.0, 4.0], [0.0, 0.0]]), 75.0).tolist() == [0.25, 0.0]


def test_reference_transformer_without_presence_is_torchs():
    inputs = contracts_inputs.FAMILIES["OTransformer"]()["self"][0]
    a, heads = inputs.arrays, inputs.heads
    width = a["h"].shape[-1]
    h = torch.from_numpy(a["h"])
    for prefix in (f"model.blocks.{i}." for i in range(references.BLOCKS)):
        w = {name.removeprefix(prefix): torch.from_numpy(x) for name, x in a.items() if name.startswith(prefix)}
        layer = nn.TransformerEncoderLayer(width, heads, 4 * width, 0, F.gelu, batch_first=True, norm_first=True)
        layer = layer.double()
        projections = [[w[f"attention.{n}_projection.{kind}"] for n in "qkv"] for kind in ("weight", "bias")]
        layer.load_state_dict(
            {
                "self_attn.in_proj_weight": torch.cat(projections[0]),
                "self_attn.in_proj_bias": torch.cat(projections[1]),
                "self_attn.out_proj.weight": w["attention.out_projection.weight"],
                "self_attn.out_proj.bias": torch.zeros(width),
                "norm1.weight": w["norm.weight"],
                "norm1.bias": w["norm.bias"],
                "norm2.weight": w["ffn.ffn.0.norm.weight"],
                "norm2.bias": w["ffn.ffn.0.norm.bias"],
                "linear1.weight": w["ffn.ffn.1.weight"],
                "linear1.bias": w["ffn.ffn.1.bias"],
                "linear2.weight": w["ffn.ffn.3.weight"],
                "linear2.bias": w["ffn.ffn.3.bias"],
            }
        )
        h = layer(h)
    last = [torch.from_numpy(a[f"model.norm.norm.{name}"]) for name in ("weight", "bias")]
    expected = F.layer_norm(h, (width,), *last).detach()
    np.testing.assert_allclose(BY_NAME["OTransformer"].formula(Direct, a, inputs, None), expected, rtol=0, atol=1e-12)


def test_direct_evaluation_is_the_formula():
    inputs = contracts_inputs.attention_inputs(np.random.default_rng(0), (1, 2, 2, 5, 7, 4))
    t = {name: torch.from_numpy(x) for name, x in inputs.arrays.items()}
    for tau in (inputs.tau, None):
        expected = BY_NAME["oattention"].formula(Direct, inputs.arrays, inputs, tau)
        np.testing.assert_allclose(contracts._direct(t, tau), expected, rtol=1e-12)


# --- The operators, whole and broken ---


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_operator_keeps_its_contracts(dtype, device, small):
    table = contracts.check_contracts([dtype], device)
    assert set(KEYS) <= set(table.columns)
    judged = table[table["passed"].notna()]
    missed = {(r.operator, r.property) for r in judged.itertuples() if r.passed is not True}
    # CUDA's fused attention takes the bias in half precision.
    known = {("oattention", "bias in float32")} if device == "cuda" and dtype in ("bf16", "fp16") else set()
    assert missed == known
    assert set(judged["operator"]) == set(BY_NAME)
    exact = judged[judged["property"].isin(["null receiver", "zero token", "inserted tokens", "empty support"])]
    assert (exact["max_error"] == 0).all() and (exact["bound"] == 0).all() and exact["ratio"].isna().all()
    assert (judged["cases"] > 0).all()
    bounded = judged[~judged["property"].isin([*exact["property"], "null source changed"])]
    assert (bounded["ratio"] <= 1).all() and (bounded["ratio_median"] <= bounded["ratio"]).all()
    draws = judged[judged["property"] == "random draws"]
    assert set(draws["operator"]) == set(BY_NAME) and (draws["stock_ratio_median"] <= draws["stock_ratio_max"]).all()
    assert judged["max_error_unrounded"].notna().any() == (dtype in ("bf16", "fp16"))

    anchors = table[table["passed"].isna()]
    assert len(anchors) == (0 if dtype == "fp64" else 2)
    assert (anchors["paper_error"] == 8.94e-8).all()


def no_mass_in_the_denominator(q, k, v, *, presence_BS, log_presence_BJ, visible, additive, eps_den):
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    masked = (v.float() * log_presence_BJ.exp()[:, None, :, None]).to(v.dtype)
    mask = additive if visible is None else (0 if additive is None else additive) + torch.where(visible, 0, -math.inf)
    if mask is not None:
        mask = mask.to(q.dtype)
    out = F.scaled_dot_product_attention(q, k, masked, attn_mask=mask).nan_to_num()
    return (out * presence_BS[:, None, :, None]).to(q.dtype)


def changed(**changes):
    """OAttention with some arguments changed before they are used."""

    def run(*heads, **options):
        return oattention(*heads, **{name: changes.get(name, lambda x: x)(x) for name, x in options.items()})

    return run


def nan_without_support(q, k, v, *, log_presence_BJ, **options):
    out = oattention(q, k, v, log_presence_BJ=log_presence_BJ, **options)
    return out.masked_fill((log_presence_BJ == -math.inf).all(-1)[:, None, None, None], math.nan)


def rounded(dtype):
    return lambda x: x.to(dtype).to(x.dtype)


half, bfloat = rounded(torch.float16), rounded(torch.bfloat16)


def leaking(eps):
    """A constant that comes to the denominator."""
    return changed(eps_den=lambda eps_den: eps_den + eps)


def null_of_mass(p):
    """NULLs that are sources all the same."""
    return changed(log_presence_BJ=lambda x: x.nan_to_num(neginf=math.log(p)))


def length(h):
    return torch.linalg.vector_norm(h, dim=-1, dtype=torch.promote_types(h.dtype, torch.float32))


def not_squared(h, tau):
    return length(h) / (tau + length(h))


NULLS = {"empty support", "null source changed", "null source at end", "null source elsewhere"}

# By what is broken: the operator, or the presence, that takes the place of the patched one; and by dtype, the rows that
# have to fail.
BROKEN_ATTENTION = {
    "no gate": (changed(presence_BS=torch.ones_like), {"fp32 bf16": {"null receiver", "formula, self"}}),
    "gate in bfloat16": (
        changed(presence_BS=bfloat),
        {"fp32": {"formula, self", "formula, one token"}, "bf16 fp16": {"gate in float32"}},
    ),
    "gate in float16": (
        changed(presence_BS=half),
        {"fp32 fp64": {"formula, self", "formula, one token"}, "fp16": {"gate in float32"}},
    ),
    "bias in bfloat16": (
        changed(log_presence_BJ=bfloat),
        {"fp32": {"formula, self", "formula, masked"}, "bf16 fp16": {"bias in float32"}},
    ),
    "bias in float16": (
        changed(log_presence_BJ=half),
        {"fp32 fp64": {"formula, self", "formula, masked"}, "fp16": {"bias in float32"}},
    ),
    "log of a rounded p": (changed(log_presence_BJ=lambda x: half(x.exp()).log()), {"fp32": {"formula, self"}}),
    "eps of 1e-3": (leaking(1e-3), {"bf16 fp16": {"formula, one token"}}),
    "eps of 1e-5": (leaking(1e-5), {"fp32": {"formula, one token", "formula, cross"}}),
    "eps of 1e-8": (leaking(1e-8), {"fp32": {"formula, one token"}, "bf16 fp16": {"bias in float32"}}),
    "eps of 1e-14": (leaking(1e-14), {"fp64": {"formula, one token"}}),
    "no eps_den": (changed(eps_den=lambda _: 0.0), {"fp32": {"formula, eps_den > 0"}}),
    "null of mass 1e-4": (null_of_mass(1e-4), {"fp32 bf16 fp16": NULLS}),
    "null of mass 1e-8": (null_of_mass(1e-8), {"fp32": NULLS}),
    "null of score -1e4": (changed(log_presence_BJ=lambda x: x.clamp(min=-1e4)), {"fp32": {"empty support"}}),
    "a count, not support": (
        changed(log_presence_BJ=lambda x: torch.where(x > -math.inf, 0.0, x)),
        {"fp32 bf16": {"formula, self", "formula, cross"}},
    ),
    "a count of all": (changed(log_presence_BJ=torch.zeros_like), {"fp32": NULLS}),
    "no mass in the denominator": (
        no_mass_in_the_denominator,
        {"fp32": {"formula, cross", "null source elsewhere"}, "bf16": {"formula, cross"}},
    ),
    "no mask": (changed(visible=lambda _: None), {"fp32": {"formula, masked"}}),
    "NaN without support": (nan_without_support, {"fp64": {"empty support", "formula, thousands"}}),
    "float32 inside": (
        lambda q, k, v, **o: oattention(q.float(), k, v, **o).double(),
        {"fp64": {"formula, one token"}},
    ),
}


@pytest.mark.parametrize("name", BROKEN_ATTENTION)
def test_broken_attention_is_reported(name, check, monkeypatch):
    broken, by_dtype = BROKEN_ATTENTION[name]
    monkeypatch.setattr(references, "oattention", broken)
    for dtypes, properties in by_dtype.items():
        for dtype in dtypes.split():
            assert properties <= failed(check("oattention", dtype)), dtype


class UngatedFFN(nn.Module):
    def __init__(self, ffn, tau):
        super().__init__()
        self.ffn = ffn

    def forward(self, h):
        return h + self.ffn(h)


class AffineEnd(OTransformer):
    """A last norm without its gate."""

    def forward(self, h_BSE, *, visible=None):
        for block in self.blocks:
            h_BSE = block(h_BSE, visible=visible)
        return self.norm.norm(h_BSE)


def gated(h, tau, y, rounding):
    return (rounding(presence(h, tau))[..., None] * y).to(h.dtype)


def rounding_norm(rounding):
    class Norm(ONorm):
        def forward(self, h):
            return gated(h, self.tau, self.norm(h), rounding)

    return Norm


def rounding_ffn(rounding):
    class FFN(OFFN):
        def forward(self, h):
            return h + gated(h, self.tau, self.ffn(h), rounding)

    return FFN


def rounding_transformer(rounding):
    """The gates of the feed-forward networks are rounded."""

    class Transformer(OTransformer):
        def forward(self, h_BSE, *, visible=None):
            for block in self.blocks:
                h_BSE = h_BSE + block.attention(h_BSE, norm=block.norm, visible=visible)
                h_BSE = h_BSE + gated(h_BSE, block.ffn.tau, block.ffn.ffn(h_BSE), rounding)
            return self.norm(h_BSE)

    return Transformer


class LeakingAttention(OAttention):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.eps_den = 1e-6


class LeakingTransformer(OTransformer):
    def __init__(self, *args):
        super().__init__(*args)
        for block in self.blocks:
            block.attention.eps_den = 1e-6


def counted_moments(x, p, eps):
    """Zero tokens have no output, but still count."""
    return (p[..., None] * F.layer_norm(x.mT, x.shape[-2:-1], eps=eps).mT).to(x.dtype)


def counted(x, p, eps):
    """Moments of all tokens by their presence, but divided by their number."""
    wide, p, count = x.to(p.dtype), p[..., None], x.shape[-2]
    mean = (p * wide).sum(-2, keepdim=True) / count
    var = (p * (wide - mean).square()).sum(-2, keepdim=True) / count
    return (p * (wide - mean) / torch.sqrt(var + eps)).to(x.dtype)


FEW = {"formula, few tokens"}

# By what is broken: the operator, what takes the place of its name in `references`, and the rows that have to fail.
BROKEN = {
    "ungated FFN": ("OFFN", "OFFN", UngatedFFN, {"fp32": {"zero token", "inserted tokens", *FEW}}),
    "affine end": ("OTransformer", "OTransformer", AffineEnd, {"bf16": {"zero token", "inserted tokens"}}),
    "other tau": ("OInject", "oinject", lambda h, u, tau: oinject(h, u, 1.0001 * tau), {"fp32": FEW}),
    "zeros counted": ("OStandardize", "ostandardize", counted_moments, {"fp32": {"insertion at end"}}),
    "a count, not support": ("OStandardize", "ostandardize", counted, {"fp32 bf16 fp16 fp64": FEW}),
    "no small tau": (
        *("OStandardize", "ostandardize", lambda x, p, eps: ostandardize(x, p.clamp(max=0.999), eps)),
        {"fp32": {"tau -> 0"}},
    ),
    "not squared": ("oattention", "presence", not_squared, {"fp32 fp16": {"formula, self"}}),
    "mass not squared": (
        *("oattention", "log_presence", lambda h, tau: not_squared(h, tau).log()),
        {"fp32 bf16": {"formula, self", "random draws"}},
    ),
    "tau not under 1e-6": ("oattention", "presence", lambda h, tau: presence(h, tau + 1e-6), {"fp32": {"tau -> 0"}}),
    "float16 norm gate": (
        *("ONorm", "ONorm", rounding_norm(half)),
        {"fp32 fp64": FEW, "fp16": {"gate in float32"}},
    ),
    "bfloat16 norm gate": ("ONorm", "ONorm", rounding_norm(bfloat), {"fp32": FEW, "bf16 fp16": {"gate in float32"}}),
    "float16 FFN gate": ("OFFN", "OFFN", rounding_ffn(half), {"fp32 fp64": FEW, "fp16": {"gate in float32"}}),
    "bfloat16 FFN gate": ("OFFN", "OFFN", rounding_ffn(bfloat), {"fp32": FEW, "bf16 fp16": {"gate in float32"}}),
    "float16 injection gate": (
        *("OInject", "oinject", lambda h, u, tau: h + gated(h, tau, u, half)),
        {"fp32 fp64": FEW, "fp16": {"gate in float32"}},
    ),
    "float16 masses": ("OStandardize", "ostandardize", lambda x, p, eps: ostandardize(x, half(p), eps), {"fp32": FEW}),
    "float16 gates in a transformer": (
        *("OTransformer", "OTransformer", rounding_transformer(half)),
        {"fp32": {"formula, self", "insertion elsewhere", "random draws"}},
    ),
    "eps of 1e-6 in a module": (
        *("OAttention", "OAttention", LeakingAttention),
        {"fp32": {"formula, one token", "null source elsewhere", "insertion at end"}},
    ),
    "eps of 1e-6 in a transformer": (
        *("OTransformer", "OTransformer", LeakingTransformer),
        {"fp32": {"formula, one token", "insertion elsewhere"}},
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_operators_are_reported(name, check, monkeypatch):
    operator, attribute, broken, by_dtype = BROKEN[name]
    monkeypatch.setattr(references, attribute, broken)
    for dtypes, properties in by_dtype.items():
        for dtype in dtypes.split():
            assert properties <= failed(check(operator, dtype)), dtype


# --- What is compared ---


@pytest.mark.parametrize("place", INSERTIONS)
@pytest.mark.parametrize("receivers", [False, True])
def test_insertion(place, receivers):
    inputs = contracts_inputs.FAMILIES["oattention"]()["masked"][2]  # both masks
    a, count = inputs.arrays, inputs.arrays["h_j"].shape[1]
    inserted = contracts_inputs.with_inserted(BY_NAME["oattention"], inputs, place, receivers=receivers)
    new = {"front": [0, 1, 2], "middle": [12, 13, 14], "end": [24, 25, 26], "everywhere": list(range(0, 49, 2))}[place]
    kept = [i for i in range(count + len(new)) if i not in new]
    rows = kept if receivers else list(range(count))
    b = inserted.arrays
    assert np.flatnonzero(~dead(b["h_i"])).tolist() == rows and np.flatnonzero(~dead(b["h_j"])).tolist() == kept
    assert (b["h_j"][:, new] == 0).all() and (b["k"][:, :, new] != 0).all() and (b["v"][:, :, new] != 0).all()
    for name in ("h_j", "k", "v"):
        np.testing.assert_array_equal(b[name][..., kept, :], a[name])
    for name in ("visible", "additive"):
        np.testing.assert_array_equal(b[name][..., rows, :][..., kept], a[name])
    assert b["visible"][rows][:, new].any()  # visible zeros, or nothing is tested
    assert (b["h_i"].shape[1] == count) != receivers
    if receivers:
        assert (b["h_i"][:, new] == 0).all()


def test_zero_tokens_are_placed_where_they_are_said_to_be():
    inputs = Inputs({"h": np.ones((1, 16, 2))})
    zeros = {
        name: np.flatnonzero(dead(contracts_inputs.with_zeros(inputs, name).arrays["h"])).tolist()
        for name in contracts_inputs.PLACEMENTS
    }
    expected = {"none": [], "front": [0, 1], "middle": [8, 9], "end": [14, 15], "everywhere": list(range(16))}
    assert zeros == expected and (inputs.arrays["h"] == 1).all()


def test_each_output_is_held_to_its_own_bound():
    """A large error within a large bound is none; a small one beyond a small bound is."""
    within = judge(np.array([3.0, -1e-9, 0.0]), np.array([4.0, 2e-9, 0.0]))
    assert (within.error, within.bound, within.ratio, within.typical) == (3.0, 4.0, 0.75, 0.625)
    assert judge(np.array([0.0, 2.0]), np.array([9.0, 1.0])).ratio == 2.0
    for error in (5e-324, math.nan, math.inf):
        assert judge(np.array([error]), np.zeros(1)).ratio == math.inf
    assert judge(np.array([math.nan]), np.ones(1)).ratio == math.inf
    assert judge(np.array([1.0]), np.array([math.nan])).ratio == math.inf  # no bound could be given
    exact = judge(np.zeros(3), np.zeros(3))
    assert exact.ratio == 0 and exact.typical is None


def test_rows():
    def row(*results, name="formula, self"):
        return contracts._row("OFFN", "fp32", name, [Result(*result) for result in results])

    mixed = row((3.0, 4.0, 0.75, 0.5), (0.1, 9.0, 1.01, 0.1), (0.5, 0.5, 1.0, 0.3))
    assert [mixed[key] for key in ("cases", "max_error", "bound", "ratio", "ratio_median")] == [3, 3.0, 9.0, 1.01, 0.3]
    assert mixed["passed"] is False and row((3.0, 4.0, 1.0, 0.5))["passed"] is True
    exact = row((0.0, 0.0, 0.0))
    assert exact["passed"] is True and exact["ratio"] is None and exact["ratio_median"] is None
    assert row((0.0, 0.0, 0.0), (1e-9, 0.0, math.inf))["passed"] is False
    counted = row((0.0, 1.0, 0.0, 0.0, None, True), (0.5, 1.0, 0.5, 0.1, None, False), (0.0, 1.0, 0.0, 0.0, None, True))
    assert (counted["bit_equal"], counted["cases"]) == (2, 3)
    draws = [(error, 9.0, 0.5, 0.1, stock) for error, stock in ((1.0, 2.0), (3.0, 1.0), (4.0, 4.0), (1.0, 0.0))]
    compared = row(*draws, name="random draws")
    assert (compared["stock_ratio_median"], compared["stock_ratio_max"], compared["stock_error"]) == (1.0, 3.0, 4.0)


def test_stock_error_is_torchs_own(check):
    """ONorm's, from the same inputs, against float64 layers of torch."""
    rows = check("ONorm", "bf16")
    errors = []
    for inputs in contracts_inputs.random_draws("ONorm", contracts_checks.DRAWS):
        h, *weights = (torch.from_numpy(x).bfloat16() for x in inputs.arrays.values())
        exact = F.layer_norm(h.double(), h.shape[-1:], *(w.double() for w in weights))
        errors.append((F.layer_norm(h, h.shape[-1:], *weights).double() - exact).abs().max().item())
    assert rows["random draws"]["stock_error"] == pytest.approx(max(errors), rel=1e-9)
    assert rows["random draws"]["cases"] == len(errors) and rows["formula, few tokens"]["stock_error"] is None


def test_both_readings_of_half_precision(check):
    rows = check("OInject", "bf16")
    assert rows["random draws"]["max_error_unrounded"] != rows["random draws"]["max_error"]
    assert rows["zero token"]["max_error_unrounded"] is None
    inputs = contracts_inputs.random_draws("OInject", 1)[0]
    bench = Bench(BY_NAME["OInject"], torch.bfloat16, "cpu")
    exact = BY_NAME["OInject"].formula(Direct, inputs.arrays, inputs, 1.0)
    assert bench.beside_stock(inputs).error_unrounded == np.abs(bench.compute(inputs).out - exact).max()


def test_lines_of_the_table_show_the_row_closest_to_its_bounds():
    rows = {"formula, self": (3.0, 9.0, 0.2, 0.1), "formula, cross": (0.5, 1.0, 0.5, 0.0001)}
    more = {"null receiver": (0.0, 0.0, 0.0), "insertion elsewhere": (2.0, 9.0, 0.9, 0.5, None, False)}
    failed_row = {"insertion at end": (0.1, 0.01, 10.0, 1.0, None, True)}
    draws = {"random draws": (3.0, 9.0, 0.2, 0.1, 2.0)}
    rows = [
        contracts._row("oattention", "fp32", name, [Result(*x)])
        for name, x in (rows | draws | more | failed_row).items()
    ]
    tables = list(contracts.table_cells(pd.DataFrame(rows, dtype=object)).values())
    header, cells = tables[0]
    assert header == ["operator", "property", "n", "error", "bound", "max", "med", "same", "ok"]
    assert cells == [
        ["oattention", "formula", "2", "5.0e-01", "1e+00", "50", "<0.1", "", "yes"],
        ["", "random draws", "1", "3.0e+00", "9e+00", "20", "10", "", "yes"],
        ["", "null receiver", "1", "0", "0", "", "", "", "yes"],
        ["", "insertion", "2", "1.0e-01", "1e-02", "1e+03", "1e+02", "1", "NO"],
    ]
    assert tables[1][1] == [["oattention", "fp32", "3.0e+00", "2.0e+00", "1.50", "1.50"]]


# --- The command ---


def run_command(*arguments):
    return CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, ["contracts", *arguments])


def test_command(tmp_path, small, monkeypatch):
    monkeypatch.setattr(contracts, "OPERATORS", tuple(BY_NAME[name] for name in ("oattention", "ONorm")))
    file = tmp_path / "contracts.json"
    result = run_command("--device", "cpu", "--dtype", "fp32, bf16", "--json", str(file))
    assert result.exit_code == 0, result.output
    for dtype in ("fp32", "bf16"):
        assert f"{dtype}: errors, and how many per cent of the outputs' own bounds they are, cpu" in result.stdout
    assert "For information: beside torch's own kernels, 5 random draws, cpu" in result.stdout
    assert "For information: OAttention beside the paper's 8.94e-08" in result.stdout
    assert "(1,1,4,8,8) against fp32" in result.stdout
    assert result.stdout.count("null source changed") == 2 and "NO" not in result.stdout

    rows = json.loads(file.read_text())
    assert all(set(row) >= KEYS for row in rows)
    assert {row["dtype"] for row in rows} == {"fp32", "bf16"}
    assert all(row["passed"] is (None if row["property"].startswith("anchor") else True) for row in rows)
    changed_sources = [row for row in rows if row["property"] == "null source changed"]
    assert all(row["bit_equal"] == row["cases"] for row in changed_sources)


def test_a_failed_row_shows_and_gives_exit_code_1(tmp_path, small, monkeypatch):
    monkeypatch.setattr(contracts, "OPERATORS", (BY_NAME["OFFN"],))
    monkeypatch.setattr(contracts, "_anchors", lambda *_: [])
    monkeypatch.setattr(references, "OFFN", UngatedFFN)
    file = tmp_path / "contracts.json"
    result = run_command("--device", "cpu", "--dtype", "fp64", "--json", str(file))
    assert result.exit_code == 1
    assert "NO" in result.stdout
    assert "rows failed: OFFN fp64 formula, few tokens; OFFN fp64 formula, one token; " in result.stderr
    assert [row["passed"] for row in json.loads(file.read_text()) if row["property"] == "zero token"] == [False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--dtype", "fp32,int8"], "unknown dtype 'int8'; there are: fp32, bf16, fp16, fp64"),
        (["--dtype", ""], "unknown dtype ''"),
        (["--device", "tpu"], "unknown device 'tpu'"),
        (["--json", "no/such/folder/x.json"], "no/such/folder/x.json"),
    ],
)
def test_bad_input_is_refused(arguments, message):
    result = run_command(*arguments)
    assert result.exit_code == 2 and message in result.stderr


def test_a_missing_kernel_is_named(monkeypatch):
    def layer_norm(x, *_):
        raise RuntimeError(f"not implemented for {x.dtype}")

    monkeypatch.setattr(F, "layer_norm", layer_norm)
    result = run_command("--device", "cpu", "--dtype", "fp16")
    assert result.exit_code == 2
    assert "torch has no layer_norm in fp16 on this cpu: not implemented for torch.float16" in result.stderr


def test_help_has_an_example():
    result = run_command("--help")
    assert result.exit_code == 0 and "oretrofit contracts" in result.stdout.split("Example:")[1]
