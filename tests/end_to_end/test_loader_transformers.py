"""Whole transformers models over 4 ranks: logits, tied weights and rotary buffers against one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from epload import HierarchicalLoader, Topology
from support import ranks
from support.checks import all_fine
from support.small_model import NODES

BUCKET = 16 << 10


def config(kind: str) -> Any:
    from transformers import LlamaConfig, Qwen3MoeConfig

    shared: dict[str, Any] = {
        "vocab_size": 66, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "head_dim": 8, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip
    if kind == "llama":
        return LlamaConfig(**shared, intermediate_size=44, tie_word_embeddings=True)
    return Qwen3MoeConfig(
        **shared, intermediate_size=44, moe_intermediate_size=16, num_experts=6, num_experts_per_tok=2
    )


def prompt() -> Tensor:
    return torch.arange(20).reshape(2, 10) * 37 % 66


def sharded(kind: str, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config(kind), dtype=dtype).eval()
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def prepare(kind: str, folder: Path, dtype: torch.dtype, seed: int) -> None:
    """A checkpoint, and what the whole model gives and holds once the library has loaded it."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(config(kind), dtype=dtype).save_pretrained(folder, max_shard_size="40KB")
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    with torch.no_grad():
        logits = whole(prompt()).logits
    torch.save({"logits": logits, "buffers": dict(whole.named_buffers())}, folder / "expected.pt")


def differs(model: nn.Module, folder: Path) -> list[str]:
    expected = torch.load(folder / "expected.pt")
    problems = []
    with torch.no_grad():
        logits = model(prompt()).logits
    if not torch.equal(logits, expected["logits"]):
        problems.append(f"logits are off by {(logits - expected['logits']).abs().max().item()}")
    buffers = dict(model.named_buffers())
    if set(buffers) != set(expected["buffers"]) or not buffers:
        problems.append(f"buffers {sorted(buffers)}")
    for name, want in expected["buffers"].items():
        if buffers[name].dtype != want.dtype or not torch.equal(buffers[name], want):
            problems.append(f"{name} is {buffers[name]} instead of {want}")
    return [f"{folder.name}: {text}" for text in problems]


def _models(rank: int, folder: Path) -> list[str]:
    problems = []
    topology = Topology.from_nodes(NODES)
    loader = HierarchicalLoader(topology, bucket_bytes=BUCKET)
    model = sharded("qwen3_moe", torch.float32)
    for name in ("one", "two", "one"):
        report = loader.load(model, folder / name)
        problems += differs(model, folder / name)
        if report.buckets < 5 or report.missing_keys or report.unexpected_keys:
            problems.append(f"{name}: {report}")
    if not any(
        "inv_freq" in name for name in loader.load(sharded("qwen3_moe", torch.float32), folder / "one").initialized
    ):
        problems.append("inv_freq was not initialized")

    model = sharded("qwen3_moe", torch.bfloat16)
    HierarchicalLoader(topology, readers="per_node", bucket_bytes=BUCKET).load(model, folder / "narrow")
    problems += differs(model, folder / "narrow")
    if model.model.rotary_emb.inv_freq.dtype != torch.float32:
        problems.append(f"inv_freq is {model.model.rotary_emb.inv_freq.dtype}")

    for name, tied in {"tied": 0, "tied-embed": 0, "tied-head": 0, "tied-both": 1}.items():
        model = sharded("llama", torch.float32)
        for where in ("meta", "loaded"):
            report = loader.load(model, folder / name)
            if model.lm_head.weight is not model.model.embed_tokens.weight:
                problems.append(f"{name}, {where}: no longer tied")
            if not isinstance(model.lm_head.weight, DTensor):
                problems.append(f"{name}, {where}: the tied weight is no DTensor")
            names = {"lm_head.weight", "model.embed_tokens.weight"}
            if len(report.tied_keys) != tied or not set(report.tied_keys) <= names:
                problems.append(f"{name}, {where}: tied keys {report.tied_keys}")
            if report.missing_keys or report.unexpected_keys:
                problems.append(f"{name}, {where}: {report.missing_keys} {report.unexpected_keys}")
            problems += differs(model, folder / name)
    return problems


def test_models_are_those_of_one_process(tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as on the ranks: the order of a sum's terms depends on it
    prepare("qwen3_moe", tmp_path / "one", torch.float32, 1)
    prepare("qwen3_moe", tmp_path / "two", torch.float32, 2)
    prepare("qwen3_moe", tmp_path / "narrow", torch.bfloat16, 3)
    prepare("llama", tmp_path / "tied", torch.float32, 4)
    state: dict[str, Tensor] = {}
    for file in sorted((tmp_path / "tied").glob("*.safetensors")):
        state |= load_file(file)
    embed, head = "model.embed_tokens.weight", "lm_head.weight"
    weight = state.pop(embed) if embed in state else state.pop(head)
    state.pop(head, None)
    for name, keys in {"tied-embed": [embed], "tied-head": [head], "tied-both": [embed, head]}.items():
        (tmp_path / name).mkdir()
        save_file({**state, **{key: weight.clone() for key in keys}}, tmp_path / name / "model.safetensors")
        (tmp_path / name / "expected.pt").write_bytes((tmp_path / "tied" / "expected.pt").read_bytes())
    all_fine(ranks.run(4, _models, tmp_path))
