"""How cells of text are read: as numbers, truth values, lengths of time, or dates.

Each function takes distinct cells and gives an array as long, with NaN or NaT where a cell is not written that way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

_EXPONENT = r"([eE][+-]?\d+)?"
_PLAIN = re.compile(rf"[+-]?(\d+\.?\d*|\.\d+){_EXPONENT}|[+-]?inf(inity)?", re.ASCII | re.IGNORECASE)
_THOUSANDS = re.compile(rf"[+-]?([1-9]\d{{0,2}}(,\d{{3}})+|\d+)(\.\d*)?{_EXPONENT}", re.ASCII)
_DECIMAL_COMMA = re.compile(rf"[+-]?(([1-9]\d{{0,2}}(\.\d{{3}})+|\d+)(,\d*)?|,\d+){_EXPONENT}", re.ASCII)
_TRUTH = {"true": 1.0, "false": 0.0}
_CLOCK = re.compile(r"([01]?\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?", re.ASCII)
_DURATION = re.compile(r"-?\d+ days?( [+-]?\d\d:\d\d:\d\d(\.\d+)?)?", re.ASCII)
_OFFSET = r"( ?(Z|[+-]\d\d(:?\d\d)?))?"
_DAY = re.compile(rf"\d{{4}}-\d{{1,2}}-\d{{1,2}}([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?{_OFFSET})?", re.ASCII)
_MONTH = re.compile(r"(18|19|20|21)\d\d-(0[1-9]|1[0-2])", re.ASCII)
_MONTH_NAME = r"(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*"
_OTHER_DATES = re.compile(
    r"(\d{1,2}([./-])\d{1,2}\2\d{4}|\d{4}([./])\d{1,2}\3\d{1,2}|\d{1,2}/\d{1,2}/\d\d)([ T]\d{1,2}:\d\d.*)?"
    r"|(0[1-9]|[12]\d|3[01])(?P<s>[.-])(0[1-9]|1[0-2])(?P=s)\d\d|(0?[1-9]|1[0-2])/(19|20)\d\d"
    r"|\d{4}-\d\d-\d\d\D*(\d\d:\d\d.*)?"
    rf"|(\w{{3,9}},? )?\d{{1,2}}[ .-]+{_MONTH_NAME}[ .,-]+\d{{2,4}}.*|{_MONTH_NAME}[ .-]+(\d{{1,2}},? )?\d{{4}}.*"
    r"|\d{4}[ -]?[WQ]\d{1,2}(-\d)?|Q\d[ -/]\d{4}",
    re.ASCII | re.IGNORECASE,
)


def plain(cells: Sequence[str]) -> np.ndarray:
    """Numbers as programs write them: -1.5e3."""
    return _numbers(cells, _PLAIN, float)


def thousands(cells: Sequence[str]) -> np.ndarray:
    """Numbers with commas between thousands: 12,345.6."""
    return _numbers(cells, _THOUSANDS, lambda cell: float(cell.replace(",", "")))


def decimal_comma(cells: Sequence[str]) -> np.ndarray:
    """Numbers with a decimal comma, and perhaps points between thousands: 12.345,6."""
    return _numbers(cells, _DECIMAL_COMMA, lambda cell: float(cell.replace(".", "").replace(",", ".")))


def truth(cells: Sequence[str]) -> np.ndarray:
    """True and False as 1 and 0."""
    return np.array([_TRUTH.get(cell.strip().lower(), np.nan) for cell in cells], dtype=np.float64)


def lengths_of_time(cells: Sequence[str]) -> np.ndarray:
    """Times of day and durations in seconds: 08:15, 2 days 08:15:00."""
    cells = [cell.strip() for cell in cells]
    spelled = [
        f"{cell}:00" if _CLOCK.fullmatch(cell) and cell.count(":") == 1 else cell
        for cell in (cell if _CLOCK.fullmatch(cell) or _DURATION.fullmatch(cell) else "" for cell in cells)
    ]
    seconds = pd.to_timedelta(pd.Series(spelled, dtype=object), errors="coerce").dt.total_seconds()
    return seconds.to_numpy(np.float64)


def dates(cells: Sequence[str]) -> pd.DatetimeIndex:
    """ISO dates, months and times: 2024-12-31, 2024-12, 2024-12-31T08:15:00+01:00.

    Times with different offsets from UTC are given in UTC, times with one offset as they are.
    """
    cells = [cell.strip() for cell in cells]
    spelled = pd.Series(
        [cell if _DAY.fullmatch(cell) or _MONTH.fullmatch(cell) else None for cell in cells], dtype="str"
    )
    try:
        return pd.DatetimeIndex(pd.to_datetime(spelled, format="ISO8601", errors="coerce"))
    except ValueError:  # several offsets
        return pd.DatetimeIndex(pd.to_datetime(spelled, format="ISO8601", errors="coerce", utc=True))


def has_offset(cell: str) -> bool:
    """Whether an ISO time says how far it is from UTC."""
    return re.search(r"\d[T ]\d.*(Z|[+-]\d\d(:?\d\d)?)$", cell.strip()) is not None


def looks_like_a_date(cell: str) -> bool:
    """Whether a cell is a date to a reader, but none of `dates`, as 31/12/2024, 5 May 2024 or 2024-12-31 08:15 UTC."""
    cell = cell.strip()
    return _OTHER_DATES.fullmatch(cell) is not None and _DAY.fullmatch(cell) is None


def begins_with_a_number(cell: str) -> bool:
    """Whether the first letter or digit of a cell is a digit, as in 12 kg, $3 or -5 %."""
    return re.match(r"[\W_]*\d", cell) is not None


def is_mark(cell: str) -> bool:
    """Whether a cell has neither letter nor digit, as ? or --, or is a spreadsheet's error, as #N/A!."""
    return cell.startswith("#") or not any(map(str.isalnum, cell))


def _numbers(cells: Sequence[str], pattern: re.Pattern[str], convert: Callable[[str], float]) -> np.ndarray:
    stripped = [cell.strip() for cell in cells]
    return np.array([convert(cell) if pattern.fullmatch(cell) else np.nan for cell in stripped], dtype=np.float64)
