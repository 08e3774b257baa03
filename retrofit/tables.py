"""Tables in files: CSV in its usual dialects, Parquet and Feather (Arrow) in, CSV and Parquet out.

What a file is is seen from its content, not from its name. CSV comes as text, which `columns` then types.
"""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import itertools
import lzma
import re
import zipfile
from collections.abc import Hashable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.dataset

from . import notations
from .columns import MISSING, Table

_SEPARATORS = {"\t": "tabs", ";": "semicolons", "|": "bars", ",": "commas"}
_SAMPLE = 100_000  # characters from which the separator is seen
_SHOWN = 10_000  # cells of a column that show how its numbers are written
# pandas reads its own notes in a damaged Arrow file as they come: hence KeyError and TypeError.
_UNREADABLE = (
    ValueError,
    KeyError,
    TypeError,
    pa.ArrowException,
    EOFError,
    csv.Error,
    lzma.LZMAError,
    zipfile.BadZipFile,
)


def read_table(path: Path, group: Hashable | None = None) -> Table:
    """Read a table from a CSV file (packed or not), a Parquet file or folder, or a Feather (Arrow) file.

    In CSV all cells are text and those that pandas takes for missing are NaN; in the column `group` only empty cells
    are, so that a group may be called NA. Rows that are one name longer than the header begin with the index, and so
    they do where the header's first name is empty, as R and pandas write them.

    Raises:
        OSError: The file cannot be opened.
        ValueError: It is no table, two columns have one name, or a line has too many or too few cells.
    """
    try:
        if path.is_dir():
            table = Table(str(path), _read_folder(path))
        else:
            content = _unpacked(path.read_bytes())
            if content[:4] == b"PAR1":
                table = Table(str(path), pd.read_parquet(io.BytesIO(content)))
            elif content[:6] == b"ARROW1":
                table = Table(str(path), pd.read_feather(io.BytesIO(content)))
            else:
                table = _read_csv(str(path), content, group)
    except _UNREADABLE as error:
        raise ValueError(f"cannot read {path}: {error}") from error
    except OSError as error:  # of gzip and bz2, about the content, these name no file
        if error.errno is None:
            raise ValueError(f"cannot read {path}: {error}") from error
        raise
    columns = table.frame.columns
    if columns.has_duplicates:
        raise ValueError(
            f"{path} has several columns called {columns[columns.duplicated()][0]!r}; rename or remove them"
        )
    return table


def _read_folder(path: Path) -> pd.DataFrame:
    """All rows of a folder of Parquet files, each column in a type that holds what all files have.

    (Arrow by itself casts to the first file's types: numbers to truth values, if need be.)
    """
    dataset = pa.dataset.dataset(path, format="parquet", partitioning="hive")
    files = list(dataset.get_fragments())
    if not files:
        raise ValueError("it holds no Parquet files")
    files = [file for file in files if file.metadata.num_rows] or files[:1]  # types of no rows say nothing
    fields: dict[str, pa.Field] = {field.name: field for field in files[0].physical_schema}
    for file in files[1:]:
        schema = file.physical_schema
        if odd := sorted(set(schema.names) ^ fields.keys()):
            raise ValueError(f"{file.path} and {files[0].path} do not have the same columns: {odd}")
        for name in schema.names:
            before, found = fields[name].type, schema.field(name).type
            try:
                fields[name] = fields[name].with_type(_common_type(before, found))
            except pa.ArrowTypeError:
                raise ValueError(
                    f"column {name!r} is {found} in {file.path} and {before} in files before it; "
                    "store it in one type in all of them"
                ) from None
    folders = [field for field in dataset.schema if field.name not in fields]  # columns that folders' names give
    schema = pa.schema([*fields.values(), *folders], files[0].physical_schema.metadata)
    try:
        return pa.dataset.FileSystemDataset(files, schema, dataset.format, dataset.filesystem).to_table().to_pandas()
    except pa.ArrowInvalid as error:
        mixed = [name for name in fields if any(file.physical_schema.field(name) != fields[name] for file in files)]
        if not mixed:
            raise
        raise ValueError(f"{error}; files have different types of {mixed}") from error


def _common_type(one: pa.DataType, other: pa.DataType) -> pa.DataType:
    """A type for the values of both; of dates with two zones the first. Raises `ArrowTypeError` where there is none."""
    if pa.types.is_timestamp(one) and pa.types.is_timestamp(other) and one.tz and other.tz:
        finer = min(one.unit, other.unit, key=["ns", "us", "ms", "s"].index)
        return pa.timestamp(finer, one.tz)
    if pa.types.is_dictionary(one) != pa.types.is_dictionary(other):  # categories in one file, and not in another
        one, other = (found.value_type if pa.types.is_dictionary(found) else found for found in (one, other))
    schemas = [pa.schema([("", found)]) for found in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field(0).type


def write_table(frame: pd.DataFrame, path: Path) -> None:
    """Write a table as the file's name ends; an index that only counts the rows is left out of CSV.

    Raises `OSError` if the file cannot be written.
    """
    if path.name.lower().endswith(".parquet"):
        frame.to_parquet(path)
        return
    named = frame.index.names if any(frame.index.names) else "index"
    counts = frame.index.equals(pd.RangeIndex(len(frame)))
    frame.to_csv(path, sep="\t" if path.suffix.lower() == ".tsv" else ",", index=not counts, index_label=named)


def _unpacked(content: bytes) -> bytes:
    if content[:2] == b"\x1f\x8b":
        return gzip.decompress(content)
    if content[:3] == b"BZh":
        return bz2.decompress(content)
    if content[:6] == b"\xfd7zXZ\x00":
        return lzma.decompress(content)
    if content[:4] == b"PK\x03\x04":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            names = archive.namelist()
            if "[Content_Types].xml" in names or "mimetype" in names:
                raise ValueError("it is a workbook of a spreadsheet program; save the sheet as CSV")
            if len(names) != 1:
                raise ValueError(f"it is an archive of {len(names)} files; unpack the one that is meant")
            return archive.read(names[0])
    return content


def _decoded(name: str, content: bytes, notes: list[str]) -> str:
    try:
        return content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        try:
            text = content.decode("cp1252")
        except UnicodeDecodeError as odd:
            raise ValueError(
                f"it is no text (byte 0x{content[odd.start]:02x} in line {content[: odd.start].count(10) + 1}), or "
                "packed in another way than with gzip, bzip2, xz or zip: unpack it, or save it as CSV"
            ) from None
        word = re.search(r"\S*$", text[: error.start])[0] + re.match(r"\S*", text[error.start :])[0]  # type: ignore[index]
        notes.append(f"{name} is not UTF-8 and is read as Windows-1252 (Latin-1): {word[:40]!r} in line {line}")
        return text


def _separator(text: str) -> str:
    """The separator by which most of the first lines have as many cells as the header, and most of them."""
    sample = io.StringIO(text[:_SAMPLE], newline="")
    lines = list(itertools.islice(sample, 100))
    if len(text) > _SAMPLE:
        lines = lines[:-1]
    best, separator = (0.0, 1), ","
    for candidate in _SEPARATORS:
        try:
            header, *rows = [row for row in csv.reader(lines, delimiter=candidate) if row]
        except (ValueError, csv.Error):
            continue
        fitting = sum(len(row) in (len(header), len(header) + 1) for row in rows)
        score = (fitting / len(rows) if rows else 1.0, len(header))
        if len(header) > 1 and score > best:
            best, separator = score, candidate
    return separator


def _read_csv(name: str, content: bytes, group: Hashable | None) -> Table:
    notes: list[str] = []
    text = _decoded(name, content, notes)
    if "\0" in text:
        raise ValueError("it has zero bytes: it is no text, or UTF-16 without a byte order mark; save it as UTF-8")
    told = re.match(r'"?sep=([,;|\t])"?\r?\n', text)  # as spreadsheet programs say it
    text = f"\n{text[told.end() :]}" if told else text
    separator = told[1] if told else _separator(text)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    lines: list[int] = []
    rows: list[list[str]] = []
    try:
        for row in reader:
            if rows or any(cell.strip() for cell in row):
                rows.append(row)
                lines.append(reader.line_num)
    except csv.Error as error:
        raise ValueError(f"line {reader.line_num}: {error}") from None
    while rows and not rows[-1]:
        rows.pop()
    if not rows:
        raise ValueError("it is empty; a first line with the columns' names is needed")
    header, *rows = rows
    rows, index = _aligned(header, rows, lines[1:])
    columns = list(zip(*rows, strict=True)) if rows else [() for _ in header]
    while len(header) > 1 and not header[-1].strip() and not any(cell.strip() for cell in columns[-1]):
        header, columns = header[:-1], columns[:-1]  # the header, too, ends in a separator
    if index is None and len(header) > 1 and not header[0].strip():
        header, columns, index = header[1:], columns[1:], list(columns[0])
        notes.append(f"{name}: the first column has no name and is taken for the rows' own names; it plays no part")
    elif index is not None:
        notes.append(f"{name}: each row begins with a name, such as {index[0]!r}, for which the header has none")
    names = [cell if cell.strip() else f"Unnamed: {i}" for i, cell in enumerate(header)]
    frame = pd.DataFrame(
        {i: pd.Series(_cells(cells, names[i] == group), dtype="str") for i, cells in enumerate(columns)}
    ).set_axis(names, axis="columns")
    if index is not None:
        frame.index = pd.Index(index)
    if separator != "," and not (separator == "\t" and ".tsv" in name.lower()):
        notes.append(f"{name} has {_SEPARATORS[separator]} between cells")
    return Table(name, frame, _decimal_comma(columns, separator), separator, notes)


def _decimal_comma(columns: Sequence[tuple[str, ...]], separator: str) -> int:
    """Whether numbers are written 1.234,5, as `Table` has it.

    A column like 12,345 may be either, and is what a column that can be only one of the two shows.
    """
    shown, either, points = 0, False, False
    for cells in columns:
        distinct = [cell for cell in dict.fromkeys(cells) if cell.strip() not in MISSING][:_SHOWN]
        if not any("," in cell or "." in cell for cell in distinct):
            continue
        thousands = ~np.isnan(notations.thousands(distinct))
        decimal = ~np.isnan(notations.decimal_comma(distinct))
        if max(thousands.sum(), decimal.sum()) < 0.9 * len(distinct):
            continue  # text
        comma = np.array(["," in cell for cell in distinct])
        either = either or bool(comma.any())
        points = points or bool((thousands & ~decimal & ~comma).any())
        if decimal.sum() > thousands.sum():
            shown += 1
        elif (thousands & ~decimal & comma).any():
            shown -= 1
    if shown:
        return 2 if shown > 0 else -2
    if either:
        return 1 if separator == ";" else -1
    return -2 if points else 0


def _cells(cells: tuple[str, ...], names_group: bool) -> list[str | None]:
    if names_group:
        return [cell or None for cell in cells]
    return [None if cell in MISSING or cell.isspace() else cell for cell in cells]


def _aligned(header: list[str], rows: list[list[str]], lines: list[int]) -> tuple[list[list[str]], list[str] | None]:
    """Rows as long as the header, and the names in front of them if there are any, as R writes them."""
    width = len(header)
    if width == 1:  # here an empty line is an empty cell
        rows = [row or [""] for row in rows]
    else:
        filled = [i for i, row in enumerate(rows) if len(row) > 1 or "".join(row).strip()]
        rows, lines = [rows[i] for i in filled], [lines[i] for i in filled]
    if rows and all(len(row) == width + 1 for row in rows):
        if any(row[-1].strip() for row in rows):
            return [row[1:] for row in rows], [row[0] for row in rows]
        if len(rows) > 2 and [row[0] for row in rows] == [str(i + 1) for i in range(len(rows))]:
            raise ValueError(
                f"the header has {width} names and each line {width + 1} cells, of which the first counts the lines "
                "and the last is empty: name the first in the header, or leave out the last"
            )
    for i, row in enumerate(rows):
        if len(row) > width and not any(cell.strip() for cell in row[width:]):
            rows[i] = row[:width]  # it ends in separators
        elif len(row) != width:
            raise ValueError(f"line {lines[i]} has {len(row)} cells and the header {width}: {', '.join(row)[:60]!r}")
    return rows, None
