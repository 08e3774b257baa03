"""Carrier statistics against what the norms and the doors of the model are seen to receive."""

import copy

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures import tabpfn_v3

from oretrofit import patch
from oretrofit.calibration import carriers as module
from oretrofit.calibration.carriers import calibration_tables, measure_carriers, predict_table
from oretrofit.retrofit.api import calibrate
from oretrofit.retrofit.patcher import carriers


@pytest.fixture(scope="module")
def tables():
    return calibration_tables(2, 1, max_rows=32, max_columns=2)


@pytest.fixture(scope="module")
def names(tiny_host):
    return list(carriers(tiny_host.model, "full-o"))


def received(specs, table, monkeypatch):
    """`||h||^2` in float64 of every token that a norm gets in one fit and predict, by the norm's name."""
    by_norm, forward = {}, tabpfn_v3._DtypeMatchingRMSNorm.forward

    def recording(self, h):
        by_norm.setdefault(id(self), []).extend((h.double() ** 2).sum(-1).flatten().tolist())
        return forward(self, h)

    with monkeypatch.context() as patched:
        patched.setattr(tabpfn_v3._DtypeMatchingRMSNorm, "forward", recording)
        n = len(table.y) * 2 // 3
        regressor = TabPFNRegressor(
            model_path=specs,
            device="cpu",
            inference_precision=torch.float32,
            categorical_features_indices=table.categorical,
        )
        regressor.fit(table.X[:n], table.y[:n]).predict(table.X[n:])
    return {name: by_norm[id(m)] for name, m in specs.model.named_modules() if id(m) in by_norm}


def test_statistics_are_what_the_norms_receive(tiny_host, tables, names, monkeypatch):
    seen = [received(tiny_host.specs, table, monkeypatch) for table in tables]
    measured = measure_carriers(tiny_host.specs, names, tables)
    assert measured.keys() == seen[0].keys()
    for name, values in measured.items():
        expected = seen[0][name] + seen[1][name]
        assert values.dtype == np.float64
        assert len(values) == len(expected) <= 2 * 4096  # nothing thinned out yet
        np.testing.assert_allclose(np.sort(values), np.sort(expected), rtol=1e-5)


def test_doors_are_measured_where_something_is_added(tiny_host, tables):
    """In float64, from what the modules of one fit and predict are called with and give back."""
    specs = tiny_host.specs
    seen = {door: [] for door in ("x_embed", "col_y_encoder", "column_aggregator", "icl_y_encoder")}
    embed, aggregate = specs.model.x_embed.forward, specs.model.column_aggregator.forward

    def embedding(g_BRCF):
        h_BRCE = embed(g_BRCF)
        for g, h in zip(g_BRCF.double().flatten(0, -2), h_BRCE.double().flatten(0, -2), strict=True):
            seen["x_embed"].append((g @ g).item() + 1)  # of (g, 1)
            seen["col_y_encoder"].append((h @ h).item())
        return h_BRCE

    def aggregating(x_BRiCE, *args, **kwargs):
        cls_BRIE = aggregate(x_BRiCE, *args, **kwargs)
        for row, cls in zip(x_BRiCE.double().flatten(0, 1), cls_BRIE.double().flatten(0, 1), strict=True):
            seen["column_aggregator"].append(np.mean([(h @ h).item() for h in row]))
            seen["icl_y_encoder"].append(sum((h @ h).item() for h in cls))
        return cls_BRIE

    specs.model.x_embed.forward, specs.model.column_aggregator.forward = embedding, aggregating
    predict_table(specs, tables[0])
    measured = measure_carriers(tiny_host.specs, list(seen), tables[:1])
    for door, values in measured.items():
        assert len(values) == len(seen[door])
        np.testing.assert_allclose(np.sort(values), np.sort(seen[door]), rtol=1e-5)
        # Rows come from a norm, and in a host with random weights are of one length.
        assert door == "icl_y_encoder" or values.max() > 1.05 * values.min()


def test_thinned_evenly(tiny_host, tables, names, monkeypatch):
    everything = measure_carriers(tiny_host.specs, names, tables[:1])
    monkeypatch.setattr(module, "_KEPT", 20)
    for name, kept in measure_carriers(tiny_host.specs, names, tables[:1]).items():
        whole = everything[name]
        assert len(kept) <= 4 * 20 < len(whole)  # two forward passes, some norms twice in each
        assert np.isin(kept, whole).all()
        assert kept[0] == whole[0]
        assert kept[-1] == whole[-1]


def test_hooks_are_gone_afterwards(tiny_host, tables):
    specs, calls = tiny_host.specs, []
    names = list(carriers(tiny_host.model, "closed"))

    def fail():
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    measure_carriers(specs, names, tables, on_table=fail)
    assert len(calls) == 2
    with pytest.raises(KeyboardInterrupt):
        measure_carriers(specs, names, tables, on_table=fail)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in specs.model.modules())


def test_carriers_without_tokens_are_refused(tiny_host, tables):
    specs = tiny_host.specs
    specs.model.unused = torch.nn.Identity()
    with pytest.raises(RuntimeError, match="unused"):
        measure_carriers(specs, ["unused"], tables[:1])
    # Live tokens only count: here the inducing points are all zero.
    layer = specs.model.feature_distribution_embedder.layers[0]
    torch.nn.init.zeros_(layer.inducing_vectors)
    name = "feature_distribution_embedder.layers.0.cross_attn_block1.layernorm_q"
    with pytest.raises(RuntimeError, match=name.replace(".", r"\.")):
        measure_carriers(specs, [name], tables[:1])


def test_zeros_are_left_out(tiny_host, tables):
    specs = tiny_host.specs
    layer = specs.model.feature_distribution_embedder.layers[0]
    with torch.no_grad():
        layer.inducing_vectors[:3] = 0
    name = "feature_distribution_embedder.layers.0.cross_attn_block1.layernorm_q"
    values = measure_carriers(specs, [name], tables[:1])[name]
    # One of four is live, the same for every column and member.
    expected = layer.inducing_vectors[3].detach().double().square().sum().item()
    np.testing.assert_allclose(values, expected, rtol=1e-6)


@pytest.mark.parametrize("variant", ["oa", "full-o", "closed"])
def test_patch_calibrates_every_site(tiny_host, variant):
    """At each site, `1 - quantile` of the live tokens of the calibration tables keep presence `1 - delta`."""
    calibration = calibrate(tiny_host, tables=2, seed=9)
    retrofit = patch(tiny_host, variant, tables=2, seed=9, delta=0.01, quantile=0.05)
    assert retrofit.settings == {"delta": 0.01, "quantile": 0.05, "tables": 2, "seed": 9}
    for site in retrofit.sites:
        n = calibration.squared_norms[site.name]
        absence = site.tau / (site.tau + n)
        assert np.mean(absence <= 0.01 * (1 + 1e-9)) >= 0.95 - 1 / len(n)
        assert np.mean(absence >= 0.01 * (1 - 1e-9)) >= 0.05 - 1 / len(n)
        assert retrofit.statistics[site.name]["presence_min"] == pytest.approx(1 - absence.max(), rel=1e-9)
    # The same on a measurement made before, and for the same seed only.
    taus = [site.tau for site in retrofit.sites]
    again = patch(tiny_host, variant, tables=2, seed=9, delta=0.01, quantile=0.05, calibration=calibration)
    assert [site.tau for site in again.sites] == taus
    other = patch(tiny_host, variant, tables=2, seed=10, delta=0.01, quantile=0.05)
    assert [site.tau for site in other.sites] != taus


def test_measuring_leaves_the_host_alone(tiny_host):
    before = copy.deepcopy(tiny_host.model.state_dict())
    calibrate(tiny_host, tables=1)
    after = tiny_host.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not any(m._forward_pre_hooks for m in tiny_host.model.modules())
