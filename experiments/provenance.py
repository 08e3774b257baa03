"""Who ran what, and where: a line for each `oretrofit eval` that had cases to run in a folder.

It decides nothing: cases are used again whatever it says.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from .folders import append_line

FILE = "provenance.jsonl"
_PACKAGE = Path(__file__).resolve().parents[1]


def describe() -> dict[str, Any]:
    """This process: `started` (UTC), `command` as it was typed, git `revision` of the package, Python and machine."""
    return {
        "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "revision": git_revision(_PACKAGE),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
    }


def append_provenance(folder: Path) -> None:
    """Add this process to a run's folder. Raises `OSError`."""
    append_line(folder / FILE, json.dumps(describe()))


def read_provenance(folder: Path) -> list[dict[str, Any]]:
    """What is noted in a run's folder, oldest first; lines that cannot be read are left out, as nothing rests on them.

    Raises `OSError` for a file that is there and cannot be read.
    """
    found = []
    try:
        lines = (folder / FILE).read_bytes().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            content = json.loads(line.decode("utf-8"))
        except ValueError:
            continue
        if isinstance(content, dict):
            found.append(content)
    return found


def git_revision(folder: Path) -> str:
    """The commit that is checked out in a folder, and whether tracked files differ from it; in words if it has none."""

    def git(*words: str) -> str:
        found = subprocess.run(
            ["git", "-C", str(folder), *words], capture_output=True, text=True, check=True, timeout=10, errors="replace"
        )
        return found.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() != folder.resolve():
            return "not a git checkout"  # but in one: of whoever installed it
        changed = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "HEAD") + (", with changes" if changed else "")
    except FileNotFoundError:
        return "not known: there is no git"
    except (OSError, subprocess.SubprocessError):
        return "not a git checkout"


def _processor() -> str:
    """Its name, where the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
