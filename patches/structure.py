"""What of a batch of tables exists.

Shape suffixes: B batch, R rows (train and test), C columns.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Structure:
    """Which rows and columns of a batch of tables exist; the others are NULL.

    The values of x and y at NULL rows and columns are never looked at. A missing value is something
    else: a NaN in a row and a column that exist keeps TabPFN's own meaning.

    Attributes:
        rows_BR: Bool; the train rows, then the test rows, as x has them. `None`: all exist.
        columns_BC: Bool. `None`: all exist.
    """

    rows_BR: Tensor | None = None
    columns_BC: Tensor | None = None

    def check(self, x_RBC: Tensor) -> None:
        """Raise `ValueError` unless this is bool, and fits x (R, B, C) in shape and device."""
        R, B, C = x_RBC.shape
        for name, exists, shape in (("rows_BR", self.rows_BR, (B, R)), ("columns_BC", self.columns_BC, (B, C))):
            if exists is not None and not (
                isinstance(exists, Tensor)
                and (exists.dtype, exists.shape, exists.device) == (torch.bool, shape, x_RBC.device)
            ):
                found = type(exists).__name__
                if isinstance(exists, Tensor):
                    found = f"{exists.dtype} {tuple(exists.shape)} on {exists.device}"
                raise ValueError(
                    f"{name} of the structure must be a bool tensor of shape {shape} on {x_RBC.device}, not {found}"
                )
