"""The tables of the page: their cells as they are shown, and the numbers behind them, by which they are sorted."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..report import is_broken, percent, ran_alone
from ..statistics import MEASURES, is_sensitive
from ..verdicts import number, p_value, tables_of_largest
from .shown import Shown
from .sites import STATISTICS, Sites


@dataclass(frozen=True)
class Cell:
    """A cell.

    Attributes:
        text: What is shown.
        value: The number behind it, to the last digit.
        mark: Of the style sheet.
    """

    text: str
    value: float | None = None
    mark: str = ""

    @property
    def hidden_value(self) -> float | None:
        """The number, where the text does not say all of it."""
        try:
            return None if self.value is None or float(self.text) == self.value else self.value
        except ValueError:
            return self.value


@dataclass(frozen=True)
class Table:
    """A table.

    Attributes:
        caption: What it shows.
        columns: Their names, each with whether it holds numbers.
        rows: Their cells.
        is_sortable: Whether a click on a column's name sorts it.
    """

    caption: str
    columns: list[tuple[str, bool]]
    rows: list[list[Cell]]
    is_sortable: bool = True


Format = Callable[[float], str]


def _number(value: Any, form: Format | str = "{:.4g}") -> Cell:
    """A cell of a number; a dash for none."""
    if value is None or value != value:
        return Cell("–")
    return Cell(form.format(value) if isinstance(form, str) else form(value), float(value))


def _interval(low: Any, high: Any, form: Format) -> Cell:
    return Cell("–") if low is None or low != low else Cell(f"{form(low)} to {form(high)}", float(low))


def _run_columns(runs: Sequence[Shown]) -> list[tuple[str, bool]]:
    return [("run", False)] if len(runs) > 1 else []


def _run_cells(runs: Sequence[Shown], shown: Shown) -> list[Cell]:
    return [Cell(shown.name, mark="run")] if len(runs) > 1 else []


def by_variant(runs: Sequence[Shown]) -> list[tuple[str, list[Shown]]]:
    """Each variant with the runs that have it."""
    variants = dict.fromkeys(variant for shown in runs for variant in shown.variants)
    return [(variant, [shown for shown in runs if variant in shown.variants]) for variant in variants]


def headline(runs: Sequence[Shown]) -> Table:
    """What became of the RMSE: a row a variant and run."""
    columns = [("variant", False), *_run_columns(runs), ("mean change, %", True), ("95 % interval", True)]
    columns += [("90 % (TOST)", True), ("equivalent?", False)]
    has_paper = any(shown.paper.keys() & set(shown.variants) for shown in runs)
    columns += [("paper's mean*, %", True)] if has_paper else []
    columns += [("median, %", True), ("largest, %", True)]
    has_others = any(tables_of_largest(shown.summary["statistics"]) for shown in runs)
    columns += [("mean without §, %", True)] if has_others else []
    columns += [("wins : losses", False), ("cases", True), ("tables", True)]
    rows = []
    for variant, having in by_variant(runs):
        for shown in having:
            row, summary = shown.statistics[variant, "rmse"], shown.summary["variants"][variant]
            cells = [Cell(variant, mark=f"of-{variant}"), *_run_cells(runs, shown)]
            cells += [Cell(percent(row["mean"]), row["mean"], "strong")]
            cells += [_interval(row["mean_low"], row["mean_high"], percent)]
            cells += [_interval(row["equivalence_low"], row["equivalence_high"], percent), _verdict(row)]
            cells += [_number(shown.paper.get(variant), "{:+.3f}")] if has_paper else []
            cells += [_number(row["median"], percent), _number(row["largest"], percent)]
            cells += [_number(row["mean_without_largest"], percent)] if has_others else []
            cells += [Cell(f"{summary['wins']} : {summary['losses']}")]
            rows.append([*cells, _number(row["cases"]), _number(row["tables"])])
    return Table("Change of the test RMSE against the host", columns, rows, is_sortable=False)


def _verdict(row: Mapping[str, Any]) -> Cell:
    within = f"within ±{row['margin']:g} {row['unit']}"
    if row["equivalent"] is None:
        return Cell(f"not tested: {row['not_available']}", mark="untested")
    p = p_value(row["equivalence_p_holm"])
    shown = f"p {p}" if p.startswith("<") else f"p = {p}"
    return (
        Cell(f"yes, {within} ({shown})", mark="yes")
        if row["equivalent"]
        else Cell(f"not shown {within} ({shown})", mark="no")
    )


def measures(runs: Sequence[Shown]) -> Table:
    """All measures: a row a variant, measure and run."""
    columns = [("variant", False), ("change of", False), *_run_columns(runs), ("mean", True), ("95 % interval", True)]
    columns += [("median", True), ("mixed model, 95 %", True), ("Wilcoxon p", True), ("90 % (TOST)", True)]
    columns += [("margin", True), ("p (Holm)", True), ("equivalent?", False)]
    rows = []
    for variant, having in by_variant(runs):
        for key, measure in MEASURES.items():
            for shown in having:
                row = shown.statistics.get((variant, key))
                if row is None:
                    continue
                cells = [Cell(variant, mark=f"of-{variant}"), Cell(f"{measure.name}, {measure.unit}")]
                cells += [*_run_cells(runs, shown), _number(row["mean"], number)]
                cells += [_interval(row["mean_low"], row["mean_high"], number), _number(row["median"], number)]
                cells += [_interval(row["model_low"], row["model_high"], number), _number(row["wilcoxon_p"], p_value)]
                cells += [_interval(row["equivalence_low"], row["equivalence_high"], number)]
                cells += [_number(row["margin"], "±{:g}"), _number(row["equivalence_p_holm"], p_value)]
                verdict = {True: ("yes", "yes"), False: ("not shown", "no"), None: ("–", "untested")}[row["equivalent"]]
                rows.append([*cells, Cell(verdict[0], mark=verdict[1])])
    return Table("All measures", columns, rows)


# What the table of cases shows: name, column, how. Columns that no run has are left out.
_CASE_COLUMNS: tuple[tuple[str, str, Format | str], ...] = (
    ("train rows", "n_train", "{:.0f}"),
    ("test rows", "n_test", "{:.0f}"),
    ("columns", "n_columns", "{:.0f}"),
    ("RMSE change, %", "rmse_delta_pct", percent),
    ("RMSE, host", "host_rmse", "{:.5g}"),
    ("RMSE, variant", "variant_rmse", "{:.5g}"),
    ("NLL change", "nll_change", number),
    ("NLL, host", "host_nll", "{:.4f}"),
    ("CRPS change, %", "crps_change", percent),
    ("CRPS, host", "host_crps", "{:.4g}"),
    ("in 80 % interval, host", "host_coverage_80", "{:.3f}"),
    ("in 80 % interval, variant", "variant_coverage_80", "{:.3f}"),
    ("in 95 % interval, host", "host_coverage_95", "{:.3f}"),
    ("in 95 % interval, variant", "variant_coverage_95", "{:.3f}"),
    ("largest shift, SD", "max_abs_diff_sd", "{:.2g}"),
    ("seconds, host", "host_seconds", "{:.2f}"),
    ("seconds, variant", "variant_seconds", "{:.2f}"),
)


def cases(runs: Sequence[Shown], names: Mapping[str, str]) -> Table:
    """A row a case, variant and run."""
    frames = []
    for shown in runs:
        rows = shown.rows
        made = rows.assign(
            run=shown.name,
            nll_change=MEASURES["nll"].change(rows),
            mark=[
                " †" * b + " ‡" * s for b, s in zip(is_broken(rows).tolist(), is_sensitive(rows).tolist(), strict=True)
            ],
        )
        if "host_crps" in rows:
            made["crps_change"] = MEASURES["crps"].change(rows)
        for who in ("host", "variant"):
            made[f"{who}_seconds"] = made[f"{who}_seconds"].where(ran_alone(rows))
        frames.append(made)
    merged = pd.concat(frames, ignore_index=True)
    orders = {"dataset": list(names), "variant": [variant for variant, _ in by_variant(runs)]}
    merged = merged.sort_values(
        ["dataset", "seed", "variant"],
        key=lambda column: column.map(orders[column.name].index) if column.name in orders else column,
        kind="stable",
    )
    shown_columns = [c for c in _CASE_COLUMNS if c[1] in merged and merged[c[1]].notna().any()]
    columns = [("table", False), ("seed", True), ("variant", False), *_run_columns(runs)]
    cells = []
    for row in merged.to_dict("records"):
        made_cells = [Cell(names[row["dataset"]] + row["mark"]), _number(row["seed"], "{:.0f}")]
        made_cells += [
            Cell(row["variant"], mark=f"of-{row['variant']}"),
            *([Cell(row["run"], mark="run")] if len(runs) > 1 else []),
        ]
        cells.append([*made_cells, *(_number(row[key], form) for _, key, form in shown_columns)])
    return Table("Cases", [*columns, *((name, True) for name, _, _ in shown_columns)], cells)


def hosts(runs: Sequence[Shown]) -> Table:
    """The runs' hosts on the cases that all runs have."""
    keys = [set(map(tuple, shown.rows[["dataset", "seed"]].itertuples(index=False))) for shown in runs]
    common = set.intersection(*keys)
    rows = []
    for shown in runs:
        settings, frame = shown.run.settings, shown.rows.drop_duplicates(["dataset", "seed"])
        frame = frame[[tuple(pair) in common for pair in frame[["dataset", "seed"]].itertuples(index=False)]]
        alone = frame["host_seconds"][ran_alone(frame)]
        relative = (
            frame["host_rmse"] / frame["train_mean_rmse"] if "train_mean_rmse" in frame else pd.Series(dtype=float)
        )
        row = [
            Cell(shown.name),
            Cell(host_of(settings)),
            Cell(precision_of(settings)),
        ]
        row += [
            Cell(device_of(settings)),
            _number(len(keys[runs.index(shown)])),
            _number(len(common)),
        ]
        row += [_number(relative.mean()), _number(frame["host_nll"].mean()), _number(alone.median(), "{:.2f}")]
        rows.append(row)
    columns = [("run", False), ("host", False), ("precision", False), ("device", False), ("cases", True)]
    columns += [
        ("in all runs", True),
        ("RMSE / that of the train mean", True),
        ("NLL", True),
        ("seconds, median", True),
    ]
    return Table("The hosts, unpatched, on the cases that all runs have", columns, rows, is_sortable=False)


def host_of(settings: Mapping[str, Any]) -> str:
    """The host's name."""
    return settings["host"]["name"] or "given as an object"


def device_of(settings: Mapping[str, Any]) -> str:
    """The GPU, or `cpu`."""
    return settings.get("gpu") or settings["device"]


def precision_of(settings: Mapping[str, Any]) -> str:
    """The precision that was asked for, and what it came to."""
    asked, used = settings["precision"], settings["precision_used"]
    return asked if asked == used else f"{asked} ({used})"


def cost(runs: Sequence[Shown]) -> Table:
    """Time and memory, a row a variant and run."""
    columns = [("variant", False), *_run_columns(runs), ("time / host's, median", True), ("lower quartile", True)]
    columns += [("upper quartile", True), ("seconds, median", True), ("seconds, host's", True)]
    columns += [("cases timed", True), ("memory / host's, median", True)]
    columns += [("peak, MiB, median", True), ("peak, MiB, host's", True)]
    rows = []
    for variant, having in by_variant(runs):
        for shown in having:
            group = shown.rows[shown.rows["variant"] == variant]
            timed = group[ran_alone(group)]
            ratios = timed["variant_seconds"] / timed["host_seconds"]
            peaks = [group[f"{who}_peak_mb"].astype(float) for who in ("variant", "host")]
            cells = [Cell(variant, mark=f"of-{variant}"), *_run_cells(runs, shown)]
            cells += [_number(ratios.quantile(q), "{:.2f}") for q in (0.5, 0.25, 0.75)]
            cells += [_number(timed[f"{who}_seconds"].median(), "{:.2f}") for who in ("variant", "host")]
            cells += [_number(len(timed)), _number((peaks[0] / peaks[1]).median(), "{:.2f}")]
            rows.append([*cells, *(_number(peak.median(), "{:.0f}") for peak in peaks)])
    return Table("Time of fit and predict, and peak memory", columns, rows, is_sortable=False)


def sites(found: Sites) -> Table:
    """A row a site."""
    columns = [("stage", False), ("site", False), ("tau", True)]
    columns += [
        ("||h||², 1 %", True),
        ("||h||², 50 %", True),
        ("||h||², 99 %", True),
        ("presence, lowest", True),
        ("presence, median", True),
    ]
    forms = ("{:.4g}", "{:.4g}", "{:.4g}", "{:.7g}", "{:.7g}")
    rows = [
        [Cell(row["stage"]), Cell(row["site"]), _number(row["tau"], "{:.4g}")]
        + [_number(row[key], form) for key, form in zip(STATISTICS, forms, strict=True)]
        for row in found.table.to_dict("records")
    ]
    return Table(f"Sites of {found.variant}", columns, rows)


def provenance(runs: Sequence[Shown], names: Mapping[str, str]) -> Table:
    """What was run, on what and by whom: a column a run, rows that differ marked."""
    lines = [_origin(shown, names) for shown in runs]
    rows = []
    for key in dict.fromkeys(key for line in lines for key in line):
        texts = [line.get(key, "–") for line in lines]
        mark = "differs" if len(set(texts)) > 1 else ""
        rows.append([Cell(key), *(Cell(text, mark=mark) for text in texts)])
    return Table("Provenance", [("setting", False), *((shown.name, False) for shown in runs)], rows, is_sortable=False)


def _origin(shown: Shown, names: Mapping[str, str]) -> dict[str, str]:
    settings = shown.run.settings
    found = {
        "host": host_of(settings),
        "host's weights, SHA-256": settings["host"]["sha256"],
        "precision": precision_of(settings),
        "device": device_of(settings),
        "tables": ", ".join(names[dataset] for dataset in settings["datasets"]),
        "seeds": ", ".join(map(str, settings["seeds"])),
        "most rows": f"{settings['max_train_rows']} train, {settings['max_test_rows']} test",
    }
    found |= {f"{names.get(spec, spec)}, SHA-256": sha for spec, sha in settings["files_sha256"].items()}
    found |= {f"variant {label}": _words(made) for label, made in settings["variants"].items()}
    if settings.get("estimator"):
        found["TabPFNRegressor"] = _words(settings["estimator"])
    found |= {f"version of {name}": version for name, version in settings["versions"].items()}
    if not shown.provenance:
        found["command"] = "not noted by the version that ran it"
    for index, noted in enumerate(shown.provenance):
        which = "" if len(shown.provenance) == 1 else f" {index + 1}"
        found[f"command{which}"] = str(noted.get("command", "–"))
        found[f"git revision{which}"] = str(noted.get("revision", "–"))
        machine = [noted.get("processor"), f"{noted.get('cores')} cores", noted.get("platform")]
        found[f"machine{which}"] = ", ".join(str(part) for part in machine if part)
        found[f"Python{which}"] = str(noted.get("python", "–"))
        found[f"started{which}"] = str(noted.get("started", "–"))
    return found | {"cases.jsonl, SHA-256": shown.cases_sha256}


def _words(content: Mapping[str, Any]) -> str:
    return ", ".join(
        f"{key} {value if isinstance(value, (str, int, float)) else json.dumps(value)}"
        for key, value in content.items()
    )
