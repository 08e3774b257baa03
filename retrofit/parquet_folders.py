"""Tables larger than memory: folders of Parquet files, read in pieces whose columns have one type in all of them.

What a column is depends on the whole table. So each piece is looked at first (`Look`), in any order and anywhere; from
what was found in all it is decided what the columns are (`decide`); and then a piece is read as that (`Reader`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
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
_KEPT = "(kept) {}".format  # others are called by their number, so that no name is another's, nor one of Dask's own
_PIECE = 2**25  # bytes, unpacked, of the row groups that are read together

# Makes pandas tell Arrow of its types, as `read_parquet` does: a process that does not know periods reads numbers.
pa.array(pd.array([], dtype="period[D]"))


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
        types: Of each column: its types, each with the first file that has it, in the order of the files.
        index: Its columns in which pandas has put an index.
        pieces: What is read at once.
        rows: How many there are.
        size: Bytes, unpacked.
    """

    name: str
    types: dict[str, dict[pa.DataType, str]]
    index: list[str]
    pieces: list[Piece]
    rows: int
    size: int

    @property
    def columns(self) -> list[str]:
        """The names of its columns, without an index."""
        return [name for name in self.types if name not in self.index]

    def zones(self, name: str) -> list[Any]:
        """The time zones of a column of dates, None for none, in the order of the files: the first is that of all."""
        filled = [of for of in self.types[name] if not pa.types.is_null(of)]
        return [getattr(of.to_pandas_dtype(), "tz", None) if pa.types.is_timestamp(of) else None for of in filled]

    def field(self, name: str) -> pa.Field:
        """A column as it is written, of one type whatever its files have. Raises `ValueError` where there is none."""
        types = {of.value_type if pa.types.is_dictionary(of) else of: file for of, file in self.types[name].items()}
        try:
            schema = pa.unify_schemas([pa.schema({name: of}) for of in types], promote_options="permissive")
        except pa.ArrowException:
            listed = "; ".join(f"{file}: {of}" for of, file in types.items() if not pa.types.is_null(of))
            raise ValueError(
                f"column {name!r} of {self.name} is not of one type, {listed}; write all files alike"
            ) from None
        return schema.field(name)


def open_folder(folder: Path) -> Folder:
    """Look at the files of a folder, at their footers only.

    Raises `ValueError` for what is no folder of Parquet files with the same columns.
    """
    files = [file for file in sorted(folder.iterdir()) if not file.name.startswith((".", "_"))]
    if not files or not all(map(Path.is_file, files)):
        raise ValueError(f"{folder} holds {'other folders' if files else 'no files'}; give a folder of Parquet files")
    opened, rows, size = Folder(str(folder), {}, [], [], 0, 0), 0, 0
    for file in map(Path.resolve, files):  # workers may be in another folder
        try:
            parquet = pq.ParquetFile(file)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(f"cannot read {file}: {error}") from error
        schema = parquet.schema_arrow
        if twice := [name for name, times in Counter(schema.names).items() if times > 1]:
            raise ValueError(f"{file} has several columns called {twice[0]!r}; rename or remove them")
        if not opened.types:
            opened.types = {name: {} for name in schema.names}
            opened.index = [
                name for name in (schema.pandas_metadata or {}).get("index_columns", []) if name in schema.names
            ]
        elif odd := sorted(set(schema.names) ^ set(opened.types)):
            raise ValueError(f"{file} and {files[0]} do not have the same columns: {odd}")
        for of in schema if parquet.metadata.num_rows else ():  # types of no rows say nothing
            opened.types[of.name].setdefault(of.type, str(file))
        row = last = 0
        for i in range(parquet.metadata.num_row_groups):
            group = parquet.metadata.row_group(i)
            if not group.num_rows:  # its columns seem to be nothing
                continue
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


def _read(piece: Piece, columns: Iterable[str]) -> pa.Table:
    try:
        opened = pq.ParquetFile(piece.path)
    except OSError as error:
        raise ValueError(
            f"a worker cannot read {piece.path}: {error}; folders have to be at the same place on all machines"
        ) from error
    with opened as file, _naming(piece):
        return file.read_row_groups(piece.groups, columns=list(dict.fromkeys(columns)))


def _as_frame(table: pa.Table, columns: Iterable[str], piece: Piece) -> pd.DataFrame:
    with _naming(piece):
        return table.select(list(columns)).to_pandas(ignore_metadata=True)


@contextmanager
def _naming(piece: Piece) -> Iterator[None]:
    """Arrow's errors about what is in a file do not say in which."""
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"cannot read {piece.path}: {error}") from error


@dataclass
class Column:
    """What was seen of a column.

    Attributes:
        kinds: As of `typed`, each with where it was seen first.
        dtypes: Of numbers.
        looks: As of `text_counts`, of text and of categories.
    """

    kinds: dict[str, str] = field(default_factory=dict)
    dtypes: set[Any] = field(default_factory=set)
    looks: Counter[str] = field(default_factory=Counter)

    @classmethod
    def of(cls, side: Typed, place: str) -> Column:
        """Of a piece."""
        kind = "numbers that are truth values or times" if side.kind == "numbers" and not side.plain else side.kind
        seen = cls({kind: place})
        if side.kind in ("numbers", "nothing"):
            seen.dtypes.add(side.values.dtype)
        elif side.kind != "dates":
            seen.looks = text_counts(Typed("text", side.values.astype(object)))
        return seen

    def add(self, other: Column) -> None:
        """Of another piece."""
        self.kinds = {**other.kinds, **self.kinds}
        self.dtypes |= other.dtypes
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
    """Called with a piece, sees what is in some of its columns and in that of the groups.

    Attributes:
        columns: Features and, of train, the target.
        by: The group.
        kept: Columns that are to be written, of which files have several types.
    """

    columns: Sequence[str]
    by: str
    kept: Sequence[pa.Field] = ()

    def __call__(self, piece: Piece) -> Seen:
        """Raises `ValueError` for a type that cannot be used, and for rows without a group."""
        table = _read(piece, [*self.columns, self.by, *(of.name for of in self.kept)])
        for of in self.kept:
            _cast(table[of.name], of, piece.path)
        frame = _as_frame(table, [*self.columns, self.by], piece)
        frame.index = pd.RangeIndex(piece.row, piece.row + len(frame))
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
        if groups.dtype == np.uint64 and groups.max() >= 2**63:
            raise ValueError(
                f"{place} holds {groups.max()} (row {groups.idxmax() + 1}), and numbers of groups are below 2**63; "
                "store them as text"
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


def decide(name: str, sides: Sequence[Column], zones: Sequence[Sequence[Any]]) -> Decided:
    """What a column of train and test is.

    Args:
        name: What messages call it.
        sides: What was seen of it in train and in test.
        zones: Its time zones in train and in test (`Folder.zones`).

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
        # As of one machine: the clock of the first file is that of all, but where there are no dates at all.
        clocks = [zone for side, of in zip(sides, zones, strict=True) if kind in side.kinds for zone in of]
        if len({zone is None for zone in clocks}) > 1:
            raise ValueError(f"{places[kind]}: some times have an offset from UTC and some have none; write all alike")
        dtype: Any = np.dtype("datetime64[us]") if clocks[0] is None else pd.DatetimeTZDtype("us", clocks[0])
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
            # A dictionary of dates alone is dates on one machine, too.
            other = "" if kind == "dates" else ", or as categories (a dictionary) in train"
            raise ValueError(f"{place} is text, and looks like {kind}; store it as {kind}{other}")
    if any(side["odd dates"] and side["odd dates"] + side["dates"] > (1 - FEW) * side["filled"] for side in looks):
        raise ValueError(f"{place} is text that looks like dates; store it as dates")


@dataclass(frozen=True)
class Reader:
    """Called with a piece, reads it with the columns' types, and each row's position in the folder.

    What it reads is to be shuffled: columns have numbers for names, and types that Dask's shuffle leaves as they are.

    Attributes:
        side: 0 for train, 1 for test.
        columns: What features, target and group are.
        kept: Columns to read as they are.
    """

    side: int
    columns: Mapping[str, Decided]
    kept: Sequence[pa.Field]

    def called(self, name: str) -> str:
        """What a column, but for those kept, is called in what is read."""
        return str(list(self.columns).index(name))

    def __call__(self, piece: Piece) -> pd.DataFrame:
        """The rows of a piece."""
        table = _read(piece, [*self.columns, *(of.name for of in self.kept)])
        frame = _as_frame(table, self.columns, piece)
        found = {self.called(name): self._typed(frame[name], decided) for name, decided in self.columns.items()}
        kept = self._packed([_cast(table[of.name], of, piece.path) for of in self.kept])
        return pd.DataFrame({**found, **kept, POSITION: np.arange(len(frame), dtype=np.int64) + piece.position})

    def empty(self) -> pd.DataFrame:
        """What is read of no rows, with its types."""
        found = {self.called(name): pd.Series(dtype=of.dtypes[self.side]) for name, of in self.columns.items()}
        kept = self._packed(pa.schema(self.kept).empty_table().columns)
        return pd.DataFrame({**found, **kept, POSITION: pd.Series(dtype=np.int64)})

    def unpack(self, rows: pd.DataFrame) -> tuple[pd.DataFrame, dict[str, pa.ChunkedArray]]:
        """Of rows that were read, in the order of the folder: the columns by their names, and those kept."""
        rows = rows.sort_values(POSITION, ignore_index=True)
        frame = rows[list(map(self.called, self.columns))].set_axis(list(self.columns), axis=1)
        kept = {of.name: pa.array(rows[_KEPT(i)].array).cast(of.type) for i, of in enumerate(self.kept)}
        return frame, kept

    def _packed(self, values: Sequence[pa.ChunkedArray]) -> Mapping[Any, pd.Series]:
        columns = {_KEPT(i): column.cast(_carrier(column.type)) for i, column in enumerate(values)}
        return dict(pa.table(columns).to_pandas(types_mapper=_pandas_type, ignore_metadata=True).items())

    def _typed(self, values: pd.Series, decided: Decided) -> pd.Series:
        values, dtype = typed(values, str(values.name)).values, decided.dtypes[self.side]
        if decided.kind == "dates":
            values = pd.to_datetime(values, utc=isinstance(dtype, pd.DatetimeTZDtype))
        elif decided.kind == "categories":
            values = values.astype(object).where(values.notna(), None)
            values = values.map("={}".format, na_action="ignore") if decided.marked else values
        return values.astype(dtype)


def can_be_kept(of: pa.DataType) -> bool:
    """Whether a column of that type comes out of the shuffle as it went in."""
    return _carrier(of) is not None


def _carrier(of: pa.DataType) -> pa.DataType | None:
    """The type as which a column is shuffled, or None: on its way through pandas Dask loses many, such as decimals."""
    types = pa.types
    if isinstance(of, pa.BaseExtensionType):
        return _carrier(of.storage_type)
    if types.is_string(of) or types.is_large_string(of) or types.is_string_view(of) or types.is_decimal(of):
        return pa.large_string()
    if types.is_binary(of) or types.is_large_binary(of) or types.is_binary_view(of) or types.is_fixed_size_binary(of):
        return pa.large_binary()
    return of if types.is_primitive(of) or types.is_null(of) else None


def _pandas_type(of: pa.DataType) -> Any:
    """Arrow's own, in which whole numbers with gaps stay whole; and of text the one that Dask moves best."""
    return TEXT if pa.types.is_large_string(of) else pd.ArrowDtype(of)


def _cast(column: pa.ChunkedArray, of: pa.Field, path: str) -> pa.ChunkedArray:
    """A column as it is written. Raises `ValueError` for a file whose values it cannot hold."""
    try:
        return column.cast(of.type)
    except pa.ArrowException as error:
        raise ValueError(
            f"{path}: column {of.name!r} is {column.type} here and {of.type} in all files together: {error}; "
            "write all files alike"
        ) from error
