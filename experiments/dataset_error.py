"""What the sources of datasets raise."""

from __future__ import annotations


class DatasetError(ValueError):
    """A dataset or suite that cannot be used; the message says what is wrong, where, and what to do."""


class Unavailable(DatasetError):
    """One that might be had another time."""
