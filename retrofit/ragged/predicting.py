"""`predict_ragged`: many tables of any sizes, answered as `fit` and `predict` do one by one.

Everything but the forward pass is TabPFN's own: each table is fitted by a `TabPFNRegressor` of its own, and
its logits are decoded by that. In between, the ensemble members of many tables are padded with NULL rows and
columns, which do not exist for a closed retrofit (docs/theory.md), and go through the model together.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import closing
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, Protocol, overload

import pandas as pd
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs
from torch import Tensor

from .. import tabpfn_api
from .planning import DEFAULT_PADDING, MAX_CELLS
from .predictor import Decode, TablePredictor
from .preparing import Job, Prepared, default_n_jobs
from .report import RaggedReport, Tally

if TYPE_CHECKING:
    from distributed import Client

OUTPUT_TYPES = ("mean", "median", "mode", "quantiles", "main", "full")
QUANTILES = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]

# A table as it is given: X_train, y_train, X_test.
Table = tuple[Any, Any, Any]


class Retrofitted(Protocol):
    """What predicts: a `Retrofit`."""

    @property
    def variant(self) -> str:
        """`closed`, or it is refused."""

    @property
    def lent_specs(self) -> ModelSpecs:
        """A copy of the patched model, which may be moved and cast, but not written to."""


class TableError(ValueError):
    """A table, `index` in the lists, that cannot be predicted."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(index, error)
        self.index = index

    @property
    def reason(self) -> str:
        """What was wrong with it."""
        error = self.args[1]
        return str(error) or type(error).__name__

    def __str__(self) -> str:
        """Which table, and what was wrong with it."""
        return f"table {self.index}: {self.reason}"


@overload
def predict_ragged(
    retrofit: Retrofitted,
    X_trains: Sequence[Any],
    y_trains: Sequence[Any],
    X_tests: Sequence[Any],
    *,
    return_report: Literal[False] = False,
    **settings: Any,
) -> list[Any]: ...


@overload
def predict_ragged(
    retrofit: Retrofitted,
    X_trains: Sequence[Any],
    y_trains: Sequence[Any],
    X_tests: Sequence[Any],
    *,
    return_report: Literal[True],
    **settings: Any,
) -> tuple[list[Any], RaggedReport]: ...


def predict_ragged(
    retrofit: Retrofitted,
    X_trains: Sequence[Any],
    y_trains: Sequence[Any],
    X_tests: Sequence[Any],
    *,
    output_type: str = "mean",
    quantiles: list[float] | None = None,
    max_padding: float = DEFAULT_PADDING,
    max_cells: int | None = None,
    on_error: str = "raise",
    n_jobs: int | None = None,
    client: Client | None = None,
    return_report: bool = False,
    on_tables: Callable[[int], None] | None = None,
    **options: Any,
) -> list[Any] | tuple[list[Any], RaggedReport]:
    """Predict many tables of any row and column counts, as `fit` and `predict` do one by one.

    Each table is preprocessed and decoded by a `TabPFNRegressor` of its own: same ensemble members, same
    seeds, its own target scaling and borders. Only the forward passes are shared: members of all tables
    are padded with NULL rows and columns, which do not exist for a `closed` retrofit.

    Args:
        retrofit: Of the variant `closed`. As a method, the retrofit itself.
        X_trains: One table each: arrays or DataFrames, with categories and missing cells.
        y_trains: The targets of their rows.
        X_tests: The rows to predict.
        output_type: As of `TabPFNRegressor.predict`.
        quantiles: As of `TabPFNRegressor.predict`.
        max_padding: The largest share of a forward pass's work that may be padding, in [0, 1).
        max_cells: Cells (rows times columns, where each column counts the host's inducing points as rows, 16 in the
            bundled host and 128 in Prior Labs') that may go through the model together; by device, by default. What
            does not fit into the device's memory is halved, down to single members, and nothing is lost. On others
            than CPU and CUDA (on MPS) every member runs alone, whatever is given here, with a warning.
        on_error: `raise` on the first bad table, or `skip` it: its result is None, and the report says why.
        n_jobs: Processes; 0 for none. On a CPU each predicts its tables from beginning to end, with one thread: by
            default as many as torch has threads (docs/threads.md). Beside a GPU they preprocess: by default all cores
            but one. Either way there have to be enough tables to repay their start. Should one be killed, this process
            goes on alone, and warns.
        client: Of a Dask cluster (`dask.distributed.Client`), whose workers predict the tables in place of this process
            and others here (docs/cluster.md).
        return_report: Also return what was done.
        on_tables: Called now and then with the number of tables that are done, to show progress.
        options: Of `TabPFNRegressor`, for all tables alike: `n_estimators`, `random_state`, `device`,
            `inference_precision`, `categorical_features_indices` and so on. Of several devices the first is
            used, and `show_progress_bar` shows none, both with a warning.

    Returns:
        For each table, in order, what `predict` returns for it. With `return_report` that, and a `RaggedReport`.

    Raises:
        TableError: A table that cannot be predicted.
        ValueError: Another variant than `closed`, no tables, lists of unequal length, an option out of range.
        TypeError: An option that `TabPFNRegressor` does not have.
        NotImplementedError: `tuning_config` or majority downsampling, as `predict_batched` refuses them.
    """
    check_closed(retrofit)
    quantiles = QUANTILES if quantiles is None else quantiles
    _check_settings(output_type, quantiles, max_padding, max_cells, on_error, n_jobs, client)
    results, report = _predict(
        retrofit.lent_specs,
        _as_tables(X_trains, y_trains, X_tests),
        options,
        decode=functools.partial(_decode, output_type=output_type, quantiles=quantiles),
        max_padding=max_padding,
        max_cells=max_cells,
        n_jobs=n_jobs,
        client=client,
        skip=on_error == "skip",
        on_tables=on_tables,
    )
    return (results, report) if return_report else results


def check_closed(retrofit: Retrofitted) -> None:
    """Raise `ValueError` for another variant than `closed`."""
    if retrofit.variant != "closed":
        raise ValueError(
            f"padding is inert only in the variant 'closed', not in {retrofit.variant!r}; make one by "
            "oretrofit.patch(host, variant='closed') or `oretrofit patch --variant closed --out FILE`"
        )


def _check_settings(
    output_type: str,
    quantiles: list[float],
    max_padding: float,
    max_cells: int | None,
    on_error: str,
    n_jobs: int | None,
    client: Client | None,
) -> None:
    """Say now what `predict` would say after the forward passes, and what has no meaning."""
    if output_type not in OUTPUT_TYPES:
        raise ValueError(f"output_type is one of {', '.join(OUTPUT_TYPES)}, not {output_type!r}")
    if not all(isinstance(q, float) and 0 <= q <= 1 for q in quantiles):
        raise ValueError(f"quantiles are floats between 0 and 1, got {quantiles}")
    if not 0 <= max_padding < 1:
        raise ValueError(f"max_padding is a share in [0, 1), got {max_padding}")
    if max_cells is not None and max_cells < 1:
        raise ValueError(f"max_cells is at least 1, got {max_cells}")
    if on_error not in ("raise", "skip"):
        raise ValueError(f"on_error is 'raise' or 'skip', not {on_error!r}")
    if n_jobs is not None and (not isinstance(n_jobs, Integral) or n_jobs < 0):
        raise ValueError(f"n_jobs is a number of processes, 0 for none, got {n_jobs!r}")
    if client is not None and not hasattr(client, "submit"):
        raise ValueError(f"client is a dask.distributed.Client, not {client!r}")
    if client is not None and n_jobs is not None:
        raise ValueError("n_jobs counts processes here; a cluster (client) has workers of its own")


def _as_tables(X_trains: Sequence[Any], y_trains: Sequence[Any], X_tests: Sequence[Any]) -> list[Table]:
    lists = [X_trains, y_trains, X_tests]
    if any(
        isinstance(entries, (pd.DataFrame, pd.Series, str, dict)) or not hasattr(entries, "__len__")
        for entries in lists
    ):
        raise ValueError("X_trains, y_trains and X_tests are lists with one entry a table")
    lengths = [len(entries) for entries in lists]
    if len(set(lengths)) > 1:
        raise ValueError("X_trains, y_trains and X_tests must have equal length, got {}, {} and {}".format(*lengths))
    if lengths[0] == 0:
        raise ValueError("nothing to predict: no tables")
    return list(zip(*lists, strict=True))


def warn_of_the_ignored(template: TabPFNRegressor, max_cells: int | None) -> None:
    """Say what was asked for and has no effect."""
    device, *others = template.devices_
    if others:
        warnings.warn(f"of {1 + len(others)} devices only {device} is used", stacklevel=4)
    if max_cells is not None and device.type not in MAX_CELLS:
        warnings.warn(f"max_cells has no effect on {device}, where every member runs alone", stacklevel=4)
    if template.show_progress_bar:
        warnings.warn("show_progress_bar has no effect on many tables at once; see on_tables", stacklevel=4)


def _predict(
    specs: ModelSpecs,
    tables: list[Table],
    options: dict[str, Any],
    *,
    decode: Decode,
    max_padding: float,
    max_cells: int | None,
    n_jobs: int | None,
    client: Client | None,
    skip: bool,
    on_tables: Callable[[int], None] | None,
) -> tuple[list[Any], RaggedReport]:
    """`predict_ragged` behind its checks, with what makes a table's answer of its logits."""
    predictor = TablePredictor(specs, options, decode, max_padding=max_padding, max_cells=max_cells)
    warn_of_the_ignored(predictor.template, max_cells)
    # Seeds are drawn in the caller's order, whatever the order of work.
    seeds = [tabpfn_api.infer_random_state(predictor.template.random_state)[0] for _ in tables]
    jobs = [Job(seed, *table) for seed, table in zip(seeds, tables, strict=True)]
    if client is not None:
        n_jobs = 0
    elif n_jobs is None:
        n_jobs = default_n_jobs(len(jobs), predictor.device)
    results: list[Any] = [None] * len(tables)
    errors: dict[int, str] = {}
    tally, done = Tally(), 0
    with closing(predictor.predict_all(jobs, n_jobs, client)) as parts:
        for part in parts:
            tally.add(part.tally)
            for index, error in part.errors.items():
                refusal = TableError(index, error)
                if not skip:
                    raise refusal from error
                errors[index] = refusal.reason
            for index, result in part.results.items():
                results[index] = result
            done += len(part.results) + len(part.errors)
            if on_tables is not None:
                on_tables(done)
    return results, tally.report(len(tables) - len(errors), errors)


def _decode(
    regressor: TabPFNRegressor,
    table: Prepared,
    total_ML: Tensor | None,
    rows: int,
    output_type: str,
    quantiles: list[float],
) -> Any:
    """What `predict` returns for a table of so many test rows, from the sum of its members' logits."""
    if table.constant is not None:
        return tabpfn_api.constant_prediction(table.constant, rows, output_type, quantiles)
    assert total_ML is not None
    return tabpfn_api.decode(regressor, total_ML, len(table.members), table.target_moments, output_type, quantiles)
