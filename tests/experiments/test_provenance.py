"""Who ran what: written by `eval`, read back, and never in the way."""

from __future__ import annotations

import platform
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from oretrofit.experiments import provenance


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    found = subprocess.run(["git", "-C", str(folder), *who, *words], capture_output=True, text=True, check=True)
    return found.stdout.strip()


def test_the_revision_of_a_checkout(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q")
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-qm", "a")
    revision = git(tmp_path, "rev-parse", "HEAD")
    assert provenance.git_revision(tmp_path) == revision
    (tmp_path / "b").write_text("not tracked")
    assert provenance.git_revision(tmp_path) == revision
    (tmp_path / "a").write_text("2")
    assert provenance.git_revision(tmp_path) == f"{revision}, with changes"
    # Installed inside somebody's checkout, it has not their revision.
    (tmp_path / "site-packages").mkdir()
    assert provenance.git_revision(tmp_path / "site-packages") == "not a git checkout"


def test_no_checkout_and_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.git_revision(tmp_path) == "not a git checkout"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.git_revision(tmp_path) == "not known: there is no git"


def test_a_line_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert provenance.read_provenance(tmp_path) == []
    monkeypatch.setattr(sys, "argv", ["/some/where/bin/oretrofit", "eval", "--suite", "csv:my file.csv#y"])
    provenance.append_provenance(tmp_path)
    with (tmp_path / provenance.FILE).open("a") as file:
        file.write("broken\n[1]\n")
    provenance.append_provenance(tmp_path)
    first, second = provenance.read_provenance(tmp_path)
    assert first["command"] == second["command"] == "oretrofit eval --suite 'csv:my file.csv#y'"
    assert first["python"] == platform.python_version()
    age = datetime.now(timezone.utc) - datetime.fromisoformat(first["started"])
    assert timedelta(seconds=-1) <= age < timedelta(hours=1)
    assert str(tmp_path) not in (tmp_path / provenance.FILE).read_text()
