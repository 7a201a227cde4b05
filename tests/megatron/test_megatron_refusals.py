"""Models of Megatron-Core, checkpoints and calls that are refused by name, before anything moves; and wrappers, which are not."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megatron_models as models
import pytest
import torch
from megatron_models import Layout
from torch import Tensor, nn

import epload
from epload.mapping import Mapping, Quantize
from support import ranks

State = dict[str, Tensor]
FUSED = "model.layers.1.self_attn.k_proj.weight"


def without(*names: str) -> Callable[[State], State]:
    return lambda state: {name: tensor for name, tensor in state.items() if name not in names}


def set_option(name: str, value: Any) -> Callable[[Any], None]:
    return lambda chunk: setattr(chunk.config, name, value)


def add_adapter(chunk: Any) -> None:
    chunk.decoder.layers[0].adapter = nn.Linear(2, 2)


def replace_norm(chunk: Any) -> None:
    norm = chunk.decoder.final_layernorm
    norm._parameters["weight"] = norm.weight.detach().as_subclass(type("Float8Tensor", (Tensor,), {}))


def move_to_meta(chunk: Any) -> None:
    chunk.decoder.final_layernorm.to("meta")


SHAPE = f"{FUSED} has shape [16, 64] in the checkpoint, expected [64, 64]"
QKV = "Megatron's decoder.layers.1.self_attention.linear_qkv.weight"
TWO = "has two names for Megatron's decoder.layers.0.self_attention.q_layernorm.weight"
ROWS = "lm_head.weight has shape [337, 64] in the checkpoint, expected [336, 64]"
CHECKPOINTS: list[tuple[str, Callable[[State], State], str, str]] = [
    ("part of a fused tensor is missing", without(FUSED), f"lacks {FUSED} of {QKV}", f"lacks {FUSED} of {QKV}"),
    (
        "a tensor is missing", without("model.norm.weight"), "missing from the checkpoint: 0.decoder.final_layernorm.weight",
        "names_from= lacks 1 tensor: decoder.final_layernorm.weight; the first would be model.norm.weight",
    ),
    (
        "a tensor is unexpected", lambda state: state | {"model.vision.weight": torch.ones(2)},
        "unexpected checkpoint key: model.vision.weight", "Megatron-Core has no name for 1 tensor: model.vision.weight",
    ),
    ("another shape", lambda state: state | {FUSED: state[FUSED][:16]}, SHAPE, SHAPE),
    ("two names", lambda state: state | {"model.layers.0.self_attn.q_a_layernorm.weight": torch.ones(16)}, TWO, TWO),
    ("a larger vocabulary", lambda state: state | {"lm_head.weight": torch.ones(337, 64)}, ROWS, ROWS),
    (
        "more layers", lambda state: state | {"model.layers.4.mlp.up_proj.weight": torch.ones(128, 64)},
        "unexpected checkpoint key: model.layers.4.mlp.up_proj.weight", "no rank has model.layers.4.mlp.up_proj.weight",
    ),
]  # fmt: skip
MODELS: list[tuple[str, Callable[[Any], None], str]] = [
    ("norms around zero", set_option("layernorm_zero_centered_gamma", True), "layernorm_zero_centered_gamma=True"),
    ("gates in queries", set_option("attention_output_gate", True), "attention_output_gate=True is not supported"),
    ("interleaved gates", set_option("moe_mlp_glu_interleave_size", 32), "moe_mlp_glu_interleave_size=32"),
    ("fp8", set_option("fp8_param", True), "fp8_param=True is not supported"),
    ("another rotation", set_option("rotary_interleaved", True), "rotary_interleaved=True is not supported"),
    ("an adapter", add_adapter, "Megatron's decoder.layers.0.adapter.weight has no name in checkpoints"),
    ("a subclass", replace_norm, "0.decoder.final_layernorm.weight is a Float8Tensor"),
    ("meta", move_to_meta, "0.decoder.final_layernorm.weight is on meta"),
]  # fmt: skip


def refuse(rank: int, model: int | None, checkpoint: int | None, folder: Path) -> list[str]:
    """Returns the errors of a load and of a save, with the change of one row of the tables."""
    chunks: list[Any] = models.build("qwen3", Layout())
    if model is not None:
        MODELS[model][1](chunks[0])
    state = models.read_checkpoint(folder)
    if checkpoint is not None:
        state = CHECKPOINTS[checkpoint][1](state)
    outcomes = []
    for call in (
        lambda: epload.load(chunks, state, timeout=30, progress=False),
        lambda: epload.save(chunks, folder / "saved", names_from=state, timeout=30),
    ):
        with pytest.raises((epload.LoadError, ValueError)) as caught:
            call()
        outcomes.append(str(caught.value))
    written = [name for name, tensor in chunks[0].named_parameters() if not tensor.is_meta and (tensor != -7.5).any()]
    assert [name for name in written if "adapter" not in name] == []
    assert not (folder / "saved").exists()
    return outcomes


@pytest.mark.parametrize("row", range(len(MODELS)), ids=[row[0] for row in MODELS])
def test_models_whose_values_are_no_copies_are_refused(row: int, tmp_path: Path) -> None:
    models.write_checkpoint("qwen3", tmp_path)
    ((load, save),) = ranks.run(1, refuse, row, None, tmp_path)
    text = MODELS[row][2]
    assert text in load
    assert text in save


@pytest.mark.parametrize("row", range(len(CHECKPOINTS)), ids=[row[0] for row in CHECKPOINTS])
def test_checkpoints_of_other_models_are_refused(row: int, tmp_path: Path) -> None:
    models.write_checkpoint("qwen3", tmp_path)
    ((load, save),) = ranks.run(1, refuse, None, row, tmp_path)
    assert CHECKPOINTS[row][2] in load
    assert CHECKPOINTS[row][3] in save


def misuse(rank: int, folder: Path) -> list[str]:
    chunks: list[Any] = models.build("qwen2", Layout())
    fsdp = type("FullyShardedDataParallel", (nn.Module,), {"__module__": "megatron.core.distributed"})()
    fsdp.module = chunks[0]
    untied = models.read_checkpoint(folder)
    untied["lm_head.weight"] = untied["model.embed_tokens.weight"] + 1
    calls: list[Callable[[], Any]] = [
        lambda: epload.save(chunks, folder / "saved", timeout=30),
        lambda: epload.save(chunks, folder / "saved", names_from=folder, mapping=Quantize(), timeout=30),
        lambda: epload.load(chunks, folder, mapping=Mapping(), timeout=30, progress=False),
        lambda: epload.load(fsdp, folder, timeout=30, progress=False),
        lambda: epload.load([nn.Linear(2, 2), chunks[0]], folder, timeout=30, progress=False),
        lambda: epload.load(chunks, untied, timeout=30, progress=False),
        lambda: epload.WeightSender([nn.Linear(2, 2)], ("127.0.0.1", 0), receivers=1, timeout=30),
        lambda: epload.WeightReceiver(chunks[0], "127.0.0.1:1", timeout=30),
    ]
    outcomes = []
    for call in calls:
        with pytest.raises((ValueError, TypeError, epload.ModelMismatch)) as caught:
            call()
        outcomes.append(str(caught.value))
    assert all((tensor == -7.5).all() for tensor in chunks[0].parameters())
    return outcomes


def test_calls_that_cannot_be_right_are_refused(tmp_path: Path) -> None:
    models.write_checkpoint("qwen2", tmp_path)
    texts = [
        "pass names_from=, a Hugging Face checkpoint of this model", "expected mapping='auto' for a Megatron-Core model",
        "expected mapping='auto' for a Megatron-Core model", "FullyShardedDataParallel keeps shards of flat buffers",
        "got a list of Linear, GPTModel", "lm_head.weight have different values",
        "got a list of Linear", "expected a model that is not Megatron-Core's",
    ]  # fmt: skip
    (outcomes,) = ranks.run(1, misuse, tmp_path)
    assert len(outcomes) == len(texts)
    for text, outcome in zip(texts, outcomes, strict=True):
        assert text in outcome


def refuse_grouped(rank: int, folder: Path) -> str:
    from megatron.core.transformer.moe import grouped_gemm_util

    grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None  # which only its kernels need
    chunks = models.build("qwen3_moe", Layout(), moe_grouped_gemm=True, moe_use_legacy_grouped_gemm=True)
    with pytest.raises(epload.ModelMismatch) as caught:
        epload.load(chunks, folder, timeout=30, progress=False)
    return str(caught.value)


@pytest.mark.skipif(version("megatron-core") >= "0.19", reason="it has no GroupedMLP any more")
def test_the_legacy_grouped_experts_are_refused(tmp_path: Path) -> None:
    models.write_checkpoint("qwen3_moe", tmp_path)
    (text,) = ranks.run(1, refuse_grouped, tmp_path)
    assert "has a copy for decoder.layers.0.mlp.experts.experts.0.linear_fc1.weight" in text


def wrap(rank: int, folder: Path) -> list[str]:
    """Loads and saves through Megatron's wrappers, with a model in bfloat16 whose router biases stay in float32."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module

    chunks: list[Any] = models.build("deepseek_v3", Layout(tp=2), bf16=True, params_dtype=torch.bfloat16)
    halves = [Float16Module(chunk.config, chunk) for chunk in chunks]
    assert {tensor.dtype for name, tensor in chunks[0].named_buffers() if "expert_bias" in name} == {torch.bfloat16}
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    wrapped = [DistributedDataParallel(half.module.config, config, half) for half in halves]
    epload.load(wrapped, folder, timeout=60, progress=False)
    epload.save(wrapped, folder / "saved", names_from=folder, timeout=60)
    state = models.read_checkpoint(folder)
    narrow = {name: t if "e_score" in name else t.bfloat16() for name, t in state.items()}
    return models.differences(chunks, "deepseek_v3", narrow)


def test_wrappers_are_looked_through_and_router_biases_are_not_rounded(tmp_path: Path) -> None:
    models.write_checkpoint("deepseek_v3", tmp_path)
    assert ranks.run(4, wrap, tmp_path) == [[]] * 4
    saved, state = models.read_checkpoint(tmp_path / "saved"), models.read_checkpoint(tmp_path)
    biases = [name for name in saved if "e_score" in name]
    assert len(biases) == 4
    assert [name for name in biases if not torch.equal(saved[name], state[name])] == []
    assert [name for name in saved if name not in biases and not torch.equal(saved[name], state[name].bfloat16())] == []


def train(rank: int, folder: Path) -> list[str]:
    """Takes a training step of Megatron's wrapper on two data-parallel ranks, and saves around the gather of its parameters."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.param_and_grad_buffer import shard_buffer

    (chunk,) = models.build("llama", Layout())
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, overlap_grad_reduce=True, bucket_size=20000
    )
    model = DistributedDataParallel(chunk.config, config, chunk)
    epload.load(model, folder, timeout=60, progress=False)
    models.forward(model, torch.arange(8)[None] + rank).square().mean().backward()
    model.finish_grad_sync()
    with torch.no_grad():  # as its optimizer, which needs CUDA: each rank updates its own part
        for group in model.bucket_groups:
            for bucket in group.buckets:
                parts, steps = (shard_buffer(buffer, 2)[rank] for buffer in (bucket.param_data, bucket.grad_data))
                parts.sub_(steps, alpha=0.1)
    chunk.register_forward_pre_hook(lambda *unused: saved)  # no value yet
    outcomes = []

    def save_and_send() -> None:
        saves = [partial(epload.save, part, folder / "stale", names_from=folder) for part in (model, chunk)]
        for call in (*saves, lambda: sender.send_weights(1)):
            with pytest.raises(epload.ModelMismatch) as caught:
                call()
            outcomes.append(str(caught.value))

    with epload.WeightSender(model, ("127.0.0.1", 0), receivers=1, names_from=folder, timeout=60) as sender:
        save_and_send()
        model.start_param_sync()
        save_and_send()
        with pytest.raises(epload.ModelMismatch) as caught:
            epload.load(model, folder, timeout=60, progress=False)
        outcomes.append(str(caught.value))
    model.start_param_sync(force_sync=True)
    epload.save(model, folder / "saved", names_from=folder, timeout=60)
    saved = models.read_checkpoint(folder / "saved")
    assert torch.equal(chunk.output_layer.weight[: models.VOCABULARY], saved["lm_head.weight"])  # the padding is trained, too
    return outcomes + [name for name in models.differences([chunk], "llama", saved) if "output_layer" not in name]


def test_parameters_that_megatron_has_not_gathered_are_refused(tmp_path: Path) -> None:
    state = models.write_checkpoint("llama", tmp_path)
    for outcomes in ranks.run(2, train, tmp_path):
        assert len(outcomes) == 7
        assert all("start_param_sync(force_sync=True) on each DistributedDataParallel" in text for text in outcomes)
    saved = models.read_checkpoint(tmp_path / "saved")
    assert [name for name in state if torch.equal(saved[name], state[name])] == []
    assert not (tmp_path / "stale").exists()
