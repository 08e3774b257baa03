"""Cases, their records, and runs that are taken up again."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

from oretrofit.calibration import predicting
from oretrofit.calibration.calibration import Calibration
from oretrofit.experiments import case_runner, memory
from oretrofit.experiments import evaluate as module
from oretrofit.experiments.case_runner import CaseRunner, Failure
from oretrofit.experiments.datasets import DatasetError, check_datasets, load_dataset, make_case
from oretrofit.experiments.evaluate import Plan, evaluate
from oretrofit.experiments.predictions import LEVELS
from oretrofit.experiments.runs import CaseResult, case_rows, open_run
from oretrofit.retrofit import tabpfn_api
from oretrofit.retrofit.api import RetrofitError, calibrate, patch
from oretrofit.retrofit.check import synthetic_cases
from oretrofit.retrofit.hosts import Host, random_host


def csv_spec(folder: Path, rows: int = 36) -> str:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(rows, 3)), columns=["a", "b", "c"])
    frame["y"] = frame["a"] + 0.1 * rng.normal(size=rows)
    frame.to_csv(folder / "table.csv", index=False)
    return f"csv:{folder / 'table.csv'}#y"


def tiny_plan(host: Host, folder: Path, **changes: Any) -> Plan:
    """Small cases of one table, with one estimator instead of TabPFN's eight."""
    given: dict[str, Any] = {"seeds": 1, "tables": 1, "max_rows": 16, "variants": ("oa",)}
    return Plan(host, [csv_spec(folder)], estimator={"n_estimators": 1}, **{**given, **changes})


def run(plan: Plan, folder: Path, **calls: Any) -> tuple[list[CaseResult], list[Failure]]:
    with open_run(folder, plan.settings()) as opened:
        return evaluate(plan, opened, **calls)


def deciding(cases: list[CaseResult]) -> list[dict[str, Any]]:
    """The records without what differs each time, and without how many ran side by side."""
    changing = ("seconds", "peak_mb", "workers")
    return [
        {name: value for name, value in record.items() if not name.endswith(changing)}
        for case in cases
        for record in case.variants
    ]


@pytest.fixture(scope="module")
def measured(tiny_host: Host) -> Calibration:
    return calibrate(tiny_host, tables=1)


@pytest.fixture
def calibrated(measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one measurement that every plan here asks for, made once."""
    monkeypatch.setattr(module, "calibrate", lambda host, **_: measured)


class FakeAnswers:
    """Stands in for fit and predict: host, then variants, each predicting the next of `means`."""

    def __init__(self, *means: float):
        self.means = means
        self.cases: list = []

    def __call__(self, specs, case) -> case_runner._Answer:
        self.cases.append(case)
        mean = np.full(len(case.y_test), self.means[(len(self.cases) - 1) % len(self.means)])
        figures = {"nll": mean[0] / 10, "crps": mean[0] / 20, "coverage_80": mean[0] / 4, "coverage_95": mean[0] / 3}
        quantiles = np.full((len(mean), len(LEVELS)), mean[0])
        return case_runner._Answer(
            mean, quantiles, 1.0, **{name: float(value) for name, value in figures.items()}, seconds=1.0, peak_mb=None
        )


@pytest.fixture
def no_model(calibrated: None, monkeypatch: pytest.MonkeyPatch) -> FakeAnswers:
    """The host predicts 2, the control 2 and `oa` 2.5."""
    fake = FakeAnswers(2.0, 2.0, 2.5)
    monkeypatch.setattr(CaseRunner, "_answer", lambda self, specs, case: fake(specs, case))
    monkeypatch.setattr(CaseRunner, "warm_up", lambda self, on_model: None)
    return fake


def test_end_to_end_and_again(tiny_host: Host, tmp_path: Path) -> None:
    plan, folder = tiny_plan(tiny_host, tmp_path, seeds=2), tmp_path / "run"
    tables: list[None] = []
    cases, failures = run(plan, folder, on_table=lambda: tables.append(None))
    assert not failures
    assert len(tables) == 1  # one measurement for all variants
    rows = case_rows(cases)
    assert list(rows["variant"]) == ["identity", "oa"] * 2
    assert list(rows["seed"]) == [0, 0, 1, 1]
    assert (rows[["n_train", "n_test", "n_columns"]] == [16, 8, 3]).all(axis=None)
    control, oa = rows[rows["variant"] == "identity"], rows[rows["variant"] == "oa"]
    # delta is 1e-6: each of some 20 gates takes at most about that from a token. Ten times as much is allowed for.
    assert control["rmse_delta_pct"].abs().max() < 100 * 10 * 20 * 1e-6
    assert oa["max_abs_diff_sd"].min() > control["max_abs_diff_sd"].max()

    # Taken up again: the same cases from disk, nothing measured, nothing run.
    def never(*_: Any) -> None:
        pytest.fail("ran again")

    assert run(plan, folder, on_table=never, on_case=never, on_failure=never) == (cases, [])


def test_more_seeds_and_variants_run_what_is_missing(tiny_host: Host, tmp_path: Path, calibrated: None) -> None:
    plan, folder = tiny_plan(tiny_host, tmp_path), tmp_path / "run"
    first, _ = run(plan, folder)
    wider = dataclasses.replace(plan, seeds=2, variants=("oa", "full-o"))
    seen: list[CaseResult] = []
    cases, failures = run(wider, folder, on_case=seen.append)
    assert not failures and cases == seen
    assert [record["variant"] for case in cases for record in case.variants] == ["identity", "oa", "full-o"] * 2
    assert cases[0].variants[:2] == first[0].variants  # to the second: not run again
    lines = [json.loads(line) for line in (folder / "cases.jsonl").read_text().splitlines()]
    ran = [(line["seed"], [record["variant"] for record in line["variants"]]) for line in lines]
    assert ran == [(0, ["identity", "oa"]), (0, ["full-o"]), (1, ["identity", "oa", "full-o"])]
    # What was put together from two runs is what one run gives, to the bit.
    assert deciding(cases) == deciding(run(wider, tmp_path / "whole")[0])
    # The first plan again, and one with fewer seeds and other variants: nothing is missing.
    for again in (plan, dataclasses.replace(wider, variants=("full-o",))):
        run(again, folder, on_case=lambda _: pytest.fail("ran again"))


def test_a_host_that_rounds_otherwise_runs_the_whole_case_again(
    tiny_host: Host, tmp_path: Path, calibrated: None
) -> None:
    plan, folder = tiny_plan(tiny_host, tmp_path), tmp_path / "run"
    run(plan, folder)
    file = folder / "cases.jsonl"
    line = json.loads(file.read_text())
    for record in line["variants"]:
        record["host_rmse"] = math.nextafter(record["host_rmse"], 0)  # as of another machine
    file.write_text(json.dumps(line) + "\n")
    wider = dataclasses.replace(plan, variants=("oa", "full-o"))
    cases, _ = run(wider, folder)
    assert deciding(cases) == deciding(run(wider, tmp_path / "whole")[0])


def test_precisions_agree(tiny_host: Host, tmp_path: Path, calibrated: None) -> None:
    rmse = {}
    for precision in ("float32", "float64", "auto"):
        plan = tiny_plan(tiny_host, tmp_path, precision=precision, variants=())
        cases, failures = run(plan, tmp_path / "run")
        assert not failures
        rmse[precision] = cases[0].variants[0]["variant_rmse"]
    # Float32 rounds by 6e-8; a network of 20 layers may make some hundred times that of it. Half precision (auto, where
    # the processor has it) rounds by 4e-3.
    assert rmse["float64"] == pytest.approx(rmse["float32"], rel=1e-4)
    assert rmse["auto"] == pytest.approx(rmse["float32"], rel=0.1)


def test_memory_peak_is_measured_where_the_system_can() -> None:
    if not memory.reset_peak("cpu"):
        pytest.skip("no /proc/self/clear_refs here")
    before = memory.peak_mb("cpu")
    block = np.ones(2**25)  # 256 MiB, all of them written to
    during = memory.peak_mb("cpu")
    assert before is not None and during is not None
    del block
    assert 200 < during - before < 400
    memory.reset_peak("cpu")
    after = memory.peak_mb("cpu")
    assert after is not None and after < during - 100


def test_record_by_hand(tiny_host: Host, tmp_path: Path, no_model: FakeAnswers) -> None:
    plan = tiny_plan(tiny_host, tmp_path)
    (case,), _ = run(plan, tmp_path / "run")
    record = case.variants[1]
    made = make_case(load_dataset(plan.datasets[0]), 0, 16, 8)
    assert all(seen is no_model.cases[0] for seen in no_model.cases)  # the variants got the host's very case
    errors = [((made.y_test - mean) ** 2).mean() ** 0.5 for mean in (2.0, 2.5, made.y_train.mean())]
    # Sums of eight squares in another order: a few roundings of 1.1e-16.
    assert [record[name] for name in ("host_rmse", "variant_rmse", "train_mean_rmse")] == pytest.approx(
        errors, rel=1e-14
    )
    assert record["rmse_delta_pct"] == pytest.approx(100 * (errors[1] / errors[0] - 1), rel=1e-12)
    assert record["max_abs_diff_sd"] == pytest.approx(0.5 / made.y_train.std())
    assert (record["host_nll"], record["variant_nll"]) == (0.2, 0.25)
    assert (record["host_crps"], record["variant_crps"]) == (0.1, 0.125)
    assert (record["host_coverage_80"], record["variant_coverage_80"]) == (0.5, 0.625)
    assert (record["host_coverage_95"], record["variant_coverage_95"]) == (2 / 3, 2.5 / 3)
    assert record["target_sd"] == pytest.approx(((made.y_test - made.y_test.mean()) ** 2).mean() ** 0.5, rel=1e-14)
    assert record["host_peak_mb"] is None
    assert (record["precision"], record["device"], record["workers"]) == ("float32", "cpu", 1)


def test_a_figure_that_is_not_finite_fails_its_case_by_name(
    tiny_host: Host, tmp_path: Path, no_model: FakeAnswers
) -> None:
    no_model.means = (2.0, 2.0, math.inf)
    cases, failures = run(tiny_plan(tiny_host, tmp_path), tmp_path / "run")
    assert cases == []
    assert failures[0].reason.startswith("ValueError: variant_rmse of oa is not finite (inf)")


def test_failing_case_is_reported_and_others_go_on(
    tiny_host: Host, tmp_path: Path, no_model: FakeAnswers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(dataset, seed, *caps):
        if seed == 1:
            raise RuntimeError("out of luck\nsecond line")
        return make_case(dataset, seed, *caps)

    monkeypatch.setattr(case_runner, "make_case", failing)
    plan, folder = tiny_plan(tiny_host, tmp_path, seeds=3), tmp_path / "run"
    seen: list[Failure] = []
    cases, failures = run(plan, folder, on_failure=seen.append)
    assert failures == seen == [Failure(plan.datasets[0], 1, "RuntimeError: out of luck")]
    assert [case.seed for case in cases] == [0, 2]
    assert [json.loads(line)["seed"] for line in (folder / "cases.jsonl").read_text().splitlines()] == [0, 2]

    # The next run takes up the failed case only.
    monkeypatch.setattr(case_runner, "make_case", make_case)
    ran: list[int] = []
    cases, failures = run(plan, folder, on_case=lambda case: ran.append(case.seed))
    assert (ran, failures) == ([1], [])
    assert [case.seed for case in cases] == [0, 1, 2]


@pytest.mark.parametrize(
    ("error", "may_pass"),
    [
        (DatasetError("constant on the training rows"), False),
        (ValueError("not finite"), False),
        (MemoryError(), True),
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"), True),
        (ConnectionError("no route"), True),
    ],
)
def test_what_might_run_another_time(error: Exception, may_pass: bool) -> None:
    assert case_runner._may_pass(error) is may_pass
    try:
        raise DatasetError("could not be had") from error
    except DatasetError as chained:
        assert case_runner._may_pass(chained) is may_pass


def test_interrupted_run_keeps_finished_cases(tiny_host: Host, tmp_path: Path, no_model: FakeAnswers) -> None:
    plan, folder = tiny_plan(tiny_host, tmp_path, seeds=3), tmp_path / "run"

    def stop(case: CaseResult) -> None:
        if case.seed == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(plan, folder, on_case=stop)
    ran: list[int] = []
    cases, _ = run(plan, folder, on_case=lambda case: ran.append(case.seed))
    assert ran == [2]
    assert len(cases) == 3


def test_retrofits_in_the_folder_are_used(
    tiny_host: Host, tmp_path: Path, measured: Calibration, calibrated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = tiny_plan(tiny_host, tmp_path), tmp_path / "run"
    with open_run(folder, plan.settings()) as opened:
        first = module.calibrate_run(plan, opened)
        monkeypatch.setattr(module, "calibrate", lambda host, **_: pytest.fail("calibrated again"))
        again = module.calibrate_run(plan, opened)
        assert {name: r.sites for name, r in again.items()} == {name: r.sites for name, r in first.items()}
        file = opened.retrofit_file("oa")
        file.write_bytes(b"\xff\xfe")
        with pytest.raises(RetrofitError, match=rf"{file.name} is not a retrofit.*remove the file"):
            module.calibrate_run(plan, opened)
    expected = patch(tiny_host, "oa", calibration=measured)
    assert first["oa"].sites == expected.sites


def test_given_retrofit_runs_beside_the_control(tiny_host: Host, tmp_path: Path, calibrated: None) -> None:
    given = patch(tiny_host, "oa", tau=0.5)
    plan = tiny_plan(tiny_host, tmp_path, variants=(), given=given)
    assert list(plan.deltas()) == ["identity"]
    settings = plan.settings()["variants"]
    assert settings["oa"]["calibration"] == {"tau": 0.5}
    other = dataclasses.replace(plan, given=patch(tiny_host, "oa", tau=0.6)).settings()["variants"]
    assert settings["oa"]["taus_sha256"] != other["oa"]["taus_sha256"]
    with open_run(tmp_path / "run", plan.settings()) as opened:
        assert module.calibrate_run(plan, opened)["oa"] is given
        kept = json.loads(opened.retrofit_file("oa").read_text())  # for the report
        assert kept["tau"] == {site.name: 0.5 for site in given.sites}
    with pytest.raises(ValueError, match="is oa too"):
        dataclasses.replace(plan, variants=("oa",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("o",)}, "unknown variant 'o'; there are: identity, oa, full-o"),
        ({"seeds": 0}, "seeds must be between 1 and"),
        ({"seeds": 10**20}, "seeds must be between 1 and"),
        ({"max_rows": 1}, "max_rows must be at least 2"),
        ({"tables": 0}, "tables must be at least 1"),
        ({"quantile": 1.5}, "quantile"),
        ({"delta": 0.0}, "delta"),
        ({"precision": "float8"}, "unknown precision"),
    ],
)
def test_bad_plans(tiny_host: Host, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_plan(tiny_host, tmp_path, **changes)


def test_what_decides_a_case_is_in_the_settings(tiny_host: Host, tmp_path: Path) -> None:
    plan = tiny_plan(tiny_host, tmp_path)
    before = plan.settings()
    assert json.loads(json.dumps(before, allow_nan=False)) == before
    assert before["estimator"] == {"n_estimators": 1}
    assert "estimator" not in dataclasses.replace(plan, estimator={}).settings()  # as in earlier versions' folders
    other = random_host(seed=2, **dataclasses.asdict(tiny_host.model.config))  # type: ignore[call-overload]
    assert dataclasses.replace(plan, host=other).settings()["host"] != before["host"]
    csv_spec(tmp_path, rows=40)  # another table under the same name
    assert plan.settings()["files_sha256"] != before["files_sha256"]
    # A folder of Parquet files is one table, too.
    (tmp_path / "parts").mkdir()
    folder = dataclasses.replace(plan, datasets=[f"csv:{tmp_path / 'parts'}#y"])
    hashes = []
    for name, content in (("a.parquet", "1"), ("b.parquet", "1"), ("b.parquet", "2")):
        (tmp_path / "parts" / name).write_text(content)
        hashes += folder.settings()["files_sha256"].values()
    assert len(set(hashes)) == 3


def test_autocast_needs_hardware(tiny_host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabpfn_api, "infer_autocast_inference_mode", lambda devices, enable: False)
    assert tiny_plan(tiny_host, tmp_path, precision="auto").precision_used() == "float32"
    with pytest.raises(ValueError, match="no autocast on this device"):
        tiny_plan(tiny_host, tmp_path, precision="autocast")
    monkeypatch.setattr(tabpfn_api, "infer_autocast_inference_mode", lambda devices, enable: True)
    assert tiny_plan(tiny_host, tmp_path, precision="auto").precision_used() == "autocast"


def test_datasets_on_disk_are_checked_first(tmp_path: Path) -> None:
    check_datasets(["concrete", "openml:1", csv_spec(tmp_path)])  # OpenML is not asked
    with pytest.raises(DatasetError):
        check_datasets([f"csv:{tmp_path / 'table.csv'}#z"])


def test_on_a_gpu_the_second_of_two_runs_is_timed(tiny_host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the first one may build what the shape needs; to be seen without a GPU by what the runner asks for."""
    calls: list[str] = []

    def predicted(specs: Any, case: Any, *, device: str, **options: Any) -> Any:
        calls.append(device)
        return predicting.predict_case(specs, case, device="cpu", **options)

    def reset(device: str) -> bool:
        calls.append("reset")
        return True

    def clock() -> float:
        calls.append("clock")
        return 10.0 * len(calls)

    monkeypatch.setattr(case_runner, "predict_case", predicted)
    monkeypatch.setattr(case_runner, "reset_peak", reset)
    monkeypatch.setattr(case_runner, "peak_mb", lambda device: 7.0)
    monkeypatch.setattr(case_runner, "time", SimpleNamespace(perf_counter=clock))
    (case,) = synthetic_cases(1, 0, max_rows=30, max_columns=3)
    runner = CaseRunner(tiny_host, {}, 30, "float32", "cuda", {"n_estimators": 1})
    answer = runner._answer(tiny_host.specs, case)
    assert calls == ["cuda", "reset", "clock", "cuda", "clock"]
    assert (answer.seconds, answer.peak_mb) == (20.0, 7.0)


def test_nan_is_no_zero(tiny_host: Host) -> None:
    """TabPFN makes NaN 0 behind the model, which would be measured as a prediction."""
    host = dataclasses.replace(tiny_host, model=copy.deepcopy(tiny_host.model))
    model: Any = host.model
    model._nan_safe_output = True
    with torch.no_grad():
        model.output_projection[-1].bias[0] = torch.nan
    (case,) = synthetic_cases(1, 0, max_rows=30, max_columns=3)
    with pytest.raises(ValueError, match="not finite"):
        CaseRunner(host, {}, 30, "float32", "cpu", {"n_estimators": 1})._answer(host.specs, case)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(tiny_host: Host, tmp_path: Path) -> None:
    cases, failures = run(tiny_plan(tiny_host, tmp_path, device="cuda", variants=()), tmp_path / "run")
    assert not failures
    (record,) = cases[0].variants
    assert record["host_peak_mb"] > 0 and record["variant_peak_mb"] > 0
    assert abs(record["rmse_delta_pct"]) < 0.01
