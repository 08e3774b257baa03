"""Host and variants on matched cases, each finished case kept on disk.

A case is one train/test split of a dataset, decided by a seed. Host and variants get the same
case, the same seed and the same precision, so that what differs between them is the patch. The
control `identity` runs the code of `full-o` with gates too small to matter: what it moves is the
precision's noise floor, and shifts of the other variants that are no larger mean nothing.

A run lives in a folder; see `runs`. Running it again reuses what is there.
"""

from __future__ import annotations

import gc
import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn.base import ModelSpecs

from ..calibration.calibration import Calibration
from ..calibration.cases import Case
from ..calibration.predicting import PRECISIONS, predict_case, rmse, train_mean_rmse
from ..calibration.settings import (
    DELTA,
    IDENTITY,
    MAX_ROWS,
    MOST_SEEDS,
    PAPER_VARIANTS,
    PRECISION,
    QUANTILE,
    SEED,
    SEEDS,
    TABLES,
    check_count,
    check_delta,
)
from ..calibration.variants import VARIANTS
from ..retrofit import tabpfn_api
from ..retrofit.api import Retrofit, RetrofitError, calibrate, load, patch
from ..retrofit.check import compare, synthetic_cases
from ..retrofit.files import replacing
from ..retrofit.hosts import Host
from ..retrofit.options import without_advice
from .datasets import load_dataset, make_case, split_spec
from .memory import peak_mb, reset_peak
from .runs import CaseResult, Run, host_figures

IDENTITY_DELTA = 1e-6


@dataclass(frozen=True)
class Plan:
    """What is compared, and on what.

    Attributes:
        host: The host; loaded once, never modified.
        datasets: Dataset specs.
        seeds: Cases per dataset, with the seeds 0 to `seeds - 1`.
        variants: Any of `VARIANTS`, calibrated for this run; `identity` always runs.
        given: A retrofit made before, to be evaluated under its variant's name.
        delta: As of `oretrofit.patch`, for the variants that are calibrated here.
        quantile: The same.
        tables: Synthetic tables to calibrate on.
        max_rows: Most train rows of a case; it has at most half as many test rows.
        precision: One of `PRECISIONS`.
        device: `cpu` or `cuda`.
        estimator: More options of `TabPFNRegressor`, such as `n_estimators`, for host and variants (not for the
            calibration).

    Raises:
        ValueError: An unknown variant or precision, a number out of range, a variant that is both
            calibrated and given, or a precision that the device cannot do.
    """

    host: Host
    datasets: list[str]
    seeds: int = SEEDS
    variants: tuple[str, ...] = PAPER_VARIANTS
    given: Retrofit | None = None
    delta: float = DELTA
    quantile: float = QUANTILE
    tables: int = TABLES
    max_rows: int = MAX_ROWS
    precision: str = PRECISION
    device: str = "cpu"
    estimator: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check the values."""
        for variant in self.variants:
            if variant not in (IDENTITY, *VARIANTS):
                raise ValueError(f"unknown variant {variant!r}; there are: {', '.join([IDENTITY, *VARIANTS])}")
            if self.given is not None and variant == self.given.variant:
                raise ValueError(f"the given retrofit is {variant} too; leave that variant out")
        check_count("seeds", self.seeds, most=MOST_SEEDS)
        check_count("max_rows", self.max_rows, least=2)
        check_count("tables", self.tables)
        check_delta(self.delta, self.quantile)
        self.precision_used()

    def deltas(self) -> dict[str, float]:
        """The variants to calibrate, the control first, each with its delta."""
        others = [variant for variant in self.variants if variant != IDENTITY]
        return {IDENTITY: IDENTITY_DELTA, **dict.fromkeys(others, self.delta)}

    def precision_used(self) -> str:
        """The precision, where it is `auto` the one that TabPFN picks on this device.

        Raises `ValueError` for an unknown precision, or autocast where the device cannot do it.
        """
        if self.precision not in PRECISIONS:
            raise ValueError(f"unknown precision {self.precision!r}; there are: {', '.join(PRECISIONS)}")
        if self.precision not in ("auto", "autocast"):
            return self.precision
        if tabpfn_api.infer_autocast_inference_mode([torch.device(self.device)], enable=None):
            return "autocast"
        if self.precision == "autocast":
            raise ValueError(
                f"TabPFN has no autocast on this device ({self.device}): a CPU needs hardware bfloat16 (AVX512-BF16 "
                "or AMX); use the precision float32 or auto"
            )
        return "float32"

    def settings(self) -> dict[str, Any]:
        """Everything that decides the results, as JSON."""
        calibration = {"quantile": self.quantile, "tables": self.tables, "seed": SEED}
        variants: dict[str, Any] = {
            label: {"patch": "full-o" if label == IDENTITY else label, "delta": delta, **calibration}
            for label, delta in self.deltas().items()
        }
        if self.given is not None:
            taus = json.dumps([(site.name, site.tau) for site in self.given.sites])
            variants[self.given.variant] = {
                "patch": self.given.variant,
                "taus_sha256": hashlib.sha256(taus.encode()).hexdigest(),
                "calibration": self.given.settings,
            }
        settings = {
            "host": {"name": self.host.name, "sha256": self.host.sha256},
            "variants": variants,
            "datasets": self.datasets,
            "files_sha256": _files_sha256(self.datasets),
            "seeds": list(range(self.seeds)),
            "max_train_rows": self.max_rows,
            "max_test_rows": self.max_rows // 2,
            "precision": self.precision,
            "precision_used": self.precision_used(),
            "device": self.device,
            "gpu": torch.cuda.get_device_name() if self.device == "cuda" else None,
            "versions": {name: installed_version(name) for name in ("oretrofit", "tabpfn", "torch", "scikit-learn")},
        }
        if self.estimator:
            settings["estimator"] = dict(self.estimator)
        return json.loads(json.dumps(settings))


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


def calibrate_run(plan: Plan, run: Run, on_table: Callable[[], None] | None = None) -> dict[str, Retrofit]:
    """The plan's retrofits by label, read from the run's folder, or calibrated and kept there.

    All of them come from one measurement of the host's carriers. Raises `RetrofitError` for a file
    in the folder that cannot be read.
    """
    retrofits: dict[str, Retrofit] = {}
    calibration: Calibration | None = None
    for label, delta in plan.deltas().items():
        file = run.retrofit_file(label)
        if file.exists():
            try:
                retrofits[label] = load(file, plan.host)
            except RetrofitError as error:
                raise RetrofitError(f"{error}; remove the file, and it is calibrated again") from error
            continue
        if calibration is None:
            calibration = calibrate(plan.host, tables=plan.tables, device=plan.device, on_table=on_table)
        variant = "full-o" if label == IDENTITY else label
        retrofits[label] = patch(plan.host, variant, delta=delta, quantile=plan.quantile, calibration=calibration)
        with replacing(file) as part:
            retrofits[label].save(part)
    if plan.given is not None:
        retrofits[plan.given.variant] = plan.given
    return retrofits


def evaluate(
    plan: Plan,
    run: Run,
    *,
    on_table: Callable[[], None] | None = None,
    on_case: Callable[[CaseResult], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> tuple[list[CaseResult], list[Failure]]:
    """Run what of the plan is not in the run's folder yet, and write each case there at once.

    A case that raises is a `Failure`, and the others go on; it is tried again by the next run. Where only
    some of a case's variants are missing, the host is run again beside them, for a fair comparison of time.

    Args:
        plan: What to run.
        run: The plan's folder, from `runs.open_run`.
        on_table: Called after each calibration table, if variants have to be calibrated.
        on_case: Called with each case that this call finishes.
        on_failure: Called with each case that fails.

    Returns:
        All cases, in the plan's order, and the failures.

    Raises:
        OSError: A finished case, or a retrofit, could not be written.
    """
    done, missing, labels = run.finished(), run.missing(), list(run.settings["variants"])
    retrofits = calibrate_run(plan, run, on_table) if missing else {}
    if missing:
        _warm_up(plan, retrofits)
    results, failures = [], []
    dataset = None
    for name, seed in ((name, seed) for name in plan.datasets for seed in range(plan.seeds)):
        records = done.get((name, seed), {})
        if (name, seed) in missing:
            try:
                if dataset is None or dataset.name != name:
                    dataset = load_dataset(name)
                case = make_case(dataset, seed, plan.max_rows, plan.max_rows // 2)
                found = CaseResult(name, seed, _run_case(plan, retrofits, case, records))
            except Exception as error:  # whatever TabPFN or torch raise; the other cases are still worth having
                text = str(error).strip().splitlines() or [""]
                reason = without_advice(f"{type(error).__name__}: {text[0]}")
                failures.append(Failure(name, seed, reason, _may_pass(error)))
                if on_failure is not None:
                    on_failure(failures[-1])
                continue
            records = records | {record["variant"]: record for record in run.append(found).variants}
        result = CaseResult(name, seed, [records[label] for label in labels])
        results.append(result)
        if (name, seed) in missing and on_case is not None:
            on_case(result)
    return results, failures


def case_rows(cases: Iterable[CaseResult]) -> pd.DataFrame:
    """One row a case and variant.

    Columns: `dataset`, `seed`, `variant`, `n_train`, `n_test`, `n_columns`; of host and variant
    `rmse`, `nll` (mean negative log-likelihood of the test targets), `seconds` (fit and predict) and
    `peak_mb`; `rmse_delta_pct`; `max_abs_diff_sd`, the largest change of a predicted mean in
    standard deviations of the training target; `precision` and `device`; `train_mean_rmse`, of
    predicting the train rows' mean (missing in records of earlier versions); `key`, a hash of what
    decides the row. `peak_mb` is in MiB: on a GPU what torch allocated, on Linux the resident size of
    the whole process, elsewhere unknown.
    """
    return pd.DataFrame([record for case in cases for record in case.variants])


@dataclass(frozen=True)
class _Answer:
    mean: np.ndarray
    rmse: float
    nll: float
    seconds: float
    peak_mb: float | None


def _run_case(
    plan: Plan, retrofits: Mapping[str, Retrofit], case: Case, earlier: Mapping[str, dict[str, Any]]
) -> list[dict[str, Any]]:
    """The records of a case's variants, without those that are there already."""
    host = _answer(plan.host.specs, case, plan)
    if any(host_figures(record) != (host.rmse, host.nll) for record in earlier.values()):
        earlier = {}  # of a machine that rounds otherwise: all records of a case are from one
    return [
        _record(label, case, plan, host, _answer(retrofit.specs, case, plan))
        for label, retrofit in retrofits.items()
        if label not in earlier
    ]


def _record(label: str, case: Case, plan: Plan, host: _Answer, variant: _Answer) -> dict[str, Any]:
    record = {
        "dataset": case.dataset,
        "seed": case.seed,
        "variant": label,
        "n_train": len(case.y_train),
        "n_test": len(case.y_test),
        "n_columns": case.X_train.shape[1],
        **asdict(compare(case, host.mean, variant.mean)),
        "host_nll": host.nll,
        "variant_nll": variant.nll,
        "host_seconds": host.seconds,
        "variant_seconds": variant.seconds,
        "host_peak_mb": host.peak_mb,
        "variant_peak_mb": variant.peak_mb,
        "precision": plan.precision,
        "device": plan.device,
        "train_mean_rmse": train_mean_rmse(case),
    }
    for name, value in record.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} of {label} is not finite ({value}); the target may be too large or too small")
    return record


def _answer(specs: ModelSpecs, case: Case, plan: Plan) -> _Answer:
    gc.collect()  # what earlier runs left would count into this one's peak
    measuring = reset_peak(plan.device)
    start = time.perf_counter()
    output = predict_case(
        specs,
        case,
        output_type="full",
        device=plan.device,
        inference_precision=PRECISIONS[plan.precision],
        **plan.estimator,
    )
    seconds = time.perf_counter() - start
    peak = peak_mb(plan.device) if measuring else None

    mean = np.asarray(output["mean"], dtype=np.float64)
    y_test = torch.as_tensor(case.y_test, dtype=torch.float64)
    nll = output["criterion"].cpu()(output["logits"].cpu().double(), y_test).mean().item()
    error = rmse(mean, case.y_test)
    if not np.isfinite([error, nll]).all():
        raise ValueError(f"predictions are not finite (RMSE {error}, negative log-likelihood {nll})")
    return _Answer(mean, error, nll, seconds, peak)


def _warm_up(plan: Plan, retrofits: Mapping[str, Retrofit]) -> None:
    """Run a small table once: first runs load kernels, which would count as the first case's time."""
    (case,) = synthetic_cases(1, 0, max_rows=30, max_columns=4)
    for specs in (plan.host.specs, *(retrofit.specs for retrofit in retrofits.values())):
        _answer(specs, case, plan)


def _may_pass(error: BaseException | None) -> bool:
    """Whether a case that failed so might run another time, to go by the error and its causes."""
    while error is not None:
        if isinstance(error, (OSError, MemoryError)) or type(error).__module__.startswith("openml."):
            return True
        if "out of memory" in str(error).lower() or "allocate memory" in str(error):  # torch's and TabPFN's
            return True
        error = error.__cause__
    return False


def _files_sha256(specs: Iterable[str]) -> dict[str, str]:
    """Of the files among the datasets, whose content may change under the same name; of a folder's files, all."""
    return {spec: _sha256(found[0]) for spec in specs if (found := split_spec(spec))}


def _sha256(path: Path) -> str:
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    content = "\n".join(f"{file.relative_to(path)} {_sha256(file)}" for file in files)
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()
