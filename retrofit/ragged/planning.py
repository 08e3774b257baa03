"""Which members share a forward pass: as few passes as pay, and little padding in each.

A member is one preprocessed table on its way into the model. Members of one pass are padded to the most train
rows, test rows and columns among them.
"""

from __future__ import annotations

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
MAX_CELLS = {"cpu": 2**12, "cuda": 2**20}


@dataclass(frozen=True)
class Costs:
    """What a forward pass costs on a device, in multiply-adds.

    A linear layer does as many for a token as it has weights, so the weights of the stages that run once a
    cell, and of those that run once a row, say what a row and a column cost. Attention itself is left out:
    it matters from thousands of rows on, where a table fills the device alone.

    Attributes:
        cell: Of one cell.
        row: Of one row beside its cells: the CLS tokens' part of the cells' stage, and the ICL stage.
        launch: Of starting a forward pass.
        max_cells: Rows times columns, over the members of a batch, that may go together.
    """

    cell: float
    row: float
    launch: float
    max_cells: int

    @classmethod
    def of(cls, model: nn.Module, device: torch.device, max_cells: int | None = None) -> Costs:
        """The costs of a host, patched or not, on a device; on others than CPU and CUDA every member runs alone.

        TabPFN itself runs members alone on MPS, whose attention kernels get batches of them wrong.
        """
        spec = known_spec(model)
        cell, row = spec.cell_weights(model), spec.row_weights(model)
        if device.type not in MAX_CELLS:
            return cls(cell, row, launch=0.0, max_cells=0)
        return cls(cell, row, LAUNCH[device.type], MAX_CELLS[device.type] if max_cells is None else max_cells)

    def work(self, rows: Any, columns: Any) -> Any:
        """Multiply-adds of a member with so many rows and columns; numbers or arrays."""
        return rows * (columns * self.cell + self.row)


def plan_batches(sizes: np.ndarray, costs: Costs, max_padding: float = DEFAULT_PADDING) -> list[list[int]]:
    """Which members to pad into one batch.

    Starts a batch with the member that has the most work left, and adds whichever leaves the least padding,
    as long as the batch stays within `max_padding` and `costs.max_cells`, and as long as the member's part
    (its own work and the padding that it brings) costs less than a forward pass of its own.

    Args:
        sizes: (members, 3): train rows, test rows, columns of each.
        costs: What a forward pass costs.
        max_padding: The largest share of a batch's work that may be padding, in [0, 1).

    Returns:
        Indices of members, each exactly once. A member too large for `max_cells` is a batch of its own.
    """
    work = costs.work(sizes[:, 0] + sizes[:, 1], sizes[:, 2])
    left = np.argsort(-work, kind="stable")
    batches = []
    while len(left):
        batch, left = [int(left[0])], left[1:]
        top, own = sizes[batch[0]], work[batch[0]]
        padded = own
        while len(left):
            tops = np.maximum(sizes[left], top)
            members, rows = len(batch) + 1, tops[:, 0] + tops[:, 1]
            padded_with = members * costs.work(rows, tops[:, 2])
            share = 1 - (own + work[left]) / padded_with
            fits = (share <= max_padding) & (members * rows * tops[:, 2] <= costs.max_cells)
            fits &= padded_with - padded <= costs.launch + work[left]
            if not fits.any():
                break
            best = int(np.argmin(np.where(fits, share, np.inf)))
            batch.append(int(left[best]))
            top, own, padded = tops[best], own + work[left[best]], padded_with[best]
            left = np.delete(left, best)
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
