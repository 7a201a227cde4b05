"""VeOmni's drop-in where a model converts its checkpoint's tensors, renames them, or ties its embeddings."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from epload.integrations import veomni
from support import ranks
from support.checks import all_fine
from support.failures import error_of
from support.gather import full_state
from support.models import on_meta
from support.veomni_models import (
    WIDTH,
    Model,
    differ,
    expected,
    sharded,
    store,
    write,
)

# ---- converters ----


def _fused(rank: int, folder: Path, options: dict[str, Any]) -> list[str]:
    model = sharded(on_meta(Model))
    path = folder if rank == 0 or options.get("readers", "one") != "one" else folder / "only rank 0 has it"
    veomni.rank0_load_and_broadcast_weights(model, str(path), "cpu", **options)
    return differ(full_state(model), expected(torch.load(folder / "stored.tensors")))


@pytest.mark.parametrize("options", [{}, {"verify": True}, {"readers": "partitioned"}, {"bucket_bytes": 4096}], ids=str)
def test_a_models_converter_makes_what_is_loaded(tmp_path: Path, options: dict[str, Any]) -> None:
    torch.save(store(tmp_path), tmp_path / "stored.tensors")
    all_fine(ranks.run(3, _fused, tmp_path, options))


def _incomplete(rank: int, folder: Path) -> list[str]:
    problems = []
    model = sharded(on_meta(Model))
    errors: list[Any] = [None] * dist.get_world_size()
    mine = error_of(lambda: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
    dist.all_gather_object(errors, mine)
    if (
        len(set(errors)) > 1
        or "converter FuseExperts failed after the last tensor: RuntimeError: incomplete" not in mine
    ):
        problems.append(str(errors))
    if not mine.startswith("CheckpointError") or any(not p.is_meta for p in model.parameters()):
        problems.append("something was moved")
    return problems


def test_a_checkpoint_that_lacks_an_expert_is_an_error_on_every_rank(tmp_path: Path) -> None:
    store(tmp_path, layers_1_experts_3_up_weight=True)
    all_fine(ranks.run(2, _incomplete, tmp_path))


def _odd_converters(rank: int, folder: Path) -> list[str]:
    problems = []
    for converter, text in (
        (lambda model: SimpleNamespace(convert=1), "expected a converter with can_handle, got SimpleNamespace"),
        ("name", "_create_checkpoint_tensor_converter to be a function, got 'name'"),
    ):
        model = sharded(on_meta(Model))
        model._create_checkpoint_tensor_converter = converter
        error = error_of(lambda model=model: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
        if text not in error or not error.startswith("TypeError"):
            problems.append(error)
    return problems


def test_what_is_no_converter_is_refused_on_every_rank(tmp_path: Path) -> None:
    store(tmp_path)
    all_fine(ranks.run(2, _odd_converters, tmp_path))


def _renamed(rank: int, folder: Path) -> list[str]:
    """As the original: the first pattern that is found, and groups in what replaces it are left out."""
    model = sharded(on_meta(Model))
    model._checkpoint_conversion_mapping = {r"^wrapped\.": "^(?!layers)", "embed": "never"}
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
    return differ(full_state(model), expected(torch.load(folder / "stored.tensors")))


def test_names_are_renamed_before_they_are_converted(tmp_path: Path) -> None:
    stored = store(tmp_path)
    write(tmp_path, {f"wrapped.{name}": tensor for name, tensor in stored.items()})
    torch.save(stored, tmp_path / "stored.tensors")
    all_fine(ranks.run(2, _renamed, tmp_path))


# ---- ties ----


def _tied(rank: int, folder: Path, both: bool) -> list[str]:
    problems = []
    values = expected(torch.load(folder / "stored.tensors"))
    tied = values | {"head.weight": values["embed.weight"]}
    for tie in (True, False, None):
        if tie is not True and not both:
            continue  # the head would be initialized
        model = sharded(on_meta(partial(Model, tie)))
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        problems += [f"tie={tie}, two of FSDP's: {name}" for name in differ(full_state(model), tied if tie else values)]
        model = on_meta(partial(Model, tie))
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        problems += [f"tie={tie}, plain: {name}" for name in differ(full_state(model), tied if tie else values)]
        if (model.head.weight is model.embed.weight) != bool(tie):
            problems.append(f"tie={tie}: not what the config asks for")
    return problems


@pytest.mark.parametrize("both", [True, False])
def test_the_embeddings_are_tied_if_the_config_says_so(tmp_path: Path, both: bool) -> None:
    """``both``: the checkpoint has an output embedding too, of other values."""
    stored = store(tmp_path, head_weight=not both)
    torch.save(stored, tmp_path / "stored.tensors")
    all_fine(ranks.run(3, _tied, tmp_path, both))


def _text_config(rank: int, folder: Path) -> list[str]:
    """Either side may deny it, and one has to say it; a model that has no head has nothing to tie."""
    problems = []
    for outer, inner, wanted in ((True, None, True), (None, True, True), (True, False, False), (False, True, False)):
        model = on_meta(Model)
        text = SimpleNamespace() if inner is None else SimpleNamespace(tie_word_embeddings=inner)
        model.config = SimpleNamespace(get_text_config=lambda decoder, text=text: text)
        if outer is not None:
            model.config.tie_word_embeddings = outer
        veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
        if (model.head.weight is model.embed.weight) != wanted:
            problems.append(f"outer {outer}, inner {inner}")
    model = on_meta(partial(Model, True))
    model.get_output_embeddings = lambda: None
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu")
    model = on_meta(partial(Model, True))
    del model.head.weight
    error = error_of(lambda: veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu"))
    if "but its output embedding cannot be found" not in error or any(not p.is_meta for p in model.parameters()):
        problems.append(error)
    return problems


def test_whether_a_composite_config_ties(tmp_path: Path) -> None:
    store(tmp_path)
    all_fine(ranks.run(1, _text_config, tmp_path))


# ---- VeOmni's own LoRA: the names of PEFT, and classes of its own ----


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base_layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(WIDTH, 2, bias=False)})

    def reset_lora_parameters(self, name: str, init: bool) -> None:
        nn.init.constant_(self.lora_A[name].weight, 5)


def _own_lora(rank: int, folder: Path) -> list[str]:
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
    veomni.rank0_load_and_broadcast_weights(model, str(folder), "cpu", is_peft_model=True)
    values = expected(torch.load(folder / "stored.tensors"))
    wanted = {}
    for name, value in values.items():
        if name.endswith("norm.weight"):
            name = name.replace(".weight", ".base_layer.weight")
            wanted[f"base_model.model.{name.replace('base_layer', 'lora_A.default')}"] = torch.full((2, WIDTH), 5.0)
        if ".experts." in name:
            name += ".base_layer.weight"
        wanted[f"base_model.model.{name}"] = value
    return differ(full_state(model), wanted)


def test_a_base_checkpoint_into_veomnis_own_lora(tmp_path: Path) -> None:
    stored = store(tmp_path)
    torch.save(stored, tmp_path / "stored.tensors")
    all_fine(ranks.run(2, _own_lora, tmp_path))
