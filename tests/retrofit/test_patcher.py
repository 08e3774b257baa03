"""Putting the O-classes on a model and taking them off: what changes, what stays, what is refused."""

import copy
import itertools
import math

import numpy as np
import pytest
import torch
from tabpfn.architectures import tabpfn_v3
from torch import nn

from oretrofit import VARIANTS, HostError, load_host, patch
from oretrofit.retrofit.patcher import PatchError, carriers, patch_model, unpatch

BLOCK = "feature_distribution_embedder.layers.{}.cross_attn_block{}"


def expected_sites(variant):
    """Every site of the tiny host: name -> (carrier, host's class, O-class)."""
    cross = ("CrossAttentionBlock", "OCrossAttentionBlock")
    columns = ("TransformerBlock", "OColumnTransformerBlock")
    rows = ("ICLTransformerBlock", "OICLTransformerBlock")
    norm = ("_DtypeMatchingRMSNorm", "GatedNorm")
    attention, rest = {}, {"column_aggregator.out_ln": ("readout", *norm), "output_norm": ("readout", *norm)}
    for i in range(2):
        for j in (1, 2):
            attention[f"{BLOCK.format(i, j)}.layernorm_q"] = ("receiver", *cross)
            attention[f"{BLOCK.format(i, j)}.layernorm_kv"] = ("source", *cross)
            rest[f"{BLOCK.format(i, j)}.layernorm2"] = ("ffn", *cross)
        attention[f"column_aggregator.blocks.{i}.layernorm"] = ("receiver and source", *columns)
        rest[f"column_aggregator.blocks.{i}.layernorm_mlp"] = ("ffn", *columns)
    for i in range(3):
        attention[f"icl_blocks.{i}.layernorm"] = ("receiver and source", *rows)
        rest[f"icl_blocks.{i}.layernorm_mlp"] = ("ffn", *rows)
    doors = {name: ("door", "Linear", "OTargetEncoder") for name in ("col_y_encoder", "icl_y_encoder")}
    doors["x_embed"] = ("door", "Linear", "OCellEmbedding")
    doors["column_aggregator"] = ("door", "ColumnAggregator", "OColumnAggregator")
    return {"oa": attention, "full-o": attention | rest, "closed": attention | rest | doors}[variant]


def weights(model):
    return {name: value.clone() for name, value in nn.Module.state_dict(model).items()}


def classes(model):
    return {name: type(module) for name, module in model.named_modules()}


def assert_same_weights(a, b):
    assert list(a) == list(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def on_host(tiny_host, predict):
    return predict(tiny_host.specs)


def patched(host, variant, tau=1.0):
    model = copy.deepcopy(host.model)
    sites = patch_model(model, variant, dict.fromkeys(carriers(model, variant), tau))
    return model, sites


def test_the_tiny_host_tells_rows_apart(on_host, table):
    assert np.ptp(on_host) > 0.1 * table[1].std()
    assert len(np.unique(on_host)) == len(on_host)


@pytest.mark.parametrize("variant", VARIANTS)
def test_patching_leaves_the_host_alone(tiny_host, on_host, predict, variant):
    before, kinds = weights(tiny_host.model), classes(tiny_host.model)
    retrofit = patch(tiny_host, variant, tau=1.0)
    moved = predict(retrofit.specs)
    assert np.abs(moved - on_host).max() > 0.05
    assert_same_weights(weights(tiny_host.model), before)
    assert classes(tiny_host.model) == kinds
    assert np.array_equal(predict(retrofit.host_specs), on_host)
    # The clone has the same keys and weights, and shares none of them.
    assert_same_weights(weights(retrofit.model), before)
    pointers = {value.data_ptr() for value in tiny_host.model.state_dict().values()}
    for model in (retrofit.model, retrofit.specs.model):
        assert pointers.isdisjoint(value.data_ptr() for value in nn.Module.state_dict(model).values())


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_site_is_reported(tiny_host, variant):
    names = carriers(tiny_host.model, variant)
    taus = {name: 1e-3 * (i + 1) for i, name in enumerate(names)}
    model = copy.deepcopy(tiny_host.model)
    sites = {site.name: site for site in patch_model(model, variant, taus)}
    expected = expected_sites(variant)
    assert {name: (s.carrier, s.host_class, s.o_class) for name, s in sites.items()} == expected
    assert {name: site.tau for name, site in sites.items()} == taus
    for name, site in sites.items():
        module = model.get_submodule(name)
        at = module if site.carrier in ("readout", "door") else model.get_submodule(name.rpartition(".")[0])
        assert type(at).__name__ == site.o_class
        assert module.tau == site.tau
    if variant == "full-o":
        assert sites.keys() == {name for name, m in tiny_host.model.named_modules() if isinstance(m, nn.RMSNorm)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_as_tau_goes_to_zero_the_host_returns(tiny_host, predict, monkeypatch, variant):
    # The host rounds the logarithm of its number of keys to float32 even in float64, which `closed` does not.
    monkeypatch.setattr(
        tabpfn_v3, "_safe_log_seqlen", lambda n, device, dtype: torch.tensor(float(n), dtype=torch.float64).log()
    )

    def shift(tau):
        specs = patch(tiny_host, variant, tau=tau).specs
        return np.abs(predict(specs, inference_precision=torch.float64) - on_host).max()

    on_host = predict(tiny_host.specs, inference_precision=torch.float64)
    assert shift(1e-30) < 1e-12 * np.abs(on_host).max()
    # On the way the change is of first order in tau.
    assert 1.5 < shift(2e-3) / shift(1e-3) < 2.5


@pytest.mark.parametrize(("first", "second"), list(itertools.product(VARIANTS, VARIANTS)))
def test_the_last_patch_replaces_those_before(tiny_host, predict, first, second):
    model, _ = patched(tiny_host, first, tau=5.0)
    again = patch_model(model, second, dict.fromkeys(carriers(model, second), 1.0))
    once, sites = patched(tiny_host, second)
    assert again == sites
    assert classes(model) == classes(once)
    assert {n: vars(m).get("tau") for n, m in model.named_modules()} == {
        n: vars(m).get("tau") for n, m in once.named_modules()
    }
    assert np.array_equal(predict(tiny_host.specs_with(model)), predict(tiny_host.specs_with(once)))


@pytest.mark.parametrize("variant", VARIANTS)
def test_unpatching_restores_the_host(tiny_host, on_host, predict, variant):
    model, _ = patched(tiny_host, variant)
    unpatch(model)
    assert classes(model) == classes(tiny_host.model)
    assert all(vars(m).keys() == vars(tiny_host.model.get_submodule(n)).keys() for n, m in model.named_modules())
    assert np.array_equal(predict(tiny_host.specs_with(model)), on_host)
    unpatch(model)
    assert classes(model) == classes(tiny_host.model)


def test_patching_and_unpatching_drop_compiled_forwards(tiny_host):
    model = copy.deepcopy(tiny_host.model)
    for change in (lambda m: patch_model(m, "oa", dict.fromkeys(carriers(m, "oa"), 1.0)), unpatch):
        vars(model)["_torch_compile_cache"] = {"forward": object()}  # where TabPFN keeps them
        change(model)
        assert "_torch_compile_cache" not in vars(model)


class OtherAttention(tabpfn_v3.Attention):
    pass


class OtherNorm(tabpfn_v3._DtypeMatchingRMSNorm):
    pass


class OtherModel(tabpfn_v3.TabPFNV3):
    pass


class OtherAggregator(tabpfn_v3.ColumnAggregator):
    pass


class OtherLinear(nn.Linear):
    pass


def recast(name, kind):
    def change(model):
        model.get_submodule(name).__class__ = kind

    return change


def put(name, module):
    def change(model):
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, module)

    return change


@pytest.mark.parametrize("before", [None, *VARIANTS])
@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("icl_blocks.1.icl_attention", put("icl_blocks.1.icl_attention", nn.MultiheadAttention(32, 4))),
        ("icl_blocks.1.extra", put("icl_blocks.1.extra", nn.MultiheadAttention(32, 4))),
        ("column_aggregator.blocks.0.attention", recast("column_aggregator.blocks.0.attention", OtherAttention)),
        ("output_norm", recast("output_norm", OtherNorm)),
        ("output_norm", put("output_norm", nn.LayerNorm(32))),
        ("icl_blocks.0.mlp.1", put("icl_blocks.0.mlp.1", nn.ReLU())),
        # A norm where none should be, and none where one should be.
        ("column_aggregator.extra", put("column_aggregator.extra", tabpfn_v3._DtypeMatchingRMSNorm(16))),
        ("icl_blocks.2.layernorm_mlp", put("icl_blocks.2.layernorm_mlp", nn.Linear(32, 32))),
        ("OtherModel", recast("", OtherModel)),
        ("column_aggregator", recast("column_aggregator", OtherAggregator)),
    ],
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_what_is_not_known_is_refused_by_name(tiny_host, name, change, variant, before):
    model = copy.deepcopy(tiny_host.model)
    taus = dict.fromkeys(carriers(model, variant), 1.0)
    if before:
        patch_model(model, before, dict.fromkeys(carriers(model, before), 2.0))
    change(model)
    kinds = classes(model)
    with pytest.raises(PatchError, match=name.replace(".", r"\.")):
        patch_model(model, variant, taus)
    assert classes(model) == kinds  # not by half


def own_forward(module):
    plain = module.forward
    module.forward = lambda *args, **kwargs: plain(*args, **kwargs)  # as accelerate's add_hook_to_module does


def compiled_in_place(module):
    module._compiled_call_impl = module._call_impl  # as Module.compile leaves it, without compiling


def replaces_output(module):
    module.register_forward_hook(lambda module, args, output: output)


def replaces_input(module):
    module.register_forward_pre_hook(lambda module, args: args)


def parametrized(module):
    torch.nn.utils.parametrize.register_parametrization(module, "weight", nn.Identity())


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(
    ("wrap", "name", "said"),
    [
        (own_forward, "icl_blocks.1.layernorm", "forward of its own"),
        (own_forward, "column_aggregator.blocks.0", "forward of its own"),
        (own_forward, "icl_blocks.0.mlp", "forward of its own"),
        (own_forward, "", "forward of its own"),
        (compiled_in_place, "icl_blocks.2", "Module.compile"),
        (replaces_output, "icl_blocks.1.layernorm_mlp", "hooks"),
        (replaces_input, "icl_blocks.1.icl_attention", "hooks"),
        (parametrized, "icl_blocks.1.icl_attention.q_projection", "parametriz"),
    ],
)
def test_what_would_pass_the_patch_by_is_refused(tiny_host, variant, wrap, name, said):
    """The sites would be listed, and the predictions would be the host's, or neither's."""
    model = copy.deepcopy(tiny_host.model)
    taus = dict.fromkeys(carriers(model, variant), 1.0)
    wrap(model.get_submodule(name))
    kinds = classes(model)
    with pytest.raises(PatchError, match=f"{name or 'the model itself'}.*{said}"):
        patch_model(model, variant, taus)
    assert classes(model) == kinds
    if wrap is not compiled_in_place:  # a copy is not compiled
        with pytest.raises(PatchError, match=said):
            patch(model, variant, tau=1.0)


@pytest.mark.parametrize("wrapped", [torch.compile, nn.DataParallel, nn.Sequential])
def test_a_wrapped_model_is_refused_with_what_to_give(tiny_host, wrapped):
    with pytest.raises(HostError, match=r"TabPFN v3.*inside"):
        load_host(wrapped(copy.deepcopy(tiny_host.model)))


@pytest.mark.parametrize("door", ["x_embed", "col_y_encoder", "icl_y_encoder"])
def test_a_door_that_is_not_the_hosts_is_refused(tiny_host, door):
    """Elsewhere a linear layer of another class is called as it is; a door's forward is replaced."""
    model = copy.deepcopy(tiny_host.model)
    recast(door, OtherLinear)(model)
    kinds = classes(model)
    with pytest.raises(PatchError, match=door):
        patch(model, "closed", tau=1.0)
    assert classes(model) == kinds
    patch_model(model, "full-o", dict.fromkeys(carriers(tiny_host.model, "full-o"), 1.0))
    assert type(model.get_submodule(door)) is OtherLinear


def test_patch_refuses_an_unknown_model_too(tiny_host):
    model = copy.deepcopy(tiny_host.model)
    model.icl_blocks[1].extra = nn.MultiheadAttention(32, 4)
    with pytest.raises(PatchError, match=r"icl_blocks\.1\.extra .*MultiheadAttention"):
        patch(model, "oa", tau=1.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_carrier_needs_its_tau(tiny_host, variant):
    model = copy.deepcopy(tiny_host.model)
    kinds, names = classes(model), carriers(model, variant)
    taus = dict.fromkeys(names, 1.0)
    last = list(names)[-1]
    extra = {"oa": "output_norm", "full-o": "x_embed", "closed": "output_projection.0"}[variant]
    cases = [({n: t for n, t in taus.items() if n != last}, PatchError, last), (taus | {extra: 1.0}, PatchError, extra)]
    cases += [(taus | {last: bad}, ValueError, last) for bad in (0, -1.0, math.nan, math.inf)]
    for given, error, named in cases:
        with pytest.raises(error, match=named.replace(".", r"\.")):
            patch_model(model, variant, given)
        assert classes(model) == kinds


def test_variants_are_named(tiny_host):
    for call in (lambda v: carriers(tiny_host.model, v), lambda v: patch(tiny_host, v, tau=1.0)):
        with pytest.raises(ValueError, match=r"'o'.*oa, full-o"):
            call("o")
