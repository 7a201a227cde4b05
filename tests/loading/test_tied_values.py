"""A checkpoint that holds a tied parameter under both of its names: taken if the values are equal, refused if they differ."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import epload
from epload import Checkpoint, HierarchicalLoader, LoadOptions, LocalModules, ModelMismatch
from support import ranks
from support.failures import error_of

CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 131,
}  # fmt: skip


def llama(tied: bool = True) -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(tie_word_embeddings=tied, **CONFIG))


def state() -> dict[str, Tensor]:
    """Both names, with equal values in memory of their own."""
    torch.manual_seed(5)
    tensors = LlamaForCausalLM(LlamaConfig(tie_word_embeddings=False, **CONFIG)).state_dict()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    return {name: tensor.clone() for name, tensor in tensors.items()}


def other(values: dict[str, Tensor], element: int) -> dict[str, Tensor]:
    """The same with one element of the output embedding changed."""
    changed = values["lm_head.weight"].clone()
    changed.view(-1)[element] += 1
    return {**values, "lm_head.weight": changed}


def test_equal_values_are_one_parameter(tmp_path: Path) -> None:
    """They may lie apart, have another dtype, or be one storage."""
    values = state()
    save_file(values, tmp_path / "model.safetensors")
    wide = {**values, "lm_head.weight": values["lm_head.weight"].double()}
    torch.save({**values, "lm_head.weight": values["model.embed_tokens.weight"]}, tmp_path / "one.bin")
    for source in (tmp_path, values, wide, tmp_path / "one.bin"):
        model = llama()
        report = epload.load(model, source, progress=False)
        assert len(report.tied_keys) == 1
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert torch.equal(model.lm_head.weight, values["lm_head.weight"])


def fp8(names: tuple[str, ...]) -> dict[str, Tensor]:
    """The same in fp8 with scales, under these of both names."""
    values = state()
    embedding = values.pop("lm_head.weight")
    del values["model.embed_tokens.weight"]
    for name in names:
        values |= {name: embedding.to(torch.float8_e4m3fn), f"{name}_scale_inv": torch.full((1,), 0.25)}
    return values


@pytest.mark.parametrize("name", ["lm_head.weight", "model.embed_tokens.weight"])
def test_a_tied_weight_is_multiplied_by_its_scale_once(name: str) -> None:
    model = llama()
    epload.load(model, (values := fp8((name,))), verify=True, progress=False)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert torch.equal(model.lm_head.weight, values[name].float() * 0.25)


def test_a_tied_weight_with_two_scales_is_refused() -> None:
    both = "model.embed_tokens.weight", "lm_head.weight"
    wide = fp8(both[:1]) | {both[1]: state()[both[1]]}
    for values in (fp8(both), wide):
        with pytest.raises(ModelMismatch, match="leave one of them out of the checkpoint"):
            epload.load(llama(), values, progress=False)


def tied_on_one(rank: int, odd: int) -> str:
    model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in ("ab" if rank == odd else "a")})
    if rank == odd:
        model["b"].weight = model["a"].weight
    values = {name: torch.ones(2, 2) for name in ("a.weight", "b.weight")}
    return error_of(lambda: epload.load(model, values, strict=False, timeout=30, progress=False))


@pytest.mark.parametrize("odd", [0, 1])
def test_a_tie_that_one_rank_has(odd: int) -> None:
    first, second = ranks.run(2, tied_on_one, odd)
    assert first == second
    assert "the ranks made different plans of the same checkpoint and model, nothing was moved" in first


def test_a_broken_tie_is_warned_of() -> None:
    """The head is a parameter of its own, as after a model on meta was distributed."""
    values, model = state(), llama()
    model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    (warning,) = epload.load(model, {name: values[name] for name in values if name != "lm_head.weight"}).warnings
    assert "lm_head.weight and model.embed_tokens.weight" in warning
    assert torch.equal(model.lm_head.weight, values["lm_head.weight"])
    model.tie_weights()
    assert epload.load(model, values).warnings == []
    untied = llama(tied=False)
    assert epload.load(untied, other(values, 0)).warnings == []


@pytest.mark.parametrize(("kind", "element"), [("file", 0), ("dict", 131 * 16 - 1), ("consumed", 0), ("double", 7)])
def test_differing_values_are_refused(kind: str, element: int, tmp_path: Path) -> None:
    values = other(state(), element)
    if kind == "double":
        values["lm_head.weight"] = values["lm_head.weight"].double()
    save_file(values, tmp_path / "model.safetensors")
    source = {"file": tmp_path, "consumed": Checkpoint.from_state_dict(values, consume=True)}.get(kind, values)
    model = llama()
    with pytest.raises(ModelMismatch) as raised:
        epload.load(model, source, progress=False)
    for part in ("lm_head.weight", "model.embed_tokens.weight", "different values", "tie_word_embeddings=False"):
        assert part in str(raised.value)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert len(values) == len(state())
    untied = llama(tied=False)
    epload.load(untied, values, progress=False)
    assert [n for n, t in untied.state_dict().items() if not torch.equal(t, values[n].float())] == []


def _sharded(rank: int, folder: str, readers: str) -> str:
    return error_of(lambda: epload.load(fully_shard(llama()), folder, readers=readers, progress=False))


@pytest.mark.parametrize("readers", ["one", "auto"])
def test_every_rank_refuses_alike(readers: str, tmp_path: Path) -> None:
    save_file(other(state(), 11), tmp_path / "model.safetensors")
    results = ranks.run(2, _sharded, str(tmp_path), readers)
    assert results[0] == results[1]
    assert "different values" in results[0]


class Stage(nn.Module):
    """Rank 1's part of a pipeline, which has a tie; rank 0's has none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        if rank == 0:
            self.first = nn.Linear(3, 3)
        else:
            self.embed, self.head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
            self.head.weight = self.embed.weight


def _stages(rank: int) -> list[str]:
    results = []
    for head in (torch.ones(5, 3), torch.zeros(5, 3)):
        whole = {"first.weight": torch.ones(3, 3), "first.bias": torch.ones(3)}
        whole |= {"embed.weight": torch.ones(5, 3), "head.weight": head}
        stage, options = Stage(rank), LoadOptions(local_modules=[LocalModules("")])
        source = whole if rank == 0 else None
        results.append(error_of(lambda: epload.load(stage, source, progress=False, options=options)))  # noqa: B023
        assert results[-1] or all(bool((p == 1).all()) for p in stage.parameters())
    return results


def test_a_tie_that_the_reading_rank_lacks() -> None:
    results = ranks.run(2, _stages)
    assert results[0] == results[1]
    assert results[0][0] == ""
    assert "different values" in results[0][1]


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
