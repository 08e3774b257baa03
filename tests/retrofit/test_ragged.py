"""Ragged prediction: answers as of fit and predict one by one, whatever shares a forward pass."""

import dataclasses
import os
import pickle
import sys
import types
import warnings

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit import RaggedReport, TableError, patch
from oretrofit.retrofit import tabpfn_api, workers
from oretrofit.retrofit.ragged import planning, predicting, predictor, preparing
from oretrofit.retrofit.ragged.planning import Costs

# In float64, a batch's sums differ from a member's own by 1e-13 or so. Behind the model TabPFN rounds logits to
# float32: where such a difference turns that, a logit below 64 moves by 4e-6, and by as large a part the probabilities,
# and the means in standard deviations of the target.
OPTIONS = {"device": "cpu", "inference_precision": torch.float64, "n_estimators": 2}
SAME = 1e-5
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
    actual, report = ragged(closed, tables, n_estimators=n_estimators, return_report=True)
    expected = one_by_one(closed.specs, tables, n_estimators=n_estimators)
    assert furthest(actual, expected, tables) < SAME
    # Rows and tables are told apart at all: an answer in another's place would fail.
    assert min(np.ptp(e) / np.std(y) for e, (_, y, X) in zip(expected, tables, strict=True) if len(X) > 1) > 100 * SAME
    assert isinstance(report, RaggedReport)
    assert (report.tables, report.members) == (len(tables), n_estimators * len(tables))
    assert report.batches < report.members
    assert 0 < report.padding <= 0.25
    assert not report.errors


def test_smallest_delta_is_the_host(tiny_host, tables):
    retrofit = patch(tiny_host, "closed", tables=1, delta=1e-9)
    actual = ragged(retrofit, tables)
    # A gate takes a part of 1e-9 away, and there are some twenty in a row: a hundredth of `SAME` even if each were
    # amplified tenfold.
    assert furthest(actual, one_by_one(retrofit.host_specs, tables), tables) < SAME


def test_padding_would_reach_the_host(closed, tables, expected, monkeypatch):
    """What is inert is the structure: the same batches without it are far off."""
    closed_class = type(closed.model)
    forward = closed_class.forward
    monkeypatch.setattr(closed_class, "forward", lambda self, *a, structure=None, **k: forward(self, *a, **k))
    assert furthest(ragged(closed, tables), expected, tables) > 1000 * SAME


@pytest.mark.parametrize("output_type", ["mean", "median", "mode", "quantiles", "main", "full"])
def test_output_types(closed, reference, output_type):
    tables, full = reference
    actual = ragged(closed, tables, output_type=output_type, quantiles=LEVELS)
    for a, e, (_, y, _) in zip(actual, full, tables, strict=True):
        scale = np.std(y) or 1.0
        if output_type == "full":
            # Equal, or one rounding of float32 apart.
            torch.testing.assert_close(a.pop("logits"), e["logits"], rtol=2**-23, atol=1e-6)
            torch.testing.assert_close(a.pop("criterion").borders, e["criterion"].borders, rtol=0, atol=0)
        if output_type in ("main", "full"):
            assert a.keys() == {"mean", "median", "mode", "quantiles"}
        else:
            a = {output_type: a}
        for name, value in a.items():
            assert type(value) is type(e[name])
            # Quantiles are read off where the cumulative probability passes a level: its shift by its slope, which
            # is above 0.1 per standard deviation at these levels.
            np.testing.assert_allclose(np.array(value) / scale, np.array(e[name]) / scale, rtol=0, atol=10 * SAME)


def test_default_quantiles(closed, tables):
    actual, expected = (
        ragged(closed, tables[:1], output_type="quantiles"),
        one_by_one(closed.specs, tables[:1], "quantiles"),
    )
    assert len(actual[0]) == 9
    np.testing.assert_allclose(actual[0], expected[0], rtol=0, atol=10 * SAME * np.std(tables[0][1]))


def test_report(closed, tables, monkeypatch):
    """What is reported, counted again from what went into the model."""
    closed_class = type(closed.model)
    forward, padded, own = closed_class.forward, [], []
    costs = Costs.of(closed.model, torch.device("cpu"))

    def work_of(rows, columns):
        return rows * (columns * costs.cell + costs.row) + columns * costs.points * costs.point

    def seen(self, x, y, *args, structure, **kwargs):
        (R, B, C) = x.shape
        rows = [R] * B if structure.rows_BR is None else structure.rows_BR.sum(1).tolist()
        columns = [C] * B if structure.columns_BC is None else structure.columns_BC.sum(1).tolist()
        padded.append(B * work_of(R, C))
        own.append(sum(map(work_of, rows, columns)))
        assert B == 1 or B * (R + costs.points) * C <= 2000
        return forward(self, x, y, *args, structure=structure, **kwargs)

    monkeypatch.setattr(closed_class, "forward", seen)
    for share in (0.15, 0.4):
        padded.clear(), own.clear()
        _, report = ragged(closed, tables, max_padding=share, max_cells=2000, return_report=True)
        assert report.batches == len(padded)
        assert report.padding == pytest.approx(1 - sum(own) / sum(padded))
        worst = max(1 - o / p for o, p in zip(own, padded, strict=True))
        assert share - 0.1 < worst <= share
        assert list(report.seconds) == ["preprocessing", "forward", "decoding"]


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
        assert furthest(ragged(closed, tables, **options), expected, tables) < SAME, options
        if "ENABLE_GPU_PREPROCESSING" not in str(options):
            assert furthest(plain, expected, tables) > 10 * SAME, options


def test_a_random_state_moves_on_in_order(closed, tables):
    """A generator is drawn from once a table, in the caller's order."""
    tables = tables[:4]
    expected = one_by_one(closed.specs, tables, random_state=np.random.RandomState(3))
    assert furthest(ragged(closed, tables, random_state=np.random.RandomState(3)), expected, tables) < SAME


@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.float16, "auto"])
def test_precisions(closed, tables, precision):
    """A member alone goes through the model as TabPFN sends it: to the bit, whatever the precision rounds."""
    for table in tables[:4]:
        options = {"inference_precision": precision, "n_estimators": 1}
        (actual,), (expected,) = ragged(closed, [table], **options), one_by_one(closed.specs, [table], **options)
        np.testing.assert_array_equal(actual, expected)
    assert next(closed.model.parameters()).dtype == torch.float32  # the engines cast in place


def test_float32(closed, tables, expected):
    """The default on most CPUs. A value passes some 2,000 sums of 16 to 64 terms' length that round by 6e-8 each."""
    assert furthest(ragged(closed, tables, inference_precision=torch.float32), expected, tables) < 1e-3


def test_no_sharing_of_state(closed, tables, expected):
    """In another order the same; nothing of the retrofit or the input has moved."""
    inputs = [X.copy() for X, _, _ in tables]
    before = {name: value.clone() for name, value in closed.model.named_parameters()}
    assert furthest(ragged(closed, tables[::-1])[::-1], expected, tables) < SAME
    for X, (now, _, _) in zip(inputs, tables, strict=True):
        pd.testing.assert_frame_equal(pd.DataFrame(X), pd.DataFrame(now))
    for name, value in closed.model.named_parameters():
        assert torch.equal(before[name], value)


def test_worker_processes(closed, tables, expected):
    assert furthest(ragged(closed, tables, n_jobs=2), expected, tables) < SAME


def test_a_table_that_cannot_be_sent_to_a_process(closed, tables, expected):
    X, y, X_test = tables[1]
    own = X.copy()
    own.attrs["note"] = lambda: "a function of the caller's cannot be pickled"
    assert furthest(ragged(closed, [tables[0], (own, y, X_test)], n_jobs=1), expected[:2], tables[:2]) < SAME


@pytest.mark.skipif(sys.platform != "linux", reason="only a forked process takes what is patched here with it")
def test_a_killed_process(closed, tables, expected, monkeypatch):
    here, prepare = os.getpid(), preparing.prepare
    monkeypatch.setattr(predictor, "prepare", lambda *given: prepare(*given) if os.getpid() == here else os._exit(1))
    with pytest.warns(UserWarning, match="was killed, perhaps for want of memory; going on without"):
        assert furthest(ragged(closed, tables, n_jobs=1), expected, tables) < SAME


def test_processes_warn_once(closed):
    rng = np.random.default_rng(0)
    X = pd.DataFrame({"x": rng.standard_normal(40), "note": [f"text {i}" for i in range(40)]})
    with pytest.warns(UserWarning) as caught:
        ragged(closed, [(X, X["x"], X)] * 3, n_jobs=1)
    assert len([w for w in caught if "look like free text" in str(w.message)]) == 1


def test_processes_are_renewed(closed, tables, expected, monkeypatch):
    """What they keep of all shapes that they have met would grow with the number of tables."""
    monkeypatch.setattr(predictor, "_CHUNKS_OF_A_PROCESS", 1)
    monkeypatch.setitem(predictor._CHUNK_TABLES, "cpu", 2)
    pools = []
    each = predictor.call_each

    def counted(function, arguments, processes, **settings):
        arguments = list(arguments)
        pools.append(len(arguments))
        return each(function, arguments, processes, **settings)

    monkeypatch.setattr(predictor, "call_each", counted)
    assert furthest(ragged(closed, tables, n_jobs=2), expected, tables) < SAME
    assert len(pools) > 1 and set(pools[:-1]) == {2}


def test_processes_that_are_not_forked(closed, tables, expected, monkeypatch):
    monkeypatch.setattr(workers, "start_method", lambda threads: "loky")
    assert furthest(ragged(closed, tables, n_jobs=1), expected, tables) < SAME


def test_prepared_ahead_of_the_passes(closed, tables, expected, monkeypatch):
    """As beside a GPU."""
    monkeypatch.setattr(predictor.TablePredictor, "on_cpu", False)
    assert furthest(ragged(closed, tables, n_jobs=0), expected, tables) < SAME
    assert furthest(ragged(closed, tables, n_jobs=1), expected, tables) < SAME


def test_the_same_bits_every_time(closed, tables):
    first, second = (ragged(closed, tables * 3, n_jobs=2, inference_precision=torch.float32) for _ in range(2))
    assert all(map(np.array_equal, first, second))


def test_a_large_table_among_small_ones(closed, tables, expected, monkeypatch):
    """It is run here, with all threads, and the others in processes."""
    monkeypatch.setattr(planning, "_THREADED_WORK", 0.0)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    seen = []
    large = a_table(20, 900, 20, 8)
    run = predictor.TablePredictor.__call__
    monkeypatch.setattr(
        predictor.TablePredictor, "__call__", lambda self, jobs: seen.append([*jobs]) or run(self, jobs)
    )
    actual = ragged(closed, [*tables, large], n_jobs=2)
    assert seen == [[len(tables)]]
    assert furthest(actual, [*expected, *one_by_one(closed.specs, [large])], [*tables, large]) < SAME


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are counted in /proc")
def test_prepared_tables_keep_no_file_open(closed, tables):
    """A pool sends tensors as open files unless told otherwise; a process may have 1,024 of them, or 256."""

    def most_open(tables):
        seen = []
        ragged(closed, tables, n_jobs=1, on_tables=lambda _: seen.append(len(os.listdir("/proc/self/fd"))))
        return max(seen)

    few = most_open(tables)
    # The pool's own are there either way. Each table has a dozen tensors in two members.
    assert most_open(tables * 4) - few < 3 * len(tables)


def test_tables_share_no_criterion(closed, tables):
    """`to` moves a module in place: neither a table's criterion nor what prepares on the CPU may follow to a GPU."""
    first, second = ragged(closed, tables[:2], output_type="full")
    assert first["criterion"] is not second["criterion"]
    specs = closed.specs
    specs.norm_criterion = tabpfn_api.bar_distribution(specs)
    made = predictor.TablePredictor(specs, OPTIONS, None, max_padding=0.2)
    ours, others = made.template.znorm_space_bardist_, made.job_options["model_path"].norm_criterion
    assert ours is not others and torch.equal(ours.borders, others.borders)


# ---- Devices -------------------------------------------------------------------------------------


def test_what_is_ignored_is_said():
    def said(*devices, show_progress_bar=False, max_cells=None):
        template = types.SimpleNamespace(
            devices_=tuple(map(torch.device, devices)), show_progress_bar=show_progress_bar
        )
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            predicting.warn_of_the_ignored(template, max_cells)
        return [str(warning.message) for warning in caught]

    assert said("cpu") == said("cuda:0", max_cells=9) == said("mps") == []
    assert said("mps", max_cells=9) == ["max_cells has no effect on mps, where every member runs alone"]
    assert said("cuda:1", "cuda:0") == ["of 2 devices only cuda:1 is used"]
    assert "show_progress_bar has no effect" in said("cpu", show_progress_bar=True)[0]


def test_what_prepares_leaves_the_gpu_alone(closed, tables, monkeypatch):
    """Beside a GPU it runs in forked processes, in which the first call of CUDA would raise, as it does here."""

    def refuse(*_, **__):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")

    made = predictor.TablePredictor(closed.specs, OPTIONS, None, max_padding=0.2)
    constant = (np.arange(12.0).reshape(4, 3), np.full(4, 7.5), np.ones((2, 3)))
    jobs = [preparing.Job(0, *table) for table in [*tables, constant]]
    expected = [preparing.prepare(job, made.job_options, None) for job in jobs]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "_is_in_bad_fork", lambda: True)
    monkeypatch.setattr(torch.cuda, "_lazy_init", refuse)
    for job, before in zip(jobs, expected, strict=True):
        for own, other in zip(preparing.prepare(job, made.job_options, None).members, before.members, strict=True):
            np.testing.assert_array_equal(own.x_RC, other.x_RC)


def test_how_processes_start_beside_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert (workers.start_method(), workers.start_method(beside_gpu=True)) == (
        "loky",
        "fork" if sys.platform == "linux" else "loky",
    )
    assert workers.start_method(2, beside_gpu=True) == "loky"
    seen = []
    monkeypatch.setattr(preparing, "call_each", lambda *_, start, **__: seen.append(start))
    preparing.prepared_ahead([], {}, None, 3)
    assert seen == [workers.start_method(beside_gpu=True)]
    monkeypatch.setattr(preparing.joblib, "cpu_count", lambda: 16)
    assert preparing.default_n_jobs(8, torch.device("cuda")) == (15 if sys.platform == "linux" else 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(closed, tables):
    actual, report = ragged(closed, tables, device="cuda", return_report=True)
    assert furthest(actual, one_by_one(closed.specs, tables, device="cuda"), tables) < SAME
    assert report.batches < report.members


# ---- Memory ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "error"),
    [
        (1, torch.cuda.OutOfMemoryError("CUDA out of memory.")),
        (3, RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")),
    ],
)
def test_out_of_memory_halves(closed, tables, expected, monkeypatch, most, error):
    """On a device that takes so many members at most, all answers come, by smaller batches, padded no more."""
    closed_class = type(closed.model)
    forward, sizes = closed_class.forward, []
    costs = Costs.of(closed.model, torch.device("cpu"))

    def limited(self, x, *args, structure, **kwargs):
        (R, B, C) = x.shape
        sizes.append(B)
        if B > most:
            raise error
        rows, columns = (
            (one * torch.ones(B, 1, dtype=torch.int64)) if e is None else e.sum(1, keepdim=True)
            for one, e in ((R, structure.rows_BR), (C, structure.columns_BC))
        )
        assert 1 - costs.work(rows, columns).sum() / (B * costs.work(R, C)) <= 0.25 + 1e-6  # float32, unlike the plan's
        return forward(self, x, *args, structure=structure, **kwargs)

    monkeypatch.setattr(closed_class, "forward", limited)
    actual, report = ragged(closed, tables, return_report=True)
    assert furthest(actual, expected, tables) < SAME
    assert report.out_of_memory == sum(size > most for size in sizes) > 0
    assert report.batches == sum(size <= most for size in sizes)
    assert report.members == sum(size for size in sizes if size <= most) == 2 * len(tables)


def test_a_table_too_large_even_alone(closed, tables, expected, monkeypatch):
    closed_class = type(closed.model)
    forward = closed_class.forward

    def limited(self, x, *args, **kwargs):
        if x.shape[0] > 60:  # table 5 has 70 rows
            raise torch.cuda.OutOfMemoryError("CUDA out of memory.")
        return forward(self, x, *args, **kwargs)

    monkeypatch.setattr(closed_class, "forward", limited)
    with pytest.raises(TableError, match="table 5: CUDA out of memory") as caught:
        ragged(closed, tables)
    assert caught.value.index == 5
    actual, report = ragged(closed, tables, on_error="skip", return_report=True)
    assert actual[5] is None and report.errors == {5: "CUDA out of memory."}
    rest = [i for i in range(len(tables)) if i != 5]
    assert furthest([actual[i] for i in rest], [expected[i] for i in rest], [tables[i] for i in rest]) < SAME


def test_other_errors_of_the_model_are_not_hidden(closed, tables, monkeypatch):
    def broken(self, *args, **kwargs):
        raise RuntimeError("broken")

    monkeypatch.setattr(type(closed.model), "forward", broken)
    with pytest.raises(RuntimeError, match=r"^broken$"):
        ragged(closed, tables, on_error="skip")


@pytest.mark.parametrize("stage", ["translation_of", "decode"])
def test_a_table_whose_answer_cannot_be_read(closed, tables, expected, monkeypatch, stage):
    step = getattr(tabpfn_api, stage)

    def failing(regressor, *args):
        of_table_5 = np.shape(args[0])[0] == 20 if stage == "decode" else regressor.n_train_samples_ == 50
        if of_table_5:
            raise ValueError("no borders left")
        return step(regressor, *args)

    monkeypatch.setattr(tabpfn_api, stage, failing)
    with pytest.raises(TableError, match="table 5: no borders left") as caught:
        ragged(closed, tables)
    assert str(pickle.loads(pickle.dumps(caught.value))) == "table 5: no borders left"
    actual, report = ragged(closed, tables, on_error="skip", return_report=True)
    assert actual[5] is None and report.errors == {5: "no borders left"} and report.tables == len(tables) - 1
    rest = [i for i in range(len(tables)) if i != 5]
    assert furthest([actual[i] for i in rest], [expected[i] for i in rest], [tables[i] for i in rest]) < SAME


def test_small_chunks(closed, tables, expected, monkeypatch):
    """Few tables decoded at a time: the same answers, in the same order."""
    monkeypatch.setattr(predictor, "_CHUNK_NUMBERS", 1000)
    monkeypatch.setitem(predictor._CHUNK_TABLES, "cpu", 3)
    seen = []
    assert furthest(ragged(closed, tables, on_tables=seen.append), expected, tables) < SAME
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
    seen = []
    actual, report = ragged(closed, many, on_error="skip", return_report=True, on_tables=seen.append)
    assert actual[2] is None
    assert (list(report.errors), report.tables, seen[-1]) == ([2], 3, 4)
    assert furthest([*actual[:2], actual[3]], expected[:3], tables[:3]) < SAME


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"output_type": "means"}, ValueError, "output_type is one of"),
        ({"output_type": "quantiles", "quantiles": [1.5]}, ValueError, "between 0 and 1"),
        ({"max_padding": 1.0}, ValueError, "max_padding"),
        ({"n_jobs": -1}, ValueError, "n_jobs is a number of processes"),
        ({"n_jobs": 1.5}, ValueError, "n_jobs is a number of processes, 0 for none, got 1.5"),
        ({"n_jobs": "2"}, ValueError, "n_jobs is a number of processes, 0 for none, got '2'"),
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
    with pytest.raises(ValueError, match="lists with one entry a table"):
        closed.predict_ragged((X for _ in range(1)), [y], [X_test])


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
            given = {"inference_config": given_config, "inference_precision": torch.float32}
            _, _, options = predictor.regressor_settings(specs, given)
            inner = options["inference_config"]
            inner = dataclasses.asdict(inner) if isinstance(inner, tabpfn_api.InferenceConfig) else inner
            assert inner["MAX_CPU_SAMPLES"] > 10**9


def uses_onednn(regressor, table, total_ML, rows):
    return torch.backends.mkldnn.enabled


@pytest.mark.parametrize(
    ("precision", "n_jobs", "expected"),
    [(torch.float32, 1, False), (torch.float64, 1, False), (torch.bfloat16, 1, True), (torch.float32, 0, True)],
)
def test_a_process_of_its_own_keeps_no_kernels_for_each_shape(closed, precision, n_jobs, expected):
    options = {**OPTIONS, "device": "cpu", "inference_precision": precision}
    made = predictor.TablePredictor(closed.lent_specs, options, uses_onednn, max_padding=0.2)
    X = np.random.default_rng(0).standard_normal((12, 2))
    parts = list(made.predict_all([preparing.Job(0, X[:9], X[:9, 0], X[9:])], n_jobs))
    assert [part.results for part in parts] == [{0: expected}]
    assert torch.backends.mkldnn.enabled
