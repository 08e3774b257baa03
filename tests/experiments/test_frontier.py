"""The sweep over delta: its cases, what it reports of them, and how it is shown."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure

import oretrofit
from oretrofit.calibration.calibration import Calibration
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import frontier, style
from oretrofit.experiments.evaluate import Plan, evaluate
from oretrofit.experiments.runs import case_rows, open_run
from oretrofit.patches.presence import presence
from oretrofit.retrofit.api import calibrate
from oretrofit.retrofit.check import Change, near_identity, synthetic_cases
from oretrofit.retrofit.hosts import Host


@pytest.fixture(scope="module")
def calibration(tiny_host: Host) -> Calibration:
    return calibrate(tiny_host, tables=1)


def test_presence_is_one_half_at_the_length_reported(tiny_host: Host, calibration: Calibration) -> None:
    retrofit = oretrofit.patch(tiny_host, "oa", delta=0.01, calibration=calibration)
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


def test_sweep(tiny_host: Host, calibration: Calibration) -> None:
    cases = synthetic_cases(2, 30_000, max_rows=60)
    done: list[None] = []
    rows = frontier.sweep_delta(
        tiny_host,
        calibration,
        cases,
        ("full-o", "oa"),
        deltas=(1e-6, 1e-1),
        on_case=lambda: done.append(None),
        n_estimators=1,
    )
    assert list(zip(rows["variant"], rows["delta"], strict=True)) == [
        *(("full-o", 1e-6), ("full-o", 1e-1), ("oa", 1e-6), ("oa", 1e-1))
    ]
    assert set(rows["host_sha256"]) == {tiny_host.sha256}
    assert len(done) == 2 + 4 * 2  # the host predicts each case once
    for _, (small, large) in rows.groupby("variant")["max_abs_diff_sd"]:
        assert small < 1e-3 < large
    # tau is in proportion to delta / (1 - delta).
    for _, (small, large) in rows.groupby("variant")["half_presence_norm"]:
        assert large / small == pytest.approx(np.sqrt((0.1 / 0.9) / (1e-6 / (1 - 1e-6))), rel=1e-9)
    # Host and variant each predicted for themselves.
    retrofit = oretrofit.patch(tiny_host, "oa", delta=1e-1, calibration=calibration)
    compared = near_identity(retrofit, cases, n_estimators=1)
    assert compared == rows.iloc[3][list(compared)].to_dict()
    # A resample of two cases is both of one with probability 1/4 each, so that the 2.5 % quantiles of its mean are the
    # changes themselves: their mean is the middle, and half their distance the mean's distance from either.
    for row in rows.to_dict("records"):
        low, high = row["ci95_low_pct"], row["ci95_high_pct"]
        assert (low + high) / 2 == pytest.approx(row["mean_rmse_delta_pct"], rel=1e-9)
        assert row["largest_rmse_delta_pct"] == pytest.approx(max(low, high, key=abs), rel=1e-9)
        assert row["worst_rmse_delta_pct"] == pytest.approx(high, rel=1e-9)


def test_interval_by_hand() -> None:
    # A resample of three cases is one of them alone with probability 1/27 each, more than the 2.5 % of either end.
    changes = [Change(1.0, 1.0, value, 0.0) for value in (3.0, 1.0, 2.0)]
    cases = synthetic_cases(3, 0)
    assert frontier._interval(changes, cases) == {"ci95_low_pct": 1.0, "ci95_high_pct": 3.0}


def test_every_variant_is_swept_by_default() -> None:
    assert inspect.signature(frontier.sweep_delta).parameters["variants"].default == tuple(VARIANTS)


def test_suite_cases_give_what_eval_gives(tiny_host: Host, calibration: Calibration, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pd.DataFrame(rng.normal(size=(40, 3)), columns=["a", "b", "c"])
    frame["town"] = np.where(frame["b"] > 0, "north", "south")
    frame["y"] = frame["a"] + 0.1 * rng.normal(size=40)
    frame.to_csv(tmp_path / "table.csv", index=False)
    spec = f"csv:{tmp_path / 'table.csv'}#y"
    given = oretrofit.patch(tiny_host, "full-o", delta=1e-2, calibration=calibration)
    few: dict[str, Any] = {"n_estimators": 1}
    plan = Plan(tiny_host, [spec], seeds=2, variants=(), given=given, tables=1, estimator=few)
    with open_run(tmp_path / "run", plan.settings()) as run:
        cases, failures = evaluate(plan, run)
    assert not failures
    records = case_rows(cases).query("variant == 'full-o'")

    made = frontier.suite_cases([spec], 2)
    swept = frontier.sweep_delta(tiny_host, calibration, made, ("full-o",), deltas=(1e-2,), **few)
    (row,) = swept.to_dict("records")
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
    names = [
        "mean_rmse_delta_pct",
        "ci95_low_pct",
        "ci95_high_pct",
        "largest_rmse_delta_pct",
        "mean_abs_rmse_delta_pct",
    ]
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
        "largest": "+0.4000",
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
        _, color = style.STYLES.get(str(variant), style.OTHER_STYLE)
        for axes, columns, unit in (
            (change, ["largest_rmse_delta_pct", "mean_rmse_delta_pct"], 1),
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
def test_sweep_on_cuda(tiny_host: Host, calibration: Calibration) -> None:
    cases = synthetic_cases(2, 30_000)
    on_cpu, on_gpu = (
        frontier.sweep_delta(tiny_host, calibration, cases, ("full-o",), deltas=(1e-2,), device=device)
        for device in ("cpu", "cuda")
    )
    assert on_gpu["max_abs_diff_sd"][0] == pytest.approx(on_cpu["max_abs_diff_sd"][0], rel=0.05)
    assert on_gpu["half_presence_norm"][0] == pytest.approx(on_cpu["half_presence_norm"][0], rel=1e-3)
