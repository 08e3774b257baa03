"""Retrofits as TabPFN's own checkpoints: loaded by path, they are what the specs are, in every way of fitting."""

import copy
import pickle
import subprocess
import sys
import warnings
import zipfile
from dataclasses import asdict

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from tabpfn import TabPFNRegressor
from tabpfn.checkpoint import Checkpoint, save_as_safetensors
from tabpfn.inference import InferenceEngineCachePreprocessing, InferenceEngineExplicitKVCache, InferenceEngineOnDemand
from tabpfn.model_loading import save_tabpfn_model

from oretrofit import HostError, RetrofitError, load, load_host, patch
from oretrofit.patches.tabpfn_v3 import OKVCacheEntry, OQuantizedKVCacheEntry, OTabPFNV3
from oretrofit.retrofit import tabpfn_api
from oretrofit.retrofit.hosts import random_host

VARIANTS = ["oa", "full-o", "closed"]


@pytest.fixture(scope="module")
def retrofits(tiny_host):
    """One of each variant, calibrated with so large a delta that it shows."""
    return {variant: patch(tiny_host, variant, tables=1, delta=0.2) for variant in VARIANTS}


@pytest.fixture(scope="module")
def files(retrofits, tmp_path_factory):
    """The checkpoint of each."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {variant: folder / f"{variant}-v3.safetensors" for variant in VARIANTS}
    for variant, path in paths.items():
        retrofits[variant].save_checkpoint(path)
    return paths


@pytest.fixture
def written(files, tmp_path):
    """A function that writes the content of the `oa` checkpoint after a change, and returns the path."""

    def write(change):
        content = copy.deepcopy(Checkpoint(files["oa"]).load())
        change(content)
        path = tmp_path / "changed-v3.safetensors"
        save_as_safetensors(content, path)
        return path

    return write


# ---- In TabPFN's estimator -----------------------------------------------------------------------


def cache(precision, **settings):
    return {"fit_mode": "fit_with_cache", "kv_cache_precision": precision, **settings}


FITS = [
    ({"fit_mode": "low_memory"}, InferenceEngineOnDemand),
    ({"fit_mode": "fit_preprocessors"}, InferenceEngineCachePreprocessing),
    (cache("auto"), InferenceEngineExplicitKVCache),
    (cache("int8", inference_config={"FINGERPRINT_FEATURE": False}), InferenceEngineExplicitKVCache),
    (cache("auto", inference_precision=torch.float64), InferenceEngineExplicitKVCache),
    ({"inference_precision": torch.float16}, InferenceEngineCachePreprocessing),
    ({"inference_precision": "auto", "softmax_temperature": 0.7}, InferenceEngineCachePreprocessing),
]


@pytest.mark.parametrize(("settings", "engine"), FITS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_regressor_by_path_is_the_one_by_specs_and_saves_its_fit(
    retrofits, files, regressor, table, tmp_path, settings, engine, variant
):
    X, y, X_test = table
    X, X_test = (pd.DataFrame(part, columns=list("abc")) for part in (X, X_test))
    for part in (X, X_test):
        part["d"] = np.where(part["a"] > 0, "plus", "minus")
    expected = regressor(retrofits[variant].specs, **settings).fit(X, y).predict(X_test, output_type="main")
    fitted = regressor(str(files[variant]), **settings).fit(X, y)
    for name, values in fitted.predict(X_test, output_type="main").items():
        assert np.array_equal(values, expected[name])

    fitted.save_fit_state(tmp_path / "some.tabpfn_fit")
    with zipfile.ZipFile(tmp_path / "some.tabpfn_fit") as archive:
        archive.extractall(tmp_path / "unpacked")
    assert joblib.load(tmp_path / "unpacked" / "executor_state.joblib").model_caches is None  # no weights
    loaded = TabPFNRegressor.load_from_fit_state(tmp_path / "some.tabpfn_fit", device="cpu")
    assert type(loaded.executor_) is engine
    assert type(loaded.models_[0]) is type(retrofits[variant].model)
    assert isinstance(loaded.models_[0], OTabPFNV3)
    if engine is InferenceEngineExplicitKVCache:
        kinds = {type(entry) for kept in loaded.executor_.kv_caches for entry in kept.kv.values()}
        assert kinds == {OQuantizedKVCacheEntry if settings["kv_cache_precision"] == "int8" else OKVCacheEntry}
    for name, values in loaded.predict(X_test, output_type="main").items():
        assert np.array_equal(values, expected[name])
    # It can be fitted anew.
    assert np.isfinite(loaded.fit(X[:10], y[:10]).predict(X_test)).all()


def test_clones_and_pickles_of_a_regressor_by_path_carry_the_path(files, regressor, table):
    X, y, X_test = table
    unfitted = regressor(str(files["closed"]))
    expected = unfitted.fit(X, y).predict(X_test)
    content = pickle.dumps(clone(unfitted))
    assert len(content) < 2000
    assert np.array_equal(pickle.loads(content).fit(X, y).predict(X_test), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(unfitted)).predict(X_test), expected)  # fitted: with the weights


def test_the_cpu_takes_as_many_rows_as_of_v3(files, regressor, table):
    assert regressor(files["oa"]).fit(*table[:2]).inference_config_.MAX_CPU_SAMPLES == 5000


def test_a_host_with_a_distribution_of_its_own_keeps_it(tiny_host, regressor, table, tmp_path):
    X, y, X_test = table
    retrofit = patch(regressor(tiny_host.specs).fit(X, y), "full-o", tau=1.0)
    assert retrofit.host.norm_criterion is not None
    with torch.no_grad():
        retrofit.host.norm_criterion.borders.mul_(1.5)  # not the model's, so that it shows which is used
    retrofit.save_checkpoint(tmp_path / "own-v3.safetensors")
    expected = regressor(retrofit.specs).fit(X, y).predict(X_test)
    assert np.array_equal(regressor(tmp_path / "own-v3.safetensors").fit(X, y).predict(X_test), expected)
    assert np.array_equal(regressor(load(tmp_path / "own-v3.safetensors").specs).fit(X, y).predict(X_test), expected)


def test_a_process_without_the_package_says_which_architecture_it_lacks(files):
    code = (
        "from tabpfn import TabPFNRegressor\n"
        f"regressor = TabPFNRegressor(model_path={str(files['oa'])!r}, device='cpu', n_estimators=1)\n"
        "X, y = [[0.0], [1.0], [2.0]], [0.0, 1.0, 2.0]\n"
        "try:\n    regressor.fit(X, y)\n"
        "except KeyError as error:\n    assert 'oretrofit_tabpfn_v3' in str(error)\n"
        "else:\n    raise SystemExit('loaded')\n"
        "from oretrofit import load\n"
        "print(type(regressor.fit(X, y).models_[0]).__name__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == "OTabPFNV3\n", done.stderr


# ---- Loaded as a retrofit ------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_load(retrofits, files, tiny_host, predict, variant):
    expected = predict(retrofits[variant].specs)
    assert np.abs(expected - predict(tiny_host.specs)).max() > 0.01
    for given in (None, tiny_host.model):
        loaded = load(files[variant], host=given)
        for attribute in ("variant", "sites", "settings", "statistics"):
            assert getattr(loaded, attribute) == getattr(retrofits[variant], attribute)
        assert np.array_equal(predict(loaded.specs), expected)
        assert np.array_equal(predict(loaded.host_specs), predict(tiny_host.specs))


def test_the_host_keeps_its_name(tmp_path):
    patch("small", "oa", tau=1.0).save_checkpoint(tmp_path / "mine-v3.safetensors")
    assert load(str(tmp_path / "mine-v3.safetensors")).host.name == "small"


def test_it_is_no_host(files):
    with pytest.raises(HostError, match=r"oa-v3\.safetensors is a retrofit.*oretrofit\.load"):
        load_host(files["oa"])


def test_a_host_is_no_retrofit(tiny_host, tmp_path):
    content = {
        "state_dict": tiny_host.model.state_dict(),
        "config": asdict(tiny_host.model.config),
        "architecture_name": "tabpfn_v3",
    }
    save_as_safetensors(content, tmp_path / "host-v3.safetensors")
    with pytest.raises(RetrofitError, match=r"host-v3\.safetensors.*of a host and not of a retrofit"):
        load(tmp_path / "host-v3.safetensors")


def test_other_weights_are_refused(files, written, tiny_host):
    with pytest.raises(RetrofitError, match="made for other weights"):
        load(files["oa"], host=random_host(seed=2, **asdict(tiny_host.model.config)))

    def nudge(content):
        content["state_dict"]["output_norm.weight"][0] += 1e-3

    with pytest.raises(RetrofitError, match=r"changed-v3.*made for other weights"):
        load(written(nudge))


BROKEN = {
    "no retrofit": lambda content: content["config"].pop("oretrofit"),
    "no host": lambda content: content["config"]["oretrofit"].pop("host"),
    "no tau": lambda content: content["config"]["oretrofit"].pop("tau"),
    "a list": lambda content: content["config"].update(oretrofit=[1]),
    "unknown variant": lambda content: content["config"]["oretrofit"].update(variant="o"),
    "tau missing at a site": lambda content: content["config"]["oretrofit"]["tau"].popitem(),
    "a weight missing": lambda content: content["state_dict"].pop("output_norm.weight"),
    "no architecture": lambda content: content.pop("architecture_name"),
    "unknown architecture": lambda content: content.update(architecture_name="oretrofit_tabpfn_v1"),
    "another format": lambda content: content["config"]["oretrofit"].update(format="oretrofit-9"),
}


@pytest.mark.parametrize("way", BROKEN)
def test_broken_files_are_refused(written, regressor, table, way):
    path = written(BROKEN[way])
    with pytest.raises(RetrofitError, match=r"changed-v3\.safetensors"):
        load(path)
    if way not in ("no host", "another format"):  # of which TabPFN needs nothing
        with pytest.raises((KeyError, TypeError, ValueError, RuntimeError)):
            regressor(path).fit(*table[:2])


# ---- Writing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.safetensors", "mine-v3.5.safetensors", "mine-v2.safetensors", "mine-v3.ckpt"])
def test_names_that_tabpfn_would_take_for_something_else(retrofits, tmp_path, name):
    with pytest.raises(ValueError, match=r"off its name.*mine-v3\.safetensors"):
        retrofits["oa"].save_checkpoint(tmp_path / name)
    assert not any(tmp_path.iterdir())


def test_an_earlier_file_stays_where_writing_fails(retrofits, files, tmp_path, monkeypatch):
    path = tmp_path / "mine-v3.safetensors"
    retrofits["oa"].save_checkpoint(path)
    before = path.read_bytes()

    def fail(content, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tabpfn_api, "save_as_safetensors", fail)
    with pytest.raises(OSError, match="No space left"):
        retrofits["closed"].save_checkpoint(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


# ---- TabPFN's own way of writing -----------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("by", ["specs", "path"])
def test_tabpfns_checkpoint_of_a_retrofit_is_the_host_and_says_so(
    retrofits, files, regressor, table, tmp_path, tiny_host, by, variant
):
    fitted = regressor(retrofits[variant].specs if by == "specs" else files[variant]).fit(*table[:2])
    with pytest.warns(UserWarning, match=r"unpatched host.*Retrofit\.save_checkpoint") as caught:
        save_tabpfn_model(fitted, tmp_path / "saved-v3.ckpt")
    (warning,) = caught
    assert warning.filename == __file__  # where it was asked for
    assert load_host(tmp_path / "saved-v3.ckpt").sha256 == tiny_host.sha256


def test_nothing_else_warns_of_the_state_dict(retrofits, regressor, table, tmp_path, tiny_host):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model = retrofits["oa"].model
        state = model.state_dict()
        assert state.keys() == tiny_host.model.state_dict().keys()
        copy.deepcopy(model).load_state_dict(state)
        torch.save(state, tmp_path / "state.pt")
        retrofits["oa"].save_checkpoint(tmp_path / "mine-v3.safetensors")
        assert retrofits["oa"].host.sha256 == tiny_host.sha256
        save_tabpfn_model(regressor(tiny_host.specs).fit(*table[:2]), tmp_path / "host-v3.ckpt")


def test_a_trained_model_is_not_written_as_if_it_had_not_been(tiny_host, tmp_path):
    retrofit = patch(tiny_host, "closed", tau=1e-3)
    retrofit.model.eval()
    retrofit.save_checkpoint(tmp_path / "same-v3.safetensors")
    with torch.no_grad():
        next(retrofit.model.parameters()).add_(1)
    with pytest.raises(ValueError, match="other weights than its host"):
        retrofit.save_checkpoint(tmp_path / "other-v3.safetensors")
    assert not (tmp_path / "other-v3.safetensors").exists()
