"""One function, called with many arguments in processes, of one thread each where nobody asks for more.

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
import time
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from multiprocessing import connection, get_context, parent_process, resource_tracker
from typing import TYPE_CHECKING, Any, TypeVar

import threadpoolctl
import torch
from joblib.externals import loky

from .calls import Said, recorded, repeat
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
    threads: int = 1,
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
        processes: How many; 0 to call the function here.
        threads: How many each has.
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
        said: Said = set()
        with _pool(function, processes, threads, start or start_method(threads)) as pool:
            sent: dict[Future, tuple[int, Argument]] = {}
            try:
                while True:
                    room = (ahead or AHEAD * processes) - len(sent)
                    for index, argument in itertools.islice(left, max(0, room)):
                        try:
                            content = pickle.dumps(argument)
                            with _interrupts_held():
                                sent[pool.submit(_call, content)] = index, argument
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


def start_method(threads: int = 1, *, beside_gpu: bool = False) -> str:
    """`fork` where that is safe, or `loky`: joblib's processes, which first import torch for some seconds.

    Several threads after a fork wait for ever for those that the caller had (GNU OpenMP's, torch's on Linux). What the
    caller has on a GPU does not survive a fork: only processes that leave GPUs alone (`beside_gpu`) are forked all the
    same, as those of torch's DataLoader are.
    """
    safe = sys.platform == "linux" and threads == 1 and (beside_gpu or not torch.cuda.is_initialized())
    return "fork" if safe else "loky"


@contextmanager
def _pool(function: Callable[[Any], Any], processes: int, threads: int, start: str) -> Iterator[Executor]:
    """An executor for `_call`; left by an error, it stops what its processes do at once."""
    if start == "fork":
        context = get_context("fork")
        stopped, stop = context.Pipe(duplex=False)
        pool: Any = ProcessPoolExecutor(
            processes, mp_context=context, initializer=start_forked_worker, initargs=(function, threads, stopped)
        )
    else:
        if hasattr(signal, "pthread_sigmask"):
            resource_tracker.ensure_running()  # started later, it would let interrupts through
        # Unlike the standard library's, it does not run the caller's script again in each process.
        pool = loky.ProcessPoolExecutor(
            processes, initializer=start_loky_worker, initargs=(function, threads, os.getpid())
        )
    try:
        yield pool
    except BaseException:
        if start == "fork":
            stop.send_bytes(b"stop")
        else:
            pool.shutdown(kill_workers=True)
        raise
    else:
        if start != "fork":
            pool.shutdown()  # after the other one, it would call the kill off
    finally:
        if start == "fork":
            pool.shutdown(cancel_futures=True)
            stop.close()
            stopped.close()


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """A process that starts here meets Ctrl-C when it can end by it without a word; this one does so behind it."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


# ---- In a process -------------------------------------------------------------------------------


def _call(argument: bytes) -> bytes:
    """The function's result and what it warned of, and where.

    Pickled on both ways: a pool would send each tensor as an open file, of which a process has few.
    """
    return pickle.dumps(recorded(_function, pickle.loads(argument)))


def start_forked_worker(function: Callable[[Any], Any], threads: int, stopped: Any) -> None:
    """What a forked process begins with."""
    _start_worker(function, threads)
    threading.Thread(target=_end_with_caller, args=(stopped,), daemon=True).start()


def start_loky_worker(function: Callable[[Any], Any], threads: int, caller: int) -> None:
    """What one of joblib's processes begins with."""
    _start_worker(function, threads)
    threading.Thread(target=_end_without_parent, args=(caller,), daemon=True).start()


def _start_worker(function: Callable[[Any], Any], threads: int) -> None:
    global _function
    _function = function
    torch.set_num_threads(threads)
    threadpoolctl.threadpool_limits(threads)
    # The caller's Ctrl-C reaches it, too, and so may an end of all of them: it ends at once and without a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


_function: Callable[[Any], Any]


def is_worker() -> bool:
    """Whether this process is one of `call_each`'s, and nobody else's."""
    return "_function" in globals()


# A caller that is killed cannot stop its processes, and they would wait for work for ever.


def _end_with_caller(stopped: Any) -> None:
    connection.wait([stopped, parent_process().sentinel])  # type: ignore[union-attr]
    os._exit(1)


def _end_without_parent(caller: int) -> None:
    while os.getppid() == caller:
        time.sleep(1)
    os._exit(1)
