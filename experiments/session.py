"""`oretrofit eval` from its options to its report: what there is is reused, what is missing is run, all is written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..calibration import settings
from ..calibration.variants import VARIANTS
from ..retrofit.cluster import check_dask, connected
from ..retrofit.options import (
    check_between,
    check_calibration,
    check_choice,
    check_folder,
    check_host,
    check_margin,
    check_outputs,
    check_retrofit,
    host_file,
    unwritten,
)
from ..retrofit.printing import print_table, print_text
from ..retrofit.terminal import interrupted, open_progress

if TYPE_CHECKING:
    from distributed import Client
    from rich.console import Console

    from .case_runner import Failure
    from .evaluate import Plan
    from .runs import CaseResult, Run


@dataclass(frozen=True)
class EvalOptions:
    """The options of `oretrofit eval`, checked before the seconds of importing torch. Raises `ValueError`."""

    variant: list[str] | None
    suite: str
    seeds: int
    device: str
    host: str | None
    retrofit: Path | None
    max_rows: int
    precision: str
    delta: float
    quantile: float
    tables: int
    margin: float
    workers: int
    dask: str | None
    out: Path | None
    json_file: Path | None
    datasets: list[str] = field(init=False)

    def __post_init__(self) -> None:
        """Check them, and read the tables."""
        for name in self.variant or ():
            check_choice("--variant", name, (settings.IDENTITY, *VARIANTS))
        check_between("--seeds", self.seeds, 1, settings.MOST_SEEDS)
        check_choice("--device", self.device, settings.DEVICES)
        if self.dask is None:
            settings.check_workers("--workers", self.workers, self.device)
        else:
            check_dask()
            if self.workers != 1:
                raise ValueError("--workers is for processes here; with --dask the cluster's workers run the cases")
        if self.host is not None:
            check_host(self.host)
        check_retrofit("--retrofit", self.retrofit)
        settings.check_count("--max-rows", self.max_rows, least=2)
        check_choice("--precision", self.precision, settings.PRECISIONS)
        check_calibration(self.delta, self.quantile, self.tables)
        check_margin(self.margin)
        check_folder("--out", self.out)
        from .datasets import files_of, read_suite

        object.__setattr__(self, "datasets", read_suite(self.suite))
        check_outputs({"--json": self.json_file}, [self.retrofit, *files_of(self.datasets), *host_file(self.host)])


def run_session(options: EvalOptions, console: Console) -> list[str]:
    """Run what is missing of a plan, write and print the report; the errors to end with, each in a line.

    Raises `ValueError` for what cannot be run, `OSError` for a folder that cannot be written to.
    """
    with console.status("Loading TabPFN and the host"):
        from . import report
        from .page.shown import PAGE
        from .provenance import append_provenance
        from .runs import CASES, REPORTS, SETTINGS, case_rows, open_run
        from .style import short_datasets
        from .verdicts import WHAT_A_VERDICT_SAYS, power_words, verdicts

        plan = _plan(options)
    if options.dask is None:
        settings.check_workers("--workers", options.workers, plan.device)
    folder = options.out or Path("runs") / f"eval-{Path(plan.host.name or 'host').stem}-{options.precision}"
    if options.json_file is not None and options.json_file.resolve().parent == folder.resolve():
        raise ValueError(f"--json {options.json_file} is in the run's own folder, where summary.json holds the same")
    names = short_datasets(plan.datasets)
    cluster = nullcontext() if options.dask is None else connected(options.dask)
    with cluster as client, open_run(folder, plan.settings()) as opened:
        _say_what_is_there(console, opened, len(plan.datasets) * plan.seeds)
        if opened.missing():
            append_provenance(folder)
        cases, failures = _run_missing(plan, opened, options.workers, client, names, console)
        rows = case_rows(cases)
        with console.status("Testing what changed"):
            failed = [vars(failure) for failure in failures]
            summary = report.make_summary(opened.settings, rows, failed, options.margin)
        if cases:
            changes = report.case_cells(rows, names)
            print_table(console, *changes, title="RMSE change of each case against the host, %")
            print_table(console, *report.summary_cells(summary), title="RMSE change against the host, %")
            print_text(console, report.notes(summary))
            for words in [*verdicts(summary["statistics"]), WHAT_A_VERDICT_SAYS, power_words(summary["power"])]:
                if words:
                    print_text(console, words)
        with console.status("Drawing"):
            errors = _write_report(opened, summary, rows, options.json_file)
    files = [name for name in (*REPORTS, CASES, SETTINGS) if (folder / name).exists()]
    print_text(console, f"In {folder}: {', '.join(files)}")
    if PAGE in files:
        print_text(console, f"To be opened in a browser: {folder / PAGE}")
    if failures:
        errors.append(_failed_cases(failures, len(plan.datasets) * plan.seeds))
    return errors


def _plan(options: EvalOptions) -> Plan:
    from ..calibration.predicting import resolve_device
    from ..retrofit.api import load
    from ..retrofit.hosts import load_host
    from .evaluate import Plan

    given = load(options.retrofit, options.host) if options.retrofit else None
    return Plan(
        host=given.host if given else load_host(options.host or settings.HOST),
        datasets=options.datasets,
        seeds=options.seeds,
        variants=tuple(options.variant or (() if given else settings.PAPER_VARIANTS)),
        given=given,
        delta=options.delta,
        quantile=options.quantile,
        tables=options.tables,
        max_rows=options.max_rows,
        precision=options.precision,
        device=resolve_device(options.device),
    )


def _run_missing(
    plan: Plan, opened: Run, workers: int, client: Client | None, names: dict[str, str], console: Console
) -> tuple[list[CaseResult], list[Failure]]:
    from . import evaluate, report

    try:
        with open_progress(console) as progress:
            alone, labels = workers == 1 and client is None, list(opened.settings["variants"])
            will_calibrate = not all(opened.retrofit_file(label).exists() for label in plan.deltas())
            if opened.missing():
                print_text(console, _what_is_begun(plan, labels, will_calibrate, alone))
            calibrating = progress.add_task("Calibrating", total=plan.tables, visible=will_calibrate)
            warming = progress.add_task("Warming up", total=1 + len(labels), visible=alone)
            running = progress.add_task("Cases", total=len(opened.missing()))

            def show(line: str) -> None:
                progress.advance(running)
                print_text(console, line)

            return evaluate.evaluate(
                plan,
                opened,
                workers=workers,
                client=client,
                on_table=lambda: progress.advance(calibrating),
                on_warm_up=lambda: progress.advance(warming),
                on_case=lambda case: show(report.case_line(case.variants, names)),
                on_failure=lambda f: show(f"{names[f.dataset]} seed {f.seed} failed: {f.reason}"),
            )
    except KeyboardInterrupt as stop:
        interrupted(stop, f"Finished cases are in {opened.folder}; the same command again resumes there.")
    except OSError as error:
        safe = f"the cases before it are safe in {opened.folder}; the same command again goes on there"
        raise OSError(error.errno, f"{error.strerror or error}; {safe}", error.filename) from error


def _write_report(opened: Run, summary: dict[str, Any], rows: Any, json_file: Path | None) -> list[str]:
    from ..retrofit.files import write_json
    from .page.build import write_page
    from .page.shown import PAGE, Shown
    from .report import report_files
    from .runs import CASES

    files: dict[Path | None, Callable[[Path], None]] = {
        opened.folder / name: write for name, write in report_files(summary, rows).items()
    }
    if len(rows):
        files[opened.folder / PAGE] = partial(write_page, [Shown(opened.folder.resolve().name, opened, rows, summary)])
    safe = f"every finished case is safe in {opened.folder / CASES}; the same command again writes the rest"
    return unwritten({**files, json_file: partial(write_json, summary)}, safe)


def _what_is_begun(plan: Plan, labels: list[str], will_calibrate: bool, alone: bool) -> str:
    host, precision = Path(plan.host.name or "host").name, plan.precision_used()
    first = [f"tau is calibrated on {plan.tables} synthetic table{'s' * (plan.tables != 1)}"] if will_calibrate else []
    first += ["each model predicts a small table to warm up, so that no case's time counts what loads once"] * alone
    before = f" First {'; then '.join(first)}." if first else ""
    return f"Comparing {', '.join(labels)} with the host {host}, {precision} on {plan.device}.{before}"


def _say_what_is_there(console: Console, opened: Run, total: int) -> None:
    missing = opened.missing()
    if done := total - len(missing):
        print_text(console, f"{done} of {total} cases are in {opened.folder} already and are not run again.")
    if partly := sum(len(labels) < len(opened.settings["variants"]) for labels in missing.values()):
        print_text(console, f"{partly} of {total} are there for some of the variants; the others are added.")
    if opened.cases and opened.differences:
        differing = "; ".join(opened.differences)
        print_text(console, f"What ran there before ran otherwise ({differing}); it is kept, not used.")


def _failed_cases(failures: list[Failure], total: int) -> str:
    failed, may_pass = len(failures), sum(failure.may_pass for failure in failures)
    text = f"{failed} of {total} cases failed"
    if may_pass == failed:
        return f"{text}; the same command again retries them"
    advice = "mend what is named above, or leave them out of --suite or --seeds"
    if may_pass == 0:
        return f"{text} and would fail again: {advice}"
    return f"{text}; the same command again retries {may_pass} of them, the others would fail again: {advice}"
