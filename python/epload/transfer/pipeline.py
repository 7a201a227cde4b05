"""Runs the stages of a transfer concurrently, each in its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial

from epload.core import threads

Stage = tuple[str, Callable[[], None]]
"""The stage's name, and the function that runs all of it."""


def run(stages: Sequence[Stage], stop: Callable[[BaseException], None], prepare: Callable[[], None] = lambda: None) -> None:
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
    go, ended, canceled = threading.Event(), threading.Semaphore(0), False

    def run_stage(stage: Callable[[], None], prepare: Callable[[], None] | None = None) -> None:
        try:
            if prepare is not None:
                prepare()
            stage()
        except BaseException as error:
            failures.append(error)
            stop(error)

    def run_in_thread(stage: Callable[[], None]) -> None:
        go.wait()
        if not canceled:
            try:
                run_stage(stage, prepare)
            finally:
                ended.release()

    *others, (_, last) = stages
    started: list[threading.Thread] = []
    try:
        for name, stage in others:
            started.append(threads.start(f"epload-{name}", partial(run_in_thread, stage)))
    except BaseException:  # no more threads, or an interrupt: no stage has begun
        canceled = True
        raise
    finally:
        go.set()
    run_stage(last)
    left = len(others)
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
