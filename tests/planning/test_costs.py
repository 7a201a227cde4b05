"""What the predicted costs of a load must have in common with real loads. Bytes and bytes/s."""

from __future__ import annotations

from epload.planning import costs
from epload.planning.costs import MEMORY_RATE, Rates

INFINITE = float("inf")
OWNED = int(MEMORY_RATE / 2)
"""Bytes that a rank unpacks in half a second."""


def test_every_is_as_slow_as_its_slowest_rank() -> None:
    assert costs.every([100, 300, 50], Rates([10.0, 100.0, 1.0], INFINITE)) == 50.0
    assert costs.every([100, 0], Rates([10.0, 1e-9], INFINITE)) == 10.0, "a rank that owns nothing is not waited for"
    assert costs.every([], Rates([], INFINITE)) == 0.0


def test_partitioned_is_as_slow_as_its_slowest_reader() -> None:
    """The shares are equal."""
    uneven, slow = Rates([100.0, 300.0], 1e12), Rates([100.0, 100.0], 1e12)
    assert costs.partitioned(4000, [OWNED], 1, 100, uneven) == costs.partitioned(4000, [OWNED], 1, 100, slow)


def test_a_chain_takes_as_long_as_one_link() -> None:
    """However many nodes there are; a single node has no link."""
    two, nine = (costs.one(4000, [1, OWNED], nodes, Rates([], 50.0), 100.0) for nodes in (2, 9))
    assert two == nine == 80.5
    assert costs.one(4000, [1, OWNED], 1, Rates([], 1.0), 100.0) == 40.5


def test_per_node_is_as_slow_as_the_slowest_node() -> None:
    assert costs.per_node(4000, [1, OWNED], [100.0, 50.0]) == 80.5


def test_the_choice_in_a_sentence() -> None:
    sentence = costs.describe_choice("every", {"every": 0.824, "one": 21.06}, "why not")
    assert sentence == "auto -> every: predicted 0.82 s, one 21 s (why not)"
    assert costs.describe_choice("one", {}, "no other way") == "auto -> one (no other way)"
