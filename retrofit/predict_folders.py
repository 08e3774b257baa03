"""`oretrofit predict --dask` of tables larger than memory: folders of Parquet files in, a folder of Parquet files out.

Train and test are shuffled by their groups with Dask's own shuffle, so that a partition has whole groups of both, and a
worker predicts it as `predict_groups` does. No process holds more than some partitions at a time.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from tabpfn.base import ModelSpecs

from . import cluster
from .calls import Said, repeat
from .columns import Table
from .files import replacing
from .hosts import lend
from .long_table import LongTable, find_few, read_groups
from .parquet_folders import TEXT, Column, Decided, Folder, Look, Reader, Seen, can_be_kept, decide, open_folder
from .ragged.groups import check_features, predict_long
from .ragged.report import RaggedReport, Tally
from .workers import call_each

if TYPE_CHECKING:
    from collections.abc import Iterator

    from distributed import Client

    from .api import Retrofit
    from .terminal import Begin

# What a partition has at most, on average: bytes of train and test, unpacked, and groups. And how many partitions there
# are at least, for each thread of the cluster.
_BYTES, _GROUPS, _SHARES = 2**26, 500, 4


@dataclass
class FolderTables:
    """Train and test in folders, looked at.

    Attributes:
        folders: Both.
        columns: What features, group and, in train, the target are.
        groups: How many rows each group has in each.
        few: The groups of test with too few train rows, where that is no error.
        notes: What a user may want to know, in sentences.
    """

    folders: tuple[Folder, Folder]
    target: str
    by: str
    columns: dict[str, Decided]
    groups: tuple[Mapping[Any, int], Mapping[Any, int]]
    few: list[Any]
    notes: list[str]

    @property
    def kinds(self) -> dict[Any, str]:
        """`numbers`, `dates` or `categories`, by feature."""
        return {name: decided.kind for name, decided in self.columns.items() if name not in (self.target, self.by)}


def look_at(
    train: Path,
    test: Path,
    client: Client,
    *,
    target: str,
    by: str,
    keep: Sequence[str],
    too_few: str,
    begin: Begin,
) -> FolderTables:
    """Look at all of two folders, piece by piece in the cluster's workers, and decide what their columns are.

    Raises `ValueError` as of `read_groups`, and for what takes a whole column to decide.
    """
    folders = (open_folder(train), open_folder(test))
    for folder, needed in zip(folders, ([target, by], [by]), strict=True):
        if missing := [name for name in needed if name not in folder.columns]:
            raise ValueError(f"{folder.name} has no column {missing[0]!r}")
    known = folders[0].columns
    if lacking := [name for name in keep if name not in folders[1].columns]:
        raise ValueError(f"--keep: {folders[1].name} has no column {lacking[0]!r}")
    if not keep and not folders[1].index:
        raise ValueError(
            f"answers to folders come in no order, and nothing names the rows of {folders[1].name}: name columns of it "
            "that tell them apart by --keep"
        )
    features: Any = check_features(
        known, [name for name in folders[1].columns if name not in keep or name in known], target=target, by=by
    )
    fields = _fields(folders[1], by, keep)
    mixed = [of for of in fields if len(folders[1].types[of.name]) > 1]
    done, found = begin("Reading", sum(len(folder.pieces) for folder in folders)), 0
    seen: list[Seen] = []
    looks = (Look([*features, target], by), Look(features, by, mixed))
    for folder, look in zip(folders, looks, strict=True):
        total: Seen | None = None
        with closing(call_each(look, folder.pieces, 0, client=client)) as parts:
            for _, part in parts:
                total = total.add(part) if total else part
                found += 1
                done(found)
        assert total is not None
        seen.append(total)
    columns = {
        name: decide(name, [side.columns[name] for side in seen], [folder.zones(name) for folder in folders])
        for name in features
    }
    columns[by] = _group_column(by, [side.columns[by] for side in seen])
    columns[target] = _target_column(target, seen[0].columns[target])
    if folders[0].rows > 1 and max(seen[0].groups.values()) == 1:
        raise ValueError(f"every row of train is a group of its own: {by!r} names rows, not groups")
    few, notes = find_few(seen[0].groups, seen[1].groups, folders[1].name, 2, too_few)
    return FolderTables(folders, target, by, columns, (seen[0].groups, seen[1].groups), few, notes)


def _fields(test: Folder, by: str, keep: Sequence[str]) -> list[pa.Field]:
    """What the answers get of test. Raises `ValueError` for columns that cannot be kept."""
    fields = [test.field(name) for name in dict.fromkeys([by, *test.index, *keep])]
    for of in fields[1:]:
        if not can_be_kept(of.type):
            raise ValueError(
                f"--keep: column {of.name!r} of {test.name} is {of.type}, which folders cannot keep: keep others that "
                "tell the rows apart, and join it to the answers by them"
            )
    return fields


def _group_column(by: str, sides: Sequence[Column]) -> Decided:
    kinds = {kind for side in sides for kind in side.kinds}
    if kinds <= {"text", "categories"}:
        return Decided("categories", (TEXT, TEXT))
    if kinds == {"numbers"} and all(np.issubdtype(dtype, np.integer) for side in sides for dtype in side.dtypes):
        return Decided("numbers", (np.int64, np.int64))
    found = sorted(kinds - {"numbers"} | {f"numbers ({dtype})" for side in sides for dtype in side.dtypes})
    raise ValueError(f"groups are text or whole numbers, in train and test alike; {by!r} is {', '.join(found)}")


def _target_column(target: str, column: Column) -> Decided:
    if odd := {kind: place for kind, place in column.kinds.items() if kind not in ("numbers", "nothing")}:
        kind, place = next(iter(odd.items()))
        raise ValueError(f"{place} is {kind}, and as a target of folders has to be stored as numbers")
    return Decided("numbers", (np.float64, np.float64))


@dataclass
class _Model:
    """What predicts, without the host that it was made of."""

    own: ModelSpecs
    variant: str = "closed"

    @property
    def lent_specs(self) -> ModelSpecs:
        return replace(self.own, model=lend(self.own.model))


@dataclass
class _Done:
    """What became of a partition: rows of test, those with a prediction, groups of test, and what was done."""

    rows: int
    predicted: int
    groups: int
    report: RaggedReport


@dataclass
class _PartPredictor:
    """Called with the number of a partition and its rows, predicts it and writes its answers; in a worker."""

    model: _Model
    tables: FolderTables
    readers: tuple[Reader, Reader]
    group: pa.Field
    levels: dict[str, float]
    folder: Path
    settings: dict[str, Any]

    def __call__(self, number: int, train: pd.DataFrame, test: pd.DataFrame) -> _Done:
        of = self.tables
        if test.empty:
            return _Done(0, 0, 0, Tally().report(0, {}))
        (train, _), (test, kept) = (
            reader.unpack(part) for reader, part in zip(self.readers, (train, test), strict=True)
        )
        train = train[train[of.by].isin(test[of.by].unique())].reset_index(drop=True)
        table = self._read(train, test, "")
        for group in table.faulty:  # read alone, so that rows are counted in the group
            own, wanted = (part[part[of.by] == group].reset_index(drop=True) for part in (train, test))
            table.faulty[group] = self._read(own, wanted, f" (rows of group {group!r})").faulty[group]
        if table.faulty and self.settings["on_error"] == "raise":
            group, reason = next(iter(table.faulty.items()))
            raise ValueError(f"group {group!r}: {reason}; such groups can be left out by --on-error skip")
        frame, report = predict_long(
            self.model,
            table,
            output_type="main",
            quantiles=list(self.levels.values()),
            too_few="nan",
            n_jobs=0,
            **self.settings,
        )
        answers = {"prediction": frame["mean"], **{name: frame[level] for name, level in self.levels.items()}}
        answers = {name: pa.array(values, pa.float64(), from_pandas=True) for name, values in answers.items()}
        columns = {of.by: pa.array(test[of.by].array).cast(self.group.type), **kept, **answers}
        with replacing(self.folder / f"part-{number:05d}.parquet") as file:
            pq.write_table(pa.table(columns), file)
        return _Done(len(test), int(frame["mean"].notna().sum()), test[of.by].nunique(), report)

    def _read(self, train: pd.DataFrame, test: pd.DataFrame, which: str) -> LongTable:
        of = self.tables
        return read_groups(
            Table(f"{of.folders[0].name}{which}", train),
            Table(f"{of.folders[1].name}{which}", test),
            list(of.kinds),
            target=of.target,
            by=of.by,
            too_few="nan",
            skip=True,
            kinds=of.kinds,
        )


def predict_folders(
    closed: Retrofit,
    tables: FolderTables,
    client: Client,
    out: Path,
    *,
    keep: Sequence[str],
    levels: dict[str, float],
    begin: Begin,
    **settings: Any,
) -> tuple[int, RaggedReport]:
    """Predict test's rows, and write them to a folder, whole or not at all.

    Args:
        closed: What predicts.
        tables: Train and test.
        client: Of the cluster; its workers have the folders at the same places.
        out: The folder. An earlier answer there is replaced.
        keep: Columns of test that the answers get.
        levels: Quantiles, by the name of their columns.
        begin: Called at the start of `Predicting`, to show progress.
        settings: As of `predict_ragged`.

    Returns:
        How many rows have a prediction, and what was done.
    """
    by, folders = tables.by, tables.folders
    if taken := [name for name in folders[1].index if name == "prediction" or name in levels]:
        raise ValueError(
            f"{folders[1].name}: the index {taken[0]!r} is called as a column of predictions is; rename it"
        )
    group, *kept = _fields(folders[1], by, keep)
    of_test = {name: decided for name, decided in tables.columns.items() if name != tables.target}
    readers = (Reader(0, tables.columns, []), Reader(1, of_test, kept))
    done, count, predicted = begin("Predicting", len(tables.groups[1])), 0, 0
    report = Tally().report(0, {})
    with _new_folder(out) as part:
        predictor = _PartPredictor(_Model(closed.lent_specs), _lean(tables), readers, group, levels, part, settings)
        for answer in _each_partition(predictor, tables, readers, client):
            report += answer.report
            predicted, count = predicted + answer.predicted, count + answer.groups
            done(count)
    return predicted, report


def _lean(tables: FolderTables) -> FolderTables:
    """Without what a worker does not need."""
    folders = [Folder(folder.name, {}, [], [], 0, 0) for folder in tables.folders]
    return FolderTables((folders[0], folders[1]), tables.target, tables.by, tables.columns, ({}, {}), [], [])


def _each_partition(
    predictor: Callable[..., _Done], tables: FolderTables, readers: Sequence[Reader], client: Client
) -> Iterator[_Done]:
    """Shuffle both tables by group, and predict each partition."""
    import dask
    import dask.dataframe as dd
    from distributed import as_completed

    threads = max(1, sum(client.nthreads().values()))
    groups, size = len(tables.groups[1]), sum(folder.size for folder in tables.folders)
    n = min(groups, max(_SHARES * threads, groups // _GROUPS, size // _BYTES))
    with client.as_current():
        shuffled = [
            dd.from_map(reader, folder.pieces, meta=reader.empty(), label="read").shuffle(
                on=reader.called(tables.by), npartitions=n, shuffle_method="p2p"
            )
            for reader, folder in zip(readers, tables.folders, strict=True)
        ]
        parts = [frame.to_delayed() for frame in shuffled]
        name, packed = cluster.send(client, predictor)
        call = dask.delayed(cluster.call, pure=False)
        futures = client.compute([call(name, packed, i, *pair) for i, pair in enumerate(zip(*parts, strict=True))])
    said: Said = set()
    try:
        for future in as_completed(futures, loop=client.loop):
            answer, caught = cluster.result_of(future)
            repeat(caught, said)
            yield answer
    finally:
        client.cancel(futures)


@contextmanager
def _new_folder(out: Path) -> Iterator[Path]:
    """A folder beside `out`, which gets its name when the block succeeds, and otherwise is removed."""
    place = out.resolve()
    part = place.with_name(f".{place.name[:40]}.{token_hex(4)}.part")
    old = part.with_suffix(".old")
    part.mkdir(parents=True)
    try:
        yield part
        if place.exists():
            place.replace(old)
        part.replace(place)
    except BaseException:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists() and not place.exists():
            old.replace(place)
        raise
    shutil.rmtree(old, ignore_errors=True)
