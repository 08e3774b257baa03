"""Every way in which TabPFN runs a model: a patched one strays from its plain run no further than the host does.

tau is so large that gating moves predictions much more than any tolerance here.
"""

import copy
import dataclasses
import functools
import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.base import clone
from tabpfn.architectures import tabpfn_v3
from tabpfn.settings import settings as tabpfn_settings

from oretrofit.patches import tabpfn_v3 as o
from oretrofit.retrofit.patcher import carriers, patch_model

VARIANTS = ["oa", "full-o", "closed"]


CONFIGS = {"few heads": {"icl_num_kv_heads": 2, "icl_num_kv_heads_test": 1}, "all heads": {}}


@pytest.fixture(scope="module")
def runs_of(make_host, gating_taus, regressor, table):
    """For one of CONFIGS: fit(variant, **settings), predict(variant, **settings) and the plain runs' predictions."""
    X, y, X_test = table

    @functools.cache
    def build(name):
        host = make_host(**CONFIGS[name])
        models = {"host": host.model}
        for variant in VARIANTS:
            models[variant] = copy.deepcopy(host.model)
            taus = gating_taus(host, run_on(host), variant)
            # Gates have to show beside the rounding of half precision, too, and `oa` has few; `closed` has the most.
            more = {"oa": 4, "full-o": 1.25, "closed": 1}[variant]
            patch_model(models[variant], variant, {site: more * tau for site, tau in taus.items()})

        def fit(variant, prepare=lambda model: None, **settings):
            specs = host.specs_with(models[variant])
            prepare(specs.model)
            return regressor(specs, **settings).fit(X, y)

        def predict(variant, **settings):
            return fit(variant, **settings).predict(X_test)

        plain = {variant: predict(variant) for variant in models}
        return SimpleNamespace(host=host, models=models, fit=fit, predict=predict, plain=plain, X_test=X_test)

    def run_on(host):
        return lambda model: regressor(dataclasses.replace(host.specs, model=model)).fit(X, y).predict(X_test)

    return build


@pytest.fixture(scope="module")
def runs(runs_of):
    return runs_of("few heads")


def rms(a, b):
    return float(np.sqrt(np.mean(np.square(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)))))


def check(runs, in_mode, plain=None):
    """`in_mode(variant)` differs from `plain[variant]` about as much as on the host, and less than the host does."""
    plain = runs.plain if plain is None else plain
    noise = rms(in_mode("host"), plain["host"])
    for variant in VARIANTS:
        allowed = 4 * noise + 1e-5 * np.abs(plain[variant]).max()
        assert rms(in_mode(variant), plain[variant]) <= allowed, variant
        assert rms(plain["host"], plain[variant]) > allowed, variant


@pytest.fixture
def seen(monkeypatch):
    """What reaches the model: how many members a forward, in what precision, in row chunks or not, cached how."""
    seen = {name: set() for name in ("members", "saving", "dtype", "autocast", "cache", "chunks")}
    stages, rows = tabpfn_v3.TabPFNV3._stages_0_to_2, tabpfn_v3.TabPFNV3._process_row_chunk

    @functools.wraps(stages)  # so that it is no other function to the check for drift
    def stages_0_to_2(self, x, y, **options):
        seen["members"].add(x.shape[1])
        seen["saving"].add(options["performance_options"].save_peak_memory_factor is not None)
        seen["dtype"].add(next(self.parameters()).dtype)
        seen["autocast"].add(torch.is_autocast_enabled("cpu"))
        cache = options["kv_cache"]
        if cache is not None and isinstance(self, o.OTabPFNV3):
            seen["cache"] |= {(type(cache), type(entry), entry.key.dtype) for entry in cache.kv.values()}
        return stages(self, x, y, **options)

    @functools.wraps(rows)
    def process_row_chunk(self, *args, **kwargs):
        seen["chunks"].add(kwargs["chunk_start"] > 0)
        return rows(self, *args, **kwargs)

    monkeypatch.setattr(tabpfn_v3.TabPFNV3, "_stages_0_to_2", stages_0_to_2)
    monkeypatch.setattr(tabpfn_v3.TabPFNV3, "_process_row_chunk", process_row_chunk)
    return seen


def cache(precision=None, **settings):
    return {"fit_mode": "fit_with_cache", "kv_cache_precision": precision, **settings}


def stored(dtype):
    return {"cache": {(o.OTabPFNV3Cache, o.OQuantizedKVCacheEntry, dtype)}}


DENSE = {"cache": {(o.OTabPFNV3Cache, o.OKVCacheEntry, torch.float32)}}
CHUNKS = {"model.inference_chunk_cells": 60, "model.inference_col_chunk_size": 2}
ALONE = {"max_batched_estimator_rows": 0}
JOINED = {"max_batched_estimator_rows": 30}  # caches built one by one and concatenated
TEST_CHUNKS = {"max_batched_test_rows": 8}

# name -> (the estimator's settings, TabPFN's and the model's own, what the model must have seen)
MODES = {
    "plain": ({}, {}, {"members": {2}, "dtype": {torch.float32}, "autocast": {False}, "chunks": {False}}),
    "low memory": ({"fit_mode": "low_memory"}, {}, {"members": {2}}),
    "one member at a time": ({}, ALONE, {"members": {1}}),
    "low memory, one at a time": ({"fit_mode": "low_memory"}, ALONE, {"members": {1}}),
    "saving memory": ({"memory_saving_mode": True}, {}, {"saving": {True}}),
    "not saving memory": ({"memory_saving_mode": False}, {}, {"saving": {False}}),
    "chunks": ({}, CHUNKS, {"chunks": {False, True}}),
    "chunks, saving memory": ({"memory_saving_mode": True}, CHUNKS, {"chunks": {False, True}, "saving": {True}}),
    "cache": (cache("auto"), {}, DENSE | {"members": {2}}),
    "cache, saving memory": (cache("auto", memory_saving_mode=True), {}, DENSE | {"saving": {True}}),
    "cache, chunks": (cache("auto"), CHUNKS, DENSE | {"chunks": {False, True}}),
    "cache, chunks of test rows": (cache("auto"), TEST_CHUNKS, DENSE),
    "cache, joined": (cache("auto"), JOINED, DENSE | {"members": {1, 2}}),
    "cache, one member at a time": (cache("auto"), ALONE, DENSE | {"members": {1}}),
    "cache, kept apart": (cache("auto", keep_cache_on_device=False), {}, DENSE),
    "cache by default": (cache(), {}, stored(torch.int8)),
    "cache, int8": (cache("int8"), {}, stored(torch.int8)),
    "cache, int8, joined": (cache("int8"), JOINED, stored(torch.int8)),
    "cache, int8, saving memory": (cache("int8", memory_saving_mode=True), {}, stored(torch.int8)),
    "cache, fp8": (cache("fp8"), {}, stored(torch.float8_e4m3fn)),
    "cache, fp8, joined": (cache("fp8"), JOINED, stored(torch.float8_e4m3fn)),
    "cache, adaptive": (cache("adaptive"), {}, stored(torch.int8)),
    "float16": ({"inference_precision": torch.float16}, {}, {"dtype": {torch.float16}}),
    "bfloat16": ({"inference_precision": torch.bfloat16}, {}, {"dtype": {torch.bfloat16}}),
    "float64": ({"inference_precision": torch.float64}, {}, {"dtype": {torch.float64}}),
    "auto": ({"inference_precision": "auto"}, {}, {"dtype": {torch.float32}}),
    "autocast": ({"inference_precision": "autocast"}, {}, {"dtype": {torch.float32}, "autocast": {True}}),
    "cache, float16": (cache("int8", inference_precision=torch.float16), {}, stored(torch.int8)),
    "cache, float64": (cache("int8", inference_precision=torch.float64), {}, stored(torch.int8)),
    "cache, autocast": (cache("int8", inference_precision="autocast"), {}, stored(torch.int8) | {"autocast": {True}}),
    "cache, autocast, dense": (cache("auto", inference_precision="autocast"), {}, {"autocast": {True}}),
}


@pytest.mark.parametrize(
    ("config", "mode"),
    [("few heads", mode) for mode in MODES] + [("all heads", mode) for mode in MODES if "cache" in mode],
)
def test_mode(runs_of, seen, monkeypatch, config, mode):
    runs = runs_of(config)
    for values in seen.values():
        values.clear()
    settings, own, expected = MODES[mode]
    # TabPFN offers autocast where the CPU is fast at it; torch has it everywhere.
    if settings.get("inference_precision") == "autocast":
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)
    for name, value in own.items():
        if not name.startswith("model."):
            monkeypatch.setattr(tabpfn_settings.tabpfn, name, value)

    def prepare(model):
        for name, value in own.items():
            if name.startswith("model."):
                setattr(model, name.removeprefix("model."), value)

    check(runs, lambda variant: runs.predict(variant, prepare=prepare, **settings))
    assert {name: seen[name] for name in expected} == expected


def test_presence_in_the_cache_is_what_makes_it_right(runs):
    """The gap between a cache with and without it, at the tolerance of `test_mode`."""
    for variant in VARIANTS:
        fitted = runs.fit(variant, **cache("auto"))
        right = rms(fitted.predict(runs.X_test), runs.plain[variant])
        for kept in fitted.executor_.kv_caches:
            for entry in kept.kv.values():
                entry.log_presence = torch.zeros_like(entry.log_presence)
        wrong = rms(fitted.predict(runs.X_test), runs.plain[variant])
        assert wrong > 100 * right + 1e-3 * np.abs(runs.plain[variant]).max()


def test_several_tables_in_one_batch(runs, seen):
    rng = np.random.default_rng(5)
    tables = [(rng.standard_normal((20, 3)), 3 * rng.standard_normal(20) + i, runs.X_test + i) for i in range(3)]

    def batched(variant):
        return np.concatenate(runs.fit(variant).predict_batched(*map(list, zip(*tables, strict=True))))

    plain = {
        variant: np.concatenate([runs.fit(variant).fit(X, y).predict(X_test) for X, y, X_test in tables])
        for variant in runs.models
    }
    seen["members"].clear()
    check(runs, batched, plain)
    assert seen["members"] == {3}


@pytest.mark.parametrize(
    ("source", "settings"),
    [
        ("test", {"fit_mode": "low_memory"}),
        ("test", cache("auto")),
        ("test", cache("int8")),
        ("train", {"fit_mode": "low_memory"}),
        ("train", {"memory_saving_mode": True}),
    ],
)
def test_embeddings(runs, source, settings):
    plain = {variant: runs.fit(variant).get_embeddings(runs.X_test, source) for variant in runs.models}
    assert plain["oa"].shape == (2, 24 if source == "train" else 9, 32)
    check(runs, lambda variant: runs.fit(variant, **settings).get_embeddings(runs.X_test, source), plain)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda fitted: pickle.loads(pickle.dumps(fitted)),
    "clone": lambda fitted: None,  # below: unfitted
    "to": lambda fitted: fitted.to("cpu") or fitted,
}


@pytest.mark.parametrize("settings", [{}, cache("int8"), cache("auto"), {"fit_mode": "low_memory"}])
@pytest.mark.parametrize("way", COPIES)
def test_copies_predict_the_same(runs, table, way, settings):
    X, y, X_test = table
    for variant in ("full-o", "closed"):
        fitted = runs.fit(variant, **settings)
        expected = fitted.predict(X_test)
        if way == "clone":
            other = clone(fitted)
            assert other.model_path.model is not fitted.model_path.model
            other.fit(X, y)
        else:
            other = COPIES[way](fitted)
        del fitted
        assert type(other.models_[0]) is type(runs.models[variant])
        np.testing.assert_allclose(other.predict(X_test), expected, rtol=1e-6)


def test_gradients_through_the_estimator(runs, regressor, table):
    """`differentiable_input`: the gradient of all inputs, against finite differences and the host's."""
    X, y, X_test = (torch.tensor(part) for part in table)
    direction = torch.randn(33, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def loss(model, inputs):
        fitted = regressor(
            runs.host.specs_with(model),
            n_estimators=1,
            differentiable_input=True,
            inference_precision=torch.float64,
            inference_config={"FINGERPRINT_FEATURE": False},  # a hash of each row
        )
        fitted.fit_with_differentiable_input(inputs[:24], y)
        (logits, _), *_ = fitted.executor_.iter_outputs(inputs[24:], autocast=False, task_type="regression")
        return logits.softmax(-1).square().sum()

    def gradient(model):
        inputs = torch.cat([X, X_test]).requires_grad_()
        loss(model, inputs).backward()
        return inputs.grad

    on_host = gradient(runs.models["host"])
    assert on_host.abs().min() > 0
    for variant in VARIANTS:
        model = runs.models[variant]
        actual, step = gradient(model), 1e-4 * direction
        with torch.no_grad():
            inputs = torch.cat([X, X_test])
            difference = (loss(model, inputs + step) - loss(model, inputs - step)) / 2
        assert (actual * step).sum().item() == pytest.approx(difference.item(), rel=1e-5)
        assert (actual - on_host).abs().max() > 0.1 * on_host.abs().max()
        tiny = copy.deepcopy(runs.host.model)
        patch_model(tiny, variant, dict.fromkeys(carriers(tiny, variant), 1e-30))
        # The host rounds the logarithm of its number of keys to float32.
        torch.testing.assert_close(gradient(tiny), on_host, rtol=0, atol=1e-7 * on_host.abs().max().item())


@pytest.mark.parametrize("variant", ["closed"])
def test_compiled(make_host, regressor, table, gating_taus, monkeypatch, variant):
    """Traced by dynamo, with everything symbolic; the code generator behind it takes minutes and is torch's own."""
    X, y, X_test = table
    host = make_host(dist_embed_num_blocks=1, nlayers=1, use_nan_indicators=False)
    model = copy.deepcopy(host.model)
    patch_model(
        model, variant, gating_taus(host, lambda m: regressor(host.specs_with(m)).fit(X, y).predict(X_test), variant)
    )
    plain = regressor(host.specs_with(model)).fit(X, y).predict(X_test)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager", fullgraph=True))
    compiled = regressor(host.specs_with(model), enable_torch_compile=True).fit(X, y)
    np.testing.assert_allclose(compiled.predict(X_test), plain, rtol=1e-5)
    assert len(vars(compiled.models_[0])["_torch_compile_cache"]) == 2
    copied = pickle.loads(pickle.dumps(compiled)).models_[0]  # without the compiled functions
    assert type(copied) is type(model)
    assert "_torch_compile_cache" not in vars(copied)
