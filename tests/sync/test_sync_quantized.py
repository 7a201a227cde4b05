"""Syncs in which the sender quantizes to fp8: what arrives is what the library of reference makes of the sender's weights."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import epload
from epload.mapping import Quantize
from support import fakedev
from support.accelerator import DEVICE
from support.checks import all_fine, as_bytes, local_of
from support.fakedev import build
from support.fp8 import Tree
from support.jobs import Job, Meeting, run
from support.models import mesh
from support.pretrained import config
from support.quantized import FORMATS, FP8, Trainer, assert_same, expected, fine_grained, reference, with_skipped
from support.small_syncs import many_waves
from support.sync_jobs import send_model

VERSIONS = (1, 2, 3)
FORMAT = "128 x 128"


def change(model: nn.Module, version: int) -> None:
    """Another maximum in another block for each version, in bits that bfloat16 rounds away and in others."""
    with torch.no_grad():
        for parameter in model.parameters():
            local_of(parameter).mul_(1 + 0.37 * version)


def trainer(version: int) -> Trainer:
    model = Trainer()
    for number in range(1, version + 1):
        change(model, number)
    return model


def send(rank: int, meeting: Meeting, receivers: int, waits: bool) -> None:
    with many_waves(lease_seconds=10):
        model = fully_shard(Trainer(), mesh=mesh(("all", 3)))
        rule, snapshot = Quantize(with_skipped(FORMATS[FORMAT])), "none" if waits else "host"
        with epload.WeightSender(
            model, ("127.0.0.1", 0), receivers=receivers, timeout=60, mapping=rule, snapshot=snapshot, verify=not waits,
            delta="always",
        ) as sender:  # fmt: skip
            if rank == 0:
                meeting.say("address", sender.address)
            for version in VERSIONS:
                change(model, version)
                report = sender.send_weights(version, wait=waits)
                if not waits:
                    with torch.no_grad():  # what is sent is what it was
                        saved = [local_of(parameter).clone() for parameter in model.parameters()]
                        for parameter in model.parameters():
                            local_of(parameter).zero_()
                    report = sender.wait()
                    with torch.no_grad():
                        for parameter, old in zip(model.parameters(), saved, strict=True):
                            local_of(parameter).copy_(old)
                assert report is not None
                assert (report.changed is not None) == (version > VERSIONS[0])


def engine(like: dict[str, torch.Tensor], shards: int | None) -> nn.Module:
    """A model with fp8 weights and scales, sharded or not."""
    model = Tree(like).to_empty(device="cpu")
    for module in list(model.modules()) if shards is not None else ():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > shards:
                made = distribute_tensor(parameter.detach(), mesh(("tp", 2)), [Shard(shards)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(made, requires_grad=False))
    return model


def receive(rank: int, meeting: Meeting, shards: int | None, stage: str) -> list[str]:
    with many_waves(lease_seconds=10):
        like = expected(trainer(0), FORMATS[FORMAT])
        model = engine(like, shards)
        problems = []
        with epload.WeightReceiver(model, meeting.hear("address"), timeout=60, stage=stage, verify=False) as receiver:
            for version in VERSIONS:
                receiver.receive_weights(version)
                receiver.commit()
                values = expected(trainer(version), FORMATS[FORMAT])
                for name, tensor in model.state_dict().items():
                    whole = values[name]
                    if isinstance(tensor, torch.distributed.tensor.DTensor):
                        whole = distribute_tensor(whole, mesh(("tp", 2)), [Shard(shards)], src_data_rank=None)
                    if not torch.equal(as_bytes(local_of(tensor)), as_bytes(local_of(whole))):
                        problems.append(f"version {version}: {name} differs")
        return problems


def take(rank: int, meeting: Meeting) -> None:
    with (
        many_waves(lease_seconds=10),
        epload.WeightReceiver(None, meeting.hear("address"), timeout=60, verify=True) as receiver,
    ):
        for version in VERSIONS:
            report = receiver.receive_weights(version)
            wanted = expected(trainer(version), FORMATS[FORMAT])
            assert_same(dict(receiver.tensors()), wanted, f"version {version}")
            assert report.nbytes == sum(tensor.nbytes for tensor in wanted.values())


SIZES = {"moe_intermediate_size": 32, "num_hidden_layers": 1, "mlp_only_layers": []}
BLOCKS = fine_grained((16, 16), modules_to_not_convert=["lm_head"])


def make_pretrained() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config("qwen3_moe", **SIZES), dtype=torch.bfloat16)


def make_sharded() -> nn.Module:
    return fully_shard(make_pretrained())


def receive_fused(rank: int, meeting: Meeting) -> None:
    """An engine of the library, whose experts and their scales are fused. They arrive one by one."""
    settings = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=["lm_head"])
    model = replace_with_fp8_linear(
        make_pretrained(), modules_to_not_convert=["lm_head"], quantization_config=settings
    ).to_empty(device="cpu")
    with pytest.raises(ValueError, match="expected mapping= without Quantize on a receiver"):
        epload.WeightReceiver(model, meeting.hear("address"), mapping=Quantize())
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60) as receiver:
        receiver.receive_weights()
        receiver.commit()
    wanted = dict(make_pretrained().state_dict())
    for name, tensor in model.state_dict().items():
        if tensor.dtype == FP8:
            wanted |= reference(name, wanted[name], BLOCKS)
    assert_same(dict(model.state_dict()), wanted)


def test_a_model_of_transformers_receives_fused_experts() -> None:
    sender = partial(send_model, mapping=Quantize(BLOCKS))
    run([Job(2, sender, (make_sharded,)), Job(1, receive_fused)])


def test_engines_receive_fp8_weights_and_scales() -> None:
    jobs = [Job(3, send, (4, True)), Job(2, receive, (0, "host")), Job(2, receive, (1, "none"))]
    all_fine([problems for job in run(jobs)[1:] for problems in job])


def test_full_tensors_of_a_snapshot() -> None:
    run([Job(3, send, (1, False)), Job(1, take)])


def send_from_device(rank: int, meeting: Meeting) -> None:
    model = Trainer().to(DEVICE)
    with epload.WeightSender(
        model, ("127.0.0.1", 0), receivers=2, timeout=60, mapping=Quantize(with_skipped(FORMATS[FORMAT]))
    ) as sender:
        meeting.say("address", sender.address)
        for version in VERSIONS:
            change(model, version)
            sender.send_weights(version)


def receive_on(rank: int, meeting: Meeting, where: str, stage: str, pulls: bool) -> None:
    model = engine(expected(trainer(0), FORMATS[FORMAT]), None).to(where)
    with epload.WeightReceiver(model, meeting.hear("address"), timeout=60, stage=stage) as receiver:
        for version in VERSIONS:
            report = receiver.receive_weights(version)
            receiver.commit()
            found = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
            assert_same(found, expected(trainer(version), FORMATS[FORMAT]), f"version {version}")
            assert bool(report.pulled) == pulls, report


def test_engines_pull_what_a_device_has_quantized() -> None:
    build.library()
    setup = partial(fakedev.setup, "nccl")
    engines = [(DEVICE, "device", True), ("cpu", "host", False)]
    jobs = [Job(1, receive_on, arguments, setup=setup) for arguments in engines]
    run([Job(1, send_from_device, setup=setup), *jobs])
