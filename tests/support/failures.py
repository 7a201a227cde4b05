"""Sources and operations that fail or are slow, and what every rank must raise then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import Tensor

from epload import Checkpoint, Manifest
from epload.core.pieces import Piece
from epload.native import ops

Failure = tuple[str, str] | None
"""Class and text of what a load raised."""
Outcome = tuple[dict[str, Failure], list[str]]
"""The failure of each case on one rank, and what else was wrong there."""


def outcome(action: Callable[[], Any]) -> Failure:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


Kind = type[BaseException] | tuple[type[BaseException], ...]


def must_raise(kind: Kind, match: str, call: Callable[..., Any], /, *args: Any, **options: Any) -> BaseException:
    """Fails unless a call raises an error of this kind whose text matches. Returns the error."""
    with pytest.raises(kind, match=match) as caught:
        call(*args, **options)
    return caught.value


def check(outcomes: Sequence[Outcome], expected: dict[str, tuple[str, list[str]]]) -> None:
    """Every case failed on all ranks with one class and one text, which says each of the expected things."""
    problems = [f"rank {rank}: {text}" for rank, (_, lines) in enumerate(outcomes) for text in lines]
    for case, (kind, texts) in expected.items():
        first = outcomes[0][0][case]
        problems += [
            f"{case}: rank {rank} raised {failures[case]}, rank 0 {first}"
            for rank, (failures, _) in enumerate(outcomes)
            if failures[case] != first
        ]
        if first is None or first[0] != kind:
            problems.append(f"{case}: expected {kind}, got {first}")
        else:
            problems += [f"{case}: {text!r} is not in {first[1]!r}" for text in texts if text not in first[1]]
    if problems:
        pytest.fail("\n".join(problems), pytrace=False)
    assert set(outcomes[0][0]) == set(expected)


class Filling(Checkpoint):
    """A state dict that fills whole buckets, and can do nothing else."""

    def __init__(self, state: dict[str, Tensor]) -> None:
        self._inner = Checkpoint.open(state)
        self.calls = 0

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self.calls += 1
        self._inner.fill(bucket, pieces)


class Failing(Filling):
    """A state dict of which one bucket cannot be read."""

    def __init__(self, state: dict[str, Tensor], error: Exception, bucket: int = 3) -> None:
        super().__init__(state)
        self._error, self._bucket = error, bucket

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        if self.calls == self._bucket:
            self.calls += 1
            raise self._error
        super().fill(bucket, pieces)


class Slow(Filling):
    """A state dict that takes its time."""

    def __init__(self, state: dict[str, Tensor], seconds: float) -> None:
        super().__init__(state)
        self._seconds = seconds

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        time.sleep(self._seconds)
        super().fill(bucket, pieces)


@contextmanager
def unpack_breaks_once(rank: int, op: str = "unpack") -> Iterator[None]:
    """``op``: the one that unpacks; the default is that on CPU."""

    def once(*args: Any) -> None:
        broken.side_effect = unpack
        raise RuntimeError("no room to unpack")

    unpack = getattr(ops, op)
    with mock.patch.object(ops, op, side_effect=once if dist.get_rank() == rank else unpack) as broken:
        yield


Raised = tuple[str, str, float]
"""Class and text of what a load raised, and the seconds that it took."""


def raised_by(action: Callable[[], Any]) -> Raised:
    began = time.monotonic()
    try:
        action()
    except BaseException as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "", "", time.monotonic() - began


def check_raised(results: Sequence[Raised | None], *parts: str, seconds: float) -> None:
    """All ranks that lived, the others having None, raised the same ``LoadError`` in time."""
    lived = [result for result in results if result is not None]
    assert len({text for _, text, _ in lived}) == 1, lived
    for part in parts:
        assert part in lived[0][1], lived[0][1]
    assert {kind for kind, _, _ in lived} == {"LoadError"}
    assert max(took for *_, took in lived) < seconds, lived


def raised(call: Callable[[], object]) -> tuple[str, str]:
    """Returns the class and the text of what a call raises."""
    return outcome(call) or ("", "raised nothing")


def error_of(action: Callable[[], Any]) -> str:
    """Returns the class and the text of the error that an action raises; empty if it raises none."""
    return ": ".join(outcome(action) or ())
