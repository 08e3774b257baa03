"""What MkDocs is told beyond mkdocs.yml: files of the repository outside docs/, and the reference of the commands.

A page here links to such a file as `../path`, which is right where the repository is browsed; in the site it is a copy.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]

# Files that are pages of the site; any other is copied as it is.
PAGES = {"retrofit/hosts/README.md": "host-card.md", "experiments/data/README.md": "bundled-tables.md"}

_LINK = re.compile(r"\]\(\.\./([^)#]+)")


def on_config(config: Any) -> None:
    """Put pages that mkdocs.yml does not place at the end of the how-tos."""
    placed = str(config.nav)
    how_to = next(entry["How to"] for entry in config.nav if isinstance(entry, dict) and "How to" in entry)
    names = (page.name for page in sorted(Path(config.docs_dir).glob("*.md")))
    how_to += [name for name in names if f"'{name}'" not in placed]


def on_files(files: Files, config: Any) -> Files:
    """Add what pages link to outside docs/."""
    linked = {path for page in Path(config.docs_dir).glob("*.md") for path in _LINK.findall(page.read_text("utf-8"))}
    for path in sorted(linked | PAGES.keys()):
        if (ROOT / path).is_file():  # or the link stays as it is, and the strict build says where
            files.append(File.generated(config, _place(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to the repository into links to its copies, and put the commands in their place."""
    if page.file.src_uri == "reference/commands.md":
        return markdown + _commands()
    return _LINK.sub(lambda found: f"]({_place(found[1])}" if (ROOT / found[1]).is_file() else found[0], markdown)


def _place(path: str) -> str:
    """Where a file of the repository is in the site; a Markdown file that is no page would become one."""
    return PAGES.get(path, f"repository/{path}")


def _commands() -> str:
    """What `--help` says of every command, as Typer writes it."""
    command = [sys.executable, "-m", "typer", "oretrofit.cli", "utils", "docs", "--name", "oretrofit"]
    text = subprocess.run(command, check=True, capture_output=True, encoding="utf-8").stdout
    _, _, text = text.partition("**Commands**:")
    _, heading, text = text.partition("\n## ")  # the list above it cuts its lines short
    text = re.sub(r"<span style=\"font-weight: bold\">(.*?)</span>", r"`\1`", text)
    return heading + re.sub(r"^Example: \[b\](.*?)\[/b\]", r"Example:\n\n```sh\n\1\n```", text, flags=re.MULTILINE)
