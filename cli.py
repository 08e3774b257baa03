"""The command line. Torch and TabPFN are imported inside the commands: `--help` needs neither."""

from __future__ import annotations

import io
import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

from .calibration import settings
from .calibration.variants import VARIANTS
from .options import (
    check_between,
    check_calibration,
    check_choice,
    check_folder,
    check_host,
    check_outputs,
    check_positive,
    check_retrofit,
    check_tau,
    files_of,
    read_suite,
    unwritten,
    what_failed,
)

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.progress import Progress

    from .experiments.evaluate import Plan
    from .experiments.runs import Run

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


def _bold(names: Iterable[str]) -> str:
    return ", ".join(f"[b]{name}[/b]" for name in names)


Host = Annotated[str, typer.Option(help=f"{_bold(settings.HOST_NAMES)} or a checkpoint file.")]
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


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which asks for the same as Ctrl-C."""


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Turn the errors that a user can do something about into one message and exit code 2, and interrupts into one."""

    def terminate(*_: Any) -> NoReturn:
        raise _Terminated

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
        yield
    except ValueError as error:  # HostError, PatchError, RetrofitError and DatasetError are ValueErrors
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error
    except BrokenPipeError:
        raise  # the reader of the output has left: typer ends without a word
    except OSError as error:
        typer.echo(f"Error: {what_failed(error)}", err=True)
        raise typer.Exit(2) from error
    except (MemoryError, RuntimeError) as error:
        text = str(error).lower()
        if not isinstance(error, MemoryError) and "out of memory" not in text and "allocate memory" not in text:
            raise
        typer.echo(f"Error: there is not enough memory for this: {error}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as stop:
        _interrupted(stop, "Interrupted.")
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def _interrupted(stop: KeyboardInterrupt, message: str) -> NoReturn:
    typer.echo(f"\n{message}", err=True)
    raise typer.Exit(143 if isinstance(stop, _Terminated) else 130) from None


@app.command(epilog="Example: [b]oretrofit patch --variant full-o --host small --out full-o.json[/b]")
@_plain_errors()
def patch(
    variant: Annotated[str, typer.Option(help=f"{_bold(VARIANTS)}.")] = settings.VARIANT,
    host: Host = settings.HOST,
    delta: Delta = settings.DELTA,
    quantile: Quantile = settings.QUANTILE,
    tau: Annotated[float | None, typer.Option(help="One tau for every site instead of calibrating.")] = None,
    tables: Tables = settings.TABLES,
    seed: Annotated[int, typer.Option(help="Seed of the calibration tables.")] = settings.SEED,
    device: Device = "auto",
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Save the retrofit (JSON, no weights).")] = None,
    json_file: JsonFile = None,
) -> None:
    """Calibrate and patch a host, list its sites, and check that it still predicts as before."""
    check_choice("--variant", variant, VARIANTS)
    check_host(host)
    check_calibration(delta, quantile, tables)
    check_tau(tau)
    check_between("--seed", seed, 0, 2**32 - 1)
    check_choice("--device", device, settings.DEVICES)
    check_outputs({"--out": out, "--json": json_file}, files_of([], host))
    import oretrofit

    from .calibration.predicting import resolve_device
    from .experiments import report, style
    from .retrofit.check import near_identity, synthetic_cases
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    with _progress(console) as progress:
        task = progress.add_task("Calibrating", total=tables)
        options: dict[str, Any] = {"delta": delta, "quantile": quantile, "tau": tau, "tables": tables, "seed": seed}
        loaded = load_host(host)
        retrofit = oretrofit.patch(loaded, variant, **options, device=device, on_table=lambda: progress.advance(task))
        progress.remove_task(task)
        task = progress.add_task("Checking", total=2 * _HELD_OUT)
        cases = synthetic_cases(_HELD_OUT, seed + settings.HELD_OUT)
        check = near_identity(retrofit, cases, on_case=lambda: progress.advance(task), device=device)

    errors = unwritten({out: retrofit.save, json_file: partial(report.write_rows, retrofit.table)})
    console.print(f"{variant}, {len(retrofit.sites)} sites, settings {json.dumps(retrofit.settings)}")
    short = ", ".join(f"{short} = {name}" for name, short in style.SHORT_NAMES.items())
    console.print(f"1 %, 50 %, 99 %: quantiles of ||h||²; p: presence; both: receiver and source; {short}\n")
    for title, (header, cells) in report.site_cells(retrofit.table).items():
        _print_table(console, header, cells, title=title, left=2)
    console.print(
        f"On {_HELD_OUT} held-out synthetic tables, in float32: RMSE change mean "
        f"{check['mean_rmse_delta_pct']:+.4f} %, largest {check['largest_rmse_delta_pct']:+.4f} %; largest shift of a "
        f"prediction {check['max_abs_diff_sd']:.2g} target standard deviations."
    )
    _exit_with(errors)
    if out is None:
        console.print("Nothing was saved; --out FILE saves the retrofit.")
    else:
        console.print(f"Saved to {out}.", soft_wrap=True)


@app.command("eval", epilog="Example: [b]oretrofit eval --suite mini --seeds 3 --out runs/mini[/b]")
@_plain_errors()
def evaluate(
    variant: Annotated[
        list[str] | None,
        typer.Option(help=f"{_bold(VARIANTS)}; repeatable. Default: {' and '.join(settings.PAPER_VARIANTS)}."),
    ] = None,
    suite: Suite = "mini",
    seeds: Seeds = settings.SEEDS,
    device: Device = "auto",
    host: Annotated[
        str | None, typer.Option(help=f"As of patch. Default: {settings.HOST}, or the host that --retrofit names.")
    ] = None,
    retrofit: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Evaluate a retrofit saved by patch, as it is.")
    ] = None,
    max_rows: Annotated[
        int, typer.Option(help="Most train rows of a case; half as many test rows.")
    ] = settings.MAX_ROWS,
    precision: Annotated[str, typer.Option(help=f"{_bold(settings.PRECISIONS)}.")] = settings.PRECISION,
    delta: Delta = settings.DELTA,
    quantile: Quantile = settings.QUANTILE,
    tables: Tables = settings.TABLES,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run. Default: runs/eval-HOST-PRECISION.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Compare host and variants on matched cases. The same command again resumes; another one reuses what it can."""
    for name in variant or ():
        check_choice("--variant", name, (settings.IDENTITY, *VARIANTS))
    check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    check_choice("--device", device, settings.DEVICES)
    if host is not None:
        check_host(host)
    check_retrofit("--retrofit", retrofit)
    settings.check_count("--max-rows", max_rows, least=2)
    check_choice("--precision", precision, settings.PRECISIONS)
    check_calibration(delta, quantile, tables)
    check_folder("--out", out)
    datasets = read_suite(suite)
    check_outputs({"--json": json_file}, [retrofit, *files_of(datasets, host)])
    from .calibration.predicting import resolve_device
    from .experiments import evaluate as run
    from .retrofit.api import load
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    given = load(retrofit, host) if retrofit else None
    plan = run.Plan(
        host=given.host if given else load_host(host or settings.HOST),
        datasets=datasets,
        seeds=seeds,
        variants=tuple(variant or (() if given else settings.PAPER_VARIANTS)),
        given=given,
        delta=delta,
        quantile=quantile,
        tables=tables,
        max_rows=max_rows,
        precision=precision,
        device=device,
    )
    folder = out or Path("runs") / f"eval-{Path(plan.host.name or 'host').stem}-{precision}"
    if json_file is not None and json_file.resolve().parent == folder.resolve():
        raise ValueError(f"--json {json_file} is in the run's own folder, where summary.json holds the same")
    _run_eval(console, plan, folder, json_file)


def _run_eval(console: Console, plan: Plan, folder: Path, json_file: Path | None) -> None:
    from .experiments import evaluate as run
    from .experiments import report
    from .experiments.runs import REPORTS, open_run
    from .experiments.style import short_datasets

    total, names = len(plan.datasets) * plan.seeds, short_datasets(plan.datasets)
    with open_run(folder, plan.settings()) as opened:
        _say_what_is_there(console, opened, total)
        try:
            with _progress(console) as progress:
                calibrating = progress.add_task("Calibrating", total=plan.tables)
                running = progress.add_task("Cases", total=len(opened.missing()))

                def show(line: str) -> None:
                    progress.advance(running)
                    console.print(line, soft_wrap=True)

                cases, failures = run.evaluate(
                    plan,
                    opened,
                    on_table=lambda: progress.advance(calibrating),
                    on_case=lambda case: show(report.case_line(case.variants, names)),
                    on_failure=lambda f: show(f"{names[f.dataset]} seed {f.seed} failed: {f.reason}"),
                )
        except KeyboardInterrupt as stop:
            _interrupted(stop, f"Interrupted. Finished cases are in {folder}; the same command again resumes there.")
        except OSError as error:
            safe = f"the cases before it are safe in {folder}; the same command again goes on there"
            raise OSError(error.errno, f"{error.strerror or error}; {safe}", error.filename) from error

        rows = run.case_rows(cases)
        summary = report.make_summary(opened.settings, rows, [vars(failure) for failure in failures])
        files: dict[Path | None, Callable[[Path], None]] = {
            folder / name: write for name, write in report.report_files(summary, rows).items()
        }
        safe = f"every finished case is safe in {folder / 'cases.jsonl'}; the same command again writes the rest"
        errors = unwritten({**files, json_file: partial(report.write_json, summary)}, safe)
    if cases:
        changes = report.case_cells(rows, names)
        _print_table(console, *changes, title="RMSE change of each case against the host, %")
        _print_table(console, *report.summary_cells(summary), title="RMSE change against the host, %")
        console.print(report.notes(summary))
    written = [name for name in REPORTS if (folder / name).exists()]
    console.print(f"In {folder}: {', '.join([*written, 'cases.jsonl', 'settings.json'])}", soft_wrap=True)
    if failures:
        errors.append(_failed_cases(len(failures), sum(failure.may_pass for failure in failures), total))
    _exit_with(errors)


def _say_what_is_there(console: Console, opened: Run, total: int) -> None:
    missing = opened.missing()
    if done := total - len(missing):
        console.print(f"{done} of {total} cases are in {opened.folder} already and are not run again.", soft_wrap=True)
    if partly := sum(len(labels) < len(opened.settings["variants"]) for labels in missing.values()):
        console.print(f"{partly} of {total} are there for some of the variants; the others are added.")
    if opened.cases and opened.differences:
        differing = "; ".join(opened.differences)
        console.print(f"What ran there before ran otherwise ({differing}); it is kept, not used.", soft_wrap=True)


def _failed_cases(failed: int, may_pass: int, total: int) -> str:
    text = f"{failed} of {total} cases failed"
    if may_pass == failed:
        return f"{text}; the same command again retries them"
    advice = "mend what is named above, or leave them out of --suite or --seeds"
    if may_pass == 0:
        return f"{text} and would fail again: {advice}"
    return f"{text}; the same command again retries {may_pass} of them, the others would fail again: {advice}"


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
    Columns of dates (and of text like 2024-12-31 throughout) become calendar
    features, by TabPFN's code.
    """
    if on_error not in ("error", "skip"):
        raise ValueError(f"--on-error is error or skip, not {on_error!r}")
    if too_few not in (None, "error", "nan", "pooled"):
        raise ValueError(f"--too-few is error, nan or pooled, not {too_few!r}")
    if by is None and (too_few is not None or on_error == "skip"):
        raise ValueError("--too-few and --on-error are about groups, whose column --by names")
    levels = _parse_quantiles(quantiles)
    for file in (train, test, out):
        if file.suffix not in (".csv", ".parquet"):
            raise ValueError(f"{file} is neither a .csv nor a .parquet file")
    if out.resolve() in (train.resolve(), test.resolve()):
        raise ValueError(f"--out {out} would overwrite what is read")
    _check_writable(out)
    import pandas as pd

    import oretrofit

    from .calibration.settings import TABLES
    from .experiments.evaluate import PRECISIONS, resolve_device
    from .retrofit.ragged import RaggedReport, check_groups

    if precision not in PRECISIONS:
        raise ValueError(f"unknown precision {precision!r}; there are: {', '.join(PRECISIONS)}")
    device, console = resolve_device(device), _console()
    known = _read_table(train, by)
    # What is text in one file is no number in the other, though all of its cells may look like one.
    text_columns = [name for name in known if pd.api.types.is_string_dtype(known[name])]
    wanted = _read_table(test, by, text_columns)
    if target in known and not pd.api.types.is_numeric_dtype(known[target]):
        numbers = pd.to_numeric(known[target].astype(str), errors="coerce")
        text = known[numbers.isna() & known[target].notna()]
        if len(text) and on_error == "error":
            group = f" in group {text[by].iloc[0]!r}" if by in text else ""
            raise ValueError(f"the target {target!r} of {train} is not numeric: {text[target].iloc[0]!r}{group}")
        known[target] = numbers  # text is missing then, which costs no more than its group
    named = [] if by is None else [by]
    answers_to = ["prediction", *(f"q{level:.12g}" for level in levels)]
    if by in answers_to:
        raise ValueError(f"the group column cannot be called {by!r}, as a column of predictions is")
    if by is None:
        if len(known) == 1:
            raise ValueError(f"{train} has one row; a prediction needs two")
        if list(known) == [target]:
            raise ValueError(f"{train} has no columns beside {target!r} to predict from")
        by = "(group)"
        while by in known or by in wanted:
            by += "_"
        known[by] = wanted[by] = "the whole table"
    features = check_groups(known, wanted, target=target, by=by)  # also here, before it takes time to calibrate
    gaps = int((known[target].isna() & known[by].isin(wanted[by])).sum())
    if gaps and on_error == "error":
        skip = ", or say --on-error skip to go without their groups" if named else ""
        raise ValueError(f"{gaps} rows of {train} have no {target!r}: leave them out{skip}")
    _parse_dates(known, wanted, features)
    with _progress(console) as progress:
        if retrofit is not None:
            closed = oretrofit.load(retrofit, host)
        else:
            task = progress.add_task("Calibrating", total=TABLES)
            closed = oretrofit.patch(host or "small", "closed", device=device, on_table=lambda: progress.advance(task))

        groups = wanted[by].nunique() if by in wanted else None
        task = progress.add_task("Predicting", total=groups)
        report = RaggedReport()
        frame = closed.predict_groups(
            known,
            wanted,
            target=target,
            by=by,
            output_type="main",
            quantiles=levels,
            too_few=too_few or ("nan" if on_error == "skip" else "error"),
            on_error="skip" if on_error == "skip" else "raise",
            report=report,
            on_tables=lambda done: progress.update(task, completed=done),
            device=device,
            inference_precision=PRECISIONS[precision],
            inference_config={"TRANSFORM_DATES": True},
        )
    columns = dict(zip(answers_to, (frame[column] for column in ["mean", *levels]), strict=True))
    answers = wanted[named].assign(**columns)
    _write_table(answers, out)
    console.print(
        f"Tables: {report.tables}; forward passes: {report.batches}, for {report.members} ensemble members; "
        f"padding: {report.padding:.1%} of their work."
    )
    for group, reason in list(report.errors.items())[:20]:
        typer.echo(f"No prediction for group {group!r}: {reason}", err=True)
    if len(report.errors) > 20:
        typer.echo(f"... and for {len(report.errors) - 20} more groups", err=True)
    if missing := int(answers["prediction"].isna().sum()):
        typer.echo(f"{missing} of {len(answers)} rows have no prediction.", err=True)
    console.print(f"Written to {out}.", soft_wrap=True)


@app.command(epilog="Example: [b]oretrofit pretrain --steps 7500 --out runs/pretrain[/b]")
@_plain_errors()
def pretrain(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for state and result.")] = Path("runs/pretrain"),
    steps: Annotated[int, typer.Option(help="Optimizer steps in all.")] = settings.PRETRAIN_STEPS,
    seed: Annotated[int, typer.Option(help="Of the initial weights and every batch.")] = 0,
    threads: Annotated[int | None, typer.Option(help="CPU threads. Default: torch's own choice.")] = None,
) -> None:
    """Train the small host from scratch, or go on where an earlier run in DIR stopped."""
    _check_positive(steps=steps)
    check_between("--seed", seed, 0, 2**32 - 1)
    if threads is not None:
        check_between("--threads", threads, 1, 1024)
    check_folder("--out", out)
    import torch

    from .experiments.pretrain import PretrainSettings
    from .experiments.pretrain import pretrain as train

    if threads is not None:
        torch.set_num_threads(threads)
    console = _console()
    try:
        with _progress(console) as progress:
            task = progress.add_task("Training", total=steps)
            for step, loss in train(PretrainSettings(steps=steps, seed=seed), out):
                progress.update(task, completed=step, description=f"Training, loss {loss:.3f}")
    except KeyboardInterrupt as stop:
        _interrupted(stop, f"Interrupted. The last state is in {out}; the same command again resumes there.")
    console.print(f"The host and its loss curve are in {out}.", soft_wrap=True)


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
    check_host(host)
    _check_positive(rounds=rounds, rows=rows, columns=columns)
    check_choice("--device", device, settings.DEVICES)
    check_outputs({"--json": json_file}, files_of([], host))
    from .calibration.predicting import resolve_device
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
    host: Host = settings.HOST,
    suite: Suite = "mini",
    seeds: Seeds = settings.SEEDS,
    device: Device = "auto",
    json_file: JsonFile = None,
) -> None:
    """Compare a host with ridge regression and a random forest."""
    check_host(host)
    check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    check_choice("--device", device, settings.DEVICES)
    datasets = read_suite(suite)
    check_outputs({"--json": json_file}, files_of(datasets, host))
    import pandas as pd

    from .calibration.predicting import resolve_device
    from .experiments.baselines import compare_baselines
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
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
    host: Host = settings.HOST,
    tables: Annotated[int, typer.Option(help="Held-out synthetic tables.")] = 24,
    suite: Annotated[str | None, typer.Option(help="Real tables instead, as of eval.")] = None,
    seeds: Annotated[int, typer.Option(help="As of eval, with --suite.")] = settings.SEEDS,
    device: Device = "auto",
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the tables (PNG).")] = None,
) -> None:
    """Show what predictions lose and what the gate buys as delta, and tau with it, grows."""
    variants = list(dict.fromkeys(variant or VARIANTS))
    for name in variants:
        check_choice("--variant", name, VARIANTS)
    check_host(host)
    _check_positive(tables=tables)
    check_between("--seeds", seeds, 1, settings.MOST_SEEDS)
    check_choice("--device", device, settings.DEVICES)
    if plot is not None and plot.suffix != ".png":
        raise ValueError(f"--plot writes a .png file, not {plot.name!r}")
    datasets = [] if suite is None else read_suite(suite)
    check_outputs({"--json": json_file, "--plot": plot}, files_of(datasets, host))
    from .calibration.predicting import resolve_device
    from .experiments import frontier as run
    from .experiments.report import write_rows
    from .retrofit.api import calibrate
    from .retrofit.check import synthetic_cases
    from .retrofit.hosts import load_host

    device, console = resolve_device(device), _console()
    loaded = load_host(host)
    held_out = settings.SEED + settings.HELD_OUT
    cases = synthetic_cases(tables, held_out) if suite is None else run.suite_cases(datasets, seeds)
    with _progress(console) as progress:
        calibrating = progress.add_task("Calibrating", total=settings.TABLES)
        sweeping = progress.add_task("Sweeping delta", total=len(cases) * (1 + len(variants) * len(run.DELTAS)))
        calibration = calibrate(loaded, device=device, on_table=lambda: progress.advance(calibrating))
        rows = run.sweep_delta(
            loaded, calibration, cases, variants, on_case=lambda: progress.advance(sweeping), device=device
        )
    errors = unwritten({json_file: partial(write_rows, rows), plot: partial(run.plot_frontier, rows)})
    place = f"{tables} held-out synthetic tables" if suite is None else f"{len(cases)} cases of {suite}"
    for name, group in rows.groupby("variant", sort=False):
        _print_table(console, *run.delta_cells(group), title=f"{name} on {place}, by delta")
    console.print(run.notes())
    _exit_with(errors)


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

    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it cannot write must not cost the results
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def _progress(console: Console) -> Progress:
    from rich.progress import Progress

    return Progress(console=console, transient=True, disable=not console.is_terminal)


def _check_writable(*files: Path | None) -> None:
    """Raise `OSError` now for a file that could not be written after minutes of work."""
    from .retrofit.files import check_writable

    check_writable(*files)


def _exit_with(errors: Sequence[str]) -> None:
    """Exit with code 1 if there are errors, each in a line."""
    for error in errors:
        typer.echo(f"Error: {error}", err=True)
    if errors:
        raise typer.Exit(1)


def _parse_quantiles(text: str | None) -> list[float]:
    try:
        levels = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        levels = [math.nan]
    if not all(0 <= level <= 1 for level in levels):
        raise ValueError(f"--quantiles are numbers between 0 and 1, joined by commas, not {text!r}")
    return list(dict.fromkeys(levels))


def _read_table(file: Path, by: str | None, text_columns: Sequence[str] = ()) -> pd.DataFrame:
    """Read a table; in a CSV file, names of groups are text, be they 1 or NA, and so are the cells of some columns."""
    import pandas as pd

    try:
        if file.suffix == ".csv":
            table = pd.read_csv(file, low_memory=False, dtype=dict.fromkeys(text_columns, str))
            if by in table:
                names = pd.read_csv(file, usecols=[by], dtype=str, keep_default_na=False)[by].to_numpy()
                table[by] = pd.Series(names, table.index).where(names != "")
            return table
        return pd.read_parquet(file)
    except ValueError as error:  # the parsers' own errors, too
        raise ValueError(f"cannot read {file}: {error}") from error


def _parse_dates(known: pd.DataFrame, wanted: pd.DataFrame, features: Sequence[Any]) -> None:
    """Make dates of the columns whose text is dates in all rows of both tables."""
    import pandas as pd

    for name in features:
        columns = [table[name] for table in (known, wanted)]
        if all(
            pd.api.types.is_string_dtype(column) and column.str.match(r"\d{4}-\d\d-\d\d").eq(True).all()
            for column in columns
        ):
            try:
                known[name], wanted[name] = (pd.to_datetime(column, format="ISO8601") for column in columns)
            except ValueError:  # some only begin like dates
                continue


def _write_table(table: pd.DataFrame, file: Path) -> None:
    """Write a table; an index that only counts the rows is left out of a CSV file."""
    import pandas as pd

    if file.suffix == ".csv":
        named = table.index.names if any(table.index.names) else "index"
        table.to_csv(file, index=not table.index.equals(pd.RangeIndex(len(table))), index_label=named)
    else:
        table.to_parquet(file)


def _check_positive(**numbers: int) -> None:
    check_positive(**numbers)


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

    errors = unwritten({json_file: partial(write_rows, frame)})
    _print_table(console, *frame_cells(frame), title=title)
    _exit_with(errors)
