"""Where a NULL moves others or wakes up: a host and its variants, boundary by boundary.

The model is run as its stages: cells from the input, each induced block, the column aggregator, the
target embedding of the ICL stage, each ICL block, and the last norm. (The projection behind it acts on
each test row alone, and a NULL row's answer is nobody's.) At each boundary NULL rows or columns, zero
vectors, are inserted, and the stage behind it is run with and without them.

Which part leaks is found by switching: the classes of one part of the leaking stage are put into the same
stage of the closed model, where everything else is inert, and a part that lets a NULL through there is named.

Shape suffixes: R rows (train and test), N train rows, C columns, E embedding width, D row width; always
one table. h is a state, of cells (1, R, C, E) or of rows (1, R, D). Definitions: docs/theory.md, section 3.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import pandas as pd
import torch
from tabpfn.architectures import tabpfn_v3
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.architectures.tabpfn_v3 import TabPFNV3
from torch import Tensor, nn

from ..calibration.prior import draw_table
from ..calibration.variants import VARIANTS, check_variant
from ..patches.structure import Structure
from ..patches.tabpfn_v3 import CarrierNorm, OColumnAttention, OCrossAttention, OICLAttention
from ..patches.tabpfn_v3_closed import ClosedTabPFNV3, OCellEmbedding, OTargetEncoder, with_structure
from ..retrofit.api import calibrate, patch
from ..retrofit.hosts import Host
from .report import SHORT_NAMES, Cells

HOST = "host"
INPUT = "input"
KINDS = ("train rows", "test rows", "columns")
AUDIT_SEED = 40_000
DEFAULT_TABLES = 5

# A shift relative to the largest state, or a norm of a NULL, that is no rounding.
LEAK = 1e-4

# What the cells and targets of a NULL hold. A closed model never looks at them; for others zeros are all
# there is to say that something is not there.
_GARBAGE, _ZERO = 1e3, 0.0

Stage = Callable[[Tensor, int, Tensor], Tensor]


# ---- The model as stages ------------------------------------------------------------------------


def embed_cells(model: TabPFNV3, x_R1C: Tensor, y_N1: Tensor, structure: Structure | None = None) -> Tensor:
    """The cells (1, R, C, E) that a model makes of its input, targets included.

    The structure is for closed models, whose cells come out with live columns first.
    """
    n = len(y_N1)
    if isinstance(model, ClosedTabPFNV3):
        x, y = with_structure(x_R1C, y_N1, structure or Structure())
        return model.x_embed(model._preprocess_and_group(x, cast(Tensor, y), n, None)[0])
    grouped, y_1NE, _ = model._preprocess_and_group(x_R1C, y_N1, n, None)
    cells = model.x_embed(grouped)
    return torch.cat([cells[:, :n] + cast(Tensor, y_1NE).unsqueeze(2), cells[:, n:]], dim=1)


def stages(model: TabPFNV3) -> dict[str, Stage]:
    """The stages behind the cells, in order: each maps (state, train rows, y_N1) to the next state."""

    def block(module: nn.Module) -> Stage:
        return lambda h, n, y: module(h, n)[0]

    def embed_targets(h: Tensor, n: int, y_N1: Tensor) -> Tensor:
        y_1N1, door = y_N1.T.unsqueeze(-1), model.icl_y_encoder
        train = door.inject(h[:, :n], y_1N1) if isinstance(door, OTargetEncoder) else h[:, :n] + door(y_1N1)
        return torch.cat([train, h[:, n:]], dim=1)

    layers, blocks = model.feature_distribution_embedder.layers, model.icl_blocks
    return {
        **{f"feature_distribution_embedder.layers.{i}": block(layer) for i, layer in enumerate(layers)},
        "column_aggregator": lambda h, n, y: model.column_aggregator(h).flatten(-2),
        "icl_y_encoder": embed_targets,
        **{f"icl_blocks.{i}": block(module) for i, module in enumerate(blocks)},
        "output_norm": lambda h, n, y: model.output_norm(h),
    }


def predicted_means(model: TabPFNV3, logits: Tensor) -> Tensor:
    """Means of the bar distributions of logits (..., buckets), in the unit of the targets."""
    return FullSupportBarDistribution(model.regression_borders).mean(logits)


# ---- Tables, and where NULLs are put into them --------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A table as a model takes it: x (R, 1, C), and the targets of its train rows (N, 1), standardised."""

    x_R1C: Tensor
    y_N1: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many there are of each of `KINDS`."""
        return len(self.y_N1), len(self.x_R1C) - len(self.y_N1), self.x_R1C.shape[2]


def draw_case(rng: np.random.Generator, rows: int, columns: int, device: str = "cpu") -> Case:
    """A synthetic table in float32, two thirds of its rows to train on."""
    table = draw_table(rng, rows, columns)
    y = table.y[: rows * 2 // 3]
    x_R1C, y_N1 = table.X[:, None], ((y - y.mean()) / y.std())[:, None]
    return Case(*(torch.tensor(values, dtype=torch.float32, device=device) for values in (x_R1C, y_N1)))


def draw_cases(tables: int, device: str = "cpu") -> list[Case]:
    """Synthetic tables of 20 to 500 rows and 2 to 30 columns, small ones as common as large ones."""
    cases = []
    for i in range(tables):
        rng = np.random.default_rng([AUDIT_SEED, i])
        rows, columns = (int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))) for low, high in ((20, 500), (2, 30)))
        cases.append(draw_case(rng, rows, columns, device))
    return cases


@dataclass(frozen=True)
class Insertion:
    """NULL rows and columns among those of a table.

    Attributes:
        rows: Where the old rows are among all, (R,).
        columns: Where the old columns are among all, (C,).
        shape: How many rows and columns there are with the NULLs.
        num_train: How many train rows there are with the NULLs.
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    num_train: int

    def packed(self) -> Insertion:
        """The same with the old columns in front, as a closed model has them behind its input."""
        return dataclasses.replace(self, columns=torch.arange(len(self.columns)))

    def inputs(self, case: Case, fill: float) -> tuple[Tensor, Tensor]:
        """x and y of a table with NULLs, whose cells and targets are `fill`."""
        x_R1C = case.x_R1C.new_full((self.shape[0], 1, self.shape[1]), fill)
        x_R1C[self.rows[:, None], 0, self.columns] = case.x_R1C[:, 0]
        return x_R1C, self.targets(case.y_N1, fill)

    def structure(self, device: torch.device) -> Structure:
        """What exists."""
        exists = [torch.zeros(1, size, dtype=torch.bool, device=device) for size in self.shape]
        for exists_1S, old in zip(exists, (self.rows, self.columns), strict=True):
            exists_1S[0, old] = True
        return Structure(*exists)

    def targets(self, y_N1: Tensor, fill: float = 0.0) -> Tensor:
        """Targets of the train rows, `fill` at NULLs."""
        longer = y_N1.new_full((self.num_train, 1), fill)
        longer[self.rows[: len(y_N1)]] = y_N1
        return longer

    def into(self, h: Tensor) -> Tensor:
        """A state with zeros at the NULLs."""
        longer = h.new_zeros(1, *self.shape[: h.dim() - 2], h.shape[-1])
        longer[self._old(h)] = h
        return longer

    def old(self, h: Tensor) -> Tensor:
        """The old tokens of a state with NULLs."""
        return h[self._old(h)]

    def null_norm(self, h: Tensor) -> float:
        """The largest norm of a NULL in a state."""
        norms = h.norm(dim=-1)
        norms[self._old(h)] = 0
        return norms.max().item()

    def _old(self, h: Tensor) -> tuple[slice | Tensor, ...]:
        rows = (slice(None), self.rows)
        return rows if h.dim() == 3 else (slice(None), self.rows[:, None], self.columns)


def draw_insertion(rng: np.random.Generator, kinds: Iterable[str], sizes: tuple[int, int, int]) -> Insertion:
    """NULLs of the given kinds, of each at least one and up to as many as there are, at random places."""
    longer = [size + int(rng.integers(1, size + 1)) * (kind in kinds) for kind, size in zip(KINDS, sizes, strict=True)]
    train, test, columns = (
        torch.tensor(np.sort(rng.choice(total, size, replace=False))) for total, size in zip(longer, sizes, strict=True)
    )
    return Insertion(torch.cat([train, longer[0] + test]), columns, (longer[0] + longer[1], longer[2]), longer[0])


# ---- What NULLs do ------------------------------------------------------------------------------


def live_shift(model: TabPFNV3, case: Case, insertion: Insertion) -> float:
    """Largest shift of a predicted mean by NULLs in the input, in standard deviations of the target."""
    n, means = len(case.y_N1), predicted_means(model, model(case.x_R1C, case.y_N1)[:, 0])
    if isinstance(model, ClosedTabPFNV3):
        logits = model(*insertion.inputs(case, _GARBAGE), structure=insertion.structure(case.x_R1C.device))
    else:
        logits = model(*insertion.inputs(case, _ZERO))
    moved = predicted_means(model, logits[insertion.rows[n:] - insertion.num_train, 0]) - means
    return moved.abs().max().item()


@dataclass(frozen=True)
class Passage:
    """What NULLs that are inserted in front of a stage do behind it.

    Attributes:
        h: The state behind the stage.
        insertion: Where the NULLs are in it.
        shift: Largest shift of an old token's entry, relative to the largest entry.
        null_norm: Largest norm of a NULL.
    """

    h: Tensor
    insertion: Insertion
    shift: float
    null_norm: float


def pass_boundary(
    model: TabPFNV3, boundary: str, case: Case, before: Tensor | None, insertion: Insertion, fill: float
) -> Passage:
    """Run one stage with NULLs and without, on the state `before` it, or on the input, where they hold `fill`."""
    n, y_N1 = len(case.y_N1), case.y_N1
    if before is None:
        live = embed_cells(model, case.x_R1C, y_N1)
        h = embed_cells(model, *insertion.inputs(case, fill), insertion.structure(live.device))
        insertion = insertion.packed() if isinstance(model, ClosedTabPFNV3) else insertion
    else:
        stage = stages(model)[boundary]
        live = stage(before, n, y_N1)
        h = stage(insertion.into(before), insertion.num_train, insertion.targets(y_N1))
    shift = (insertion.old(h) - live).abs().max() / live.abs().max()
    return Passage(h, insertion, shift.item(), insertion.null_norm(h))


def audit_boundaries(
    model: TabPFNV3, reference: ClosedTabPFNV3, case: Case, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Insert NULLs of each kind at each boundary, at random places.

    Args:
        model: A host or a variant.
        reference: `reference_of` the closed variant of the same weights, in which parts are switched.
        case: A table.
        rng: Draws how many NULLs there are, and where.

    Yields:
        `boundary`, the stage behind it by its name in the model, or `input`; `inserted`, one of
        `KINDS`; `shift` and `null_norm` as of `Passage`, at the input of the whole door;
        `prediction_shift`, the largest shift of a predicted mean at the end, in standard deviations of
        the target; `leaks`, the parts at fault and what they do, in words.
    """
    run, n, closed = stages(model), len(case.y_N1), isinstance(model, ClosedTabPFNV3)
    states = [embed_cells(model, case.x_R1C, case.y_N1)]
    for stage in run.values():
        states.append(stage(states[-1], n, case.y_N1))
    means = predicted_means(model, model.output_projection(states[-1][0, n:]))
    for kind in KINDS:
        for i, (boundary, before) in enumerate(zip([INPUT, *run], [None, *states], strict=False)):
            if kind == "columns" and before is not None and before.dim() == 3:
                break  # rows have no columns any more
            insertion = draw_insertion(rng, [kind], case.sizes)
            if closed and before is not None:
                insertion = insertion.packed()
            at: tuple[Any, ...] = (boundary, case, before, insertion, _GARBAGE if closed else _ZERO)
            behind = pass_boundary(model, *at)
            h, insertion = behind.h, behind.insertion
            for stage in [*run.values()][i:]:
                h = stage(h, insertion.num_train, insertion.targets(case.y_N1))
            moved = predicted_means(model, model.output_projection(h[0, insertion.rows[n:]])) - means
            leaks = max(behind.shift, behind.null_norm) > LEAK
            yield {
                "boundary": boundary,
                "inserted": kind,
                "shift": behind.shift,
                "null_norm": behind.null_norm,
                "prediction_shift": moved.abs().max().item(),
                "leaks": list(leaking_parts(model, reference, at)) if leaks else [],
            }


# ---- Switching parts ----------------------------------------------------------------------------


class _NoRotation(tabpfn_v3.RotaryEmbedding):
    def rotate_queries_or_keys(self, t_BHSD: Tensor) -> Tensor:
        return t_BHSD


class _NoScaling(tabpfn_v3.SoftmaxScalingMLP):
    def forward(self, q_BSHD: Tensor, n: int | Tensor) -> Tensor:
        return q_BSHD


# What the host does at its input, each in the closed model by itself: the host's own door does not run there.


class _ScalingOfAll(ClosedTabPFNV3):
    def _preprocess_and_group(
        self, rows_RiBC: Tensor, y: Tensor, num_train: int, scaler_cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        x_RBC, exists_RBC = rows_RiBC.chunk(2, dim=-1)
        every_row = torch.cat([x_RBC, exists_RBC.amax(dim=0).expand_as(x_RBC)], dim=-1)
        F = self.x_embed.in_features
        cells = super()._preprocess_and_group(rows_RiBC, y, num_train, scaler_cache)[0]
        scaled, _, scaler_cache = super()._preprocess_and_group(every_row, y, num_train, scaler_cache)
        return torch.cat([scaled[..., :F], cells[..., F:]], dim=-1), None, scaler_cache


class _GroupingOfAll(ClosedTabPFNV3):
    @staticmethod
    def _shifted_columns(columns_BC: Tensor, live_B1: Tensor, shift: int) -> Tensor:
        return (columns_BC + shift) % columns_BC.shape[1]


class _BiasForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        F = self.in_features
        present = torch.ones_like(cell_BRCF[..., :1])
        return super().forward(torch.cat([cell_BRCF[..., :F], present, cell_BRCF[..., F + 1 :]], dim=-1))


class _TargetForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        F = self.in_features
        y, train = cell_BRCF[..., F + 1 : F + 2], cell_BRCF[..., F + 2 :]
        return super().forward(cell_BRCF[..., : F + 1]) + train * self.target(y)


Classes = dict[str, type[nn.Module]]

# Parts of the host's input, as (module -> class) of the closed model.
_INPUT_PARTS: dict[str, Classes] = {
    "standard_scaler": {"": _ScalingOfAll},
    "grouping": {"": _GroupingOfAll},
    "x_embed": {"x_embed": _BiasForAll},
    "col_y_encoder": {"x_embed": _TargetForAll},
}

# Run only in a block of their own kind, and are switched together with it.
_OF_A_BLOCK = (CarrierNorm, OColumnAttention, OCrossAttention, OICLAttention)

# What a part with a leak does to old tokens, and what it does to a NULL, by its class.
_MOVES, _WAKES = "moves old tokens", "gives a NULL a state"
_SOFTMAX = ("gives a NULL source the weight exp(0)", "gives a NULL receiver the mean of its values")
WORDS: dict[type[nn.Module], tuple[str, str]] = {
    _ScalingOfAll: (
        "takes mean and deviation over all train rows, and counts a NULL",
        "takes the mean off every row, a NULL one too",
    ),
    _GroupingOfAll: (
        "embeds a cell together with those of other columns, NULL ones too",
        "embeds a NULL cell together with those of other columns",
    ),
    _BiasForAll: (_MOVES, "adds its bias to every cell, a NULL one too"),
    _TargetForAll: (_MOVES, "adds the embedded target to every cell of a train row, a NULL one too"),
    tabpfn_v3.SoftmaxScalingMLP: ("scales queries by the number of keys, and counts a NULL", _WAKES),
    tabpfn_v3.CrossAttentionBlock: _SOFTMAX,
    tabpfn_v3.TransformerBlock: _SOFTMAX,
    tabpfn_v3.ICLTransformerBlock: _SOFTMAX,
    tabpfn_v3.ColumnAggregator: (_MOVES, "puts CLS tokens in front of every row, a NULL one too"),
    tabpfn_v3.RotaryEmbedding: ("turns a column by its position, which a NULL in front of it changes", _WAKES),
    nn.Linear: (_MOVES, "adds the embedded target to every train row, a NULL one too"),
}


def reference_of(closed: TabPFNV3) -> ClosedTabPFNV3:
    """A copy of a closed model in which columns have no position, so that NULLs may be between others."""
    reference = cast(ClosedTabPFNV3, copy.deepcopy(closed))
    if reference.column_aggregator.rope is not None:
        reference.column_aggregator.rope.__class__ = _NoRotation
    return reference


@contextmanager
def switched(model: nn.Module, classes: Classes) -> Iterator[None]:
    """Give modules, by name, other classes for a time."""
    before = {name: type(model.get_submodule(name)) for name in classes}
    try:
        for name, other in classes.items():
            model.get_submodule(name).__class__ = other
        yield
    finally:
        for name, own in before.items():
            model.get_submodule(name).__class__ = own


def parts(model: TabPFNV3, reference: ClosedTabPFNV3, boundary: str) -> dict[str, Classes]:
    """The parts in which a model differs from the closed one behind a boundary.

    Returns:
        For each part, by its name in the model, the modules and classes to switch in the reference. The
        first is the part itself.
    """
    if boundary == INPUT and not isinstance(model, ClosedTabPFNV3):
        return _INPUT_PARTS
    root = "x_embed" if boundary == INPUT else boundary
    inside = {
        f"{root}.{name}" if name else root: module for name, module in reference.get_submodule(root).named_modules()
    }
    differing = {name: type(model.get_submodule(name)) for name in inside}
    differing = {name: other for name, other in differing.items() if other is not type(inside[name])}
    found: dict[str, Classes] = {}
    for name, other in differing.items():
        if type(inside[name]) in _OF_A_BLOCK:
            continue
        found[name] = {name: other}
        for child, other in differing.items():
            if child.rpartition(".")[0] == name and type(inside[child]) in _OF_A_BLOCK:
                found[name][child] = other
                # The query scaling of an attention is a part of its own.
                scaling = f"{child}.softmax_scaling_layer"
                if scaling in inside:
                    found[name][scaling] = _NoScaling
    return found


def leaking_parts(model: TabPFNV3, reference: ClosedTabPFNV3, at: tuple[Any, ...]) -> Iterator[str]:
    """The parts of a model that let a NULL through, each switched alone in the reference, in words.

    `at`: the arguments of `pass_boundary` behind the model.
    """
    for part, classes in parts(model, reference, at[0]).items():
        with switched(reference, classes):
            behind = pass_boundary(reference, *at)
        moves, wakes = WORDS.get(next(iter(classes.values())), (_MOVES, _WAKES))
        if behind.shift > LEAK:
            yield f"{part} {moves}"
        if behind.null_norm > LEAK:
            yield f"{part} {wakes}"


# ---- The audit ----------------------------------------------------------------------------------


def audit_model(
    model: TabPFNV3,
    reference: ClosedTabPFNV3,
    cases: Sequence[Case],
    on_case: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What `audit` finds of one model; `reference` as of `audit_boundaries`. `on_case` gets 1, 2, ..."""
    rng = np.random.default_rng(AUDIT_SEED)
    rows: list[dict[str, Any]] = []
    shifts = {kind: 0.0 for kind in (*KINDS, "all")}
    with torch.inference_mode():
        for i, case in enumerate(cases):
            if on_case is not None:
                on_case(i + 1)
            rows.extend(audit_boundaries(model, reference, case, rng))
            for kind in shifts:
                insertion = draw_insertion(rng, KINDS if kind == "all" else [kind], case.sizes)
                shifts[kind] = max(shifts[kind], live_shift(model, case, insertion))
    groups = pd.DataFrame(rows).groupby(["boundary", "inserted"], sort=False)
    boundaries = groups[["shift", "null_norm", "prediction_shift"]].max()
    boundaries["leaks"] = [[*dict.fromkeys(itertools.chain(*leaks))] for _, leaks in groups["leaks"]]
    return {
        "max_live_shift": max(shifts.values()),
        "live_shift": shifts,
        "max_null_norm": float(boundaries["null_norm"].max()),
        "boundaries": boundaries.reset_index().to_dict("records"),
    }


def audit(
    host: Host,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    tables: int = DEFAULT_TABLES,
    device: str = "cpu",
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Audit a host and its variants in float32, calibrated with the default settings.

    Args:
        host: Any v3 regressor; it is audited first, whatever the variants.
        variants: Any of `VARIANTS`.
        tables: Synthetic tables (`draw_cases`), at least 1; figures are the largest over them.
        device: `cpu` or `cuda`.
        on_step: Called with a line of text at each step.

    Returns:
        `host`, its name, `tables`, and under `variants` for each: `live_shift`, the largest shift of a
        predicted mean end to end, in standard deviations of the target, by kind of NULL in the input and for
        `all` at once; `max_live_shift`, the largest of them; `max_null_norm`, the largest norm of a
        NULL behind any boundary; `boundaries`, records as of `audit_boundaries`.

    Raises:
        ValueError: An unknown variant.
    """
    tell = on_step or (lambda line: None)
    variants = list(dict.fromkeys(variants))
    for variant in variants:
        check_variant(variant)
    cases = draw_cases(tables, device)
    tell("Calibrating")
    calibration = calibrate(host, device=device)
    models = {HOST: host.specs.model}
    models |= {variant: patch(host, variant, calibration=calibration).model for variant in variants}
    reference = reference_of(patch(host, "closed", calibration=calibration).model).to(device)
    found = {}
    for name, model in models.items():

        def on_case(i: int, name: str = name) -> None:
            tell(f"Auditing {name}, table {i} of {tables}")

        found[name] = audit_model(model.to(device).eval(), reference.eval(), cases, on_case)
    return {"host": host.name, "tables": tables, "variants": found}


# ---- What it prints -----------------------------------------------------------------------------


def summary_cells(found: dict[str, Any]) -> Cells:
    """Header and cells of the summary table, of what `audit` returned: a row a variant."""
    rows = [
        [name, *(_figure(v["live_shift"][kind]) for kind in (*KINDS, "all")), _figure(v["max_null_norm"])]
        for name, v in found["variants"].items()
    ]
    return ["", *KINDS, "all at once", "NULL norm"], rows


def boundary_cells(found: dict[str, Any]) -> Cells:
    """Header and cells of the table by boundary, narrow: shift and NULL norm, the largest over `KINDS`."""
    frames = {name: pd.DataFrame(v["boundaries"]) for name, v in found["variants"].items()}
    figures = pd.concat(
        {name: f.groupby("boundary", sort=False)[["shift", "null_norm"]].max() for name, f in frames.items()}, axis=1
    )
    header = [f"{name}\n{what}" for name in frames for what in ("shift", "NULL")]
    return ["", *header], [
        [_short(str(boundary)), *map(_figure, row)]
        for boundary, row in zip(figures.index, figures.to_numpy(), strict=True)
    ]


def leak_rows(found: dict[str, Any]) -> dict[str, list[list[str]]]:
    """Where and what leaks, in words, by the variants that it is found in.

    Equal findings at consecutive blocks are one.
    """
    variants: dict[tuple[tuple[str, str], ...], list[str]] = {}
    for name, v in found["variants"].items():
        variants.setdefault(tuple(_leak_rows(v["boundaries"])), []).append(name)
    return {", ".join(names): [list(row) for row in rows] for rows, names in variants.items()}


def _leak_rows(boundaries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, str]]:
    kinds: dict[str, dict[str, list[str]]] = {}
    for record in boundaries:
        leaks = kinds.setdefault(record["boundary"], {})
        for leak in record["leaks"]:
            # A part of a stage without the stage's name, which stands beside it.
            leaks.setdefault(leak.removeprefix(record["boundary"]).lstrip(". "), []).append(record["inserted"])

    def of_stack(item: tuple[str, dict[str, list[str]]]) -> tuple[str, Any]:
        stack, _, index = item[0].rpartition(".")
        return (stack if index.isdigit() else item[0]), item[1]

    for (_, leaks), stages_alike in itertools.groupby(kinds.items(), key=of_stack):
        first, *others = [name for name, _ in stages_alike]
        place = _short(first) + (f" to {others[-1].rpartition('.')[2]}" if others else "")
        for leak, inserted in leaks.items():
            yield place, f"{leak} ({', '.join(inserted)})"


def notes() -> str:
    """What a reader of the tables has to know."""
    short = ", ".join(f"{short} = {name}" for name, short in list(SHORT_NAMES.items())[:3])
    return (
        "Figures are the largest over tables; NULLs are up to as many again, at random places. Shift of a prediction: "
        "of its mean, in standard deviations of the target; of an old token: relative to the largest entry of its "
        "state. In brackets: the NULLs with which a part leaks. A part is named if it alone lets a NULL through "
        f"in the closed model. {short}."
    )


def _short(name: str) -> str:
    for long, short in SHORT_NAMES.items():
        name = name.replace(long, short)
    return name


def _figure(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.2g}"
