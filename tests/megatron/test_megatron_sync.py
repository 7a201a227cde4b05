"""Megatron-Core's ranks send versions to other jobs: to a plain model of transformers, and to one that FSDP2 shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import megatron_models as models
import pytest
import torch
import transformers
from megatron_models import Layout

import epload
from epload.saving import megatron, model_reader
from support import pretrained
from support.jobs import Job, Meeting, run
from support.small_syncs import receiving, sending, take

VERSIONS = 3


def send(rank: int, meeting: Meeting, family: str, layout: Layout, folder: Path, delta: str) -> tuple[int, list[int]]:
    """Returns how often the model was walked and Megatron was asked for its shards, and the bytes that each rank sent."""
    chunks, nbytes, calls = models.build(family, layout), [], []
    for module, name in ((model_reader, "collect"), (megatron, "read_shards")):
        count_calls(module, name, calls)
    with sending(meeting, chunks, 2, names_from=folder / "1", delta=delta, only=without_prediction) as sender:
        for version in range(1, VERSIONS + 1):
            epload.load(chunks, folder / str(version), timeout=60, progress=False)
            nbytes.append(sender.send_weights(version).phases["read"].nbytes)
    return len(calls), nbytes


def count_calls(module: Any, name: str, calls: list[str]) -> None:
    function = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        return function(*args, **kwargs)

    setattr(module, name, counted)


def without_prediction(name: str) -> bool:
    """Leaves out DeepSeek's layer for multi-token prediction, for which transformers has no place."""
    return not name.startswith("model.layers.4.")


def receive(rank: int, meeting: Meeting, folder: Path, fsdp: bool) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder / "1")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    if fsdp:
        pretrained.fsdp(model, shard=2)
    with receiving(meeting, model) as receiver:
        for version in range(1, VERSIONS + 1):
            take(receiver, version)
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
        state = models.write_checkpoint(family, tmp_path / str(version), seed=version)
    receivers = [Job(2, receive, (tmp_path, True))] if fsdp else [Job(1, receive, (tmp_path, False)) for _ in range(2)]
    sent, *_ = run([Job(world, send, (family, layout, tmp_path, delta)), *receivers])
    assert [calls for calls, _ in sent] == [2] * world  # later versions cost no more planning than an FSDP2 model's
    whole = sum(tensor.nbytes for name, tensor in state.items() if without_prediction(name))
    assert whole <= sum(nbytes[0] for _, nbytes in sent) < 1.05 * whole  # each element by one of the ranks that have it
    if layout.pp == 1:
        assert max(nbytes[0] for _, nbytes in sent) < 1.2 * whole / world
