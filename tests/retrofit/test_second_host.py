"""Another architecture costs new files in `patches` and its place in `HOST_SPECS`, and no edit elsewhere.

Shown on a made-up one: TabPFN v3 under other names. Whoever asks it for a part by the name that the part has in v3
is refused, v3's own file and patches aside. So it is patched, calibrated, audited and predicts ragged tables only
if nothing else knows v3; and all answers have to be v3's, to the bit.
"""

import ast
import copy
import dataclasses
import functools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures import tabpfn_v3

import oretrofit
from oretrofit import HostError, PatchError, calibrate, load_host, patch
from oretrofit.calibration import predicting
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import audit, audit_report, audit_tables
from oretrofit.patches import architectures
from oretrofit.patches.architectures import spec_of
from oretrofit.patches.host_spec import HostSpec
from oretrofit.patches.operators import OTransformer
from oretrofit.patches.tabpfn_v3 import OTabPFNV3
from oretrofit.patches.tabpfn_v3_closed import ClosedTabPFNV3
from oretrofit.patches.tabpfn_v3_host import TABPFN_V3
from oretrofit.retrofit import api, tabpfn_api
from oretrofit.retrofit.checkpoints import RetrofitArchitecture
from oretrofit.retrofit.patcher import known_spec, patch_model, unpatch
from oretrofit.retrofit.sites import site_tables

# --- The made-up architecture, as a file in `patches` would have it ---

PARTS = {
    name: f"part_{i}"
    for i, name in enumerate(
        [
            "x_embed",
            "col_y_encoder",
            "feature_distribution_embedder",
            "column_aggregator",
            "icl_y_encoder",
            "icl_blocks",
            "output_norm",
            "output_projection",
            "regression_borders",
        ]
    )
}


def ours(name):
    """A module's name in the made-up architecture, by its name in v3."""
    return ".".join(PARTS.get(part, part) for part in name.split("."))


class MadeUp(tabpfn_v3.TabPFNV3):
    """TabPFN v3 whose parts have other names for all but v3's own code."""

    def __getattr__(self, name):
        if name in PARTS:
            asks = sys._getframe(1).f_globals["__name__"]
            if not asks.startswith(("tabpfn.", "oretrofit.patches.")):
                raise AttributeError(f"{asks} asks for {name}, which only TabPFN v3 has")
            name = PARTS[name]
        return super().__getattr__(name)


class OMadeUp(OTabPFNV3, MadeUp):
    pass


class ClosedMadeUp(ClosedTabPFNV3, MadeUp):
    pass


def made_up(model):
    """The same network as a made-up one."""
    model = copy.deepcopy(model)
    for parts in (model._modules, model._buffers):
        items = [(ours(name), part) for name, part in parts.items()]
        parts.clear()
        parts.update(items)
    model.__class__ = MadeUp
    return model


def our_class(kind):
    """A class of the closed v3, of the made-up one."""
    return type(kind.__name__, (kind, ClosedMadeUp), {}) if issubclass(kind, ClosedTabPFNV3) else kind


OUR_CLASSES = {kind: our_class(kind) for kind in TABPFN_V3.audit.words}
MADE_UP = dataclasses.replace(
    TABPFN_V3,
    architecture="made_up",
    label="Made-Up",
    model_class=MadeUp,
    carriers={
        MadeUp if kind is TABPFN_V3.model_class else kind: {ours(norm): carrier for norm, carrier in norms.items()}
        for kind, norms in TABPFN_V3.carriers.items()
    },
    doors={ours(name): dataclasses.replace(door, at=ours(door.at)) for name, door in TABPFN_V3.doors.items()},
    classes={
        variant: {kind: o_class for kind, o_class in classes.items() if kind is not TABPFN_V3.model_class}
        | {MadeUp: ClosedMadeUp if variant == "closed" else OMadeUp}
        for variant, classes in TABPFN_V3.classes.items()
    },
    build=lambda config: made_up(TABPFN_V3.build(config)),
    short_names={ours(name): short for name, short in TABPFN_V3.short_names.items()},
    audit=dataclasses.replace(
        TABPFN_V3.audit,
        stages=lambda model: {ours(name): stage for name, stage in TABPFN_V3.audit.stages(model).items()},
        cell_embedding=ours(TABPFN_V3.audit.cell_embedding),
        input_parts={
            ours(part): {ours(name): OUR_CLASSES[kind] for name, kind in classes.items()}
            for part, classes in TABPFN_V3.audit.input_parts.items()
        },
        words={OUR_CLASSES[kind]: words for kind, words in TABPFN_V3.audit.words.items()},
    ),
)


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr(architectures, "HOST_SPECS", (*architectures.HOST_SPECS, MADE_UP))


# --- What the package does with it ---


@pytest.fixture
def second(registered, tiny_host):
    return load_host(made_up(tiny_host.model))


def ours_in(value):
    """Whatever can be JSON with our names in place of v3's."""
    text = json.dumps(value)
    for name, our in PARTS.items():
        text = text.replace(name, our)
    return json.loads(text)


def test_only_v3s_own_code_finds_its_parts(second):
    assert not any(hasattr(second.model, name) for name in PARTS)
    assert all(hasattr(second.model, our) for our in PARTS.values())
    with pytest.raises(AttributeError):
        second.model.get_submodule("icl_blocks.0")


def test_it_is_refused_while_it_has_no_spec(tiny_host):
    model = made_up(tiny_host.model)
    assert spec_of(model) is None
    with pytest.raises(HostError, match="MadeUp"):
        load_host(model)
    with pytest.raises(PatchError, match="MadeUp"):
        patch_model(model, "oa", {})


def test_from_a_checkpoint(registered, tiny_host, tmp_path):
    model, file = made_up(tiny_host.model), tmp_path / "made-up.ckpt"
    config = dataclasses.asdict(model.config)
    torch.save({"state_dict": model.state_dict(), "config": config, "architecture_name": "made_up"}, file)
    loaded = load_host(file)
    assert type(loaded.model) is MadeUp
    assert loaded.sha256 == load_host(model).sha256
    torch.save({"state_dict": {}, "config": {**config, "max_num_classes": 10}, "architecture_name": "made_up"}, file)
    with pytest.raises(HostError, match="a Made-Up classifier"):
        load_host(file)


def test_calibrated(second, tiny_host):
    ours_, v3s = (calibrate(host, tables=1) for host in (second, tiny_host))
    assert {**ours_.carriers} == ours_in({**v3s.carriers})
    for name, squared_norms in v3s.squared_norms.items():
        assert np.array_equal(ours_.squared_norms[ours(name)], squared_norms)


@pytest.mark.parametrize("variant", VARIANTS)
def test_patched(second, tiny_host, predict, variant):
    settings = {"tables": 1, "delta": 0.05}
    retrofit, expected = patch(second, variant, **settings), patch(tiny_host, variant, **settings)
    sites = expected.table.assign(name=expected.table["name"].map(ours)).replace({"TabPFNV3": "MadeUp"})
    assert retrofit.table.to_dict("records") == sites.to_dict("records")
    assert np.array_equal(predict(retrofit.specs), predict(expected.specs))
    assert np.abs(predict(retrofit.specs) - predict(second.specs)).max() > 0
    unpatch(retrofit.model)
    assert type(retrofit.model) is MadeUp
    assert np.array_equal(predict(second.specs_with(retrofit.model)), predict(tiny_host.specs))

    tables = [site_tables(r.table, known_spec(r.model)) for r in (retrofit, expected)]
    assert json.dumps(tables[0]).replace("MadeUp", "TabPFNV3") == json.dumps(ours_in(tables[1]))


def test_saved_as_a_checkpoint(second, predict, tmp_path, monkeypatch):
    # As importing `checkpoints` does for those that are in HOST_SPECS by then.
    monkeypatch.setitem(tabpfn_api.ARCHITECTURES, "oretrofit_made_up", RetrofitArchitecture(MADE_UP))
    retrofit, file = patch(second, "closed", tau=1e-3), tmp_path / "made-up-v3.safetensors"
    retrofit.save_checkpoint(file)
    expected = predict(retrofit.specs)
    assert np.array_equal(predict(str(file)), expected)
    assert np.array_equal(predict(oretrofit.load(file).specs), expected)
    with pytest.raises(HostError, match="is a retrofit"):
        load_host(file)


def test_ragged(second, tiny_host):
    rng = np.random.default_rng(0)
    shapes = [(12, 3, 2), (20, 5, 4), (9, 1, 3)]
    X_trains, y_trains, X_tests = zip(
        *((rng.random((n, c)), rng.random(n), rng.random((m, c))) for n, m, c in shapes), strict=True
    )
    predicted = [
        patch(host, "closed", tau=1e-3).predict_ragged(
            list(X_trains), list(y_trains), list(X_tests), device="cpu", n_estimators=2, max_padding=0.9
        )
        for host in (second, tiny_host)
    ]
    assert all(map(np.array_equal, *predicted))
    assert min(answer.std() for answer in predicted[0][:2]) > 0


def test_audited(second, tiny_host, monkeypatch):
    def draw(tables, device):
        return [audit_tables.draw_audit_table(np.random.default_rng(i), 30, 4, device) for i in range(tables)]

    monkeypatch.setattr(audit, "draw_audit_tables", draw)
    monkeypatch.setattr(audit, "calibrate", functools.partial(api.calibrate, tables=1))
    monkeypatch.setattr(predicting, "TabPFNRegressor", functools.partial(TabPFNRegressor, n_estimators=1))
    found, v3s = (audit.audit(host, tables=1) for host in (second, tiny_host))
    assert found == ours_in(v3s)
    tables = [[*audit_report.titled_tables(*of, "cpu")] for of in ((found, MADE_UP), (v3s, TABPFN_V3))]
    assert json.dumps(tables[0]) == json.dumps(ours_in(tables[1]))
    assert audit_report.notes(found, MADE_UP).endswith(" part_2.layers, agg = part_3, icl = part_5.")


# --- Names of TabPFN v3 ---

# What is about v3 itself: the random host, and the pretraining of the small one.
ABOUT_V3 = {"retrofit/hosts.py", "experiments/pretrain.py"}


def names_in(file):
    """What the code of a file calls by name: identifiers, imports and the parts of dotted strings."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.ImportFrom):
            yield from (node.module or "").split(".")
        elif isinstance(node, ast.alias):
            yield from node.name.split(".")
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split(".")


def test_nothing_outside_patches_names_a_module_or_class_of_v3(tiny_host):
    def parts(model):
        return {part for name, _ in model.named_modules() for part in name.split(".") if "_" in part}

    classes = {name for name, kind in vars(tabpfn_v3).items() if getattr(kind, "__module__", "") == tabpfn_v3.__name__}
    # The projections of the package's own attention have the names of v3's.
    v3s = classes | parts(tiny_host.model) - parts(OTransformer(4, 2, 1)) | {*PARTS, "tabpfn_v3"}
    v3s -= {field.name for field in dataclasses.fields(HostSpec)}  # `parse_config`, which is asked of the spec
    assert {"TabPFNV3", "get_architecture", "x_embed", "layernorm_q", "softmax_scaling_layer"} <= v3s
    package = Path(oretrofit.__file__).parent
    files = [file for part in ("calibration", "retrofit", "experiments") for file in (package / part).rglob("*.py")]
    found = {
        str(file.relative_to(package)): v3s & {*names_in(file)}
        for file in [*files, package / "__init__.py", package / "cli.py"]
    }
    assert {file: names for file, names in found.items() if names and file not in ABOUT_V3} == {}
