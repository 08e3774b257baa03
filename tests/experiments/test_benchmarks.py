"""The benchmark and baseline modules on tiny inputs: what they report is what it says."""

import copy
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor
from torch.nn.attention import SDPBackend, sdpa_kernel

from oretrofit.calibration.cases import Case
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import baselines, overhead
from oretrofit.experiments.datasets import DatasetError, load_dataset, make_case
from oretrofit.retrofit import tabpfn_api
from oretrofit.retrofit.patcher import carriers


def test_overhead_reports_a_row_a_variant(tiny_host):
    lines = []
    table = overhead.measure_overhead(tiny_host, rows=20, test_rows=5, columns=2, rounds=2, on_round=lines.append)
    assert list(table["variant"]) == list(VARIANTS)
    assert (table["rounds"] == 2).all()
    assert len(lines) == 3
    # The bundled kernels of a CPU; the memory of a GPU is known only there.
    assert set(table["host_attention"]) == set(table["variant_attention"]) == {"flash_for_cpu"}
    assert set(table["precision"]) == {"float32"} and not {"host_peak_mb", "variant_peak_mb"} & {*table.columns}


def test_overhead_in_half_precision(tiny_host, monkeypatch):
    """Where TabPFN has it: everything runs under autocast then."""
    monkeypatch.setattr(tabpfn_api, "infer_autocast_inference_mode", lambda devices, enable: True)
    seen, forward = set(), torch.nn.Linear.forward
    monkeypatch.setattr(
        torch.nn.Linear, "forward", lambda *given: seen.add(torch.is_autocast_enabled("cpu")) or forward(*given)
    )
    table = overhead.measure_overhead(tiny_host, rows=20, test_rows=5, columns=2, rounds=1, precision="auto")
    assert seen == {True} and set(table["precision"]) == {"autocast"}
    with pytest.raises(ValueError, match="unknown precision 'half'; there are: float32, auto"):
        overhead.measure_overhead(tiny_host, rows=20, columns=2, precision="half")


def test_overhead_names_the_kernels_that_ran(tiny_host):
    with sdpa_kernel(SDPBackend.MATH):
        table = overhead.measure_overhead(tiny_host, rows=20, test_rows=5, columns=2, rounds=1)
    # The host sets its own kernels, among them the one of CPUs.
    assert set(table["host_attention"]) == {"flash_for_cpu"} and set(table["variant_attention"]) == {"math"}


def test_overhead_of_nan_is_refused(tiny_host):
    """TabPFN would make it 0."""
    host = replace(tiny_host, model=copy.deepcopy(tiny_host.model))
    with torch.no_grad():
        host.model.output_projection[-1].bias[0] = torch.nan
    with pytest.raises(FloatingPointError, match="the output of host is not finite"):
        overhead.measure_overhead(host, rows=20, test_rows=5, columns=2, rounds=1)


def test_overhead_ratio_is_the_median_of_paired_rounds(tiny_host, monkeypatch):
    # By the number of sites; the first round is the warm-up.
    sites = {0: "host", **{len(carriers(tiny_host.model, variant)): variant for variant in VARIANTS}}
    seconds = {
        "host": iter([9, 1, 2, 4]),
        "oa": iter([9, 3, 2, 4]),
        "full-o": iter([9, 1, 4, 40]),
        "closed": iter([9, 2, 4, 8]),
    }
    took = lambda model, *_: next(seconds[sites[sum("tau" in vars(module) for module in model.modules())]])  # noqa: E731
    monkeypatch.setattr(overhead, "_forward_seconds", took)
    table = overhead.measure_overhead(tiny_host, rows=4, test_rows=2, columns=1, rounds=3).set_index("variant")
    assert table["ratio"].to_dict() == {"oa": 1.0, "full-o": 2.0, "closed": 2.0}
    assert table["host_seconds"].to_dict() == {"oa": 2.0, "full-o": 2.0, "closed": 2.0}
    assert table["low"].isna().all() and table["high"].isna().all()


def test_overhead_ends_when_the_ratios_are_known(tiny_host, monkeypatch):
    took = iter(np.random.default_rng(0).normal(1, 0.015, 10_000))
    monkeypatch.setattr(overhead, "_forward_seconds", lambda *_: next(took))
    table = overhead.measure_overhead(tiny_host, rows=4, test_rows=2, columns=1)
    assert ((table["high"] - table["ratio"] <= 0.01) & (table["ratio"] - table["low"] <= 0.01)).all()
    assert table["low"].between(0.97, table["ratio"]).all() and table["high"].between(table["ratio"], 1.03).all()
    # The ratio of two such times has a deviation of 0.021, and the median of n of them one of 0.027 / sqrt(n).
    assert 10 < table["rounds"][0] < 100
    steady = iter(lambda: 1.0, None)
    monkeypatch.setattr(overhead, "_forward_seconds", lambda *_: next(steady))
    assert (overhead.measure_overhead(tiny_host, rows=4, test_rows=2, columns=1)["rounds"] == 10).all()


def test_the_interval_of_a_median():
    """Of 25 rounds the 8th and the 18th: of 25 fair coins 7 heads or fewer come up 2.2 % of the time, 8 more often."""
    rng = np.random.default_rng(1)
    seconds = {name: list(1 + rng.random(25)) for name in ("oa", "full-o", "closed")} | {"host": [1.0] * 25}
    table = overhead._compared(seconds).set_index("variant")
    for name, found in table.iterrows():
        ordered = sorted(seconds[name])
        assert (found["low"], found["high"]) == (ordered[7], ordered[17])


def test_baselines_are_relative_to_the_train_mean(tiny_host, tmp_path):
    rng = np.random.default_rng(0)
    x = rng.standard_normal(90)
    group = np.where(np.arange(90) % 9 == 0, None, np.where(x > 0, "a", "b"))
    file = tmp_path / "line.csv"
    pd.DataFrame({"x": x, "group": group, "y": 3 * x + 0.1 * rng.standard_normal(90)}).to_csv(file, index=False)
    spec = f"csv:{file}#y"
    table = baselines.compare_baselines(tiny_host, [spec], 1, n_estimators=1)
    assert list(table.columns) == ["dataset", "ridge", "random_forest", "host"]
    # A line with noise of 0.1 / 3 of its spread, which least squares finds.
    case = make_case(load_dataset(spec), 0, 500, 300)
    slope, intercept = np.polyfit(case.X_train["x"], case.y_train, 1)
    error = np.mean((slope * case.X_test["x"] + intercept - case.y_test) ** 2)
    expected = np.sqrt(error / np.mean((case.y_train.mean() - case.y_test) ** 2))
    assert table["ridge"][0] == pytest.approx(expected, rel=0.1)
    assert table["random_forest"][0] < 0.3
    fitted = TabPFNRegressor(model_path=tiny_host.specs, n_estimators=1, device="cpu", random_state=0)
    means = fitted.fit(case.X_train, case.y_train).predict(case.X_test)
    errors = [np.linalg.norm(mean - case.y_test) for mean in (means, case.y_train.mean())]
    assert table["host"][0] == pytest.approx(errors[0] / errors[1], rel=1e-12)


def test_baselines_say_what_cannot_be_split_before_they_begin(tiny_host, tmp_path):
    good = pd.DataFrame({"x": range(30), "y": range(30)})
    good.to_csv(tmp_path / "good.csv", index=False)
    # One value in 30 differs: constant on the train rows of every seed that draws it for the test.
    bad = good.assign(y=[1] + 29 * [0])
    bad.to_csv(tmp_path / "bad.csv", index=False)
    specs = [f"csv:{tmp_path / name}.csv#y" for name in ("good", "bad")]
    with pytest.raises(DatasetError, match=r"bad\.csv"):
        baselines.compare_baselines(tiny_host, specs, 20, on_case=lambda _: pytest.fail("began"))


def test_baselines_end_with_the_mean_over_datasets(tiny_host, monkeypatch):
    # Predicting the train mean is off by 1 everywhere; what is fitted by these, a seed each.
    off = {("two", 0): 2.0, ("two", 1): 4.0, ("one", 0): 1.0, ("one", 1): 6.0}
    one = Case("one", 0, pd.DataFrame({"x": [0.0]}), np.array([5.0]), pd.DataFrame({"x": [0.0]}), np.array([6.0]))
    monkeypatch.setattr(baselines, "load_dataset", lambda spec: spec)
    monkeypatch.setattr(baselines, "make_case", lambda dataset, seed, *_: replace(one, dataset=dataset, seed=seed))
    monkeypatch.setattr(baselines, "_predict", lambda model, case: case.y_test + off[case.dataset, case.seed])
    monkeypatch.setattr(
        baselines, "predict_case", lambda specs, case, **_: case.y_test - 2 * off[case.dataset, case.seed]
    )
    lines = []
    table = baselines.compare_baselines(tiny_host, ["two", "one"], 2, on_case=lines.append)
    assert table.to_dict("list") == {
        "dataset": ["two", "one", "mean"],
        "ridge": [3.0, 3.5, 3.25],
        "random_forest": [3.0, 3.5, 3.25],
        "host": [6.0, 7.0, 6.5],
    }
    assert lines[1] == "two seed 1: ridge 4.000, random_forest 4.000, host 8.000" and len(lines) == 4
