"""Recordings of the ``load_weights`` of vLLM's own model classes, applied to real weights, against ``load_weights`` itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import make_checkpoint, make_engine, read_checkpoint
from transformers import LlamaConfig, Qwen3MoeConfig

from support import ranks
from support.recordings import apply, record_model, same_bits, tensors_of

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=320,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **SMALL,
    ),
    "llama": LlamaConfig(vocab_size=323, tie_word_embeddings=False, **SMALL),
    "llama_tied": LlamaConfig(vocab_size=323, tie_word_embeddings=True, **SMALL),
}


def check(rank: int, folder: Path, tensor_parallel: int) -> dict[str, Any]:
    from vllm.config import set_current_vllm_config

    weights = read_checkpoint(folder)
    model, config = make_engine(folder, tensor_parallel)
    poison(model)
    with set_current_vllm_config(config):
        model.load_weights(iter(weights.items()))
        expected = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
        poison(model)
        recording = record_model(model, weights)
        apply(recording, model, weights)
    return {
        "wrong": [name for name, tensor in tensors_of(model).items() if not same_bits(tensor, expected[name])],
        "shapes": {name: tuple(tensor.shape) for name, tensor in expected.items()},
        "whole": recording.whole,
        "fills": [(fill.target, fill.box) for fill in recording.fills],
        "unwritten": recording.unwritten,
        "unused": recording.unused,
        "places": sum(map(len, recording.regions)),
    }


def poison(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)


@functools.cache
def checked(name: str, folder: Path, world: int) -> list[dict[str, Any]]:
    make_checkpoint(folder, CONFIGS[name])
    return ranks.run(world, check, folder, 2)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_recording_gives_what_load_weights_gives(name: str, world: int, tmp_path: Path) -> None:
    """2 tensor- and expert-parallel ranks, in one stage or two."""
    found = checked(name, tmp_path, world)
    assert [(rank["wrong"], rank["whole"]) for rank in found] == [([], ())] * world
    assert [rank["unwritten"] for rank in found] == [{}] * world
    assert all(rank["places"] > 20 for rank in found)
