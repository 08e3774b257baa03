"""What commands have in common: how they print, show progress, and end."""

from __future__ import annotations

import io
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

import typer

from ..calibration.settings import DEVICES
from .files import write_rows
from .options import check_choice, unwritten, what_failed, without_advice

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console
    from rich.progress import Progress

# Header and rows of a table.
Cells: TypeAlias = tuple[list[str], list[list[str]]]

# A table with its title, and how many of its columns are text.
Titled: TypeAlias = tuple[str, Cells, int]

# Begins a stage of the work, with its name and steps; returns what to call with the number of steps that are done.
Begin: TypeAlias = Callable[[str, int | None], Callable[[int], None]]


class Terminated(KeyboardInterrupt):
    """SIGTERM, which asks for the same as Ctrl-C."""


@contextmanager
def plain_errors() -> Iterator[None]:
    """Turn the errors that a user can do something about into one message and exit code 2, and interrupts into one."""

    def terminate(*_: Any) -> NoReturn:
        raise Terminated

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, terminate) if in_main else None
    try:
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
    from ..calibration.predicting import resolve_device

    return resolve_device(device), open_console()


def open_console() -> Console:
    """Standard output, without markup."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):  # a character that it does not have must not cost the results
        sys.stdout.reconfigure(errors="backslashreplace")
    return Console(highlight=False, markup=False, emoji=False)


def open_progress(console: Console) -> Progress:
    """Progress bars, where the console is a terminal."""
    from rich.progress import Progress

    return Progress(console=console, transient=True, disable=not console.is_terminal)


def begin_stage(progress: Progress, name: str, total: int | None) -> Callable[[int], None]:
    """Begin a stage; what is returned is told how many of its steps are done."""
    task = progress.add_task(name, total=total)
    return lambda done: progress.update(task, completed=done)


def print_table(console: Console, header: list[str], cells: list[list[str]], *, title: str, left: int = 1) -> None:
    """Print a table, its first `left` columns flush left."""
    from rich import box
    from rich.table import Table

    console.print(title)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for i, name in enumerate(header):
        table.add_column(name, justify="left" if i < left else "right", overflow="fold")
    for row in cells:
        table.add_row(*row)
    console.print(table)


def frame_cells(frame: pd.DataFrame) -> Cells:
    """Header and cells of any table, numbers to four digits."""
    cells = [[f"{v:.4g}" if isinstance(v, float) else str(v) for v in row] for row in frame.to_numpy(dtype=object)]
    return [str(column).replace("_", " ") for column in frame.columns], cells


def finish(
    console: Console,
    tables: Iterable[Titled],
    notes: str,
    files: Mapping[Path | None, Callable[[Path], None]],
    failures: Sequence[str] = (),
) -> None:
    """End a command: write its files, print its tables and notes, and exit with code 1 for what failed."""
    errors = unwritten(files)
    for title, (header, cells), left in tables:
        print_table(console, header, cells, title=title, left=left)
    if notes:
        console.print(notes)
    exit_with([*errors, *failures])


def finish_frame(console: Console, frame: pd.DataFrame, json_file: Path | None, title: str, notes: str = "") -> None:
    """`finish` with a table as it is."""
    finish(console, [(title, frame_cells(frame), 1)], notes, {json_file: partial(write_rows, frame)})
