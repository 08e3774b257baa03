"""The audit's tables, and where NULL rows and columns are put into them.

Shape suffixes: R rows (train and test), N train rows, C columns, S any of these, E embedding width, D row width;
always one table. h is a state, of cells (1, R, C, E) or of rows (1, R, D).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..calibration.prior import draw_table
from ..patches.structure import Structure

KINDS = ("train rows", "test rows", "columns")
AUDIT_SEED = 40_000


@dataclass(frozen=True)
class AuditTable:
    """A table as a model takes it: x (R, 1, C), and the targets of its train rows (N, 1), standardised."""

    x_R1C: Tensor
    y_N1: Tensor

    @property
    def sizes(self) -> tuple[int, int, int]:
        """How many there are of each of `KINDS`."""
        return len(self.y_N1), len(self.x_R1C) - len(self.y_N1), self.x_R1C.shape[2]


def draw_audit_table(rng: np.random.Generator, rows: int, columns: int, device: str = "cpu") -> AuditTable:
    """A synthetic table in float32, two thirds of its rows to train on."""
    table = draw_table(rng, rows, columns)
    y = table.y[: rows * 2 // 3]
    x_R1C, y_N1 = table.X[:, None], ((y - y.mean()) / y.std())[:, None]
    return AuditTable(*(torch.tensor(values, dtype=torch.float32, device=device) for values in (x_R1C, y_N1)))


def draw_audit_tables(tables: int, device: str = "cpu") -> list[AuditTable]:
    """Synthetic tables of 20 to 500 rows and 2 to 30 columns, small ones as common as large ones."""
    audit_tables = []
    for i in range(tables):
        rng = np.random.default_rng([AUDIT_SEED, i])
        rows, columns = (int(np.exp(rng.uniform(np.log(low), np.log(high + 1)))) for low, high in ((20, 500), (2, 30)))
        audit_tables.append(draw_audit_table(rng, rows, columns, device))
    return audit_tables


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

    def inputs(self, table: AuditTable, fill: float) -> tuple[Tensor, Tensor]:
        """x and y of a table with NULLs, whose cells and targets are `fill`."""
        x_R1C = table.x_R1C.new_full((self.shape[0], 1, self.shape[1]), fill)
        x_R1C[self.rows[:, None], 0, self.columns] = table.x_R1C[:, 0]
        return x_R1C, self.targets(table.y_N1, fill)

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
