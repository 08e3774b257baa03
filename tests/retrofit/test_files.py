"""Files are written whole or not at all, and what could not be written is named."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from oretrofit.retrofit.files import check_writable, replacing, write_text

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writes_and_overwrites(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    write_text(file, "één")
    write_text(file, "zwei")
    assert file.read_text(encoding="utf-8") == "zwei"
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]


def test_the_path_to_write_is_beside_and_ends_alike(tmp_path: Path) -> None:
    with replacing(tmp_path / "a.csv") as part:
        assert (part.parent, part.suffix) == (tmp_path, ".csv")
        with replacing(tmp_path / "a.csv") as other:  # two writers do not meet
            assert other != part
            other.write_text("other")
        part.write_text("part")
    assert (tmp_path / "a.csv").read_text() == "part"


@pytest.mark.parametrize("error", [FULL, ValueError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_the_earlier_file(tmp_path: Path, error: BaseException) -> None:
    file = tmp_path / "a.csv"
    file.write_text("earlier")
    with pytest.raises(type(error)) as raised, replacing(file) as part:
        part.write_text("half")
        raise error
    assert file.read_text() == "earlier"
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    if error is FULL:
        assert isinstance(raised.value, OSError)
        assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, str(file))
        assert raised.value.strerror == os.strerror(errno.ENOSPC)
    else:
        assert raised.value is error


def test_errors_of_other_files_keep_their_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised, replacing(tmp_path / "a.csv"):
        (tmp_path / "other.csv").read_text()
    assert raised.value.filename == str(tmp_path / "other.csv")


@pytest.mark.parametrize("write", [lambda path: write_text(path, "x"), check_writable])
def test_what_cannot_be_written_is_named(tmp_path: Path, write) -> None:
    (tmp_path / "file").write_text("")
    for path, kind in ((tmp_path / "missing" / "a.csv", FileNotFoundError), (tmp_path, IsADirectoryError)):
        with pytest.raises(kind) as raised:
            write(path)
        assert raised.value.filename == str(path)
    with pytest.raises(NotADirectoryError) as raised:
        write(tmp_path / "file" / "a.csv")
    assert raised.value.filename == str(tmp_path / "file" / "a.csv")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_read_only_file_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.csv"
    file.write_text("earlier")
    monkeypatch.setattr(os, "access", lambda path, mode: path != file)  # root may write everything
    for write in (lambda path: write_text(path, "x"), check_writable):
        with pytest.raises(PermissionError) as raised:
            write(file)
        assert raised.value.filename == str(file)
    assert file.read_text() == "earlier"


def test_checking_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("earlier")
    check_writable(tmp_path / "a.csv", None, tmp_path / "b.csv", Path(os.devnull))
    assert [path.name for path in tmp_path.iterdir()] == ["a.csv"]
    assert (tmp_path / "a.csv").read_text() == "earlier"


def test_links_and_permissions_stay(tmp_path: Path) -> None:
    (tmp_path / "real.csv").write_text("earlier")
    (tmp_path / "real.csv").chmod(0o640)
    (tmp_path / "link.csv").symlink_to("real.csv")
    write_text(tmp_path / "link.csv", "new")
    assert (tmp_path / "link.csv").is_symlink()
    assert (tmp_path / "real.csv").read_text() == "new"
    assert (tmp_path / "real.csv").stat().st_mode & 0o777 == 0o640
    write_text(tmp_path / "fresh.csv", "new")
    (tmp_path / "plain.csv").write_text("")
    assert (tmp_path / "fresh.csv").stat().st_mode == (tmp_path / "plain.csv").stat().st_mode


def test_what_is_no_file_is_written_to(tmp_path: Path) -> None:
    write_text(Path(os.devnull), "x")
    assert not Path(os.devnull).is_file() and Path(os.devnull).exists()
