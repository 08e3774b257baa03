"""Host and variants on matched cases, each finished case kept on disk.

A case is one train/test split of a dataset, decided by a seed. Host and variants get the same
case, the same seed and the same precision, so that what differs between them is the patch. The
control `identity` runs the code of `full-o` with gates too small to matter: what it moves is the
precision's noise floor, and shifts of the other variants that are no larger mean nothing.

A run lives in a folder; see `runs`. Running it again reuses what is there.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..calibration.calibration import Calibration
from ..calibration.predicting import PRECISIONS
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
    check_workers,
)
from ..calibration.variants import VARIANTS
from ..retrofit import tabpfn_api
from ..retrofit.api import Retrofit, RetrofitError, calibrate, load, patch
from ..retrofit.files import replacing
from ..retrofit.hosts import Host
from ..retrofit.workers import call_each
from .case_runner import CaseJob, CaseRunner, Failure
from .datasets import split_spec
from .runs import CaseResult, Run

if TYPE_CHECKING:
    from distributed import Client

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
            # Of a file its name alone: where it lies is nobody else's business, and the hash says which one it is.
            "host": {"name": self.host.name and Path(self.host.name).name, "sha256": self.host.sha256},
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


def calibrate_run(plan: Plan, run: Run, on_table: Callable[[], None] | None = None) -> dict[str, Retrofit]:
    """The plan's retrofits by label, read from the run's folder, or calibrated (or given) and kept there.

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
        with replacing(run.retrofit_file(plan.given.variant)) as part:
            plan.given.save(part)
    return retrofits


def evaluate(
    plan: Plan,
    run: Run,
    *,
    workers: int = 1,
    client: Client | None = None,
    on_table: Callable[[], None] | None = None,
    on_warm_up: Callable[[], None] | None = None,
    on_case: Callable[[CaseResult], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> tuple[list[CaseResult], list[Failure]]:
    """Run what of the plan is not in the run's folder yet, and write each case there at once.

    A case that raises is a `Failure`, and the others go on; it is tried again by the next run. Where only
    some of a case's variants are missing, the host is run again beside them, for a fair comparison of time.

    Args:
        plan: What to run.
        run: The plan's folder, from `runs.open_run`.
        workers: How many cases run side by side, each in a process that has its share of torch's threads. With more
            than one, times mean nothing, and there is no warm-up.
        client: Of a Dask cluster, whose workers run the cases in place of processes here, one a thread; `workers` is
            then the number of these.
        on_table: Called after each calibration table, if variants have to be calibrated.
        on_warm_up: Called after each model that has run a small table, before the first case.
        on_case: Called with each case that this call finishes.
        on_failure: Called with each case that fails.

    Returns:
        All cases and the failures, both in the plan's order.

    Raises:
        ValueError: Several workers beside a GPU.
        OSError: A finished case, or a retrofit, could not be written.
    """
    if client is None:
        check_workers("workers", workers, plan.device)
    else:
        workers = sum(client.nthreads().values())
    records, missing, labels = run.finished(), run.missing(), list(run.settings["variants"])
    retrofits = calibrate_run(plan, run, on_table) if missing else {}
    runner = CaseRunner(plan.host, retrofits, plan.max_rows, plan.precision, plan.device, plan.estimator, workers)
    if missing and workers == 1 and client is None:
        runner.warm_up(on_warm_up)

    def result(case: tuple[str, int]) -> CaseResult:
        return CaseResult(*case, [records[case][label] for label in labels])

    failed: dict[tuple[str, int], Failure] = {}
    jobs = [CaseJob(*case, records.get(case, {})) for case in missing]
    processes = 0 if workers == 1 else min(workers, len(jobs))
    threads = max(1, torch.get_num_threads() // max(1, workers))
    with closing(call_each(runner, jobs, processes, threads=threads, client=client)) as answers:
        for _, found in answers:
            case = found.dataset, found.seed
            if isinstance(found, Failure):
                failed[case] = found
                if on_failure is not None:
                    on_failure(found)
                continue
            records.setdefault(case, {}).update({new["variant"]: new for new in run.append(found).variants})
            if on_case is not None:
                on_case(result(case))
    cases = [(dataset, seed) for dataset in plan.datasets for seed in range(plan.seeds)]
    return [result(case) for case in cases if case not in failed], [failed[case] for case in cases if case in failed]


def _files_sha256(specs: Iterable[str]) -> dict[str, str]:
    """Of the files among the datasets, whose content may change under the same name; of a folder's files, all."""
    return {spec: _sha256(found[0]) for spec in specs if (found := split_spec(spec))}


def _sha256(path: Path) -> str:
    if not path.is_dir():
        return hashlib.sha256(path.read_bytes()).hexdigest()
    files = sorted(file for file in path.rglob("*") if file.is_file())
    content = "\n".join(f"{file.relative_to(path)} {_sha256(file)}" for file in files)
    return hashlib.sha256(content.encode(errors="surrogateescape")).hexdigest()
