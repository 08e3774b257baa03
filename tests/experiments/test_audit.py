"""The audit: stages against the model, the parts it finds in which model, the bar of `closed`, the command."""

import copy
import functools
import inspect
import json

import numpy as np
import pytest
import torch
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st
from tabpfn import TabPFNRegressor
from tabpfn.architectures import tabpfn_v3
from torch import nn
from typer.testing import CliRunner

from oretrofit import cli, load_host, patch
from oretrofit.calibration import predicting
from oretrofit.calibration.variants import VARIANTS
from oretrofit.experiments import audit, audit_report, audit_tables
from oretrofit.experiments.audit import HOST, INPUT
from oretrofit.experiments.audit_tables import KINDS, AuditTable, Insertion
from oretrofit.experiments.pretrain import save_host
from oretrofit.patches import tabpfn_v3_audit
from oretrofit.patches.tabpfn_v3 import GatedNorm
from oretrofit.patches.tabpfn_v3_closed import OCellEmbedding
from oretrofit.patches.tabpfn_v3_host import TABPFN_V3
from oretrofit.retrofit import api

MODELS = [HOST, *VARIANTS]
HOW = TABPFN_V3.audit
# Float64 rounds by 1.1e-16 of a value, states and logits are below 30, and some hundred roundings follow each other.
ROUNDING = 1e-12
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))


def build(host, name, tau=1e-6):
    """A copy of a host, or of its variant."""
    return copy.deepcopy(host.model) if name == HOST else patch(host, name, tau=tau).model


def draw(seed=0, rows=40, columns=5, dtype=torch.float32, device="cpu"):
    """A table with missing cells."""
    table = audit_tables.draw_audit_table(np.random.default_rng(seed), rows, columns)
    table.x_R1C[::7, 0, 1] = torch.nan
    return AuditTable(table.x_R1C.to(device, dtype), table.y_N1.to(device, dtype))


def insert(table, kinds=KINDS, seed=1):
    return audit_tables.draw_insertion(np.random.default_rng(seed), kinds, table.sizes)


def run(model, closed=None):
    """What the audit finds of a model, with the closed variant of the same weights."""
    reference = audit.reference_of(model if closed is None else closed)
    return audit.audit_model(model, reference, [draw()])


def leaks(found, *, inserted=KINDS):
    """Boundary -> the parts that are named there, the boundary's own name left out."""
    named = {}
    for record in found["boundaries"]:
        for leak in record["leaks"]:
            if record["inserted"] in inserted:
                part = leak.split()[0].removeprefix(record["boundary"]).removeprefix(".") or "itself"
                named.setdefault(record["boundary"], set()).add(part)
    return named


# --- Stages and insertions ---


@pytest.mark.parametrize("config", [{}, {"use_rope": False, "use_nan_indicators": False, "icl_num_kv_heads_test": 1}])
@pytest.mark.parametrize("name", MODELS)
@torch.inference_mode()
def test_the_stages_together_are_the_model(make_host, name, config):
    model, table = build(make_host(**config), name, tau=1e-2).double(), draw(dtype=torch.float64)
    insertion = insert(table)
    inputs = [((table.x_R1C, table.y_N1), {}, len(table.y_N1))]
    if name == "closed":
        longer, structure = insertion.inputs(table, 1e3), insertion.structure(torch.device("cpu"))
        inputs.append((longer, {"structure": structure}, insertion.num_train))
    for (x, y), structure, n in inputs:
        h = HOW.embed_cells(model, x, y, structure.get("structure"))
        for stage in HOW.stages(model).values():
            h = stage(h, n, y if not structure else insertion.targets(table.y_N1))
        logits, expected = HOW.head(model, h[0, n:]), model(x, y, **structure)[:, 0]
        live = insertion.rows[len(table.y_N1) :] - n if structure else slice(None)
        assert (logits[live] - expected[live]).abs().max() < ROUNDING
        assert expected.std(dim=0).max() > 0.1


def test_an_insertion_by_hand():
    insertion = Insertion(torch.tensor([1, 2, 4]), torch.tensor([0, 2]), (6, 3), 3)  # two train rows, one test row
    table = AuditTable(torch.tensor([[[1.0, 2]], [[3, 4]], [[5, 6]]]), torch.tensor([[7.0], [8]]))
    x, y = insertion.inputs(table, 9)
    assert x[:, 0].tolist() == [[9, 9, 9], [1, 9, 2], [3, 9, 4], [9, 9, 9], [5, 9, 6], [9, 9, 9]]
    assert y.tolist() == [[9], [7], [8]]
    assert insertion.targets(table.y_N1).tolist() == [[0], [7], [8]]
    structure = insertion.structure(torch.device("cpu"))
    assert structure.rows_BR.tolist() == [[False, True, True, False, True, False]]
    assert structure.columns_BC.tolist() == [[True, False, True]]

    rows = insertion.into(table.x_R1C.transpose(0, 1))
    assert rows.tolist() == [[[0, 0], [1, 2], [3, 4], [0, 0], [5, 6], [0, 0]]]
    rows[0, 0] = torch.tensor([3.0, 4])
    assert (insertion.old(rows)[0].tolist(), insertion.null_norm(rows)) == ([[1, 2], [3, 4], [5, 6]], 5)
    cells = insertion.packed().into(table.x_R1C.transpose(0, 1)[..., None])
    assert cells[0, :, :, 0].tolist() == [[0, 0, 0], [1, 2, 0], [3, 4, 0], [0, 0, 0], [5, 6, 0], [0, 0, 0]]
    cells[0, 1, 2] = -2
    assert (insertion.packed().old(cells)[0, 0, :, 0].tolist(), insertion.packed().null_norm(cells)) == ([1, 2], 2)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
def test_up_to_as_many_again_at_random_places(kinds):
    rng, sizes, seen = np.random.default_rng(0), (5, 4, 3), []
    for _ in range(300):
        insertion = audit_tables.draw_insertion(rng, kinds, sizes)
        train, test = insertion.rows[:5], insertion.rows[5:] - insertion.num_train
        totals = (insertion.num_train, insertion.shape[0] - insertion.num_train, insertion.shape[1])
        for places, total in zip((train, test, insertion.columns), totals, strict=True):
            assert places.tolist() == sorted({*places.tolist()} & {*range(total)})
        seen.append([*zip(totals, (places[0].item() for places in (train, test, insertion.columns)), strict=True)])
    for kind, size, drawn in zip(KINDS, sizes, zip(*seen, strict=True), strict=True):
        every = {(total, 0) for total in range(size + 1, 2 * size + 1)} if kind in kinds else {(size, 0)}
        assert every <= {*drawn}
        assert {total for total, _ in drawn} == {total for total, _ in every}
        assert (kind in kinds) == any(first > 0 for _, first in drawn)


@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [KINDS])
@torch.inference_mode()
def test_the_shift_of_a_live_prediction_by_hand(tiny_host, kinds):
    table, model = draw(dtype=torch.float64), build(tiny_host, HOST).double()
    insertion, n = insert(table, kinds), len(table.y_N1)
    x, y = torch.zeros(insertion.shape[0], 1, insertion.shape[1]).double(), torch.zeros(insertion.num_train, 1).double()
    for i, row in enumerate(insertion.rows.tolist()):
        for j, column in enumerate(insertion.columns.tolist()):
            x[row, 0, column] = table.x_R1C[i, 0, j]
        if i < n:
            y[row] = table.y_N1[i]
    # Bar distribution: uniform buckets, and half normals at the sides whose median is a bucket's width.
    borders = model.regression_borders
    centers, side = (borders[:-1] + borders[1:]) / 2, (2 / np.pi) ** 0.5 / 0.6744897501960817
    centers[0], centers[-1] = borders[1] - side * borders.diff()[0], borders[-2] + side * borders.diff()[-1]
    test = [row - insertion.num_train for row in insertion.rows.tolist()[n:]]
    with_null, without = (
        model(x, y)[test, 0].softmax(-1) @ centers,
        model(table.x_R1C, table.y_N1)[:, 0].softmax(-1) @ centers,
    )
    expected = (with_null - without).abs().max().item()
    # TabPFN's half normals are in float32, which rounds by 6e-8.
    assert audit.live_shift(model, table, insertion) == pytest.approx(expected, rel=1e-6, abs=ROUNDING)
    assert (expected > 0.01) == (list(kinds) != ["test rows"])


# --- Which parts leak ---

EMBEDDER, ICL = ("feature_distribution_embedder.layers.0", "feature_distribution_embedder.layers.1"), "icl_blocks"
COUNT_EMBEDDER = {name: {"cross_attn_block1.attn.softmax_scaling_layer"} for name in EMBEDDER}
COUNT_ICL = {f"{ICL}.{i}": {"icl_attention.softmax_scaling_layer"} for i in range(3)}
COUNT = {**COUNT_EMBEDDER, **COUNT_ICL}
# What neither variant of the paper closes, behind the count (docs/theory.md, section 5).
DOORS = {
    INPUT: {"standard_scaler", "grouping", "x_embed", "col_y_encoder"},
    "column_aggregator": {"itself", "rope"},
    "icl_y_encoder": {"itself"},
}
HOST_LEAKS = {
    INPUT: DOORS[INPUT],
    **{name: COUNT[name] | {"cross_attn_block1", "cross_attn_block2"} for name in EMBEDDER},
    "column_aggregator": {"itself", "rope", "blocks.0", "blocks.1"},
    "icl_y_encoder": {"itself"},
    **{name: leak | {"itself"} for name, leak in COUNT_ICL.items()},
}


def test_a_host(tiny_host):
    found = run(build(tiny_host, HOST), build(tiny_host, "closed"))
    assert leaks(found) == HOST_LEAKS
    assert leaks(found, inserted=["test rows"]) == {
        INPUT: {"standard_scaler", "x_embed"},
        **{name: {"cross_attn_block2"} for name in EMBEDDER},
        "column_aggregator": {"itself"},
        **{name: {"itself"} for name in COUNT_ICL},
    }
    assert leaks(found, inserted=["columns"]) == {
        INPUT: {"grouping", "x_embed", "col_y_encoder"},
        **{name: {"cross_attn_block2"} for name in EMBEDDER},
        "column_aggregator": {"rope", "blocks.0", "blocks.1"},
    }
    # Sources move the old tokens, receivers wake up: which attention does which is measured.
    words = {leak for record in found["boundaries"] for leak in record["leaks"]}
    assert f"{EMBEDDER[0]}.cross_attn_block1 gives a NULL source the weight exp(0)" in words
    assert f"{EMBEDDER[0]}.cross_attn_block1 gives a NULL receiver the mean of its values" not in words
    assert f"{EMBEDDER[0]}.cross_attn_block2 gives a NULL receiver the mean of its values" in words
    assert f"{EMBEDDER[0]}.cross_attn_block2 gives a NULL source the weight exp(0)" not in words
    assert "icl_blocks.1 gives a NULL source the weight exp(0)" in words
    assert "icl_blocks.1 gives a NULL receiver the mean of its values" in words
    scaling = "icl_blocks.2.icl_attention.softmax_scaling_layer"
    assert f"{scaling} scales queries by the number of keys, and counts a NULL" in words


@pytest.mark.parametrize("variant", ["oa", "full-o"])
def test_the_variants_that_leave_doors_and_count_open(tiny_host, variant):
    assert leaks(run(build(tiny_host, variant), build(tiny_host, "closed"))) == {**COUNT, **DOORS}


def test_closed(tiny_host):
    found = run(build(tiny_host, "closed"))
    assert leaks(found) == {}
    assert {record["null_norm"] for record in found["boundaries"]} == {found["max_null_norm"]} == {0.0}
    # Float32 rounds by 6e-8: of the largest entry of a state, in sums of a few dozen terms; and of logits of about 20,
    # whose error, 1e-6 at each of some dozen roundings, is that of a mean in standard deviations.
    assert max(record["shift"] for record in found["boundaries"]) < 1e-5
    assert found["max_live_shift"] < 1e-4


@pytest.mark.parametrize("variant", [HOST, "oa"])
def test_a_count_without_effect_is_not_named(make_host, variant):
    host = make_host()
    for module in host.model.modules():
        if isinstance(module, tabpfn_v3.SoftmaxScalingMLP):
            module.base_mlp[-1].weight.data.zero_()  # the scale is its bias, whatever the number of keys
    found = leaks(run(build(host, variant), build(host, "closed")))
    assert not any("scaling" in part for named in found.values() for part in named)
    expected = HOST_LEAKS if variant == HOST else {**COUNT, **DOORS}
    rest = {name: named - COUNT.get(name, set()) for name, named in expected.items()}
    assert found == {name: named for name, named in rest.items() if named}


@pytest.mark.parametrize(("variant", "rotation"), [(HOST, "none"), ("oa", "none"), ("oa", "by no angle")])
def test_no_rotation_is_not_named(make_host, variant, rotation):
    host = make_host(use_rope=rotation != "none")
    if rotation == "by no angle":
        host.model.column_aggregator.rope.freqs.data.zero_()
    found = run(build(host, variant), build(host, "closed"))
    assert leaks(found)["column_aggregator"] == (HOST_LEAKS if variant == HOST else DOORS)["column_aggregator"] - {
        "rope"
    }


class OffsetNorm(tabpfn_v3._DtypeMatchingRMSNorm):
    """A norm with a bias, which no presence gates."""

    def forward(self, h):
        return super().forward(h) + 0.1


class UngatedEmbedding(OCellEmbedding):
    """A cell embedding that adds something to every cell."""

    def forward(self, cell_BRCF):
        return super().forward(cell_BRCF) + 0.1


@pytest.mark.parametrize(
    ("opened", "other", "boundary"),
    [
        ("x_embed", UngatedEmbedding, INPUT),
        ("feature_distribution_embedder.layers.1.cross_attn_block2.layernorm2", OffsetNorm, EMBEDDER[1]),
        ("column_aggregator", tabpfn_v3.ColumnAggregator, "column_aggregator"),
        ("column_aggregator.out_ln", OffsetNorm, "column_aggregator"),
        ("icl_y_encoder", nn.Linear, "icl_y_encoder"),
        ("icl_blocks.1.layernorm_mlp", OffsetNorm, "icl_blocks.1"),
        ("icl_blocks.2.icl_attention.softmax_scaling_layer", tabpfn_v3.SoftmaxScalingMLP, "icl_blocks.2"),
        ("output_norm", OffsetNorm, "output_norm"),
    ],
)
def test_one_part_that_is_opened_in_the_closed_model_is_found(tiny_host, opened, other, boundary):
    closed = build(tiny_host, "closed")
    model = copy.deepcopy(closed)
    model.get_submodule(opened).__class__ = other
    # The stages alone: a model whose targets are embedded by the host's class does not run.
    reference, rng = audit.reference_of(closed), np.random.default_rng(0)
    with torch.inference_mode():
        records = [*audit.audit_boundaries(model, reference, draw(), rng)]
    assert {r["boundary"] for r in records if max(r["shift"], r["null_norm"]) > audit.LEAK} == {boundary}
    named = leaks({"boundaries": records})
    assert named == {boundary: {opened.removeprefix(boundary).removeprefix(".") or "itself"}}
    assert {type(m) for m in reference.modules()} - {tabpfn_v3_audit._NoRotation} <= {type(m) for m in closed.modules()}


def test_a_norm_without_its_gate_is_no_leak(tiny_host):
    """TabPFN's norms have no bias: they map zero to zero by themselves."""
    closed = build(tiny_host, "closed")
    model = copy.deepcopy(closed)
    norms = [module for module in model.modules() if type(module) is GatedNorm]
    for norm in norms:
        norm.__class__ = tabpfn_v3._DtypeMatchingRMSNorm
    assert norms and leaks(run(model, closed)) == {}


@torch.inference_mode()
def test_the_parts_at_the_input_are_the_hosts_whole_door(tiny_host):
    host, closed = build(tiny_host, HOST).double(), build(tiny_host, "closed").double()
    table = draw(dtype=torch.float64)
    # A NULL's target is 0 in the host, and the mean of the others in the closed model.
    table = AuditTable(table.x_R1C, table.y_N1 - table.y_N1.mean())
    insertion = insert(table).packed()
    x, y = insertion.inputs(table, 0.0)
    by_module = {}
    for classes in audit.parts(TABPFN_V3, host, closed, INPUT).values():
        for module, part in classes.items():
            by_module.setdefault(module, []).append(part)
    together = {module: type("Together", tuple(classes), {}) for module, classes in by_module.items()}
    with audit.switched(closed, together):
        cells = HOW.embed_cells(closed, x, y, insertion.structure(x.device))
    expected = HOW.embed_cells(host, x, y, None)
    assert (cells - expected).abs().max() < ROUNDING


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_nothing_hides_behind_the_named_parts(tiny_host, kind):
    """All parts that are not named, together in the closed model, let nothing through."""
    host, closed = build(tiny_host, HOST), build(tiny_host, "closed")
    reference, table = audit.reference_of(closed), draw()
    records = audit.audit_boundaries(host, reference, table, np.random.default_rng(0))
    found = {record["boundary"]: record for record in records if record["inserted"] == kind}
    state = None
    for boundary in found:
        rest = {}
        named = {leak.split()[0] for leak in found[boundary]["leaks"]}
        for part, classes in audit.parts(TABPFN_V3, host, reference, boundary).items():
            rest |= {} if part in named else classes
        with audit.switched(reference, rest):
            behind = audit.pass_boundary(TABPFN_V3, reference, boundary, table, state, insert(table, [kind]), 0.0)
        assert max(behind.shift, behind.null_norm) < audit.LEAK, (boundary, rest)
        live = audit.pass_boundary(TABPFN_V3, host, boundary, table, state, insert(table, [kind]), 0.0)
        state = live.insertion.old(live.h)


# --- The bundled host ---


@functools.cache
def bundled():
    """The bundled host and its closed variant, calibrated with the default settings."""
    host = load_host("small")
    return host.model, patch(host, "closed").model


def draw_any(seed):
    """A table of 20 to 500 rows and 2 to 30 columns, and NULLs of all kinds."""
    rng = np.random.default_rng(seed)
    table = audit_tables.draw_audit_table(rng, int(rng.integers(20, 501)), int(rng.integers(2, 31)))
    return table, audit_tables.draw_insertion(rng, KINDS, table.sizes)


@settings(max_examples=4, derandomize=True, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@torch.inference_mode()
def test_null_rows_and_columns_move_no_live_prediction_but_for_rounding(seed):
    host, closed = bundled()
    table, insertion = draw_any(seed)
    assert audit.live_shift(host, table, insertion) > 0.01
    in_float64 = AuditTable(table.x_R1C.double(), table.y_N1.double())
    assert audit.live_shift(copy.deepcopy(closed).double(), in_float64, insertion) < ROUNDING


@settings(max_examples=15, derandomize=True, deadline=None, phases=[Phase.explicit, Phase.generate])
@given(seed=st.integers(0, 2**32 - 1))
@example(seed=82)
@example(seed=98)
@example(seed=67873)
@torch.inference_mode()
def test_null_rows_and_columns_move_no_live_prediction_in_float32(seed):
    table, insertion = draw_any(seed)
    # What the variant promises. Float32 itself moves these predictions by about as much: logits are of about 20, and
    # 6e-8 of that, some ten times, is 1e-5 standard deviations.
    assert audit.live_shift(bundled()[1], table, insertion) <= 1e-5


def test_the_tables_have_the_sizes_of_the_bar():
    sizes = [table.sizes for table in audit_tables.draw_audit_tables(60)]
    rows, columns = [train + test for train, test, _ in sizes], [columns for *_, columns in sizes]
    assert 20 <= min(rows) < 40 and 250 < max(rows) <= 500
    assert 2 == min(columns) and 25 < max(columns) <= 30
    assert all(train == 2 * (train + test) // 3 for train, test, _ in sizes)
    y = audit_tables.draw_audit_tables(3)[2].y_N1.double()
    assert abs(y.mean()) < 1e-6 and abs(y.std(correction=0) - 1) < 1e-6  # standardised in float64, kept in float32


# --- The function and the command ---


@pytest.fixture
def quick(monkeypatch):
    """Small tables, and calibration on one of them with one estimator."""
    monkeypatch.setattr(
        audit, "draw_audit_tables", lambda tables, device: [draw(i, device=device) for i in range(tables)]
    )
    monkeypatch.setattr(audit, "calibrate", functools.partial(api.calibrate, tables=1))
    monkeypatch.setattr(predicting, "TabPFNRegressor", functools.partial(TabPFNRegressor, n_estimators=1))


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_what_is_returned(tiny_host, quick, device):
    steps = []
    found = audit.audit(tiny_host, ["oa", "oa"], tables=2, device=device, on_step=steps.append)
    assert steps == [
        "Calibrating",
        *(f"Auditing {name}, table {i} of 2" for name in (HOST, "oa") for i in (1, 2)),
    ]
    assert (found["host"], found["tables"], list(found["variants"])) == (tiny_host.name, 2, [HOST, "oa"])
    for variant in found["variants"].values():
        assert list(variant) == ["max_live_shift", "live_shift", "max_null_norm", "boundaries"]
        assert list(variant["live_shift"]) == [*KINDS, "all"]
        assert variant["max_live_shift"] == max(variant["live_shift"].values()) > 0.01
        assert variant["max_null_norm"] == max(record["null_norm"] for record in variant["boundaries"])
        keys = ["boundary", "inserted", "shift", "null_norm", "prediction_shift", "leaks"]
        assert all(list(record) == keys for record in variant["boundaries"])
    places = [(record["boundary"], record["inserted"]) for record in found["variants"]["oa"]["boundaries"]]
    by_row = [INPUT, *EMBEDDER, "column_aggregator", "icl_y_encoder", *COUNT_ICL, "output_norm"]
    assert places == [(name, kind) for kind in KINDS for name in (by_row if kind != "columns" else by_row[:4])]
    assert next(tiny_host.model.parameters()).device.type == "cpu"


def test_equal_findings_at_consecutive_blocks_are_one():
    def record(boundary, inserted, *found):
        return {"boundary": boundary, "inserted": inserted, "leaks": [f"{boundary}{leak}" for leak in found]}

    boundaries = [
        record("icl_y_encoder", "train rows", " adds"),
        *(record(f"icl_blocks.{i}", "train rows", " moves", ".attn counts") for i in (0, 1, 2)),
        record("icl_blocks.3", "train rows", " moves"),
        record("output_norm", "train rows"),
        *(record(f"icl_blocks.{i}", "test rows", " moves") for i in (0, 1, 3)),
    ]
    found = {"variants": {"a": {"boundaries": boundaries}, "b": {"boundaries": []}, "c": {"boundaries": boundaries}}}
    assert audit_report.leak_rows(found, TABPFN_V3) == {
        "a, c": [
            ["icl_y_encoder", "adds (train rows)"],
            ["icl.0 to 1", "moves (train rows, test rows)"],
            ["icl.0 to 1", "attn counts (train rows)"],
            ["icl.2", "moves (train rows)"],
            ["icl.2", "attn counts (train rows)"],
            ["icl.3", "moves (train rows, test rows)"],
        ],
        "b": [],
    }


def command(*arguments, columns=80):
    """As in a terminal that knows no colours."""
    terminal = {"COLUMNS": str(columns), "FORCE_COLOR": "1", "TERM": "dumb"}
    return CliRunner(env=terminal).invoke(cli.app, ["audit", *map(str, arguments)])


def test_the_command(tiny_host, tmp_path, quick):
    save_host(tiny_host.model, tmp_path / "tiny-v3.safetensors")
    file = tmp_path / "audit.json"
    result = command("--host", tmp_path / "tiny-v3.safetensors", "--tables", 1, "--device", "cpu", "--json", file)
    assert result.exit_code == 0, result.output
    lines = [line.split() for line in result.stdout.splitlines()]
    found = json.loads(file.read_text())
    assert list(found["variants"]) == MODELS
    for name, variant in found["variants"].items():
        # Printed to two digits: within 5 %.
        row = next(line for line in lines if line[:1] == [name] and len(line) == 6)
        assert float(row[1]) == pytest.approx(variant["live_shift"]["train rows"], rel=0.06)
        assert float(row[5]) == pytest.approx(variant["max_null_norm"], rel=0.06)
    shifts = next(line for line in lines if line[:1] == ["icl_y_encoder"])[1::2]
    assert shifts == ["0", "0", "0", "0"]  # shift and norm of each: it moves nobody, and wakes NULLs
    assert "What leaks in oa, full-o" in result.stdout
    assert "Nothing leaks in closed." in result.stdout
    assert "above 0.0001: a weaker leak is in the figures only" in " ".join(result.stdout.split())
    assert "icl.0 to 2     icl_attention.softmax_scaling_layer scales queries by the" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_its_defaults_are_those_of_the_function():
    options = inspect.signature(cli.audit).parameters
    assert options["tables"].default == audit.DEFAULT_TABLES
    assert audit.audit.__kwdefaults__["tables"] == audit.DEFAULT_TABLES


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variant", "osa"], "unknown variant 'osa'"),
        (["--tables", 0], "--tables must be between 1 and"),
        (["--host", "nowhere"], "no host 'nowhere'"),
        (["--device", "tpu"], "tpu"),
        (["--json", "no/folder/audit.json"], "no/folder/audit.json"),
    ],
)
def test_bad_input(arguments, message):
    result = command(*arguments)
    assert (result.exit_code, message in result.stderr) == (2, True), result.output
