"""Steps that run on several threads: what fails or is interrupted ends them all."""

from __future__ import annotations

import threading
import time
from concurrent import futures
from concurrent.futures import Future
from unittest import mock

import pytest

from epload.core import threads


def test_the_first_failure_is_raised_once_no_step_runs() -> None:
    both = threading.Barrier(2, timeout=30)

    def fail(number: int) -> None:
        both.wait()
        if number == 0:
            time.sleep(0.05)
        raise ValueError(f"step {number}")

    with pytest.raises(ValueError, match="step 0"):
        threads.run_all("steps", [lambda number=number: fail(number) for number in range(2)], 2)  # type: ignore[misc]


def test_no_step_runs_after_an_interrupt() -> None:
    """The other three threads are in a step when the caller is interrupted, and end theirs once the caller waits for them."""
    begun, ended, caller = list[int](), list[int](), threading.current_thread()
    all_begun, waits = threading.Barrier(4, timeout=30), threading.Event()

    def step(number: int) -> None:
        begun.append(number)
        if number < 4:
            all_begun.wait()
        if threading.current_thread() is caller:
            raise KeyboardInterrupt
        waits.wait(30)
        ended.append(number)

    def wait(helpers: list[Future[None]]) -> None:
        waits.set()
        futures.wait(helpers)

    with mock.patch.object(threads, "wait", wait), pytest.raises(KeyboardInterrupt):
        threads.run_all("steps", [lambda number=number: step(number) for number in range(100)], 4)  # type: ignore[misc]
    assert (len(begun), len(ended)) == (4, 3)


class Panic(BaseException):
    """No Exception, like what a library in Rust raises."""


def test_what_is_no_exception_reaches_the_caller() -> None:
    both, caller = threading.Barrier(2, timeout=30), threading.current_thread()

    def step() -> None:
        both.wait()
        if threading.current_thread() is not caller:
            raise Panic

    with pytest.raises(Panic):
        threads.run_all("steps", [step, step], 2)
