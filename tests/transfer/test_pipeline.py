"""The pipeline: concurrent stages, and how it ends if one of them fails."""

from __future__ import annotations

import threading

import pytest

from epload.transfer import pipeline

LIMIT = 20.0
"""Seconds that a stage waits for another, so that a pipeline that ran its stages in turn would fail."""


def left_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("epload-")]


@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
@pytest.mark.parametrize(("count", "failing"), [(1, 0), (3, 0), (3, 1), (3, 2)])
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
