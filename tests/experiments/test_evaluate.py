"""Cases, their records, and runs that are taken up again."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit.calibration import carriers
from oretrofit.experiments import evaluate as run
from oretrofit.experiments.datasets import Case, DatasetError
from oretrofit.retrofit.api import patch
from oretrofit.retrofit.hosts import Host, random_host


@pytest.fixture(autouse=True)
def one_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """TabPFN fits eight by default, which here would only take longer."""
    for module in (run, carriers):
        monkeypatch.setattr(module, "TabPFNRegressor", functools.partial(TabPFNRegressor, n_estimators=1))


@pytest.fixture
def host(tiny_host: Host) -> Host:
    return tiny_host


def csv_spec(folder: Path, rows: int = 36) -> str:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(rows, 3)), columns=["a", "b", "c"])
    frame["y"] = frame["a"] + 0.1 * rng.normal(size=rows)
    frame.to_csv(folder / "table.csv", index=False)
    return f"csv:{folder / 'table.csv'}#y"


def tiny_plan(host: Host, folder: Path, **changes) -> run.Plan:
    return run.Plan(host, [csv_spec(folder)], **{"seeds": 1, "tables": 1, "max_rows": 16, **changes})


class FakeRun:
    """Stands in for fit and predict: host, then variants, each predicting the next of `means`."""

    def __init__(self, *means: float):
        self.means = means
        self.cases: list[Case] = []

    def __call__(self, specs, case, plan) -> run._Run:
        self.cases.append(case)
        mean = np.full(len(case.y_test), self.means[(len(self.cases) - 1) % len(self.means)])
        return run._Run(mean, float(mean[0]), nll=float(mean[0]) / 10, seconds=1.0, peak_mb=None)


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun(2.0, 2.5)
    monkeypatch.setattr(run, "_run", fake)
    monkeypatch.setattr(run, "_warm_up", lambda plan, retrofits: None)
    return fake


def test_end_to_end(host: Host, tmp_path: Path) -> None:
    plan = tiny_plan(host, tmp_path, seeds=2, variants=("oa",))
    folder = tmp_path / "run"
    assert run.open_run(plan, folder) == []
    tables: list[None] = []
    retrofits = run.calibrate_run(plan, folder, on_table=lambda: tables.append(None))
    assert len(tables) == 1  # one measurement for all variants
    cases, failures = run.evaluate(plan, retrofits, folder)
    assert not failures
    rows = run.case_rows(cases)
    assert list(rows["variant"]) == ["identity", "oa"] * 2
    assert list(rows["seed"]) == [0, 0, 1, 1]
    assert (rows[["n_train", "n_test", "n_columns"]] == [16, 8, 3]).all(axis=None)
    assert np.isfinite(rows[["host_nll", "variant_nll", "rmse_delta_pct"]].to_numpy()).all()
    assert (rows[["host_seconds", "variant_seconds"]] > 0).all(axis=None)
    control, oa = rows[rows["variant"] == "identity"], rows[rows["variant"] == "oa"]
    assert control["rmse_delta_pct"].abs().max() < 0.01
    assert control["max_abs_diff_sd"].max() < 1e-3
    assert oa["max_abs_diff_sd"].min() > control["max_abs_diff_sd"].max()

    # Taken up again: the same cases from disk, the same taus, nothing measured.
    finished = run.open_run(plan, folder)
    assert finished == cases
    again = run.calibrate_run(plan, folder, on_table=lambda: pytest.fail("calibrated again"))
    assert {name: r.sites for name, r in again.items()} == {name: r.sites for name, r in retrofits.items()}
    assert run.evaluate(plan, again, folder, finished=finished, on_case=lambda _: pytest.fail("ran again"))[0] == cases


def test_precisions_agree(host: Host, tmp_path: Path) -> None:
    rmse = {}
    for precision in ("float32", "float64", "auto"):
        plan = tiny_plan(host, tmp_path, precision=precision)
        retrofits = {"identity": patch(host, "full-o", tau=1e-12)}
        cases, failures = run.evaluate(plan, retrofits, tmp_path)
        assert not failures
        rmse[precision] = cases[0].variants[0]["variant_rmse"]
    assert rmse["float64"] == pytest.approx(rmse["float32"], rel=1e-4)
    assert rmse["auto"] == pytest.approx(rmse["float32"], rel=0.1)


def test_memory_peak_is_measured_where_the_system_can() -> None:
    if not run._reset_peak("cpu"):
        pytest.skip("no /proc/self/clear_refs here")
    before = run.peak_mb("cpu")
    block = np.ones(2**25)  # 256 MiB
    during = run.peak_mb("cpu")
    assert before is not None and during is not None
    del block
    assert 200 < during - before < 400
    run._reset_peak("cpu")
    after = run.peak_mb("cpu")
    assert after is not None and after < during - 100


def test_record_by_hand(host: Host, tmp_path: Path, no_model: FakeRun) -> None:
    plan = tiny_plan(host, tmp_path)
    retrofits = {"oa": patch(host, "oa", tau=1e-9)}
    (case,), _ = run.evaluate(plan, retrofits, tmp_path)
    (record,) = case.variants
    assert no_model.cases[0] is no_model.cases[1]  # the variant got the host's very case
    assert (record["host_rmse"], record["variant_rmse"]) == (2.0, 2.5)
    assert record["rmse_delta_pct"] == pytest.approx(25)
    assert record["max_abs_diff_sd"] == pytest.approx(0.5 / no_model.cases[0].y_train.std())
    assert (record["host_nll"], record["variant_nll"]) == (0.2, 0.25)
    assert record["host_peak_mb"] is None
    assert (record["precision"], record["device"]) == ("float32", "cpu")


def test_failing_case_is_reported_and_others_go_on(
    host: Host, tmp_path: Path, no_model: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(dataset, seed, *caps):
        if seed == 1:
            raise RuntimeError("out of luck\nsecond line")
        return make_case(dataset, seed, *caps)

    make_case = run.make_case
    monkeypatch.setattr(run, "make_case", failing)
    plan = tiny_plan(host, tmp_path, seeds=3)
    seen: list[run.Failure] = []
    cases, failures = run.evaluate(plan, {}, tmp_path, on_failure=seen.append)
    assert failures == seen == [run.Failure(plan.datasets[0], 1, "RuntimeError: out of luck")]
    assert [case.seed for case in cases] == [0, 2]
    assert [json.loads(line)["seed"] for line in (tmp_path / "cases.jsonl").read_text().splitlines()] == [0, 2]

    # The next run takes up the failed case only.
    monkeypatch.setattr(run, "make_case", make_case)
    ran: list[int] = []
    cases, failures = run.evaluate(plan, {}, tmp_path, finished=cases, on_case=lambda case: ran.append(case.seed))
    assert (ran, failures) == ([1], [])
    assert [case.seed for case in cases] == [0, 1, 2]


def test_interrupted_run_keeps_finished_cases(
    host: Host, tmp_path: Path, no_model: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, folder = tiny_plan(host, tmp_path, seeds=3), tmp_path / "run"
    run.open_run(plan, folder)

    def stop(case: run.CaseResult) -> None:
        if case.seed == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.evaluate(plan, {}, folder, on_case=stop)
    with (folder / "cases.jsonl").open("a") as file:
        file.write('{"dataset": "half a li')
    finished = run.open_run(plan, folder)
    assert [case.seed for case in finished] == [0, 1]
    cases, _ = run.evaluate(plan, {}, folder, finished=finished)
    assert run.open_run(plan, folder) == cases
    assert len(cases) == 3


def test_other_settings_are_refused_by_name(host: Host, tmp_path: Path) -> None:
    plan, folder = tiny_plan(host, tmp_path), tmp_path / "run"
    run.open_run(plan, folder)
    run.open_run(plan, folder)
    with pytest.raises(ValueError, match=r"max_train_rows: 16 there, 18 here.*another --out"):
        run.open_run(dataclasses.replace(plan, max_rows=18), folder)
    with pytest.raises(ValueError, match=r"variants\.oa\.delta: 0\.001 there, 0\.01 here"):
        run.open_run(dataclasses.replace(plan, delta=0.01), folder)
    with pytest.raises(ValueError, match=r"host\.sha256"):
        run.open_run(
            dataclasses.replace(plan, host=random_host(seed=2, **dataclasses.asdict(host.model.config))),
            folder,  # type: ignore[call-overload]
        )
    csv_spec(tmp_path, rows=40)  # another table under the same name
    with pytest.raises(ValueError, match="files_sha256"):
        run.open_run(plan, folder)


def test_unreadable_run_is_refused(host: Host, tmp_path: Path) -> None:
    plan, folder = tiny_plan(host, tmp_path), tmp_path / "run"
    run.open_run(plan, folder)
    (folder / "cases.jsonl").write_text('{"dataset": 1}\n')
    with pytest.raises(ValueError, match="another --out"):
        run.open_run(plan, folder)
    (folder / "cases.jsonl").unlink()
    (folder / "settings.json").write_text("{")
    with pytest.raises(ValueError, match="another --out"):
        run.open_run(plan, folder)


def test_given_retrofit_runs_beside_the_control(host: Host, tmp_path: Path) -> None:
    given = patch(host, "oa", tau=0.5)
    plan = tiny_plan(host, tmp_path, variants=(), given=given)
    assert list(plan.deltas()) == ["identity"]
    settings = plan.settings()["variants"]
    assert settings["oa"]["calibration"] == {"tau": 0.5}
    other = dataclasses.replace(plan, given=patch(host, "oa", tau=0.6)).settings()["variants"]
    assert settings["oa"]["taus_sha256"] != other["oa"]["taus_sha256"]
    run.open_run(plan, tmp_path / "run")
    assert run.calibrate_run(plan, tmp_path / "run")["oa"] is given
    with pytest.raises(ValueError, match="is oa too"):
        dataclasses.replace(plan, variants=("oa",))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variants": ("o",)}, "unknown variant 'o'; there are: identity, oa, full-o"),
        ({"seeds": 0}, "at least one seed"),
        ({"max_rows": 1}, "at least 2 train rows"),
        ({"tables": 0}, "at least one table"),
        ({"quantile": 1.5}, "quantile"),
        ({"delta": 0.0}, "delta"),
        ({"precision": "float8"}, "unknown precision"),
    ],
)
def test_bad_plans(host: Host, tmp_path: Path, changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_plan(host, tmp_path, **changes)


def test_autocast_needs_hardware(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "infer_autocast_inference_mode", lambda devices, enable: False)
    assert tiny_plan(host, tmp_path, precision="auto").precision_used() == "float32"
    with pytest.raises(ValueError, match="no autocast on this device"):
        tiny_plan(host, tmp_path, precision="autocast")
    monkeypatch.setattr(run, "infer_autocast_inference_mode", lambda devices, enable: True)
    assert tiny_plan(host, tmp_path, precision="auto").precision_used() == "autocast"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.resolve_device("auto") == run.resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        run.resolve_device("cuda")
    with pytest.raises(ValueError, match="unknown device"):
        run.resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert run.resolve_device("auto") == run.resolve_device("cuda") == "cuda"
    assert run.resolve_device("cpu") == "cpu"


def test_datasets_on_disk_are_checked_first(tmp_path: Path) -> None:
    run.check_datasets(["concrete", "openml:1", csv_spec(tmp_path)])  # OpenML is not asked
    with pytest.raises(DatasetError):
        run.check_datasets([f"csv:{tmp_path / 'table.csv'}#z"])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu(host: Host, tmp_path: Path) -> None:
    plan = tiny_plan(host, tmp_path, device="cuda", variants=())
    folder = tmp_path / "run"
    run.open_run(plan, folder)
    cases, failures = run.evaluate(plan, run.calibrate_run(plan, folder), folder)
    assert not failures
    (record,) = cases[0].variants
    assert record["host_peak_mb"] > 0 and record["variant_peak_mb"] > 0
    assert abs(record["rmse_delta_pct"]) < 0.01
