"""Choose a variant, its delta and TabPFN's ensemble size by cross-validation, as for any scikit-learn regressor.

    python examples/grid_search.py            # prints the grid; about a minute

The estimator's parameters are plain, so that clones and workers carry the host's name and not its weights. tau is
calibrated once a process, however many candidates are fitted.
"""

from __future__ import annotations

import argparse

import pandas as pd
from sklearn.compose import make_column_transformer
from sklearn.datasets import load_diabetes
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from oretrofit import RetrofitRegressor


def search(rows: int, folds: int) -> tuple[GridSearchCV, float]:
    """The fitted search over a pipeline on the diabetes table, and the R^2 of its best on rows that it has not seen."""
    X, y = load_diabetes(return_X_y=True, as_frame=True, scaled=False)
    X_train, X_test, y_train, y_test = train_test_split(X, y, train_size=rows, random_state=0)
    scaled = make_column_transformer((StandardScaler(), ["bmi", "bp"]), remainder="passthrough")
    pipeline = make_pipeline(scaled, RetrofitRegressor("small", variant="closed"))
    grid = {
        "retrofitregressor__delta": [1e-3, 1e-1],
        "retrofitregressor__estimator__n_estimators": [1, 4],
    }
    found = GridSearchCV(pipeline, grid, cv=folds, scoring="neg_root_mean_squared_error").fit(X_train, y_train)
    return found, float(found.best_estimator_.score(X_test, y_test))


def main() -> None:
    """Search, and print each candidate's error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=240, help="train rows, at most 440")
    parser.add_argument("--folds", type=int, default=3)
    given = parser.parse_args()
    found, score = search(given.rows, given.folds)
    results = pd.DataFrame(found.cv_results_)
    parameters = pd.DataFrame(found.cv_results_["params"]).rename(columns=lambda name: name.split("__", 1)[1])
    print(parameters.assign(RMSE=-results["mean_test_score"], rank=results["rank_test_score"]).round(3).to_string())
    print(f"best: {found.best_params_}; R^2 on rows not seen: {score:.2f}")


if __name__ == "__main__":
    main()
