"""Tables as text: whole words and figures, in a terminal of any width and in a pipe."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from oretrofit.retrofit.printing import markdown_table, print_table, print_text

HEADER = ["dataset", "seed", "rows x columns", "host RMSE", "identity", "oa"]
ROWS = [
    ["a/long folder/sales.csv#amount", "0", "1000 + 500 x 73", "35705", "-3e-05", "+0.0171"],
    ["cars", "12", "536 + 268 x 17", "2531.1 †", "+2e-05", "+0.0369"],
]


def printed(header, rows, *, width=80, terminal=True, left=1, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, force_terminal=terminal, highlight=False, color_system=None, **options)
    print_table(console, header, rows, title="A title", left=left)
    file.flush()
    title, *lines = file.buffer.getvalue().decode(encoding).split("\n")
    assert title == "A title"
    return lines


def test_text_breaks_between_words_in_a_terminal_and_nowhere_in_a_pipe():
    text = "In /a/folder/with/a/long/name: one, two\nand three"
    for terminal, expected in (
        (True, "In\n/a/folder/with/a/long/name:\none, two\nand three\n"),
        (False, f"{text}\n"),
    ):
        file = io.StringIO()
        print_text(Console(file=file, width=12, force_terminal=terminal, highlight=False, color_system=None), text)
        assert file.getvalue() == expected


def test_a_table_that_fits():
    assert printed(["", "oa", "full-o"], [["mean", "+0.1", "-0.0033"], ["  95 % CI", "1 to 2", "3"]]) == [
        "               oa   full-o",
        "─────────  ──────  ───────",
        "mean         +0.1  -0.0033",
        "  95 % CI  1 to 2        3",
        "",
        "",
    ]


def test_at_80_columns_every_figure_and_every_name_is_whole():
    lines = printed(HEADER, ROWS)
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert all(cell in text for row in ROWS for cell in row[1:])
    # A folder's name may hold a space; the line may end there.
    assert "a/long" in text and "folder/sales.csv#amount" in text


def test_what_is_too_wide_is_printed_in_parts_each_with_the_names():
    lines = printed(HEADER, ROWS[1:], width=30)
    parts = "\n".join(lines).split("\n\n")[:-1]
    assert [part.splitlines()[-1].split(maxsplit=1)[0] for part in parts] == ["cars"] * len(parts)
    rest = "  ".join(part.splitlines()[-1].split(maxsplit=1)[1] for part in parts)
    assert [cell.strip() for cell in rest.split("  ") if cell.strip()] == ROWS[1][1:]


def test_headers_take_several_lines_where_that_helps():
    lines = printed(["what", "a header of many words", "b"], [["x", "1", "2"]], width=20)
    assert max(map(len, lines)) <= 20 and len("\n".join(lines).split("\n\n")) == 2
    assert lines[-5].split() == ["what", "many", "words", "b"]  # its last line, on the rule


@given(
    st.integers(1, 4).flatmap(
        lambda n: st.lists(
            st.lists(st.text("ab+-x| ", min_size=1, max_size=12).map(str.strip), min_size=n, max_size=n),
            min_size=2,
            max_size=4,
        )
    ),
    st.integers(10, 60),
)
def test_no_word_and_no_figure_is_ever_broken(table, width):
    header, *rows = table
    text = "\n".join(printed(header, rows, width=width))
    for row in rows:
        assert all(cell in text for cell in row[1:])
        assert all(word in text for word in row[0].split())


@pytest.mark.parametrize("width", [20, 80])
def test_a_pipe_gets_markdown_however_long_its_lines(width):
    lines = printed(HEADER, [*ROWS, ["a|b", *ROWS[0][1:]]], terminal=False, width=width)
    assert lines == [
        "",
        "| dataset                        | seed |  rows x columns | host RMSE | identity |      oa |",
        "| ------------------------------ | ---: | --------------: | --------: | -------: | ------: |",
        "| a/long folder/sales.csv#amount |    0 | 1000 + 500 x 73 |     35705 |   -3e-05 | +0.0171 |",
        "| cars                           |   12 |  536 + 268 x 17 |  2531.1 † |   +2e-05 | +0.0369 |",
        "| a\\|b                           |    0 | 1000 + 500 x 73 |     35705 |   -3e-05 | +0.0171 |",
        "",
        "",
    ]


def test_markdown_for_files_is_not_aligned():
    assert markdown_table(["", "two\nlines"], [["a", "1"]]) == "|  | two lines |\n| --- | ---: |\n| a | 1 |"


def test_a_terminal_without_lines_to_draw():
    assert printed(["a", "b"], [["1", "2"]], encoding="ascii") == ["a  b", "-  -", "1  2", "", ""]
