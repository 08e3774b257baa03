"""Tables larger than memory: folders of Parquet files, read in pieces whose columns have one type in all of them.

What a column is depends on the whole table. So each piece is looked at first (`Look`), in any order and anywhere; from
what was found in all it is decided what the columns are (`decide`); and then a piece is read as that (`Reader`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from . import notations
from .columns import FEW, NUMBERS, Text
from .dtypes import Typed, typed

TEXT = pd.StringDtype("pyarrow")
POSITION = "(position)"  # of a row in its folder: a column of what is read
_PIECE = 2**25  # bytes, unpacked, of the row groups that are read together


class Piece(NamedTuple):
    """Row groups of a file, behind so many rows of the file and of the folder."""

    path: str
    groups: list[int]
    row: int
    position: int


@dataclass
class Folder:
    """A table in a folder of Parquet files.

    Attributes:
        name: What messages call it.
        schema: Of its first file.
        index: Its columns in which pandas has put an index.
        pieces: What is read at once.
        rows: How many there are.
        size: Bytes, unpacked.
    """

    name: str
    schema: pa.Schema
    index: list[str]
    pieces: list[Piece]
    rows: int
    size: int

    @property
    def columns(self) -> list[str]:
        """The names of its columns, without an index."""
        return [name for name in self.schema.names if name not in self.index]


def open_folder(folder: Path) -> Folder:
    """Look at the files of a folder, at their footers only.

    Raises `ValueError` for what is no folder of Parquet files with the same columns.
    """
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith((".", "_"))]
    if not files or not all(map(Path.is_file, files)):
        raise ValueError(f"{folder} holds {'other folders' if files else 'no files'}; give a folder of Parquet files")
    opened, rows, size = Folder(str(folder), None, [], [], 0, 0), 0, 0
    for file in map(Path.resolve, files):  # workers may be in another folder
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
        schema, first = parquet.schema_arrow, opened.schema
        if first is None:
            opened.schema = schema
            opened.index = [
                name for name in (schema.pandas_metadata or {}).get("index_columns", []) if name in schema.names
            ]
        elif sorted(schema.names) != sorted(first.names):
            odd = sorted(set(schema.names) ^ set(first.names))
            raise ValueError(f"{file} and {files[0]} do not have the same columns: {odd}")
        row = last = 0
        for i in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(i)
            if last and last + group.total_byte_size <= _PIECE:
                opened.pieces[-1].groups.append(i)
            else:
                opened.pieces.append(Piece(str(file), [i], row, rows))
                last = 0
            last += group.total_byte_size
            row, rows, size = row + group.num_rows, rows + group.num_rows, size + group.total_byte_size
    if not rows:
        raise ValueError(f"{folder} has no rows")
    opened.rows, opened.size = rows, size
    return opened


def _read(piece: Piece, columns: Iterable[str]) -> pd.DataFrame:
    """Some columns, with each row's number in the file as their index."""
    try:
        opened = pq.ParquetFile(piece.path)
    except OSError as error:
        raise ValueError(
            f"a worker cannot read {piece.path}: {error}; folders have to be at the same place on all machines"
        ) from error
    with opened as file:
        frame = file.read_row_groups(piece.groups, columns=list(dict.fromkeys(columns))).to_pandas(ignore_metadata=True)
    return frame.set_index(pd.RangeIndex(piece.row, piece.row + len(frame)))


@dataclass
class Column:
    """What was seen of a column.

    Attributes:
        kinds: As of `typed`, each with where it was seen first.
        dtypes: Of numbers.
        zones: Of dates.
        looks: As of `text_counts`, of text and of categories.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    dtypes: set[Any] = field(default_factory=set)
    zones: set[Any] = field(default_factory=set)
    looks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, side: Typed, place: str) -> Column:
        """Of a piece."""
        kind = "numbers that are truth values or times" if side.kind == "numbers" and not side.plain else side.kind
        seen = cls({kind: place})
        if side.kind in ("numbers", "nothing"):
            seen.dtypes.add(side.values.dtype)
        elif side.kind == "dates":
            seen.zones.add(side.values.dt.tz)
        else:
            seen.looks = text_counts(Typed("text", side.values.astype(object)))
        return seen

    def add(self, other: Column) -> None:
        """Of another piece."""
        self.kinds = {**other.kinds, **self.kinds}
        self.dtypes |= other.dtypes
        self.zones |= other.zones
        self.looks += other.looks


@dataclass
class Seen:
    """What was seen of a table: its columns, and how many rows each group has."""

    columns: dict[str, Column]
    groups: Counter[Any]

    def add(self, other: Seen) -> Seen:
        """This, with what was seen of another piece."""
        for name, column in other.columns.items():
            self.columns[name].add(column)
        self.groups += other.groups
        return self


@dataclass(frozen=True)
class Look:
    """Called with a piece, sees what is in some of its columns and in that of the groups."""

    columns: Sequence[str]
    by: str

    def __call__(self, piece: Piece) -> Seen:
        """Raises `ValueError` for a type that cannot be used, and for rows without a group."""
        frame = _read(piece, [*self.columns, self.by])
        columns = {}
        for name in [*self.columns, self.by]:
            place = f"{piece.path}: column {name!r}"
            columns[name] = Column.of(typed(frame[name], place), place)
        groups = frame[self.by]
        if groups.isna().any():
            row = int(groups.isna().idxmax())
            raise ValueError(
                f"{piece.path}: {groups.isna().sum()} rows have no group in {self.by!r}, such as row {row + 1}"
            )
        return Seen(columns, Counter(groups.tolist()))


def text_counts(side: Typed) -> Counter[str]:
    """What the cells of a column of text look like, in numbers that can be added up over parts of a table.

    How many are `filled`, like a date in other notations (`odd dates`), and by the name of each notation: written so,
    or else `words beside` it, which are no marks of a gap.
    """
    text = Text([side])
    ways = [*NUMBERS, notations.truth, notations.lengths_of_time, notations.dates]
    found = Counter({"filled": text.filled(0), **{way.__name__: text.count(0, way) for way in ways}})
    for way in ways:
        words = [cell for cell in text.strays(0, way) if not notations.is_mark(cell)]
        found[f"words beside {way.__name__}"] = len(text.rows(0, words))
    found["odd dates"] = len(text.rows(0, filter(notations.looks_like_a_date, text.cells)))
    return found


class Decided(NamedTuple):
    """What a column is: its kind; its types in train and test; whether its categories get a mark (`columns`)."""

    kind: str
    dtypes: tuple[Any, ...]
    marked: bool = False


def decide(name: str, sides: Sequence[Column]) -> Decided:
    """What a column of train and test is.

    Raises `ValueError` where it is not one thing, or where that would take all of its text to see.
    """
    places: dict[str, str] = {}
    for side in sides:
        places = {**{kind.partition(" ")[0]: place for kind, place in side.kinds.items()}, **places}
    places.pop("nothing", None)
    if len(places.keys() - {"categories"}) > 1 or (
        "categories" in places and not places.keys() <= {"categories", "text"}
    ):
        listed = "; ".join(f"{place}: {kind}" for kind, place in places.items())
        raise ValueError(f"{name!r} is not of one kind: {listed}")
    kind = next(iter(places), "numbers")
    if kind == "dates":
        zones = [zone for side in sides for zone in side.zones]
        if len({zone is None for zone in zones}) > 1:
            raise ValueError(f"{places[kind]}: some times have an offset from UTC and some have none; write all alike")
        dtype: Any = np.dtype("datetime64[us]") if zones[0] is None else pd.DatetimeTZDtype("us", zones[0])
        return Decided("dates", (dtype, dtype))
    if kind == "numbers":
        return Decided("numbers", tuple(np.result_type(*side.dtypes) if side.dtypes else np.float64 for side in sides))
    if "categories" not in sides[0].kinds:
        _check_text(places["text"] if "text" in places else places[kind], [side.looks for side in sides])
    return Decided("categories", (TEXT, TEXT), any(side.looks["plain"] for side in sides))


def _check_text(place: str, looks: Sequence[Counter[str]]) -> None:
    """Raise `ValueError` for text that one machine might read as something else than categories (`columns._Column`)."""
    as_numbers = [way.__name__ for way in NUMBERS]
    ways = {way: "numbers" for way in (*as_numbers, "truth", "lengths_of_time")} | {"dates": "dates"}
    for way, kind in ways.items():
        train = looks[0]
        if way in (*as_numbers, "dates"):
            likely = [train[way] > 0 and train[f"words beside {way}"] <= FEW * train["filled"]]
        else:
            likely = [train["filled"] == train[way] > 0]
        likely += [test["filled"] == test[way] > 0 for test in looks[1:]]
        if any(likely):
            raise ValueError(
                f"{place} is text, and looks like {kind}; store it as {kind}, or as categories (a dictionary) in train"
            )
    if any(side["odd dates"] and side["odd dates"] + side["dates"] > (1 - FEW) * side["filled"] for side in looks):
        raise ValueError(f"{place} is text that looks like dates; store it as dates")


@dataclass(frozen=True)
class Reader:
    """Called with a piece, reads it with the columns' types, and each row's position in the folder.

    Attributes:
        side: 0 for train, 1 for test.
        columns: What features, target and group are.
        kept: Columns to read as they are, by the name that they get.
    """

    side: int
    columns: Mapping[str, Decided]
    kept: Mapping[str, pa.Field]

    def __call__(self, piece: Piece) -> pd.DataFrame:
        """The rows of a piece."""
        frame = _read(piece, [*self.columns, *(of.name for of in self.kept.values())])
        found = {name: self._typed(frame[name], decided) for name, decided in self.columns.items()}
        found |= self._kept(frame)
        found[POSITION] = pd.Series(np.arange(len(frame), dtype=np.int64) + piece.position, index=frame.index)
        return pd.DataFrame(found).reset_index(drop=True)

    def empty(self) -> pd.DataFrame:
        """What is read of no rows, with its types."""
        found = {name: pd.Series(dtype=decided.dtypes[self.side]) for name, decided in self.columns.items()}
        found |= self._kept(pa.schema(self.kept.values()).empty_table().to_pandas())
        return pd.DataFrame({**found, POSITION: pd.Series(dtype=np.int64)})

    def _kept(self, frame: pd.DataFrame) -> dict[str, pd.Series]:
        """Text in the type that Dask moves best, and others as they are."""
        return {
            new: frame[of.name].astype(TEXT) if _is_text(of.type) else frame[of.name] for new, of in self.kept.items()
        }

    def _typed(self, values: pd.Series, decided: Decided) -> pd.Series:
        values, dtype = typed(values, str(values.name)).values, decided.dtypes[self.side]
        if decided.kind == "dates":
            values = pd.to_datetime(values, utc=isinstance(dtype, pd.DatetimeTZDtype))
        elif decided.kind == "categories":
            values = values.astype(object).where(values.notna(), None)
            values = values.map("={}".format, na_action="ignore") if decided.marked else values
        return values.astype(dtype)


def _is_text(of: pa.DataType) -> bool:
    of = of.value_type if pa.types.is_dictionary(of) else of
    return pa.types.is_string(of) or pa.types.is_large_string(of)
