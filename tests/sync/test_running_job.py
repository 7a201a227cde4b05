"""epload.load from a running job: the version that its engines have, as a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import epload
from epload.transfer.shards import Shards
from support import jobs
from support.jobs import Job, Meeting
from support.small_syncs import many_waves, outcome, receiving, sending, take

CONFIG = Qwen3MoeConfig(
    vocab_size=101, hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=2, num_experts=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=8, num_experts_per_tok=2,
)  # fmt: skip


def make(seed: int) -> Any:
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(CONFIG, dtype=torch.float32)


def send(rank: int, meeting: Meeting, world: int, loads: int, merged: bool = False, **options: Any) -> None:
    model = adapted() if merged else make(1)
    if merged:
        model.merge_adapter()
    if world > 1:
        fully_shard(model)
    with many_waves(), sending(meeting, model, timeout=30, **options) as sender:
        sender.send_weights(7)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        for number in range(loads):
            meeting.hear(f"loaded-{number}")


def serve(rank: int, meeting: Meeting, loads: int, stage: str = "host", verify: bool = False) -> None:
    with many_waves(), receiving(meeting, make(2), timeout=30, stage=stage, verify=verify) as receiver:
        take(receiver)
        for number in range(loads):
            meeting.hear(f"loaded-{number}")


def cold_start(
    rank: int, meeting: Meeting, number: int, nodes: list[list[int]], dtype: torch.dtype, folder: str, verify: bool
) -> list[str]:  # fmt: skip
    """Compares a load of this rank's part with ``from_pretrained``."""
    with torch.device("meta"):
        model = fully_shard(make(3))
    with many_waves():
        topology = epload.Topology.from_nodes(nodes)
        report = epload.load(
            model, f"epload://{meeting.hear('address')}", dtype=dtype, topology=topology, timeout=30, verify=verify,
            progress=False,
        )  # fmt: skip
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.arange(12).reshape(2, 6)
    values = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
    for name, tensor in expected.state_dict().items():
        assert torch.equal(values[name], tensor), name
    assert torch.equal(model(ids).logits, expected(ids).logits)
    dist.barrier()
    if rank == 0:
        meeting.say(f"loaded-{number}")
    assert report.nbytes > 0
    return [report.source.split(":")[0], report.readers]


@pytest.mark.parametrize("verify", [False, True])
def test_a_model_is_loaded_from_the_engines_of_a_running_job(tmp_path: Path, verify: bool) -> None:
    """While the trainer's weights are others already. On two nodes, and on one in another dtype."""
    folder = str(tmp_path)
    make(1).save_pretrained(folder)
    *_, first, second = jobs.run(
        [
            Job(2, partial(send, verify=verify), (2, 2)),
            Job(1, partial(serve, verify=verify), (2,)),
            Job(2, cold_start, (0, [[0], [1]], torch.float32, folder, verify)),
            Job(2, cold_start, (1, [[0, 1]], torch.bfloat16, folder, verify)),
        ]
    )
    assert first == second == [["epload", "every"]] * 2


def refused(rank: int, meeting: Meeting) -> list[str]:
    address = f"epload://{meeting.hear('address')}"
    with torch.device("meta"):
        model = make(3)
    other = nn.Linear(2, 2)
    errors = [
        outcome(partial(epload.load, model, address, readers="one")),
        outcome(partial(epload.load, model, "epload://nowhere")),
        outcome(partial(epload.load, other, address, timeout=20, progress=False)),
        outcome(partial(epload.load, model, address, timeout=20, progress=False, verify=True)),
    ]
    assert all(parameter.is_meta for parameter in model.parameters())
    meeting.say("loaded-0")
    return errors


def test_what_cannot_be_loaded_from_a_running_job_is_refused() -> None:
    *_, (errors,) = jobs.run([Job(1, send, (1, 1)), Job(1, serve, (1,)), Job(1, refused)])
    assert "expected readers='every' for epload://" in errors[0]
    assert "expected an address such as" in errors[1]
    assert "Unexpected" in errors[2] or "unexpected" in errors[2]
    assert errors[3].startswith("verify=True is up to the job at 127.0.0.1:")


def nothing_there(rank: int, meeting: Meeting) -> str:
    error = outcome(partial(epload.load, make(3), f"epload://{meeting.hear('address')}", timeout=3, progress=False))
    meeting.say("loaded-0")
    return error


def test_a_job_none_of_whose_engines_keeps_versions_is_named() -> None:
    *_, (error,) = jobs.run([Job(1, send, (1, 1)), Job(1, serve, (1, "none")), Job(1, nothing_there)])
    assert "no engine of the job at 127.0.0.1:" in error
    assert 'has a version in host memory (stage="host") within 3 s' in error


def hold_slowly(rank: int, meeting: Meeting) -> None:
    """Hands a version on, a bucket each 0.3 s."""
    pack = Shards.pack

    def slow(shards: Shards, number: int, buffer: torch.Tensor) -> None:
        meeting.say("handing on")
        time.sleep(0.3)
        pack(shards, number, buffer)

    with mock.patch.object(Shards, "pack", slow):
        serve(rank, meeting, 1)


class Interrupted(Exception):
    """Raised by a signal."""


def interrupted(rank: int, meeting: Meeting) -> tuple[str, bool]:
    """Loads, is interrupted, and fills the model in another way; returns the error, and whether that is what it holds later."""

    def interrupt(*arguments: Any) -> None:
        raise Interrupted

    def send_signal() -> None:
        meeting.hear("handing on")
        os.kill(os.getpid(), signal.SIGALRM)

    signal.signal(signal.SIGALRM, interrupt)
    model, address = make(3), meeting.hear("address")
    threading.Thread(target=send_signal, daemon=True).start()
    with many_waves():
        error = outcome(partial(epload.load, model, f"epload://{address}", timeout=30, progress=False))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(5)
    time.sleep(4)
    meeting.say("loaded-0")
    return error, all((parameter == 5).all() for parameter in model.parameters())


def test_nothing_changes_the_model_after_a_load_that_was_interrupted() -> None:
    *_, ((error, holds),) = jobs.run([Job(1, send, (1, 1)), Job(1, hold_slowly), Job(1, interrupted)])
    assert "Interrupted" in error
    assert holds


def send_adapter(rank: int, meeting: Meeting) -> None:
    """Sends from a process that has never had the adapter merged."""
    options = {"timeout": 40, "only": "adapter", "where": "address of the adapter"}
    with many_waves(), sending(meeting, adapted(), **options) as sender:
        outcome(partial(sender.send_weights, 1))


def adapted() -> Any:
    return peft.get_peft_model(make(1), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def load_then_adapt(rank: int, meeting: Meeting) -> str:
    model = make(2)
    with many_waves():
        epload.load(model, f"epload://{meeting.hear('address')}", timeout=30, progress=False)
    meeting.say("loaded-0")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with many_waves(), receiving(meeting, model, timeout=40, where="address of the adapter") as receiver:
        return outcome(receiver.receive_weights)


def test_an_adapter_does_not_follow_merged_weights_that_were_loaded() -> None:
    *_, (error,) = jobs.run(
        [Job(1, send, (1, 1, True)), Job(1, serve, (1,)), Job(1, send_adapter), Job(1, load_then_adapt)]
    )
    assert "would apply the adapter twice" in error
