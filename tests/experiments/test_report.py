"""The summary against numbers worked out by hand, and the files written from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from oretrofit.experiments import report

KEYS = {
    *("cases", "mean_rmse_delta_pct", "median_rmse_delta_pct", "worst_rmse_delta_pct", "ci95_pct", "wins", "losses"),
    *("mean_nll_delta", "max_abs_diff_sd", "time_ratio", "peak_memory_ratio"),
}


def record(dataset: str, seed: int, variant: str, delta: float, **values: float | None) -> dict:
    made: dict = {"dataset": dataset, "seed": seed, "variant": variant, "n_train": 20, "n_test": 10, "n_columns": 3}
    made |= {"host_rmse": 2.0, "variant_rmse": 2.0 * (1 + delta / 100), "rmse_delta_pct": delta}
    made |= {"max_abs_diff_sd": 0.0, "host_nll": 1.0, "variant_nll": 1.0, "host_seconds": 1.0, "variant_seconds": 1.0}
    return made | {"host_peak_mb": None, "variant_peak_mb": None} | values


def rows() -> pd.DataFrame:
    first = {"max_abs_diff_sd": 0.5, "variant_nll": 1.25, "host_seconds": 2.0, "variant_seconds": 3.0}
    return pd.DataFrame(
        [
            record("a", 0, "oa", 1.0, **first, host_peak_mb=100.0, variant_peak_mb=110.0),
            record("a", 1, "oa", -2.0, max_abs_diff_sd=0.1, variant_seconds=1.0, variant_nll=0.5),
            record("b", 0, "oa", 4.0, variant_seconds=5.0),
            record("b", 1, "oa", 0.0, variant_seconds=2.5),
            record("a", 0, "identity", 0.0),
        ]
    )


def test_summary_by_hand() -> None:
    summary = report.summarize(rows())
    assert list(summary) == ["oa", "identity"]
    assert set(summary["oa"]) == set(summary["identity"]) == KEYS
    oa = summary["oa"]
    assert oa["cases"] == 4
    assert oa["mean_rmse_delta_pct"] == pytest.approx(0.75)
    assert oa["median_rmse_delta_pct"] == pytest.approx(0.5)
    assert oa["worst_rmse_delta_pct"] == 4.0
    assert (oa["wins"], oa["losses"]) == (1, 2)
    assert oa["mean_nll_delta"] == pytest.approx((0.25 - 0.5) / 4)
    assert oa["max_abs_diff_sd"] == 0.5
    assert oa["time_ratio"] == pytest.approx(2.0)  # median of 1.5, 1, 5, 2.5
    assert oa["peak_memory_ratio"] == pytest.approx(1.1)  # known for one case only
    assert summary["identity"]["peak_memory_ratio"] is None
    assert summary["identity"]["ci95_pct"] == [0.0, 0.0]


def test_interval_is_that_of_the_mean_and_always_the_same() -> None:
    values = np.random.default_rng(1).normal(0.1, 0.5, 200)
    low, high = report.summarize(pd.DataFrame([record("a", i, "oa", v) for i, v in enumerate(values)]))["oa"][
        "ci95_pct"
    ]
    half = 1.96 * values.std() / math.sqrt(len(values))  # the normal interval, near at 200 cases
    assert low == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.1 * half)
    again = report.summarize(pd.DataFrame([record("a", i, "oa", v) for i, v in enumerate(values)]))
    assert again["oa"]["ci95_pct"] == [low, high]


SETTINGS = {
    "host": {"name": "small", "sha256": "0" * 64},
    "precision": "auto",
    "precision_used": "autocast",
    "device": "cpu",
    "gpu": None,
    "max_train_rows": 20,
}


def test_files(tmp_path: Path) -> None:
    failed = [{"dataset": "csv:/some/where/c.csv#y", "seed": 2, "reason": "ValueError: no"}]
    report.write_report(tmp_path, SETTINGS, rows(), failed)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["settings"] == SETTINGS
    assert set(summary["variants"]["oa"]) == KEYS
    assert summary["paper"]["mean_rmse_delta_pct"] == {"oa": 0.088, "full-o": 0.177}
    assert (summary["paper"]["cases"], summary["paper"]["note"]) == (18, "another host on other data")
    assert summary["failed"] == failed
    table = (tmp_path / "table.md").read_text()
    assert "| cases | 4 | 1 |" in table
    assert "| b | 0 | 20 + 10 x 3 | 2 | +4.0000 |" in table
    assert "auto (autocast)" in table
    assert "another host on other data" in table and "+0.088" in table
    assert "- c.csv#y, seed 2: ValueError: no" in table
    assert (tmp_path / "deltas.png").read_bytes()[:4] == b"\x89PNG"


def test_no_finished_case(tmp_path: Path) -> None:
    summary = report.write_report(tmp_path, SETTINGS, pd.DataFrame())
    assert summary["variants"] == {}
    assert (tmp_path / "table.md").exists() and not (tmp_path / "deltas.png").exists()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e2])
def test_figure_for_any_scale(tmp_path: Path, spread: float) -> None:
    values = [("oa", 1e-3), ("oa", -2e-3), ("oa", spread), ("full-o", -spread), ("identity", 0.0)]
    frame = pd.DataFrame([record(f"data{i % 3}", i, name, v) for i, (name, v) in enumerate(values)])
    report.plot_deltas(frame, tmp_path / "deltas.png")
    assert (tmp_path / "deltas.png").stat().st_size > 5000


def test_rows_as_json(tmp_path: Path) -> None:
    report.write_rows(pd.DataFrame({"name": ["a", "b"], "value": [0.1, math.nan]}), tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"name": "a", "value": 0.1},
        {"name": "b", "value": None},
    ]


def test_small_changes_stay_visible() -> None:
    assert [report.percent(v) for v in (0.08812, -0.00005, 0.0, 3.21e-6)] == ["+0.0881", "-0.0001", "+0.0000", "+3e-06"]
