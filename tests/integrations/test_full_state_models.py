"""Real models through each drop-in, with each parallelization: the same tensors on every rank as in the whole model."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

from epload.integrations import accelerate, skyrl, veomni, verl
from epload.integrations import torch as our_torch
from support import ranks
from support.checks import all_fine, as_bytes, local_of
from support.models import on_meta
from support.pretrained import MATRIX, build, prepare, whole

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def load(framework: str, rank: int, model: nn.Module, state: dict[str, Tensor]) -> None:
    if framework == "torch":
        our_torch.set_model_state_dict(model, state, options=FULL)
    elif framework == "accelerate":
        accelerate.fsdp2_load_full_state_dict(SimpleNamespace(is_main_process=rank == 0), model, state)
    else:
        module = verl if framework == "verl" else skyrl
        module.fsdp2_load_full_state_dict(model, state)


def wrong(expected: nn.Module, model: nn.Module) -> Iterator[str]:
    """Names of the local tensors and buffers that differ."""
    values = expected.state_dict()
    for name, tensor in model.state_dict().items():
        if not torch.equal(as_bytes(local_of(tensor)), as_bytes(local_of(values[name]))):
            yield name
    buffers = dict(expected.named_buffers())
    for name, buffer in model.named_buffers():
        if buffer.is_meta or not torch.equal(buffer, buffers[name]):
            yield f"buffer {name} is {buffer}"


def frameworks(kind: str, way: str) -> tuple[str, ...]:
    """torch's function with every parallelization; verl's and SkyRL's are for FSDP."""
    if way == "fsdp":
        return ("torch", "accelerate", "verl" if len(kind) % 2 else "skyrl")
    return ("torch", "accelerate") if way == "tp x fsdp" else ("torch",)


def models(rank: int, folder: Path, kind: str) -> list[str]:
    from transformers.utils import logging

    logging.set_verbosity_error()
    problems = []
    loaded = whole(folder, kind)
    state = loaded.state_dict()
    for name, way in ((name, way) for table in MATRIX[kind] for name, way in table[4].items()):
        expected = way.parallelize(deepcopy(loaded))
        for framework in frameworks(kind, name):
            # verl and SkyRL have the loaded model on rank 0 and an empty one on the others.
            real = framework in ("verl", "skyrl") and rank == 0
            model = way.parallelize(deepcopy(loaded) if real else on_meta(partial(build, kind)))
            load(framework, rank, model, {n: t.clone() for n, t in state.items()} if rank == 0 else {})
            problems += [f"{framework}, {name}: {text}" for text in wrong(expected, model)]
    model = way.parallelize(on_meta(partial(build, kind)))  # VeOmni's reads the files
    veomni.rank0_load_and_broadcast_weights(model, str(folder / kind), "cpu")
    return problems + [f"veomni, {name}: {text}" for text in wrong(expected, model)]


@pytest.mark.parametrize("kind", MATRIX)
def test_a_model_through_each_drop_in(kind: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    prepare(tmp_path, [kind])
    all_fine(ranks.run(4, models, tmp_path, kind))
