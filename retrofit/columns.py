"""Which columns are numbers, dates or categories, decided from all tables of one task together.

Whatever types CSV files, Parquet, Arrow or pandas have: a column ends as numbers (truth values are 1 and 0, times of
day and durations are seconds), as dates (datetime64), as categories (`category`), or as an error that names it. Text
is read cell by cell, as `notations` has it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from . import notations
from .dtypes import Typed, as_text, floats, typed

# What pandas takes for a missing cell in a CSV file.
MISSING = frozenset(
    "|#N/A|#N/A N/A|#NA|-1.#IND|-1.#QNAN|-NaN|-nan|1.#IND|1.#QNAN|<NA>|N/A|NA|NULL|NaN|None|n/a|nan|null".split("|")
)

# A column of the first table is still one of numbers, or dates, if at most this share of its cells are words.
FEW = 0.1

# Of float32, in which a model sees its columns.
_LARGEST = float(np.finfo(np.float32).max)

# Between which the spread of a target must lie: TabPFN adds 1e-20 to its standard deviation, and squares it in float64.
_SPREAD = (1e-16, 1e150)

# A way to read distinct cells of text; NaN or NaT where a cell is not written so.
_Notation = Callable[[Sequence[str]], Any]
NUMBERS: list[_Notation] = [notations.plain, notations.thousands, notations.decimal_comma]


@dataclass
class Table:
    """A table as it was read.

    Attributes:
        name: What messages call it.
        frame: Its columns, those of a CSV file as text.
        decimal_comma: Whether its numbers are written 1.234,5: 2 where they show that they are, -2 where they show that
            they are not, 1 or -1 where they may be or may not, 0 where there is nothing to see.
        separator: What stands between the cells of a CSV file. Files with one separator are taken to be written alike.
        notes: What a user may want to know of how it was read, in sentences.
    """

    name: str
    frame: pd.DataFrame
    decimal_comma: int = 0
    separator: str = ""
    notes: list[str] = field(default_factory=list)

    def place(self, column: Hashable) -> str:
        """What messages call a column."""
        return f"{self.name}: column {column!r}"


class Fault(NamedTuple):
    """A cell that cannot be used: of which table (by number) and row (both from 0), and what is wrong, in words."""

    table: int
    row: int
    reason: str


@dataclass
class Columns:
    """Columns of several tables, typed.

    Attributes:
        frames: The columns of each table, with its index: numbers, datetime64 or `category`.
        kinds: `numbers`, `dates` or `categories`, by column.
        notes: What was read in another way than one might think, in sentences.
        faults: Cells that cannot be used. They are missing in `frames`.
    """

    frames: list[pd.DataFrame]
    kinds: dict[Hashable, str]
    notes: list[str]
    faults: list[Fault]


@dataclass
class Target:
    """A target: y_N in float64, NaN where it is missing or not numeric, and where it is the latter."""

    y: np.ndarray
    not_numeric: np.ndarray
    notes: list[str]


def read_columns(
    tables: Sequence[Table], names: Iterable[Hashable], kinds: Mapping[Hashable, str] | None = None
) -> Columns:
    """Type columns of the first table (train) and of those that must match it (test).

    With `kinds` they were decided, and the columns typed, from more rows than there are here (`survey`).

    Raises `ValueError` for a column of a type that is none of the three, or of different ones in the tables.
    """
    columns = {name: _Column(name, tables, None if kinds is None else kinds[name]) for name in names}
    frames = [
        pd.DataFrame(
            {name: column.values[i].array for name, column in columns.items()},
            index=table.frame.index,
            columns=pd.Index(list(columns)),
        )
        for i, table in enumerate(tables)
    ]
    return Columns(
        frames,
        {name: column.kind for name, column in columns.items()},
        [note for column in columns.values() for note in column.notes],
        sorted(fault for column in columns.values() for fault in column.faults),
    )


def read_target(table: Table, name: Hashable) -> Target:
    """Read a column of numbers to predict: no truth values, times, dates or categories.

    Raises `ValueError` for a column of a type that `read_columns` refuses, and for numbers that TabPFN could not scale.
    """
    values = table.frame[name].reset_index(drop=True)
    side = typed(values, table.place(name))
    missing = values.isna()
    y, notes = pd.Series(np.nan, index=values.index), []
    if side.kind == "numbers" and side.plain:
        y = floats(side.values)
    elif side.kind == "text":
        text, missing = Text([side]), missing | side.values.str.strip().isin(MISSING)
        notation = max(_number_notations(table, [table]), key=lambda notation: text.count(0, notation))
        y = text.read(0, notation)
        notes = text.notes_on(notation, 0, table.place(name))
    finite = y[np.isfinite(y)]
    with np.errstate(over="ignore"):
        spread = np.ptp(finite) if len(finite) else 0.0
    if spread and not _SPREAD[0] < spread < _SPREAD[1]:
        raise ValueError(
            f"{table.place(name)} is a target from {finite.min():g} to {finite.max():g}, which TabPFN cannot scale: "
            "give it in another unit"
        )
    return Target(y.to_numpy(), (y.isna() & ~missing).to_numpy(), notes)


def listed(names: Sequence[Hashable] | pd.Index) -> str:
    """Names of columns for a message, with the blanks around them to be seen."""
    return f"{list(names[:20])}" + (f" and {len(names) - 20} more" if len(names) > 20 else "")


def take(frame: pd.DataFrame, rows: np.ndarray) -> pd.DataFrame:
    """Some rows, without the categories that occur in others: there may be very many."""
    taken = frame.iloc[rows]
    categories = taken.select_dtypes("category")
    return taken.assign(**{name: column.cat.remove_unused_categories() for name, column in categories.items()})


def _number_notations(table: Table, tables: Sequence[Table]) -> list[_Notation]:
    """How a table's numbers may be written, the likeliest first: as they show, or those of a table that is like it."""
    shown = [other.decimal_comma for other in (table, *tables) if other.separator == table.separator]
    seen = next((one for one in shown if abs(one) > 1), table.decimal_comma)
    # 1.234 is a thousand and more where numbers have decimal commas.
    return NUMBERS[::-1] if seen > 0 else NUMBERS


class Text:
    """The cells of a column's text, each distinct one read once."""

    def __init__(self, sides: Sequence[Typed]) -> None:
        self.sides = sides
        self.cells = list(dict.fromkeys(cell for side in sides if side.kind == "text" for cell in side.values.dropna()))
        at = {cell: i for i, cell in enumerate(self.cells)}
        self.codes = [
            np.array([at.get(cell, -1) for cell in (side.values if side.kind == "text" else ())], dtype=int)
            for side in sides
        ]
        self.gap = np.array([cell.strip() in MISSING for cell in self.cells], dtype=bool)
        # How often each cell occurs in each table.
        self.counts = [np.bincount(codes[codes >= 0], minlength=len(self.cells)) for codes in self.codes]
        self._read: dict[_Notation, Any] = {}

    def parsed(self, notation: _Notation) -> Any:
        """The distinct cells, read."""
        if notation not in self._read:
            self._read[notation] = notation(self.cells)
        return self._read[notation]

    def filled(self, i: int) -> int:
        """How many cells of table `i` are filled."""
        side = self.sides[i]
        return int(self.counts[i] @ ~self.gap) if side.kind == "text" else int(side.values.notna().sum())

    def count(self, i: int, notation: _Notation) -> int:
        """How many of them are written so, or have that type."""
        if self.sides[i].kind != "text":
            return self.filled(i) if self.sides[i].kind == _kind(notation) else 0
        return int(self.counts[i] @ (pd.notna(self.parsed(notation)) & ~self.gap))

    def fits(self, i: int, notation: _Notation) -> bool:
        """Whether all of them are."""
        return self.count(i, notation) == self.filled(i)

    def strays(self, i: int, notation: _Notation) -> list[str]:
        """The distinct cells of table `i` that are not."""
        stray = (self.counts[i] > 0) & pd.isna(self.parsed(notation)) & ~self.gap
        return [self.cells[at] for at in np.flatnonzero(stray)]

    def read(self, i: int, notation: _Notation) -> pd.Series:
        """Table `i`'s column, read."""
        if self.sides[i].kind != "text":
            return self.sides[i].values
        parsed, codes = self.parsed(notation), np.where(self.gap[self.codes[i]], -1, self.codes[i])
        if notation is notations.dates:
            return pd.Series(parsed.take(codes, allow_fill=True, fill_value=pd.NaT))
        return pd.Series(np.append(parsed, np.nan)[codes])

    def rows(self, i: int, cells: Iterable[str]) -> np.ndarray:
        """The rows of table `i`, from 0, that hold one of these cells."""
        wanted = set(cells)
        return np.flatnonzero(np.isin(self.codes[i], [at for at, cell in enumerate(self.cells) if cell in wanted]))

    def example(self, i: int, cells: Iterable[str]) -> str:
        """The first of these cells in table `i`, with its row."""
        row = self.rows(i, cells)[0]
        return f"{self.cells[self.codes[i][row]]!r} (row {row + 1})"

    def notes_on(self, notation: _Notation, i: int, place: str) -> list[str]:
        """How table `i`'s numbers were read, where they are not written as programs do."""
        if self.sides[i].kind != "text" or notation in (notations.plain, notations.truth, notations.dates):
            return []
        values = dict(zip(self.cells, self.parsed(notation), strict=True))
        odd = [cell for cell in self.strays(i, notations.plain) if not np.isnan(values[cell])]
        if notation is notations.decimal_comma:  # 1.234 is plain, but read in another way
            plain = self.parsed(notations.plain)
            odd += [c for c, p in zip(self.cells, plain, strict=True) if values[c] != p and not np.isnan(values[c])]
        if not odd or not len(rows := self.rows(i, odd)):
            return []
        cell = self.cells[self.codes[i][rows[0]]]
        unit = " seconds" if notation is notations.lengths_of_time else ""
        return [f"{place}: {self.example(i, [cell])} is read as {values[cell]:.12g}{unit}"]


def _kind(notation: _Notation) -> str:
    return "dates" if notation is notations.dates else "numbers"


class _Column:
    """One column of all tables: its `kind`, its `values` in each table, `notes` and `faults`."""

    def __init__(self, name: Hashable, tables: Sequence[Table], kind: str | None = None) -> None:
        self.tables, self.places = tables, [table.place(name) for table in tables]
        self.values: list[pd.Series] = []
        self.notes: list[str] = []
        self.faults: list[Fault] = []
        columns = [table.frame[name].reset_index(drop=True) for table in tables]
        self.sides = [typed(column, place) for column, place in zip(columns, self.places, strict=True)]
        if kind is not None:
            self.kind = kind
            return self._decided()
        if self.sides[0].kind != "categories":
            self.sides = [_undeclared(side) for side in self.sides]
        kinds = {side.kind: table.name for side, table in zip(self.sides, tables, strict=True)}
        kinds.pop("nothing", None)
        self.kind = next(iter(kinds), "numbers")
        if self.kind == "categories":
            self._categories()
        elif "text" in kinds:
            self._text()
        elif len(kinds) > 1:
            described = ", ".join(f"{kind} in {table}" for kind, table in kinds.items())
            raise ValueError(f"{self.places[0]} is not of one kind: {described}")
        else:
            self._typed([side.values for side in self.sides])

    def _decided(self) -> None:
        """Of a kind that is known, whose values have its type: but a column that is empty here seems to be of none."""
        if self.kind == "categories":
            return self._label([side.values.astype(object) for side in self.sides])
        empty = self.kind == "dates" and all(side.kind == "nothing" for side in self.sides)
        self._typed([side.values.astype("datetime64[ns]") if empty else side.values for side in self.sides])

    def _typed(self, values: list[pd.Series]) -> None:
        """Numbers or dates: what a model cannot hold is a fault, and clocks are set by the first that there is."""
        if self.kind == "dates":
            zones = [series.dt.tz for series in values if series.dtype.kind == "M"]
            if len({zone is None for zone in zones}) > 1:
                raise ValueError(f"{self.places[0]}: times have an offset from UTC in one table and none in the other")
            values = [pd.to_datetime(series, utc=zones[0] is not None) for series in values]
            self.values = [series if zones[0] is None else series.dt.tz_convert(zones[0]) for series in values]
            return
        for i, series in enumerate(values):
            numbers = series.to_numpy(np.float64)
            beyond = np.abs(numbers) > _LARGEST
            self.values.append(series.mask(beyond) if beyond.any() else series)
            for row in np.flatnonzero(beyond):
                what = "infinite" if np.isinf(numbers[row]) else f"{numbers[row]:g}, which float32 does not hold,"
                reason = f"{self.places[i]} is {what} in row {row + 1}; replace it or leave the cell empty"
                self.faults.append(Fault(i, int(row), reason))

    def _text(self) -> None:
        """Text in one table at least: numbers or dates if all tables are, or all but a few words in the first."""
        text, n = Text(self.sides), range(len(self.tables))
        numbers = [_number_notations(table, self.tables) for table in self.tables]
        alike = all(ways == numbers[0] for ways in numbers)
        for way in [*(numbers[0] if alike else ()), notations.truth, notations.lengths_of_time, notations.dates]:
            if all(text.fits(i, way) for i in n):
                return self._read(text, [way] * len(n))
        own = [[w for w in (*numbers[i], notations.truth, notations.lengths_of_time) if text.fits(i, w)] for i in n]
        if all(own):
            return self._read(text, [ways[0] for ways in own])
        way = max([*numbers[0], notations.dates], key=lambda way: [text.count(i, way) for i in n])
        ways = [way] * len(n)
        if not alike and way is not notations.dates:
            ways = [max(numbers[i], key=lambda way: text.count(i, way)) for i in n]
        if self._is_but_for_strays(text, ways):
            return self._read(text, ways)
        self._refuse_unlike(text)
        self._mixed_note(text, way)
        return self._label([_labels(side) for side in self.sides])

    def _is_but_for_strays(self, text: Text, ways: Sequence[_Notation]) -> bool:
        """Whether the first table's cells are written so, but for marks and a few words that no other table knows."""
        if any(side.kind not in ("text", "nothing", _kind(ways[0])) for side in self.sides):
            return False
        words = {cell for cell in text.strays(0, ways[0]) if not notations.is_mark(cell)}
        known_elsewhere = any(words & set(text.strays(i, ways[i])) for i in range(1, len(self.tables)))
        few = len(text.rows(0, words)) <= FEW * text.filled(0)
        return text.count(0, ways[0]) > 0 and few and not known_elsewhere

    def _read(self, text: Text, ways: Sequence[_Notation]) -> None:
        self.kind = _kind(ways[0])
        what = {"numbers": "number", "dates": "date like 2024-12-31"}[self.kind]
        if self.kind == "dates" and text.parsed(notations.dates).tz is not None:
            self._check_offsets(text)
        values = [text.read(i, way) for i, way in enumerate(ways)]
        if all(way is notations.truth for way in ways) and all(series.notna().all() for series in values):
            values = [series.astype(bool) for series in values]
        self._typed(values)
        for i, way in enumerate(ways):
            self.notes += text.notes_on(way, i, self.places[i])
            if text.sides[i].kind != "text" or not (strays := text.strays(i, way)):
                continue
            # In train a stray cell is a gap, and so is train's mark for a gap elsewhere.
            marks = strays if i == 0 else [cell for cell in text.strays(0, way) if notations.is_mark(cell)]
            if gaps := [cell for cell in strays if cell in marks]:
                more = len(text.rows(i, gaps)) - 1
                others = f", and so for {more} more; these cells count" if more else "; the cell counts"
                self.notes.append(f"{self.places[i]}: {text.example(i, gaps)} is no {what}{others} as empty")
            self.faults += [
                Fault(
                    i,
                    int(row),
                    f"{self.places[i]}: {text.cells[text.codes[i][row]]!r} (row {row + 1}) is no {what}, as those of "
                    f"{self.tables[0].name} are; correct it or leave the cell empty",
                )
                for row in text.rows(i, set(strays) - set(gaps))
            ]

    def _check_offsets(self, text: Text) -> None:
        dates = [cell for cell, date in zip(text.cells, text.parsed(notations.dates), strict=True) if pd.notna(date)]
        found: dict[bool, str] = {}
        for i, place in enumerate(self.places):
            for offset in (True, False):
                cells = [cell for cell in dates if notations.has_offset(cell) == offset]
                if len(text.rows(i, cells)):
                    found.setdefault(offset, f"{place}: {text.example(i, cells)}")
        if len(found) > 1:
            raise ValueError(f"{found[True]} has an offset from UTC, and {found[False]} has none; write all alike")

    def _refuse_unlike(self, text: Text) -> None:
        """Raise where text would be taken for categories, but cannot be meant as such."""
        dates = [cell for cell in text.cells if notations.looks_like_a_date(cell)]
        for i, side in enumerate(self.sides):
            odd = len(text.rows(i, dates)) if side.kind == "text" else 0
            if odd and odd + text.count(i, notations.dates) > (1 - FEW) * text.filled(i):
                raise ValueError(
                    f"{self.places[i]}: {text.example(i, dates)} looks like a date; write dates as 2024-12-31 or "
                    "2024-12-31T08:15"
                )
        known, *others = [_labels(side).dropna() for side in self.sides]
        for i, labels in enumerate(others, start=1):
            if not len(known) or not len(labels):
                continue
            for way in (notations.dates, *_number_notations(self.tables[i], self.tables)):
                if text.fits(i, way) and (_kind(way) == "dates" or not labels.isin(known).any()):
                    raise ValueError(
                        f"{self.places[i]} holds {_kind(way)}, such as {labels.iloc[0]!r} (row {labels.index[0] + 1}), "
                        f"and that of {self.tables[0].name} does not: {known.iloc[0]!r} (row {known.index[0] + 1})"
                    )

    def _mixed_note(self, text: Text, way: _Notation) -> None:
        if self.sides[0].kind != "text":
            return
        kind, odd = f"no {_kind(way)[:-1]}", text.strays(0, way)
        if 2 * text.count(0, way) < text.filled(0):
            kind, odd = "neither number nor date", [cell for cell in odd if notations.begins_with_a_number(cell)]
            if 2 * len(text.rows(0, odd)) < text.filled(0):
                return
        if odd:
            self.notes.append(f"{self.places[0]} is read as categories, since {text.example(0, odd)} is {kind}")

    def _categories(self) -> None:
        """Declared ones in the first table: those of the others are joined to them, as text if one of all is text."""
        numeric = [
            side.kind in ("numbers", "nothing")
            or (side.kind == "categories" and pd.api.types.is_numeric_dtype(side.values.cat.categories.dtype))
            for side in self.sides
        ]
        self._label([side.values.astype(object) if all(numeric) else _labels(side) for side in self.sides])

    def _label(self, labels: list[pd.Series]) -> None:
        self.kind = "categories"
        for place, series in zip(self.places[1:], labels[1:], strict=True):
            new = series[series.notna() & ~series.isin(labels[0])]
            if len(new):
                self.notes.append(
                    f"{place}: {new.nunique()} of {series.nunique()} categories do not occur in {self.tables[0].name}, "
                    f"such as {new.iloc[0]!r} (row {new.index[0] + 1})"
                )
        levels = sorted(set().union(*(series.dropna().unique() for series in labels)))
        if levels and isinstance(levels[0], str) and not np.isnan(notations.plain(levels)).all():
            # TabPFN takes categories that are spelled like numbers for numbers, and codes them in another way.
            levels = [f"={level}" for level in levels]
            labels = [series.map("={}".format, na_action="ignore") for series in labels]
        self.values = [pd.Series(pd.Categorical(series, categories=levels)) for series in labels]


def _labels(side: Typed) -> pd.Series:
    """What names a column's values, as text."""
    values = side.values.astype(object)
    return values if side.kind == "text" else values.map(as_text, na_action="ignore")


def _undeclared(side: Typed) -> Typed:
    """Categories as the text or numbers that name them."""
    if side.kind != "categories":
        return side
    if pd.api.types.is_numeric_dtype(side.values.cat.categories.dtype):
        return Typed("numbers", side.values.astype(np.float64))
    return Typed("text", side.values.astype(object))
