"""Predict many small groups in folders of Parquet files by a Dask cluster here, and watch its memory (docs/cluster.md).

    python examples/many_groups.py make FOLDER --groups 20000 --files 40
    python examples/many_groups.py measure --json memory.json

The data are made up: 8 to 32 train rows and 4 test rows a group, spread over all files. To be short, each group is
predicted with one ensemble member (`oretrofit predict` takes TabPFN's eight).
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from oretrofit import patch
from oretrofit.retrofit.cluster import connected
from oretrofit.retrofit.predict_folders import look_at, predict_folders

LIMIT = "2GiB"  # of a worker's memory


def make(folder: Path, groups: int, files: int) -> None:
    """Write the folders train and test."""
    rng = np.random.default_rng(0)
    for name, sizes in (("train", rng.integers(8, 33, groups)), ("test", np.full(groups, 4))):
        (folder / name).mkdir(parents=True)
        shop = rng.permutation(np.repeat(np.arange(groups), sizes))
        for i, part in enumerate(np.array_split(shop, files)):
            rows = pd.DataFrame({"shop": np.char.add("shop ", part.astype(str))})
            rows[["price", "rain", "trend"]] = rng.standard_normal((len(part), 3))
            rows["weekday"] = rng.choice(["mon", "tue", "wed", "thu", "fri", "sat", "sun"], len(part))
            if name == "train":
                rows["sold"] = rows["trend"] - rows["price"] + 0.3 * rng.standard_normal(len(part))
            else:
                rows["id"] = [f"{i}-{j}" for j in range(len(part))]
            rows.to_parquet(folder / name / f"{i:03}.parquet", index=False)


@contextmanager
def a_cluster(folder: Path, workers: int) -> Iterator[tuple[str, psutil.Process, psutil.Process]]:
    """A scheduler and workers of one thread, each a process: the address, the scheduler, and the workers' parent."""
    file = folder / "scheduler.json"
    dask = [sys.executable, "-m", "dask"]
    environ = {**os.environ, "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False"}  # docs/cluster.md
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environ}
    with subprocess.Popen(
        [*dask, "scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)], **quiet
    ) as scheduler:
        while not file.exists():
            time.sleep(0.1)
        address = json.loads(file.read_text())["address"]
        counts = ["--nworkers", str(workers), "--nthreads", "1", "--memory-limit", LIMIT, "--no-dashboard"]
        with subprocess.Popen([*dask, "worker", address, *counts], cwd=folder, **quiet) as nanny:
            yield address, psutil.Process(scheduler.pid), psutil.Process(nanny.pid)
            nanny.terminate()
        scheduler.terminate()


@contextmanager
def watched(scheduler: psutil.Process, nanny: psutil.Process) -> Iterator[list[tuple[float, float, list[float]]]]:
    """Every second: seconds, the scheduler's MiB, and each worker's, resident."""
    samples: list[tuple[float, float, list[float]]] = []
    over, start = threading.Event(), time.perf_counter()

    def watch() -> None:
        while not over.wait(1):
            sizes = []
            for process in nanny.children(recursive=True):
                try:
                    if "spawn_main" in " ".join(process.cmdline()):
                        sizes.append(process.memory_info().rss / 2**20)
                except psutil.NoSuchProcess:
                    continue
            samples.append((time.perf_counter() - start, scheduler.memory_info().rss / 2**20, sizes))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield samples
    finally:
        over.set()
        thread.join()


def measure(groups: int, files: int, host: str, workers: int) -> dict[str, Any]:
    """Make data, predict them, and watch."""
    closed = patch(host, "closed", tau=1e-6)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make(folder, groups, files)
        with a_cluster(folder, workers) as (address, scheduler, nanny), connected(address) as client:
            client.wait_for_workers(workers)
            with watched(scheduler, nanny) as samples:
                tables = look_at(
                    folder / "train",
                    folder / "test",
                    client,
                    target="sold",
                    by="shop",
                    keep=["id"],
                    too_few="error",
                    begin=lambda *_: lambda _: None,
                )
                looked = samples[-1][0] if samples else 0.0
                predicted, report = predict_folders(
                    closed,
                    tables,
                    client,
                    folder / "out",
                    keep=["id"],
                    levels={},
                    begin=lambda *_: lambda _: None,
                    on_error="raise",
                    device="cpu",
                    n_estimators=1,
                )
        return {
            "groups": groups,
            "rows": sum(table.rows for table in tables.folders),
            "predicted": predicted,
            "tables": report.tables,
            "seconds": samples[-1][0],
            "seconds to look": looked,
            "scheduler, peak MiB": max(size for _, size, _ in samples),
            "worker, peak MiB": max(max(sizes, default=0.0) for _, _, sizes in samples),
            "samples": [[round(x) for x in (t, size, *sizes)] for t, size, sizes in samples[::5]],
        }


def main() -> None:
    """Run one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    making, measuring = commands.add_parser("make"), commands.add_parser("measure")
    making.add_argument("folder", type=Path)
    making.add_argument("--groups", type=int, default=20_000)
    measuring.add_argument("--groups", default="2500,20000")
    measuring.add_argument("--host", default="small")
    measuring.add_argument("--workers", type=int, default=2)
    measuring.add_argument("--json", type=Path)
    for command in (making, measuring):
        command.add_argument("--files", type=int, default=40)
    given = parser.parse_args()
    if given.command == "make":
        return make(given.folder, given.groups, given.files)
    found = []
    for groups in map(int, given.groups.split(",")):
        found.append(measure(groups, given.files, given.host, given.workers))
        print({name: value for name, value in found[-1].items() if name != "samples"}, flush=True)
        if given.json:
            given.json.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
