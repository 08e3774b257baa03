"""What host and variants of a run predicted, case by case, in the numbers that the page draws."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from ..runs import Run
from ..statistics import resampled_cases

_RESAMPLES = 2000


@dataclass(frozen=True, eq=False)
class CaseAnswers:
    """Of a case.

    Attributes:
        dataset: Its dataset.
        means: By `host` and variant (rows,), the predicted means, standardized by mean and deviation of the test
            targets.
        below: By `host` and variant (levels,), the share of test targets that are not above each predicted quantile.
    """

    dataset: str
    means: dict[str, np.ndarray]
    below: dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Answers:
    """Of a run.

    Attributes:
        levels: (levels,), of the quantiles.
        cases: Those whose predictions are kept.
        unreadable: What of them could not be read, in words.
    """

    levels: np.ndarray
    cases: list[CaseAnswers]
    unreadable: list[str]

    def of(self, variant: str) -> list[CaseAnswers]:
        """The cases for which the variant's predictions are kept."""
        return [case for case in self.cases if variant in case.means]

    def agreement(self, variant: str) -> tuple[np.ndarray, np.ndarray]:
        """Over all cases together (rows,) the host's means, and the variant's less these."""
        cases = self.of(variant)
        host = np.concatenate([case.means["host"] for case in cases])
        return host, np.concatenate([case.means[variant] for case in cases]) - host

    def reliability(self, variants: list[str]) -> dict[str, np.ndarray]:
        """By `host` and variant (levels,), the mean of `below` over the cases that have all of them."""
        cases = [case for case in self.cases if case.means.keys() >= set(variants)]
        return {who: np.mean([case.below[who] for case in cases], axis=0) for who in ("host", *variants) if cases}

    def reliability_change(self, variant: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The mean of (variant's less host's) `below` over cases, and its 95 % interval by `resampled_cases`."""
        cases = self.of(variant)
        changes = np.array([case.below[variant] - case.below["host"] for case in cases])
        positions = resampled_cases(np.array([case.dataset for case in cases]), _RESAMPLES)
        # Of each resample how often it has each case; position -1, which is no case, is counted and dropped.
        at = positions % (len(cases) + 1) + (len(cases) + 1) * np.arange(_RESAMPLES)[:, None]
        counts = np.bincount(at.ravel(), minlength=_RESAMPLES * (len(cases) + 1)).reshape(_RESAMPLES, -1)[:, :-1]
        means = counts @ changes / counts.sum(axis=1, keepdims=True)
        low, high = np.quantile(means, [0.025, 0.975], axis=0)
        return changes.mean(axis=0), low, high


def read_answers(run: Run) -> Answers:
    """What of a run's predictions is kept; what cannot be read is named and left out."""
    cases, unreadable, levels = [], [], np.empty(0)
    for case in run.results():
        try:
            kept = run.predictions(case.dataset, case.seed)
        except ValueError as error:
            unreadable.append(str(error).replace(f"{run.folder}{os.sep}", ""))
            continue
        if kept is None:
            continue
        mean, scale = kept.y.mean(), kept.y.std() or 1.0
        means = {who: (answer.mean - mean) / scale for who, answer in kept.answers.items()}
        below = {who: (kept.y[:, None] <= answer.quantiles).mean(axis=0) for who, answer in kept.answers.items()}
        levels = kept.levels
        cases.append(CaseAnswers(case.dataset, means, below))
    return Answers(levels, cases, unreadable)
