"""Ragged prediction against what there is without it: its speed and memory, and whether the answers are the same."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn import TabPFNRegressor
from tabpfn.architectures.tabpfn_v3 import TabPFNV3
from tabpfn.base import ModelSpecs

from ..calibration.carriers import split_table
from ..calibration.prior import draw_sizes, draw_table
from ..calibration.settings import DELTA
from ..retrofit.api import Retrofit, calibrate, patch
from ..retrofit.hosts import Host, load_host
from ..retrofit.ragged import RaggedReport
from .evaluate import peak_mb
from .report import Cells

# A table as the methods take it: X_train, y_train, X_test.
RawTable = tuple[Any, np.ndarray, Any]

METHODS = ("loop", "shape_groups", "ragged")

# Sizes of the benchmark's tables: rows (two thirds of them to fit) and columns, uniform, ends included.
ROWS, COLUMNS = (20, 100), (3, 10)
_BENCH_SEED = 50_000

# Sizes of the equality study's tables: rows and columns, log-uniform.
EQUALITY_ROWS, EQUALITY_COLUMNS = (5, 400), 30
_EQUALITY_SEED = 60_000

# So small that `closed` predicts as its host, whose answers the other methods give; it costs what any tau costs.
_TAU = 1e-9
SMALLEST_DELTA = 1e-9

QUANTILES = [0.01, 0.1, 0.5, 0.9, 0.99]


# ---- Speed and memory ----------------------------------------------------------------------------


def bench_tables(count: int) -> list[RawTable]:
    """Synthetic numeric tables of unequal sizes; the first ones are the same for every count."""
    tables = []
    for i in range(count):
        rng = np.random.default_rng([_BENCH_SEED, i])
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
        peak_rss_mb: Peak memory in MiB of the process, from its start, and of the largest process that it
            has started, summed (they may share pages); None where the system does not tell.
        peak_gpu_mb: Peak of what torch allocated on the GPU, if it ran there.
    """

    means: list[np.ndarray] = field(repr=False)
    seconds: dict[str, float]
    total_seconds: float
    passes: int
    padding: float
    peak_rss_mb: float | None
    peak_gpu_mb: float | None


def measure_ragged(
    host: str,
    *,
    tables: int = 200,
    rounds: int = 3,
    device: str = "cpu",
    on_run: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Time ragged prediction, a loop of `fit` and `predict`, and `predict_batched` on tables of one shape.

    Loop and `predict_batched` run the unpatched host, as anybody would who does without ragged
    prediction; ragged prediction runs the host's `closed` retrofit. Each round runs every method once over
    the same tables, in an order drawn anew, each in a process of its own: a peak of memory only grows. All
    predict means with TabPFN's default settings in float32. Counted is what happens from raw tables to
    predicted means, the start of ragged prediction's worker processes included; imports, loading the model
    and a first small table are not.

    Args:
        host: A host's name or path.
        tables: How many; see `bench_tables`.
        rounds: Runs of each method.
        device: `cpu` or `cuda`.
        on_run: Called with a line of text before each run.

    Returns:
        `settings`, and for each of `METHODS`: `tables_per_second` (median over rounds), `peak_rss_mb` and
        `peak_gpu_mb` (largest), `ragged_speedup` (the median over rounds of this method's time by that of
        ragged prediction), `total_seconds` (each round's), `seconds` by stage (medians), `passes`,
        `padding`, and `max_abs_diff_sd`, the largest difference of a predicted mean from the loop's in
        standard deviations of the training target.
    """
    rng = np.random.default_rng(0)
    runs: dict[str, list[Measured]] = {method: [] for method in METHODS}
    for i in range(rounds):
        for method in rng.permutation(METHODS):
            if on_run is not None:
                on_run(f"round {i + 1} of {rounds}: {method}")
            runs[method].append(_in_own_process(_measure, method, host, tables, device))
    settings = {
        "host": host,
        "tables": tables,
        "rows": list(ROWS),
        "columns": list(COLUMNS),
        "rounds": rounds,
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "precision": "float32",
    }
    targets = [y for _, y, _ in bench_tables(tables)]
    ragged = np.array([run.total_seconds for run in runs["ragged"]])
    result: dict[str, Any] = {"settings": settings}
    for method, measured in runs.items():
        total = np.array([run.total_seconds for run in measured])
        result[method] = {
            "tables_per_second": float(tables / np.median(total)),
            "peak_rss_mb": _largest([run.peak_rss_mb for run in measured]),
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
                np.max(list(map(_largest_shift, measured[0].means, runs["loop"][0].means, targets)))
            ),
        }
    return result


def bench_cells(result: dict[str, Any]) -> Cells:
    """Header and cells of `measure_ragged`'s result, a row a method."""
    header = ["method", "tables/s", "time/ragged", "peak MiB", "prep", "fwd", "decode", "passes", "pad"]
    cells = []
    for method in METHODS:
        found = result[method]
        memory = [found["peak_rss_mb"], *([found["peak_gpu_mb"]] if found["peak_gpu_mb"] is not None else [])]
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
    shift = max(result[method]["max_abs_diff_sd"] for method in METHODS)
    return (
        f"{settings['tables']} tables of {ROWS[0]} to {ROWS[1]} rows and {COLUMNS[0]} to {COLUMNS[1]} columns, medians "
        f"over {settings['rounds']} round(s), {settings['threads']} threads. Loop: fit and predict of the unpatched "
        "host; shape groups: its predict_batched on tables of one shape. Time/ragged: a method's time / ragged "
        "prediction's, paired by round. Prep(rocessing), fwd (forward passes), decode: seconds. Peak: of the process "
        "and the largest it starts (and of the GPU). The methods' "
        f"means differ by {shift:.1g} target standard deviations at most."
    )


def _in_own_process(function: Callable[..., Any], *arguments: Any) -> Any:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def _measure(method: str, host: str, count: int, device: str) -> Measured:
    """One run of a method; in a process of its own, as what the process did before counts into the peak."""
    run = _ragged(host, device) if method == "ragged" else _one_by_one(method, host, device)
    run(bench_tables(1))  # the first pass loads kernels
    tables = bench_tables(count)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    means, seconds, passes, padding = run(tables)
    total = time.perf_counter() - start
    gpu = peak_mb("cuda") if device == "cuda" else None
    return Measured(means, seconds, total, passes, padding, _peak_rss_mb(), gpu)


_Run = Callable[[list[RawTable]], tuple[list[np.ndarray], dict[str, float], int, float]]


def _ragged(host: str, device: str) -> _Run:
    retrofit = patch(host, "closed", tau=_TAU)

    def run(tables: list[RawTable]) -> tuple[list[np.ndarray], dict[str, float], int, float]:
        report = RaggedReport()
        means = retrofit.predict_ragged(
            *map(list, zip(*tables, strict=True)), device=device, inference_precision=torch.float32, report=report
        )
        return means, report.seconds, report.batches, report.padding

    return run


def _one_by_one(method: str, host: str, device: str) -> _Run:
    specs = load_host(host).specs
    regressor = TabPFNRegressor(model_path=specs, device=device, inference_precision=torch.float32)

    def run(tables: list[RawTable]) -> tuple[list[np.ndarray], dict[str, float], int, float]:
        groups: dict[Any, list[int]] = defaultdict(list)
        for i, (X, _, X_test) in enumerate(tables):
            groups[i if method == "loop" else (X.shape, X_test.shape)].append(i)
        means: list[Any] = [None] * len(tables)
        clock = _Clock(device)
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


class _Clock:
    """Tells what part of the calls made under it went by before, in and after the passes of a v3 model."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.seconds = {"preprocessing": 0.0, "forward": 0.0, "decoding": 0.0}
        self.passes = 0

    def __enter__(self) -> None:
        self.stage, self.since = "preprocessing", time.perf_counter()
        self.forward = forward = TabPFNV3.forward

        def timed(model: TabPFNV3, *args: Any, **kwargs: Any) -> Any:
            self._turn("forward")
            self.passes += 1
            output = forward(model, *args, **kwargs)
            self._turn("decoding")
            return output

        # Of the class, not a hook on the model: predict_batched runs a copy of the one it is given.
        TabPFNV3.forward = timed  # type: ignore[method-assign]

    def __exit__(self, *_: Any) -> None:
        TabPFNV3.forward = self.forward  # type: ignore[method-assign]
        self._turn("preprocessing")

    def _turn(self, stage: str) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self.stage] += now - self.since
        self.stage, self.since = stage, now


def _peak_rss_mb() -> float | None:
    """Of this process, and the largest it has started and ended, which may share pages with it."""
    # Not `getrusage`, for this process: it begins with the peak of the one that started it.
    if (own := peak_mb("cpu")) is None:
        return None
    import resource  # Unix only, as is what the own peak was read from

    return own + resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**10


def _largest(values: Sequence[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _largest_shift(a: Any, b: Any, y: np.ndarray) -> float:
    return float(np.abs(np.asarray(a, float) - np.asarray(b, float)).max() / y.std())


# ---- Equality ------------------------------------------------------------------------------------


def mixed_tables(count: int) -> list[RawTable]:
    """Synthetic tables of 5 to 400 rows and 1 to 30 columns: numbers, categories, strings, flags; missing cells."""
    tables = []
    for i in range(count):
        rng = np.random.default_rng([_EQUALITY_SEED, i])
        rows, columns = draw_sizes(rng, EQUALITY_ROWS[1], EQUALITY_COLUMNS, min_rows=EQUALITY_ROWS[0])
        table = draw_table(rng, rows, columns)
        missing = rng.random((rows, columns)) < rng.uniform(0.02, 0.2)
        X = {}
        for c in range(columns):
            values = pd.Series(table.X[:, c])
            kind = rng.choice(["number", "category", "string", "flag"], p=[0.7, 0.1, 0.1, 0.1])
            if kind == "flag":  # TabPFN takes no flag that is missing
                X[f"x{c}"] = values > values.median()
            elif kind == "number":
                X[f"x{c}"] = values.mask(missing[:, c])
            else:
                words = values.rank(method="dense").mask(missing[:, c]) % 7
                words = words.map(lambda level: f"level {level:.0f}", na_action="ignore")
                X[f"x{c}"] = words.astype("category" if kind == "category" else object)
        frame, n = pd.DataFrame(X), max(2, rows * 2 // 3)
        tables.append((frame.iloc[:n], table.y[:n], frame.iloc[n:]))
    return tables


def compare_equality(
    host: Host,
    tables: Sequence[RawTable],
    *,
    device: str = "cpu",
    on_calibrated: Callable[[], None] | None = None,
    on_tables: Callable[[int], None] = lambda done: None,
) -> pd.DataFrame:
    """How far ragged prediction of all tables at once is from `fit` and `predict` one by one, in float32.

    The reference is the retrofit itself (`closed`, at the default delta), and at the smallest delta, where
    the retrofit is its host, the host. `on_calibrated` is called after each calibration table,
    `on_tables` now and then with the number of predictions done, four a table.

    Returns:
        A row a quantity: `quantity` (the mean, each of `QUANTILES`, logits), and for `closed` and `host` the
        median over tables (`closed_median`) and the largest (`closed_worst`) of a table's largest
        difference: in standard deviations of its training target, or, for logits, as they are. The last
        row, `spread of means`, is what the mean's differences are to be seen against: the standard
        deviation of a table's predicted means in that unit, its median and its smallest.
    """
    calibration = calibrate(host, device=device, on_table=on_calibrated)
    rows: dict[str, dict[str, Any]] = defaultdict(dict)
    finished = 0

    def advance(done: int) -> None:
        on_tables(finished + done)

    for name, delta in (("closed", DELTA), ("host", SMALLEST_DELTA)):
        retrofit = patch(host, "closed", delta=delta, calibration=calibration)
        specs = retrofit.specs if name == "closed" else retrofit.host_specs
        differences = _differences(retrofit, specs, tables, device, advance)
        finished += 2 * len(tables)
        for quantity, values in differences.items():
            worst = np.min(values) if quantity == _SPREAD else np.max(values)
            rows[quantity] |= {f"{name}_median": float(np.median(values)), f"{name}_worst": float(worst)}
    return pd.DataFrame({"quantity": quantity, **row} for quantity, row in rows.items())


_SPREAD = "spread of means"


def _differences(
    retrofit: Retrofit,
    specs: ModelSpecs,
    tables: Sequence[RawTable],
    device: str,
    on_tables: Callable[[int], None],
) -> dict[str, list[float]]:
    """By quantity, each table's largest difference between ragged prediction and `fit` and `predict` on `specs`."""
    output: dict[str, Any] = {"output_type": "full", "quantiles": QUANTILES}
    X_trains, y_trains, X_tests = map(list, zip(*tables, strict=True))
    many = retrofit.predict_ragged(
        X_trains, y_trains, X_tests, **output, device=device, inference_precision=torch.float32, on_tables=on_tables
    )
    regressor = TabPFNRegressor(model_path=specs, device=device, inference_precision=torch.float32)
    found: dict[str, list[float]] = defaultdict(list)
    for i, ((X, y, X_test), ours) in enumerate(zip(tables, many, strict=True)):
        theirs = regressor.fit(X, y).predict(X_test, **output)
        found["mean"].append(_largest_shift(ours["mean"], theirs["mean"], y))
        for q, a, b in zip(QUANTILES, ours["quantiles"], theirs["quantiles"], strict=True):
            found[f"quantile {q:g}"].append(_largest_shift(a, b, y))
        found["logits"].append(_logit_shift(ours["logits"], theirs["logits"]))
        found[_SPREAD].append(float(theirs["mean"].std() / y.std()))
        on_tables(len(tables) + i + 1)
    return found


def _logit_shift(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference; buckets that both give no probability (-inf) are equal."""
    return float((a - b).where(a != b, 0).abs().max())


def equality_notes() -> str:
    """What a reader of the table has to know."""
    return (
        "Of each table's largest difference the median over tables and the largest, in standard deviations of its "
        "training target (logits: as they are). closed: against the retrofit's own fit and predict at the default "
        f"delta; host: against the unpatched host's at delta {SMALLEST_DELTA:g}. The last row is the standard "
        "deviation of a table's predicted means, its median and its smallest."
    )
