"""Saving and loading retrofits and the regressors fitted on them, and what the specs promise."""

import copy
import dataclasses
import json
import warnings
import zipfile
from dataclasses import asdict

import joblib
import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn.checkpoint import save_as_safetensors
from tabpfn.inference import InferenceEngineCachePreprocessing, InferenceEngineExplicitKVCache, InferenceEngineOnDemand
from tabpfn.model_loading import load_fitted_tabpfn_model, save_tabpfn_model

from oretrofit import load, load_host, patch
from oretrofit.patches.tabpfn_v3 import OKVCacheEntry, OQuantizedKVCacheEntry, OTabPFNV3
from oretrofit.retrofit.api import RetrofitError
from oretrofit.retrofit.hosts import HostError, random_host

VARIANTS = ["oa", "full-o", "closed"]


@pytest.fixture(scope="module")
def retrofits(tiny_host):
    """One of each variant, calibrated with so large a delta that it shows."""
    return {variant: patch(tiny_host, variant, tables=1, delta=0.2) for variant in VARIANTS}


@pytest.fixture
def saved(retrofits, tmp_path):
    """The JSON file of the `oa` retrofit, and what is in it."""
    path = tmp_path / "oa.json"
    retrofits["oa"].save(path)
    return path, json.loads(path.read_text())


# ---- Retrofits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", VARIANTS)
def test_save_and_load(retrofits, tiny_host, predict, tmp_path, variant):
    retrofit, path = retrofits[variant], tmp_path / "retrofit.json"
    retrofit.save(str(path))
    assert path.stat().st_size < 20_000  # no weights
    loaded = load(path, host=tiny_host.model)
    for attribute in ("variant", "sites", "settings", "statistics"):
        assert getattr(loaded, attribute) == getattr(retrofit, attribute)
    assert loaded.host.sha256 == tiny_host.sha256
    expected = predict(retrofit.specs)
    assert np.array_equal(predict(loaded.specs), expected)
    assert np.array_equal(predict(loaded.host_specs), predict(tiny_host.specs))
    assert np.abs(expected - predict(tiny_host.specs)).max() > 0.01
    # Once more round gives the same file.
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == path.read_text()


def test_the_file_names_its_host(tiny_host, predict, tmp_path, monkeypatch):
    checkpoint = {
        "state_dict": tiny_host.model.state_dict(),
        "config": asdict(tiny_host.model.config),
        "architecture_name": "tabpfn_v3",
        "inference_config": asdict(tiny_host.inference_config),
    }
    file, path = tmp_path / "my-v3.safetensors", tmp_path / "retrofit.json"
    save_as_safetensors(checkpoint, file)
    retrofit = patch(file, "oa", tau=1.0)
    retrofit.save(path)
    monkeypatch.chdir(tmp_path.parent)
    assert np.array_equal(predict(load(path).specs), predict(retrofit.specs))
    # Other weights under the same name, and none.
    checkpoint["state_dict"] = random_host(seed=2, **checkpoint["config"]).model.state_dict()
    save_as_safetensors(checkpoint, file)
    with pytest.raises(RetrofitError, match=r"made for other weights.*my-v3"):
        load(path)
    file.unlink()
    with pytest.raises(HostError, match="my-v3"):
        load(path)
    # The weights count, not their name.
    assert load(path, host=tiny_host.model).sites == retrofit.sites


def test_a_host_given_as_an_object_must_be_given_again(saved, make_host):
    path, _ = saved
    with pytest.raises(HostError, match=r"load\(FILE, host="):
        load(path)
    for other in (make_host(nlayers=2), random_host(seed=2, **asdict(make_host().model.config))):
        with pytest.raises(RetrofitError, match="made for other weights"):
            load(path, host=other)


BROKEN = {
    "format": lambda c: c | {"format": "oretrofit-2"},
    "no format": lambda c: {k: v for k, v in c.items() if k != "format"},
    "no host": lambda c: {k: v for k, v in c.items() if k != "host"},
    "host a string": lambda c: c | {"host": "small"},
    "host without hash": lambda c: c | {"host": {"name": "small"}},
    "unknown variant": lambda c: c | {"variant": "o"},
    "variant a list": lambda c: c | {"variant": ["oa"]},
    "no tau": lambda c: {k: v for k, v in c.items() if k != "tau"},
    "tau a number": lambda c: c | {"tau": 1.0},
    "tau missing at a site": lambda c: c | {"tau": dict(list(c["tau"].items())[1:])},
    "tau for another site": lambda c: c | {"tau": c["tau"] | {"x_embed": 1.0}},
    "tau a word": lambda c: c | {"tau": dict.fromkeys(c["tau"], "much")},
    "tau null": lambda c: c | {"tau": dict.fromkeys(c["tau"], None)},
    "tau zero": lambda c: c | {"tau": dict.fromkeys(c["tau"], 0.0)},
    "tau not finite": lambda c: c | {"tau": dict.fromkeys(c["tau"], float("nan"))},
    "a list": lambda c: [c],
    "null": lambda c: None,
}


@pytest.mark.parametrize("way", BROKEN)
def test_broken_files_are_refused(saved, tiny_host, way):
    path, content = saved
    path.write_text(json.dumps(BROKEN[way](content)))
    with pytest.raises(RetrofitError, match=r"oa\.json"):
        load(path, host=tiny_host)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b'{"format": "oretrofit-1"}', None])
def test_files_that_are_no_retrofit_are_refused(tmp_path, tiny_host, content):
    path = tmp_path / "oa.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RetrofitError, match=r"oa\.json"):
        load(path, host=tiny_host)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_table_has_a_row_for_each_site(retrofits, variant, tiny_host):
    table = retrofits[variant].table
    assert list(table["name"]) == [site.name for site in retrofits[variant].sites]
    assert list(table["tau"]) == [site.tau for site in retrofits[variant].sites]
    quantiles = ["sq_norm_q01", "sq_norm_q50", "sq_norm_q99"]
    assert (table[quantiles].diff(axis=1).iloc[:, 1:] >= 0).all(axis=None)
    assert ((0 < table["presence_min"]) & (table["presence_min"] <= table["presence_median"])).all()
    given = patch(tiny_host, variant, tau=2.0)
    assert given.settings == {"tau": 2.0}
    assert set(given.table["tau"]) == {2.0}
    assert "presence_min" not in given.table


@pytest.mark.parametrize(
    "wrong", [{"delta": 0}, {"delta": 1.0}, {"quantile": -1}, {"quantile": 2}, {"tables": 0}, {"tau": 0}, {"tau": -1.0}]
)
def test_numbers_out_of_range_are_refused(tiny_host, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s")):
        patch(tiny_host, "oa", **({"tables": 1} | wrong))


def test_progress_is_told(tiny_host):
    calls = []
    patch(tiny_host, "oa", tables=2, on_table=lambda: calls.append(1))
    assert len(calls) == 2


# ---- Specs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ["specs", "host_specs"])
def test_specs_are_fresh_copies(retrofits, predict, which):
    retrofit = retrofits["full-o"]
    before = copy.deepcopy(torch.nn.Module.state_dict(retrofit.model))
    expected = predict(getattr(retrofit, which))
    used = getattr(retrofit, which)
    predict(used, inference_precision=torch.float16)
    assert used.model.output_norm.weight.dtype == torch.float16  # what TabPFN does to a model it is given
    assert np.array_equal(predict(getattr(retrofit, which)), expected)
    assert not np.array_equal(predict(used), expected)
    after = torch.nn.Module.state_dict(retrofit.model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    used.inference_config.PREPROCESS_TRANSFORMS.clear()
    assert getattr(retrofit, which).inference_config.PREPROCESS_TRANSFORMS


@pytest.mark.parametrize("variant", VARIANTS)
def test_specs_take_as_many_rows_on_the_cpu_as_v3_does(retrofits, regressor, variant):
    specs = retrofits[variant].specs
    assert specs.inference_config.MAX_CPU_SAMPLES == 5000
    X = np.random.default_rng(0).standard_normal((1200, 2))
    out = regressor(specs, n_estimators=1).fit(X, X[:, 0]).predict(X[:5])
    assert np.isfinite(out).all()
    with pytest.raises(RuntimeError, match="CPU"):
        regressor(specs, n_estimators=1).fit(np.ones((5001, 1)), np.arange(5001.0))


def test_tabpfns_checkpoint_of_a_patched_model_is_the_host_and_says_so(
    retrofits, regressor, table, tmp_path, tiny_host
):
    fitted = regressor(retrofits["oa"].specs).fit(*table[:2])
    with pytest.warns(UserWarning, match=r"unpatched host.*Retrofit\.save"):
        save_tabpfn_model(fitted, tmp_path / "saved-v3.ckpt")
    assert load_host(tmp_path / "saved-v3.ckpt").sha256 == tiny_host.sha256
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        copy.deepcopy(retrofits["oa"].model)
        assert retrofits["oa"].host.sha256 == tiny_host.sha256
        save_tabpfn_model(regressor(tiny_host.specs).fit(*table[:2]), tmp_path / "host-v3.ckpt")


# ---- Fitted regressors ---------------------------------------------------------------------------


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
def test_save_and_load_a_fit(retrofits, regressor, table, tmp_path, settings, engine, variant):
    X, y, X_test = table
    X, X_test = (pd.DataFrame(part, columns=list("abc")) for part in (X, X_test))
    for part in (X, X_test):
        part["d"] = np.where(part["a"] > 0, "plus", "minus")
    specs = retrofits[variant].specs
    fitted = regressor(specs, **settings).fit(X, y)
    path = tmp_path / "some.tabpfn_fit"
    retrofits[variant].save_fit(fitted, path)
    assert fitted.model_path is specs
    expected = fitted.predict(X_test, output_type="main")
    with zipfile.ZipFile(path) as archive:
        archive.extractall(tmp_path / "unpacked")
    assert joblib.load(tmp_path / "unpacked" / "executor_state.joblib").model_caches is None  # no weights
    loaded = retrofits[variant].load_fit(str(path), device="cpu")
    assert type(loaded.executor_) is engine
    assert type(loaded.models_[0]) is type(specs.model)
    assert isinstance(loaded.models_[0], OTabPFNV3)
    if engine is InferenceEngineExplicitKVCache:
        kinds = {type(entry) for kept in loaded.executor_.kv_caches for entry in kept.kv.values()}
        assert kinds == {OQuantizedKVCacheEntry if settings["kv_cache_precision"] == "int8" else OKVCacheEntry}
    for name, values in loaded.predict(X_test, output_type="main").items():
        assert np.array_equal(values, expected[name])
    # It can be fitted anew.
    assert np.isfinite(loaded.fit(X[:10], y[:10]).predict(X_test)).all()


def test_a_fit_of_another_retrofit_is_refused(retrofits, regressor, table, tmp_path, tiny_host, make_host):
    path = tmp_path / "some.tabpfn_fit"
    retrofits["oa"].save_fit(regressor(retrofits["oa"].specs).fit(*table[:2]), path)
    twin = patch(tiny_host, "oa", tables=1, delta=0.2)
    assert np.array_equal(twin.load_fit(path).predict(table[2]), retrofits["oa"].load_fit(path).predict(table[2]))
    others = [
        retrofits["full-o"],
        patch(tiny_host, "oa", tables=1, delta=0.1),
        patch(random_host(seed=2, **asdict(tiny_host.model.config)), "oa", tables=1, delta=0.2),
    ]
    for other in others:
        with pytest.raises(RetrofitError, match="other weights, variant or taus"):
            other.load_fit(path)


@pytest.mark.parametrize("kind", ["missing", "garbage", "TabPFN's own", "JSON"])
def test_files_that_are_no_fit_of_a_retrofit_are_refused(retrofits, regressor, table, tmp_path, tiny_host, kind):
    path = tmp_path / "some.tabpfn_fit"
    if kind == "garbage":
        path.write_bytes(b"garbage" * 99)
    elif kind == "TabPFN's own":
        checkpoint = tmp_path / "my-v3.ckpt"
        save_tabpfn_model(regressor(tiny_host.specs).fit(*table[:2]), checkpoint)
        fitted = regressor(str(checkpoint)).fit(*table[:2])
        fitted.save_fit_state(path)
        assert np.array_equal(load_fitted_tabpfn_model(path).predict(table[2]), fitted.predict(table[2]))
    elif kind == "JSON":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("oretrofit.json", "{")
    with pytest.raises(RetrofitError, match=r"some\.tabpfn_fit"):
        retrofits["oa"].load_fit(path)


def test_what_cannot_be_saved_as_a_fit(retrofits, regressor, table, tmp_path):
    specs = retrofits["oa"].specs
    with pytest.raises(ValueError, match="not fitted"):
        retrofits["oa"].save_fit(regressor(specs), tmp_path / "some.tabpfn_fit")
    with pytest.raises(ValueError, match=r"\.tabpfn_fit.*some\.zip"):
        retrofits["oa"].save_fit(regressor(specs).fit(*table[:2]), tmp_path / "some.zip")
    assert not any(tmp_path.iterdir())


def test_save_fit_refuses_a_fit_of_other_weights_with_the_same_taus(tiny_host, regressor, table, tmp_path):
    X, y, _ = table
    other = random_host(seed=3, **dataclasses.asdict(tiny_host.model.config))
    fitted = regressor(patch(other, "oa", tau=1e-3).specs).fit(X, y)
    with pytest.raises(ValueError, match="not fitted on the specs"):
        patch(tiny_host, "oa", tau=1e-3).save_fit(fitted, tmp_path / "x.tabpfn_fit")


def test_a_tau_beyond_float32_is_refused_when_patching(tiny_host):
    with pytest.raises(ValueError, match="within float32"):
        patch(tiny_host, "oa", tau=1e300)


def test_a_host_that_ran_in_half_precision_is_announced(tiny_host, regressor, table):
    X, y, X_test = table
    fitted = regressor(tiny_host.specs, inference_precision=torch.float16).fit(X, y)
    fitted.predict(X_test)
    with pytest.warns(UserWarning, match="rounded its weights"):
        patch(fitted, "oa", tau=1e-3)
