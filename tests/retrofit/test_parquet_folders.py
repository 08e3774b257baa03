"""Columns of tables that no process reads as a whole: decided as `columns` does of the whole, or refused."""

import datetime
from collections import Counter
from decimal import Decimal

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oretrofit.retrofit.columns import Table, read_columns
from oretrofit.retrofit.parquet_folders import POSITION, Look, Reader, decide, open_folder
from oretrofit.retrofit.predict_folders import _group_column, _target_column

N = 24
RNG = np.random.default_rng(0)
DAYS = pd.date_range("2024-01-01", periods=N)

# Columns of 24 rows: 16 of train and 8 of test, each in files of 4 rows.
READ = {
    "numbers": RNG.standard_normal(N),
    "whole numbers": np.arange(N),
    "gaps in one file": pa.array([None, *range(N - 1)]),
    "gaps in all but one": pa.array([*range(4), *[None] * (N - 4)], pa.int64()),
    "empty": pa.nulls(N),
    "flags": np.arange(N) % 2 == 0,
    "flags with gaps": pa.array([None, *[True, False, True] * 8][:N]),
    "decimals": pa.array([Decimal(f"{i}.5") for i in range(N)]),
    "clocks": pa.array([datetime.time(i % 24, 30) for i in range(N)]),
    "dates": pa.array([datetime.date(2024, 1, 1 + i) for i in range(N)]),
    "times": DAYS,
    "times of one zone": DAYS.tz_localize("Europe/Paris"),
    "times in one file": pa.array([DAYS[0], *[None] * (N - 1)], pa.timestamp("ms")),
    "words": RNG.choice(np.array(["red", "green", None], dtype=object), N),
    "words, later numbers": ["red"] * 8 + ["green"] * 6 + ["1", "2"] + ["red"] * 8,
    "numbers first": ["1"] * 4 + ["2"] * 4 + ["red"] * 12 + ["1"] * 4,
    "dates in one file": ["2024-12-31"] * 4 + ["never"] * 16 + ["2024-12-31"] * 4,
    "words in one file": [*["red"] * 4, *[None] * 12, *["red"] * 2, *[None] * 6],
    "dictionary of numbers": pd.Categorical([1, 2] * 12),  # a Parquet file makes them numbers again
    "dictionary": pd.Categorical(RNG.choice(["red", "green"], N)),
    "dictionary of numbers in text": pd.Categorical(RNG.choice(["1", "2", "10"], N)),
}

REFUSED = {
    "text of numbers": ([str(i) for i in range(N)], "is text, and looks like numbers; store it as numbers"),
    "text of numbers, gaps": (["1", "?"] * 12, "looks like numbers"),
    "text of numbers, few words": (["none", *map(str, range(N - 1))], "looks like numbers"),
    "text of numbers in test": (["red"] * 16 + ["1"] * 8, "looks like numbers"),
    "text of dates": ([f"2024-01-{i + 1:02}" for i in range(N)], "looks like dates; store it as dates"),
    "text of other dates": ([f"{i + 1:02}/01/2024" for i in range(N)], "looks like dates"),
    "text of flags": (["True", "False"] * 12, "looks like numbers"),
    "lists": ([[1]] * N, "values of the type ndarray"),
}


def write(folder, name, values):
    """The folders train and test, whose one feature is that."""
    table = pa.table({"shop": list("ab") * (N // 2), name: pa.array(values, from_pandas=True)})
    for side, rows in (("train", range(0, 16, 4)), ("test", range(16, N, 4))):
        (folder / side).mkdir()
        for i in rows:
            pq.write_table(table.slice(i, 4), folder / side / f"{i:02}.parquet")
    return [open_folder(folder / side) for side in ("train", "test")]


def looked_at(folders, name):
    seen = []
    for folder in folders:
        first, *others = map(Look([name], "shop"), folder.pieces[::-1])  # in any order
        for other in others:
            first = first.add(other)
        seen.append(first)
    return seen


@pytest.mark.parametrize("name", READ)
def test_pieces_are_read_as_the_whole(name, tmp_path):
    folders = write(tmp_path, name, READ[name])
    seen = looked_at(folders, name)
    decided = decide(name, [side.columns[name] for side in seen])
    columns = {name: decided, "shop": _group_column("shop", [side.columns["shop"] for side in seen])}
    whole = read_columns([Table(folder.name, pd.read_parquet(folder.name)) for folder in folders], [name])
    assert decided.kind == whole.kinds[name]
    assert [side.groups for side in seen] == [Counter(a=8, b=8), Counter(a=4, b=4)]

    readers = [Reader(side, columns, {}) for side in (0, 1)]
    parts = [[reader(piece) for piece in folder.pieces] for reader, folder in zip(readers, folders, strict=True)]
    for side in (0, 1):
        assert all((part.dtypes == readers[side].empty().dtypes).all() for part in parts[side])
        assert pd.concat(parts[side])[POSITION].tolist() == list(range(16 if side == 0 else 8))
    # Each file of train beside one of test, as if they were partitions.
    for i, train in enumerate(parts[0]):
        j = i % 2
        part = read_columns([Table("train", train), Table("test", parts[1][j])], [name], {name: decided.kind})
        for found, all_rows, at in zip(part.frames, whole.frames, (i, j), strict=True):
            a, e = found[name], all_rows[name].iloc[4 * at : 4 * at + 4].reset_index(drop=True)
            if decided.kind == "categories":
                a, e = a.cat.remove_unused_categories(), e.cat.remove_unused_categories()
                assert a.cat.categories.tolist() == e.cat.categories.tolist()
                assert a.cat.codes.tolist() == e.cat.codes.tolist()
            elif decided.kind == "dates":
                assert a.dtype.kind == "M" and str(getattr(a.dt, "tz", None)) == str(e.dt.tz)
                np.testing.assert_array_equal(a, e)
            else:
                assert (a.dtype == e.dtype) or a.isna().all()
                np.testing.assert_array_equal(a.to_numpy(float), e.to_numpy(float))


@pytest.mark.parametrize("name", REFUSED)
def test_what_takes_the_whole_column_to_decide_is_refused(name, tmp_path):
    values, message = REFUSED[name]
    folders = write(tmp_path, name, values)
    with pytest.raises(ValueError, match=message):
        decide(name, [side.columns[name] for side in looked_at(folders, name)])


def test_columns_of_two_kinds_are_refused(tmp_path):
    folders = write(tmp_path, "x", range(N))
    table = pq.read_table(tmp_path / "train" / "04.parquet")
    pq.write_table(table.set_column(1, "x", pa.array(list("pqrs"))), tmp_path / "train" / "04.parquet")
    with pytest.raises(ValueError, match=r"'x' is not of one kind: .*04\.parquet: column 'x': text"):
        decide("x", [side.columns["x"] for side in looked_at(folders, "x")])


@pytest.mark.parametrize("name", ["words", "flags", "clocks", "dates", "dictionary"])
def test_targets_and_groups(name, tmp_path):
    seen = looked_at(write(tmp_path, name, READ[name]), name)
    with pytest.raises(ValueError, match="as a target of folders has to be stored as numbers"):
        _target_column(name, seen[0].columns[name])
    if name not in ("words", "dictionary"):
        with pytest.raises(ValueError, match="groups are text or whole numbers"):
            _group_column(name, [side.columns[name] for side in seen])


def test_folders(tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty holds no files"):
        open_folder(tmp_path / "empty")
    folder, _ = write(tmp_path, "x", range(N))
    assert (folder.rows, len(folder.pieces), folder.columns) == (16, 4, ["shop", "x"])
    assert [piece.position for piece in folder.pieces] == [0, 4, 8, 12]
    with pytest.raises(ValueError, match="holds other folders"):
        open_folder(tmp_path)
    (tmp_path / "train" / "notes.txt").write_text("hello")
    with pytest.raises(ValueError, match=r"cannot read .*notes\.txt"):
        open_folder(tmp_path / "train")
    pq.write_table(pa.table({"shop": ["a"]}), tmp_path / "test" / "99.parquet")
    with pytest.raises(ValueError, match=r"do not have the same columns: \['x'\]"):
        open_folder(tmp_path / "test")


def test_row_groups_are_read_together_while_they_are_small(tmp_path, monkeypatch):
    monkeypatch.setattr("oretrofit.retrofit.parquet_folders._PIECE", 1000)
    pq.write_table(pa.table({"shop": ["a"] * 100, "x": np.arange(100.0)}), tmp_path / "0.parquet", row_group_size=10)
    folder = open_folder(tmp_path)
    assert 1 < len(folder.pieces) < 10
    assert [i for piece in folder.pieces for i in piece.groups] == list(range(10))
    kinds = {"x": decide("x", [Look(["x"], "shop")(piece).columns["x"] for piece in folder.pieces[:2]])}
    rows = pd.concat(map(Reader(0, kinds, {}), folder.pieces))
    assert rows["x"].tolist() == rows[POSITION].tolist() == list(range(100))


def test_rows_without_a_group(tmp_path):
    pq.write_table(pa.table({"shop": ["a", None], "x": [1, 2]}), tmp_path / "0.parquet")
    with pytest.raises(ValueError, match=r"0\.parquet: 1 rows have no group in 'shop', such as row 2"):
        Look(["x"], "shop")(open_folder(tmp_path).pieces[0])


def test_a_folder_that_a_worker_does_not_have(tmp_path):
    pq.write_table(pa.table({"shop": ["a"], "x": [1]}), tmp_path / "0.parquet")
    (piece,) = open_folder(tmp_path).pieces
    (tmp_path / "0.parquet").unlink()
    with pytest.raises(ValueError, match=r"a worker cannot read .*0\.parquet.*at the same place on all machines"):
        Look(["x"], "shop")(piece)
