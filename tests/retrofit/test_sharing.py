"""Members whose preprocessing is shared: bit for bit TabPFN's own."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
import sklearn
import torch
from tabpfn import TabPFNRegressor
from tabpfn.constants import ModelVersion
from tabpfn.inference_config import InferenceConfig
from tabpfn.preprocessing import presets
from tabpfn.preprocessing.configs import PreprocessorConfig

from oretrofit import load_host
from oretrofit.retrofit.ragged import preparing, sharing
from oretrofit.retrofit.tabpfn_api import PreprocessingPipeline

# Prior Labs' checkpoints of v3 bring their own; this is what TabPFN takes where one has none.
DEFAULT = InferenceConfig.get_default("regression", ModelVersion.V2_5)
SMALL = load_host("small").specs.inference_config

PRESETS = {
    name: dataclasses.replace(DEFAULT, PREPROCESS_TRANSFORMS=getattr(presets, name)())
    for name in presets.__all__
    if name.endswith("_configs")
}
NAMES = (
    *("power", "safepower", "power_box", "safepower_box", "quantile_norm", "quantile_uni_fine", "robust"),
    *("quantile_uni_extrapolate", "squashing_scaler_max10", "kdi", "kdi_alpha_0.5_uni", "norm_and_kdi"),
)
ENCODINGS = ("none", "numeric", "onehot", "ordinal", "ordinal_shuffled", "ordinal_very_common_categories_shuffled")


def transforms(*configs):
    return dataclasses.replace(DEFAULT, PREPROCESS_TRANSFORMS=[*configs])


CONFIGS = {
    "bundled host": SMALL,
    "v2": InferenceConfig.get_default("regression", ModelVersion.V2),
    "v2.5": DEFAULT,
    **PRESETS,
    **{name: transforms(PreprocessorConfig(name), PreprocessorConfig(name, append_original=True)) for name in NAMES},
    **{f"cat {name}": transforms(PreprocessorConfig("none", categorical_name=name)) for name in ENCODINGS},
    "alike but for one": transforms(
        PreprocessorConfig("none", categorical_name="onehot", max_onehot_cardinality=2),
        PreprocessorConfig("none", categorical_name="onehot"),
    ),
    "polynomials": dataclasses.replace(SMALL, POLYNOMIAL_FEATURES=5),
    "fingerprints": dataclasses.replace(SMALL, FINGERPRINT_FEATURE=True),
    "rotated": dataclasses.replace(SMALL, FEATURE_SHIFT_METHOD="rotate"),
    "not shuffled": dataclasses.replace(SMALL, FEATURE_SHIFT_METHOD=None),
    "some rows": dataclasses.replace(SMALL, SUBSAMPLE_SAMPLES=20),
    "some columns": transforms(PreprocessorConfig("none", max_features_per_estimator=3)),
    "targets": dataclasses.replace(SMALL, REGRESSION_Y_PREPROCESS_TRANSFORMS=(None, "quantile_norm", "safepower")),
    "on the GPU": dataclasses.replace(SMALL, ENABLE_GPU_PREPROCESSING=True),
}


def numbers():
    rng = np.random.default_rng(0)
    X = rng.standard_normal((60, 5)) * 10.0 ** np.arange(-2, 3)
    return X[:40], np.exp(X[:40, 0]) + X[:40, 2], X[40:]


def mixed():
    """With categories, gaps, infinities, a constant column and rows that are alike."""
    rng = np.random.default_rng(1)
    X = pd.DataFrame(rng.standard_normal((60, 4)), columns=list("abcd"))
    X["kind"] = pd.Categorical(rng.choice(["x", "y", "z"], 60))
    X["few"] = rng.integers(0, 2, 60)
    X["one"] = 1.0
    X.loc[rng.random(60) < 0.2, "b"] = np.nan
    X.loc[[3, 50], "c"] = np.inf
    X.iloc[7] = X.iloc[8]
    return X[:40], np.exp(X["a"][:40].to_numpy()), X[40:]


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()  # the signs of zeros too


@pytest.mark.parametrize("table", [numbers, mixed])
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.filterwarnings("ignore")
def test_members_are_tabpfns_own(tiny_host, name, table):
    X, y, X_test = table()
    options = {
        "model_path": tiny_host.specs,
        "device": "cpu",
        "inference_precision": torch.float32,
        "n_estimators": 8,
        "random_state": 3,
        "inference_config": dataclasses.replace(CONFIGS[name], PASSTHROUGH_INF=True),
    }
    plain, job = TabPFNRegressor(**options), preparing.Job(3, X, y, X_test)
    try:
        plain.fit(X, y)
    except Exception as error:
        assert str(error) in str(preparing.prepare(job, options, None))
        return
    plain.executor_ = expected = preparing.InputRecorder(plain.executor_.ensemble_members)
    plain.get_embeddings(X_test)
    with sklearn.config_context(transform_output="default"):
        actual = preparing.fitted(job, options).executor_
    assert len(actual.members) == len(expected.members) == 8
    levels = np.linspace(-3, 3, 7).reshape(-1, 1)
    for ours, own, X_ours, X_own in zip(
        actual.members, expected.members, actual.X_tests, expected.X_tests, strict=True
    ):
        same(ours.X_train, own.X_train)
        same(ours.y_train, own.y_train)
        same(X_ours, X_own)
        assert ours.feature_schema == own.feature_schema
        transforms = ours.config.target_transform, own.config.target_transform
        assert (transforms[0] is None) == (transforms[1] is None)
        if transforms[0] is not None:
            for undone in (levels, 2 * levels, levels):
                same(*(transform.inverse_transform(undone) for transform in transforms))
        left, right = (dataclasses.asdict(dataclasses.replace(m.config, target_transform=None)) for m in (ours, own))
        assert left == right


def fits(monkeypatch, config, table=numbers):
    """How often the first steps, and a target's transform, are fitted."""
    seen = {"steps": 0, "targets": 0}
    fit_transform = PreprocessingPipeline.fit_transform

    def counted(self, *args):
        seen["steps"] += not isinstance(self.steps[0][0], sharing._FirstSteps)
        return fit_transform(self, *args)

    def counted_target(self, y):
        seen["targets"] += self._fitted is None
        return fit_target(self, y)

    fit_target = sharing._TargetTransform.fit_transform
    monkeypatch.setattr(PreprocessingPipeline, "fit_transform", counted)
    monkeypatch.setattr(sharing._TargetTransform, "fit_transform", counted_target)
    host = load_host("small")
    options = {"model_path": host.specs, "device": "cpu", "inference_config": config}
    assert not isinstance(preparing.prepare(preparing.Job(0, *table()), options, None), Exception)
    return seen


@pytest.mark.filterwarnings("ignore")
def test_what_is_shared(monkeypatch):
    # Two configs of the columns, one transform of the target.
    assert fits(monkeypatch, SMALL) == {"steps": 2, "targets": 1}


@pytest.mark.filterwarnings("ignore")
def test_what_is_not_shared(monkeypatch):
    """Other rows, other columns, and random steps in front."""
    some_rows = dataclasses.replace(SMALL, SUBSAMPLE_SAMPLES=20)
    assert fits(monkeypatch, some_rows) == {"steps": 8, "targets": 4}
