"""Tables on their way to the model: each fitted by TabPFN's own code."""

from __future__ import annotations

import functools
import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import current_process
from typing import Any, NamedTuple

import joblib
import numpy as np
import sklearn
import torch
from tabpfn import TabPFNRegressor

from .. import tabpfn_api
from ..workers import call_each, start_method
from .sharing import ensemble_members

# How many tables repay the start of processes: forked ones start at once, joblib's first import torch for some seconds.
_TABLES_FOR_PROCESSES = {"fork": 8, "loky": 200}

# How many tables are prepared ahead of the forward passes, and of how many cells (about 0.3 GB in 8 members).
_AHEAD_TABLES, _AHEAD_CELLS = 256, 2**22


class Job(NamedTuple):
    """A table, and the seed of the `TabPFNRegressor` that is fitted on it."""

    seed: int
    X_train: Any
    y_train: Any
    X_test: Any


@dataclass
class Member:
    """A member as it enters the model, and how its logits are read.

    Attributes:
        x_RC: Its preprocessed rows, the train rows first. An array, as is the next (a tensor only in bfloat16, which
            numpy lacks): arrays go to another process in a fraction of the time.
        y_N: The targets of the train rows, as the model sees them.
        translation: Of its logits; one object for all members of a table that have the same.
        table: Whose member it is.
    """

    x_RC: Any
    y_N: Any
    translation: tabpfn_api.Translation | None
    table: int = -1

    @property
    def size(self) -> tuple[int, int, int]:
        """Train rows, test rows and columns."""
        return len(self.y_N), len(self.x_RC) - len(self.y_N), self.x_RC.shape[1]


class Prepared(NamedTuple):
    """What the forward passes and the decoding need of a table.

    Attributes:
        members: Its ensemble members; none for a constant target.
        target_moments: Mean and deviation of the train rows' targets.
        constant: The regressor of a constant target, which predicts without a model.
    """

    members: list[Member]
    target_moments: tuple[float, float] = (0.0, 1.0)
    constant: TabPFNRegressor | None = None

    def numbers(self, buckets: int) -> int:
        """Of the model's input, and of the sum of its outputs."""
        inputs = sum(math.prod(member.x_RC.shape) for member in self.members)
        return inputs + (self.members[0].size[1] * buckets if self.members else 0)


class InputRecorder:
    """Takes the engine's place in a fitted regressor, and records what would go into the model.

    Attributes:
        members: The ensemble members, which hold their preprocessed train rows.
        X_tests: The test rows as each member transforms them.
    """

    def __init__(self, members: list[Any]) -> None:
        self.members = members
        self.X_tests: list[Any] = []

    def iter_outputs(self, X: Any, **_: Any) -> Iterator[Any]:
        """Record the test rows; there are no outputs."""
        self.X_tests = [member.transform_X_test(X) for member in self.members]
        return iter(())

    def to(self, *_: Any) -> None:
        """There is no model to move."""


def prepare(job: Job, options: Mapping[str, Any], dtype: torch.dtype | None) -> Prepared | ValueError:
    """A table as the model takes it, by the steps of TabPFN's engines; or what was wrong with it.

    All that needs the table alone is done here, on the CPU: also the steps that TabPFN leaves to the device of the
    model, and the borders that a transformed target's logits are on.

    Args:
        job: The table.
        options: Of its `TabPFNRegressor`; in place of the model they hold a stand-in.
        dtype: What the model was cast to; None for float32.
    """
    try:
        # Arrays, as in `fit` and `predict`. TabPFN's own code sets all parameters: checking them takes a tenth of the
        # time.
        with sklearn.config_context(transform_output="default", skip_parameter_validation=True):
            return _prepared(fitted(job, options), dtype)
    except Exception as error:
        # As a plain exception: not all survive the way back from a process.
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        return ValueError(f"{kind}{error}").with_traceback(error.__traceback__)


def fitted(job: Job, options: Mapping[str, Any]) -> TabPFNRegressor:
    """A regressor fitted on a table, its engine an `InputRecorder` that has seen the test rows (or a constant's)."""
    # An engine of this mode has not preprocessed yet.
    changed = {"random_state": job.seed, "fit_mode": "low_memory"}
    regressor = TabPFNRegressor(**{**options, **changed}).fit(job.X_train, job.y_train)
    if regressor.is_constant_target_:
        regressor.predict(job.X_test)  # only to see whether it can be
        return regressor
    engine = regressor.executor_
    regressor.executor_ = InputRecorder(
        ensemble_members(regressor.ensemble_preprocessor_, engine.X_train, engine.y_train)
    )
    # The way of `predict` to the engine, without its decoding.
    regressor.get_embeddings(job.X_test)
    return regressor


def _prepared(regressor: TabPFNRegressor, dtype: torch.dtype | None) -> Prepared:
    if regressor.is_constant_target_:
        return Prepared([], constant=regressor)
    recorder, members = regressor.executor_, []
    translations: dict[int, tabpfn_api.Translation | None] = {}
    for member, X_test in zip(recorder.members, recorder.X_tests, strict=True):
        x_R1C, y_N = tabpfn_api.prepare_member(member, X_test, torch.device("cpu"), dtype)
        alike = id(member.config.target_transform)
        if alike not in translations:
            translations[alike] = tabpfn_api.translation_of(regressor, member.config)
        members.append(Member(_as_array(x_R1C.squeeze(1)), _as_array(y_N), translations[alike]))
    return Prepared(members, (regressor.y_train_mean_, regressor.y_train_std_))


def _as_array(x: torch.Tensor) -> Any:
    return x if x.dtype == torch.bfloat16 else x.numpy()


def prepared_ahead(
    jobs: Sequence[Job], options: Mapping[str, Any], dtype: torch.dtype | None, n_jobs: int
) -> Generator[tuple[int, Prepared | ValueError], None, None]:
    """`prepare` each job, in processes that run ahead of who takes what they have prepared, beside a GPU.

    Yields:
        Positions of jobs, as they come, with what was made of them. To be closed.
    """
    cells = max((math.prod(rough_size(job)) for job in jobs), default=0)
    ahead = max(n_jobs, min(_AHEAD_TABLES, _AHEAD_CELLS // max(1, cells)))
    run = functools.partial(prepare, options=options, dtype=dtype)
    return call_each(run, jobs, n_jobs, start=start_method(beside_gpu=True), ahead=ahead)


def default_n_jobs(tables: int, device: torch.device) -> int:
    """Processes for so many tables: as many as torch has threads, or beside a GPU all cores but one; or none."""
    on_cpu = device.type == "cpu"
    # A daemon may not start processes.
    if tables < _TABLES_FOR_PROCESSES[start_method(beside_gpu=not on_cpu)] or current_process().daemon:
        return 0
    processes = torch.get_num_threads() if on_cpu else joblib.cpu_count() - 1
    return processes if processes > 1 or not on_cpu else 0


def rough_size(job: Job) -> tuple[int, int]:
    """(rows, columns) of a raw table; zeros for one that is none, which preprocessing will say."""
    try:
        return len(job.X_train) + len(job.X_test), np.shape(job.X_train)[1]
    except Exception:
        return 0, 0
