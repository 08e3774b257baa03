"""What a run keeps of its predictions, and that a run which was killed again and again has the undisturbed one's."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from oretrofit.calibration.calibration import Calibration
from oretrofit.experiments import evaluate as module
from oretrofit.experiments import predictions, report, runs
from oretrofit.experiments.case_runner import CaseRunner
from oretrofit.experiments.datasets import load_dataset, make_case
from oretrofit.experiments.evaluate import Plan, evaluate
from oretrofit.experiments.predictions import LEVELS
from oretrofit.experiments.runs import CaseResult, case_rows, open_run, read_run
from oretrofit.retrofit.api import calibrate
from oretrofit.retrofit.hosts import Host

FORKED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs forked processes")
RESULTS = Path(__file__).parents[2] / "results"


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Three tables of 30 rows and 3 columns."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(0)
    for name in ("one", "two", "three"):
        frame = pd.DataFrame(rng.normal(size=(30, 3)), columns=["a", "b", "c"])
        frame["y"] = frame["a"] + 0.1 * rng.normal(size=30)
        frame.to_csv(folder / f"{name}.csv", index=False)
    return [f"csv:{folder / name}.csv#y" for name in ("one", "two", "three")]


@pytest.fixture(scope="module")
def measured(tiny_host: Host) -> Calibration:
    return calibrate(tiny_host, tables=1)


@pytest.fixture
def plan(tiny_host: Host, tables: list[str], measured: Calibration, monkeypatch: pytest.MonkeyPatch) -> Plan:
    monkeypatch.setattr(module, "calibrate", lambda host, **_: measured)
    estimator = {"n_estimators": 1}
    return Plan(tiny_host, tables[:1], seeds=2, tables=1, max_rows=16, variants=("oa",), estimator=estimator)


def run(plan: Plan, folder: Path, **options: Any) -> list[CaseResult]:
    with open_run(folder, plan.settings()) as opened:
        cases, failures = evaluate(plan, opened, **options)
    assert not failures
    return cases


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "predictions").iterdir())


def test_predictions_are_those_that_the_figures_are_of(plan: Plan, tmp_path: Path, regressor) -> None:
    cases = run(plan, tmp_path)
    opened = read_run(tmp_path)
    assert opened.results() == cases
    for case in cases:
        found = opened.predictions(case.dataset, case.seed)
        assert found is not None and list(found.answers) == ["host", "identity", "oa"]
        assert tuple(found.levels) == tuple(np.float32(level) for level in LEVELS)
        made = make_case(load_dataset(case.dataset), case.seed, 16, 8)
        rounding = 6e-8 * np.abs(made.y_test - made.y_test.mean()).max()  # float32's, of what is left of their mean
        np.testing.assert_allclose(found.y, made.y_test, rtol=1e-15, atol=rounding)
        fitted = regressor(plan.host.specs, n_estimators=1, random_state=case.seed).fit(made.X_train, made.y_train)
        expected = fitted.predict(made.X_test, output_type="quantiles", quantiles=list(LEVELS))
        # TabPFN reads quantiles off in float32, which resolves a probability of 0.01 by 6e-8 (summed over 50 bars).
        spread = made.y_train.std()
        np.testing.assert_allclose(found.answers["host"].quantiles, np.array(expected).T, atol=1e-3 * spread)
        for record in case.variants:
            for name, who in (("host", "host"), (record["variant"], "variant")):
                answer = found.answers[name]
                # Each value is rounded to float32 by 6e-8 of its size.
                size = np.abs(made.y_test).max() + np.abs(answer.mean).max()
                error = np.sqrt(np.mean((answer.mean.astype(float) - made.y_test) ** 2))
                assert error == pytest.approx(record[f"{who}_rmse"], abs=6e-8 * size)
                for share, low, high in ((80, 0.1, 0.9), (95, 0.025, 0.975)):
                    ends = [answer.quantiles[:, LEVELS.index(level)] for level in (low, high)]
                    inside = np.mean((ends[0] <= found.y) & (found.y <= ends[1]))
                    assert inside == record[f"{who}_coverage_{share}"]


@pytest.mark.parametrize(("scale", "offset"), [(1.0, 1.7e9), (1e60, 0.0), (1e-60, 1e-59), (0.0, 5.0)])
def test_targets_of_any_size_keep_their_digits(tmp_path: Path, scale: float, offset: float) -> None:
    rng = np.random.default_rng(0)
    y, mean, quantiles = (scale * rng.standard_normal(s) + offset for s in (50, 50, (50, len(LEVELS))))
    record = {"dataset": "a", "seed": 0, "variant": "oa", "key": "0"}
    answer = predictions.Answer(mean, quantiles)
    predictions.write_predictions(tmp_path, record, predictions.make_arrays(y, answer, answer))
    found = predictions.read_predictions(tmp_path, [record])
    assert found is not None
    for ours, own in ((found.y, y), (found.answers["oa"].mean, mean), (found.answers["host"].quantiles, quantiles)):
        # Half a unit of float32 in values of up to 6 deviations, and of float64 in the offset.
        np.testing.assert_allclose(ours, own, rtol=1e-15, atol=6 * 6e-8 * scale)


@pytest.mark.parametrize("bad", [b"", b"PK\x03\x04", "middle", "inf", "rows"])
def test_a_damaged_file_is_named(tmp_path: Path, bad: bytes | str) -> None:
    record = {"dataset": "a", "seed": 0, "variant": "oa", "key": "0"}
    y = np.arange(400.0)
    answer = predictions.Answer(y, np.tile(y[:, None], len(LEVELS)))
    arrays = predictions.make_arrays(y, answer, answer)
    if bad == "inf":
        arrays["variant_mean"] = np.full_like(arrays["variant_mean"], np.inf)
    if bad == "rows":
        arrays = {name: array[:0] if array.ndim and name != "levels" else array for name, array in arrays.items()}
    predictions.write_predictions(tmp_path, record, arrays)
    (file,) = kept(tmp_path)
    if isinstance(bad, bytes):
        file.write_bytes(bad)
    elif bad == "middle":
        content = bytearray(file.read_bytes())
        place = len(content) * 15 // 100
        content[place : place + 20] = b"\xff" * 20
        file.write_bytes(content)
    with pytest.raises(ValueError, match=r"a-0-oa-0\.npz holds no predictions"):
        predictions.read_predictions(tmp_path, [record])


def test_other_plans_in_the_same_folder_keep_theirs(plan: Plan, tmp_path: Path) -> None:
    run(plan, tmp_path)
    first = {file.name: file.read_bytes() for file in kept(tmp_path)}
    run(dataclasses.replace(plan, variants=("oa", "full-o")), tmp_path)
    found = read_run(tmp_path).predictions(plan.datasets[0], 0)
    assert found is not None and list(found.answers) == ["host", "identity", "oa", "full-o"]
    run(dataclasses.replace(plan, delta=1e-2), tmp_path)  # another `oa`, whose predictions are others
    other = read_run(tmp_path).predictions(plan.datasets[0], 0)
    assert other is not None and (other.answers["oa"].mean != found.answers["oa"].mean).any()
    np.testing.assert_array_equal(other.answers["host"].mean, found.answers["host"].mean)
    assert first.items() <= {file.name: file.read_bytes() for file in kept(tmp_path)}.items()


def test_what_is_missing_or_torn(plan: Plan, tmp_path: Path) -> None:
    cases = run(plan, tmp_path)
    files = kept(tmp_path)
    begun = [tmp_path / name for name in ("predictions/.begun.1234.part.npz", ".power.1234.part.png")]
    begun += [tmp_path / name for name in ("..power.1234.part.5678.part.png", ".cases.1234.part.jsonl")]
    for file in begun:
        file.write_bytes(b"PK")
    run(plan, tmp_path, on_case=lambda _: pytest.fail("ran again"))
    assert not any(file.exists() for file in begun)
    assert kept(tmp_path) == files
    opened = read_run(tmp_path)
    oa = next(file for file in files if "-0-oa-" in file.name)
    oa.unlink()
    found = opened.predictions(plan.datasets[0], 0)
    assert found is not None and list(found.answers) == ["host", "identity"]
    for content in (b"", b"PK\x03\x04 torn", files[-1].read_bytes()[:-40]):
        oa.write_bytes(content)
        with pytest.raises(ValueError, match=rf"{oa.name} holds no predictions .*; remove it"):
            opened.predictions(plan.datasets[0], 0)
    np.savez(oa, y=np.zeros(3))
    with pytest.raises(ValueError, match=rf"{oa.name} holds no predictions .*; remove it"):
        opened.predictions(plan.datasets[0], 0)
    assert opened.predictions(plan.datasets[0], 7) is None
    assert read_run(tmp_path).results() == cases  # no figure depends on them


def test_folders_of_earlier_versions_are_read_and_left_alone(tmp_path: Path) -> None:
    for name in ("eval-float32", "eval-closed"):
        before = {file.name: file.read_bytes() for file in (RESULTS / name).iterdir() if file.is_file()}
        opened = read_run(RESULTS / name)
        assert len(opened.results()) == 18
        assert len(case_rows(opened.results())) == 18 * len(opened.settings["variants"])
        case = opened.results()[0]
        # There from this version on, in a working copy; never in what is committed.
        assert opened.predictions(case.dataset, case.seed) is None or (RESULTS / name / "predictions").is_dir()
        after = {file.name: file.read_bytes() for file in (RESULTS / name).iterdir() if file.is_file()}
        assert after == before
    with pytest.raises(ValueError, match=r"holds no run: it has no settings\.json"):
        read_run(tmp_path)


def test_a_figure_that_is_none_is_named(plan: Plan, tmp_path: Path) -> None:
    run(plan, tmp_path)
    file = tmp_path / "cases.jsonl"
    lines = file.read_text()
    for broken in ('"0.5"', "1e999"):
        line = json.loads(lines.splitlines()[0])
        line["variants"][0]["host_crps"] = "HERE"
        file.write_text(json.dumps(line).replace('"HERE"', broken) + "\n")
        with pytest.raises(ValueError, match="'host_crps'"):
            read_run(tmp_path)


# ---- Killed again and again ----------------------------------------------------------------------

KILLS, WHILE_WRITING = 25, 8
SEEDS = 4  # of three tables: more cases than there are kills while writing


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_predictions(part: Path, **arrays: np.ndarray) -> None:
    """In place of numpy's: half of the file, and no more."""
    SAVE(part, **arrays)
    content = part.read_bytes()
    part.write_bytes(content[: random.randrange(len(content))])
    die()


def die_in_a_line(file: Path, line: str) -> None:
    """In place of appending one: some of it, and no more."""
    data = line.encode() + b"\n"
    with file.open("ab") as out:
        out.write(data[: random.randrange(len(data))])
    die()


SAVE: Any = np.savez_compressed
WRITERS = (
    (predictions.np, "savez_compressed", die_in_predictions),
    (runs, "append_line", die_in_a_line),
)


def whole_run(plan: Plan, folder: Path) -> None:
    """What `eval` does, from the folder to the report."""
    with open_run(folder, plan.settings()) as opened:
        cases, failures = evaluate(plan, opened)
        rows = case_rows(cases)
        summary = report.make_summary(opened.settings, rows, [vars(failure) for failure in failures])
        for name, write in report.report_files(summary, rows).items():
            if not name.endswith(".png"):
                write(folder / name)


def killed(plan: Plan, folder: Path, before: Callable[[], None], after: float | None) -> int:
    """Fork a whole run, and kill it after some seconds, unless it dies by what is done before it; its exit code."""

    def work() -> None:
        before()
        whole_run(plan, folder)

    process = get_context("fork").Process(target=work)
    process.start()
    if after is not None:
        time.sleep(after)
        process.kill()
    process.join(120)
    assert process.exitcode is not None
    return process.exitcode


def tables_of(folder: Path) -> str:
    """All that was written for a reader, without what is measured anew each time."""
    text = (folder / "table.md").read_text()
    kept_lines = [line for line in text.splitlines() if not line.startswith(("| time /", "| memory /"))]
    summary = json.loads((folder / "summary.json").read_text())
    for variant in summary["variants"].values():
        del variant["time_ratio"], variant["peak_memory_ratio"]
    return "\n".join(kept_lines) + json.dumps(summary)


@FORKED
def test_killed_at_25_moments_and_resumed_it_is_the_undisturbed_run(
    plan: Plan, tables: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = dataclasses.replace(plan, datasets=tables, seeds=SEEDS)
    monkeypatch.setattr(CaseRunner, "warm_up", lambda self, on_model: None)
    start = time.perf_counter()
    assert killed(plan, tmp_path / "whole", lambda: None, None) == 0
    duration = time.perf_counter() - start

    random.seed(0)
    folder, codes = tmp_path / "killed", []
    for kill in range(WHILE_WRITING):
        place, name, instead = WRITERS[kill % 2]

        def before(place: Any = place, name: str = name, instead: Any = instead, seed: int = kill) -> None:
            random.seed(seed)
            setattr(place, name, instead)

        codes.append(killed(plan, folder, before, None))
    assert codes == [-signal.SIGKILL] * WHILE_WRITING  # each while it wrote
    for _ in range(KILLS - WHILE_WRITING):
        codes.append(killed(plan, folder, lambda: None, random.uniform(0, 1.5 * duration / KILLS)))
    assert set(codes) <= {-signal.SIGKILL, 0}

    # A line is never there without its predictions.
    opened = read_run(folder)
    for case in opened.cases:
        for record in case.variants:
            assert len(list((folder / "predictions").glob(f"*-{record['key']}.npz"))) == 1
    whole_run(plan, folder)
    assert tables_of(folder) == tables_of(tmp_path / "whole")
    one, other = kept(tmp_path / "whole"), kept(folder)
    assert [file.name for file in one] == [file.name for file in other] and len(one) == 2 * 3 * SEEDS
    assert all(a.read_bytes() == b.read_bytes() for a, b in zip(one, other, strict=True))
