"""One function, called with many arguments in processes of one thread each.

A machine is used best by as many such processes as it has cores: torch's threads meet after every operation, and small
tables leave them little to share (docs/threads.md).
"""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process
from typing import TYPE_CHECKING, Any, TypeVar

import threadpoolctl
import torch
from joblib.externals import loky

from .calls import Caught, recorded, repeat
from .cluster import call_each_on

if TYPE_CHECKING:
    from distributed import Client

Argument = TypeVar("Argument")
Result = TypeVar("Result")

# How many arguments are sent ahead for each process, so that none waits for the caller.
AHEAD = 2


def call_each(
    function: Callable[[Argument], Result],
    arguments: Iterable[Argument],
    processes: int,
    *,
    start: str | None = None,
    ahead: int | None = None,
    client: Client | None = None,
) -> Generator[tuple[int, Result], None, None]:
    """Call a function with each argument, in processes that live as long as this generator: close it.

    What can be sent to no process, or not back from it, is called here, behind all others; and so is what is left when
    a process is killed, with a warning. What a process warns of is repeated here, once.

    Args:
        function: Reaches each process once.
        arguments: Taken one by one, as there is work for them.
        processes: How many, of one thread each; 0 to call the function here.
        start: How they start, `fork` or `loky`; by default as of `start_method`.
        ahead: How many arguments may be on their way at once.
        client: Of a Dask cluster, whose workers call the function in place of processes here (`cluster`).

    Yields:
        The position of an argument and the function's result, as they come.
    """
    if client is not None:
        yield from call_each_on(client, function, arguments, ahead=ahead)
        return
    left = enumerate(arguments)
    behind: list[tuple[int, Argument]] = []
    if processes:
        said: set[Caught] = set()
        with _pool(function, processes, start or start_method()) as pool:
            sent: dict[Future, tuple[int, Argument]] = {}
            try:
                while True:
                    room = (ahead or AHEAD * processes) - len(sent)
                    for index, argument in itertools.islice(left, max(0, room)):
                        try:
                            sent[pool.submit(_call, pickle.dumps(argument))] = index, argument
                        except Exception as error:
                            behind.append((index, argument))
                            if isinstance(error, BrokenExecutor):
                                raise
                    if not sent:
                        break
                    for future in wait(sent, return_when=FIRST_COMPLETED).done:
                        try:
                            result, caught = pickle.loads(future.result())
                        except BrokenExecutor:
                            raise
                        except Exception:
                            behind.append(sent.pop(future))
                            continue
                        index, _ = sent.pop(future)
                        repeat(caught, said)
                        yield index, result
            except BrokenExecutor:
                warnings.warn(
                    "a process was killed, perhaps for want of memory; going on without processes", stacklevel=2
                )
                behind += sent.values()
    for index, argument in itertools.chain(behind, left):
        yield index, function(argument)


def start_method() -> str:
    """`fork` where that is safe, or `loky`: joblib's processes, which first import torch for some seconds."""
    return "fork" if sys.platform == "linux" and not torch.cuda.is_initialized() else "loky"


@contextmanager
def _pool(function: Callable[[Any], Any], processes: int, start: str) -> Iterator[Executor]:
    """An executor for `_call`; left by an error, it stops what its processes do at once."""
    if start == "fork":
        context = get_context("fork")
        stopped, stop = context.Pipe(duplex=False)
        pool: Any = ProcessPoolExecutor(
            processes, mp_context=context, initializer=start_forked_worker, initargs=(function, stopped)
        )
    else:
        # Unlike the standard library's, it does not run the caller's script again in each process.
        pool = loky.ProcessPoolExecutor(processes, initializer=_start_worker, initargs=(function,))
    try:
        yield pool
    except BaseException:
        if start == "fork":
            stop.send_bytes(b"stop")
        else:
            pool.shutdown(wait=False, kill_workers=True)
        raise
    finally:
        pool.shutdown(cancel_futures=True) if start == "fork" else pool.shutdown()
        if start == "fork":
            stop.close()
            stopped.close()


def _call(argument: bytes) -> bytes:
    """The function in a process, its result and what it warned of.

    Pickled on both ways: a pool would send each tensor as an open file, of which a process has few.
    """
    return pickle.dumps(recorded(_function, pickle.loads(argument)))


def start_forked_worker(function: Callable[[Any], Any], stopped: Any) -> None:
    """What a forked process begins with."""
    _start_worker(function)
    threading.Thread(target=_end_with_caller, args=(stopped,), daemon=True).start()


def _start_worker(function: Callable[[Any], Any]) -> None:
    global _function
    _function = function
    torch.set_num_threads(1)
    threadpoolctl.threadpool_limits(1)
    # The caller's Ctrl-C reaches it, too, and ends it at once and without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


_function: Callable[[Any], Any]


def _end_with_caller(stopped: Any) -> None:
    # A caller that is killed cannot stop its processes, and they would wait for work for ever.
    connection.wait([stopped, parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)
