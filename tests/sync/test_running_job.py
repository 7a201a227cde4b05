"""epload.load from a running job: the version that its engines have, as a checkpoint."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import nullcontext
from functools import partial
from itertools import count
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
from support import fakedev, jobs
from support.accelerator import DEVICE
from support.checkpoints import assert_same
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
        meeting.say("served")
        for number in range(loads):
            meeting.hear(f"loaded-{number}")


def load(meeting: Meeting, model: Any, **options: Any) -> epload.LoadReport:
    with many_waves():
        usual = {"timeout": 30, "progress": False}
        return epload.load(model, f"epload://{meeting.hear('address')}", **usual | options)


def cold_start(rank: int, meeting: Meeting, number: int, nodes: Any, dtype: Any, folder: str, verify: bool) -> Any:
    """Compares a load of this rank's part with ``from_pretrained``."""
    with torch.device("meta"):
        model = fully_shard(make(3))
    report = load(meeting, model, dtype=dtype, topology=epload.Topology.from_nodes(nodes), verify=verify)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    ids = torch.arange(12).reshape(2, 6)
    assert_same({name: tensor.full_tensor() for name, tensor in model.state_dict().items()}, expected.state_dict())
    assert torch.equal(model(ids).logits, expected(ids).logits)
    dist.barrier()
    if rank == 0:
        meeting.say(f"loaded-{number}")
    assert report.nbytes > 0
    return [report.source.split(":")[0], report.readers]


@pytest.mark.parametrize("verify", [False, True])
def test_a_model_is_loaded_from_the_engines_of_a_running_job(tmp_path: Path, verify: bool) -> None:
    folder = str(tmp_path)
    make(1).save_pretrained(folder)
    started = [Job(2, partial(send, verify=verify), (2, 2)), Job(1, partial(serve, verify=verify), (2,))]
    loads = [(0, [[0], [1]], torch.float32, folder, verify), (1, [[0, 1]], torch.bfloat16, folder, verify)]
    *_, first, second = jobs.run([*started, *(Job(2, cold_start, arguments) for arguments in loads)])
    assert first == second == [["epload", "every"]] * 2


def refused(rank: int, meeting: Meeting, keeps: bool) -> list[str]:
    with torch.device("meta"):
        model = make(3)
    meeting.hear("served")
    calls = [partial(load, meeting, model)]
    if keeps:
        calls = [
            partial(load, meeting, model, readers="one"), partial(epload.load, model, "epload://nowhere"),
            partial(load, meeting, nn.Linear(2, 2)), partial(load, meeting, model, verify=True),
        ]  # fmt: skip
    soon = mock.Mock(monotonic=count(0, 10).__next__)
    with nullcontext() if keeps else mock.patch("epload.sync.running_job.time", soon):
        errors = [outcome(call) for call in calls]
    assert all(parameter.is_meta for parameter in model.parameters())
    meeting.say("loaded-0")
    return errors


NOT_KEPT = [r'no engine of the job at 127\.0\.0\.1:\d+ has a version in host memory \(stage="host"\) within 30 s']
REFUSED = [
    "expected readers='every' for epload://", "expected an address such as", "[Uu]nexpected",
    "^verify=True is up to the job at 127.0.0.1:",
]  # fmt: skip


@pytest.mark.parametrize(("stage", "expected"), [("host", REFUSED), ("none", NOT_KEPT)])
def test_what_cannot_be_loaded_from_a_running_job_is_refused(stage: str, expected: list[str]) -> None:
    *_, (errors,) = jobs.run([Job(1, send, (1, 1)), Job(1, serve, (1, stage)), Job(1, refused, (stage == "host",))])
    assert all(re.search(text, error) for text, error in zip(expected, errors, strict=True)), errors


def hold_slowly(rank: int, meeting: Meeting) -> None:
    """Hands a version on, a bucket each 0.3 s."""
    pack = Shards.pack

    def slow(shards: Shards, number: int, buffer: torch.Tensor) -> None:
        meeting.say("handing on")
        meeting.hear("interrupted")
        time.sleep(0.3)
        pack(shards, number, buffer)

    with mock.patch.object(Shards, "pack", slow):
        serve(rank, meeting, 1)


def interrupted(rank: int, meeting: Meeting, connects: bool) -> bool:
    """Loads, is interrupted, and fills the model in another way; returns whether that is what it holds later.

    Args:
        connects: whether it is interrupted while it connects to the job.
    """

    def connect_slowly(*args: Any, **options: Any) -> epload.WeightReceiver:
        meeting.say("handing on")
        meeting.hear("filled")
        return epload.WeightReceiver(*args, **options)

    def send_signal() -> None:
        meeting.hear("handing on")
        os.kill(os.getpid(), signal.SIGINT)
        meeting.say("interrupted")

    model = make(3)
    meeting.hear("served")
    threading.Thread(target=send_signal, daemon=True).start()
    slow = mock.patch("epload.sync.running_job.WeightReceiver", connect_slowly) if connects else nullcontext()
    with many_waves():  # also for what goes on
        with pytest.raises(KeyboardInterrupt), slow:
            load(meeting, model, timeout=12)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(5)
        meeting.say("filled")
        for thread in threading.enumerate():
            if thread.name == "epload-receive":
                thread.join(60)
                assert not thread.is_alive()
    meeting.say("loaded-0")
    return all((parameter == 5).all() for parameter in model.parameters())


@pytest.mark.parametrize("connects", [False, True])
def test_nothing_changes_the_model_after_a_load_that_was_interrupted(connects: bool) -> None:
    holder = Job(1, serve, (1,)) if connects else Job(1, hold_slowly)
    assert jobs.run([Job(1, send, (1, 1)), holder, Job(1, interrupted, (connects,))])[2] == [True]


def load_late(rank: int, meeting: Meeting) -> bool:
    """Loads while the caller's stream still has to read the weights; returns whether it has read those before."""
    model = make(3).to(DEVICE)
    weight = model.lm_head.weight.detach()
    before, caller = weight.cpu(), torch.Stream(DEVICE)
    opener, unpack = threading.Timer(1, fakedev.release, [caller]), Shards.unpack

    def unpack_and_open(self: Shards, number: int, bucket: torch.Tensor) -> None:
        unpack(self, number, bucket)
        if opener.ident is None:
            opener.start()

    with caller, mock.patch.object(Shards, "unpack", unpack_and_open):
        fakedev.hold(caller)
        seen = weight.clone()
        load(meeting, model)
        after = weight.clone()
    opener.join()
    caller.synchronize()
    meeting.say("loaded-0")
    return torch.equal(seen.cpu(), before) and torch.equal(after.cpu(), make(1).lm_head.weight)


@pytest.mark.usefixtures("fake_device")
def test_what_the_caller_has_queued_comes_before() -> None:
    jobs_of = [Job(1, send, (1, 1)), Job(1, serve, (1,)), Job(1, load_late, setup=fakedev.setup)]
    assert jobs.run(jobs_of)[2] == [True]


def send_adapter(rank: int, meeting: Meeting) -> None:
    """Sends from a process that has never had the adapter merged."""
    options = {"timeout": 40, "only": "adapter", "where": "address of the adapter"}
    with many_waves(), sending(meeting, adapted(), **options) as sender:
        outcome(partial(sender.send_weights, 1))


def adapted() -> Any:
    return peft.get_peft_model(make(1), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))


def load_then_adapt(rank: int, meeting: Meeting) -> str:
    model = make(2)
    load(meeting, model)
    meeting.say("loaded-0")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))
    with many_waves(), receiving(meeting, model, timeout=40, where="address of the adapter") as receiver:
        return outcome(receiver.receive_weights)


def test_an_adapter_does_not_follow_merged_weights_that_were_loaded() -> None:
    senders = [Job(1, send, (1, 1, True)), Job(1, serve, (1,)), Job(1, send_adapter)]
    *_, (error,) = jobs.run([*senders, Job(1, load_then_adapt)])
    assert "would apply the adapter twice" in error
