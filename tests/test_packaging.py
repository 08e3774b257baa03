"""What a user installs: one top-level package, with its weights and tables, and nothing else."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_wheel_holds_the_package_its_weights_and_its_tables(tmp_path):
    # Built from a copy: setuptools leaves its traces where it builds.
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(".*", "build", "runs", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", tmp_path, source]
    subprocess.run(command, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("oretrofit-*.whl")
    files = set(zipfile.ZipFile(wheel).namelist())
    assert {file.split("/")[0] for file in files if ".dist-info/" not in file} == {"oretrofit"}
    for file in (
        "oretrofit/cli.py",
        "oretrofit/py.typed",
        "oretrofit/retrofit/hosts/oretrofit-small-v3-regressor.safetensors",
        "oretrofit/retrofit/hosts/README.md",
        "oretrofit/experiments/data/README.md",
        "oretrofit/experiments/data/ames.parquet",
    ):
        assert file in files
    assert not any("/tests/" in file or "/results/" in file for file in files)


def test_importing_the_package_or_the_command_line_does_not_import_torch():
    code = "import sys, oretrofit, oretrofit.cli; sys.exit('torch' in sys.modules or 'tabpfn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
