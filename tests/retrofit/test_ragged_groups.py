"""Groups of one long table: each as if it were fitted alone."""

import numpy as np
import pandas as pd
import pytest
import torch
from tabpfn import TabPFNRegressor

from oretrofit import RaggedReport, patch

# As in test_ragged.py: float64, in which batches differ by less than what TabPFN rounds behind them. Here the target's
# standard deviation is about 50, and outer answers move most.
OPTIONS = {"device": "cpu", "inference_precision": torch.float64, "n_estimators": 2}
SAME = {"rtol": 0, "atol": 1e-3}


@pytest.fixture(scope="module")
def closed(tiny_host):
    """A closed retrofit with so large a delta that gating shows."""
    return patch(tiny_host, "closed", tables=1, delta=0.05)


@pytest.fixture(scope="module")
def sales():
    """A long table of four stores, in mixed order; `d` has one train row, `e` none, `c` no test rows."""
    rng = np.random.default_rng(0)
    n = 60
    frame = pd.DataFrame(
        {
            "day": rng.integers(0, 7, n),
            "store": rng.choice(list("abc"), n),
            "price": rng.standard_normal(n),
            "weather": rng.choice(["sun", "rain"], n),
        },
        index=[f"row{i}" for i in rng.permutation(n)],
    )
    frame["sold"] = frame["price"] + frame["store"].map({"a": 100, "b": 0, "c": -5}) + rng.standard_normal(n)
    train, test = frame.iloc[:40].copy(), frame.iloc[40:].copy()
    test = test[test["store"] != "c"]
    train.iloc[3, train.columns.get_loc("store")] = "d"
    test.iloc[[1, 4], test.columns.get_loc("store")] = "d"
    test.iloc[2, test.columns.get_loc("store")] = "e"
    return train, test[["weather", "store", "day", "price", "sold"]]


def by_store(specs, train, test, store, **settings):
    features = ["day", "price", "weather"]
    own = train if store is None else train[train["store"] == store]
    regressor = TabPFNRegressor(model_path=specs, **OPTIONS).fit(own[features], own["sold"])
    return regressor.predict(test[features], **settings)


def test_groups(closed, sales):
    train, test = sales
    names = {"target": "sold", "by": "store", **OPTIONS}
    with pytest.raises(ValueError, match=r"2 of 4 groups in test .*'d' \(1\)"):
        closed.predict_groups(train, test, **names)
    left_out, report = closed.predict_groups(train, test, too_few="nan", return_report=True, **names)
    pooled = closed.predict_groups(train, test, too_few="pooled", **names)
    assert report.tables == 2
    assert report.errors == {
        "d": "train rows: 1; at least 2 are needed",
        "e": "train rows: 0; at least 2 are needed",
    }
    indexed = closed.predict_groups(
        train.set_index("store", drop=False), test.set_index("store", drop=False), too_few="nan", **names
    )
    np.testing.assert_array_equal(indexed, left_out)
    for series in (left_out, pooled):
        assert series.name == "sold"
        assert series.index.equals(test.index)
    few = test["store"].isin(["d", "e"])
    assert left_out[few].isna().all()
    for store in "ab":
        rows = test["store"] == store
        expected = by_store(closed.specs, train, test[rows], store)
        np.testing.assert_allclose(left_out[rows], expected, **SAME)
        np.testing.assert_allclose(pooled[rows], expected, **SAME)
    np.testing.assert_allclose(pooled[few], by_store(closed.specs, train, test[few], None), **SAME)


@pytest.mark.parametrize("stores", ["a", "ab"])
def test_groups_may_be_categories(closed, sales, stores):
    """Of which pandas maps each category once, and to categories where that is one to one."""
    chosen = [frame[frame["store"].isin(list(stores))] for frame in sales]
    days = {store: pd.Timestamp(2024, 1, 1 + i) for i, store in enumerate(stores)}
    dated = [frame.assign(store=frame["store"].map(days).astype("category")) for frame in chosen]
    names = {"target": "sold", "by": "store", **OPTIONS}
    expected = closed.predict_groups(*chosen, **names)
    pd.testing.assert_series_equal(closed.predict_groups(*dated, **names), expected, rtol=0, atol=SAME["atol"])


def test_groups_min_rows_and_quantiles(closed, sales):
    train, test = sales
    few = test["store"].isin(["d", "e"])
    levels = {"output_type": "quantiles", "quantiles": [0.2, 0.8]}
    frame = closed.predict_groups(train, test[~few], target="sold", by="store", **levels, **OPTIONS)
    assert list(frame.columns) == [0.2, 0.8]
    assert frame.index.equals(test[~few].index)
    rows = test[~few]["store"] == "b"
    expected = by_store(closed.specs, train, test[~few][rows], "b", **levels)
    np.testing.assert_allclose(frame[rows].to_numpy().T, expected, **SAME)
    default = closed.predict_groups(
        train, test[~few], target="sold", by="store", output_type="quantiles", too_few="nan", min_rows=1000, **OPTIONS
    )
    assert default.shape == ((~few).sum(), 9) and default.isna().all(axis=None)


def test_groups_that_all_have_too_few_rows(closed, sales):
    train, test = sales
    found, report = closed.predict_groups(
        train, test, target="sold", by="store", too_few="nan", min_rows=1000, return_report=True, **OPTIONS
    )
    assert found.isna().all() and found.name == "sold"
    assert (report.tables, report.batches, report.padding) == (0, 0, 0.0) and len(report.errors) == 4


def test_groups_with_all_of_the_main_answers(closed, sales):
    train, test = sales
    test = test[test["store"].isin(["a", "b"])]
    named = {"target": "sold", "by": "store", **OPTIONS}
    frame = closed.predict_groups(train, test, output_type="main", quantiles=[0.2, 0.8], **named)
    assert list(frame.columns) == ["mean", "median", "mode", 0.2, 0.8]
    for store in "ab":
        rows = test["store"] == store
        expected = by_store(closed.specs, train, test[rows], store, output_type="main", quantiles=[0.2, 0.8])
        for point in ("mean", "median", "mode"):
            np.testing.assert_allclose(frame.loc[rows, point], expected[point], **SAME)
        np.testing.assert_allclose(frame.loc[rows, [0.2, 0.8]].to_numpy().T, expected["quantiles"], **SAME)


def test_one_bad_group(closed, sales):
    train, test = sales
    train = train.assign(sold=train["sold"].where(train["store"] != "a"))
    names = {"target": "sold", "by": "store", "too_few": "nan", **OPTIONS}
    with pytest.raises(ValueError, match=r"group 'a': .*NaN"):
        closed.predict_groups(train, test, **names)
    series, report = closed.predict_groups(train, test, on_error="skip", return_report=True, **names)
    assert list(report.errors) == ["a", "d", "e"] and report.tables == 1
    assert series[test["store"] == "a"].isna().all()
    assert series[test["store"] == "b"].notna().all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a, b: (a.drop(columns="store"), b, {}), "train has no group column 'store'; its columns are "),
        (
            lambda a, b: (a, b.rename(columns={"day": " day"}), {}),
            r"test lacks columns that train has: \['day'\], and has columns that train lacks: \[' day'\]",
        ),
        (lambda a, b: (a, b.drop(columns="store"), {}), "test has no group column 'store'"),
        (lambda a, b: (a.assign(store=range(len(a))), b, {"too_few": "nan"}), "every row of train is a group"),
        (lambda a, b: (a.assign(store=None), b, {}), "40 rows of train have no group"),
        (lambda a, b: (a.assign(store=a.store.map(ord)), b, {}), "no group of test is in train: 'store' is int64 in"),
        (lambda a, b: (a.drop(columns="sold"), b, {}), "no target column 'sold'"),
        (lambda a, b: (a, b.drop(columns="day"), {}), r"test lacks columns that train has: \['day'\]"),
        (lambda a, b: (a, b.assign(hour=1), {}), r"test has columns that train lacks: \['hour'\]"),
        (lambda a, b: (a[:0], b, {}), "train has no rows"),
        (lambda a, b: (a, b[:0], {}), "test has no rows"),
        (lambda a, b: (a.to_numpy(), b, {}), "train is a DataFrame"),
        (lambda a, b: (a[["store", "sold"]], b[["store"]], {}), "no columns beside 'sold' and 'store'"),
        (lambda a, b: (a, b, {"output_type": "quantiles", "quantiles": []}), "quantiles is empty"),
        (lambda a, b: (a, b, {"output_type": "full"}), "mean, median, mode, quantiles or main"),
        (lambda a, b: (a, b, {"too_few": "skip"}), "'error', 'nan' or 'pooled'"),
        (lambda a, b: (a, b, {"min_rows": 1}), "min_rows"),
        (lambda a, b: (a, b, {"by": "sold"}), "both target and group"),
        (lambda a, b: (a, b, {"target": ["sold"]}), "target is the name of one column"),
        (lambda a, b: (a.assign(store=np.float16(1.5)), b, {}), "'store' of train is float16, by which pandas cannot"),
        (lambda a, b: (a.assign(store=[["a"]] * len(a)), b, {}), "values that cannot name a group, such as \\['a'\\]"),
        (lambda a, b: (pd.concat([a, a["day"]], axis=1), b, {}), "several columns called 'day'"),
    ],
)
def test_bad_frames(closed, sales, change, message):
    train, test, settings = change(*sales)
    with pytest.raises(ValueError, match=message):
        closed.predict_groups(train, test, **{"target": "sold", "by": "store", **OPTIONS, **settings})


def test_reports_add_up():
    times = {"preprocessing": 1.0, "forward": 2.0, "decoding": 0.5}
    one = RaggedReport(2, 4, 1, 0.5, 0, {"a": "bad"}, times, work=10.0)
    other = RaggedReport(1, 2, 3, 0.1, 1, {"b": "worse"}, times, work=30.0)
    both = one + other
    assert (both.tables, both.members, both.batches, both.out_of_memory, both.work) == (3, 6, 4, 1, 40.0)
    assert both.padding == pytest.approx((5 + 3) / 40)
    assert both.errors == {"a": "bad", "b": "worse"}
    assert both.seconds == {"preprocessing": 2.0, "forward": 4.0, "decoding": 1.0}
