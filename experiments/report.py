"""What an evaluation found: a summary per variant, a Markdown table and a figure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..patches.host_spec import HostSpec

# What the paper reports: mean RMSE change over 18 matched cases of its own.
PAPER: dict[str, Any] = {
    "note": "another host on other data",
    "cases": 18,
    "mean_rmse_delta_pct": {"oa": 0.088, "full-o": 0.177},
}

_RESAMPLES = 10_000
STYLES = {"identity": ("s", "#8c8c8c"), "oa": ("o", "#1f6fb4"), "full-o": ("^", "#c8501e"), "closed": ("D", "#2b8a3e")}

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
            "ci95_pct": bootstrap_ci(delta),
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
    """Header and cells of the summary table: a column a variant, so that it fits a terminal."""
    paper = PAPER["mean_rmse_delta_pct"]
    lines: dict[str, Callable[[str, dict[str, Any]], str]] = {
        "cases": lambda _, s: str(s["cases"]),
        "mean change, %": lambda _, s: percent(s["mean_rmse_delta_pct"]),
        "  95 % CI": lambda _, s: " to ".join(map(percent, s["ci95_pct"])),
        "  median": lambda _, s: percent(s["median_rmse_delta_pct"]),
        "  worst": lambda _, s: percent(s["worst_rmse_delta_pct"]),
        "  paper's mean*": lambda name, _: f"{paper[name]:+.3f}" if name in paper else "",
        "wins : losses": lambda _, s: f"{s['wins']} : {s['losses']}",
        "NLL change": lambda _, s: f"{s['mean_nll_delta']:+.2g}",
        "largest shift": lambda _, s: f"{s['max_abs_diff_sd']:.2g}",
        "time / host's": lambda _, s: f"{s['time_ratio']:.2f}",
        "memory / host's": lambda _, s: "–" if s["peak_memory_ratio"] is None else f"{s['peak_memory_ratio']:.2f}",
    }
    return ["", *variants], [[label, *(cell(*item) for item in variants.items())] for label, cell in lines.items()]


def percent(value: float) -> str:
    """A change in percent: four decimals, or one digit where these would show nothing."""
    return f"{value:+.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:+.0e}"


def case_cells(rows: pd.DataFrame) -> Cells:
    """Header and cells of the per-case table, a row a case, the variants' RMSE changes in columns."""
    deltas = rows.pivot_table(index=["dataset", "seed"], columns="variant", values="rmse_delta_pct", sort=False)
    cases = rows.drop_duplicates(["dataset", "seed"]).set_index(["dataset", "seed"])
    variants = list(rows["variant"].unique())
    cells = []
    for (dataset, seed), case in cases.iterrows():  # type: ignore[misc]
        changes = (percent(deltas.loc[(dataset, seed), variant]) for variant in variants)
        shape = f"{case['n_train']} + {case['n_test']} x {case['n_columns']}"
        cells.append([short_name(dataset), str(seed), shape, f"{case['host_rmse']:.5g}", *changes])
    return ["dataset", "seed", "rows x columns", "host RMSE", *variants], cells


def case_line(variants: Sequence[dict[str, Any]]) -> str:
    """A finished case in one line, from its records."""
    first = variants[0]
    changes = ", ".join(f"{record['variant']} {percent(record['rmse_delta_pct'])} %" for record in variants)
    seconds = first["host_seconds"] + sum(record["variant_seconds"] for record in variants)
    name = f"{short_name(first['dataset'])} seed {first['seed']}"
    return f"{name}: host RMSE {first['host_rmse']:.5g}, {changes} ({seconds:.0f} s)"


def site_cells(sites: pd.DataFrame, spec: HostSpec) -> dict[str, Cells]:
    """Header and cells of `Retrofit.table`, by what became of the class.

    Names are shortened as the host's `spec` has it; the columns in percent are quantiles of `||h||^2`.
    """
    header = ["site", "carrier", "tau"]
    calibrated = "sq_norm_q50" in sites
    if calibrated:
        header += ["1 %", "50 %", "99 %", "p min", "p med."]
    tables = {}
    for (host_class, o_class), group in sites.groupby(["host_class", "o_class"], sort=False):
        cells = []
        for site in group.to_dict("records"):
            row = [
                spec.shorten(site["name"]),
                site["carrier"].replace("receiver and source", "both"),
                f"{site['tau']:.3g}",
            ]
            if calibrated:
                row += [_short_number(site[f"sq_norm_q{q}"]) for q in ("01", "50", "99")]
                row += [f"{site[f'presence_{kind}']:.5f}" for kind in ("min", "median")]
            cells.append(row)
        tables[f"{host_class} -> {o_class}"] = (header, cells)
    return tables


def _short_number(value: float) -> str:
    """At most six characters from 1e-4 to 1e6, for the narrow columns of the site table."""
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}" if value >= 0.01 else f"{value:.2g}"


def frame_cells(frame: pd.DataFrame) -> Cells:
    """Header and cells of any table, numbers to four digits."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in frame.to_numpy(dtype=object)]
    return [str(column).replace("_", " ") for column in frame.columns], cells


def write_rows(frame: pd.DataFrame, file: Path) -> None:
    """Write a table as a JSON list of rows; what is no finite number becomes null.

    Raises `OSError` if the file cannot be written.
    """
    rows = [
        {key: None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
        for row in frame.to_dict("records")
    ]
    file.write_text(json.dumps(rows, indent=1) + "\n")


def notes() -> str:
    """What a reader of the summary table has to know."""
    return (
        f"* The paper's mean over {PAPER['cases']} cases: {PAPER['note']}. CI: percentile bootstrap over cases. NLL: "
        "mean negative log-likelihood of the test targets. Largest shift: of a predicted mean, in standard deviations "
        "of the training target. Time (fit and predict) and peak memory: medians over cases. identity: the code of "
        "full-o with gates too small to matter; what it moves is the noise floor of this precision."
    )


def short_name(dataset: str) -> str:
    """A dataset's spec, of a CSV file without its folders."""
    return Path(dataset).name if dataset.startswith("csv:") else dataset


def plot_deltas(rows: pd.DataFrame, file: Path) -> None:
    """Draw every case's RMSE change, and each variant's mean with its interval.

    Raises `OSError` if the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose

    datasets, variants = list(rows["dataset"].unique()), list(rows["variant"].unique())
    groups = [*map(short_name, datasets), "mean,\n95 % CI"]
    figure = Figure(figsize=(max(5.2, 1.3 + 0.95 * len(groups)), 3.9), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    set_change_scale(axes, rows)
    for position in range(0, len(datasets), 2):
        axes.axvspan(position - 0.5, position + 0.5, color="#f5f5f5", linewidth=0, zorder=0)
    axes.axvline(len(datasets) - 0.5, color="black", linewidth=0.8)
    axes.axhline(0, color="black", linewidth=0.8)
    for i, variant in enumerate(variants):
        marker, color = STYLES.get(variant, ("D", "#555555"))
        lane = 0.84 * ((i + 0.5) / len(variants) - 0.5)
        cases = rows[rows["variant"] == variant]
        seeds = sorted(cases["seed"].unique())
        nudge = np.array([seeds.index(seed) + 0.5 for seed in cases["seed"]]) / len(seeds) - 0.5
        x = np.array([datasets.index(dataset) for dataset in cases["dataset"]]) + lane + 0.5 * nudge / len(variants)
        deltas = cases["rmse_delta_pct"].to_numpy()
        style: dict[str, Any] = {"marker": marker, "color": color, "linestyle": "none", "markeredgewidth": 0}
        axes.plot(x, deltas, markersize=5, alpha=0.8, label=variant, **style)
        mean, (low, high) = deltas.mean(), bootstrap_ci(deltas)
        axes.vlines(len(datasets) + lane, low, high, color=color, linewidth=1.5)
        axes.plot(len(datasets) + lane, mean, markersize=7, **style)

    crowded = len(groups) * max(map(len, groups)) > 110
    axes.set_xticks(range(len(groups)), groups, rotation=35 if crowded else 0, ha="right" if crowded else "center")
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(variants), frameon=False, handletextpad=0.2)
    figure.savefig(file)


def set_change_scale(axes: Any, rows: pd.DataFrame) -> None:
    """Give a figure's `axes` an axis of RMSE changes in percent, for the values in `rows["rmse_delta_pct"]`.

    It is symlog where the variants' changes differ by orders of magnitude, linear below most.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter, SymmetricalLogLocator

    sizes = rows.loc[rows["variant"] != "identity", "rmse_delta_pct"].abs()
    typical = sizes[sizes > 0].median()
    axes.set_ylabel("RMSE change against the host, %")
    if sizes.max() > 20 * typical:
        threshold = 10.0 ** math.floor(math.log10(typical))
        axes.set_yscale("symlog", linthresh=threshold)
        axes.set_ylabel(f"{axes.get_ylabel()}\n(linear up to ±{threshold:g}, logarithmic beyond)")
        axes.yaxis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axes.yaxis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=threshold, subs=range(2, 10)))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))


def bootstrap_ci(values: np.ndarray) -> list[float]:
    """`[low, high]`: the 95 % percentile bootstrap interval of the mean of (N,) values, always the same."""
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (_RESAMPLES, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return [float(low), float(high)]


def _markdown(summary: dict[str, Any], rows: pd.DataFrame) -> str:
    settings = summary["settings"]
    used = settings["precision_used"]
    precision = settings["precision"] if settings["precision"] == used else f"{settings['precision']} ({used})"
    host = f"{settings['host']['name'] or 'given as an object'} (SHA-256 {settings['host']['sha256'][:12]})"
    device = settings["gpu"] or settings["device"]
    parts = [
        "# RMSE change against the host, %",
        f"Host {host}, precision {precision}, device {device}, at most {settings['max_train_rows']} train rows.",
        _markdown_table(*summary_cells(summary["variants"])),
        notes().replace("*", "\\*"),
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
