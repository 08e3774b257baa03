"""The command line. Torch and TabPFN are imported inside the commands: `--help` needs neither."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.progress import Progress

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    add_completion=False,
    pretty_exceptions_show_locals=False,
)
bench = typer.Typer(
    help="Measure what a patch costs, how good a host is, and what ragged prediction gains.", no_args_is_help=True
)
app.add_typer(bench, name="bench")

_HELD_OUT = 8  # synthetic tables on which `patch` compares host and variant

Host = Annotated[str, typer.Option(help="[b]small[/b], [b]random-v3[/b], [b]v3[/b] or a checkpoint file.")]
Device = Annotated[str, typer.Option(help="[b]auto[/b] (a GPU if there is one), [b]cpu[/b] or [b]cuda[/b].")]
Suite = Annotated[
    str, typer.Option(help="mini, openml-suite:ID, or datasets joined by commas: a name, openml:ID, csv:FILE#target.")
]
Seeds = Annotated[int, typer.Option(help="Splits of each dataset, with the seeds 0 to N - 1.")]
JsonFile = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the table as JSON.")]
Delta = Annotated[float, typer.Option(help="How much presence a live token at the quantile loses, between 0 and 1.")]
Quantile = Annotated[float, typer.Option(help="Which quantile of ||h||² keeps presence 1 - delta, from 0 to 1.")]
Tables = Annotated[int, typer.Option(help="Synthetic tables to calibrate on.")]


def _show_version(value: bool) -> None:
    if value:
        from importlib.metadata import version

        typer.echo(f"oretrofit {version('oretrofit')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Retrofit a pretrained TabPFN v3 regressor with O-closed attention, feed-forward and norm layers."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn the errors that a user can do something about into one message and exit code 2."""
    try:
        yield
    except ValueError as error:  # HostError, PatchError, RetrofitError and DatasetError are ValueErrors
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except OSError as error:
        typer.echo(f"Error: {error.filename or 'a file'}: {error.strerror or error}", err=True)
        raise typer.Exit(2) from error


@app.command(epilog="Example: [b]oretrofit patch --variant full-o --host small --out full-o.json[/b]")
@_plain_errors()
def patch(
    variant: Annotated[str, typer.Option(help="[b]oa[/b], [b]full-o[/b] or [b]closed[/b].")] = "full-o",
    host: Host = "small",
    delta: Delta = 1e-3,
    quantile: Quantile = 0.01,
    tau: Annotated[float | None, typer.Option(help="One tau for every site instead of calibrating.")] = None,
    tables: Tables = 16,
    seed: Annotated[int, typer.Option(help="Seed of the calibration tables.")] = 20_000,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the retrofit (JSON, no weights).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Calibrate and patch a host, list its sites, and check that it still predicts as before."""
    _check_writable(out, json_file)
    import oretrofit

    from .experiments import report
    from .experiments.evaluate import resolve_device
    from .experiments.frontier import near_identity, synthetic_cases
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    with _progress(console) as progress:
        task = progress.add_task("Calibrating", total=tables)
        options: dict[str, Any] = {"delta": delta, "quantile": quantile, "tau": tau, "tables": tables, "seed": seed}
        loaded = load_host(host)
        retrofit = oretrofit.patch(loaded, variant, **options, device=device, on_table=lambda: progress.advance(task))
        progress.remove_task(task)
        task = progress.add_task("Checking", total=2 * _HELD_OUT)
        cases = synthetic_cases(_HELD_OUT, seed + 10_000)
        check = near_identity(retrofit, cases, device, on_case=lambda: progress.advance(task))

    console.print(f"{variant}, {len(retrofit.sites)} sites, settings {json.dumps(retrofit.settings)}")
    short = ", ".join(f"{short} = {name}" for name, short in report.SHORT_NAMES.items())
    console.print(f"1 %, 50 %, 99 %: quantiles of ||h||²; p: presence; both: receiver and source; {short}\n")
    for title, (header, cells) in report.site_cells(retrofit.table).items():
        _print_table(console, header, cells, title=title, left=2)
    console.print(
        f"On {_HELD_OUT} held-out synthetic tables, in float32: RMSE change mean "
        f"{check['mean_rmse_delta_pct']:+.4f} %, worst {check['worst_rmse_delta_pct']:+.4f} %; largest shift of a "
        f"prediction {check['max_abs_diff_sd']:.2g} target standard deviations."
    )
    if json_file is not None:
        report.write_rows(retrofit.table, json_file)
    if out is None:
        console.print("Nothing was saved; --out FILE saves the retrofit.")
    else:
        retrofit.save(out)
        console.print(f"Saved to {out}.", soft_wrap=True)


@app.command("eval", epilog="Example: [b]oretrofit eval --suite mini --seeds 3 --out runs/mini[/b]")
@_plain_errors()
def evaluate(
    variant: Annotated[
        list[str] | None,
        typer.Option(help="[b]oa[/b], [b]full-o[/b], [b]closed[/b]; repeatable. Default: the first two."),
    ] = None,
    suite: Suite = "mini",
    seeds: Seeds = 3,
    device: Device = "auto",
    host: Annotated[
        str | None, typer.Option(help="As of patch. Default: small, or the host that --retrofit names.")
    ] = None,
    retrofit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluate a retrofit saved by patch, as it is.")
    ] = None,
    max_rows: Annotated[int, typer.Option(help="Most train rows of a case; half as many test rows.")] = 1000,
    precision: Annotated[str, typer.Option(help="auto, float32, float64 or autocast.")] = "float32",
    delta: Delta = 1e-3,
    quantile: Quantile = 0.01,
    tables: Tables = 16,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run. Default: runs/eval-HOST-PRECISION.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare host and variants on matched cases. The same command again resumes."""
    _check_writable(json_file)
    from .experiments import evaluate as run
    from .experiments import report
    from .experiments.datasets import resolve_suite
    from .retrofit.api import load
    from .retrofit.hosts import load_host

    device, console = run.resolve_device(device), _console()
    datasets = resolve_suite(suite)
    run.check_datasets(datasets)
    given = load(retrofit, host) if retrofit else None
    plan = run.Plan(
        host=given.host if given else load_host(host or "small"),
        datasets=datasets,
        seeds=seeds,
        variants=tuple(variant or (() if given else ("oa", "full-o"))),
        given=given,
        delta=delta,
        quantile=quantile,
        tables=tables,
        max_rows=max_rows,
        precision=precision,
        device=device,
    )
    folder = out or Path("runs") / f"eval-{Path(plan.host.name or 'host').stem}-{precision}"
    finished = run.open_run(plan, folder)
    total = len(datasets) * seeds
    if finished:
        console.print(f"{len(finished)} of {total} cases are in {folder} already and are not run again.")
    try:
        with _progress(console) as progress:
            task = progress.add_task("Calibrating", total=tables)
            retrofits = run.calibrate_run(plan, folder, on_table=lambda: progress.advance(task))
            progress.remove_task(task)
            cases_task = progress.add_task("Cases", total=total, completed=len(finished))

            def show(line: str) -> None:
                progress.advance(cases_task)
                console.print(line, soft_wrap=True)

            cases, failures = run.evaluate(
                plan,
                retrofits,
                folder,
                finished=finished,
                on_case=lambda case: show(report.case_line(case.variants)),
                on_failure=lambda f: show(f"{report.short_name(f.dataset)} seed {f.seed} failed: {f.reason}"),
            )
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. Finished cases are in {folder}; the same command again resumes there.")
        raise typer.Exit(130) from None

    rows = run.case_rows(cases)
    summary = report.write_report(folder, plan.settings(), rows, [vars(failure) for failure in failures])
    if cases:
        _print_table(console, *report.case_cells(rows), title="RMSE change of each case against the host, %")
        _print_table(console, *report.summary_cells(summary["variants"]), title="RMSE change against the host, %")
        console.print(report.notes())
    if json_file is not None:
        json_file.write_text(json.dumps(summary, indent=1) + "\n")
    files = ["summary.json", "table.md", *(["deltas.png"] if cases else []), "cases.jsonl", "settings.json"]
    console.print(f"In {folder}: {', '.join(files)}", soft_wrap=True)
    if failures:
        typer.echo(f"Error: {len(failures)} of {total} cases failed; the same command again retries them", err=True)
        raise typer.Exit(1)


@app.command(
    epilog="Example: [b]oretrofit predict --train past.csv --test next.csv --target sales --by shop --out sales.csv[/b]"
)
@_plain_errors()
def predict(
    train: Annotated[Path, typer.Option(metavar="FILE", help="Rows with a known target, CSV or Parquet.")],
    test: Annotated[Path, typer.Option(metavar="FILE", help="Rows to predict, CSV or Parquet.")],
    target: Annotated[str, typer.Option(help="The column to predict. All others are features.")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the predictions go, CSV or Parquet.")],
    by: Annotated[
        str | None, typer.Option(metavar="GROUP", help="The column that names each row's group. Default: one table.")
    ] = None,
    quantiles: Annotated[
        str | None, typer.Option(metavar="Q,Q,...", help="Quantiles to predict beside the mean, e.g. 0.1,0.5,0.9.")
    ] = None,
    host: Annotated[
        str | None, typer.Option(help="As of patch. Default: small, or the host that --retrofit names.")
    ] = None,
    retrofit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A closed retrofit saved by patch. Default: calibrate one.")
    ] = None,
    too_few: Annotated[
        str | None,
        typer.Option(
            metavar="error|nan|pooled",
            help="Groups with fewer than 2 train rows: an error, no prediction, or one from all groups' train rows. "
            "Default: error; nan with --on-error skip.",
        ),
    ] = None,
    on_error: Annotated[
        str, typer.Option(metavar="error|skip", help="A group that cannot be predicted: an error, or no prediction.")
    ] = "error",
    precision: Annotated[
        str,
        typer.Option(
            help="auto, float32, float64 or autocast. Below float32 answers depend a little on what shares a pass."
        ),
    ] = "auto",
    device: Device = "auto",
) -> None:
    """Predict a table with the closed retrofit of a host; with --by, each group from its own rows.

    Groups are predicted as if each were fitted alone, but share forward passes.
    The file at --out gets a row for each test row, in their order: its group
    (with --by), the mean as [b]prediction[/b], and a column like [b]q0.1[/b] for each quantile.
    A column is numbers, dates (2024-12-31) or categories, in both files alike;
    what was read as what is printed.
    """
    from .retrofit.predict_files import PredictOptions, predict_files

    options = PredictOptions(
        train, test, target, out, by, quantiles, host, retrofit, too_few, on_error, precision, device
    )
    from .experiments.evaluate import resolve_device

    device, console = resolve_device(device), _console()
    with _progress(console) as progress:
        predicted = predict_files(options, device, functools.partial(_stage, progress))
    console.print("\n".join(predicted.lines), soft_wrap=True)
    for line in predicted.warnings:
        typer.echo(line, err=True)


@app.command(epilog="Example: [b]oretrofit pretrain --steps 7500 --out runs/pretrain[/b]")
@_plain_errors()
def pretrain(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for state and result.")] = Path("runs/pretrain"),
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = 7_500,
    seed: Annotated[int, typer.Option(help="Of the initial weights and every batch.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's own choice.")] = None,
) -> None:
    """Train the small host from scratch, or go on where an earlier run in DIR stopped."""
    _check_positive(steps=steps, threads=threads or 1)
    out.mkdir(parents=True, exist_ok=True)
    _check_writable(out / "loss.csv")
    from .experiments.pretrain import PretrainSettings
    from .experiments.pretrain import pretrain as train

    console = _console()
    try:
        with _progress(console) as progress:
            task = progress.add_task("Training", total=steps)
            for step, loss in train(PretrainSettings(steps=steps, seed=seed), out, threads=threads):
                progress.update(task, completed=step, description=f"Training, loss {loss:.3f}")
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. The last state is in {out}; the same command again resumes there.")
        raise typer.Exit(130) from None
    console.print(f"The host and its loss curve are in {out}.")


@bench.command(epilog="Example: [b]oretrofit bench overhead --host random-v3 --rows 1000[/b]")
@_plain_errors()
def overhead(
    host: Host = "random-v3",
    rounds: Annotated[int, typer.Option(help="Rounds; a ratio is the median over them.")] = 7,
    rows: Annotated[int, typer.Option(help="Train rows.")] = 1000,
    columns: Annotated[int, typer.Option(help="Feature columns.")] = 10,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time host and variants against each other on one table of random data."""
    _check_positive(rounds=rounds, rows=rows, columns=columns)
    _check_writable(json_file)
    from .experiments.evaluate import resolve_device
    from .experiments.overhead import measure_overhead
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    with console.status("Timing") as status:
        table = measure_overhead(
            load_host(host), rows=rows, columns=columns, rounds=rounds, device=device, on_round=status.update
        )
    _print_frame(
        console, table, json_file, title=f"Time of a forward pass, variant / host, {rows} x {columns}, {device}"
    )


@bench.command("host", epilog="Example: [b]oretrofit bench host --host small --suite mini[/b]")
@_plain_errors()
def bench_host(
    host: Host = "small",
    suite: Suite = "mini",
    seeds: Seeds = 3,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Compare a host with ridge regression and a random forest."""
    _check_positive(seeds=seeds)
    _check_writable(json_file)
    import pandas as pd

    from .experiments.baselines import compare_baselines
    from .experiments.datasets import resolve_suite
    from .experiments.evaluate import check_datasets, resolve_device
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    datasets = resolve_suite(suite)
    check_datasets(datasets)
    with console.status("Comparing"):
        table = compare_baselines(load_host(host), datasets, seeds, device=device, on_case=console.print)
    mean = pd.DataFrame([{"dataset": "mean", **table.drop(columns="dataset").mean()}])
    title = "RMSE / RMSE of predicting the train mean"
    _print_frame(console, pd.concat([table, mean]), json_file, title=title)


@bench.command("ragged", epilog="Example: [b]oretrofit bench ragged --tables 200 --host small[/b]")
@_plain_errors()
def bench_ragged(
    tables: Annotated[int, typer.Option(help="Synthetic tables of unequal sizes.")] = 200,
    host: Host = "small",
    rounds: Annotated[int, typer.Option(help="Runs of each method, each in a process of its own.")] = 3,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Time ragged prediction against a loop of fit and predict, and against predict_batched by shape."""
    _check_positive(tables=tables, rounds=rounds)
    _check_writable(json_file)
    from .experiments import ragged
    from .experiments.evaluate import resolve_device
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    load_host(host)  # here, so that a host that is none is refused before the first process starts
    with console.status("Timing") as status:
        result = ragged.measure_ragged(host, tables=tables, rounds=rounds, device=device, on_run=status.update)
    _print_table(console, *ragged.bench_cells(result), title=f"Predicting {tables} tables, {host}, {device}")
    console.print(ragged.bench_notes(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=1) + "\n")


@bench.command("ragged-equality", epilog="Example: [b]oretrofit bench ragged-equality --tables 200[/b]")
@_plain_errors()
def bench_ragged_equality(
    tables: Annotated[int, typer.Option(help="Synthetic tables of mixed types, with missing cells.")] = 200,
    host: Host = "small",
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Show how far ragged prediction is from fit and predict, one table at a time."""
    _check_positive(tables=tables)
    _check_writable(json_file)
    from .calibration.settings import TABLES
    from .experiments import ragged
    from .experiments.evaluate import resolve_device
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    loaded = load_host(host)
    with _progress(console) as progress:
        calibrating = progress.add_task("Calibrating", total=TABLES)
        comparing = progress.add_task("Comparing", total=4 * tables)
        found = ragged.compare_equality(
            loaded,
            ragged.mixed_tables(tables),
            device=device,
            on_calibrated=lambda: progress.advance(calibrating),
            on_tables=lambda done: progress.update(comparing, completed=done),
        )
    _print_frame(console, found, json_file, title=f"Ragged prediction of {tables} tables against one by one, {device}")
    console.print(ragged.equality_notes())


@app.command(epilog="Example: [b]oretrofit frontier --variant full-o --plot frontier.png[/b]")
@_plain_errors()
def frontier(
    variant: Annotated[list[str] | None, typer.Option(help="As of patch; repeatable. Default: all.")] = None,
    host: Host = "small",
    tables: Annotated[int, typer.Option(help="Held-out synthetic tables.")] = 24,
    suite: Annotated[str | None, typer.Option(help="Real tables instead, as of eval.")] = None,
    seeds: Annotated[int, typer.Option(help="As of eval, with --suite.")] = 3,
    device: Device = "auto",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the tables (PNG).")] = None,
) -> None:
    """Show what predictions lose and what the gate buys as delta, and tau with it, grows."""
    _check_positive(tables=tables, seeds=seeds)
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot writes a .png file, not {plot.name!r}")
    _check_writable(json_file, plot)
    from .calibration.settings import TABLES
    from .calibration.variants import VARIANTS, check_variant
    from .experiments import frontier as run
    from .experiments.datasets import resolve_suite
    from .experiments.evaluate import resolve_device
    from .experiments.report import write_rows
    from .retrofit.hosts import load_host

    variants = list(dict.fromkeys(variant or VARIANTS))
    for name in variants:
        check_variant(name)
    device, console = resolve_device(device), _console()
    loaded = load_host(host)
    cases = run.synthetic_cases(tables) if suite is None else run.suite_cases(resolve_suite(suite), seeds)
    with _progress(console) as progress:
        calibrating = progress.add_task("Calibrating", total=TABLES)
        sweeping = progress.add_task("Sweeping delta", total=len(cases) * (1 + len(variants) * len(run.DELTAS)))
        rows = run.sweep_delta(
            loaded,
            cases,
            variants,
            device=device,
            on_table=lambda: progress.advance(calibrating),
            on_case=lambda: progress.advance(sweeping),
        )
    place = f"{tables} held-out synthetic tables" if suite is None else f"{len(cases)} cases of {suite}"
    for name, group in rows.groupby("variant", sort=False):
        _print_table(console, *run.delta_cells(group), title=f"{name} on {place}, by delta")
    console.print(run.notes())
    if json_file is not None:
        write_rows(rows, json_file)
    if plot is not None:
        run.plot_frontier(rows, plot)


@app.command(epilog="Example: [b]oretrofit ablate --blocks 2 --plot ablation.png[/b]")
@_plain_errors()
def ablate(
    blocks: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    seeds: Annotated[int, typer.Option(help="Random models, with the seeds 0 to N - 1.")] = 100,
    device: Device = "auto",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the table (PNG).")] = None,
) -> None:
    """Show where an inserted zero token wakes up: with no O-operators, with OAttention alone, with all."""
    _check_positive(blocks=blocks, seeds=seeds)
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot writes a .png file, not {plot.name!r}")
    _check_writable(json_file, plot)
    from .experiments import ablation
    from .experiments.evaluate import resolve_device
    from .experiments.report import write_rows

    device, console = resolve_device(device), _console()
    with console.status("Inserting zero tokens"):
        table = ablation.ablate(blocks=blocks, seeds=seeds, device=device)
    title = f"Zero tokens inserted, {seeds} seeds, float32, {device}: medians and largest"
    _print_table(console, *ablation.cells(table), title=title, left=2)
    console.print(ablation.notes(table))
    if json_file is not None:
        write_rows(table, json_file)
    if plot is not None:
        ablation.plot_ablation(table, plot)


@app.command(epilog="Example: [b]oretrofit audit --variant full-o --json audit.json[/b]")
@_plain_errors()
def audit(
    host: Host = "small",
    variant: Annotated[list[str] | None, typer.Option(help="As of patch; repeatable. Default: all.")] = None,
    tables: Annotated[int, typer.Option(help="Synthetic tables; figures are the largest over them.")] = 5,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Insert NULL rows and columns at every stage of a host and its variants, and say which part leaks."""
    _check_positive(tables=tables)
    _check_writable(json_file)
    from .calibration.variants import VARIANTS
    from .experiments import audit as run
    from .experiments.evaluate import resolve_device
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    with console.status("Auditing") as status:
        found = run.audit(
            load_host(host), variant or list(VARIANTS), tables=tables, device=device, on_step=status.update
        )
    title = f"NULLs in the input, {tables} synthetic tables, float32, {device}: shift of a live prediction"
    _print_table(console, *run.summary_cells(found), title=title)
    title = "NULLs in front of each stage: shift of an old token, norm of a NULL behind it"
    _print_table(console, *run.boundary_cells(found), title=title)
    for names, rows in run.leak_rows(found).items():
        if rows:
            _print_table(console, ["at", "what leaks"], rows, title=f"What leaks in {names}", left=2)
        else:
            console.print(f"Nothing leaks in {names}.")
    console.print(run.notes())
    if json_file is not None:
        json_file.write_text(json.dumps(found, indent=1) + "\n")


@app.command(epilog="Example: [b]oretrofit contracts --dtype fp32,bf16 --json contracts.json[/b]")
@_plain_errors()
def contracts(
    device: Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="[b]fp32[/b], [b]bf16[/b], [b]fp16[/b], [b]fp64[/b], joined by commas.")
    ] = "fp32,bf16,fp16,fp64",
    json_file: JsonFile = None,
) -> None:
    """Hold the operators to their definitions, beside the error of torch's own kernels."""
    _check_writable(json_file)
    from .experiments import contracts as run
    from .experiments.evaluate import resolve_device
    from .experiments.report import write_rows

    device, dtypes, console = resolve_device(device), run.parse_dtypes(dtype), _console()
    with console.status("Checking") as status:
        table = run.check_contracts(dtypes, device, on_step=status.update)
    for title, (header, cells) in run.table_cells(table).items():
        _print_table(console, header, cells, title=f"{title}, {device}", left=2)
    console.print(run.notes())
    if json_file is not None:
        write_rows(table, json_file)
    failed = table[[passed is False for passed in table["passed"]]]
    if len(failed):
        names = (f"{row.operator} {row.dtype} {row.property}" for row in failed.itertuples(index=False))
        typer.echo(f"Error: {len(failed)} of {len(table)} rows failed: {'; '.join(names)}", err=True)
        raise typer.Exit(1)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, markup=False, emoji=False)


def _progress(console: Console) -> Progress:
    from rich.progress import Progress

    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _stage(progress: Progress, name: str, total: int | None) -> Callable[[int], None]:
    """Begin a stage; what is returned is told how many of its steps are done."""
    task = progress.add_task(name, total=total)
    return lambda done: progress.update(task, completed=done)


def _check_writable(*files: Path | None) -> None:
    """Raise `OSError` now for a file that could not be written after minutes of work."""
    for file in files:
        if file is not None:
            existed = file.exists()
            file.open("a").close()
            if not existed:
                file.unlink()


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"--{name} must be at least 1, got {number}")


def _print_table(console: Console, header: list[str], cells: list[list[str]], *, title: str, left: int = 1) -> None:
    from rich import box
    from rich.table import Table

    console.print(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def _print_frame(console: Console, frame: pd.DataFrame, json_file: Path | None, *, title: str) -> None:
    """Print a table and, where asked to, write it."""
    from .experiments.report import frame_cells, write_rows

    _print_table(console, *frame_cells(frame), title=title)
    if json_file is not None:
        write_rows(frame, json_file)
