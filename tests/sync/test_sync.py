"""A trainer's weights in the ranks of another job: every layout against the full tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import epload
from support.jobs import Job, Meeting, run
from support.synced_models import build, check, write


def send(rank: int, meeting: Meeting, layout: str, world: int, receivers: int, nodes: Any, options: Any) -> list[str]:
    model = build(layout, world)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    with epload.WeightSender(
        model, ("127.0.0.1", 0), receivers=receivers, topology=topology, timeout=60, **options
    ) as sender:
        if rank == 0:
            meeting.say("address", sender.address)
        reports = []
        for version in (1, 2, 3):
            write(model, version)
            report = sender.send_weights(version)
            assert report is not None
            reports.append(str(report))
        for receiver in range(receivers):
            meeting.hear(f"done-{receiver}")
    return reports


def receive(
    rank: int, meeting: Meeting, layout: str, world: int, first: int, nodes: Any, dtype: torch.dtype, options: Any
) -> list[str]:
    model = build(layout, world, dtype)
    topology = epload.Topology.from_nodes(nodes) if nodes else None
    reports = []
    with epload.WeightReceiver(model, meeting.hear("address"), topology=topology, timeout=60, **options) as receiver:
        for version in (1, 2, 3):
            before = receiver.version
            report = receiver.receive_weights()
            if options.get("stage", "host") != "none":
                assert receiver.version == before
                assert receiver.staged == version
            receiver.commit()
            assert receiver.version == version
            assert not receiver.torn
            check(model, version)
            reports.append(str(report))
        meeting.say(f"done-{first + rank}")
    return reports


@pytest.mark.parametrize(
    ("trainer", "engine", "dtype", "options"),
    [
        (("fsdp", 2, None), ("tp0", 2, None), torch.float32, {}),
        (("fsdp", 3, [[0, 1], [2]]), ("tp1", 2, [[0], [1]]), torch.bfloat16, {"verify": True}),
        (("tp1", 2, [[0], [1]]), ("fsdp", 4, [[0, 1], [2, 3]]), torch.float32, {"stage": "none", "verify": True}),
        (("plain", 1, None), ("plain", 2, [[0], [1]]), torch.float32, {"stage": "none", "verify": True}),
        (("tp0", 2, None), ("fsdp", 3, [[0, 1], [2]]), torch.bfloat16, {"stage": "device", "verify": True}),
    ],
    ids=["fsdp to tp", "three to two nodes", "tp to fsdp in place", "plain", "tp to fsdp beside"],
)
def test_every_version_arrives_as_a_whole(trainer: Any, engine: Any, dtype: torch.dtype, options: Any) -> None:
    layout, world, nodes = trainer
    theirs, count, their_nodes = engine
    both = {name: value for name, value in options.items() if name == "verify"}
    reports = run(
        [
            Job(world, send, (layout, world, count, nodes, both)),
            Job(count, receive, (theirs, count, 0, their_nodes, dtype, options)),
        ]
    )
    assert "sent version 3" in reports[0][0][2]
    assert "received version 3" in reports[1][0][2]
