"""Columns of tables that no process reads as a whole: decided as `columns` does of the whole, or refused."""

import datetime
import subprocess
import sys
import uuid
from collections import Counter
from decimal import Decimal
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from oretrofit.retrofit.columns import Table, read_columns
from oretrofit.retrofit.parquet_folders import POSITION, Look, Reader, decide, open_folder
from oretrofit.retrofit.predict_folders import FolderTables, _fields, _group_column, _target_column, predict_folders
from oretrofit.retrofit.tables import read_table

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
    "dictionary of dates": (pa.array(["2024-12-31"] * N).dictionary_encode(), "looks like dates; store it as dates$"),
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


def decide_on(folders, name):
    return decide(
        name, [side.columns[name] for side in looked_at(folders, name)], [folder.zones(name) for folder in folders]
    )


@pytest.mark.parametrize("name", READ)
def test_pieces_are_read_as_the_whole(name, tmp_path):
    folders = write(tmp_path, name, READ[name])
    seen = looked_at(folders, name)
    decided = decide_on(folders, name)
    columns = {name: decided, "shop": _group_column("shop", [side.columns["shop"] for side in seen])}
    whole = read_columns([Table(folder.name, pd.read_parquet(folder.name)) for folder in folders], [name])
    assert decided.kind == whole.kinds[name]
    assert [side.groups for side in seen] == [Counter(a=8, b=8), Counter(a=4, b=4)]

    readers = [Reader(side, columns, []) for side in (0, 1)]
    parts = [[reader(piece) for piece in folder.pieces] for reader, folder in zip(readers, folders, strict=True)]
    for side in (0, 1):
        assert all((part.dtypes == readers[side].empty().dtypes).all() for part in parts[side])
        assert pd.concat(parts[side])[POSITION].tolist() == list(range(16 if side == 0 else 8))
    parts = [[reader.unpack(part)[0] for part in side] for reader, side in zip(readers, parts, strict=True)]
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
        decide_on(folders, name)


def test_columns_of_two_kinds_are_refused(tmp_path):
    folders = write(tmp_path, "x", range(N))
    table = pq.read_table(tmp_path / "train" / "04.parquet")
    pq.write_table(table.set_column(1, "x", pa.array(list("pqrs"))), tmp_path / "train" / "04.parquet")
    with pytest.raises(ValueError, match=r"'x' is not of one kind: .*04\.parquet: column 'x': text"):
        decide_on(folders, "x")


@pytest.mark.parametrize("name", ["words", "flags", "clocks", "dates", "dictionary"])
def test_targets_and_groups(name, tmp_path):
    seen = looked_at(write(tmp_path, name, READ[name]), name)
    with pytest.raises(ValueError, match="as a target of folders has to be stored as numbers"):
        _target_column(name, seen[0].columns[name])
    if name not in ("words", "dictionary"):
        with pytest.raises(ValueError, match="groups are text or whole numbers"):
            _group_column(name, [side.columns[name] for side in seen])


def test_groups_that_are_not_whole_numbers(tmp_path):
    seen = looked_at(write(tmp_path, "numbers", READ["numbers"]), "numbers")
    with pytest.raises(ValueError, match=r"whole numbers, in train and test alike; 'numbers' is numbers \(float64\)$"):
        _group_column("numbers", [side.columns["numbers"] for side in seen])


def test_periods_in_a_process_that_has_read_none(tmp_path):
    frame = pd.DataFrame({"shop": ["a"] * N, "x": pd.period_range("2024-01", periods=N, freq="M")})
    frame.to_parquet(tmp_path / "0.parquet", index=False)
    code = (
        "import sys; from pathlib import Path; from oretrofit.retrofit.parquet_folders import Look, open_folder\n"
        "print(*Look(['x'], 'shop')(open_folder(Path(sys.argv[1])).pieces[0]).columns['x'].kinds)"
    )
    found = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    whole = read_columns([Table("x", pd.read_parquet(tmp_path))] * 2, ["x"])
    assert found.stdout.strip() == whole.kinds["x"] == "dates"
    folder = open_folder(tmp_path)
    decided = decide_on([folder, folder], "x")
    rows, _ = (reader := Reader(0, {"x": decided}, [])).unpack(reader(folder.pieces[0]))
    assert rows["x"].tolist() == whole.frames[0]["x"].tolist()


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
    reader = Reader(0, {"x": decide_on([folder, folder], "x")}, [])
    rows = pd.concat(map(reader, folder.pieces[::-1]))
    assert rows[POSITION].tolist() != list(range(100))
    assert reader.unpack(rows)[0]["x"].tolist() == list(range(100))


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


# ---- Files that differ, odd names, what is kept ----------------------------------------------------


def write_files(folder, **files):
    """A folder of files, each of a column `x` beside one of groups."""
    folder.mkdir()
    for name, values in files.items():
        pq.write_table(pa.table({"shop": pa.array(["a"] * len(values), pa.string()), "x": values}), folder / name)
    return open_folder(folder)


def test_files_without_rows_say_nothing(tmp_path):
    empty, filled = pa.nulls(0), pa.array([2**60 + 1, 2])
    folder = write_files(tmp_path / "x", a=empty, b=filled, c=pa.array([], pa.string()), d=filled)
    assert [(piece.position, piece.groups) for piece in folder.pieces] == [(0, [0]), (2, [0])]
    assert decide_on([folder, folder], "x") == ("numbers", (np.int64, np.int64), False)
    with pytest.raises(ValueError, match="none has no rows"):
        write_files(tmp_path / "none", a=empty)


CLOCKS = {
    "first file": {"a": ([1], "Asia/Tokyo"), "b": ([2], "UTC")},
    "none in the first file": {"a": ([None], "Asia/Tokyo"), "b": ([2], "UTC")},
    "no rows in the first file": {"a": ([], "Asia/Tokyo"), "b": ([2], "UTC"), "c": ([3], "+01:00")},
    "an offset": {"a": ([1], "+01:00"), "b": ([2], "Asia/Tokyo")},
    "nothing in train": {"a": ([None], "Asia/Tokyo")},
}


@pytest.mark.parametrize("train", CLOCKS)
def test_clocks_are_those_of_one_machine(train, tmp_path):
    files = {name: pa.array(values, pa.timestamp("us", zone)) for name, (values, zone) in CLOCKS[train].items()}
    folders = [
        write_files(tmp_path / "train", **files),
        write_files(tmp_path / "test", a=pa.array([0], pa.timestamp("us", "US/Pacific"))),
    ]
    whole = read_columns([read_table(Path(folder.name)) for folder in folders], ["x"])
    clocks = [str(frame["x"].dt.tz) for frame in whole.frames]
    assert [str(dtype.tz) for dtype in decide_on(folders, "x").dtypes] == clocks


def test_clocks_of_two_kinds_are_refused(tmp_path):
    files = {name: pa.array([1], pa.timestamp("us", zone)) for name, zone in (("a", "UTC"), ("b", None))}
    folder = write_files(tmp_path / "x", **files)
    with pytest.raises(ValueError, match="column 'x': some times have an offset from UTC and some have none"):
        decide_on([folder, folder], "x")


def test_groups_beyond_int64(tmp_path):
    folder = write_files(tmp_path / "x", a=pa.array([1, 2**63 - 1], pa.uint64()), b=pa.array([1, 2**63], pa.uint64()))
    seen = Look(["shop"], "x")(folder.pieces[0])
    assert _group_column("x", [seen.columns["x"]]).dtypes[0] == np.int64 and seen.groups == {1: 1, 2**63 - 1: 1}
    with pytest.raises(
        ValueError, match=rf"b: column 'x' holds {2**63} \(row 2\), .* below 2\*\*63; store them as text"
    ):
        Look(["shop"], "x")(folder.pieces[1])


def test_no_name_is_anothers(tmp_path):
    names = ["(position)", "(kept) 0", "_partitions", "_worker", "0", "shop", "y", "1", "3"]
    frame = pd.DataFrame(RNG.standard_normal((6, len(names))), columns=names)
    frame.to_parquet(tmp_path / "0.parquet", index=False)
    folder = open_folder(tmp_path)
    reader = Reader(
        0, {name: decide_on([folder, folder], name) for name in names if name != "shop"}, [folder.field("0")]
    )
    rows = reader(folder.pieces[0])
    assert rows.columns.is_unique and not set(rows) & {"_partitions", "_worker"}
    found, kept = reader.unpack(rows.sample(frac=1, random_state=0))
    pd.testing.assert_frame_equal(found, frame.drop(columns="shop"))
    assert kept["0"].to_pylist() == frame["0"].tolist()


def test_columns_of_one_name(tmp_path):
    pq.write_table(pa.table([pa.array([1])] * 2, names=["x", "x"]), tmp_path / "0.parquet")
    with pytest.raises(ValueError, match=r"0\.parquet has several columns called 'x'"):
        open_folder(tmp_path)


KEPT = [
    pa.array([2**60 + 1, None]),
    pa.array([2**64 - 1, None], pa.uint64()),
    pa.array([0.1, float("nan"), None]),
    pa.array([True, None]),
    pa.nulls(2),
    pa.array([None, "", "ü"]),
    pa.array(["a", None], pa.large_string()),
    pa.array(["a", None], pa.string_view()),
    pa.array(["a", None, "b"]).dictionary_encode(),
    pa.array([b"\xff", b"", None]),
    pa.array([b"\xff\0", None], pa.binary(2)),
    pa.array([Decimal("1.50"), None]),
    pa.array([datetime.time(8, 15), None]),
    pa.array([datetime.date(9999, 12, 31), None]),
    pa.array([2**60 + 1, None], pa.timestamp("ns", "Europe/Paris")),
    pa.array([2**60 + 1, None], pa.duration("ns")),
    pa.array([uuid.UUID(int=1).bytes, None], pa.uuid()),
]


@pytest.mark.parametrize("values", KEPT, ids=lambda values: str(values.type))
def test_kept_columns_are_as_they_were(values, tmp_path):
    folder = write_files(tmp_path / "x", a=values, b=values[1:], c=pa.nulls(1))
    (field,) = _fields(folder, "shop", ["x"])[1:]
    reader = Reader(1, {}, [field])
    rows = [reader(piece) for piece in folder.pieces]
    assert all((part.dtypes == reader.empty().dtypes).all() for part in rows)
    _, kept = reader.unpack(pd.concat(rows[::-1]))
    assert kept["x"].type == field.type == getattr(values.type, "value_type", values.type)
    expected = [*values.to_pylist(), *values[1:].to_pylist(), None]
    assert list(map(repr, kept["x"].to_pylist())) == list(map(repr, expected))  # NaN is NaN
    assert kept["x"].null_count == expected.count(None)


@pytest.mark.parametrize("values", [[[1], None], [{"a": 1}], pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int8()))])
def test_nested_columns_cannot_be_kept(values, tmp_path):
    folder = write_files(tmp_path / "x", a=pa.array(values))
    with pytest.raises(
        ValueError, match=r"--keep: column 'x' of .*x is .*, which folders cannot keep: keep others that"
    ):
        _fields(folder, "shop", ["x"])


def test_kept_columns_of_several_types(tmp_path):
    folder = write_files(tmp_path / "x", a=pa.array([1], pa.int8()), b=pa.array([300, None]), c=pa.array([0.5]))
    fields = _fields(folder, "shop", ["x"])
    _, kept = (reader := Reader(1, {}, fields[1:])).unpack(pd.concat(map(reader, folder.pieces)))
    assert kept["x"].to_pylist() == [1, 300, None, 0.5]
    folder = write_files(tmp_path / "y", a=pa.array([2**60 + 1]), b=pa.array([0.5]))
    with pytest.raises(
        ValueError, match=r"a: column 'x' is int64 here and double in all files together: .*; write all"
    ):
        Look([], "shop", _fields(folder, "shop", ["x"])[1:])(folder.pieces[0])
    folder = write_files(tmp_path / "z", a=pa.array([1]), b=pa.array(["one"]))
    with pytest.raises(ValueError, match=r"column 'x' of .*z is not of one type, .*/a: int64; .*/b: string; write all"):
        _fields(folder, "shop", ["x"])


def test_an_index_called_as_an_answer(tmp_path):
    (tmp_path / "x").mkdir()
    pd.DataFrame({"shop": ["a"]}, pd.Index([7], name="q0.1")).to_parquet(tmp_path / "x" / "0.parquet")
    folder = open_folder(tmp_path / "x")
    tables = FolderTables((folder, folder), "y", "shop", {}, ({}, {}), [], [])
    with pytest.raises(ValueError, match=r"x: the index 'q0\.1' is called as a column of predictions is; rename it"):
        predict_folders(None, tables, None, tmp_path / "out", keep=[], levels={"q0.1": 0.1}, begin=None)
    assert not (tmp_path / "out").exists()


def test_what_arrow_cannot_read_is_named(tmp_path):
    folder = write_files(tmp_path / "x", a=pa.array([1], pa.time64("ns")), b=pa.array([0.5] * 1000))
    with pytest.raises(ValueError, match=r"cannot read .*a: Value 1 has non-zero nanoseconds"):
        Look(["x"], "shop")(folder.pieces[0])
    content = bytearray((tmp_path / "x" / "b").read_bytes())
    content[4:40] = b"\xff" * 36
    (tmp_path / "x" / "b").write_bytes(content)
    with pytest.raises(ValueError, match=r"cannot read .*b: "):
        Look(["x"], "shop")(folder.pieces[1])
