"""Stages that work on different buckets at the same time, with a fixed number of buffers between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from time import perf_counter

from torch import Tensor

Work = Callable[[int, Tensor], bool]
"""Called with the bucket's number and a buffer; True means that this bucket is the last one."""
_Item = tuple[int, Tensor] | None


@dataclass
class Stage:
    """One step of every bucket, in a thread of its own."""

    name: str
    work: Work
    seconds: float = 0.0
    """Time inside ``work``, for the report."""


def run(stages: Sequence[Stage], count: int, buffers: Sequence[Tensor]) -> None:
    """Puts ``count`` buckets through the stages in order. The last stage runs on the calling thread.

    A bucket holds one buffer from its first stage to its last, so no more than ``len(buffers)`` buckets are under way.
    An exception in a stage ends the pipeline: buckets behind it are dropped, and the first exception is raised when all
    stages have stopped.
    """
    free: SimpleQueue[Tensor | None] = SimpleQueue()
    for buffer in buffers:
        free.put(buffer)
    queues: list[SimpleQueue[_Item]] = [SimpleQueue() for _ in stages]
    failures: list[BaseException] = []

    def start(incoming: SimpleQueue[_Item]) -> None:
        for index in range(count):
            buffer = free.get()
            if buffer is None:
                break
            incoming.put((index, buffer))
        incoming.put(None)

    def loop(position: int) -> None:
        stage = stages[position]
        last = position + 1 == len(stages)
        try:
            while (item := queues[position].get()) is not None:
                began = perf_counter()
                done = stage.work(*item)
                stage.seconds += perf_counter() - began
                if last:
                    free.put(item[1])
                else:
                    queues[position + 1].put(item)
                if done:
                    break
        except BaseException as error:
            failures.append(error)
        finally:
            free.put(None)
            if not last:
                queues[position + 1].put(None)

    threads = [threading.Thread(target=start, args=(queues[0],), name="epload-feed", daemon=True)]
    for position, stage in enumerate(stages[:-1]):
        threads.append(threading.Thread(target=loop, args=(position,), name=f"epload-{stage.name}", daemon=True))
    for thread in threads:
        thread.start()
    loop(len(stages) - 1)
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
