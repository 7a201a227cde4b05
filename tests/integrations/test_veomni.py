"""VeOmni's drop-in: its expert shards, converters, renames, ties and LoRA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from epload import LoadOptions
from epload.integrations import veomni
from support import ranks
from support.checks import all_fine, as_bytes, local_of
from support.findings import must_be_refused_by_all
from support.gather import full_state
from support.models import Mlp, mesh, on_meta
from support.on_ranks import on_ranks
from support.veomni_models import WIDTH, Model, differ, expected, sharded, store, write


def load(model: Any, path: Path, **options: Any) -> None:
    veomni.rank0_load_and_broadcast_weights(model, str(path), "cpu", **options)


# ---- VeOmni's plan has sharded the experts before FSDP ----


def planned(model: Any, on: DeviceMesh, names: Sequence[str]) -> Any:
    """Stands for VeOmni's ParallelPlan: the named parameters are this rank's experts, and FSDP cuts their next dim."""
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


def _veomni(rank: int, folder: Path) -> None:
    from support.pretrained import build

    on = mesh(("fsdp", 2), ("ep", 2))
    whole = build("qwen3_moe")
    whole.load_state_dict(torch.load(folder / "whole.pt"))
    names = [
        name for name, _ in whole.named_parameters() if name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    ]
    path = str(folder / "model" if rank == 0 else folder / "not" / "here")
    model = planned(on_meta(lambda: build("qwen3_moe")), on, names)
    veomni.rank0_load_and_broadcast_weights(
        model,
        path,
        "cpu",
        distribute_tensor,
        names,
        20.0,
        fqn_to_index_mapping={},
        is_peft_model=False,
        adapter_path=None,
    )
    for name, tensor in whole.state_dict().items():
        part = tensor.chunk(2)[rank % 2].chunk(2, 1)[rank // 2] if name in names else None
        if part is None:
            chunks = tensor.chunk(4)
            part = chunks[rank] if rank < len(chunks) else tensor[:0]
        assert torch.equal(as_bytes(local_of(model.state_dict()[name])), as_bytes(part.contiguous())), (
            f"{name} is wrong"
        )
    assert torch.equal(model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq), "inv_freq"
    again = partial(veomni.rank0_load_and_broadcast_weights, model, path, "cpu", adapter_path="x")
    must_be_refused_by_all(again, "expected adapter_path=None, got 'x'")


def test_veomni_rank0_load_and_broadcast_weights(tmp_path: Path) -> None:
    from support.pretrained import build

    torch.manual_seed(0)
    model = build("qwen3_moe")
    model.save_pretrained(tmp_path / "model")
    torch.save(model.state_dict(), tmp_path / "whole.pt")
    ranks.run(4, _veomni, tmp_path)


def _veomni_missing(rank: int, folder: Path) -> None:
    """The original initializes what is missing and leaves out what is unexpected; a plain model cannot initialize."""
    import peft

    from support.pretrained import small_llama

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    model: Any = fully_shard(on_meta(lambda: peft.get_peft_model(small_llama(), config)), mesh=mesh(("all", 4)))
    load(model, folder / "odd.safetensors", is_peft_model=True)
    state, file = full_state(model), load_file(folder / "odd.safetensors")
    up = "base_model.model.model.layers.0.mlp.up_proj.weight"
    lora = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    for name, value in state.items():
        source = name.removeprefix("base_model.model.").replace(".base_layer", "")
        assert not (source in file and not torch.equal(value, file[source])), f"{name} is not the file's"
    spread = {name: float(state[name].std()) for name in (up, f"{lora}A.default.weight")}
    assert not state[f"{lora}B.default.weight"].any(), f"initialized: {spread}, {state[f'{lora}B.default.weight']}"
    assert all(0 < value < 1 for value in spread.values()), f"initialized: {spread}, {state[f'{lora}B.default.weight']}"
    plain = fully_shard(on_meta(lambda: Mlp(7, 5, 3)), mesh=mesh(("all", 4)))
    text = "missing from the checkpoint: embed.weight"
    must_be_refused_by_all(lambda: load(plain, folder / "odd.safetensors"), "ModelMismatch", text)


def test_veomni_what_the_checkpoint_lacks_is_initialized(tmp_path: Path) -> None:
    from support.pretrained import small_llama

    pytest.importorskip("peft", reason="peft is not installed: pip install -r requirements-dev.txt")
    torch.manual_seed(0)
    state = {n: t.clone() for n, t in small_llama().state_dict().items() if not n.endswith("up_proj.weight")}
    save_file(state | {"stray": torch.ones(1)}, tmp_path / "odd.safetensors")
    ranks.run(4, _veomni_missing, tmp_path)


# ---- converters ----


def _fused(rank: int, folder: Path, options: dict[str, Any], renames: dict[str, str]) -> list[str]:
    model = sharded(on_meta(Model))
    model._checkpoint_conversion_mapping = renames
    path = folder if rank == 0 or options.get("readers", "one") != "one" else folder / "only rank 0 has it"
    load(model, path, **options)
    return differ(full_state(model), expected(torch.load(folder / "stored.tensors")))


@pytest.mark.parametrize(
    "options", [{}, {"verify": True}, {"readers": "partitioned"}, {"options": LoadOptions(bucket_bytes=4096)}], ids=str
)
def test_a_models_converter_makes_what_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    store(tmp_path)
    all_fine(ranks.run(3, _fused, tmp_path, options, {}))


def test_names_are_renamed_before_they_are_converted(tmp_path: Path) -> None:
    """Like the original: the first pattern that is found, and groups in what replaces it are left out."""
    stored = store(tmp_path)
    write(tmp_path, {f"wrapped.{name}": tensor for name, tensor in stored.items()})
    all_fine(ranks.run(2, _fused, tmp_path, {}, {r"^wrapped\.": "^(?!layers)", "embed": "never"}))


def _incomplete(rank: int, folder: Path) -> None:
    model = sharded(on_meta(Model))
    text = "converter FuseExperts failed after the last tensor: RuntimeError: incomplete"
    must_be_refused_by_all(lambda: load(model, folder), "CheckpointError", text)
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == []


def test_a_checkpoint_that_lacks_an_expert_is_an_error_on_every_rank(tmp_path: Path) -> None:
    store(tmp_path, layers_1_experts_3_up_weight=True)
    ranks.run(2, _incomplete, tmp_path)


@on_ranks(2, store)
def test_what_is_no_converter_is_refused_on_every_rank(rank: int, tmp_path: Path) -> None:
    for converter, text in (
        (lambda model: SimpleNamespace(convert=1), "expected a converter with can_handle, got SimpleNamespace"),
        ("name", "_create_checkpoint_tensor_converter to be a function, got 'name'"),
    ):
        model = sharded(on_meta(Model))
        model._create_checkpoint_tensor_converter = converter
        must_be_refused_by_all(partial(load, model, tmp_path), "TypeError", text)


# ---- ties ----


def _tied(rank: int, folder: Path, both: bool) -> None:
    values = expected(torch.load(folder / "stored.tensors"))
    tied = values | {"head.weight": values["embed.weight"]}
    for tie in (True, False, None):
        if tie is not True and not both:
            continue  # the head would be initialized
        model = sharded(on_meta(partial(Model, tie)))
        load(model, folder)
        assert [*differ(full_state(model), tied if tie else values)] == [], f"tie={tie}, two of FSDP's"
        model = on_meta(partial(Model, tie))
        load(model, folder)
        assert [*differ(full_state(model), tied if tie else values)] == [], f"tie={tie}, plain"
        assert (model.head.weight is model.embed.weight) == bool(tie), f"tie={tie}: not what the config asks for"


@pytest.mark.parametrize("both", [True, False])
def test_the_embeddings_are_tied_if_the_config_says_so(tmp_path: Path, both: bool) -> None:
    """``both``: the checkpoint has an output embedding too, of other values."""
    store(tmp_path, head_weight=not both)
    ranks.run(3, _tied, tmp_path, both)


@on_ranks(1, store)
def test_whether_a_composite_config_ties(rank: int, tmp_path: Path) -> None:
    """Either side may deny it, and one has to say it; a model that has no head has nothing to tie."""
    for outer, inner, wanted in ((True, None, True), (None, True, True), (True, False, False), (False, True, False)):
        model = on_meta(Model)
        text = SimpleNamespace() if inner is None else SimpleNamespace(tie_word_embeddings=inner)
        model.config = SimpleNamespace(get_text_config=lambda decoder, text=text: text)
        if outer is not None:
            model.config.tie_word_embeddings = outer
        load(model, tmp_path)
        assert (model.head.weight is model.embed.weight) == wanted, f"outer {outer}, inner {inner}"
    model = on_meta(partial(Model, True))
    model.get_output_embeddings = lambda: None
    load(model, tmp_path)
    model = on_meta(partial(Model, True))
    del model.head.weight
    must_be_refused_by_all(lambda: load(model, tmp_path), "but its output embedding cannot be found")
    assert [name for name, parameter in model.named_parameters() if not parameter.is_meta] == []


# ---- VeOmni's own LoRA: the names of PEFT, and classes of its own ----


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})

    def reset_lora_parameters(self, name: str, init: bool) -> None:
        nn.init.constant_(self.lora_A[name].weight, 5)


@on_ranks(2, store)
def test_a_base_checkpoint_into_veomnis_own_lora(rank: int, tmp_path: Path) -> list[str]:
    def make() -> nn.Module:
        model = nn.Module()
        model.base_model = nn.Module()
        model.base_model.model = Model()
        for layer in model.base_model.model.layers:
            layer.norm = Adapted()
            for name in ("gate_up", "down"):
                holder = nn.Module()
                holder.base_layer = nn.Module()
                holder.base_layer._is_bare_param_holder = True
                holder.base_layer.weight = getattr(layer.experts, name)
                delattr(layer.experts, name)
                setattr(layer.experts, name, holder)
        model.get_base_model = lambda: model.base_model.model
        model._init_weights = Model._init_weights.__get__(model)
        return model

    model: Any = fully_shard(on_meta(make))
    load(model, tmp_path, is_peft_model=True)
    values = expected(torch.load(tmp_path / "stored.tensors"))
    wanted = {}
    for name, value in values.items():
        if name.endswith("norm.weight"):
            name = name.replace(".weight", ".base_layer.weight")
            wanted[f"base_model.model.{name.replace('base_layer', 'lora_A.default')}"] = torch.full((2, WIDTH), 5.0)
        if ".experts." in name:
            name += ".base_layer.weight"
        wanted[f"base_model.model.{name}"] = value
    return differ(full_state(model), wanted)
