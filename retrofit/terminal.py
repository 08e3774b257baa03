"""What commands have in common: how they print, show progress, and end."""

from __future__ import annotations

import io
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import typer

from ..calibration.settings import DEVICES
from .files import write_rows
from .options import Files, check_choice, unwritten, what_failed, without_advice
from .printing import Titled, frame_cells, print_table, print_text

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.progress import Progress

# Begins a stage of the work, with its name and steps; returns what to call with the number of steps that are done.
Begin: TypeAlias = Callable[[str, int | None], Callable[[int], None]]


class Terminated(KeyboardInterrupt):
    """SIGTERM, which asks for the same as Ctrl-C."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors that a user can do something about into one message and exit code 2, and interrupts into one.

    Each warning is said once, in a line.
    """

    def terminate(*_: Any) -> NoReturn:
        raise Terminated

    def say(message: Warning | str, *_: Any, **__: Any) -> None:
        if str(message) not in said:
            said.add(str(message))
            typer.echo(f"Warning: {without_advice(str(message))}", err=True)

    said: set[str] = set()

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
        with warnings.catch_warnings():
            warnings.showwarning = say
            yield
    except ValueError as error:  # HostError, PatchError, RetrofitError and DatasetError are ValueErrors
        typer.echo(f"Error: {without_advice(str(error))}", err=True)
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
        first, *_ = str(error).splitlines() or [""]  # behind it TabPFN says how to write a loop
        typer.echo(f"Error: there is not enough memory for this: {first}", err=True)
        raise typer.Exit(2) from error
    except KeyboardInterrupt as stop:
        interrupted(stop)
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)


def interrupted(stop: KeyboardInterrupt, more: str = "") -> NoReturn:
    """Say so, and exit as a shell expects."""
    terminated = isinstance(stop, Terminated)
    typer.echo(f"\n{'Ended by SIGTERM' if terminated else 'Interrupted'}.{more and f' {more}'}", err=True)
    raise typer.Exit(143 if terminated else 130) from None


def exit_with(errors: Sequence[str]) -> None:
    """Exit with code 1 if there are errors, each in a line."""
    for error in errors:
        typer.echo(f"Error: {error}", err=True)
    if errors:
        raise typer.Exit(1)


def start(device: str) -> tuple[str, Console]:
    """The device that `device` means here, and standard output; imports torch. Raises `ValueError` for no device."""
    check_choice("--device", device, DEVICES)
    console = open_console()
    with console.status("Loading torch and TabPFN"):
        from ..calibration.predicting import resolve_device

        return resolve_device(device), console


def open_console() -> Console:
    """Standard output, without markup."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it does not have must not cost the results
        sys.stdout.reconfigure(errors="backslashreplace")
    console = Console(highlight=False, markup=False, emoji=False)
    console.width = console.width or 80  # COLUMNS=0 is a width that nobody knows
    return console


def open_progress(console: Console) -> Progress:
    """Progress bars, where the console is a terminal."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def begin_stage(progress: Progress, name: str, total: int | None) -> Callable[[int], None]:
    """Begin a stage; what is returned is told how many of its steps are done."""
    task = progress.add_task(name, total=total)
    return lambda done: progress.update(task, completed=done)


def finish(
    console: Console,
    tables: Iterable[Titled],
    notes: str,
    files: Files,
    failures: Sequence[str] = (),
) -> None:
    """End a command: write its files, print its tables and notes, and exit with code 1 for what failed."""
    errors = unwritten(files)
    for title, (header, cells), left in tables:
        print_table(console, header, cells, title=title, left=left)
    if notes:
        print_text(console, notes)
    exit_with([*errors, *failures])


def finish_frame(console: Console, frame: pd.DataFrame, json_file: Path | None, title: str, notes: str = "") -> None:
    """`finish` with a table as it is."""
    finish(console, [(title, frame_cells(frame), 1)], notes, {json_file: partial(write_rows, frame)})
