"""accelerate's, verl's, SkyRL's and VeOmni's functions: as the originals, and right where those are not."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import epload
from epload import OuterShard
from epload.integrations import accelerate as our_accelerate
from epload.integrations import skyrl, veomni, verl
from support import ranks
from support.checks import all_fine, as_bytes, differences, full_values, local_of
from support.drop_ins import everywhere, on_rank_0, raised, sharded, wrong
from support.fused_experts import Fused
from support.fused_experts import store as store_fused
from support.gather import full_state
from support.models import Mlp, Rotary, Stack, mesh, on_meta

NO_ACCELERATE = "accelerate is not installed: pip install -r requirements-dev.txt"


# ---- accelerate ----


def _accelerate(rank: int) -> list[str]:
    from accelerate.utils import fsdp_utils

    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    theirs, ours = sharded(), sharded()
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, theirs, on_rank_0(values))
    given = on_rank_0(values | {"stray": torch.zeros(3)})  # which the original does not look at either
    returned = our_accelerate.fsdp2_load_full_state_dict(accelerator, ours, given)
    problems = [*differences(theirs, ours), *wrong(ours, values)]
    if returned is not ours:
        problems.append("did not return the model")

    # accelerate#3898: a plain buffer has no device_mesh.
    make = partial(Stack, [{"w": (5, 3)}], buffers={"step": ((), torch.int64)})
    values = full_values(on_meta(make))
    try:
        fsdp_utils.fsdp2_load_full_state_dict(accelerator, fully_shard(on_meta(make)), on_rank_0(values))
        problems.append("the original takes plain buffers by now")
    except AttributeError:
        pass
    model = our_accelerate.fsdp2_load_full_state_dict(accelerator, fully_shard(on_meta(make)), on_rank_0(values))
    problems += wrong(model, values)

    return problems


def _accelerate_one_sided(rank: int) -> list[str]:
    """A missing key raises on rank 0 only in the original, where the others wait for its broadcast; here everywhere."""
    from accelerate.utils import fsdp_utils

    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    values = full_values(on_meta(lambda: Mlp(7, 5, 3)))
    last = list(values)[-1]
    short = on_rank_0({name: value for name, value in values.items() if name != last})
    errors = everywhere(raised(lambda: our_accelerate.fsdp2_load_full_state_dict(accelerator, sharded(), short)))
    problems = (
        []
        if len(set(errors)) == 1 and f"1 parameter missing from the checkpoint: {last}" in errors[0]
        else [str(errors)]
    )
    theirs = sharded()
    if rank == 0:
        error = raised(lambda: fsdp_utils.fsdp2_load_full_state_dict(accelerator, theirs, short))
        problems += [] if "KeyError" in error else [error]
        time.sleep(1)
        dist.broadcast(values[last], 0)  # what the others wait for
        distribute_tensor(values[last], theirs.state_dict()[last].device_mesh, theirs.state_dict()[last].placements)
    else:
        waiting = threading.Thread(
            target=fsdp_utils.fsdp2_load_full_state_dict, args=(accelerator, theirs, {}), daemon=True
        )
        waiting.start()
        waiting.join(0.5)
        problems += [] if waiting.is_alive() else ["the original tells all ranks by now"]
        waiting.join(30)
    return problems


def test_accelerate_a_missing_key_is_reported_to_all_ranks() -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    all_fine(ranks.run(4, _accelerate_one_sided))


def _accelerate_experts(rank: int, folder: Path) -> list[str]:
    """transformers#45662: FSDP over tensors of one rank's experts. In the original all have rank 0's."""
    from accelerate.utils import fsdp_utils

    on = mesh(("fsdp", 2), ("ep", 2))
    experts = load_file(folder / "fused.safetensors")["experts.gate_up"].chunk(2)

    def make() -> Any:
        model: Any = on_meta(lambda: Fused(6))
        del model.norm  # the original takes no parameters of the root's own
        fully_shard(model.experts, mesh=on["fsdp"])
        return model

    theirs, ours = make(), make()
    accelerator = SimpleNamespace(is_main_process=rank == 0, device=torch.device("cpu"))
    full = {"experts.gate_up": experts[0]}  # what rank 0's model is made of
    fsdp_utils.fsdp2_load_full_state_dict(accelerator, theirs, on_rank_0(full))
    epload.load(ours, folder / "fused.safetensors", outer_shards=[OuterShard("gate_up", on["ep"])], strict=False)
    problems = [] if torch.equal(local_of(theirs.experts.gate_up), experts[0].chunk(2)[rank // 2]) else ["the original"]
    return problems + (
        [] if torch.equal(local_of(ours.experts.gate_up), experts[rank % 2].chunk(2)[rank // 2]) else ["ours"]
    )


def test_accelerate_overwrites_experts_with_rank_0s(tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    store_fused(tmp_path)
    all_fine(ranks.run(4, _accelerate_experts, tmp_path))


def _prepared(rank: int) -> list[str]:
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
    all_fine(ranks.run(4, _prepared))


def test_accelerate_fsdp2_load_full_state_dict() -> None:
    pytest.importorskip("accelerate", reason=NO_ACCELERATE)
    all_fine(ranks.run(4, _accelerate))


# ---- verl and SkyRL: torch's with strict keys, then every buffer from rank 0 ----


def _rl(rank: int) -> list[str]:
    problems = []
    values = full_values(on_meta(Rotary))
    for load in (verl.fsdp2_load_full_state_dict, skyrl.fsdp2_load_full_state_dict):
        for real in (True, False):  # rank 0 has loaded the model; the others have it on meta, or for real
            model: Any = Rotary() if rank == 0 or real else on_meta(Rotary)
            if rank and real:
                model.inv_freq.zero_()
            fully_shard(model, mesh=mesh(("all", 4)))
            returned = load(model, on_rank_0(values), cpu_offload=None)
            problems += wrong(model, values)
            if not torch.equal(model.inv_freq, Rotary().inv_freq):
                problems.append(f"inv_freq is not rank 0's: {model.inv_freq}")
            if returned is not (model if load is skyrl.fsdp2_load_full_state_dict else None):
                problems.append(f"returned {returned}")
        for odd, text in (
            (values | {"stray": torch.ones(1)}, "unexpected checkpoint key: stray"),
            ({}, "missing from the checkpoint: w"),
        ):
            model = fully_shard(Rotary() if rank == 0 else on_meta(Rotary), mesh=mesh(("all", 4)))
            errors = everywhere(raised(lambda model=model, odd=odd, load=load: load(model, on_rank_0(odd))))
            if len(set(errors)) > 1 or text not in errors[0] or model.w.is_meta != (rank > 0):
                problems.append(f"{text}: {errors}")
        hollow = fully_shard(on_meta(Rotary), mesh=mesh(("all", 4)))
        error = raised(lambda hollow=hollow, load=load: load(hollow, on_rank_0(values)))
        if "fills 1 tensor on meta: inv_freq" not in error:
            problems.append(f"nobody has the buffer: {error}")
    return problems


def test_verl_and_skyrl_fsdp2_load_full_state_dict() -> None:
    all_fine(ranks.run(4, _rl))


# ---- VeOmni: its plan has cut the experts before FSDP, and has left word of it on the model ----


def planned(model: Any, on: DeviceMesh, names: Sequence[str]) -> Any:
    """As VeOmni's ParallelPlan: the named parameters are this rank's experts, and FSDP cuts their next dim."""
    size = on["ep"].size()
    model._fqn2spec_info = {}
    for name, parameter in list(model.named_parameters()):
        cut = name in names
        model._fqn2spec_info[name] = SimpleNamespace(placement=Shard(0) if cut else Replicate(), para_mesh=on["ep"])
        if cut:
            path, _, leaf = name.rpartition(".")
            part = parameter.new_empty(parameter.shape[0] // size, *parameter.shape[1:])
            model.get_submodule(path).register_parameter(leaf, nn.Parameter(part))
    for path in dict.fromkeys(name.rpartition(".")[0] for name in names):
        fully_shard(model.get_submodule(path), mesh=on["fsdp"], shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=mesh(("all", 4)))


def _veomni(rank: int, folder: Path) -> list[str]:
    from support.pretrained import build

    problems = []
    on = mesh(("fsdp", 2), ("ep", 2))
    whole = build("qwen3_moe")
    whole.load_state_dict(torch.load(folder / "whole.pt"))
    names = [
        name for name, _ in whole.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    path = str(folder / "model" if rank == 0 else folder / "not" / "here")
    theirs = {
        "cpu_load_param_name": names,
        "max_load_broadcast_size": 20.0,
        "is_peft_model": False,
        "adapter_path": None,
    }
    model = planned(on_meta(lambda: build("qwen3_moe")), on, names)
    veomni.rank0_load_and_broadcast_weights(model, path, "cpu", distribute_tensor, fqn_to_index_mapping={}, **theirs)
    for name, tensor in whole.state_dict().items():
        part = tensor.chunk(2)[rank % 2].chunk(2, 1)[rank // 2] if name in names else None
        if part is None:
            chunks = tensor.chunk(4)
            part = chunks[rank] if rank < len(chunks) else tensor[:0]
        if not torch.equal(as_bytes(local_of(model.state_dict()[name])), as_bytes(part.contiguous())):
            problems.append(f"{name} is wrong")
    if not torch.equal(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq):
        problems.append("inv_freq")
    error = raised(lambda: veomni.rank0_load_and_broadcast_weights(model, path, "cpu", adapter_path="x"))
    return problems if "expected adapter_path=None, got 'x'" in error else [*problems, error]


def test_veomni_rank0_load_and_broadcast_weights(tmp_path: Path) -> None:
    from support.pretrained import build

    torch.manual_seed(0)
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    all_fine(ranks.run(4, _veomni, tmp_path))


def _veomni_missing(rank: int, folder: Path) -> list[str]:
    """The original initializes what is missing and leaves out what is unexpected; a plain model cannot initialize."""
    import peft

    from support.pretrained import small_llama

    problems = []
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model: Any = fully_shard(on_meta(lambda: peft.get_peft_model(small_llama(), config)), mesh=mesh(("all", 4)))
    veomni.rank0_load_and_broadcast_weights(model, str(folder / "odd.safetensors"), "cpu", is_peft_model=True)
    state, file = full_state(model), load_file(folder / "odd.safetensors")
    up = "base_model.model.model.layers.0.mlp.up_proj.weight"
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    for name, value in state.items():
        source = name.removeprefix("base_model.model.").replace(".base_layer", "")
        if source in file and not torch.equal(value, file[source]):
            problems.append(f"{name} is not the file's")
    spread = {name: float(state[name].std()) for name in (up, f"{lora}A.default.weight")}
    if state[f"{lora}B.default.weight"].any() or not all(0 < value < 1 for value in spread.values()):
        problems.append(f"initialized: {spread}, {state[f'{lora}B.default.weight']}")
    plain = fully_shard(on_meta(lambda: Mlp(7, 5, 3)), mesh=mesh(("all", 4)))
    error = raised(lambda: veomni.rank0_load_and_broadcast_weights(plain, str(folder / "odd.safetensors"), "cpu"))
    return (
        problems
        if "ModelMismatch" in error and "missing from the checkpoint: embed.weight" in error
        else [*problems, error]
    )


def test_veomni_what_the_checkpoint_lacks_is_initialized(tmp_path: Path) -> None:
    from support.pretrained import small_llama

    pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-dev.txt")
    torch.manual_seed(0)
    state = {n: t.clone() for n, t in small_llama().state_dict().items() if not n.endswith("up_proj.weight")}
    save_file(state | {"stray": torch.ones(1)}, tmp_path / "odd.safetensors")
    all_fine(ranks.run(4, _veomni_missing, tmp_path))
