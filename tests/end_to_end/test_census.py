"""A sample of the census (see ``tests/campaigns/census``): classes of transformers, judged as the program judges them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from campaigns.census.classes import ALWAYS, LIST, auto_classes, listed, sample
from campaigns.census.pool import Worker, verdict_of

COUNT = 40


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.close()


@pytest.mark.parametrize("name", sample(COUNT))
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
