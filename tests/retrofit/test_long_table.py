"""Which groups of a long table can be predicted, and what is said of the others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from oretrofit.retrofit.columns import Table
from oretrofit.retrofit.hosts import load_host
from oretrofit.retrofit.long_table import LongTable, read_groups


def tables() -> tuple[pd.DataFrame, pd.DataFrame]:
    train = pd.DataFrame({"g": list("aaabbbccc"), "x": range(9), "d": "2024-01-01", "y": np.arange(9.0)})
    return train, pd.DataFrame({"d": "2024-01-02", "g": list("aabc"), "x": range(4)})


def read(train: pd.DataFrame, test: pd.DataFrame, **settings: Any) -> LongTable:
    named = Table("past.csv", train, notes=["past"]), Table("next.csv", test, notes=["next"])
    return read_groups(*named, ["x", "d"], target="y", by="g", **settings)


def test_what_is_read() -> None:
    train, test = tables()
    table = read(train, test)
    assert table.kinds == {"x": "numbers", "d": "dates"}
    assert list(table.train) == ["x", "d", "y", "g"] and list(table.test) == ["x", "d", "g"]
    assert table.train["y"].tolist() == list(range(9)) and table.test["g"].tolist() == list("aabc")
    assert (table.few, table.faulty, table.notes) == ([], {}, ["past", "next"])


FAULTS = {
    "missing": ("y", lambda a: a["y"].mask(a["g"] == "b"), "target 'y' is missing (NaN) in row 4 and in 2 more"),
    "word": ("y", lambda a: a["y"].astype(object).where(a["x"] != 4, "high"), "'y' is not numeric (row 5: 'high')"),
    "infinite target": ("y", lambda a: a["y"].where(a["x"] != 4, np.inf), "target 'y' is infinite in row 5"),
    "infinite": ("x", lambda a: a["x"].where(a["x"] != 4, -np.inf), "column 'x' is infinite in row 5"),
}


def test_a_target_of_categories_is_called_so() -> None:
    train, test = tables()
    with pytest.raises(ValueError, match=r"target 'y' is not numeric \(row 1: .*, which is a category\)"):
        read(train.assign(y=train["y"].astype("category")), test)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_cell_that_cannot_be_used(fault: str) -> None:
    train, test = tables()
    column, change, message = FAULTS[fault]
    bad = train.assign(**{column: change(train)})
    with pytest.raises(ValueError) as raised:
        read(bad, test)
    assert str(raised.value).startswith("group 'b': past.csv: ") and message in str(raised.value)
    assert "on_error='skip' (--on-error skip)" in str(raised.value)
    with pytest.raises(ValueError) as raised:
        read(bad, test, whole=True)
    assert str(raised.value).startswith("past.csv: ") and "skip" not in str(raised.value)

    table = read(bad, test, skip=True)
    assert list(table.faulty) == ["b"] and message in table.faulty["b"]
    assert table.train["g"].tolist() == list("aaaccc") and table.test["g"].tolist() == list("aabc")
    # What is wrong in a group that is not asked for does not matter, but to a table of all groups.
    others = test[test["g"] != "b"]
    assert read(bad, others).faulty == {}
    lone = pd.concat([others, others.tail(1).assign(g="z")])
    with pytest.raises(ValueError, match=r"group 'b': past\.csv"):
        read(bad, lone, too_few="pooled")
    table = read(bad, lone, too_few="pooled", skip=True)
    assert list(table.faulty) == ["b"] and table.few == ["z"] and table.train["g"].tolist() == list("aaaccc")


def test_a_cell_of_test_that_cannot_be_used() -> None:
    train, test = tables()
    bad = test.assign(x=["1", "two", "3", "inf"])
    with pytest.raises(
        ValueError, match=r"^group 'a': next.csv: column 'x': 'two' \(row 2\) is no number, as those of past"
    ):
        read(train, bad)
    table = read(train, bad, skip=True)
    assert list(table.faulty) == ["a", "c"] and len(table.test) == 4


def test_too_few_train_rows() -> None:
    train, test = tables()
    train.loc[0:1, "g"] = "b"
    with pytest.raises(
        ValueError, match=r"1 of 3 groups in next.csv have fewer than 2 train rows: 'a' \(1\). Say too_few"
    ):
        read(train, test)
    for too_few in ("nan", "pooled"):
        table = read(train, test, too_few=too_few)
        assert table.few == ["a"] and table.notes == ["past", "next"]
    assert read(train, test, too_few="nan", min_rows=4).few == ["a", "c"]


@pytest.mark.parametrize(
    ("known", "asked"),
    [("1", "1.0"), ("1", "01"), ("12345678901234567890", "12345678901234567890.0"), ("nord", "Nord "), ("A 1", "a1")],
)
def test_names_that_differ_only_in_writing(known: str, asked: str) -> None:
    train, test = tables()
    train, test = train.replace({"g": {"a": known}}), test.replace({"g": {"a": asked}})
    twins = f"groups {asked!r} and {known!r} of test and train differ only in how they are written"
    with pytest.raises(ValueError) as raised:
        read(train, test)
    assert f"{asked!r} (0). {twins}. Say too_few" in str(raised.value)
    for too_few in ("nan", "pooled"):
        assert read(train, test, too_few=too_few).notes[2:] == [f"next.csv: {twins}"]


def test_names_that_differ() -> None:
    train, test = tables()
    test = test.replace({"g": {"a": "12345678901234567891"}})
    train = train.replace({"g": {"b": "12345678901234567890"}})  # equal as floats
    assert read(train, test, too_few="nan").notes == ["past", "next"]


def test_dates_need_calendar_features() -> None:
    train, test = tables()
    table = read(train, test)
    assert table.options({"device": "cpu"}) == {"device": "cpu", "inference_config": {"TRANSFORM_DATES": True}}
    given = {"inference_config": {"FINGERPRINT_FEATURE": False}}
    assert table.options(given)["inference_config"] == {"FINGERPRINT_FEATURE": False, "TRANSFORM_DATES": True}
    assert given == {"inference_config": {"FINGERPRINT_FEATURE": False}}
    assert table.options({"inference_config": None})["inference_config"] == {"TRANSFORM_DATES": True}
    config = load_host().inference_config
    assert (
        not config.TRANSFORM_DATES and table.options({"inference_config": config})["inference_config"].TRANSFORM_DATES
    )
    plain = read(train.assign(d=1), test.assign(d=2))
    assert plain.options(given) is given
