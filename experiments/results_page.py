"""The pages that quote `results/`: docs/results.md from its template, and parts of others between their markers.

    python -m oretrofit.experiments.results_page            # writes them
    python -m oretrofit.experiments.results_page --check    # exit code 1 if one differs from what the files say

What the template calls is here: each function reads a file of `results/` and returns Markdown.
"""

from __future__ import annotations

import functools
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jinja2
import pandas as pd

from ..calibration.settings import IDENTITY
from ..patches.tabpfn_v3_host import TABPFN_V3
from ..retrofit.files import write_text
from ..retrofit.printing import markdown_table
from . import audit_report, frontier, runs
from .report import make_summary, notes, percent, percent_interval, summary_cells
from .verdicts import WHAT_A_VERDICT_SAYS, by_measure, power_words, tables_of_largest, verdict_cell, verdicts

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE, TEMPLATE = "docs/results.md", "docs/results.md.jinja"
QUOTING = ("README.md", "docs/cluster.md")  # pages with marked parts

# How fast many small tables are predicted, with the small host and with one of full size.
RAGGED = ("ragged-small-200.json", "ragged-random-v3-40.json")
GROWTH = tuple(f"ragged-small-{tables}.json" for tables in (100, 200, 2000, 5000))

# The evaluation that the README's table is of.
QUOTED = "eval-rdata-float32"

_MARKED = re.compile(r"(<!-- (\w+): begin -->\n).*?(<!-- \2: end -->)", re.DOTALL)
_STRIP = 30  # places on either side of 0 in the README's figure


def pages() -> dict[str, str]:
    """Path -> text of each page as `results/` has it."""
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, trim_blocks=True)
    environment.globals |= {
        name: value
        for name, value in globals().items()
        if callable(value) and getattr(value, "__module__", "") == __name__
    }
    environment.globals["WHAT_A_VERDICT_SAYS"] = WHAT_A_VERDICT_SAYS
    environment.filters |= {"pct": percent, "g": digits}
    template = environment.from_string((ROOT / TEMPLATE).read_text(encoding="utf-8"))
    parts = {"speed": readme_speed, "results": readme_results}
    if has("cluster-memory.json"):
        parts["memory"] = cluster_memory

    def filled(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        return f"{begin}{parts[name]()}\n{end}" if name in parts else found[0]

    texts = {path: (ROOT / path).read_text(encoding="utf-8") for path in QUOTING}
    return {PAGE: template.render(), **{path: _MARKED.sub(filled, text) for path, text in texts.items()}}


def digits(value: float, count: int = 2) -> str:
    """A number to so many significant digits."""
    return f"{value:.{count}g}"


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` only say which of them differ."""
    files = {path: ROOT / path for path in (PAGE, *QUOTING)}
    before = {path: file.read_text(encoding="utf-8") if file.exists() else "" for path, file in files.items()}
    differing = {path: text for path, text in pages().items() if text != before[path]}
    if "--check" in arguments:
        for path in differing:
            print(f"{path} does not say what results/ says; `make pages` writes it anew", file=sys.stderr)
        return bool(differing)
    for path, text in differing.items():
        write_text(ROOT / path, text)
    return 0


# ---- What is there ------------------------------------------------------------------------------


def has(name: str) -> bool:
    """Whether `results/` holds a file or folder."""
    return (RESULTS / name).exists()


def read(name: str) -> Any:
    """The content of a JSON file of `results/`."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def _frame(name: str) -> pd.DataFrame:
    return pd.DataFrame(read(name))


# ---- Evaluations --------------------------------------------------------------------------------


def evaluation(name: str) -> SimpleNamespace:
    """An evaluation's `rows` (as of `runs.case_rows`), and of its summary the parts, in Markdown."""
    return _evaluation(name, *((RESULTS / name / file).read_bytes() for file in (runs.CASES, runs.SETTINGS)))


@functools.cache  # its statistics take seconds, and two pages quote them; of the same content they are the same
def _evaluation(name: str, *_: bytes) -> SimpleNamespace:
    run = runs.read_run(RESULTS / name)
    rows = runs.case_rows(run.results())
    summary = make_summary(run.settings, rows, read(f"{name}/summary.json").get("failed", []))
    return SimpleNamespace(
        rows=rows,
        summary=summary,
        variants=summary["variants"],
        verdicts="\n".join(f"- {sentence}" for sentence in verdicts(summary["statistics"])),
        power=power_words(summary["power"]),
        table=markdown_table(*summary_cells(summary)),
        notes=notes(summary).replace("*", "\\*"),
    )


def conditions(name: str) -> str:
    """On which host, how many tables, and how an evaluation ran, in a sentence."""
    settings = read(f"{name}/{runs.SETTINGS}")
    versions, datasets = settings["versions"], settings["datasets"]
    used = settings["precision_used"]
    precision = used if settings["precision"] == used else f"{settings['precision']} ({used})"
    return (
        f"{host_name(**settings['host'])}; {len(datasets)} tables with {len(settings['seeds'])} random "
        f"splits each, at most {settings['max_train_rows']:,} train and {settings['max_test_rows']:,} test rows; "
        f"precision {precision}, {settings['gpu'] or settings['device'].upper()}, torch {versions['torch']}, "
        f"tabpfn {versions['tabpfn']}."
    )


def host_name(name: str | None, sha256: str) -> str:
    """A host in words, so that no figure of the bundled one is read as TabPFN's."""
    known = {
        "small": "The small model that comes along (trained by this project; *not* Prior Labs' model)",
        "random-v3": "The full-size v3 network with random weights",
        "v3": "Prior Labs' v3 regressor",
    }
    if name == "small" and sha256 != read(f"{QUOTED}/{runs.SETTINGS}")["host"]["sha256"]:
        return f"An earlier small model of this project (SHA-256 {sha256[:12]}; *not* Prior Labs' model)"
    return known.get(name or "", f"The host `{name}`")


def other_evaluations(named: Sequence[str]) -> list[str]:
    """Evaluations in `results/` beside the named ones."""
    found = (path.parent.name for path in RESULTS.glob(f"eval-*/{runs.SETTINGS}"))
    return sorted(set(found) - set(named))


# ---- The README ---------------------------------------------------------------------------------


def readme_results() -> str:
    """The README's table and figure, and where they are from."""
    main = evaluation(QUOTED)
    found = by_measure(main.summary["statistics"])
    margin = f"equivalent within {main.summary['margin']:g} %†"
    header = ["variant", "cases", "mean change, %", "95 % CI*", "largest, %", "wins : losses", margin]
    cells = [
        [
            f"`{variant}`",
            str(s["cases"]),
            percent(s["mean_rmse_delta_pct"]),
            percent_interval(*s["ci95_pct"]),
            percent(s["largest_rmse_delta_pct"]),
            f"{s['wins']} : {s['losses']}",
            verdict_cell(found.get((variant, "rmse"))),
        ]
        for variant, s in main.variants.items()
    ]
    figure = "\n".join(strip(main.rows))
    return f"{conditions(QUOTED)}\n\n{markdown_table(header, cells)}\n\n```text\n{figure}\n```\n\n{largest_changes()}"


def largest_changes() -> str:
    """Of which tables the largest changes are, what the means are without them, and how good the host is there."""
    statistics = [row for row in evaluation(QUOTED).summary["statistics"] if row["variant"] != IDENTITY]
    without = {row["variant"]: percent(row["mean_without_largest"]) for row in statistics if row["measure"] == "rmse"}
    errors, sentences = _frame("host-rdata.json").set_index("dataset"), []
    for table, variants in tables_of_largest(statistics).items():
        name, means = table.rpartition("/")[2], ", ".join(f"{without[variant]} (`{variant}`)" for variant in variants)
        sentences.append(f"Without {name}, the table of the largest change, the means are {means}.")
        if table in errors.index:
            host, forest = errors.loc[table, ["host", "random_forest"]]
            sentences.append(f"There the host's RMSE is {host:.2f} of the mean's, a random forest's {forest:.2f}.")
    return " ".join(sentences)


def readme_speed() -> str:
    """How ragged prediction compares with the best loop, in a sentence."""
    small, full = (read(name)["parallel_loop"]["ragged_speedup"] for name in RAGGED)
    return (
        f"Not by much on a CPU. On two cores it is {small:.2f} times as fast as TabPFN in two processes side by side "
        f"with the small model, and {full:.2f} times with the full-size network ([benchmark]"
        "(docs/results.md#tables-of-different-shapes-speed)). A GPU is where it is expected to pay; that is unmeasured."
    )


def strip(rows: pd.DataFrame) -> Iterator[str]:
    """A figure of characters: for each variant how many cases changed by how much; the first line is its scale."""
    reach = max(rows["rmse_delta_pct"].abs().max(), 1e-9)
    yield f"{'':10}{-reach:<+{_STRIP}.2f}0{reach:>+{_STRIP}.2f} %"
    for variant, group in rows.groupby("variant", sort=False):
        counts = (group["rmse_delta_pct"] / reach * _STRIP).round().astype(int).value_counts()
        places = [counts.get(place, 0) for place in range(-_STRIP, _STRIP + 1)]
        line = "".join("·" if not count else str(count) if count < 10 else "#" for count in places)
        yield f"{variant!s:10}{line}"


# ---- The other files ----------------------------------------------------------------------------


def frontier_table() -> str:
    """Every variant's row at each delta."""
    rows, cells = _frame("frontier.json"), []
    for variant, group in rows.groupby("variant", sort=False):
        header, found = frontier.delta_cells(group)
        cells += [[f"`{variant}`", *row] for row in found]
    return markdown_table(["variant", *header], cells)


def at_delta(name: str, delta: float) -> str:
    """Each variant's mean change at a delta, in words."""
    rows = _frame(name)
    chosen = rows[rows["delta"] == delta]
    return ", ".join(f"{percent(row.mean_rmse_delta_pct)} % (`{row.variant}`)" for row in chosen.itertuples())


def equality_table() -> str:
    """How far ragged answers are from those one by one."""
    columns = {f"{who}_{what}": f"{who}, {what}" for who in ("closed", "host") for what in ("median", "worst")}
    rows = _frame("ragged-equality.json").set_index("quantity").drop("spread of means")
    cells = [[str(name), *(f"{row[column]:.1e}" for column in columns)] for name, row in rows.iterrows()]
    return markdown_table(["", *columns.values()], cells)


def ragged_table() -> str:
    """Many small tables by each method."""
    header = ["host", "tables", "method", "tables / s", "time / ragged", "peak memory, MiB"]
    header += ["preprocessing, s", "forward, s", "decoding, s", "passes", "padding"]
    cells = []
    for found in map(read, RAGGED):
        settings = found["settings"]
        for method, m in found.items():
            if method == "settings":
                continue
            seconds = m["seconds"]
            cells.append(
                [
                    *(settings["host"], str(settings["tables"]), method.replace("_", " ")),
                    *(f"{m['tables_per_second']:.3g}", f"{m['ragged_speedup']:.2f}", f"{m['peak_pss_mb']:.0f}"),
                    *(f"{seconds[stage]:.1f}" for stage in ("preprocessing", "forward", "decoding")),
                    *(f"{m['passes']:,}", f"{m['padding']:.1%}"),
                ]
            )
    return markdown_table(header, cells)


def growth_table() -> str:
    """How speed and memory change with the number of tables."""
    columns = {"tables_per_second": ".3g", "ragged_speedup": ".2f", "peak_pss_mb": ".0f"}
    cells = [
        [
            *(f"{found['settings']['tables']:,}", method.replace("_", " ")),
            *(f"{found[method][key]:{form}}" for key, form in columns.items()),
        ]
        for found in map(read, GROWTH)
        for method in ("parallel_loop", "ragged")
    ]
    return markdown_table(["tables", "method", "tables / s", "time / ragged", "peak memory, MiB"], cells, left=2)


def overhead_table() -> str:
    """What a forward pass of a variant takes."""
    rows = _frame("overhead.json").itertuples()
    cells = [
        [f"`{r.variant}`", *(f"{v:.3f}" for v in (r.ratio, r.low, r.high, r.host_seconds, r.variant_seconds))]
        for r in rows
    ]
    return markdown_table(["variant", "time, variant / host", "95 % CI from", "to", "host, s", "variant, s"], cells)


def contracts_table() -> str:
    """Each operator's largest error, and share of its bound, against the formula; and beside torch's own kernels."""
    rows = _frame("contracts.json")
    formula = rows[rows["property"].str.startswith("formula") | (rows["property"] == "random draws")]
    largest = formula.groupby(["operator", "dtype"], sort=False)[["max_error", "ratio"]].max()
    draws = rows[(rows["property"] == "random draws") & (rows["dtype"] == "fp32")].set_index("operator")
    dtypes = list(rows["dtype"].unique())
    cells = []
    for operator in rows["operator"].unique():
        errors = (largest.loc[(operator, dtype)] for dtype in dtypes)
        stock = draws.loc[operator]
        cells.append(
            [
                f"`{operator}`",
                *(f"{error['max_error']:.1e}, {100 * error['ratio']:.0f} %" for error in errors),
                f"{stock['stock_ratio_median']:.2f}, {stock['stock_ratio_max']:.2f}",
            ]
        )
    return markdown_table(["operator", *dtypes, "ours / torch's, fp32"], cells)


def contracts_rows() -> SimpleNamespace:
    """How many rows there are that can fail, how many did, and how often a null source changed no bit."""
    rows = _frame("contracts.json")
    judged = rows[rows["passed"].notna()]
    chosen = judged[(judged["operator"] == "oattention") & (judged["dtype"] == "fp32")].set_index("property")
    behind = chosen.loc["null source at end"]
    return SimpleNamespace(
        judged=len(judged),
        failed=int((judged["passed"] == False).sum()),  # noqa: E712 - a column of objects
        same=int(behind["bit_equal"]),
        of=int(behind["cases"]),
    )


def anchors_table() -> str:
    """OAttention's error at two sizes, beside torch's own attention's."""
    rows = _frame("contracts.json")
    rows = rows[rows["property"].str.startswith("anchor")]
    kinds = rows["property"].str.removeprefix("anchor ").str.split(" against ", expand=True)
    rows = rows.assign(size=kinds[0], against=kinds[1].where(kinds[1] == "float64", "the same precision"))
    cells = []
    for (size, dtype), group in rows.groupby(["size", "dtype"], sort=False):
        errors = group.set_index("against")
        pairs = [errors.loc[against] for against in ("float64", "the same precision")]
        cells.append([f"{size}, {dtype}", *(f"{e['max_error']:.1e} / {e['stock_error']:.1e}" for e in pairs)])
    return markdown_table(["(B,H,S,J,D), dtype", "against float64", "against the formula in the same precision"], cells)


def largest_error(operator: str) -> str:
    """An operator's largest float32 error against the formula, over all shapes."""
    rows = _frame("contracts.json").query("operator == @operator and dtype == 'fp32'")
    return f"{rows.loc[rows['property'].str.startswith('formula'), 'max_error'].max():.1e}"


def anchor_range() -> str:
    """The smallest and the largest of OAttention's float32 errors at those sizes."""
    rows = _frame("contracts.json")
    errors = rows[rows["property"].str.startswith("anchor") & (rows["dtype"] == "fp32")]["max_error"]
    return f"{errors.min():.1e} to {errors.max():.1e}"


def ablation_table() -> str:
    """Where an inserted zero wakes up."""
    rows = _frame("ablation/table.json").set_index(["host", "block", "sublayer"])
    hosts = {"standard": "standard", "oa-only": "OA-only", "otransformer": "OTransformer"}
    header = ["after", *(f"{title}: {what}" for title in hosts.values() for what in ("shift", "norm"))]
    cells = []
    for block, sublayer in rows.loc["standard"].index:
        name = {"attention": f"attention {block}", "ffn": f"FFN {block}"}.get(sublayer, sublayer)
        found = [rows.loc[(host, block, sublayer)] for host in hosts]
        figures = [
            f"{row['median_shift']:.2g} ({row['max_shift']:.2g}), {row['median_null_norm']:.2g}" for row in found
        ]
        cells.append([name, *(figure for pair in figures for figure in pair.split(", "))])
    return markdown_table(header, cells)


def ablation_end(host: str) -> dict[str, float]:
    """The last row of a host of the ablation."""
    rows = _frame("ablation/table.json")
    return rows[rows["host"] == host].iloc[-1].to_dict()


def audit_table() -> str:
    """How far NULLs in the input move live predictions."""
    header, cells = audit_report.summary_cells(read("audit.json"))
    return markdown_table(header, cells)


def leaks_list() -> str:
    """Which parts leak, in which variants."""
    found = audit_report.leak_rows(read("audit.json"), TABPFN_V3)
    parts = [[f"In {names}:", "", *(f"- `{at}`: {what}" for at, what in rows)] for names, rows in found.items() if rows]
    return "\n\n".join("\n".join(lines) for lines in parts)


def baselines_table() -> str:
    """The bundled host beside ridge regression and a random forest."""
    rows = _frame("host.json")
    cells = [[r.dataset, *(f"{e:.3f}" for e in (r.ridge, r.random_forest, r.host))] for r in rows.itertuples()]
    return markdown_table(["table", "ridge", "random forest (200 trees)", "bundled host"], cells)


def baselines_means() -> str:
    """The same over the tables of rdata, in words."""
    rows = _frame("host-rdata.json").set_index("dataset")
    tables = rows.drop("mean")
    mean, ahead = rows.loc["mean"], (tables["host"] < tables["random_forest"]).sum()
    words = {"ridge": "ridge", "random_forest": "random forest", "host": "bundled host"}
    means = ", ".join(f"{word} {mean[name]:.3f}" for name, word in words.items())
    return f"{means}; the host is ahead of the forest on {ahead} of them"


# ---- Examples -----------------------------------------------------------------------------------


def removal_table() -> str:
    """Of each feature the size of its Shapley values, and the error without it, by each way."""
    found = read("removal.json")
    ways = list(found["seconds"])
    header = ["feature", *(f"Shapley, {way}" for way in ways), *(f"RMSE without, {way}" for way in ways)]
    kinds = [f"{kind}, {way}" for kind in ("shapley", "error without it") for way in ways]
    features = sorted(found["features"], key=lambda feature: -feature["shapley, removal"])
    return markdown_table(header, [[row["feature"], *(f"{row[kind]:.2f}" for kind in kinds)] for row in features])


def filled_larger(filling: str) -> int:
    """How many features have larger Shapley values by a filling (`mean`, `NaN`) than by removal."""
    return sum(row[f"shapley, fill {filling}"] > row["shapley, removal"] for row in read("removal.json")["features"])


def removal_seconds() -> str:
    """What each way took, in words."""
    return ", ".join(f"{way} {seconds:.3g} s" for way, seconds in read("removal.json")["seconds"].items())


def cluster_memory() -> str:
    """Peaks of a cluster's processes by the number of groups, and over the time of the largest run."""
    measured = read("cluster-memory.json")
    numbers = [(r["groups"], r["rows"], r["worker, peak MiB"], r["scheduler, peak MiB"]) for r in measured]
    peaks = markdown_table(["groups", "rows", "worker", "scheduler"], [[f"{n:,.0f}" for n in row] for row in numbers])
    samples = measured[-1]["samples"]  # seconds, the scheduler's, each worker's
    cells: list[list[str]] = [["worker, peak so far"], ["scheduler, peak so far"]]
    places = [round(share / 5 * (len(samples) - 1)) for share in range(6)]
    for place in places:
        so_far = samples[: place + 1]
        cells[0].append(str(max(max(sample[2:], default=0) for sample in so_far)))
        cells[1].append(str(max(sample[1] for sample in so_far)))
    growth = markdown_table(["after seconds", *(f"{samples[place][0]:,}" for place in places)], cells)
    return f"{peaks}\n\nOver the time of the last, the larger of the two workers and the scheduler:\n\n{growth}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
