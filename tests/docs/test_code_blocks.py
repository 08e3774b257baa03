"""Every block of code in the README, the docs and the docstrings is run, with small numbers; and so are the examples.

A block behind `<!-- not run: REASON -->` is only read: the command line knows its commands, and its Python compiles.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import typer
from sybil import Document, Example, Sybil
from sybil.document import PythonDocStringDocument
from sybil.evaluators.python import PythonEvaluator
from sybil.example import NotEvaluated
from sybil.parsers.markdown import CodeBlockParser
from typer.testing import CliRunner

from oretrofit import cli
from oretrofit.calibration.calibration import Calibration
from oretrofit.calibration.variants import VARIANTS
from oretrofit.patches.tabpfn_v3_host import TABPFN_V3

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
SOURCES = [ROOT / name for name in ("__init__.py", "retrofit/api.py", "retrofit/estimator.py")]

# What makes a command small; an option that is given twice counts as it was given last.
SMALL = {
    "patch": "--tables 1",
    "eval": "--seeds 1 --max-rows 30 --tables 1",
    "predict": "--device cpu",
    "audit": "--tables 1",
    "frontier": "--tables 1",
}
SMALL_EXAMPLES = {
    "panel.py": "--series 6",
    "removal.py": "--table diabetes --rows 30 --explained 3 --members 1 --permutations 1",
    "grid_search.py": "--rows 40 --folds 2",
    "many_groups.py": "--groups 6 --files 2",
}

_NOT_RUN = re.compile(r"<!-- not run: .+ -->\s*$")


def is_not_run(example: Example) -> bool:
    return bool(_NOT_RUN.search(example.document.text[: example.region.start]))


def run_python(example: Example) -> None:
    if is_not_run(example):
        compile(example.parsed, example.path, "exec")
    else:
        PythonEvaluator()(example)


def run_shell(example: Example) -> None:
    for words in commands_of(example.parsed):
        if words[:1] == ["oretrofit"]:
            parse(words[1:])
        if is_not_run(example):
            continue
        if words[0] == "oretrofit":
            run_oretrofit(words[1:])
        elif words[0] == "python":
            run_example(ROOT / words[1], words[2:])
        else:
            raise AssertionError(f"{example.path}:{example.line}: nobody runs {words}; say why: <!-- not run: ... -->")


def commands_of(text: str) -> Iterator[list[str]]:
    """The words of each command, without assignments in front of it."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            words.pop(0)
        if words:
            yield words


def parse(words: list[str]) -> None:
    """Let the command line read a command without running it: it stops at an option that it does not know."""
    result = CliRunner().invoke(cli.app, [*words, "--help"])
    assert result.exit_code == 0, f"{words}: {result.output}"


def run_oretrofit(words: list[str]) -> None:
    small = shlex.split(SMALL.get(words[0], ""))
    if words[0] == "eval" and "--suite" not in words:
        small += ["--suite", "diabetes"]
    result = CliRunner().invoke(cli.app, [*words, *small])
    assert result.exit_code == 0, f"{words}: {result.output}"


def run_example(file: Path, words: list[str]) -> None:
    before = sys.argv
    sys.argv = [str(file), *words, *shlex.split(SMALL_EXAMPLES[file.name])]
    try:
        runpy.run_path(str(file), run_name="__main__")
    finally:
        sys.argv = before


class DocStrings(PythonDocStringDocument):
    """Those of a file, which is not imported by its path: a clone of the repository may be called anything."""

    def import_document(self, example: Example) -> None:
        self.pop_evaluator(self.import_document)
        raise NotEvaluated


PARSERS = [CodeBlockParser("python", run_python), CodeBlockParser("sh", run_shell)]
SYBIL = Sybil(parsers=PARSERS, path=str(ROOT), document_types={".md": Document, ".py": DocStrings})


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with the files that pages speak of, and calibration on one table."""
    measure = Calibration.measure.__func__  # type: ignore[attr-defined]
    monkeypatch.setattr(
        Calibration, "measure", classmethod(lambda cls, *args, **kwargs: measure(cls, *args, **{**kwargs, "tables": 1}))
    )
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    past = pd.DataFrame({"shop": np.repeat(["north", "south", "west"], [8, 5, 11])})
    past["day"], past["price"] = past.groupby("shop").cumcount(), rng.uniform(1, 2, len(past))
    past["sales"] = 10 - 3 * past["price"] + past["day"]
    past.to_csv("past.csv", index=False)
    past.groupby("shop").tail(2).drop(columns="sales").to_csv("next.csv", index=False)
    mine = pd.DataFrame(rng.standard_normal((40, 2)), columns=["rooms", "age"])
    mine.assign(price=mine["rooms"] - mine["age"]).to_csv("mine.csv", index=False)
    with mock.patch.dict(VARIANTS), mock.patch.dict(TABPFN_V3.classes):  # docs/new-variant.md adds one
        yield


@pytest.mark.usefixtures("small")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("path", [*PAGES, *SOURCES], ids=lambda path: str(path.relative_to(ROOT)))
def test_blocks(path):
    for example in SYBIL.parse(path).examples():
        example.evaluate()


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_in_sentences_exist(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for words in re.findall(r"`oretrofit ([a-z][^`]*)`", text):
        if not re.search(r"[A-Z]{2}|\.\.\.", words):  # with a placeholder
            command = shlex.split(words)
            known = {option for option in command if option.startswith("--")}
            assert known <= options_of(command), words


def options_of(words: list[str]) -> set[str]:
    """The options of the command that the words begin with."""
    command: Any = typer.main.get_command(cli.app)
    for word in words:
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return {name for parameter in command.params for name in parameter.opts}


def test_examples_of_the_commands_are_read():
    group: Any = typer.main.get_command(cli.app)
    found = 0
    stack = list(group.commands.values())
    while stack:
        command = stack.pop()
        stack += getattr(command, "commands", {}).values()
        for example in re.findall(r"\[b\]oretrofit (.*?)\[/b\]", command.epilog or ""):
            parse(shlex.split(example))
            found += 1
    assert found >= 12


def test_what_make_results_runs_is_read():
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").replace("$(", "").replace(")", "")
    commands = re.findall(r"^measure-\S+ = oretrofit (.*?)(?: &&.*)?$", recipe, flags=re.MULTILINE)
    assert len(commands) >= 14
    for command in commands:
        parse(shlex.split(command))


def test_a_block_with_an_unknown_option_or_command_fails(tmp_path):
    for text in ("```sh\noretrofit eval --speeds 3\n```", "```sh\nmake coffee\n```", "```python\n1 / 0\n```"):
        page = tmp_path / "page.md"
        page.write_text(text)
        (example,) = Sybil(parsers=PARSERS, path=str(tmp_path)).parse(page).examples()
        with pytest.raises(Exception, match=r"speeds|coffee|division"):
            example.evaluate()


def test_few_blocks_are_not_run():
    """Each says why; those that need a cluster, a licence, a network or a fresh environment."""
    reasons = [found for page in PAGES for found in re.findall(r"<!-- not run: (.+) -->", page.read_text("utf-8"))]
    assert reasons
    assert all(re.match(r"needs a |needs Prior Labs' licence|fetches|sets up", reason) for reason in reasons), reasons
