"""accelerate's, verl's and SkyRL's functions: as the originals, and right where those are not."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload.integrations import accelerate as our_accelerate
from epload.integrations import skyrl, verl
from support import ranks
from support.checks import all_fine, differences, full_values, local_of
from support.drop_ins import on_rank_0, sharded, wrong
from support.findings import must_be_refused_by_all
from support.models import Mlp, Rotary, Stack, mesh, on_meta
from support.on_ranks import on_ranks

NO_ACCELERATE = "accelerate is not installed: pip install -r requirements-dev.txt"


def accelerate(rank: int) -> None:
    from accelerate.utils import fsdp_utils

    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    expected, model = sharded(), sharded()
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, expected, on_rank_0(values))
    state = on_rank_0(values | {"stray": torch.zeros(3)})  # which the original does not look at either
    returned = our_accelerate.fsdp2_load_full_state_dict(accelerator, model, state)
    assert [*differences(expected, model)] == []
    assert wrong(model, values) == []
    assert returned is model, "did not return the model"

    # accelerate#3898: a plain buffer has no device_mesh.
    make = partial(Stack, [{"w": (5, 3)}], buffers={"step": ((), torch.int64)})
    values = full_values(on_meta(make))
    model = our_accelerate.fsdp2_load_full_state_dict(accelerator, fully_shard(on_meta(make)), on_rank_0(values))
    assert wrong(model, values) == []

    # The original raises on rank 0 only, and the others wait for its broadcast.
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    last = list(values)[-1]
    short = on_rank_0({name: value for name, value in values.items() if name != last})
    must_be_refused_by_all(
        lambda: our_accelerate.fsdp2_load_full_state_dict(accelerator, sharded(), short),
        f"1 parameter missing from the checkpoint: {last}",
    )


def test_accelerate_fsdp2_load_full_state_dict() -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    ranks.run(4, accelerate)


def prepared(rank: int) -> list[str]:
    """accelerate's own caller, which fills buffers itself once our function has loaded what it put on meta."""
    from accelerate import FullyShardedDataParallelPlugin
    from accelerate.utils import fsdp_utils

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, cpu_ram_efficient_loading=True, auto_wrap_policy="no_wrap", reshard_after_forward=True
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        mixed_precision="no",
        is_main_process=rank == 0,
        device=torch.device("cpu"),
    )
    models = []
    for patched in (False, True):
        model: Any = nn.Sequential(Rotary())
        with torch.no_grad():
            model[0].w.fill_(7 if rank == 0 else 0)  # the others' is empty until it is loaded
        with epload.patch(*["accelerate"] * patched) if patched else nullcontext():
            models.append(fsdp_utils.fsdp2_prepare_model(accelerator, model))
    same = torch.equal(models[1][0].inv_freq, Rotary().inv_freq) and bool((local_of(models[1][0].w) == 7).all())
    return [*differences(*models), *([] if same else [str(models[1][0].inv_freq)])]


def test_accelerate_prepares_a_model_through_the_patch() -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    all_fine(ranks.run(4, prepared))


@on_ranks(4)
def test_verl_and_skyrl_fsdp2_load_full_state_dict(rank: int) -> None:
    """verl's and SkyRL's are torch's with strict keys, then every buffer from rank 0."""
    values = full_values(on_meta(Rotary))
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        for real in (True, False):  # rank 0 has loaded the model; the others have it on meta, or for real
            model: Any = Rotary() if rank == 0 or real else on_meta(Rotary)
            if rank and real:
                model.inv_freq.zero_()
            fully_shard(model, mesh=mesh(("all", 4)))
            returned = load(model, on_rank_0(values), cpu_offload=None)
            assert wrong(model, values) == []
            assert torch.equal(model.inv_freq, Rotary().inv_freq), f"inv_freq is not rank 0's: {model.inv_freq}"
            assert returned is (model if load is skyrl.fsdp2_load_full_state_dict else None), f"returned {returned}"
        for odd, text in (
            (values | {"stray": torch.ones(1)}, "unexpected checkpoint key: stray"),
            ({}, "missing from the checkpoint: w"),
        ):
            model = fully_shard(Rotary() if rank == 0 else on_meta(Rotary), mesh=mesh(("all", 4)))
            must_be_refused_by_all(partial(load, model, on_rank_0(odd)), text)
            assert model.w.is_meta == (rank > 0), f"{text}: something has moved"
        hollow = fully_shard(on_meta(Rotary), mesh=mesh(("all", 4)))  # nobody has the buffer
        must_be_refused_by_all(partial(load, hollow, on_rank_0(values)), "fills 1 tensor on meta: inv_freq")
