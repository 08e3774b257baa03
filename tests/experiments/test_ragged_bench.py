"""The benchmark of ragged prediction on tiny inputs."""

from __future__ import annotations

import copy
import functools
import json
import os
import subprocess
import sys
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor
from torch import nn
from typer.testing import CliRunner

from oretrofit import cli, load_host
from oretrofit.experiments import ragged_bench as run
from oretrofit.experiments.pretrain import save_host

# In float32, as predict_batched refuses float64.
OPTIONS = {"device": "cpu", "inference_precision": torch.float32, "n_estimators": 2}

# In standard deviations of the target: a value passes some 2,000 sums of 16 to 64 terms' length, which round by 6e-8.
SAME = 1e-3


@pytest.fixture(scope="module")
def host_file(tmp_path_factory, tiny_host) -> str:
    file = tmp_path_factory.mktemp("host") / "tiny-v3.safetensors"
    save_host(tiny_host.model, file)
    return str(file)


@pytest.fixture
def in_this_process(monkeypatch):
    """Processes take seconds to start."""
    monkeypatch.setattr(run, "_in_own_process", lambda function, *arguments: (function(*arguments), 123.0))


def test_bench_tables():
    tables = run.bench_tables(200)
    rows = [len(X) + len(X_test) for X, _, X_test in tables]
    columns = [X.shape[1] for X, _, _ in tables]
    assert 20 <= min(rows) < 25 and 95 < max(rows) <= 100
    assert (min(columns), max(columns)) == (3, 10)
    shapes = {(X.shape, X_test.shape) for X, _, X_test in tables}
    assert 150 < len(shapes) < 200  # ragged, with a few of one shape
    assert all(np.array_equal(a[0], b[0], equal_nan=True) for a, b in zip(run.bench_tables(3), tables, strict=False))


def test_methods_agree(host_file, monkeypatch):
    """All give the means that TabPFN gives the host."""
    tables = run.bench_tables(3)
    X, y, X_test = tables[0]
    tables.append((2 * X + 1, -y, X_test))  # of the shape of the first
    expected = []
    for X, y, X_test in tables:
        regressor = TabPFNRegressor(model_path=load_host(host_file).specs, **OPTIONS)
        expected.append(regressor.fit(X, y).predict(X_test))
    assert min(np.ptp(means) / y.std() for means, (_, y, _) in zip(expected, tables, strict=True)) > 10 * SAME
    passes = {}
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # so there are two processes
    for method in run.METHODS:
        once = run._run(method, host_file, OPTIONS)
        for _ in range(2):  # counts begin anew
            means, seconds, passes[method], padding = once(tables)
        for mean, wanted, (_, y, _) in zip(means, expected, tables, strict=True):
            np.testing.assert_allclose(mean / y.std(), wanted / y.std(), rtol=0, atol=SAME)
        assert list(seconds) == ["preprocessing", "forward", "decoding"]
        assert (padding > 0) == (method == "ragged")
    # predict_batched runs the members of an ensemble one by one, the tables of a shape together.
    assert passes["shape_groups"] == 2 * 3
    # fit and predict run members of one shape together, ragged prediction more than that.
    assert passes["parallel_loop"] == passes["loop"]
    assert len(tables) <= passes["loop"] <= 2 * len(tables) and passes["ragged"] < len(tables)


def test_measure_ragged(host_file, in_this_process):
    lines = []
    result = run.measure_ragged(host_file, tables=2, rounds=2, on_run=lines.append, n_estimators=2)
    assert sorted(lines) == sorted(f"round {i} of 2: {method}" for i in (1, 2) for method in run.METHODS)
    assert result["settings"]["tables"] == 2
    for method in run.METHODS:
        found = result[method]
        assert found["tables_per_second"] == pytest.approx(2 / np.median(found["total_seconds"]))
        # The stages are parts of it; here torch has one thread, so processes are one.
        assert sum(found["seconds"].values()) <= np.mean(found["total_seconds"])
        assert found["max_abs_diff_sd"] < SAME
        assert found["peak_pss_mb"] == 123
    speedup = np.median(np.array(result["loop"]["total_seconds"]) / np.array(result["ragged"]["total_seconds"]))
    assert result["loop"]["ragged_speedup"] == pytest.approx(speedup)
    header, cells = run.bench_cells(result)
    assert [row[0] for row in cells] == ["loop", "shape groups", "parallel loop", "ragged"]
    assert all(len(row) == len(header) for row in cells)


def test_what_is_reported_of_the_rounds(monkeypatch):
    """Speeds are medians, gains are paired by round, and a method that predicts otherwise is told."""
    seconds = {"loop": iter([4.0, 6.0, 90.0]), "shape_groups": iter([1.0] * 3), "ragged": iter([2.0, 2.0, 10.0])}
    seconds["parallel_loop"] = iter([3.0, 1.0, 1.0])

    def measured(_, method, host, count, options):
        total = next(seconds[method])
        means = [np.full(len(X_test), float(method == "shape_groups")) for _, _, X_test in run.bench_tables(count)]
        stages = {"preprocessing": total / 2, "forward": total / 4, "decoding": total / 4}
        return run.Measured(means, stages, total, 7, 0.25, None), 100 * total

    monkeypatch.setattr(run, "_in_own_process", measured)
    result = run.measure_ragged("small", tables=3, rounds=3)
    assert result["loop"]["ragged_speedup"] == 3.0
    assert result["shape_groups"]["ragged_speedup"] == 0.5
    assert result["loop"]["tables_per_second"] == 0.5
    assert result["loop"]["seconds"] == {"preprocessing": 3.0, "forward": 1.5, "decoding": 1.5}
    assert result["loop"]["peak_pss_mb"] == 9000
    smallest = min(y.std() for _, y, _ in run.bench_tables(3))
    assert result["shape_groups"]["max_abs_diff_sd"] == pytest.approx(1 / smallest)
    assert result["ragged"]["max_abs_diff_sd"] == 0
    assert f"{1 / smallest:.1g} target standard deviations" in run.bench_notes(result)


def test_measure_ragged_against_one_method(host_file, in_this_process):
    result = run.measure_ragged(host_file, tables=2, rounds=1, against=["parallel_loop"], n_estimators=2)
    assert list(result) == ["settings", "parallel_loop", "ragged"]
    assert result["parallel_loop"]["max_abs_diff_sd"] == 0 and result["ragged"]["max_abs_diff_sd"] < SAME


def test_clock_tells_the_stages_apart(monkeypatch):
    now = iter([0.0, 1.0, 3.0, 6.0, 10.0, 15.0])  # enter, two passes in and out, exit
    model, clock = nn.Identity(), run._Clock("cpu")
    clock.watch(model)
    monkeypatch.setattr(run.time, "perf_counter", lambda: next(now))
    with clock:
        assert model(1) == 1
        assert copy.deepcopy(model)(2) == 2
    assert clock.seconds == {"preprocessing": 1.0, "forward": 2.0 + 4.0, "decoding": 3.0 + 5.0}
    assert clock.passes == 2
    assert isinstance(model, nn.Identity) and type(nn.Identity()) is nn.Identity


def test_own_process():
    assert run._in_own_process(os.getpid)[0] != os.getpid()
    with pytest.raises(BrokenProcessPool):
        run._in_own_process(os._exit, 3)


# ---- Memory --------------------------------------------------------------------------------------

needs_proc = pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="needs Linux's /proc")


@needs_proc
def test_memory_is_of_all_processes_and_shared_pages_count_once():
    """Sizes are of bare interpreters that the test starts, so what else is in memory plays no part."""
    code = """
import os, sys
said = lambda word: (print(word, flush=True), sys.stdin.readline())
held = b"x" * (300 * 2**20)
said("alone")
if os.fork() == 0:
    assert held.count(b"y") == 0  # reads all of it
    said("shared")
    own = b"x" * (200 * 2**20)
    said("own")
    os._exit(0)
os.wait()
"""
    sizes = {}
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as p:
        while word := p.stdout.readline().strip():
            sizes[word] = run.tree_pss_mb(p.pid)
            p.stdin.write("\n")
            p.stdin.flush()
    assert list(sizes) == ["alone", "shared", "own"]
    assert sizes["alone"] >= 300
    # What the child has beside the 300 MiB is what an interpreter writes to on its way: far below their half.
    assert sizes["shared"] - sizes["alone"] < 150
    assert 200 <= sizes["own"] - sizes["shared"] < 250


@needs_proc
def test_peak_is_of_all_that_a_process_starts(monkeypatch, tmp_path):
    """The largest sample, however briefly it was that large: here until it has been seen."""
    seen, tree_pss_mb = tmp_path / "seen", run.tree_pss_mb

    def sampled(pid):
        size = tree_pss_mb(pid)
        if size is not None and size >= 300:
            seen.touch()
        return size

    monkeypatch.setattr(run, "tree_pss_mb", sampled)
    code = "import os, sys, time; held = b'x' * (300 * 2**20)\nwhile not os.path.exists(sys.argv[1]): time.sleep(0.01)"
    command = [sys.executable, "-c", code, str(seen)]
    # With a limit only so that a peak that is not seen is a failure and not a wait for ever.
    process, peak = run._in_own_process(functools.partial(subprocess.run, timeout=120), command)
    assert process.returncode == 0 and peak >= 300


def test_memory_of_a_process_that_is_none():
    assert run.tree_pss_mb(2**22 + 1) is None  # above the largest number that Linux gives


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(host_file):
    options = {"device": "cuda", "inference_precision": torch.float32, "n_estimators": 2}
    before = torch.cuda.memory_allocated()
    measured = run._measure("ragged", host_file, 3, options)
    weights = sum(value.nbytes for value in load_host(host_file).model.parameters())
    assert measured.peak_gpu_mb * 2**20 >= before + weights


# ---- Commands --------------------------------------------------------------------------------------


def oretrofit(command: str, *more: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [*command.split(), *more])


def test_bench_ragged_command(host_file, in_this_process, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "measure_ragged", functools.partial(run.measure_ragged, n_estimators=2))
    result = oretrofit(
        "bench ragged --tables 2 --rounds 1 --device cpu --host", host_file, "--json", f"{tmp_path}/t.json"
    )
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "t.json").read_text())
    assert written["settings"]["tables"] == 2 and written["settings"]["rounds"] == 1
    for method in run.METHODS:
        assert len(written[method]["total_seconds"]) == 1
        assert method.replace("_", " ") in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tables 0", "--tables must be between 1 and"),
        ("--host nowhere", "no host 'nowhere'"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--against ragged", "unknown against 'ragged'; there are: loop, shape_groups, parallel_loop"),
        ("--json missing/t.json", "missing/t.json: No such file"),
    ],
)
def test_bad_input_is_one_message(options, message):
    result = oretrofit(f"bench ragged {options}")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr
