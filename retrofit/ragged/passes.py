"""The forward passes: members of many tables, padded into one batch and run through the model.

Shapes: B members in a batch, R rows of a member, N of them train and M test rows, C columns after
preprocessing, L logits of a row, P rows of several members.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tabpfn import TabPFNRegressor
from torch import Tensor, nn

from ...patches.structure import Structure
from .. import tabpfn_api
from .planning import Costs, plan_batches
from .preparing import Member, Prepared
from .report import Tally

# How many logits are translated at once, at most (0.5 GB, and as much for each step).
_MOST_LOGITS = 2**27


class Passes:
    """Runs members through a model on one device, in smaller batches where they do not fit.

    Args:
        model: A closed one; it is moved and cast.
        template: A regressor that knows device and precision.
        byte_size: Of a number in that precision.
        costs: What a pass costs; what does not fit the device lowers their `max_cells`.
        max_padding: The largest share of a pass's work that may be padding.
    """

    def __init__(
        self,
        model: nn.Module,
        template: TabPFNRegressor,
        byte_size: int,
        costs: Costs,
        max_padding: float,
    ) -> None:
        self.device = template.devices_[0]
        self.dtype = template.forced_inference_dtype_
        self.model: Any = tabpfn_api.model_on(model, self.device, self.dtype)
        self.template, self.byte_size, self.costs = template, byte_size, costs
        self.max_padding = max_padding

    def sum_logits(
        self, tables: Mapping[int, Prepared], tally: Tally
    ) -> tuple[dict[int, Tensor], dict[int, Exception]]:
        """Run prepared tables, of which those with a constant target have no members.

        Args:
            tables: By index.
            tally: Counts what is done.

        Returns:
            For each other table the sum of its members' translated logits (M, L); or, in the second, what the device
            said to one of its members even alone.
        """
        totals: dict[int, Tensor] = {}
        failed: dict[int, Exception] = {}
        left = self._plan([dataclasses.replace(m, table=index) for index, t in tables.items() for m in t.members])
        while left:
            batch = left.popleft()
            try:
                with tally.timed("forward"):
                    logits_MBL = self._forward(batch)
                with tally.timed("decoding"):
                    totals.update(self._add(batch, logits_MBL, totals))
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                error = error.with_traceback(None)  # its frames hold the tensors that did not fit
                tally.out_of_memory += 1
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                if len(batch) > 1:
                    n_train, n_test, columns = _padded_size(batch)
                    cells = len(batch) * self.costs.cells(n_train + n_test, columns)
                    self.costs = dataclasses.replace(self.costs, max_cells=cells // 2)
                    left = self._plan(list(itertools.chain(batch, *left)))
                else:
                    failed[batch[0].table] = error
            else:
                self._count(batch, tally)
        return totals, failed

    def _add(self, batch: list[Member], logits_MBL: Tensor, totals: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """What the totals of a batch's tables become with its members; those that are translated alike are so at once.

        They are added one by one in the order of the batch, which decides how sums round.
        """
        alike: dict[int, list[int]] = {}
        for i, member in enumerate(batch):
            alike.setdefault(id(member.translation), []).append(i)
        added: dict[int, Tensor] = {}
        for members in alike.values():
            rows = max(batch[i].size[1] for i in members)
            at_once = max(1, _MOST_LOGITS // (rows * logits_MBL.shape[-1]))
            for start in range(0, len(members), at_once):
                part = members[start : start + at_once]
                logits_PL = logits_MBL[:rows, part].flatten(0, 1)
                found_PL = tabpfn_api.translate(self.template, logits_PL, batch[part[0]].translation)
                added.update(zip(part, found_PL.unflatten(0, (rows, -1)).unbind(1), strict=True))
        sums: dict[int, Tensor] = {}
        for i, member in enumerate(batch):
            before = sums.get(member.table, totals.get(member.table, 0))
            sums[member.table] = before + added.pop(i)[: member.size[1]]
        return sums

    def _plan(self, members: list[Member]) -> deque[list[Member]]:
        sizes = np.array([member.size for member in members]).reshape(-1, 3)
        return deque([members[i] for i in batch] for batch in plan_batches(sizes, self.costs, self.max_padding))

    def _count(self, batch: list[Member], tally: Tally) -> None:
        n_train, n_test, columns = _padded_size(batch)
        tally.batches += 1
        tally.members += len(batch)
        tally.own_work += sum(self.costs.work(*m.x_RC.shape) for m in batch)
        tally.padded_work += len(batch) * self.costs.work(n_train + n_test, columns)

    def _forward(self, members: list[Member]) -> Tensor:
        """The logits (M, B, L) of a batch, of which a member's are its first rows."""
        x_RBC, y_NB, structure = _on_device(self.device, *pad(members))
        (n_train, batch), (n_rows, _, columns) = y_NB.shape, x_RBC.shape
        save_memory = tabpfn_api.should_save_peak_mem(
            self.template.memory_saving_mode,
            X_train_shape=(batch * n_train, columns),
            X_test_shape=(batch * (n_rows - n_train), columns),
            devices=[self.device],
            dtype_byte_size=self.byte_size,
        )
        performance = dataclasses.replace(
            self.model.get_default_performance_options(),
            enable_torch_compile=self.template.enable_torch_compile,
            save_peak_memory_factor=tabpfn_api.DEFAULT_SAVE_PEAK_MEMORY_FACTOR if save_memory else None,
        )
        with tabpfn_api.get_autocast_context(self.device, enabled=self.template.use_autocast_), torch.inference_mode():
            logits_MBL = self.model(
                x_RBC, y_NB, structure=structure, performance_options=performance, task_type="regression"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the report's seconds mean something
        return logits_MBL


def pad(members: list[Member]) -> tuple[Tensor, Tensor, Structure]:
    """Members as one batch: x_RBC (train rows, then test rows), y_NB, and what of it exists; on the CPU."""
    sizes = np.array([member.size for member in members])
    n_train, n_test, columns = _padded_size(members)
    dtype = torch.as_tensor(members[0].x_RC).dtype
    x_RBC = torch.zeros(n_train + n_test, len(members), columns, dtype=dtype)
    y_NB = torch.zeros(n_train, len(members), dtype=dtype)
    for i, (member, (n, m, c)) in enumerate(zip(members, sizes.tolist(), strict=True)):
        x_RC = torch.as_tensor(member.x_RC)
        x_RBC[:n, i, :c] = x_RC[:n]
        x_RBC[n_train : n_train + m, i, :c] = x_RC[n:]
        y_NB[:n, i] = torch.as_tensor(member.y_N)
    n_B1, m_B1, c_B1 = sizes.T[:, :, None]
    r_R = np.arange(n_train + n_test)
    rows_BR = (r_R < n_B1) | ((r_R >= n_train) & (r_R < n_train + m_B1))
    columns_BC = np.arange(columns) < c_B1
    # None where nothing is padded, so that the model may take its ordinary way.
    exist = (None if exists.all() else torch.from_numpy(exists) for exists in (rows_BR, columns_BC))
    return x_RBC, y_NB, Structure(*exist)


def _on_device(
    device: torch.device, x_RBC: Tensor, y_NB: Tensor, structure: Structure
) -> tuple[Tensor, Tensor, Structure]:
    """A batch on a device, by one copy that is not waited for; each tensor's own would be."""
    if device.type == "cpu":
        return x_RBC, y_NB, structure
    parts = [x_RBC, y_NB, structure.rows_BR, structure.columns_BC]
    moved = packed(parts, pinned=device.type == "cuda").to(device, non_blocking=True)
    x, y, rows, columns = unpacked(moved, parts)
    assert x is not None
    assert y is not None
    return x, y, Structure(rows, columns)


def packed(parts: Sequence[Tensor | None], *, pinned: bool = False) -> Tensor:
    """The bytes of tensors as one; those of wider numbers have to come first, or they were not aligned."""
    flat = [part.flatten().view(torch.uint8) for part in parts if part is not None]
    return torch.cat(flat, out=torch.empty(sum(map(len, flat)), dtype=torch.uint8, pin_memory=pinned))


def unpacked(left: Tensor, like: Sequence[Tensor | None]) -> list[Tensor | None]:
    """The tensors that `packed` made bytes of."""
    found: list[Tensor | None] = []
    for part in like:
        if part is None:
            found.append(None)
            continue
        taken, left = left.tensor_split([part.nbytes])
        found.append(taken.view(part.dtype).view(part.shape))
    return found


def _padded_size(members: list[Member]) -> tuple[int, int, int]:
    """Train rows, test rows and columns of each member in a batch."""
    n_train, n_test, columns = np.max([member.size for member in members], axis=0).tolist()
    return n_train, n_test, columns


def _is_out_of_memory(error: Exception) -> bool:
    """TabPFN's test, which is about GPUs, and what torch says when the CPU's memory or cuBLAS's ends."""
    others = ("DefaultCPUAllocator", "ALLOC_FAILED")
    return (
        isinstance(error, MemoryError) or tabpfn_api.is_oom_error(error) or any(text in str(error) for text in others)
    )
