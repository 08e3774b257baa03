"""Finding hosts: every way to name one gives the weights and predictions TabPFN gets from it, or a clear refusal."""

import copy
import dataclasses
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from tabpfn import TabPFNClassifier, TabPFNRegressor, model_loading
from tabpfn.architectures import tabpfn_v2_5, tabpfn_v3, tabpfn_v3_5
from tabpfn.base import ModelSpecs
from tabpfn.checkpoint import save_as_safetensors
from tabpfn.settings import settings

from oretrofit import load_host, patch
from oretrofit.calibration.variants import VARIANTS
from oretrofit.patches.tabpfn_v3 import OTabPFNV3
from oretrofit.retrofit.hosts import HostError, lend, random_host, weights_sha256
from oretrofit.retrofit.patcher import carriers, patch_model

V3_FILE = "tabpfn-v3-regressor-v3_default.ckpt"


def checkpoint(host, **changes):
    """As TabPFN's save_tabpfn_model writes it."""
    return {
        "state_dict": host.model.state_dict(),
        "config": dataclasses.asdict(host.model.config),
        "architecture_name": "tabpfn_v3",
        "inference_config": dataclasses.asdict(host.inference_config),
        **changes,
    }


def write(content, path):
    save_as_safetensors(content, path) if path.suffix == ".safetensors" else torch.save(content, path)
    return path


@pytest.fixture
def cache_dir(tmp_path, monkeypatch):
    """TabPFN's cache folder, empty, with no way to download."""
    monkeypatch.setattr(settings.tabpfn, "model_cache_dir", tmp_path)
    monkeypatch.setattr(model_loading, "download_model", lambda *_, **__: [RuntimeError("no network\nat all")])
    return tmp_path


# ---- Random hosts --------------------------------------------------------------------------------


def test_random_hosts_depend_on_their_seed_alone(make_host, tiny_host):
    state = torch.get_rng_state()
    again = make_host()
    assert torch.equal(torch.get_rng_state(), state)
    assert again.sha256 == tiny_host.sha256
    assert again.name is None
    config = dataclasses.asdict(again.model.config)
    assert random_host(seed=2, **config).sha256 != tiny_host.sha256
    assert not again.model.training
    # Whatever the processor and the release of torch.
    assert tiny_host.sha256.startswith("530e1883925fbb71")


def test_the_hash_is_over_all_weights(tiny_host):
    host = dataclasses.replace(tiny_host, model=copy.deepcopy(tiny_host.model))
    for name, parameter in host.model.named_parameters():
        last = parameter.data.view(-1)[-1:]
        kept = last.clone()
        last.copy_(torch.nextafter(kept, kept + 1))
        assert weights_sha256(host.model) != tiny_host.sha256, name
        last.copy_(kept)
    assert weights_sha256(host.model) == tiny_host.sha256


# ---- Checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".ckpt", ".safetensors"])
@pytest.mark.parametrize("as_string", [False, True])
def test_a_checkpoint_by_its_path(tiny_host, predict, tmp_path, suffix, as_string, monkeypatch):
    path = write(checkpoint(tiny_host), tmp_path / f"my-v3{suffix}")
    monkeypatch.chdir(tmp_path)
    host = load_host(path.name if as_string else path)
    assert host.name == str(path)
    assert host.sha256 == tiny_host.sha256
    assert np.array_equal(predict(host.specs), predict(path))


def test_what_tabpfn_saves(tiny_host, predict, regressor, table, tmp_path):
    """With the bar distribution beside the model, and not the borders that the model would make itself."""
    borders = tiny_host.model.regression_borders * 1.1
    specs = tiny_host.specs
    specs.norm_criterion = model_loading.FullSupportBarDistribution(borders)
    fitted = regressor(specs).fit(*table[:2])
    model_loading.save_tabpfn_model(fitted, tmp_path / "saved-v3.ckpt")
    host = load_host(tmp_path / "saved-v3.ckpt")
    assert torch.equal(host.norm_criterion.borders, borders)
    assert np.array_equal(predict(host.specs), fitted.predict(table[2]))
    assert np.array_equal(predict(host.specs), predict(tmp_path / "saved-v3.ckpt"))
    assert not np.allclose(predict(host.specs), predict(tiny_host.specs), rtol=1e-3)


@pytest.mark.parametrize(
    "stored",
    [
        lambda config: None,
        lambda config: config | {"FINGERPRINT_FEATURE": False, "SOFTMAX_TEMPERATURE": 0.5},
        # As TabPFN named a field once; it still reads that.
        lambda config: {
            {"FEATURE_SUBSAMPLING_CONSTANT_FEATURE_COUNT": "CONSTANT_FEATURE_COUNT"}.get(k, k): v
            for k, v in config.items()
        },
    ],
    ids=["none", "changed", "old name"],
)
def test_the_stored_preprocessing_is_used(tiny_host, predict, tmp_path, stored):
    config = dataclasses.asdict(tiny_host.inference_config)
    path = write(checkpoint(tiny_host, inference_config=stored(config)), tmp_path / "my-v3.ckpt")
    assert np.array_equal(predict(load_host(path).specs), predict(path))


class Trap:
    def __reduce__(self):
        return os.mkdir, ("trapped",)


def without(key):
    return lambda content: {k: v for k, v in content.items() if k != key}


def config(**changes):
    return lambda content: content | {"config": content["config"] | changes}


REFUSED = {
    "pickled code": (lambda content: content | {"more": Trap()}, "cannot read"),
    "v3.5": (lambda content: content | {"architecture_name": "tabpfn_v3_5"}, "tabpfn_v3_5 model, not a TabPFN v3 reg"),
    "v2.5": (lambda content: content | {"architecture_name": "base"}, "tabpfn_v2_5 model, not a TabPFN v3 regressor"),
    "v2": (without("architecture_name"), "tabpfn_v2 model, not a TabPFN v3 regressor"),
    "unknown": (lambda content: content | {"architecture_name": "mine"}, "unknown architecture mine"),
    "classifier": (config(max_num_classes=10), "classifier; only regressors"),
    "other depth": (config(nlayers=2), "does not hold the weights that its own config describes"),
    "other width": (config(embed_dim=32), "does not hold the weights that its own config describes"),
    "bad config": (config(icl_num_kv_heads=3), "does not hold the weights that its own config describes"),
    "no config": (without("config"), "not a TabPFN checkpoint"),
    "no weights": (without("state_dict"), "not a TabPFN checkpoint"),
    "only weights": (lambda content: content["state_dict"], "not a TabPFN checkpoint"),
    "a tensor": (lambda content: torch.zeros(3), "not a TabPFN checkpoint"),
    "empty config": (lambda content: content | {"config": None}, ""),
    "a list for weights": (lambda content: content | {"state_dict": [1]}, ""),
    "unknown preprocessing": (lambda content: content | {"inference_config": {"NEW": 1}}, ""),
}


@pytest.mark.parametrize("change", REFUSED)
def test_other_checkpoints_are_refused(tiny_host, tmp_path, monkeypatch, change):
    monkeypatch.chdir(tmp_path)
    edit, message = REFUSED[change]
    path = write(edit(checkpoint(tiny_host)), tmp_path / "other-v3.ckpt")
    with pytest.raises(HostError, match=message) as caught:
        load_host(path)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("name", ["garbage.ckpt", "garbage.safetensors", "empty.ckpt", "folder.ckpt"])
def test_unreadable_files_are_refused(tmp_path, name):
    path = tmp_path / name
    path.mkdir() if "folder" in name else path.write_bytes(b"garbage" * 99 if "garbage" in name else b"")
    with pytest.raises(HostError, match=f"cannot read the checkpoint .*{name}"):
        load_host(path)


@pytest.mark.parametrize("missing", ["v4", "no/such-v3.ckpt"])
def test_a_missing_host_is_told_the_names_there_are(missing):
    with pytest.raises(HostError, match=f"{missing}.*small, random-v3, v3"):
        load_host(missing)


# ---- Prior Labs' own -----------------------------------------------------------------------------


def test_v3_comes_from_the_cache_folder_of_tabpfn(tiny_host, predict, cache_dir):
    path = write(checkpoint(tiny_host), cache_dir / V3_FILE)
    host = load_host("v3")
    assert host.name == "v3"
    assert host.sha256 == tiny_host.sha256
    assert np.array_equal(predict(host.specs), predict(path))
    assert host.inference_config.MAX_CPU_SAMPLES == 5000


def test_v3_at_its_full_size(cache_dir, predict):
    made = random_host()
    assert made.name == "random-v3"
    assert 58e6 < sum(p.numel() for p in made.model.parameters()) < 59e6
    path = write(checkpoint(made), cache_dir / V3_FILE)
    sha256 = made.sha256
    del made
    retrofit = patch("v3", "full-o", tau=1e-30)
    assert retrofit.host.sha256 == sha256
    assert len(retrofit.sites) == 3 * 2 * 3 + 3 * 2 + 24 * 2 + 2
    plain = predict(path, n_estimators=1)
    model_loading._load_checkpoint_cached.cache_clear()
    assert plain.std() > 1e-3
    # Of float32's rounding, 6e-8, thirty layers make 1e-5 or so.
    np.testing.assert_allclose(predict(retrofit.specs, n_estimators=1), plain, rtol=0, atol=1e-4 * plain.std())


@pytest.mark.parametrize("message", ["no network\nat all", "", "\n"])
def test_v3_without_file_or_network_says_how_to_get_it(cache_dir, monkeypatch, message):
    monkeypatch.setattr(model_loading, "download_model", lambda *_, **__: [RuntimeError(message)])
    with pytest.raises(HostError, match=message.partition("\n")[0]) as caught:
        load_host("v3")
    for needed in ("TABPFN_TOKEN", "https://ux.priorlabs.ai", V3_FILE, str(cache_dir), "TABPFN_MODEL_CACHE_DIR"):
        assert needed in str(caught.value)


@pytest.mark.parametrize("change", ["v3.5", "classifier", "other depth", "pickled code"])
def test_v3_that_is_something_else_is_refused(tiny_host, cache_dir, change, monkeypatch):
    monkeypatch.chdir(cache_dir)
    write(REFUSED[change][0](checkpoint(tiny_host)), cache_dir / V3_FILE)
    with pytest.raises(HostError):
        load_host("v3")
    assert not (cache_dir / "trapped").exists()


# ---- Objects -------------------------------------------------------------------------------------


@pytest.fixture
def settled(tiny_host, regressor, table, tmp_path):
    """A function that makes regressors on the tiny host: fitted or not, by path or specs, with settings."""

    def make(way, **settings):
        by_path = "path" in way
        source = write(checkpoint(tiny_host), tmp_path / "my-v3.ckpt") if by_path else tiny_host.specs
        made = regressor(source, **settings)
        return made.fit(*table[:2]) if "unfitted" not in way else made

    return make


@pytest.mark.parametrize("way", ["fitted", "unfitted", "fitted by path", "unfitted by path"])
def test_a_regressor_as_host(tiny_host, settled, predict, table, way):
    given = settled(way)
    before = vars(given).copy()
    host = load_host(given)
    assert host.name is None
    assert host.sha256 == tiny_host.sha256
    assert np.array_equal(predict(host.specs), predict(tiny_host.specs))
    assert host.inference_config.MAX_CPU_SAMPLES == 5000
    # No trace on the user's estimator, and no shared model.
    assert vars(given) == before
    assert patch(given, "oa", tau=1.0).host.sha256 == tiny_host.sha256
    if "unfitted" not in way:
        assert host.model is not given.models_[0]
        assert type(given.models_[0]) is tabpfn_v3.TabPFNV3
        assert np.array_equal(given.predict(table[2]), predict(tiny_host.specs))


def test_a_regressor_brings_its_own_preprocessing(tiny_host, settled):
    given = settled("fitted", inference_config={"FINGERPRINT_FEATURE": False})
    assert tiny_host.inference_config.FINGERPRINT_FEATURE
    assert not load_host(given).inference_config.FINGERPRINT_FEATURE


def test_a_regressor_fitted_on_a_constant_target(tiny_host, regressor, predict, table):
    """Its bar distribution is that of the constant, not the model's."""
    given = regressor(tiny_host.specs).fit(table[0], np.ones(24))
    assert np.array_equal(predict(load_host(given).specs), predict(tiny_host.specs))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("way", ["model", "fitted", "unfitted"])
def test_a_patched_model_as_host_is_unpatched(tiny_host, regressor, predict, table, way, variant):
    retrofit = patch(tiny_host, variant, tau=1.0)
    patched = type(retrofit.model)
    given = retrofit.model if way == "model" else regressor(retrofit.specs)
    if way == "fitted":
        given.fit(*table[:2])
    host = load_host(given)
    assert host.sha256 == tiny_host.sha256
    assert np.array_equal(predict(host.specs), predict(tiny_host.specs))
    assert type(retrofit.model) is patched and issubclass(patched, OTabPFNV3)


def test_a_model_as_host(tiny_host, predict):
    host = load_host(tiny_host.model)
    assert host.name is None
    assert host.model is not tiny_host.model
    assert np.array_equal(predict(host.specs), predict(tiny_host.specs))
    assert load_host(host) is host


def small(module, **sizes):
    """(model, config) of another architecture."""
    (name,) = (name for name in vars(module) if name.startswith("TabPFNV") and name.endswith("Config"))
    config = getattr(module, name)(num_buckets=50, nlayers=1, **sizes)
    return module.get_architecture(config).eval(), config


OTHER_MODELS = {
    "v3.5": (tabpfn_v3_5, {"embed_dim": 16, "max_num_classes": 10}, "TabPFNV3p5.*not a TabPFN v3 regressor"),
    "v2.5": (tabpfn_v2_5, {"emsize": 12}, "not a TabPFN v3 regressor"),
    "classifier": (tabpfn_v3, {"embed_dim": 16, "max_num_classes": 10}, "classifier; only regressors"),
}


@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_other_models_are_refused(kind):
    module, sizes, message = OTHER_MODELS[kind]
    with pytest.raises(HostError, match=message):
        load_host(small(module, **sizes)[0])
    with pytest.raises(HostError, match=r"Linear.*not a TabPFN v3 regressor"):
        load_host(torch.nn.Linear(2, 2))


def test_v3_5_as_tabpfn_loads_it_is_refused(tiny_host, cache_dir):
    """In a regressor, and by mistake under the name of v3."""
    module, sizes, message = OTHER_MODELS["v3.5"]
    model, config = small(module, **sizes)
    with pytest.raises(HostError, match=message):
        load_host(TabPFNRegressor(model_path=ModelSpecs(model, config, tiny_host.inference_config)))
    content = {"state_dict": model.state_dict(), "config": dataclasses.asdict(config)}
    write(checkpoint(tiny_host, architecture_name="tabpfn_v3_5", **content), cache_dir / V3_FILE)
    with pytest.raises(HostError, match=message):
        load_host("v3")


def test_several_models_are_refused(tiny_host, regressor):
    with pytest.raises(HostError, match="2 models"):
        load_host(regressor([tiny_host.specs, tiny_host.specs]))


def test_a_classifier_is_refused():
    with pytest.raises(HostError, match="TabPFNClassifier"):
        load_host(TabPFNClassifier())


def test_a_regressor_whose_weights_cannot_be_had_is_refused(cache_dir):
    with pytest.raises(HostError, match="no network"):
        load_host(TabPFNRegressor())


# ---- Weights that are lent -----------------------------------------------------------------------


def test_a_lent_model_has_no_weights_of_its_own(tiny_host):
    model = tiny_host.model
    lent = lend(model)
    assert lent is not model and [*lent.state_dict()] == [*model.state_dict()]
    for (name, ours), (own_name, own) in zip(
        [*lent.named_parameters(), *lent.named_buffers()],
        [*model.named_parameters(), *model.named_buffers()],
        strict=True,
    ):
        assert (name, type(ours), ours.requires_grad) == (own_name, type(own), own.requires_grad)
        assert ours is not own and ours.data_ptr() == own.data_ptr()
    assert not {id(module) for module in lent.modules()} & {id(module) for module in model.modules()}


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.half(),
        lambda model: model.type(torch.bfloat16),
        lambda model: model.to(torch.float64),
        lambda model: model.to("meta"),
        lambda model: patch_model(model, "oa", dict.fromkeys(carriers(model, "oa"), 1.0)),
        lambda model: model.requires_grad_(not next(model.parameters()).requires_grad),
        lambda model: model.train(),
    ],
)
def test_what_becomes_of_a_lent_model_is_not_the_owners(tiny_host, change):
    before = weights_sha256(tiny_host.model)
    kinds = [type(module) for module in tiny_host.model.modules()]
    asked = [weight.requires_grad for weight in tiny_host.model.parameters()]
    change(lend(tiny_host.model))
    assert weights_sha256(tiny_host.model) == before
    assert [type(module) for module in tiny_host.model.modules()] == kinds
    assert [weight.requires_grad for weight in tiny_host.model.parameters()] == asked
    assert not tiny_host.model.training


def test_who_shares_the_hosts_weights(tiny_host):
    """What ragged prediction runs; but nothing that estimators are given, nor a model that was asked for."""

    def place(model):
        return next(model.parameters()).data_ptr()

    retrofit = patch(tiny_host, "closed", tau=1e-3)
    shared = place(tiny_host.model)
    assert place(retrofit.lent_specs.model) == shared
    assert len({shared, *(place(specs.model) for specs in (retrofit.specs, retrofit.host_specs, retrofit.specs))}) == 4
    before = weights_sha256(tiny_host.model)
    with torch.no_grad():
        next(retrofit.model.parameters()).add_(1)
    assert weights_sha256(tiny_host.model) == before != weights_sha256(retrofit.model)
    assert weights_sha256(retrofit.specs.model) == weights_sha256(retrofit.model)  # it is what estimators are given
    assert len({id(model) for model in ThreadPoolExecutor(8).map(lambda _: retrofit.model, range(32))}) == 1
    assert copy.deepcopy(retrofit).model is not retrofit.model
    assert retrofit.model is retrofit.model and place(retrofit.lent_specs.model) == place(retrofit.model)
