"""One writer for a folder, whatever becomes of it, and lines that are whole or not there."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oretrofit.experiments import folders
from oretrofit.experiments.folders import LOCK, FolderInUseError, append_line, held

HOLD = """
import sys, time
from pathlib import Path
from oretrofit.experiments.folders import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def holder(folder: Path) -> subprocess.Popen:
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


def test_the_second_writer_is_told_who_the_first_is(tmp_path: Path) -> None:
    with held(tmp_path):
        with pytest.raises(FolderInUseError, match=rf"in use by process {os.getpid()} on .+ since 2\d\d\d-.*--out"):
            with held(tmp_path):
                pytest.fail("two writers")
        with pytest.raises(FolderInUseError):  # the refusal has not freed it
            with held(tmp_path):
                pytest.fail("two writers")
    with held(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(tmp_path: Path, how: signal.Signals) -> None:
    process = holder(tmp_path)
    with pytest.raises(FolderInUseError, match=f"process {process.pid} "):
        with held(tmp_path):
            pytest.fail("two writers")
    process.send_signal(how)
    process.wait()
    assert (tmp_path / LOCK).exists()  # left behind, and free
    with held(tmp_path):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()


def test_a_lock_that_was_removed_in_between_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Its holder removes the file after the next one has opened it, and before that one locks it.
    lock = folders._lock
    opened: list[int] = []

    def late(descriptor: int, folder: Path) -> None:
        if not opened:
            (folder / LOCK).unlink()
        opened.append(descriptor)
        lock(descriptor, folder)

    monkeypatch.setattr(folders, "_lock", late)
    with held(tmp_path):
        assert len(opened) == 2
        monkeypatch.undo()
        with pytest.raises(FolderInUseError):
            with held(tmp_path):
                pytest.fail("two writers")


@pytest.mark.skipif(sys.platform == "win32", reason="fcntl")
def test_without_locks_one_goes_on_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="has no locks"):
        with held(tmp_path):
            pass


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="gone") as caught, held(tmp_path / "gone"):
        pass
    assert str(caught.value.filename).startswith(str(tmp_path / "gone"))


FULL = """
import resource, sys
from pathlib import Path
from oretrofit.experiments.folders import append_line
file = Path(sys.argv[1])
append_line(file, "a" * 50)
resource.setrlimit(resource.RLIMIT_FSIZE, (80, 80))  # as a disk with room for 29 bytes more
try:
    append_line(file, "b" * 50)
except OSError as error:
    print(error.filename)
append_line(file, "c" * 10)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no such limit")
def test_a_line_that_does_not_fit_is_not_there_at_all(tmp_path: Path) -> None:
    file = tmp_path / "lines"
    found = subprocess.run([sys.executable, "-c", FULL, str(file)], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == str(file)
    assert file.read_text() == "a" * 50 + "\n" + "c" * 10 + "\n"


def test_lines_are_appended(tmp_path: Path) -> None:
    append_line(tmp_path / "lines", "one")
    append_line(tmp_path / "lines", "zwölf")
    assert (tmp_path / "lines").read_text(encoding="utf-8") == "one\nzwölf\n"
