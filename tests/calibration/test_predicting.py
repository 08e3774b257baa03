"""The one way to fit and predict, against TabPFN's own calls, and its errors against sums by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit.calibration import predicting, settings
from oretrofit.calibration.cases import Case


def test_predicts_as_tabpfn_does(tiny_host, table) -> None:
    X, y, X_test = table
    given: dict[str, Any] = {"n_estimators": 2, "random_state": 3, "categorical_features_indices": [2]}
    case = Case("made", 3, pd.DataFrame(X), y, pd.DataFrame(X_test), np.zeros(len(X_test)), [2])
    for name in ("float32", "float64", "auto"):
        options: dict[str, Any] = {"device": "cpu", "inference_precision": predicting.PRECISIONS[name]}
        fitted = TabPFNRegressor(model_path=tiny_host.specs, **options, **given).fit(X, y)
        expected = fitted.predict(X_test)
        assert np.array_equal(predicting.fit_and_predict(tiny_host.specs, X, y, X_test, **options, **given), expected)
        assert np.array_equal(predicting.predict_case(tiny_host.specs, case, **options, n_estimators=2), expected)
    # Float32 is what is taken unasked.
    unasked = predicting.fit_and_predict(tiny_host.specs, X, y, X_test, **given)
    asked = predicting.fit_and_predict(tiny_host.specs, X, y, X_test, inference_precision=torch.float32, **given)
    assert np.array_equal(unasked, asked)
    with pytest.raises(RuntimeError, match="nowhere"):
        predicting.fit_and_predict(tiny_host.specs, X, y, X_test, device="nowhere", **given)
    full = predicting.predict_case(tiny_host.specs, case, output_type="full", n_estimators=2)
    assert {"mean", "logits", "criterion"} <= full.keys() and np.array_equal(full["mean"], unasked)


def test_precisions_are_those_of_the_command_line() -> None:
    assert tuple(predicting.PRECISIONS) == settings.PRECISIONS


def test_errors_by_hand() -> None:
    y = np.array([1.0, 3.0, 5.0])
    assert predicting.rmse(np.array([1.0, 0.0, 9.0]), y) == pytest.approx((25 / 3) ** 0.5)
    rows = pd.DataFrame({"x": [0, 0]})
    case = Case("made", 0, rows, np.array([1.0, 5.0]), rows, np.array([4.0, 0.0]))
    assert predicting.train_mean_rmse(case) == pytest.approx(5**0.5)  # 3 is off by 1 and by 3


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert predicting.resolve_device("auto") == predicting.resolve_device("cpu") == "cpu"
    with pytest.raises(ValueError, match="--device cpu"):
        predicting.resolve_device("cuda")
    with pytest.raises(ValueError, match="unknown device"):
        predicting.resolve_device("tpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert predicting.resolve_device("auto") == predicting.resolve_device("cuda") == "cuda"
    assert predicting.resolve_device("cpu") == "cpu"
