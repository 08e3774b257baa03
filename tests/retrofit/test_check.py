"""The comparison of host's and variant's predictions, by hand and on synthetic tables."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

import oretrofit
from oretrofit.calibration.carriers import calibration_tables, predict_table
from oretrofit.calibration.cases import Case
from oretrofit.retrofit import check
from oretrofit.retrofit.hosts import Host


def case(y_train: list[float], y_test: list[float]) -> Case:
    X_train, X_test = pd.DataFrame(np.zeros((len(y_train), 1))), pd.DataFrame(np.zeros((len(y_test), 1)))
    return Case("made", 7, X_train, np.array(y_train), X_test, np.array(y_test))


def test_comparison_by_hand() -> None:
    # RMSE 1 -> 0.6 and 2 -> 2.6: changes of -40 % and +30 %.
    cases = [case([0.0, 1.0, 0.0, 1.0], [0.0, 0.0]), case([0.0, 4.0, 0.0, 4.0], [1.0, 1.0])]
    host = [np.array([1.0, -1.0]), np.array([3.0, -1.0])]
    variant = [np.array([0.6, -0.6]), np.array([3.6, -1.6])]
    changes = [check.compare(*made) for made in zip(cases, host, variant, strict=True)]
    assert (changes[0].host_rmse, changes[1].host_rmse) == (1.0, 2.0)
    assert [change.variant_rmse for change in changes] == pytest.approx([0.6, 2.6])
    assert [change.max_abs_diff_sd for change in changes] == pytest.approx([0.4 / 0.5, 0.6 / 2])
    assert check.summarize(changes) == pytest.approx(
        {
            "mean_rmse_delta_pct": -5.0,
            "largest_rmse_delta_pct": -40.0,
            "worst_rmse_delta_pct": 30.0,
            "mean_abs_rmse_delta_pct": 35.0,
            "max_abs_diff_sd": 0.8,
        }
    )


def test_no_relative_change_of_a_perfect_host() -> None:
    with pytest.raises(ValueError, match="made, seed 7: the host's error is exactly zero"):
        check.compare(case([0.0, 1.0], [1.0]), np.array([1.0]), np.array([1.5]))


def test_synthetic_cases_are_predicted_as_calibration_predicts(tiny_host: Host) -> None:
    tables, cases = calibration_tables(3, 1, max_rows=40), check.synthetic_cases(3, 1, max_rows=40)
    assert any(table.categorical for table in tables)
    done: list[None] = []
    predicted = check.predict_cases(tiny_host.specs, cases, on_case=lambda: done.append(None))
    assert len(done) == 3
    for table, made, means in zip(tables, cases, predicted, strict=True):
        assert np.array_equal(np.concatenate([made.y_train, made.y_test]), table.y)
        assert np.array_equal(np.concatenate([made.X_train, made.X_test]), table.X, equal_nan=True)
        assert made.categorical == table.categorical
        assert np.array_equal(means, predict_table(tiny_host.specs, table))


def test_near_identity_compares_a_retrofit_with_its_host(tiny_host: Host) -> None:
    cases = check.synthetic_cases(2, 5, max_rows=40)
    retrofit = oretrofit.patch(tiny_host, "oa", tau=1.0)
    done: list[None] = []
    found = check.near_identity(retrofit, cases, on_case=lambda: done.append(None), n_estimators=1)
    assert len(done) == 4
    host, variant = (check.predict_cases(s, cases, n_estimators=1) for s in (tiny_host.specs, retrofit.specs))
    shifts = [np.abs(a - b).max() / c.y_train.std() for a, b, c in zip(host, variant, cases, strict=True)]
    assert found["max_abs_diff_sd"] == max(shifts) > 0
    errors = [
        [np.linalg.norm(p - c.y_test) / len(p) ** 0.5 for p, c in zip(made, cases, strict=True)]
        for made in (host, variant)
    ]
    changes = [100 * (after / before - 1) for before, after in zip(*errors, strict=True)]
    # RMSE, a sum of squares in another order here: a few roundings of 1.1e-16, times 100 for percent.
    assert found["mean_rmse_delta_pct"] == pytest.approx(np.mean(changes), abs=1e-11)
    assert found["largest_rmse_delta_pct"] == pytest.approx(max(changes, key=abs), abs=1e-11)
