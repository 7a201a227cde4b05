"""Megatron-Core's ranks send versions to other jobs: to a plain model of transformers, and to one that FSDP2 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_models as models
import pytest
import torch
import transformers
from megatron_models import Layout
from torch.distributed.fsdp import fully_shard

import epload
from epload.saving import megatron as reads
from support.jobs import Job, Meeting, run

VERSIONS = 3


def send(rank: int, meeting: Meeting, family: str, layout: Layout, folder: Path, delta: str) -> tuple[int, list[int]]:
    """Returns how often Megatron was asked for its shards, and the bytes that each version took."""
    chunks, read, nbytes = models.build(family, layout), reads.read_shards, []
    times = []
    reads.read_shards = lambda chunks: times.append(1) or read(chunks)
    with epload.WeightSender(
        chunks, ("127.0.0.1", 0), receivers=2, names_from=folder / "1", timeout=60, delta=delta, only=without_prediction
    ) as sender:
        if rank == 0:
            meeting.say("address", sender.address)
        for version in range(1, VERSIONS + 1):
            epload.load(chunks, folder / str(version), timeout=60, progress=False)
            nbytes.append(sender.send_weights(version).wire_bytes)
    return len(times), nbytes


def without_prediction(name: str) -> bool:
    """Leaves out DeepSeek's layer for multi-token prediction, for which transformers has no place."""
    return not name.startswith("model.layers.4.")


def receive(rank: int, meeting: Meeting, folder: Path, fsdp: bool) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if fsdp:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        for version in range(1, VERSIONS + 1):
            receiver.receive_weights(version)
            receiver.commit()
            wanted = transformers.AutoModelForCausalLM.from_pretrained(folder / str(version)).state_dict()
            for name, tensor in model.state_dict().items():
                full = tensor.full_tensor() if fsdp else tensor
                assert torch.equal(full, wanted[name]), f"{name} of version {version}"


@pytest.mark.parametrize(
    ("family", "world", "layout", "fsdp", "delta"),
    [
        ("qwen3", 4, Layout(tp=2), False, "auto"),
        ("qwen2", 4, Layout(tp=2, pp=2), True, "off"),
        ("qwen3_moe", 4, Layout(tp=2, pp=2, ep=2), True, "off"),
        ("mixtral", 4, Layout(tp=2, ep=2, etp=2), False, "off"),
        ("deepseek_v3", 4, Layout(tp=2, pp=2, ep=2), False, "off"),
    ],
    ids=["dense, two replicas", "tied, stages", "experts, stages", "experts over all ranks", "latent attention"],
)
def test_versions_arrive(family: str, world: int, layout: Layout, fsdp: bool, delta: str, tmp_path: Path) -> None:
    for version in range(1, VERSIONS + 1):
        models.write_checkpoint(family, tmp_path / str(version), seed=version)
    receivers = [Job(2, receive, (tmp_path, True))] if fsdp else [Job(1, receive, (tmp_path, False)) for _ in range(2)]
    sent, *_ = run([Job(world, send, (family, layout, tmp_path, delta)), *receivers])
    assert [times for times, _ in sent] == [1] * world  # later versions cost no more planning than an FSDP2 model's
