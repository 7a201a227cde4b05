"""A checkpoint with fp8 weights and block scales, and a model that takes it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from epload import Mapping
from epload.mapping import Concatenate, Convert, Reshape, Stack, Transpose

FP8, BF16 = torch.float8_e4m3fn, torch.bfloat16
ROWS, COLUMNS, EXPERTS = 300, 200, 3
MAPPING = Mapping(
    converts=(
        Convert(
            (r"experts\.(?P<index>\d+)\.gate\.weight$", r"experts\.(?P<index>\d+)\.up\.weight$"),
            ("experts.gate_up",),
            (Stack(0), Concatenate(1)),
        ),
        Convert((r"turned\.weight$",), ("turned",), (Transpose(0, 1),)),
        Convert((r"heads\.weight$",), ("heads",), (Reshape((10, -1, COLUMNS)), Transpose(0, 1))),
    )
)


def weight(seed: int, rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, Tensor]:
    """fp8 values and a scale for each 128 x 128 of them."""
    made = torch.Generator().manual_seed(seed)
    scale = torch.rand(-(-rows // 128), -(-columns // 128), generator=made) + 0.01
    return torch.randn(rows, columns, generator=made).to(FP8), scale


def dequantized(value: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """The reference: one scale for each 128 x 128."""
    full = scale.repeat_interleave(128, 0)[: value.shape[0]].repeat_interleave(128, 1)[:, : value.shape[1]]
    return (value.float() * full).to(dtype)


def checkpoint() -> dict[str, Tensor]:
    names = [f"experts.{i}.{part}" for i in range(EXPERTS) for part in ("gate", "up")]
    made: dict[str, Tensor] = {}
    for seed, name in enumerate([*names, "turned", "heads", "plain"]):
        made[f"{name}.weight"], made[f"{name}.weight_scale_inv"] = weight(seed)
    return made | {"norm": torch.arange(7) / 3, "wide.weight": torch.arange(15).reshape(5, 3) / 7}


def expected(file: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    whole = {
        name.removesuffix(".weight"): dequantized(value, file[f"{name}_scale_inv"], dtype)
        for name, value in file.items()
        if f"{name}_scale_inv" in file
    }
    parts = [torch.cat([whole[f"experts.{i}.gate"], whole[f"experts.{i}.up"]]) for i in range(EXPERTS)]
    return {
        "experts.gate_up": torch.stack(parts),
        "turned": whole["turned"].T.contiguous(),
        "heads": whole["heads"].reshape(10, -1, COLUMNS).transpose(0, 1).contiguous(),
        "plain.weight": whole["plain"],
        "norm": file["norm"].to(dtype),
        "wide.weight": file["wide.weight"].to(dtype),
    }


class Tree(nn.Module):
    """Parameters under dotted names."""

    def __init__(self, like: dict[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in like.items():
            path, _, leaf = name.rpartition(".")
            module: nn.Module = self
            for part in path.split(".") if path else []:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
            module.register_parameter(leaf, nn.Parameter(torch.empty_like(tensor, device="meta"), requires_grad=False))


CONFIG = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}


def store(folder: Path) -> None:
    """Scales in another file than their weights, and a configuration."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    file = checkpoint()
    shards = {"a.safetensors": {}, "b.safetensors": {}}  # type: dict[str, dict[str, Tensor]]
    for name, tensor in file.items():
        shards["a.safetensors" if "scale" in name else "b.safetensors"][name] = tensor
    for shard, tensors in shards.items():
        save_file(tensors, folder / shard)
    where = {name: shard for shard, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
