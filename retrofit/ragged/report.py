"""What a ragged prediction did."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STAGES = ("preprocessing", "forward", "decoding")


@dataclass(frozen=True)
class RaggedReport:
    """What a ragged prediction did.

    Attributes:
        tables: Tables answered, constant targets included.
        members: Ensemble members that went through the model.
        batches: Forward passes.
        padding: The share of the forward passes' work that was padding, in [0, 1).
        out_of_memory: Batches that did not fit the device and were halved.
        errors: What was wrong with each table that has no prediction, by its index or group.
        seconds: Wall time in `preprocessing` (beside a GPU: waiting for it), `forward` and `decoding`; where processes
            share the tables, the sum of theirs.
        work: Multiply-adds of the forward passes, padding included.
    """

    tables: int
    members: int
    batches: int
    padding: float
    out_of_memory: int
    errors: Mapping[Any, str]
    seconds: Mapping[str, float]
    work: float = 0.0

    def __add__(self, other: RaggedReport) -> RaggedReport:
        """What two predictions did together, of different tables."""
        work = self.work + other.work
        padded = self.padding * self.work + other.padding * other.work
        return RaggedReport(
            self.tables + other.tables,
            self.members + other.members,
            self.batches + other.batches,
            padded / work if work else 0.0,
            self.out_of_memory + other.out_of_memory,
            {**self.errors, **other.errors},
            {stage: self.seconds[stage] + other.seconds[stage] for stage in STAGES},
            work,
        )


@dataclass
class Tally:
    """Counts of a prediction that is under way; works are in multiply-adds."""

    members: int = 0
    batches: int = 0
    out_of_memory: int = 0
    own_work: float = 0.0
    padded_work: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the wall time of a `with` block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def add(self, other: Tally) -> None:
        """Take over another's counts."""
        for name in ("members", "batches", "out_of_memory", "own_work", "padded_work"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for stage in STAGES:
            self.seconds[stage] += other.seconds[stage]

    def report(self, tables: int, errors: Mapping[Any, str]) -> RaggedReport:
        """The counts, with how many tables were answered, and what was wrong with the others."""
        padding = 1 - self.own_work / self.padded_work if self.padded_work else 0.0
        return RaggedReport(
            tables,
            self.members,
            self.batches,
            padding,
            self.out_of_memory,
            dict(errors),
            dict(self.seconds),
            self.padded_work,
        )
