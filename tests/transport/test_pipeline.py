"""The pipeline: concurrent stages, and how it ends if one of them fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from unittest import mock

import pytest

from epload.core import threads
from epload.transport import pipeline

LIMIT = 20.0
"""Seconds that a stage waits for another, so that a pipeline that ran its stages in turn would fail."""


def left_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("epload-")]


def never(error: BaseException) -> None:
    raise AssertionError("stop was called, though no stage failed")


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_all_stages_run_concurrently(count: int) -> None:
    meet = threading.Barrier(count, timeout=LIMIT)
    pipeline.run([(f"s{i}", lambda: meet.wait() and None) for i in range(count)], never)
    assert not meet.broken
    assert left_threads() == []


def test_threads_are_named_and_the_last_stage_runs_on_the_calling_thread() -> None:
    seen: dict[str, threading.Thread] = {}
    meet = threading.Barrier(3, timeout=LIMIT)

    def stage(name: str) -> Callable[[], None]:
        def work() -> None:
            seen[name] = threading.current_thread()
            meet.wait()

        return work

    pipeline.run([(name, stage(name)) for name in ("read", "relay", "unpack")], never)
    assert seen["unpack"] is threading.current_thread()
    assert (seen["read"].name, seen["relay"].name) == ("epload-read", "epload-relay")
    assert seen["read"].daemon, "a stuck stage must not keep the process from ending"


def test_run_waits_for_stages_that_outlast_the_last() -> None:
    last_has_ended, ended = threading.Event(), []

    def slow() -> None:
        assert last_has_ended.wait(LIMIT)
        ended.append("slow")

    pipeline.run([("slow", slow), ("last", last_has_ended.set)], never)
    assert ended == ["slow"]


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("count", "failing"), [(n, i) for n in (1, 2, 3, 4) for i in range(n)])
def test_an_exception_of_a_stage_is_raised_when_all_have_ended(count: int, failing: int, error: BaseException) -> None:
    """The other stages run until they are stopped."""
    stop, log, lock = threading.Event(), [], threading.Lock()

    def note(what: str) -> None:
        with lock:
            log.append(what)

    def fails() -> None:
        note("fails")
        raise error

    def works() -> None:
        assert stop.wait(LIMIT)
        note("ends")

    def stopped(by: BaseException) -> None:
        assert by is error
        note("stop")
        stop.set()

    stages: list[pipeline.Stage] = [(f"s{i}", fails if i == failing else works) for i in range(count)]
    with pytest.raises(type(error)) as caught:
        pipeline.run(stages, stopped)
    assert caught.value is error
    assert log == ["fails", "stop"] + ["ends"] * (count - 1)
    assert left_threads() == []


@pytest.mark.parametrize("first", [0, 1, 2])
def test_the_first_of_several_exceptions_is_raised(first: int) -> None:
    stop = threading.Event()
    stops: list[str] = []

    def before() -> None:
        raise KeyError("the cause")

    def after() -> None:
        assert stop.wait(LIMIT)
        raise ValueError("a consequence")

    def stopped(by: BaseException) -> None:
        stops.append(threading.current_thread().name)
        stop.set()

    with pytest.raises(KeyError, match="the cause"):
        pipeline.run([(f"s{i}", before if i == first else after) for i in range(3)], stopped)
    assert stops[0] == (threading.current_thread().name if first == 2 else f"epload-s{first}")
    assert left_threads() == []


def test_a_thread_whose_start_was_interrupted_is_waited_for() -> None:
    """It runs, although the call that started it raised."""
    stopped, ended = threading.Event(), threading.Event()
    start = threads.start

    def interrupted(name: str, target: Callable[[], None]) -> threading.Thread:
        start(name, target)
        begun.wait(5)
        raise KeyboardInterrupt

    begun = threading.Event()

    def stage() -> None:
        begun.set()
        stopped.wait(5)
        time.sleep(0.2)
        ended.set()

    with mock.patch.object(threads, "start", interrupted), pytest.raises(KeyboardInterrupt):
        pipeline.run([("first", stage), ("last", lambda: None)], lambda error: stopped.set())
    assert ended.is_set()
