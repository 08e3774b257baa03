"""Tables on their way to the model: each fitted by TabPFN's own code."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import current_process
from typing import Any, NamedTuple

import joblib
import numpy as np
import sklearn
import torch
from tabpfn import TabPFNRegressor

from ..workers import call_each, start_method
from .sharing import ensemble_members

# How many tables repay the start of processes: forked ones start at once, joblib's first import torch for some seconds.
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
        members: The ensemble members, which hold their preprocessed train rows.
        X_tests: The test rows as each member transforms them.
    """

    def __init__(self, members: list[Any]) -> None:
        self.members = members
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
    # Arrays, as in `fit` and `predict`. TabPFN's own code sets all parameters: checking them takes a tenth of the time.
    with sklearn.config_context(transform_output="default", skip_parameter_validation=True):
        return _prepare(job)


def _prepare(job: Job) -> TabPFNRegressor | ValueError:
    try:
        # An engine of this mode has not preprocessed yet.
        regressor = TabPFNRegressor(**{**job.options, "fit_mode": "low_memory"}).fit(job.X_train, job.y_train)
        if regressor.is_constant_target_:
            regressor.predict(job.X_test)  # only to see whether it can be
            return regressor
        # The criterion is the options' own object, and `to` would move all tables' together.
        regressor.znorm_space_bardist_ = copy.deepcopy(regressor.znorm_space_bardist_)
        engine = regressor.executor_
        members = ensemble_members(regressor.ensemble_preprocessor_, engine.X_train, engine.y_train)
        regressor.executor_ = recorder = InputRecorder(members)
        # The way of `predict` to the engine, without its decoding.
        regressor.get_embeddings(job.X_test)
    except Exception as error:
        # As a plain exception: not all survive the way back from a process.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return ValueError(f"{kind}{error}").with_traceback(error.__traceback__)
    del regressor.ensemble_preprocessor_
    recorder.members = [dataclasses.replace(member, cpu_preprocessor=None) for member in recorder.members]
    return regressor


def prepared_ahead(jobs: Sequence[Job], n_jobs: int) -> Generator[tuple[int, TabPFNRegressor | ValueError], None, None]:
    """`prepare` each job, in processes that run ahead of who takes what they have prepared, beside a GPU.

    Yields:
        Positions of jobs, as they come, with their regressors or what was wrong with their tables. To be closed.
    """
    cells = max((math.prod(rough_size(job)) for job in jobs), default=0)
    ahead = max(n_jobs, min(_AHEAD_TABLES, _AHEAD_CELLS // max(1, cells)))
    return call_each(prepare, jobs, n_jobs, start="loky", ahead=ahead)  # a GPU's state does not survive a fork


def default_n_jobs(tables: int, device: torch.device) -> int:
    """Processes for so many tables: as many as torch has threads, or beside a GPU all cores but one; or none."""
    on_cpu = device.type == "cpu"
    # A daemon may not start processes.
    if tables < _TABLES_FOR_PROCESSES[start_method() if on_cpu else "loky"] or current_process().daemon:
        return 0
    processes = torch.get_num_threads() if on_cpu else joblib.cpu_count() - 1
    return processes if processes > 1 or not on_cpu else 0


def rough_size(job: Job) -> tuple[int, int]:
    """(rows, columns) of a raw table; zeros for one that is none, which preprocessing will say."""
    try:
        return len(job.X_train) + len(job.X_test), np.shape(job.X_train)[1]
    except Exception:
        return 0, 0
