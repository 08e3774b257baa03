"""The forward passes: members of many tables, padded into one batch and run through the model.

Shapes: B members in a batch, R rows of a member, N of them train and M test rows, C columns after
preprocessing, L logits of a row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from tabpfn import TabPFNRegressor
from torch import Tensor, nn

from ...patches.structure import Structure
from .. import tabpfn_api
from .planning import Costs, plan_batches
from .report import Tally


@dataclass
class Member:
    """A member as it enters the model.

    Attributes:
        x_RC: Its preprocessed rows, the train rows first.
        y_N: The targets of the train rows, as the model sees them.
        table: Whose member it is.
        config: How TabPFN made it of its table, and how to undo that in its logits.
    """

    x_RC: Tensor
    y_N: Tensor
    table: int
    config: Any

    @property
    def size(self) -> tuple[int, int, int]:
        """Train rows, test rows and columns."""
        return len(self.y_N), len(self.x_RC) - len(self.y_N), self.x_RC.shape[1]


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
        self, tables: Mapping[int, TabPFNRegressor], tally: Tally
    ) -> tuple[dict[int, Tensor], dict[int, Exception]]:
        """Run prepared tables, of which those with a constant target have no members.

        Args:
            tables: By index.
            tally: Counts what is done.

        Returns:
            For each other table the sum of its members' logits (M, L) on its own borders; or, in the second, what
            was wrong with it.
        """
        members: list[Member] = []
        totals: dict[int, Tensor] = {}
        failed: dict[int, Exception] = {}
        with tally.timed("preprocessing"):
            for index, regressor in tables.items():
                if regressor.is_constant_target_:
                    continue
                try:
                    members += self._members_of(index, regressor)
                except Exception as error:
                    failed[index] = error.with_traceback(None)  # its frames hold tensors
        for member, output in self._run(members, tally):
            if isinstance(output, Exception):
                failed[member.table] = output
            elif member.table not in failed:
                try:
                    with tally.timed("decoding"):
                        logits_ML = tabpfn_api.translate_logits(tables[member.table], output, member.config)
                        totals[member.table] = totals.get(member.table, 0) + logits_ML
                except Exception as error:
                    failed[member.table] = error.with_traceback(None)
        return totals, failed

    def _members_of(self, table: int, regressor: TabPFNRegressor) -> list[Member]:
        """A table's members on the device, by the steps of TabPFN's own engines."""
        regressor.inference_precision = self.template.inference_precision
        regressor.to(self.device)
        recorder, found = regressor.executor_, []
        for member, X_test in zip(recorder.members, recorder.X_tests, strict=True):
            x_R1C, y_N = tabpfn_api.prepare_member(member, X_test, self.device, self.dtype)
            found.append(Member(x_R1C.squeeze(1), y_N, table, member.config))
        return found

    def _run(self, members: list[Member], tally: Tally) -> Iterator[tuple[Member, Tensor | Exception]]:
        """Each member with its logits (M, L), or with what the device said to it even alone."""
        left = self._plan(members)
        while left:
            batch = left.popleft()
            try:
                with tally.timed("forward"):
                    outputs: Sequence[Tensor | Exception] = self._forward(batch)
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                outputs = [error.with_traceback(None)]  # its frames hold the tensors that did not fit
                tally.out_of_memory += 1
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                if len(batch) > 1:
                    n_train, n_test, columns = _padded_size(batch)
                    cells = len(batch) * (n_train + n_test) * columns
                    self.costs = dataclasses.replace(self.costs, max_cells=cells // 2)
                    left = self._plan(list(itertools.chain(batch, *left)))
                    continue
            else:
                self._count(batch, tally)
            yield from zip(batch, outputs, strict=True)

    def _plan(self, members: list[Member]) -> deque[list[Member]]:
        sizes = np.array([member.size for member in members]).reshape(-1, 3)
        return deque([members[i] for i in batch] for batch in plan_batches(sizes, self.costs, self.max_padding))

    def _count(self, batch: list[Member], tally: Tally) -> None:
        n_train, n_test, columns = _padded_size(batch)
        tally.batches += 1
        tally.members += len(batch)
        tally.own_work += sum(self.costs.work(len(m.x_RC), m.x_RC.shape[1]) for m in batch)
        tally.padded_work += len(batch) * self.costs.work(n_train + n_test, columns)

    def _forward(self, members: list[Member]) -> list[Tensor]:
        """The logits (M, L) of each member of a batch."""
        x_RBC, y_NB, structure = pad(members)
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
        if self.dtype is not None:
            x_RBC, y_NB = x_RBC.type(self.dtype), y_NB.type(self.dtype)
        with tabpfn_api.get_autocast_context(self.device, enabled=self.template.use_autocast_), torch.inference_mode():
            logits_MBL = self.model(
                x_RBC, y_NB, structure=structure, performance_options=performance, task_type="regression"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the report's seconds mean something
        return [logits_MBL[: member.size[1], i] for i, member in enumerate(members)]


def pad(members: list[Member]) -> tuple[Tensor, Tensor, Structure]:
    """Members as one batch: x_RBC (train rows, then test rows), y_NB, and what of it exists."""
    sizes = np.array([member.size for member in members])
    n_train, n_test, columns = _padded_size(members)
    first = members[0]
    x_BRC = first.x_RC.new_zeros(len(members), n_train + n_test, columns)
    y_BN = first.y_N.new_zeros(len(members), n_train)
    for i, (member, (n, m, c)) in enumerate(zip(members, sizes.tolist(), strict=True)):
        x_BRC[i, :n, :c] = member.x_RC[:n]
        x_BRC[i, n_train : n_train + m, :c] = member.x_RC[n:]
        y_BN[i, :n] = member.y_N
    n_B1, m_B1, c_B1 = sizes.T[:, :, None]
    r_R = np.arange(n_train + n_test)
    rows_BR = (r_R < n_B1) | ((r_R >= n_train) & (r_R < n_train + m_B1))
    columns_BC = np.arange(columns) < c_B1
    # None where nothing is padded, so that the model may take its ordinary way.
    structure = Structure(
        *(None if exists.all() else torch.from_numpy(exists).to(x_BRC.device) for exists in (rows_BR, columns_BC))
    )
    return x_BRC.transpose(0, 1).contiguous(), y_BN.T.contiguous(), structure


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
