"""What a feature is worth to TabPFN, by really removing it: Shapley values, and the error without each feature.

    python examples/removal.py                # prints tables; about a minute
    python examples/removal.py --table diabetes --permutations 16 --json removal.json

A coalition of columns is a table of its own, from which the other columns are absent in train and test. All coalitions
are predicted by one call of `predict_ragged`. Beside it: the same tables fitted one by one, and one fit on all columns
whose missing ones are filled in at test, with the train rows' mean or with NaN. (TabPFN 9.2 refuses +inf.)
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from math import factorial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tabpfn import TabPFNRegressor

import oretrofit
from oretrofit.experiments.datasets import load_dataset, make_case

MOST_EXACT = 8  # columns, of which all coalitions are taken; of more, those along random permutations

# A coalition is a bit mask of columns. A step is (weight, column, coalition without it).
Step = tuple[float, int, int]
Values = dict[int, np.ndarray]  # coalition -> predicted means of the test rows


def steps_of(columns: int, permutations: int, rng: np.random.Generator) -> list[Step]:
    """The steps whose weighted gains add up to Shapley values: all of them, or those along random permutations.

    All: Shapley (1953), weight |S|! (d - |S| - 1)! / d!. Permutations: Castro, Gomez and Tejada (2009).
    """
    if columns <= MOST_EXACT:
        return [
            (factorial(S.bit_count()) * factorial(columns - S.bit_count() - 1) / factorial(columns), j, S)
            for S in range(2**columns)
            for j in range(columns)
            if not S >> j & 1
        ]
    steps = []
    for _ in range(permutations):
        S = 0
        for j in map(int, rng.permutation(columns)):
            steps.append((1 / permutations, j, S))
            S |= 1 << j
    return steps


def shapley(steps: list[Step], columns: int, values: Values) -> np.ndarray:
    """Shapley values (columns, rows) of the predictions in `values`."""
    found = np.zeros((columns, len(values[0])))
    for weight, j, S in steps:
        found[j] += weight * (values[S | 1 << j] - values[S])
    return found


class Ways:
    """Predictions of the test rows by coalitions, in four ways. Without any column it is the train targets' mean."""

    def __init__(self, retrofit: oretrofit.Retrofit, case: Any, members: int) -> None:
        self.X, self.y, self.X_test = case.X_train.astype(float), case.y_train, case.X_test.astype(float)
        self.retrofit = retrofit
        self.options: dict[str, Any] = {"n_estimators": members, "inference_precision": torch.float32, "device": "cpu"}
        self.regressor = TabPFNRegressor(model_path=retrofit.specs, **self.options)

    def _columns(self, S: int) -> list[int]:
        return [j for j in range(self.X.shape[1]) if S >> j & 1]

    def _nothing(self) -> Values:
        return {0: np.full(len(self.X_test), self.y.mean())}

    def removal(self, coalitions: list[int]) -> Values:
        """Every coalition is a table; all of them in one call."""
        taken = [self._columns(S) for S in coalitions]
        X_trains, X_tests = ([X.iloc[:, columns] for columns in taken] for X in (self.X, self.X_test))
        means = self.retrofit.predict_ragged(X_trains, [self.y] * len(taken), X_tests, **self.options)
        return self._nothing() | dict(zip(coalitions, means, strict=True))

    def refit(self, coalitions: list[int]) -> Values:
        """The same tables, one `fit` after the other."""
        found = self._nothing()
        for S in coalitions:
            columns = self._columns(S)
            found[S] = self.regressor.fit(self.X.iloc[:, columns], self.y).predict(self.X_test.iloc[:, columns])
        return found

    def fill_mean(self, coalitions: list[int]) -> Values:
        """One fit on all columns; at test those outside the coalition get the train rows' mean."""
        return self._fill(coalitions, self.X.mean())

    def fill_nan(self, coalitions: list[int]) -> Values:
        """The same, with missing cells."""
        return self._fill(coalitions, pd.Series(np.nan, self.X.columns))

    def _fill(self, coalitions: list[int], value: pd.Series) -> Values:
        filled = []
        for S in [0, *coalitions]:
            X = self.X_test.copy()
            for j in set(range(X.shape[1])) - set(self._columns(S)):
                X.iloc[:, j] = value.iloc[j]
            filled.append(X)
        means = self.regressor.fit(self.X, self.y).predict(pd.concat(filled))
        return dict(zip([0, *coalitions], np.split(means, len(filled)), strict=True))


def timed(run: Callable[[list[int]], Values], coalitions: list[int]) -> tuple[Values, float]:
    """What a way finds, and its seconds."""
    start = time.perf_counter()
    return run(coalitions), time.perf_counter() - start


def compare(table: str, *, rows: int, explained: int, members: int, permutations: int, rounds: int) -> dict[str, Any]:
    """Explain a bundled table's predictions in the four ways, in turns; all figures, as JSON has them."""
    case = make_case(load_dataset(table), 0, rows, explained)
    retrofit = oretrofit.patch("small", variant="closed")
    names = list(case.X_train.columns)
    steps = steps_of(len(names), permutations, np.random.default_rng(0))
    whole = 2 ** len(names) - 1
    without = {name: whole & ~(1 << j) for j, name in enumerate(names)}
    coalitions = sorted({S | 1 << j for _, j, S in steps} | {S for _, _, S in steps if S} | set(without.values()))
    ways = Ways(retrofit, case, members)
    runs = {"removal": ways.removal, "refit": ways.refit, "fill mean": ways.fill_mean, "fill NaN": ways.fill_nan}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    values: dict[str, Values] = {}
    for _ in range(rounds):
        for name, run in runs.items():
            values[name], took = timed(run, coalitions)
            seconds[name].append(took)

    def rmse(means: np.ndarray) -> float:
        return float(np.sqrt(np.mean((means - case.y_test) ** 2)))

    worth = {name: np.abs(shapley(steps, len(names), found)).mean(axis=1) for name, found in values.items()}
    features = [
        {
            "feature": feature,
            **{f"shapley, {name}": float(worth[name][j]) for name in runs},
            **{f"error without it, {name}": rmse(found[without[feature]]) for name, found in values.items()},
        }
        for j, feature in enumerate(names)
    ]
    difference = max(float(np.abs(values["removal"][S] - values["refit"][S]).max()) for S in coalitions)
    return {
        "settings": {
            "table": table,
            "host": {"name": retrofit.host.name, "sha256": retrofit.host.sha256},
            "train rows": len(case.X_train),
            "test rows": len(case.X_test),
            "members": members,
            "threads": torch.get_num_threads(),
        },
        "coalitions": len(coalitions),
        "seconds": {name: float(np.median(took)) for name, took in seconds.items()},
        "rounds": rounds,
        "largest difference of removal and refit, sd": difference / float(case.y_train.std()),
        "error with all": rmse(values["removal"][whole]),
        "features": features,
        "copy": with_a_copy(retrofit, case, members, max(features, key=lambda f: f["shapley, removal"])["feature"]),
    }


def with_a_copy(retrofit: oretrofit.Retrofit, case: Any, members: int, feature: str) -> dict[str, Any]:
    """Errors of a table in which a feature stands twice, with both and without one of the two."""
    twice = {part: getattr(case, part).assign(copy=getattr(case, part)[feature]) for part in ("X_train", "X_test")}
    ways = Ways(retrofit, case, members)
    ways.X, ways.X_test = twice["X_train"].astype(float), twice["X_test"].astype(float)
    both = 2 ** ways.X.shape[1] - 1
    one = both & ~(1 << list(ways.X.columns).index(feature))
    found: dict[str, Any] = {"feature": feature}
    for name, run in {"removal": ways.removal, "fill mean": ways.fill_mean, "fill NaN": ways.fill_nan}.items():
        means = run([one, both])
        found |= {
            f"{name}, {what}": float(np.sqrt(np.mean((means[S] - case.y_test) ** 2)))
            for what, S in (("both", both), ("one", one))
        }
    return found


def main() -> None:
    """Compare the ways, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", choices=("concrete", "diabetes"), default="concrete")
    parser.add_argument("--rows", type=int, default=200, help="train rows")
    parser.add_argument("--explained", type=int, default=40, help="test rows")
    parser.add_argument("--members", type=int, default=2, help="of each table's ensemble")
    parser.add_argument("--permutations", type=int, default=16, help=f"for tables of more than {MOST_EXACT} columns")
    parser.add_argument("--rounds", type=int, default=1, help="of all ways in turns, for their times")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures")
    given = vars(parser.parse_args())
    file = given.pop("json")
    found = compare(given.pop("table"), **given)
    if file:
        file.write_text(json.dumps(found, indent=1) + "\n")
    features = pd.DataFrame(found["features"]).set_index("feature")
    for title, prefix in (("Mean size of the Shapley values", "shapley, "), ("RMSE without it", "error without it, ")):
        part = features.loc[:, features.columns.str.startswith(prefix)]
        part.columns = part.columns.str.removeprefix(prefix)
        print(f"{title}\n{part.sort_values('removal', ascending=False).round(2).to_string()}\n")
    copy = found["copy"]
    print(f"RMSE with all columns: {found['error with all']:.2f}")
    print(
        f"With a copy of {copy['feature']}: {copy['removal, both']:.2f}; leaving one of the two out: "
        f"{copy['removal, one']:.2f} by removal, {copy['fill mean, one']:.2f} by filling"
    )
    print(f"removal and refit differ by {found['largest difference of removal and refit, sd']:.1e} standard deviations")
    print(f"{found['coalitions']} coalitions, seconds:", {k: round(v, 1) for k, v in found["seconds"].items()})


if __name__ == "__main__":
    main()
