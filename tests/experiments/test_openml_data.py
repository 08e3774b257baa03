"""OpenML's datasets, tasks and suites, asked of a real server on loopback through OpenML's own client."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openml
import pytest
import urllib3

from oretrofit.experiments.case_runner import _may_pass
from oretrofit.experiments.datasets import DatasetError, load_dataset, make_case, resolve_suite

from .openml_server import N_ROWS, Server, serving, table

RETRIES = 3
# Datasets (43 is in Parquet) and targets, by specs.
DATASETS = {
    "openml:41": (41, "y"),
    "openml:42": (42, "y"),
    "openml:43": (43, "y"),
    "openml-task:101": (41, "height"),
    "openml-task:103": (43, "y"),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Server]:
    with serving() as server:
        monkeypatch.setattr(openml.config, "server", f"{server.url}/api/v1/xml")
        monkeypatch.setattr(openml.config, "_root_cache_directory", tmp_path)
        monkeypatch.setattr(openml.config, "connection_n_retries", RETRIES)
        monkeypatch.setattr(openml._api_calls, "_human_delay", lambda n: 0)
        monkeypatch.setattr(urllib3.Retry, "sleep", lambda *_: None)
        yield server


def check(spec: str) -> None:
    """That a dataset is read as it is."""
    number, target = DATASETS[spec]
    expected, dataset = table(number), load_dataset(spec)
    assert (dataset.name, dataset.target) == (spec, target)
    assert list(dataset.X) == [c for c in ("height", "town", "y") if c != target]  # and not the row id
    np.testing.assert_array_equal(dataset.y, expected[target])
    assert dataset.X["town"].tolist() == expected["town"].tolist()
    assert len(make_case(dataset, 0).y_train) == N_ROWS - N_ROWS // 3


def test_named_suites_are_their_regression_tasks(server: Server) -> None:
    assert resolve_suite("ctr23") == ["openml-task:101", "openml-task:103"]
    assert "/api/v1/xml/study/353" in server.asked
    server.asked.clear()
    assert resolve_suite("tabarena, cars") == ["openml-task:103", "cars"]
    assert "/api/v1/xml/study/457" in server.asked
    assert resolve_suite("openml-suite:353,ctr23") == ["openml-task:101", "openml-task:103"]


def test_a_suite_without_regression_tasks_is_refused(server: Server) -> None:
    with pytest.raises(DatasetError, match=r"^openml-suite:7: none of the suite's 1 tasks is one of regression; check"):
        resolve_suite("openml-suite:7")
    with pytest.raises(DatasetError, match=r"^openml-suite:8: the suite has no tasks; check the id on openml.org"):
        resolve_suite("openml-suite:8")


@pytest.mark.parametrize("spec", DATASETS)
def test_datasets_and_tasks(server: Server, spec: str) -> None:
    check(spec)
    assert any(path.endswith(".pq" if DATASETS[spec][0] == 43 else ".arff") for path in server.asked)
    server.asked.clear()
    check(spec)
    assert not server.asked  # the cache is used, also where there is a network


def test_a_dataset_that_many_want_is_fetched_once(server: Server) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(check, ["openml:41", "openml-task:101"] * 4))
    assert sum("/files/" in path for path in server.asked) == 1


def test_a_task_of_another_kind_is_refused(server: Server) -> None:
    with pytest.raises(
        DatasetError, match=r"^openml-task:102 is no regression task but one of Supervised Classification$"
    ):
        load_dataset("openml-task:102")


@pytest.mark.parametrize(
    ("spec", "what"), [("openml:9", "dataset"), ("openml-task:9", "task"), ("openml-suite:9", "study")]
)
def test_unknown_ids(server: Server, spec: str, what: str) -> None:
    with pytest.raises(
        DatasetError, match=f"^{spec}: OpenML gave no usable data .*Unknown {what}.*check the id on"
    ) as raised:
        (resolve_suite if "suite" in spec else load_dataset)(spec)
    assert "\n" not in str(raised.value)


def test_what_was_answered_once_works_offline(server: Server) -> None:
    suite = resolve_suite("ctr23")
    for spec in ("openml:41", "openml:42", *suite):
        check(spec)
    server.close()
    asked = list(server.asked)
    with pytest.warns(UserWarning, match="^ctr23: OpenML could not be reached; the suite is as it was when last asked"):
        assert resolve_suite("ctr23") == suite
    for spec in DATASETS:  # 43 was read as a task
        check(spec)
    for spec, read in (("openml-task:102", load_dataset), ("tabarena", resolve_suite)):
        with pytest.raises(
            DatasetError, match=f"^{spec}: OpenML could not be reached, .* works offline, and the bundled"
        ):
            read(spec)
    assert server.asked == asked


# What goes wrong: a connection that is dropped, an error of the server, an answer that breaks off, and one that is too
# short by its own account.

PLACES = {
    "openml:41": ["/data/41", "41/t.arff"],
    "openml:42": ["/data/42", "42/t.arff"],
    "openml-task:103": ["/task/103", "/data/43", "43/t.pq"],
    "openml-suite:353": ["/study/353", "/task/list", "/estimationprocedure"],
}
FAULTS = [(spec, place) for spec, places in PLACES.items() for place in places]


def read(spec: str) -> None:
    if "suite" in spec:
        assert resolve_suite(spec) == ["openml-task:101", "openml-task:103"]
    else:
        check(spec)


@pytest.mark.parametrize("kind", ["dropped", "broken off"])
@pytest.mark.parametrize(("spec", "place"), FAULTS)
def test_a_connection_lost_once_is_tried_again(server: Server, spec: str, place: str, kind: str) -> None:
    server.faults = {place: (kind, 1)}
    read(spec)
    assert server.faults[place][1] == 0


@pytest.mark.parametrize("kind", ["dropped", "500", "broken off", "cut short"])
@pytest.mark.parametrize(("spec", "place"), FAULTS)
def test_a_failure_is_one_clear_line_and_leaves_nothing_behind(
    server: Server, spec: str, place: str, kind: str
) -> None:
    server.faults = {place: (kind, 10**6)}
    if place.endswith(".pq") and kind in ("dropped", "500"):
        read(spec)  # the client takes the dataset's other file
        return
    with pytest.raises(DatasetError, match=f"^{spec}: ") as raised:
        read(spec)
    message = str(raised.value)
    assert "\n" not in message and len(message) < 800
    assert "OpenML could not be reached" in message or (kind == "cut short" and "run again to fetch" in message)
    assert _may_pass(raised.value)  # a run that resumes tries again
    server.faults = {}
    read(spec)


@pytest.mark.parametrize("spec", ["openml:41", "openml-task:103"])
@pytest.mark.parametrize("damage", [lambda content: content[: len(content) // 2], lambda content: b""])
def test_a_damaged_cache_is_cleared(server: Server, tmp_path: Path, spec: str, damage) -> None:
    """As a process leaves it that was killed while it wrote."""
    check(spec)
    files = [file for file in tmp_path.rglob("*") if file.is_file() and file.parent.parent.name == "datasets"]
    for file in files:
        content = file.read_bytes()
        file.write_bytes(damage(content))
        try:
            check(spec)
        except DatasetError as error:
            assert "It was removed from the cache" in str(error) and "run again" in str(error)
            check(spec)
        if file.exists():
            file.write_bytes(content)
