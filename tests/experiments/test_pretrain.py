"""Training the small host: batches, resuming, and a checkpoint that TabPFN loads."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures.tabpfn_v3 import TabPFNV3Config, get_architecture

from oretrofit.experiments.folders import FolderInUseError
from oretrofit.experiments.pretrain import (
    SMALL_CONFIG,
    PretrainSettings,
    draw_batch,
    new_host,
    pretrain,
    save_host,
    what_is_kept,
)
from oretrofit.retrofit.hosts import load_host, weights_sha256
from oretrofit.retrofit.tabpfn_api import FullSupportBarDistribution

SETTINGS = PretrainSettings(steps=4, warmup=2, max_rows=40, max_columns=3, cells=200, batch_rows=80)
HOST = "oretrofit-small-v3-regressor.safetensors"


def test_batches_are_one_shape_and_standardised_by_train_rows():
    for step in range(20):
        x_RBC, y_RB, train = draw_batch(replace(SETTINGS, seed=1), step)
        assert x_RBC.shape[:2] == y_RB.shape
        assert 0 < train < len(y_RB)
        assert not x_RBC.isinf().any()
        torch.testing.assert_close(y_RB[:train].mean(0), torch.zeros(y_RB.shape[1]), atol=1e-4, rtol=0)
        torch.testing.assert_close(y_RB[:train].std(0, correction=0), torch.ones(y_RB.shape[1]), atol=1e-3, rtol=0)


def test_a_resumed_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    for _ in pretrain(SETTINGS, tmp_path / "whole"):
        pass
    part = pretrain(SETTINGS, tmp_path / "parts", save_every=2, log_every=1)
    next(part)
    assert "no state yet" in what_is_kept(tmp_path / "parts")
    while next(part)[0] < 3:  # stopped after the state of step 2 was saved
        pass
    part.close()
    assert what_is_kept(tmp_path / "parts").startswith(f"The last state is in {tmp_path / 'parts'};")
    for _ in pretrain(SETTINGS, tmp_path / "parts", log_every=1):
        pass
    whole, parts = (load_host(tmp_path / name / HOST) for name in ("whole", "parts"))
    assert whole.sha256 == parts.sha256
    steps = [line.split(",")[0] for line in (tmp_path / "parts" / "loss.csv").read_text().split()]
    assert steps == ["step", "1", "2", "3", "4"]

    table = np.random.default_rng(0).standard_normal((30, 3))
    regressor = TabPFNRegressor(model_path=tmp_path / "whole" / HOST, n_estimators=1, device="cpu")
    assert np.isfinite(regressor.fit(table[:20], table[:20, 0]).predict(table[20:])).all()


def test_tables_drawn_ahead_in_processes_are_the_same(tmp_path):
    losses = {}
    for workers in (0, 2):
        folder = tmp_path / str(workers)
        losses[workers] = list(pretrain(SETTINGS, folder, workers=workers, log_every=1))
    assert losses[0] == losses[2] and len(losses[0]) == 4
    assert len({load_host(tmp_path / name / HOST).sha256 for name in ("0", "2")}) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_training_on_a_gpu_goes_on_from_a_cpus_state(folder):
    steps = [step for step, loss in pretrain(SETTINGS, folder, device="cuda", log_every=1) if np.isfinite(loss)]
    assert steps == [3, 4]
    assert load_host(folder / HOST)


def test_new_weights_are_those_of_the_seed_and_leave_torchs_own_state_alone():
    before = torch.random.get_rng_state()
    first, again, other = (weights_sha256(new_host(seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(0)
    assert weights_sha256(get_architecture(TabPFNV3Config(**SMALL_CONFIG))) == first


def test_a_training_may_begin_with_a_hosts_weights(tmp_path):
    for _ in pretrain(SETTINGS, tmp_path / "first"):
        pass
    start = str(tmp_path / "first" / HOST)
    settings = replace(SETTINGS, seed=5, start=start)
    _, loss = next(pretrain(settings, tmp_path / "second", log_every=1))

    model = load_host(start).model
    x_RBC, y_RB, train = draw_batch(settings, 0)
    with torch.no_grad():
        logits_MBL = model(x_RBC, y_RB[:train])
        expected = FullSupportBarDistribution(model.regression_borders)(logits_MBL, y_RB[train:]).mean()
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_host_of_another_architecture_is_no_start(tmp_path, tiny_host):
    file = tmp_path / "tiny-v3.safetensors"
    save_host(tiny_host.model, file)
    with pytest.raises(ValueError, match=r"tiny-v3\.safetensors is no host of the small architecture"):
        next(pretrain(replace(SETTINGS, start=str(file)), tmp_path / "run"))


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """The folder of a run that ended after its second step."""
    folder = tmp_path_factory.mktemp("stopped")
    run = pretrain(SETTINGS, folder, save_every=1, log_every=1)
    for _ in range(3):  # the state of a step is saved when the next one is asked for
        next(run)
    run.close()
    return folder


@pytest.fixture
def folder(stopped, tmp_path):
    """A copy of it."""
    return Path(shutil.copytree(stopped, tmp_path / "run"))


def test_half_a_line_of_the_log_is_left_out(folder):
    log = folder / "loss.csv"
    lines = log.read_text().splitlines()[:3]
    log.write_text("\n".join(lines) + "\n1")  # of step 10, say
    for _ in pretrain(SETTINGS, folder, log_every=1):
        pass
    assert log.read_text().splitlines()[:3] == lines
    assert [line.split(",")[0] for line in log.read_text().splitlines()] == ["step", "1", "2", "3", "4"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("state.pt", b"", r"state\.pt is no state of a training"),
        ("state.pt", b"PK\x03\x04 and no more", r"state\.pt is no state of a training"),
        ("loss.csv", b"\xff\xfes\x00\n\x00", r"loss\.csv is no log of a training"),
        ("loss.csv", b"step,loss\nten,1\n", r"loss\.csv is no log of a training"),
    ],
)
def test_files_that_cannot_be_read_are_named_and_left_alone(folder, name, content, message):
    (folder / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"{message}.*; remove it, or choose another --out"):
        next(pretrain(SETTINGS, folder))
    assert (folder / name).read_bytes() == content


@pytest.mark.parametrize("part", ["model", "optimizers"])
def test_a_state_that_lacks_something_is_named(folder, part):
    state = torch.load(folder / "state.pt", weights_only=True)
    state[part] = {} if part == "model" else state[part][:1]
    torch.save(state, folder / "state.pt")
    with pytest.raises(ValueError, match=r"state\.pt is no state of a training .*; remove it, or choose another --out"):
        next(pretrain(SETTINGS, folder))


def test_a_run_that_began_with_other_weights_of_the_same_name_is_not_gone_on_with(tmp_path):
    start = tmp_path / "start-v3.safetensors"
    save_host(new_host(1), start)
    settings = replace(SETTINGS, steps=2, start=str(start))
    run = pretrain(settings, tmp_path / "run", log_every=1, save_every=1)
    next(run), next(run)  # the state of a step is saved when the next one is asked for
    run.close()
    save_host(new_host(2), start)
    with pytest.raises(ValueError, match=r"began with other weights of \S*start-v3\.safetensors"):
        next(pretrain(settings, tmp_path / "run"))
    save_host(new_host(1), start)
    assert [step for step, _ in pretrain(settings, tmp_path / "run", log_every=1)] == [2]


def test_one_writer(folder):
    run = pretrain(SETTINGS, folder, log_every=1)
    next(run)
    with pytest.raises(FolderInUseError, match="in use by process"):
        next(pretrain(SETTINGS, folder))
    run.close()
    next(pretrain(SETTINGS, folder, log_every=1))


def test_other_settings_are_not_mixed_into_a_run(folder):
    with pytest.raises(ValueError, match="other settings"):
        next(pretrain(replace(SETTINGS, seed=1), folder))
