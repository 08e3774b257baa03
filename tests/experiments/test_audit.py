"""The audit: stages against the model, which parts it finds in which model, the bar of the closed variant, the command."""

import copy
import functools
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tabpfn import TabPFNRegressor
from tabpfn.architectures import tabpfn_v3
from torch import nn
from typer.testing import CliRunner

from oretrofit import cli, load_host, patch
from oretrofit.calibration import carriers
from oretrofit.experiments import audit
from oretrofit.experiments.audit import HOST, INPUT, KINDS, Insertion
from oretrofit.experiments.pretrain import save_host
from oretrofit.patches.tabpfn_v3 import GatedNorm
from oretrofit.patches.tabpfn_v3_closed import OCellEmbedding
from oretrofit.retrofit.patcher import VARIANTS

MODELS = [HOST, *VARIANTS]
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def build(host, name, tau=1e-6):
    """A copy of a host, or of its variant."""
    return copy.deepcopy(host.model) if name == HOST else patch(host, name, tau=tau).model


def draw(seed=0, rows=40, columns=5, dtype=torch.float32, device="cpu"):
    """A table with missing cells."""
    case = audit.draw_case(np.random.default_rng(seed), rows, columns)
    case.x_R1C[:: 7, 0, 1] = torch.nan
    return audit.Case(case.x_R1C.to(device, dtype), case.y_N1.to(device, dtype))


def insert(case, kinds=KINDS, seed=1):
    return audit.draw_insertion(np.random.default_rng(seed), kinds, case.sizes)


def run(model, closed=None, seeds=(0, 1)):
    """What the audit finds of a model, with the closed variant of the same weights."""
    reference = audit.reference_of(model if closed is None else closed)
    return audit.audit_model(model, reference, [draw(seed) for seed in seeds])


def leaks(found, *, inserted=KINDS):
    """Boundary -> the parts that are named there, the boundary's own name left out."""
    named = {}
    for record in found["boundaries"]:
        for leak in record["leaks"]:
            if record["inserted"] in inserted:
                part = leak.split()[0].removeprefix(record["boundary"]).removeprefix(".") or "itself"
                named.setdefault(record["boundary"], set()).add(part)
    return named


# --- Stages and insertions ---


@pytest.mark.parametrize("config", [{}, {"use_rope": False, "use_nan_indicators": False, "icl_num_kv_heads_test": 1}])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_stages_together_are_the_model(make_host, name, config):
    model, case = build(make_host(**config), name, tau=1e-2).double(), draw(dtype=torch.float64)
    insertion = insert(case)
    inputs = [((case.x_R1C, case.y_N1), {}, len(case.y_N1))]
    if name == "closed":
        longer, structure = insertion.inputs(case, 1e3), insertion.structure(torch.device("cpu"))
        inputs.append((longer, {"structure": structure}, insertion.num_train))
    for (x, y), structure, n in inputs:
        h = audit.embed_cells(model, x, y, **structure)
        for stage in audit.stages(model).values():
            h = stage(h, n, y if not structure else insertion.targets(case.y_N1))
        logits, expected = model.output_projection(h[0, n:]), model(x, y, **structure)[:, 0]
        live = insertion.rows[len(case.y_N1) :] - n if structure else slice(None)
        assert (logits[live] - expected[live]).abs().max() < 1e-12
        assert expected.std(dim=0).max() > 0.1


def test_an_insertion_by_hand():
    insertion = Insertion(torch.tensor([1, 2, 4]), torch.tensor([0, 2]), (6, 3), 3)  # two train rows, one test row
    case = audit.Case(torch.tensor([[[1.0, 2]], [[3, 4]], [[5, 6]]]), torch.tensor([[7.0], [8]]))
    x, y = insertion.inputs(case, 9)
    assert x[:, 0].tolist() == [[9, 9, 9], [1, 9, 2], [3, 9, 4], [9, 9, 9], [5, 9, 6], [9, 9, 9]]
    assert y.tolist() == [[9], [7], [8]]
    assert insertion.targets(case.y_N1).tolist() == [[0], [7], [8]]
    structure = insertion.structure(torch.device("cpu"))
    assert structure.rows_BR.tolist() == [[False, True, True, False, True, False]]
    assert structure.columns_BC.tolist() == [[True, False, True]]
    rows = insertion.into(case.x_R1C.transpose(0, 1))
    assert rows.tolist() == [[[0, 0], [1, 2], [3, 4], [0, 0], [5, 6], [0, 0]]]
    rows[0, 0] = torch.tensor([3.0, 4])
    assert (insertion.old(rows)[0].tolist(), insertion.null_norm(rows)) == ([[1, 2], [3, 4], [5, 6]], 5)
    cells = insertion.packed().into(case.x_R1C[..., None].transpose(0, 1).squeeze(2)[None][0].unsqueeze(-1))
    assert cells[0, 4, :, 0].tolist() == [5, 6, 0]


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
def test_insertions_are_at_random_places_up_to_as_many_again(kinds):
    rng, sizes, seen = np.random.default_rng(0), (5, 4, 3), []
    for _ in range(300):
        insertion = audit.draw_insertion(rng, kinds, sizes)
        train, test = insertion.rows[:5].tolist(), (insertion.rows[5:] - insertion.num_train).tolist()
        totals = (insertion.num_train, insertion.shape[0] - insertion.num_train, insertion.shape[1])
        for kind, places, size, total in zip(KINDS, (train, test, insertion.columns.tolist()), sizes, totals, strict=True):
            assert size < total <= 2 * size if kind in kinds else total == size
            assert places == sorted(set(places)) and 0 <= places[0] and places[-1] < total
        seen.append((tuple(train), tuple(test), totals))
    assert {totals[KINDS.index(kinds[0])] for *_, totals in seen} == set(
        range(sizes[KINDS.index(kinds[0])] + 1, 2 * sizes[KINDS.index(kinds[0])] + 1)
    )


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
@torch.inference_mode()
def test_live_shift_of_a_host_row_by_row(tiny_host, kinds):
    case, model = draw(dtype=torch.float64), build(tiny_host, HOST).double()
    insertion, n = insert(case, kinds), len(case.y_N1)
    rows, columns = insertion.rows.tolist(), insertion.columns.tolist()
    x, y = np.zeros((insertion.shape[0], 1, insertion.shape[1])), np.zeros((insertion.num_train, 1))
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            x[row, 0, column] = case.x_R1C[i, 0, j]
        if i < n:
            y[row] = case.y_N1[i]
    borders = model.regression_borders.double()

    def means(logits):
        centers = (borders[:-1] + borders[1:]) / 2
        half_normal = (2 / np.pi) ** 0.5  # the outer buckets are half normal
        # Half normals of the width of their bucket, as a median: TabPFN's own scale.
        del half_normal
        return logits.softmax(-1) @ centers

    got = audit.live_shift(model, case, insertion)
    longer = model(torch.tensor(x), torch.tensor(y))[[row - insertion.num_train for row in rows[n:]], 0]
    inner = means(longer) - means(model(case.x_R1C, case.y_N1)[:, 0])
    assert got == pytest.approx(inner.abs().max().item(), abs=2e-2 * max(got, 1e-9))
