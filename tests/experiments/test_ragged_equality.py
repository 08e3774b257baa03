"""The equality study of ragged prediction on tiny inputs."""

from __future__ import annotations

import functools
import json

import pandas as pd
import pytest
import torch
from typer.testing import CliRunner

from oretrofit import cli, patch
from oretrofit.experiments import ragged_equality as run
from oretrofit.experiments.pretrain import save_host

# In float64 a batch's sums differ by 1e-13 or so. What is left is where that turns the rounding of logits to float32,
# which TabPFN does behind the model: 4e-6 of a logit below 64, and as large a part of the probabilities.
OPTIONS = {"inference_precision": torch.float64, "n_estimators": 2}
SAME = 1e-5


def test_mixed_tables():
    tables = run.mixed_tables(60)
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
    tables = run.mixed_tables(4)
    found = run.compare_equality(tiny_host, tables, calibration_tables=1, on_tables=seen.append, **OPTIONS)
    assert seen == sorted(seen) and seen[-1] == 4 * len(tables)
    return found.set_index("quantity")


def test_equality(equality):
    assert equality.loc[["mean", "logits"], ["closed_worst", "host_worst"]].max(axis=None) < SAME
    # The shift of a probability by its density, which is above 0.1 per standard deviation at the median.
    assert equality.loc["quantile 0.5", ["closed_worst", "host_worst"]].max() < 10 * SAME
    assert list(equality.index) == [
        "mean", *(f"quantile {q}" for q in (0.01, 0.1, 0.5, 0.9, 0.99)), "logits", "spread of means"
    ]  # fmt: skip
    # Against what there is to tell apart.
    assert equality.loc["spread of means", "closed_median"] > 100 * SAME
    assert (equality["closed_median"] <= equality["closed_worst"])[:-1].all()


def test_equality_sees_another_answer(tiny_host):
    """A mean off by half a standard deviation in one of the tables, and every logit by one."""
    retrofit = patch(tiny_host, "closed", tau=1e-3)
    tables = run.mixed_tables(2)

    class Off:
        specs = retrofit.specs

        def predict_ragged(self, X_trains, y_trains, X_tests, **settings):
            answers = retrofit.predict_ragged(X_trains, y_trains, X_tests, **settings)
            answers[1]["mean"] = answers[1]["mean"] + 0.5 * tables[1][1].std()
            answers[1]["logits"] = answers[1]["logits"] + 1
            return answers

    found = run._differences(Off(), retrofit.specs, tables, {"device": "cpu", **OPTIONS}, lambda done: None)
    assert found["mean"][0] < SAME and found["mean"][1] == pytest.approx(0.5, abs=SAME)
    assert found["logits"][0] < SAME and found["logits"][1] == pytest.approx(1, abs=SAME)


def test_logits_that_are_no_probability():
    inf = float("inf")
    a = torch.tensor([[0.0, -inf, 1.0]])
    assert run._logit_shift(a, torch.tensor([[0.5, -inf, 1.0]])) == 0.5
    assert run._logit_shift(a, torch.tensor([[0.0, -3.0, 1.0]])) == inf


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda(tiny_host):
    tables = run.mixed_tables(2)
    found = run.compare_equality(tiny_host, tables, device="cuda", calibration_tables=1, **OPTIONS)
    assert found.set_index("quantity").loc["mean", "closed_worst"] < SAME


# ---- The command -----------------------------------------------------------------------------------


def oretrofit(command: str, *more: str):
    return CliRunner(env={"COLUMNS": "100"}).invoke(cli.app, [*command.split(), *more])


def test_bench_ragged_equality_command(tmp_path, tiny_host, monkeypatch):
    host = tmp_path / "tiny-v3.safetensors"
    save_host(tiny_host.model, host)
    quick = functools.partial(run.compare_equality, calibration_tables=1, **OPTIONS)
    monkeypatch.setattr(run, "compare_equality", quick)
    command = "bench ragged-equality --tables 2 --device cpu --host"
    result = oretrofit(command, str(host), "--json", f"{tmp_path}/t.json")
    assert result.exit_code == 0, result.output
    written = {row["quantity"]: row for row in json.loads((tmp_path / "t.json").read_text())}
    assert written["mean"]["closed_worst"] < SAME and "quantile 0.99" in result.stdout


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--tables 0", "--tables must be between 1 and"),
        ("--host nowhere", "no host 'nowhere'"),
        ("--device tpu", "unknown device 'tpu'"),
        ("--json missing/t.json", "missing/t.json: No such file"),
    ],
)
def test_bad_input_is_one_message(options, message):
    result = oretrofit(f"bench ragged-equality {options}")
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: ") and message in result.stderr
