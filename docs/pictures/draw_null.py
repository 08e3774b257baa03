"""Draw null.svg: a table with one NULL row and one NULL column predicts as the table without them.

python docs/pictures/draw_null.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

INK, GREY, BLUE, ORANGE = "#333333", "#e4e4e4", "#1f6fb4", "#c8501e"
HEADER = ["age", "bmi", "NULL", "bp", "y"]
ROWS = [
    ["59", "32.1", "", "101", "151"],
    ["48", "21.6", "", "87", "75"],
    ["", "", "", "", ""],
    ["24", "25.3", "", "84", "206"],
    ["50", "23.0", "", "101", "?"],
]


def draw_table(axes: Axes, left: float, rows: list[list[str]], header: list[str], title: str) -> None:
    """Cells from the top left; NULL ones are hatched."""
    for i, row in enumerate([header, *rows]):
        null_row = not any(row)
        for j, text in enumerate(row):
            null = null_row or header[j] == "NULL"
            box = Rectangle((left + j, -i), 1, -1, facecolor=GREY if null else "white", edgecolor=INK, linewidth=0.7)
            box.set_hatch("////" if null and i else "")
            axes.add_patch(box)
            color = BLUE if text == "?" else ORANGE if text == "NULL" else INK
            weight = "bold" if i == 0 or text == "?" else "normal"
            axes.text(left + j + 0.5, -i - 0.5, text, ha="center", va="center", color=color, weight=weight, fontsize=9)
        if null_row:
            axes.text(left - 0.15, -i - 0.5, "NULL", ha="right", va="center", color=ORANGE, weight="bold", fontsize=9)
    axes.text(left + len(header) / 2, 0.35, title, ha="center", color=INK, fontsize=9)


def main() -> None:
    """Draw it beside this file, always with the same bytes."""
    matplotlib.rcParams.update({"svg.hashsalt": "oretrofit", "svg.fonttype": "none", "hatch.linewidth": 0.4})
    figure = Figure(figsize=(7.2, 3.1), layout="constrained")
    axes = figure.add_subplot()
    draw_table(axes, 0, ROWS, HEADER, "padded: one row and one column do not exist")
    draw_table(
        axes,
        7,
        [[c for j, c in enumerate(row) if j != 2] for row in ROWS if any(row)],
        [*HEADER[:2], *HEADER[3:]],
        "without them",
    )
    axes.text(6, -3, "=", ha="center", va="center", fontsize=22, color=INK)
    axes.text(
        5.5,
        -6.5,
        "the patched model gives both the same answer at “?”",
        ha="center",
        va="center",
        fontsize=9,
        color=BLUE,
    )
    axes.set_xlim(-1.2, 11.2)
    axes.set_ylim(-7, 0.9)
    axes.set_aspect("equal")
    axes.axis("off")
    figure.savefig(Path(__file__).with_name("null.svg"), metadata={"Date": None})


if __name__ == "__main__":
    main()
