"""Every type of column that there is, with and without gaps, in train and in test: numbers, dates, categories, or an
error that says which cell."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from oretrofit.retrofit.columns import Columns, Table, read_columns, read_target, take

GAPS = [(), (0,), (1,), (0, 1)]  # which of train and test have a missing cell


def arrow(kind: pa.DataType) -> Callable[[list[Any]], pd.Series]:
    return lambda cells: pd.Series(pd.array(cells, dtype=pd.ArrowDtype(kind)))


def of(dtype: Any) -> Callable[[list[Any]], pd.Series]:
    return lambda cells: pd.Series(cells, dtype=dtype)


def text(spell: Callable[[Any], str] = str, dtype: Any = "str") -> Callable[[list[Any]], pd.Series]:
    return lambda cells: pd.Series([None if cell is None else spell(cell) for cell in cells], dtype=dtype)


def objects(make: Callable[[Any], Any]) -> Callable[[list[Any]], pd.Series]:
    return lambda cells: pd.Series([None if cell is None else make(cell) for cell in cells], dtype=object)


def dictionary(make: Callable[[list[Any]], pd.Series]) -> Callable[[list[Any]], pd.Series]:
    return lambda cells: make(cells).astype("category")


def array(cells: list[Any], kind: pa.DataType) -> pd.Series:
    return pd.Series(pd.array(pa.array(cells, kind), dtype=pd.ArrowDtype(kind)))


TEXTS = {
    "str": "str",
    "string": "string",
    "string[pyarrow]": pd.ArrowDtype(pa.string()),
    "large_string": pd.ArrowDtype(pa.large_string()),
    "objects": object,
}
if hasattr(pa, "string_view"):  # from pyarrow 16 on
    TEXTS["string_view"] = pd.ArrowDtype(pa.string_view())


def texts(name: str, spell: Callable[[Any], str]) -> dict[str, Callable[[list[Any]], pd.Series]]:
    return {f"{name} in {kind}": text(spell, dtype) for kind, dtype in TEXTS.items()}


NUMBERS = {
    **{kind: of(kind) for kind in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")},
    **{kind: of(kind) for kind in ("float16", "float32", "float64", "Float32", "Float64", "Sparse[float64]")},
    **{str(kind): arrow(kind) for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.float32(), pa.float64())},
    **{str(kind): arrow(kind) for kind in (pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())},
    "halffloat": lambda cells: array([None if c is None else np.float16(c) for c in cells], pa.float16()),
    "decimal128": lambda cells: array([None if c is None else Decimal(c) for c in cells], pa.decimal128(10, 2)),
    "decimal256": lambda cells: array([None if c is None else Decimal(c) for c in cells], pa.decimal256(50, 3)),
    "decimals": objects(Decimal),
    "ints": objects(int),
    "numpy scalars": objects(np.float32),
    "ints and floats": objects(lambda cell: int(cell) if cell % 2 else float(cell)),
    "decimals and floats": objects(lambda cell: Decimal(cell) if cell % 2 else float(cell)),
    "numbers and text": objects(lambda cell: cell if cell % 2 else str(cell)),
    "decimals as categories": dictionary(objects(Decimal)),
    **texts("text", str),
    **texts("floats", "{:.3f}".format),
    "blanks around": text(" {} ".format),
    "with exponent": text("{:.1e}".format),
}
INTEGERS = {  # which cannot have gaps
    kind: of(kind)
    for kind in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "Sparse[int64]")
}
TRUTH = {
    "boolean": of("boolean"),
    "bool[pyarrow]": arrow(pa.bool_()),
    "bools": objects(bool),
    "numpy bools": objects(np.bool_),
    "bools as categories": dictionary(objects(bool)),
    "dictionary of bools": lambda cells: array(cells, pa.bool_()).astype("category"),
    **texts("True", str),
    "TRUE": text(lambda cell: str(cell).upper()),
    "true": text(lambda cell: str(cell).lower()),
}


def day(cell: datetime.datetime) -> datetime.date:
    return cell.date()


DATES = {
    **{kind: of(kind) for kind in ("datetime64[s]", "datetime64[ms]", "datetime64[us]", "datetime64[ns]")},
    "date32": lambda cells: array([None if c is None else day(c) for c in cells], pa.date32()),
    "date64": lambda cells: array([None if c is None else day(c) for c in cells], pa.date64()),
    **{f"timestamp[{unit}]": arrow(pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")},
    "dates": objects(day),
    "datetimes": objects(lambda cell: cell),
    "Timestamps": objects(pd.Timestamp),
    "datetime64 scalars": objects(np.datetime64),
    "dates and datetimes": objects(lambda cell: cell if cell.day % 2 else cell.date()),
    "dates and text": objects(lambda cell: str(day(cell)) if cell.day % 2 else cell),
    "period[D]": lambda cells: pd.Series(pd.PeriodIndex(cells, freq="D")),
    "periods": objects(lambda cell: pd.Period(cell, freq="D")),
    "dates as categories": dictionary(of("datetime64[us]")),
    "ISO as categories": dictionary(text(lambda cell: str(day(cell)))),
    **texts("ISO", lambda cell: str(day(cell))),
    "with time": text(str),
    "with T": text(lambda cell: cell.isoformat()),
    "with fractions": text(lambda cell: cell.isoformat() + ".000"),
}
SECONDS = {
    "time32[s]": arrow(pa.time32("s")),
    "time64[us]": arrow(pa.time64("us")),
    "times": objects(lambda cell: cell),
    **texts("clock", str),
}
DURATIONS = {
    **{kind: of(kind) for kind in ("timedelta64[s]", "timedelta64[ns]")},
    "duration[us]": arrow(pa.duration("us")),
    "timedeltas": objects(lambda cell: cell),
    "numpy timedeltas": objects(np.timedelta64),
    "durations as categories": dictionary(of("timedelta64[us]")),
    **texts("duration", lambda cell: str(pd.Timedelta(cell))),
}
CATEGORIES = {
    **texts("text", str),
    "categories": dictionary(text()),
    "categories of objects": dictionary(text(dtype=object)),
    "dictionary": arrow(pa.dictionary(pa.int8(), pa.string())),
}


def days(first: str, count: int) -> list[datetime.datetime]:
    return [time.to_pydatetime() for time in pd.date_range(first, periods=count, freq="5D")]


def clock(minutes: range) -> list[datetime.time]:
    return [datetime.time(minute // 60, minute % 60, 30) for minute in minutes]


def seconds(cells: list[Any]) -> list[float]:
    """By hand, from the parts of a time or a duration."""
    return [
        np.nan
        if cell is None
        else 86400 * cell.days + cell.seconds
        if isinstance(cell, datetime.timedelta)
        else 3600 * cell.hour + 60 * cell.minute + cell.second
        for cell in cells
    ]


def floats(cells: list[Any]) -> list[float]:
    return [np.nan if cell is None else float(cell) for cell in cells]


FAMILIES: dict[str, tuple[dict[str, Callable], list[Any], list[Any], str, Callable]] = {
    "numbers": (NUMBERS, list(range(12)), [3, 5, 40, 7], "numbers", floats),
    "truth": (TRUTH, [True, False, False] * 4, [True, True, False, True], "numbers", floats),
    "dates": (DATES, days("2023-12-30", 12), days("2024-03-01", 4), "dates", pd.to_datetime),
    "seconds": (SECONDS, clock(range(500, 620, 10)), clock(range(700, 704)), "numbers", seconds),
    "durations": (
        DURATIONS,
        [datetime.timedelta(days=i - 2, minutes=i) for i in range(12)],
        [datetime.timedelta(minutes=i) for i in range(4)],
        "numbers",
        seconds,
    ),
    "categories": (CATEGORIES, list("abcd") * 3, list("acdb"), "categories", lambda cells: cells),
}


def read(train: pd.Series, test: pd.Series) -> Columns:
    tables = [Table(name, pd.DataFrame({"x": series})) for name, series in (("train", train), ("test", test))]
    return read_columns(tables, ["x"])


def with_gap(cells: list[Any]) -> list[Any]:
    return [*cells[:2], None, *cells[3:]]


@pytest.mark.parametrize(("family", "kind"), [(family, kind) for family in FAMILIES for kind in FAMILIES[family][0]])
def test_types(family: str, kind: str) -> None:
    """Whatever the type in train, in test and the gaps: one kind, and the values by hand."""
    kinds, train, test, expected_kind, expected = FAMILIES[family]
    turn = list(kinds).index(kind)
    # Each type with itself and every gap, and with a third of the others.
    pairs = [(other, GAPS[(turn + i) % len(GAPS)]) for i, other in enumerate(kinds) if (turn + i) % 3 == 0]
    for other, gaps in [*pairs, *((kind, gaps) for gaps in GAPS)]:
        tables = [with_gap(cells) if i in gaps else cells for i, cells in enumerate((train, test))]
        found = read(kinds[kind](tables[0]), kinds[other](tables[1]))
        assert (found.kinds, found.faults) == ({"x": expected_kind}, []), (other, gaps)
        for frame, cells in zip(found.frames, tables, strict=True):
            column = frame["x"]
            if expected_kind == "categories":
                assert isinstance(column.dtype, pd.CategoricalDtype)
                assert column.astype(object).where(column.notna(), None).tolist() == cells, (other, gaps)
                assert len(column.cat.categories) == 4
            elif expected_kind == "dates":
                assert column.dtype.kind == "M"
                assert column.equals(pd.Series(expected(cells)).astype(column.dtype)), (other, gaps)
            else:
                assert column.dtype.kind in "biuf"
                np.testing.assert_array_equal(column.astype(float), expected(cells), err_msg=f"{other} {gaps}")


@pytest.mark.parametrize("kind", INTEGERS)
def test_integers_without_gaps(kind: str) -> None:
    for other in NUMBERS:
        for kinds in ((INTEGERS[kind], NUMBERS[other]), (NUMBERS[other], INTEGERS[kind])):
            found = read(kinds[0]([1, 2, 3]), kinds[1]([4, 5]))
            assert found.kinds == {"x": "numbers"} and found.notes == []
            assert [frame["x"].tolist() for frame in found.frames] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_column_that_is_empty_on_one_side(family: str) -> None:
    kinds, cells, _, expected_kind, _ = FAMILIES[family]
    nothing = [
        *(pd.Series([None] * 3, dtype=dtype) for dtype in (object, "float64", "str", "Int64", "datetime64[ns]")),
        array([None] * 3, pa.null()),
        array([None] * 3, pa.list_(pa.int8())),
        pd.Series([None] * 3, dtype="category"),
    ]
    for i, kind in enumerate(kinds):
        empty = nothing[i % len(nothing)]
        for train, test in ((kinds[kind](cells), empty), (empty, kinds[kind](cells))):
            found = read(train, test)
            assert found.kinds == {"x": expected_kind}, (kind, empty.dtype)
            assert [frame["x"].isna().all() for frame in found.frames] == [train is empty, test is empty]
    for one in nothing:
        assert read(one, nothing[0]).kinds == {"x": "numbers"}


ONE_OF_EACH = {
    "numbers": ("Float64", [1, 2, 3]),
    "dates": ("date32", days("2024-01-01", 3)),
    "categories": ("text in str", ["a", "b", "c"]),
}


@pytest.mark.parametrize(("one", "other"), list(itertools.permutations(ONE_OF_EACH, 2)))
def test_different_kinds_in_train_and_test(one: str, other: str) -> None:
    """No column is of another kind in test without a word, whatever types both are."""
    pairs = list(itertools.product(FAMILIES[one][0], FAMILIES[other][0]))
    for kind, other_kind in pairs[::7]:
        train = FAMILIES[one][0][kind](FAMILIES[one][1])
        test = FAMILIES[other][0][other_kind](FAMILIES[other][1])
        try:
            found = read(train, test)
        except ValueError as error:
            assert "column 'x'" in str(error) and "train" in str(error), (kind, other_kind)
        else:
            # Cells of test are faults, or categories of which it is said that none is known.
            said = [fault.reason for fault in found.faults] or found.notes
            assert said and all(line.startswith("test: column 'x'") for line in said), (kind, other_kind)
            assert found.faults == [] or {fault.row for fault in found.faults} == set(range(len(test)))
            if found.kinds["x"] == "categories":
                assert one == "categories" and isinstance(train.dtype, pd.CategoricalDtype | pd.ArrowDtype)


REFUSED = {
    "list": array([[1], [2]], pa.list_(pa.int8())),
    "large_list": array([[1], [2]], pa.large_list(pa.int8())),
    "struct": array([{"a": 1}, {"a": 2}], pa.struct({"a": pa.int8()})),
    "map": array([[("a", 1)], [("b", 2)]], pa.map_(pa.string(), pa.int8())),
    "binary": array([b"a", b"b"], pa.binary()),
    "large_binary": array([b"a", b"b"], pa.large_binary()),
    "fixed_size_binary": array([b"a", b"b"], pa.binary(1)),
    "lists": pd.Series([[1], [2]]),
    "tuples": pd.Series([(1,), (2,)]),
    "sets": pd.Series([{1}, {2}]),
    "dicts": pd.Series([{"a": 1}, {"a": 2}]),
    "bytes": pd.Series([b"a", b"b"], dtype=object),
    "bytes as categories": pd.Series([b"a", b"b"], dtype=object).astype("category"),
    "arrays": pd.Series([np.arange(2), np.arange(3)]),
    "complex": pd.Series([1j, 2j]),
    "complex objects": pd.Series([1j, 2], dtype=object),
    "intervals": pd.Series(pd.interval_range(0, 2)),
    "objects": pd.Series([object(), object()]),
    "text and lists": pd.Series(["a", [1]]),
}


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("side", [0, 1])
def test_what_is_none_of_the_three_is_refused_by_name(kind: str, side: int) -> None:
    values = REFUSED[kind]
    row = 2 if kind == "text and lists" else 1
    for other in (pd.Series([1.0, 2.0]), pd.Series(["a", "b"])):
        pair = (values, other) if side == 0 else (other, values)
        with pytest.raises(
            ValueError, match=rf"^{('train', 'test')[side]}: column 'x' holds .*\(row {row}: .*leave it out"
        ):
            read(*pair)
    gap = values.reindex([-1, 0, 1]).reset_index(drop=True)
    with pytest.raises(ValueError, match=rf"\(row {row + 1}: "):
        read(gap, pd.Series([1.0]))
    with pytest.raises(ValueError, match="column 'x' holds"):
        read_target(Table("train", pd.DataFrame({"x": values})), "x")


def test_intervals_as_categories() -> None:
    """What `pd.cut` makes."""
    cut = pd.cut(pd.Series([0.1, 0.9, 1.5]), [0, 1, 2])
    found = read(cut, cut[:1])
    assert found.kinds == {"x": "categories"}
    assert found.frames[0]["x"].tolist() == ["(0, 1]", "(0, 1]", "(1, 2]"]


# ---- Text -----------------------------------------------------------------------------------------

PLAIN = [str(i) for i in range(20)]
ISO = [f"2024-01-{i:02}" for i in range(1, 21)]


def of_text(train: list[Any], test: list[Any], **settings: Any) -> Columns:
    tables = [
        Table(name, pd.DataFrame({"x": pd.Series(cells, dtype=object)}), **settings)
        for name, cells in (("train", train), ("test", test))
    ]
    return read_columns(tables, ["x"])


@pytest.mark.parametrize(
    ("train", "test", "values", "note"),
    [
        (["12,345", "1,234,567", "7"], ["999"], [12345, 1234567, 7, 999], "train: '12,345' as 12345"),
        (["-1,000.25", "+2,000"], ["3"], [-1000.25, 2000, 3], "train: '-1,000.25' as -1000.25"),
        (["4,500", "2"], ["3", "4"], [4500, 2, 3, 4], "train: '4,500' as 4500"),
        (["0,5", "12,34"], ["7", "1.234,5"], [0.5, 12.34, 7, 1234.5], "train: '0,5' as 0.5"),
        (["0,123", "1"], ["2"], [0.123, 1, 2], "train: '0,123' as 0.123"),
        (["1.5", "2"], ["2,5"], [1.5, 2, 2.5], "test: '2,5' as 2.5"),
        (["08:15", "23:59:59.5"], ["0:01"], [29700, 86399.5, 60], "train: '08:15' as 29700 seconds"),
        (
            ["1 days 00:00:01", "-2 days"],
            ["01:00:00"],
            [86401, -172800, 3600],
            "train: '1 days 00:00:01' as 86401 seconds",
        ),
        (["1e3", "-.5", "2."], ["+7", " 8 "], [1000, -0.5, 2, 7, 8], None),
        (["True", "FALSE"], ["1", "0"], [1, 0, 1, 0], None),
    ],
)
def test_notations_of_numbers(train: list[str], test: list[str], values: list[float], note: str | None) -> None:
    found = of_text(train, test)
    assert found.kinds == {"x": "numbers"} and found.faults == []
    assert pd.concat([frame["x"].astype(float) for frame in found.frames]).tolist() == values
    said = [line.replace("column 'x': ", "").replace("(row 1) is read ", "") for line in found.notes]
    assert said[:1] == ([note] if note else [])


def test_decimal_commas_of_a_whole_file() -> None:
    """Where numbers have decimal commas, a point stands between thousands."""
    for cells, values, note in (
        (["1,5", "12,345"], [1.5, 12.345], "'1,5' (row 1) is read as 1.5"),
        (["1.234", "999"], [1234, 999], "'1.234' (row 1) is read as 1234"),
        (["48.85", "2.5"], [48.85, 2.5], None),
        (["0.125", "0.250"], [0.125, 0.25], None),
    ):
        found = of_text(cells, cells, decimal_comma=1)
        assert found.frames[0]["x"].tolist() == values
        assert found.notes[:1] == ([f"train: column 'x': {note}"] if note else [])


@pytest.mark.parametrize(
    ("written", "cells", "values"),
    [
        # one separator: what one of the two shows holds for both
        ([(2, ";"), (1, ";")], (["12,345"], ["1.234"]), [12.345, 1234]),
        ([(-2, ";"), (1, ";")], (["12,345"], ["1,234"]), [12345, 1234]),
        ([(2, "\t"), (-1, "\t")], (["12,345"], ["1,234"]), [12.345, 1.234]),
        ([(0, "\t"), (2, "\t")], (["12.345"], ["1,234"]), [12345, 1.234]),
        # two: each by itself
        ([(2, ";"), (-2, ",")], (["12,345"], ["1.234"]), [12.345, 1.234]),
        ([(2, ";"), (0, ",")], (["12,345", "?"], ["1.234", "?"]), [12.345, np.nan, 1.234, np.nan]),
        ([(0, ","), (2, ";")], (["12.345", None], ["1.234", "0,5"]), [12.345, np.nan, 1234, 0.5]),
        ([(2, ";"), (-2, ",")], (["True"], ["False"]), [1, 0]),
    ],
)
def test_files_that_are_written_differently(
    written: list[tuple[int, str]], cells: tuple[list[str], ...], values: list[float]
) -> None:
    tables = [
        Table(name, pd.DataFrame({"x": pd.Series(column, dtype=object)}), comma, separator)
        for name, column, (comma, separator) in zip(("train", "test"), cells, written, strict=True)
    ]
    found = read_columns(tables, ["x"])
    assert found.kinds == {"x": "numbers"} and found.faults == []
    np.testing.assert_array_equal(pd.concat([frame["x"].astype(float) for frame in found.frames]), values)


@pytest.mark.parametrize(
    "cell",
    ["2024-12-31", "2024-12", "2024-12-31 08:15", "2024-12-31T08:15:30", "2024-12-31T08", "2024-12-31T08:15:30.5"],
)
def test_dates_in_text(cell: str) -> None:
    found = of_text([cell, None, "2024-01-01"], ["2025-01-01", None])
    assert found.kinds == {"x": "dates"} and found.notes == found.faults == []
    assert found.frames[0]["x"][0] == pd.Timestamp(cell)
    assert found.frames[1]["x"].isna().tolist() == [False, True]


def test_months_are_not_any_two_numbers() -> None:
    for cell in ("1001-01", "2024-13", "2024-00", "2024-02-30", "2024-01-01 25:00"):
        assert of_text([cell], [cell]).kinds == {"x": "categories"}


@pytest.mark.parametrize(
    "cell",
    "31/12/2024|12/31/2024|31.12.2024|2024/12/31|2024.12.31|31-12-2024|12/31/24|5 May 2024|5-May-24|May 5, 2024|"
    "Dec 2024|Monday, 5 May 2024|2024-W05|2024 Q1|Q1 2024|31/12/2024 08:15|31.12.24|31-12-24|12/2024|"
    "2024-12-31 08:15 UTC|2024-12-31t08:15:00z|2024-12-31 08:15 AM|2024-12-31, 08:15|2024-12-31 (Tue)".split("|"),
)
def test_dates_in_another_notation_are_refused(cell: str) -> None:
    for train, test in (([None, cell], [cell]), (["2024-12-31"], [cell]), ([None, cell], ["2024-12-31"])):
        try:
            found = of_text(train, test)
        except ValueError as error:
            assert f"'{cell}' (row" in str(error) and "column 'x'" in str(error)
        else:
            assert [(fault.table, fault.row) for fault in found.faults] == [(1, 0)] and cell in found.faults[0].reason


def test_dates_in_two_notations_are_refused() -> None:
    cells = ["2024-12-31", "31/12/2024", "2024-12-30", None]
    with pytest.raises(ValueError, match=r"train: column 'x': '31/12/2024' \(row 2\) looks like a date"):
        of_text(cells, cells[:1])


def test_text_that_only_looks_a_little_like_dates() -> None:
    for cell in ("1.2.10", "10.0.0.1", "3/4", "May", "mayor 12", "12-05", "A-2024", "32.12.24", "2024-12-31-001"):
        assert of_text([cell, "b"], [cell]).kinds == {"x": "categories"}


@pytest.mark.parametrize(("good", "kind"), [(PLAIN, "number"), (ISO, "date like 2024-12-31")])
@pytest.mark.parametrize("stray", ["?", "-", "--", ".", "#REF!", "n.k.", "unknown"])
def test_a_stray_cell_in_train_is_a_gap(good: list[str], kind: str, stray: str) -> None:
    found = of_text([*good, stray], good[:2])
    assert found.kinds == {"x": f"{kind.split()[0]}s"} and found.faults == []
    assert found.frames[0]["x"].isna().tolist() == [False] * 20 + [True]
    assert found.notes == [f"train: column 'x': {stray!r} (row 21) is no {kind}; the cell counts as empty"]
    clean = of_text([*good, None], good[:2])
    assert clean.frames[0].equals(found.frames[0])


def test_many_marks_and_few_words() -> None:
    assert of_text(["1", "?", "?", "?"], ["2"]).frames[0]["x"].isna().sum() == 3  # a mark says nothing else
    assert of_text([*PLAIN, "a", "b"], ["2"]).kinds == {"x": "numbers"}  # two of 22
    mixed = of_text([*PLAIN, "a", "b", "c"], ["2"])  # three of 23 are more than a tenth
    assert mixed.kinds == {"x": "categories"}
    assert mixed.notes[0] == "train: column 'x' is read as categories, since 'a' (row 21) is no number"
    note = of_text([*PLAIN, "a", "b"], ["2"]).notes[0]
    assert note == "train: column 'x': 'a' (row 21) is no number, and so for 1 more; these cells count as empty"
    assert of_text(["+", "-", "+"], ["-"]).kinds == {"x": "categories"}
    assert of_text(["True", "False", "?"] * 9, ["True"]).kinds == {"x": "categories"}


@pytest.mark.parametrize(("good", "kind"), [(PLAIN, "number"), (ISO, "date")])
@pytest.mark.parametrize("typed", [False, True])
def test_a_stray_cell_in_test_is_a_fault(good: list[str], kind: str, typed: bool) -> None:
    train: Any = good
    if typed:
        train = pd.to_datetime(pd.Series(good)) if kind == "date" else pd.Series(good).astype(float)
    found = read(pd.Series(train), pd.Series([good[0], None, "?", "word"]))
    assert found.kinds == {"x": f"{kind}s"}
    assert [(fault.table, fault.row) for fault in found.faults] == [(1, 2), (1, 3)]
    assert found.faults[1].reason.startswith(f"test: column 'x': 'word' (row 4) is no {kind}")
    assert found.frames[1]["x"].isna().tolist() == [False, True, True, True]


def test_a_mark_that_train_has_is_a_gap_in_test_too() -> None:
    found = of_text([*PLAIN, "?"], ["1", "?"])
    assert found.faults == [] and found.frames[1]["x"].isna().tolist() == [False, True]
    assert found.notes[1] == "test: column 'x': '?' (row 2) is no number; the cell counts as empty"


def test_words_that_both_know_are_categories() -> None:
    found = of_text([*PLAIN, "3A"], ["1", "3A"])
    assert found.kinds == {"x": "categories"}
    assert found.frames[1]["x"].tolist() == ["=1", "=3A"]  # so that TabPFN takes no group's for numbers
    assert found.notes == ["train: column 'x' is read as categories, since '3A' (row 21) is no number"]


@pytest.mark.parametrize("cell", ["12%", "$3,400", "7 kg", "1_000", "0x1F", "1'000", "30:15:00", "1:30 PM", "-5 C"])
def test_numbers_with_something_around_them_are_said_to_be_categories(cell: str) -> None:
    found = of_text(["b", cell, None, cell], [cell])
    assert found.kinds == {"x": "categories"}
    assert found.notes == [
        f"train: column 'x' is read as categories, since {cell!r} (row 2) is neither number nor date"
    ]
    assert of_text(["b", "c", cell], [cell]).notes == []  # less than half


def test_blanks_around_cells_count_for_nothing() -> None:
    for train, test, kind in (
        ([" 2024-01-01", "2024-01-02 "], [" 2024-01-03 "], "dates"),
        ([" 08:15", "1 days "], [" 8:15 "], "numbers"),
        ([" 1", " NA", "2 ", "nan "], [" NA", " 3"], "numbers"),
    ):
        found = of_text(train, test)
        bare = of_text([cell.strip() for cell in train], [cell.strip() for cell in test])
        assert found.kinds == bare.kinds == {"x": kind} and found.faults == []
        for one, other in zip(found.frames, bare.frames, strict=True):
            pd.testing.assert_frame_equal(one, other)
    blank = read_target(Table("t", pd.DataFrame({"y": ["1", " NA"]})), "y")
    assert np.isnan(blank.y[1]) and not blank.not_numeric.any()


def test_categories_that_train_has_not_are_said() -> None:
    found = of_text(["a", "b", None], ["c", "a", "d", "c", None])
    assert found.notes == ["test: column 'x': 2 of 3 categories do not occur in train, such as 'c' (row 1)"]
    assert read(pd.Series(["a"], dtype="category"), pd.Series(["b"], dtype="category")).notes == [
        "test: column 'x': 1 of 1 categories do not occur in train, such as 'b' (row 1)"
    ]


@pytest.mark.parametrize("test", [["3"], pd.Series([3]), pd.Series([3.5]), pd.Series([True])])
def test_numbers_in_test_and_words_in_train(test: Any) -> None:
    with pytest.raises(ValueError, match=r"test: column 'x' holds numbers, such as .* and that of train does not: 'a'"):
        read(pd.Series(["a", "1"]), pd.Series(test))
    found = read(pd.Series(["a", "b", "c", "d", "3", "3.5", "True"]), pd.Series(test))  # which train knows
    assert found.kinds == {"x": "categories"} and len(found.notes) == 0


def test_declared_categories_stay_categories() -> None:
    """Spelled like numbers, or numbers: a declaration is believed, in train's table."""
    spelled = pd.Series([f"{i}" for i in range(40)], dtype="category")
    found = read(spelled, pd.Series(["7", "50"]))
    assert found.kinds == {"x": "categories"}
    assert found.frames[0]["x"].tolist() == [f"={i}" for i in range(40)]
    for codes in (
        pd.Series([1, 2, None], dtype="category"),
        pd.Series([1, 2, None]).astype("Int64").astype("category"),
    ):
        for test in (codes[:2], pd.Series([1, 2]), pd.Series([1.0, 2.0])):
            found = read(codes, test)
            assert found.kinds == {"x": "categories"} and found.notes == []
            assert found.frames[0]["x"].cat.categories.tolist() == [1, 2]
            assert found.frames[1]["x"].tolist() == [1, 2]
    assert read(pd.Series([1, 2], dtype="category"), pd.Series(["1", "x"])).frames[1]["x"].tolist() == ["=1", "=x"]
    assert read(pd.Series([1, 2]), pd.Series([1, 2], dtype="category")).kinds == {"x": "numbers"}


def test_infinite_numbers_are_faults() -> None:
    too_long = pd.Series([1, 10**400, 2, -(10**400)], dtype=object)
    for values in (pd.Series([1, np.inf, 2, -np.inf]), pd.Series(["1", "inf", "2", "1e400"]), too_long):
        found = read(values, pd.Series([np.inf]))
        assert [(fault.table, fault.row) for fault in found.faults] == [(0, 1), (0, 3), (1, 0)]
        assert found.faults[0].reason.startswith("train: column 'x' is infinite in row 2")
        assert found.frames[0]["x"].isna().tolist() == [False, True, False, True]


def test_numbers_that_float32_does_not_hold_are_faults() -> None:
    for values in (pd.Series([1, 3.4e38, -1e39]), pd.Series(["1", "3.4e38", "-1e39"])):
        found = read(values, pd.Series([1.0]))
        ((table, row, reason),) = found.faults
        assert (table, row) == (0, 2) and "column 'x' is -1e+39, which float32 does not hold, in row 3;" in reason
        assert found.frames[0]["x"].isna().tolist() == [False, False, True]


def test_clocks() -> None:
    """All times are on the first table's clock; with and without an offset from UTC cannot be mixed."""
    naive = pd.Series(pd.to_datetime(["2024-07-01 12:00", None]))
    paris, utc = naive.dt.tz_localize("Europe/Paris"), naive.dt.tz_localize("UTC")
    found = read(paris, utc)
    assert found.frames[1]["x"][0] == utc[0] and found.frames[1]["x"][0].hour == 14
    assert read(utc, paris).frames[1]["x"][0].hour == 10
    summer, winter = "2024-07-01T12:00+02:00", "2024-01-01T12:00+01:00"
    assert of_text([summer], [summer]).frames[0]["x"][0].hour == 12
    for train, test in (([summer], [winter]), ([summer, winter], [winter]), ([summer, winter], ["2024-01-01T11:00Z"])):
        found = of_text(train, test)  # in UTC
        assert [frame["x"].iloc[0].hour for frame in found.frames] == [10, 11]
    aware = pd.Series([pd.Timestamp(summer), pd.Timestamp(winter)], dtype=object)
    assert read(aware, aware).frames[0]["x"].dt.hour.tolist() == [10, 11]
    for pair in (
        (paris, naive),
        (naive, utc),
        (pd.Series([summer]), pd.Series(["2024-07-01"])),
        (pd.Series([summer, "2024-07-01"]), pd.Series([summer])),
        (pd.Series([summer]), naive),
        (pd.Series([pd.Timestamp(summer), pd.Timestamp("2024-07-01")], dtype=object), naive),
    ):
        with pytest.raises(ValueError, match=r"column 'x'.* offset"):
            read(*pair)


@pytest.mark.skipif(pd.__version__ < "3", reason="pandas 2 counts dates in nanoseconds")
def test_dates_before_and_after_the_nanoseconds() -> None:
    found = of_text(["0001-01-01", "9999-12-31"], ["2024-01-01"])
    assert found.kinds == {"x": "dates"} and found.faults == []


def test_what_is_typed_is_typed_again_alike() -> None:
    """`predict` types what it reads, and `predict_groups` what it is given."""
    frames = {
        "numbers": (PLAIN, ["1", None]),
        "truth": (["True", "False"] * 10, ["True", "True"]),
        "truth with gaps": (["True", None] * 10, ["True", "False"]),
        "dates": (ISO, [ISO[0], None]),
        "times": (["2024-01-01T10:00Z", None] * 10, ["2024-01-01T10:00Z", None]),
        "clock": (["10:00"] * 20, ["10:30", None]),
        "words": (["a", "b"] * 10, ["b", "c"]),
        "codes": (["1", "3A"] * 10, ["1", "7"]),
        "empty": ([None] * 20, ["5", None]),
        "stray": ([*PLAIN[1:], "?"], ["5", None]),
    }
    tables = [
        Table(name, pd.DataFrame({column: pd.Series(cells[i], dtype="str") for column, cells in frames.items()}))
        for i, name in enumerate(("train", "test"))
    ]
    first = read_columns(tables, list(frames))
    again = read_columns([Table(t.name, f) for t, f in zip(tables, first.frames, strict=True)], list(frames))
    assert again.kinds == first.kinds and again.faults == []
    for one, other in zip(first.frames, again.frames, strict=True):
        pd.testing.assert_frame_equal(one, other)
    assert all("do not occur in train" in note for note in again.notes)


def test_index_and_names_stay() -> None:
    train = pd.DataFrame({7: [1, 2], ("a", "b"): ["x", "y"]}, index=["r", "s"])
    found = read_columns([Table("train", train), Table("test", train[::-1])], list(train))
    assert list(found.frames[0]) == list(train) and list(found.frames[1].index) == ["s", "r"]
    assert found.frames[1][7].tolist() == [2, 1]
    assert train.dtypes.tolist() == [np.dtype(np.int64), train[("a", "b")].dtype]  # the caller's is as it was


def test_one_table_alone() -> None:
    found = read_columns(
        [Table("t", pd.DataFrame({"x": ["1", None], "k": ["a", "b"], "d": ["2024-01-01", None]}))], "xkd"
    )
    assert found.kinds == {"x": "numbers", "k": "categories", "d": "dates"} and found.notes == []


def test_take_keeps_only_the_categories_that_occur() -> None:
    frame = pd.DataFrame({"x": [1, 2, 3], "k": pd.Categorical(["a", None, "b"], categories=["a", "b", "c"])})
    taken = take(frame, np.array([2, 1]))
    assert taken["x"].tolist() == [3, 2] and taken["k"].cat.categories.tolist() == ["b"]
    assert taken["k"].isna().tolist() == [False, True]


# ---- The target -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [*NUMBERS, *INTEGERS])
def test_targets(kind: str) -> None:
    values = {**NUMBERS, **INTEGERS}[kind]([1, 2, 3])
    if "categories" in kind:
        return
    target = read_target(Table("train", pd.DataFrame({"y": values})), "y")
    assert target.y.tolist() == [1, 2, 3] and target.y.dtype == np.float64 and not target.not_numeric.any()


@pytest.mark.parametrize("scale", [1e-20, 1e-300, 1e150, 1e308])
def test_a_target_that_tabpfn_cannot_scale(scale: float) -> None:
    """Predictions would be 0, or not finite, whatever the target is."""
    for y in ([scale, None, -scale], [f"{scale:g}", "2e-300"]):
        with pytest.raises(ValueError, match=r"column 'y' is a target from .*: give it in another unit"):
            read_target(Table("t", pd.DataFrame({"y": y})), "y")
    for fine in ([1e-15, 2e-15], [1e140, -1e140], [1e-300, 1], [1e300, 1e300], [np.inf, 1]):
        assert read_target(Table("t", pd.DataFrame({"y": fine})), "y").y.tolist() == fine


def test_a_target_is_numbers_cell_by_cell() -> None:
    def read_y(cells: Any) -> Any:
        return read_target(Table("t", pd.DataFrame({"y": cells})), "y")

    target = read_y(["1", "high", None, "NA", "", "2.5", "inf"])
    np.testing.assert_array_equal(target.y, [1, np.nan, np.nan, np.nan, np.nan, 2.5, np.inf])
    assert target.not_numeric.tolist() == [False, True, False, False, False, False, False]
    target = read_y(["1,234", "7", "?"])
    assert target.y[:2].tolist() == [1234, 7] and target.not_numeric.tolist() == [False, False, True]
    assert target.notes == ["t: column 'y': '1,234' (row 1) is read as 1234"]
    for cells in (
        [True, False],
        ["True", "False"],
        pd.to_datetime(["2024-01-01", "2024-01-02"]),
        ["2024-01-01", "2024-01-02"],
        pd.to_timedelta(["1h", "2h"]),
        ["08:15", "09:15"],
        pd.Categorical(["1", "2"]),
        ["a", "b"],
    ):
        assert read_y(cells).not_numeric.all()
    assert np.isnan(read_y([None, None]).y).all() and not read_y([None, None]).not_numeric.any()
