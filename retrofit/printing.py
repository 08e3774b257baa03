"""Tables as text, their words and figures whole: for a terminal of any width, or as Markdown."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

# Header and rows of a table.
Cells: TypeAlias = tuple[list[str], list[list[str]]]

# A table with its title, and how many of its columns are text.
Titled: TypeAlias = tuple[str, Cells, int]

_GAP = 2  # between columns


def frame_cells(frame: pd.DataFrame) -> Cells:
    """Header and cells of any table, numbers to four digits."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in frame.to_numpy(dtype=object)]
    return [str(column).replace("_", " ") for column in frame.columns], cells


def print_text(console: Console, text: str) -> None:
    """Print lines, in a terminal wrapped between words: what is longer than a line, such as a path, stays whole."""
    if console.is_terminal:
        text = "\n".join(piece for line in text.split("\n") for piece in _wrapped(line, console.width))
    console.print(text, soft_wrap=True)


def print_table(console: Console, header: list[str], cells: list[list[str]], *, title: str, left: int = 1) -> None:
    """Print a table, its first `left` columns of text flush left; where it is no terminal, as Markdown.

    In a terminal text goes over to the next line between words only, and figures do not. A table that is too wide even
    so is printed in parts, each with its columns of text.
    """
    print_text(console, title)
    if not console.is_terminal:
        print_text(console, f"\n{markdown_table(header, cells, left, aligned=True)}\n")
        return
    columns = [[name, *column] for name, *column in zip(header, *cells, strict=True)]
    for widths in _widths(columns, left, console.width + _GAP):
        names, *rows = zip(*(columns[i] for i in widths), strict=True)
        rule = ["-" * width if console.options.ascii_only else "─" * width for width in widths.values()]
        console.print("\n".join(_lines(names, widths, left, is_header=True)), style="bold", soft_wrap=True)
        lines = [line for row in (rule, *rows) for line in _lines(row, widths, left)]
        console.print("\n".join(lines), end="\n\n", soft_wrap=True)


def markdown_table(header: list[str], cells: list[list[str]], left: int = 1, *, aligned: bool = False) -> str:
    """A table in Markdown, its first `left` columns flush left; with `aligned`, in its source as well."""
    from rich.cells import cell_len

    rows = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in [header, *cells]]
    widths = [max(3, *map(cell_len, column)) if aligned else 3 for column in zip(*rows, strict=True)]
    rule = [f"{'-' * max(3, width - (i >= left))}{':' * (i >= left)}" for i, width in enumerate(widths)]
    if aligned:
        rows = [[_padded(cell, len(rule[i]), i < left) for i, cell in enumerate(row)] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in [rows[0], rule, *rows[1:]])


def _lines(row: Sequence[str], widths: dict[int, int], left: int, *, is_header: bool = False) -> Iterator[str]:
    """The lines of a row, its cells wrapped to their widths; a header's stand on the rule."""
    columns = []
    for cell, width in zip(row, widths.values(), strict=True):
        pieces = [_wrapped(line, width) for line in cell.split("\n")]
        columns.append([piece for wrapped in pieces for piece in wrapped][:: -1 if is_header else 1])
    for line in list(zip_longest(*columns, fillvalue=""))[:: -1 if is_header else 1]:
        cells = zip(line, widths.items(), strict=True)
        yield (" " * _GAP).join(_padded(cell, width, i < left) for cell, (i, width) in cells).rstrip()


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, max(1, width), break_long_words=False, break_on_hyphens=False) or [""]


def _padded(cell: str, width: int, to_left: bool) -> str:
    from rich.cells import cell_len

    space = " " * (width - cell_len(cell))
    return cell + space if to_left else space + cell


def _widths(columns: list[list[str]], left: int, width: int) -> Iterator[dict[int, int]]:
    """Of each part that a table is printed in, its columns and their widths; `width` has room for a gap after each."""
    natural = [_widest(column, of_words=False) for column in columns]
    # A figure such as `60 + 30 x 10` is one; its header may take more lines.
    least = [
        max(_widest(column[:1], of_words=True), _widest(column[1:], of_words=i < left))
        for i, column in enumerate(columns)
    ]
    part = list(range(left))
    for i in range(left, len(columns)):
        if len(part) > left and sum(least[j] + _GAP for j in [*part, i]) > width:
            yield _shared_out(part, natural, least, width)
            part = list(range(left))
        part.append(i)
    yield _shared_out(part, natural, least, width)


def _shared_out(part: list[int], natural: list[int], least: list[int], width: int) -> dict[int, int]:
    """The columns' widths: what they need, and of what is left first those that want the least more."""
    widths = {i: least[i] for i in part}
    spare = max(0, width - sum(widths[i] + _GAP for i in part))
    for i in sorted(part, key=lambda i: natural[i] - least[i]):
        more = min(spare, natural[i] - least[i])
        widths[i] += more
        spare -= more
    return widths


def _widest(cells: Sequence[str], *, of_words: bool) -> int:
    """The longest word of cells, indented ones as they are, or the longest line."""
    from rich.cells import cell_len

    pieces = [re.findall(r"^\s*\S+|\S+", line) if of_words else [line] for cell in cells for line in cell.split("\n")]
    return max((cell_len(piece) for line in pieces for piece in line), default=0)
