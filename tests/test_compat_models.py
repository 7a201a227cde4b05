"""Real models through each drop-in, and through the function that it stands in for: the same tensors on every rank."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions

import ranks
from epload.compat import accelerate as our_accelerate
from epload.compat import skyrl, veomni, verl
from epload.compat import torch as our_torch
from test_layouts import as_bytes, local_of
from test_loader import all_fine
from test_models import MATRIX, build, prepare, whole
from test_state import meta

State = dict[str, Tensor]
Load = Callable[[nn.Module, State], Any]
FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def accelerate(function: Callable[..., Any], model: nn.Module, state: State) -> None:
    main = SimpleNamespace(is_main_process=dist.get_rank() == 0, device=torch.device("cpu"))
    function(main, model, state)


def torch_then_buffers(model: nn.Module, state: State) -> None:
    """What verl's and SkyRL's functions come to: torch's, and rank 0's buffers."""
    if dist.get_rank():
        model.to_empty(device="cpu")
    torch_state_dict.set_model_state_dict(model, state, options=FULL)
    for _, buffer in model.named_buffers():
        dist.broadcast(buffer, src=0)


def differ(what: str, ours: nn.Module, theirs: nn.Module, buffers: State) -> Iterator[str]:
    """Of the state dict; and of ours whether a buffer that no checkpoint holds is that of one process."""
    expected = theirs.state_dict()
    for name, got in ours.state_dict().items():
        if not torch.equal(as_bytes(local_of(got)), as_bytes(local_of(expected[name]))):
            yield f"{what}: {name} differs from the original's"
    for name, buffer in ours.named_buffers():
        if buffer.is_meta or not torch.equal(buffer, buffers[name]):
            yield f"{what}: buffer {name} is {buffer}"


def _models(rank: int, folder: Path) -> list[str]:
    from accelerate.utils.fsdp_utils import fsdp2_load_full_state_dict
    from transformers.utils import logging

    logging.set_verbosity_error()
    set_model_state_dict = torch_state_dict.set_model_state_dict
    pairs: dict[str, tuple[Load, Load, bool]] = {
        "torch": (partial(our_torch.set_model_state_dict, options=FULL), partial(set_model_state_dict, options=FULL), True),
        "accelerate": (
            partial(accelerate, our_accelerate.fsdp2_load_full_state_dict),
            partial(accelerate, fsdp2_load_full_state_dict),
            True,
        ),
        "verl": (verl.fsdp2_load_full_state_dict, torch_then_buffers, False),
        "skyrl": (skyrl.fsdp2_load_full_state_dict, torch_then_buffers, False),
    }  # fmt: skip
    said: list[str] = []
    for kind, tables in MATRIX.items():
        loaded = whole(folder, kind)
        buffers, values = dict(loaded.named_buffers()), loaded.state_dict()
        for name, way in ((name, way) for table in tables for name, way in table[4].items()):
            for framework, (ours, theirs, on_meta) in pairs.items():
                if not on_meta and name != "fsdp":
                    continue
                # verl and SkyRL have the loaded model on rank 0 and an empty one on the others.
                make = partial(meta, partial(build, kind)) if on_meta or rank else partial(whole, folder, kind)
                models = [way.parallelise(make()) for _ in range(2)]
                what = f"rank {rank}: {framework}, {kind}, {name}"
                try:
                    for load, model in zip((ours, theirs), models, strict=True):
                        load(model, {n: t.clone() for n, t in values.items()} if rank == 0 else {})
                    said += differ(what, models[0], models[1], buffers)
                except Exception:
                    said.append(f"{what}: {traceback.format_exc(limit=-4)}")
        model = way.parallelise(meta(partial(build, kind)))  # VeOmni's reads the files
        veomni.rank0_load_and_broadcast_weights(model, str(folder / kind), "cpu")
        said += differ(f"rank {rank}: veomni, {kind}, {name}", model, models[0], buffers)
    return said


def test_models_through_each_drop_in(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed: pip install -r requirements-dev.txt")
    torch.set_num_threads(1)
    prepare(tmp_path)
    all_fine(ranks.run(4, _models, tmp_path, limit=220))
