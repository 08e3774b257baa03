"""What every source of datasets raises."""

from __future__ import annotations


class DatasetError(ValueError):
    """A dataset or suite that cannot be used; the message says what is wrong, where, and what to do."""
