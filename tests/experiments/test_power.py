"""Power against simulated studies and against Student's noncentral distribution."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from oretrofit.experiments.power import (
    design_power,
    difference_power,
    equivalence_power,
    plot_power,
    without_control,
)


def row(variant: str = "oa", measure: str = "rmse", **changes: float | None) -> dict:
    made = {"variant": variant, "measure": measure, "unit": "%", "margin": 0.5}
    return {**made, "between_sd": 0.3, "within_sd": 0.4, "table_sd": 0.6, **changes}


@pytest.mark.parametrize(
    ("change", "sd", "tables", "margin"),
    [(0.0, 0.3, 6, 0.5), (0.2, 0.3, 6, 0.5), (-0.4, 1.0, 30, 0.5), (0.1, 2.0, 100, 0.5), (0.5, 0.1, 6, 0.5)],
)
def test_against_simulated_studies(change: float, sd: float, tables: int, margin: float) -> None:
    rng, studies = np.random.default_rng(0), 100_000
    means = rng.normal(change, sd, (studies, tables))
    errors = means.std(axis=1, ddof=1) / math.sqrt(tables)
    both = np.abs(means.mean(axis=1)) + stats.t.ppf(0.95, tables - 1) * errors < margin
    found = np.abs(means.mean(axis=1)) > stats.t.ppf(0.975, tables - 1) * errors
    bound = 5 * 0.5 / math.sqrt(studies)
    assert equivalence_power(change, sd, tables, margin) == pytest.approx(both.mean(), abs=bound)
    assert difference_power(change, sd, tables) == pytest.approx(found.mean(), abs=bound)


def test_true_changes_at_the_margin_are_called_equivalent_in_one_of_twenty_studies_at_most() -> None:
    for sd, tables in ((0.01, 6), (0.2, 6), (0.2, 100)):
        assert equivalence_power(0.5, sd, tables, 0.5) <= 0.0501  # an average over 2,000 quantiles


def test_the_designs_of_a_run() -> None:
    table = design_power(
        pd.DataFrame([row(), row("full-o", "nll", between_sd=math.nan, within_sd=math.nan, table_sd=0.0)])
    )
    assert list(table["cases"]) == [18, 90, 300] and set(table["variant"]) == {"oa"}
    sd = math.sqrt(0.3**2 + 0.4**2 / 3)
    for _, design in table.iterrows():
        assert design["table_sd"] == pytest.approx(sd)
        freedom, size = design["tables"] - 1, design["detectable"] / sd * math.sqrt(design["tables"])
        critical = stats.t.ppf(0.975, freedom)
        finds = stats.nct.sf(critical, freedom, size) + stats.nct.cdf(-critical, freedom, size)
        assert finds == pytest.approx(0.8, abs=1e-4)
        assert design["equivalence_power"] == equivalence_power(0.0, sd, design["tables"], 0.5)
    assert table["detectable"].is_monotonic_decreasing and table["equivalence_power"].is_monotonic_increasing
    assert design_power(pd.DataFrame()).empty
    for none in (math.nan, None):
        one_seed = design_power(pd.DataFrame([row(between_sd=none, within_sd=none)]))
        assert set(one_seed["table_sd"]) == {0.6}


def test_without_the_control() -> None:
    table = design_power(pd.DataFrame([row("identity"), row(), row(measure="crps")]))
    assert set(without_control(table)["variant"]) == {"oa"} and set(without_control(table)["measure"]) == {"rmse"}
    assert without_control(pd.DataFrame()).empty


def test_figure(tmp_path: Path) -> None:
    file = tmp_path / "power.png"
    plot_power(pd.DataFrame([row("identity"), row(), row("full-o", between_sd=0.0, within_sd=1e-3)]), file)
    assert file.read_bytes()[:4] == b"\x89PNG" and file.stat().st_size > 5000
    with pytest.raises(ValueError, match="power needs a variant with two tables that differ"):
        plot_power(pd.DataFrame([row("identity")]), tmp_path / "none.png")
