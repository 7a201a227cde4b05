"""Starts threads, on their caller's device and stream, with a helpful error where the process has reached its limit."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import TypeVar

import torch

from epload.core import accelerator
from epload.errors import LoadError

T = TypeVar("T")
_EXIT_SECONDS = 5.0
"""Maximum seconds that process exit waits for threads that are still running, as some are after a failed load."""
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, target: Callable[[], None]) -> threading.Thread:
    """Starts a daemon thread that runs ``target``, on the caller's current stream of the accelerator.

    Raises:
        LoadError: the process cannot start another thread.
    """
    enter = _stream_setter()

    def run() -> None:
        with suppress(Exception):  # an earlier error of the device, which what runs here meets, too
            enter()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise LoadError(
            f"cannot start thread {name} ({error}): raise the limit on threads and processes (ulimit -u, or pids.max of the "
            "container)"
        ) from error
    _started.add(thread)
    return thread


def _stream_setter() -> Callable[[], None]:
    """Returns a function that makes the caller's current stream, and its device, current in another thread. A thread begins on
    device 0, where what it queues would make a context of some 0.5 GB for each rank, and on a stream that does not wait for the
    caller's."""
    if not accelerator.is_in_use():
        return lambda: None
    stream = torch.accelerator.current_stream()
    if stream.device_index == 0 and stream.stream_id == 0:  # the thread's own
        return lambda: None
    return lambda: torch.accelerator.set_stream(stream)


def call(name: str, function: Callable[[], T]) -> Future[T]:
    """Calls a function in a thread, as :func:`start`. Callers wait for the future: up to Python 3.12, a thread whose join was
    interrupted counts as ended although it runs."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    start(name, run)
    return future


def run_all(name: str, steps: Sequence[Callable[[], T]], count: int) -> list[T]:
    """Runs steps on up to ``count`` threads, this one among them, and returns what they return, in their order. Once one has
    failed, no other is begun.

    Raises:
        Exception: what the first of the steps that failed has raised; also an interrupt, once no thread runs a step any more.
    """
    results: dict[int, T] = {}
    failures: dict[int, BaseException] = {}
    lock, numbered = threading.Lock(), iter(enumerate(steps))

    def work() -> None:
        while not failures:
            with lock:
                number, step = next(numbered, (-1, None))
            if step is None:
                return
            try:
                results[number] = step()
            except Exception as error:
                failures[number] = error

    helpers: list[Future[None]] = []
    try:
        with suppress(LoadError):  # those that could be started do the work
            for _ in range(min(count, len(steps)) - 1):
                helpers.append(call(name, work))
        work()
        wait(helpers)
        for helper in helpers:
            helper.result()  # which raises only what is no Exception, as a client's panic
    except BaseException as interrupt:
        failures[-1] = interrupt
        wait(helpers)
        raise
    if failures:
        results.clear()  # the error's traceback has them
        raise failures[min(failures)]
    return [results[number] for number in range(len(steps))]


@atexit.register
def _join_all() -> None:
    """The interpreter ends a daemon thread when it returns from native code. If that is C++, the process ends with SIGABRT."""
    until = time.monotonic() + _EXIT_SECONDS
    for thread in list(_started):
        thread.join(max(until - time.monotonic(), 0.0))
