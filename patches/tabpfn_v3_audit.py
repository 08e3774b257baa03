"""How TabPFN v3 is audited: its stages, and the parts of its input, to be switched in the closed model.

Shape suffixes: B batch, R rows (train and test), N train rows, C columns, F features that the host embeds per
cell, E embedding width, D row width. h is a state, of cells (1, R, C, E) or of rows (1, R, D).
"""

from __future__ import annotations

from typing import Any

import torch
from tabpfn.architectures import tabpfn_v3
from torch import Tensor, nn

from .host_spec import AuditSpec, Stage
from .structure import Structure
from .tabpfn_v3 import CarrierNorm, OColumnAttention, OCrossAttention, OICLAttention
from .tabpfn_v3_closed import ClosedTabPFNV3, OCellEmbedding, OTargetEncoder, with_structure

# ---- The model as stages ------------------------------------------------------------------------


def _embed_cells(model: Any, x_R1C: Tensor, y_N1: Tensor, structure: Structure | None) -> Tensor:
    n = len(y_N1)
    if isinstance(model, ClosedTabPFNV3):
        x, y = with_structure(x_R1C, y_N1, structure or Structure())
        assert y is not None
        return model.x_embed(model._preprocess_and_group(x, y, n, None)[0])
    grouped, y_1NE, _ = model._preprocess_and_group(x_R1C, y_N1, n, None)
    cells = model.x_embed(grouped)
    return torch.cat([cells[:, :n] + y_1NE.unsqueeze(2), cells[:, n:]], dim=1)


def _stages(model: Any) -> dict[str, Stage]:
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


# ---- What is switched in the closed model -------------------------------------------------------


class _NoRotation(tabpfn_v3.RotaryEmbedding):
    def rotate_queries_or_keys(self, t_BHSD: Tensor) -> Tensor:
        return t_BHSD


class _NoScaling(tabpfn_v3.SoftmaxScalingMLP):
    def forward(self, q_BSHD: Tensor, n: int | Tensor) -> Tensor:
        return q_BSHD


def _drop_positions(model: Any) -> None:
    if model.column_aggregator.rope is not None:
        model.column_aggregator.rope.__class__ = _NoRotation


# What the host does at its input, each in the closed model by itself: the host's own door does not run there.


class _ScalingOfAll(ClosedTabPFNV3):
    def _preprocess_and_group(
        self, rows_RiBC: Tensor, y: Tensor, num_train: int, scaler_cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        x_RBC, exists_RBC = rows_RiBC.chunk(2, dim=-1)
        every_row = torch.cat([x_RBC, exists_RBC.amax(dim=0).expand_as(x_RBC)], dim=-1)
        cells, _, _ = super()._preprocess_and_group(rows_RiBC, y, num_train, scaler_cache)
        scaled, _, scaler_cache = super()._preprocess_and_group(every_row, y, num_train, scaler_cache)
        g_BRCF, _, _ = self.x_embed.unpack(scaled)
        return torch.cat([g_BRCF, *self.x_embed.unpack(cells)[1:]], dim=-1), None, scaler_cache


class _GroupingOfAll(ClosedTabPFNV3):
    @staticmethod
    def _shifted_columns(columns_BC: Tensor, live_B1: Tensor, shift: int) -> Tensor:
        return (columns_BC + shift) % columns_BC.shape[1]


class _BiasForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        g, p, target = self.unpack(cell_BRCF)
        return super().forward(torch.cat([g, torch.ones_like(p), target], dim=-1))


class _TargetForAll(OCellEmbedding):
    def forward(self, cell_BRCF: Tensor) -> Tensor:
        g, p, target = self.unpack(cell_BRCF)
        y, train = target.chunk(2, dim=-1)
        return super().forward(torch.cat([g, p], dim=-1)) + train * self.target(y)


_SOFTMAX = ("gives a NULL source the weight exp(0)", "gives a NULL receiver the mean of its values")

AUDIT = AuditSpec(
    embed_cells=_embed_cells,
    stages=_stages,
    head=lambda model, h: model.output_projection(h),
    drop_positions=_drop_positions,
    cell_embedding="x_embed",
    input_parts={
        "standard_scaler": {"": _ScalingOfAll},
        "grouping": {"": _GroupingOfAll},
        "x_embed": {"x_embed": _BiasForAll},
        "col_y_encoder": {"x_embed": _TargetForAll},
    },
    within_blocks=(CarrierNorm, OColumnAttention, OCrossAttention, OICLAttention),
    stand_ins={"softmax_scaling_layer": _NoScaling},
    words={
        _ScalingOfAll: (
            "takes mean and deviation over all train rows, and counts a NULL",
            "takes the mean off every row, a NULL one too",
        ),
        _GroupingOfAll: (
            "embeds a cell together with those of other columns, NULL ones too",
            "embeds a NULL cell together with those of other columns",
        ),
        _BiasForAll: (None, "adds its bias to every cell, a NULL one too"),
        _TargetForAll: (None, "adds the embedded target to every cell of a train row, a NULL one too"),
        tabpfn_v3.SoftmaxScalingMLP: ("scales queries by the number of keys, and counts a NULL", None),
        tabpfn_v3.CrossAttentionBlock: _SOFTMAX,
        tabpfn_v3.TransformerBlock: _SOFTMAX,
        tabpfn_v3.ICLTransformerBlock: _SOFTMAX,
        tabpfn_v3.ColumnAggregator: (None, "puts CLS tokens in front of every row, a NULL one too"),
        tabpfn_v3.RotaryEmbedding: ("turns a column by its position, which a NULL in front of it changes", None),
        nn.Linear: (None, "adds the embedded target to every train row, a NULL one too"),
    },
)
