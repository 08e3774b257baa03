"""What `--host` and `--suite` accept, as `oretrofit hosts` and `oretrofit datasets` list it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow.parquet as pq

from ..calibration.settings import BUNDLED_TARGETS, DATASET_FORMS, SUITES
from ..retrofit.printing import Titled
from . import rdata
from .datasets import DATA_FOLDER


def host_tables(found: Sequence[dict[str, Any]]) -> list[Titled]:
    """What `find_hosts` found, as a table of text."""
    cells = [[h["host"], "yes" if h["available"] else "no", f"{h['what']}; {h['where']}"] for h in found]
    cells.append(["FILE", "", "the path of any other TabPFN v3 regressor checkpoint (.ckpt or .safetensors)"])
    return [("What --host accepts", (["host", "here", "what it is"], cells), 3)]


def list_datasets() -> dict[str, list[dict[str, Any]]]:
    """Everything that `--suite` accepts.

    Returns:
        `bundled` and `rdata`: of each of these suites' tables its name (`dataset`), `target`, `rows`, `columns`
        (without the target), `source` and `licence`; `suites` and `forms` (of other datasets): `name`, and `what` it
        is.
    """
    origins = _origins()
    bundled = []
    for name, target in sorted(BUNDLED_TARGETS.items()):
        size = pq.read_metadata(DATA_FOLDER / f"{name}.parquet")
        source, licence = origins[name]
        row = {"dataset": name, "target": target, "rows": size.num_rows, "columns": size.num_columns - 1}
        bundled.append(row | {"source": source, "licence": licence})
    listed = rdata.tables().reset_index(names="dataset").drop(columns=["rows", "columns"])
    listed = listed.rename(columns={"target_rows": "rows", "features": "columns"}).astype({"rows": int, "columns": int})
    suites, forms = (
        [{"name": name, "what": what} for name, what in named.items()] for named in (SUITES, DATASET_FORMS)
    )
    return {"bundled": bundled, "rdata": listed[list(bundled[0])].to_dict("records"), "suites": suites, "forms": forms}


def dataset_tables(found: dict[str, list[dict[str, Any]]]) -> list[Titled]:
    """What `list_datasets` found, as tables."""
    bundled, listed = (
        [[row["dataset"], row["target"], f"{row['rows']:,}", str(row["columns"])] for row in found[suite]]
        for suite in ("bundled", "rdata")
    )
    licences = [[row["dataset"], row["licence"]] for row in found["bundled"]]
    header = ["dataset", "target", "rows", "columns"]
    suites, forms = ([[row["name"], row["what"]] for row in found[kind]] for kind in ("suites", "forms"))
    return [
        ("Bundled tables, the suite mini", (header, bundled), 2),
        ("Their licences", (["dataset", "licence"], licences), 2),
        ("The suite rdata", (header, listed), 2),
        ("Suites", (["suite", "what it is"], suites), 2),
        ("Other datasets; several, and suites, are joined by commas", (["form", "what it is"], forms), 2),
    ]


def _origins() -> dict[str, tuple[str, str]]:
    """Source and licence of each bundled table, from the README beside them, without its Markdown."""
    found = {}
    for line in (DATA_FOLDER / "README.md").read_text(encoding="utf-8").splitlines():
        name, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        if name in BUNDLED_TARGETS and len(cells) == 2:
            source, licence = (re.sub(r"\[(.*?)\]\(.*?\)|[*<>]", r"\1", cell) for cell in cells)
            found[name] = source, licence
    return found
