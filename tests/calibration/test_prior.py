"""The synthetic tables: usable by TabPFN as they are, and the same for the same seed."""

import numpy as np
import pytest

from oretrofit.calibration.carriers import calibration_tables, split_table
from oretrofit.calibration.prior import draw_sizes, draw_table


def draw(seed, rows, columns):
    return draw_table(np.random.default_rng([3, seed]), rows, columns)


def same(a, b):
    return np.array_equal(a.X, b.X, equal_nan=True) and np.array_equal(a.y, b.y) and a.categorical == b.categorical


def is_scaled_codes(values):
    """Whether the values are integers from 0 to 24 times one scale."""
    scales = values.max() / np.arange(1, 25) if values.any() else [1.0]
    return any(np.allclose(values / scale, np.round(values / scale), rtol=0, atol=1e-9) for scale in scales)


@pytest.mark.parametrize(("rows", "columns"), [(2, 1), (3, 1), (2, 6), (30, 1), (40, 7), (120, 20)])
@pytest.mark.filterwarnings("error::RuntimeWarning", "error::UserWarning")  # not of what others deprecate
def test_tables_are_usable(rows, columns):
    categories = missing = 0
    for seed in range(40):
        table = draw(seed, rows, columns)
        assert table.X.shape == (rows, columns)
        assert table.X.dtype == table.y.dtype == np.float64
        assert table.y.shape == (rows,)
        assert np.isfinite(table.y).all()
        assert np.ptp(table.y) > 0
        assert not np.isinf(table.X).any()
        assert not np.isnan(table.X[:2]).any()
        assert table.categorical == sorted(set(table.categorical))
        for column in table.categorical:
            values = table.X[:, column]
            values = values[~np.isnan(values)]
            assert len(np.unique(values)) <= 24
            assert is_scaled_codes(values)
        categories += len(table.categorical)
        missing += np.isnan(table.X).sum()
    assert categories > 0
    assert missing > 0 or rows == 2 or (rows, columns) == (3, 1)


def test_the_same_generator_state_gives_the_same_table():
    assert same(draw(1, 50, 5), draw(1, 50, 5))
    assert not same(draw(1, 50, 5), draw(2, 50, 5))


@pytest.mark.parametrize(("rows", "columns"), [(1, 3), (0, 3), (10, 0), (10, -1)])
def test_tables_without_rows_or_columns_are_refused(rows, columns):
    with pytest.raises(ValueError, match=f"{rows} x {columns}"):
        draw(0, rows, columns)


def test_sizes_keep_to_their_limits_and_favour_neither_small_nor_large():
    rng = np.random.default_rng(0)
    sizes = np.array([draw_sizes(rng, 300, 20) for _ in range(4000)])
    assert sizes.min(axis=0).tolist() == [30, 1]
    assert sizes.max(axis=0).tolist() == [300, 20]
    # Log-uniform: as many below the geometric mean of the limits as above.
    assert np.mean(sizes[:, 0] < np.sqrt(30 * 301)) == pytest.approx(0.5, abs=0.04)
    assert np.mean(sizes[:, 1] < np.sqrt(21)) == pytest.approx(0.5, abs=0.04)


def test_calibration_tables_depend_on_their_seed_alone():
    tables = calibration_tables(4, 5, max_rows=60, max_columns=4)
    assert len(tables) == 4
    # Fewer of them are the first of them.
    assert all(map(same, tables, calibration_tables(2, 5, max_rows=60, max_columns=4)))
    assert not same(tables[0], calibration_tables(1, 6, max_rows=60, max_columns=4)[0])
    for table in tables:
        assert 30 <= len(table.y) <= 60
        assert table.X.shape[1] <= 4
        X_train, y_train, X_test, y_test = split_table(table)
        assert len(X_train) == len(y_train) == len(table.y) * 2 // 3
        assert np.array_equal(np.concatenate([X_train, X_test]), table.X, equal_nan=True)
        assert np.array_equal(np.concatenate([y_train, y_test]), table.y)
    assert [len(part) for part in split_table(draw(0, 3, 1))] == [2, 2, 1, 1]
