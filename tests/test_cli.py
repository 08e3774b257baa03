"""The command line: what it prints, writes and refuses."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.calibration import carriers, settings
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import datasets, evaluate, frontier
from oretrofit.experiments.pretrain import save_host
from oretrofit.retrofit import api
from oretrofit.retrofit.hosts import Host, random_host


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """One estimator instead of TabPFN's eight, and fewer held-out tables."""
    for module in (evaluate, carriers, frontier):
        monkeypatch.setattr(module, "TabPFNRegressor", functools.partial(TabPFNRegressor, n_estimators=1))
    monkeypatch.setattr(cli, "_HELD_OUT", 2)


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


def test_help_imports_no_torch() -> None:
    code = "import oretrofit.cli, sys; print([m for m in ('torch', 'tabpfn', 'pandas', 'numpy') if m in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "command",
    [
        *("", "patch", "eval", "predict", "pretrain", "frontier", "ablate", "audit", "contracts"),
        *("bench", "bench overhead", "bench host", "bench ragged", "bench ragged-equality"),
    ],
)
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = oretrofit(command, "--help")
    assert result.exit_code == 0
    if command not in ("", "bench"):
        assert f"oretrofit {command}" in result.stdout.split("Example:")[1]


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
    assert settings.SEED + 10_000 == frontier.HELD_OUT_SEED


def test_patch(tmp_path: Path) -> None:
    out, table = tmp_path / "full.json", tmp_path / "sites.json"
    result = oretrofit("patch --host tiny-v3.safetensors --tables 1", "--out", str(out), "--json", str(table))
    assert result.exit_code == 0, result.output
    assert "ICLTransformerBlock -> OICLTransformerBlock" in result.stdout
    assert "emb.0.ca1.ln_kv " in result.stdout  # whole, at 80 columns
    assert "RMSE change mean" in result.stdout
    assert f"Saved to {out}." in result.stdout
    saved = api.load(out)
    rows = json.loads(table.read_text())
    assert [row["tau"] for row in rows] == [site.tau for site in saved.sites]
    assert {"name", "carrier", "host_class", "o_class", "presence_min", "sq_norm_q50"} <= rows[0].keys()


def test_patch_writes_nothing_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Path) -> None:
    monkeypatch.chdir(tmp_path)
    result = oretrofit("patch --variant oa --tau 1e-3", "--host", str(files / "tiny-v3.safetensors"))
    assert result.exit_code == 0, result.output
    assert "Nothing was saved" in result.stdout
    assert list(tmp_path.iterdir()) == []


def test_eval_and_again(tmp_path: Path) -> None:
    command = f"{EVAL} --variant oa --seeds 2 --suite csv:good.csv#y,csv:half.csv#y --out {tmp_path / 'run'}"
    result = oretrofit(command, "--json", str(tmp_path / "summary.json"))
    # One case fails: it is named, the others are kept.
    assert result.exit_code == 1, result.output
    assert "half.csv#y seed 0 failed: DatasetError" in result.stdout
    assert "Error: 1 of 4 cases failed" in result.stderr
    assert "good.csv#y seed 1: host RMSE" in result.stdout
    assert "another host on other data" in " ".join(result.stdout.split())
    found = {file.name for file in (tmp_path / "run").iterdir()}
    assert {"summary.json", "table.md", "deltas.png", "cases.jsonl", "settings.json"} <= found
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    assert list(summary["variants"]) == ["identity", "oa"]
    assert [variant["cases"] for variant in summary["variants"].values()] == [3, 3]
    assert abs(summary["variants"]["identity"]["mean_rmse_delta_pct"]) < 0.01
    assert [(f["dataset"], f["seed"]) for f in summary["failed"]] == [("csv:half.csv#y", 0)]

    again = oretrofit(command)
    assert again.exit_code == 1
    assert "3 of 4 cases are in" in again.stdout
    assert "seed 1: host RMSE" not in again.stdout
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary

    other = oretrofit(f"{command} --precision float64")
    assert other.exit_code == 2
    assert 'precision: "float32" there, "float64" here' in other.stderr
    assert "--out" in other.stderr


def test_eval_of_a_retrofit_takes_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[evaluate.Plan] = []

    def calibrate(plan, *_, **__):
        seen.append(plan)
        return {}

    monkeypatch.setattr(evaluate, "calibrate", calibrate)
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: ([], []))
    result = oretrofit("eval --retrofit oa.json --suite csv:good.csv#y", "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert Path(str(seen[0].host.name)).name == "tiny-v3.safetensors"
    assert list(seen[0].settings()["variants"]) == ["identity", "oa"]


def test_eval_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluate, "evaluate", interrupted)
    monkeypatch.setattr(evaluate, "calibrate", lambda *_, **__: {})
    result = oretrofit(f"{EVAL} --suite csv:good.csv#y", "--out", str(tmp_path / "run"))
    assert result.exit_code == 130
    assert "the same command again resumes" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("patch --host tiny-v3.safetensors --variant o", f"unknown variant 'o'; there are: {', '.join(VARIANTS)}"),
        ("patch --host nowhere", "no host 'nowhere'"),
        ("patch --host broken-v3.safetensors", "cannot read the checkpoint"),
        ("patch --host v2.ckpt", "is a tabpfn_v2 model"),
        ("patch --host tiny-v3.safetensors --device tpu", "unknown device 'tpu'; there are: auto, cpu, cuda"),
        ("patch --host tiny-v3.safetensors --delta 2", "between 0 and 1"),
        ("patch --host tiny-v3.safetensors --tables 1 --quantile 2", "quantile must lie in [0, 1]"),
        ("patch --host tiny-v3.safetensors --tau 0", "positive number"),
        ("patch --host tiny-v3.safetensors --tables 0", "at least one table"),
        ("patch --host tiny-v3.safetensors --out missing/full.json", "missing/full.json: No such file"),
        ("patch --host tiny-v3.safetensors --json .", ".: Is a directory"),
        (f"{EVAL} --suite maxi", "unknown dataset 'maxi'"),
        (f"{EVAL} --suite csv:good.csv#z", "no column 'z'"),
        (f"{EVAL} --suite csv:gone.csv#y", "no file 'gone.csv'"),
        (f"{EVAL} --suite csv:text.csv#y", "is not numeric"),
        (f"{EVAL} --suite csv:constant.csv#y", "is constant"),
        (f"{EVAL} --suite csv:short.csv#y", "19 rows are too few"),
        (f"{EVAL} --suite csv:good.csv#y --seeds 0", "at least one seed"),
        (f"{EVAL} --suite csv:good.csv#y --max-rows 1", "at least 2 train rows"),
        (f"{EVAL} --suite csv:good.csv#y --delta 2", "between 0 and 1"),
        (f"{EVAL} --suite csv:good.csv#y --variant o", "there are: identity, oa, full-o"),
        (f"{EVAL} --suite csv:good.csv#y --precision half", "unknown precision 'half'"),
        (f"{EVAL} --suite csv:good.csv#y --precision autocast", "no autocast on this device"),
        (f"{EVAL} --suite csv:good.csv#y --retrofit no-retrofit.json", "is not a retrofit"),
        (f"{EVAL} --suite csv:good.csv#y --retrofit oa.json --variant oa", "is oa too"),
        (f"{EVAL} --suite csv:good.csv#y --out good.csv", "good.csv: File exists"),
        (f"{EVAL} --suite csv:good.csv#y --json .", "Is a directory"),
        ("eval --retrofit oa.json --host other-v3.safetensors --suite csv:good.csv#y", "made for other weights"),
        ("bench overhead --rounds 0", "--rounds must be at least 1"),
        ("bench overhead --host nowhere", "no host 'nowhere'"),
        ("bench host --seeds 0", "--seeds must be at least 1"),
        ("bench host --suite maxi", "unknown dataset"),
        ("frontier --variant o", "unknown variant"),
        ("frontier --tables 0", "--tables must be at least 1"),
        ("frontier --suite maxi", "unknown dataset 'maxi'"),
        ("frontier --suite csv:text.csv#y --host tiny-v3.safetensors", "is not numeric"),
        ("frontier --seeds 0", "--seeds must be at least 1"),
        ("frontier --plot curve.svg", "--plot writes a .png file, not 'curve.svg'"),
        ("frontier --plot missing/curve.png", "missing/curve.png: No such file"),
        ("pretrain --steps 0", "--steps must be at least 1"),
        ("pretrain --out good.csv", "good.csv: File exists"),
    ],
)
def test_bad_input_is_one_message(command: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluate, "infer_autocast_inference_mode", lambda devices, enable: False)
    before = set(Path().rglob("*"))
    result = oretrofit(command)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ") and message in result.stderr
    assert result.stderr.count("Error:") == 1 and "Traceback" not in result.output
    assert set(Path().rglob("*")) == before


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for command in ("patch", "eval", "bench overhead", "bench host", "frontier"):
        result = oretrofit(f"{command} --device cuda")
        assert result.exit_code == 2
        assert "no CUDA device" in result.stderr and "--device cpu" in result.stderr


def fake_module(monkeypatch: pytest.MonkeyPatch, name: str, function) -> None:
    module = ModuleType(name)
    setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, f"oretrofit.experiments.{name}", module)


def test_bench_overhead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_overhead(host, *, rows, columns, rounds, device, on_round):
        assert (rows, columns, rounds, device) == (50, 4, 2, "cpu")
        on_round("round 1 of 2")
        return pd.DataFrame(
            [{"variant": "oa", "ratio": 1.25, "host_seconds": 2.0, "variant_seconds": 2.5, "rounds": 2}]
        )

    fake_module(monkeypatch, "overhead", measure_overhead)
    command = "bench overhead --host tiny-v3.safetensors --rounds 2 --rows 50 --columns 4 --device cpu"
    result = oretrofit(command, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert "1.25" in result.stdout
    assert json.loads((tmp_path / "t.json").read_text())[0]["ratio"] == 1.25


def test_bench_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compare_baselines(host, datasets, seeds, *, device, on_case):
        assert (datasets, seeds) == (["concrete", "cars"], 2)
        on_case("concrete seed 0")
        ridge = {"concrete": 0.4, "cars": 0.2}
        return pd.DataFrame([{"dataset": d, "ridge": ridge[d], "random_forest": 0.5, "host": 0.3} for d in datasets])

    fake_module(monkeypatch, "baselines", compare_baselines)
    command = "bench host --host tiny-v3.safetensors --suite concrete,cars --seeds 2"
    result = oretrofit(command, "--json", str(tmp_path / "t.json"))
    assert result.exit_code == 0, result.output
    assert "concrete seed 0" in result.stdout
    mean = next(line.split() for line in result.stdout.splitlines() if line.split()[:1] == ["mean"])
    assert mean == ["mean", "0.3", "0.5", "0.3"]
    assert [row["dataset"] for row in json.loads((tmp_path / "t.json").read_text())] == ["concrete", "cars", "mean"]


@pytest.mark.parametrize(
    ("options", "variants", "place"),
    [
        ("--variant oa --variant oa --tables 2", ["oa"], "2 held-out synthetic tables"),
        ("--suite csv:good.csv#y --seeds 2", list(VARIANTS), "2 cases of csv:good.csv#y"),
    ],
)
def test_frontier(
    options: str, variants: list[str], place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(frontier, "DELTAS", (1e-6,))
    monkeypatch.setattr(frontier, "sweep_delta", functools.partial(frontier.sweep_delta, deltas=(1e-6,)))
    files = ("--json", str(tmp_path / "t.json"), "--plot", str(tmp_path / "t.png"))
    result = oretrofit(f"frontier --host tiny-v3.safetensors --device cpu {options}", *files)
    assert result.exit_code == 0, result.output
    for variant in variants:
        assert f"{variant} on {place}, by delta" in result.stdout
    rows = json.loads((tmp_path / "t.json").read_text())
    assert [row["variant"] for row in rows] == variants
    assert all(abs(row["mean_rmse_delta_pct"]) < 0.01 for row in rows)
    assert (tmp_path / "t.png").read_bytes()[:4] == b"\x89PNG"


def test_pretrain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pretrain(settings, folder, *, threads):
        assert (settings.steps, settings.seed, folder, threads) == (50, 3, tmp_path / "host", 1)
        yield 25, 1.5
        yield 50, 1.25

    monkeypatch.setattr("oretrofit.experiments.pretrain.pretrain", pretrain)
    result = oretrofit("pretrain --steps 50 --seed 3 --threads 1", "--out", str(tmp_path / "host"))
    assert result.exit_code == 0, result.output
    assert str(tmp_path / "host") in "".join(result.stdout.split("\n"))
