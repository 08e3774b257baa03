"""Forecast a panel of monthly series of unequal length, each from its own past, in shared forward passes.

    python examples/panel.py                        # prints the forecasts' error; half a minute
    python examples/panel.py --plot forecasts.png   # and draws six of them

The series are made up.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

import oretrofit

HORIZON = 12
QUANTILES = [0.1, 0.5, 0.9]
INK, BLUE = "#333333", "#1f6fb4"


def draw_panel(series: int, rng: np.random.Generator) -> pd.DataFrame:
    """Sales of shops, of which 20 months to 8 years are known: trend, season, noise, and 12 months to forecast."""
    shops = []
    for shop in range(series):
        month = np.arange(rng.integers(20, 97) + HORIZON)
        trend = 0.3 * rng.standard_normal() * month / 12
        angle = 2 * np.pi * (month - rng.uniform(0, 12)) / 12
        season = rng.uniform(0.5, 1.5) * np.cos(angle) + rng.uniform(0, 0.7) * np.cos(2 * angle)
        sales = 100 + 10 * (trend + season + rng.uniform(0.2, 0.5) * rng.standard_normal(len(month)))
        shops.append(pd.DataFrame({"shop": f"shop {shop:02d}", "month": month, "sales": sales}))
    return pd.concat(shops, ignore_index=True)


def add_features(panel: pd.DataFrame) -> pd.DataFrame:
    """What is known a year ahead. There is no last year in the first one: these cells are missing."""
    angle = 2 * np.pi * panel["month"] / 12
    year_ago = panel.groupby("shop")["sales"].shift(12)
    return panel.assign(
        sin=np.sin(angle), cos=np.cos(angle), sin2=np.sin(2 * angle), cos2=np.cos(2 * angle), year_ago=year_ago
    )


def plot(train: pd.DataFrame, test: pd.DataFrame, forecast: pd.DataFrame, file: Path) -> None:
    """Draw the shop with the shortest known past, that with the longest, and four between them."""
    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    by_length = train["shop"].value_counts(ascending=True).index
    shops = by_length[np.linspace(0, len(by_length) - 1, 6).astype(int)]
    low, middle, high = (forecast[q] for q in QUANTILES)
    for shop, axes in zip(shops, figure.subplots(2, 3).flat, strict=True):
        past, future = train[train["shop"] == shop], test[test["shop"] == shop]
        at, month = future.index, future["month"]
        axes.plot(past["month"].tail(36), past["sales"].tail(36), color=INK, linewidth=1, label="known (last 3 years)")
        axes.plot(month, future["sales"], ".", color=INK, markersize=6, markeredgewidth=0, label="actual")
        axes.fill_between(month, low[at], high[at], color=BLUE, alpha=0.25, linewidth=0, label="10 % to 90 % quantile")
        axes.plot(month, middle[at], color=BLUE, linewidth=1.5, label="median forecast")
        axes.set_title(f"{shop}, {len(past)} months known", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("month", fontsize=9)
    figure.supylabel("sales", fontsize=9)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False)
    figure.savefig(file)


def main() -> None:
    """Forecast, compare with last year's values, and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=40, help="at least 6")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw six of the series (PNG)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what is printed")
    given = parser.parse_args()
    panel = add_features(draw_panel(given.series, np.random.default_rng(0)))
    ahead = panel.groupby("shop").cumcount(ascending=False) < HORIZON
    train, test = panel[~ahead], panel[ahead]

    retrofit = oretrofit.patch("small", variant="closed")
    forecast, report = retrofit.predict_groups(
        train, test, target="sales", by="shop", output_type="quantiles", quantiles=QUANTILES, return_report=True
    )

    found = {
        "series": report.tables,
        "forward passes": report.batches,
        "padding": report.padding,
        "mean absolute error": float((forecast[0.5] - test["sales"]).abs().mean()),
        "of last year's values": float((test["year_ago"] - test["sales"]).abs().mean()),
        "within the 80 % bands": float(test["sales"].between(forecast[0.1], forecast[0.9]).mean()),
    }
    print("\n".join(f"{name}: {value:.3g}" for name, value in found.items()))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")
    if given.plot:
        plot(train, test, forecast, given.plot)


if __name__ == "__main__":
    main()
