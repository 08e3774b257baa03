"""What predicts tables, here or in a process that it is sent to: each prepared, run with others, and decoded."""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from tabpfn import TabPFNRegressor
from tabpfn.base import ModelSpecs
from torch import Tensor, nn

from .. import tabpfn_api
from ..workers import call_each, is_worker
from .passes import Passes
from .planning import Costs, share_out
from .preparing import Job, Prepared, prepare, prepared_ahead, rough_size
from .report import Tally

if TYPE_CHECKING:
    from distributed import Client

# Tables are run and decoded in chunks, of so many by device, whose inputs and logits stay below this many numbers
# (0.5 GB).
_CHUNK_TABLES = {"cpu": 16, "cuda": 128}  # half of what is prepared ahead, so that preparing goes on meanwhile
_CHUNK_NUMBERS = 2**27

# A process keeps what it has compiled for each shape, and holes in its heap: after so many chunks a new one takes its
# place.
_CHUNKS_OF_A_PROCESS = 32

# What makes the answer of a regressor (of all tables), a table, the sum of its members' logits (M, L) (None for a
# constant target), and M.
Decode = Callable[[TabPFNRegressor, Prepared, "Tensor | None", int], Any]


class Part(NamedTuple):
    """Some of the tables, by index: what each was answered, or what was wrong with it."""

    results: dict[int, Any]
    errors: dict[int, Exception]
    tally: Tally


class TablePredictor:
    """Predicts tables with a closed model, many in one forward pass.

    Attributes:
        template: A regressor that knows device and precision.
        device: Where the model is.
        job_options: What a table's own regressor is built with, its seed aside.

    Args:
        specs: The model; it is used up.
        options: Of `TabPFNRegressor`.
        decode: What makes a table's answer.
        max_padding: As of `predict_ragged`.
        max_cells: The same.

    Raises:
        TypeError: An option that `TabPFNRegressor` does not have.
        ValueError: An option that has no meaning here.
        NotImplementedError: What `predict_batched` refuses: it is fitted table by table.
    """

    def __init__(
        self,
        specs: ModelSpecs,
        options: dict[str, Any],
        decode: Decode,
        *,
        max_padding: float,
        max_cells: int | None = None,
    ) -> None:
        self.template, byte_size, self.job_options = regressor_settings(specs, options)
        self.device = self.template.devices_[0]
        # A copy: `to` moves a module in place, and the options hold this one for processes that leave the GPU alone.
        self.template.znorm_space_bardist_ = copy.deepcopy(self.template.znorm_space_bardist_).to(self.device)
        costs = Costs.of(specs.model, self.device, max_cells)
        self._decode, self._buckets = decode, specs.model.n_out
        self._passes = Passes(specs.model, self.template, byte_size, costs, max_padding)

    @property
    def on_cpu(self) -> bool:
        """Whether processes can run the model as this one does."""
        return self.device.type == "cpu"

    def predict_all(
        self, jobs: Sequence[Job], n_jobs: int, client: Client | None = None
    ) -> Generator[Part, None, None]:
        """Predict tables, part by part, in any order.

        On a CPU each of so many processes takes some of them, and this one those that need all threads. Beside a GPU
        they prepare, and the forward passes run here. With a Dask client, its workers share all tables.
        """
        sizes = [rough_size(job) for job in jobs]
        if not self.on_cpu and client is None:
            order = sorted(range(len(jobs)), key=sizes.__getitem__)  # neighbours pad well to each other
            ordered = [jobs[i] for i in order]
            with closing(prepared_ahead(ordered, self.job_options, self._passes.dtype, n_jobs)) as prepared:
                yield from self._parts(((order[i], table) for i, table in prepared), dict(enumerate(jobs)))
            return
        works = [self._passes.costs.work(rows, columns) for rows, columns in sizes]
        if client is None:
            processes, threads = n_jobs, torch.get_num_threads()
        else:
            processes, threads = max(1, sum(client.nthreads().values())), 0
        alone, chunks = share_out(sizes, works, processes, threads, _CHUNK_TABLES.get(self.device.type, 1))
        for index in alone:
            yield from self({index: jobs[index]})
        at_once = _CHUNKS_OF_A_PROCESS * n_jobs or len(chunks)
        for start in range(0, len(chunks), at_once or 1):
            arguments = ({i: jobs[i] for i in chunk} for chunk in chunks[start : start + at_once])
            with closing(call_each(self, arguments, n_jobs, client=client)) as answers:
                for _, parts in answers:
                    yield from parts

    def __call__(self, jobs: Mapping[int, Job]) -> list[Part]:
        """Predict tables from beginning to end."""
        dtype = self._passes.dtype
        if is_worker() and dtype in (None, torch.float32, torch.float64) and not self.template.use_autocast_:
            # It keeps what it compiles for each of the many shapes. In these precisions torch takes it for activations
            # only, and whole runs take no longer without it.
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]
        return list(self._parts(((index, prepare(job, self.job_options, dtype)) for index, job in jobs.items()), jobs))

    def _parts(self, prepared: Iterable[tuple[int, Prepared | Exception]], jobs: Mapping[int, Job]) -> Iterator[Part]:
        prepared, most = iter(prepared), _CHUNK_TABLES.get(self.device.type, 1)
        chunk_tables = most if self.device.type == "cpu" else 2  # so that the first forward pass need not wait long
        while True:
            part = Part({}, {}, Tally())
            with part.tally.timed("preprocessing"):
                chunk = self._take_chunk(prepared, chunk_tables, part)
            if not chunk and not part.errors:
                return
            totals, failed = self._passes.sum_logits(chunk, part.tally)
            part.errors.update(failed)
            with part.tally.timed("decoding"):
                for index in [index for index in chunk if index not in failed]:
                    try:
                        rows = len(jobs[index].X_test)
                        part.results[index] = self._decode(self.template, chunk[index], totals.get(index), rows)
                    except Exception as error:
                        part.errors[index] = error
            chunk_tables = min(2 * chunk_tables, most)
            yield part

    def _take_chunk(
        self, prepared: Iterator[tuple[int, Prepared | Exception]], most_tables: int, part: Part
    ) -> dict[int, Prepared]:
        """The next tables by index, as many as may be run and decoded together, and the part's errors."""
        chunk: dict[int, Prepared] = {}
        numbers = 0
        while len(chunk) < most_tables and numbers < _CHUNK_NUMBERS:
            if (found := next(prepared, None)) is None:
                break
            index, table = found
            if isinstance(table, Exception):
                part.errors[index] = table
                continue
            chunk[index] = table
            numbers += table.numbers(self._buckets)
        return chunk


def regressor_settings(specs: ModelSpecs, options: dict[str, Any]) -> tuple[TabPFNRegressor, int, dict[str, Any]]:
    """A regressor that knows device and precision, its byte size, and what the workers build theirs with.

    None of them has the weights.

    Raises:
        TypeError: An option that `TabPFNRegressor` does not have.
        ValueError: An option that has no meaning here.
        NotImplementedError: What `predict_batched` refuses: it is fitted table by table.
    """
    for name, only in (("model_path", None), ("fit_mode", "fit_preprocessors"), ("differentiable_input", False)):
        if name in options and options[name] != only:
            raise ValueError(f"{name} cannot be set here" + ("" if only is None else f" to anything but {only!r}"))
    if isinstance(members := options.get("n_estimators", 1), int) and members < 1:
        raise ValueError(f"n_estimators is at least 1, got {members}")
    if options.get("tuning_config") is not None:
        raise NotImplementedError("no tuning_config: the temperature is fitted table by table; use fit and predict")
    # TabPFN asks a model for its device, so for a parameter. Not of a layer, whose weights would be drawn at random.
    stand_in: Any = nn.ParameterList([torch.zeros(1)])
    weightless = dataclasses.replace(specs, model=stand_in, norm_criterion=tabpfn_api.bar_distribution(specs))
    options = {**options, "model_path": weightless}
    template = TabPFNRegressor(**options)
    if tabpfn_api.uses_majority_downsample(template):
        raise NotImplementedError(
            "no SAMPLE_SUBSAMPLING_METHOD='majority_downsample': its correction is fitted table by table; use fit and "
            "predict"
        )
    byte_size = tabpfn_api.initialize(template)
    # Workers run on the CPU, whatever the device and the precision of the forward passes.
    worker_options = {**options, "device": "cpu", "inference_precision": torch.float32, "n_preprocessing_jobs": 1}
    if template.devices_[0].type != "cpu":
        no_limit, config = {"MAX_CPU_SAMPLES": sys.maxsize}, options.get("inference_config")
        if isinstance(config, tabpfn_api.InferenceConfig):
            worker_options["inference_config"] = dataclasses.replace(config, **no_limit)
        else:
            worker_options["inference_config"] = {**(config or {}), **no_limit}
    return template, byte_size, worker_options
