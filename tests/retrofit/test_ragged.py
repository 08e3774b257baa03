"""Ragged prediction: answers as of fit and predict one by one, whatever shares a forward pass."""

import dataclasses
import os
import pickle
import select
import subprocess
import sys
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tabpfn import TabPFNRegressor
from tabpfn.base import _regression_distribution_from_specs
from tabpfn.inference_config import InferenceConfig

import oretrofit.retrofit.ragged
from oretrofit import patch
from oretrofit.patches.tabpfn_v3_closed import ClosedTabPFNV3
from oretrofit.retrofit.ragged import Costs, RaggedReport, TableError, _Member, _pad, _prepare, _settings, plan_batches

OPTIONS = {"device": "cpu", "inference_precision": torch.float32, "n_estimators": 2}
LEVELS = [0.3, 0.5, 0.7]


@pytest.fixture(scope="module")
def closed(tiny_host):
    """A closed retrofit with so large a delta that gating shows."""
    return patch(tiny_host, "closed", tables=1, delta=0.05)


def a_table(seed, n_train, n_test, columns, frame=False):
    """Random (X_train, y_train, X_test): numbers, some missing; as a frame with categories and strings too."""
    rng = np.random.default_rng(seed)
    rows = n_train + n_test
    X = rng.standard_normal((rows, columns)) * 10.0 ** rng.integers(-2, 3, columns)
    y = 100 * rng.standard_normal() + X[:, 0] + rng.standard_normal(rows)
    X[rng.random(X.shape) < 0.1] = np.nan
    X[:, 0] = np.where(np.isnan(X[:, 0]), 0, X[:, 0])
    if frame:
        X = pd.DataFrame(X, columns=[f"x{i}" for i in range(columns)])
        X["kind"] = pd.Categorical(rng.choice(["a", "b", "c"], rows))
        X["word"] = rng.choice(["red", "green", None], rows)
        X["flag"] = rng.random(rows) < 0.5
        return X.iloc[:n_train], pd.Series(y[:n_train]), X.iloc[n_train:]
    return X[:n_train], y[:n_train], X[n_train:]


@pytest.fixture(scope="module")
def tables():
    """Tables of all kinds of sizes, one test row and two train rows among them."""
    sizes = [(12, 5, 2), (30, 1, 6), (2, 3, 3), (25, 9, 1), (12, 5, 2), (50, 20, 9), (7, 4, 4), (28, 2, 6)]
    return [a_table(i, *size, frame=i % 3 == 1) for i, size in enumerate(sizes)]


def one_by_one(specs, tables, output_type="mean", quantiles=None, **options):
    """The reference: TabPFN's own fit and predict, a table at a time."""
    results = []
    for X, y, X_test in tables:
        regressor = TabPFNRegressor(model_path=specs, **{**OPTIONS, **options}).fit(X, y)
        results.append(regressor.predict(X_test, output_type=output_type, quantiles=quantiles))
    return results


def ragged(retrofit, tables, **settings):
    return retrofit.predict_ragged(*map(list, zip(*tables, strict=True)), **{**OPTIONS, **settings})


@pytest.fixture(scope="module")
def reference(closed, tables):
    """Everything that `predict` says of each table and of one with a constant target."""
    constant = (np.arange(12.0).reshape(4, 3), np.full(4, 7.5), np.ones((2, 3)))
    return [*tables, constant], one_by_one(closed.specs, [*tables, constant], "full", LEVELS)


@pytest.fixture(scope="module")
def expected(reference):
    """Their means, without the constant target's."""
    return [full["mean"] for full in reference[1][:-1]]


def furthest(actual, expected, tables):
    """The largest difference between two lists of predicted means, in standard deviations of the target."""
    assert [np.shape(a) for a in actual] == [(len(X_test),) for _, _, X_test in tables]
    pairs = zip(actual, expected, tables, strict=True)
    return max(np.abs(a - e).max() / np.std(y) for a, e, (_, y, _) in pairs)


# ---- The same answers ----------------------------------------------------------------------------


@pytest.mark.parametrize("n_estimators", [1, 5])
def test_means(closed, tables, n_estimators):
    report = RaggedReport()
    actual = ragged(closed, tables, n_estimators=n_estimators, report=report)
    expected = one_by_one(closed.specs, tables, n_estimators=n_estimators)
    assert furthest(actual, expected, tables) < 1e-5
    # The tables are told apart at all: each against its neighbour's answer would fail.
    assert min(np.ptp(e) / np.std(y) for e, (_, y, X) in zip(expected, tables, strict=True) if len(X) > 1) > 1e-3
    assert (report.tables, report.members) == (len(tables), n_estimators * len(tables))
    assert report.batches < report.members
    assert 0 < report.padding <= 0.25
    assert not report.errors


def test_smallest_delta_is_the_host(tiny_host, tables):
    retrofit = patch(tiny_host, "closed", tables=1, delta=1e-9)
    actual = ragged(retrofit, tables)
    assert furthest(actual, one_by_one(retrofit.host_specs, tables), tables) < 1e-4


def test_padding_would_reach_the_host(closed, tables, expected, monkeypatch):
    """What is inert is the structure: the same batches without it are far off."""
    forward = ClosedTabPFNV3.forward
    monkeypatch.setattr(ClosedTabPFNV3, "forward", lambda self, *a, structure=None, **k: forward(self, *a, **k))
    assert furthest(ragged(closed, tables), expected, tables) > 0.01


@pytest.mark.parametrize("output_type", ["mean", "median", "mode", "quantiles", "main", "full"])
def test_output_types(closed, reference, output_type):
    tables, full = reference
    actual = ragged(closed, tables, output_type=output_type, quantiles=LEVELS)
    for a, e, (_, y, _) in zip(actual, full, tables, strict=True):
        scale = np.std(y) or 1.0
        if output_type == "full":
            np.testing.assert_allclose(a.pop("logits"), e["logits"], atol=1e-3)
            torch.testing.assert_close(a.pop("criterion").borders, e["criterion"].borders, rtol=0, atol=0)
        if output_type in ("main", "full"):
            assert a.keys() == {"mean", "median", "mode", "quantiles"}
        else:
            a = {output_type: a}
        for name, value in a.items():
            assert type(value) is type(e[name])
            np.testing.assert_allclose(np.array(value) / scale, np.array(e[name]) / scale, atol=1e-4)


def test_default_quantiles(closed, tables):
    actual, expected = (
        ragged(closed, tables[:1], output_type="quantiles"),
        one_by_one(closed.specs, tables[:1], "quantiles"),
    )
    np.testing.assert_allclose(actual[0], expected[0], rtol=1e-4)


def test_report(closed, tables, monkeypatch):
    """What is reported, counted again from what went into the model."""
    forward, padded, own = ClosedTabPFNV3.forward, [], []
    costs = Costs.of(closed.model, torch.device("cpu"))

    def seen(self, x, y, *args, structure, **kwargs):
        (R, B, C) = x.shape
        rows = [R] * B if structure.rows_BR is None else structure.rows_BR.sum(1).tolist()
        columns = [C] * B if structure.columns_BC is None else structure.columns_BC.sum(1).tolist()
        padded.append(B * R * (C * costs.cell + costs.row))
        own.append(sum(r * (c * costs.cell + costs.row) for r, c in zip(rows, columns, strict=True)))
        assert B == 1 or B * R * C <= 1000
        return forward(self, x, y, *args, structure=structure, **kwargs)

    monkeypatch.setattr(ClosedTabPFNV3, "forward", seen)
    for share in (0.15, 0.4):
        padded.clear(), own.clear()
        report = RaggedReport()
        ragged(closed, tables, max_padding=share, max_cells=1000, report=report)
        assert report.batches == len(padded)
        assert report.padding == pytest.approx(1 - sum(own) / sum(padded))
        worst = max(1 - o / p for o, p in zip(own, padded, strict=True))
        assert share - 0.1 < worst <= share
        assert min(report.seconds.values()) > 0


def test_options_are_the_regressors_own(closed, tables, expected):
    """Options that change the answer change it alike."""
    tables, plain = tables[:4], expected[:4]
    for options in (
        {"random_state": 5},
        {"softmax_temperature": 0.5},
        {"average_before_softmax": True, "softmax_temperature": 0.5},
        {"categorical_features_indices": [0]},
        {"inference_config": {"SUBSAMPLE_SAMPLES": 5, "POLYNOMIAL_FEATURES": 3}},
        {"inference_config": {"ENABLE_GPU_PREPROCESSING": True}},
    ):
        expected = one_by_one(closed.specs, tables, **options)
        assert furthest(ragged(closed, tables, **options), expected, tables) < 1e-5, options
        if "ENABLE_GPU_PREPROCESSING" not in str(options):
            assert furthest(plain, expected, tables) > 1e-4, options


def test_a_random_state_moves_on_in_order(closed, tables):
    """A generator is drawn from once a table, in the caller's order."""
    tables = tables[:4]
    expected = one_by_one(closed.specs, tables, random_state=np.random.RandomState(3))
    assert furthest(ragged(closed, tables, random_state=np.random.RandomState(3)), expected, tables) < 1e-5


@pytest.mark.parametrize("precision", [torch.float64, torch.float16, "auto"])
def test_precisions(closed, tables, precision):
    tables = tables[:4]
    actual = ragged(closed, tables, inference_precision=precision)
    expected = one_by_one(closed.specs, tables, inference_precision=precision)
    # Half precision rounds by 1e-3 to 4e-3 of a value; `auto` is bfloat16 on some processors.
    assert furthest(actual, expected, tables) < (1e-5 if precision == torch.float64 else 0.05)
    assert next(closed.model.parameters()).dtype == torch.float32  # the engines cast in place


def test_no_sharing_of_state(closed, tables, expected):
    """In another order the same; nothing of the retrofit or the input has moved."""
    inputs = [X.copy() for X, _, _ in tables]
    before = {name: value.clone() for name, value in closed.model.named_parameters()}
    assert furthest(ragged(closed, tables[::-1])[::-1], expected, tables) < 1e-5
    for X, (now, _, _) in zip(inputs, tables, strict=True):
        pd.testing.assert_frame_equal(pd.DataFrame(X), pd.DataFrame(now))
    for name, value in closed.model.named_parameters():
        assert torch.equal(before[name], value)


def test_worker_processes(closed, tables, expected):
    assert furthest(ragged(closed, tables, n_jobs=2), expected, tables) < 1e-5


def test_a_table_that_cannot_be_sent_to_a_process(closed, tables, expected):
    X, y, X_test = tables[1]
    own = X.copy()
    own.attrs["note"] = lambda: "a function of the caller's cannot be pickled"
    assert furthest(ragged(closed, [tables[0], (own, y, X_test)], n_jobs=1), expected[:2], tables[:2]) < 1e-5


@pytest.mark.skipif(sys.platform != "linux", reason="only a forked process takes what is patched here with it")
def test_a_killed_process(closed, tables, expected, monkeypatch):
    here = os.getpid()
    monkeypatch.setattr(
        "oretrofit.retrofit.ragged._prepare", lambda *job: _prepare(*job) if os.getpid() == here else os._exit(1)
    )
    with pytest.warns(UserWarning, match="was killed, perhaps for want of memory; going on without"):
        assert furthest(ragged(closed, tables, n_jobs=1), expected, tables) < 1e-5


def test_processes_warn_once(closed):
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"x": rng.standard_normal(40), "note": [f"text {i}" for i in range(40)]})
    with pytest.warns(UserWarning) as caught:
        ragged(closed, [(X, X["x"], X)] * 3, n_jobs=1)
    assert len([w for w in caught if "look like free text" in str(w.message)]) == 1


def test_processes_that_are_not_forked(closed, tables, expected, monkeypatch):
    monkeypatch.setattr("oretrofit.retrofit.ragged._start_method", lambda device: "loky")
    assert furthest(ragged(closed, tables, n_jobs=1), expected, tables) < 1e-5


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the worker shows that it lives by a pipe it has inherited")
def test_workers_end_with_their_parent():
    parent = """
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from oretrofit.retrofit.ragged import _start_forked_worker
pool = ProcessPoolExecutor(2, mp_context=get_context("fork"), initializer=_start_forked_worker)
pool.submit(int).result()
print("ready", flush=True)
time.sleep(600)
"""
    read, write = os.pipe()
    with subprocess.Popen([sys.executable, "-c", parent], pass_fds=[write], stdout=subprocess.PIPE) as process:
        os.close(write)
        assert process.stdout.readline() == b"ready\n"
        process.terminate()
    ready, _, _ = select.select([read], [], [], 60)
    assert ready and os.read(read, 1) == b""  # nobody holds the other end any more
    os.close(read)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="descriptors are counted in /proc")
def test_prepared_tables_keep_no_file_open(closed, tables):
    """A pool sends tensors as open files unless told otherwise; a process may have 1,024 of them, or 256."""
    seen = []
    ragged(closed, tables * 4, n_jobs=1, on_tables=lambda _: seen.append(len(os.listdir("/proc/self/fd"))))
    before = len(os.listdir("/proc/self/fd"))
    assert max(seen) < before + 60  # the pool's own; of the tables' tensors there are hundreds


def test_tables_share_no_criterion(closed, tables):
    """`to` moves a module in place: the criterion of a table must not follow that of the next."""
    specs = closed.specs
    specs.norm_criterion = _regression_distribution_from_specs(specs)
    first, second = (_prepare({"model_path": specs, **OPTIONS}, *tables[0]) for _ in range(2))
    assert first.znorm_space_bardist_ is not second.znorm_space_bardist_


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(closed, tables):
    report = RaggedReport()
    actual = ragged(closed, tables, device="cuda", report=report)
    assert furthest(actual, one_by_one(closed.specs, tables, device="cuda"), tables) < 1e-3
    assert report.batches < report.members


# ---- Planning and memory -------------------------------------------------------------------------


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


def test_pad():
    def member(n, m, c):
        return _Member(torch.rand(n + m, c), torch.rand(n), 0, 0)

    members = [member(3, 1, 2), member(2, 2, 4)]
    x_RBC, y_NB, structure = _pad(members)
    assert (x_RBC.shape, y_NB.shape) == ((5, 2, 4), (3, 2))
    assert structure.rows_BR.tolist() == [[True, True, True, True, False], [True, True, False, True, True]]
    assert structure.columns_BC.tolist() == [[True, True, False, False], [True, True, True, True]]
    for i, m in enumerate(members):
        live = x_RBC[:, i][structure.rows_BR[i]][:, structure.columns_BC[i]]
        assert torch.equal(live, m.x_RC)
        assert torch.equal(y_NB[: len(m.y_N), i], m.y_N)
    same = _pad([member(3, 1, 2), member(3, 1, 2)])[2]
    assert same.rows_BR is None and same.columns_BC is None


@pytest.mark.parametrize(
    ("most", "error"),
    [
        (1, torch.cuda.OutOfMemoryError("CUDA out of memory.")),
        (3, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
    ],
)
def test_out_of_memory_halves(closed, tables, expected, monkeypatch, most, error):
    """On a device that takes so many members at most, all answers come, by smaller batches, padded no more."""
    forward, sizes = ClosedTabPFNV3.forward, []
    costs = Costs.of(closed.model, torch.device("cpu"))

    def limited(self, x, *args, structure, **kwargs):
        (R, B, C) = x.shape
        sizes.append(B)
        if B > most:
            raise error
        rows, columns = (
            (one * torch.ones(B, 1)) if e is None else e.sum(1, keepdim=True)
            for one, e in ((R, structure.rows_BR), (C, structure.columns_BC))
        )
        assert 1 - costs.work(rows, columns).sum() / (B * costs.work(R, C)) <= 0.25 + 1e-6
        return forward(self, x, *args, structure=structure, **kwargs)

    monkeypatch.setattr(ClosedTabPFNV3, "forward", limited)
    report = RaggedReport()
    assert furthest(ragged(closed, tables, report=report), expected, tables) < 1e-5
    assert report.out_of_memory == sum(size > most for size in sizes) > 0
    assert report.batches == sum(size <= most for size in sizes)
    assert report.members == sum(size for size in sizes if size <= most) == 2 * len(tables)


def test_a_table_too_large_even_alone(closed, tables, expected, monkeypatch):
    forward = ClosedTabPFNV3.forward

    def limited(self, x, *args, **kwargs):
        if x.shape[0] > 60:  # table 5 has 70 rows
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(ClosedTabPFNV3, "forward", limited)
    with pytest.raises(TableError, match="table 5: CUDA out of memory") as caught:
        ragged(closed, tables)
    assert caught.value.index == 5
    report = RaggedReport()
    actual = ragged(closed, tables, on_error="skip", report=report)
    assert actual[5] is None and report.errors == {5: "CUDA out of memory."}
    rest = [i for i in range(len(tables)) if i != 5]
    assert furthest([actual[i] for i in rest], [expected[i] for i in rest], [tables[i] for i in rest]) < 1e-5


def test_other_errors_of_the_model_are_not_hidden(closed, tables, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(ClosedTabPFNV3, "forward", broken)
    with pytest.raises(RuntimeError, match=r"^broken$"):
        ragged(closed, tables, on_error="skip")


@pytest.mark.parametrize("stage", ["_add_output", "_decode"])
def test_a_table_that_fails_behind_the_model(closed, tables, expected, monkeypatch, stage):
    step = getattr(oretrofit.retrofit.ragged, stage)

    def failing(regressor, *args):
        if len(regressor.executor_.members[0].y_train) == 50:  # table 5
            raise AssertionError("no borders left")
        return step(regressor, *args)

    monkeypatch.setattr(oretrofit.retrofit.ragged, stage, failing)
    with pytest.raises(TableError, match="table 5: no borders left") as caught:
        ragged(closed, tables)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "table 5: no borders left"
    report = RaggedReport()
    actual = ragged(closed, tables, on_error="skip", report=report)
    assert actual[5] is None and report.errors == {5: "no borders left"} and report.tables == len(tables) - 1
    rest = [i for i in range(len(tables)) if i != 5]
    assert furthest([actual[i] for i in rest], [expected[i] for i in rest], [tables[i] for i in rest]) < 1e-5


def test_small_chunks(closed, tables, expected, monkeypatch):
    """Few tables decoded at a time: the same answers, in the same order."""
    monkeypatch.setattr("oretrofit.retrofit.ragged._CHUNK_NUMBERS", 1000)
    seen = []
    assert furthest(ragged(closed, tables, on_tables=seen.append), expected, tables) < 1e-5
    assert seen == sorted(seen) and seen[-1] == len(tables) and len(seen) > 2


# ---- Bad input -----------------------------------------------------------------------------------


def bad_tables():
    X, y, X_test = a_table(0, 6, 2, 3)
    frame, y_frame, frame_test = a_table(1, 6, 2, 3, frame=True)
    return {
        "width": (X, y, X_test[:, :2], "2 features, but"),
        "names": (frame, y_frame, frame_test.rename(columns={"x1": "z"}), "x1"),
        "no train rows": (X[:0], y[:0], X_test, "0 sample"),
        "one train row": (X[:1], y[:1], X_test, "minimum of 2"),
        "no test rows": (X, y, X_test[:0], "0 sample"),
        "no test rows, constant": (X, np.ones(6), X_test[:0], "0 sample"),
        "strings": (X, np.array(list("abcdef")), X_test, "could not convert"),
        "missing target": (X, np.where(np.arange(6) == 3, np.nan, y), X_test, "NaN"),
        "lengths": (X, y[:4], X_test, "inconsistent numbers of samples"),
        "no table": (None, y, X_test, "Expected 2D array"),
        "no target": (X, [object()] * 6, X_test, "real number"),
    }


@pytest.mark.parametrize("kind", bad_tables())
def test_one_bad_table(closed, tables, expected, kind):
    *bad, message = bad_tables()[kind]
    many = [*tables[:2], tuple(bad), tables[2]]
    with pytest.raises(TableError, match=f"(?s)table 2: .*{message}"):
        ragged(closed, many)
    report, seen = RaggedReport(), []
    actual = ragged(closed, many, on_error="skip", report=report, on_tables=seen.append)
    assert actual[2] is None
    assert (list(report.errors), report.tables, seen[-1]) == ([2], 3, 4)
    assert furthest([*actual[:2], actual[3]], expected[:3], tables[:3]) < 1e-5


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"output_type": "means"}, ValueError, "output_type is one of"),
        ({"output_type": "quantiles", "quantiles": [1.5]}, ValueError, "between 0 and 1"),
        ({"max_padding": 1.0}, ValueError, "max_padding"),
        ({"n_jobs": -1}, ValueError, "n_jobs is a number of processes"),
        ({"max_cells": 0}, ValueError, "max_cells is at least 1"),
        ({"n_estimators": 0}, ValueError, "n_estimators is at least 1"),
        ({"on_error": "ignore"}, ValueError, "'raise' or 'skip'"),
        ({"model_path": "auto"}, ValueError, "model_path"),
        ({"fit_mode": "fit_with_cache"}, ValueError, "fit_mode"),
        ({"differentiable_input": True}, ValueError, "differentiable_input"),
        ({"estimators": 3}, TypeError, "estimators"),
        ({"tuning_config": {"calibrate_temperature": True}}, NotImplementedError, "tuning_config"),
        (
            {"inference_config": {"SUBSAMPLE_SAMPLES": 5, "SAMPLE_SUBSAMPLING_METHOD": "majority_downsample"}},
            NotImplementedError,
            "majority_downsample",
        ),
    ],
)
def test_refused_settings(closed, tables, settings, error, message):
    with pytest.raises(error, match=message):
        ragged(closed, tables, **settings)


def test_refused_lists(closed, tables):
    X, y, X_test = tables[0]
    with pytest.raises(ValueError, match="equal length, got 2, 1 and 2"):
        closed.predict_ragged([X, X], [y], [X_test, X_test])
    with pytest.raises(ValueError, match="no tables"):
        closed.predict_ragged([], [], [])
    with pytest.raises(ValueError, match="lists with one entry a table"):
        closed.predict_ragged(pd.DataFrame(X), [y], [X_test])


@pytest.mark.parametrize("variant", ["oa", "full-o"])
def test_other_variants_are_refused(tiny_host, tables, variant):
    with pytest.raises(ValueError, match=f"'closed', not in '{variant}'"):
        ragged(patch(tiny_host, variant, tau=1e-6), tables)


def test_row_limits_are_of_the_device(closed, monkeypatch):
    """The workers are on the CPU, but its row limit counts only where the forward passes are."""
    X, y, X_test = a_table(0, 40, 2, 2)
    config = {"MAX_CPU_SAMPLES": 30}
    with pytest.raises(ValueError, match="table 0: RuntimeError: Running on CPU"):
        ragged(closed, [(X, y, X_test)], inference_config=config)
    specs = closed.specs
    with pytest.MonkeyPatch.context() as patched, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patched.setattr("tabpfn.base.infer_devices", lambda _: (torch.device("cuda"),))
        for given_config in (None, config, dataclasses.replace(specs.inference_config, MAX_CPU_SAMPLES=30)):
            _, _, options = _settings(specs, {"inference_config": given_config, "inference_precision": torch.float32})
            inner = options["inference_config"]
            inner = dataclasses.asdict(inner) if isinstance(inner, InferenceConfig) else inner
            assert inner["MAX_CPU_SAMPLES"] > 10**9


# ---- Groups --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sales():
    """A long table of four stores, in mixed order; `d` has one train row, `e` none, `c` no test rows."""
    rng = np.random.default_rng(0)
    n = 60
    frame = pd.DataFrame(
        {
            "day": rng.integers(0, 7, n),
            "store": rng.choice(list("abc"), n),
            "price": rng.standard_normal(n),
            "weather": rng.choice(["sun", "rain"], n),
        },
        index=[f"row{i}" for i in rng.permutation(n)],
    )
    frame["sold"] = frame["price"] + frame["store"].map({"a": 100, "b": 0, "c": -5}) + rng.standard_normal(n)
    train, test = frame.iloc[:40].copy(), frame.iloc[40:].copy()
    test = test[test["store"] != "c"]
    train.iloc[3, train.columns.get_loc("store")] = "d"
    test.iloc[[1, 4], test.columns.get_loc("store")] = "d"
    test.iloc[2, test.columns.get_loc("store")] = "e"
    return train, test[["weather", "store", "day", "price", "sold"]]


def by_store(specs, train, test, store, **settings):
    features = ["day", "price", "weather"]
    own = train if store is None else train[train["store"] == store]
    regressor = TabPFNRegressor(model_path=specs, **OPTIONS).fit(own[features], own["sold"])
    return regressor.predict(test[features], **settings)


def test_groups(closed, sales):
    train, test = sales
    names = {"target": "sold", "by": "store", **OPTIONS}
    with pytest.raises(ValueError, match=r"2 of 4 groups in test .*'d' \(1\)"):
        closed.predict_groups(train, test, **names)
    report = RaggedReport()
    left_out = closed.predict_groups(train, test, too_few="nan", report=report, **names)
    pooled = closed.predict_groups(train, test, too_few="pooled", **names)
    assert report.tables == 2
    assert report.errors == {
        "d": "train rows: 1; at least 2 are needed",
        "e": "train rows: 0; at least 2 are needed",
    }
    indexed = closed.predict_groups(
        train.set_index("store", drop=False), test.set_index("store", drop=False), too_few="nan", **names
    )
    np.testing.assert_array_equal(indexed, left_out)
    for series in (left_out, pooled):
        assert series.name == "sold"
        assert series.index.equals(test.index)
    few = test["store"].isin(["d", "e"])
    assert left_out[few].isna().all()
    for store in "ab":
        rows = test["store"] == store
        expected = by_store(closed.specs, train, test[rows], store)
        np.testing.assert_allclose(left_out[rows], expected, atol=1e-4)
        np.testing.assert_allclose(pooled[rows], expected, atol=1e-4)
    np.testing.assert_allclose(pooled[few], by_store(closed.specs, train, test[few], None), atol=1e-3)


def test_groups_min_rows_and_quantiles(closed, sales):
    train, test = sales
    few = test["store"].isin(["d", "e"])
    levels = {"output_type": "quantiles", "quantiles": [0.2, 0.8]}
    frame = closed.predict_groups(train, test[~few], target="sold", by="store", **levels, **OPTIONS)
    assert list(frame.columns) == [0.2, 0.8]
    assert frame.index.equals(test[~few].index)
    rows = test[~few]["store"] == "b"
    expected = by_store(closed.specs, train, test[~few][rows], "b", **levels)
    np.testing.assert_allclose(frame[rows].to_numpy().T, expected, atol=1e-3)
    default = closed.predict_groups(
        train, test[~few], target="sold", by="store", output_type="quantiles", too_few="nan", min_rows=1000, **OPTIONS
    )
    assert default.shape == ((~few).sum(), 9) and default.isna().all(axis=None)


def test_groups_with_all_of_the_main_answers(closed, sales):
    train, test = sales
    test = test[test["store"].isin(["a", "b"])]
    named = {"target": "sold", "by": "store", **OPTIONS}
    frame = closed.predict_groups(train, test, output_type="main", quantiles=[0.2, 0.8], **named)
    assert list(frame.columns) == ["mean", "median", "mode", 0.2, 0.8]
    for store in "ab":
        rows = test["store"] == store
        expected = by_store(closed.specs, train, test[rows], store, output_type="main", quantiles=[0.2, 0.8])
        for point in ("mean", "median", "mode"):
            np.testing.assert_allclose(frame.loc[rows, point], expected[point], atol=1e-3)
        np.testing.assert_allclose(frame.loc[rows, [0.2, 0.8]].to_numpy().T, expected["quantiles"], atol=1e-3)


def test_one_bad_group(closed, sales):
    train, test = sales
    train = train.assign(sold=train["sold"].where(train["store"] != "a"))
    names = {"target": "sold", "by": "store", "too_few": "nan", **OPTIONS}
    with pytest.raises(ValueError, match=r"group 'a': .*NaN"):
        closed.predict_groups(train, test, **names)
    report = RaggedReport()
    for _ in range(2):  # a report may be used again
        series = closed.predict_groups(train, test, on_error="skip", report=report, **names)
        assert list(report.errors) == ["a", "d", "e"]
    assert series[test["store"] == "a"].isna().all()
    assert series[test["store"] == "b"].notna().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.drop(columns="store"), b, {}), "train has no group column 'store'"),
        (lambda a, b: (a, b.drop(columns="store"), {}), "test has no group column 'store'"),
        (lambda a, b: (a.assign(store=range(len(a))), b, {"too_few": "nan"}), "every row of train is a group"),
        (lambda a, b: (a.assign(store=None), b, {}), "40 rows of train have no group"),
        (lambda a, b: (a.assign(store=a.store.map(ord)), b, {}), "no group of test is in train: 'store' is int64 in"),
        (lambda a, b: (a.drop(columns="sold"), b, {}), "no target column 'sold'"),
        (lambda a, b: (a, b.drop(columns="day"), {}), r"test lacks columns that train has: \['day'\]"),
        (lambda a, b: (a, b.assign(hour=1), {}), r"test has columns that train lacks: \['hour'\]"),
        (lambda a, b: (a[:0], b, {}), "train has no rows"),
        (lambda a, b: (a, b[:0], {}), "test has no rows"),
        (lambda a, b: (a.to_numpy(), b, {}), "train is a DataFrame"),
        (lambda a, b: (a[["store", "sold"]], b[["store"]], {}), "no columns beside 'sold' and 'store'"),
        (lambda a, b: (a, b, {"output_type": "quantiles", "quantiles": []}), "quantiles is empty"),
        (lambda a, b: (a, b, {"output_type": "full"}), "mean, median, mode, quantiles or main"),
        (lambda a, b: (a, b, {"too_few": "skip"}), "'error', 'nan' or 'pooled'"),
        (lambda a, b: (a, b, {"min_rows": 1}), "min_rows"),
        (lambda a, b: (a, b, {"by": "sold"}), "both target and group"),
        (lambda a, b: (a, b, {"target": ["sold"]}), "target is the name of one column"),
        (lambda a, b: (a.assign(store=[["a"]] * len(a)), b, {}), "values that cannot name a group, such as \\['a'\\]"),
        (lambda a, b: (pd.concat([a, a["day"]], axis=1), b, {}), "several columns called 'day'"),
    ],
)
def test_bad_frames(closed, sales, change, message):
    train, test, settings = change(*sales)
    with pytest.raises(ValueError, match=message):
        closed.predict_groups(train, test, **{"target": "sold", "by": "store", **OPTIONS, **settings})
