"""Any mover loads a model. A new one has a row here."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest

from epload import HierarchicalLoader, Topology
from epload.transfer import engine
from epload.transfer.movers import Mover, relay
from support import ranks
from support.checks import all_fine
from support.example_mover import point_to_point
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong


def load_over(rank: int, mover: Callable[..., Mover]) -> list[str]:
    problems = []
    for readers, algorithm in (("one", "two_level"), ("partitioned", "striped")):
        model = meta_net()
        loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
        with mock.patch.object(engine, "relay", mover):
            report = loader.load(model, state_for(1))
        problems += wrong(model, state_for(1)) + ["moved nothing"] * (algorithm == "striped" and report.transport_steps == 0)
    return problems


@pytest.mark.parametrize("mover", [relay, point_to_point])
def test_a_mover_fills_every_shard(mover: Callable[..., Mover]) -> None:
    all_fine(ranks.run(4, load_over, mover))
