"""The commands `oretrofit bench ...`. As in `cli.py`, torch and TabPFN are imported inside them."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from ..calibration import settings
from ..retrofit import options, terminal
from ..retrofit.files import write_json
from ..retrofit.printing import print_text

bench = typer.Typer(
    help="Measure what a patch costs, how good a host is, and what ragged prediction gains.", no_args_is_help=True
)

Precision = Annotated[str, typer.Option(help="[b]float32[/b], or [b]auto[/b]: half precision where TabPFN takes it.")]


@bench.command(epilog="Example: [b]oretrofit bench overhead --host random-v3 --rows 1000[/b]")
@terminal.plain_errors()
def overhead(
    host: options.Host = "random-v3",
    rounds: Annotated[int | None, typer.Option(help="Rounds; by default until each ratio is known to 0.01.")] = None,
    rows: Annotated[int, typer.Option(help="Train rows.")] = 1000,
    columns: Annotated[int, typer.Option(help="Feature columns.")] = 10,
    device: options.Device = "auto",
    precision: Precision = settings.PRECISION,
    json_file: options.JsonFile = None,
) -> None:
    """Time host and variants against each other on one table of random data."""
    options.check_host(host)
    options.check_positive(rounds=1 if rounds is None else rounds, rows=rows, columns=columns)
    options.check_choice("--precision", precision, settings.BENCH_PRECISIONS)
    options.check_outputs({"--json": json_file}, options.host_file(host))
    device, console = terminal.start(device)
    from ..retrofit.hosts import load_host
    from .overhead import measure_overhead

    with console.status("Timing") as status:
        table = measure_overhead(
            load_host(host),
            rows=rows,
            columns=columns,
            rounds=rounds,
            device=device,
            precision=precision,
            on_round=status.update,
        )
    title = f"Time of a forward pass, variant / host, {rows} x {columns}, {device}"
    terminal.finish_frame(console, table, json_file, title)


@bench.command("host", epilog="Example: [b]oretrofit bench host --host small --suite mini[/b]")
@terminal.plain_errors()
def bench_host(
    host: options.Host = settings.HOST,
    suite: options.Suite = "mini",
    seeds: options.Seeds = settings.SEEDS,
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
) -> None:
    """Compare a host with ridge regression and a random forest."""
    options.check_host(host)
    options.check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    from .datasets import files_of, read_suite

    datasets = read_suite(suite)
    options.check_outputs({"--json": json_file}, [*files_of(datasets), *options.host_file(host)])
    device, console = terminal.start(device)
    from ..retrofit.hosts import load_host
    from .baselines import compare_baselines

    with console.status("Comparing"):
        table = compare_baselines(load_host(host), datasets, seeds, device=device, on_case=partial(print_text, console))
    terminal.finish_frame(console, table, json_file, "RMSE / RMSE of predicting the train mean")


@bench.command("ragged", epilog="Example: [b]oretrofit bench ragged --tables 200 --host small[/b]")
@terminal.plain_errors()
def bench_ragged(
    tables: Annotated[int, typer.Option(help="Synthetic tables of unequal sizes.")] = 200,
    host: options.Host = settings.HOST,
    rounds: Annotated[int, typer.Option(help="Runs of each method, each in a process of its own.")] = 3,
    device: options.Device = "auto",
    precision: Precision = settings.PRECISION,
    against: Annotated[
        list[str] | None, typer.Option(help=f"One or more of {options.bold(settings.RAGGED_AGAINST)}; default: all.")
    ] = None,
    json_file: options.JsonFile = None,
) -> None:
    """Time ragged prediction against a loop of fit and predict, and against predict_batched by shape."""
    options.check_host(host)
    options.check_positive(tables=tables, rounds=rounds)
    options.check_choice("--precision", precision, settings.BENCH_PRECISIONS)
    for name in against or ():
        options.check_choice("--against", name, settings.RAGGED_AGAINST)
    options.check_outputs({"--json": json_file}, options.host_file(host))
    device, console = terminal.start(device)
    from . import ragged_bench as run

    with console.status("Timing") as status:
        result = run.measure_ragged(
            host,
            tables=tables,
            rounds=rounds,
            device=device,
            precision=precision,
            against=against or settings.RAGGED_AGAINST,
            on_run=status.update,
        )
    table = f"Predicting {tables} tables, {host}, {device}", run.bench_cells(result), 1
    terminal.finish(console, [table], run.bench_notes(result), {json_file: partial(write_json, result)})


@bench.command("ragged-equality", epilog="Example: [b]oretrofit bench ragged-equality --tables 200[/b]")
@terminal.plain_errors()
def bench_ragged_equality(
    tables: Annotated[int, typer.Option(help="Synthetic tables of mixed types, with missing cells.")] = 200,
    host: options.Host = settings.HOST,
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
) -> None:
    """Show how far ragged prediction is from fit and predict, one table at a time."""
    options.check_host(host)
    options.check_positive(tables=tables)
    options.check_outputs({"--json": json_file}, options.host_file(host))
    device, console = terminal.start(device)
    from ..retrofit.hosts import load_host
    from . import ragged_equality as run

    loaded = load_host(host)
    with terminal.open_progress(console) as progress:
        calibrating = progress.add_task("Calibrating", total=settings.TABLES)
        comparing = progress.add_task("Comparing", total=4 * tables)
        found = run.compare_equality(
            loaded,
            run.mixed_tables(tables),
            device=device,
            on_calibrated=lambda: progress.advance(calibrating),
            on_tables=lambda done: progress.update(comparing, completed=done),
        )
    title = f"Ragged prediction of {tables} tables against one by one, {device}"
    terminal.finish_frame(console, found, json_file, title, run.equality_notes())
