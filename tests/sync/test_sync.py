"""A trainer's weights in the ranks of another job: every layout against the full tensors."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from support.jobs import Job, run
from support.sync_jobs import receive, send


@pytest.mark.parametrize(
    ("trainer", "engine", "options"),
    [
        (("fsdp", 2, None), ("tp0", 2, None), {}),
        (("fsdp", 3, [[0, 1], [2]]), ("tp1", 2, [[0], [1]]), {"verify": True, "dtype": torch.bfloat16}),
        (("tp1", 2, [[0], [1]]), ("fsdp", 4, [[0, 1], [2, 3]]), {"verify": True, "stage": "none"}),
        (("plain", 1, None), ("plain", 2, [[0], [1]]), {"verify": True, "stage": "none"}),
        (("tp0", 2, None), ("fsdp", 3, [[0, 1], [2]]), {"verify": True, "stage": "device", "dtype": torch.bfloat16}),
    ],
    ids=["fsdp to tp", "three to two nodes", "tp to fsdp in place", "plain", "tp to fsdp beside"],
)
def test_every_version_arrives_as_a_whole(trainer: Any, engine: Any, options: Any) -> None:
    layout, world, nodes = trainer
    other, count, other_nodes = engine
    sends = partial(send, nodes=nodes, verify=options.get("verify", False))
    receives = partial(receive, nodes=other_nodes, **options)
    sent, received = run([Job(world, sends, (layout, world, count)), Job(count, receives, (other, count))])
    for of_rank in (*sent, *received):
        assert [report.transport for report in of_rank] == ["host"] * 3
