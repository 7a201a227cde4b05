"""The cost functions against numbers computed by hand, in bytes and bytes/s."""

from __future__ import annotations

import pytest

from epload.planning import costs
from epload.planning.costs import MEMORY_RATE, Rates

INFINITE = float("inf")
UNPACK = 0.5
"""Seconds that a rank takes to unpack ``OWNED``."""
OWNED = int(UNPACK * MEMORY_RATE)


def test_every_is_as_slow_as_its_slowest_rank() -> None:
    assert costs.every([100, 300, 50], Rates([10.0, 100.0, 1.0], INFINITE)) == 50.0
    assert costs.every([100, 0], Rates([10.0, 1e-9], INFINITE)) == 10.0, "a rank that owns nothing takes no time"
    assert costs.every([], Rates([], INFINITE)) == 0.0


def test_partitioned_on_one_node_is_bound_by_reading() -> None:
    assert costs.partitioned(4000, [OWNED], 1, 100, Rates([200.0, 200.0], INFINITE)) == 4000 / 400 + UNPACK
    assert costs.partitioned(4000, [OWNED], 1, 100, Rates([200.0, 200.0], 1e12)) == 4000 / 400 + UNPACK
    assert costs.partitioned(4000, [OWNED], 1, 100, Rates([100.0, 300.0], 1e12)) == 2000 / 100 + UNPACK, "equal shares"


@pytest.mark.parametrize(
    ("nodes", "link", "expected"),
    [
        (2, 1e9, 10.0),  # bound by reading
        (2, 100.0, 20.0),  # each node receives half of all bytes
        (4, 100.0, 30.0),  # three quarters
    ],
)
def test_partitioned_is_bound_by_reading_or_by_the_link(nodes: int, link: float, expected: float) -> None:
    seconds = costs.partitioned(4000, [OWNED, 1], nodes, 200, Rates([200.0, 300.0], link))
    assert seconds == pytest.approx(expected + 200 / 400 + UNPACK), "the first wave is read before anything moves"


@pytest.mark.parametrize(
    ("nodes", "reader", "link", "expected"),
    [(1, 100.0, 1.0, 40.0), (2, 100.0, 1e9, 40.0), (2, 100.0, 50.0, 80.0), (9, 100.0, 50.0, 80.0)],
)
def test_one(nodes: int, reader: float, link: float, expected: float) -> None:
    """A chain takes as long as one link, however many nodes there are."""
    assert costs.one(4000, [1, OWNED], nodes, Rates([], link), reader) == expected + UNPACK


def test_per_node_is_as_slow_as_the_slowest_node() -> None:
    assert costs.per_node(4000, [1, OWNED], [100.0, 50.0]) == 80.0 + UNPACK


def test_describe_choice() -> None:
    text = costs.describe_choice("every", {"every": 0.824, "one": 21.06}, "why not")
    assert text == "auto -> every: predicted 0.82 s, one 21 s (why not)"
    assert costs.describe_choice("one", {}, "no other way") == "auto -> one (no other way)"
