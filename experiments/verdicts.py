"""The statistics of an evaluation in tables and in plain words: what each says, and what it does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..retrofit.printing import Cells
from .statistics import MEASURES

Rows = Sequence[dict[str, Any]]

WHAT_A_VERDICT_SAYS = (
    "Equivalent: two one-sided t tests over table means (TOST) at 5 %, by Holm's method for the number of variants, "
    "put the mean change inside the margin (--margin). That is said of the mean, of tables like these and of this "
    "host: not of every case (see the largest change), not of other hosts or other data, and not that nothing changed. "
    "Not shown is not different: few tables show little."
)
WHAT_THE_OTHERS_SAY = (
    "95 % CI, of the mean: percentile bootstrap over tables, then over the cases of each; with few tables it is too "
    "narrow. Mixed model: the mean with a random effect of the table, 95 % by Student's t. Wilcoxon: signed-rank test "
    "over table means; a small p says that tables change in one direction, a large one says nothing (with 6 tables "
    "none is below 0.03). 90 % of TOST: equivalent is what has all of it inside the margin, before Holm's correction. "
    "Stretching a predicted distribution by the margin's percentage changes its NLL by about that margin's nats."
)


def by_measure(statistics: Rows) -> dict[tuple[str, str], dict[str, Any]]:
    """The rows of `statistics.compare_variants` by variant and measure."""
    return {(row["variant"], row["measure"]): row for row in statistics}


def statistics_cells(statistics: Rows) -> Cells:
    """Header and cells of all statistics, a row a variant and measure."""
    header = ["variant", "change of", "mean", "95 % CI", "median", "mixed model", "Wilcoxon p", "90 % of TOST"]
    cells = []
    for row in statistics:
        measure = MEASURES[row["measure"]]
        shown = [f"{row['variant']}", f"{measure.name}, {measure.unit}", number(row["mean"])]
        shown += [_interval(row["mean_low"], row["mean_high"]), number(row["median"])]
        shown += [_interval(row["model_low"], row["model_high"]), p_value(row["wilcoxon_p"])]
        shown += [_interval(row["equivalence_low"], row["equivalence_high"]), f"{row['margin']:g}"]
        cells.append([*shown, p_value(row["equivalence_p_holm"]), _VERDICT[row["equivalent"]]])
    return [*header, "margin", "p (Holm)", "equivalent"], cells


def verdicts(statistics: Rows) -> list[str]:
    """Of each variant, in a sentence, in which measures it is equivalent to its host."""
    sentences = []
    for variant in dict.fromkeys(row["variant"] for row in statistics):
        rows = [row for row in statistics if row["variant"] == variant]
        tables = max(row["tables"] for row in rows)
        names = {row["measure"]: MEASURES[row["measure"]].name for row in rows}
        unchanged = [names[row["measure"]] for row in rows if row["largest"] == 0]
        tested = [row for row in rows if row["largest"] != 0]
        shown = [_within(row) for row in tested if row["equivalent"]]
        not_shown = [names[row["measure"]] for row in tested if row["equivalent"] is False]
        untested = [row for row in tested if row["equivalent"] is None]
        where = "this one table" if tables == 1 else f"these {tables} tables"
        parts = [f"equivalent on {where} and this host within {', '.join(shown)}"] if shown else []
        parts += [f"not shown to be equivalent in {', '.join(not_shown)}"] if not_shown else []
        parts += [f"not tested in {', '.join(names[row['measure']] for row in untested)} ({_why(untested)})"] * bool(
            untested
        )
        parts += [f"no case changed in {', '.join(unchanged)}"] if unchanged else []
        sentences.append(f"{variant}: {'; '.join(parts)}.")
    return sentences


def power_words(power: Rows) -> str:
    """What each design could have missed, in a sentence; empty where that is not known."""
    if not power:
        return ""
    designs = dict.fromkeys((row["cases"], row["tables"]) for row in power)
    found = [
        f"{cases} cases ({tables} tables): "
        + ", ".join(f"{row['variant']} {row['detectable']:.2g} %" for row in power if row["cases"] == cases)
        for cases, tables in designs
    ]
    return (
        "What could have been missed, if tables vary as these did: the smallest true mean change of the RMSE that a t "
        f"test over table means finds in four of five such studies. {'; '.join(found)}."
    )


def tables_of_largest(statistics: Rows) -> dict[str, list[str]]:
    """The tables whose RMSE changed most, with the variants of which that is said; none where there are but two."""
    found: dict[str, list[str]] = {}
    for row in statistics:
        if row["measure"] == "rmse" and row["tables"] > 2 and row["largest"]:
            found.setdefault(row["largest_dataset"], []).append(row["variant"])
    return found


def number(value: float | None) -> str:
    """A change, to two digits; a dash where there is none."""
    return "–" if _is_missing(value) else f"{value:+.2g}"


def p_value(value: float | None) -> str:
    """A p-value, to two digits."""
    if _is_missing(value):
        return "–"
    return "<0.001" if value < 0.001 else f"{value:.2g}"  # type: ignore[operator]


_VERDICT = {True: "yes", False: "not shown", None: "–"}


def verdict_cell(row: dict[str, Any] | None) -> str:
    """Whether a measure is equivalent, with the p-value."""
    if row is None or row["equivalent"] is None:
        return "–"
    return f"{_VERDICT[row['equivalent']]} (p {p_value(row['equivalence_p_holm'])})"


def _within(row: dict[str, Any]) -> str:
    measure = MEASURES[row["measure"]]
    return f"{row['margin']:g} {measure.unit} of {measure.name}"


def _why(rows: Rows) -> str:
    return "; ".join(dict.fromkeys(row["not_available"] for row in rows))


def _interval(low: float | None, high: float | None) -> str:
    return "–" if _is_missing(low) else f"{number(low)} to {number(high)}"


def _is_missing(value: float | None) -> bool:
    return value is None or value != value
