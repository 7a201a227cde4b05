"""Stripes into models on a fake accelerator: when "auto" chooses them, and that a node gathers them at once."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from epload import HierarchicalLoader, Topology
from support import fakedev, ranks
from support.accelerator import NODES, SEMANTICS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")


def _chosen(rank: int, nodes: list[list[int]]) -> list[tuple[str, bool]]:
    found = []
    for readers in ("one", "partitioned", "auto", "per_node", "every"):
        loader = HierarchicalLoader(Topology.from_nodes(nodes), readers=readers, bucket_bytes=BUCKET)
        for salt in (1, 2):
            model = meta_net()
            report = loader.load(model, for_readers(state_for(salt), readers))
            fine = not wrong(model, state_for(salt))
        found.append((report.algorithm, fine))
    return found


@pytest.mark.parametrize(
    ("nodes", "algorithm"), [(NODES[4], "striped"), ([[0, 1, 2], [3]], "two_level"), ([[0, 1, 2, 3]], "")]
)
def test_auto_stripes_buckets_that_cross_nodes_of_one_size(nodes: list[list[int]], algorithm: str) -> None:
    for found in ranks.run(4, _chosen, nodes, setup=fakedev.setup):
        assert all(fine for _, fine in found)
        # Of the dicts that ranks have with "auto", one is sent; with "per_node" and "every" no bucket is sent from rank to rank.
        assert [used for used, _ in found] == [algorithm] * 3 + [""] * 2


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
