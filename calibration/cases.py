"""One train/test split of a table, free of torch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd


@dataclass(frozen=True, eq=False)
class Case:
    """One train/test split of a dataset, as decided by a seed.

    `categorical` holds the indices of numeric columns that are codes; None leaves that to TabPFN.
    """

    dataset: str
    seed: int
    X_train: pd.DataFrame
    y_train: np.ndarray
    X_test: pd.DataFrame
    y_test: np.ndarray
    categorical: list[int] | None = None
