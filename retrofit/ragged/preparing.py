"""Tables on their way to the model: each fitted by TabPFN's own code, ahead of the passes, in processes."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import math
import os
import pickle
import sys
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import BrokenExecutor, Executor, Future, ProcessPoolExecutor
from multiprocessing import current_process, get_context, parent_process
from typing import Any, NamedTuple

import joblib
import numpy as np
import sklearn
import threadpoolctl
import torch
from joblib.externals import loky
from tabpfn import TabPFNRegressor

# Preprocessing is mostly Python, so it runs in processes. Forked ones start at once; elsewhere, and beside a GPU,
# whose state does not survive a fork, joblib's first import torch for some seconds. How many tables repay that:
_TABLES_FOR_PROCESSES = {"fork": 8, "loky": 200}

# How many tables are prepared ahead of the forward passes, and of how many cells (about 0.3 GB in 8 members).
_AHEAD_TABLES, _AHEAD_CELLS = 256, 2**22


class Job(NamedTuple):
    """A table, and the options of the `TabPFNRegressor` that is fitted on it."""

    options: dict[str, Any]
    X_train: Any
    y_train: Any
    X_test: Any


class InputRecorder:
    """Takes the engine's place in a fitted regressor, and records what would go into the model.

    Attributes:
        members: The engine's ensemble members, which hold their preprocessed train rows.
        X_tests: The test rows as each member transforms them.
    """

    def __init__(self, engine: Any) -> None:
        self.members = engine.ensemble_members
        self.X_tests: list[Any] = []

    def numbers(self, buckets: int) -> int:
        """Of the model's input, and of the sum of its outputs."""
        inputs = [*(member.X_train for member in self.members), *self.X_tests]
        return sum(math.prod(X.shape) for X in inputs) + len(self.X_tests[0]) * buckets

    def iter_outputs(self, X: Any, **_: Any) -> Iterator[Any]:
        """Record the test rows; there are no outputs."""
        self.X_tests = [member.transform_X_test(X) for member in self.members]
        return iter(())

    def to(self, *_: Any) -> None:
        """There is no model to move."""


def prepare(job: Job) -> TabPFNRegressor | ValueError:
    """A regressor fitted on a table, its engine an `InputRecorder` (or a constant target's); or what was wrong.

    On the CPU, and without the model, which the options hold a stand-in of.
    """
    try:
        regressor = TabPFNRegressor(**job.options).fit(job.X_train, job.y_train)
        if regressor.is_constant_target_:
            regressor.predict(job.X_test)  # only to see whether it can be
            return regressor
        # The criterion is the options' own object, and `to` would move all tables' together.
        regressor.znorm_space_bardist_ = copy.deepcopy(regressor.znorm_space_bardist_)
        regressor.executor_ = recorder = InputRecorder(regressor.executor_)
        with sklearn.config_context(transform_output="default"):
            # The way of `predict` to the engine, without its decoding.
            regressor.get_embeddings(job.X_test)
    except Exception as error:
        # As a plain exception: not all survive the way back from a process.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return ValueError(f"{kind}{error}").with_traceback(error.__traceback__)
    del regressor.ensemble_preprocessor_
    recorder.members = [dataclasses.replace(member, cpu_preprocessor=None) for member in recorder.members]
    return regressor


def _prepare_bytes(job: bytes) -> bytes:
    """`prepare` in a worker process, and what it warned of.

    Pickled on both ways: a pool would send each tensor as an open file, of which a process has few.
    """
    with warnings.catch_warnings(record=True) as caught:
        prepared = prepare(pickle.loads(job))
    return pickle.dumps((prepared, [(str(warning.message), warning.category) for warning in caught]))


class Preparation:
    """Jobs prepared in the given order, ahead of who takes them, in processes of one thread each.

    To be closed: it holds processes, where there are any.
    """

    def __init__(self, jobs: Iterable[Job], n_jobs: int, start_method: str) -> None:
        self._jobs = iter(jobs)
        self._pool: Executor | None = None
        # What is being prepared: its future, where it could be sent to a process; the job; its cells.
        self._ahead: deque[tuple[Future | None, Job, int]] = deque()
        self._n_jobs, self._threads = n_jobs, torch.get_num_threads()
        self._warned: set[tuple[str, type[Warning]]] = set()
        if n_jobs > 0:
            self._pool = (
                ProcessPoolExecutor(n_jobs, mp_context=get_context("fork"), initializer=start_forked_worker)
                if start_method == "fork"
                # Unlike the standard library's, it does not run the caller's script again in each process.
                else loky.ProcessPoolExecutor(n_jobs, initializer=_start_worker)
            )

    def take(self) -> TabPFNRegressor | ValueError:
        """The next job's regressor, or what was wrong with its table. Raises `StopIteration` behind the last."""
        if self._pool is not None:
            self._send()
        if not self._ahead:
            return prepare(next(self._jobs))
        future, job, _ = self._ahead.popleft()
        try:
            if future is not None:
                prepared, caught = pickle.loads(future.result())
                self._warn_once(caught)
                return prepared
        except BrokenExecutor:
            warnings.warn(
                "a process that prepares tables was killed, perhaps for want of memory; going on without",
                stacklevel=2,
            )
            self.close()
            self._jobs = itertools.chain([job for _, job, _ in self._ahead], self._jobs)
            self._ahead = deque()
        except Exception:  # what cannot be sent back or understood there, such as the caller's own classes
            pass
        return prepare(job)

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

    def _send(self) -> None:
        """Send the next jobs to the processes, up to so many ahead."""
        while len(self._ahead) < _AHEAD_TABLES and sum(cells for _, _, cells in self._ahead) < _AHEAD_CELLS:
            if (job := next(self._jobs, None)) is None:
                return
            try:
                future = self._pool.submit(_prepare_bytes, pickle.dumps(job))  # type: ignore[union-attr]
            except Exception:  # it cannot be pickled, or the pool is broken, which an earlier job will say
                future = None
            self._ahead.append((future, job, math.prod(rough_size(job))))

    def _warn_once(self, caught: list[tuple[str, type[Warning]]]) -> None:
        """Repeat what a process warned of, but not once a table."""
        for warning in caught:
            if warning not in self._warned:
                self._warned.add(warning)
                warnings.warn(*warning, stacklevel=3)


def start_method(device: torch.device) -> str:
    """How processes may start beside forward passes on a device."""
    return "fork" if sys.platform == "linux" and device.type == "cpu" else "loky"


def default_n_jobs(tables: int, device: torch.device) -> int:
    """Processes for so many tables: half the cores beside passes on the CPU, all but one beside a GPU, or none."""
    # A daemon may not start processes.
    if tables < _TABLES_FOR_PROCESSES[start_method(device)] or current_process().daemon:
        return 0
    cores = joblib.cpu_count()
    return cores // 2 if device.type == "cpu" else cores - 1


def rough_size(job: Job) -> tuple[int, int]:
    """(rows, columns) of a raw table; zeros for one that is none, which preprocessing will say."""
    try:
        return len(job.X_train) + len(job.X_test), np.shape(job.X_train)[1]
    except Exception:
        return 0, 0


def start_forked_worker() -> None:
    """What a forked process begins with."""
    _start_worker()
    # A process that is killed cannot stop its workers, and they would wait for work for ever.
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _start_worker() -> None:
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)


def _end_with_parent() -> None:
    parent_process().join()  # type: ignore[union-attr]
    os._exit(1)
