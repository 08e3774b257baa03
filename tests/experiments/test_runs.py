"""Run folders: what is taken up, what is left alone, what is refused by name, and what is never lost."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from oretrofit.experiments.folders import FolderInUseError
from oretrofit.experiments.runs import CaseResult, Run, case_rows, open_run, read_run, record_key

CALIBRATION = {"quantile": 0.01, "tables": 16, "seed": 20_000}


def settings(**changes: Any) -> dict[str, Any]:
    made = {
        "host": {"name": "small", "sha256": "0" * 64},
        "variants": {
            "identity": {"patch": "full-o", "delta": 1e-6, **CALIBRATION},
            "oa": {"patch": "oa", "delta": 1e-3, **CALIBRATION},
        },
        "datasets": ["ames", "csv:t.csv#y"],
        "files_sha256": {"csv:t.csv#y": "f" * 64},
        "seeds": [0, 1],
        "max_train_rows": 100,
        "max_test_rows": 50,
        "precision": "float32",
        "precision_used": "float32",
        "device": "cpu",
        "gpu": None,
        "versions": {"oretrofit": "0.1.0", "torch": "2.13.0"},
    }
    return {**made, **changes}


def record(dataset: Any = "ames", seed: Any = 0, variant: Any = "oa", **changes: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"dataset": dataset, "seed": seed, "variant": variant}
    made |= dict.fromkeys(("n_train", "n_test", "n_columns"), 10)
    figures = ("host_rmse", "variant_rmse", "rmse_delta_pct", "max_abs_diff_sd", "host_nll", "variant_nll")
    made |= dict.fromkeys((*figures, "host_seconds", "variant_seconds"), 0.1)
    made |= {"host_peak_mb": None, "variant_peak_mb": 12.5, "precision": "float32", "device": "cpu"}
    return made | changes


def case(dataset: str = "ames", seed: int = 0, variants: tuple[str, ...] = ("identity", "oa"), **changes: Any):
    return CaseResult(dataset, seed, [record(dataset, seed, variant, **changes) for variant in variants])


def run_here(folder: Path, plan: dict[str, Any], *cases: CaseResult) -> Run:
    """What a run of a plan leaves in a folder: these cases, then it ends."""
    with open_run(folder, plan) as run:
        for made in cases:
            run.append(made)
    with open_run(folder, plan) as run:
        return run


def finished(folder: Path, plan: dict[str, Any]) -> dict[tuple[str, int], list[str]]:
    with open_run(folder, plan) as run:
        return {at: list(records) for at, records in run.finished().items() if records}


def test_finished_cases_are_there_for_the_same_plan(tmp_path: Path) -> None:
    run = run_here(tmp_path / "run", settings(), case(), case(seed=1, variants=("identity",)))
    assert {at: list(records) for at, records in run.finished().items()} == {
        ("ames", 0): ["identity", "oa"],
        ("ames", 1): ["identity"],
    }
    csv = "csv:t.csv#y"
    assert run.missing() == {("ames", 1): ["oa"], (csv, 0): ["identity", "oa"], (csv, 1): ["identity", "oa"]}
    assert json.loads((tmp_path / "run" / "settings.json").read_text()) == settings()
    assert sorted(file.name for file in (tmp_path / "run").iterdir()) == ["cases.jsonl", "settings.json"]


@pytest.mark.parametrize(
    "changes",
    [
        {"seeds": [0, 1, 2]},
        {"seeds": [0]},
        {"datasets": ["ames", "diamonds"], "files_sha256": {}},
        {"files_sha256": {"csv:t.csv#y": "e" * 64}},  # of another dataset than the finished one
        {"host": {"name": "renamed", "sha256": "0" * 64}},
        {"variants": {**settings()["variants"], "closed": {"patch": "closed", "delta": 1e-3, **CALIBRATION}}},
    ],
)
def test_another_plan_uses_what_is_decided_alike(tmp_path: Path, changes: dict[str, Any]) -> None:
    run_here(tmp_path, settings(), case())
    assert finished(tmp_path, settings(**changes)) == {("ames", 0): ["identity", "oa"]}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"host": {"name": "small", "sha256": "1" * 64}}, 'host: "000000000000" there, "111111111111" here'),
        ({"max_train_rows": 101}, "max_train_rows: 100 there, 101 here"),
        ({"max_test_rows": 51}, "max_test_rows"),
        ({"precision": "auto"}, 'precision: "float32" there, "auto" here'),
        ({"precision_used": "autocast"}, "precision_used"),
        ({"device": "cuda"}, "device"),
        ({"gpu": "H200"}, "gpu"),
        ({"estimator": {"n_estimators": 1}}, "estimator"),
        ({"versions": {"oretrofit": "0.1.0", "torch": "2.14.0"}}, 'versions.torch: "2.13.0" there, "2.14.0" here'),
    ],
)
def test_what_is_decided_otherwise_is_named_kept_and_not_used(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    run_here(tmp_path, settings(), case())
    with open_run(tmp_path, settings(**changes)) as run:
        assert not any(run.finished().values())
        assert len(run.missing()) == 4
        assert len(run.differences) == 1 and run.differences[0].startswith(named)
        run.append(case())
    for plan in (settings(), settings(**changes)):
        assert finished(tmp_path, plan) == {("ames", 0): ["identity", "oa"]}


def test_a_variant_or_a_file_that_changed_spoils_its_own_records_only(tmp_path: Path) -> None:
    run_here(tmp_path, settings(), case(), case("csv:t.csv#y"))
    plan = settings(files_sha256={"csv:t.csv#y": "e" * 64})
    plan["variants"] = {**plan["variants"], "oa": {**plan["variants"]["oa"], "delta": 1e-2}}
    assert finished(tmp_path, plan) == {("ames", 0): ["identity"]}


def test_records_of_a_host_that_rounds_otherwise_do_not_mix(tmp_path: Path) -> None:
    again = case(variants=("identity", "closed"), host_rmse=math.nextafter(0.1, 1))
    plan = settings(variants={**settings()["variants"], "closed": {"patch": "closed"}})
    run_here(tmp_path, plan, case(), again)
    assert finished(tmp_path, plan) == {("ames", 0): ["identity", "closed"]}


def test_a_retrofit_has_a_file_of_its_own_for_each_way_to_calibrate(tmp_path: Path) -> None:
    other = {**settings()["variants"], "oa": {"patch": "oa", "delta": 1e-2, **CALIBRATION}}
    names = [
        Run(tmp_path, plan, [], []).retrofit_file("oa").name
        for plan in (settings(), settings(seeds=[5], max_train_rows=7), settings(variants=other), settings(gpu="H200"))
    ]
    assert names[0] == names[1]
    assert len(set(names)) == 3 and all(name.startswith("retrofit-oa-") for name in names)


# ---- Folders of earlier versions, and of others --------------------------------------------------


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A run of an earlier version: one plan a folder, records without keys."""
    lines = [{"dataset": "ames", "seed": seed, "variants": [record(seed=seed)]} for seed in (0, 1)]
    (tmp_path / "cases.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "settings.json").write_text(json.dumps(settings()))
    (tmp_path / "retrofit-oa.json").write_text("taus")
    yield tmp_path


def test_a_folder_of_an_earlier_version_is_taken_up(old: Path) -> None:
    # By another plan first, which must not make the records its own.
    assert finished(old, settings(precision="float64")) == {}
    assert finished(old, settings()) == {("ames", 0): ["oa"], ("ames", 1): ["oa"]}
    with open_run(old, settings()) as run:
        assert run.retrofit_file("oa").read_text() == "taus"


def test_committed_runs_are_taken_up(tmp_path: Path) -> None:
    results = Path(__file__).parents[2] / "results"
    for name in ("eval-float32", "eval-auto", "eval-closed"):
        stored = json.loads((results / name / "settings.json").read_text())
        folder = tmp_path / name
        folder.mkdir()
        for file in ("settings.json", "cases.jsonl"):
            (folder / file).write_bytes((results / name / file).read_bytes())
        with open_run(folder, stored) as run:
            assert run.missing() == {}
            assert len(run.cases) == 18


def test_cases_whose_settings_are_gone_are_refused(old: Path) -> None:
    (old / "settings.json").unlink()
    with pytest.raises(ValueError, match=r"no settings\.json that says how they were run; choose another --out"):
        with open_run(old, settings()):
            pass


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe{", b"[]", b'{"editor.fontSize": 12}', b'{"host": {"sha256": "0"}}']
)
def test_settings_that_are_no_runs_are_refused_and_left_alone(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "settings.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"settings\.json is no run's settings.*; choose another --out"):
        with open_run(tmp_path, settings()):
            pass
    assert (tmp_path / "settings.json").read_bytes() == content


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, 1.5) for name in settings()),
        ("seeds", ["0"]),
        ("seeds", [True]),
        ("datasets", [1]),
        ("variants", {"oa": None}),
        ("versions", {"torch": 2}),
        ("files_sha256", {"csv:t.csv#y": None}),
        ("host", {"sha256": "0" * 64}),
        ("host", {"name": "small"}),
    ],
)
def test_settings_with_a_spoilt_part_are_refused_by_its_name(tmp_path: Path, name: str, value: Any) -> None:
    (tmp_path / "settings.json").write_text(json.dumps(settings() | {name: value}))
    message = rf"settings\.json is no run's settings \(without a proper '{name}'\); name another run"
    with pytest.raises(ValueError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize("name", settings())
def test_settings_that_lack_a_part_are_refused_by_its_name(tmp_path: Path, name: str) -> None:
    stored = settings()
    del stored[name]
    (tmp_path / "settings.json").write_text(json.dumps(stored))
    with pytest.raises(ValueError, match=rf"without a proper '{name}'\); name another run"):
        read_run(tmp_path)


def test_somebody_elses_tables_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "table.md").write_text("mine")
    with pytest.raises(ValueError, match=r"holds table\.md but no settings\.json of a run; choose another --out"):
        with open_run(tmp_path, settings()):
            pass
    assert [file.name for file in tmp_path.iterdir()] == ["table.md"]


# ---- What happens to files ----------------------------------------------------------------------


def spoil(folder: Path, line: bytes) -> Path:
    """Put a line between the two of a run."""
    run_here(folder, settings(), case(), case(seed=1))
    file = folder / "cases.jsonl"
    first, second = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(first + line + b"\n" + second)
    return file


def without(name: str) -> bytes:
    made = record()
    del made[name]
    return json.dumps({"dataset": "ames", "seed": 0, "variants": [made]}).encode()


def with_value(name: str, value: str) -> bytes:
    text = json.dumps({"dataset": "ames", "seed": 0, "variants": [{**record(), name: "HERE"}]})
    return text.replace('"HERE"', value).encode()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"dataset": "ames", "seed": 0, "vari', "not JSON"),
        (b'{"dataset": "ames"}', "no case with variants"),
        (b'{"dataset": "ames", "seed": 0, "variants": []}', "no case with variants"),
        (b'{"dataset": "ames", "seed": 0, "variants": [1]}', "a variant without a proper 'dataset'"),
        (b'"ames"', "no case with variants"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (without("host_nll"), "a variant without a proper 'host_nll'"),
        (with_value("host_nll", '"1"'), "a variant without a proper 'host_nll'"),
        (with_value("n_test", "true"), "a variant without a proper 'n_test'"),
        (with_value("host_rmse", "NaN"), "NaN is no figure"),
        (with_value("host_rmse", "1e999"), "'host_rmse' is not finite"),
        (with_value("rmse_delta_pct", "-1e308"), "'rmse_delta_pct' is not finite, or too large to be squared"),
        (with_value("n_train", "1" + "0" * 400), "'n_train' is not finite, or too large to be squared"),
        (with_value("seed", "3"), "a variant of another case"),
    ],
)
def test_a_line_that_is_no_case_is_named(tmp_path: Path, line: bytes, message: str) -> None:
    file = spoil(tmp_path, line)
    before = file.read_bytes()
    with pytest.raises(ValueError) as caught:
        with open_run(tmp_path, settings()):
            pass
    assert str(caught.value).startswith(f"{file}, line 2: ") and message in str(caught.value)
    assert "remove that line" in str(caught.value)
    assert file.read_bytes() == before
    file.write_bytes(before.replace(line + b"\n", b""))
    assert len(finished(tmp_path, settings())) == 2


@pytest.mark.parametrize("torn", [b'{"dataset": "half a li', b'{"dataset": "\xc3', b"\x00" * 100])
def test_a_last_line_that_was_torn_is_left_out(tmp_path: Path, torn: bytes) -> None:
    run_here(tmp_path, settings(), case())
    file = tmp_path / "cases.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + torn)
    run_here(tmp_path, settings(), case(seed=1))
    assert file.read_bytes().startswith(whole)
    assert len(finished(tmp_path, settings())) == 2


def test_a_last_line_that_only_lacks_its_end_is_kept(tmp_path: Path) -> None:
    run_here(tmp_path, settings(), case())
    file = tmp_path / "cases.jsonl"
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    run_here(tmp_path, settings(), case(seed=1))
    assert len(finished(tmp_path, settings())) == 2


def test_figures_that_are_no_json_are_not_written(tmp_path: Path) -> None:
    with open_run(tmp_path, settings()) as run, pytest.raises(ValueError, match="JSON"):
        run.append(case(host_nll=math.nan))
    assert not (tmp_path / "cases.jsonl").exists()


def test_one_writer(tmp_path: Path) -> None:
    with open_run(tmp_path, settings()):
        with pytest.raises(FolderInUseError, match="in use by process"):
            with open_run(tmp_path, settings()):
                pass


def test_keys_do_not_depend_on_the_order_of_settings() -> None:
    plan = settings()
    turned = dict(reversed(copy.deepcopy(plan).items()))
    turned["variants"] = {name: dict(reversed(v.items())) for name, v in reversed(plan["variants"].items())}
    assert record_key(plan, "ames", 0, "oa") == record_key(turned, "ames", 0, "oa")
    assert record_key(plan, "ames", 0, "oa") != record_key(plan, "ames", 1, "oa")
    assert record_key(plan, "ames", 0, "oa") != record_key(plan, "cars", 0, "oa")


def test_names_of_files_that_are_no_utf_8_are_kept() -> None:
    names = ["csv:caf\udce9.csv#y", "csv:plain.csv#y"]
    made = [CaseResult(name, i, [{"dataset": name, "seed": i, "rmse": 0.5 + i}]) for i, name in enumerate(names)]
    made[1].variants[0]["crps"] = 2.0  # which an earlier version did not have
    rows = case_rows(made)
    assert list(rows["dataset"]) == names and list(rows["rmse"]) == [0.5, 1.5]
    assert rows["crps"].isna().tolist() == [True, False] and rows["crps"].dtype == float
    assert list(case_rows([]).columns) == []
