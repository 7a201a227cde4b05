"""Non-persistent buffers of models with storage, which no checkpoint has: after ``to_empty()`` they hold garbage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import epload
from support import ranks

IDS = torch.arange(9)[None]
CONFIG = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
    "vocab_size": 32, "max_position_embeddings": 64,
}  # fmt: skip


def saved(folder: Path, **options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG, **options)).eval()
    model.save_pretrained(folder)
    return model


def emptied(folder: str, garbage: float = 123.0) -> Any:
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            tensor.fill_(garbage)
    return model


def test_they_are_computed_if_the_model_can(tmp_path: Path) -> None:
    expected = saved(tmp_path)
    model = emptied(str(tmp_path))
    report = epload.load(model, tmp_path, progress=False)
    assert torch.equal(model(IDS).logits, expected(IDS).logits)
    for name, buffer in expected.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    assert "model.rotary_emb.inv_freq" in report.initialized
    assert not report.warnings


def mixed(rank: int, folder: str) -> list[Any]:
    """Rank 0 has garbage, rank 1 has the model on meta."""
    model = emptied(folder)
    if rank == 1:
        with torch.device("meta"):
            model = LlamaForCausalLM(LlamaConfig.from_pretrained(folder)).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    with epload.HierarchicalLoader(progress=False, timeout=60) as loader:
        loader.load(model, folder)
        first = model(IDS).logits.tolist()
        loader.load(model, folder)
    return [first, model(IDS).logits.tolist()]


def test_ranks_with_and_without_storage(tmp_path: Path) -> None:
    expected = saved(tmp_path)(IDS).logits
    for logits in ranks.run(2, mixed, str(tmp_path)):
        assert logits == [expected.tolist()] * 2


def test_frequencies_that_had_grown_start_anew(tmp_path: Path) -> None:
    """Dynamic scaling replaces the buffer as sequences grow, and remembers for which length."""
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    expected = saved(tmp_path, rope_parameters=rope)
    model = LlamaForCausalLM.from_pretrained(tmp_path).eval()
    model(torch.zeros(1, 200, dtype=torch.int64))
    epload.load(model, tmp_path, progress=False)
    longer = torch.arange(100)[None] % 32
    assert torch.equal(model(longer).logits, expected(longer).logits)


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))
        self.register_buffer("mask", torch.ones(3), persistent=False)
        self.register_buffer("window", self.w.detach()[1:], persistent=False)


def test_what_the_model_cannot_compute_keeps_its_values_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Masked()
    with epload.HierarchicalLoader(progress=False) as loader:
        report = loader.load(model, {"w": torch.arange(3.0)})
        assert torch.equal(model.mask, torch.ones(3))
        assert torch.equal(model.window, torch.tensor([1.0, 2.0]))  # part of what was loaded
        [warning] = [warning for warning in report.warnings if "non-persistent" in warning]
        assert "mask" in warning
        assert "window" not in warning
        # Not again for a model that has not changed.
        assert not loader.load(model, {"w": torch.arange(3.0) + 1}).warnings
        assert torch.equal(model.window, torch.tensor([2.0, 3.0]))
