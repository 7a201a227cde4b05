"""Runs several jobs at once, each with ranks and a default group of its own, that meet at an address."""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from support import ranks


class Job(NamedTuple):
    """``function(rank, meeting, *args)`` on so many ranks."""

    world: int
    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    dying: tuple[int, ...] = ()
    setup: Callable[[], str] | None = None
    """Function that ``ranks.run`` calls first."""


class Meeting:
    """A folder in which ranks of all jobs leave files."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)

    def say(self, name: str, text: str = "") -> None:
        path = self._folder / f".{name}.{os.getpid()}"
        path.write_text(text)
        path.rename(self._folder / name)

    def hear(self, name: str, seconds: float = ranks.LIMIT) -> str:
        """Waits until another rank has said it."""
        until = time.monotonic() + seconds
        while not (path := self._folder / name).exists():
            if time.monotonic() >= until:
                raise AssertionError(f"nobody said {name!r} within {seconds} s")
            time.sleep(0.01)
        return path.read_text()


def run(jobs: Sequence[Job], limit: float = ranks.LIMIT) -> list[list[Any]]:
    """Each job's values, by rank."""
    with tempfile.TemporaryDirectory(prefix="epload-jobs-") as folder, ThreadPoolExecutor(len(jobs)) as pool:
        meeting = Meeting(folder)
        running = [
            pool.submit(ranks.run, job.world, job.function, meeting, *job.args, limit=limit, dying=job.dying, setup=job.setup)
            for job in jobs
        ]
        errors = [str(error) for each in running if (error := each.exception()) is not None]
        if errors:
            raise ranks.RankFailed("\n======== another job:\n".join(errors))
        return [each.result() for each in running]


@contextmanager
def session(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Starts a command, which is killed at the end with all that it has started."""
    process = subprocess.Popen(command, text=True, start_new_session=True, **options)
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
