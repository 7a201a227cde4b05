"""Drop-ins against the functions they stand in for: equal where the original is right, right where it is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor.placement_types import _StridedShard

import epload
from epload.integrations import accelerate as our_accelerate
from epload.integrations import skyrl, veomni, verl
from epload.integrations import torch as our_torch
from support import ranks
from support.checks import all_fine, differences, full_values, local_of
from support.drop_ins import everywhere, on_rank_0, raised, sharded, wrong
from support.gather import checkpoint_of
from support.models import Block, Mlp, Rotary, Stack, Tied, mesh, on_meta, place

FULL = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
NO_ACCELERATE = "accelerate is not installed: pip install -r requirements-dev.txt"


# ---- torch ----


def _torch(rank: int) -> list[str]:
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    theirs, ours = sharded().to_empty(device="cpu"), sharded()
    torch_state_dict.set_model_state_dict(theirs, on_rank_0(dict(values)), options=FULL)
    keys = our_torch.set_model_state_dict(ours, on_rank_0(values), options=FULL)
    problems = [*differences(theirs, ours), *wrong(ours, values), *keys.missing_keys, *keys.unexpected_keys]

    # A sharded state dict is none of our business.
    shards = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    our_torch.set_model_state_dict(theirs, shards)
    return problems + wrong(theirs, values)


def test_torch_set_model_state_dict() -> None:
    all_fine(ranks.run(4, _torch))


def _torch_keys(rank: int) -> list[str]:
    """Keys that do not fit: the original raises what is unexpected on rank 0 only, so that the ranks part."""
    problems = []
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    stray = values | {"stray": torch.zeros(1)}
    short = {name: value for name, value in values.items() if name != "up.bias"}
    shape = values | {"up.bias": torch.zeros(8)}
    for odd, text in ((stray, "stray"), (short, "up.bias"), (shape, "up.bias has shape [8]")):
        errors = everywhere(
            raised(lambda odd=odd: our_torch.set_model_state_dict(sharded(), on_rank_0(odd), options=FULL))
        )
        if len(set(errors)) > 1 or "ModelMismatch" not in errors[0] or text not in errors[0]:
            problems.append(f"ours: {errors}")
    theirs = sharded().to_empty(device="cpu")
    errors = everywhere(
        raised(lambda: torch_state_dict.set_model_state_dict(theirs, on_rank_0(dict(stray)), options=FULL))
    )
    if "stray" not in errors[0] or any(errors[1:]):
        problems.append(f"the original tells all ranks by now: {errors}")
    lenient = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False)
    keys = our_torch.set_model_state_dict(sharded(), on_rank_0(short | {"stray": torch.zeros(1)}), options=lenient)
    if (keys.missing_keys, keys.unexpected_keys) != (["up.bias"], ["stray"]):
        problems.append(str(keys))
    error = raised(lambda: our_torch.set_model_state_dict(sharded(), on_rank_0(shape), options=lenient))
    if "up.bias has shape [8]" not in error:  # torch, too, takes strict=False for keys only
        problems.append(f"another shape, not strict: {error}")
    return problems


def test_torch_keys_that_do_not_fit_are_reported_to_all_ranks() -> None:
    all_fine(ranks.run(4, _torch_keys))


def both(make: Callable[[], Any], values: dict[str, Tensor]) -> tuple[Any, Any]:
    """A model loaded by the original, and one by ours."""
    models = (make(), make())
    for function, model in zip(
        (torch_state_dict.set_model_state_dict, our_torch.set_model_state_dict), models, strict=True
    ):
        function(model, on_rank_0({name: value.clone() for name, value in values.items()}), options=FULL)
    return models


def _torch_is_wrong(rank: int) -> list[str]:
    """Where the original is wrong, for each thing that it gets wrong."""
    problems = []

    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))  # it adopts the checkpoint's dtype
    theirs, ours = both(lambda: sharded(torch.bfloat16), values)
    if theirs.up.weight.dtype != torch.float32 or ours.up.weight.dtype != torch.bfloat16:
        problems.append(f"dtypes: {theirs.up.weight.dtype} {ours.up.weight.dtype}")
    problems += wrong(ours, {name: value.bfloat16() for name, value in values.items()})

    values = full_values(on_meta(Tied))  # it breaks ties
    theirs, ours = both(lambda: fully_shard(on_meta(Tied), mesh=mesh(("all", 4))), values)
    if theirs.head.weight is theirs.embed.weight or ours.head.weight is not ours.embed.weight:
        problems.append("ties")
    problems += wrong(ours, values)

    values = full_values(on_meta(Rotary))  # it leaves buffers on meta that rank 0 has
    theirs, ours = both(lambda: fully_shard(Rotary() if rank == 0 else on_meta(Rotary), mesh=mesh(("all", 4))), values)
    if theirs.inv_freq.is_meta != (rank > 0) or not torch.equal(ours.inv_freq, Rotary().inv_freq):
        problems.append(f"buffers: {theirs.inv_freq}, {ours.inv_freq}")

    def strided() -> nn.Module:  # rows of a _StridedShard that is not one of FSDP's over another
        model = nn.Module()
        model.inner = Block({"w": (16, 3)})
        place(model.inner, mesh(("tp", 4)), [_StridedShard(0, split_factor=2)])
        return model

    w = torch.arange(48.0).reshape(16, 3)
    theirs, ours = both(strided, {"inner.w": w})
    rows = torch.cat([w[2 * rank : 2 * rank + 2], w[8 + 2 * rank : 10 + 2 * rank]])
    if all(everywhere(torch.equal(local_of(theirs.inner.w), rows))) or not torch.equal(local_of(ours.inner.w), rows):
        problems.append(f"strided: {theirs.inner.w} {ours.inner.w}")

    def partial_sum() -> nn.Module:  # a Partial comes out multiplied by the number of ranks; ours has no answer either
        model = nn.Module()
        local = torch.zeros(3)
        model.w = nn.Parameter(DTensor.from_local(local, mesh(("all", 4)), [Partial()], run_check=False))
        return model

    model = partial_sum()
    torch_state_dict.set_model_state_dict(model, on_rank_0({"w": torch.ones(3)}), options=FULL)
    if model.w.full_tensor().tolist() != [4.0] * 3:
        problems.append(f"Partial: {model.w.full_tensor()}")
    error = raised(lambda: our_torch.set_model_state_dict(partial_sum(), on_rank_0({"w": torch.ones(3)}), options=FULL))
    if "w has placement P(sum), which cannot be loaded into" not in error:
        problems.append(error)
    return problems


def test_where_torch_set_model_state_dict_is_wrong() -> None:
    all_fine(ranks.run(4, _torch_is_wrong))


def _wrapped(rank: int) -> list[str]:
    """Names of compiled modules, and a buffer that nobody has: as the original takes them, and leaves it."""
    make = partial(Stack, [{"w": (5, 3)}, {"w": (2, 3)}])
    values = full_values(on_meta(make))

    def compiled() -> Any:
        model: Any = on_meta(make)
        model.layers[1] = torch.compile(model.layers[1])
        for layer in model.layers:
            fully_shard(layer, mesh=mesh(("all", 4)))
        return torch.compile(fully_shard(model, mesh=mesh(("all", 4))))

    theirs, ours = both(compiled, values)
    problems = [f"compiled: {name}" for name in ours.state_dict() if ".w" not in name]
    problems += [f"compiled: {text}" for text in differences(theirs, ours)]
    hollow: Any = on_meta(Rotary)
    fully_shard(hollow, mesh=mesh(("all", 4)))
    our_torch.set_model_state_dict(hollow, on_rank_0(full_values(on_meta(Rotary))), options=FULL)
    if not hollow.inv_freq.is_meta or hollow.w.is_meta:
        problems.append(f"{hollow.inv_freq} {hollow.w}")
    return problems


def test_torch_compiled_modules_and_buffers_that_nobody_has() -> None:
    all_fine(ranks.run(4, _wrapped))


# ---- patch ----


def test_patch_replaces_and_restores() -> None:
    before = torch_state_dict.set_model_state_dict
    with epload.patch("torch"):
        assert torch_state_dict.set_model_state_dict is our_torch.set_model_state_dict
        model = nn.Linear(2, 3, device="meta")
        values = {"weight": torch.randn(3, 2), "bias": torch.randn(3)}
        torch_state_dict.set_model_state_dict(model, values, options=FULL)
        assert torch.equal(model.weight, values["weight"])
        torch_state_dict.set_model_state_dict(model, {name: value + 1 for name, value in values.items()})  # torch's own
        assert torch.equal(model.weight, values["weight"] + 1)
    assert torch_state_dict.set_model_state_dict is before
    with pytest.raises(ZeroDivisionError), epload.patch():
        1 / 0  # noqa: B018
    assert torch_state_dict.set_model_state_dict is before
    with (
        pytest.raises(ValueError, match="expected frameworks among torch, accelerate, verl, skyrl, veomni, got 'nemo'"),
        epload.patch("nemo"),
    ):
        pass


def test_patch_where_a_function_was_imported_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    places = {
        "verl.utils.fsdp_utils": verl.fsdp2_load_full_state_dict,
        "skyrl_train.distributed.fsdp_utils": skyrl.fsdp2_load_full_state_dict,
        "veomni.models.module_utils": veomni.rank0_load_and_broadcast_weights,
    }
    for defined, ours in places.items():
        parts = defined.split(".")
        for i in range(1, len(parts) + 1):
            monkeypatch.setitem(sys.modules, ".".join(parts[:i]), ModuleType(parts[i - 1]))
        user = ModuleType("user")
        monkeypatch.setitem(sys.modules, "user", user)
        name, original = ours.__name__, lambda: None
        setattr(sys.modules[defined], name, original)
        setattr(user, name, original)
        with epload.patch(defined.split(".")[0].removesuffix("_train")):
            assert getattr(sys.modules[defined], name) is ours
            assert getattr(user, name) is ours
        assert getattr(sys.modules[defined], name) is original
        assert getattr(user, name) is original
    monkeypatch.setitem(sys.modules, "verl.utils.fsdp_utils", None)  # as if not installed
    before = torch_state_dict.set_model_state_dict
    with pytest.raises(ImportError), epload.patch("torch", "verl"):
        pass
    assert torch_state_dict.set_model_state_dict is before


def test_patch_of_accelerate() -> None:
    utils = pytest.importorskip("accelerate.utils.fsdp_utils", reason=NO_ACCELERATE)
    before = utils.fsdp2_load_full_state_dict
    with epload.patch():
        assert utils.fsdp2_load_full_state_dict is our_accelerate.fsdp2_load_full_state_dict
    assert utils.fsdp2_load_full_state_dict is before


# ---- and back ----


def _back(rank: int, folder: Path) -> list[str]:
    """A published checkpoint (experts one by one) into a model on ep 2 x fsdp 2, gathered again: the same file."""
    from support.pretrained import build, by_the_library

    file = load_file(folder / "model.safetensors")
    model = by_the_library(on_meta(lambda: build("qwen3_moe")), ep_size=2, fsdp_size=4)
    mapping = epload.mapping.from_model(model)
    epload.load(model, folder, progress=False)
    back = checkpoint_of(model, mapping, file)
    return [name for name, tensor in file.items() if name not in back or not torch.equal(back[name], tensor)]


def test_what_was_loaded_gathers_back_to_the_file(tmp_path: Path) -> None:
    from support.pretrained import build

    build("qwen3_moe").save_pretrained(tmp_path)
    all_fine(ranks.run(4, _back, tmp_path))
