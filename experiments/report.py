"""What an evaluation found: a summary per variant, a Markdown table and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

# What the paper reports: mean RMSE change over 18 matched cases of its own.
PAPER = {
    "note": "another host on other data",
    "cases": 18,
    "mean_rmse_delta_pct": {"oa": 0.088, "full-o": 0.177},
}

_RESAMPLES = 10_000

Cells = tuple[list[str], list[list[str]]]


def summarize(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Summarise the rows of `evaluate.case_rows` per variant.

    Returns:
        For each variant: `cases`; `mean_`, `median_` and `worst_rmse_delta_pct` (the largest);
        `ci95_pct`, `[low, high]` of the mean by a percentile bootstrap over cases, which are not
        independent where they share a dataset; `wins` and `losses` (RMSE below and above the
        host's); `mean_nll_delta`; `max_abs_diff_sd`; `time_ratio` and `peak_memory_ratio` (medians
        over cases of variant / host; None where unknown).
    """
    summary = {}
    for variant, group in rows.groupby("variant", sort=False) if len(rows) else []:
        delta = group["rmse_delta_pct"].to_numpy()
        memory = (group["variant_peak_mb"].astype(float) / group["host_peak_mb"].astype(float)).median()
        summary[str(variant)] = {
            "cases": len(group),
            "mean_rmse_delta_pct": float(delta.mean()),
            "median_rmse_delta_pct": float(np.median(delta)),
            "worst_rmse_delta_pct": float(delta.max()),
            "ci95_pct": _bootstrap_ci(delta),
            "wins": int((group["variant_rmse"] < group["host_rmse"]).sum()),
            "losses": int((group["variant_rmse"] > group["host_rmse"]).sum()),
            "mean_nll_delta": float((group["variant_nll"] - group["host_nll"]).mean()),
            "max_abs_diff_sd": float(group["max_abs_diff_sd"].max()),
            "time_ratio": float((group["variant_seconds"] / group["host_seconds"]).median()),
            "peak_memory_ratio": None if math.isnan(memory) else float(memory),
        }
    return summary


def write_report(
    folder: Path, settings: dict[str, Any], rows: pd.DataFrame, failed: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Write `summary.json`, `table.md` and, if any case finished, `deltas.png`; return the summary.

    Raises `OSError` if the folder cannot be written to.
    """
    summary = {"settings": settings, "paper": PAPER, "variants": summarize(rows), "failed": list(failed)}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    (folder / "table.md").write_text(_markdown(summary, rows))
    if len(rows):
        plot_deltas(rows, folder / "deltas.png")
    return summary


def summary_cells(variants: dict[str, dict[str, Any]]) -> Cells:
    """Header and cells of the summary table, a row a variant."""
    header = ["variant", "cases", "mean", "median", "worst", "95 % CI", "wins : losses"]
    header += ["NLL change", "largest shift", "time", "memory"]
    cells = []
    for name, s in variants.items():
        memory = s["peak_memory_ratio"]
        cells.append(
            [
                name,
                str(s["cases"]),
                *(f"{s[f'{kind}_rmse_delta_pct']:+.4f}" for kind in ("mean", "median", "worst")),
                "{:+.4f} to {:+.4f}".format(*s["ci95_pct"]),
                f"{s['wins']} : {s['losses']}",
                f"{s['mean_nll_delta']:+.5f}",
                f"{s['max_abs_diff_sd']:.2g}",
                f"{s['time_ratio']:.2f}",
                "–" if memory is None else f"{memory:.2f}",
            ]
        )
    return header, cells


def case_cells(rows: pd.DataFrame) -> Cells:
    """Header and cells of the per-case table, a row a case, the variants' RMSE changes in columns."""
    deltas = rows.pivot_table(index=["dataset", "seed"], columns="variant", values="rmse_delta_pct", sort=False)
    cases = rows.drop_duplicates(["dataset", "seed"]).set_index(["dataset", "seed"])
    variants = list(rows["variant"].unique())
    cells = []
    for (dataset, seed), case in cases.iterrows():  # type: ignore[misc]
        changes = (f"{deltas.loc[(dataset, seed), variant]:+.4f}" for variant in variants)
        shape = f"{case['n_train']} + {case['n_test']} x {case['n_columns']}"
        cells.append([short_name(dataset), str(seed), shape, f"{case['host_rmse']:.5g}", *changes])
    return ["dataset", "seed", "rows x columns", "host RMSE", *variants], cells


def paper_note() -> str:
    """One line that puts the paper's figures beside ours, as what they are."""
    figures = ", ".join(f"{name} {value:+.3f} %" for name, value in PAPER["mean_rmse_delta_pct"].items())  # type: ignore[attr-defined]
    return f"The paper's means over {PAPER['cases']} cases, {PAPER['note']}: {figures}."


def short_name(dataset: str) -> str:
    """A dataset's spec, of a CSV file without its folders."""
    return Path(dataset).name if dataset.startswith("csv:") else dataset


def plot_deltas(rows: pd.DataFrame, file: Path) -> None:
    """Draw every case's RMSE change: datasets along x, a marker a variant.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose

    datasets, variants = list(rows["dataset"].unique()), list(rows["variant"].unique())
    figure = Figure(figsize=(max(5.0, 1.6 + 0.95 * len(datasets)), 3.8), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    styles = {"identity": ("s", "#8c8c8c"), "oa": ("o", "#1f6fb4"), "full-o": ("^", "#c8501e")}
    for position in range(0, len(datasets), 2):
        axes.axvspan(position - 0.5, position + 0.5, color="#f4f4f4", zorder=0, linewidth=0)
    axes.axhline(0, color="black", linewidth=0.8, zorder=1)
    for i, variant in enumerate(variants):
        of_variant = rows[rows["variant"] == variant]
        seeds = sorted(of_variant["seed"].unique())
        lane = (i + 0.5) / len(variants) - 0.5
        nudge = [0.5 * ((seeds.index(s) + 0.5) / len(seeds) - 0.5) / len(variants) for s in of_variant["seed"]]
        x = [datasets.index(d) + 0.86 * lane + n for d, n in zip(of_variant["dataset"], nudge, strict=True)]
        marker, color = styles.get(variant, ("D", "#555555"))
        mean = of_variant["rmse_delta_pct"].mean()
        label = f"{variant} (mean {mean:+.4f} %)"
        axes.scatter(
            x, of_variant["rmse_delta_pct"], s=26, marker=marker, color=color, alpha=0.85, linewidths=0, label=label
        )

    _scale(axes, rows["rmse_delta_pct"].to_numpy())
    axes.set_xticks(range(len(datasets)), [short_name(d) for d in datasets])
    axes.tick_params(axis="x", length=0, rotation=0 if len(datasets) <= 8 else 45)
    axes.set_xlim(-0.5, len(datasets) - 0.5)
    axes.set_ylabel("RMSE change against the host, %")
    axes.grid(axis="y", color="#d9d9d9", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=9, handletextpad=0.2)
    figure.savefig(file)


def _scale(axes: Any, deltas: np.ndarray) -> None:
    """A symlog axis where the changes differ by orders of magnitude, linear below the small ones."""
    from matplotlib.ticker import FuncFormatter, SymmetricalLogLocator

    sizes = np.abs(deltas[deltas != 0])
    if len(sizes) and sizes.max() > 30 * np.median(sizes):
        threshold = 10.0 ** math.floor(math.log10(np.median(sizes)))
        axes.set_yscale("symlog", linthresh=threshold)
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axes.yaxis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=threshold, subs=range(2, 10)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))


def _bootstrap_ci(values: np.ndarray) -> list[float]:
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]


def _markdown(summary: dict[str, Any], rows: pd.DataFrame) -> str:
    settings = summary["settings"]
    header, cells = summary_cells(summary["variants"])
    blank = [""] * (len(header) - 3)
    paper = PAPER["mean_rmse_delta_pct"].items()  # type: ignore[attr-defined]
    cells += [[f"paper's {name} ({PAPER['note']})", str(PAPER["cases"]), f"{v:+.3f}", *blank] for name, v in paper]
    used = settings["precision_used"]
    precision = settings["precision"] if settings["precision"] == used else f"{settings['precision']} ({used})"
    parts = [
        "# RMSE change against the host, %",
        f"Host {settings['host']['name'] or 'given as an object'} (SHA-256 {settings['host']['sha256'][:12]}), precision "
        f"{precision}, device {settings['gpu'] or settings['device']}, at most {settings['max_train_rows']} train rows.",
        _markdown_table(header, cells),
        "95 % CI: percentile bootstrap over cases. NLL: mean negative log-likelihood of the test targets. Largest "
        "shift: of a predicted mean, in standard deviations of the training target. Time (fit and predict) and peak "
        "memory: median ratio to the host. `identity`: the code of `full-o` with gates too small to matter, so what "
        "it moves is rounding.",
    ]
    if summary["failed"]:
        parts += ["## Failed cases"]
        parts += [
            "\n".join(f"- {short_name(f['dataset'])}, seed {f['seed']}: {f['reason']}" for f in summary["failed"])
        ]
    if len(rows):
        parts += ["## Cases", _markdown_table(*case_cells(rows))]
    return "\n\n".join(parts) + "\n"


def _markdown_table(header: list[str], cells: list[list[str]]) -> str:
    rule = ["---", *["---:"] * (len(header) - 1)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in [header, rule, *cells]
    )
