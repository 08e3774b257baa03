"""RetrofitRegressor: scikit-learn's own checks, what it predicts, and what clones and pickles carry."""

import copy
import inspect
import io
import json
import pickle
import re
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.base import clone
from sklearn.ensemble import StackingRegressor
from sklearn.exceptions import NotFittedError
from sklearn.linear_model import LinearRegression
from sklearn.model_selection import GridSearchCV, KFold, cross_val_predict, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks
from tabpfn import TabPFNRegressor
from tabpfn.checkpoint import save_as_safetensors

from oretrofit import HostError, RetrofitError, RetrofitRegressor, calibrate, load_host, patch
from oretrofit.retrofit import estimator as module
from oretrofit.retrofit.hosts import random_host

LEVELS = [0.1, 0.5, 0.9]
OUTPUTS = ["mean", "median", "mode", "quantiles", "main"]


def inner(**options):
    """The inner estimator of these tests, as small and as repeatable as it gets."""
    return TabPFNRegressor(**{"n_estimators": 1, "device": "cpu", "inference_precision": torch.float32, **options})


def write_host(host, path):
    content = {
        "state_dict": host.model.state_dict(),
        "config": asdict(host.model.config),
        "architecture_name": "tabpfn_v3",
        "inference_config": asdict(host.inference_config),
    }
    save_as_safetensors(content, path)


@pytest.fixture(scope="module")
def host_file(tiny_host, tmp_path_factory):
    """The tiny host as a checkpoint."""
    path = tmp_path_factory.mktemp("hosts") / "tiny-v3.safetensors"
    write_host(tiny_host, path)
    return path


@pytest.fixture(autouse=True)
def calibrations(monkeypatch):
    """The hosts that were calibrated, each on one table; nothing is kept from test to test."""
    kept = (module._host, module._calibration, module._patched, module._saved, module._described)
    for function in kept:
        function.cache_clear()
    done = []

    def calibrate_on_one_table(host):
        done.append(host)
        return calibrate(host, tables=1)

    monkeypatch.setattr(module, "calibrate", calibrate_on_one_table)
    yield done
    for function in kept:
        function.cache_clear()


@pytest.fixture(scope="module")
def stores():
    """A long table of four stores of 6 to 9 rows, one of a single row, and rows to predict in another order."""
    rng = np.random.default_rng(3)
    store = np.repeat(["b", "a", "d", "c", "lone"], [6, 7, 8, 9, 1])
    X = pd.DataFrame({"x": rng.standard_normal(31), "store": store, "kind": rng.integers(0, 3, 31).astype(float)})
    y = pd.Series(2 * X["x"] + X["store"].map(len) + X["kind"], name="sold", index=np.arange(31)[::-1])
    X_test = X.sample(12, random_state=0).query("store != 'lone'")
    return X, y, X_test


def equal(actual, expected):
    """Whether two answers of `predict` are the same to the bit."""
    if isinstance(expected, dict):
        return actual.keys() == expected.keys() and all(equal(actual[name], expected[name]) for name in expected)
    if isinstance(expected, list):
        return len(actual) == len(expected) and all(map(equal, actual, expected))
    return type(actual) is type(expected) and np.array_equal(actual, expected)


# ---- scikit-learn's checks -----------------------------------------------------------------------

# The two that TabPFN's tests expect TabPFNRegressor to fail, whatever its host.
EXPECTED_FAILED_CHECKS = {
    "check_methods_subset_invariance": "kernels round by how many rows share a pass, by more than this check's 1e-7",
    "check_methods_sample_order_invariance": "kernels round by where a row stands, by more than this check's 1e-7",
}


@parametrize_with_checks(
    # The bundled host, as one that predicts; tau as calibrated, more or less.
    [RetrofitRegressor(tau=1e-3, estimator=inner())],
    expected_failed_checks=lambda estimator: EXPECTED_FAILED_CHECKS,
)
def test_sklearn_checks(estimator, check):
    check(estimator)


# ---- What it predicts ----------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["oa", "full-o", "closed"])
def test_it_predicts_as_tabpfn_on_the_specs(host_file, table, variant):
    X, y, X_test = table
    options = {"delta": 0.2, "quantile": 0.05}
    retrofit = patch(host_file, variant, tables=1, **options)
    expected = inner(n_estimators=2).set_params(model_path=retrofit.specs).fit(X, y)
    actual = RetrofitRegressor(host_file, variant=variant, estimator=inner(n_estimators=2), **options).fit(X, y)
    for output_type in OUTPUTS:
        parts = [r.predict(X_test, output_type=output_type, quantiles=LEVELS) for r in (actual, expected)]
        assert equal(*parts)
    full = actual.predict(X_test, output_type="full")
    assert torch.equal(full["logits"], expected.predict(X_test, output_type="full")["logits"])
    assert actual.retrofit_.sites == retrofit.sites
    host = inner(n_estimators=2, model_path=host_file).fit(X, y)
    assert np.abs(actual.predict(X_test) - host.predict(X_test)).max() > 1e-3


def test_it_is_calibrated_as_a_patch_and_closed_by_default(calibrations, table, monkeypatch):
    monkeypatch.setattr(module, "calibrate", lambda host: calibrate(host, tables=1))
    fitted = RetrofitRegressor(estimator=inner()).fit(*table[:2])
    assert fitted.retrofit_.sites == patch("small", "closed", tables=1).sites
    assert {"delta": 1e-3, "quantile": 0.01}.items() <= fitted.retrofit_.settings.items()


def test_the_example_runs(calibrations):
    doc = inspect.getdoc(RetrofitRegressor)
    example = textwrap.dedent(re.search(r"```python\n(.*?)```", doc, re.DOTALL)[1])
    names = {}
    exec(example, names)
    assert (names["low"] < names["high"]).all()
    assert set(names["search"].best_params_) == {"variant", "estimator__n_estimators"}
    assert names["means"].shape == names["median"].shape
    assert len(calibrations) == 1


def test_inner_parameters_need_no_inner_estimator(host_file, table):
    regressor = RetrofitRegressor(host_file, tau=1.0)
    assert regressor.get_params()["estimator__n_estimators"] == "auto"
    assert "estimator__n_estimators" not in regressor.get_params(deep=False)
    assert clone(regressor).set_params(**regressor.get_params()).get_params().keys() == regressor.get_params().keys()
    regressor.set_params(estimator__n_estimators=3, estimator__device="cpu")
    assert len(regressor.fit(*table[:2]).estimator_.executor_.ensemble_members) == 3
    assert regressor.estimator.model_path == "auto"
    with pytest.raises(ValueError, match="Invalid parameter 'members'"):
        regressor.set_params(estimator__members=3)


@pytest.mark.parametrize("n_jobs", [1, 2])
def test_grid_search(host_file, table, n_jobs):
    X, y, _ = table
    grid = {"estimator__n_estimators": [1, 2], "variant": ["oa", "closed"] if n_jobs == 1 else ["closed"]}
    options = {"tau": 1.0, "estimator": None if n_jobs == 1 else inner()}
    search = GridSearchCV(
        RetrofitRegressor(host_file, **options), grid, cv=KFold(2), n_jobs=n_jobs, error_score="raise"
    )
    search.fit(X, y)
    expected = []
    for params in search.cv_results_["params"]:
        specs = patch(host_file, params["variant"], tau=1.0).specs
        options = {} if n_jobs == 1 else {"device": "cpu", "inference_precision": torch.float32}
        one = TabPFNRegressor(model_path=specs, n_estimators=params["estimator__n_estimators"], **options)
        expected.append(cross_val_score(one, X, y, cv=KFold(2)).mean())
    # Processes of other numbers of threads round otherwise.
    np.testing.assert_allclose(search.cv_results_["mean_test_score"], expected, rtol=0 if n_jobs == 1 else 1e-4)
    assert len(set(search.cv_results_["mean_test_score"])) == len(expected)


def test_within_others(host_file, table):
    X, y, X_test = table
    regressor = RetrofitRegressor(host_file, tau=1.0, estimator=inner())
    piped = make_pipeline(StandardScaler(), regressor).fit(X, y)
    levels = piped.predict(X_test, output_type="quantiles", quantiles=LEVELS)
    assert equal(levels, piped[-1].predict(piped[:-1].transform(X_test), output_type="quantiles", quantiles=LEVELS))
    stacked = StackingRegressor([("one", regressor)], LinearRegression(), cv=2).fit(X, y)
    assert np.isfinite(stacked.predict(X_test)).all()
    assert "RetrofitRegressor" in piped._repr_html_()


def test_feature_names(host_file, table):
    X, y, X_test = table
    frame, test = (pd.DataFrame(part, columns=["a", "b", "c"]) for part in (X, X_test))
    fitted = RetrofitRegressor(host_file, tau=1.0, estimator=inner()).fit(frame, y)
    assert list(fitted.feature_names_in_) == ["a", "b", "c"]
    assert fitted.n_features_in_ == 3
    with pytest.raises(ValueError, match="same order as they were in fit"):
        fitted.predict(test[["b", "a", "c"]])
    with pytest.raises(ValueError, match=r"(?s)unseen at fit time.*- d"):
        fitted.predict(test.rename(columns={"c": "d"}))
    with pytest.warns(UserWarning, match="RetrofitRegressor was fitted with feature names"):
        assert np.array_equal(fitted.predict(X_test), fitted.predict(test))
    with pytest.raises(ValueError, match="X has 2 features, but RetrofitRegressor is expecting 3"):
        RetrofitRegressor(host_file, tau=1.0, estimator=inner()).fit(X, y).predict(X_test[:, :2])


# ---- Calibrated once -----------------------------------------------------------------------------


def test_clones_and_deltas_share_a_calibration(host_file, table, calibrations):
    X, y, _ = table
    regressor = RetrofitRegressor(host_file, estimator=inner())
    for variant, delta in [("closed", 1e-3), ("closed", 1e-2), ("oa", 1e-3)]:
        fitted = clone(regressor).set_params(variant=variant, delta=delta).fit(X, y)
        assert fitted.retrofit_.sites == patch(host_file, variant, delta=delta, tables=1).sites
    again = clone(regressor).set_params(host=str(host_file)).fit(X, y)  # a string for the path
    assert len(calibrations) == 1
    assert again.retrofit_.host is fitted.retrofit_.host  # one host in memory
    RetrofitRegressor(host_file, tau=1.0, estimator=inner()).fit(X, y)
    assert len(calibrations) == 1


def test_threads_share_a_calibration(host_file, table, calibrations):
    X, y, X_test = table
    regressor = RetrofitRegressor(host_file, estimator=inner())
    with ThreadPoolExecutor(4) as threads:
        fitted = list(threads.map(lambda _: clone(regressor).fit(X, y), range(4)))
    assert len(calibrations) == 1
    assert len({r.predict(X_test).tobytes() for r in fitted}) == 1


def test_another_host_in_the_same_place_is_calibrated_anew(tiny_host, table, calibrations, tmp_path):
    X, y, _ = table
    path = tmp_path / "tiny-v3.safetensors"
    for seed in (1, 2):
        write_host(random_host(seed=seed, **asdict(tiny_host.model.config)), path)
        fitted = RetrofitRegressor(path, estimator=inner()).fit(X, y)
        assert fitted.retrofit_.host.sha256 == load_host(path).sha256
    assert len(calibrations) == 2


def test_a_host_given_as_an_object_is_known_by_its_weights(tiny_host, table, calibrations):
    X, y, X_test = table
    regressor = RetrofitRegressor(tiny_host, estimator=inner())
    for given in (tiny_host, tiny_host.model):
        fitted = clone(regressor).set_params(host=given).fit(X, y)
        assert fitted.get_params(deep=False)["host"] is given
        copied = pickle.loads(pickle.dumps(fitted))
        assert np.array_equal(copied.predict(X_test), fitted.predict(X_test))
    assert len(calibrations) == 1


# ---- Copies --------------------------------------------------------------------------------------


class WithoutTensors(pickle.Pickler):
    """Refuses what would put weights, or whatever else of torch's, into a pickle."""

    def reducer_override(self, value):
        assert not isinstance(value, (torch.Tensor, torch.nn.Module)), f"a {type(value).__name__} is pickled"
        return NotImplemented


def pickled(estimator):
    buffer = io.BytesIO()
    WithoutTensors(buffer).dump(estimator)
    return buffer.getvalue()


MODES = [{}, {"fit_mode": "low_memory"}, {"fit_mode": "fit_with_cache"}, {"n_estimators": 3, "random_state": None}]


@pytest.mark.parametrize("options", MODES)
def test_a_fitted_one_is_pickled_without_weights_and_predicts_the_same(host_file, table, calibrations, options):
    X, y, X_test = table
    fitted = RetrofitRegressor(host_file, delta=0.2, estimator=inner(**options)).fit(X, y)
    expected = {name: fitted.predict(X_test, output_type=name, quantiles=LEVELS) for name in OUTPUTS}
    content = pickled(fitted)
    assert len(content) < X.nbytes + y.nbytes + 20_000 < host_file.stat().st_size
    for copied in (pickle.loads(content), copy.deepcopy(fitted), pickle.loads(pickled(pickle.loads(content)))):
        assert "estimator_" not in vars(copied)
        assert "estimator_" not in dir(copied)  # which tab completion asks for, and must not fit
        assert copied.n_features_in_ == 3
        for name in OUTPUTS:
            assert equal(copied.predict(X_test, output_type=name, quantiles=LEVELS), expected[name])
        assert copied.estimator_ is copied.estimator_
        assert copied.retrofit_.sites == fitted.retrofit_.sites
        assert np.isfinite(copied.fit(X[:10], y[:10]).predict(X_test)).all()
    assert len(calibrations) == 1


def test_what_fit_was_given_may_change_afterwards(host_file, table):
    X, y, X_test = (part.copy() for part in table)
    fitted = RetrofitRegressor(host_file, tau=1.0, estimator=inner()).fit(X, y)
    expected = fitted.predict(X_test)
    X[:], y[:] = 0, 1
    fitted.set_params(host="no such host", estimator__n_estimators=7)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(X_test), expected)


def test_in_another_process(host_file, table, stores, tmp_path):
    """Where nothing was calibrated, nor is."""
    X, y, X_test = table
    saved = tmp_path / "mine-v3.safetensors"
    patch(host_file, "closed", tau=2.0).save_checkpoint(saved)
    groups, targets, coming = stores
    fits = [
        (RetrofitRegressor(host_file, delta=0.2, estimator=inner()).fit(X, y), X_test),
        (RetrofitRegressor(retrofit=saved, estimator=inner()).fit(X, y), X_test),
        (RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner()).fit(groups, targets), coming),
    ]
    (tmp_path / "fits.pkl").write_bytes(pickle.dumps([(r, rows, r.predict(rows)) for r, rows in fits]))
    code = (
        "import pickle, sys, numpy, torch\n"
        "torch.set_num_threads(1)\n"
        "for regressor, rows, expected in pickle.load(open(sys.argv[1], 'rb')):\n"
        "    assert numpy.array_equal(regressor.predict(rows), expected)\n"
        "import oretrofit.retrofit.estimator as module\n"
        "assert module._calibration.cache_info().misses == 0\n"
    )
    command = [sys.executable, "-c", code, tmp_path / "fits.pkl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_pickle_whose_host_is_gone_or_another(tiny_host, table, tmp_path, calibrations):
    X, y, X_test = table
    path = tmp_path / "tiny-v3.safetensors"
    write_host(tiny_host, path)
    content = pickle.dumps(RetrofitRegressor(path, tau=1.0, estimator=inner()).fit(X, y))
    write_host(random_host(seed=2, **asdict(tiny_host.model.config)), path)
    with pytest.raises(RetrofitError, match=r"the fitted RetrofitRegressor was made for other weights"):
        pickle.loads(content).predict(X_test)
    path.unlink()
    with pytest.raises(HostError, match=r"no host.*tiny-v3"):
        pickle.loads(content).predict(X_test)
    write_host(tiny_host, path)
    assert np.isfinite(pickle.loads(content).predict(X_test)).all()


def test_a_pickle_has_the_whole_path(host_file, table, monkeypatch, tmp_path):
    X, y, X_test = table
    monkeypatch.chdir(host_file.parent)
    fitted = RetrofitRegressor(host_file.name, tau=1.0, estimator=inner()).fit(X, y)
    monkeypatch.chdir(tmp_path)
    assert np.array_equal(pickle.loads(pickle.dumps(fitted)).predict(X_test), fitted.predict(X_test))


def test_a_generator_is_drawn_from_at_each_fit_and_no_more(host_file, table):
    X, y, X_test = table
    rng = np.random.RandomState(0)
    regressor = RetrofitRegressor(host_file, tau=1.0, estimator=inner(n_estimators=2, random_state=rng))
    first = regressor.fit(X, y).predict(X_test)
    assert np.array_equal(regressor.predict(X_test), first)
    again = RetrofitRegressor(host_file, tau=1.0, estimator=inner(n_estimators=2))
    seeds = np.random.RandomState(0)
    # As TabPFN itself draws.
    tabpfn = inner(n_estimators=2, random_state=seeds, model_path=patch(host_file, "closed", tau=1.0).specs)
    assert np.array_equal(tabpfn.fit(X, y).predict(X_test), first)
    assert not np.array_equal(regressor.fit(X, y).predict(X_test), first)
    assert regressor.estimator.random_state is rng
    assert again.fit(X, y).estimator_.random_state == 0


# ---- A saved retrofit ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mine.json", "mine-v3.safetensors"])
@pytest.mark.parametrize("named", [True, False])
def test_a_saved_retrofit(host_file, tiny_host, table, tmp_path, name, named, calibrations):
    X, y, X_test = table
    retrofit = patch(host_file if named else tiny_host, "full-o", tau=2.0)
    save = retrofit.save if name.endswith("json") else retrofit.save_checkpoint
    save(tmp_path / name)
    expected = inner(model_path=retrofit.specs).fit(X, y).predict(X_test)
    # A file that names no host needs it given.
    host = {} if named or not name.endswith("json") else {"host": tiny_host}
    fitted = RetrofitRegressor(retrofit=tmp_path / name, estimator=inner(), **host).fit(X, y)
    assert np.array_equal(fitted.predict(X_test), expected)
    assert np.array_equal(pickle.loads(pickle.dumps(clone(fitted).fit(X, y))).predict(X_test), expected)
    assert not calibrations
    if not host:
        pickled(fitted)
        with pytest.raises(RetrofitError, match="made for other weights"):
            clone(fitted).set_params(host=random_host(seed=2, **asdict(tiny_host.model.config))).fit(X, y)


@pytest.mark.parametrize("own", [{"variant": "oa"}, {"delta": 0.1}, {"quantile": 0.5}, {"tau": 1.0}])
def test_a_saved_retrofit_has_its_own_settings(host_file, table, tmp_path, own):
    patch(host_file, "oa", tau=2.0).save(tmp_path / "mine.json")
    with pytest.raises(ValueError, match=f"{next(iter(own))} is the saved retrofit's own"):
        RetrofitRegressor(retrofit=tmp_path / "mine.json", **own).fit(*table[:2])


# ---- Groups --------------------------------------------------------------------------------------


@pytest.mark.parametrize("output_type", OUTPUTS)
def test_groups(host_file, stores, output_type):
    X, y, X_test = stores
    fitted = RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner(n_estimators=2)).fit(X, y)
    actual = fitted.predict(X_test, output_type=output_type, quantiles=LEVELS)
    train = X.assign(sold=y.to_numpy())
    expected = fitted.retrofit_.predict_groups(
        train,
        X_test,
        target="sold",
        by="store",
        output_type=output_type,
        quantiles=LEVELS,
        n_estimators=2,
        device="cpu",
        inference_precision=torch.float32,
    )
    if output_type in ("quantiles", "main"):
        pd.testing.assert_frame_equal(actual, expected, check_exact=True)
    else:
        assert equal(actual, expected.to_numpy())
    assert equal(pickle.loads(pickled(fitted)).predict(X_test, output_type=output_type, quantiles=LEVELS), actual)


def test_each_group_is_answered_from_its_own_rows(host_file, stores):
    X, y, X_test = stores
    fitted = RetrofitRegressor(host_file, by="store", tau=1e-3, estimator=inner()).fit(X, y)
    actual = fitted.predict(X_test)
    alone = RetrofitRegressor(host_file, tau=1e-3, estimator=inner())
    for store in X_test["store"].unique():
        of_train, of_test = X["store"] == store, (X_test["store"] == store).to_numpy()
        features = ["x", "kind"]
        expected = clone(alone).fit(X[of_train][features], y.to_numpy()[of_train]).predict(X_test[of_test][features])
        # Padded into one pass, float32 rounds otherwise; as `test_ragged` has it.
        np.testing.assert_allclose(actual[of_test], expected, atol=1e-4 * y.std())
    assert fitted.estimator_ is None
    assert list(fitted.feature_names_in_) == ["x", "store", "kind"]
    assert fitted.n_features_in_ == 3


@pytest.mark.parametrize("too_few", ["error", "nan", "pooled"])
def test_groups_with_too_few_rows(host_file, stores, too_few):
    X, y, _ = stores
    fitted = RetrofitRegressor(host_file, by="store", tau=1.0, too_few=too_few, estimator=inner()).fit(X, y)
    if too_few == "error":
        with pytest.raises(ValueError, match=r"1 of 5 groups.*'lone'"):
            fitted.predict(X)
    else:
        assert np.isnan(fitted.predict(X)).sum() == (too_few == "nan")


def test_categorical_columns_are_counted_with_the_groups(host_file, stores):
    X, y, X_test = stores
    options = {
        "n_estimators": 4,  # the second kind of preprocessing tells categories from numbers
        "device": "cpu",
        "inference_precision": torch.float32,
        "inference_config": {"MIN_NUMBER_SAMPLES_FOR_CATEGORICAL_INFERENCE": 1},
    }
    declared = inner(categorical_features_indices=[1, 2], **options)  # store and kind
    fitted = RetrofitRegressor(host_file, by="store", tau=1.0, estimator=declared).fit(X, y)

    def of_groups(indices):
        names = {"target": "sold", "by": "store", "categorical_features_indices": indices}
        return fitted.retrofit_.predict_groups(X.assign(sold=y.to_numpy()), X_test, **names, **options).to_numpy()

    assert np.array_equal(fitted.predict(X_test), of_groups([1]))  # kind, of x and kind
    assert not np.array_equal(of_groups([1]), of_groups([0]))


def test_groups_are_cross_validated(host_file, stores):
    X, y, _ = stores
    kept = (X["store"] != "lone").to_numpy()
    X, y = X[kept], y[kept]
    regressor = RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner())
    folds = KFold(3, shuffle=True, random_state=0)
    actual = cross_val_predict(regressor, X, y, cv=folds)
    for train, test in folds.split(X):
        assert np.array_equal(actual[test], clone(regressor).fit(X.iloc[train], y.iloc[train]).predict(X.iloc[test]))
    assert np.isfinite(cross_val_score(regressor, X, y, cv=folds)).all()


def test_a_column_called_target_is_a_feature_like_others(host_file, stores):
    X, y, X_test = stores
    regressor = RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner())
    expected = clone(regressor).fit(X, y).predict(X_test)
    X, X_test = (part.rename(columns={"x": "target", "kind": "target_"}) for part in (X, X_test))
    assert np.array_equal(clone(regressor).fit(X, y).predict(X_test), expected)


WRONG_TABLES = {
    "an array": (lambda X, y: (X.to_numpy(), y), "X is a DataFrame with that column, not a ndarray"),
    "no group column": (lambda X, y: (X.drop(columns="store"), y), "no group column 'store'"),
    "a row without a group": (lambda X, y: (X.where(X["store"] != "lone"), y), "1 rows of train have no group"),
    "groups of one row each": (lambda X, y: (X.assign(store=range(len(X))), y), "names rows, not groups"),
    "no other column": (lambda X, y: (X[["store"]], y), "no columns beside"),
    "a target too few": (lambda X, y: (X, y[1:]), "inconsistent numbers of samples"),
    "a missing target": (lambda X, y: (X, y.where(y.index > 0)), "y contains NaN"),
    "two targets": (lambda X, y: (X, np.stack([y, y], axis=1)), "1d array"),
    "words": (lambda X, y: (X, ["much"] * len(X)), "Convert your data to numeric values"),
}


@pytest.mark.parametrize("way", WRONG_TABLES)
def test_long_tables_that_are_none(host_file, stores, way):
    X, y, _ = stores
    change, message = WRONG_TABLES[way]
    with pytest.raises(ValueError, match=message):
        RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner()).fit(*change(X, y))


def test_rows_of_groups_are_checked_as_scikit_learn_does(host_file, stores):
    X, y, X_test = stores
    fitted = RetrofitRegressor(host_file, by="store", tau=1.0, estimator=inner()).fit(X, y)
    with pytest.raises(ValueError, match="same order as they were in fit"):
        fitted.predict(X_test[["store", "x", "kind"]])
    with pytest.raises(ValueError, match=r"(?s)seen at fit time, yet now missing.*kind"):
        fitted.predict(X_test[["x", "store"]])
    with pytest.raises(ValueError, match="output_type is mean, median, mode, quantiles or main"):
        fitted.predict(X_test, output_type="full")


# ---- Wrong parameters ----------------------------------------------------------------------------

WRONG = {
    "variant": ({"variant": "o"}, ValueError, "'o'"),
    "delta": ({"delta": 0}, ValueError, "delta"),
    "quantile": ({"quantile": 2}, ValueError, "quantile"),
    "tau": ({"tau": -1.0}, ValueError, "tau"),
    "host": ({"host": "none"}, HostError, "no host 'none'"),
    "a number for a host": ({"host": 3}, TypeError, "host is a name.*not a int"),
    "a regressor for a host": ({"host": TabPFNRegressor()}, TypeError, r"load_host.*TabPFNRegressor"),
    "another inner estimator": ({"estimator": LinearRegression()}, TypeError, "not a LinearRegression"),
    "a model of its own": ({"estimator": TabPFNRegressor(model_path="mine.ckpt")}, ValueError, "model_path"),
    "by without closed": ({"variant": "oa", "tau": 1.0, "by": "store"}, ValueError, "'closed', not 'oa'"),
    "a retrofit that is none": ({"retrofit": "none.json"}, RetrofitError, "none.json"),
    "an object for a path": ({"retrofit": 3}, TypeError, "path of a saved one, not a int"),
}


@pytest.mark.parametrize("way", WRONG)
def test_wrong_parameters_are_said_by_fit(table, calibrations, way):
    params, error, message = WRONG[way]
    with pytest.raises(error, match=message):
        RetrofitRegressor(**params).fit(*table[:2])
    assert not calibrations  # which takes its time


def test_before_fit(table):
    regressor = RetrofitRegressor()
    with pytest.raises(NotFittedError):
        regressor.predict(table[2])
    assert not hasattr(regressor, "estimator_")
    assert not hasattr(regressor, "retrofit_")


def test_the_retrofit_is_told_as_json(host_file, table):
    fitted = RetrofitRegressor(host_file, tau=1.0, estimator=inner()).fit(*table[:2])
    assert json.loads(fitted._given.retrofit) == fitted.retrofit_.to_dict()
