"""`oretrofit predict`: tables in files in, predictions in a file out.

Options are checked before anything that takes seconds to import.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration import settings
from ..calibration.settings import DEVICES, HOST, TABLES
from .options import check_choice, check_host, check_input, check_outputs, host_file, unwritten, without_advice

if TYPE_CHECKING:
    import pandas as pd

    from .columns import Table
    from .long_table import LongTable
    from .ragged.report import RaggedReport
    from .terminal import Begin

OUT_SUFFIXES = (".csv", ".csv.gz", ".tsv", ".parquet")  # in any case

_WHOLE = "the whole table"  # the group, where there are none


@dataclass(frozen=True)
class PredictOptions:
    """The options of `oretrofit predict`, checked.

    Raises:
        ValueError: An option that cannot be used, or a file at `out` that could not be written.
    """

    train: Path
    test: Path
    target: str
    out: Path
    by: str | None = None
    quantiles: str | None = None
    host: str | None = None
    retrofit: Path | None = None
    too_few: str | None = None
    on_error: str = "error"
    precision: str = "auto"
    device: str = "auto"
    levels: list[float] = field(init=False)

    def __post_init__(self) -> None:
        """Check them."""
        object.__setattr__(self, "levels", _parse_quantiles(self.quantiles))
        if self.on_error not in ("error", "skip"):
            raise ValueError(f"--on-error is error or skip, not {self.on_error!r}")
        if self.too_few not in (None, "error", "nan", "pooled"):
            raise ValueError(f"--too-few is error, nan or pooled, not {self.too_few!r}")
        if self.by is None and (self.too_few is not None or self.on_error == "skip"):
            raise ValueError("--too-few and --on-error are about groups, whose column --by names")
        if self.by in (answers := ["prediction", *map(_label, self.levels)]):
            raise ValueError(f"the group column cannot be called {self.by!r}, as a column of predictions is: {answers}")
        if self.by == self.target:
            raise ValueError(f"{self.target!r} cannot be both target and group")
        check_choice("--precision", self.precision, settings.PRECISIONS)
        check_choice("--device", self.device, DEVICES)
        check_input("--retrofit", self.retrofit)
        if self.host is not None:
            check_host(self.host)
        if not self.out.name.lower().endswith(OUT_SUFFIXES):
            raise ValueError(f"--out {self.out} ends in none of {', '.join(OUT_SUFFIXES)}")
        check_outputs({"--out": self.out}, [self.train, self.test, self.retrofit, *host_file(self.host)])


@dataclass
class Predicted:
    """What `predict_files` did.

    Attributes:
        lines: What was read, and what was predicted.
        warnings: What a user should look at.
        errors: What could not be written, and where it was put instead.
    """

    lines: list[str]
    warnings: list[str]
    errors: list[str]


def _label(level: float) -> str:
    return f"q{level:.12g}"


def _parse_quantiles(text: str | None) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        levels = [float("nan")]
    if not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"--quantiles are numbers between 0 and 1, joined by commas, not {text!r}")
    return list(dict.fromkeys(levels))


def predict_files(options: PredictOptions, device: str = "cpu", begin: Begin = lambda *_: lambda _: None) -> Predicted:
    """Read train and test, predict test's rows with the closed retrofit of a host, and write them to `out`.

    Args:
        options: The options.
        device: `cpu` or `cuda`.
        begin: Called at the start of `Calibrating` and `Predicting`, to show progress.

    Raises:
        ValueError: Files, columns or cells that cannot be used; the message says which.
        OSError: A file that cannot be read.
    """
    from .tables import read_table, write_table

    train, test = (read_table(path, options.by) for path in (options.train, options.test))
    by = _groups(train, test, options)

    from ..calibration.predicting import PRECISIONS
    from .api import load, patch
    from .hosts import load_host
    from .long_table import read_groups
    from .ragged.groups import check_groups, predict_long

    names = (train.name, test.name)
    features = check_groups(train.frame, test.frame, target=options.target, by=by, names=names)
    too_few = options.too_few or ("nan" if options.on_error == "skip" else "error")
    skip = options.on_error == "skip"
    table = read_groups(
        train, test, features, target=options.target, by=by, too_few=too_few, skip=skip, whole=options.by is None
    )
    if options.retrofit is not None:
        closed = load(options.retrofit, options.host)
        _check_limits(closed.host.inference_config, table, train.name)
    else:
        host = load_host(options.host or HOST)
        _check_limits(host.inference_config, table, train.name)
        done, count = begin("Calibrating", TABLES), itertools.count(1)
        closed = patch(host, "closed", device=device, on_table=lambda: done(next(count)))

    try:
        frame, report = predict_long(
            closed,
            table,
            output_type="main",
            quantiles=options.levels,
            too_few=too_few,
            on_error="skip" if skip else "raise",
            on_tables=begin("Predicting", table.test[by].nunique()),
            device=device,
            inference_precision=PRECISIONS[options.precision],
        )
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"group {_WHOLE!r}: ")) from error
    answers = {"prediction": frame["mean"].array, **{_label(level): frame[level].array for level in options.levels}}
    written = test.frame[[] if options.by is None else [by]].assign(**answers)
    errors = unwritten({options.out: partial(write_table, written)})
    lines = [*_read_lines(train, test, table), *_predicted_lines(table, too_few, frame["mean"], report)]
    if not errors:
        lines.append(f"Written to {options.out}.")
    return Predicted(lines, [*table.notes, *_missing_lines(report.errors, frame["mean"])], errors)


def _groups(train: Table, test: Table, options: PredictOptions) -> str:
    """The column of the groups; without one, a column that both tables get, with one group for the whole table."""
    if options.by is not None:
        return options.by
    if len(train.frame) == 1:
        raise ValueError(f"{train.name} has one row; a prediction needs two")
    if list(train.frame) == [options.target]:
        raise ValueError(f"{train.name} has no columns beside {options.target!r} to predict from")
    by = "(group)"
    while by in train.frame or by in test.frame:
        by += "_"
    for table in (train, test):
        table.frame = table.frame.assign(**{by: _WHOLE})
    return by


def _check_limits(config: Any, table: LongTable, train: str) -> None:
    """Raise `ValueError` for more columns than the host takes, which its own message would advise to override."""
    columns = sum(9 if kind == "dates" else 1 for kind in table.kinds.values())  # calendar features of a date
    if columns > config.MAX_NUMBER_OF_FEATURES:
        raise ValueError(
            f"{train} has {columns} columns to predict from (a date counts as 9), and this host takes "
            f"{config.MAX_NUMBER_OF_FEATURES}; leave some out"
        )


def _read_lines(train: Table, test: Table, table: LongTable) -> list[str]:
    kinds = {
        kind: [name for name, of in table.kinds.items() if of == kind] for kind in ("numbers", "dates", "categories")
    }
    columns = ". ".join(f"{kind.capitalize()}: {_listed(names)}" for kind, names in kinds.items() if names)
    return [f"Read {train.name} ({len(train.frame)} rows) and {test.name} ({len(test.frame)}). {columns}."]


def _predicted_lines(table: LongTable, too_few: str, prediction: pd.Series, report: RaggedReport) -> list[str]:
    few = [group for group in table.few if group not in table.faulty] if too_few == "pooled" else []
    pooled = int(table.test[table.by].isin(few).sum())
    line = f"Predicted {prediction.notna().sum()} of {len(prediction)} rows"
    if pooled:
        line += f", {pooled} of them from the train rows of all groups, pooled (groups {_listed(few)})"
    return [
        f"{line}.",
        f"Tables: {report.tables}; forward passes: {report.batches}, for {report.members} ensemble members; "
        f"padding: {report.padding:.1%} of their work.",
    ]


def _missing_lines(errors: Mapping[Any, str], prediction: pd.Series) -> list[str]:
    lines = [
        f"No prediction for group {group!r}: {without_advice(reason)}" for group, reason in list(errors.items())[:20]
    ]
    if len(errors) > 20:
        lines.append(f"... and for {len(errors) - 20} more groups")
    if missing := int(prediction.isna().sum()):
        lines.append(f"{missing} of {len(prediction)} rows have no prediction.")
    return lines


def _listed(names: Sequence[Hashable]) -> str:
    return ", ".join(map(str, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
