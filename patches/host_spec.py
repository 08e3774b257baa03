"""What the rest of the package has to know of a host architecture, as one value."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from .structure import Structure

Classes = Mapping[type[nn.Module], type[nn.Module]]
Stage = Callable[[Tensor, int, Tensor], Tensor]


@dataclass(frozen=True)
class Door:
    """A place where outside information is added to a carrier.

    Attributes:
        host_class: The class that the door has in the host.
        o_class: The class that it gets.
        at: The module, by its name in the model, through which the carrier passes in the host.
        part: Whether the carrier is that module's `input` or its `output`.
        squared_norm: `||carrier||^2` of that tensor, over its last dim or dims.
    """

    host_class: type[nn.Module]
    o_class: type[nn.Module]
    at: str
    part: str
    squared_norm: Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class AuditSpec:
    """How the audit runs a model stage by stage, and switches parts of the host into the closed model.

    A state is of cells (1, R, C, E) or of rows (1, R, D): R rows, train rows first, C columns.

    Attributes:
        embed_cells: (model, x (R, 1, C), y (N, 1), structure) -> the state of cells that a model makes of its input,
            targets included. The structure (None: everything exists) is for closed models; live columns come first.
        stages: A model -> the stages behind the cells, in order, by their module's name; each maps a state, the number
            of train rows and their targets (N, 1) to the next state.
        head: (model, final state of test rows (..., D)) -> logits.
        drop_positions: Makes a closed model's columns forget, in place, where they stand: NULLs may be anywhere then.
        cell_embedding: The module that the cells come out of, by name.
        input_parts: What the host does at its input, each part as classes for modules, by name, of the closed model.
        within_blocks: O-classes that run only in a block of their own kind, and are switched together with it.
        stand_ins: Submodules of these that are parts of their own, by name there, and a class that does nothing for
            each, which it has while the block is switched.
        words: What a part that leaks does to old tokens, and what to a NULL, by its class, where that can be said.
    """

    embed_cells: Callable[[Any, Tensor, Tensor, Structure | None], Tensor]
    stages: Callable[[Any], dict[str, Stage]]
    head: Callable[[Any, Tensor], Tensor]
    drop_positions: Callable[[Any], None]
    cell_embedding: str
    input_parts: Mapping[str, Mapping[str, type[nn.Module]]]
    within_blocks: tuple[type[nn.Module], ...]
    stand_ins: Mapping[str, type[nn.Module]]
    words: Mapping[type[nn.Module], tuple[str | None, str | None]]


@dataclass(frozen=True)
class HostSpec:
    """A host architecture: where its carriers are, what is put on, and how its parts are found.

    Attributes:
        architecture: Its name in TabPFN's checkpoints.
        version: What TabPFN calls it, and reads off a checkpoint's file name.
        label: Its name in messages.
        model_class: The class of the network.
        norm_class: The class of every norm with a carrier in front of it.
        carrier_norm: The class that such a norm gets; it holds tau.
        gated_norm: The same where the norm's output is gated (ONorm).
        carriers: What each norm's input is a carrier of, by the class that owns the norm and its name there.
        doors: The doors that the carriers of kind `door` are at, by their name in the model.
        classes: For each variant the O-class of every other host class that it changes.
        left_alone: Classes that stay as they are. What is named nowhere here is refused: a model must never be
            patched by half without a word.
        wire: Gives a patched model with doors what these need of each other.
        patched_attributes: Attributes that the patch leaves on modules, and that have to go with it.
        parse_config: A checkpoint's config -> the architecture's config, and what is not known of it.
        build: A network for such a config.
        is_regressor: Whether a config (of either kind) is a regressor's.
        borders: A model -> the borders of the bar distribution of its logits.
        cell_weights: A model -> how many weights are applied to each cell, the multiply-adds that it costs.
        row_weights: The same for each row, beside its cells.
        points: A model -> how many tokens each column has beside its cells, however many rows there are.
        point_weights: A model -> how many weights are applied to each of these.
        short_names: How tables shorten the names of its modules.
        audit: How it is audited.
        sources: Functions of TabPFN that the patches override, or whose order of calls they rely on, as
            `module:qualified name`, and the fingerprint of the source that each had when the patches were written.
    """

    architecture: str
    version: str
    label: str
    model_class: type[nn.Module]
    norm_class: type[nn.Module]
    carrier_norm: type[nn.Module]
    gated_norm: type[nn.Module]
    carriers: Mapping[type[nn.Module], Mapping[str, str]]
    doors: Mapping[str, Door]
    classes: Mapping[str, Classes]
    left_alone: tuple[type[nn.Module], ...]
    wire: Callable[[Any], None]
    patched_attributes: tuple[str, ...]
    parse_config: Callable[[dict[str, Any]], tuple[Any, dict[str, Any]]]
    build: Callable[[Any], nn.Module]
    is_regressor: Callable[[Any], bool]
    borders: Callable[[Any], Tensor]
    cell_weights: Callable[[Any], int]
    row_weights: Callable[[Any], int]
    points: Callable[[Any], int]
    point_weights: Callable[[Any], int]
    short_names: Mapping[str, str]
    audit: AuditSpec
    sources: Mapping[str, str]

    @functools.cached_property
    def host_classes(self) -> dict[type[nn.Module], type[nn.Module]]:
        """The class that a module had before it was patched, by the class that it has."""
        found = {o_class: host for classes in self.classes.values() for host, o_class in classes.items()}
        found |= dict.fromkeys((self.carrier_norm, self.gated_norm), self.norm_class)
        return found | {door.o_class: door.host_class for door in self.doors.values()}

    def host_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that a module has, or had before it was patched."""
        return self.host_classes.get(type(module), type(module))

    def takes_structure(self, model: nn.Module) -> bool:
        """Whether a model's forward takes a `Structure`: that of a closed variant does."""
        return isinstance(model, self.classes["closed"][self.model_class])

    def shorten(self, name: str) -> str:
        """A module's name as tables have it."""
        for long, short in self.short_names.items():
            name = name.replace(long, short)
        return name
