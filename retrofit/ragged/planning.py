"""Which members share a forward pass: as few passes as pay, and little padding in each.

A member is one preprocessed table on its way into the model. Members of one pass are padded to the most train
rows, test rows and columns among them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ..patcher import known_spec

DEFAULT_PADDING = 0.25

# Torch's threads do this share of what as many processes of one thread do, in tables whose members take this many
# multiply-adds at least; in smaller ones, far less.
_THREADS_DO, _THREADED_WORK = 0.7, 1e9

# Chunks for each process at least, where there are as many tables: one that gets the last chunk alone keeps the others
# waiting for a part of the time that is as small.
_CHUNKS = 16

# By device: what starting one forward pass costs, in multiply-adds it could have done instead, and the cells
# beyond which a larger batch gains nothing. Orders of magnitude: on one CPU core the bundled host takes 10 ms a
# pass and does 15 G multiply-adds a second, and batches of more cells leave the cache; CUDA is an estimate.
LAUNCH = {"cpu": 2e8, "cuda": 2e11}
MAX_CELLS = {"cpu": 2**13, "cuda": 2**20}


@dataclass(frozen=True)
class Costs:
    """What a forward pass costs on a device, in multiply-adds.

    A linear layer does as many for a token as it has weights, so the weights of the stages that run once a
    cell, once an inducing point of a column, and once a row, say what these cost. Attention itself is left out:
    it matters from thousands of rows on, where a table fills the device alone.

    Attributes:
        cell: Of one cell.
        row: Of one row beside its cells: the CLS tokens' part of the cells' stage, and the ICL stage.
        launch: Of starting a forward pass.
        max_cells: Cells, over the members of a batch, that may go together; inducing points count as such.
        points: Inducing points of a column, however many rows there are.
        point: Of one of them.
    """

    cell: float
    row: float
    launch: float
    max_cells: int
    points: int = 0
    point: float = 0.0

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, max_cells: int | None = None) -> Costs:
        """The costs of a host, patched or not, on a device; on others than CPU and CUDA every member runs alone.

        TabPFN itself runs members alone on MPS, whose attention kernels get batches of them wrong.
        """
        spec = known_spec(model)
        launch, most = LAUNCH.get(device.type, 0.0), MAX_CELLS.get(device.type, 0)
        if most and max_cells is not None:
            most = max_cells
        tokens = spec.points(model), spec.point_weights(model)
        return cls(spec.cell_weights(model), spec.row_weights(model), launch, most, *tokens)

    def work(self, rows: Any, columns: Any) -> Any:
        """Multiply-adds of a member with so many rows and columns; numbers or arrays."""
        return columns * (rows * self.cell + self.points * self.point) + rows * self.row

    def cells(self, rows: Any, columns: Any) -> Any:
        """Cells of such a member as `max_cells` counts them."""
        return columns * (rows + self.points)


def plan_batches(sizes: np.ndarray, costs: Costs, max_padding: float = DEFAULT_PADDING) -> list[list[int]]:
    """Which members to pad into one batch.

    Starts a batch with the member that has the most work left, and adds whichever leaves the least padding,
    as long as the batch stays within `max_padding` and `costs.max_cells`, and as long as the member's part
    (its own work and the padding that it brings) costs less than a forward pass of its own. Members of one size
    are looked at as one: there are many of each.

    Args:
        sizes: (members, 3): train rows, test rows, columns of each.
        costs: What a forward pass costs.
        max_padding: The largest share of a batch's work that may be padding, in [0, 1).

    Returns:
        Indices of members, each exactly once. A member too large for `max_cells` is a batch of its own.
    """
    kinds, kind_of = np.unique(sizes.reshape(-1, 3), axis=0, return_inverse=True)
    by_work = np.argsort(-costs.work(kinds[:, 0] + kinds[:, 1], kinds[:, 2]), kind="stable")
    left = [deque(np.flatnonzero(kind_of.ravel() == kind).tolist()) for kind in by_work]
    kinds, counts = kinds[by_work], np.array([len(members) for members in left])
    work = costs.work(kinds[:, 0] + kinds[:, 1], kinds[:, 2])
    batches = []
    while counts.any():
        batch: list[int] = []
        best, added = int(np.argmax(counts > 0)), 1
        top, own = kinds[best], 0.0
        while added:
            batch += [left[best].popleft() for _ in range(added)]
            counts[best] -= added
            top, own = np.maximum(kinds[best], top), own + added * work[best]
            padded = len(batch) * costs.work(top[0] + top[1], top[2])

            tops = np.maximum(kinds, top)
            members, rows, columns = len(batch) + 1, tops[:, 0] + tops[:, 1], tops[:, 2]
            padded_with = members * costs.work(rows, columns)
            share = 1 - (own + work) / padded_with
            fits = (counts > 0) & (share <= max_padding) & (members * costs.cells(rows, columns) <= costs.max_cells)
            fits &= padded_with - padded <= costs.launch + work
            best, added = int(np.argmin(np.where(fits, share, np.inf))), int(fits.any())
            if added and (kinds[best] == top).all():  # then no other kind leaves less padding, however many are added
                room = costs.max_cells // int(costs.cells(rows[best], columns[best])) - len(batch)
                added = min(int(counts[best]), room)
        batches.append(batch)
    return batches


def share_out(
    sizes: Sequence[tuple[int, int]], works: Sequence[float], processes: int, threads: int, most_tables: int
) -> tuple[list[int], list[list[int]]]:
    """Which tables go together through one process, and which are so large that they need all of torch's threads.

    Args:
        sizes: Rows and columns of each table.
        works: The work of each, in multiply-adds of a member.
        processes: How many share the chunks; 0 if the caller takes all.
        threads: How many the caller has; 0 if it takes none.
        most_tables: In a chunk.

    Returns:
        Indices of tables to run alone, before the others, and chunks of the others, those with the most work first.
    """
    alone: list[int] = []
    if processes and threads:
        largest = sorted(range(len(works)), key=lambda i: -works[i])
        after = np.append(np.cumsum(np.array(works)[largest][::-1])[::-1], 0.0)  # the work from each one on
        # The time of running the first k with all threads and then the others in processes, for each k.
        one = np.append(np.array(works)[largest], 0.0)
        times = (after[0] - after) / (threads * _THREADS_DO) + np.maximum(one, after / processes)
        times[1:][one[:-1] < _THREADED_WORK] = np.inf
        alone = largest[: int(np.argmin(times))]
    others = sorted(set(range(len(works))) - set(alone), key=sizes.__getitem__)  # neighbours pad well to each other
    most_work = sum(works[i] for i in others) / (_CHUNKS * processes) if processes else np.inf
    chunks: list[list[int]] = []
    for i in others:
        if not chunks or len(chunks[-1]) == most_tables or sum(works[j] for j in chunks[-1]) + works[i] > most_work:
            chunks.append([])
        chunks[-1].append(i)
    return alone, sorted(chunks, key=lambda chunk: -sum(works[i] for i in chunk))
