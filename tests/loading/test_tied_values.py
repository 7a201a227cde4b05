"""A checkpoint that holds a tied parameter under both of its names: taken if the values are equal, refused if they differ."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from epload import HierarchicalLoader, LoadOptions, LocalModules, ModelMismatch
from epload.loading import tied
from support.checks import full_values
from support.findings import differing, must_be_refused, must_be_refused_by_all
from support.models import Tied, on_meta
from support.on_ranks import on_ranks
from support.pretrained import small_llama

load = partial(epload.load, progress=False)
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def llama(tied: bool = True) -> Any:
    return on_meta(lambda: small_llama(vocab_size=131, tie_word_embeddings=tied))


def state() -> dict[str, Tensor]:
    """Both names, with equal values in memory of their own."""
    torch.manual_seed(5)
    tensors = small_llama(vocab_size=131).state_dict()
    return {name: tensors[EMBEDDING if name == HEAD else name].clone() for name in tensors}


def other(values: dict[str, Tensor], element: int) -> dict[str, Tensor]:
    """The same with one element of the output embedding changed."""
    changed = values[HEAD].clone()
    changed.view(-1)[element] += 1
    return {**values, HEAD: changed}


def test_equal_values_are_one_parameter(tmp_path: Path) -> None:
    """They may lie apart, have another dtype, or be one storage."""
    values = state()
    save_file(values, tmp_path / "model.safetensors")
    wide = {**values, HEAD: values[HEAD].double()}
    torch.save({**values, HEAD: values[EMBEDDING]}, tmp_path / "one.bin")
    for source in (tmp_path, values, wide, tmp_path / "one.bin"):
        model = llama()
        assert len(load(model, source).tied_keys) == 1
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, values[HEAD])


def fp8(*names: str) -> dict[str, Tensor]:
    """The same in fp8 with scales, under these of both names."""
    values = state()
    embedding = values.pop(HEAD)
    del values[EMBEDDING]
    for name in names:
        values |= {name: embedding.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1,), 0.25)}
    return values


def test_a_tied_weight_is_multiplied_by_its_scale_once_and_not_by_two() -> None:
    for name in (HEAD, EMBEDDING):
        model, values = llama(), fp8(name)
        load(model, values, verify=True)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, values[name].float() * 0.25)
    for values in (fp8(HEAD, EMBEDDING), fp8(EMBEDDING) | {HEAD: state()[HEAD]}):
        with pytest.raises(ModelMismatch, match="leave one of them out of the checkpoint"):
            load(llama(), values)


@on_ranks(2)
def test_a_tie_that_one_rank_has(rank: int) -> None:
    values = {name: torch.ones(2, 2) for name in ("a.weight", "b.weight")}
    for odd in (0, 1):
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("ab" if rank == odd else "a")})
        if rank == odd:
            model["b"].weight = model["a"].weight
        text = "the ranks made different plans of the same checkpoint and model, nothing was moved"
        must_be_refused_by_all(partial(load, model, values, strict=False, timeout=30), text)


def test_a_broken_tie_is_warned_of() -> None:
    """The head is a parameter of its own, as after a model on meta was distributed."""
    values, model = state(), llama()
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    (warning,) = load(model, {name: values[name] for name in values if name != HEAD}).warnings
    assert f"{EMBEDDING} and {HEAD}" in warning
    assert torch.equal(model.lm_head.weight, values[HEAD])
    model.tie_weights()
    assert load(model, values).warnings == []
    assert load(llama(tied=False), other(values, 0)).warnings == []


@pytest.mark.parametrize(("kind", "element"), [("file", -1), ("dict", -1), ("dict", 0), ("double", 7)])
def test_differing_values_are_refused(kind: str, element: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tied, "_CHUNK", 100)
    values = other(state(), element)
    if kind == "double":
        values[HEAD] = values[HEAD].double()
    save_file(values, tmp_path / "model.safetensors")
    source = tmp_path if kind == "file" else values
    model, untied = llama(), llama(tied=False)
    must_be_refused(
        partial(load, model, source), "ModelMismatch", HEAD, EMBEDDING, "different values", "tie_word_embeddings=False"
    )
    assert all(parameter.is_meta for parameter in model.parameters())
    load(untied, values)
    assert [n for n, t in untied.state_dict().items() if not torch.equal(t, values[n].float())] == []


def save_other(folder: Path) -> None:
    save_file(other(state(), 11), folder / "model.safetensors")


@on_ranks(2, save_other)
def test_every_rank_refuses_alike(rank: int, tmp_path: Path) -> None:
    for readers in ("one", "auto"):
        must_be_refused_by_all(partial(load, fully_shard(llama()), tmp_path, readers=readers), "different values")


class Stage(nn.Module):
    """Rank 1's part of a pipeline, which has a tie; rank 0's has none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        if rank == 0:
            self.first = nn.Linear(3, 3)
        else:
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight


@on_ranks(2)
def test_a_tie_that_the_reading_rank_lacks(rank: int) -> None:
    whole = {"first.weight": torch.ones(3, 3), "first.bias": torch.ones(3)}
    whole |= {name: torch.ones(5, 3) for name in ("embed.weight", "head.weight")}
    stage, options = Stage(rank), LoadOptions(local_modules=[LocalModules("")])
    load(stage, whole if rank == 0 else None, options=options)
    assert all(bool((p == 1).all()) for p in stage.parameters())
    whole["head.weight"].zero_()
    must_be_refused_by_all(partial(load, Stage(rank), whole if rank == 0 else None, options=options), "different values")


def test_a_reload_compares_what_may_have_changed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(state(), path)
    loader, model = HierarchicalLoader(progress=False), llama()
    for _ in range(2):
        loader.load(model, path)
    save_file(other(state(), 3), tmp_path / "new")
    os.replace(tmp_path / "new", path)
    with pytest.raises(ModelMismatch, match="different values"):
        loader.load(model, path)


@on_ranks(4)
def test_ties_that_parallelizing_broke(rank: int) -> None:
    """Parallelizing part by part makes two parameters of one; a declared tie fills both."""
    model, values = on_meta(Tied), full_values(Tied())
    fully_shard(model.embed)
    fully_shard(model)
    assert model.head.weight is not model.embed.weight, "expected fully_shard to break the tie"
    source = {name: value for name, value in values.items() if name != "head.weight"} if rank == 0 else None
    load(model, source, mapping=epload.Mapping(ties=(("head.weight", "embed.weight"),)))
    assert differing(model, values) == []
