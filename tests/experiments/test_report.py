"""The summary against numbers worked out by hand, and the files written from it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from oretrofit.experiments import report
from oretrofit.experiments.datasets import BUNDLED_TARGETS
from oretrofit.experiments.verdicts import verdicts
from oretrofit.retrofit import files

KEYS = {
    *("cases", "mean_rmse_delta_pct", "median_rmse_delta_pct", "worst_rmse_delta_pct", "ci95_pct", "wins", "losses"),
    *("largest_rmse_delta_pct", "mean_rmse_delta_pct_without_broken"),
    *("mean_nll_delta", "max_abs_diff_sd", "timed", "time_ratio", "peak_memory_ratio"),
}


def record(dataset: str, seed: int, variant: str, delta: float, **values: float | None) -> dict:
    made: dict = {"dataset": dataset, "seed": seed, "variant": variant, "n_train": 20, "n_test": 10, "n_columns": 3}
    made |= {"host_rmse": 2.0, "variant_rmse": 2.0 * (1 + delta / 100), "rmse_delta_pct": delta}
    made |= {"max_abs_diff_sd": 0.0, "host_nll": 1.0, "variant_nll": 1.0, "host_seconds": 1.0, "variant_seconds": 1.0}
    return made | {"host_peak_mb": None, "variant_peak_mb": None, "train_mean_rmse": 3.0} | values


def rows() -> pd.DataFrame:
    first = {"max_abs_diff_sd": 0.5, "variant_nll": 1.25, "host_seconds": 2.0, "variant_seconds": 3.0}
    return pd.DataFrame(
        [
            record("a", 0, "oa", 1.0, **first, host_peak_mb=100.0, variant_peak_mb=110.0),
            record("a", 1, "oa", -2.0, max_abs_diff_sd=0.1, variant_seconds=1.0, variant_nll=0.5),
            record("b", 0, "oa", 4.0, variant_seconds=5.0, host_peak_mb=100.0, variant_peak_mb=130.0),
            record("b", 1, "oa", 0.0, variant_seconds=2.5, host_peak_mb=100.0, variant_peak_mb=400.0),
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
    assert (oa["largest_rmse_delta_pct"], oa["worst_rmse_delta_pct"]) == (4.0, 4.0)
    assert oa["mean_rmse_delta_pct_without_broken"] == oa["mean_rmse_delta_pct"]
    assert (oa["wins"], oa["losses"]) == (1, 2)
    assert oa["mean_nll_delta"] == pytest.approx((0.25 - 0.5) / 4)
    assert oa["max_abs_diff_sd"] == 0.5
    assert oa["time_ratio"] == pytest.approx(2.0)  # median of 1.5, 1, 5, 2.5
    assert oa["peak_memory_ratio"] == pytest.approx(1.3)  # median of 1.1, 1.3, 4; of one case not known
    assert summary["identity"]["peak_memory_ratio"] is None
    assert summary["identity"]["ci95_pct"] == [None, None]  # of a single case there is none


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


def test_the_largest_change_is_of_either_sign() -> None:
    found = report.summarize(pd.DataFrame([record("a", i, "oa", v) for i, v in enumerate((0.48, -0.82, 0.1))]))["oa"]
    assert (found["largest_rmse_delta_pct"], found["worst_rmse_delta_pct"]) == (-0.82, 0.48)
    assert (found["wins"], found["losses"]) == (1, 2)


SETTINGS: dict = {
    "host": {"name": "small", "sha256": "0" * 64},
    "datasets": ["a", "b", "csv:/some/where/c.csv#y", "csv:/else/where/c.csv#y"],
    "precision": "auto",
    "precision_used": "autocast",
    "device": "cpu",
    "gpu": None,
    "max_train_rows": 20,
}
OURS = {**SETTINGS, "datasets": sorted(BUNDLED_TARGETS)}


def write(folder: Path, summary: dict, rows: pd.DataFrame) -> str:
    for name, write in report.report_files(summary, rows).items():
        write(folder / name)
    assert json.loads((folder / "summary.json").read_text()) == summary
    return (folder / "table.md").read_text()


def test_files(tmp_path: Path) -> None:
    failed = [{"dataset": "csv:/some/where/c.csv#y", "seed": 2, "reason": "ValueError: no", "may_pass": False}]
    summary = report.make_summary(SETTINGS, rows(), failed)
    assert summary["settings"] == SETTINGS
    assert set(summary["variants"]["oa"]) == KEYS
    assert summary["failed"] == failed
    assert summary["broken_host"] == []
    table = write(tmp_path, summary, rows())
    assert "| cases | 4 | 1 |" in table
    assert "| b | 0 | 20 + 10 x 3 | 2 | +4.0000 |" in table
    assert "auto (autocast)" in table
    assert "- some/where/c.csv#y, seed 2: ValueError: no" in table
    assert (tmp_path / "deltas.png").read_bytes()[:4] == b"\x89PNG"


def test_the_papers_figures_stand_under_our_own_only(tmp_path: Path) -> None:
    ours = report.make_summary(OURS, rows().replace({"a": "ames", "b": "cars"}))
    assert ours["paper"]["mean_rmse_delta_pct"] == {"oa": 0.088, "full-o": 0.177}
    assert (ours["paper"]["cases"], ours["paper"]["note"]) == (18, "another host on other data")
    table = write(tmp_path, ours, rows().replace({"a": "ames", "b": "cars"}))
    assert "another host on other data" in table and "+0.088" in table
    for settings in (SETTINGS, {**OURS, "host": {"name": "v3", "sha256": "1" * 64}}):
        other = report.make_summary(settings, rows())
        assert other["paper"] is None
        assert "paper" not in str(report.summary_cells(other)) + report.notes(other)
    # Nor where none of the variants is the paper's.
    closed = report.make_summary(OURS, pd.DataFrame([record("ames", 0, "closed", 1.0)]))
    assert "paper" not in str(report.summary_cells(closed)) + report.notes(closed)


def test_a_broken_host_is_named_and_its_mean_given_without_it(tmp_path: Path) -> None:
    # Predicting the mean gives 3: a host at 26 is broken, one at 9 (three times the mean's) not yet.
    made = pd.DataFrame(
        [
            record("a", 0, "oa", -91.0, host_rmse=26.0, variant_rmse=2.34),
            record("a", 1, "oa", 1.0, host_rmse=9.0),
            record("b", 0, "oa", 3.0),
        ]
    )
    summary = report.make_summary(SETTINGS, made)
    assert summary["broken_host"] == [{"dataset": "a", "seed": 0, "host_rmse": 26.0, "train_mean_rmse": 3.0}]
    both = pd.DataFrame([*made.to_dict("records"), record("a", 0, "full-o", 1.0, host_rmse=26.0)])
    assert report.make_summary(SETTINGS, both)["broken_host"] == summary["broken_host"]  # once for all variants
    oa = summary["variants"]["oa"]
    assert (oa["mean_rmse_delta_pct"], oa["mean_rmse_delta_pct_without_broken"]) == (-29.0, 2.0)
    table = write(tmp_path, summary, made)
    assert "|   mean without † | +2.0000 |" in table
    assert "| a | 0 | 20 + 10 x 3 | 26 † | -91.0000 |" in table
    assert "a seed 0 (26, the mean 3)" in table

    only = report.make_summary(SETTINGS, made[:1])
    assert only["variants"]["oa"]["mean_rmse_delta_pct_without_broken"] is None
    assert ["  mean without †", "–"] in report.summary_cells(only)[1]


def test_a_nearly_exact_host_is_named_and_its_mean_given_without_it(tmp_path: Path) -> None:
    # 2 % of 100.5 is 2.01, above the host's 2.
    made = pd.DataFrame(
        [
            record("a", 0, "oa", 30.0, target_sd=100.5),
            record("a", 1, "oa", 1.0, target_sd=99.5),
            record("b", 0, "oa", 3.0, target_sd=50.0),
        ]
    )
    summary = report.make_summary(SETTINGS, made)
    assert summary["sensitive"] == [{"dataset": "a", "seed": 0, "host_rmse": 2.0, "target_sd": 100.5}]
    table = write(tmp_path, summary, made)
    assert "|   mean without ‡ | +2.0000 |" in table
    assert "| a | 0 | 20 + 10 x 3 | 2 ‡ | +30.0000 |" in table
    assert "below 2 % of the target's standard deviation" in table and "a seed 0 (2, deviation 100)" in table
    assert "‡" not in write(tmp_path, report.make_summary(SETTINGS, rows()), rows())
    only = report.make_summary(SETTINGS, made[:1])
    assert ["  mean without ‡", "–"] in report.summary_cells(only)[1]


def test_how_far_one_table_decides_is_shown(tmp_path: Path) -> None:
    changes: dict[str, dict[str, tuple[float, ...]]] = {
        "oa": {"a": (0.1, 0.3), "b": (9.0, 5.0), "c": (0.0, 0.4)},
        "closed": {"a": (-8.0,), "b": (1,), "c": (2,)},
    }
    made = pd.DataFrame(
        [
            record(table, seed, variant, change)
            for variant, tables in changes.items()
            for table, found in tables.items()
            for seed, change in enumerate(found)
        ]
    )
    settings = {**SETTINGS, "datasets": list("abc")}
    table = write(tmp_path, report.make_summary(settings, made), made)
    assert "|   mean without § | +0.2000 | +1.5000 |" in table
    assert "§ Over all tables but that of the variant's largest change: b (oa); a (closed)." in table
    two = made[made["dataset"] != "c"]
    assert "§" not in write(tmp_path, report.make_summary(settings, two), two)


def test_of_a_single_case_there_is_no_interval(tmp_path: Path) -> None:
    one = pd.DataFrame([record("a", 0, "oa", 1.0)])
    assert "|   95 % CI | – |" in write(tmp_path, report.make_summary(SETTINGS, one), one)


def test_verdicts_in_words() -> None:
    """Three variants: one within half a percent, one that may be beyond, one that does nothing; tables a to e."""
    levels = {"oa": 0.01, "full-o": 0.45, "closed": 0.0}
    made = pd.DataFrame(
        [
            record(table, seed, variant, level * (1 + at / 10 + seed / 20), variant_nll=1 + level / 1000 * at)
            for variant, level in levels.items()
            for at, table in enumerate("abcde")
            for seed in range(2)
        ]
    )
    found = verdicts(report.make_summary(SETTINGS, made)["statistics"])
    assert found == [
        "oa: equivalent on these 5 tables and this host within 0.5 % of RMSE, 0.005 nats of NLL.",
        "full-o: equivalent on these 5 tables and this host within 0.005 nats of NLL; "
        "not shown to be equivalent in RMSE.",
        "closed: no case changed in RMSE, NLL.",
    ]
    one = verdicts(report.make_summary(SETTINGS, made[:2])["statistics"])
    assert one == [
        "oa: not tested in RMSE (tests need two tables; a mixed model needs two tables and two cases of a table); "
        "no case changed in NLL."
    ]


def test_records_of_earlier_versions_do_not_say_whether_the_host_is_broken() -> None:
    old = rows().drop(columns="train_mean_rmse")
    assert report.make_summary(SETTINGS, old)["broken_host"] == []
    mixed = pd.DataFrame([*old.to_dict("records"), record("b", 2, "oa", 1.0, host_rmse=26.0)])
    assert [case["seed"] for case in report.make_summary(SETTINGS, mixed)["broken_host"]] == [2]


def test_times_of_cases_that_ran_beside_others_are_left_out(tmp_path: Path) -> None:
    made = [record("a", 0, "oa", 1.0, variant_seconds=3.0), record("a", 1, "oa", 1.0, variant_seconds=50.0, workers=2)]
    made += [record("b", 0, "oa", 1.0, variant_seconds=4.0, workers=1)]
    mixed = report.make_summary(SETTINGS, pd.DataFrame(made))
    assert (mixed["variants"]["oa"]["timed"], mixed["variants"]["oa"]["time_ratio"]) == (2, 3.5)
    assert "Cases that ran beside others (--workers): 1." in write(tmp_path, mixed, pd.DataFrame(made))
    beside = report.make_summary(SETTINGS, pd.DataFrame(made[1:2]))
    assert (beside["variants"]["oa"]["timed"], beside["variants"]["oa"]["time_ratio"]) == (0, None)
    assert "| time / host's | – |" in write(tmp_path, beside, pd.DataFrame(made[1:2]))
    alone = report.make_summary(SETTINGS, pd.DataFrame(made[:1]))
    assert "--workers" not in report.notes(alone)
    names = {"a": "a"}
    assert [report.case_line([line], names).endswith(" s)") for line in made[:2]] == [True, False]


def test_no_finished_case(tmp_path: Path) -> None:
    summary = report.make_summary(SETTINGS, pd.DataFrame())
    assert summary["variants"] == {}
    write(tmp_path, summary, pd.DataFrame())
    assert (tmp_path / "table.md").exists() and not (tmp_path / "deltas.png").exists()


@pytest.mark.parametrize("spread", [0.0, 1e-3, 1e2])
def test_figure_for_any_scale(tmp_path: Path, spread: float) -> None:
    values = [("oa", 1e-3), ("oa", -2e-3), ("oa", spread), ("full-o", -spread), ("identity", 0.0)]
    frame = pd.DataFrame([record(f"data{i % 3}", i, name, v) for i, (name, v) in enumerate(values)])
    report.plot_deltas(frame, {f"data{i}": f"data{i}" for i in range(3)}, tmp_path / "deltas.png")
    assert (tmp_path / "deltas.png").stat().st_size > 5000


def test_rows_as_json(tmp_path: Path) -> None:
    files.write_rows(pd.DataFrame({"name": ["a", "b"], "value": [0.1, math.nan]}), tmp_path / "rows.json")
    assert json.loads((tmp_path / "rows.json").read_text()) == [
        {"name": "a", "value": 0.1},
        {"name": "b", "value": None},
    ]


def test_json_is_valid_whatever_it_is_given(tmp_path: Path) -> None:
    content = {"a": [1, math.inf, {"b": -math.inf}], "c": (math.nan, None, "x"), "d": np.float64("nan")}
    files.write_json(content, tmp_path / "t.json")
    assert json.loads((tmp_path / "t.json").read_text()) == {
        "a": [1, None, {"b": None}],
        "c": [None, None, "x"],
        "d": None,
    }


def test_small_changes_stay_visible() -> None:
    assert [report.percent(v) for v in (0.08812, -0.00005, 0.0, 3.21e-6)] == ["+0.0881", "-0.0001", "+0.0000", "+3e-06"]
