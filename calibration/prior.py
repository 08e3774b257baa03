"""Synthetic regression tables: what the bundled host is trained on and what tau is calibrated on.

A table is drawn in four steps: latent columns (independent, correlated, or nodes of a random
causal graph), a marginal for each column (normal, uniform, skewed, discrete, categorical codes,
zero-inflated), a target function of the relevant columns (linear, random networks, smooth random
Fourier functions, sums of random trees), and what spoils it (noise that may be heavy-tailed or
heteroscedastic, a skewed target, missing cells).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Table:
    """One synthetic regression table.

    Attributes:
        X: Features, (rows, columns), float64; missing cells are NaN.
        y: Target, (rows,), float64, finite and not constant.
        categorical: Indices of the columns that hold categorical codes (whole numbers times one scale).
    """

    X: Array
    y: Array
    categorical: list[int]


def draw_table(rng: Generator, rows: int, columns: int) -> Table:
    """Draw one table of `rows` rows and `columns` feature columns.

    The same generator state gives the same table. Raises `ValueError` for fewer than two rows or
    no column.
    """
    if rows < 2 or columns < 1:
        raise ValueError(f"a table needs at least 2 rows and 1 column, not {rows} x {columns}")
    if rng.random() < 0.3:
        latent, signal = _causal_graph(rng, rows, columns)
    else:
        latent, signal = _latent_columns(rng, rows, columns), None
    X, effects, categorical = _marginals(rng, latent)
    if signal is None:
        signal = _target_function(rng, effects)
    y = _spoil_target(rng, _standardize(signal), effects)
    if rng.random() < 0.25:
        X = _drop_cells(rng, X)
    return Table(X=X, y=y, categorical=categorical)


def draw_sizes(rng: Generator, max_rows: int, max_columns: int, min_rows: int = 30) -> tuple[int, int]:
    """Draw (rows, columns), log-uniform, so that small tables are as common as large ones."""
    rows = int(np.exp(rng.uniform(np.log(min_rows), np.log(max_rows + 1))))
    columns = int(np.exp(rng.uniform(0.0, np.log(max_columns + 1))))
    return min(rows, max_rows), min(columns, max_columns)


def _standardize(values: Array) -> Array:
    return (values - values.mean(axis=0)) / (values.std(axis=0) + 1e-9)


def _latent_columns(rng: Generator, rows: int, columns: int) -> Array:
    latent = rng.standard_normal((rows, columns))
    kind = rng.random()
    if kind < 0.5:
        # Correlated: few factors behind all columns.
        factors = rng.standard_normal((rows, rng.integers(1, max(2, columns // 2) + 1)))
        loadings = rng.standard_normal((factors.shape[1], columns))
        strength = rng.uniform(0.2, 2.0) * rng.random(columns)
        latent = latent + strength * _standardize(factors @ loadings)
    elif kind < 0.65:
        # Clustered rows.
        clusters = int(rng.integers(2, 8))
        centers = rng.normal(0, rng.uniform(0.5, 3.0), (clusters, columns))
        latent = latent + centers[rng.integers(0, clusters, rows)]
    return _standardize(latent)


def _causal_graph(rng: Generator, rows: int, columns: int) -> tuple[Array, Array]:
    """Columns and target are nodes of a random layered graph with noise at every node."""
    width = max(4, columns + int(rng.integers(1, columns + 5)))
    layer = rng.standard_normal((rows, int(rng.integers(1, 12))))
    nodes = [layer]
    for _ in range(int(rng.integers(1, 4))):
        weights = rng.standard_normal((layer.shape[1], width))
        weights *= rng.random(weights.shape) < rng.uniform(0.2, 1.0)
        layer = _activation(rng)(_standardize(layer @ weights) * rng.uniform(0.5, 2.0))
        layer = layer + rng.uniform(0.0, 0.3) * rng.standard_normal(layer.shape)
        nodes.append(layer)
    pool = np.concatenate(nodes, axis=1)
    target = pool.shape[1] - 1 - int(rng.integers(0, width))
    others = np.delete(np.arange(pool.shape[1]), target)
    chosen = rng.choice(others, columns, replace=len(others) < columns)
    return _standardize(pool[:, chosen]), pool[:, target]


def _activation(rng: Generator):
    return [
        np.tanh,
        lambda v: np.maximum(v, 0.0),
        np.sin,
        lambda v: np.abs(v),
        lambda v: v * (v > 0) + 0.1 * v,
        lambda v: np.exp(-(v**2)),
        lambda v: np.sign(v) * np.sqrt(np.abs(v)),
    ][int(rng.integers(7))]


def _marginals(rng: Generator, latent: Array) -> tuple[Array, Array, list[int]]:
    """Give each column a marginal.

    Returns the columns as a user would see them, the values through which they act on the target
    (for a category: its own random effect), and which columns hold codes.
    """
    rows, columns = latent.shape
    X, effects, categorical = latent.copy(), latent.copy(), []
    plain = rng.random() < 0.3  # a table of plain continuous columns
    for c in range(columns):
        u = latent[:, c]
        kind = 0.0 if plain else rng.random()
        ranks = np.argsort(np.argsort(u)) / max(rows - 1, 1)
        if kind < 0.3:
            pass
        elif kind < 0.4:
            X[:, c] = ranks
        elif kind < 0.55:
            X[:, c] = np.exp(rng.uniform(0.3, 1.5) * u)
        elif kind < 0.62:
            X[:, c] = np.maximum(u - rng.normal(0, 0.7), 0.0)  # zero-inflated
        elif kind < 0.77:
            levels = int(rng.integers(2, 12))
            X[:, c] = np.floor(ranks * (levels - 1e-9))
        elif kind < 0.82:
            X[:, c] = np.round(u * rng.uniform(1, 10))
        else:
            levels = int(rng.integers(2, 25 if rng.random() < 0.3 else 7))
            cuts = np.sort(rng.random(levels - 1))
            bins = np.searchsorted(cuts, ranks)
            X[:, c] = rng.permutation(levels)[bins]
            own = rng.standard_normal(levels)
            effects[:, c] = own[bins] if rng.random() < 0.7 else u
            categorical.append(c)
            continue
        # Functions act on the column itself about as often as on the latent value behind it.
        if rng.random() < 0.7:
            effects[:, c] = X[:, c]
    return X * np.exp(rng.normal(0, 1.5, columns)), _standardize(effects), categorical


def _target_function(rng: Generator, effects: Array) -> Array:
    columns = effects.shape[1]
    relevant = max(1, round(columns * (1.0 if rng.random() < 0.3 else rng.uniform(0.15, 1.0))))
    chosen = rng.choice(columns, relevant, replace=False)
    # A few columns usually carry most of the signal.
    weights = rng.exponential(1.0, relevant) ** rng.uniform(0.3, 1.5)
    v = effects[:, chosen] * weights / np.sqrt((weights**2).mean())
    functions = (_linear, _network, _fourier, _trees, _additive)
    parts = int(rng.choice([1, 2, 3], p=[0.55, 0.3, 0.15]))
    picks = rng.choice(len(functions), parts, p=[0.12, 0.28, 0.15, 0.3, 0.15])
    out = sum(rng.exponential() * _standardize(functions[k](rng, v)) for k in picks)
    if parts > 1 and rng.random() < 0.2:
        out = out * (1.0 + 0.5 * _standardize(_network(rng, v)))
    return np.asarray(out)


def _linear(rng: Generator, v: Array) -> Array:
    return v @ rng.standard_normal(v.shape[1])


def _network(rng: Generator, v: Array) -> Array:
    hidden = v
    for _ in range(int(rng.integers(1, 4))):
        width = int(rng.integers(2, 33))
        weights = rng.standard_normal((hidden.shape[1], width)) / np.sqrt(hidden.shape[1])
        hidden = _activation(rng)(hidden @ weights * rng.uniform(0.7, 2.5) + rng.normal(0, 0.7, width))
    return hidden @ rng.standard_normal(hidden.shape[1])


def _fourier(rng: Generator, v: Array) -> Array:
    features = 64
    scale = rng.uniform(0.2, 1.2) / np.sqrt(v.shape[1])
    # Dividing by a chi-like factor gives heavier-tailed spectra: smooth but not analytic.
    frequencies = rng.standard_normal((v.shape[1], features)) * scale
    frequencies /= np.sqrt(rng.gamma(2.0, 0.5, features))
    return np.cos(v @ frequencies + rng.uniform(0, 2 * np.pi, features)) @ rng.standard_normal(features)


def _trees(rng: Generator, v: Array) -> Array:
    rows, columns = v.shape
    out = np.zeros(rows)
    for _ in range(int(np.exp(rng.uniform(0, np.log(40))))):
        depth = int(rng.integers(1, 6))
        # Splits fall on data points, so that thresholds follow each column's own distribution.
        split_columns = rng.integers(0, columns, depth)
        thresholds = v[rng.integers(0, rows, depth), split_columns]
        leaf = (v[:, split_columns] > thresholds) @ (1 << np.arange(depth))
        out += rng.standard_normal(1 << depth)[leaf]
    return out


def _additive(rng: Generator, v: Array) -> Array:
    """A sum of one-column curves, as in generalised additive models."""
    out = np.zeros(len(v))
    for c in range(v.shape[1]):
        u = v[:, c] * rng.uniform(0.5, 2.0) + rng.normal(0, 0.5)
        out += rng.standard_normal() * _activation(rng)(u) + 0.5 * rng.standard_normal() * u
    return out


def _spoil_target(rng: Generator, signal: Array, effects: Array) -> Array:
    rows = len(signal)
    noise: Array = rng.standard_normal(rows) if rng.random() < 0.8 else rng.standard_t(rng.uniform(2.5, 6), rows)
    if rng.random() < 0.3:
        noise = noise * np.exp(0.7 * _standardize(effects @ rng.standard_normal(effects.shape[1])))
    y = signal + np.exp(rng.uniform(np.log(0.02), np.log(1.2))) * noise
    kind = rng.random()
    if kind < 0.2:
        y = np.exp(rng.uniform(0.3, 1.2) * np.clip(_standardize(y), -5, 5))
    elif kind < 0.25:
        y = np.round(y * rng.uniform(1, 5))
    elif kind < 0.28:
        y = np.maximum(y, np.quantile(y, rng.uniform(0.05, 0.4)))
    if y.std() < 1e-6:
        y = rng.standard_normal(rows)
    return y


def _drop_cells(rng: Generator, X: Array) -> Array:
    rate = np.asarray(rng.uniform(0, 0.3) * rng.random(X.shape[1]) * (rng.random(X.shape[1]) < 0.6))
    if rng.random() < 0.3:
        # Missing more often where the value is large.
        rate = rate * 2 * (X > np.median(X, axis=0))
    missing = rng.random(X.shape) < rate
    missing[:2] = False
    return np.where(missing, np.nan, X)
