"""Which members share a forward pass, and how they are padded into one."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from oretrofit import patch
from oretrofit.retrofit.ragged.passes import packed, pad, unpacked
from oretrofit.retrofit.ragged.planning import Costs, plan_batches, share_out
from oretrofit.retrofit.ragged.preparing import Member


@pytest.fixture(scope="module")
def closed(tiny_host):
    return patch(tiny_host, "closed", tau=1e-6)


@given(
    sizes=hnp.arrays(np.int64, st.tuples(st.integers(0, 40), st.just(3)), elements=st.integers(1, 300)),
    max_padding=st.floats(0, 0.9),
    costs=st.builds(
        Costs,
        cell=st.floats(1, 1e6),
        row=st.floats(0, 1e8),
        launch=st.floats(0, 1e12),
        max_cells=st.integers(0, 10**6),
    ),
)
@settings(deadline=None)
def test_plan(sizes, costs, max_padding):
    batches = plan_batches(sizes, costs, max_padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        own = sum((n + m) * (c * costs.cell + costs.row) for n, m, c in sizes[batch].tolist())
        n, m, c = (max(column) for column in zip(*sizes[batch].tolist(), strict=True))
        padded = len(batch) * (n + m) * (c * costs.cell + costs.row)
        if len(batch) > 1:
            assert 1 - own / padded <= max_padding + 1e-9
            assert len(batch) * (n + m) * c <= costs.max_cells
            # No dearer than a pass for each.
            assert padded <= own + costs.launch * (len(batch) - 1) + 1e-6 * padded


def test_plan_by_hand():
    costs = Costs(cell=1, row=10, launch=1e9, max_cells=10**6)
    sizes = np.array([[80, 20, 10], [8, 2, 10], [80, 20, 10], [79, 20, 10], [8, 2, 10]])
    assert plan_batches(sizes, costs, 0.0) == [[0, 2], [3], [1, 4]]
    # Own work 5980 of 3 * 2000, then 6180 of 4 * 2000 with one of the short members, but not with both.
    assert plan_batches(sizes, costs, 0.2) == [[0, 2, 3], [1, 4]]
    assert plan_batches(sizes, costs, 0.25) == [[0, 2, 3, 1], [4]]
    assert plan_batches(sizes, costs, 0.4) == [[0, 2, 3, 1, 4]]
    # Where a pass costs nothing, no padding pays.
    assert plan_batches(sizes, dataclasses.replace(costs, launch=0), 0.9) == [[0, 2], [3], [1, 4]]
    assert plan_batches(sizes, dataclasses.replace(costs, max_cells=2000), 0.2) == [[0, 2], [3], [1, 4]]


def test_costs(closed):
    """A row costs what the ICL stage and its CLS tokens do, a cell what the cells' stages do."""
    model = closed.model
    costs = Costs.of(model, torch.device("cpu"))
    named = {name: p.numel() for name, p in model.named_parameters()}
    cells = sum(n for name, n in named.items() if name.startswith(("feature_distribution", "column_aggregator")))
    rows = sum(n for name, n in named.items() if name.startswith(("icl_blocks", "output_projection")))
    assert (costs.cell, costs.row) == (cells, rows + 2 * cells)
    assert Costs.of(model, torch.device("cpu"), 99).max_cells == 99
    assert Costs.of(model, torch.device("mps"), 99).max_cells == 0  # every member alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pad(dtype):
    def member(n, m, c):
        x_RC, y_N = torch.rand(n + m, c).to(dtype), torch.rand(n).to(dtype)
        return Member(*((x_RC, y_N) if dtype == torch.bfloat16 else (x_RC.numpy(), y_N.numpy())), None)

    members = [member(3, 1, 2), member(2, 2, 4)]
    x_RBC, y_NB, structure = pad(members)
    assert (x_RBC.shape, y_NB.shape, x_RBC.dtype, y_NB.dtype) == ((5, 2, 4), (3, 2), dtype, dtype)
    assert structure.rows_BR.tolist() == [[True, True, True, True, False], [True, True, False, True, True]]
    assert structure.columns_BC.tolist() == [[True, True, False, False], [True, True, True, True]]
    for i, m in enumerate(members):
        live = x_RBC[:, i][structure.rows_BR[i]][:, structure.columns_BC[i]]
        assert torch.equal(live, torch.as_tensor(m.x_RC))
        assert torch.equal(y_NB[: len(m.y_N), i], torch.as_tensor(m.y_N))
    same = pad([member(3, 1, 2), member(3, 1, 2)])[2]
    assert same.rows_BR is None and same.columns_BC is None


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("exists", [None, torch.tensor([[True, False, True]])])
def test_a_batch_on_its_way_to_a_gpu(dtype, exists):
    """Bytes in one piece, and the same tensors made of them."""
    parts = [torch.randn(3, 1, 5).to(dtype), torch.randn(3, 1).to(dtype), exists, torch.rand(1, 5) < 0.5]
    flat = packed(parts)
    assert (flat.dtype, flat.ndim) == (torch.uint8, 1)
    for part, again in zip(parts, unpacked(flat.clone(), parts), strict=True):
        assert (part is None) == (again is None)
        assert part is None or (part.dtype == again.dtype and torch.equal(part, again))


# ---- Which tables share a process ----------------------------------------------------------------


def shared(works, processes):
    return share_out([(work, 1) for work in works], works, processes, processes, 16)


@given(
    sizes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 500)), max_size=60),
    processes=st.integers(0, 9),
    threads=st.integers(1, 9),
    most_tables=st.integers(1, 20),
)
@settings(deadline=None)
def test_share_out(sizes, processes, threads, most_tables):
    works = [rows * (columns * 1e4 + 1e5) for rows, columns in sizes]
    alone, chunks = share_out(sizes, works, processes, threads, most_tables)
    assert sorted(alone + [i for chunk in chunks for i in chunk]) == list(range(len(sizes)))
    assert all(1 <= len(chunk) <= most_tables for chunk in chunks)
    totals = [sum(works[i] for i in chunk) for chunk in chunks]
    assert totals == sorted(totals, reverse=True)
    if not processes:
        assert not alone
        assert len(chunks) == -(-len(sizes) // most_tables)
    assert all(works[i] >= 1e9 for i in alone)
    # No chunk of several tables has more than a 16th of a process's share.
    for chunk, total in zip(chunks, totals, strict=True):
        assert len(chunk) == 1 or not processes or total <= (1 + 1e-9) * sum(totals) / (16 * processes)


def test_share_out_by_hand():
    # A table of 10 and four of 1: two processes take 10, or both threads at 0.7 first 7.1 and then two processes 2.
    assert shared([1e11] + [1e10] * 4, 2)[0] == [0]
    # With ten of 1 it is 10 against 7.1 + 5.
    assert shared([1e11] + [1e10] * 10, 2)[0] == []
    # Two equal tables fill two processes.
    assert shared([1e11] * 2, 2)[0] == []
    # Small tables are not worth it.
    assert shared([1e8] * 3, 2)[0] == []
    assert shared([1e8] * 160, 2)[1] == [[*range(i, i + 5)] for i in range(0, 160, 5)]
