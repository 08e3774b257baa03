"""What closes TabPFN v3 from its input to its readout: structure, moments, count and doors.

The O-variants in `tabpfn_v3.py` keep a zero token inert where tokens meet in attention, feed-forward
networks and norms. Here are the other places of the host where a zero would be counted, averaged or
woken: the standard scaler and the mean imputation, the grouping of columns, the bias of the cell
embedding, the target embeddings, and the CLS tokens. (The count of keys is `OSoftmaxScalingMLP`.)

Which rows and columns exist is said once, at the model's input (`Structure`). Behind the cell
embedding a NULL row or column is a zero vector and nothing else: no mask is carried along.

Shape suffixes: B batch, R rows (train and test), N train rows, C columns, F features that the host
embeds per cell, E embedding width, I CLS tokens. Definitions: docs/theory.md, section 6.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from tabpfn.architectures import tabpfn_v3
from torch import Tensor, nn

from .operators import oinject, support_moments
from .presence import gate, presence, presence_at, squared_norm
from .structure import Structure
from .tabpfn_v3 import OTabPFNV3

# ---- Doors: where outside information is added to a carrier --------------------------------------


class OTargetEncoder(nn.Linear):
    """The host's target embedding, injected by the presence of what it is added to."""

    tau: float

    def inject(self, h: Tensor, y: Tensor) -> Tensor:
        """OInject of the embedded targets y (..., 1) into h (..., E)."""
        # Projected as a matrix: for more dimensions torch compiles a kernel on CUDA, and needs a C compiler.
        return oinject(h, self(y.reshape(-1, 1)).unflatten(0, y.shape[:-1]), self.tau, own=True)


class OCellEmbedding(nn.Linear):
    """The host's cell embedding, its bias injected by the presence of the cell.

    A cell comes as (g, p) or, where there are train rows, (g, p, y, t): the F features that the host
    embeds, the cell's presence, the target of its row, and 1 on train rows. g and p are 0 for a
    NULL cell, and so is what becomes of it.
    """

    tau: float
    target: OTargetEncoder

    def unpack(self, cell_BRCF: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """g (B, R, C, F), p (B, R, C, 1), and the target and its mark (B, R, C, 2 or 0)."""
        g, p = cell_BRCF[..., : self.in_features], cell_BRCF[..., self.in_features : self.in_features + 1]
        return g, p, cell_BRCF[..., self.in_features + 1 :]

    def forward(self, cell_BRCF: Tensor) -> Tensor:
        """`W g + p b`, plus the target embedding by the presence of that: (B, R, C, E)."""
        width = self.in_features + 1
        weight = torch.cat([self.weight, self.bias.unsqueeze(1)], dim=1)
        h_BRCE = F.linear(cell_BRCF[..., :width], weight)
        if cell_BRCF.shape[-1] == width:
            return h_BRCE
        weight = torch.cat([self.target.weight, self.target.bias.unsqueeze(1)], dim=1)
        return oinject(h_BRCE, F.linear(cell_BRCF[..., width:], weight), self.target.tau, own=True)


class OColumnAggregator(tabpfn_v3.ColumnAggregator):
    """The host's column aggregator, its CLS tokens injected into rows by the presence of their cells."""

    tau: float

    def forward(
        self, x_BRiCE: Tensor, save_peak_memory_factor: int | None = None, force_recompute_layer: bool = False
    ) -> Tensor:
        """(B, R, C, E) -> (B, R, I, E)."""

        def run(layer: Callable, *args) -> Tensor:
            if force_recompute_layer:
                return torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=False)
            return layer(*args)

        cls_BRIE = gate(presence_at(row_squared_norm(x_BRiCE), self.tau).unsqueeze(-1), self.cls_tokens)
        x = torch.cat((cls_BRIE, x_BRiCE), dim=2)
        *blocks, readout = self.blocks
        for block in blocks:
            x = run(block, x, self.rope, save_peak_memory_factor)
        return self.out_ln(run(readout.forward_cross, x[:, :, : self.num_cls_tokens], x, self.rope))


def row_squared_norm(x_BRCE: Tensor) -> Tensor:
    """Mean of `||h||^2` over the live (non-zero) cells of each row: (B, R); 0 without any."""
    n_BRC = squared_norm(x_BRCE)
    return n_BRC.sum(dim=-1) / (n_BRC > 0).sum(dim=-1).clamp(min=1)


# ---- The model ----------------------------------------------------------------------------------


def with_structure(x_RBC: Tensor, y_NB: Tensor | None, structure: Structure) -> tuple[Tensor, Tensor | None]:
    """x with its structure beside it, (R, B, 2 C), live columns first; y with NaN on NULL train rows.

    Side by side, x and its structure get through the host's slicing of rows to the door. Raises
    `ValueError` for a structure that does not fit x; see `Structure.check`.
    """
    structure.check(x_RBC)
    exists_RBC = torch.ones_like(x_RBC)
    if structure.columns_BC is not None:
        # Columns are grouped and rotated by their position.
        order_BC = torch.argsort(structure.columns_BC.logical_not(), dim=-1, stable=True)
        x_RBC = x_RBC.gather(2, order_BC.expand_as(x_RBC))
        exists_RBC = exists_RBC * structure.columns_BC.gather(1, order_BC)
    if structure.rows_BR is not None:
        rows_RB = structure.rows_BR.T
        exists_RBC = exists_RBC * rows_RB.unsqueeze(-1)
        if y_NB is not None:
            y_NB = torch.where(rows_RB[: len(y_NB)], y_NB.unsqueeze(-1).flatten(1), torch.nan)
    return torch.cat([x_RBC, exists_RBC], dim=-1), y_NB


class ClosedTabPFNV3(OTabPFNV3):
    """TabPFN v3, O-closed from its input to its readout."""

    @functools.wraps(tabpfn_v3.TabPFNV3.forward)
    def forward(self, x, y, *args, structure: Structure | None = None, **kwargs):
        """As the host's forward, on the rows and columns that exist.

        Args:
            x: (R, B, C), or the test rows alone beside a cache, with `x_is_test_only`.
            y: (N, B), or (N,) for all tables alike.
            structure: What exists; everything by default. Outputs at NULL test rows mean nothing.
            args: As of the host.
            kwargs: As of the host.
        """
        x, y = (part["main"] if isinstance(part, dict) else part for part in (x, y))
        if structure is None:
            x = torch.cat([x, torch.ones_like(x)], dim=-1)
        elif kwargs.get("x_is_test_only"):
            x, _ = with_structure(x, None, structure)
        else:
            x, y = with_structure(x, y, structure)
        return super().forward(x, y, *args, **kwargs)

    def _preprocess_and_group(
        self, rows_RiBC: Tensor, y: Tensor, num_train: int, scaler_cache: dict[str, Tensor] | None
    ) -> tuple[Tensor, None, dict[str, Tensor]]:
        """Cells as `OCellEmbedding` takes them, targets included, and the scaler's statistics."""
        x_RBC, exists_RBC = rows_RiBC.chunk(2, dim=-1)
        with_targets = scaler_cache is None and num_train > 0
        x_RBC = x_RBC.where(exists_RBC > 0, 0)
        features = [x_RBC]
        if self.use_nan_indicators:
            features.append(tabpfn_v3._generate_nan_and_inf_indicator(x_RBC))
        if scaler_cache is None:
            scaler_cache = self._scaler_statistics(x_RBC, exists_RBC, num_train)
        x_RBC = x_RBC.where(x_RBC.isfinite(), scaler_cache["mean"])
        features[0] = exists_RBC * self.standard_scaler.transform(x_RBC, scaler_cache)

        # A cell is embedded together with other cells of its row.
        exists_BRC = exists_RBC.transpose(0, 1)
        live_B1 = (exists_BRC > 0).any(dim=1).sum(dim=-1, keepdim=True)
        columns_BC = torch.arange(exists_BRC.shape[-1], device=live_B1.device).expand(len(live_B1), -1)
        groups_BC = [self._shifted_columns(columns_BC, live_B1, 2**i) for i in range(self.feature_group_size)]
        cell = [
            feature.transpose(0, 1).gather(2, group_BC.unsqueeze(1).expand_as(exists_BRC))
            for feature in features
            for group_BC in groups_BC
        ]
        p_BRC = presence(torch.stack([*cell, exists_BRC], dim=-1), self.x_embed.tau)
        cell.append(p_BRC.to(exists_BRC.dtype))
        if with_targets:
            y_BN = self._prepare_y(y, num_train, len(exists_BRC)).to(exists_BRC.dtype)
            test_rows = (0, exists_BRC.shape[1] - num_train)
            for target_BR in (F.pad(y_BN, test_rows), F.pad(torch.ones_like(y_BN), test_rows)):
                cell.append(target_BR.unsqueeze(-1).expand_as(exists_BRC))
        return torch.stack(cell, dim=-1), None, scaler_cache

    @staticmethod
    def _scaler_statistics(x_RBC: Tensor, exists_RBC: Tensor, num_train: int) -> dict[str, Tensor]:
        """The host's mean and standard deviation of the train rows (B, C), by support instead of count.

        As the host: missing values count as the mean of the others, the divisor is support - 1, and a
        column without variance or with one row has the deviation 1. Sums are in float64, where adding
        zeros to them changes no bit of the result in float32.
        """
        wide = x_RBC.dtype if x_RBC.device.type == "mps" else torch.float64
        fit = slice(num_train or None)
        x, p = x_RBC[fit].to(wide), exists_RBC[fit].to(wide)
        known = x.isfinite() & (p > 0)
        # From one of its own values on, a constant column has no variance and no rounding.
        origin = x.where(known, -torch.inf).amax(dim=0, keepdim=True)
        origin = origin.where(origin.isfinite(), 0)
        x = x.where(known, origin) - origin
        _, mean, _ = support_moments(x, known.to(wide), dim=0)
        _, mean, var = support_moments(x.where(known, mean), p, dim=0, correction=1)
        # Masked before the root, whose gradient at 0 is infinite; one row alone has no variance.
        std = torch.where(var > 0, var, 1.0).sqrt().to(x_RBC.dtype)
        return {"mean": (origin + mean)[0].to(x_RBC.dtype), "std": torch.where(std == 0, 1.0, std)[0]}

    @staticmethod
    def _shifted_columns(columns_BC: Tensor, live_B1: Tensor, shift: int) -> Tensor:
        """The columns that `shift` turns into each other, going round among the live ones: (B, C)."""
        return torch.where(columns_BC < live_B1, (columns_BC + shift) % live_B1.clamp(min=1), columns_BC)

    def _stages_0_to_2(self, x_RiBC: Tensor, y: Tensor, *, kv_cache=None, **options):
        """The host's, and the target embedding of the train rows for the ICL stage."""
        x_BRIE, hidden, scaler_cache = super()._stages_0_to_2(x_RiBC, y, kv_cache=kv_cache, **options)
        num_train = y.shape[0]
        if num_train > 0 and (kv_cache is None or kv_cache.is_empty()):
            y_BN1 = self._prepare_y(y, num_train, x_RiBC.shape[1]).unsqueeze(-1)
            # A copy: the gradient of presence needs it as it was.
            train_BNE = x_BRIE[:, :num_train].flatten(-2).clone()
            x_BRIE[:, :num_train] = self.icl_y_encoder.inject(train_BNE, y_BN1).unflatten(-1, x_BRIE.shape[-2:])
        return x_BRIE, hidden, scaler_cache

    def _embed_icl_y(self, y_BN: Tensor) -> Tensor:
        """Nothing: the host adds this without a look at the rows, `_stages_0_to_2` injects it by them."""
        return y_BN.new_zeros(())
