"""Where a NULL moves others or wakes up: a host and its variants, boundary by boundary.

The model is run as its stages, from the cells that it makes of its input to its last norm. (The head behind it
acts on each test row alone, and a NULL row's answer is nobody's.) At each boundary NULL rows or columns, zero
vectors, are inserted, and the stage behind it is run with and without them.

Which part leaks is found by switching: the classes of one part of the leaking stage are put into the same
stage of the closed model, where everything else is inert, and a part that lets a NULL through there is named.

What stages and parts an architecture has is said by its `AuditSpec`. Shape suffixes: R rows (train and test), N
train rows, C columns, E embedding width, D row width; always one table. h is a state, of cells (1, R, C, E) or of
rows (1, R, D). Definitions: docs/theory.md, section 3.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from ..calibration.variants import VARIANTS, check_variant
from ..patches.host_spec import HostSpec
from ..retrofit.api import calibrate, patch
from ..retrofit.hosts import Host
from ..retrofit.patcher import known_spec
from ..retrofit.tabpfn_api import FullSupportBarDistribution
from .audit_tables import AUDIT_SEED, KINDS, AuditTable, Insertion, draw_audit_tables, draw_insertion

HOST = "host"
INPUT = "input"
DEFAULT_TABLES = 5

# A shift relative to the largest state, or a norm of a NULL, that is no rounding.
LEAK = 1e-4

# What the cells and targets of a NULL hold. A closed model never looks at them; for others zeros are all
# there is to say that something is not there.
_GARBAGE, _ZERO = 1e3, 0.0

# What a part with a leak does to old tokens, and what to a NULL, where its architecture has no words for it.
_MOVES, _WAKES = "moves old tokens", "gives a NULL a state"

# Module's name -> the class that it gets for a time.
Switch = Mapping[str, type[nn.Module]]


# ---- What NULLs do ------------------------------------------------------------------------------


def predicted_means(spec: HostSpec, model: nn.Module, logits: Tensor) -> Tensor:
    """Means of the bar distributions of logits (..., buckets), in the unit of the targets."""
    return FullSupportBarDistribution(spec.borders(model)).mean(logits)


def live_shift(model: nn.Module, table: AuditTable, insertion: Insertion) -> float:
    """Largest shift of a predicted mean by NULLs in the input, in standard deviations of the target."""
    spec, n = known_spec(model), len(table.y_N1)
    means = predicted_means(spec, model, model(table.x_R1C, table.y_N1)[:, 0])
    if spec.takes_structure(model):
        logits = model(*insertion.inputs(table, _GARBAGE), structure=insertion.structure(table.x_R1C.device))
    else:
        logits = model(*insertion.inputs(table, _ZERO))
    moved = predicted_means(spec, model, logits[insertion.rows[n:] - insertion.num_train, 0]) - means
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
    spec: HostSpec,
    model: nn.Module,
    boundary: str,
    table: AuditTable,
    before: Tensor | None,
    insertion: Insertion,
    fill: float,
) -> Passage:
    """Run one stage with NULLs and without, on the state `before` it, or on the input, where they hold `fill`."""
    n, y_N1 = len(table.y_N1), table.y_N1
    if before is None:
        live = spec.audit.embed_cells(model, table.x_R1C, y_N1, None)
        h = spec.audit.embed_cells(model, *insertion.inputs(table, fill), insertion.structure(live.device))
        insertion = insertion.packed() if spec.takes_structure(model) else insertion
    else:
        stage = spec.audit.stages(model)[boundary]
        live = stage(before, n, y_N1)
        h = stage(insertion.into(before), insertion.num_train, insertion.targets(y_N1))
    shift = (insertion.old(h) - live).abs().max() / live.abs().max()
    return Passage(h, insertion, shift.item(), insertion.null_norm(h))


def audit_boundaries(
    model: nn.Module, reference: nn.Module, table: AuditTable, rng: np.random.Generator
) -> Iterator[dict[str, Any]]:
    """Insert NULLs of each kind at each boundary, at random places.

    Args:
        model: A host or a variant.
        reference: `reference_of` the closed variant of the same weights, in which parts are switched.
        table: A table.
        rng: Draws how many NULLs there are, and where.

    Yields:
        `boundary`, the stage behind it by its name in the model, or `input`; `inserted`, one of
        `KINDS`; `shift` and `null_norm` as of `Passage`, at the input of the whole door;
        `prediction_shift`, the largest shift of a predicted mean at the end, in standard deviations of
        the target; `leaks`, the parts at fault and what they do, in words.
    """
    spec = known_spec(model)
    run, n, closed = spec.audit.stages(model), len(table.y_N1), spec.takes_structure(model)
    states = [spec.audit.embed_cells(model, table.x_R1C, table.y_N1, None)]
    for stage in run.values():
        states.append(stage(states[-1], n, table.y_N1))
    means = predicted_means(spec, model, spec.audit.head(model, states[-1][0, n:]))
    for kind in KINDS:
        for i, (boundary, before) in enumerate(zip([INPUT, *run], [None, *states], strict=False)):
            if kind == "columns" and before is not None and before.dim() == 3:
                break  # rows have no columns any more
            insertion = draw_insertion(rng, [kind], table.sizes)
            if closed and before is not None:
                insertion = insertion.packed()
            at: tuple[Any, ...] = (boundary, table, before, insertion, _GARBAGE if closed else _ZERO)
            behind = pass_boundary(spec, model, *at)
            h, insertion = behind.h, behind.insertion
            for stage in [*run.values()][i:]:
                h = stage(h, insertion.num_train, insertion.targets(table.y_N1))
            moved = predicted_means(spec, model, spec.audit.head(model, h[0, insertion.rows[n:]])) - means
            leaks = max(behind.shift, behind.null_norm) > LEAK
            yield {
                "boundary": boundary,
                "inserted": kind,
                "shift": behind.shift,
                "null_norm": behind.null_norm,
                "prediction_shift": moved.abs().max().item(),
                "leaks": list(leaking_parts(spec, model, reference, at)) if leaks else [],
            }


# ---- Switching parts ----------------------------------------------------------------------------


def reference_of(closed: nn.Module) -> nn.Module:
    """A copy of a closed model in which columns have no position, so that NULLs may be between others."""
    reference = copy.deepcopy(closed)
    known_spec(closed).audit.drop_positions(reference)
    return reference


@contextmanager
def switched(model: nn.Module, classes: Switch) -> Iterator[None]:
    """Give modules, by name, other classes for a time."""
    before = {name: type(model.get_submodule(name)) for name in classes}
    try:
        for name, other in classes.items():
            model.get_submodule(name).__class__ = other
        yield
    finally:
        for name, own in before.items():
            model.get_submodule(name).__class__ = own


def parts(spec: HostSpec, model: nn.Module, reference: nn.Module, boundary: str) -> Mapping[str, Switch]:
    """The parts in which a model differs from the closed one behind a boundary.

    Returns:
        For each part, by its name in the model, the modules and classes to switch in the reference. The
        first is the part itself.
    """
    how = spec.audit
    if boundary == INPUT and not spec.takes_structure(model):
        return how.input_parts
    root = how.cell_embedding if boundary == INPUT else boundary
    inside = {
        f"{root}.{name}" if name else root: module for name, module in reference.get_submodule(root).named_modules()
    }
    differing = {name: type(model.get_submodule(name)) for name in inside}
    differing = {name: other for name, other in differing.items() if other is not type(inside[name])}
    found: dict[str, dict[str, type[nn.Module]]] = {}
    for name, other in differing.items():
        if type(inside[name]) in how.within_blocks:
            continue
        found[name] = {name: other}
        for child, other in differing.items():
            if child.rpartition(".")[0] == name and type(inside[child]) in how.within_blocks:
                found[name][child] = other
                aside = {f"{child}.{part}": idle for part, idle in how.stand_ins.items()}
                found[name] |= {part: idle for part, idle in aside.items() if part in inside}
    return found


def leaking_parts(spec: HostSpec, model: nn.Module, reference: nn.Module, at: tuple[Any, ...]) -> Iterator[str]:
    """The parts of a model that let a NULL through, each switched alone in the reference, in words.

    `at`: the arguments of `pass_boundary` behind the model.
    """
    for part, classes in parts(spec, model, reference, at[0]).items():
        with switched(reference, classes):
            behind = pass_boundary(spec, reference, *at)
        moves, wakes = spec.audit.words.get(next(iter(classes.values())), (None, None))
        if behind.shift > LEAK:
            yield f"{part} {moves or _MOVES}"
        if behind.null_norm > LEAK:
            yield f"{part} {wakes or _WAKES}"


# ---- The audit ----------------------------------------------------------------------------------


def audit_model(
    model: nn.Module,
    reference: nn.Module,
    tables: Sequence[AuditTable],
    on_table: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """What `audit` finds of one model; `reference` as of `audit_boundaries`. `on_table` gets 1, 2, ..."""
    rng = np.random.default_rng(AUDIT_SEED)
    rows: list[dict[str, Any]] = []
    shifts = {kind: 0.0 for kind in (*KINDS, "all")}
    with torch.inference_mode():
        for i, table in enumerate(tables):
            if on_table is not None:
                on_table(i + 1)
            rows.extend(audit_boundaries(model, reference, table, rng))
            for kind in shifts:
                insertion = draw_insertion(rng, KINDS if kind == "all" else [kind], table.sizes)
                shifts[kind] = max(shifts[kind], live_shift(model, table, insertion))
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
        host: Any regressor that can be patched; it is audited first, whatever the variants.
        variants: Any of `VARIANTS`.
        tables: Synthetic tables (`draw_audit_tables`), at least 1; figures are the largest over them.
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
    drawn = draw_audit_tables(tables, device)
    tell("Calibrating")
    calibration = calibrate(host, device=device)
    models = {HOST: host.specs.model}
    models |= {variant: patch(host, variant, calibration=calibration).model for variant in variants}
    reference = reference_of(patch(host, "closed", calibration=calibration).model).to(device)
    found = {}
    for name, model in models.items():

        def on_table(i: int, name: str = name) -> None:
            tell(f"Auditing {name}, table {i} of {tables}")

        found[name] = audit_model(model.to(device).eval(), reference.eval(), drawn, on_table)
    return {"host": host.name, "tables": tables, "variants": found}
