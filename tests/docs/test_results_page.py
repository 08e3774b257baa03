"""What docs and README quote is what the files in results/ say."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pandas as pd
import pytest

from oretrofit.experiments import results_page
from oretrofit.retrofit.hosts import load_host

ROOT = Path(__file__).parents[2]


def test_the_committed_pages_say_what_the_files_say(capsys):
    assert results_page.main(["--check"]) == 0, capsys.readouterr().err


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """The pages and the files they are made of, to be changed."""
    for name in ("results", "docs"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "README.md", tmp_path)
    monkeypatch.setattr(results_page, "ROOT", tmp_path)
    monkeypatch.setattr(results_page, "RESULTS", tmp_path / "results")
    return tmp_path


def test_a_figure_that_differs_from_its_file_fails(copy, capsys):
    file = copy / "results/ragged-small-200.json"
    content = json.loads(file.read_text())
    content["parallel_loop"]["ragged_speedup"] = 7.25
    file.write_text(json.dumps(content))
    assert results_page.main(["--check"]) == 1
    said = capsys.readouterr().err
    assert "README.md" in said
    assert "docs/results.md" in said
    assert results_page.main([]) == 0
    assert results_page.main(["--check"]) == 0
    page = copy / "docs/results.md"
    page.write_text(page.read_text().replace(" : ", " : 1", 1))  # typed into a page
    assert results_page.main(["--check"]) == 1
    assert "7.25 times as fast" in (copy / "README.md").read_text()
    assert "| 7.25 |" in page.read_text()


def test_what_is_quoted_is_of_the_bundled_host():
    bundled = {"name": "small", "sha256": load_host("small").sha256}
    for name in (results_page.QUOTED, "eval-float32", "eval-closed"):
        assert results_page.read(f"{name}/settings.json")["host"] == bundled, name
    assert results_page.read("removal.json")["settings"]["host"] == bundled
    for name in ("frontier.json", "frontier-mini.json"):
        assert {row["host_sha256"] for row in results_page.read(name)} == {bundled["sha256"]}, name


def test_an_evaluation_of_an_earlier_host_says_so(copy):
    file = copy / "results/eval-closed/settings.json"
    settings = json.loads(file.read_text())
    settings["host"]["sha256"] = "0123456789abcdef" * 4
    file.write_text(json.dumps(settings))
    assert results_page.conditions("eval-closed").startswith(
        "An earlier small model of this project (SHA-256 0123456789ab; *not* Prior Labs' model); 6 tables"
    )


def test_what_is_added_finds_its_place_and_what_is_missing_is_left_out(copy):
    results = copy / "results"
    shutil.copytree(results / "eval-closed", results / "eval-of-mine")
    (results / "removal.json").unlink(missing_ok=True)
    samples = [[0, 150, 600, 610], [60, 160, 620, 615], [120, 155, 621, 622]]
    peaks = {"groups": 10, "rows": 200, "worker, peak MiB": 622.4, "scheduler, peak MiB": 160.0, "samples": samples}
    (results / "cluster-memory.json").write_text(json.dumps([peaks]))
    pages = results_page.pages()
    assert "### eval-of-mine" in pages["docs/results.md"]
    assert "really removed" not in pages["docs/results.md"]
    assert "| 10 | 200 | 622 | 160 |" in pages["docs/cluster.md"]
    assert "| worker, peak so far | 610 | 610 | 620 | 620 | 622 | 622 |" in pages["docs/cluster.md"]


def test_the_readme_takes_the_larger_suite_where_there_is_one(copy):
    shutil.copytree(copy / "results/eval-closed", copy / "results/eval-rdata-float32", dirs_exist_ok=True)
    block = results_page.readme_results()
    assert "`closed`" in block
    assert "`oa`" not in block


def test_the_strip_counts_cases():
    rows = pd.DataFrame({"variant": ["a"] * 5 + ["b"] * 12, "rmse_delta_pct": [-2.0, 0, 0, 0.02, 2.0, *[1.0] * 12]})
    scale, a, b = results_page.strip(rows)
    middle = 10 + results_page._STRIP
    assert (scale[middle], a[10], a[middle], a[-1]) == ("0", "1", "3", "1")
    assert a.count("·") == 2 * results_page._STRIP - 2
    assert b[middle + results_page._STRIP // 2] == "#"
    assert len(a) == len(b)


def test_results_holds_nothing_that_make_results_does_not_measure():
    recipe = (ROOT / "Makefile").read_text()
    for place in sorted((ROOT / "results").iterdir()):
        assert re.search(rf"\$\(R\)/{re.escape(place.name)}\b", recipe), f"no line of `make results` makes {place.name}"


def test_the_readme_is_short_and_has_no_picture_that_breaks_elsewhere():
    readme = (ROOT / "README.md").read_text()
    assert len(readme.splitlines()) <= 150
    assert re.findall(r"!\[[^]]*\]\((?!https://)|<img", readme) == []
