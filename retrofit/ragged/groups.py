"""`predict_groups`: one long table, of which every group is predicted from its own rows."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import pandas as pd

from ..columns import Table, listed, take
from ..long_table import LongTable, read_groups
from .predicting import QUANTILES, Retrofitted, TableError, check_closed, predict_ragged
from .report import RaggedReport, Tally

POOLED = "(pooled)"

_POINTS = ("mean", "median", "mode")


class _Part(NamedTuple):
    """A table to be: what it is called, the positions of its train rows (None: all) and of its test rows."""

    group: Hashable
    train: np.ndarray | None
    test: np.ndarray


@overload
def predict_groups(
    retrofit: Retrofitted,
    train: pd.DataFrame,
    test: pd.DataFrame,
    *,
    target: str,
    by: str,
    return_report: Literal[False] = False,
    **settings: Any,
) -> pd.Series | pd.DataFrame: ...


@overload
def predict_groups(
    retrofit: Retrofitted,
    train: pd.DataFrame,
    test: pd.DataFrame,
    *,
    target: str,
    by: str,
    return_report: Literal[True],
    **settings: Any,
) -> tuple[pd.Series | pd.DataFrame, RaggedReport]: ...


def predict_groups(
    retrofit: Retrofitted,
    train: pd.DataFrame,
    test: pd.DataFrame,
    *,
    target: str,
    by: str,
    output_type: str = "mean",
    quantiles: list[float] | None = None,
    min_rows: int = 2,
    too_few: str = "error",
    return_report: bool = False,
    **settings: Any,
) -> pd.Series | pd.DataFrame | tuple[pd.Series | pd.DataFrame, RaggedReport]:
    """Predict every group of one long table from its own train rows, like so many tables of their own.

    Args:
        retrofit: Of the variant `closed`. As a method, the retrofit itself.
        train: Group, target and features. Groups that have no rows in `test` play no part but in `pooled`.
        test: Group and the same features, in any order; a target column is left aside.
        target: The column to predict.
        by: The column that names the group (a store, a series, a patient). It is no feature.
        output_type: `mean`, `median`, `mode`, `quantiles`, or `main` for all of these.
        quantiles: As of `TabPFNRegressor.predict`.
        min_rows: How many train rows a group needs, 2 at least.
        too_few: What becomes of the test rows of groups with fewer (or no) train rows: `error` names
            these groups; `nan` leaves their predictions missing; `pooled` predicts them from the train
            rows of all groups as one table.
        return_report: Also return what was done. Its errors are keyed by group, `(pooled)` for the pooled one,
            and with `too_few="nan"` name the groups left out, too.
        settings: As of `predict_ragged`, `TabPFNRegressor`'s options included. With `on_error="skip"` the
            predictions of a bad group are missing. `categorical_features_indices` count the columns of
            `train` without target and group.

    Returns:
        In the order and with the index of `test`, a Series called `target`; for `quantiles` a DataFrame
        with a column for each, and for `main` one with `mean`, `median` and `mode` before them. With
        `return_report` that, and a `RaggedReport`.

    Raises:
        ValueError: As of `predict_ragged`; a group that cannot be predicted; a column that is missing
            from `train` or `test`, rows without a group, a group column that is different in every row
            of `train` or text in only one of the two, or, with `too_few="error"`, groups with too few train rows.
    """
    _check_settings(output_type, quantiles, min_rows, too_few)
    check_closed(retrofit)
    features = check_groups(train, test, target=target, by=by)
    table = read_groups(
        Table("train", train),
        Table("test", test),
        features,
        target=target,
        by=by,
        min_rows=min_rows,
        too_few=too_few,
        skip=settings.get("on_error") == "skip",
    )
    for note in table.notes:
        warnings.warn(note, stacklevel=2)
    frame, report = predict_long(
        retrofit, table, output_type=output_type, quantiles=quantiles, min_rows=min_rows, too_few=too_few, **settings
    )
    found = frame if output_type in ("main", "quantiles") else pd.Series(frame.iloc[:, 0], name=target)
    return (found, report) if return_report else found


def predict_long(
    retrofit: Retrofitted,
    table: LongTable,
    *,
    output_type: str,
    quantiles: list[float] | None,
    min_rows: int = 2,
    too_few: str = "error",
    **settings: Any,
) -> tuple[pd.DataFrame, RaggedReport]:
    """`predict_groups` of a table that has been read: a column for each answer, and what was done."""
    parts, few = _cut(table, min_rows, too_few)
    features = list(table.kinds)
    X_train, y_train, X_test = table.train[features], table.train[table.target], table.test[features]
    tables = [
        (X_train, y_train, X_test.iloc[part.test])
        if part.train is None
        else (take(X_train, part.train), y_train.iloc[part.train], take(X_test, part.test))
        for part in parts
    ]
    settings = table.options(settings)
    answers, report = _predict_parts(retrofit, parts, tables, output_type=output_type, quantiles=quantiles, **settings)
    frame = _as_frame(answers, parts, X_test.index, output_type, QUANTILES if quantiles is None else quantiles)
    failed = {_plain(parts[index].group): reason for index, reason in report.errors.items()}
    return frame, dataclasses.replace(report, errors=table.faulty | failed | few)


def check_groups(
    train: pd.DataFrame, test: pd.DataFrame, *, target: str, by: str, names: tuple[str, str] = ("train", "test")
) -> list[Hashable]:
    """The features: what train has beside target and group. `names` is what messages call the two.

    Raises `ValueError` as of `predict_groups`.
    """
    for name, column in (("by", by), ("target", target)):
        if not isinstance(column, Hashable):
            raise ValueError(f"{name} is the name of one column, not {column!r}")
    if target == by:
        raise ValueError(f"{target!r} cannot be both target and group")
    for name, frame in zip(names, (train, test), strict=True):
        if not isinstance(frame, pd.DataFrame):
            raise ValueError(f"{name} is a DataFrame, not a {type(frame).__name__}")
        if frame.empty:
            raise ValueError(f"{name} has no rows")
        if frame.columns.has_duplicates:
            raise ValueError(f"{name} has several columns called {frame.columns[frame.columns.duplicated()][0]!r}")
        if by not in frame.columns:
            raise ValueError(f"{name} has no group column {by!r}; its columns are {listed(frame.columns)}")
        if frame[by].dtype == np.float16:
            raise ValueError(f"{by!r} of {name} is float16, by which pandas cannot group; store it as float32 or text")
        if frame[by].isna().any():
            first = int(frame[by].isna().to_numpy().argmax()) + 1
            raise ValueError(f"{frame[by].isna().sum()} rows of {name} have no group in {by!r}, such as row {first}")
        if not all(isinstance(group, Hashable) for group in frame[by]):
            raise ValueError(f"{by!r} of {name} holds values that cannot name a group, such as {frame[by].iloc[0]!r}")
    if target not in train.columns:
        raise ValueError(
            f"{names[0]} has no target column {target!r}; its columns are {listed(train.columns.drop(by))}"
        )
    if len(train) > 1 and train[by].is_unique:
        raise ValueError(f"every row of {names[0]} is a group of its own: {by!r} names rows, not groups")
    text = [{isinstance(group, str) for group in frame[by].unique()} for frame in (train, test)]
    if text in ([{True}, {False}], [{False}, {True}]):
        kinds = f"{train[by].dtype} in {names[0]} and {test[by].dtype} in {names[1]}"
        raise ValueError(f"no group of {names[1]} is in {names[0]}: {by!r} is {kinds}")
    return check_features(train.columns, test.columns, target=target, by=by, names=names)


def check_features(
    train: Iterable[Hashable],
    test: Iterable[Hashable],
    *,
    target: Hashable,
    by: Hashable,
    names: tuple[str, str] = ("train", "test"),
) -> list[Hashable]:
    """The features, to go by the columns' names. Raises `ValueError` unless train and test have the same."""
    features = [column for column in train if column not in (target, by)]
    if not features:
        raise ValueError(f"{names[0]} has no columns beside {target!r} and {by!r} to predict from")
    others = set(test) - {target, by}
    missing = [column for column in features if column not in others]
    extra = sorted(others - set(features), key=str)
    if missing or extra:
        lacks = [f"lacks columns that {names[0]} has: {listed(missing)}"] if missing else []
        has = [f"has columns that {names[0]} lacks: {listed(extra)}"] if extra else []
        raise ValueError(f"{names[1]} {', and '.join(lacks + has)}")
    return features


def _check_settings(output_type: str, quantiles: list[float] | None, min_rows: int, too_few: str) -> None:
    if output_type not in (*_POINTS, "quantiles", "main"):
        raise ValueError(f"output_type is mean, median, mode, quantiles or main for groups, not {output_type!r}")
    if too_few not in ("error", "nan", "pooled"):
        raise ValueError(f"too_few is 'error', 'nan' or 'pooled', not {too_few!r}")
    if min_rows < 2:
        raise ValueError(f"TabPFN needs two train rows at least, so min_rows cannot be {min_rows}")
    if output_type == "quantiles" and quantiles is not None and not len(quantiles):
        raise ValueError("quantiles is empty")


def _cut(table: LongTable, min_rows: int, too_few: str) -> tuple[list[_Part], dict[Any, str]]:
    """The tables to predict, and with `too_few="nan"` what is wrong with each group that has none."""
    rows_of, wanted = _rows_by_group(table.train[table.by]), _rows_by_group(table.test[table.by])
    known = {group: len(rows_of.get(group, ())) for group in wanted if group not in table.faulty}
    few = [group for group, rows in known.items() if rows < min_rows]
    parts = [_Part(group, rows_of[group], wanted[group]) for group, rows in known.items() if rows >= min_rows]
    if few and too_few == "pooled":
        parts.append(_Part(POOLED, None, np.sort(np.concatenate([wanted[group] for group in few]))))
        few = []
    return parts, {_plain(group): f"train rows: {known[group]}; at least {min_rows} are needed" for group in few}


def _rows_by_group(groups: pd.Series) -> dict[Hashable, np.ndarray]:
    """Positions of each group's rows, groups as they first appear."""
    groups = groups.reset_index(drop=True)  # its index may have the name of the column
    return groups.groupby(groups, sort=False, observed=True).indices


def _predict_parts(
    retrofit: Retrofitted, parts: Sequence[_Part], tables: Sequence[tuple[Any, Any, Any]], **settings: Any
) -> tuple[list[Any], RaggedReport]:
    """`predict_ragged`, where there is anything to predict, with a bad table called by its group."""
    if not tables:
        return [], Tally().report(0, {})
    try:
        return predict_ragged(retrofit, *map(list, zip(*tables, strict=True)), return_report=True, **settings)
    except TableError as error:
        raise ValueError(f"group {_plain(parts[error.index].group)!r}: {error.reason}") from error.__cause__


def _as_frame(
    answers: Sequence[Any], parts: Sequence[_Part], index: pd.Index, output_type: str, levels: Sequence[float]
) -> pd.DataFrame:
    """Each part's answer at its test rows; missing where there is none."""
    points = {"main": list(_POINTS), "quantiles": []}.get(output_type, [output_type])
    columns = [*points, *(levels if output_type in ("main", "quantiles") else [])]
    values = np.full((len(index), len(columns)), np.nan)
    for part, answer in zip(parts, answers, strict=True):
        if isinstance(answer, Mapping):
            answer = [answer[point] for point in points] + list(answer["quantiles"])
        if answer is not None:
            values[part.test] = np.asarray(answer).reshape(len(columns), -1).T
    return pd.DataFrame(values, index=index, columns=columns)


def _plain(group: Any) -> Any:
    """The name of a group as Python's own kind of number."""
    return group.item() if isinstance(group, np.generic) else group
