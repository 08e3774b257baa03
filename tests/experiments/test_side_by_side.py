"""Cases in processes: the answers of one after another, in the plan's order, whatever becomes of the processes."""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from distributed import Client
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.calibration import predicting
from oretrofit.calibration.calibration import Calibration
from oretrofit.experiments import case_runner
from oretrofit.experiments import evaluate as module
from oretrofit.experiments.case_runner import CaseJob, CaseRunner, Failure
from oretrofit.experiments.datasets import load_dataset, make_case
from oretrofit.experiments.evaluate import Plan, evaluate
from oretrofit.experiments.pretrain import save_host
from oretrofit.experiments.runs import CaseResult, open_run
from oretrofit.retrofit.api import calibrate, patch
from oretrofit.retrofit.hosts import Host

HERE = os.getpid()
FORKED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs forked processes")


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two tables of 36 rows and 3 columns."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    for name in ("one", "two"):
        frame = pd.DataFrame(rng.normal(size=(36, 3)), columns=["a", "b", "c"])
        frame["y"] = frame["a"] + 0.1 * rng.normal(size=36)
        frame.to_csv(folder / f"{name}.csv", index=False)
    return [f"csv:{folder / name}.csv#y" for name in ("one", "two")]


@pytest.fixture(scope="module")
def measured(tiny_host: Host) -> Calibration:
    return calibrate(tiny_host, tables=1)


def small_plan(host: Host, tables: list[str]) -> Plan:
    """Two tables with two seeds each, one estimator instead of TabPFN's eight."""
    return Plan(host, tables, seeds=2, tables=1, max_rows=16, variants=("oa",), estimator={"n_estimators": 1})


@pytest.fixture
def plan(tiny_host: Host, tables: list[str], measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """That, and a measurement made once."""
    monkeypatch.setattr(module, "calibrate", lambda host, **_: measured)
    return small_plan(tiny_host, tables)


def run(plan: Plan, folder: Path, **options: Any) -> tuple[list[CaseResult], list[Failure]]:
    with open_run(folder, plan.settings()) as opened:
        return evaluate(plan, opened, **options)


def deciding(records: list[dict[str, Any]]) -> list[str]:
    """To the bit, without what differs each time and how many cases ran side by side."""
    changing = ("seconds", "peak_mb", "workers")
    return [json.dumps({name: r[name] for name in r if not name.endswith(changing)}) for r in records]


def records(cases: list[CaseResult]) -> list[dict[str, Any]]:
    return [record for case in cases for record in case.variants]


def order(plan: Plan) -> list[tuple[str, int]]:
    return [(dataset, seed) for dataset in plan.datasets for seed in range(plan.seeds)]


@pytest.fixture(scope="module")
def serial(
    tiny_host: Host, tables: list[str], measured: Calibration, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[CaseResult]]:
    """The plan's cases one after another, in the number of threads that processes have (one), and their folder."""
    folder = tmp_path_factory.mktemp("serial")
    models: list[None] = []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(module, "calibrate", lambda host, **_: measured)
        cases, failures = run(small_plan(tiny_host, tables), folder, on_warm_up=lambda: models.append(None))
    assert not failures
    assert len(models) == 3  # the host, the control and `oa`
    return folder, cases


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], None]], None]:
    """Has processes do something before the case of a seed."""

    def install(before: Callable[[int], None]) -> None:
        def make(dataset, seed, *caps):
            if os.getpid() != HERE:
                before(seed)
            return make_case(dataset, seed, *caps)

        monkeypatch.setattr(case_runner, "make_case", make)

    return install


@FORKED
def test_the_answers_of_one_after_another_in_the_plans_order(
    plan: Plan, serial, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_processes
) -> None:
    def load(name: str):
        with (tmp_path / "loaded").open("a") as file:
            file.write(f"{os.getpid()} {name}\n")
        return load_dataset(name)

    monkeypatch.setattr(case_runner, "load_dataset", load)
    in_processes(lambda seed: time.sleep(2 if seed == 0 else 0))  # the first is not the first to end
    seen: list[CaseResult] = []
    cases, failures = run(
        plan, tmp_path / "two", workers=2, on_case=seen.append, on_warm_up=lambda: pytest.fail("warmed up")
    )
    assert not failures
    assert [(case.dataset, case.seed) for case in cases] == order(plan)
    assert [(case.dataset, case.seed) for case in seen] != order(plan)
    assert sorted(map(str, seen)) == sorted(map(str, cases))
    lines = [json.loads(line) for line in (tmp_path / "two" / "cases.jsonl").read_text().splitlines()]
    assert [(line["dataset"], line["seed"]) for line in lines] == [(case.dataset, case.seed) for case in seen]
    assert {record["workers"] for record in records(cases)} == {2}
    loaded = [line.split(maxsplit=1) for line in (tmp_path / "loaded").read_text().splitlines()]
    assert len({pid for pid, _ in loaded}) == 2 and str(HERE) not in dict(loaded)
    assert len(loaded) == len(set(map(tuple, loaded)))  # each table once in each process

    folder, alone = serial
    assert {record["workers"] for record in records(alone)} == {1}
    assert deciding(records(cases)) == deciding(records(alone))

    # Either way can go on where the other ended: nothing is run again.
    never = {"on_case": lambda _: pytest.fail("ran again"), "on_table": lambda: pytest.fail("calibrated again")}
    assert run(plan, tmp_path / "two", **never) == (cases, [])
    assert run(plan, folder, workers=2, **never) == (alone, [])


def test_the_runner_is_all_that_another_process_needs(plan: Plan, measured: Calibration) -> None:
    retrofits = {"oa": patch(plan.host, "oa", calibration=measured)}
    runner = CaseRunner(plan.host, retrofits, 16, "float32", "cpu", plan.estimator, 2)
    content = pickle.dumps(runner)
    code = "import pickle, sys; runner, job = pickle.load(sys.stdin.buffer); print(repr(runner(job)))"
    job = CaseJob(plan.datasets[0], 1, {})
    there = subprocess.run(
        [sys.executable, "-c", f"import torch; torch.set_num_threads(1); {code}"],
        input=pickle.dumps((runner, job)),
        capture_output=True,
        check=True,
    )
    here = runner(job)
    assert isinstance(here, CaseResult)
    answer = eval(there.stdout, {"CaseResult": CaseResult})
    assert deciding(answer.variants) == deciding(here.variants)
    assert len(content) < 20 * 2**20


@FORKED
def test_a_case_that_raises_is_a_failure(plan: Plan, tmp_path: Path, in_processes) -> None:
    def fail(seed: int) -> None:
        if seed == 1:
            raise RuntimeError("out of luck\nsecond line")
        time.sleep(1.5 if seed == 0 else 0)

    in_processes(fail)
    seen: list[Failure] = []
    cases, failures = run(plan, tmp_path / "run", workers=2, on_failure=seen.append)
    assert failures == [Failure(dataset, 1, "RuntimeError: out of luck") for dataset in plan.datasets]
    assert sorted(map(str, seen)) == sorted(map(str, failures))
    assert [(case.dataset, case.seed) for case in cases] == [case for case in order(plan) if case[1] != 1]


@FORKED
def test_a_killed_process_costs_a_warning_only(plan: Plan, serial, tmp_path: Path, in_processes) -> None:
    in_processes(lambda seed: os.kill(os.getpid(), signal.SIGKILL) if seed == 1 else None)
    with pytest.warns(UserWarning, match="a process was killed, perhaps for want of memory"):
        cases, failures = run(plan, tmp_path / "run", workers=2)
    assert not failures
    assert deciding(records(cases)) == deciding(records(serial[1]))
    assert len((tmp_path / "run" / "cases.jsonl").read_text().splitlines()) == 4


@FORKED
def test_variants_are_added_beside_those_that_are_there(plan: Plan, tmp_path: Path) -> None:
    plan = dataclasses.replace(plan, datasets=plan.datasets[:1])
    wider = dataclasses.replace(plan, variants=("oa", "full-o"))
    first, _ = run(plan, tmp_path / "run")
    cases, _ = run(wider, tmp_path / "run", workers=2)
    assert [[record["workers"] for record in case.variants] for case in cases] == [[1, 1, 2]] * 2
    assert [case.variants[:2] for case in cases] == [case.variants for case in first]
    assert deciding(records(cases)) == deciding(records(run(wider, tmp_path / "whole")[0]))


def test_threads_are_divided(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    def call_each(function, arguments, processes, *, threads, client):
        seen.append((processes, threads))
        yield from enumerate(Failure(job.dataset, job.seed, "not run") for job in arguments)

    monkeypatch.setattr(module, "call_each", call_each)
    monkeypatch.setattr(CaseRunner, "warm_up", lambda self, on_model: None)
    for threads, workers in ((8, 3), (2, 4), (1, 2), (8, 100), (8, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        run(plan, tmp_path / f"{threads}-{workers}", workers=workers)
    # No more processes than the four cases, and none for one worker; each has its share of the threads, at least one.
    assert seen == [(3, 2), (4, 1), (2, 1), (4, 1), (0, 8)]


@pytest.mark.parametrize("workers", [0, -1, 1025])
def test_workers_out_of_range(plan: Plan, tmp_path: Path, workers: int) -> None:
    with pytest.raises(ValueError, match=f"workers must be between 1 and 1024, not {workers}"):
        run(plan, tmp_path / "run", workers=workers)


# ---- On a cluster --------------------------------------------------------------------------------


def test_cases_on_a_cluster(plan: Plan, serial, tmp_path: Path, client: Client) -> None:
    """One of its workers is killed when the first case is there."""
    killed: list[int] = []

    def kill(_: CaseResult) -> None:
        if not killed:
            killed.append(next(iter(client.run(os.getpid).values())))
            os.kill(killed[0], signal.SIGKILL)

    cases, failures = run(plan, tmp_path, client=client, on_case=kill, on_warm_up=lambda: pytest.fail("warmed up"))
    assert killed and not failures
    assert deciding(records(cases)) == deciding(records(serial[1]))
    lines = [json.loads(line) for line in (tmp_path / "cases.jsonl").read_text().splitlines()]
    assert sorted((line["dataset"], line["seed"]) for line in lines) == sorted(order(plan))  # none twice
    again, _ = run(plan, tmp_path, client=client, on_case=lambda _: pytest.fail("ran again"))
    assert again == cases


def test_a_case_that_fails_on_a_cluster(plan: Plan, tmp_path: Path, tables: list[str], client: Client) -> None:
    lost = tmp_path / "lost.csv"
    lost.write_text(Path(tables[0].removeprefix("csv:").removesuffix("#y")).read_text())
    plan = dataclasses.replace(plan, datasets=[f"csv:{lost}#y", tables[1]])
    with open_run(tmp_path / "run", plan.settings()) as opened:
        lost.unlink()
        cases, failures = evaluate(plan, opened, client=client)
    assert [(failure.dataset, failure.seed) for failure in failures] == order(plan)[:2]
    assert [(case.dataset, case.seed) for case in cases] == order(plan)[2:]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dask tcp://127.0.0.1:9", "no Dask scheduler answers at tcp://127.0.0.1:9"),
        ("--dask local --workers 2", "--workers is for processes here"),
    ],
)
def test_refused(tables: list[str], tmp_path: Path, options: str, message: str) -> None:
    result = CliRunner().invoke(
        cli.app, [*f"eval --suite {tables[0]} --out {tmp_path / 'run'}".split(), *options.split()]
    )
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "run").exists()


# ---- The command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def host_file(tmp_path_factory: pytest.TempPathFactory, tiny_host: Host) -> Path:
    file = tmp_path_factory.mktemp("host") / "tiny-v3.safetensors"
    save_host(tiny_host.model, file)
    return file


SEEDS = 5  # two workers have begun four of these cases when the first one ends


def command(host_file: Path, tables: list[str], folder: Path, workers: int, seeds: int = 3) -> list[str]:
    options = f"eval --tables 1 --max-rows 16 --device cpu --variant identity --seeds {seeds} --workers {workers}"
    return [*options.split(), "--host", str(host_file), "--suite", tables[0], "--out", str(folder)]


def read(folder: Path) -> dict[int, list[str]]:
    lines = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
    return {line["seed"]: deciding(line["variants"]) for line in lines}


@pytest.fixture(scope="module")
def one_by_one(host_file: Path, tables: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    folder = tmp_path_factory.mktemp("serial")
    assert CliRunner().invoke(cli.app, command(host_file, tables, folder, 1, seeds=SEEDS)).exit_code == 0
    return read(folder)


@FORKED
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_ended_run_leaves_no_process_and_goes_on(
    host_file: Path,
    tables: list[str],
    one_by_one: dict[int, list[str]],
    tmp_path: Path,
    how: signal.Signals,
    code: int,
) -> None:
    """Processes hold a pipe that they have inherited; when the last holder is gone, it can be read to its end."""
    there, folder = command(host_file, tables, tmp_path / "run", 2, seeds=SEEDS), tmp_path / "run"
    read_end, write_end = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", "from oretrofit.cli import app; app()", *there],
        pass_fds=[write_end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    ) as process:
        os.close(write_end)
        assert process.stdout is not None
        assert any("host RMSE" in line for line in iter(process.stdout.readline, ""))
        if how is signal.SIGKILL:
            process.kill()
        else:
            os.killpg(process.pid, how)  # as a terminal does
        output, errors = process.communicate(timeout=120)
    assert process.returncode == code
    assert "Traceback" not in errors
    said = ("Interrupted. Finished cases are in ", "Ended by SIGTERM. Finished cases are in ")
    assert how is signal.SIGKILL or errors.split("\n", 1)[1].startswith(said)
    ready, _, _ = select.select([read_end], [], [], 60)
    assert ready and os.read(read_end, 1) == b""
    os.close(read_end)
    before = (folder / "cases.jsonl").read_bytes()
    assert 1 + output.count("host RMSE") <= before.count(b"\n") < SEEDS

    result = CliRunner().invoke(cli.app, there)
    assert result.exit_code == 0, result.output
    assert f"{len(before.splitlines())} of {SEEDS} cases are in" in result.stdout
    assert (folder / "cases.jsonl").read_bytes().startswith(before)
    assert read(folder) == one_by_one


@FORKED
def test_eval_says_that_times_mean_nothing(host_file: Path, tables: list[str], tmp_path: Path) -> None:
    one, two = command(host_file, tables, tmp_path, 1, seeds=1), command(host_file, tables, tmp_path, 2, seeds=3)
    alone = CliRunner().invoke(cli.app, one)
    assert alone.exit_code == 0 and " s)" in alone.stdout and "--workers" not in alone.stdout
    beside = CliRunner().invoke(cli.app, two)
    assert beside.exit_code == 0, beside.output
    assert "seed 2: host RMSE" in beside.stdout and " s)" not in beside.stdout
    assert "Cases that ran beside others (--workers): 2. Their times mean nothing" in " ".join(beside.stdout.split())
    assert "(--workers): 2." in (tmp_path / "table.md").read_text()
    # Read again by a plan of one worker, the two are still what they are.
    again = CliRunner().invoke(cli.app, command(host_file, tables, tmp_path, 1, seeds=3))
    assert "3 of 3 cases are in" in again.stdout and "(--workers): 2." in " ".join(again.stdout.split())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert [variant["timed"] for variant in summary["variants"].values()] == [1]


@FORKED
def test_the_command_goes_on_without_a_killed_process(
    host_file: Path, tables: list[str], one_by_one: dict[int, list[str]], tmp_path: Path, in_processes
) -> None:
    in_processes(lambda seed: os.kill(os.getpid(), signal.SIGKILL) if seed == 1 else time.sleep(1))
    result = CliRunner().invoke(cli.app, command(host_file, tables, tmp_path, 2, seeds=SEEDS))
    assert result.exit_code == 0, result.output
    assert "a process was killed" in result.stderr
    assert read(tmp_path) == one_by_one


@pytest.mark.parametrize("device", ["cuda", "auto"])
def test_a_gpu_has_one_worker(
    host_file: Path, tables: list[str], tmp_path: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(predicting, "resolve_device", lambda _: "cuda")
    options = [*command(host_file, tables, tmp_path / "run", 2), "--device", device]
    result = CliRunner().invoke(cli.app, options)
    assert result.exit_code == 2
    assert result.stderr == ("Error: --workers 2: a GPU runs one case at a time; leave --workers out, or use the CPU\n")
    assert not (tmp_path / "run").exists()
