"""The small host that comes with the package: there, small, usable by TabPFN itself, and described."""

import re

import numpy as np
import pytest
from tabpfn.checkpoint import Checkpoint

from oretrofit import load_host, patch
from oretrofit.retrofit.hosts import SMALL_HOST


@pytest.fixture(scope="module")
def on_path(regressor, table):
    """Predictions of TabPFN on the file itself."""
    X, y, X_test = table
    return regressor(SMALL_HOST).fit(X, y).predict(X_test)


def test_the_file_is_small_and_complete():
    assert SMALL_HOST.stat().st_size < 12e6
    checkpoint = Checkpoint(SMALL_HOST).load()
    assert checkpoint["architecture_name"] == "tabpfn_v3"
    assert checkpoint["inference_config"]
    assert "v3" in SMALL_HOST.name  # TabPFN reads the version off the name


def test_tabpfn_and_the_package_agree_on_it(on_path, regressor, table):
    X, y, X_test = table
    host = load_host("small")
    assert host.name == "small"
    assert np.array_equal(regressor(host.specs).fit(X, y).predict(X_test), on_path)


def test_it_predicts(on_path, table):
    """Better than the mean, on a target that a straight line nearly gives."""
    _, y, X_test = table
    truth = 2 * X_test[:, 0] + np.sin(X_test[:, 1])
    assert len(np.unique(on_path)) == len(on_path)
    assert np.corrcoef(on_path, truth)[0, 1] > 0.9
    assert np.square(on_path - truth).mean() < 0.3 * np.square(y.mean() - truth).mean()


@pytest.mark.parametrize("variant", ["oa", "full-o"])
def test_it_can_be_patched(on_path, regressor, table, variant):
    X, y, X_test = table
    retrofit = patch("small", variant, tables=2)
    moved = np.abs(regressor(retrofit.specs).fit(X, y).predict(X_test) - on_path).max()
    assert 0 < moved < 0.1 * y.std()


def test_it_has_a_card():
    card = (SMALL_HOST.parent / "README.md").read_text()
    assert SMALL_HOST.name in card
    assert not re.search(r"@[A-Z]+@", card)  # nothing left to fill in
    for topic in ("synthetic", "Apache-2.0", "Limits"):
        assert topic in card
