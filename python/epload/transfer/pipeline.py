"""Runs the stages of a transfer concurrently, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from epload.core import threads

Stage = tuple[str, Callable[[], None]]
"""The stage's name, and the function that runs all of it."""


def run(
    stages: Sequence[Stage], stop: Callable[[BaseException], None], prepare: Callable[[], None] = lambda: None
) -> None:
    """Runs the stages concurrently, the last one on the calling thread. Returns when all have ended.

    If a stage raises, or the calling thread is interrupted, ``stop`` is called with the exception and must make the other stages
    end. It may be called more than once, from any thread.

    Args:
        stages: at least one.
        stop: makes the stages end.
        prepare: called first in each thread that is started.

    Raises:
        BaseException: what interrupted the run (e.g. KeyboardInterrupt), else the first exception of a stage.
        LoadError: a thread cannot be started.
    """
    failures: list[BaseException] = []

    def run_stage(stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            failures.append(error)
            stop(error)

    *others, (_, last) = stages
    started: list[threading.Thread] = []
    ended = threading.Semaphore(0)

    lock, begun, closed = threading.Lock(), 0, False

    def run_in_thread(stage: Callable[[], None]) -> None:
        nonlocal begun
        with lock:
            if closed:
                return
            begun += 1

        def prepared() -> None:
            prepare()
            stage()

        try:
            run_stage(prepared)
        finally:
            ended.release()

    try:
        for name, stage in others:
            started.append(threads.start(f"epload-{name}", partial(run_in_thread, stage)))
    except BaseException as error:  # no more threads, or an interrupt: stop those that run, and wait for them below
        with lock:  # a thread whose start was interrupted may run, and is not in the list
            closed, left = True, begun
        failures.append(error)
        stop(error)
    else:
        left = len(started)
        run_stage(last)
    while left:
        try:
            ended.acquire()  # not join: a thread whose join was interrupted counts as ended although it runs
            left -= 1
        except BaseException as interrupt:  # the stages are ending, so keep waiting
            failures.append(interrupt)
            stop(interrupt)
    for thread in started:
        thread.join()  # what is left of it takes no time, but no thread outlives the transfer
    if failures:
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
