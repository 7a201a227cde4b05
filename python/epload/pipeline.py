"""Runs the stages of a transfer at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

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
    ended = threading.Semaphore(0)

    def work_apart(stage: Callable[[], None]) -> None:
        try:
            work(stage)
        finally:
            ended.release()

    for name, stage in others:
        threading.Thread(target=work_apart, args=(stage,), name=f"epload-{name}", daemon=True).start()
    work(last)
    left = len(others)
    while left:
        try:
            ended.acquire()  # not join: a thread whose join was interrupted counts as ended though it is not
            left -= 1
        except BaseException as interrupt:  # from here on the stages end by themselves
            failures.append(interrupt)
            stop(interrupt)
    if failures:
        raise next((error for error in failures if not isinstance(error, Exception)), failures[0])
