"""The sweep over delta: its cases, what it reports of them, and how it is shown."""

from __future__ import annotations

import functools
import inspect
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from tabpfn import TabPFNRegressor

import oretrofit
from oretrofit.calibration import carriers
from oretrofit.calibration.carriers import calibration_tables, predict_table
from oretrofit.calibration.settings import TABLES
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import evaluate, frontier, report
from oretrofit.experiments.datasets import Case
from oretrofit.patches.presence import presence
from oretrofit.retrofit.api import calibrate
from oretrofit.retrofit.hosts import Host


@pytest.fixture(autouse=True)
def one_estimator(monkeypatch: pytest.MonkeyPatch) -> None:
    """TabPFN fits eight by default, which here would only take longer."""
    for module in (carriers, evaluate, frontier):
        monkeypatch.setattr(module, "TabPFNRegressor", functools.partial(TabPFNRegressor, n_estimators=1))


def case(y_train: list[float], y_test: list[float]) -> Case:
    X_train, X_test = pd.DataFrame(np.zeros((len(y_train), 1))), pd.DataFrame(np.zeros((len(y_test), 1)))
    return Case("made", 0, X_train, np.array(y_train), X_test, np.array(y_test))


def test_comparison_by_hand() -> None:
    # RMSE 1 -> 0.9 and 2 -> 2.6: changes of -10 % and +30 %. A resample of two cases is both of one
    # with probability 1/4 each, so the 2.5 % quantiles of its mean are the changes themselves.
    cases = [case([0.0, 1.0, 0.0, 1.0], [0.0, 0.0]), case([0.0, 4.0, 0.0, 4.0], [1.0, 1.0])]
    host = [np.array([1.0, -1.0]), np.array([3.0, -1.0])]
    variant = [np.array([0.9, -0.9]), np.array([3.6, -1.6])]
    compared = frontier.compare_predictions(host, variant, cases)
    assert compared == pytest.approx(
        {
            "mean_rmse_delta_pct": 10.0,
            "ci95_low_pct": -10.0,
            "ci95_high_pct": 30.0,
            "worst_rmse_delta_pct": 30.0,
            "mean_abs_rmse_delta_pct": 20.0,
            "max_abs_diff_sd": 0.3,  # 0.6 / 2 in the second, 0.1 / 0.5 in the first
        }
    )
    with pytest.raises(ValueError, match="zip"):
        frontier.compare_predictions(host, variant[:1], cases)


def test_interval_narrows_with_the_number_of_cases() -> None:
    changes = np.random.default_rng(2).normal(0.1, 0.5, 400)
    cases = [case([0.0, 1.0], [0.0])] * len(changes)
    host = [np.array([1.0])] * len(changes)
    compared = frontier.compare_predictions(host, [np.array([1 + c / 100]) for c in changes], cases)
    half = 1.96 * changes.std() / np.sqrt(len(changes))  # the normal interval of a mean
    assert compared["ci95_low_pct"] == pytest.approx(changes.mean() - half, abs=0.1 * half)
    assert compared["ci95_high_pct"] == pytest.approx(changes.mean() + half, abs=0.1 * half)


def test_synthetic_cases_are_predicted_as_calibration_predicts(tiny_host: Host) -> None:
    tables, cases = calibration_tables(6, 5), frontier.synthetic_cases(6, 5)
    assert any(table.categorical for table in tables)
    done: list[None] = []
    predicted = frontier.predict_cases(tiny_host.specs, cases, on_case=lambda: done.append(None))
    assert len(done) == 6
    for table, made, means in zip(tables, cases, predicted, strict=True):
        assert np.array_equal(np.concatenate([made.y_train, made.y_test]), table.y)
        assert np.array_equal(np.concatenate([made.X_train, made.X_test]), table.X, equal_nan=True)
        assert made.categorical == table.categorical
        assert np.array_equal(means, predict_table(tiny_host.specs, table))


def test_presence_is_one_half_at_the_length_reported(tiny_host: Host) -> None:
    calibration = calibrate(tiny_host, tables=2)
    retrofit = oretrofit.patch(tiny_host, "oa", delta=0.01, tables=2, calibration=calibration)
    half = frontier.half_presence(retrofit)
    lengths = {site.name: np.median(np.sqrt(calibration.squared_norms[site.name])) for site in retrofit.sites}
    presences = {}
    for end in ("_min", "_max"):
        norm = half[f"half_presence_norm{end}"]
        presences[end] = [
            presence(torch.tensor([[norm * lengths[site.name], 0.0]], dtype=torch.float64), site.tau).item()
            for site in retrofit.sites
        ]
    # At the smallest of the sites' lengths no token of that relative length is above 1/2, at the
    # largest none below, and one site is met each time.
    assert max(presences["_min"]) == pytest.approx(0.5, abs=1e-3)
    assert min(presences["_max"]) == pytest.approx(0.5, abs=1e-3)
    expected = [np.sqrt(site.tau) / lengths[site.name] for site in retrofit.sites]
    assert half["half_presence_norm"] == pytest.approx(np.median(expected), rel=1e-3)


def test_sweep(tiny_host: Host) -> None:
    cases = frontier.synthetic_cases(2)
    tables: list[None] = []
    done: list[None] = []
    rows = frontier.sweep_delta(
        tiny_host,
        cases,
        ("full-o", "oa"),
        deltas=(1e-6, 1e-1),
        on_table=lambda: tables.append(None),
        on_case=lambda: done.append(None),
    )
    assert list(rows.columns) == [
        *("variant", "delta", "mean_rmse_delta_pct", "ci95_low_pct", "ci95_high_pct", "worst_rmse_delta_pct"),
        *("mean_abs_rmse_delta_pct", "max_abs_diff_sd", "half_presence_norm", "half_presence_norm_min"),
        "half_presence_norm_max",
    ]
    assert list(zip(rows["variant"], rows["delta"], strict=True)) == [
        *(("full-o", 1e-6), ("full-o", 1e-1), ("oa", 1e-6), ("oa", 1e-1))
    ]
    assert (len(tables), len(done)) == (TABLES, 2 + 4 * 2)  # the host predicts each case once
    for _, (small, large) in rows.groupby("variant")["max_abs_diff_sd"]:
        assert small < 1e-3 < large
    # tau is in proportion to delta / (1 - delta).
    for _, (small, large) in rows.groupby("variant")["half_presence_norm"]:
        assert large / small == pytest.approx(np.sqrt((0.1 / 0.9) / (1e-6 / (1 - 1e-6))), rel=1e-9)
    # Host and variant each predicted for themselves.
    compared = frontier.near_identity(oretrofit.patch(tiny_host, "oa", delta=1e-1), cases)
    assert compared == rows.iloc[3][list(compared)].to_dict()


def test_every_variant_is_swept_by_default() -> None:
    assert inspect.signature(frontier.sweep_delta).parameters["variants"].default == tuple(VARIANTS)


def test_suite_cases_give_what_eval_gives(tiny_host: Host, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 3)), columns=["a", "b", "c"])
    frame["town"] = np.where(frame["b"] > 0, "north", "south")
    frame["y"] = frame["a"] + 0.1 * rng.normal(size=40)
    frame.to_csv(tmp_path / "table.csv", index=False)
    spec = f"csv:{tmp_path / 'table.csv'}#y"
    plan = evaluate.Plan(tiny_host, [spec], seeds=2, variants=("full-o",), delta=1e-2)
    cases, failures = evaluate.evaluate(plan, evaluate.calibrate_run(plan, tmp_path), tmp_path)
    assert not failures
    records = evaluate.case_rows(cases).query("variant == 'full-o'")

    (row,) = frontier.sweep_delta(tiny_host, frontier.suite_cases([spec], 2), ("full-o",), deltas=(1e-2,)).to_dict(
        "records"
    )
    assert row["mean_rmse_delta_pct"] == pytest.approx(records["rmse_delta_pct"].mean(), rel=1e-9)
    assert row["worst_rmse_delta_pct"] == pytest.approx(records["rmse_delta_pct"].max(), rel=1e-9)
    assert row["max_abs_diff_sd"] == pytest.approx(records["max_abs_diff_sd"].max(), rel=1e-9)


def made_rows() -> pd.DataFrame:
    rows = []
    for factor, variant in ((1.0, "oa"), (-0.1, "full-o"), (2.0, "another")):
        for delta in (1e-4, 1e-3, 1e-1):
            ends = sorted((factor * delta * 50, factor * delta * 300))
            compared = [factor * delta * 100, *ends, delta * 400, delta * 120, delta]
            half = [np.sqrt(delta) * part for part in (0.8, 0.1, 0.9)]
            rows.append([variant, delta, *compared, *half])
    names = ["mean_rmse_delta_pct", "ci95_low_pct", "ci95_high_pct", "worst_rmse_delta_pct", "mean_abs_rmse_delta_pct"]
    names += ["max_abs_diff_sd", "half_presence_norm", "half_presence_norm_min", "half_presence_norm_max"]
    return pd.DataFrame(rows, columns=["variant", "delta", *names])


def test_table() -> None:
    rows = made_rows()
    header, cells = frontier.delta_cells(rows[rows["variant"] == "oa"])
    assert dict(zip(header, cells[1], strict=True)) == {
        "delta": "1e-03",
        "mean": "+0.1000",
        "low": "+0.0500",
        "high": "+0.3000",
        "worst": "+0.4000",
        "size": "0.1200",
        "half": "2.5",  # 100 * 0.8 * sqrt(0.001)
        "range": "0.32–2.8",
    }


def test_plot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def savefig(figure: Figure, *args, **settings) -> None:
        drawn.append(figure)
        save(figure, *args, **settings)

    monkeypatch.setattr(Figure, "savefig", savefig)
    rows = made_rows()
    frontier.plot_frontier(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes()[:4] == b"\x89PNG"
    change, half = drawn[0].axes
    assert (change.get_xscale(), half.get_xscale(), change.get_yscale()) == ("log", "log", "symlog")
    for variant, group in rows.groupby("variant"):
        _, color = report.STYLES.get(str(variant), ("", "#555555"))
        for axes, columns, unit in (
            (change, ["worst_rmse_delta_pct", "mean_rmse_delta_pct"], 1),
            (half, ["half_presence_norm"], 100),
        ):
            lines = [np.asarray(line.get_ydata()) for line in axes.get_lines() if line.get_color() == color]
            assert np.allclose(lines, unit * group[columns].to_numpy().T)
        bars = [
            [tuple(segment[:, 1]) for segment in bar.get_segments()]
            for axes in (change, half)
            for bar in axes.collections
            if isinstance(bar, LineCollection) and np.allclose(bar.get_color(), to_rgba(color))
        ]
        assert np.allclose(bars[0], group[["ci95_low_pct", "ci95_high_pct"]])
        assert np.allclose(bars[1], 100 * group[["half_presence_norm_min", "half_presence_norm_max"]])
    labels = [text.get_text() for text in drawn[0].legends[0].get_texts()]
    assert labels[:3] == ["oa", "full-o", "another"]


def test_plot_of_changes_of_exactly_zero(tmp_path: Path) -> None:
    rows = made_rows()
    rows.loc[:, [name for name in rows if name.endswith("_pct")]] = 0.0
    frontier.plot_frontier(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").stat().st_size > 5000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sweep_on_cuda(tiny_host: Host) -> None:
    cases = frontier.synthetic_cases(2)
    on_cpu, on_gpu = (
        frontier.sweep_delta(tiny_host, cases, ("full-o",), deltas=(1e-2,), device=device) for device in ("cpu", "cuda")
    )
    assert on_gpu["max_abs_diff_sd"][0] == pytest.approx(on_cpu["max_abs_diff_sd"][0], rel=0.05)
    assert on_gpu["half_presence_norm"][0] == pytest.approx(on_cpu["half_presence_norm"][0], rel=1e-3)
