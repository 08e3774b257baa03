"""One case from its name to its records, here or in a process that the runner was sent to."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np
from tabpfn.base import ModelSpecs

from ..calibration.cases import Case
from ..calibration.predicting import PRECISIONS, predict_case, rmse, train_mean_rmse
from ..retrofit import tabpfn_api
from ..retrofit.api import Retrofit
from ..retrofit.check import compare, synthetic_cases
from ..retrofit.hosts import Host
from ..retrofit.options import without_advice
from .dataset_error import Unavailable
from .datasets import Dataset, load_dataset, make_case
from .distribution import coverage, score
from .memory import peak_mb, reset_peak
from .predictions import LEVELS, Answer, make_arrays
from .runs import CaseResult, host_figures

# What a record holds of host and variant, beside the RMSE.
_FIGURES = ("nll", "crps", "coverage_80", "coverage_95", "seconds", "peak_mb")


class CaseJob(NamedTuple):
    """A case to be run, with the records that it has already, by variant."""

    dataset: str
    seed: int
    earlier: Mapping[str, dict[str, Any]]


@dataclass(frozen=True)
class Failure:
    """A case that could not be run.

    Attributes:
        dataset: Its dataset.
        seed: Its seed.
        reason: Why, in one line.
        may_pass: Whether it might run another time: there was no memory, no network or no file.
    """

    dataset: str
    seed: int
    reason: str
    may_pass: bool = False


@dataclass
class CaseRunner:
    """Runs one case after another: all that it needs is in it, and it can be pickled.

    Attributes:
        host: The host.
        retrofits: Its retrofits, by label.
        max_rows: As of `evaluate.Plan`, as are the next three.
        precision: The same.
        device: The same.
        estimator: The same.
        workers: How many cases run side by side.
    """

    host: Host
    retrofits: Mapping[str, Retrofit]
    max_rows: int
    precision: str
    device: str
    estimator: Mapping[str, Any]
    workers: int = 1
    _dataset: Dataset | None = field(default=None, init=False, repr=False)

    def __call__(self, job: CaseJob) -> CaseResult | Failure:
        """The records that a case lacks, or why there are none."""
        try:
            dataset = self._dataset
            if dataset is None or dataset.name != job.dataset:
                dataset = self._dataset = load_dataset(job.dataset)
            case = make_case(dataset, job.seed, self.max_rows, self.max_rows // 2)
            return self._result(case, job.earlier)
        except Exception as error:  # whatever TabPFN or torch raise; the other cases are still worth having
            text = str(error).strip().splitlines() or [""]
            reason = without_advice(f"{type(error).__name__}: {text[0]}")
            return Failure(job.dataset, job.seed, reason, _may_pass(error))

    def warm_up(self, on_model: Callable[[], None] | None = None) -> None:
        """Run a small table with each model: first runs load kernels, which would count as the first case's time."""
        (case,) = synthetic_cases(1, 0, max_rows=30, max_columns=4)
        models: list[Host | Retrofit] = [self.host, *self.retrofits.values()]
        for made in models:
            self._answer(made.specs, case)
            if on_model is not None:
                on_model()

    def _result(self, case: Case, earlier: Mapping[str, dict[str, Any]]) -> CaseResult:
        host = self._answer(self.host.specs, case)
        if any(host_figures(record) != (host.rmse, host.nll) for record in earlier.values()):
            earlier = {}  # of a machine that rounds otherwise: all records of a case are from one
        records, predictions = [], {}
        for label, retrofit in self.retrofits.items():
            if label not in earlier:
                variant = self._answer(retrofit.specs, case)
                records.append(self._record(label, case, host, variant))
                predictions[label] = make_arrays(case.y_test, host.kept, variant.kept)
        return CaseResult(case.dataset, case.seed, records, predictions)

    def _record(self, label: str, case: Case, host: _Answer, variant: _Answer) -> dict[str, Any]:
        record = {
            "dataset": case.dataset,
            "seed": case.seed,
            "variant": label,
            "n_train": len(case.y_train),
            "n_test": len(case.y_test),
            "n_columns": case.X_train.shape[1],
            **asdict(compare(case, host.mean, variant.mean)),
            **{f"host_{name}": getattr(host, name) for name in _FIGURES},
            **{f"variant_{name}": getattr(variant, name) for name in _FIGURES},
            "precision": self.precision,
            "device": self.device,
            "workers": self.workers,
            "train_mean_rmse": train_mean_rmse(case),
            "target_sd": float(case.y_test.std()),
        }
        for name, value in record.items():
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError(f"{name} of {label} is not finite ({value}); the target may be too large or too small")
        return record

    def _answer(self, specs: ModelSpecs, case: Case) -> _Answer:
        tabpfn_api.show_nan(specs.model)

        def predict() -> Any:
            options = {"device": self.device, "inference_precision": PRECISIONS[self.precision], **self.estimator}
            return predict_case(specs, case, output_type="full", **options)

        if self.device == "cuda":
            predict()  # what a shape costs at first is no part of the time, and on a GPU each has such costs
        gc.collect()  # what earlier runs left would count into this one's peak
        measuring = reset_peak(self.device)
        start = time.perf_counter()
        output = predict()
        seconds = time.perf_counter() - start
        peak = peak_mb(self.device) if measuring else None

        mean = np.asarray(output["mean"], dtype=np.float64)
        scores = score(output["criterion"], output["logits"], case.y_test, LEVELS)
        error = rmse(mean, case.y_test)
        if not np.isfinite([error, scores.nll, scores.crps]).all():
            raise ValueError(
                f"predictions are not finite (RMSE {error}, negative log-likelihood {scores.nll}, CRPS {scores.crps})"
            )
        in_80, in_95 = (coverage(case.y_test, scores.quantiles_NL, LEVELS, share) for share in (0.80, 0.95))
        return _Answer(mean, scores.quantiles_NL, error, scores.nll, scores.crps, in_80, in_95, seconds, peak)


@dataclass(frozen=True)
class _Answer:
    mean: np.ndarray
    quantiles: np.ndarray
    rmse: float
    nll: float
    crps: float
    coverage_80: float
    coverage_95: float
    seconds: float
    peak_mb: float | None

    @property
    def kept(self) -> Answer:
        return Answer(self.mean, self.quantiles)


def _may_pass(error: BaseException | None) -> bool:
    """Whether a case that failed so might run another time, to go by the error and its causes."""
    while error is not None:
        if isinstance(error, (OSError, MemoryError, Unavailable)) or type(error).__module__.startswith("openml."):
            return True
        if "out of memory" in str(error).lower() or "allocate memory" in str(error):  # torch's and TabPFN's
            return True
        error = error.__cause__
    return False
