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

from oretrofit.retrofit.columns import Columns, Table, read_columns

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
    "string_view": pd.ArrowDtype(pa.string_view()),
    "objects": object,
}


def texts(name: str, spell: Callable[[Any], str]) -> dict[str, Callable[[list[Any]], pd.Series]]:
    return {f"{name} in {kind}": text(spell, dtype) for kind, dtype in TEXTS.items()}


NUMBERS = {
    **{kind: of(kind) for kind in ("Int8", "Int16", "Int32", "Int64", "UInt8", "UInt16", "UInt32", "UInt64")},
    **{kind: of(kind) for kind in ("float16", "float32", "float64", "Float32", "Float64", "Sparse[float64]")},
    **{
        str(kind): arrow(kind)
        for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64())
        + (pa.float16(), pa.float32(), pa.float64())
    },
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
    for kind, other_kind in pairs[::7]:  # 7 divides no number of types: each meets others
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
