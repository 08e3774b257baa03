"""Options that commands share, checked by name before the seconds of importing torch, and the files they end with."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any, TypeAlias

import typer

from ..calibration import settings
from ..calibration.variants import VARIANTS
from .files import check_writable, replacing

# What writes each file that a command ends with; one that was not asked for is None.
Files: TypeAlias = "Mapping[Path | None, Callable[[Path], None]]"

_FLOAT32 = 3.4e38  # about the largest number
_MANY = 10_000_000  # of anything; more is a slip of the keyboard, or a seed in the wrong place


def bold(names: Iterable[str]) -> str:
    """Names for a help text."""
    return ", ".join(f"[b]{name}[/b]" for name in names)


def _one_of(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What a shell is offered for the beginning of a name."""
    known = list(names)
    return lambda incomplete: [name for name in known if name.startswith(incomplete)]


def _suites(incomplete: str) -> list[str]:
    """The same for the last of several datasets or suites."""
    before, comma, last = incomplete.rpartition(",")
    names = [*settings.SUITES, *settings.BUNDLED_TARGETS, *settings.DATASET_FORMS]
    begun = [re.sub("(ID|FILE#target|PACKAGE/ITEM)$", "", name) for name in names]
    return [f"{before}{comma}{name}" for name in begun if name.startswith(last)]


def _file(text: str, metavar: str = "FILE") -> Any:
    return typer.Option(metavar=metavar, help=text)


# Hosts, variants, and how tau is chosen.
_HOSTS, _VARIANTS = _one_of(settings.HOST_NAMES), _one_of(VARIANTS)
Host = Annotated[str, typer.Option(help=f"{bold(settings.HOST_NAMES)} or a checkpoint file.", autocompletion=_HOSTS)]
NamedHost = Annotated[
    str | None,
    typer.Option(
        help=f"As of patch. Default: {settings.HOST}, or the host that --retrofit names.", autocompletion=_HOSTS
    ),
]
OneVariant = Annotated[str, typer.Option(help=f"{bold(VARIANTS)}.", autocompletion=_VARIANTS)]
Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", help="As of patch; repeatable. Default: all.", autocompletion=_VARIANTS),
]
Variant = Annotated[
    list[str] | None,
    typer.Option(
        help=f"{bold(VARIANTS)}; repeatable. Default: {' and '.join(settings.PAPER_VARIANTS)}.",
        autocompletion=_one_of((settings.IDENTITY, *VARIANTS)),
    ),
]
Delta = Annotated[float, typer.Option(help="How much presence a live token at the quantile loses, between 0 and 1.")]
Quantile = Annotated[float, typer.Option(help="Which quantile of ||h||² keeps presence 1 - delta, from 0 to 1.")]
Tables = Annotated[int, typer.Option(help="Synthetic tables to calibrate on.")]
Tau = Annotated[float | None, typer.Option(help="One tau for every site instead of calibrating.")]
GivenRetrofit = Annotated[Path | None, _file("Evaluate a retrofit saved by patch, as it is.")]
RetrofitFile = Annotated[Path | None, _file("Save the retrofit (JSON, no weights).")]

# Where it runs and what it writes.
Device = Annotated[
    str,
    typer.Option(
        help="[b]auto[/b] (a GPU if there is one), [b]cpu[/b] or [b]cuda[/b].",
        autocompletion=_one_of(settings.DEVICES),
    ),
]
Precision = Annotated[
    str, typer.Option(help=f"{bold(settings.PRECISIONS)}.", autocompletion=_one_of(settings.PRECISIONS))
]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the table as JSON.")]
Plot = Annotated[Path | None, _file("Also draw the tables (PNG).")]

# Cases.
Suite = Annotated[
    str,
    typer.Option(
        help=f"{', '.join(settings.SUITES)}, or datasets joined by commas: a bundled name, "
        f"{', '.join(settings.DATASET_FORMS)}. [b]oretrofit datasets[/b] lists them.",
        autocompletion=_suites,
    ),
]
Seeds = Annotated[int, typer.Option(help="Splits of each dataset, with the seeds 0 to N - 1.")]
MaxRows = Annotated[int, typer.Option(help="Most train rows of a case; half as many test rows.")]
Margin = Annotated[
    float,
    typer.Option(
        help="Mean changes of up to so many percent, up or down, are equivalent. Another margin runs nothing again."
    ),
]
Workers = Annotated[
    int, typer.Option(help="Cases side by side, in so many processes. More than 1: times mean nothing. Not on a GPU.")
]
RunFolder = Annotated[Path | None, _file("Folder of the run. Default: runs/eval-HOST-PRECISION.", "DIR")]
RunFolders = Annotated[
    list[Path], typer.Argument(metavar="RUN...", help="Folders of runs, as eval leaves them; several side by side.")
]
Page = Annotated[Path, _file("Where the page goes (HTML).")]
Paper = Annotated[
    bool, typer.Option("--paper", help="Show the paper's figures beside runs of other hosts and tables, too.")
]
DaskCases = Annotated[
    str | None, typer.Option("--dask", metavar="ADDRESS|local", help="Run the cases by the workers of a Dask cluster.")
]

# Tables to predict.
Train = Annotated[Path, _file("Rows with a known target, CSV or Parquet.")]
Test = Annotated[Path, _file("Rows to predict, CSV or Parquet.")]
Target = Annotated[str, typer.Option(help="The column to predict. All others are features.")]
Predictions = Annotated[Path, _file("Where the predictions go, CSV or Parquet.")]
By = Annotated[
    str | None, typer.Option(metavar="GROUP", help="The column that names each row's group. Default: one table.")
]
Quantiles = Annotated[
    str | None, typer.Option(metavar="Q,Q,...", help="Quantiles to predict beside the mean, e.g. 0.1,0.5,0.9.")
]
ClosedRetrofit = Annotated[Path | None, _file("A closed retrofit saved by patch. Default: calibrate one.")]
TooFew = Annotated[
    str | None,
    typer.Option(
        metavar="error|nan|pooled",
        help="Groups with fewer than 2 train rows: an error, no prediction, or one from all groups' train rows. "
        "Default: error; nan with --on-error skip.",
    ),
]
OnError = Annotated[
    str, typer.Option(metavar="error|skip", help="A group that cannot be predicted: an error, or no prediction.")
]
PredictPrecision = Annotated[
    str,
    typer.Option(
        help="auto, float32, float64 or autocast. Below float32 answers depend a little on what shares a pass.",
        autocompletion=_one_of(settings.PRECISIONS),
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        metavar="COLUMN", help="A column of test that --out gets, too; repeatable. No feature if train lacks it."
    ),
]
Dask = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS|local",
        help="Predict by the workers of a Dask cluster. Tables may then be folders of Parquet files, larger than "
        "memory; so is --out.",
    ),
]


def check_outputs(outputs: Mapping[str, Path | None], inputs: Iterable[Path | None] = ()) -> None:
    """Raise `ValueError` now, with the option's name, for a file that could not be written, or must not be."""
    taken = {path.expanduser().resolve(): "what is read" for path in inputs if path is not None}
    for option, path in outputs.items():
        if path is None:
            continue
        try:
            place = path.resolve()
            if place in taken:
                raise ValueError(f"{option} {path} would overwrite {taken[place]}; give another file")
            if folder := next((folder for folder in place.parents if folder in taken), None):  # a table in parts
                raise ValueError(f"{option} {path} would be a part of {taken[folder]}; give a file in another folder")
            check_writable(path)
        except OSError as error:
            raise ValueError(f"{option} {what_failed(error)}; give a file in a folder that can be written to") from None
        taken[place] = "what another option writes"


def check_folder(option: str, folder: Path | None) -> None:
    """Raise `ValueError` now for a folder that could not be made or written to; it is not made here."""
    if folder is None:
        return
    try:
        existing = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    except OSError as error:  # too long a name
        raise ValueError(f"{option} {what_failed(error)}; give another folder") from None
    if not existing.is_dir():
        raise ValueError(f"{option} {folder}: {existing} is a file; give a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{option} {folder}: {existing} cannot be written to; give another folder")


def check_input(option: str, file: Path | None) -> None:
    """Raise `ValueError` for a file that is not there."""
    if file is not None and not file.is_file():
        raise ValueError(f"{option} {file}: {'that is a folder' if file.is_dir() else 'there is no such file'}")


def check_plot(file: Path | None) -> None:
    """Raise `ValueError` for a `--plot` that is no PNG file."""
    if file is not None and file.suffix.lower() != ".png":
        raise ValueError(f"--plot writes a .png file, not {file.name!r}")


def check_retrofit(option: str, file: Path | None) -> None:
    """Raise `ValueError` for a file that is not there or no retrofit, to go by its first words."""
    check_input(option, file)
    if file is not None and file.suffix != ".safetensors":  # a retrofit's checkpoint takes torch to see
        try:
            content = json.loads(file.read_text(encoding="utf-8"))
        except ValueError:  # UnicodeDecodeError is one
            content = None
        if not isinstance(content, dict) or not {"format", "variant", "tau"} <= content.keys():
            raise ValueError(
                f"{option} {file} is not a retrofit written by oretrofit; `oretrofit patch --out` makes one"
            )


def check_host(host: str) -> None:
    """Raise `ValueError` now for a host that is nowhere; what it is takes torch to see."""
    if host in settings.HOST_NAMES:
        return
    known = ", ".join(settings.HOST_NAMES)
    with suppress(OSError, RuntimeError):  # too long a name, or the home of nobody
        path = Path(host).expanduser()
        if path.is_dir():
            raise ValueError(f"--host {host!r} is a folder; give a checkpoint file, or {known}")
        if path.is_file():
            with path.open("rb") as file:
                head = file.read(9)
            # A zip archive, a pickle, or safetensors' header behind its length.
            if head[:2] == b"PK" or head[:1] == b"\x80" or head[8:] == b"{":
                return
            raise ValueError(
                f"--host {host!r} is no checkpoint, to go by its first bytes; give another file, or {known}"
            )
    raise ValueError(f"--host: no host {host!r}: neither a known name ({known}) nor an existing checkpoint file")


def check_choice(option: str, value: str, known: Iterable[str]) -> None:
    """Raise `ValueError` for a name that is not among the known ones."""
    if value not in known:
        raise ValueError(f"{option}: unknown {option.strip('-')} {value!r}; there are: {', '.join(known)}")


def chosen_variants(names: list[str] | None) -> list[str]:
    """The variants given by `--variant`, each once; by default all. Raises `ValueError` for an unknown one."""
    for name in names or ():
        check_choice("--variant", name, VARIANTS)
    return list(dict.fromkeys(names or VARIANTS))


def check_between(option: str, value: float, low: float, high: float) -> None:
    """Raise `ValueError` unless the value lies there, ends included."""
    if not low <= value <= high:
        raise ValueError(f"{option} must lie between {low} and {high}, not {value}")


def check_margin(margin: float) -> None:
    """Raise `ValueError` for a `--margin` that is no share of an error."""
    if not 0 < margin < 100:
        raise ValueError(f"--margin is in percent and must lie between 0 and 100, not {margin}")


def check_tau(tau: float | None) -> None:
    """Raise `ValueError` for a `--tau` that is no scale."""
    if tau is not None and not 0 < tau <= _FLOAT32:
        raise ValueError(f"--tau must be a positive number within float32, not {tau}")


def check_calibration(delta: float, quantile: float, tables: int) -> None:
    """Raise `ValueError` for a `--delta`, `--quantile` or `--tables` out of range."""
    if not 0 < delta < 1:
        raise ValueError(f"--delta is 1 minus a presence and must lie between 0 and 1, ends excluded, not {delta}")
    check_between("--quantile", quantile, 0, 1)
    check_positive(tables=tables)


def host_file(host: str | None) -> list[Path]:
    """The host's file, if it is one."""
    return [] if host is None or host in settings.HOST_NAMES else [Path(host)]


def unwritten(files: Files, safe: str = "") -> list[str]:
    """Write files, each whole or not at all; one that fails does not keep the others from being written.

    Returns a message for each that failed: with what is `safe`, or else where its content was put instead.
    """

    def put(path: Path, write: Callable[[Path], None]) -> None:
        with replacing(path) as part:
            write(part)

    errors = []
    for path, write in files.items():
        if path is None:
            continue
        try:
            put(path, write)
        except OSError as error:
            errors.append(f"{what_failed(error)}{safe and f'; {safe}'}")
            for folder in () if safe else (Path.cwd(), Path(tempfile.gettempdir())):
                kept = folder / f"{path.stem}-{token_hex(4)}{path.suffix}"
                with suppress(OSError):
                    put(kept, write)
                    errors[-1] += f"; what was to be written is in {kept}"
                    break
    return errors


def what_failed(error: OSError) -> str:
    """The file and the reason, in a line."""
    return f"{error.filename}: {error.strerror or error}" if error.filename else error.strerror or str(error)


def without_advice(text: str) -> str:
    """What TabPFN says, its parameters as the options of commands that they are, without those that no command has."""
    text = re.sub(r'inference_precision="(\w+)"', r"--precision \1", text)
    text = re.sub(r"\s*Set `ignore_pretraining_limits=True`\s*to override this\s*error!", "", text)
    return re.sub(r"\s+or\s+set ignore_pretraining_limits=True", "", text)


def check_positive(**numbers: int) -> None:
    """Raise `ValueError`, with the option's name, for a number below 1 or beyond reason."""
    for name, number in numbers.items():
        settings.check_count(f"--{name}", number, most=_MANY)
