"""What a call in another process warns of, repeated in the caller."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, TypeVar

Result = TypeVar("Result")

# A warning's message and category, and the file and line that it is of.
Caught = tuple[str, type[Warning], str, int]

# The messages and categories of those that have been repeated.
Said = set[tuple[str, type[Warning]]]


def recorded(function: Callable[..., Result], *arguments: Any) -> tuple[Result, list[Caught]]:
    """A function's result, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        result = function(*arguments)
    return result, [(str(each.message), each.category, each.filename, each.lineno) for each in caught]


def repeat(caught: Iterable[Caught], said: Said) -> None:
    """Warn of what is not among the `said`, and add it to them."""
    for message, category, file, line in caught:
        if (message, category) not in said:
            said.add((message, category))
            _warn(message, category, file, line)


def _warn(message: str, category: type[Warning], file: str, line: int) -> None:
    """Repeat a warning as if it were given here, where the same line may have given it before."""
    names = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    registry = next((each for each in names if each.get("__file__") == file), {}).setdefault("__warningregistry__", {})
    warnings.warn_explicit(message, category, file, line, registry=registry)
