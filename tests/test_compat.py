"""Drop-ins against the functions they stand in for: equal where the original is right, right where it is not."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.placement_types import _StridedShard

import epload
import ranks
from epload import OuterShard
from epload.compat import accelerate as our_accelerate
from epload.compat import skyrl, veomni, verl
from epload.compat import torch as our_torch
from gather import checkpoint_of, full_state
from test_expert_parallel import Fused
from test_layouts import Block, Mlp, Stack, as_bytes, differences, full_values, local_of, mesh, place
from test_loader import all_fine
from test_state import Rotary, meta

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
NO_ACCELERATE = "accelerate is not installed: pip install -r requirements-dev.txt"


def sharded(dtype: torch.dtype = torch.float32) -> Any:
    """Uneven and empty shards over 4 ranks, on meta."""
    model = meta(lambda: Mlp(7, 5, 3).to(dtype))
    return fully_shard(model, mesh=mesh(("all", 4)))


def on_rank_0(values: dict[str, Tensor]) -> dict[str, Tensor]:
    return values if dist.get_rank() == 0 else {}


def wrong(model: nn.Module, values: dict[str, Tensor]) -> list[str]:
    state = full_state(model)
    return [name for name, value in values.items() if not torch.equal(as_bytes(state[name]), as_bytes(value))]


# ---- torch ----


def _torch(rank: int) -> list[str]:
    values = full_values(meta(lambda: Mlp(7, 5, 3)))
    theirs, ours = sharded().to_empty(device="cpu"), sharded()
    torch_state_dict.set_model_state_dict(theirs, on_rank_0(dict(values)), options=FULL)
    keys = our_torch.set_model_state_dict(ours, on_rank_0(values), options=FULL)
    said = [*differences(theirs, ours), *wrong(ours, values), *keys.missing_keys, *keys.unexpected_keys]

    # Keys that do not fit: the original raises on rank 0 only and leaves the others waiting.
    for odd, text in ((values | {"stray": torch.zeros(1)}, "stray"), ({"up.bias": values["up.bias"]}, "up.weight")):
        try:
            our_torch.set_model_state_dict(sharded(), on_rank_0(odd), options=FULL)
            said.append(f"{text}: not raised")
        except RuntimeError as error:
            if text not in str(error):
                said.append(repr(error))
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    given = {name: value for name, value in values.items() if name != "up.bias"} | {"stray": torch.zeros(1)}
    keys = our_torch.set_model_state_dict(sharded(), on_rank_0(given), options=lenient)
    if (keys.missing_keys, keys.unexpected_keys) != (["up.bias"], ["stray"]):
        said.append(str(keys))

    # The original adopts the checkpoint's dtype on meta; a lone _StridedShard gets the wrong rows.
    narrow = sharded(torch.bfloat16)
    our_torch.set_model_state_dict(narrow, on_rank_0(values), options=FULL)
    if wrong(narrow, {name: value.bfloat16() for name, value in values.items()}):
        said.append("values of the bf16 model")
    found = []
    for function in (torch_state_dict.set_model_state_dict, our_torch.set_model_state_dict):
        model = nn.Module()
        model.inner = Block({"w": (16, 3)})
        place(model.inner, mesh(("tp", 4)), [_StridedShard(0, split_factor=2)])
        w = torch.arange(48.0).reshape(16, 3)
        function(model, on_rank_0({"inner.w": w.clone()}), options=FULL)
        rows = torch.cat([w[2 * rank : 2 * rank + 2], w[8 + 2 * rank : 10 + 2 * rank]])
        found.append(torch.equal(local_of(model.inner.w), rows))
    right_anywhere: list[bool] = [False] * 4
    dist.all_gather_object(right_anywhere, found[0])
    if all(right_anywhere) or not found[1]:
        said.append(f"strided shard: the original is right on {right_anywhere}, ours {found[1]}")

    # A sharded state dict is none of our business.
    shards = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    our_torch.set_model_state_dict(theirs, shards)
    return said + wrong(theirs, values)


def test_torch_set_model_state_dict() -> None:
    all_fine(ranks.run(4, _torch))


# ---- accelerate ----


def _accelerate(rank: int) -> list[str]:
    from accelerate.utils import fsdp_utils

    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    values = full_values(meta(lambda: Mlp(7, 5, 3)))
    theirs, ours = sharded(), sharded()
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, theirs, on_rank_0(values))
    given = on_rank_0(values | {"stray": torch.zeros(3)})  # which the original does not look at either
    returned = our_accelerate.fsdp2_load_full_state_dict(accelerator, ours, given)
    said = [*differences(theirs, ours), *wrong(ours, values)]
    if returned is not ours:
        said.append("did not return the model")

    # accelerate#3898: a plain buffer has no device_mesh.
    make = partial(Stack, [{"w": (5, 3)}], buffers={"step": ((), torch.int64)})
    values = full_values(meta(make))
    try:
        fsdp_utils.fsdp2_load_full_state_dict(accelerator, fully_shard(meta(make)), on_rank_0(values))
        said.append("the original takes plain buffers by now")
    except AttributeError:
        pass
    model = our_accelerate.fsdp2_load_full_state_dict(accelerator, fully_shard(meta(make)), on_rank_0(values))
    said += wrong(model, values)

    # A missing key raises on rank 0 only in the original; here everywhere.
    try:
        our_accelerate.fsdp2_load_full_state_dict(
            accelerator, fully_shard(meta(make)), on_rank_0({"layers.0.w": values["layers.0.w"]})
        )
        said.append("a missing key was not raised")
    except epload.ModelMismatch as error:
        if "step" not in str(error):
            said.append(repr(error))
    return said


def test_accelerate_fsdp2_load_full_state_dict() -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    all_fine(ranks.run(4, _accelerate))


# ---- verl, SkyRL, VeOmni: by what they promise, as they are not installed here ----


def _rl(rank: int) -> list[str]:
    said = []
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        model: Any = Rotary() if rank == 0 else meta(Rotary)  # rank 0 has loaded the model, the others have it on meta
        fully_shard(model, mesh=mesh(("all", 4)))
        values = full_values(meta(Rotary))
        load(model, on_rank_0(values), cpu_offload=None)
        said += wrong(model, values)
        if not torch.equal(model.inv_freq, Rotary().inv_freq):
            said.append("inv_freq is not rank 0's")
    return said


def test_verl_and_skyrl_fsdp2_load_full_state_dict() -> None:
    all_fine(ranks.run(4, _rl))


def _veomni(rank: int, folder: Path) -> list[str]:
    """The form of its experts, too: 12 over an ep axis of 2, and FSDP over what one rank holds."""
    on = mesh(("fsdp", 2), ("ep", 2))
    model = meta(lambda: Fused(6))
    fully_shard(model.experts, mesh=on["fsdp"])
    fully_shard(model, mesh=mesh(("all", 4)))
    path = folder if rank == 0 else folder / "not" / "here"
    veomni.rank0_load_and_broadcast_weights(
        model, str(path), init_device="cpu", outer_shards=[OuterShard("gate_up", on["ep"])]
    )
    file = load_file(folder / "model.safetensors")
    expected = file["experts.gate_up"].chunk(2)[rank % 2].chunk(2)[rank // 2]
    return [] if torch.equal(local_of(model.experts.gate_up), expected) else [f"{model.experts.gate_up}"]


def test_veomni_rank0_load_and_broadcast_weights(tmp_path: Path) -> None:
    state = {"experts.gate_up": torch.arange(12 * 12 * 4.0).reshape(12, 12, 4), "norm": torch.arange(7.0)}
    save_file(state, tmp_path / "model.safetensors")
    all_fine(ranks.run(4, _veomni, tmp_path))


# ---- patch ----


def test_patch_replaces_and_restores() -> None:
    before = torch_state_dict.set_model_state_dict
    with epload.patch("torch"):
        assert torch_state_dict.set_model_state_dict is our_torch.set_model_state_dict
        model = nn.Linear(2, 3, device="meta")
        values = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
        torch_state_dict.set_model_state_dict(model, values, options=StateDictOptions(full_state_dict=True))
        assert torch.equal(model.weight, values["weight"])
        torch_state_dict.set_model_state_dict(model, {name: value + 1 for name, value in values.items()})  # torch's own
        assert torch.equal(model.weight, values["weight"] + 1)
    assert torch_state_dict.set_model_state_dict is before
    with pytest.raises(ZeroDivisionError), epload.patch():
        1 / 0  # noqa: B018
    assert torch_state_dict.set_model_state_dict is before
    with (
        pytest.raises(ValueError, match="expected frameworks among torch, accelerate, got 'nemo'"),
        epload.patch("nemo"),
    ):
        pass


def test_patch_of_accelerate() -> None:
    utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason=NO_ACCELERATE)
    before = utils.fsdp2_load_full_state_dict
    with epload.patch():
        assert utils.fsdp2_load_full_state_dict is our_accelerate.fsdp2_load_full_state_dict
    assert utils.fsdp2_load_full_state_dict is before


# ---- and back ----


def _back(rank: int, folder: Path) -> list[str]:
    """A published checkpoint (experts one by one) into a model on ep 2 x fsdp 2, gathered again: the same file."""
    from test_models import build, by_the_library

    file = load_file(folder / "model.safetensors")
    model = by_the_library(meta(lambda: build("qwen3_moe")), ep_size=2, fsdp_size=4)
    mapping = epload.Mapping.from_transformers(model)
    epload.load(model, folder, progress=False)
    back = checkpoint_of(model, mapping, file)
    return [name for name, tensor in file.items() if name not in back or not torch.equal(back[name], tensor)]


def test_what_was_loaded_gathers_back_to_the_file(tmp_path: Path) -> None:
    from test_models import build

    build("qwen3_moe").save_pretrained(tmp_path)
    all_fine(ranks.run(4, _back, tmp_path))
