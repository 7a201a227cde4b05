"""Runs the stages of a transfer at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from epload.core import threads

Stage = tuple[str, Callable[[], None]]
"""A name and the stage's whole work."""


def run(stages: Sequence[Stage], stop: Callable[[BaseException], None]) -> None:
    """Returns when all stages have; the last one runs on the calling thread.

    When a stage raises, or the calling thread is interrupted, ``stop`` is called with the exception, which must make the others
    end; then an interrupt is raised if there was one, else the first exception.
    """
    failures: list[BaseException] = []

    def work(stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            failures.append(error)
            stop(error)

    *others, (_, last) = stages
    started: list[threading.Thread] = []
    ended = threading.Semaphore(0)

    def work_apart(stage: Callable[[], None]) -> None:
        try:
            work(stage)
        finally:
            ended.release()

    try:
        for name, stage in others:
            started.append(threads.start(f"epload-{name}", partial(work_apart, stage)))
    except BaseException as error:  # no thread left, or an interrupt: those that run are stopped, and waited for below
        failures.append(error)
        stop(error)
    else:
        work(last)
    left = len(started)
    while left:
        try:
            ended.acquire()  # not join: a thread whose join was interrupted counts as ended though it is not
            left -= 1
        except BaseException as interrupt:  # from here on the stages end by themselves
            failures.append(interrupt)
            stop(interrupt)
    for thread in started:
        thread.join()  # what is left of it takes no time, but no thread outlives the transfer
    if failures:
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
