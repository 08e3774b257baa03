"""Host and variants on matched cases, each finished case kept on disk.

A case is one train/test split of a dataset, decided by a seed. Host and variants get the same
case, the same seed and the same precision, so that what differs between them is the patch. The
control `identity` runs the code of `full-o` with gates too small to matter: what it moves is the
precision's noise floor, and shifts of the other variants that are no larger mean nothing.

A run lives in a folder: `settings.json` (what decides the results), `retrofit-*.json` (the
calibrated taus) and `cases.jsonl` (a line a case). Running it again reuses all three.
"""

from __future__ import annotations

import gc
import hashlib
import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs

from ..calibration.carriers import calibration_tables, split_table
from ..calibration.settings import DELTA, MAX_ROWS, PAPER_VARIANTS, QUANTILE, SEED, TABLES, check_delta
from ..calibration.variants import VARIANTS
from ..retrofit import tabpfn_api
from ..retrofit.api import Retrofit, calibrate, load, patch
from ..retrofit.hosts import Host
from .datasets import Case, load_dataset, make_case

IDENTITY = "identity"
IDENTITY_DELTA = 1e-6

Precision = torch.dtype | Literal["auto", "autocast"]
PRECISIONS: dict[str, Precision] = {
    "auto": "auto",
    "float32": torch.float32,
    "float64": torch.float64,
    "autocast": "autocast",
}


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

    Raises:
        ValueError: An unknown variant or precision, a number out of range, a variant that is both
            calibrated and given, or a precision that the device cannot do.
    """

    host: Host
    datasets: list[str]
    seeds: int = 3
    variants: tuple[str, ...] = PAPER_VARIANTS
    given: Retrofit | None = None
    delta: float = DELTA
    quantile: float = QUANTILE
    tables: int = TABLES
    max_rows: int = MAX_ROWS
    precision: str = "float32"
    device: str = "cpu"

    def __post_init__(self) -> None:
        """Check the values."""
        for variant in self.variants:
            if variant not in (IDENTITY, *VARIANTS):
                raise ValueError(f"unknown variant {variant!r}; there are: {', '.join([IDENTITY, *VARIANTS])}")
            if self.given is not None and variant == self.given.variant:
                raise ValueError(f"the given retrofit is {variant} too; leave that variant out")
        if self.seeds < 1:
            raise ValueError(f"there must be at least one seed, got {self.seeds}")
        if self.max_rows < 2:
            raise ValueError(f"a case needs at least 2 train rows, got a limit of {self.max_rows}")
        if self.tables < 1:
            raise ValueError(f"calibration needs at least one table, got {self.tables}")
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
        return json.loads(json.dumps(settings))


@dataclass(frozen=True)
class CaseResult:
    """A finished case: `variants` holds a flat record for each variant, as `case_rows` lists them."""

    dataset: str
    seed: int
    variants: list[dict[str, Any]]


@dataclass(frozen=True)
class Failure:
    """A case that could not be run, and why, in one line."""

    dataset: str
    seed: int
    reason: str


def resolve_device(name: str) -> str:
    """`cpu` or `cuda`; `auto` is `cuda` where there is one.

    Raises `ValueError` for another name, or for `cuda` without a GPU.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"unknown device {name!r}; there are: auto, cpu, cuda")
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError("there is no CUDA device, or this build of torch cannot use it; use --device cpu")
    return "cuda" if found and name != "cpu" else "cpu"


def check_datasets(specs: Iterable[str]) -> None:
    """Raise `DatasetError` now for a table on disk that is unusable; OpenML's are fetched when due."""
    for spec in specs:
        if not spec.startswith("openml:"):
            load_dataset(spec)


def open_run(plan: Plan, folder: Path) -> list[CaseResult]:
    """Create the run's folder, or take up the one that is there.

    Returns:
        The cases that an earlier run of the same plan has finished.

    Raises:
        ValueError: The folder holds a run with other settings, or an unreadable one.
        OSError: The folder cannot be written to.
    """
    settings = plan.settings()
    settings_file, cases_file = folder / "settings.json", folder / "cases.jsonl"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        if settings_file.exists() or cases_file.exists() or any(folder.glob("retrofit-*.json")):
            stored = json.loads(settings_file.read_text())
            if different := _differences(stored, settings):
                raise ValueError(
                    f"{folder} holds a run with other settings ({'; '.join(different)}); choose another --out"
                )
        finished = _read_cases(cases_file)
    except (FileNotFoundError, json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{folder} holds a run that cannot be read ({error!r}); choose another --out") from error
    _write(settings_file, json.dumps(settings, indent=1) + "\n")
    return finished


def calibrate_run(plan: Plan, folder: Path, on_table: Callable[[], None] | None = None) -> dict[str, Retrofit]:
    """The plan's retrofits by label, read from the run's folder, or calibrated and kept there.

    All of them come from one measurement of the host's carriers. Raises `RetrofitError` for a file
    in the folder that cannot be read.
    """
    retrofits: dict[str, Retrofit] = {}
    calibration = None
    for label, delta in plan.deltas().items():
        file = folder / f"retrofit-{label}.json"
        if file.exists():
            retrofits[label] = load(file, plan.host)
            continue
        if calibration is None:
            calibration = calibrate(plan.host, tables=plan.tables, device=plan.device, on_table=on_table)
        variant = "full-o" if label == IDENTITY else label
        retrofits[label] = patch(plan.host, variant, delta=delta, quantile=plan.quantile, calibration=calibration)
        part = file.with_suffix(".part")
        retrofits[label].save(part)
        part.replace(file)
    if plan.given is not None:
        retrofits[plan.given.variant] = plan.given
    return retrofits


def evaluate(
    plan: Plan,
    retrofits: dict[str, Retrofit],
    folder: Path,
    *,
    finished: Iterable[CaseResult] = (),
    on_case: Callable[[CaseResult], None] | None = None,
    on_failure: Callable[[Failure], None] | None = None,
) -> tuple[list[CaseResult], list[Failure]]:
    """Run the plan's cases that are not finished, and append each to `cases.jsonl` at once.

    A case that raises is a `Failure`, and the others go on; it is tried again by the next run.

    Args:
        plan: What to run.
        retrofits: The variants, from `calibrate_run`.
        folder: The run's folder, from `open_run`.
        finished: The cases not to run again, from `open_run`.
        on_case: Called with each case that this call finishes.
        on_failure: Called with each case that fails.

    Returns:
        All cases, in the plan's order, and the failures.
    """
    done = {(case.dataset, case.seed): case for case in finished}
    results, failures = [], []
    if any((name, seed) not in done for name in plan.datasets for seed in range(plan.seeds)):
        _warm_up(plan, retrofits)
    for name in plan.datasets:
        dataset = None
        for seed in range(plan.seeds):
            if (name, seed) in done:
                results.append(done[name, seed])
                continue
            try:
                dataset = dataset or load_dataset(name)
                case = make_case(dataset, seed, plan.max_rows, plan.max_rows // 2)
                result = CaseResult(name, seed, _compare(plan, retrofits, case))
            except Exception as error:  # whatever TabPFN or torch raise; the other cases are still worth having
                text = str(error).strip().splitlines() or [""]
                failures.append(Failure(name, seed, f"{type(error).__name__}: {text[0]}"))
                if on_failure is not None:
                    on_failure(failures[-1])
                continue
            with (folder / "cases.jsonl").open("a") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            results.append(result)
            if on_case is not None:
                on_case(result)
    return results, failures


def case_rows(cases: Iterable[CaseResult]) -> pd.DataFrame:
    """One row a case and variant.

    Columns: `dataset`, `seed`, `variant`, `n_train`, `n_test`, `n_columns`; of host and variant
    `rmse`, `nll` (mean negative log-likelihood of the test targets), `seconds` (fit and predict) and
    `peak_mb`; `rmse_delta_pct`; `max_abs_diff_sd`, the largest change of a predicted mean in
    standard deviations of the training target; `precision` and `device`. `peak_mb` is in MiB: on a
    GPU what torch allocated, on Linux the resident size of the whole process, elsewhere unknown.
    """
    return pd.DataFrame([record for case in cases for record in case.variants])


@dataclass(frozen=True)
class _Run:
    mean: np.ndarray
    rmse: float
    nll: float
    seconds: float
    peak_mb: float | None


def _compare(plan: Plan, retrofits: dict[str, Retrofit], case: Case) -> list[dict[str, Any]]:
    host = _run(plan.host.specs, case, plan)
    if host.rmse == 0:
        raise ValueError("the host's error is exactly zero, so there is no relative change")
    records = []
    for label, retrofit in retrofits.items():
        variant = _run(retrofit.specs, case, plan)
        records.append(
            {
                "dataset": case.dataset,
                "seed": case.seed,
                "variant": label,
                "n_train": len(case.y_train),
                "n_test": len(case.y_test),
                "n_columns": case.X_train.shape[1],
                "host_rmse": host.rmse,
                "variant_rmse": variant.rmse,
                "rmse_delta_pct": 100 * (variant.rmse / host.rmse - 1),
                "max_abs_diff_sd": float(np.abs(variant.mean - host.mean).max() / case.y_train.std()),
                "host_nll": host.nll,
                "variant_nll": variant.nll,
                "host_seconds": host.seconds,
                "variant_seconds": variant.seconds,
                "host_peak_mb": host.peak_mb,
                "variant_peak_mb": variant.peak_mb,
                "precision": plan.precision,
                "device": plan.device,
            }
        )
    return records


def _run(specs: ModelSpecs, case: Case, plan: Plan) -> _Run:
    gc.collect()  # what earlier runs left would count into this one's peak
    measuring = _reset_peak(plan.device)
    start = time.perf_counter()
    regressor = TabPFNRegressor(
        model_path=specs,
        device=plan.device,
        inference_precision=PRECISIONS[plan.precision],
        random_state=case.seed,
    )
    output = regressor.fit(case.X_train, case.y_train).predict(case.X_test, output_type="full")
    seconds = time.perf_counter() - start
    peak = peak_mb(plan.device) if measuring else None

    mean = np.asarray(output["mean"], dtype=np.float64)
    criterion = output["criterion"].cpu()
    y_test = torch.as_tensor(case.y_test, dtype=torch.float64)
    nll = criterion(output["logits"].cpu().double(), y_test).mean().item()
    rmse = float(np.sqrt(np.mean((mean - case.y_test) ** 2)))
    if not np.isfinite([rmse, nll]).all():
        raise ValueError(f"predictions are not finite (RMSE {rmse}, negative log-likelihood {nll})")
    return _Run(mean, rmse, nll, seconds, peak)


def _warm_up(plan: Plan, retrofits: dict[str, Retrofit]) -> None:
    """Run a small table once: first runs load kernels, which would count as the first case's time."""
    X_train, y_train, X_test, y_test = split_table(calibration_tables(1, 0, max_rows=30, max_columns=4)[0])
    case = Case("warm-up", 0, pd.DataFrame(X_train), y_train, pd.DataFrame(X_test), y_test)
    for specs in (plan.host.specs, *(retrofit.specs for retrofit in retrofits.values())):
        _run(specs, case, plan)


def _reset_peak(device: str) -> bool:
    """Start a new memory peak; False where the system cannot."""
    if device == "cuda":
        torch.cuda.init()  # the reset fails on a context that is not there yet
        torch.cuda.reset_peak_memory_stats()
        return True
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def peak_mb(device: str) -> float | None:
    """Peak memory in MiB of what torch has on the GPU, or of this process; None where the system does not tell."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 2**10 for line in lines if line.startswith("VmHWM:")), None)


def _files_sha256(specs: Iterable[str]) -> dict[str, str]:
    """Of the CSV files among the datasets, whose content may change under the same name."""
    files = {spec: spec.removeprefix("csv:").rpartition("#")[0] for spec in specs if spec.startswith("csv:")}
    return {spec: hashlib.sha256(Path(file).read_bytes()).hexdigest() for spec, file in files.items()}


def _differences(stored: Any, wanted: Any, name: str = "") -> list[str]:
    if isinstance(stored, dict) and isinstance(wanted, dict):
        keys = list(dict.fromkeys([*stored, *wanted]))
        return [d for key in keys for d in _differences(stored.get(key), wanted.get(key), f"{name}.{key}".strip("."))]
    return [] if stored == wanted else [f"{name}: {json.dumps(stored)} there, {json.dumps(wanted)} here"]


def _read_cases(file: Path) -> list[CaseResult]:
    if not file.exists():
        return []
    lines = file.read_text().splitlines(keepends=True)
    if lines and not lines[-1].endswith("\n"):
        # A run was killed while it wrote this line; left there, the next case would be glued to it.
        _write(file, "".join(lines[:-1]))
        lines.pop()
    return [CaseResult(**json.loads(line)) for line in lines if line.strip()]


def _write(file: Path, text: str) -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.replace(file)
