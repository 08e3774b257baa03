"""What a user installs: one top-level package, with its weights and tables, and nothing else; built without git."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
FOLDERS = ("patches", "calibration", "retrofit", "experiments")
LEFT = (".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "runs", "*.egg-info", "__pycache__")
if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    # From a copy: setuptools leaves its traces where it builds.
    left = shutil.ignore_patterns(
        ".git", ".venv", ".*_cache", ".hypothesis", "build", "dist", "runs", "*.egg-info", "__pycache__"
    )
    shutil.copytree(ROOT, folder / "source", ignore=left)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_the_wheel_holds_the_package_its_weights_and_its_tables(built: Path) -> None:
    (wheel,) = built.glob("oretrofit-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    tops = {file.split("/")[0] for file in files if ".dist-info/" not in file}
    assert tops == {"oretrofit"}
    code = {file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")}
    data = {*(ROOT / "retrofit/hosts").iterdir(), *(ROOT / "experiments/data").iterdir(), ROOT / "py.typed"}
    data |= set((ROOT / "experiments/page").glob("page.*"))
    expected = {f"oretrofit/{file.relative_to(ROOT).as_posix()}" for file in {*ROOT.glob("*.py"), *code, *data}}
    assert {file for file in files if ".dist-info/" not in file} == expected
    assert any(file.endswith(".dist-info/licenses/LICENSE") for file in files)


def test_the_sdist_holds_what_the_tests_need(built: Path) -> None:
    (sdist,) = built.glob("oretrofit-*.tar.gz")
    with tarfile.open(sdist) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "Makefile"} <= files
    for folder in (".ci", ".github", "tests", "docs", "examples", "results"):
        here = {file for file in (ROOT / folder).rglob("*") if file.is_file() and file.suffix != ".pyc"}
        here = {file for file in here if file.parent.name != "predictions"}  # as .gitignore has it
        assert {file.relative_to(ROOT).as_posix() for file in here} <= files
    assert not any(file.endswith(".pyc") or file.startswith((".git/", "runs/")) for file in files)


def test_the_wheel_runs_from_anywhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("oretrofit-*.whl")
    install = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(tmp_path / "site")]
    subprocess.run([*install, str(wheel)], check=True, capture_output=True)
    # Of an oretrofit that is installed here, too, the first on the path is taken.
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def run(*command: str) -> str:
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert str(tmp_path / "site") in run(sys.executable, "-c", "import oretrofit; print(oretrofit.__file__)")
    script = str(next((tmp_path / "site").glob("*/oretrofit*")))  # bin, or Scripts
    run(script, "datasets", "--json", "datasets.json")
    assert json.loads((tmp_path / "datasets.json").read_text())["bundled"][0]["licence"]
    run(script, "doctor", "--json", "doctor.json")  # it loads the bundled host and predicts
    assert json.loads((tmp_path / "doctor.json").read_text())["problems"] == []


def test_one_version_everywhere() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == project["version"] and citation["license"] == project["license"]
    assert f"## {project['version']}" in (ROOT / "CHANGELOG.md").read_text()


def test_the_workflow_runs_what_is_promised() -> None:
    """Every Python of the classifiers, on the oldest torch that the dependencies allow and on the newest."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if "Python :: 3." in line]
    oldest = next(line for line in project["dependencies"] if line.startswith("torch>=")).replace(">=", "==")
    assert job["strategy"]["matrix"] == {"python": pythons, "torch": [f"{oldest}.*", "torch"]}
    assert job["steps"][-1] == {"run": ".ci/run"} and os.access(ROOT / ".ci/run", os.X_OK)


def test_the_hooks_are_the_linters_of_make_lint() -> None:
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    lint = (ROOT / "Makefile").read_text().partition("\nlint:")[2].partition("\n\n")[0]
    hooks = " ".join(hook["entry"] for hook in repository["hooks"])
    assert re.findall(r"\.venv/bin/(\S+ \S+)", hooks) == re.findall(r"\$\(BIN\)/(\S+ \S+)", lint)


def test_importing_the_package_or_the_command_line_does_not_import_torch() -> None:
    code = "import sys, oretrofit, oretrofit.cli; sys.exit('torch' in sys.modules or 'tabpfn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
