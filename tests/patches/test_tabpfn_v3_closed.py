"""The closed variant: one table as a formula in float64, and many tables padded together as each of them alone."""

import copy
import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tabpfn.architectures import tabpfn_v3
from tabpfn.preprocessing.torch.torch_standard_scaler import TorchStandardScaler

from oretrofit.patches import tabpfn_v3 as o
from oretrofit.patches.tabpfn_v3_closed import ClosedTabPFNV3, Structure, with_structure
from oretrofit.retrofit.patcher import carriers, patch_model

from .formulas import closed_forward

DOORS = ["x_embed", "col_y_encoder", "column_aggregator", "icl_y_encoder"]
GARBAGE = [np.nan, np.inf, -np.inf, 1e30, -1e30, 3.0]
FEW_HEADS = {"icl_num_kv_heads": 2, "icl_num_kv_heads_test": 1}
NO_ROPE = {"use_rope": False, "use_nan_indicators": False}
ONE_BLOCK = {"feat_agg_num_blocks": 1, "nlayers": 1}

# In float64, of logits of size 1 to 30: a dozen blocks, each with sums of at most 64 terms and a softmax over scores
# below 30, so up to some 10^4 unit roundoffs each. A NULL that wakes moves logits by 0.1 and more.
CLOSE = 1e-10
CLOSE_ON_ANY = 1e-9  # of tables drawn at random, some of them ill-conditioned


class Table(NamedTuple):
    """Train rows, then test rows: x (R, C), y (N,)."""

    x: torch.Tensor
    y: torch.Tensor


def draw(rng, n, m, c, missing=0.1):
    """A table of n train and m test rows and c columns, some cells missing or infinite."""
    # In steps of 2^-8: the host's mean of a column that is constant on the train rows is then exact, as
    # is that of `closed`. Elsewhere the host scales such a column by its own rounding.
    x = np.round(256 * (2 * rng.standard_normal((n + m, c)) + rng.standard_normal(c))) / 256
    x[rng.random(x.shape) < missing] = np.nan
    x[rng.random(x.shape) < missing / 5] = np.inf
    x[rng.random(x.shape) < missing / 5] = -np.inf
    return Table(torch.tensor(x), torch.tensor(rng.standard_normal(n)))


class Batch(NamedTuple):
    """Tables at random places of one batch: x (R, B, C), y (N, B), and which test rows are theirs."""

    x: torch.Tensor
    y: torch.Tensor
    structure: Structure
    tests: list


def pad(tables, rng, room=(2, 1, 2), garbage=GARBAGE):
    sizes = [(len(t.y), len(t.x) - len(t.y), t.x.shape[1]) for t in tables]
    (N, M, C), B = np.max(sizes, axis=0) + room, len(tables)
    x, y = (torch.tensor(rng.choice(garbage, shape)) for shape in ((N + M, B, C), (N, B)))
    rows, columns, tests = torch.zeros(B, N + M, dtype=torch.bool), torch.zeros(B, C, dtype=torch.bool), []
    for b, (table, (n, m, c)) in enumerate(zip(tables, sizes, strict=True)):
        train, test, at_c = (np.sort(rng.choice(total, k, replace=False)) for total, k in ((N, n), (M, m), (C, c)))
        at_r = np.concatenate([train, N + test])
        x[at_r[:, None], b, at_c] = table.x.double()
        y[train, b] = table.y.double()
        rows[b, at_r] = columns[b, at_c] = True
        tests.append(test)
    return Batch(x, y, Structure(rows, columns), tests)


def alone(model, table):
    """Logits (M, buckets) of one table in a batch of its own, without structure."""
    with torch.no_grad():
        return model(table.x[:, None], table.y[:, None])[:, 0]


def together(model, batch, **options):
    """Logits of each table of a padded batch."""
    with torch.no_grad():
        return split(model(batch.x, batch.y, structure=batch.structure, **options), batch)


def split(logits, batch):
    return [logits[test, b] for b, test in enumerate(batch.tests)]


def deviation(a, b):
    return max((p - q).abs().max().item() for p, q in zip(a, b, strict=True) if p.numel())


@pytest.fixture(scope="module", autouse=True)
def count_in_full_precision():
    """The host rounds the logarithm of its number of keys to float32 whatever it runs in; here it does not."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            tabpfn_v3,
            "_safe_log_seqlen",
            lambda n, device, dtype: torch.tensor(max(n, 1), device=device, dtype=dtype).log(),
        )
        yield


@pytest.fixture(scope="module")
def models(make_host, gating_taus):
    """For a config, in float64: `host`, `tiny` (tau 1e-30), `gated` (presence that matters) and its `taus`."""
    rng = np.random.default_rng(0)
    sample = [draw(rng, 7, 6, 4) for _ in range(2)]
    x, y = (torch.stack([getattr(table, part) for table in sample], dim=1) for part in ("x", "y"))

    @functools.cache
    def build(items):
        host = make_host(**dict(items))
        model = host.model.double()
        model._nan_safe_output = False  # which would hide NaN
        taus = gating_taus(host, lambda m: m(x, y), "closed")
        taus |= {door: 8 * taus[door] for door in DOORS}
        tiny, gated = copy.deepcopy(model), copy.deepcopy(model)
        patch_model(tiny, "closed", dict.fromkeys(carriers(model, "closed"), 1e-30))
        patch_model(gated, "closed", taus)
        return SimpleNamespace(host=model, tiny=tiny, gated=gated, taus=taus)

    return lambda **config: build(tuple(config.items()))


def fresh(models, seed=0, dtype=torch.float64):
    """(a copy of the gated model, three tables, their batch)."""
    rng = np.random.default_rng(seed)
    tables = [draw(rng, n, m, c) for n, m, c in ((6, 3, 4), (3, 5, 2), (1, 2, 1))]
    batch = pad(tables, rng)
    return copy.deepcopy(models().gated).to(dtype), tables, batch


# ---- One table is its formula; many together are each alone ---------------------------------------


@pytest.mark.parametrize("config", [{}, FEW_HEADS, NO_ROPE, ONE_BLOCK])
def test_a_table_is_its_formula(models, config):
    m = models(**config)
    tables = [draw(np.random.default_rng(i), *size) for i, size in enumerate([(6, 4, 4), (9, 1, 2), (2, 5, 7)])]
    with torch.no_grad():
        expected = [closed_forward(m.host, *table, m.taus) for table in tables]
    assert deviation([alone(m.gated, table) for table in tables], expected) < CLOSE
    assert deviation(together(m.gated, pad(tables, np.random.default_rng(9))), expected) < CLOSE
    assert deviation([alone(m.host, table) for table in tables], expected) > 1
    for door in DOORS:
        with torch.no_grad():
            open_door = [closed_forward(m.host, *table, m.taus | {door: 1e-300}) for table in tables]
        assert deviation(open_door, expected) > 1e-3, door


sizes = st.tuples(st.integers(1, 7), st.integers(1, 4), st.integers(1, 5))


@settings(max_examples=25, deadline=None)
@given(st.lists(sizes, min_size=1, max_size=3), st.tuples(*[st.integers(0, 3)] * 3), st.integers(0, 2**32 - 1))
def test_padding_is_inert(models, shapes, room, seed):
    m, rng = models(), np.random.default_rng(seed)
    tables = [draw(rng, *shape) for shape in shapes]
    batch = pad(tables, rng, room)
    on_host = [alone(m.host, table) for table in tables]
    assert deviation(together(m.tiny, batch), on_host) < CLOSE_ON_ANY
    assert deviation([alone(m.tiny, table) for table in tables], on_host) < CLOSE_ON_ANY
    assert deviation(together(m.gated, batch), [alone(m.gated, table) for table in tables]) < CLOSE_ON_ANY


def test_zero_padding_is_not_inert_on_the_host(models):
    m = models()
    for seed in range(4):
        _, tables, batch = fresh(models, seed)
        rng = np.random.default_rng(seed)
        zeros = pad(tables, rng, garbage=[0.0])
        with torch.no_grad():
            padded = split(m.host(zeros.x, zeros.y), zeros)
        on_host = [alone(m.host, table) for table in tables]
        for a, b in zip(padded, on_host, strict=True):
            assert (a - b).abs().max() > 0.1
        assert deviation(together(m.tiny, batch), on_host) < CLOSE_ON_ANY


GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("which", ["tiny", "gated"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, "autocast"])
def test_padding_is_inert_within_the_precision(models, dtype, which, device):
    """Padding moves a table no further than rounding does."""
    low = torch.float32 if dtype == "autocast" else dtype
    model = copy.deepcopy(getattr(models(), which)).to(device, low)
    exact = copy.deepcopy(model).double()
    for module in exact.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = torch.finfo(torch.float32).eps  # what torch takes in all of these precisions
    u = torch.finfo(torch.bfloat16 if dtype == "autocast" else dtype).eps / 2
    for seed in range(4):
        _, tables, batch = fresh(models, seed)
        tables = [Table(*(part.to(device, low) for part in table)) for table in tables]
        structure = Structure(batch.structure.rows_BR.to(device), batch.structure.columns_BC.to(device))
        batch = Batch(batch.x.to(device, low), batch.y.to(device, low), structure, batch.tests)
        with torch.autocast(device, torch.bfloat16, enabled=dtype == "autocast"):
            single = [alone(model, table) for table in tables]
            moved = deviation(together(model, batch), single)
        tables = [Table(*(part.double() for part in table)) for table in tables]
        bound = 4 * moved_by_perturbation(exact, tables, u)
        # So that it says something.
        assert bound < (1e-4 if dtype == torch.float32 else 0.1 * max(part.abs().max().item() for part in single))
        assert deviation(single, [alone(exact, table) for table in tables]) < bound
        assert moved < 2 * bound


def test_padding_is_inert_behind_norms_that_divide_by_zero(models):
    """Norms without eps: NULL rows and columns are 0 / 0 in each of them."""
    model, tables, batch = fresh(models)
    for module in model.modules():
        if isinstance(module, torch.nn.RMSNorm):
            module.eps = 0.0
    expected = [alone(model, table) for table in tables]
    assert deviation(together(model, batch), expected) < CLOSE
    train = Structure(batch.structure.rows_BR[:, : len(batch.y)], batch.structure.columns_BC)
    with torch.no_grad():
        _, cache = model(batch.x[: len(batch.y)], batch.y, return_kv_cache=True, structure=train)
    for kept in cache.kv.values():
        assert kept.key[train.rows_BR].any(-1).all()
        assert not kept.key[~train.rows_BR].any() and not kept.value[~train.rows_BR].any()
    model.train()
    x = batch.x.clone().requires_grad_()
    logits = split(model(x, batch.y, structure=batch.structure), batch)
    assert deviation(logits, expected) < CLOSE
    sum(part.square().sum() for part in logits).backward()
    exists_RBC = batch.structure.rows_BR.T[..., None] & batch.structure.columns_BC
    assert x.grad.isfinite().all()
    assert not x.grad[~exists_RBC].any()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


def moved_by_perturbation(model, tables, u, draws=2):
    """What one random unit roundoff in each weight, input and module's output does to the logits.

    Rounding does about as much: a few times that, as a module rounds at each of its steps.
    """
    generator, expected, largest = torch.Generator().manual_seed(0), [alone(model, table) for table in tables], 0.0

    def perturbed(x):
        noise = torch.rand(x.shape, generator=generator, dtype=x.dtype).to(x.device)
        return x * (1 + u * (2 * noise - 1))

    for _ in range(draws):
        other = copy.deepcopy(model)
        for parameter in other.parameters():
            parameter.data = perturbed(parameter.data)
        for module in other.modules():
            module.register_forward_hook(lambda _, __, output: perturbed(output) if torch.is_tensor(output) else None)
        found = [alone(other, Table(*map(perturbed, table))) for table in tables]
        largest = max(largest, deviation(found, expected))
    return largest


def changed(table, change):
    x, y = table.x.clone(), table.y.clone()
    change(x, y)
    return Table(x, y)


def put(where, value):
    def change(x, y):
        x[where] = value

    return change


def put_y(where, value):
    def change(x, y):
        y[where] = value

    return change


# name -> (config, train rows, test rows, columns, change of x and y)
SPECIAL = {
    "one train row": ({}, 1, 3, 3, put((0, 0), 2.0)),
    "one train row, all missing": ({}, 1, 3, 3, put(0, np.nan)),
    "one column": ({}, 5, 3, 1, put((1, 0), np.nan)),
    "one cell of each": ({}, 1, 1, 1, put((0, 0), 1.0)),
    "constant columns": ({}, 5, 3, 4, put((slice(None), [0, 2]), 7.0)),
    "constant on train rows": ({}, 5, 3, 4, put((slice(5), 1), -3.0)),
    "constant but for what is missing": (
        {},
        5,
        3,
        4,
        put((slice(5), 1), torch.tensor([2, np.nan, 2, np.inf, 2.0]).double()),
    ),
    "a column missing on train rows": ({}, 5, 3, 4, put((slice(5), 1), np.nan)),
    "a column missing altogether": ({}, 5, 3, 4, put((slice(None), 1), np.nan)),
    "a column infinite on train rows": ({}, 5, 3, 4, put((slice(5), 1), np.inf)),
    "infinite cells": ({}, 5, 3, 4, put(([0, 2, 6], [1, 1, 3]), torch.tensor([np.inf, -np.inf, np.inf]).double())),
    "a row without any value": ({}, 5, 3, 4, put([1, 6], np.nan)),
    "zeros": ({}, 5, 3, 4, put(slice(None), 0.0)),
    "far out": ({}, 5, 3, 4, put((6, 0), 1e25)),
    "a target missing": ({}, 5, 3, 4, put_y(2, np.nan)),
    "a target infinite": ({}, 5, 3, 4, put_y(2, np.inf)),
    "all targets missing": ({}, 5, 3, 4, put_y(slice(None), np.nan)),
    "no positions": ({"use_rope": False}, 5, 3, 4, put((1, 1), np.nan)),
    "no indicators": ({"use_nan_indicators": False}, 5, 3, 4, put((1, 1), np.nan)),
    "one block": (ONE_BLOCK, 5, 3, 4, put((1, 1), np.nan)),
    "few heads": (FEW_HEADS, 5, 3, 4, put((1, 1), np.nan)),
    "a target for each row": ({}, 5, 3, 4, put_y(slice(None), 1.0)),
}


@pytest.mark.parametrize("name", SPECIAL)
def test_special_tables(models, name):
    """As the host alone where tau is tiny, as the formula where it is not; beside a larger table in both."""
    config, n, m, c, change = SPECIAL[name]
    rng, model = np.random.default_rng(3), models(**config)
    table = changed(draw(rng, n, m, c, missing=0), change)
    batch = pad([table, draw(rng, 8, 4, 5)], rng)
    on_host = alone(model.host, table)
    assert on_host.isfinite().all()
    with torch.no_grad():
        expected = closed_forward(model.host, *table, model.taus)
    for place in (alone(model.tiny, table), together(model.tiny, batch)[0]):
        assert (place - on_host).abs().max() < CLOSE_ON_ANY
    for place in (alone(model.gated, table), together(model.gated, batch)[0]):
        assert (place - expected).abs().max() < CLOSE_ON_ANY


def test_one_target_for_all_tables(models):
    """y (N,) and (N, B, 1) stand for (N, B)."""
    model, _, batch = fresh(models)
    y, (_, B, _) = torch.linspace(-1, 1, len(batch.y), dtype=torch.float64), batch.x.shape
    expected = together(model, batch._replace(y=y[:, None].expand(-1, B)))
    assert deviation(together(model, batch._replace(y=y)), expected) < CLOSE
    assert deviation(together(model, batch._replace(y=y[:, None, None].expand(-1, B, 1))), expected) < CLOSE
    named = batch._replace(x={"main": batch.x}, y={"main": y})  # as the host takes them, too
    assert deviation(together(model, named), expected) < CLOSE
    with torch.no_grad():
        x = torch.nan_to_num(batch.x.clamp(-3, 3))
        torch.testing.assert_close(model(x, y), model(x, y[:, None].expand(-1, B)), rtol=CLOSE, atol=CLOSE)


def test_a_table_without_test_rows_beside_others(models):
    m, rng = models(), np.random.default_rng(4)
    tables = [draw(rng, 4, 0, 3), draw(rng, 6, 3, 2)]
    empty, other = together(m.gated, pad(tables, rng))
    assert empty.shape == (0, 50)
    assert (other - alone(m.gated, tables[1])).abs().max() < CLOSE


@pytest.mark.parametrize("rows", [slice(None), slice(0, 8)])
def test_a_table_that_is_all_null_beside_others(models, rows):
    """Or one whose train rows all are: finite, and nobody else's business."""
    m, rng = models(), np.random.default_rng(4)
    tables = [draw(rng, 4, 2, 3), draw(rng, 6, 3, 2)]
    batch = pad(tables, rng)
    assert len(batch.y) == 8
    batch.structure.rows_BR[0, rows] = False
    null, other = together(m.gated, batch)
    assert null.isfinite().all()
    assert (other - alone(m.gated, tables[1])).abs().max() < CLOSE


def test_without_train_rows(models):
    """Where the host fails: no batch of tables has any train row."""
    m, rng = models(), np.random.default_rng(4)
    tables = [draw(rng, 0, 3, 3, missing=0), draw(rng, 0, 5, 2, missing=0)]
    batch = pad(tables, rng, room=(0, 1, 1))
    with pytest.raises(RuntimeError):
        alone(m.host, tables[0])
    expected = [alone(m.gated, table) for table in tables]
    assert all(logits.isfinite().all() for logits in expected)
    assert deviation(together(m.gated, batch), expected) < CLOSE
    assert deviation(together(m.gated, batch._replace(y=None)), expected) < CLOSE


def test_structure_may_name_rows_or_columns_only(models):
    model, tables, _ = fresh(models)
    rng, table = np.random.default_rng(1), tables[0]
    for room in ((2, 2, 0), (0, 0, 2), (0, 0, 0)):
        batch = pad([table], rng, room)
        rows, columns = batch.structure.rows_BR, batch.structure.columns_BC
        given = Structure(rows if room[0] else None, columns if room[2] else None)
        assert deviation(together(model, batch._replace(structure=given)), [alone(model, table)]) < CLOSE
    assert deviation(together(model, batch._replace(structure=None)), [alone(model, table)]) < CLOSE


def test_live_columns_keep_their_order():
    """Also among so many columns that a sort that may change it does: they are grouped and rotated by it."""
    columns_BC = torch.tensor(np.random.default_rng(0).random((2, 200)) < 0.5)
    x = torch.arange(200.0).expand(3, 2, -1)
    packed, exists = with_structure(x, None, Structure(columns_BC=columns_BC))[0].chunk(2, dim=-1)
    for b, live in enumerate(columns_BC):
        at, count = live.nonzero()[:, 0].tolist(), int(live.sum())
        assert packed[:, b, :count].tolist() == 3 * [at]
        assert exists[:, b].tolist() == 3 * [count * [1.0] + (200 - count) * [0.0]]


# ---- NULL is zero, from the door to the readout ---------------------------------------------------


def test_null_rows_and_columns_are_zero_at_every_boundary(models):
    model, tables, batch = fresh(models)
    seen = {}

    def record(name):
        def hook(module, args, kwargs, output):
            given = [*args, *kwargs.values()][0]
            seen.setdefault(name, []).extend([given, output[0] if isinstance(output, tuple) else output])

        return hook

    aggregator = model.column_aggregator
    names = [f"feature_distribution_embedder.layers.{i}" for i in range(2)]
    names += ["column_aggregator", "column_aggregator.blocks.0", "column_aggregator.out_ln"]
    names += [*(f"icl_blocks.{i}" for i in range(3)), "output_norm"]
    for name in names:
        model.get_submodule(name).register_forward_hook(record(name), with_kwargs=True)
    model.x_embed.register_forward_hook(lambda _, args, output: seen.update(x_embed=[output]))
    with torch.no_grad():
        out = model(batch.x, batch.y, structure=batch.structure, only_return_standard_out=False)
    rows_BR = batch.structure.rows_BR
    columns = [table.x.shape[1] for table in tables]
    N, cls = len(batch.y), aggregator.num_cls_tokens
    for name in [*names, "x_embed"]:
        for h in seen[name]:
            assert not h[~rows_BR].any(), name  # all that is in NULL rows
            assert (h[rows_BR].flatten(1) != 0).any(-1).all(), name
            if h.ndim == 4 and h.shape[2] > cls:
                lead = cls if h.shape[2] > batch.x.shape[2] else 0
                for b, c in enumerate(columns):
                    assert not h[b, :, lead + c :].any(), name
                    assert h[b, rows_BR[b], : lead + c].any(-1).all(), name
    assert {name: len(values) for name, values in seen.items()} == dict.fromkeys(names, 2) | {"x_embed": 1}
    assert not out["train_embeddings"].transpose(0, 1)[~rows_BR[:, :N]].any()
    assert not out["test_embeddings"].transpose(0, 1)[~rows_BR[:, N:]].any()


def test_nulls_change_no_bit_of_attention(models):
    """On a CPU in float32: not of the sums of the kernel, nor of the support that scales queries."""
    rng, g = np.random.default_rng(5), torch.Generator().manual_seed(5)
    receivers, sources = 37, 301
    q, k, v = (torch.randn(2, size, 4, 8, generator=g) for size in (receivers, sources, sources))
    p, log_p = torch.rand(2, receivers, generator=g), torch.rand(2, sources, generator=g).log()
    out, gate = o._attend(q, k, v, p, log_p)
    layer = copy.deepcopy(models().gated).float().icl_blocks[0].icl_attention.softmax_scaling_layer
    assert type(layer) is o.OSoftmaxScalingMLP
    # Many supports of about 3, of which a sum in float32 would give some another last bit.
    few, supports = torch.randn(100, 1, 4, 8, generator=g), (torch.rand(100, 40, generator=g) * 0.15).log()
    scaled = layer(few, supports)

    def among(x, at, size, null):
        longer = torch.full((len(x), size, *x.shape[2:]), null)
        longer[:, at] = x
        return longer

    for more_receivers, more_sources in ((3, 0), (0, 1), (0, 40), (5, 99), (1, 1000)):
        S, J = receivers + more_receivers, sources + more_sources
        at_S, at_J = (np.sort(rng.choice(*part, replace=False)) for part in ((S, receivers), (J, sources)))
        keys = among(k, at_J, J, 3.0), among(v, at_J, J, -2.0)
        long_p, long_log_p = among(p, at_S, S, 0.0), among(log_p, at_J, J, -math.inf)
        long_out, long_gate = o._attend(among(q, at_S, S, 1.0), *keys, long_p, long_log_p)
        assert torch.equal(long_out[:, at_S], out)
        assert torch.equal(long_gate[:, at_S], gate)
        assert long_gate.count_nonzero() == gate.count_nonzero()
        at = np.sort(rng.choice(40 + more_sources, 40, replace=False))
        assert torch.equal(layer(few, among(supports, at, 40 + more_sources, -math.inf)), scaled)


# ---- The ways a model is run ----------------------------------------------------------------------


def test_chunks(models, monkeypatch):
    model, _, batch = fresh(models)
    expected, starts = together(model, batch), set()
    chunk = ClosedTabPFNV3._process_row_chunk

    def spy(self, *args, **kwargs):
        starts.add(kwargs["chunk_start"])
        return chunk(self, *args, **kwargs)

    monkeypatch.setattr(ClosedTabPFNV3, "_process_row_chunk", spy)
    for cells, columns in ((1, 1), (60, 1), (90, 3)):
        model.inference_chunk_cells, model.inference_col_chunk_size = cells, columns
        assert deviation(together(model, batch), expected) < CLOSE
        assert len(starts) > 1
        starts.clear()


@pytest.mark.parametrize(
    "options", [{"save_peak_memory_factor": 3}, {"save_peak_memory_factor": 100}, {"force_recompute_layer": True}]
)
def test_performance_options(models, options):
    model, _, batch = fresh(models)
    given = dataclasses.replace(model.get_default_performance_options(), **options)
    assert deviation(together(model, batch, performance_options=given), together(model, batch)) < CLOSE


@pytest.mark.parametrize("cells", [None, 60])
@pytest.mark.parametrize("config", [{}, FEW_HEADS])
def test_cache(models, config, cells):
    """Train rows first, test rows later, each with the structure of what x holds."""
    _, tables, batch = fresh(models)
    model = copy.deepcopy(models(**config).gated)
    if cells:
        model.inference_chunk_cells, model.inference_col_chunk_size = cells, 1
    (x, y, structure, _), N = batch[:4], len(batch.y)
    expected = [alone(model, table) for table in tables]
    train, test = (Structure(structure.rows_BR[:, part], structure.columns_BC) for part in (slice(N), slice(N, None)))
    with torch.no_grad():
        _, cache = model(x[:N], y, return_kv_cache=True, structure=train)
        whole, same = model(x, y, return_kv_cache=True, structure=structure)
        later = model(x[N:], y, kv_cache=cache, x_is_test_only=True, structure=test)
        beside = model(x, y, kv_cache=cache, structure=structure)
    for logits in (whole, later, beside):
        assert deviation(split(logits, batch), expected) < CLOSE
    assert type(cache) is o.OTabPFNV3Cache
    for kept, also in zip(cache.kv.values(), same.kv.values(), strict=True):
        assert ((kept.log_presence == -math.inf) == ~structure.rows_BR[:, :N]).all()
        torch.testing.assert_close(kept.log_presence, also.log_presence, rtol=1e-9, atol=0)
        assert not kept.key[~structure.rows_BR[:, :N]].any()


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_null_rows_leave_a_quantized_cache_alone(models, dtype):
    """The scale of a quantized tensor is its largest number, where zeros do not show."""
    model, tables, _ = fresh(models)
    table = tables[0]
    batch, N = pad([table], np.random.default_rng(2)), len(table.y)
    rows, columns = batch.structure.rows_BR, batch.structure.columns_BC

    def quantized(x, y, train, test):
        with torch.no_grad():
            _, cache = model(x[: len(y)], y, return_kv_cache=True, structure=train)
            cache = cache.quantize(dtype)
            return model(x[len(y) :], y, kv_cache=cache, x_is_test_only=True, structure=test)

    expected = quantized(table.x[:, None], table.y[:, None], None, None)[:, 0]
    n = len(batch.y)
    assert n > N
    out = quantized(batch.x, batch.y, Structure(rows[:, :n], columns), Structure(rows[:, n:], columns))
    assert (expected - alone(model, table)).abs().max() > 10 * CLOSE_ON_ANY  # what quantizing costs
    assert deviation(split(out, batch), [expected]) < CLOSE_ON_ANY


# ---- Gradients ------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_each_table_alone(models, recompute):
    """Of inputs, targets and weights, in training mode; exactly zero at NULL rows and columns."""
    model, tables, batch = fresh(models)
    tables[1].x[:, 0] = 2.0  # no variance
    batch = pad(tables, np.random.default_rng(6))
    model.train()
    options = dataclasses.replace(model.get_default_performance_options(), force_recompute_layer=recompute)
    weight = [torch.linspace(-1, 1, 50 * len(test), dtype=torch.float64).view(-1, 50) for test in batch.tests]

    def gradients(x, y, structure, pick):
        model.zero_grad()
        x, y = x.clone().requires_grad_(), y.clone().requires_grad_()
        logits = pick(model(x, y, structure=structure, performance_options=options))
        sum((w * part).sum() for w, part in logits).backward()
        weights = {name: p.grad.clone() for name, p in model.named_parameters() if p.requires_grad}
        return x.grad, y.grad, weights

    x, y, weights = gradients(*batch[:3], lambda logits: zip(weight, split(logits, batch), strict=True))
    total = {name: torch.zeros_like(gradient) for name, gradient in weights.items()}
    rows_BR, columns_BC = batch.structure.rows_BR, batch.structure.columns_BC
    exists_RBC = rows_BR.T[..., None] & columns_BC
    assert not x[~exists_RBC].any()
    assert not y[~rows_BR.T[: len(y)]].any()
    for b, table in enumerate(tables):
        own_x, own_y, own = gradients(
            table.x[:, None], table.y[:, None], None, lambda out, b=b: [(weight[b], out[:, 0])]
        )
        assert own_x.isfinite().all()
        assert own_x.any() or len(table.y) == 1
        torch.testing.assert_close(
            x[:, b][exists_RBC[:, b]].view(own_x[:, 0].shape), own_x[:, 0], rtol=1e-8, atol=1e-11
        )
        torch.testing.assert_close(y[rows_BR[b, : len(y)], b], own_y[:, 0], rtol=1e-8, atol=1e-11)
        for name, gradient in own.items():
            total[name] += gradient
    for name, gradient in total.items():
        assert gradient.isfinite().all()
        scale = gradient.abs().max().item()
        torch.testing.assert_close(weights[name], gradient, rtol=1e-8, atol=1e-9 * scale, msg=lambda m, n=name: n + m)


def test_gradients_are_those_of_the_formula(models):
    m = models()
    table = draw(np.random.default_rng(8), 6, 3, 4)
    found = []
    for model, forward in (
        (copy.deepcopy(m.gated), lambda model, x, y: model(x[:, None], y[:, None])[:, 0]),
        (copy.deepcopy(m.host), lambda model, x, y: closed_forward(model, x, y, m.taus)),
    ):
        model.train()
        x, y = (part.clone().requires_grad_() for part in table)
        logits = forward(model, x, y)
        (torch.linspace(-1, 1, logits.numel(), dtype=torch.float64).view(logits.shape) * logits).sum().backward()
        weights = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
        found.append({"x": x.grad, "y": y.grad} | weights)
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        scale = gradient.abs().max().item()
        assert scale > 0, name
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-8, atol=1e-9 * scale, msg=lambda m, n=name: n + m)


def test_gradients_are_finite_differences(models):
    model, tables, batch = fresh(models)
    tables = [Table(torch.nan_to_num(t.x, posinf=1, neginf=-1), t.y) for t in tables]
    batch = pad(tables, np.random.default_rng(6), garbage=[3.0, -1.0])
    g = torch.Generator().manual_seed(0)
    directions = [torch.randn(part.shape, dtype=torch.float64, generator=g) for part in batch[:2]]

    def loss(x, y):
        return sum(part.softmax(-1).square().sum() for part in split(model(x, y, structure=batch.structure), batch))

    inputs = [part.clone().requires_grad_() for part in batch[:2]]
    loss(*inputs).backward()
    for i, direction in enumerate(directions):
        with torch.no_grad():
            ahead, behind = (
                loss(*(p + sign * 1e-5 * direction if j == i else p for j, p in enumerate(batch[:2])))
                for sign in (1, -1)
            )
        slope = (inputs[i].grad * direction).sum().item()
        # The loss is of order 1: its rounding, over a step of 1e-5, makes 1e-11 of the slope uncertain.
        assert abs(slope) > 1e-6
        assert slope == pytest.approx(((ahead - behind) / 2e-5).item(), rel=1e-5)


# ---- The scaler -----------------------------------------------------------------------------------


def statistics(model, x, y, structure):
    with torch.no_grad():
        return model(x[: len(y)], y, return_kv_cache=True, structure=structure)[1].scaler_cache


def test_statistics_are_the_hosts_on_what_exists(models):
    model, tables, batch = fresh(models)
    N = len(batch.y)
    train = Structure(batch.structure.rows_BR[:, :N], batch.structure.columns_BC)
    kept = statistics(model, batch.x, batch.y, train)
    for b, table in enumerate(tables):
        x = table.x[: len(table.y)]
        finite = x.isfinite()
        mean = torch.nan_to_num(x.where(finite, torch.nan).nanmean(0), 0)
        expected = TorchStandardScaler().fit(x.where(finite, mean))
        for name, values in expected.items():
            # At most eight values of size up to 8, shifted, summed and shifted back.
            torch.testing.assert_close(kept[name][b, : x.shape[1]], values, rtol=1e-14, atol=1e-14)
        assert not kept["mean"][b, x.shape[1] :].any()
        assert (kept["std"][b, x.shape[1] :] == 1).all()


def test_a_deviation_below_the_range_of_the_dtype_is_none(models):
    """It would be 0, and divided by; the host takes 1."""
    model, _, _ = fresh(models, dtype=torch.float32)
    x = torch.zeros(10, 2)
    x[4, 0] = 2.0**-149  # the smallest number: over ten rows a deviation of 0.3 of it
    x[:, 1] = torch.arange(10.0)
    kept = statistics(model, x[:, None], torch.ones(10, 1), None)
    assert kept["std"].tolist() == [[1.0, pytest.approx(x[:, 1].double().std().item(), rel=1e-6)]]


@pytest.mark.parametrize("scale", [1.0, 1e-3, 1e4])
def test_null_rows_change_no_bit_of_the_statistics(models, scale):
    """In float32, wherever and however many they are."""
    model, _, _ = fresh(models, dtype=torch.float32)
    rng = np.random.default_rng(7)
    table = draw(rng, 23, 1, 4)
    x, y = (scale * table.x + 5 * scale).float(), table.y.float()
    expected = statistics(model, x[:, None], y[:, None], None)
    for room in itertools.chain(range(12), (60, 500)):
        batch = pad([Table(x, y)], rng, room=(room, 0, 0))
        structure = Structure(batch.structure.rows_BR[:, :-1], None)
        kept = statistics(model, batch.x.float(), batch.y.float(), structure)
        assert torch.equal(kept["mean"], expected["mean"])
        assert torch.equal(kept["std"], expected["std"])


@pytest.mark.parametrize(
    ("structure", "message"),
    [
        (Structure(torch.ones(2, 5, dtype=torch.bool)), r"rows_BR .* \(2, 6\) on cpu, not torch.bool \(2, 5\) on"),
        (
            Structure(columns_BC=torch.ones(2, 1, dtype=torch.bool)),
            r"columns_BC .* \(2, 3\) on cpu, not torch.bool \(2, 1\) on",
        ),
        (Structure(columns_BC=torch.full((2, 3), 0.5)), "must be a bool tensor .* not torch.float32"),
        (Structure(rows_BR=[[True] * 6] * 2), "must be a bool tensor .* not list"),  # type: ignore[arg-type]
    ],
)
def test_a_structure_that_does_not_fit(structure, message):
    with pytest.raises(ValueError, match=message):
        with_structure(torch.zeros(6, 2, 3), torch.zeros(4, 2), structure)
