"""Reading and writing of table files, against tables written down here."""

from __future__ import annotations

import bz2
import datetime
import gzip
import io
import lzma
import zipfile
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oretrofit.retrofit.columns import Table, read_columns, read_target
from oretrofit.retrofit.tables import read_table, write_table


def read(tmp_path: Path, content: str | bytes, name: str = "t.csv", group: str | None = None) -> Table:
    file = tmp_path / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return read_table(file, group)


def cells(table: Table) -> dict[str, list[str | None]]:
    return {name: column.astype(object).where(column.notna(), None).tolist() for name, column in table.frame.items()}


AB = {"a": ["1", "2"], "b": ["x", None]}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a,b\n1,x\n2,\n", AB),
        ("a,b\r\n1,x\r\n2,\r\n", AB),
        ("a,b\r1,x\r2,\r", AB),
        ("a,b\n1,x\n2,", AB),
        ('"a","b"\n"1","x"\n"2",""\n', AB),
        ("\n\na,b\n\n1,x\n   \n2,\n\n\n", AB),
        ("a;b\n1;x\n2;\n", AB),
        ("a\tb\n1\tx\n2\t\n", AB),
        ("a|b\n1|x\n2|\n", AB),
        # a trailing separator in all rows, in some, in the header too; several
        ("a,b\n1,x,\n2,,\n", AB),
        ("a,b\n1,x\n2,,\n", AB),
        ("a,b,\n1,x,\n2,,\n", AB),
        ("a,b,,\n1,x,,\n2,,,\n", AB),
        ("a,b\n1,x,,,\n2,,,,\n", AB),
        # missing cells as pandas has them, and blank ones
        ("a,b\nNA,x\n2,nan\nnull, \n", {"a": [None, "2", None], "b": ["x", None, None]}),
        ('a,b\n"1,5","x ""y"""\n2,"two\nlines"\n', {"a": ["1,5", "2"], "b": ['x "y"', "two\nlines"]}),
        ("a,b\n1,5' nail\n2,6\" nail\n", {"a": ["1", "2"], "b": ["5' nail", '6" nail']}),
        ("a, b\n1, x\n", {"a": ["1"], " b": [" x"]}),
        ("a,,b\n0,1,2\n", {"a": ["0"], "Unnamed: 1": ["1"], "b": ["2"]}),
        ("sep=;\na;b,c\n1;x\n", {"a": ["1"], "b,c": ["x"]}),
        ('"sep=|"\r\na|b\r\n1|x\r\n', {"a": ["1"], "b": ["x"]}),
        # one column: an empty line is an empty cell, but not at the end
        ('a\n1\n\n3\n""\n5\n\n', {"a": ["1", None, "3", None, "5"]}),
        ("a,b\n", {"a": [], "b": []}),
        # what could be taken for another separator
        ("Income, EUR;Day\n1,5;2024-01-01\n", {"Income, EUR": ["1,5"], "Day": ["2024-01-01"]}),
        ("id,tags\n1,a;b;c\n2,d;e;f\n", {"id": ["1", "2"], "tags": ["a;b;c", "d;e;f"]}),
        ('"a;b",c\n1,2\n', {"a;b": ["1"], "c": ["2"]}),
    ],
)  # fmt: skip
def test_csv(tmp_path: Path, content: str, expected: dict[str, list[str | None]]) -> None:
    table = read(tmp_path, content)
    assert cells(table) == expected
    assert table.frame.index.equals(pd.RangeIndex(len(table.frame)))


def test_names_in_front_of_the_rows(tmp_path: Path) -> None:
    """As R writes them: the header is one shorter."""
    table = read(tmp_path, '"a","b"\n"r1",1,"x"\n"r2",2,\n')
    assert cells(table) == AB and list(table.frame.index) == ["r1", "r2"]
    assert table.notes == [
        f"{tmp_path / 't.csv'}: each row begins with a name, such as 'r1', for which the header has none"
    ]
    table = read(tmp_path, "a,b\n7,1,x\n8,2,\n")
    assert cells(table) == AB and list(table.frame.index) == ["7", "8"]
    for header in (",a,b", '"","a","b"', " ,a,b"):  # as pandas and R write it
        table = read(tmp_path, f"{header}\n7,1,x\n8,2,\n")
        assert cells(table) == AB and list(table.frame.index) == ["7", "8"]
        assert table.notes == [
            f"{tmp_path / 't.csv'}: the first column has no name and is taken for the rows' own names; it plays no part"
        ]
    assert list(read(tmp_path, ",a,b\n").frame) == ["a", "b"]


def test_a_file_that_may_have_names_or_separators_at_the_ends(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"2 names and each line 3 cells, of which the first counts the lines"):
        read(tmp_path, "a,b\n1,5,\n2,6,\n3,7,\n")
    assert cells(read(tmp_path, "a,b\n1,5,\n2,6,\n4,7,\n"))["a"] == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "it is empty"),
        ("\n\n", "it is empty"),
        ("a,b\n1,2\n1,2,3\n", "line 3 has 3 cells and the header 2: '1, 2, 3'"),
        ("a,b\n1,2\n1\n", "line 3 has 1 cells and the header 2: '1'"),
        ("a,b\n1,2,3\n1,2\n", "line 2 has 3 cells and the header 2"),
        ('a,b\n"x\ny",2\n\n1\n', "line 5 has 1 cells"),
        ("a,b,a\n1,2,3\n", "several columns called 'a'"),
        ("a,b,a\n", "several columns called 'a'"),
        ('a,b\n1,"2\n3,4\n', "line 3: unexpected end of data"),
        ("a,b\n1,2\n".encode("utf-16-le"), "zero bytes"),
        (b"a,b\n1,\x00\n", "zero bytes"),
        (b"(\xb5/\xfd$\n\x9d", "it is no text (byte 0x9d in line 2), or packed"),
        ("sep=;\na;b\n1\n", "line 3 has 1 cells"),
        (b"PAR1 and no more", "cannot read"),
        (b"ARROW1 and no more", "cannot read"),
        (b"\x1f\x8b and no more", "cannot read"),
        (b"BZh9 and no more", "cannot read"),
        (b"\xfd7zXZ\x00 and no more", "cannot read"),
        (b"PK\x03\x04 and no more", "cannot read"),
        (gzip.compress(b"a,b\n1,2\n", mtime=0)[:-9], "cannot read"),
    ],
)
def test_what_is_no_table(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError) as raised:
        read(tmp_path, content)
    assert message in str(raised.value) and str(tmp_path / "t.csv") in str(raised.value)


def test_a_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        read_table(tmp_path / "gone.csv")
    assert raised.value.filename == str(tmp_path / "gone.csv")


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "cp1252", "latin-1"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    table = read(tmp_path, "größe,stadt\n1,Zürich\n2,Łódź\n".replace("Łódź", "Orléans").encode(encoding))
    assert cells(table) == {"größe": ["1", "2"], "stadt": ["Zürich", "Orléans"]}
    told = [f"{tmp_path / 't.csv'} is not UTF-8 and is read as Windows-1252 (Latin-1): 'größe,stadt' in line 1"]
    assert table.notes == (told if encoding in ("cp1252", "latin-1") else [])
    big = read(tmp_path, b"\xfe\xff" + "a,b\n1,x\n2,\n".encode("utf-16-be"))
    assert cells(big) == AB


def test_what_is_said_of_separators(tmp_path: Path) -> None:
    assert read(tmp_path, "a;b\n1;2\n").notes == [f"{tmp_path / 't.csv'} has semicolons between cells"]
    assert read(tmp_path, "a\tb\n1\t2\n").notes == [f"{tmp_path / 't.csv'} has tabs between cells"]
    assert read(tmp_path, "a\tb\n1\t2\n", "t.tsv").notes == read(tmp_path, "a,b\n1,2\n").notes == []


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a;b\n1,5;2\n", 2),
        ("a;b\n1.234,5;2\n", 2),
        ("a;b\nx;-0,5\n", 2),
        ("a\tb\n1,5\t12,345\n", 2),
        ('a,b\n"1,5","12,345"\n', 2),
        ("a;b\n1,234.5;12,345\n", -2),
        ("a;b\n1,234,567;12,345\n", -2),
        ("a;b\n1.5;2\n", -2),
        ("a;b\n12,345;1.5\n", 1),  # semicolons are used where commas are for decimals
        ("a\tb\n12,345\t2\n", -1),
        ("a;b\n1,5;1,234.5\n12,345;2\n", 1),  # both are shown
        ("a;b\n1;x, y\n2;3,5 kg\n", 0),
        ("a;b\n12.345;2\n", 0),
    ],
)
def test_decimal_commas_are_noticed(tmp_path: Path, content: str, expected: int) -> None:
    assert read(tmp_path, content).decimal_comma == expected


def zipped(content: bytes, names: tuple[str, ...] = ("t.csv",)) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("pack", [gzip.compress, bz2.compress, lzma.compress, zipped])
@pytest.mark.parametrize("name", ["t.csv.gz", "t.CSV", "t.txt", "t"])
def test_a_file_is_what_it_holds_whatever_its_name(tmp_path: Path, pack, name: str) -> None:
    assert cells(read(tmp_path, pack(b"a,b\n1,x\n2,\n"), name)) == AB


def test_archives_and_workbooks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an archive of 2 files"):
        read(tmp_path, zipped(b"a\n1\n", ("a.csv", "b.csv")))
    for name in ("[Content_Types].xml", "mimetype"):
        with pytest.raises(ValueError, match="a workbook of a spreadsheet program; save the sheet as CSV"):
            read(tmp_path, zipped(b"", (name, "sheet")))


def test_names_of_groups_are_as_they_are_written(tmp_path: Path) -> None:
    content = "g,x\nNA,NA\n1.0,1.0\n01,\n,2\n None,3\n"
    table = read(tmp_path, content, group="g")
    assert cells(table) == {"g": ["NA", "1.0", "01", None, " None"], "x": [None, "1.0", None, "2", "3"]}
    assert cells(read(tmp_path, content))["g"] == [None, "1.0", "01", None, " None"]


def test_parquet_and_feather(tmp_path: Path) -> None:
    frame = pd.DataFrame({"a": [1, 2], "b": ["x", None]}, index=pd.Index(["r", "s"], name="row"))
    frame.to_parquet(tmp_path / "t.parquet")
    for name in ("t.parquet", "t.PARQUET", "t.csv"):
        (tmp_path / name).write_bytes((tmp_path / "t.parquet").read_bytes())
        pd.testing.assert_frame_equal(read_table(tmp_path / name).frame, frame)
    frame.reset_index().to_feather(tmp_path / "t.feather")
    pd.testing.assert_frame_equal(read_table(tmp_path / "t.feather").frame, frame.reset_index())
    folder = tmp_path / "parts.parquet"
    folder.mkdir()
    for i in range(2):
        frame[i : i + 1].to_parquet(folder / f"{i}.parquet")
    pd.testing.assert_frame_equal(read_table(folder).frame, frame)

    repeated = pa.table([[1], [2]], names=["a", "a"])
    pq.write_table(repeated, tmp_path / "t.parquet")
    with pytest.raises(ValueError, match=r"t\.parquet.*'?a'?"):
        read_table(tmp_path / "t.parquet")


def folder_of(place: Path, columns: list) -> Path:
    """A folder with a file for each of some contents of the column `b`."""
    for i, column in enumerate(columns):
        frame = pd.DataFrame({"a": pd.array(["x"] * len(column), dtype="str"), "b": column})
        frame.to_parquet(place / f"{i}.parquet")
    return place


DATES = pd.to_datetime(["2024-01-01 00:00", "2024-06-01 12:30"])


@pytest.mark.parametrize(
    ("columns", "cells"),
    [
        ([np.array([1, 2], "int8"), np.array([-132, 2**60 + 1])], [1, 2, -132, 2**60 + 1]),
        ([np.array([1.5, 2], "float16"), np.array([0.1])], [1.5, 2, 0.1]),
        ([np.array([1, 2]), np.array([0.5])], [1, 2, 0.5]),
        ([[None, None], ["u", "v"]], [None, None, "u", "v"]),
        ([pd.Categorical(["u", "v"]), ["u", "w"]], ["u", "v", "u", "w"]),
        ([np.array([], "bool"), ["u"]], ["u"]),
        ([["u"], np.array([], "float64")], ["u"]),
        ([DATES.tz_localize("UTC"), DATES.tz_localize("Asia/Tokyo")], [*DATES, *(DATES - pd.Timedelta(hours=9))]),
    ],
)
def test_files_of_a_folder_may_have_other_types(columns: list, cells: list, tmp_path: Path) -> None:
    """As they are by themselves, whichever comes first."""
    for turned, expected in ((columns, cells), (columns[::-1], [*cells[len(columns[0]) :], *cells[: len(columns[0])]])):
        place = tmp_path / str(turned is columns)
        place.mkdir()
        found = read_table(folder_of(place, turned)).frame["b"]
        if isinstance(found.dtype, pd.DatetimeTZDtype):
            assert str(found.dt.tz) == str(turned[0].tz)
            found = found.dt.tz_convert("UTC").dt.tz_localize(None)
        assert [None if pd.isna(cell) else cell for cell in found] == expected


@pytest.mark.parametrize(
    "columns",
    [[[True, False], [0.1, 2.0]], [["u"], [1]], [DATES, DATES.tz_localize("UTC")], [[1], [True]]],
)
def test_types_without_a_common_one_are_refused_by_file_and_column(columns: list, tmp_path: Path) -> None:
    folder = folder_of(tmp_path, columns)
    with pytest.raises(ValueError, match=r"column 'b' is .* in \S*1\.parquet and .* in files before it"):
        read_table(folder)
    pd.DataFrame({"a": ["x"], "c": [1]}).to_parquet(folder / "1.parquet")
    with pytest.raises(ValueError, match=r"1\.parquet and \S*0\.parquet do not have the same columns: \['b', 'c'\]"):
        read_table(folder)


def test_a_value_that_no_common_type_holds_is_refused_by_column(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"different types of \['b'\]"):
        read_table(folder_of(tmp_path, [np.array([2**63], "uint64"), np.array([-1])]))


def test_a_damaged_file_is_refused_with_its_name(tmp_path: Path) -> None:
    """Whichever bytes are wrong: pandas and Arrow raise whatever comes."""
    file, rng = tmp_path / "t.parquet", np.random.default_rng(0)
    pd.DataFrame({"a": pd.Categorical(list("xyx")), "b": DATES.tz_localize("UTC").repeat(2)[:3]}).to_parquet(file)
    whole = file.read_bytes()
    for _ in range(300):
        content = bytearray(whole)
        content[rng.integers(4, len(whole))] ^= 1 << rng.integers(8)
        file.write_bytes(content)
        try:
            read_table(file)
        except ValueError as error:
            assert str(file) in str(error)


# ---- The same table in every format ---------------------------------------------------------------

TEXTS = st.text(st.sampled_from("abcé ñ-,;\"'|?"), min_size=1, max_size=4).filter(lambda t: any(map(str.isalpha, t)))
DAYS = st.datetimes(datetime.datetime(1900, 1, 1), datetime.datetime(2100, 1, 1))
FLOATS = st.floats(-1e15, 1e15, allow_nan=False)
COLUMNS = {
    "int64": (st.integers(-(2**53), 2**53), "numbers"),
    "Int16": (st.integers(-(2**15), 2**15 - 1), "numbers"),
    "float64": (FLOATS, "numbers"),
    "Float64": (FLOATS, "numbers"),
    "bool": (st.booleans(), "numbers"),
    "boolean": (st.booleans(), "numbers"),
    "datetime64[us]": (DAYS, "dates"),
    "date32": (DAYS.map(lambda time: time.date()), "dates"),
    "str": (TEXTS, "categories"),
    "category": (TEXTS, "categories"),
    "time64": (st.times(), "numbers"),
    "timedelta64[us]": (st.timedeltas(datetime.timedelta(0), datetime.timedelta(99)), "numbers"),
}
WITHOUT_GAPS = ("int64", "bool")
OBJECTS = ("date32", "time64")


@st.composite
def frames(draw: st.DrawFn) -> tuple[pd.DataFrame, dict[str, str]]:
    n = draw(st.integers(2, 8))
    columns, kinds = {}, {}
    for i, dtype in enumerate(draw(st.lists(st.sampled_from(list(COLUMNS)), min_size=1, max_size=6))):
        values, kind = COLUMNS[dtype]
        filled = draw(st.lists(values, min_size=n, max_size=n))
        gaps = (
            [False] * n
            if dtype in WITHOUT_GAPS
            else [False, *draw(st.lists(st.booleans(), min_size=n - 1, max_size=n - 1))]
        )
        drawn = [None if gap else value for value, gap in zip(filled, gaps, strict=True)]
        columns[f"{dtype} {i}"] = pd.Series(drawn, dtype=object if dtype in OBJECTS else dtype)
        kinds[f"{dtype} {i}"] = kind
    return pd.DataFrame(columns), kinds


@settings(max_examples=60, deadline=None)
@given(frames(), st.sampled_from([",", ";", "\t", "|"]))
def test_every_format_gives_the_same_columns(
    tmp_path_factory, made: tuple[pd.DataFrame, dict[str, str]], separator: str
) -> None:
    frame, kinds = made
    folder = tmp_path_factory.mktemp("formats")
    frame.to_parquet(folder / "t.parquet")
    frame.to_feather(folder / "t.feather")
    # In a file of one column no separator is to be seen: a comma in a cell that is not quoted ends the cell.
    frame.to_csv(folder / "t.csv", index=False, sep=separator if len(frame.columns) > 1 else ",")
    typed = read_columns([Table("frame", frame)], list(frame))
    assert typed.kinds == kinds and typed.faults == []
    for name in ("t.parquet", "t.feather", "t.csv"):
        found = read_columns([read_table(folder / name)], list(frame))
        assert found.kinds == kinds and found.faults == [], name
        for column, kind in kinds.items():
            one, other = typed.frames[0][column], found.frames[0][column]
            assert one.isna().tolist() == other.isna().tolist(), (name, column)
            if kind == "categories":
                assert one.dropna().tolist() == other.dropna().tolist(), (name, column)
            elif kind == "dates":
                assert (one.dropna() == other.dropna()).all(), (name, column)
            else:
                np.testing.assert_array_equal(one.astype(float), other.astype(float), err_msg=f"{name} {column}")


# ---- Writing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["p.csv", "p.CSV", "p.csv.gz", "p.tsv", "p.parquet"])
def test_written_and_read(tmp_path: Path, name: str) -> None:
    frame = pd.DataFrame({"g": ["a", "b"], "prediction": [0.1 + 0.2, np.nan]})
    write_table(frame, tmp_path / name)
    found = read_table(tmp_path / name)
    assert found.notes == [] and found.frame["g"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(read_target(found, "prediction").y, frame["prediction"])
    assert gzip.decompress((tmp_path / name).read_bytes()) if name.endswith("gz") else True


def test_an_index_is_written_unless_it_only_counts(tmp_path: Path) -> None:
    frame = pd.DataFrame({"prediction": [1.5, 2.5]})
    for index, header in (
        (pd.RangeIndex(2), "prediction"),
        (pd.Index([7, 8]), "index,prediction"),
        (pd.Index(["a", "b"], name="row"), "row,prediction"),
    ):
        write_table(frame.set_axis(index), tmp_path / "p.csv")
        assert (tmp_path / "p.csv").read_text().splitlines()[0] == header
