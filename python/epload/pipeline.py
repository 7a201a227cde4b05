"""Runs the stages of a transfer at the same time, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

Stage = tuple[str, Callable[[], None]]
"""A name and the stage's whole work."""


def run(stages: Sequence[Stage], stop: Callable[[], None]) -> None:
    """Returns when all stages have; the last one runs on the calling thread.

    When a stage raises, ``stop`` is called, which must make the others end; then the first exception is raised.
    """
    failures: list[BaseException] = []

    def work(stage: Callable[[], None]) -> None:
        try:
            stage()
        except BaseException as error:
            failures.append(error)
            stop()

    *others, (_, last) = stages
    threads = [
        threading.Thread(target=work, args=(stage,), name=f"epload-{name}", daemon=True) for name, stage in others
    ]
    for thread in threads:
        thread.start()
    work(last)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
