"""Any mover loads a model. A new one has a row here."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from epload import HierarchicalLoader, Topology
from epload.transfer import engine
from epload.transfer.movers import Mover, relay
from support.example_mover import point_to_point
from support.on_ranks import on_ranks
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong


@pytest.mark.parametrize("mover", [relay, point_to_point])
@on_ranks(4)
def test_a_mover_fills_every_shard(rank: int, mover: Callable[..., Mover]) -> list[str]:
    problems = []
    for readers, algorithm in (("one", "two_level"), ("partitioned", "striped")):
        model = meta_net()
        loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
        with mock.patch.object(engine, "relay", mover):
            report = loader.load(model, state_for(1))
        problems += wrong(model, state_for(1)) + ["moved nothing"] * (algorithm == "striped" and report.transport_steps == 0)
    return problems
