"""Regression tables for the experiments: bundled, from OpenML or from a CSV file.

A dataset is named by a spec: a bundled name (`concrete`), `openml:<id>` or `csv:FILE#target`.
A suite is `mini` (the bundled tables), `openml-suite:<id>`, or dataset specs joined by commas.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
from pandas.api.types import is_bool_dtype, is_float_dtype, is_numeric_dtype, is_object_dtype, is_string_dtype
from sklearn.model_selection import train_test_split

from ..calibration.cases import Case

DATA_FOLDER = Path(__file__).parent / "data"
BUNDLED_TARGETS = {
    "ames": "Sale_Price",
    "cars": "Price",
    "concrete": "compressive_strength",
    "diabetes": "target",
    "diamonds": "price",
    "sacramento": "price",
}
MIN_ROWS = 20


class DatasetError(ValueError):
    """A dataset or suite that cannot be used; the message says what is wrong, where, and what to do."""


@dataclass(frozen=True, eq=False)
class Dataset:
    """A checked regression table: `name` is its spec, `target` the name of the column in `y`.

    `X` may hold missing values, and holds text as `category`; `y` is finite and not constant.
    """

    name: str
    X: pd.DataFrame
    y: np.ndarray
    target: str


def load_dataset(spec: str) -> Dataset:
    """Load the table that `spec` names.

    Raises:
        DatasetError: If the spec is unknown, the table cannot be read or fetched, or it is not a
            usable regression table.
    """
    _check_spec(spec)
    kind, _, rest = spec.partition(":")
    if kind == "openml":
        frame, target = _read_openml(spec, int(rest))
    elif kind == "csv":
        file, _, target = rest.rpartition("#")
        frame = _read_csv(spec, file)
    else:
        frame, target = pd.read_parquet(DATA_FOLDER / f"{spec}.parquet"), BUNDLED_TARGETS[spec]
    return _checked(spec, frame, target)


def resolve_suite(spec: str) -> list[str]:
    """Return the dataset specs of a suite, each once; `load_dataset` then reads the tables.

    Parts joined by commas may also be suites. A comma between `csv:` and the next `#` is part of the
    file's name; a target with a comma works in `load_dataset` only. The OpenML client does not
    cache suites, so they need the network.

    Raises:
        DatasetError: If a part of the spec is unknown, or OpenML cannot be reached.
    """
    parts: list[str] = []
    for part in spec.split(","):
        if parts and parts[-1].startswith("csv:") and "#" not in parts[-1]:
            parts[-1] += f",{part}"
        else:
            parts.append(part.lstrip())
    specs: list[str] = []
    for part in map(str.rstrip, parts):
        kind, _, rest = part.partition(":")
        if part == "mini":
            specs.extend(sorted(BUNDLED_TARGETS))
        elif kind == "openml-suite" and _is_id(rest):
            specs.extend(_read_openml_suite(part, int(rest)))
        else:
            _check_spec(part)
            specs.append(part)
    return list(dict.fromkeys(specs))


def split_spec(spec: str) -> tuple[str, str] | None:
    """(file, target) of a spec that names a file; None for others."""
    kind, _, rest = spec.partition(":")
    file, _, target = rest.rpartition("#")
    return (file, target) if kind == "csv" else None


def check_datasets(specs: Iterable[str]) -> None:
    """Raise `DatasetError` now for a table on disk that is unusable; OpenML's are fetched when due."""
    for spec in specs:
        if not spec.startswith("openml:"):
            load_dataset(spec)


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


def _check_spec(spec: str) -> None:
    """Raise unless `spec` has the form of a dataset spec."""
    kind, _, rest = spec.partition(":")
    if kind == "csv":
        file, _, target = rest.rpartition("#")
        if not file or not target:
            raise DatasetError(f"{spec!r} must name a file and its target column: csv:FILE#target")
    elif spec not in BUNDLED_TARGETS and not (kind == "openml" and _is_id(rest)):
        raise DatasetError(
            f"unknown dataset {spec!r}; possible are the bundled {', '.join(sorted(BUNDLED_TARGETS))}, "
            "openml:<id> and csv:FILE#target; as a suite also mini (all bundled) and openml-suite:<id>"
        )


def _read_csv(name: str, file: str) -> pd.DataFrame:
    try:
        # The header is also read as data, because read_csv renames repeated columns.
        header = pd.read_csv(file, header=None, nrows=1, dtype=str, keep_default_na=False)
        frame = pd.read_csv(file, low_memory=False)
    except FileNotFoundError:
        raise DatasetError(f"{name}: there is no file {file!r}; check the path") from None
    except (OSError, ValueError) as error:  # pandas' parser errors and UnicodeDecodeError are ValueErrors
        raise DatasetError(f"{name}: {file!r} cannot be read as CSV with a header line: {error}") from error
    if len(frame) and not isinstance(frame.index, pd.RangeIndex):  # surplus fields would become the index
        raise DatasetError(f"{name}: the rows of {file!r} have more fields than its header line; name every column")
    return frame.set_axis(header.iloc[0].to_list(), axis="columns")


@contextmanager
def _openml(name: str) -> Iterator[ModuleType]:
    """Give the OpenML client, and turn its failures into `DatasetError`."""
    import openml  # slow, and only these specs need it

    try:
        yield openml
    except Exception as error:  # the client also raises requests' and minio's errors, ValueError and plain Exception
        cause = f"{type(error).__name__}: {error}"
        answered = isinstance(error, openml.exceptions.OpenMLServerException)
        if answered or not isinstance(error, (OSError, openml.exceptions.OpenMLServerError)):
            raise DatasetError(f"{name}: OpenML gave no usable data ({cause}); check the id on openml.org") from error
        raise DatasetError(
            f"{name}: OpenML could not be reached ({cause}). Datasets already in the cache "
            f"({openml.config.get_cache_directory()}) work offline as openml:<id>; "
            "the bundled suite mini needs no network"
        ) from error


def _read_openml(name: str, dataset_id: int) -> tuple[pd.DataFrame, str]:
    with _openml(name) as openml:
        # No metadata of features: where a cache lacks it and the network is down, asking for it
        # makes the client delete the dataset's cache.
        dataset = openml.datasets.get_dataset(
            dataset_id, download_data=True, download_qualities=False, download_features_meta_data=False
        )
        frame, _, _, _ = dataset.get_data()
    if not dataset.default_target_attribute:
        raise DatasetError(f"{name}: OpenML names no target for it; save it as a file and use csv:FILE#target")
    return frame, dataset.default_target_attribute


def _read_openml_suite(name: str, suite_id: int) -> list[str]:
    with _openml(name) as openml:
        dataset_ids = openml.study.get_suite(suite_id).data
    if not dataset_ids:
        raise DatasetError(f"{name}: the suite has no datasets; check the id on openml.org")
    return [f"openml:{dataset_id}" for dataset_id in dataset_ids]


def _checked(name: str, frame: pd.DataFrame, target: str) -> Dataset:
    """Make a `Dataset` of a table, or raise `DatasetError`."""
    repeated = frame.columns[frame.columns.duplicated()]
    if len(repeated):
        raise DatasetError(f"{name}: column {repeated[0]!r} occurs more than once; rename or remove the repeats")
    if target not in frame.columns:
        raise DatasetError(f"{name}: no column {target!r}; the columns are {', '.join(map(str, frame.columns))}")
    if frame.shape[1] == 1:
        raise DatasetError(f"{name}: {target!r} is the only column; at least one feature column is needed")
    if len(frame) < MIN_ROWS:
        raise DatasetError(f"{name}: {len(frame)} rows are too few; at least {MIN_ROWS} are needed")
    y = _checked_target(name, frame[target])
    features = {c: _checked_feature(name, frame[c]) for c in frame.columns if c != target}
    return Dataset(name, pd.DataFrame(features).reset_index(drop=True), y, target)


def _is_text(values: pd.Series) -> bool:
    # is_string_dtype also holds for a category of strings, which OpenML uses for classes.
    return not isinstance(values.dtype, pd.CategoricalDtype) and (is_string_dtype(values) or is_object_dtype(values))


def _checked_target(name: str, values: pd.Series) -> np.ndarray:
    place = f"{name}: target {values.name!r}"
    y = np.full(len(values), np.nan)
    if _is_text(values) or (is_numeric_dtype(values) and not is_bool_dtype(values)):
        y = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    bad = values.notna().to_numpy() & np.isnan(y)
    if bad.any():
        row = int(bad.argmax())
        value = values.tolist()[row]  # Python's own type: numpy's repr would show np.True_
        raise DatasetError(f"{place} is not numeric (row {row + 1}: {value!r}); regression needs numbers")
    for fault, rows in (("missing", np.isnan(y)), ("infinite", np.isinf(y))):
        if rows.any():
            first = ", ".join(str(row + 1) for row in np.flatnonzero(rows)[:5])
            more = f" and {rows.sum() - 5} more" if rows.sum() > 5 else ""
            raise DatasetError(f"{place} is {fault} in row {first}{more}; remove these rows or fill them in")
    if np.ptp(y) == 0:
        raise DatasetError(f"{place} is constant ({y[0]:g} in every row); choose another target")
    return y


def _checked_feature(name: str, values: pd.Series) -> pd.Series:
    if _is_text(values):
        # TabPFN takes a text column of many values for free text, unless it is declared `category`.
        return values.astype("string").astype("category")
    if is_float_dtype(values) and np.isinf(values.to_numpy(np.float64, na_value=np.nan)).any():
        raise DatasetError(f"{name}: column {values.name!r} holds infinite values; replace them or leave them empty")
    return values
