"""Training the small host: batches, resuming, and a checkpoint that TabPFN loads."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit.experiments.pretrain import PretrainSettings, draw_batch, pretrain
from oretrofit.retrofit.hosts import load_host

SETTINGS = PretrainSettings(steps=4, warmup=2, max_rows=40, max_columns=3, cells=200, batch_rows=80)
HOST = "oretrofit-small-v3-regressor.safetensors"


def test_batches_are_one_shape_and_standardised_by_train_rows():
    for step in range(20):
        x_RBC, y_RB, train = draw_batch(np.random.default_rng([1, step]), SETTINGS)
        assert x_RBC.shape[:2] == y_RB.shape
        assert 0 < train < len(y_RB)
        assert not x_RBC.isinf().any()
        torch.testing.assert_close(y_RB[:train].mean(0), torch.zeros(y_RB.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(y_RB[:train].std(0, correction=0), torch.ones(y_RB.shape[1]), atol=1e-3, rtol=0)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    for _ in pretrain(SETTINGS, tmp_path / "whole"):
        pass
    part = pretrain(SETTINGS, tmp_path / "parts", save_every=2, log_every=1)
    while next(part)[0] < 3:  # stopped after the state of step 2 was saved
        pass
    part.close()
    for _ in pretrain(SETTINGS, tmp_path / "parts", log_every=1):
        pass
    whole, parts = (load_host(tmp_path / name / HOST) for name in ("whole", "parts"))
    assert whole.sha256 == parts.sha256
    steps = [line.split(",")[0] for line in (tmp_path / "parts" / "loss.csv").read_text().split()]
    assert steps == ["step", "1", "2", "3", "4"]

    table = np.random.default_rng(0).standard_normal((30, 3))
    regressor = TabPFNRegressor(model_path=tmp_path / "whole" / HOST, n_estimators=1, device="cpu")
    assert np.isfinite(regressor.fit(table[:20], table[:20, 0]).predict(table[20:])).all()


def test_other_settings_are_not_mixed_into_a_run(tmp_path):
    run = pretrain(SETTINGS, tmp_path, save_every=1, log_every=1)
    next(run)
    next(run)
    run.close()
    with pytest.raises(ValueError, match="other settings"):
        next(pretrain(replace(SETTINGS, seed=1), tmp_path))
