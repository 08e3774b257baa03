"""The figures of the page; see `svg` for how they are drawn. Each is as wide as a narrow phone, and stands alone.

Shapes: `levels` are those of the quantiles.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from ..report import linear_up_to
from .svg import BAND, INK, LINE, MUTED, color_of, draw, rgb, run_color

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ROW = 15  # pixels
_LANE = 0.42  # of a row, for each of several runs
_BINS = 120
_LONGEST = 20  # letters of a label


def short(label: str) -> str:
    """A label that leaves room for the figure, of letters that XML has."""
    label = re.sub("[\x00-\x1f\ud800-\udfff\ufffe\uffff]", "�", label)
    return label if len(label) <= _LONGEST else f"{label[: _LONGEST - 8]}…{label[-7:]}"


# ---- Tables --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChangeAxis:
    """An axis of changes in percent.

    Attributes:
        low: Its one end.
        high: The other.
        linear: Up to which change it is linear, and logarithmic beyond; None: linear all along.
    """

    low: float
    high: float
    linear: float | None

    @classmethod
    def of(cls, rows: pd.DataFrame, intervals: Iterable[float | None]) -> ChangeAxis:
        """One with room for all of `rows["rmse_delta_pct"]`; logarithmic where these differ by orders of magnitude."""
        linear = linear_up_to(rows)
        values = [*rows["rmse_delta_pct"], *(end for end in intervals if end is not None), 0.0]
        low, high = min(values), max(values)
        if linear is not None:
            return cls(min(1.4 * low, 0.0) - linear / 4, max(1.4 * high, 0.0) + linear / 4, linear)
        room = 0.04 * (high - low) or 1e-9
        return cls(low - room, high + room, None)

    def apply(self, axes: Axes) -> None:
        """Give a figure's `axes` this one."""
        from matplotlib.ticker import FuncFormatter, MaxNLocator, SymmetricalLogLocator

        if self.linear is None:
            axes.xaxis.set_major_locator(MaxNLocator(5))
            axes.set_xlabel("RMSE change, %")
        else:
            axes.set_xscale("symlog", linthresh=self.linear)
            locator = SymmetricalLogLocator(base=10, linthresh=self.linear)
            locator.set_params(numticks=5)
            axes.xaxis.set_major_locator(locator)
            axes.minorticks_off()
            axes.set_xlabel(f"RMSE change, % (logarithmic beyond ±{self.linear:g})")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.5g}" if value else "0"))
        axes.grid(axis="x", color=LINE, linewidth=0.6)
        axes.set_xlim(self.low, self.high)


def forest(
    name: str,
    variant: str,
    runs: Sequence[tuple[int, pd.DataFrame, Mapping[str, Any]]],
    names: Mapping[str, str],
    axis: ChangeAxis,
    alone: bool,
) -> str:
    """The changes of a variant's RMSE, table by table, and of all tables together.

    Args:
        name: Of the figure.
        variant: Which.
        runs: Of each run that has the variant its position on the page, the variant's rows, and its row of
            `statistics.compare_variants` for the RMSE.
        names: The datasets' short names, in the order to show them.
        axis: Of the changes, the same for all variants.
        alone: Whether there is one run, drawn in the variant's colour; or each in its own.
    """
    datasets = [dataset for dataset in names if any((rows["dataset"] == dataset).any() for _, rows, _ in runs)]
    lanes = len(runs)
    step = max(1.0, _LANE * lanes + 0.5)
    labels, ends = [short(names[dataset]) for dataset in datasets], ["all, 95 %", "all, 90 % (TOST)"]

    def plot(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.axvline(0, color=INK, linewidth=0.8)
        for lane, (position, rows, statistics) in enumerate(runs):
            color = color_of(variant) if alone else run_color(position)
            nudge = _LANE * (lane - (lanes - 1) / 2)
            for i, dataset in enumerate(datasets):
                changes = rows.loc[rows["dataset"] == dataset, "rmse_delta_pct"].to_numpy()
                if len(changes):
                    _case_range(axes, changes, step * i + nudge, color)
            at = step * len(datasets) + 0.5 + nudge
            _interval(axes, statistics["mean"], statistics["mean_low"], statistics["mean_high"], at, color, "D")
            low, high = statistics["equivalence_low"], statistics["equivalence_high"]
            if low is not None and math.isfinite(low):
                _interval(axes, (low + high) / 2, low, high, at + step, color, "|")
        axis.apply(axes)
        for margin in sorted({statistics["margin"] for *_, statistics in runs}):
            for edge in (-margin, margin):
                if axis.low < edge < axis.high:
                    axes.axvline(edge, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        axes.axhline(step * len(datasets) - 0.5 * step + 0.25, color=LINE, linewidth=0.8)
        places = [step * i for i in range(len(datasets))]
        places += [step * (len(datasets) + i) + 0.5 for i in range(2)]
        axes.set_yticks(places, [*labels, *ends])
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(places[-1] + 0.6 * step, -0.6 * step)
        axes.spines["left"].set_visible(False)

    title = f"{variant}: change of the test RMSE against the host, in percent, of each table and of all together"
    return draw(name, title, 60 + ROW * step * (len(datasets) + 2.7), plot, left=_room([*labels, *ends], 10))


def _case_range(axes: Axes, changes: np.ndarray, at: float, color: str) -> None:
    axes.plot([changes.min(), changes.max()], [at, at], color=color, linewidth=1.2, alpha=0.55)
    style: dict[str, Any] = {"linestyle": "none", "color": color, "markeredgewidth": 0}
    axes.plot(changes, np.full(len(changes), at), marker="o", markersize=3.2, alpha=0.55, **style)
    axes.plot(changes.mean(), at, marker="s", markersize=5.5, **style)


def _interval(
    axes: Axes, mean: float, low: float | None, high: float | None, at: float, color: str, marker: str
) -> None:
    if low is not None and high is not None:
        axes.plot([low, high], [at, at], color=color, linewidth=2.2, solid_capstyle="butt")
    axes.plot(mean, at, marker=marker, markersize=8, color=color)


# ---- Predictions ---------------------------------------------------------------------------------


def agreement(name: str, variant: str, host: np.ndarray, shift: np.ndarray) -> str:
    """The variant's predicted means against the host's, and how far they are from these.

    Args:
        name: Of the figure.
        variant: Which.
        host: (rows,), the host's means, standardized by the mean and deviation of the case's test targets.
        shift: (rows,), the variant's means less the host's, in these deviations.
    """

    def plot(figure: Figure) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(1.25, 1))
        figure.subplots_adjust(hspace=0.08)
        ends = host.min(), host.max()
        above.plot(ends, ends, color=MUTED, linewidth=0.8)
        _density(above, host, host + shift, variant)
        above.set_ylabel("variant's mean, SD")
        _density(below, host, shift, variant)
        below.axhline(0, color=MUTED, linewidth=0.8, zorder=0)
        below.set_ylabel("variant − host, SD")
        below.set_xlabel("host's mean, SD of the test targets from their mean")
        for axes in (above, below):
            axes.grid(color=LINE, linewidth=0.6)
            axes.yaxis.set_major_formatter(_plain())

    title = f"{variant}: predicted means against the host's, and the difference between them"
    return draw(name, title, 380, plot)


def _density(axes: Axes, x: np.ndarray, y: np.ndarray, variant: str) -> None:
    """An image, darker where more rows are, on a logarithmic scale."""
    spans = [_span(x), _span(y)]
    counts, _, _ = np.histogram2d(x, y, bins=_BINS, range=spans)
    image = np.zeros((_BINS, _BINS, 4))
    image[..., :3] = rgb(variant)
    image[..., 3] = np.where(counts > 0, 0.35 + 0.65 * np.log1p(counts) / max(1.0, np.log1p(counts.max())), 0).T
    axes.imshow(image, extent=(*spans[0], *spans[1]), origin="lower", aspect="auto", interpolation="nearest", zorder=2)


def _span(values: np.ndarray) -> tuple[float, float]:
    low, high = float(values.min()), float(values.max())
    room = 0.03 * (high - low) or 1e-9
    return low - room, high + room


# ---- Quantiles -----------------------------------------------------------------------------------


def reliability(name: str, levels: np.ndarray, below: Mapping[str, np.ndarray]) -> str:
    """The share of test targets below each quantile, against its level; `below` by answer, `host` among them."""

    def plot(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.plot([0, 1], [0, 1], color=MUTED, linewidth=0.8)
        for who, shares in below.items():
            if who == "host":
                axes.plot(levels, shares, color=INK, linewidth=3.2, alpha=0.35, label=who)
            else:
                axes.plot(levels, shares, color=color_of(who), linewidth=1.2, marker="o", markersize=2.6, label=who)
        axes.set_xlabel("level of the predicted quantile")
        axes.set_ylabel("share of test targets below it")
        axes.set_aspect("equal")
        axes.grid(color=LINE, linewidth=0.6)
        axes.legend(loc="upper left", handletextpad=0.4, borderaxespad=0.2)

    return draw(name, "Share of test targets below each predicted quantile, host and variants", 350, plot)


def reliability_change(
    name: str, levels: np.ndarray, changes: Mapping[str, tuple[np.ndarray, np.ndarray, np.ndarray]]
) -> str:
    """How much these shares change from host to variant: by variant the mean, low and high, each (levels,)."""

    def plot(figure: Figure) -> None:
        panels = figure.subplots(len(changes), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
        figure.subplots_adjust(hspace=0.4)
        for axes, (variant, (mean, low, high)) in zip(panels, changes.items(), strict=True):
            axes.axhline(0, color=MUTED, linewidth=0.8)
            axes.fill_between(levels, 100 * low, 100 * high, color=color_of(variant), alpha=0.25, linewidth=0)
            axes.plot(levels, 100 * mean, color=color_of(variant), linewidth=1.2, marker="o", markersize=2.6)
            axes.set_title(variant, loc="left", pad=2)
            axes.grid(color=LINE, linewidth=0.6)
            axes.yaxis.set_major_formatter(_plain())
        panels[-1].set_xlabel("level of the predicted quantile")
        figure.supylabel("change of the share below, points", fontsize=10.5, x=0.01, ha="left")

    title = "Change of the share of test targets below each predicted quantile, variants against the host"
    return draw(name, title, 60 + 78 * len(changes), plot, top=18)


# ---- Sites ---------------------------------------------------------------------------------------


def lost_presence(name: str, variant: str, sites: pd.DataFrame, delta: float | None) -> str:
    """What live tokens lose of their presence at each site, stage by stage.

    Args:
        name: Of the figure.
        variant: Which.
        sites: A row a site, in the model's order: `stage`, `site`, `presence_min`, `presence_median`.
        delta: What they lose at the quantile of the calibration, if it is known.
    """
    stages = list(dict.fromkeys(sites["stage"]))
    gaps = sites["stage"].map(stages.index).to_numpy()
    places = np.arange(len(sites)) + 1.4 * (gaps + 1)
    labels = [_short_site(site) for site in sites["site"]]
    median, most = (np.maximum(1 - sites[f"presence_{kind}"].to_numpy(), 1e-16) for kind in ("median", "min"))

    def plot(figure: Figure) -> None:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        color = color_of(variant)
        for stage in stages:
            at = places[(sites["stage"] == stage).to_numpy()]
            axes.axhspan(at[0] - 0.6, at[-1] + 0.6, color=BAND, linewidth=0, zorder=0)
            axes.text(0.0, at[0] - 0.75, stage.replace("_", " "), transform=axes.get_yaxis_transform(), va="bottom")
        axes.hlines(places, median, most, color=color, linewidth=1.6)
        axes.plot(median, places, linestyle="none", marker="o", markersize=4, color=color)
        axes.plot(most, places, linestyle="none", marker="|", markersize=7, color=color)
        if delta is not None:
            axes.axvline(delta, color=MUTED, linewidth=1, linestyle=(0, (3, 2)))
        axes.set_yticks(places, labels, fontsize=8.5)
        axes.minorticks_off()
        axes.tick_params(axis="y", length=0)
        axes.set_ylim(places[-1] + 1, -0.3)
        axes.set_xlabel("1 − presence: median token (dot) to the lowest (bar)")
        axes.xaxis.set_major_formatter(_plain())
        axes.grid(axis="x", color=LINE, linewidth=0.6)
        axes.spines["left"].set_visible(False)

    title = f"{variant}: presence that live tokens lose at each site, by stage of the model"
    return draw(name, title, 55 + 12.5 * places[-1], plot, left=_room(labels, 8.5))


def _room(labels: Iterable[str], size: float) -> float:
    """Pixels that labels of a font size take on the left."""
    return 10 + 0.56 * size * max(map(len, labels))


def _short_site(site: str) -> str:
    for long, shorter in (("layers.", ""), ("blocks.", ""), ("cross_attn_", ""), ("layernorm", "norm")):
        site = site.replace(long, shorter)
    return short(site)


def _plain() -> Any:
    from matplotlib.ticker import FuncFormatter

    return FuncFormatter(lambda value, _: f"{value:.4g}")
