"""Folders that are written to for hours: one writer, and lines that are appended whole or not at all."""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

LOCK = ".lock"

# A file system that knows no locks says one of these.
_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL}
_HELD = {errno.EAGAIN, errno.EACCES}


class FolderInUseError(ValueError):
    """A folder that another process writes to; the message says which, and since when."""


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Be the one writer of an existing folder, by a lock of the system that ends with the process, however that ends.

    Where there are no locks (some network file systems) warn, and go on.

    Raises:
        FolderInUseError: Another process is.
        OSError: The folder cannot be written to.
    """
    file = folder / LOCK
    while True:
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            _lock(descriptor, folder)
            if _is_at(descriptor, file):
                break
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # of a file that its last holder has removed since it was opened
    try:
        try:
            holder = {
                "pid": os.getpid(),
                "machine": socket.gethostname(),
                "since": f"{datetime.now():%Y-%m-%d %H:%M:%S}",
            }
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(holder).encode())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(file)) from error
        yield
    finally:
        with suppress(OSError):  # Windows removes no open file
            file.unlink()
        os.close(descriptor)


def append_line(file: Path, line: str) -> None:
    """Append a line and see it on disk; if that fails, leave the file as it was.

    Raises `OSError`, with the file's name.
    """
    data = line.encode() + b"\n"
    try:
        with file.open("ab", buffering=0) as out:
            before = out.tell()
            try:
                while data:
                    data = data[out.write(data) :]
                os.fsync(out.fileno())
            except OSError:
                out.truncate(before)
                raise
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file)) from error


def _lock(descriptor: int, folder: Path) -> None:
    try:
        if sys.platform == "win32":
            os.lseek(descriptor, 2**30, os.SEEK_SET)  # what is locked cannot be read, and the holder's name must be
            msvcrt.locking(descriptor, msvcrt.LK_NBLCK, 1)
            os.lseek(descriptor, 0, os.SEEK_SET)
        else:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise FolderInUseError(
                f"{folder} is in use by {_holder(descriptor)}; wait for it, end it, or choose another folder (--out)"
            ) from None
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(f"the file system of {folder} has no locks: let no second run write there", stacklevel=4)


def _is_at(descriptor: int, file: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(file))
    except FileNotFoundError:
        return False


def _holder(descriptor: int) -> str:
    try:
        os.lseek(descriptor, 0, os.SEEK_SET)
        found = json.loads(os.read(descriptor, 1000))
        return f"process {found['pid']} on {found['machine']} since {found['since']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
