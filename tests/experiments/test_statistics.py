"""Every statistic against an independent computation, on a made-up run of five tables with three seeds."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from oretrofit.experiments import statistics
from oretrofit.experiments.statistics import MEASURES, compare_variants, fit_model, is_sensitive, resampled_cases

TABLES, SEEDS = ("a", "b", "c", "d", "e"), 3
T_90, T_95 = 2.1318467863266495, 2.7764451051977987  # Student's t with 4 degrees of freedom at 95 and 97.5 %


def record(dataset: str, seed: int, variant: str, **changed: float) -> dict:
    made: dict = {"dataset": dataset, "seed": seed, "variant": variant, "target_sd": 10.0, "rmse_delta_pct": 0.0}
    for who in ("host", "variant"):
        made |= {f"{who}_rmse": 2.0, f"{who}_crps": 1.0, f"{who}_nll": 3.0}
        made |= {f"{who}_coverage_80": 0.8, f"{who}_coverage_95": 0.95}
    return made | changed


def made_up(variant: str = "oa", spread: float = 0.1, seed: int = 0, seeds: int = SEEDS) -> pd.DataFrame:
    """Changes of about half a percent, tables differing more than seeds."""
    rng = np.random.default_rng(seed)
    rows = []
    for table in TABLES:
        level = 0.3 + 2 * spread * rng.normal()
        for number in range(seeds):
            change = level + spread * rng.normal()
            rows.append(
                record(
                    *(table, number, variant),
                    rmse_delta_pct=change,
                    variant_crps=1 + change / 200,
                    variant_nll=3 + change / 100,
                    variant_coverage_80=0.8 - change / 500,
                    variant_coverage_95=0.95 + change / 1000 * rng.integers(0, 2),
                )
            )
    return pd.DataFrame(rows)


def row_of(table: pd.DataFrame, measure: str = "rmse", variant: str = "oa") -> pd.Series:
    (found,) = [row for _, row in table.iterrows() if (row["measure"], row["variant"]) == (measure, variant)]
    return found


def by_table(rows: pd.DataFrame, name: str = "rmse_delta_pct") -> list[list[float]]:
    return [[row[name] for _, row in rows.iterrows() if row["dataset"] == table] for table in TABLES]


def interval_by_loops(values: list[list[float]], statistic, resamples: int = 10_000) -> np.ndarray:
    """The bootstrap, drawn case by case."""
    rng = np.random.default_rng(99)
    found = np.empty(resamples)
    for i in range(resamples):
        drawn: list[float] = []
        for table in rng.integers(0, len(values), len(values)):
            drawn += [values[table][case] for case in rng.integers(0, len(values[table]), len(values[table]))]
        found[i] = statistic(drawn)
    return found


def test_every_statistic_of_the_rmse() -> None:
    rows = made_up()
    found, values = row_of(compare_variants(rows)), by_table(rows)
    flat = list(itertools.chain(*values))
    assert (found["cases"], found["tables"], found["unit"], found["margin"]) == (15, 5, "%", 0.5)
    assert found["mean"] == pytest.approx(sum(flat) / 15, rel=1e-13)
    assert found["median"] == sorted(flat)[7]
    largest = max(range(15), key=lambda i: abs(flat[i]))
    assert found["largest"] == flat[largest]
    assert (found["largest_dataset"], found["largest_seed"]) == (TABLES[largest // 3], largest % 3)
    assert found["not_available"] == ""

    # Over table means, in the formulas of the t test.
    means = [sum(v) / 3 for v in values]
    grand = sum(means) / 5
    error = math.sqrt(sum((m - grand) ** 2 for m in means) / 4 / 5)
    assert found["equivalence_low"] == pytest.approx(grand - T_90 * error, rel=1e-12)
    assert found["equivalence_high"] == pytest.approx(grand + T_90 * error, rel=1e-12)
    assert found["table_sd"] == pytest.approx(error * math.sqrt(5), rel=1e-12)
    below = stats.ttest_1samp(means, 0.5, alternative="less").pvalue
    above = stats.ttest_1samp(means, -0.5, alternative="greater").pvalue
    assert found["equivalence_p"] == pytest.approx(max(below, above), rel=1e-10)
    assert found["equivalence_p_holm"] == found["equivalence_p"]  # of one variant
    assert found["equivalent"] is bool(max(below, above) < 0.05)

    # Signed ranks, all 32 ways to sign them.
    ranks = stats.rankdata(np.abs(means))
    signed = sum(rank for rank, mean in zip(ranks, means, strict=True) if mean > 0)
    sums = [sum(r for r, s in zip(ranks, signs, strict=True) if s) for signs in itertools.product((0, 1), repeat=5)]
    tail = min(np.mean([s >= signed for s in sums]), np.mean([s <= signed for s in sums]))
    assert found["wilcoxon_p"] == pytest.approx(min(1, 2 * tail))


def test_mixed_model_is_the_analysis_of_variance_of_a_balanced_run() -> None:
    """There REML has a closed form: mean squares between and within tables (where the former is the larger)."""
    rows = made_up()
    found, values = row_of(compare_variants(rows)), np.array(by_table(rows))
    means = values.mean(axis=1)
    between, within = 3 * means.var(ddof=1), ((values - means[:, None]) ** 2).sum() / 10
    assert between > within
    # An iterative maximum: the likelihood is flat there, so its argument is good to the root of the tolerance.
    assert found["within_sd"] == pytest.approx(math.sqrt(within), rel=1e-4)
    assert found["between_sd"] == pytest.approx(math.sqrt((between - within) / 3), rel=1e-4)
    assert found["model_mean"] == pytest.approx(values.mean(), rel=1e-6)
    half = T_95 * math.sqrt(between / 15)
    assert found["model_low"] == pytest.approx(values.mean() - half, abs=1e-4 * half)
    assert found["model_high"] == pytest.approx(values.mean() + half, abs=1e-4 * half)


@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e4])
def test_mixed_model_where_tables_vary_no_more_than_seeds(scale: float) -> None:
    """REML puts the variance of tables at its bound, and the mean's error is that of independent cases."""
    values = scale * np.array([[1.0, 2.0, 3.1], [3.0, 1.0, 2.0], [2.0, 3.0, 1.0], [1.0, 3.0, 2.0]])
    frame = pd.DataFrame({"dataset": np.repeat(list("abcd"), 3), "change": values.ravel()})
    found, reason = fit_model(frame)
    assert reason == ""
    half = stats.t.ppf(0.975, 3) * values.std(ddof=1) / math.sqrt(12)
    assert found["between_sd"] < 0.02 * found["within_sd"]
    assert found["within_sd"] == pytest.approx(values.std(ddof=1), rel=1e-3)
    assert found["model_high"] - found["model_mean"] == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize("unbalanced", [False, True])
def test_bootstrap_is_the_loop_over_tables_then_cases(unbalanced: bool) -> None:
    rows = made_up()
    if unbalanced:
        rows = rows.drop(index=[1, 2, 7])
    found, values = row_of(compare_variants(rows)), by_table(rows)
    for name, statistic in (("mean", np.mean), ("median", np.median)):
        drawn = interval_by_loops(values, statistic)
        for end, level in (("low", 0.025), ("high", 0.975)):
            # Both are quantiles of samples: one of 10,000 lies within five standard errors of its level in another.
            error = 5 * math.sqrt(level * (1 - level) * 2 / 10_000)
            low, high = np.quantile(drawn, [max(0, level - error), min(1, level + error)])
            assert low <= found[f"{name}_{end}"] <= high
    naive = stats.bootstrap((rows["rmse_delta_pct"],), np.mean, method="percentile", rng=0).confidence_interval
    assert found["mean_high"] - found["mean_low"] > 1.3 * (naive.high - naive.low)  # what knowing of tables costs


def test_resamples_are_tables_then_their_cases() -> None:
    tables = np.array(["a", "b", "a", "c", "b", "a"])
    drawn = resampled_cases(tables, 5000)
    assert drawn.shape == (5000, 9)
    sizes = {"a": 3, "b": 2, "c": 1}
    counts: dict[str, int] = dict.fromkeys(sizes, 0)
    for row in drawn.reshape(-1, 3):  # a drawn table each
        cases = row[row >= 0]
        (name,) = set(tables[cases])
        assert len(cases) == sizes[name]
        counts[name] += 1
    assert sum(counts.values()) == 15_000
    for count in counts.values():
        assert count == pytest.approx(5000, abs=5 * math.sqrt(15_000 * 2 / 9))
    # Each case of a table as often as another.
    seen = np.bincount(drawn[drawn >= 0], minlength=6)
    assert seen[3] == counts["c"]
    for case in (0, 2, 5):
        assert seen[case] == pytest.approx(counts["a"], abs=5 * math.sqrt(3 * counts["a"] * 2 / 9))
    np.testing.assert_array_equal(drawn, resampled_cases(tables, 5000))


def test_other_measures_are_changes_in_their_own_units() -> None:
    rows = made_up()
    table = compare_variants(rows, margin=0.2)
    assert list(table["measure"]) == list(MEASURES)
    expected = {
        "rmse": ("%", 0.2, sum(rows["rmse_delta_pct"]) / 15),
        "crps": (
            "%",
            0.2,
            sum(100 * (v / h - 1) for v, h in zip(rows["variant_crps"], rows["host_crps"], strict=True)) / 15,
        ),
        "nll": ("nats", 0.002, sum(rows["variant_nll"] - rows["host_nll"]) / 15),
        "coverage_80": ("points", 0.2, 100 * sum(rows["variant_coverage_80"] - 0.8) / 15),
        "coverage_95": ("points", 0.2, 100 * sum(rows["variant_coverage_95"] - 0.95) / 15),
    }
    for measure, (unit, margin, mean) in expected.items():
        found = row_of(table, measure)
        assert (found["unit"], found["margin"]) == (unit, pytest.approx(margin))
        assert found["mean"] == pytest.approx(mean, rel=1e-9)


def test_a_stretched_distribution_changes_its_likelihood_by_the_margin() -> None:
    """The margin of NLL in nats for one of 1 %: that of a normal's, 1 % wider, on targets that are its own."""
    y = stats.norm.ppf((np.arange(100_000) + 0.5) / 100_000)
    worst = max(np.abs(stats.norm.logpdf(y, scale=s) - stats.norm.logpdf(y)).min() for s in (0.99, 1.01))
    assert worst < 1e-4  # where y is one deviation away nothing changes
    at_mode = abs(stats.norm.logpdf(0, scale=1.01) - stats.norm.logpdf(0))
    assert at_mode == pytest.approx(MEASURES["nll"].margin, rel=0.01)


def test_holm_corrects_over_variants_within_a_measure() -> None:
    variants = {
        "identity": made_up("identity", 0.001, 1),
        "oa": made_up("oa", 0.1, 2),
        "full-o": made_up("full-o", 0.05, 3),
    }
    table = compare_variants(pd.concat(variants.values()))
    by_itself = {name: compare_variants(rows) for name, rows in variants.items()}
    for measure in ("rmse", "nll"):
        alone = {name: row_of(found, measure, name)["equivalence_p"] for name, found in by_itself.items()}
        corrected, running = {}, 0.0
        for at, name in enumerate(sorted(alone, key=alone.__getitem__)):
            running = max(running, min(1.0, (3 - at) * alone[name]))
            corrected[name] = running
        for name, p in corrected.items():
            found = row_of(table, measure, name)
            assert found["equivalence_p_holm"] == pytest.approx(p, rel=1e-12)
            assert found["equivalent"] is (p < 0.05)


def test_equivalence_is_the_90_percent_interval_inside_the_margin() -> None:
    for seed, spread in itertools.product(range(3), (0.02, 0.2)):
        found = row_of(compare_variants(made_up(seed=seed, spread=spread)))
        inside = -0.5 < found["equivalence_low"] and found["equivalence_high"] < 0.5
        assert found["equivalent"] is bool(inside)


# ---- Sensitive cases, and what is not there ------------------------------------------------------


def test_sensitive_cases_are_counted_and_left_out_of_a_mean() -> None:
    rows = made_up()
    rows.loc[[0, 4], "host_rmse"] = 0.19  # below 2 % of 10
    rows.loc[5, "host_rmse"] = 0.2
    assert list(np.flatnonzero(is_sensitive(rows))) == [0, 4]
    found = row_of(compare_variants(rows))
    assert found["sensitive"] == 2
    left = [v for i, v in enumerate(rows["rmse_delta_pct"]) if i not in (0, 4)]
    assert found["mean_without_sensitive"] == pytest.approx(sum(left) / 13, rel=1e-12)
    rows["host_rmse"] = 0.1
    assert math.isnan(row_of(compare_variants(rows))["mean_without_sensitive"])
    assert not is_sensitive(rows.drop(columns="target_sd")).any()


def test_the_table_of_the_largest_change_is_left_out_of_a_mean() -> None:
    rows = made_up()
    rows.loc[7, "rmse_delta_pct"] = -9.0
    found = row_of(compare_variants(rows))
    assert (found["largest"], found["largest_dataset"]) == (-9.0, rows.loc[7, "dataset"])
    left = [
        v for v, table in zip(rows["rmse_delta_pct"], rows["dataset"], strict=True) if table != rows.loc[7, "dataset"]
    ]
    assert found["mean_without_largest"] == pytest.approx(sum(left) / 12, rel=1e-12)
    assert math.isnan(row_of(compare_variants(rows[:3]))["mean_without_largest"])


def test_rows_of_earlier_versions_have_fewer_measures() -> None:
    old = made_up().drop(columns=["target_sd", *(c for c in made_up() if "crps" in c or "coverage" in c)])
    assert list(compare_variants(old)["measure"]) == ["rmse", "nll"]
    mixed = pd.concat([old, made_up().assign(seed=lambda rows: rows["seed"] + 3)])
    table = compare_variants(mixed)
    assert (row_of(table)["cases"], row_of(table, "crps")["cases"]) == (30, 15)


def test_what_cannot_be_tested_is_said_and_warns_of_nothing() -> None:
    one_table = made_up()[:3]
    one_seed = made_up(seeds=1)
    unchanged = made_up().assign(rmse_delta_pct=0.0)
    alike = made_up().assign(rmse_delta_pct=0.25)
    cancelling = made_up().assign(rmse_delta_pct=[0.1, -0.1, 0.0] * 5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {
            name: row_of(compare_variants(rows))
            for name, rows in (
                ("one table", one_table),
                ("one seed", one_seed),
                ("unchanged", unchanged),
                ("alike", alike),
                ("cancelling", cancelling),
                ("one case", made_up()[:1]),
            )
        }
        assert compare_variants(pd.DataFrame()).empty
    for name in ("one table", "one case"):
        assert found[name]["not_available"].startswith("tests need two tables; a mixed model needs two tables")
        assert found[name]["equivalent"] is None and math.isnan(found[name]["wilcoxon_p"])
        assert math.isnan(found[name]["mean_low"]) is (name == "one case")
    assert found["one seed"]["equivalent"] in (True, False)
    assert found["one seed"]["not_available"] == "a mixed model needs two tables and two cases of a table"
    assert found["unchanged"]["not_available"] == "no case changed"
    assert (found["unchanged"]["mean_low"], found["unchanged"]["mean_high"]) == (0.0, 0.0)
    assert found["alike"]["equivalent"] is None and "all tables changed alike" in found["alike"]["not_available"]
    assert (
        found["cancelling"]["equivalent"] is None and "no table's mean changed" in found["cancelling"]["not_available"]
    )
    for row in found.values():
        assert (row["equivalent"] is None) == math.isnan(row["equivalence_p"])


def test_a_mixed_model_that_does_not_converge_is_not_available(monkeypatch: pytest.MonkeyPatch) -> None:
    class Lost:
        def __init__(self, *_, **__) -> None: ...

        def fit(self, **_) -> None:
            raise np.linalg.LinAlgError("Singular matrix")

    monkeypatch.setattr(statistics, "MixedLM", Lost)
    found = row_of(compare_variants(made_up()))
    assert math.isnan(found["model_mean"]) and found["not_available"] == "the mixed model did not converge"
    assert not math.isnan(found["equivalence_p"])
