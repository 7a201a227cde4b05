"""Recordings of the ``load_weights`` of vLLM's own model classes, applied to real weights, against ``load_weights`` itself."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import CONFIGS, make_checkpoint, make_engine, read_checkpoint

from support import ranks
from support.recordings import apply, record_model, same_bits, tensors_of


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
        "unwritten": sorted(recording.unwritten.keys() & dict(model.named_parameters()).keys()),
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
    assert [rank["unwritten"] for rank in found] == [[]] * world
    assert all(rank["places"] > 15 for rank in found)
