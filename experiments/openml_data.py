"""Datasets, tasks and suites of OpenML, through its own client and that client's cache.

A suite is a list of tasks, and a task a dataset with a target of its own; the splits that tasks come with are not used.
"""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from xml.parsers.expat import ExpatError

from filelock import FileLock

from ..retrofit.columns import Table
from ..retrofit.files import write_text
from .dataset_error import DatasetError, Unavailable

# Suites by name: OpenML-CTR23 (Fischer et al., 2023); TabArena-v0.1 (Erickson et al., 2025), not all of it regression.
SUITES = {"ctr23": 353, "tabarena": 457}

# No metadata of features: where a cache lacks it and the network is down, asking for it makes the client delete the
# dataset's cache.
_NO_METADATA = {"download_qualities": False, "download_features_meta_data": False}


def read_openml_dataset(name: str, dataset_id: int) -> tuple[Table, str]:
    """A dataset and its default target. Raises `DatasetError`."""
    frame, target = _read(name, dataset_id)
    if not target:
        raise DatasetError(f"{name}: OpenML names no target for it; save it as a file and use csv:FILE#target")
    return frame, target


def read_openml_task(name: str, task_id: int) -> tuple[Table, str]:
    """The dataset and the target of a regression task. Raises `DatasetError`."""
    with _client(name) as openml:
        task = openml.tasks.get_task(task_id, download_splits=False, download_data=False, **_NO_METADATA)
    if task.task_type_id != openml.tasks.TaskType.SUPERVISED_REGRESSION:
        raise DatasetError(f"{name} is no regression task but one of {task.task_type}")
    return _read(name, int(task.dataset_id))[0], task.target_name


def regression_tasks(name: str, suite_id: int) -> list[str]:
    """The specs of a suite's regression tasks.

    The client does not cache suites, so the answer is kept beside its cache for when there is no network.

    Raises `DatasetError` if there is none, or if OpenML cannot be reached and the suite was never asked for.
    """
    kept: Path | None = None
    try:
        with _client(name) as openml:
            kept = Path(openml.config.get_cache_directory()) / f"oretrofit-suite-{suite_id}.json"
            in_suite = openml.study.get_suite(suite_id).tasks
            if not in_suite:
                raise DatasetError(f"{name}: the suite has no tasks; check the id on openml.org")
            # Of any status: a suite keeps a dataset that was deactivated since.
            regression = openml.tasks.list_tasks(
                openml.tasks.TaskType.SUPERVISED_REGRESSION, task_id=in_suite, status="all", output_format="dataframe"
            )
            found = set(regression.get("tid", ()))
    except Unavailable:
        if kept is None or not kept.exists():
            raise
        warnings.warn(f"{name}: OpenML could not be reached; the suite is as it was when last asked for", stacklevel=2)
        return json.loads(kept.read_text())
    specs = [f"openml-task:{task}" for task in in_suite if task in found]
    if not specs:
        raise DatasetError(f"{name}: none of the suite's {len(in_suite)} tasks is one of regression; check the id")
    write_text(kept, json.dumps(specs))
    return specs


def _read(name: str, dataset_id: int) -> tuple[Table, str]:
    with _client(name) as openml:
        dataset = openml.datasets.get_dataset(dataset_id, download_data=True, **_NO_METADATA)
        try:
            frame = dataset.get_data()[0]
        except MemoryError:
            raise
        except Exception as error:  # pyarrow's, the ARFF reader's, pickle's
            folder = Path(openml.config.get_cache_directory()) / "datasets" / str(dataset_id)
            shutil.rmtree(folder, ignore_errors=True)
            raise Unavailable(
                f"{name}: the file of dataset {dataset_id} cannot be read ({_cause(error)}). It was removed from the "
                f"cache ({folder}): run again to fetch it anew; if that does not help, OpenML's file is damaged"
            ) from error
    return Table(name, frame), dataset.default_target_attribute


@contextmanager
def _client(name: str) -> Iterator[ModuleType]:
    """Give the OpenML client, and turn its failures into `DatasetError`.

    One process at a time: two that find a file missing in the cache would both write it.
    """
    import openml  # slow, and only these specs need it
    import urllib3

    cache = Path(openml.config.get_cache_directory())
    cache.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(cache / "oretrofit.lock"):
            yield openml
    except DatasetError:
        raise
    except Exception as error:  # the client also raises requests' and minio's errors, ValueError and plain Exception
        answered = isinstance(error, openml.exceptions.OpenMLServerException)
        lost = (
            OSError,
            ExpatError,  # an XML answer that breaks off
            urllib3.exceptions.HTTPError,
            openml.exceptions.OpenMLServerError,
            openml.exceptions.OpenMLHashException,
        )
        if answered or not isinstance(error, lost):
            raise DatasetError(
                f"{name}: OpenML gave no usable data ({_cause(error)}); check the id on openml.org"
            ) from error
        raise Unavailable(
            f"{name}: OpenML could not be reached, or its answer is damaged ({_cause(error)}). Try again later; what "
            f"is in the cache ({cache}) works offline, and the bundled suite mini needs no network"
        ) from error


def _cause(error: Exception) -> str:
    """An error in one line: some of the client's hold a whole page of HTML."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}{'...' if len(text) > 300 else ''}"
