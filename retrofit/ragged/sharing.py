"""A table's ensemble members, of which what several have in common is fitted once.

TabPFN fits each member's preprocessing anew, though most differ from another only in the order of their columns, or in
random steps behind the same first ones; and each member's transform of the target, though these are copies of few. What
comes out is bit for bit what TabPFN makes.
"""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np

from ..tabpfn_api import PreprocessingPipeline, PreprocessingStep, PreprocessingStepResult

# Whatever their random state, these transforms do the same; quantiles do up to so many rows, which TabPFN samples.
_SURE = ("none", "robust", "power", "safepower", "power_box", "safepower_box", "squashing_scaler_")
_MOST_ROWS_OF_QUANTILES = 100_000


def ensemble_members(preprocessor: Any, X_train: np.ndarray, y_train: np.ndarray) -> list[Any]:
    """What `fit_transform_ensemble_members` of a regressor's `TabPFNEnsemblePreprocessor` returns, by less work.

    Args:
        preprocessor: Not fitted yet; used up.
        X_train: Train rows, as a regressor's engine has them.
        y_train: Their targets, standardised.
    """
    _share_first_steps(preprocessor, len(X_train))
    _share_target_transforms(preprocessor)
    return preprocessor.fit_transform_ensemble_members(X_train, y_train)


def _share_first_steps(preprocessor: Any, rows: int) -> None:
    """Let members whose pipelines begin with the same steps on the same columns and rows run these together."""
    shared: dict[str, _FirstSteps] = {}
    choices = zip(preprocessor.subsample_feature_indices, _chosen_rows(preprocessor), strict=True)
    for i, (pipeline, chosen) in enumerate(zip(preprocessor.pipelines, choices, strict=True)):
        sure = 0
        while sure < len(pipeline.steps) and _is_sure(pipeline.steps[sure][0], rows):
            sure += 1
        if not sure:
            continue
        first, others = pipeline.steps[:sure], pipeline.steps[sure:]
        key = repr([[_parameters(step) for step in first], *map(_listed, chosen)])
        steps = shared.setdefault(key, _FirstSteps(first))
        preprocessor.pipelines[i] = PreprocessingPipeline([(steps, set()), *others])


def _is_sure(step: Any, rows: int) -> bool:
    """Whether a step does the same whatever its random state is."""
    kind = type(step).__name__
    if kind == "ReshapeFeatureDistributionsStep":
        if step.transform_name.startswith("quantile_"):
            return rows <= _MOST_ROWS_OF_QUANTILES
        return step.transform_name.startswith(_SURE)
    if kind == "EncodeCategoricalFeaturesStep":
        return not step.categorical_transform_name.endswith("_shuffled")
    return kind in ("RemoveConstantFeaturesStep", "AddFingerprintFeaturesStep")


def _parameters(step: tuple[Any, set[Any]]) -> Any:
    """A step that is not fitted yet, as text, its random state aside."""
    kept = {name: value for name, value in vars(step[0]).items() if name != "random_state"}
    return type(step[0]).__name__, kept, sorted(map(str, step[1]))


def _chosen_rows(preprocessor: Any) -> list[np.ndarray | None]:
    """The rows of each member; None for all."""
    return preprocessor.subsample_row_indices or [None] * len(preprocessor.pipelines)


def _listed(indices: np.ndarray | None) -> list[int] | None:
    return None if indices is None else np.asarray(indices).tolist()


class _FirstSteps(PreprocessingStep):
    """The first steps of several members' pipelines as one step, run again only for other rows than before."""

    def __init__(self, steps: list[Any]) -> None:
        self._pipeline = PreprocessingPipeline(steps)
        self._seen: dict[bool, tuple[np.ndarray, PreprocessingStepResult]] = {}

    def fit_transform(self, X: np.ndarray, feature_schema: Any) -> PreprocessingStepResult:
        return self._run(X, True, lambda: self._pipeline.fit_transform(X, feature_schema))

    def transform(self, X: np.ndarray, *, is_test: bool = True) -> PreprocessingStepResult:
        return self._run(X, False, lambda: self._pipeline.transform(X))

    def _run(self, X: np.ndarray, is_fitting: bool, run: Any) -> PreprocessingStepResult:
        seen = self._seen.get(is_fitting)
        if seen is None or not np.array_equal(X, seen[0], equal_nan=True):
            result = run()
            seen = self._seen[is_fitting] = X, PreprocessingStepResult(result.X, result.feature_schema)
        _, result = seen
        # A later step of one member may change it in place.
        return PreprocessingStepResult(result.X.copy(order="K"), result.feature_schema)


def _share_target_transforms(preprocessor: Any) -> None:
    """Let members whose target transforms are copies of one, for the same rows, fit one."""
    shared: dict[tuple[bytes, Any], _TargetTransform] = {}
    for config, rows in zip(preprocessor.configs, _chosen_rows(preprocessor), strict=True):
        if config.target_transform is not None:
            key = pickle.dumps(config.target_transform), repr(_listed(rows))
            config.target_transform = shared.setdefault(key, _TargetTransform(config.target_transform))


class _TargetTransform:
    """A transform of the target, fitted once to the same rows, and undone once for the borders of a distribution."""

    def __init__(self, transform: Any) -> None:
        self._transform = transform
        self._fitted: np.ndarray | None = None
        self._undone: tuple[np.ndarray, np.ndarray] | None = None

    def fit_transform(self, y_N1: np.ndarray) -> np.ndarray:
        if self._fitted is None:
            self._fitted = self._transform.fit_transform(y_N1)
        return self._fitted.copy()

    def inverse_transform(self, borders_L1: np.ndarray) -> np.ndarray:
        if self._undone is None or not np.array_equal(borders_L1, self._undone[0]):
            self._undone = borders_L1, self._transform.inverse_transform(borders_L1)
        return self._undone[1].copy()  # TabPFN mends borders in place
