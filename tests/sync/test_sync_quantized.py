"""Syncs in which the sender quantizes to fp8: what arrives is what the library of reference makes of the sender's weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import transformers
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

import epload
from epload.mapping import Quantize
from support import fakedev, quantized
from support.accelerator import DEVICE
from support.checks import fill
from support.fp8 import Tree
from support.jobs import Job, Meeting, run
from support.pretrained import config
from support.quantized import FP8, Trainer, assert_same, expected, reference, same, sharded
from support.small_syncs import many_waves, receiving, sending, take
from support.sync_jobs import send_model

VERSIONS = (1, 2, 3)
FORMAT = "128 x 128"


def change(model: nn.Module, version: int) -> None:
    """Another maximum in another block for each version, in bits that bfloat16 rounds away and in others."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.37 * version)


def trainer(version: int) -> Trainer:
    model = Trainer()
    for number in range(1, version + 1):
        change(model, number)
    return model


def wanted(version: int) -> dict[str, torch.Tensor]:
    return expected(trainer(version), quantized.FORMATS[FORMAT])


def send(rank: int, meeting: Meeting, receivers: int, waits: bool, where: str = "cpu") -> None:
    with many_waves():
        model = sharded(Trainer(), "fsdp") if where == "cpu" else Trainer().to(where)
        rule, snapshot = Quantize(quantized.with_skipped(quantized.FORMATS[FORMAT])), "none" if waits else "host"
        delta = "always" if where == "cpu" else "off"
        options = {"mapping": rule, "snapshot": snapshot, "verify": not waits, "delta": delta}
        with sending(meeting, model, receivers, **options) as sender:
            for version in VERSIONS:
                fill(model, trainer(version).state_dict())
                report = sender.send_weights(version, wait=waits)
                if not waits:
                    fill(model, trainer(0).state_dict())  # what is sent is what it was
                    report = sender.wait()
                assert (report.changed is not None) == (version > VERSIONS[0] and where == "cpu")


def engine(layout: str = "plain") -> nn.Module:
    """A model with fp8 weights and scales, sharded or not."""
    return sharded(Tree(wanted(0)).to_empty(device="cpu"), layout)


def receive(rank: int, meeting: Meeting, layout: str, stage: str, where: str = "cpu", pulls: bool = False) -> None:
    with many_waves():
        model = engine(layout).to(where)
        with receiving(meeting, model, stage=stage, verify=False) as receiver:
            for version in VERSIONS:
                assert bool(take(receiver, version).pulled) == pulls
                values = wanted(version)
                assert [name for name, found in model.state_dict().items() if not same(found, values[name])] == []


def take_tensors(rank: int, meeting: Meeting) -> None:
    with many_waves(), receiving(meeting, None, verify=True) as receiver:
        for version in VERSIONS:
            report, values = receiver.receive_weights(version), wanted(version)
            assert_same(dict(receiver.tensors()), values, f"version {version}")
            assert report.nbytes == sum(tensor.nbytes for tensor in values.values())


SIZES = {"moe_intermediate_size": 32, "num_hidden_layers": 1, "mlp_only_layers": []}
BLOCKS = quantized.fine_grained((16, 16), modules_to_not_convert=["lm_head"])


def make_pretrained() -> nn.Module:
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config("qwen3_moe", **SIZES), dtype=torch.bfloat16)


def make_sharded() -> nn.Module:
    return fully_shard(make_pretrained())


def make_engine() -> nn.Module:
    """An engine of the library, whose experts and their scales are fused. They arrive one by one."""
    settings = transformers.FineGrainedFP8Config(weight_block_size=(16, 16), modules_to_not_convert=["lm_head"])
    skipped = {"modules_to_not_convert": ["lm_head"]}
    model = replace_with_fp8_linear(make_pretrained(), quantization_config=settings, **skipped)
    return model.to_empty(device="cpu")


def receive_fused(rank: int, meeting: Meeting) -> None:
    model = make_engine()
    with pytest.raises(ValueError, match="expected mapping= without Quantize on a receiver"):
        epload.WeightReceiver(model, meeting.hear("address"), mapping=Quantize())
    with receiving(meeting, model) as receiver:
        take(receiver)
    values = dict(make_pretrained().state_dict())
    for name, tensor in model.state_dict().items():
        if tensor.dtype == FP8:
            values |= reference(name, values[name], BLOCKS)
    assert_same(dict(model.state_dict()), values)


def test_a_model_of_transformers_receives_fused_experts() -> None:
    sender = partial(send_model, mapping=Quantize(BLOCKS))
    run([Job(2, sender, (make_sharded,)), Job(1, receive_fused)])


def is_of_first_layer(name: str) -> bool:
    return "layers.0." in name


def is_norm(name: str) -> bool:
    return "norm" in name


def receive_part(rank: int, meeting: Meeting, is_sent: Callable[[str], bool]) -> None:
    model = make_engine()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with receiving(meeting, model) as receiver:
        take(receiver)
    wanted = dict(make_pretrained().state_dict())
    for name, tensor in before.items():
        if tensor.dtype == FP8:
            wanted |= reference(name, wanted[name], BLOCKS)
    assert_same(dict(model.state_dict()), {name: (wanted if is_sent(name) else before)[name] for name in wanted})


@pytest.mark.parametrize("is_sent", [is_of_first_layer, is_norm])
def test_a_part_of_the_weights_with_their_scales(is_sent: Callable[[str], bool]) -> None:
    sender = partial(send_model, mapping=Quantize(BLOCKS), only=is_sent)
    run([Job(2, sender, (make_sharded,)), Job(1, receive_part, (is_sent,))])


def test_engines_receive_fp8_weights_and_scales() -> None:
    run([Job(3, send, (4, True)), Job(2, receive, ("tp0", "host")), Job(2, receive, ("tp1", "none"))])


def test_full_tensors_of_a_snapshot() -> None:
    run([Job(3, send, (1, False)), Job(1, take_tensors)])


@pytest.mark.usefixtures("fake_device")
def test_engines_pull_what_a_device_has_quantized() -> None:
    setup = partial(fakedev.setup, "nccl")
    engines = ("plain", "device", DEVICE, True), ("plain", "host")
    run([Job(1, send, (2, True, DEVICE), setup=setup), *(Job(1, receive, engine, setup=setup) for engine in engines)])
