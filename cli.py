"""The command line. Torch and TabPFN are imported inside the commands: `--help` needs neither."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .calibration import settings
from .calibration.variants import VARIANTS
from .experiments.bench import bench
from .retrofit import options, terminal
from .retrofit.files import write_json, write_rows
from .retrofit.printing import print_text

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)
app.add_typer(bench, name="bench")


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


@app.command(epilog="Example: [b]oretrofit patch --variant full-o --host small --out full-o.json[/b]")
@terminal.plain_errors()
def patch(
    variant: options.OneVariant = settings.VARIANT,
    host: options.Host = settings.HOST,
    delta: options.Delta = settings.DELTA,
    quantile: options.Quantile = settings.QUANTILE,
    tau: options.Tau = None,
    tables: options.Tables = settings.TABLES,
    seed: Annotated[int, typer.Option(help="Seed of the calibration tables.")] = settings.SEED,
    device: options.Device = "auto",
    out: options.RetrofitFile = None,
    json_file: options.JsonFile = None,
) -> None:
    """Calibrate and patch a host, list its sites, and check that it still predicts as before."""
    options.check_choice("--variant", variant, VARIANTS)
    options.check_host(host)
    options.check_calibration(delta, quantile, tables)
    options.check_tau(tau)
    options.check_between("--seed", seed, 0, 2**32 - 1)
    options.check_outputs({"--out": out, "--json": json_file}, options.host_file(host))
    device, console = terminal.start(device)
    from .retrofit.check import checked_summary, patch_and_check
    from .retrofit.patcher import known_spec
    from .retrofit.sites import site_notes, site_tables

    chosen: dict[str, Any] = {"delta": delta, "quantile": quantile, "tau": tau, "tables": tables, "seed": seed}
    with terminal.open_progress(console) as progress:
        retrofit, check = patch_and_check(host, variant, chosen, device, partial(terminal.begin_stage, progress))
    print_text(console, checked_summary(retrofit, check))
    sites, spec = retrofit.table, known_spec(retrofit.host.model)
    files: options.Files = {out: retrofit.save, json_file: partial(write_rows, sites)}
    terminal.finish(console, site_tables(sites, spec), site_notes(spec), files)
    print_text(console, f"Saved to {out}." if out else "Nothing was saved; --out FILE saves the retrofit.")


@app.command(epilog="Example: [b]oretrofit hosts --json hosts.json[/b]")
@terminal.plain_errors()
def hosts(json_file: options.JsonFile = None) -> None:
    """List what --host accepts, and what of it is here."""
    options.check_outputs({"--json": json_file})
    _, console = terminal.start("cpu")
    from .experiments.listing import host_tables
    from .retrofit.hosts import find_hosts

    found = find_hosts()
    terminal.finish(console, host_tables(found), "", {json_file: partial(write_json, found)})


@app.command(epilog="Example: [b]oretrofit datasets --json datasets.json[/b]")
@terminal.plain_errors()
def datasets(json_file: options.JsonFile = None) -> None:
    """List what --suite accepts: the bundled tables, suites, and how other tables are named."""
    options.check_outputs({"--json": json_file})
    console = terminal.open_console()
    from .experiments.listing import dataset_tables, list_datasets

    found = list_datasets()
    terminal.finish(console, dataset_tables(found), "", {json_file: partial(write_json, found)})


@app.command(epilog="Example: [b]oretrofit doctor --json doctor.json[/b]")
@terminal.plain_errors()
def doctor(json_file: options.JsonFile = None) -> None:
    """Check that all that a retrofit needs is here and works; a report to go with a question or a bug."""
    options.check_outputs({"--json": json_file})
    console = terminal.open_console()
    from .experiments import doctor as run

    with console.status("Looking") as status:
        found = run.examine(status.update)
    tables = [("oretrofit doctor", run.report_cells(found), 3)]
    terminal.finish(console, tables, "", {json_file: partial(write_json, found)}, found["problems"])


@app.command("eval", epilog="Example: [b]oretrofit eval --suite mini --seeds 3 --workers 4 --out runs/mini[/b]")
@terminal.plain_errors()
def evaluate(
    variant: options.Variant = None,
    suite: options.Suite = "mini",
    seeds: options.Seeds = settings.SEEDS,
    device: options.Device = "auto",
    host: options.NamedHost = None,
    retrofit: options.GivenRetrofit = None,
    max_rows: options.MaxRows = settings.MAX_ROWS,
    precision: options.Precision = settings.PRECISION,
    delta: options.Delta = settings.DELTA,
    quantile: options.Quantile = settings.QUANTILE,
    tables: options.Tables = settings.TABLES,
    margin: options.Margin = settings.MARGIN,
    workers: options.Workers = 1,
    dask: options.DaskCases = None,
    out: options.RunFolder = None,
    json_file: options.JsonFile = None,
) -> None:
    """Compare host and variants on matched cases. The same command again resumes; another one reuses what it can."""
    from .experiments.session import EvalOptions, run_session

    chosen = EvalOptions(
        *(variant, suite, seeds, device, host, retrofit, max_rows, precision),
        *(delta, quantile, tables, margin, workers, dask, out, json_file),
    )
    terminal.exit_with(run_session(chosen, terminal.open_console()))


@app.command(epilog="Example: [b]oretrofit report runs/small runs/half --out report.html[/b]")
@terminal.plain_errors()
def report(runs: options.RunFolders, out: options.Page, paper: options.Paper = False) -> None:
    """Make one page, for a browser, of what eval found: figures, every case, and how it was run. Runs nothing."""
    from .experiments.page.build import notices, render
    from .experiments.page.shown import files_read, read_shown
    from .retrofit.files import write_text

    options.check_outputs({"--out": out}, files_read(runs))
    console = terminal.open_console()
    with console.status("Drawing"):
        shown = read_shown(runs, wants_paper=paper)
        page = render(shown)
    terminal.finish(console, [], "\n".join(notices(shown)), {out: lambda file: write_text(file, page)})
    print_text(console, f"Saved to {out}.")


@app.command(
    epilog="Example: [b]oretrofit predict --train past.csv --test next.csv --target sales --by shop --out sales.csv[/b]"
)
@terminal.plain_errors()
def predict(
    train: options.Train,
    test: options.Test,
    target: options.Target,
    out: options.Predictions,
    by: options.By = None,
    quantiles: options.Quantiles = None,
    host: options.NamedHost = None,
    retrofit: options.ClosedRetrofit = None,
    too_few: options.TooFew = None,
    on_error: options.OnError = "error",
    precision: options.PredictPrecision = "auto",
    device: options.Device = "auto",
    keep: options.Keep = None,
    dask: options.Dask = None,
) -> None:
    """Predict a table with the closed retrofit of a host; with --by, each group from its own rows.

    Groups are predicted as if each were fitted alone, but share forward passes.
    The file at --out gets a row for each test row, in their order: its group
    (with --by), the mean as [b]prediction[/b], and a column like [b]q0.1[/b] for each quantile.
    A column is numbers, dates (2024-12-31) or categories, in both files alike;
    what was read as what is printed.
    """
    from .retrofit.predict_files import PredictOptions, predict_files

    chosen = PredictOptions(
        train, test, target, out, by, quantiles, host, retrofit, too_few, on_error, precision, device, keep or (), dask
    )
    device, console = terminal.start(device)
    with terminal.open_progress(console) as progress:
        predicted = predict_files(chosen, device, partial(terminal.begin_stage, progress))
    print_text(console, "\n".join(predicted.lines))
    for line in predicted.warnings:
        typer.echo(line, err=True)
    terminal.exit_with(predicted.errors)


@app.command(epilog="Example: [b]oretrofit pretrain --steps 7500 --out runs/pretrain[/b]")
@terminal.plain_errors()
def pretrain(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for state and result.")] = Path("runs/pretrain"),
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = settings.PRETRAIN_STEPS,
    seed: Annotated[int, typer.Option(help="Of the initial weights and every batch.")] = 0,
    host: Annotated[
        str | None, typer.Option(help="A small host to go on from (small, or a checkpoint), not from random weights.")
    ] = None,
    learning_rate: Annotated[float, typer.Option(help="The highest.")] = settings.PRETRAIN_RATE,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's own choice.")] = None,
    device: options.Device = "auto",
) -> None:
    """Train the small host from scratch, or go on where an earlier run in DIR stopped."""
    options.check_positive(steps=steps)
    options.check_between("--seed", seed, 0, 2**32 - 1)
    options.check_between("--learning-rate", learning_rate, 1e-6, 1)
    if host is not None:
        options.check_host(host)
    if threads is not None:
        options.check_between("--threads", threads, 1, 1024)
    options.check_folder("--out", out)
    import torch

    from .experiments.pretrain import PretrainSettings, what_is_kept
    from .experiments.pretrain import pretrain as train

    if threads is not None:
        torch.set_num_threads(threads)
    chosen = PretrainSettings(steps=steps, seed=seed, start=host, learning_rate=learning_rate)
    device, console = terminal.start(device)
    try:
        with terminal.open_progress(console) as progress:
            task = progress.add_task("Training", total=steps)
            for step, loss in train(chosen, out, device=device):
                progress.update(task, completed=step, description=f"Training, loss {loss:.3f}")
    except KeyboardInterrupt as stop:
        terminal.interrupted(stop, what_is_kept(out))
    print_text(console, f"The host and its loss curve are in {out}.")


@app.command(epilog="Example: [b]oretrofit frontier --variant full-o --plot frontier.png[/b]")
@terminal.plain_errors()
def frontier(
    variant: options.Variants = None,
    host: options.Host = settings.HOST,
    tables: Annotated[int, typer.Option(help="Held-out synthetic tables.")] = 24,
    suite: Annotated[str | None, typer.Option(help="Real tables instead, as of eval.")] = None,
    seeds: Annotated[int, typer.Option(help="As of eval, with --suite.")] = settings.SEEDS,
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Show what predictions lose and what the gate buys as delta, and tau with it, grows."""
    variants = options.chosen_variants(variant)
    options.check_host(host)
    options.check_positive(tables=tables)
    options.check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    options.check_plot(plot)
    from .experiments.datasets import files_of, read_suite

    datasets = [] if suite is None else read_suite(suite)
    options.check_outputs({"--json": json_file, "--plot": plot}, [*files_of(datasets), *options.host_file(host)])
    device, console = terminal.start(device)
    from .experiments import frontier as run
    from .retrofit.api import calibrate
    from .retrofit.check import synthetic_cases
    from .retrofit.hosts import load_host

    loaded = load_host(host)
    held_out = settings.SEED + settings.HELD_OUT
    cases = synthetic_cases(tables, held_out) if suite is None else run.suite_cases(datasets, seeds)
    with terminal.open_progress(console) as progress:
        calibrating = progress.add_task("Calibrating", total=settings.TABLES)
        sweeping = progress.add_task("Sweeping delta", total=len(cases) * (1 + len(variants) * len(run.DELTAS)))
        calibration = calibrate(loaded, device=device, on_table=lambda: progress.advance(calibrating))
        rows = run.sweep_delta(
            loaded, calibration, cases, variants, on_case=lambda: progress.advance(sweeping), device=device
        )
    place = f"{tables} held-out synthetic tables" if suite is None else f"{len(cases)} cases of {suite}"
    files = {json_file: partial(write_rows, rows), plot: partial(run.plot_frontier, rows)}
    terminal.finish(console, run.titled_tables(rows, place), run.notes(), files)


@app.command(epilog="Example: [b]oretrofit ablate --blocks 2 --plot ablation.png[/b]")
@terminal.plain_errors()
def ablate(
    blocks: Annotated[int, typer.Option(help="Transformer blocks.")] = 2,
    seeds: Annotated[int, typer.Option(help="Random models, with the seeds 0 to N - 1.")] = 100,
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
    plot: options.Plot = None,
) -> None:
    """Show where an inserted zero token wakes up: with no O-operators, with OAttention alone, with all."""
    options.check_positive(blocks=blocks)
    options.check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    options.check_plot(plot)
    options.check_outputs({"--json": json_file, "--plot": plot})
    device, console = terminal.start(device)
    from .experiments import ablation

    with console.status("Inserting zero tokens"):
        table = ablation.ablate(blocks=blocks, seeds=seeds, device=device)
    files = {json_file: partial(write_rows, table), plot: partial(ablation.plot_ablation, table)}
    title = f"Zero tokens inserted, {seeds} seeds, float32, {device}: medians and largest"
    terminal.finish(console, [(title, ablation.cells(table), 2)], ablation.notes(table), files)


@app.command(epilog="Example: [b]oretrofit audit --variant full-o --json audit.json[/b]")
@terminal.plain_errors()
def audit(
    host: options.Host = settings.HOST,
    variant: options.Variants = None,
    tables: Annotated[int, typer.Option(help="Synthetic tables; figures are the largest over them.")] = 5,
    device: options.Device = "auto",
    json_file: options.JsonFile = None,
) -> None:
    """Insert NULL rows and columns at every stage of a host and its variants, and say which part leaks."""
    variants = options.chosen_variants(variant)
    options.check_host(host)
    options.check_positive(tables=tables)
    options.check_outputs({"--json": json_file}, options.host_file(host))
    device, console = terminal.start(device)
    from .experiments import audit as run
    from .experiments import audit_report
    from .retrofit.hosts import load_host
    from .retrofit.patcher import known_spec

    with console.status("Auditing") as status:
        loaded = load_host(host)
        found = run.audit(loaded, variants, tables=tables, device=device, on_step=status.update)
    spec = known_spec(loaded.model)
    tables_found = audit_report.titled_tables(found, spec, device)
    files = {json_file: partial(write_json, found)}
    terminal.finish(console, tables_found, audit_report.notes(found, spec), files)


@app.command(epilog="Example: [b]oretrofit contracts --dtype fp32,bf16 --json contracts.json[/b]")
@terminal.plain_errors()
def contracts(
    device: options.Device = "auto",
    dtype: Annotated[
        str, typer.Option(help="[b]fp32[/b], [b]bf16[/b], [b]fp16[/b], [b]fp64[/b], joined by commas.")
    ] = "fp32,bf16,fp16,fp64",
    json_file: options.JsonFile = None,
) -> None:
    """Hold the operators to their definitions, beside the error of torch's own kernels."""
    options.check_outputs({"--json": json_file})
    device, console = terminal.start(device)
    from .experiments import contracts as run

    dtypes = run.parse_dtypes(dtype)
    with console.status("Checking") as status:
        table = run.check_contracts(dtypes, device, on_step=status.update)
    tables = [(f"{title}, {device}", cells, 2) for title, cells in run.table_cells(table).items()]
    terminal.finish(console, tables, run.notes(), {json_file: partial(write_rows, table)}, run.failures(table))
