"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import errno
import functools
import inspect
import json
import math
import os
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.calibration.calibration import Calibration
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import datasets, evaluate, frontier, report, runs
from oretrofit.experiments.folders import held
from oretrofit.experiments.pretrain import PretrainSettings, save_host
from oretrofit.retrofit import api, check, tabpfn_api
from oretrofit.retrofit import files as writing
from oretrofit.retrofit.hosts import Host, random_host


@pytest.fixture(scope="module")
def measured(files: Path) -> Calibration:
    return api.calibrate(files / "tiny-v3.safetensors", tables=1)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch, measured: Calibration) -> None:
    """One estimator instead of TabPFN's eight, a measurement made once, and fewer held-out tables."""
    monkeypatch.setattr(evaluate, "Plan", functools.partial(evaluate.Plan, estimator={"n_estimators": 1}))
    monkeypatch.setattr(evaluate, "calibrate", lambda host, **_: measured)
    monkeypatch.setattr(check, "HELD_OUT_TABLES", 2)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, tiny_host: Host) -> Path:
    """A folder with hosts, retrofits and tables, good and bad."""
    folder = tmp_path_factory.mktemp("files")
    save_host(tiny_host.model, folder / "tiny-v3.safetensors")
    other = random_host(seed=2, **dataclasses.asdict(tiny_host.model.config))  # type: ignore[call-overload]
    save_host(other.model, folder / "other-v3.safetensors")
    (folder / "broken-v3.safetensors").write_text("no checkpoint")
    torch.save({"state_dict": {}, "config": {}, "architecture_name": "tabpfn_v2"}, folder / "v2.ckpt")
    api.patch(folder / "tiny-v3.safetensors", "oa", tau=1e-3).save(folder / "oa.json")
    (folder / "no-retrofit.json").write_text("{}")

    rng = np.random.default_rng(0)
    good = pd.DataFrame(rng.normal(size=(36, 3)), columns=["a", "b", "c"])
    good["y"] = good["a"] + 0.1 * rng.normal(size=36)
    good.to_csv(folder / "good.csv", index=False)
    good.assign(y="high").to_csv(folder / "text.csv", index=False)
    good.assign(y=1).to_csv(folder / "constant.csv", index=False)
    good.head(19).to_csv(folder / "short.csv", index=False)
    # Constant on the train rows of seed 0, so that this case fails and the one of seed 1 does not.
    numbered = datasets.Dataset("", pd.DataFrame({"row": range(36)}), np.arange(36.0), "y")
    test_rows = [set(datasets.make_case(numbered, seed, 16, 8).X_test["row"]) for seed in (0, 1)]
    only = min(test_rows[0] - test_rows[1])
    train_rows = set(datasets.make_case(numbered, 0, 16, 8).X_train["row"])
    outside = [row for row in range(36) if row not in train_rows and row != only]
    y = np.zeros(36)
    y[[only, *outside]] = rng.normal(size=1 + len(outside))
    good.assign(y=y).to_csv(folder / "half.csv", index=False)
    return folder


@pytest.fixture(autouse=True)
def in_files(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(files)


def oretrofit(command: str, *more: str):
    return CliRunner(env={"COLUMNS": "80"}).invoke(cli.app, [*command.split(), *more])


EVAL = "eval --host tiny-v3.safetensors --tables 1 --max-rows 16 --device cpu"
GOOD = f"{EVAL} --suite csv:good.csv#y"


def test_help_imports_no_torch() -> None:
    code = "import oretrofit.cli, sys; print([m for m in ('torch', 'tabpfn', 'pandas', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        *(
            "",
            "patch",
            "hosts",
            "datasets",
            "doctor",
            "eval",
            "report",
            "predict",
            "pretrain",
            "frontier",
            "ablate",
            "audit",
            "contracts",
        ),
        *("bench", "bench overhead", "bench host", "bench ragged", "bench ragged-equality"),
    ],
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = oretrofit(command, "--help")
    assert result.exit_code == 0
    if command not in ("", "bench"):
        assert f"oretrofit {command}" in result.stdout.split("Example:")[1]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("patch --variant ", list(VARIANTS)),
        ("eval --variant i", ["identity"]),
        ("bench overhead --host r", ["random-v3"]),
        ("eval --precision float", ["float32", "float64"]),
        ("eval --suite co", ["concrete"]),
        ("eval --suite csv:a.csv#y,openml-", ["csv:a.csv#y,openml-suite:", "csv:a.csv#y,openml-task:"]),
        ("fr", ["frontier"]),
    ],
)
def test_a_shell_is_offered_names(words: str, offered: list[str]) -> None:
    """By the protocol of typer's script for bash."""
    typed = f"oretrofit {words}"
    asked = {"_ORETROFIT_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(typed.split(" ")) - 1)}
    code = "import sys; from oretrofit.cli import app; sys.argv[0] = 'oretrofit'; app(prog_name='oretrofit')"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **asked})
    assert found.stdout.split() == offered, found.stderr


def test_hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabpfn_api, "prior_labs_path", lambda version: tmp_path / "the-v3.ckpt")
    file = tmp_path / "hosts.json"

    def hosts(token: bool) -> dict[str, dict]:
        monkeypatch.setattr(tabpfn_api, "has_token", lambda: token)
        result = oretrofit("hosts --json", str(file))
        assert result.exit_code == 0, result.output
        found = {host["host"]: host for host in json.loads(file.read_text())}
        for host in found.values():
            here = "yes" if host["available"] else "no"
            assert any(f"| {host['host']}" in line and f"| {here} " in line for line in result.stdout.splitlines())
        assert list(found) == ["small", "random-v3", "v3"]
        assert found["small"]["available"] and found["random-v3"]["available"]
        return found

    absent = hosts(token=False)["v3"]
    assert not absent["available"] and "TABPFN_TOKEN" in absent["where"] and str(tmp_path) in absent["where"]
    with_token = hosts(token=True)["v3"]
    assert with_token["available"] and "downloaded there when first used" in with_token["where"]
    (tmp_path / "the-v3.ckpt").touch()
    there = hosts(token=False)["v3"]
    assert there["available"] and there["where"] == f"the-v3.ckpt in TabPFN's cache folder {tmp_path}"


def test_a_token_of_tabpfn_is_found_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = "a-secret-token"
    monkeypatch.setenv("TABPFN_TOKEN", secret)
    monkeypatch.setenv("TABPFN_MODEL_CACHE_DIR", str(tmp_path))
    assert tabpfn_api.has_token()
    for command in ("hosts", "doctor"):
        result = oretrofit(f"{command} --json", str(tmp_path / "t.json"))
        assert secret not in result.output + (tmp_path / "t.json").read_text()
    monkeypatch.setenv("TABPFN_TOKEN", "")
    for name in ("_TOKEN_FILE", "_CLIENT_TOKEN_FILE"):  # of the one who runs the tests
        monkeypatch.setattr(f"tabpfn.browser_auth.{name}", tmp_path / "nothing")
    assert not tabpfn_api.has_token()


def test_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "regression_tasks", lambda name, number: ["openml-task:1"])  # needs the network
    result = oretrofit("datasets --json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    listed = json.loads((tmp_path / "t.json").read_text())
    assert [row["dataset"] for row in listed["bundled"]] == datasets.resolve_suite("mini")
    assert [row["dataset"] for row in listed["rdata"]] == datasets.resolve_suite("rdata")
    for row in [*listed["bundled"], *listed["rdata"][:3]]:
        found = datasets.load_dataset(row["dataset"])
        assert (row["rows"], row["columns"], row["target"]) == (*found.X.shape, found.target)
        assert row["source"] and row["licence"] and row["dataset"] in result.stdout
    assert {row["dataset"]: row["licence"] for row in listed["bundled"]}["concrete"].startswith("CC BY 4.0 at UCI;")
    for row in [*listed["suites"], *listed["forms"]]:
        assert f"| {row['name']} " in result.stdout
        # What is listed is what is read.
        example = {"ID": "1", "FILE": "good.csv", "target": "y", "PACKAGE/ITEM": "AER/NMES1988"}
        spec = functools.reduce(lambda text, word: text.replace(word, example[word]), example, row["name"])
        assert datasets.resolve_suite(spec)


def test_doctor(tmp_path: Path) -> None:
    result = oretrofit("doctor --json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["problems"] == []
    assert found["versions"]["torch"] == version("torch") and "pytest" not in found["versions"]
    assert list(found["hosts"]) == ["small", "random-v3", "v3"]
    assert found["self-test"]["cpu"].startswith("passed in ")
    home = str(Path.home())
    assert home == "/" or home not in result.output


@pytest.mark.parametrize("sick", ["drift", "self-test", "torch"])
def test_doctor_says_what_is_broken_and_goes_on(sick: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object):
        raise RuntimeError(f"no such kernel in {Path.home()}\nand more")

    if sick == "drift":
        monkeypatch.setattr(tabpfn_api, "drift", lambda: {"tabpfn.base:a": ("1", "2"), "tabpfn.base:b": ("1", "2")})
        said = "internals: ValueError: of TabPFN 9.2.0 tabpfn.base:a, tabpfn.base:b differ from what the patches"
    elif sick == "self-test":  # one that a host with open doors would give
        predict = api.Retrofit.predict_ragged
        monkeypatch.setattr(api.Retrofit, "predict_ragged", lambda *a, **k: [m + 0.1 for m in predict(*a, **k)])
        said = "self-test: ValueError: on cpu two tables padded into one pass are 0.1 target standard deviations"
    else:
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", refuse)
        said = "torch: RuntimeError: no such kernel in ~\n"
    result = oretrofit("doctor --json", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert f"Error: {said}" in result.stderr and "Traceback" not in result.output
    found = json.loads((tmp_path / "t.json").read_text())
    assert len(found["problems"]) == (2 if sick == "drift" else 1)  # nothing can be patched for the self-test then
    assert found["threads"] and found["cache folders"]


def test_version() -> None:
    result = oretrofit("--version")
    assert (result.exit_code, result.stdout) == (0, "oretrofit 0.1.0\n")


def test_defaults_are_those_of_the_functions() -> None:
    def defaults(function) -> dict:
        return {name: p.default for name, p in inspect.signature(function).parameters.items()}

    for name in ("variant", "delta", "quantile", "tau", "tables", "seed"):
        assert defaults(cli.patch)[name] == defaults(api.patch)[name], name
    for name in ("seeds", "delta", "quantile", "tables", "max_rows", "precision"):
        assert defaults(cli.evaluate)[name] == defaults(evaluate.Plan)[name], name
    for name in ("steps", "seed"):
        assert defaults(cli.pretrain)[name] == defaults(PretrainSettings)[name], name


def test_patch(tmp_path: Path, quick: None) -> None:
    out, table = tmp_path / "full.json", tmp_path / "sites.json"
    result = oretrofit("patch --host tiny-v3.safetensors --tables 1", "--out", str(out), "--json", str(table))
    assert result.exit_code == 0, result.output
    assert "ICLTransformerBlock -> OICLTransformerBlock" in result.stdout
    assert "emb.0.ca1.ln_kv " in result.stdout  # whole, at 80 columns
    assert "RMSE change: mean" in result.stdout
    assert f"Saved to {out}." in result.stdout
    saved = api.load(out)
    rows = json.loads(table.read_text())
    assert [row["tau"] for row in rows] == [site.tau for site in saved.sites]
    assert {"name", "carrier", "host_class", "o_class", "presence_min", "sq_norm_q50"} <= rows[0].keys()


def test_patch_writes_nothing_unasked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path, quick: None
) -> None:
    monkeypatch.chdir(tmp_path)
    result = oretrofit("patch --variant oa --tau 1e-3", "--host", str(files / "tiny-v3.safetensors"))
    assert result.exit_code == 0, result.output
    assert "Nothing was saved" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_what_could_not_be_written_is_put_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path, quick: None
) -> None:
    def full(self, path) -> None:
        if Path(path).parent == tmp_path / "full":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        save(self, path)

    save = api.Retrofit.save
    monkeypatch.setattr(api.Retrofit, "save", full)
    (tmp_path / "full").mkdir()
    monkeypatch.chdir(tmp_path)
    out, table = tmp_path / "full" / "oa.json", tmp_path / "t.json"
    command = f"patch --variant oa --tau 1e-3 --host {files / 'tiny-v3.safetensors'} --out {out} --json {table}"
    result = oretrofit(command)
    assert result.exit_code == 1
    assert "RMSE change: mean" in result.stdout  # what was computed is shown,
    assert json.loads(table.read_text())  # the other file is written,
    assert result.stderr.startswith(f"Error: {out}: No space left on device; what was to be written is in ")
    assert "Traceback" not in result.output
    kept = Path(result.stderr.split("is in ")[1].strip())
    assert kept.parent == tmp_path and api.load(kept).variant == "oa"  # and what could not be is kept
    assert sorted(file.name for file in tmp_path.rglob("*")) == sorted(["full", kept.name, "t.json"])


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_table_that_cannot_be_written_after_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    def measure_overhead(*_, **__):
        return pd.DataFrame([{"variant": "oa", "ratio": 1.25, "seconds": math.nan}])

    fake_module(monkeypatch, "overhead", measure_overhead)
    monkeypatch.chdir(tmp_path)
    result = oretrofit(f"bench overhead --host {files / 'tiny-v3.safetensors'} --json /dev/full")
    assert result.exit_code == 1
    assert "1.25" in result.stdout
    assert result.stderr.startswith("Error: /dev/full: No space left on device; what was to be written is in ")
    (kept,) = tmp_path.iterdir()
    assert json.loads(kept.read_text()) == [{"variant": "oa", "ratio": 1.25, "seconds": None}]


def test_eval_and_again(tmp_path: Path, quick: None) -> None:
    command = f"{EVAL} --variant oa --seeds 2 --suite csv:good.csv#y,csv:half.csv#y --out {tmp_path / 'run'}"
    result = oretrofit(command, "--json", str(tmp_path / "summary.json"))
    # One case fails: it is named, the others are kept.
    assert result.exit_code == 1, result.output
    assert "half.csv#y seed 0 failed: DatasetError" in result.stdout
    assert "Error: 1 of 4 cases failed and would fail again: mend what is named above" in result.stderr
    assert "good.csv#y seed 1: host RMSE" in result.stdout
    assert "paper" not in result.stdout
    found = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"summary.json", "table.md", "deltas.png", "cases.jsonl", "settings.json", "cases.csv"} <= found
    (noted,) = (json.loads(line) for line in (tmp_path / "run" / "provenance.jsonl").read_text().splitlines())
    assert noted["command"] and noted["revision"]
    assert f"To be opened in a browser: {tmp_path / 'run' / 'report.html'}" in result.stdout.splitlines()
    page = (tmp_path / "run" / "report.html").read_text()
    assert "1 of 4 cases have no result, and no figure counts them: half.csv#y seed 0 (DatasetError" in page
    assert oretrofit(f"report {tmp_path / 'run'} --out {tmp_path / 'same.html'}").exit_code == 0
    assert (tmp_path / "same.html").read_text() == page
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["variants"]) == ["identity", "oa"]
    assert [variant["cases"] for variant in summary["variants"].values()] == [3, 3]
    assert [(f["dataset"], f["seed"]) for f in summary["failed"]] == [("csv:half.csv#y", 0)]

    again = oretrofit(command)
    assert again.exit_code == 1
    assert "3 of 4 cases are in" in again.stdout
    assert "seed 1: host RMSE" not in again.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary

    # Other plans in the same folder: what is decided alike is used again, the rest is left alone.
    closed = oretrofit(f"{EVAL} --variant closed --suite csv:good.csv#y --seeds 1 --out {tmp_path / 'run'}")
    assert closed.exit_code == 0, closed.output
    assert "1 of 1 are there for some of the variants; the others are added." in closed.stdout
    assert list(json.loads((tmp_path / "run" / "summary.json").read_text())["variants"]) == ["identity", "closed"]
    other = oretrofit(f"{EVAL} --variant oa --suite csv:good.csv#y --seeds 1 --out {tmp_path / 'run'} --delta 0.01")
    assert other.exit_code == 0, other.output
    assert "1 of 1 are there for some" in other.stdout
    assert oretrofit(command).exit_code == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary


def test_eval_with_another_margin_runs_nothing_again(tmp_path: Path, quick: None) -> None:
    suite = "csv:good.csv#y,csv:good.csv#a"
    command = f"{EVAL} --variant oa --seeds 2 --suite {suite} --out {tmp_path / 'run'}"
    wide = oretrofit(f"{command} --margin 90")
    assert wide.exit_code == 0, wide.output
    said = " ".join(wide.stdout.split())
    assert "equivalent, ±90 %" in said and "oa: equivalent on these 2 tables and this host within 90 % of RMSE" in said
    assert "not of other hosts or other data, and not that nothing changed" in said
    cases = (tmp_path / "run" / "cases.jsonl").read_bytes()
    narrow = oretrofit(f"{command} --margin 0.0000001")
    said = " ".join(narrow.stdout.split())
    assert "4 of 4 cases are in" in said and "oa: not shown to be equivalent in RMSE" in said
    assert (tmp_path / "run" / "cases.jsonl").read_bytes() == cases
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["margin"] == 1e-7
    found = {(row["variant"], row["measure"]): row["equivalent"] for row in summary["statistics"]}
    assert found["oa", "rmse"] is False and len(found) == 10
    assert (tmp_path / "run" / "power.png").read_bytes()[:4] == b"\x89PNG"
    table = (tmp_path / "run" / "table.md").read_text()
    assert "## What the tests say" in table and "What could have been missed" in table


def test_eval_in_a_terminal_of_80_columns(tmp_path: Path, quick: None) -> None:
    """And what is said of a table is said once, though each case reads it."""
    table = pd.read_csv("good.csv")
    table.to_csv(tmp_path / "semicolons.csv", sep=";", index=False)
    command = f"{EVAL} --seeds 2 --suite csv:{tmp_path / 'semicolons.csv'}#y --out {tmp_path / 'run'}"
    terminal = {"COLUMNS": "80", "FORCE_COLOR": "1", "TERM": "dumb"}
    result = CliRunner(env=terminal).invoke(cli.app, [*command.split(), *(f"--variant={name}" for name in VARIANTS)])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("semicolons between cells") == 1, result.stderr
    lines = result.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if not line.startswith(("In ", str(tmp_path))))
    assert sum("24 + 12 x 3" in line or "16 + 8 x 3" in line for line in lines) == 2
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    for variant in summary["variants"].values():
        low, high = map(report.percent, variant["ci95_pct"])
        assert any(f"{low} to {high}" in line for line in lines)


def test_eval_says_what_of_a_folder_it_does_not_use(tmp_path: Path, quick: None) -> None:
    command = f"{EVAL} --variant identity --seeds 1 --suite csv:good.csv#y --out {tmp_path / 'run'}"
    assert oretrofit(command).exit_code == 0
    other = oretrofit(f"{command} --precision float64")
    assert other.exit_code == 0
    said = " ".join(other.stdout.split())
    assert 'ran otherwise (precision: "float32" there, "float64" here; ' in said and "it is kept, not used." in said


def test_eval_without_room_for_its_tables_says_what_is_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    for module in (report, writing):  # where tables are written, and JSON is
        monkeypatch.setattr(module, "write_text", full)
    command = f"{EVAL} --variant identity --seeds 1 --suite csv:good.csv#y --out {tmp_path / 'run'}"
    result = oretrofit(command, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 1
    assert "mean change, %" in result.stdout
    safe = f"every finished case is safe in {tmp_path / 'run' / 'cases.jsonl'}; the same command again writes the rest"
    errors = [
        f"Error: {tmp_path / name}: No space left on device; {safe}"
        for name in ("run/summary.json", "run/table.md", "run/cases.csv", "t.json")
    ]
    assert result.stderr.splitlines() == errors
    assert (tmp_path / "run" / "deltas.png").exists() and (tmp_path / "run" / "report.html").exists()


def test_eval_without_room_for_a_case_keeps_those_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick: None
) -> None:
    def full(file: Path, line: str) -> None:
        if json.loads(line)["seed"] == 1:
            raise OSError(errno.ENOSPC, "No space left on device", str(file))
        append(file, line)

    append = runs.append_line
    monkeypatch.setattr(runs, "append_line", full)
    command = f"{EVAL} --variant identity --seeds 2 --suite csv:good.csv#y --out {tmp_path / 'run'}"
    result = oretrofit(command)
    assert result.exit_code == 2
    said = (
        f"No space left on device; the cases before it are safe in {tmp_path / 'run'}; the same command again goes on"
    )
    assert result.stderr.startswith(f"Error: {tmp_path / 'run' / 'cases.jsonl'}: {said}")
    monkeypatch.setattr(runs, "append_line", append)
    again = oretrofit(command)
    assert again.exit_code == 0 and "1 of 2 cases are in" in again.stdout


def test_eval_of_a_retrofit_takes_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[evaluate.Plan] = []

    def see(plan: evaluate.Plan, *_, **__):
        seen.append(plan)
        return [], []

    monkeypatch.setattr(evaluate, "evaluate", see)
    result = oretrofit("eval --retrofit oa.json --suite csv:good.csv#y", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert Path(str(seen[0].host.name)).name == "tiny-v3.safetensors"
    assert list(seen[0].settings()["variants"]) == ["identity", "oa"]


def test_a_second_eval_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    with held(tmp_path / "run"):
        result = oretrofit(f"{EVAL} --suite csv:good.csv#y", "--out", str(tmp_path / "run"))
    assert result.exit_code == 2
    assert f"is in use by process {os.getpid()} on " in result.stderr and "--out" in result.stderr


@pytest.mark.skipif(sys.platform == "win32", reason="signals")
@pytest.mark.parametrize(("how", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143)])
def test_eval_that_is_ended_goes_on(tmp_path: Path, how: signal.Signals, code: int) -> None:
    command = f"{GOOD} --variant identity --seeds 2"
    process = subprocess.Popen(
        [sys.executable, "-c", "from oretrofit.cli import app; app()", *command.split(), "--out", tmp_path / "run"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdout is not None and process.stderr is not None
    assert "calibrated on 1 synthetic table; then each model predicts a small table" in process.stdout.readline()
    assert "seed 0: host RMSE" in process.stdout.readline()
    process.send_signal(how)
    errors = process.stderr.read()
    assert process.wait() == code
    assert how is signal.SIGKILL or "the same command again resumes there" in errors
    before = (tmp_path / "run" / "cases.jsonl").read_bytes()

    result = oretrofit(command, "--out", str(tmp_path / "run"))
    assert result.exit_code == 0, result.output
    assert f"{len(before.splitlines())} of 2 cases are in" in result.stdout
    after = (tmp_path / "run" / "cases.jsonl").read_bytes()
    assert after.startswith(before)
    assert [json.loads(line)["seed"] for line in after.splitlines()] == [0, 1]


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            "patch --host tiny-v3.safetensors --variant o",
            f"--variant: unknown variant 'o'; there are: {', '.join(VARIANTS)}",
        ),
        ("patch --host nowhere", "--host: no host 'nowhere'"),
        ("patch --host good.csv", "--host 'good.csv' is no checkpoint"),
        ("patch --host .", "--host '.' is a folder"),
        ("patch --host broken-v3.safetensors", "--host 'broken-v3.safetensors' is no checkpoint"),
        ("patch --host v2.ckpt", "is a tabpfn_v2 model"),
        ("patch --host tiny-v3.safetensors --device tpu", "--device: unknown device 'tpu'; there are: auto, cpu, cuda"),
        ("patch --host tiny-v3.safetensors --delta 2", "--delta is 1 minus a presence and must lie between 0 and 1"),
        ("patch --host tiny-v3.safetensors --delta nan", "ends excluded, not nan"),
        ("patch --host tiny-v3.safetensors --quantile 2", "--quantile must lie between 0 and 1, not 2.0"),
        ("patch --host tiny-v3.safetensors --quantile nan", "--quantile must lie between 0 and 1, not nan"),
        ("patch --host tiny-v3.safetensors --tau 0", "--tau must be a positive number within float32, not 0.0"),
        ("patch --host tiny-v3.safetensors --tau -1", "--tau must be a positive number within float32, not -1.0"),
        ("patch --host tiny-v3.safetensors --tau 1e400", "--tau must be a positive number within float32, not inf"),
        ("patch --host tiny-v3.safetensors --tables 0", "--tables must be between 1 and"),
        ("patch --host tiny-v3.safetensors --seed -5", "--seed must lie between 0 and 4294967295, not -5"),
        ("patch --host tiny-v3.safetensors --out missing/full.json", "--out missing/full.json: No such file"),
        ("patch --host tiny-v3.safetensors --json .", "--json .: Is a directory"),
        ("patch --host tiny-v3.safetensors --out a.json --json ./a.json", "--json a.json would overwrite what another"),
        ("patch --host tiny-v3.safetensors --out tiny-v3.safetensors", "would overwrite what is read"),
        (f"{EVAL} --suite maxi", "--suite: unknown dataset 'maxi'"),
        (f"{EVAL} --suite csv:good.csv#z", "no column 'z'"),
        (f"{EVAL} --suite csv:gone.csv#y", "no file 'gone.csv'"),
        (f"{EVAL} --suite csv:text.csv#y", "is not numeric"),
        (f"{EVAL} --suite csv:constant.csv#y", "is constant"),
        (f"{EVAL} --suite csv:short.csv#y", "19 rows are too few"),
        (f"{GOOD} --seeds 0", "--seeds must lie between 1 and 10000, not 0"),
        (f"{GOOD} --seeds 99999999999999999999", "--seeds must lie between 1 and 10000, not 99999999999999999999"),
        (f"{GOOD} --workers 0", "--workers must be between 1 and 1024, not 0"),
        (f"{GOOD} --workers -2", "--workers must be between 1 and 1024, not -2"),
        (f"{GOOD} --workers 99999999999999999999", "--workers must be between 1 and 1024, not 9999999999"),
        (f"{GOOD} --device cuda --workers 2", "--workers 2: a GPU runs one case at a time"),
        (f"{GOOD} --max-rows 1", "--max-rows must be at least 2, not 1"),
        (f"{GOOD} --delta 2", "--delta is 1 minus a presence"),
        (f"{GOOD} --variant o", "--variant: unknown variant 'o'; there are: identity, oa, full-o"),
        (f"{GOOD} --precision half", "--precision: unknown precision 'half'"),
        (f"{GOOD} --precision autocast", "no autocast on this device"),
        (f"{GOOD} --retrofit gone.json", "--retrofit gone.json: there is no such file"),
        (f"{GOOD} --retrofit no-retrofit.json", "--retrofit no-retrofit.json is not a retrofit"),
        (f"{GOOD} --retrofit good.csv", "--retrofit good.csv is not a retrofit"),
        (f"{GOOD} --retrofit oa.json --variant oa", "is oa too"),
        (f"{GOOD} --out good.csv", "good.csv is a file; give a folder"),
        (f"{GOOD} --out good.csv/run", "good.csv is a file; give a folder"),
        (f"{GOOD} --json .", "--json .: Is a directory"),
        (f"{GOOD} --json good.csv", "--json good.csv would overwrite what is read"),
        (f"{GOOD} --out run --json run/t.json", "--json run/t.json: No such file"),
        (f"{GOOD} --out . --json t.json", "is in the run's own folder"),
        ("eval --retrofit oa.json --host other-v3.safetensors --suite csv:good.csv#y", "made for other weights"),
        ("bench overhead --rounds 0", "--rounds must be between 1 and"),
        ("bench overhead --rows 99999999999999999999", "--rows must be between 1 and"),
        ("bench overhead --host nowhere", "--host: no host 'nowhere'"),
        ("bench host --seeds 0", "--seeds must lie between 1 and"),
        ("bench host --suite maxi", "--suite: unknown dataset"),
        ("frontier --variant o", "--variant: unknown variant"),
        ("frontier --tables 0", "--tables must be between 1 and"),
        ("frontier --suite maxi", "--suite: unknown dataset 'maxi'"),
        ("frontier --suite csv:text.csv#y --host tiny-v3.safetensors", "is not numeric"),
        ("frontier --seeds 0", "--seeds must lie between 1 and"),
        ("frontier --plot curve.svg", "--plot writes a .png file, not 'curve.svg'"),
        ("frontier --plot missing/curve.png", "--plot missing/curve.png: No such file"),
        ("pretrain --steps 0", "--steps must be between 1 and"),
        ("pretrain --seed -5", "--seed must lie between 0 and 4294967295, not -5"),
        ("pretrain --threads 0", "--threads must lie between 1 and 1024, not 0"),
        ("pretrain --out good.csv", "good.csv is a file; give a folder"),
    ],
)
def test_bad_input_is_one_message(command: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tabpfn_api, "infer_autocast_inference_mode", lambda devices, enable: False)
    before = set(Path().rglob("*"))
    result = oretrofit(command)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert result.stderr.count("Error:") == 1 and "Traceback" not in result.output
    assert set(Path().rglob("*")) == before


TORCHLESS = """
import sys
from typer.testing import CliRunner
from oretrofit.cli import app
for command in sys.argv[1:]:
    result = CliRunner().invoke(app, command.split())
    print(result.exit_code, result.stderr.startswith("Error: "), "torch" in sys.modules, command)
"""


def test_options_are_checked_before_torch_is_imported() -> None:
    commands = [
        *("patch --variant o", "patch --host nowhere", "patch --host good.csv", "patch --tau -1", "patch --seed -5"),
        *("patch --device tpu", "patch --delta 1", "patch --quantile -1", "patch --out missing/x", "patch --tables 0"),
        *("eval --variant o", "eval --suite maxi", "eval --suite csv:gone.csv#y", "eval --seeds 99999999999999999999"),
        *("eval --precision half", "eval --retrofit good.csv", "eval --max-rows 1", "eval --out good.csv"),
        *("eval --workers 0", "eval --workers 2 --device cuda", "eval --margin 0", "eval --margin nan"),
        *("report gone --out x.html", "report good.csv --out x.html", "report . --out missing/x.html"),
        *("frontier --variant o", "frontier --suite maxi", "frontier --plot x.svg", "frontier --json missing/x"),
        *("bench host --suite maxi", "bench host --host nowhere", "bench overhead --rows 0", "pretrain --steps 0"),
    ]
    found = subprocess.run([sys.executable, "-c", TORCHLESS, *commands], capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == [f"2 True False {command}" for command in commands]


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("patch", "eval", "bench overhead", "bench host", "frontier"):
        result = oretrofit(f"{command} --device cuda")
        assert result.exit_code == 2
        assert "no CUDA device" in result.stderr and "--device cpu" in result.stderr


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, function, called: str = "") -> None:
    module = ModuleType(name)
    setattr(module, called or function.__name__, function)
    monkeypatch.setitem(sys.modules, f"oretrofit.experiments.{name}", module)


def test_bench_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_overhead(host, *, rows, columns, rounds, device, precision, on_round):
        assert (rows, columns, rounds, device, precision) == (50, 4, 2, "cpu", "auto")
        on_round("round 1 of 2")
        return pd.DataFrame(
            [{"variant": "oa", "ratio": 1.25, "host_seconds": 2.0, "variant_seconds": 2.5, "rounds": 2}]
        )

    fake_module(monkeypatch, "overhead", measure_overhead)
    command = "bench overhead --host tiny-v3.safetensors --rounds 2 --rows 50 --columns 4 --device cpu --precision auto"
    result = oretrofit(command, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert "1.25" in result.stdout
    assert json.loads((tmp_path / "t.json").read_text())[0]["ratio"] == 1.25


def test_bench_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare_baselines(host, datasets, seeds, *, device, on_case):
        assert (datasets, seeds) == (["concrete", "cars"], 2)
        on_case("concrete seed 0")
        return pd.DataFrame([{"dataset": d, "ridge": 0.3, "random_forest": 0.5, "host": 0.3} for d in datasets])

    fake_module(monkeypatch, "baselines", compare_baselines)
    command = "bench host --host tiny-v3.safetensors --suite concrete,cars --seeds 2"
    result = oretrofit(command, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert "concrete seed 0" in result.stdout
    assert "| cars     |   0.3 |           0.5 |  0.3 |" in result.stdout.splitlines()
    assert [row["dataset"] for row in json.loads((tmp_path / "t.json").read_text())] == ["concrete", "cars"]


@pytest.mark.parametrize(
    ("options", "variants", "place"),
    [
        ("--variant oa --variant oa --tables 2", ["oa"], "2 held-out synthetic tables"),
        ("--suite csv:good.csv#y --seeds 2", list(VARIANTS), "2 cases of csv:good.csv#y"),
    ],
)
def test_frontier(
    options: str,
    variants: list[str],
    place: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    measured: Calibration,
) -> None:
    def swept(host, calibration, cases, names, **given) -> pd.DataFrame:
        assert calibration is measured and len(cases) == 2
        return frontier_sweep(host, calibration, cases[:1], names, deltas=(1e-6,), n_estimators=1, **given)

    frontier_sweep = frontier.sweep_delta
    monkeypatch.setattr(frontier, "sweep_delta", swept)
    monkeypatch.setattr(api, "calibrate", lambda host, **_: measured)
    files = ("--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png"))
    result = oretrofit(f"frontier --host tiny-v3.safetensors --device cpu {options}", *files)
    assert result.exit_code == 0, result.output
    for variant in variants:
        assert f"{variant} on {place}, by delta" in result.stdout
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [row["variant"] for row in rows] == variants
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    fake_module(monkeypatch, "overhead", interrupted, "measure_overhead")
    before = signal.getsignal(signal.SIGTERM)
    result = oretrofit("bench overhead --host tiny-v3.safetensors")
    assert result.exit_code == 130
    assert result.stderr.strip() == "Interrupted."
    fake_module(monkeypatch, "overhead", lambda *_, **__: os.kill(os.getpid(), signal.SIGTERM), "measure_overhead")
    result = oretrofit("bench overhead --host tiny-v3.safetensors")
    assert result.exit_code == 143
    assert result.stderr.strip() == "Ended by SIGTERM."
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("command", ["eval --variant oa --seeds 1 --out {}", "bench host --seeds 1"])
def test_no_advice_that_a_command_cannot_follow(command: str, tmp_path: Path, quick: None) -> None:
    """TabPFN's own message of more than its 500 columns names a parameter of its estimators."""
    wide = pd.DataFrame(np.random.default_rng(0).normal(size=(30, 502)), columns=[*map(str, range(501)), "y"])
    wide.to_csv(tmp_path / "wide.csv", index=False)
    result = oretrofit(
        f"{command.format(tmp_path / 'run')} --host tiny-v3.safetensors --suite csv:{tmp_path / 'wide.csv'}#y"
    )
    assert result.exit_code in (1, 2)
    assert "Number of features `501`" in result.output
    assert "ignore_pretraining_limits" not in result.output


def test_not_enough_memory_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_overhead(*_, **__):
        raise RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: 8 PiB")

    fake_module(monkeypatch, "overhead", measure_overhead)
    result = oretrofit("bench overhead --host tiny-v3.safetensors")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: there is not enough memory for this: ")


def test_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(settings, folder, device):
        assert (settings.steps, settings.seed, folder, torch.get_num_threads()) == (50, 3, tmp_path / "host", 1)
        assert device == "cpu"
        yield 25, 1.5
        yield 50, 1.25

    monkeypatch.setattr("oretrofit.experiments.pretrain.pretrain", pretrain)
    result = oretrofit("pretrain --steps 50 --seed 3 --threads 1 --device cpu", "--out", str(tmp_path / "host"))
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "host") in "".join(result.stdout.split("\n"))
