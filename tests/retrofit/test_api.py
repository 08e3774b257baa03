"""Saving and loading retrofits, and what the specs promise."""

import copy
import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from tabpfn.checkpoint import save_as_safetensors

from oretrofit import load, patch
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


def test_an_earlier_file_stays_where_saving_fails(saved, retrofits, monkeypatch):
    path, content = saved
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(OSError, match=r"No space left.*oa\.json"):
        retrofits["closed"].save(path)
    assert json.loads(path.read_text()) == content
    assert list(path.parent.iterdir()) == [path]


def test_it_shows_itself_in_a_line(retrofits, tiny_host):
    assert repr(retrofits["oa"]) == (
        "<Retrofit of a TabPFNV3: variant='oa', delta=0.2, quantile=0.01, tables=1, seed=20000, "
        f"{len(retrofits['oa'].sites)} sites>"
    )
    named = repr(patch("small", "closed", tau=1.5))
    assert named.startswith("<Retrofit of small: variant='closed', tau=1.5, ")


def test_it_shows_every_site_whole_in_a_terminal(retrofits, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    retrofit = retrofits["full-o"]
    head, _, tables = str(retrofit).partition("\n\n")
    lines = tables.splitlines()
    assert head.replace("\n", " ") == repr(retrofit) and max(map(len, lines)) <= 80
    shown = {line.split()[0]: line.split() for line in lines if line}
    for site in retrofit.table.to_dict("records"):
        name = site["name"].replace("feature_distribution_embedder.layers", "emb").replace("icl_blocks", "icl")
        name = name.replace("column_aggregator", "agg").replace("cross_attn_block", "ca").replace("layernorm", "ln")
        row = shown[name]
        assert row[2] == f"{site['tau']:.3g}" and row[-2] == f"{site['presence_min']:.5f}"
    assert not any(line.endswith("...") for line in lines)


def test_it_shows_every_site_in_a_notebook(retrofits):
    retrofit = retrofits["closed"]
    shown = ElementTree.fromstring(retrofit._repr_html_())
    assert shown.findtext("summary") == repr(retrofit)
    header, *rows = [[cell.text for cell in row] for row in shown.iter("tr")]
    assert header == list(retrofit.table)
    assert [row[0] for row in rows] == list(retrofit.table["name"])
    taus = [float(row[header.index("tau")]) for row in rows]
    assert taus == pytest.approx(list(retrofit.table["tau"]), rel=5e-4)  # to four digits


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


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00" * 1000, b'{"format": "oretrofit-1"}', None])
def test_files_that_are_no_retrofit_are_refused(tmp_path, tiny_host, content):
    path = tmp_path / "oa.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RetrofitError, match=r"oa\.json") as raised:
        load(path, host=tiny_host)
    assert len(str(raised.value)) < len(str(path)) + 200  # and not the file's content


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


def test_a_tau_beyond_float32_is_refused_when_patching(tiny_host):
    with pytest.raises(ValueError, match="within float32"):
        patch(tiny_host, "oa", tau=1e300)


def test_a_host_that_ran_in_half_precision_is_announced(tiny_host, regressor, table):
    X, y, X_test = table
    fitted = regressor(tiny_host.specs, inference_precision=torch.float16).fit(X, y)
    fitted.predict(X_test)
    with pytest.warns(UserWarning, match="rounded its weights"):
        patch(fitted, "oa", tau=1e-3)
