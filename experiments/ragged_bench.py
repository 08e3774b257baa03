"""The speed and the memory of ragged prediction, beside what there is without it."""

from __future__ import annotations

import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tabpfn import TabPFNRegressor

from ..calibration.carriers import split_table
from ..calibration.predicting import PRECISIONS
from ..calibration.prior import draw_table
from ..calibration.settings import RAGGED_AGAINST
from ..retrofit import tabpfn_api
from ..retrofit.api import patch
from ..retrofit.hosts import load_host
from ..retrofit.printing import Cells
from ..retrofit.ragged.report import STAGES
from .memory import peak_mb
from .ragged_equality import RawTable, largest_shift

METHODS = (*RAGGED_AGAINST, "ragged")

# Sizes of the tables: rows (two thirds of them to fit) and columns, uniform, ends included.
ROWS, COLUMNS = (20, 100), (3, 10)
_SEED = 50_000

# So small that `closed` predicts as its host, whose answers the other methods give; it costs what any tau costs.
_TAU = 1e-9


def bench_tables(count: int) -> list[RawTable]:
    """Synthetic numeric tables of unequal sizes; the first ones are the same for every count."""
    tables = []
    for i in range(count):
        rng = np.random.default_rng([_SEED, i])
        rows, columns = (int(rng.integers(low, high + 1)) for low, high in (ROWS, COLUMNS))
        tables.append(split_table(draw_table(rng, rows, columns))[:3])
    return tables


@dataclass
class Measured:
    """One run of one method over all tables.

    Attributes:
        means: Predicted means of each table's test rows.
        seconds: Wall time in `preprocessing`, `forward` and `decoding`. A loop's preprocessing ends with
            the first forward pass of a call, and what is neither that nor a pass is decoding.
        total_seconds: Wall time of it all.
        passes: Forward passes.
        padding: The share of their work that was padding.
        peak_gpu_mb: Peak in MiB of what torch allocated on the GPU, if it ran there.
        peak_pss_mb: Peak of `tree_pss_mb` from the start of the process on; None where the system does not tell.
    """

    means: list[np.ndarray] = field(repr=False)
    seconds: dict[str, float]
    total_seconds: float
    passes: int
    padding: float
    peak_gpu_mb: float | None
    peak_pss_mb: float | None = None


def measure_ragged(
    host: str,
    *,
    tables: int,
    rounds: int,
    device: str = "cpu",
    precision: str = "float32",
    against: Sequence[str] = RAGGED_AGAINST,
    on_run: Callable[[str], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Time ragged prediction, a loop of `fit` and `predict`, that in processes, and `predict_batched` by shape.

    All others run the unpatched host, as anybody would who does without ragged prediction, which runs the host's
    `closed` retrofit. On a CPU the loop also runs in as many processes as torch has threads, of one thread each. Each
    round runs every method once over the same tables, in an order drawn anew, each in a process of its own: a peak of
    memory only grows. All predict means with TabPFN's default settings but for the precision. Counted is what happens
    from raw tables to predicted means, the start of worker processes included; imports, loading the model and a first
    small table are not.

    Args:
        host: A host's name or path.
        tables: How many; see `bench_tables`.
        rounds: Runs of each method.
        device: `cpu` or `cuda`.
        precision: Of `PRECISIONS`.
        against: Which of the others run, one or more of `RAGGED_AGAINST`.
        on_run: Called with a line of text before each run.
        options: Of `TabPFNRegressor`, for all methods.

    Returns:
        `settings`, and for each of `METHODS`: `tables_per_second` (median over rounds), `peak_pss_mb` and `peak_gpu_mb`
        (largest), `ragged_speedup` (the median over rounds of this method's time by that of ragged prediction),
        `total_seconds` (each round's), `seconds` by stage (medians), `passes`, `padding`, and `max_abs_diff_sd`, the
        largest difference of a predicted mean from the loop's (without one, from that of the first method) in standard
        deviations of the training target.

    Raises:
        HostError: As of `load_host`, before the first process starts.
    """
    load_host(host)
    options = {"device": device, "inference_precision": PRECISIONS[precision], **options}
    rng = np.random.default_rng(0)
    left_out = set(RAGGED_AGAINST) - set(against) | ({"parallel_loop"} if device != "cpu" else set())
    methods = [method for method in METHODS if method not in left_out]
    runs: dict[str, list[Measured]] = {method: [] for method in methods}
    for i in range(rounds):
        for method in rng.permutation(methods):
            if on_run is not None:
                on_run(f"round {i + 1} of {rounds}: {method}")
            run, peak = _in_own_process(_measure, method, host, tables, options)
            runs[method].append(dataclasses.replace(run, peak_pss_mb=peak))
    settings = _settings(host, tables, rounds, device, precision)
    targets = [y for _, y, _ in bench_tables(tables)]
    ragged = np.array([run.total_seconds for run in runs["ragged"]])
    result: dict[str, Any] = {"settings": settings}
    for method, measured in runs.items():
        total = np.array([run.total_seconds for run in measured])
        result[method] = {
            "tables_per_second": float(tables / np.median(total)),
            "peak_pss_mb": _largest([run.peak_pss_mb for run in measured]),
            "peak_gpu_mb": _largest([run.peak_gpu_mb for run in measured]),
            "ragged_speedup": float(np.median(total / ragged)),
            "total_seconds": total.tolist(),
            "seconds": {
                stage: float(np.median([run.seconds[stage] for run in measured])) for stage in measured[0].seconds
            },
            "passes": measured[0].passes,
            "padding": measured[0].padding,
            # Unlike Python's own, numpy's maximum keeps a NaN.
            "max_abs_diff_sd": float(
                np.max(list(map(largest_shift, measured[0].means, runs[methods[0]][0].means, targets)))
            ),
        }
    return result


def _settings(host: str, tables: int, rounds: int, device: str, precision: str) -> dict[str, Any]:
    return {
        "host": host,
        "tables": tables,
        "rows": list(ROWS),
        "columns": list(COLUMNS),
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": precision,
    }


def bench_cells(result: dict[str, Any]) -> Cells:
    """Header and cells of `measure_ragged`'s result, a row a method."""
    header = ["method", "tables/s", "time/ragged", "peak MiB", "prep", "fwd", "decode", "passes", "pad"]
    cells = []
    for method in [method for method in METHODS if method in result]:
        found = result[method]
        memory = [found["peak_pss_mb"], *([found["peak_gpu_mb"]] if found["peak_gpu_mb"] is not None else [])]
        cells.append(
            [
                method.replace("_", " "),
                f"{found['tables_per_second']:.3g}",
                f"{found['ragged_speedup']:.2f}",
                " + ".join("–" if mb is None else f"{mb:.0f}" for mb in memory),
                *(f"{seconds:.1f}" for seconds in found["seconds"].values()),
                str(found["passes"]),
                f"{found['padding']:.1%}",
            ]
        )
    return header, cells


def bench_notes(result: dict[str, Any]) -> str:
    """What a reader of the table has to know."""
    settings = result["settings"]
    shift = max(result[method]["max_abs_diff_sd"] for method in METHODS if method in result)
    return (
        f"{settings['tables']} tables of {ROWS[0]} to {ROWS[1]} rows and {COLUMNS[0]} to {COLUMNS[1]} columns, medians "
        f"over {settings['rounds']} round(s), {settings['threads']} threads. Loop: fit and predict of the unpatched "
        "host; parallel loop: that in as many processes of one thread; shape groups: its predict_batched on tables of "
        "one shape. Time/ragged: a method's time / ragged prediction's, paired by round. Prep(rocessing), fwd (forward "
        "passes), decode: seconds, summed over processes that share the tables. Peak: proportional set size of the "
        "process and those it starts, sampled (and what torch has on the GPU). The methods' "
        f"means differ by {shift:.1g} target standard deviations at most."
    )


def tree_pss_mb(pid: int) -> float | None:
    """Memory of a process and of all that it has started and that still run, in MiB.

    As proportional set size: a page that several processes share counts once among them. None where the system does
    not tell.
    """
    sizes, left = [], [pid]
    while left:
        process = Path("/proc") / str(left.pop())
        try:
            sizes += [int(line.split()[1]) for line in (process / "smaps_rollup").open() if line.startswith("Pss:")]
            for children in process.glob("task/*/children"):
                left += map(int, children.read_text().split())
        except OSError:  # it has ended, or there is no /proc
            continue
    return sum(sizes) / 2**10 if sizes else None


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> tuple[Any, float | None]:
    """What a function returns in a process of its own, and the peak of that one's `tree_pss_mb`.

    The peak is of samples: the system keeps none. Reading one takes the kernel milliseconds, so they are so
    far apart that a 50th of one core goes into it, and 50 ms at least; what lasts less may be missed.
    """
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        pid = pool.submit(os.getpid).result()
        running, samples, pause = pool.submit(function, *arguments), [], 0.05
        while not wait([running], timeout=pause).done:
            start = time.perf_counter()
            samples.append(tree_pss_mb(pid))
            pause = max(0.05, 50 * (time.perf_counter() - start))
        return running.result(), _largest(samples)


def _measure(method: str, host: str, count: int, options: dict[str, Any]) -> Measured:
    """One run of a method; in a process of its own, as what the process did before counts into the peak."""
    run = _run(method, host, options)
    run(bench_tables(1))  # the first pass loads kernels
    tables, gpu = bench_tables(count), options["device"] == "cuda"
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    means, seconds, passes, padding = run(tables)
    total = time.perf_counter() - start
    return Measured(means, seconds, total, passes, padding, peak_mb("cuda") if gpu else None)


_Run = Callable[[list[RawTable]], tuple[list[np.ndarray], dict[str, float], int, float]]


def _run(method: str, host: str, options: dict[str, Any]) -> _Run:
    if method == "ragged":
        return _ragged(host, options)
    if method == "parallel_loop":
        return _in_parallel(host, options)
    return _one_by_one(method, host, options)


def _ragged(host: str, options: dict[str, Any]) -> _Run:
    loaded = load_host(host)
    tabpfn_api.show_nan(loaded.model)
    retrofit = patch(loaded, "closed", tau=_TAU)

    def run(tables: list[RawTable]) -> tuple[list[np.ndarray], dict[str, float], int, float]:
        lists = map(list, zip(*tables, strict=True))
        means, report = retrofit.predict_ragged(*lists, return_report=True, **options)
        return means, dict(report.seconds), report.batches, report.padding

    return run


def _one_by_one(method: str, host: str, options: dict[str, Any]) -> _Run:
    specs = load_host(host).specs
    clock = _Clock(options["device"])
    clock.watch(specs.model)
    tabpfn_api.show_nan(specs.model)
    regressor = TabPFNRegressor(model_path=specs, **options)

    def run(tables: list[RawTable]) -> tuple[list[np.ndarray], dict[str, float], int, float]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, (X, _, X_test) in enumerate(tables):
            groups[i if method == "loop" else (X.shape, X_test.shape)].append(i)
        means: list[Any] = [None] * len(tables)
        clock.reset()
        for members in groups.values():
            X_trains, y_trains, X_tests = map(list, zip(*(tables[i] for i in members), strict=True))
            with clock:
                if method == "loop":
                    answers = [regressor.fit(X_trains[0], y_trains[0]).predict(X_tests[0])]
                else:
                    answers = regressor.predict_batched(X_trains, y_trains, X_tests)
            for i, answer in zip(members, answers, strict=True):
                means[i] = answer
        return means, clock.seconds, clock.passes, 0.0

    return run


def _in_parallel(host: str, options: dict[str, Any]) -> _Run:
    """The loop in forked processes, which have the model without being sent it: the best without ragged prediction."""
    loop, cores = _one_by_one("loop", host, options), torch.get_num_threads()

    def run(tables: list[RawTable]) -> tuple[list[np.ndarray], dict[str, float], int, float]:
        global _forked
        _forked = loop, tables
        with get_context("fork").Pool(cores) as pool:
            parts = pool.map(_loop_over, [range(i, len(tables), cores) for i in range(cores)], chunksize=1)
        means: list[Any] = [None] * len(tables)
        for i, (found, *_) in enumerate(parts):
            means[i::cores] = found
        seconds = {stage: sum(part[1][stage] for part in parts) for stage in STAGES}
        return means, seconds, sum(part[2] for part in parts), 0.0

    return run


_forked: tuple[_Run, list[RawTable]]


def _loop_over(indices: range) -> tuple[list[np.ndarray], dict[str, float], int, float]:
    torch.set_num_threads(1)
    loop, tables = _forked
    return loop([tables[i] for i in indices])


class _Clock:
    """Tells what part of the calls made under it went by before, in and after the passes of a model."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.reset()

    def reset(self) -> None:
        """Begin at zero."""
        self.seconds = dict.fromkeys(STAGES, 0.0)
        self.passes = 0

    def watch(self, model: Any) -> None:
        """Note the passes of a model, and of every copy that is made of it: `predict_batched` makes one."""
        clock = self

        class Timed(type(model)):  # type: ignore[misc]
            def forward(self, *args: Any, **kwargs: Any) -> Any:
                clock._turn("forward")
                clock.passes += 1
                output = super().forward(*args, **kwargs)
                clock._turn("decoding")
                return output

        model.__class__ = Timed

    def __enter__(self) -> None:
        self.stage, self.since = "preprocessing", time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._turn("preprocessing")

    def _turn(self, stage: str) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.stage] += now - self.since
        self.stage, self.since = stage, now


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)
