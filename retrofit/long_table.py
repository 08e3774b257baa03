"""One long table of groups, train and test: its columns typed, and which groups cannot be predicted."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import pandas as pd

from .columns import Fault, Table, Target, read_columns, read_target


@dataclass
class LongTable:
    """What is to be predicted, read.

    Attributes:
        train: Features, typed as `columns` says, the target as float64, and the group.
        test: Features and group.
        target: The column of the target.
        by: The column of the groups.
        kinds: `numbers`, `dates` or `categories`, by feature.
        few: The groups of test with too few train rows, where that is no error.
        faulty: What is wrong with each group that cannot be predicted; none of its rows is in `train`.
        notes: What a user may want to know of how the tables were read, in sentences.
    """

    train: pd.DataFrame
    test: pd.DataFrame
    target: Hashable
    by: Hashable
    kinds: dict[Hashable, str]
    few: list[Hashable]
    faulty: dict[Hashable, str]
    notes: list[str]

    def options(self, settings: dict[str, Any]) -> dict[str, Any]:
        """`TabPFNRegressor`'s options in `settings`, with calendar features for dates where there are any."""
        if "dates" not in self.kinds.values():
            return settings
        config: Any = settings.get("inference_config")
        if dataclasses.is_dataclass(config):
            config = dataclasses.replace(config, TRANSFORM_DATES=True)  # type: ignore[type-var]
        else:
            config = {**(config or {}), "TRANSFORM_DATES": True}
        return {**settings, "inference_config": config}


def read_groups(
    train: Table,
    test: Table,
    features: Sequence[Hashable],
    *,
    target: Hashable,
    by: Hashable,
    min_rows: int = 2,
    too_few: str = "error",
    skip: bool = False,
    whole: bool = False,
    kinds: Mapping[Hashable, str] | None = None,
) -> LongTable:
    """Type the columns of a long table, and find the cells that cannot be used.

    Args:
        train: With features, target and group.
        test: With features and group.
        features: The columns to predict from.
        target: The column to predict.
        by: The column of the groups.
        min_rows: How many train rows a group needs.
        too_few: As of `predict_groups`; `pooled` makes all train rows matter if a group has too few of its own.
        skip: Whether a cell that cannot be used costs its group (`faulty`), or is an error.
        whole: Whether the one group is the whole table, so that messages need not name it.
        kinds: Of the features, as of `read_columns`.

    Raises:
        ValueError: Groups with too few train rows, if that is an error; a column that is neither numbers, dates nor
            categories, or not the same in both tables; without `skip`, a cell that cannot be used, or an empty target.
    """
    columns = read_columns([train, test], features, kinds)
    y = read_target(train, target)
    notes = [*train.notes, *test.notes, *columns.notes, *y.notes]
    groups = [table.frame[by].tolist() for table in (train, test)]
    counts = Counter(groups[0])
    few, twins = find_few(counts, dict.fromkeys(groups[1]), test.name, min_rows, too_few)
    notes += twins

    wanted = set(counts if few and too_few == "pooled" else groups[1])
    faulty: dict[Hashable, str] = {}
    for fault in [*_target_faults(train, target, y, groups[0]), *columns.faults]:
        if (group := groups[fault.table][fault.row]) in wanted:
            faulty.setdefault(group, fault.reason)
    if faulty and not skip:
        group, reason = next(iter(faulty.items()))
        hint = "; such groups can be left out by on_error='skip' (--on-error skip)"
        raise ValueError(reason if whole else f"group {group!r}: {reason}{hint}")

    frames = columns.frames
    frames[0][target] = y.y
    for frame, table in zip(frames, (train, test), strict=True):
        frame[by] = table.frame[by].array
    kept = np.array([group not in faulty for group in groups[0]], dtype=bool)
    return LongTable(frames[0][kept], frames[1], target, by, columns.kinds, few, faulty, notes)


def find_few(
    counts: Counter[Hashable], wanted: Collection[Hashable], test: str, min_rows: int, too_few: str
) -> tuple[list[Hashable], list[str]]:
    """The groups of a test table that have too few train rows, and a note where they seem to be misspelled.

    Raises `ValueError` where such groups are an error.
    """
    few = [group for group in wanted if counts[group] < min_rows]
    twins = _twins(few, counts)
    if few and too_few == "error":
        listed = ", ".join(f"{group!r} ({counts[group]})" for group in few[:10])
        raise ValueError(
            f"{len(few)} of {len(wanted)} groups in {test} have fewer than {min_rows} train rows: {listed}"
            f"{', ...' if len(few) > 10 else ''}. {f'{twins}. ' if twins else ''}Say too_few='nan' (--too-few nan) to "
            "leave their predictions missing, or too_few='pooled' (--too-few pooled) to predict them from the train "
            "rows of all groups"
        )
    return few, [f"{test}: {twins}"] if twins else []


def _target_faults(train: Table, target: Hashable, y: Target, groups: Sequence[Hashable]) -> list[Fault]:
    """Cells of the target that are no finite numbers; of the empty ones, one a group."""
    place = f"{train.name}: target {target!r}"
    category = ", which is a category" if isinstance(train.frame[target].dtype, pd.CategoricalDtype) else ""
    odd = train.frame[target][y.not_numeric].tolist()  # Python's own types: numpy's repr would show np.True_
    faults = [
        Fault(0, int(row), f"{place} is not numeric (row {row + 1}: {value!r}{category})")
        for row, value in zip(np.flatnonzero(y.not_numeric), odd, strict=True)
    ]
    empty: dict[Hashable, list[int]] = {}
    for row in np.flatnonzero(np.isnan(y.y) & ~y.not_numeric).tolist():
        empty.setdefault(groups[row], []).append(row)
    for rows in empty.values():
        more = f" and in {len(rows) - 1} more" if len(rows) > 1 else ""
        faults.append(Fault(0, rows[0], f"{place} is missing (NaN) in row {rows[0] + 1}{more}; leave such rows out"))
    return faults + [
        Fault(0, int(row), f"{place} is infinite in row {row + 1}") for row in np.flatnonzero(np.isinf(y.y))
    ]


def _twins(few: Iterable[Hashable], known: Iterable[Hashable]) -> str:
    """Which groups with too few train rows differ from one in train only in how they are written; "" if none."""
    written = {_bare(group): group for group in known}
    twins = [f"{group!r} and {twin!r}" for group in few if (twin := written.get(_bare(group), group)) != group]
    if not twins:
        return ""
    more = f" (and {len(twins) - 3} more such pairs)" if len(twins) > 3 else ""
    return f"groups {'; '.join(twins[:3])}{more} of test and train differ only in how they are written"


def _bare(group: Hashable) -> Hashable:
    """A group's name without what may differ between two writings of it: 1 and 01.0, Nord and ' nord'."""
    text = "".join(str(group).split()).casefold()
    try:
        return str(Decimal(text).normalize())
    except InvalidOperation:
        return text
