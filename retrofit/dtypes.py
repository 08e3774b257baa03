"""What a column is by its type, whatever library made it: numbers, dates, categories, or text yet to be read."""

from __future__ import annotations

import datetime
import math
import reprlib
from collections.abc import Callable
from decimal import Decimal
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa

from . import notations

_NUMBER = (Real, Decimal, np.bool_)
_DATE = (datetime.date, np.datetime64)  # a datetime and a Timestamp are a date
_DURATION = (datetime.timedelta, np.timedelta64)
_SCALARS = (str, *_NUMBER, *_DATE, *_DURATION, datetime.time)


class Typed(NamedTuple):
    """A column by its type.

    Attributes:
        kind: `numbers`, `dates` (datetime64), `categories`, `text` (str), or `nothing` where no cell is filled.
        values: Its cells.
        plain: Of numbers, whether they are none of truth values, times of day and durations (in seconds).
    """

    kind: str
    values: pd.Series
    plain: bool = True


def typed(values: pd.Series, place: str) -> Typed:
    """What a column is by its type. `place` is what messages call it; rows are counted from 0 in the index.

    Raises `ValueError` for values that are neither numbers, dates, categories nor text.
    """
    dtype = values.dtype
    if values.isna().all():
        return Typed("nothing", pd.Series(np.nan, index=values.index, dtype=np.float64))
    if isinstance(dtype, pd.CategoricalDtype):
        return _typed_categories(values, place)
    if isinstance(dtype, pd.ArrowDtype):
        try:
            return typed(pa.array(values, from_pandas=True).to_pandas(), place)
        except pa.ArrowException:
            raise _refusal(place, str(dtype), values) from None
    if isinstance(dtype, pd.SparseDtype):
        return typed(pd.Series(np.asarray(values)), place)
    if isinstance(dtype, pd.PeriodDtype):
        return Typed("dates", values.dt.to_timestamp())
    if pd.api.types.is_complex_dtype(dtype):
        raise _refusal(place, "complex numbers", values)
    if pd.api.types.is_numeric_dtype(dtype):
        usual = isinstance(dtype, np.dtype) and dtype != np.float16
        return Typed("numbers", values if usual else floats(values), not pd.api.types.is_bool_dtype(dtype))
    if pd.api.types.is_datetime64_any_dtype(dtype):
        return Typed("dates", values)
    if pd.api.types.is_timedelta64_dtype(dtype):
        return Typed("numbers", values.dt.total_seconds(), plain=False)
    if isinstance(dtype, pd.StringDtype):
        return Typed("text", values.astype(object))
    if pd.api.types.is_object_dtype(dtype):
        return _typed_objects(values, place)
    raise _refusal(place, str(dtype), values)


def _typed_objects(values: pd.Series, place: str) -> Typed:
    """A column of Python objects, by their types; of several types it is text."""
    cells = values.dropna()
    types = set(map(type, cells))

    def all_are(kinds: type | tuple[type, ...]) -> bool:
        return all(issubclass(kind, kinds) for kind in types)

    def each(convert: Callable[[Any], Any]) -> pd.Series:
        return pd.Series([convert(cell) for cell in cells], index=cells.index, dtype=np.float64).reindex(values.index)

    if all_are(str):
        return Typed("text", values)
    if all_are(_DURATION):  # numpy's count as integers, too
        return Typed("numbers", each(lambda cell: pd.Timedelta(cell).total_seconds()), plain=False)
    if all_are(_NUMBER):
        return Typed("numbers", each(_float), not all_are((bool, np.bool_)))
    if all_are(pd.Period):
        return Typed("dates", pd.Series(pd.PeriodIndex(values).to_timestamp(), index=values.index))
    if all_are(datetime.time):
        seconds = each(lambda t: 3600 * t.hour + 60 * t.minute + t.second + t.microsecond / 1e6)
        return Typed("numbers", seconds, plain=False)
    if all_are(_DATE):
        aware = [getattr(cell, "tzinfo", None) is not None for cell in cells]
        if any(aware) and not all(aware):
            with_offset, without = (f"row {cells.index[aware.index(kind)] + 1}" for kind in (True, False))
            raise ValueError(f"{place}: {with_offset} has an offset from UTC, and {without} has none; write all alike")
        try:
            try:
                return Typed("dates", pd.to_datetime(values))
            except ValueError:  # several offsets from UTC
                return Typed("dates", pd.to_datetime(values, utc=True))
        except ValueError as error:
            raise ValueError(f"{place} cannot be read as dates: {error}") from error
    if all_are(_SCALARS):
        return Typed("text", values.map(as_text, na_action="ignore"))
    odd = cells[[not isinstance(cell, _SCALARS) for cell in cells]]
    raise _refusal(place, f"values of the type {type(odd.iloc[0]).__name__}", odd)


def _typed_categories(values: pd.Series, place: str) -> Typed:
    """Categories stay what they were declared to be, but dates, truth values and the like are what they are."""
    categories = values.cat.categories
    if isinstance(categories.dtype, pd.IntervalDtype):
        return Typed("categories", values.cat.rename_categories(categories.astype(str)))
    try:
        side = typed(pd.Series(categories), place)
    except ValueError:
        raise _refusal(place, f"categories of the type {type(categories[0]).__name__}", values) from None
    spelled_dates = side.kind == "text" and notations.dates(list(side.values)).notna().all()
    declared = side.kind == "text" or (pd.api.types.is_numeric_dtype(categories.dtype) and side.plain)
    if declared and not spelled_dates:
        return Typed("categories", values)
    known = floats(side.values) if side.kind == "numbers" else side.values
    cells = known.array.take(values.cat.codes.to_numpy(), allow_fill=True)
    return Typed(side.kind, pd.Series(cells, index=values.index), side.plain)


def _refusal(place: str, what: str, values: pd.Series) -> ValueError:
    row = values.first_valid_index()
    return ValueError(
        f"{place} holds {what} (row {row + 1}: {reprlib.repr(values[row])}), which are neither numbers, dates "
        "nor text: leave it out, or make it one of these"
    )


def _float(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an int may have any length
        return math.inf if number > 0 else -math.inf


def floats(values: pd.Series) -> pd.Series:
    """Numbers of any type as float64, NaN where they are missing."""
    return pd.Series(values.to_numpy(np.float64, na_value=np.nan), index=values.index)


def as_text(value: Any) -> str:
    """A value as a CSV file would have it, whole numbers without a point."""
    if isinstance(value, _NUMBER) and not isinstance(value, (bool, np.bool_, *_DURATION)):
        return str(int(value)) if np.isfinite(float(value)) and value == int(value) else str(value)  # type: ignore[arg-type]
    return str(value)
