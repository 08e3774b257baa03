"""What a call in another process warns of, repeated in the caller."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")

# The message of a warning, and its category.
Caught = tuple[str, type[Warning]]


def recorded(function: Callable[..., Result], *arguments: Any) -> tuple[Result, list[Caught]]:
    """A function's result, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        result = function(*arguments)
    return result, [(str(warning.message), warning.category) for warning in caught]


def repeat(caught: Iterable[Caught], said: set[Caught]) -> None:
    """Warn of what is not among the `said`, and add it to them."""
    for message, category in caught:
        if (message, category) not in said:
            said.add((message, category))
            warnings.warn(message, category, stacklevel=3)
