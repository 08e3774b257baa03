"""Predict many tables of any sizes: members of all tables padded into shared forward passes.

Everything but the forward pass is TabPFN's own: each table is fitted by a `TabPFNRegressor` of its own, and
its logits are decoded by that. In between, the ensemble members of many tables are padded with NULL rows and
columns, which do not exist for a closed retrofit (docs/theory.md), and go through the model together.

Shapes: B members in a batch, R rows of a member, N of them train and M test rows, C columns after
preprocessing.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import pickle
import sys
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from multiprocessing import current_process, get_context, parent_process
from typing import TYPE_CHECKING, Any

import joblib
import numpy as np
import pandas as pd
import sklearn
import threadpoolctl
import torch
from joblib.externals import loky
from tabpfn import TabPFNRegressor
from torch import Tensor, nn

from ..patches.structure import Structure
from . import tabpfn_api
from .columns import Table, take
from .long_table import read_groups
from .patcher import known_spec
from .tabpfn_api import InferenceConfig

if TYPE_CHECKING:
    from .api import Retrofit

DEFAULT_PADDING = 0.25

_OUTPUT_TYPES = ("mean", "median", "mode", "quantiles", "main", "full")
_QUANTILES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]

# Preprocessing is mostly Python, so it runs in processes. Forked ones start at once; elsewhere, and beside a GPU,
# whose state does not survive a fork, joblib's first import torch for some seconds. How many tables repay that:
_TABLES_FOR_PROCESSES = {"fork": 8, "loky": 200}

# How many tables are prepared ahead of the forward passes, and of how many cells (about 0.3 GB in 8 members).
_AHEAD_TABLES, _AHEAD_CELLS = 256, 2**22

# Tables are run and decoded in chunks, of so many by device, whose inputs and logits stay below this many numbers
# (0.5 GB).
_CHUNK_TABLES = {"cpu": 16, "cuda": 512}
_CHUNK_NUMBERS = 2**27

# By device: what starting one forward pass costs, in multiply-adds it could have done instead, and the cells
# beyond which a larger batch gains nothing. Orders of magnitude: on one CPU core the bundled host takes 10 ms a
# pass and does 15 G multiply-adds a second, and batches of more cells leave the cache; CUDA is an estimate.
_LAUNCH = {"cpu": 2e8, "cuda": 2e11}
_MAX_CELLS = {"cpu": 2**13, "cuda": 2**20}


class TableError(ValueError):
    """A table, `index` in the lists, that cannot be predicted."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index = index

    @property
    def reason(self) -> str:
        """What was wrong with it."""
        error = self.args[1]
        return str(error) or type(error).__name__

    def __str__(self) -> str:
        """Which table, and what was wrong with it."""
        return f"table {self.index}: {self.reason}"


@dataclass
class RaggedReport:
    """What a ragged prediction did.

    Attributes:
        tables: Tables answered, constant targets included.
        members: Ensemble members that went through the model.
        batches: Forward passes.
        padding: The share of the forward passes' work that was padding, in [0, 1).
        out_of_memory: Batches that did not fit the device and were halved.
        errors: What was wrong with each table that has no prediction, by its index or group.
        seconds: Wall time waiting for `preprocessing`, in `forward` and in `decoding`.
    """

    tables: int = 0
    members: int = 0
    batches: int = 0
    out_of_memory: int = 0
    errors: dict[Any, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=lambda: {"preprocessing": 0.0, "forward": 0.0, "decoding": 0.0})
    _own_work: float = field(default=0.0, repr=False)
    _padded_work: float = field(default=0.0, repr=False)

    @property
    def padding(self) -> float:
        """The share of the forward passes' work that was padding."""
        return 1 - self._own_work / self._padded_work if self._padded_work else 0.0

    @contextmanager
    def _timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start


# ---- Planning -----------------------------------------------------------------------------------


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
        """The costs of a v3 model on a device; on others than CPU and CUDA every member runs alone.

        TabPFN itself runs members alone on MPS, whose attention kernels get batches of them wrong.
        """
        spec = known_spec(model)
        cell, row = spec.cell_weights(model), spec.row_weights(model)
        limit = _MAX_CELLS.get(device.type, 0)
        return cls(cell, row, _LAUNCH.get(device.type, 0.0), max_cells if limit and max_cells is not None else limit)

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


# ---- One table: TabPFN's own fit, and its way to the model ---------------------------------------


class _Engine:
    """Takes the engine's place in a fitted regressor: notes what goes into the model, sums up what came out."""

    def __init__(self, engine: Any) -> None:
        self.members = engine.ensemble_members
        self.X_tests: list[Any] = []
        self.total: Any = 0

    def numbers(self, buckets: int) -> int:
        """Of the model's input, and of the sum of its outputs."""
        inputs = [*(member.X_train for member in self.members), *self.X_tests]
        return sum(math.prod(X.shape) for X in inputs) + len(self.X_tests[0]) * buckets

    def iter_outputs(self, X: Any, **_: Any) -> Iterator[Any]:
        self.X_tests = [member.transform_X_test(X) for member in self.members]
        return iter(())

    def to(self, *_: Any) -> None:
        """There is no model to move."""


def _prepare(options: dict[str, Any], X_train: Any, y_train: Any, X_test: Any) -> TabPFNRegressor | ValueError:
    """A regressor fitted on one table, whose engine holds the preprocessed members; or what was wrong.

    On the CPU, and without the model, which `options` hold a stand-in of.
    """
    try:
        regressor = TabPFNRegressor(**options).fit(X_train, y_train)
        if regressor.is_constant_target_:
            regressor.predict(X_test)  # only to see whether it can be
            return regressor
        # The criterion is the options' own object, and `to` would move all tables' together.
        regressor.znorm_space_bardist_ = copy.deepcopy(regressor.znorm_space_bardist_)
        regressor.executor_ = engine = _Engine(regressor.executor_)
        with sklearn.config_context(transform_output="default"):
            # The way of `predict` to the engine, without its decoding.
            regressor.get_embeddings(X_test)
    except Exception as error:
        # As a plain exception: not all survive the way back from a process.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return ValueError(f"{kind}{error}").with_traceback(error.__traceback__)
    del regressor.ensemble_preprocessor_
    engine.members = [dataclasses.replace(member, cpu_preprocessor=None) for member in engine.members]
    return regressor


def _prepare_bytes(job: bytes) -> bytes:
    """`_prepare` in a worker process, and what it warned of.

    Pickled on both ways: a pool would send each tensor as an open file, of which a process has few.
    """
    with warnings.catch_warnings(record=True) as caught:
        prepared = _prepare(*pickle.loads(job))
    return pickle.dumps((prepared, [(str(warning.message), warning.category) for warning in caught]))


def _add_output(regressor: TabPFNRegressor, position: int, logits_ML: Tensor) -> None:
    """Add a member's logits to its table's, on the table's borders, as `predict_batched` does."""
    engine = regressor.executor_
    engine.total = engine.total + tabpfn_api.translate_logits(regressor, logits_ML, engine.members[position].config)


def _decode(regressor: TabPFNRegressor, X_test: Any, output_type: str, quantiles: list[float]) -> Any:
    """What `predict` would return, from the sum of the members' logits, as `predict_batched` does."""
    if regressor.is_constant_target_:
        return tabpfn_api.constant_prediction(regressor, len(X_test), output_type, quantiles)
    engine = regressor.executor_
    return tabpfn_api.decode(regressor, engine.total, len(engine.members), output_type, quantiles)


# ---- Many members: the forward passes ------------------------------------------------------------


@dataclass
class _Member:
    """A member as it enters the model: x_RC train rows first, y_N, and where its output belongs."""

    x_RC: Tensor
    y_N: Tensor
    table: int
    position: int

    @property
    def size(self) -> tuple[int, int, int]:
        return len(self.y_N), len(self.x_RC) - len(self.y_N), self.x_RC.shape[1]


class _Passes:
    """Runs members through the model on one device, in smaller batches where they do not fit."""

    def __init__(self, model: nn.Module, template: TabPFNRegressor, byte_size: int, costs: Costs) -> None:
        self.device = template.devices_[0]
        self.dtype = template.forced_inference_dtype_
        self.model: Any = tabpfn_api.model_on(model, self.device, self.dtype)
        self.template, self.byte_size, self.costs = template, byte_size, costs

    def members_of(self, table: int, engine: _Engine) -> Iterator[_Member]:
        """A table's members on the device, by the steps of TabPFN's own engines."""
        for position, (member, X_test) in enumerate(zip(engine.members, engine.X_tests, strict=True)):
            x_R1C, y_N = tabpfn_api.prepare_member(member, X_test, self.device, self.dtype)
            yield _Member(x_R1C.squeeze(1), y_N, table, position)

    def answer(
        self,
        tables: dict[int, TabPFNRegressor],
        max_padding: float,
        report: RaggedReport,
        threads: Callable[[], int],
    ) -> dict[int, Exception]:
        """Give each prepared regressor the sum of its members' logits; what was wrong with those that have none."""
        members: list[_Member] = []
        failed: dict[int, Exception] = {}
        with report._timed("preprocessing"):
            for index, regressor in tables.items():
                if regressor.is_constant_target_:
                    continue
                try:
                    regressor.inference_precision = self.template.inference_precision
                    regressor.to(self.device)
                    members += list(self.members_of(index, regressor.executor_))
                except Exception as error:
                    failed[index] = error.with_traceback(None)  # its frames hold tensors
        for member, output in self.run(members, max_padding, report, threads):
            if isinstance(output, Exception):
                failed[member.table] = output
            elif member.table not in failed:
                try:
                    with report._timed("decoding"):
                        _add_output(tables[member.table], member.position, output)
                except Exception as error:
                    failed[member.table] = error.with_traceback(None)
        return failed

    def run(
        self, members: list[_Member], max_padding: float, report: RaggedReport, threads: Callable[[], int]
    ) -> Iterator[tuple[_Member, Tensor | Exception]]:
        """Each member with its logits (M, buckets), or with what the device said to it even alone."""
        left = self._plan(members, max_padding)
        while left:
            batch = left.popleft()
            try:
                with report._timed("forward"):
                    outputs: Sequence[Tensor | Exception] = self._forward(batch, threads())
            except (RuntimeError, MemoryError) as error:
                if not _is_out_of_memory(error):
                    raise
                outputs = [error.with_traceback(None)]  # its frames hold the tensors that did not fit
                report.out_of_memory += 1
                if self.device.type == "cuda":
                    torch.cuda.empty_cache()
                if len(batch) > 1:
                    self.costs = dataclasses.replace(self.costs, max_cells=_padded_cells(batch) // 2)
                    left = self._plan(list(itertools.chain(batch, *left)), max_padding)
                    continue
            else:
                report.batches += 1
                report.members += len(batch)
                report._own_work += sum(self.costs.work(len(m.x_RC), m.x_RC.shape[1]) for m in batch)
                n_train, n_test, columns = np.max([m.size for m in batch], axis=0)
                report._padded_work += len(batch) * self.costs.work(n_train + n_test, columns)
            yield from zip(batch, outputs, strict=True)

    def _plan(self, members: list[_Member], max_padding: float) -> deque[list[_Member]]:
        sizes = np.array([member.size for member in members]).reshape(-1, 3)
        return deque([members[i] for i in batch] for batch in plan_batches(sizes, self.costs, max_padding))

    def _forward(self, members: list[_Member], threads: int) -> list[Tensor]:
        x_RBC, y_NB, structure = _pad(members)
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
        torch.set_num_threads(threads)
        with tabpfn_api.get_autocast_context(self.device, enabled=self.template.use_autocast_), torch.inference_mode():
            logits_MBL = self.model(  # type: ignore[call-overload]
                x_RBC, y_NB, structure=structure, performance_options=performance, task_type="regression"
            )
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # so that the report's seconds mean something
        return [logits_MBL[: member.size[1], i] for i, member in enumerate(members)]


def _is_out_of_memory(error: Exception) -> bool:
    """TabPFN's test, which is about GPUs, and what torch says when the CPU's memory or cuBLAS's ends."""
    others = ("DefaultCPUAllocator", "ALLOC_FAILED")
    return (
        isinstance(error, MemoryError) or tabpfn_api.is_oom_error(error) or any(text in str(error) for text in others)
    )


def _padded_cells(members: list[_Member]) -> int:
    n_train, n_test, columns = np.max([member.size for member in members], axis=0)
    return int(len(members) * (n_train + n_test) * columns)


def _pad(members: list[_Member]) -> tuple[Tensor, Tensor, Structure]:
    """Members as one batch: x_RBC (train rows, then test rows), y_NB, and what of it exists."""
    sizes = np.array([member.size for member in members])
    n_train, n_test, columns = (int(top) for top in sizes.max(axis=0))
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


# ---- Many tables ---------------------------------------------------------------------------------


def predict_ragged(
    retrofit: Retrofit,
    X_trains: Sequence[Any],
    y_trains: Sequence[Any],
    X_tests: Sequence[Any],
    *,
    output_type: str = "mean",
    quantiles: list[float] | None = None,
    max_padding: float = DEFAULT_PADDING,
    max_cells: int | None = None,
    on_error: str = "raise",
    n_jobs: int | None = None,
    report: RaggedReport | None = None,
    on_tables: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Any]:
    """Predict many tables of any row and column counts, as `fit` and `predict` do one by one.

    Each table is preprocessed and decoded by a `TabPFNRegressor` of its own: same ensemble members, same
    seeds, its own target scaling and borders. Only the forward passes are shared: members of all tables
    are padded with NULL rows and columns, which do not exist for a `closed` retrofit.

    Args:
        retrofit: Of the variant `closed`. As a method, the retrofit itself.
        X_trains: One table each: arrays or DataFrames, with categories and missing cells.
        y_trains: The targets of their rows.
        X_tests: The rows to predict.
        output_type: As of `TabPFNRegressor.predict`.
        quantiles: As of `TabPFNRegressor.predict`.
        max_padding: The largest share of a forward pass's work that may be padding, in [0, 1).
        max_cells: Rows times columns that may go through the model together; by device, by default. What
            does not fit into the device's memory is halved, down to single members, and nothing is lost.
        on_error: `raise` on the first bad table, or `skip` it: its result is None, and the report says why.
        n_jobs: Processes that preprocess, beside the forward passes; 0 for none. By default half the cores
            (beside a GPU all but one), as soon as there are enough tables to repay their start. Should one
            be killed, this process goes on alone, and warns.
        report: What was done is added to it.
        on_tables: Called now and then with the number of tables that are done, to show progress.
        options: Of `TabPFNRegressor`, for all tables alike: `n_estimators`, `random_state`, `device`,
            `inference_precision`, `categorical_features_indices` and so on. Of several devices the first is
            used.

    Returns:
        For each table, in order, what `predict` returns for it.

    Raises:
        TableError: A table that cannot be predicted.
        ValueError: Another variant than `closed`, no tables, lists of unequal length, an option out of
            range.
        TypeError: An option that `TabPFNRegressor` does not have.
        NotImplementedError: `tuning_config` or majority downsampling, as `predict_batched` refuses them.
    """
    _check_closed(retrofit)
    lists = [X_trains, y_trains, X_tests]
    if any(isinstance(entries, (pd.DataFrame, pd.Series, str, dict)) for entries in lists):
        raise ValueError("X_trains, y_trains and X_tests are lists with one entry a table")
    lengths = [len(entries) for entries in lists]
    if len(set(lengths)) > 1:
        raise ValueError("X_trains, y_trains and X_tests must have equal length, got {}, {} and {}".format(*lengths))
    if lengths[0] == 0:
        raise ValueError("nothing to predict: no tables")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if max_cells is not None and max_cells < 1:
        raise ValueError(f"max_cells is at least 1, got {max_cells}")
    if n_jobs is not None and n_jobs < 0:
        raise ValueError(f"n_jobs is a number of processes, 0 for none, got {n_jobs}")
    if not 0 <= max_padding < 1:
        raise ValueError(f"max_padding is a share in [0, 1), got {max_padding}")
    # Said now as `predict` would say it, not after the forward passes.
    if output_type not in _OUTPUT_TYPES:
        raise ValueError(f"output_type is one of {', '.join(_OUTPUT_TYPES)}, not {output_type!r}")
    quantiles = _QUANTILES if quantiles is None else quantiles
    if not all(isinstance(q, float) and 0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles are floats between 0 and 1, got {quantiles}")

    report = RaggedReport() if report is None else report
    specs = retrofit.specs
    weightless = dataclasses.replace(specs, model=nn.Linear(1, 1), norm_criterion=tabpfn_api.bar_distribution(specs))
    template, byte_size, worker_options = _settings(weightless, options)
    passes = _Passes(specs.model, template, byte_size, Costs.of(specs.model, template.devices_[0], max_cells))

    def refuse(index: int, error: Exception) -> None:
        refusal = TableError(index, error)
        if on_error == "raise":
            raise refusal from error
        report.errors[index] = refusal.reason

    results: list[Any] = [None] * lengths[0]
    tables = list(zip(*lists, strict=True))
    # Seeds are drawn in the caller's order. The order of work is by size, so that neighbours pad well to each other.
    seeds = [tabpfn_api.infer_random_state(template.random_state)[0] for _ in tables]
    order = sorted(range(len(tables)), key=lambda i: _rough_size(tables[i]))
    if n_jobs is None:
        enough = len(tables) >= _TABLES_FOR_PROCESSES[_start_method(passes.device)]
        enough &= not current_process().daemon  # these may not start processes
        cores = joblib.cpu_count()
        n_jobs = 0 if not enough else cores // 2 if passes.device.type == "cpu" else cores - 1
    most_tables, waiting = _CHUNK_TABLES.get(passes.device.type, 1), list(reversed(order))
    chunk_tables = 2 if n_jobs else most_tables  # so that the first forward pass need not wait long
    prepared = _Preparation(worker_options, tables, seeds, order, n_jobs, _start_method(passes.device))
    with closing(prepared), _same_threads():
        while waiting:
            chunk: dict[int, TabPFNRegressor] = {}
            numbers = 0
            with report._timed("preprocessing"):
                while waiting and len(chunk) < chunk_tables and numbers < _CHUNK_NUMBERS:
                    index, regressor = waiting.pop(), next(prepared)
                    if isinstance(regressor, Exception):
                        refuse(index, regressor)
                        continue
                    chunk[index] = regressor
                    if not regressor.is_constant_target_:
                        numbers += regressor.executor_.numbers(specs.model.n_out)
            failed = passes.answer(chunk, max_padding, report, prepared.threads)
            with report._timed("decoding"):
                torch.set_num_threads(prepared.threads())
                for index in chunk.keys() - failed.keys():
                    try:
                        results[index] = _decode(chunk[index], tables[index][2], output_type, quantiles)
                    except Exception as error:
                        failed[index] = error
            for index, reason in failed.items():
                refuse(index, reason)
            report.tables += len(chunk) - len(failed)
            chunk_tables = min(2 * chunk_tables, most_tables)
            if on_tables is not None:
                on_tables(len(tables) - len(waiting))
    return results


def _check_closed(retrofit: Retrofit) -> None:
    if retrofit.variant != "closed":
        raise ValueError(
            f"padding is inert only in the variant 'closed', not in {retrofit.variant!r}; make one by "
            "oretrofit.patch(host, variant='closed') or `oretrofit patch --variant closed --out FILE`"
        )


def _settings(weightless: Any, options: dict[str, Any]) -> tuple[TabPFNRegressor, int, dict[str, Any]]:
    """A regressor that knows device and precision, its byte size, and what the workers build theirs with.

    Raises:
        TypeError: An option that `TabPFNRegressor` does not have.
        ValueError: An option that has no meaning here.
        NotImplementedError: What `predict_batched` refuses: it is fitted table by table.
    """
    for name, only in (("model_path", None), ("fit_mode", "fit_preprocessors"), ("differentiable_input", False)):
        if name in options and options[name] != only:
            raise ValueError(f"{name} cannot be set here" + ("" if only is None else f" to anything but {only!r}"))
    if isinstance(members := options.get("n_estimators", 1), int) and members < 1:
        raise ValueError(f"n_estimators is at least 1, got {members}")
    if options.get("tuning_config") is not None:
        raise NotImplementedError("no tuning_config: the temperature is fitted table by table; use fit and predict")
    options = {**options, "model_path": weightless}
    template = TabPFNRegressor(**options)
    if tabpfn_api.uses_majority_downsample(template):
        raise NotImplementedError(
            "no SAMPLE_SUBSAMPLING_METHOD='majority_downsample': its correction is fitted table by table; use fit and "
            "predict"
        )
    byte_size = tabpfn_api.initialize(template)
    # Workers run on the CPU, whatever the device and the precision of the forward passes.
    worker_options = {**options, "device": "cpu", "inference_precision": torch.float32}
    if template.devices_[0].type != "cpu":
        no_limit, config = {"MAX_CPU_SAMPLES": sys.maxsize}, options.get("inference_config")
        if isinstance(config, InferenceConfig):
            worker_options["inference_config"] = dataclasses.replace(config, **no_limit)
        else:
            worker_options["inference_config"] = {**(config or {}), **no_limit}
    return template, byte_size, worker_options


@contextmanager
def _same_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _start_method(device: torch.device) -> str:
    return "fork" if sys.platform == "linux" and device.type == "cpu" else "loky"


def _start_worker() -> None:
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)


def _start_forked_worker() -> None:
    _start_worker()
    # A process that is killed cannot stop its workers, and they would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)


class _Preparation:
    """The tables' regressors in the given order, prepared ahead in processes of one thread each."""

    def __init__(
        self,
        options: dict[str, Any],
        tables: list[tuple[Any, Any, Any]],
        seeds: list[int],
        order: list[int],
        n_jobs: int,
        start_method: str,
    ) -> None:
        self._work: Iterator[tuple[Any, ...]] = (({**options, "random_state": seeds[i]}, *tables[i]) for i in order)
        self._pool: Executor | None = None
        # What is being prepared: its future, where it could be sent to a process; the job; its cells.
        self._ahead: deque[tuple[Future | None, tuple[Any, ...], int]] = deque()
        self._n_jobs, self._threads = n_jobs, torch.get_num_threads()
        self._warned: set[tuple[str, type[Warning]]] = set()
        if n_jobs > 0:
            self._pool = (
                ProcessPoolExecutor(n_jobs, mp_context=get_context("fork"), initializer=_start_forked_worker)
                if start_method == "fork"
                # Unlike the standard library's, it does not run the caller's script again in each process.
                else loky.ProcessPoolExecutor(n_jobs, initializer=_start_worker)
            )

    def __next__(self) -> TabPFNRegressor | ValueError:
        if self._pool is not None:
            self._send()
        if not self._ahead:
            return _prepare(*next(self._work))
        future, job, _ = self._ahead.popleft()
        try:
            if future is not None:
                prepared, caught = pickle.loads(future.result())
                for text, category in set(caught) - self._warned:  # else once a table
                    warnings.warn(text, category, stacklevel=3)
                self._warned.update(caught)
                return prepared
        except BrokenExecutor:
            warnings.warn(
                "a process that prepares tables was killed, perhaps for want of memory; going on without",
                stacklevel=3,
            )
            self.close()
            self._work = itertools.chain([job, *(job for _, job, _ in self._ahead)], self._work)
            self._ahead.clear()
            return next(self)
        except Exception:  # what cannot be sent back or understood there, such as the caller's own classes
            pass
        return _prepare(*job)

    def _send(self) -> None:
        """Send the next jobs to the processes, up to so many ahead."""
        while len(self._ahead) < _AHEAD_TABLES and sum(cells for _, _, cells in self._ahead) < _AHEAD_CELLS:
            if (job := next(self._work, None)) is None:
                return
            try:
                future = self._pool.submit(_prepare_bytes, pickle.dumps(job))  # type: ignore[union-attr]
            except Exception:  # it cannot be pickled, or the pool is broken, which an earlier job will say
                future = None
            self._ahead.append((future, job, math.prod(_rough_size(job[1:]))))

    def threads(self) -> int:
        """How many threads are left for others: a core that is busy here would keep all of them waiting."""
        busy = any(future is not None and not future.done() for future, _, _ in reversed(self._ahead))
        return max(1, self._threads - self._n_jobs) if busy else self._threads

    def close(self) -> None:
        """Stop what still runs."""
        for future, _, _ in self._ahead:
            if future is not None:
                future.cancel()
        if self._pool is not None:
            self._pool.shutdown()
        self._pool = None


def _rough_size(table: tuple[Any, ...]) -> tuple[int, int]:
    """(rows, columns) of a raw table; zeros for one that is none, which preprocessing will say."""
    X_train, _, X_test = table
    try:
        return len(X_train) + len(X_test), np.shape(X_train)[1]
    except Exception:
        return 0, 0


# ---- Groups of one long table ----------------------------------------------------------------------


def predict_groups(
    retrofit: Retrofit,
    train: pd.DataFrame,
    test: pd.DataFrame,
    *,
    target: str,
    by: str,
    output_type: str = "mean",
    quantiles: list[float] | None = None,
    min_rows: int = 2,
    too_few: str = "error",
    report: RaggedReport | None = None,
    **settings: Any,
) -> pd.Series | pd.DataFrame:
    """Predict every group of one long table from its own train rows, like so many tables of their own.

    Args:
        retrofit: Of the variant `closed`. As a method, the retrofit itself.
        train: Group, target and features. Groups that have no rows in `test` play no part but in `pooled`.
        test: Group and the same features, in any order; a target column is left aside.
        target: The column to predict.
        by: The column that names the group (a store, a series, a patient). It is no feature.
        output_type: `mean`, `median`, `mode`, `quantiles`, or `main` for all of these.
        quantiles: As of `TabPFNRegressor.predict`.
        min_rows: How many train rows a group needs, 2 at least.
        too_few: What becomes of the test rows of groups with fewer (or no) train rows: `error` names
            these groups; `nan` leaves their predictions missing; `pooled` predicts them from the train
            rows of all groups as one table.
        report: What was done is added to it; its errors are keyed by group, `(pooled)` for the pooled one,
            and with `too_few="nan"` name the groups left out, too.
        settings: As of `predict_ragged`, `TabPFNRegressor`'s options included. With `on_error="skip"` the
            predictions of a bad group are missing. `categorical_features_indices` count the columns of
            `train` without target and group.

    Returns:
        In the order and with the index of `test`, a Series called `target`; for `quantiles` a DataFrame
        with a column for each, and for `main` one with `mean`, `median` and `mode` before them.

    Raises:
        ValueError: As of `predict_ragged`; a group that cannot be predicted; a column that is missing
            from `train` or `test`, rows without a group, a group column that is different in every row
            of `train` or text in only one of the two, or, with `too_few="error"`, groups with too few train rows.
    """
    if output_type not in ("mean", "median", "mode", "quantiles", "main"):
        raise ValueError(f"output_type is mean, median, mode, quantiles or main for groups, not {output_type!r}")
    if too_few not in ("error", "nan", "pooled"):
        raise ValueError(f"too_few is 'error', 'nan' or 'pooled', not {too_few!r}")
    if min_rows < 2:
        raise ValueError(f"TabPFN needs two train rows at least, so min_rows cannot be {min_rows}")
    if output_type == "quantiles" and quantiles is not None and not len(quantiles):
        raise ValueError("quantiles is empty")
    _check_closed(retrofit)
    features = check_groups(train, test, target=target, by=by)
    report = RaggedReport() if report is None else report
    table = read_groups(
        Table("train", train),
        Table("test", test),
        features,
        target=target,
        by=by,
        min_rows=min_rows,
        too_few=too_few,
        skip=settings.get("on_error") == "skip",
    )
    for note in table.notes:
        warnings.warn(note, stacklevel=2)
    train, test, settings = table.train, table.test, table.options(settings)
    report.errors |= table.faulty

    rows_of, wanted = _rows_by_group(train[by]), _rows_by_group(test[by])
    wanted = {group: at for group, at in wanted.items() if group not in table.faulty}
    few = [group for group in wanted if len(rows_of.get(group, ())) < min_rows]
    set_aside = set(few)
    # What each table is called, which train rows it has (None: all), and which test rows.
    plan: list[tuple[Hashable, np.ndarray | None, np.ndarray]] = [
        (group, rows_of[group], at) for group, at in wanted.items() if group not in set_aside
    ]
    if few and too_few == "pooled":
        plan.append(("(pooled)", None, np.sort(np.concatenate([wanted[group] for group in few]))))

    X_train, y_train, X_test = train[features], train[target], test[features]
    tables = [
        (X_train, y_train, X_test.iloc[at])
        if rows is None
        else (take(X_train, rows), y_train.iloc[rows], take(X_test, at))
        for _, rows, at in plan
    ]
    answers: list[Any] = []
    if tables:
        earlier, report.errors = report.errors, {}
        try:
            answers = predict_ragged(
                retrofit,
                *map(list, zip(*tables, strict=True)),
                output_type=output_type,
                quantiles=quantiles,
                report=report,
                **settings,
            )
        except TableError as error:
            raise ValueError(f"group {_plain(plan[error.index][0])!r}: {error.reason}") from error.__cause__
        finally:
            report.errors = earlier | {_plain(plan[index][0]): message for index, message in report.errors.items()}
    if too_few == "nan":
        report.errors |= {
            _plain(group): f"train rows: {len(rows_of.get(group, ()))}; at least {min_rows} are needed" for group in few
        }
    points = {"main": ["mean", "median", "mode"], "quantiles": []}.get(output_type, [target])
    levels = _QUANTILES if quantiles is None else quantiles
    columns = [*points, *(levels if output_type in ("main", "quantiles") else [])]
    values = np.full((len(test), len(columns)), np.nan)
    for (_, _, at), answer in zip(plan, answers, strict=True):
        if output_type == "main" and answer is not None:
            answer = [answer[point] for point in points] + list(answer["quantiles"])
        if answer is not None:
            values[at] = np.asarray(answer).reshape(len(columns), -1).T
    if output_type in ("main", "quantiles"):
        return pd.DataFrame(values, index=test.index, columns=columns)
    return pd.Series(values[:, 0], index=test.index, name=target)


def _rows_by_group(groups: pd.Series) -> dict[Hashable, np.ndarray]:
    """Positions of each group's rows, groups as they first appear."""
    groups = groups.reset_index(drop=True)  # its index may have the name of the column
    return groups.groupby(groups, sort=False, observed=True).indices


def _plain(group: Any) -> Any:
    """The name of a group as Python's own kind of number."""
    return group.item() if isinstance(group, np.generic) else group


def check_groups(train: pd.DataFrame, test: pd.DataFrame, *, target: str, by: str) -> list[Hashable]:
    """The features: what train has beside target and group. Raises `ValueError` as of `predict_groups`."""
    for name, column in (("by", by), ("target", target)):
        if not isinstance(column, Hashable):
            raise ValueError(f"{name} is the name of one column, not {column!r}")
    if target == by:
        raise ValueError(f"{target!r} cannot be both target and group")
    for name, frame in (("train", train), ("test", test)):
        if not isinstance(frame, pd.DataFrame):
            raise ValueError(f"{name} is a DataFrame, not a {type(frame).__name__}")
        if frame.empty:
            raise ValueError(f"{name} has no rows")
        if frame.columns.has_duplicates:
            raise ValueError(f"{name} has several columns called {frame.columns[frame.columns.duplicated()][0]!r}")
        if by not in frame.columns:
            raise ValueError(f"{name} has no group column {by!r}")
        if frame[by].isna().any():
            raise ValueError(f"{frame[by].isna().sum()} rows of {name} have no group in {by!r}")
        if not frame[by].map(lambda group: isinstance(group, Hashable)).all():
            raise ValueError(f"{by!r} of {name} holds values that cannot name a group, such as {frame[by].iloc[0]!r}")
    if target not in train.columns:
        raise ValueError(f"train has no target column {target!r}")
    if len(train) > 1 and train[by].is_unique:
        raise ValueError(f"every row of train is a group of its own: {by!r} names rows, not groups")
    text = [{isinstance(group, str) for group in frame[by].unique()} for frame in (train, test)]
    if text in ([{True}, {False}], [{False}, {True}]):
        kinds = f"{train[by].dtype} in train and {test[by].dtype} in test"
        raise ValueError(f"no group of test is in train: {by!r} is {kinds}")
    features = [column for column in train.columns if column not in (target, by)]
    if not features:
        raise ValueError(f"train has no columns beside {target!r} and {by!r} to predict from")
    others = set(test.columns) - {target, by}
    if missing := [column for column in features if column not in others]:
        raise ValueError(f"test lacks columns that train has: {missing}")
    if extra := sorted(others - set(features), key=str):
        raise ValueError(f"test has columns that train lacks: {extra}")
    return features
