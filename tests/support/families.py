"""Small models of transformers' families, and checkpoints of them whose values no narrower dtype can hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.distributed.fsdp import fully_shard

from support.pretrained import SIZES, config

IDS = torch.arange(1, 8)[None]


@dataclass(frozen=True)
class Family:
    """One family: how a small model of it is configured, and how it is called."""

    config: Callable[[], Any]
    auto: str = "AutoModelForCausalLM"
    dtype: str = "bfloat16"
    inputs: dict[str, Tensor] = field(default_factory=lambda: {"input_ids": IDS})
    own_groups: tuple[str, ...] = ()
    """Ends of the paths of modules that need a group of their own, as their parameters stay in float32."""
    block: int = 0
    """Size of the blocks in which linear weights are quantized to fp8; 0 for a checkpoint that is not."""

    @property
    def auto_class(self) -> Any:
        return getattr(transformers, self.auto)

    def make(self) -> Any:
        return self.auto_class.from_config(self.config(), dtype=torch.float32)


def _known(kind: str, **options: Any) -> Callable[[], Any]:
    return lambda: config(kind, **options)


FAMILIES = {
    "llama": Family(_known("llama", tie_word_embeddings=False)),
    "llama_tied": Family(_known("llama")),
    "qwen3_moe": Family(_known("qwen3_moe")),
    "deepseek_v3": Family(_known("deepseek_v3"), own_groups=("mlp.gate",)),
    "t5": Family(
        lambda: transformers.T5Config(
            vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, dropout_rate=0.0
        ),
        "AutoModelForSeq2SeqLM",
        "float16",
        {"input_ids": IDS, "labels": IDS},
        (".wo",),
    ),
    "qwen3_fp8": Family(lambda: transformers.Qwen3Config(**SIZES), block=16),
    "gpt2": Family(
        lambda: transformers.GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, n_positions=64), dtype="float32"
    ),
    "mixtral": Family(_known("mixtral")),
    "ernie4_5_moe": Family(
        lambda: transformers.Ernie4_5_MoeConfig(
            **SIZES, moe_num_experts=4, moe_k=2, moe_intermediate_size=16, moe_layer_start_index=0
        ),
        own_groups=("mlp.gate",),
    ),
    "gpt_oss": Family(
        _known("gpt_oss", sliding_window=4), dtype="float16",
        own_groups=("input_layernorm", "post_attention_layernorm", "model.norm"),
    ),
}  # fmt: skip
EVERY_TIME = ("qwen3_moe", "deepseek_v3", "t5", "qwen3_fp8")
"""Families that ``make test`` runs."""


def save(folder: Path, make: Callable[[], Any], dtype: str, block: int = 0) -> str:
    """Saves a checkpoint of float32 values that narrower dtypes cannot hold, quantized to fp8 if there is a size of blocks, of a
    model of the given dtype."""
    torch.manual_seed(0)
    model = make().float()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape) * 0.1)
    model.save_pretrained(folder)
    path = folder / "config.json"
    described = json.loads(path.read_text()) | {"dtype": dtype}
    if block:
        _quantize(folder / "model.safetensors", block)
        described["quantization_config"] = {
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [block] * 2,
        }  # fmt: skip
    path.write_text(json.dumps(described))
    return str(folder)


def _quantize(path: Path, block: int) -> None:
    """Replaces the weights of linear layers by fp8 values, each block with a scale, and others by bfloat16."""
    from safetensors.torch import load_file, save_file

    state = {}
    for name, value in load_file(path).items():
        if not name.endswith("_proj.weight"):
            state[name] = value.bfloat16()
            continue
        rows, columns = (-(-n // block) for n in value.shape)
        scale = torch.rand(rows, columns) * 0.01 + 0.001
        spread = scale.repeat_interleave(block, 0).repeat_interleave(block, 1)[: value.shape[0], : value.shape[1]]
        state[name] = (value / spread).clamp(-400, 400).to(torch.float8_e4m3fn)
        state[f"{name}_scale_inv"] = scale
    save_file(state, path, {"format": "pt"})


def shard(model: Any, own_groups: tuple[str, ...]) -> None:
    """Applies the README's recipe: a group for each layer, and one for the rest."""
    layers = [module for module in model.modules() if type(module).__name__ in _layer_classes(model)]
    own = [module for path, module in model.named_modules() if path.endswith(own_groups)] if own_groups else []
    for module in [*own, *layers, model]:
        fully_shard(module)


def _layer_classes(model: Any) -> set[str]:
    names: set[str] = set()
    for module in model.modules():
        names |= set(getattr(module, "_no_split_modules", None) or ())
    return {name for name in names if name.endswith(("Layer", "Block"))}
