"""Figures as SVG inside the page: text stays text, and colours are the page's own, so that dark mode has them too."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ..style import OTHER_STYLE, STYLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A colour's name in the page's style sheet -> it in light and in dark mode.
COLORS: dict[str, tuple[str, str]] = {
    "ink": ("#1f2328", "#e6e9ed"),
    "muted": ("#5c6570", "#9aa4b0"),
    "line": ("#d5dae0", "#3a424c"),
    "band": ("#eef1f4", "#20262d"),
    "identity": (STYLES["identity"][1], "#9a9a9a"),
    "oa": (STYLES["oa"][1], "#5aa9ec"),
    "full-o": (STYLES["full-o"][1], "#f08a55"),
    "closed": (STYLES["closed"][1], "#5cc274"),
    "other": (OTHER_STYLE[1], "#b5b5b5"),
    # Runs side by side: none of the variants' colours.
    "run-0": ("#7a4fb5", "#b795ea"),
    "run-1": ("#0f8a8a", "#4cc7c7"),
    "run-2": ("#a87a00", "#e0b84c"),
    "run-3": ("#a8326e", "#ec7fb4"),
    "run-4": ("#4b5d8a", "#93a8de"),
    "run-5": ("#6b8e23", "#a9cc5f"),
}
# matplotlib is given a colour of its own for each name, which becomes the style sheet's.
_CODES = {name: f"#0000{i + 1:02x}" for i, name in enumerate(COLORS)}
_NAMES = {code: name for name, code in _CODES.items()}
INK, MUTED, LINE, BAND = (_CODES[name] for name in ("ink", "muted", "line", "band"))

PIXELS = 72  # an inch, so that a point is a pixel
WIDTH = 372 / PIXELS  # what a narrow phone has room for


def color_of(variant: str) -> str:
    """What matplotlib draws a variant in."""
    return _CODES[variant if variant in STYLES else "other"]


def run_color(index: int) -> str:
    """What matplotlib draws the run of that position in."""
    return _CODES[f"run-{index % 6}"]


def rgb(variant: str) -> tuple[float, float, float]:
    """A variant's colour for an image, where the style sheet does not reach: as in light mode, from 0 to 1."""
    code = STYLES.get(variant, OTHER_STYLE)[1]
    return tuple(int(code[i : i + 2], 16) / 255 for i in (1, 3, 5))  # type: ignore[return-value]


def draw(name: str, title: str, height: float, plot: Callable[[Figure], None], left: float = 64, top: float = 6) -> str:
    """A figure of the page.

    Args:
        name: Of letters, digits and hyphens, once on a page.
        title: What it shows, for those who do not see it.
        height: In pixels, where it is `WIDTH` wide.
        plot: Draws it.
        left: Room for labels, in pixels.
        top: The same.
    """
    import matplotlib
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose

    style: Any = {
        **{
            "svg.fonttype": "none",
            "svg.hashsalt": name,
            "text.parse_math": False,
            "axes.unicode_minus": False,
            "font.size": 10.5,
        },
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), MUTED),
        **{"axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.color": LINE},
        **{"axes.labelsize": 10.5, "xtick.labelsize": 10, "ytick.labelsize": 10, "legend.fontsize": 10},
        **{"axes.titlesize": 11, "legend.frameon": False, "axes.facecolor": "none", "figure.facecolor": "none"},
    }
    written = io.StringIO()
    with matplotlib.rc_context(style), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of letters that matplotlib's font lacks: the reader's own draws them
        figure = Figure(figsize=(WIDTH, height / PIXELS), dpi=PIXELS)
        width = WIDTH * PIXELS  # matplotlib's own layouts take as long as all the rest
        figure.subplots_adjust(left / width, 42 / height, 1 - 8 / width, 1 - top / height)
        plot(figure)
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    return _inline(written.getvalue(), name, title)


def _inline(text: str, name: str, title: str) -> str:
    """Without what only a file needs, its ids the figure's own, colours by name, and in hundredths of a pixel."""
    svg = ElementTree.fromstring(text)
    for node in svg.iter():
        node.tag = node.tag.rpartition("}")[2]
        node.attrib = {key.rpartition("}")[2]: value for key, value in node.attrib.items()}
        node.tail = None
        if node.tag != "text" and node.text is not None and not node.text.strip():
            node.text = None
    for parent in list(svg.iter()):
        for child in [child for child in parent if child.tag in ("metadata", "style")]:
            parent.remove(child)
    used = set(re.findall(r"#([\w-]+)", " ".join(_references(svg))))
    for node in svg.iter():
        if "id" in node.attrib and node.attrib["id"] not in used:
            del node.attrib["id"]
        for key, value in node.attrib.items():
            if key == "id":
                value = f"{name}-{value}"
            elif (key == "href" and value.startswith("#")) or "url(#" in value:
                value = value.replace("#", f"#{name}-")
            elif key in ("d", "x", "y", "transform", "width", "height"):
                value = re.sub(r"(\.\d\d)\d+", r"\1", value)
            elif key == "style":
                value = re.sub("|".join(_CODES.values()), lambda code: f"var(--{_NAMES[code[0]]})", value)
            node.attrib[key] = value
    svg.attrib = {"class": "figure", "viewBox": svg.attrib["viewBox"], "role": "img", "aria-label": title}
    return ElementTree.tostring(svg, encoding="unicode")


def _references(svg: ElementTree.Element) -> Iterator[str]:
    for node in svg.iter():
        yield from (value for key, value in node.attrib.items() if key == "href" or "url(#" in value)
