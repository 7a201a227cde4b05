"""A sample of the census (see ``tests/campaigns/census``): classes of transformers, judged as the program judges them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import transformers

from campaigns.census.classes import ALWAYS, LIST, auto_classes, listed, sample
from campaigns.census.pool import Worker, verdict_of
from epload.mapping.transformers import SUPPORTED

COUNT = 16


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


def installed() -> list[str]:
    """The sample, or what an older version of transformers than the newest supported has of it."""
    newest = transformers.__version__.startswith(f"{SUPPORTED[1]}.")
    return [name for name in sample(COUNT) if newest or name in auto_classes()]


@pytest.mark.parametrize("name", installed())
def test_loads_as_the_library_does(worker: Worker, name: str) -> None:
    verdict = verdict_of(worker, name, auto_classes().get(name, []))
    assert verdict["kind"] == "right", "\n".join(verdict["findings"])


def test_the_list_is_sorted_and_the_sample_is_of_it() -> None:
    names = listed()
    assert names == sorted(set(names))
    assert LIST.read_text() == "".join(f"{name}\n" for name in names)
    assert len(sample(COUNT)) == COUNT
    assert set(sample(COUNT)) <= set(names)
    assert set(ALWAYS) <= set(names)
