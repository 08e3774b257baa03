"""The sites of a run's retrofits, from their files alone: the model is not loaded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pandas as pd

from ..runs import Run

STATISTICS = ("sq_norm_q01", "sq_norm_q50", "sq_norm_q99", "presence_min", "presence_median")


@dataclass(frozen=True, eq=False)
class Sites:
    """The sites of a variant.

    Attributes:
        variant: Its label in the run.
        table: A row a site, stage by stage in the model's order: `stage`, `site`, `tau`, and `STATISTICS`, NaN where
            the site was not calibrated.
        chosen: What tau was chosen with, such as `delta`.
    """

    variant: str
    table: pd.DataFrame
    chosen: dict[str, Any]

    def same(self, other: Sites) -> bool:
        """Whether two runs have one retrofit, to the last digit."""
        return self.chosen == other.chosen and self.table.equals(other.table)


def read_sites(run: Run) -> dict[str, Sites | str]:
    """Of each variant of a run its sites, or in words why they are not known."""
    return {variant: _read(run, variant) for variant in run.settings["variants"]}


def _read(run: Run, variant: str) -> Sites | str:
    file = run.retrofit_file(variant)
    if not file.exists():
        file = run.folder / f"retrofit-{variant}.json"  # of earlier versions
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        taus, statistics = content["tau"], content["statistics"]
        rows = [_row(name, float(tau), statistics.get(name, {})) for name, tau in taus.items()]
        chosen = dict(content["calibration"])
    except FileNotFoundError:
        return "the run's folder does not hold its retrofit"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{file.name} cannot be read as a retrofit ({type(error).__name__}: {error})"
    if not rows:
        return f"{file.name} has no sites"
    return Sites(variant, _by_stage(pd.DataFrame(rows)), chosen)


def _row(name: str, tau: float, statistics: dict[str, Any]) -> dict[str, Any]:
    stage, _, site = name.partition(".")
    figures = {key: float(statistics.get(key, "nan")) for key in STATISTICS}
    return {"stage": stage, "site": site or stage, "tau": tau, **figures}


def _by_stage(table: pd.DataFrame) -> pd.DataFrame:
    """The sites of a stage together, stages with several parts first: a model's own order has readouts in front."""
    parts = table.groupby("stage", sort=False)["site"].transform("size")
    order = {stage: i for i, stage in enumerate(dict.fromkeys([*table["stage"][parts > 1], *table["stage"]]))}
    return table.sort_values("stage", key=lambda stages: stages.map(order), kind="stable", ignore_index=True)
