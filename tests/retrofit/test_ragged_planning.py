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


def work_of(rows, columns, costs):
    return rows * (columns * costs.cell + costs.row) + columns * costs.points * costs.point


@given(
    sizes=hnp.arrays(np.int64, st.tuples(st.integers(0, 40), st.just(3)), elements=st.integers(1, 300)),
    max_padding=st.floats(0, 0.9),
    costs=st.builds(
        Costs,
        cell=st.floats(1, 1e6),
        row=st.floats(0, 1e8),
        launch=st.floats(0, 1e12),
        max_cells=st.integers(0, 10**6),
        points=st.integers(0, 200),
        point=st.floats(0, 1e6),
    ),
)
@settings(deadline=None)
def test_plan(sizes, costs, max_padding):
    batches = plan_batches(sizes, costs, max_padding)
    assert sorted(i for batch in batches for i in batch) == list(range(len(sizes)))
    for batch in batches:
        own = sum(work_of(n + m, c, costs) for n, m, c in sizes[batch].tolist())
        n, m, c = (max(column) for column in zip(*sizes[batch].tolist(), strict=True))
        padded = len(batch) * work_of(n + m, c, costs)
        if len(batch) > 1:
            assert 1 - own / padded <= max_padding + 1e-9
            assert len(batch) * (n + m + costs.points) * c <= costs.max_cells
            # No dearer than a pass for each.
            assert padded <= own + costs.launch * (len(batch) - 1) + 1e-6 * padded


def planned_one_by_one(sizes, costs, max_padding):
    """The plan by its definition: every member that is left looked at before each is added."""
    left = sorted(range(len(sizes)), key=lambda i: (-work_of(sizes[i][0] + sizes[i][1], sizes[i][2], costs), sizes[i]))
    batches = []
    while left:
        batch = [left.pop(0)]

        def padded(members):
            n, m, c = (max(column) for column in zip(*(sizes[i] for i in members), strict=True))
            return len(members) * work_of(n + m, c, costs), len(members) * (n + m + costs.points) * c

        def own(members):
            return sum(work_of(sizes[i][0] + sizes[i][1], sizes[i][2], costs) for i in members)

        while True:
            found = []
            for i in left:
                work, cells = padded([*batch, i])
                share = 1 - own([*batch, i]) / work
                pays = work - padded(batch)[0] <= costs.launch + own([i])
                if share <= max_padding and cells <= costs.max_cells and pays:
                    found.append((share, i))
            if not found:
                break
            best = min(found, key=lambda pair: pair[0])[1]  # of equal ones the first
            batch.append(best)
            left.remove(best)
        batches.append(batch)
    return batches


@given(
    kinds=st.lists(st.tuples(*[st.integers(1, 60)] * 3), min_size=1, max_size=6),
    data=st.data(),
    max_padding=st.floats(0, 0.9),
    # Whole numbers, of which sums do not round.
    costs=st.builds(
        Costs,
        cell=st.integers(1, 10**4),
        row=st.integers(0, 10**5),
        launch=st.integers(0, 10**8),
        max_cells=st.integers(0, 10**5),
        points=st.integers(0, 200),
        point=st.integers(0, 10**4),
    ),
)
@settings(deadline=None)
def test_members_of_one_size_are_planned_together_as_one_by_one(kinds, data, max_padding, costs):
    sizes = data.draw(st.lists(st.sampled_from(kinds), max_size=25))
    actual = plan_batches(np.array(sizes).reshape(-1, 3), costs, max_padding)
    assert actual == planned_one_by_one(sizes, costs, max_padding)


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


def multiply_adds(model, rows, columns):
    """Of the linear layers of one pass, counted as they run; of all rows but one the targets are known."""
    counted = []

    def count(layer, inputs, _):
        counted.append(inputs[0].numel() // layer.in_features * layer.weight.numel())

    # The layers that scale queries are tiny, and left out of the costs.
    layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and "softmax_scaling" not in n]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    try:
        with torch.inference_mode():
            model(torch.randn(rows, 1, columns), torch.randn(rows - 1))
    finally:
        for hook in hooks:
            hook.remove()
    return sum(counted)


def test_costs(closed):
    """The multiply-adds of the layers that run for a table, but for those of norms and doors."""
    model = closed.model
    costs = Costs.of(model, torch.device("cpu"))
    only_readout = sum(p.numel() for p in model.output_projection.parameters())

    def counted(rows, columns):  # the costs have the readout at all rows, the model only at the one test row
        return multiply_adds(model, rows, columns) + (rows - 1) * only_readout

    for rows, columns in ((40, 3), (300, 20)):
        assert counted(rows, columns) == pytest.approx(costs.work(rows, columns), rel=0.06)
    # What a column costs beside its cells: twice the rows are less than twice the work.
    assert counted(20, 9) - counted(20, 8) > 20 * costs.cell
    points = model.config.dist_embed_num_inducing_points
    assert (costs.points, costs.cells(30, 4)) == (points, 4 * (30 + points))
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
