"""Stripes into models on a fake accelerator: when "auto" chooses them, and that a node gathers them at once."""

from __future__ import annotations

from collections import Counter
from functools import partial
from unittest import mock

import pytest

from epload import HierarchicalLoader, Topology
from epload.cluster import cards
from support import fakedev, ranks
from support.accelerator import NODES, SEMANTICS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")

REASON = "auto -> striped: every rank has a network card of its own"


def _chosen(rank: int, nodes: list[list[int]], per_rank: list[int]) -> list[tuple[str, str, bool]]:
    found = []
    with mock.patch.object(cards, "count", return_value=per_rank[rank]):
        for readers in ("one", "partitioned", "auto", "per_node", "every"):
            loader = HierarchicalLoader(Topology.from_nodes(nodes), readers=readers, bucket_bytes=BUCKET)
            for salt in (1, 2):
                model = meta_net()
                report = loader.load(model, for_readers(state_for(salt), readers))
                fine = not wrong(model, state_for(salt))
            found.append((report.algorithm, report.reason, fine))
    return found


@pytest.mark.parametrize(
    ("nodes", "per_rank", "striped"),
    [
        (NODES[4], [2, 2, 2, 2], True),
        (NODES[4], [2, 2, 1, 2], False),
        ([[0, 1, 2], [3]], [9, 9, 9, 9], False),
    ],
)
def test_auto_stripes_where_every_rank_has_a_card(nodes: list[list[int]], per_rank: list[int], striped: bool) -> None:
    per_rank_found = ranks.run(4, _chosen, nodes, per_rank, setup=fakedev.setup)
    assert all(fine for found in per_rank_found for _, _, fine in found)
    for one, partitioned, auto, per_node, every in per_rank_found:
        for algorithm, reason, _ in (one, partitioned):
            assert algorithm == ("striped" if striped else "two_level" if len(nodes) > 1 else "")
            assert (REASON in reason) == striped
        assert auto[0] == one[0], "of the dicts that ranks have, one is sent"
        assert (REASON in auto[1]) == striped
        for algorithm, reason, _ in (per_node, every):
            assert algorithm == "", "no bucket is sent from rank to rank"
            assert REASON not in reason


def _queued(rank: int, semantics: str) -> list[str]:
    """What of a load with stripes is queued on this rank."""
    problems = []
    for bucket_bytes in (BUCKET, BUCKET + 56):
        loader = HierarchicalLoader(Topology.from_nodes(NODES[4]), algorithm="striped", bucket_bytes=bucket_bytes)
        model = meta_net()
        loader.load(model, state_for(1))
        with fakedev.traced() as seen:
            report = loader.load(model, for_readers(state_for(2), "one"))
        problems += wrong(model, state_for(2))
        counted = Counter(name for _, _, name in seen if name in ("broadcast", "allgather"))
        # The source's node broadcasts each bucket, then all send their stripe; the other node gathers.
        inside = {"broadcast": 1} if rank in (0, 1) else {"allgather": 1}
        expected = Counter({"broadcast": report.buckets}) + Counter({k: v * report.buckets for k, v in inside.items()})
        if counted != expected or report.transport_steps != 2 * report.buckets:
            problems.append(f"{bucket_bytes}: {counted} for {report.buckets} buckets, {report.transport_steps} steps")
    return problems


@SEMANTICS
def test_a_node_gathers_its_stripes_at_once(semantics: str) -> None:
    all_fine(ranks.run(4, _queued, semantics, setup=partial(fakedev.setup, semantics)))
