"""The benchmark and the equality study of ragged prediction on tiny inputs."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures.tabpfn_v3 import TabPFNV3
from typer.testing import CliRunner

from oretrofit import cli, load_host, patch
from oretrofit.calibration import carriers
from oretrofit.experiments import ragged
from oretrofit.experiments.pretrain import save_host
from oretrofit.retrofit import ragged as core


@pytest.fixture(scope="module", autouse=True)
def quick():
    """Two members instead of TabPFN's eight, and one calibration table."""
    two = functools.partial(TabPFNRegressor, n_estimators=2)
    with pytest.MonkeyPatch.context() as patched:
        for module in (ragged, core, carriers):
            patched.setattr(module, "TabPFNRegressor", two)
        patched.setattr(ragged, "calibrate", functools.partial(ragged.calibrate, tables=1))
        yield


@pytest.fixture(scope="module")
def host_file(tmp_path_factory, tiny_host) -> str:
    file = tmp_path_factory.mktemp("host") / "tiny-v3.safetensors"
    save_host(tiny_host.model, file)
    return str(file)


@pytest.fixture
def in_this_process(monkeypatch):
    """Processes take seconds to start."""
    monkeypatch.setattr(ragged, "_in_own_process", lambda function, *arguments: function(*arguments))


def test_bench_tables():
    tables = ragged.bench_tables(200)
    rows = [len(X) + len(X_test) for X, _, X_test in tables]
    columns = [X.shape[1] for X, _, _ in tables]
    assert 20 <= min(rows) < 25 and 95 < max(rows) <= 100
    assert (min(columns), max(columns)) == (3, 10)
    shapes = {(X.shape, X_test.shape) for X, _, X_test in tables}
    assert 150 < len(shapes) < 200  # ragged, with a few of one shape
    assert all(np.array_equal(a[0], b[0], equal_nan=True) for a, b in zip(ragged.bench_tables(3), tables, strict=False))


def test_methods_agree(host_file):
    """All three give the means that TabPFN gives the host."""
    tables = ragged.bench_tables(3)
    X, y, X_test = tables[0]
    tables.append((2 * X + 1, -y, X_test))  # of the shape of the first
    expected = []
    for X, y, X_test in tables:
        regressor = TabPFNRegressor(
            model_path=load_host(host_file).specs, n_estimators=2, device="cpu", inference_precision=torch.float32
        )
        expected.append(regressor.fit(X, y).predict(X_test))
    passes = {}
    for method in ragged.METHODS:
        run = ragged._ragged(host_file, "cpu") if method == "ragged" else ragged._one_by_one(method, host_file, "cpu")
        means, seconds, passes[method], padding = run(tables)
        for mean, wanted, (_, y, _) in zip(means, expected, tables, strict=True):
            np.testing.assert_allclose(mean / y.std(), wanted / y.std(), atol=1e-4)
        assert list(seconds) == ["preprocessing", "forward", "decoding"] and min(seconds.values()) > 0
        assert (padding > 0) == (method == "ragged")
    # predict_batched runs the members of an ensemble one by one, the tables of a shape together.
    assert passes["shape_groups"] == 2 * 3
    # fit and predict run members of one shape together, ragged prediction more than that.
    assert len(tables) <= passes["loop"] <= 2 * len(tables) and passes["ragged"] < len(tables)


def test_measure_ragged(host_file, in_this_process, monkeypatch):
    lines = []
    result = ragged.measure_ragged(host_file, tables=2, rounds=2, on_run=lines.append)
    assert sorted(lines) == sorted(f"round {i} of 2: {method}" for i in (1, 2) for method in ragged.METHODS)
    assert result["settings"]["tables"] == 2
    for method in ragged.METHODS:
        found = result[method]
        assert found["tables_per_second"] == pytest.approx(2 / np.median(found["total_seconds"]))
        assert sum(found["seconds"].values()) <= 1.5 * max(found["total_seconds"])
        assert found["max_abs_diff_sd"] < 1e-3
        assert found["peak_rss_mb"] > 100  # torch alone is larger
    speedup = np.median(np.array(result["loop"]["total_seconds"]) / np.array(result["ragged"]["total_seconds"]))
    assert result["loop"]["ragged_speedup"] == pytest.approx(speedup)
    header, cells = ragged.bench_cells(result)
    assert [row[0] for row in cells] == ["loop", "shape groups", "ragged"]
    assert all(len(row) == len(header) for row in cells)


def test_what_is_reported_of_the_rounds(monkeypatch):
    """Speeds are medians, gains are paired by round, and a method that predicts otherwise is told."""
    seconds = {"loop": iter([4.0, 6.0, 90.0]), "shape_groups": iter([1.0, 1.0, 1.0]), "ragged": iter([2.0, 2.0, 10.0])}

    def measured(_, method, host, count, device):
        total = next(seconds[method])
        means = [np.full(len(X_test), float(method == "shape_groups")) for _, _, X_test in ragged.bench_tables(count)]
        stages = {"preprocessing": total / 2, "forward": total / 4, "decoding": total / 4}
        return ragged.Measured(means, stages, total, 7, 0.25, 100 * total, None)

    monkeypatch.setattr(ragged, "_in_own_process", measured)
    result = ragged.measure_ragged("any", tables=3, rounds=3)
    assert result["loop"]["ragged_speedup"] == 3.0
    assert result["shape_groups"]["ragged_speedup"] == 0.5
    assert result["loop"]["tables_per_second"] == 0.5
    assert result["loop"]["seconds"] == {"preprocessing": 3.0, "forward": 1.5, "decoding": 1.5}
    assert result["loop"]["peak_rss_mb"] == 9000
    smallest = min(y.std() for _, y, _ in ragged.bench_tables(3))
    assert result["shape_groups"]["max_abs_diff_sd"] == pytest.approx(1 / smallest)
    assert result["ragged"]["max_abs_diff_sd"] == 0
    assert f"{1 / smallest:.1g} target standard deviations" in ragged.bench_notes(result)


def test_clock_tells_the_stages_apart(tiny_host, monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])  # enter, two passes in and out, exit
    monkeypatch.setattr(ragged.time, "perf_counter", lambda: next(now))
    forward = TabPFNV3.forward
    monkeypatch.setattr(TabPFNV3, "forward", lambda self: None)
    clock = ragged._Clock("cpu")
    with clock:
        tiny_host.model()
        tiny_host.model()
    assert clock.seconds == {"preprocessing": 1.0, "forward": 2.0 + 4.0, "decoding": 3.0 + 5.0}
    assert clock.passes == 2
    monkeypatch.undo()
    assert TabPFNV3.forward is forward


def test_own_process():
    assert ragged._in_own_process(os.getpid) != os.getpid()
    with pytest.raises(BrokenProcessPool):
        ragged._in_own_process(os._exit, 3)


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_peak_counts_the_largest_process_it_started():
    code = """
import subprocess, sys
from oretrofit.experiments.ragged import _peak_rss_mb
before = _peak_rss_mb()
for size in (800, 100):
    subprocess.run([sys.executable, "-c", f"bytearray({size} * 2**20)"], check=True)
print(_peak_rss_mb() - before)
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 800 <= float(found.stdout) < 900


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(host_file, tiny_host):
    measured = ragged._measure("ragged", host_file, 3, "cuda")
    assert measured.peak_gpu_mb > 0
    found = ragged.compare_equality(tiny_host, ragged.mixed_tables(2), device="cuda").set_index("quantity")
    assert found.loc["mean", "closed_worst"] < 1e-3


# ---- Equality ------------------------------------------------------------------------------------


def test_mixed_tables():
    tables = ragged.mixed_tables(60)
    frames = [pd.concat([X, X_test]) for X, _, X_test in tables]
    assert all(5 <= len(frame) <= 400 and 1 <= frame.shape[1] <= 30 for frame in frames)
    assert min(map(len, frames)) < 10 and max(map(len, frames)) > 300
    kinds = {str(dtype) for frame in frames for dtype in frame.dtypes}
    assert {"float64", "category", "bool"} <= kinds and kinds & {"object", "str"}
    assert sum(frame.isna().any(axis=None) for frame in frames) > 30
    assert all(len(y) == len(X) >= 2 and len(X_test) >= 1 for X, y, X_test in tables)


@pytest.fixture(scope="module")
def equality(tiny_host):
    seen = []
    tables = ragged.mixed_tables(4)
    found = ragged.compare_equality(tiny_host, tables, on_tables=seen.append)
    assert seen == sorted(seen) and seen[-1] == 4 * len(tables)
    return found.set_index("quantity")


def test_equality(equality):
    assert equality.loc[["mean", "quantile 0.5"], ["closed_worst", "host_worst"]].max(axis=None) < 1e-4
    assert equality.loc["logits"].max() < 1e-3
    assert list(equality.index) == [
        "mean", *(f"quantile {q}" for q in (0.01, 0.1, 0.5, 0.9, 0.99)), "logits", "spread of means"
    ]  # fmt: skip
    # Against what there is to tell apart.
    assert equality.loc["spread of means", "closed_median"] > 0.01
    assert (equality["closed_median"] <= equality["closed_worst"])[:-1].all()


def test_equality_sees_another_answer(tiny_host, monkeypatch):
    """A mean off by half a standard deviation in one of the tables, and every logit by one."""
    retrofit = patch(tiny_host, "closed", tau=1e-3)
    tables = ragged.mixed_tables(2)

    class Off:
        specs = retrofit.specs

        def predict_ragged(self, X_trains, y_trains, X_tests, **settings):
            answers = retrofit.predict_ragged(X_trains, y_trains, X_tests, **settings)
            answers[1]["mean"] = answers[1]["mean"] + 0.5 * tables[1][1].std()
            answers[1]["logits"] = answers[1]["logits"] + 1
            return answers

    found = ragged._differences(Off(), retrofit.specs, tables, "cpu", lambda done: None)
    assert found["mean"][0] < 1e-4 and found["mean"][1] == pytest.approx(0.5, rel=1e-3)
    assert found["logits"][0] < 1e-3 and found["logits"][1] == pytest.approx(1, rel=1e-3)


def test_logits_that_are_no_probability():
    inf = float("inf")
    a = torch.tensor([[0.0, -inf, 1.0]])
    assert ragged._logit_shift(a, torch.tensor([[0.5, -inf, 1.0]])) == 0.5
    assert ragged._logit_shift(a, torch.tensor([[0.0, -3.0, 1.0]])) == inf


# ---- Commands --------------------------------------------------------------------------------------


def oretrofit(command: str, *more: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [*command.split(), *more])


def test_bench_ragged_command(host_file, in_this_process, tmp_path):
    result = oretrofit(
        "bench ragged --tables 2 --rounds 1 --device cpu --host", host_file, "--json", f"{tmp_path}/t.json"
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "t.json").read_text())
    for method in ("loop", "shape_groups", "ragged"):
        assert written[method]["tables_per_second"] > 0 and written[method]["peak_rss_mb"] > 0
        assert method.replace("_", " ") in result.stdout


def test_bench_ragged_equality_command(host_file, tmp_path, monkeypatch):
    command = "bench ragged-equality --tables 2 --device cpu --host"
    result = oretrofit(command, host_file, "--json", f"{tmp_path}/t.json")
    assert result.exit_code == 0, result.output
    written = {row["quantity"]: row for row in json.loads((tmp_path / "t.json").read_text())}
    assert written["mean"]["closed_worst"] < 1e-4 and "quantile 0.99" in result.stdout


@pytest.mark.parametrize("command", ["bench ragged", "bench ragged-equality"])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tables 0", "--tables must be at least 1"),
        ("--host nowhere", "no host 'nowhere'"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--json missing/t.json", "missing/t.json: No such file"),
    ],
)
def test_bad_input_is_one_message(command, options, message):
    result = oretrofit(f"{command} {options}")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr
