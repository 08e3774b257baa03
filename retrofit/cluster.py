"""One function, called with many arguments by a Dask cluster's workers, here or on many machines (docs/cluster.md).

Dask (`pip install 'oretrofit[dask]'`) is imported when a cluster is asked for, and not before.
"""

from __future__ import annotations

import gc
import hashlib
import importlib.metadata
import importlib.util
import itertools
import logging
import os
import pickle
import platform
import threading
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .calls import Caught, Said, recorded, repeat

if TYPE_CHECKING:
    from distributed import Client, Future

Argument = TypeVar("Argument")
Result = TypeVar("Result")

LOCAL = "local"

# How many arguments are sent ahead for each thread of the cluster, so that none waits for the caller.
AHEAD = 2

# Of workers that are started here. Dask's profiler keeps all stacks of an hour, and TabPFN's take hundreds of MB. And a
# worker that pauses for want of memory would wait for ever, since it is no data of Dask's that fill it.
WORKERS = {"distributed.worker.profile.enabled": False, "distributed.worker.memory.pause": False}

_PATIENCE = 5  # seconds, for a scheduler to answer
_PACKAGES = ("oretrofit", "tabpfn", "torch", "numpy", "pandas", "scikit-learn", "cloudpickle")


def check_dask() -> None:
    """Raise `ValueError` where Dask is not installed; imports nothing."""
    if any(importlib.util.find_spec(name) is None for name in ("dask", "distributed")):
        raise ValueError("a cluster needs Dask, which is not installed: pip install 'oretrofit[dask]'")


@contextmanager
def connected(address: str) -> Iterator[Client]:
    """A client of the scheduler at an address; or of processes here, one thread each, as many as torch has threads.

    Args:
        address: As `tcp://10.0.0.1:8786`, or `local`. In a script, `local` needs `if __name__ == "__main__":`, since
            its processes import the script.

    Raises:
        ValueError: Dask is not installed, no scheduler answers there, or its workers lack oretrofit.
    """
    check_dask()
    from distributed import Client, LocalCluster

    with ExitStack() as stack:
        if address == LOCAL:
            import dask
            import torch

            threads = torch.get_num_threads()
            with dask.config.set(WORKERS):
                scheduler: Any = stack.enter_context(
                    LocalCluster(
                        n_workers=threads,
                        threads_per_worker=1,
                        dashboard_address=":0",
                        silence_logs=logging.CRITICAL,  # what fails in a worker is raised here
                    )
                )
        else:
            scheduler = address
        client, reason = None, ""
        try:
            client = stack.enter_context(Client(scheduler, timeout=_PATIENCE, set_as_default=False))
        except (OSError, ValueError, TypeError, ImportError) as error:  # no answer, or no address
            reason = str(error)
        if client is None:
            # What there is of the client closes itself when it is collected: best here and now. In the thread of
            # another client that begins meanwhile, it would wait for that one.
            gc.collect()
            raise ValueError(f"no Dask scheduler answers at {address}: {reason}")
        _compare_versions(client)
        yield client


def _compare_versions(client: Client) -> None:
    """Warn of packages whose versions differ between this process and the workers there are now."""
    try:
        found = client.run(_versions)
    except ImportError as error:
        raise ValueError(f"the cluster's workers cannot import oretrofit ({error}): install it there, too") from error
    if not found:
        warnings.warn("the cluster has no workers yet; waiting for them", stacklevel=4)
    for name, here in _versions().items():
        if others := sorted({str(versions[name]) for versions in found.values()} - {str(here)}):
            warnings.warn(
                f"{name} is {here} here and {', '.join(others)} in the cluster's workers; install the same everywhere, "
                "or answers may differ or fail",
                stacklevel=4,
            )


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def call_each_on(
    client: Client, function: Callable[[Argument], Result], arguments: Iterable[Argument], *, ahead: int | None = None
) -> Generator[tuple[int, Result], None, None]:
    """`workers.call_each` by a cluster's workers: the same, but for what is said here.

    The function is pickled once; each worker gets it once and unpacks it once, whatever the number of arguments.
    What a lost worker had to do is done by another. An argument or a result that cannot be pickled is called here,
    behind all others. A generator that is closed takes back what has not begun; what has begun ends by itself.

    Args:
        client: Of the cluster.
        function: Called by one thread of a worker at a time.
        arguments: Taken one by one, as there is work for them.
        ahead: How many arguments may be on their way at once; by default two for each thread of the cluster.

    Yields:
        The position of an argument and the function's result, as they come.

    Raises:
        MemoryError: A call during which one worker after the other was killed.
    """
    import cloudpickle
    from distributed import as_completed

    left = enumerate(arguments)
    behind: list[tuple[int, Argument]] = []
    sent: dict[Any, tuple[int, Argument]] = {}
    said: Said = set()
    done = as_completed(loop=client.loop)
    name, packed = send(client, function)
    try:
        while True:
            room = ahead or AHEAD * max(1, sum(client.nthreads().values()))
            for index, argument in itertools.islice(left, max(0, room - len(sent))):
                try:
                    pickled = cloudpickle.dumps(argument)
                except Exception:
                    behind.append((index, argument))
                    continue
                with _sending():
                    future = client.submit(_call_pickled, name, packed, pickled, pure=False)
                sent[future] = index, argument
                done.add(future)
            if not sent:
                break
            future = next(done)
            index, argument = sent.pop(future)
            if (answer := result_of(future)) is None:
                behind.append((index, argument))
                continue
            result, caught = pickle.loads(answer)
            repeat(caught, said)
            yield index, result
    finally:
        client.cancel(list(sent))
    for index, argument in behind:
        yield index, function(argument)


def send(client: Client, function: Callable[..., Any]) -> tuple[str, Future]:
    """The first two arguments of `call`: a function's name by its content, and its content in the cluster."""
    import cloudpickle

    content = cloudpickle.dumps(function)
    name = f"oretrofit-{hashlib.sha256(content).hexdigest()}"
    with _sending():
        # A task, and no scattered data: should the last worker that has it be lost, Dask sends it again.
        return name, client.submit(_keep, content, key=name)


def result_of(future: Future) -> Any:
    """A future's result. Raises `MemoryError` where one worker after the other was killed at it."""
    from distributed.scheduler import KilledWorker

    try:
        return future.result()
    except KilledWorker as error:
        raise MemoryError(
            f"{error.allowed_failures + 1} workers of the cluster were killed at the same work, one after the other, "
            "most likely for want of memory; give each worker more memory (--memory-limit; fewer on a machine)"
        ) from error


@contextmanager
def _sending() -> Iterator[None]:
    """Silences Dask's advice against large arguments: the model is one, and it is sent once."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Sending large graph", UserWarning)
        yield


def _keep(content: bytes) -> bytes:
    return content


# In a worker: the function that was unpacked last, by its name.
_unpacked: dict[str, Callable[[Any], Any]] = {}
_one_at_a_time = threading.Lock()

# How many of the kernels compiled for a shape oneDNN and torch keep; 1024 otherwise. Tables have ever new shapes, and a
# worker would fill hundreds of MB with them.
_CACHES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")


def call(name: str, content: bytes, *arguments: Any) -> tuple[Any, list[Caught]]:
    """In a worker: the function's result, and what it warned of."""
    for variable in _CACHES:
        os.environ.setdefault(variable, "64")
    import threadpoolctl
    import torch

    with _one_at_a_time:
        if name not in _unpacked:
            _unpacked.clear()
            _unpacked[name] = pickle.loads(content)
            threadpoolctl.threadpool_limits(1)
        torch.set_num_threads(1)
        return recorded(_unpacked[name], *arguments)


def _call_pickled(name: str, content: bytes, argument: bytes) -> bytes | None:
    """`call`, both ways pickled; None for a result that cannot be."""
    import cloudpickle

    answer = call(name, content, pickle.loads(argument))
    try:
        return cloudpickle.dumps(answer)
    except Exception:
        return None
