"""What an evaluation found: a summary per variant, a Markdown table and a figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ..calibration.settings import BUNDLED_TARGETS, MARGIN
from ..retrofit.files import replacing, write_json, write_text
from ..retrofit.printing import Cells, markdown_table
from .power import design_power, plot_power, without_control
from .statistics import SENSITIVE, bootstrap_interval, compare_variants, is_sensitive
from .style import OTHER_STYLE, STYLES, short_datasets
from .verdicts import (
    WHAT_A_VERDICT_SAYS,
    WHAT_THE_OTHERS_SAY,
    by_measure,
    number,
    power_words,
    statistics_cells,
    tables_of_largest,
    verdict_cell,
    verdicts,
)

# What the paper reports: mean RMSE change over 18 matched cases of its own.
PAPER: dict[str, Any] = {
    "note": "another host on other data",
    "cases": 18,
    "mean_rmse_delta_pct": {"oa": 0.088, "full-o": 0.177},
}

# A host whose RMSE is more than this many times that of predicting the train rows' mean is broken on that case: what a
# patch changes there says nothing about the patch. (A host that has learnt nothing is near 1.)
BROKEN = 3.0


def summarize(rows: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Summarise the rows of `runs.case_rows` per variant.

    Returns:
        For each variant: `cases`; `mean_`, `median_`, `largest_` (the largest change, of either sign) and
        `worst_rmse_delta_pct` (the largest increase); `ci95_pct`, `[low, high]` of the mean by a
        percentile bootstrap over tables, then over the cases of each (both None for a single case);
        `mean_rmse_delta_pct_without_broken`, over the cases whose host is not broken (None without any);
        `wins` and `losses` (RMSE below and above the host's); `mean_nll_delta`; `max_abs_diff_sd`;
        `timed`, how many cases ran by themselves, so that their times mean something; `time_ratio`, over these, and
        `peak_memory_ratio` (medians over cases of variant / host; None where unknown).
    """
    summary = {}
    for variant, group in rows.groupby("variant", sort=False) if len(rows) else []:
        delta, tables = group["rmse_delta_pct"].to_numpy(), group["dataset"].to_numpy()
        sound = delta[~is_broken(group)]
        times = (group["variant_seconds"] / group["host_seconds"])[ran_alone(group)]
        memory = (group["variant_peak_mb"].astype(float) / group["host_peak_mb"].astype(float)).median()
        summary[str(variant)] = {
            "cases": len(group),
            "mean_rmse_delta_pct": float(delta.mean()),
            "median_rmse_delta_pct": float(np.median(delta)),
            "largest_rmse_delta_pct": float(delta[np.abs(delta).argmax()]),
            "worst_rmse_delta_pct": float(delta.max()),
            "ci95_pct": [None if math.isnan(end) else end for end in bootstrap_interval(delta, tables)],
            "mean_rmse_delta_pct_without_broken": float(sound.mean()) if len(sound) else None,
            "wins": int((group["variant_rmse"] < group["host_rmse"]).sum()),
            "losses": int((group["variant_rmse"] > group["host_rmse"]).sum()),
            "mean_nll_delta": float((group["variant_nll"] - group["host_nll"]).mean()),
            "max_abs_diff_sd": float(group["max_abs_diff_sd"].max()),
            "timed": len(times),
            "time_ratio": float(times.median()) if len(times) else None,
            "peak_memory_ratio": None if math.isnan(memory) else float(memory),
        }
    return summary


def is_broken(rows: pd.DataFrame) -> np.ndarray:
    """Of each row whether the host is broken on its case; see `BROKEN`. (In rows of earlier versions unknown: no.)"""
    if "train_mean_rmse" not in rows:
        return np.zeros(len(rows), dtype=bool)
    return (rows["host_rmse"] > BROKEN * rows["train_mean_rmse"].astype(float)).to_numpy()


def ran_alone(rows: pd.DataFrame) -> np.ndarray:
    """Of each row whether its case ran by itself. (In rows of earlier versions all did.)"""
    if "workers" not in rows:
        return np.ones(len(rows), dtype=bool)
    return (rows["workers"].fillna(1) == 1).to_numpy()


def make_summary(
    settings: dict[str, Any], rows: pd.DataFrame, failed: Sequence[dict[str, Any]] = (), margin: float = MARGIN
) -> dict[str, Any]:
    """What `summary.json` holds.

    Returns:
        `settings`, `variants` (see `summarize`), `failed`; `margin`, in percent; `statistics`, the rows of
        `statistics.compare_variants`; `power`, those of `power.design_power` for the RMSE, without the control;
        `broken_host` and `sensitive` (cases, with the host's RMSE and that of predicting the train mean, or the
        target's standard deviation); and `paper`: what the paper reports, where our own figures are made (the bundled
        host on the bundled tables); None elsewhere.
    """
    is_ours = settings["host"]["name"] == "small" and set(settings["datasets"]) == set(BUNDLED_TARGETS)
    statistics = compare_variants(rows, margin)
    return {
        "settings": settings,
        "paper": PAPER if is_ours else None,
        "variants": summarize(rows),
        "margin": margin,
        "statistics": _records(statistics),
        "power": _records(without_control(design_power(statistics))),
        "broken_host": _named(rows, is_broken, "train_mean_rmse"),
        "sensitive": _named(rows, is_sensitive, "target_sd"),
        "failed": list(failed),
    }


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Its rows, as JSON has them."""
    rows = frame.to_dict("records")
    return [{k: None if isinstance(v, float) and math.isnan(v) else v for k, v in row.items()} for row in rows]  # type: ignore[misc]


def _named(rows: pd.DataFrame, chosen: Callable[[pd.DataFrame], np.ndarray], beside: str) -> list[dict[str, Any]]:
    """The cases among the rows that are chosen, with the host's RMSE and another of its figures."""
    if not len(rows):
        return []
    found = rows[chosen(rows)].drop_duplicates(["dataset", "seed"])
    return found[["dataset", "seed", "host_rmse", beside]].to_dict("records") if len(found) else []


def report_files(summary: dict[str, Any], rows: pd.DataFrame) -> dict[str, Callable[[Path], None]]:
    """What writes each file of a report: `summary.json`, `table.md`; where there are cases figures and `cases.csv`."""
    names = short_datasets(summary["settings"]["datasets"])
    files: dict[str, Callable[[Path], None]] = {
        "summary.json": partial(write_json, summary),
        "table.md": partial(_write_markdown, summary, rows),
    }
    if len(rows):
        files["deltas.png"] = partial(plot_deltas, rows, names)
        files["cases.csv"] = partial(_write_csv, rows)
    if summary["power"]:
        files["power.png"] = partial(plot_power, pd.DataFrame(summary["statistics"]))
    return files


def summary_cells(summary: dict[str, Any]) -> Cells:
    """Header and cells of the summary table: a column a variant, so that it fits a terminal."""
    variants = summary["variants"]
    paper = summary["paper"]["mean_rmse_delta_pct"] if summary["paper"] else {}
    found = by_measure(summary["statistics"])
    lines: dict[str, Callable[[str, dict[str, Any]], str]] = {
        "cases": lambda _, s: str(s["cases"]),
        "mean change, %": lambda _, s: percent(s["mean_rmse_delta_pct"]),
        "  95 % CI": lambda _, s: percent_interval(*s["ci95_pct"]),
        "  median": lambda _, s: percent(s["median_rmse_delta_pct"]),
        "  largest": lambda _, s: percent(s["largest_rmse_delta_pct"]),
    }
    if tables_of_largest(summary["statistics"]):
        lines["  mean without §"] = lambda name, _: percent(found[name, "rmse"]["mean_without_largest"])
    if summary["broken_host"]:
        lines["  mean without †"] = lambda _, s: percent(s["mean_rmse_delta_pct_without_broken"])
    if summary["sensitive"]:
        lines["  mean without ‡"] = lambda name, _: percent(found[name, "rmse"]["mean_without_sensitive"])
    if paper.keys() & variants.keys():
        lines["  paper's mean*"] = lambda name, _: f"{paper[name]:+.3f}" if name in paper else ""
    lines |= {
        f"equivalent, ±{summary['margin']:g} %": lambda name, _: verdict_cell(found.get((name, "rmse"))),
        "wins : losses": lambda _, s: f"{s['wins']} : {s['losses']}",
        "NLL change": lambda _, s: f"{s['mean_nll_delta']:+.2g}",
    }
    if any(measure == "crps" for _, measure in found):
        lines["CRPS change, %"] = lambda name, _: number(found[name, "crps"]["mean"])
    lines |= {
        "largest shift": lambda _, s: f"{s['max_abs_diff_sd']:.2g}",
        "time / host's": lambda _, s: _ratio(s["time_ratio"]),
        "memory / host's": lambda _, s: _ratio(s["peak_memory_ratio"]),
    }
    return ["", *variants], [[label, *(cell(*item) for item in variants.items())] for label, cell in lines.items()]


def _ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(value: float | None) -> str:
    """A change in percent: four decimals, or one digit where these would show nothing; a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    return f"{value:+.4f}" if value == 0 or abs(value) >= 5e-5 else f"{value:+.0e}"


def percent_interval(low: float | None, high: float | None) -> str:
    """An interval of changes in percent; a dash where there is none."""
    return "–" if low is None else f"{percent(low)} to {percent(high)}"


def case_cells(rows: pd.DataFrame, names: Mapping[str, str]) -> Cells:
    """Header and cells of the per-case table, a row a case, the variants' RMSE changes in columns.

    `names` are the datasets' short names; the RMSE of a broken host and of a nearly exact one are marked.
    """
    deltas = rows.pivot_table(index=["dataset", "seed"], columns="variant", values="rmse_delta_pct", sort=False)
    marked = rows.assign(broken=is_broken(rows), sensitive=is_sensitive(rows))
    cases = marked.drop_duplicates(["dataset", "seed"]).set_index(["dataset", "seed"])
    variants = list(rows["variant"].unique())
    cells = []
    for (dataset, seed), case in cases.iterrows():  # type: ignore[misc]
        changes = (percent(deltas.loc[(dataset, seed), variant]) for variant in variants)
        shape = f"{case['n_train']} + {case['n_test']} x {case['n_columns']}"
        host = f"{case['host_rmse']:.5g}" + " †" * case["broken"] + " ‡" * case["sensitive"]
        cells.append([names[dataset], str(seed), shape, host, *changes])
    return ["dataset", "seed", "rows x columns", "host RMSE", *variants], cells


def case_line(variants: Sequence[dict[str, Any]], names: Mapping[str, str]) -> str:
    """A finished case in one line, from its records; `names` are the datasets' short names.

    With the time, where all of it ran by itself.
    """
    first = variants[0]
    changes = ", ".join(f"{record['variant']} {percent(record['rmse_delta_pct'])} %" for record in variants)
    line = f"{names[first['dataset']]} seed {first['seed']}: host RMSE {first['host_rmse']:.5g}, {changes}"
    if any(record.get("workers", 1) > 1 for record in variants):
        return line
    seconds = first["host_seconds"] + sum(record["variant_seconds"] for record in variants)
    return f"{line} ({seconds:.0f} s)"


def notes(summary: dict[str, Any]) -> str:
    """What a reader of the summary table has to know."""
    parts = []
    names = short_datasets(summary["settings"]["datasets"])

    def cases(which: str, beside: str, word: str) -> str:
        return "; ".join(
            f"{names[case['dataset']]} seed {case['seed']} ({case['host_rmse']:.3g}, {word} {case[beside]:.3g})"
            for case in summary[which]
        )

    if summary["broken_host"]:
        parts.append(
            f"† The host itself is broken there: its RMSE is more than {BROKEN:g} times that of predicting the mean of "
            f"the train rows, so that a change says nothing about the patch: "
            f"{cases('broken_host', 'train_mean_rmse', 'the mean')}."
        )
    if summary["sensitive"]:
        parts.append(
            f"‡ The host is nearly exact there: its RMSE is below {100 * SENSITIVE:g} % of the target's standard "
            f"deviation, so that many percent of it may be little: {cases('sensitive', 'target_sd', 'deviation')}."
        )
    if without := without_largest_note(summary):
        parts.append(without)
    if summary["paper"] and summary["paper"]["mean_rmse_delta_pct"].keys() & summary["variants"].keys():
        parts.append(f"* The paper's mean over {summary['paper']['cases']} cases: {summary['paper']['note']}.")
    parts.append(
        "CI: percentile bootstrap over tables, then over the cases of each. Largest: the largest change, up or down. "
        "NLL: mean negative log-likelihood of the test targets. CRPS: their mean continuous ranked probability score. "
        "Largest shift: of a predicted mean, in standard deviations of the training target. Time (fit and predict) and "
        "peak memory: medians over cases. identity: the code of full-o with gates too small to matter; what it moves "
        "is the noise floor of this precision."
    )
    if beside := max((s["cases"] - s["timed"] for s in summary["variants"].values()), default=0):
        parts.append(
            f"Cases that ran beside others (--workers): {beside}. Their times mean nothing and are left out; their "
            "memory is that of the process that ran them, without a warm-up, what it shares with others included."
        )
    return " ".join(parts)


def without_largest_note(summary: dict[str, Any]) -> str:
    """What § means in a summary; empty where there is none."""
    names = short_datasets(summary["settings"]["datasets"])
    largest = tables_of_largest(summary["statistics"])
    listed = "; ".join(f"{names[table]} ({', '.join(variants)})" for table, variants in largest.items())
    return f"§ Over all tables but that of the variant's largest change: {listed}." if listed else ""


def plot_deltas(rows: pd.DataFrame, names: Mapping[str, str], file: Path) -> None:
    """Draw every case's RMSE change, and each variant's mean with its interval, as a PNG.

    `names` are the datasets' short names. Raises `OSError` if the file cannot be written.
    """
    from matplotlib.figure import Figure  # slow to import; without pyplot there is no backend to choose

    datasets, variants = list(rows["dataset"].unique()), list(rows["variant"].unique())
    groups = [*(names[dataset] for dataset in datasets), "mean, 95 % CI"]
    lanes = 0.09 * len(variants)  # inches
    figure = Figure(figsize=(7.5, 1.1 + len(groups) * max(0.2, lanes)), dpi=160, layout="constrained")
    axes = figure.add_subplot()
    set_change_scale(axes, rows, "x")
    for position in range(0, len(datasets), 2):
        axes.axhspan(position - 0.5, position + 0.5, color="#f5f5f5", linewidth=0, zorder=0)
    axes.axhline(len(datasets) - 0.5, color="black", linewidth=0.8)
    axes.axvline(0, color="black", linewidth=0.8)
    for i, variant in enumerate(variants):
        marker, color = STYLES.get(variant, OTHER_STYLE)
        lane = 0.84 * ((i + 0.5) / len(variants) - 0.5)
        cases = rows[rows["variant"] == variant]
        y = np.array([datasets.index(dataset) for dataset in cases["dataset"]]) + lane
        deltas = cases["rmse_delta_pct"].to_numpy()
        style: dict[str, Any] = {"marker": marker, "color": color, "linestyle": "none", "markeredgewidth": 0}
        axes.plot(deltas, y, markersize=4, alpha=0.8, label=variant, **style)
        mean, (low, high) = deltas.mean(), bootstrap_interval(deltas, cases["dataset"].to_numpy())
        axes.hlines(len(datasets) + lane, low, high, color=color, linewidth=1.5)
        axes.plot(mean, len(datasets) + lane, markersize=5, **style)

    axes.set_yticks(range(len(groups)), groups)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper center", ncols=len(variants), frameon=False, handletextpad=0.2)
    with replacing(file) as part:
        figure.savefig(part, format="png")


def linear_up_to(rows: pd.DataFrame) -> float | None:
    """Up to which change an axis is best linear, and logarithmic beyond; None where changes are of one size."""
    sizes = rows.loc[rows["variant"] != "identity", "rmse_delta_pct"].abs()
    typical = sizes[sizes > 0].median()
    return 10.0 ** math.floor(math.log10(typical)) if sizes.max() > 20 * typical else None


def set_change_scale(axes: Any, rows: pd.DataFrame, direction: str = "y") -> None:
    """Let a figure's `axes` show RMSE changes in percent along x or y, for the values in `rows["rmse_delta_pct"]`.

    The scale is symlog where the variants' changes differ by orders of magnitude, linear below most.
    """
    from matplotlib.ticker import FuncFormatter, NullFormatter, SymmetricalLogLocator

    axis, label = getattr(axes, f"{direction}axis"), "RMSE change against the host, %"
    if (threshold := linear_up_to(rows)) is not None:
        getattr(axes, f"set_{direction}scale")("symlog", linthresh=threshold)
        label += f"\n(linear up to ±{threshold:g}, logarithmic beyond)"
        axis.set_major_locator(SymmetricalLogLocator(base=10, linthresh=threshold))
        axis.set_minor_locator(SymmetricalLogLocator(base=10, linthresh=threshold, subs=range(2, 10)))
        axis.set_minor_formatter(NullFormatter())
    axis.set_label_text(label)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+g}" if value else "0"))


def cases_csv(rows: pd.DataFrame) -> str:
    """The rows of `runs.case_rows` as CSV, unrounded."""
    ordered = sorted(rows, key=lambda name: name == "key")  # which is read in front, and written behind
    text = rows[ordered].to_csv(index=False, lineterminator="\n")
    return text.encode("utf-8", "backslashreplace").decode()  # of names of files that are no UTF-8


def _write_csv(rows: pd.DataFrame, file: Path) -> None:
    write_text(file, cases_csv(rows))


def _write_markdown(summary: dict[str, Any], rows: pd.DataFrame, file: Path) -> None:
    settings = summary["settings"]
    names = short_datasets(settings["datasets"])
    used = settings["precision_used"]
    precision = settings["precision"] if settings["precision"] == used else f"{settings['precision']} ({used})"
    host = f"{settings['host']['name'] or 'given as an object'} (SHA-256 {settings['host']['sha256'][:12]})"
    device = settings["gpu"] or settings["device"]
    parts = [
        "# RMSE change against the host, %",
        f"Host {host}, precision {precision}, device {device}, at most {settings['max_train_rows']} train rows.",
        markdown_table(*summary_cells(summary)),
        notes(summary).replace("*", "\\*"),
    ]
    if statistics := summary["statistics"]:
        parts += ["## What the tests say", "\n".join(f"- {sentence}" for sentence in verdicts(statistics))]
        parts += [WHAT_A_VERDICT_SAYS, markdown_table(*statistics_cells(statistics), left=2), WHAT_THE_OTHERS_SAY]
    if summary["power"]:
        parts += [power_words(summary["power"]), "![Power against the true mean change](power.png)"]
    if summary["failed"]:
        parts += ["## Failed cases"]
        parts += ["\n".join(f"- {names[f['dataset']]}, seed {f['seed']}: {f['reason']}" for f in summary["failed"])]
    if len(rows):
        parts += ["## Cases", markdown_table(*case_cells(rows, names))]
    write_text(file, "\n\n".join(parts) + "\n")
