"""`oretrofit predict`: tables in files in, predictions in a file out.

Options are checked before anything that takes seconds to import.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration import settings
from ..calibration.settings import DEVICES, HOST, TABLES
from .cluster import check_dask, connected
from .options import (
    check_choice,
    check_folder,
    check_host,
    check_outputs,
    check_retrofit,
    host_file,
    unwritten,
    without_advice,
)

if TYPE_CHECKING:
    from distributed import Client

    from .api import Retrofit
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
    keep: Sequence[str] = ()
    dask: str | None = None
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
        answers = ["prediction", *map(_label, self.levels)]
        if self.by in answers:
            raise ValueError(f"the group column cannot be called {self.by!r}, as a column of predictions is: {answers}")
        if taken := [name for name in self.keep if name in answers]:
            raise ValueError(f"--keep: {taken[0]!r} is the name of a column of predictions")
        if self.by == self.target:
            raise ValueError(f"{self.target!r} cannot be both target and group")
        check_choice("--precision", self.precision, settings.PRECISIONS)
        check_choice("--device", self.device, DEVICES)
        check_retrofit("--retrofit", self.retrofit)
        if self.host is not None:
            check_host(self.host)
        if self.dask is not None:
            check_dask()
        if self.of_folders:
            return self._check_folders()
        if not self.out.name.lower().endswith(OUT_SUFFIXES):
            raise ValueError(f"--out {self.out} ends in none of {', '.join(OUT_SUFFIXES)}")
        check_outputs({"--out": self.out}, [self.train, self.test, self.retrofit, *host_file(self.host)])

    @property
    def on_too_few(self) -> str:
        """As of `predict_groups`."""
        return self.too_few or ("nan" if self.on_error == "skip" else "error")

    @property
    def of_folders(self) -> bool:
        """Whether the tables are folders that no process is to hold."""
        return self.dask is not None and (self.train.is_dir() or self.test.is_dir())

    def _check_folders(self) -> None:
        for option, place in (("--train", self.train), ("--test", self.test)):
            if not place.is_dir():
                raise ValueError(
                    f"{option} {place} is no folder; with --dask both are folders of Parquet files, or none"
                )
        if self.by is None:
            raise ValueError("folders with --dask are predicted by group: name its column by --by")
        if self.too_few == "pooled":
            raise ValueError("--too-few pooled needs all train rows in one process; leave it out, or leave out --dask")
        check_folder("--out", self.out)
        out = self.out.resolve()
        for option, place in (("--train", self.train), ("--test", self.test)):
            if place.resolve() in (out, *out.parents):
                raise ValueError(f"--out {self.out} would be a part of {option} {place}; give another folder")
        if self.out.is_dir() and any(not fnmatch(file.name, "part-*.parquet") for file in self.out.iterdir()):
            raise ValueError(f"--out {self.out} is a folder with something else than predictions; give another")


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
    if options.dask is None:
        return _predict_tables(options, device, begin, None)
    with connected(options.dask) as client:
        predict = _predict_in_folders if options.of_folders else _predict_tables
        return predict(options, device, begin, client)


def _predict_tables(options: PredictOptions, device: str, begin: Begin, client: Client | None) -> Predicted:
    from .tables import read_table, write_table

    train, test = (read_table(path, options.by) for path in (options.train, options.test))
    by = _groups(train, test, options)

    from ..calibration.predicting import PRECISIONS
    from .long_table import read_groups
    from .ragged.groups import check_groups, predict_long

    kept = _kept(train, test, options, by)
    names = (train.name, test.name)
    features = check_groups(train.frame, test.frame, target=options.target, by=by, names=names)
    too_few = options.on_too_few
    skip = options.on_error == "skip"
    table = read_groups(
        train, test, features, target=options.target, by=by, too_few=too_few, skip=skip, whole=options.by is None
    )
    closed = _closed(options, table.kinds, train.name, device, begin)
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
            client=client,
        )
    except ValueError as error:
        raise ValueError(str(error).removeprefix(f"group {_WHOLE!r}: ")) from error
    answers = {"prediction": frame["mean"].array, **{_label(level): frame[level].array for level in options.levels}}
    written = test.frame[[] if options.by is None else [by]].assign(**kept, **answers)
    errors = unwritten({options.out: partial(write_table, written)})
    rows, predicted = len(frame), int(frame["mean"].notna().sum())
    lines = [
        *_read_lines((train.name, len(train.frame)), (test.name, len(test.frame)), table.kinds),
        *_predicted_lines(predicted, rows, _pooled(table, too_few), report),
    ]
    if not errors:
        lines.append(f"Written to {options.out}.")
    return Predicted(lines, [*table.notes, *_missing_lines(report.errors, predicted, rows)], errors)


def _predict_in_folders(options: PredictOptions, device: str, begin: Begin, client: Client) -> Predicted:
    import torch

    from .predict_folders import look_at, predict_folders

    by, keep = str(options.by), options.keep
    tables = look_at(
        options.train,
        options.test,
        client,
        target=options.target,
        by=by,
        keep=keep,
        too_few=options.on_too_few,
        begin=begin,
    )
    train, test = tables.folders
    closed = _closed(options, tables.kinds, train.name, device, begin)
    predicted, report = predict_folders(
        closed,
        tables,
        client,
        options.out,
        keep=keep,
        levels={_label(level): level for level in options.levels},
        begin=begin,
        on_error="skip" if options.on_error == "skip" else "raise",
        device=options.device,  # `auto` is decided by each worker
        inference_precision=getattr(torch, options.precision, options.precision),
    )
    lines = [
        *_read_lines((train.name, train.rows), (test.name, test.rows), tables.kinds),
        *_predicted_lines(predicted, test.rows, "", report),
        f"Written to {options.out}.",
    ]
    return Predicted(lines, [*tables.notes, *_missing_lines(report.errors, predicted, test.rows)], [])


def _closed(options: PredictOptions, kinds: Mapping[Any, str], train: str, device: str, begin: Begin) -> Retrofit:
    """What predicts: loaded or calibrated."""
    from .api import load, patch
    from .hosts import load_host

    if options.retrofit is not None:
        closed = load(options.retrofit, options.host)
        _check_limits(closed.host.inference_config, kinds.values(), train)
        return closed
    host = load_host(options.host or HOST)
    _check_limits(host.inference_config, kinds.values(), train)
    done, count = begin("Calibrating", TABLES), itertools.count(1)
    return patch(host, "closed", device=device, on_table=lambda: done(next(count)))


def _kept(train: Table, test: Table, options: PredictOptions, by: str) -> dict[str, Any]:
    """The columns of test that the answers get; those that train lacks are taken out of test: they are no features."""
    if lacking := [name for name in options.keep if name not in test.frame]:
        raise ValueError(f"--keep: {test.name} has no column {lacking[0]!r}")
    kept = {name: test.frame[name].array for name in options.keep if name != by}
    test.frame = test.frame.drop(columns=[name for name in kept if name not in train.frame])
    return kept


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


def _check_limits(config: Any, kinds: Iterable[str], train: str) -> None:
    """Raise `ValueError` for more columns than the host takes, which its own message would advise to override."""
    columns = sum(9 if kind == "dates" else 1 for kind in kinds)  # calendar features of a date
    if columns > config.MAX_NUMBER_OF_FEATURES:
        raise ValueError(
            f"{train} has {columns} columns to predict from (a date counts as 9), and this host takes "
            f"{config.MAX_NUMBER_OF_FEATURES}; leave some out"
        )


def _read_lines(train: tuple[str, int], test: tuple[str, int], kinds: Mapping[Any, str]) -> list[str]:
    """Of tables by name and rows."""
    names = {kind: [name for name, of in kinds.items() if of == kind] for kind in ("numbers", "dates", "categories")}
    columns = ". ".join(f"{kind.capitalize()}: {_listed(found)}" for kind, found in names.items() if found)
    return [f"Read {train[0]} ({train[1]} rows) and {test[0]} ({test[1]}). {columns}."]


def _pooled(table: LongTable, too_few: str) -> str:
    few = [group for group in table.few if group not in table.faulty] if too_few == "pooled" else []
    pooled = int(table.test[table.by].isin(few).sum())
    return f", {pooled} of them from the train rows of all groups, pooled (groups {_listed(few)})" if pooled else ""


def _predicted_lines(predicted: int, rows: int, pooled: str, report: RaggedReport) -> list[str]:
    return [
        f"Predicted {predicted} of {rows} rows{pooled}.",
        f"Tables: {report.tables}; forward passes: {report.batches}, for {report.members} ensemble members; "
        f"padding: {report.padding:.1%} of their work.",
    ]


def _missing_lines(errors: Mapping[Any, str], predicted: int, rows: int) -> list[str]:
    lines = [
        f"No prediction for group {group!r}: {without_advice(reason)}" for group, reason in list(errors.items())[:20]
    ]
    if len(errors) > 20:
        lines.append(f"... and for {len(errors) - 20} more groups")
    if predicted < rows:
        lines.append(f"{rows - predicted} of {rows} rows have no prediction.")
    return lines


def _listed(names: Sequence[Hashable]) -> str:
    return ", ".join(map(str, names[:12])) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
