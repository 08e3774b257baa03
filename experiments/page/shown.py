"""The runs of the page, read from their folders."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from ...calibration.settings import IDENTITY, MARGIN
from ...retrofit.options import check_margin
from ..provenance import read_provenance
from ..report import PAPER, make_summary
from ..runs import CASES, Run, case_rows, read_run
from ..verdicts import by_measure
from .answers import Answers, read_answers
from .sites import Sites, read_sites

PAGE = "report.html"  # in a run's folder


@dataclass(frozen=True, eq=False)
class Shown:
    """A run on the page.

    Attributes:
        name: What it is called there.
        run: It.
        rows: Of `runs.case_rows`, at least one.
        summary: Of `report.make_summary`.
        wants_paper: Whether the paper's figures stand beside it, whatever was run.
    """

    name: str
    run: Run
    rows: pd.DataFrame
    summary: dict[str, Any]
    wants_paper: bool = False

    @property
    def variants(self) -> list[str]:
        """In the run's order."""
        return list(self.summary["variants"])

    @cached_property
    def statistics(self) -> dict[tuple[str, str], dict[str, Any]]:
        """By variant and measure."""
        return by_measure(self.summary["statistics"])

    @property
    def paper(self) -> dict[str, float]:
        """The paper's figures by variant, where they stand on the page."""
        return PAPER["mean_rmse_delta_pct"] if self.wants_paper or self.summary["paper"] else {}

    @cached_property
    def answers(self) -> Answers:
        """What is kept of the predictions."""
        return read_answers(self.run)

    @cached_property
    def sites(self) -> dict[str, Sites | str]:
        """By variant; see `read_sites`."""
        return read_sites(self.run)

    @cached_property
    def provenance(self) -> list[dict[str, Any]]:
        """See `read_provenance`."""
        return read_provenance(self.run.folder)

    @cached_property
    def cases_sha256(self) -> str:
        """Of the file that every figure of the page rests on."""
        return hashlib.sha256((self.run.folder / CASES).read_bytes()).hexdigest()

    @property
    def planned(self) -> int:
        """How many cases the run was to have."""
        return len(self.run.settings["datasets"]) * len(self.run.settings["seeds"])


def read_shown(folders: Sequence[Path], wants_paper: bool = False) -> list[Shown]:
    """The runs in folders.

    Raises:
        ValueError: A folder that is given twice, or holds no run, or none with a finished case; or a run that
            has no variant in common with any other, but the control.
        OSError: A file cannot be read.
    """
    places = [folder.resolve() for folder in folders]
    for folder, place in zip(folders, places, strict=True):
        if not folder.is_dir():
            what = "is a file" if folder.exists() else "does not exist"
            raise ValueError(f"{folder} {what}; give the folder of a run, as eval --out has it")
        if places.count(place) > 1:
            raise ValueError(f"{folder} is given twice; give each run once")
    found = [_read(folder, name, wants_paper) for folder, name in zip(folders, _names(places), strict=True)]
    for shown in found if len(found) > 1 else ():
        others = {variant for other in found if other is not shown for variant in other.variants}
        if not (set(shown.variants) - {IDENTITY}) & others:
            listed = "; ".join(f"{other.name} has {', '.join(other.variants)}" for other in found)
            raise ValueError(
                f"{shown.name} has no variant in common with another run but the control ({listed}); evaluate one of "
                "these there, too (eval --variant), or make a page of its own"
            )
    return found


def files_read(folders: Sequence[Path]) -> list[Path]:
    """What a page of these folders' runs must not overwrite."""
    return [file for folder in folders if folder.is_dir() for file in folder.iterdir() if file.name != PAGE]


def _read(folder: Path, name: str, wants_paper: bool) -> Shown:
    run = read_run(folder)
    rows = case_rows(run.results())
    if not len(rows):
        raise ValueError(f"{folder} holds no finished case; run its eval again, which goes on there")
    summary = _stored_summary(folder)
    missing = run.missing()
    failed = [case for case in summary["failed"] if (case["dataset"], case["seed"]) in missing]
    return Shown(name, run, rows, make_summary(run.settings, rows, failed, summary["margin"]), wants_paper)


def _stored_summary(folder: Path) -> dict[str, Any]:
    """The margin and the failures that the run's own report has; where that is not to be read, the usual and none."""
    try:
        stored = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        failed = [{key: case[key] for key in ("dataset", "seed", "reason")} for case in stored["failed"]]
        margin = float(stored.get("margin", MARGIN))
        check_margin(margin)
        return {"failed": failed, "margin": margin}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {"failed": [], "margin": MARGIN}


def _names(places: Sequence[Path]) -> list[str]:
    """Of each folder its last name, and as much in front of it as tells it from the others."""
    for parts in range(1, max(len(place.parts) for place in places) + 1):
        names = ["/".join(place.parts[-parts:]) for place in places]
        if len(set(names)) == len(names):
            break
    return [name.encode("utf-8", "backslashreplace").decode() for name in names]
