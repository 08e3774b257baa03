"""Processes that call a function: whatever becomes of them, each argument is answered once."""

import os
import select
import signal
import subprocess
import sys
import warnings
from contextlib import closing

import pytest
import torch

from oretrofit.retrofit.workers import call_each, start_method

HERE = os.getpid()
FORKED = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs forked processes")
STARTS = [pytest.param("fork", marks=FORKED), "loky"]


def said(caught):
    """Without Python's own advice against forks, from 3.12 on."""
    return [str(warning.message) for warning in caught if warning.category is not DeprecationWarning]


def square(number):
    return number**2


def who(_):
    return os.getpid(), torch.get_num_threads()


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("processes", [0, 1, 3])
def test_each_argument_is_answered_once(processes, start):
    found = dict(call_each(square, range(20), processes, start=start))
    assert found == {i: i * i for i in range(20)}


@pytest.mark.parametrize("start", STARTS)
def test_processes_of_one_thread(start):
    pids, threads = zip(*(result for _, result in call_each(who, range(12), 2, start=start)), strict=True)
    assert HERE not in pids and set(threads) == {1} and len(set(pids)) <= 2


def test_processes_of_several_threads():
    """Not forked: they would wait for the caller's threads for ever."""
    torch.ones(1000, 1000) @ torch.ones(1000, 1000)
    assert {threads for _, (_, threads) in call_each(who, range(2), 1, threads=2)} == {2}
    assert start_method(2) == "loky"


def test_arguments_are_taken_as_they_are_needed():
    taken = []

    def arguments():
        for i in range(100):
            taken.append(i)
            yield i

    with closing(call_each(square, arguments(), 2, ahead=5)) as answers:
        for done, _ in enumerate(answers):
            assert len(taken) <= done + 5 + 1


class Unsendable:
    """Neither way."""

    def __reduce__(self):
        raise TypeError("not sent")


@FORKED
def test_what_cannot_be_sent_is_called_here():
    arguments = [1, Unsendable(), 2]
    found = dict(call_each(lambda argument: (argument, os.getpid()), arguments, 1))
    assert found[1] == (arguments[1], HERE)
    assert found[0][0] == 1 and found[2][0] == 2 and HERE not in (found[0][1], found[2][1])


@FORKED
def test_what_cannot_be_sent_back_is_called_here():
    found = dict(call_each(lambda i: Unsendable() if i == 1 else i, range(3), 2))
    assert found[0] == 0 and isinstance(found[1], Unsendable) and found[2] == 2


@pytest.mark.parametrize("start", STARTS)
def test_an_error_is_the_callers(start):
    with pytest.raises(TypeError, match="unsupported operand"):
        list(call_each(square, [1, "two", 3], 2, start=start))


def killed_there(i):
    if i == 3 and os.getpid() != HERE:
        os.kill(os.getpid(), signal.SIGKILL)
    return i


@FORKED
def test_a_killed_process_costs_a_warning_only():
    with pytest.warns(UserWarning, match="was killed, perhaps for want of memory; going on without processes"):
        found = list(call_each(killed_there, range(30), 2))
    assert sorted(found) == [(i, i) for i in range(30)]


def warn(i):
    warnings.warn("of every call", stacklevel=2)


@FORKED
def test_processes_warn_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        list(call_each(warn, range(6), 2))
    assert said(caught) == ["of every call"]


@FORKED
def test_what_was_warned_of_here_is_not_said_again():
    def warn_here(i):
        warnings.warn("of this line", stacklevel=1)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        warn_here(0)
        list(call_each(warn_here, range(3), 2))
    assert said(caught) == ["of this line"]


# ---- Ends ----------------------------------------------------------------------------------------

SLEEPS = """
import time
from contextlib import closing
from oretrofit.retrofit.workers import call_each

def sleep(seconds):
    time.sleep(seconds)
    return seconds

with closing(call_each(sleep, [0, 600, 600], 2, start="{start}")) as answers:
    next(answers)
    print("ready", flush=True)
    {then}
print("over", flush=True)
"""


@FORKED
@pytest.mark.parametrize(
    ("start", "then", "signals", "output"),
    [
        ("fork", "answers.close()", [], b"over\n"),  # the generator's own end
        ("fork", "next(answers)", [signal.SIGINT], b""),
        ("fork", "next(answers)", [signal.SIGTERM], b""),
        ("fork", "next(answers)", [signal.SIGKILL], b""),
        ("loky", "answers.close()", [], b"over\n"),
        ("loky", "next(answers)", [signal.SIGINT], b""),
        ("loky", "next(answers)", [signal.SIGKILL], b""),
    ],
)
def test_processes_end_with_who_needs_them(start, then, signals, output):
    """They hold a pipe that they have inherited; when the last holder is gone, it can be read to its end."""
    read, write = os.pipe()
    with subprocess.Popen(
        [sys.executable, "-c", SLEEPS.format(start=start, then=then)],
        pass_fds=[write],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        os.close(write)
        assert process.stdout.readline() == b"ready\n"
        for number in signals:
            process.send_signal(number)
        rest, errors = process.communicate(timeout=120)  # of ten minutes' sleep
    assert rest == output
    assert errors.count(b"Traceback") == signals.count(signal.SIGINT)
    ready, _, _ = select.select([read], [], [], 60)
    assert ready and os.read(read, 1) == b""
    os.close(read)
