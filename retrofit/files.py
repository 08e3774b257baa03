"""Files that are written whole or not at all: beside their place, then renamed."""

from __future__ import annotations

import errno
import json
import math
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a path beside `path`, with the same suffix, to write; rename it to `path` when the block succeeds.

    Otherwise what was written is removed, and an earlier file at `path` stays as it was. A link stays a link, and
    what is no regular file, such as /dev/stdout, is written to as it is.

    Raises:
        OSError: With `path` as its `filename`, for whatever could not be created, written or renamed.
    """
    place = path.resolve()
    if _is_special(path):  # resolved, a pipe has no path
        with _naming(path):
            yield path
        return
    part = place.with_name(f".{place.stem[:40]}.{secrets.token_hex(4)}.part{place.suffix}")
    with _naming(path, part):
        try:
            _create(part, place)
            yield part
            with part.open("rb+") as file:
                os.fsync(file.fileno())  # some file systems say only now that they are full
            if place.exists():
                part.chmod(place.stat().st_mode)
            part.replace(place)
        except BaseException:
            part.unlink(missing_ok=True)
            raise


def write_text(path: Path, text: str) -> None:
    """Write `text` in UTF-8 to `path`, whole or not at all. Raises as of `replacing`."""
    with replacing(path) as part:
        part.write_text(text, encoding="utf-8")


def write_json(content: Any, file: Path) -> None:
    """Write JSON, whole or not at all; what is no finite number becomes null.

    Raises `OSError`, with the file's name, if it cannot be written.
    """
    write_text(file, json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def write_rows(frame: pd.DataFrame, file: Path) -> None:
    """`write_json` of a table, as a list of rows."""
    write_json(frame.to_dict("records"), file)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def check_writable(*paths: Path | None) -> None:
    """Raise `OSError` for a path that `replacing` could not write, before work is put into its content."""
    for path in paths:
        if path is not None and not _is_special(path):
            place = path.resolve()
            part = place.with_name(f".{place.stem[:40]}.{secrets.token_hex(4)}.part")
            with _naming(path, part):
                _create(part, place)
                part.unlink()


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file() and not path.is_dir()


def _create(part: Path, place: Path) -> None:
    if place.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(part))
    if place.exists() and not os.access(place, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(part))
    part.open("xb").close()


@contextmanager
def _naming(path: Path, part: Path | None = None) -> Iterator[None]:
    """Make an `OSError` about `part`, or about no file in particular, one about `path`."""
    try:
        yield
    except OSError as error:
        if error.filename is not None and str(error.filename) not in (str(part), str(path)):
            raise
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
