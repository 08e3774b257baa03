"""The documentation builds strictly, and its reference has every public name."""

from __future__ import annotations

import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path

import pytest

import oretrofit
from oretrofit import patches

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


def documented(site: Path) -> set[str]:
    """The names in the site's inventory, as other projects' documentation reads it: four lines, then zlib."""
    content = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    return {line.split(" ", 1)[0] for line in zlib.decompress(content).decode().splitlines()}


def undocumented(site: Path) -> set[str]:
    names = {f"oretrofit.{name}" for name in oretrofit.__all__} | {
        f"oretrofit.patches.{name}" for name in patches.__all__
    }
    methods = {"oretrofit.Retrofit.save", "oretrofit.RetrofitRegressor.predict"}
    return (names | methods) - documented(site)


def test_every_public_name_is_in_the_reference(site):
    assert undocumented(site) == set()


def test_a_name_that_is_missing_is_found(site, monkeypatch):
    monkeypatch.setattr(oretrofit, "__all__", [*oretrofit.__all__, "brand_new"])
    assert undocumented(site) == {"oretrofit.brand_new"}


def test_every_command_is_in_the_reference(site):
    page = (site / "reference/commands.html").read_text(encoding="utf-8")
    for command in ("patch", "eval", "predict", "bench ragged", "pretrain"):
        assert f"oretrofit {command}" in page
    assert "[b]" not in page


class Sources(HTMLParser):
    """What a page loads: pictures, scripts, styles."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("img", "script") and given.get("src"):
            self.found.append(given["src"] or "")
        if tag == "link" and given.get("rel") == "stylesheet":
            self.found.append(given["href"] or "")


def test_pages_load_what_is_in_the_site_and_nothing_else(site):
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    pictures = 0
    for page in pages:
        sources = Sources()
        sources.feed(page.read_text(encoding="utf-8"))
        for source in sources.found:
            assert not source.startswith(("http:", "https:", "//")), f"{page.name} loads {source}"
            assert (page.parent / source.partition("?")[0]).resolve().is_file(), f"{page.name}: {source}"
            pictures += source.endswith((".png", ".svg"))
    assert pictures >= 5
