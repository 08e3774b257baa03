"""Where a NULL moves others or wakes up: a host and its variants, boundary by boundary.

The model is run as its stages: cells from the input, each induced block, the column aggregator, the
target embedding of the ICL stage, each ICL block, and the readout. At each boundary zero vectors are
inserted as NULL rows or columns, and the stage is run with and without them. What leaks is found by
switching parts: the stage of the closed variant is given one part of the host back at a time, and a
part is named where that alone lets a NULL through.

Shape suffixes: B batch (one table), R rows (train and test), N train rows, C columns, E embedding
width, D row width; h is a state, cells (1, R, C, E) or rows (1, R, D).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn.architectures import tabpfn_v3
from tabpfn.architectures.shared.bar_distribution import FullSupportBarDistribution
from tabpfn.architectures.tabpfn_v3 import TabPFNV3
from torch import Tensor, nn

from ..calibration.prior import draw_table
from ..patches.tabpfn_v3 import CARRIERS
from ..patches.tabpfn_v3_closed import (
    ClosedTabPFNV3,
    OCellEmbedding,
    OTargetEncoder,
    Structure,
    with_structure,
)
from ..retrofit.api import measure, patch
from ..retrofit.hosts import Host
from ..retrofit.patcher import VARIANTS, host_class

HOST = "host"
KINDS = ("train rows", "test rows", "columns")
AUDIT_SEED = 40_000

# A shift of old tokens relative to the largest state, or a norm of a NULL, that is no rounding.
LEAK = 1e-4

INPUT = "input"

# What a part does to a NULL, by the part's class in the host.
WORDS = {
    "SoftmaxScalingMLP": "scales queries by the number of keys, and counts a NULL",
    "CrossAttentionBlock": "its softmax gives a zero source the weight exp(0), a zero receiver the mean of the values",
    "TransformerBlock": "its softmax gives a zero source the weight exp(0), a zero receiver the mean of the values",
    "ICLTransformerBlock": "its softmax gives a zero source the weight exp(0), a zero receiver the mean of the values",
    "ColumnAggregator": "puts CLS tokens in front of every row, a NULL one too",
    "RotaryEmbedding": "turns columns by their position, which a NULL in front of them changes",
    "Linear": "adds an embedding to every row or cell, a NULL one too",
    "standard scaler": "takes mean and deviation over all rows, and counts a NULL",
    "grouping": "embeds cells together with those of neighbouring columns, NULL ones too",
}


@dataclass(frozen=True)
class Insertion:
    """Where the old rows and columns are among the NULLs that were inserted.

    Attributes:
        rows: Places of the old rows.
        columns: Places of the old columns.
        shape: Rows and columns with the NULLs.
        num_train: Train rows with the NULLs.
    """

    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    num_train: int

    def into(self, h: Tensor) -> Tensor:
        """h with zeros at its new rows and columns."""
        if h.dim() == 3:
            longer = h.new_zeros(1, self.shape[0], h.shape[2])
            longer[:, self.rows] = h
        else:
            longer = h.new_zeros(1, *self.shape, h.shape[3])
            longer[:, self.rows[:, None], self.columns] = h
        return longer

    def targets(self, y_N1: Tensor) -> Tensor:
        """Targets of the train rows, 0 at the new ones."""
        longer = y_N1.new_zeros(self.num_train, 1)
        longer[self.rows[: len(y_N1)]] = y_N1
        return longer

    def old(self, h: Tensor) -> Tensor:
        """The old tokens of a state with NULLs."""
        return h[:, self.rows] if h.dim() == 3 else h[:, self.rows[:, None], self.columns]

    def null_norm(self, h: Tensor) -> float:
        """Largest norm among the NULLs of a state."""
        norms = h.norm(dim=-1)
        if h.dim() == 3:
            norms[:, self.rows] = 0
        else:
            norms[:, self.rows[:, None], self.columns] = 0
        return norms.max().item()


Stage = Callable[[Tensor, int, Tensor], Tensor]


def stages(model: TabPFNV3) -> dict[str, Stage]:
    """The stages behind the cells, in order: each maps (state, train rows, y_N1) to the next state."""
    found: dict[str, Stage] = {}
    for i, layer in enumerate(model.feature_distribution_embedder.layers):
        found[f"feature_distribution_embedder.layers.{i}"] = lambda h, n, y, layer=layer: layer(h, n)[0]
    found["column_aggregator"] = lambda h, n, y: model.column_aggregator(h).flatten(-2)

    def embed_targets(h: Tensor, n: int, y_N1: Tensor) -> Tensor:
        y_1N1, door = y_N1.T.unsqueeze(-1), model.icl_y_encoder
        train = door.inject(h[:, :n], y_1N1) if isinstance(door, OTargetEncoder) else h[:, :n] + door(y_1N1)
        return torch.cat([train, h[:, n:]], dim=1)

    found["icl_y_encoder"] = embed_targets
    for i, block in enumerate(model.icl_blocks):
        found[f"icl_blocks.{i}"] = lambda h, n, y, block=block: block(h, n)[0]
    found["output_norm"] = lambda h, n, y: model.output_norm(h)
    return found


def embed_cells(model: TabPFNV3, x_R1C: Tensor, y_N1: Tensor, structure: Structure | None = None) -> Tensor:
    """The cells that the model makes of its input, targets included: (1, R, C, E)."""
    n = len(y_N1)
    if isinstance(model, ClosedTabPFNV3):
        x, y = with_structure(x_R1C, y_N1, structure or Structure())
        return model.x_embed(model._preprocess_and_group(x, y, n, None)[0])
    grouped, y_1NE, _ = model._preprocess_and_group(x_R1C, y_N1, n, None)
    cells = model.x_embed(grouped)
    return torch.cat([cells[:, :n] + y_1NE.unsqueeze(2), cells[:, n:]], dim=1)


def predicted_means(model: TabPFNV3, logits: Tensor) -> Tensor:
    """Means of the bar distributions, in the unit of the targets, which is their standard deviation."""
    return FullSupportBarDistribution(model.regression_borders).mean(logits)


def draw_insertion(
    rng: np.random.Generator, kinds: Sequence[str], sizes: tuple[int, int, int], *, behind: bool = False
) -> Insertion:
    """NULLs of some kinds, of each up to as many as there are, at random places.

    sizes are (train rows, test rows, columns); `behind` puts columns behind the old ones.
    """
    longer = dict(zip(KINDS, sizes, strict=True))
    for kind in kinds:
        longer[kind] += int(rng.integers(1, longer[kind] + 1))
    places = [np.sort(rng.choice(longer[k], size, replace=False)) for k, size in zip(KINDS, sizes, strict=True)]
    if behind:
        places[2] = np.arange(sizes[2])
    train, test, columns = places
    num_train = longer["train rows"]
    rows = torch.tensor(np.concatenate([train, num_train + test]))
    return Insertion(rows, torch.tensor(columns), (num_train + longer["test rows"], longer["columns"]), num_train)


@dataclass(frozen=True)
class Case:
    """A table as the model takes it: x (R, 1, C), the targets of its train rows (N, 1), standardised."""

    x_R1C: Tensor
    y_N1: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Train rows, test rows, columns."""
        return len(self.y_N1), len(self.x_R1C) - len(self.y_N1), self.x_R1C.shape[2]


def draw_cases(tables: int, device: str) -> list[Case]:
    """Synthetic tables of 20 to 500 rows and 2 to 30 columns, two thirds of the rows to train on."""
    cases = []
    for i in range(tables):
        rng = np.random.default_rng([AUDIT_SEED, i])
        rows, columns = (int(np.exp(rng.uniform(np.log(a), np.log(b + 1)))) for a, b in ((20, 500), (2, 30)))
        table = draw_table(rng, rows, columns)
        y = table.y[: rows * 2 // 3]
        x, y = (torch.tensor(v, dtype=torch.float32, device=device) for v in (table.X, (y - y.mean()) / y.std()))
        cases.append(Case(x.unsqueeze(1), y.unsqueeze(1)))
    return cases


def insert_at_input(
    model: TabPFNV3, case: Case, insertion: Insertion, rng: np.random.Generator
) -> tuple[Tensor, Tensor, Structure | None]:
    """(x, y, structure) with NULLs: for a closed model garbage and a structure, else zeros and `None`."""
    closed, device = isinstance(model, ClosedTabPFNV3), case.x_R1C.device
    (R, C), rows, columns = insertion.shape, insertion.rows, insertion.columns
    scale = 1e3 if closed else 0.0
    x_R1C, y_N1 = (
        torch.tensor(scale * rng.standard_normal(shape), dtype=torch.float32, device=device)
        for shape in ((R, 1, C), (insertion.num_train, 1))
    )
    x_R1C[rows[:, None], 0, columns] = case.x_R1C[:, 0]
    y_N1[rows[: len(case.y_N1)]] = case.y_N1
    if not closed:
        return x_R1C, y_N1, None
    rows_BR, columns_BC = (torch.zeros(1, size, dtype=torch.bool, device=device) for size in (R, C))
    rows_BR[0, rows], columns_BC[0, columns] = True, True
    return x_R1C, y_N1, Structure(rows_BR, columns_BC)


def live_shift(model: TabPFNV3, case: Case, kinds: Sequence[str], rng: np.random.Generator) -> float:
    """Largest shift of a live prediction, end to end, in standard deviations of the target."""
    insertion = draw_insertion(rng, kinds, case.sizes)
    x, y, structure = insert_at_input(model, case, insertion, rng)
    n = len(case.y_N1)
    longer = model(x, y, structure=structure) if structure else model(x, y)
    test = insertion.rows[n:] - insertion.num_train
    moved = predicted_means(model, longer[test, 0]) - predicted_means(model, model(case.x_R1C, case.y_N1)[:, 0])
    return moved.abs().max().item()


def audit_boundaries(model: TabPFNV3, case: Case, rng: np.random.Generator) -> Iterator[dict[str, Any]]:
    """One row a boundary and kind of NULL that is inserted there.

    `shift`: of the old tokens behind the stage, relative to the largest state; `null_norm`: the
    largest norm of a NULL there; `prediction_shift`: of the predicted means at the end of the model.
    """
    run, closed, n = stages(model), isinstance(model, ClosedTabPFNV3), len(case.y_N1)
    states = [embed_cells(model, case.x_R1C, case.y_N1)]
    for stage in run.values():
        states.append(stage(states[-1], n, case.y_N1))
    means = predicted_means(model, model.output_projection(states[-1][0, n:]))
    for kind in KINDS:
        for i, boundary in enumerate([INPUT, *run]):
            if kind == "columns" and i > 0 and states[i - 1].dim() == 3:
                break  # rows have no columns any more
            # The closed model's door packs the live columns first; others have no door.
            insertion = draw_insertion(rng, [kind], case.sizes, behind=closed)
            y = insertion.targets(case.y_N1)
            if i == 0:
                h = embed_cells(model, *insert_at_input(model, case, insertion, rng))
            else:
                h = run[boundary](insertion.into(states[i - 1]), insertion.num_train, y)
            shift = (insertion.old(h) - states[i]).abs().max() / states[i].abs().max()
            row = {"boundary": boundary, "inserted": kind, "shift": shift.item(), "null_norm": insertion.null_norm(h)}
            for stage in list(run.values())[i:]:
                h = stage(h, insertion.num_train, y)
            moved = predicted_means(model, model.output_projection(h[0, insertion.rows[n:]])) - means
            yield {**row, "prediction_shift": moved.abs().max().item()}


# ---- Switching parts ----------------------------------------------------------------------------


class _CountingScaler(ClosedTabPFNV3):
    @staticmethod
    def _scaler_statistics(x_RBC, exists_RBC, num_train):
        return ClosedTabPFNV3._scaler_statistics(x_RBC, torch.ones_like(exists_RBC), num_train)


class _GroupingOfAll(ClosedTabPFNV3):
    @staticmethod
    def _shifted_columns(columns_BC, live_B1, shift):
        return (columns_BC + shift) % columns_BC.shape[1]


class _BiasForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        present = torch.ones_like(cell_BRCF[..., :1])
        F = self.in_features
        return super().forward(torch.cat([cell_BRCF[..., :F], present, cell_BRCF[..., F + 1 :]], dim=-1))


class _TargetForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        F = self.in_features
        y, train = cell_BRCF[..., F + 1 : F + 2], cell_BRCF[..., F + 2 :]
        return super().forward(cell_BRCF[..., : F + 1]) + train * self.target(y)


# Parts of the input, by name, as (module, its class with that part as the host has it).
_INPUT_PARTS: dict[str, tuple[str, type[nn.Module]]] = {
    "standard scaler": ("", _CountingScaler),
    "grouping": ("", _GroupingOfAll),
    "x_embed": ("x_embed", _BiasForAll),
    "col_y_encoder": ("x_embed", _TargetForAll),
}


# RoPE is no module of another class in the closed model, whose door puts live columns first: it is
# switched by putting NULL columns between the others.
_ROPE = "column_aggregator.rope"


class _NoScaling(tabpfn_v3.SoftmaxScalingMLP):
    def forward(self, q_BSHD: Tensor, n: int) -> Tensor:
        return q_BSHD


@contextmanager
def _classes(model: nn.Module, classes: dict[str, type[nn.Module]]) -> Iterator[None]:
    """Give modules other classes, for a time."""
    before = {name: type(model.get_submodule(name)) for name in classes}
    try:
        for name, other in classes.items():
            model.get_submodule(name).__class__ = other
        yield
    finally:
        for name, own in before.items():
            model.get_submodule(name).__class__ = own


def _parts(closed: ClosedTabPFNV3, boundary: str) -> dict[str, dict[str, type[nn.Module]]]:
    """The parts that the closed model and its host differ in at a boundary: part -> classes to switch."""
    if boundary == INPUT:
        return {part: {module: other} for part, (module, other) in _INPUT_PARTS.items()}
    within = {
        name: module for name, module in closed.named_modules() if name == boundary or name.startswith(f"{boundary}.")
    }
    switched = {name: host_class(module) for name, module in within.items() if host_class(module) is not type(module)}
    parts = {name: {name: other} for name, other in switched.items()}
    for name, other in switched.items():
        if other in CARRIERS and other is not tabpfn_v3.ColumnAggregator:
            # An attention runs only in its own kind of block: the two are one part.
            parts[name] = {n: c for n, c in switched.items() if n == name or n.startswith(f"{name}.")}
    if boundary == "column_aggregator" and closed.column_aggregator.rope is not None:
        parts[_ROPE] = {}
    return parts


def leaking_parts(closed: ClosedTabPFNV3, cases: Sequence[Case]) -> pd.DataFrame:
    """Which parts of the host let a NULL through, each switched alone in the closed model.

    Returns:
        A row a boundary, kind of NULL and part that leaks: `boundary`, `inserted`, `part`, `leak`
        (the larger of shift and null_norm).
    """
    states: list[list[Tensor]] = []
    for case in cases:
        states.append([embed_cells(closed, case.x_R1C, case.y_N1)])
        for stage in stages(closed).values():
            states[-1].append(stage(states[-1][-1], len(case.y_N1), case.y_N1))
    rows = []
    for i, boundary in enumerate([INPUT, *stages(closed)]):
        for part, classes in _parts(closed, boundary).items():
            # A block is switched without its query scaling, which is a part of its own.
            scalings = [name for name in classes if name.endswith(".softmax_scaling_layer") and name != part]
            unscaled = dict.fromkeys(scalings, _NoScaling)
            try:
                with _classes(closed, {**classes, **unscaled}):
                    for case, before in zip(cases, states, strict=True):
                        state = before[i - 1] if i else None
                        for kind, leak in _stage_leaks(closed, boundary, part, case, state):
                            rows.append({"boundary": boundary, "inserted": kind, "part": part, "leak": leak})
            except (TypeError, AttributeError):
                continue  # it runs only together with its block, which is switched as a whole
    frame = pd.DataFrame(rows).groupby(["boundary", "inserted", "part"], sort=False, as_index=False).max()
    return frame[frame["leak"] > LEAK].reset_index(drop=True)


def _stage_leaks(
    model: TabPFNV3, boundary: str, part: str, case: Case, state: Tensor | None
) -> Iterator[tuple[str, float]]:
    """(kind of NULL, leak) of one stage of the model as it is now, run on a state, or on its input."""
    rng, n = np.random.default_rng(0), len(case.y_N1)
    stage = stages(model).get(boundary)
    live = embed_cells(model, case.x_R1C, case.y_N1) if stage is None else stage(state, n, case.y_N1)
    for kind in KINDS:
        if kind == "columns" and state is not None and state.dim() == 3:
            continue
        insertion = draw_insertion(rng, [kind], case.sizes, behind=part != _ROPE)
        if stage is None:
            h = embed_cells(model, *insert_at_input(model, case, insertion, rng))
        else:
            h = stage(insertion.into(state), insertion.num_train, insertion.targets(case.y_N1))
        shift = (insertion.old(h) - live).abs().max() / live.abs().max()
        yield kind, max(shift.item(), insertion.null_norm(h))


def audit(
    host: Host,
    variants: Sequence[str] = tuple(VARIANTS),
    *,
    tables: int = 4,
    device: str = "cpu",
    on_step: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Audit a host and its variants, calibrated with the default settings.

    Args:
        host: Any v3 regressor; it is audited first, whatever the variants.
        variants: Any of `VARIANTS`.
        tables: Synthetic tables; figures are the largest over them.
        device: `cpu` or `cuda`.
        on_step: Called with a line of text after each step.

    Returns:
        `host`, `tables`, and under `variants` for each: `max_live_shift` (of a predicted mean, end to
        end, in standard deviations of the target) and `live_shift` by kind of NULL;
        `max_null_norm`, the largest norm of a NULL behind any boundary; and `boundaries`, records as
        of `audit_boundaries`, the largest over tables, each with `leaks`: the parts at fault, in words.
    """
    tell = on_step or (lambda line: None)
    cases = draw_cases(tables, device)
    tell("calibrating")
    squared_norms = measure(host, device=device)
    models: dict[str, Any] = {HOST: host.specs().model}
    for variant in dict.fromkeys([*variants, "closed"]):
        models[variant] = patch(host, variant, squared_norms=squared_norms).specs.model
    models = {name: model.to(device).eval() for name, model in models.items()}
    found: dict[str, Any] = {}
    with torch.inference_mode():
        tell("switching parts")
        parts = leaking_parts(models["closed"], cases[:2])
        for name in [HOST, *dict.fromkeys(variants)]:
            rng = np.random.default_rng(AUDIT_SEED)
            model, rows, shifts = models[name], [], dict.fromkeys([*KINDS, "all"], 0.0)
            for i, case in enumerate(cases):
                tell(f"{name}, table {i + 1} of {tables}")
                rows.extend(audit_boundaries(model, case, rng))
                for kind in shifts:
                    kinds = KINDS if kind == "all" else [kind]
                    shifts[kind] = max(shifts[kind], live_shift(model, case, kinds, rng))
            frame = pd.DataFrame(rows).groupby(["boundary", "inserted"], sort=False, as_index=False).max()
            boundaries = frame.to_dict("records")
            for record in boundaries:
                record["leaks"] = _leaks(model, record, parts)
            found[name] = {
                "max_live_shift": max(shifts.values()),
                "live_shift": shifts,
                "max_null_norm": float(frame["null_norm"].max()),
                "boundaries": boundaries,
            }
    return {"host": host.name, "tables": tables, "variants": found}


def _leaks(model: TabPFNV3, record: dict[str, Any], parts: pd.DataFrame) -> list[str]:
    """The parts at fault for what a boundary's record shows: those that leak alone, and are open here."""
    if max(record["shift"], record["null_norm"]) <= LEAK:
        return []
    here = parts[(parts["boundary"] == record["boundary"]) & (parts["inserted"] == record["inserted"])]
    return [f"{part} {_words(model, part)}" for part in here["part"] if _is_open(model, part)]


def _is_open(model: TabPFNV3, part: str) -> bool:
    if part in _INPUT_PARTS or part == _ROPE:
        return not isinstance(model, ClosedTabPFNV3)
    module = model.get_submodule(part)
    return type(module) is host_class(module)


def _words(model: TabPFNV3, part: str) -> str:
    return WORDS[part] if part in WORDS else WORDS[host_class(model.get_submodule(part)).__name__]
