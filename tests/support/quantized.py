"""A model with weights to quantize, and what the libraries of reference make of them."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from transformers.integrations.finegrained_fp8 import Fp8Quantize

from support.checks import as_bytes, local_of
from support.models import mesh

BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn


def fine_grained(block: tuple[int, int] | None, scale_fmt: str = "float", **more: Any) -> dict[str, Any]:
    return {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": scale_fmt, **more}


def compressed(ignore: tuple[str, ...] = (), **weights: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "ignore": list(ignore)}


MX = {"strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
FORMATS: dict[str, dict[str, Any]] = {
    "128 x 128": fine_grained((128, 128)),
    "7 x 200": fine_grained((7, 200)),
    "one": fine_grained(None),
    "mx": fine_grained((1, 32), "ue8m0"),
    "tensor": compressed(strategy="tensor"),
    "channel": compressed(strategy="channel"),
    "block": compressed(strategy="block", block_structure=[128, 128]),
    "group": compressed(**MX),
}


class Trainer(nn.Module):
    """A model of float32 masters, with what is quantized and what is not."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 160)
        self.norm = nn.LayerNorm(160)
        self.up = nn.Linear(160, 390)
        self.down = nn.Linear(390, 131, bias=False)
        self.row = nn.Linear(5, 1)
        self.gate = nn.Linear(160, 5)
        self.kept = nn.Linear(7, 130)
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.empty(5, 150, 160))
        self.experts.bias = nn.Parameter(torch.empty(5, 150))
        self.lm_head = nn.Linear(160, 9)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                magnitudes = torch.exp2(torch.randint(-9, 5, parameter.shape, generator=generator))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * magnitudes)
            self.up.weight[:128, :128] = 0
            self.up.weight[200, 3], self.down.weight[130, 389], self.down.weight[0, 0] = math.nan, 1e30, -0.0


LAYOUTS = {"plain": 1, "fsdp": 3, "tp0": 2, "tp1": 2}
"""Number of ranks of each layout."""


def sharded(model: nn.Module, layout: str) -> nn.Module:
    if layout == "plain":
        return model
    on = mesh((layout, LAYOUTS[layout]))
    if layout == "fsdp":
        return fully_shard(model, mesh=on)
    dim = int(layout[-1])
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > dim:
                shard = distribute_tensor(parameter.detach(), on, [Shard(dim)], src_data_rank=None)
                module.register_parameter(name, nn.Parameter(shard, requires_grad=parameter.requires_grad))
    return model


def same(found: Tensor, whole: Tensor) -> bool:
    """True if a tensor, sharded or not, has the bytes of a full one."""
    if isinstance(found, DTensor):
        whole = distribute_tensor(whole, found.device_mesh, found.placements, src_data_rank=None)
    return torch.equal(as_bytes(local_of(found)), as_bytes(local_of(whole)))


QUANTIZED = ("up.weight", "down.weight", "row.weight", "experts.gate_up")


def fine_grained_reference(value: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The library's code on a weight that is padded to whole blocks with zeros, as it takes no other."""
    rows, columns = config["weight_block_size"] or value.shape[-2:]
    padded = nn.functional.pad(value, (0, -value.shape[-1] % columns, 0, -value.shape[-2] % rows))
    settings = SimpleNamespace(weight_block_size=(rows, columns), scale_fmt=config["scale_fmt"])
    made = Fp8Quantize(SimpleNamespace(quantization_config=settings)).convert({"w.weight": padded})
    return made["w.weight"][..., : value.shape[-2], : value.shape[-1]], made["w.weight_scale_inv"]


def compressed_reference(value: Tensor, config: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """The formulas of compressed-tensors, in bfloat16 throughout."""
    (group,) = config["config_groups"].values()
    rows, columns = {
        "tensor": value.shape[-2:], "channel": (1, value.shape[-1]), "block": (128, 128), "group": (1, 32),
    }[group["weights"]["strategy"]]  # fmt: skip
    grid = (*value.shape[:-2], -(-value.shape[-2] // rows), -(-value.shape[-1] // columns))
    padded = nn.functional.pad(value, (0, grid[-1] * columns - value.shape[-1], 0, grid[-2] * rows - value.shape[-2]))
    blocks = padded.unflatten(-1, (grid[-1], columns)).unflatten(-3, (grid[-2], rows))
    maxima = blocks.abs().amax((-3, -1))
    if group["weights"]["strategy"] == "group":
        nearest = (maxima.view(torch.int16).to(torch.int32) + 32 & 0x7F80).to(torch.int16).view(BF16)
        stored = (127 + torch.floor(torch.log2(nearest)) - 8).clamp(0, 255).to(torch.uint8)
        scales = (2.0 ** (stored.to(torch.int32) - 127)).to(BF16)
    else:
        scales = maxima / torch.tensor(448.0, dtype=BF16)
        scales = stored = torch.where(scales == 0, torch.finfo(BF16).eps, scales)
    scaled = blocks / scales.unsqueeze(-1).unsqueeze(-3) + 0
    narrow = scaled.clamp(-448, 448).to(FP8).flatten(-2).flatten(-3, -2)
    return narrow[..., : value.shape[-2], : value.shape[-1]], stored


def reference(name: str, value: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors that a quantized weight is stored as."""
    is_fine = config["quant_method"] == "fp8"
    weight, scales = (fine_grained_reference if is_fine else compressed_reference)(value.detach().to(BF16), config)
    one = value.ndim == 2 and scales.numel() == 1 and config in (FORMATS["one"], FORMATS["tensor"])
    shape = ((), (1,))[not is_fine] if one else scales.shape
    return {name: weight, f"{name}{'_scale_inv' if is_fine else '_scale'}": scales.reshape(shape)}


def expected(model: nn.Module, config: dict[str, Any], quantized: tuple[str, ...] = QUANTIZED) -> dict[str, Tensor]:
    tensors = dict(model.state_dict())
    for name in quantized:
        if config is not FORMATS["group"] or tensors[name].shape[-1] % 32 == 0:
            tensors |= reference(name, tensors[name], config)
    return tensors


def as_bits(tensor: Tensor) -> Tensor:
    """The bytes, with one NaN in fp8: torch's processors choose its sign by where in a vector the element is."""
    bits = as_bytes(tensor)
    return torch.where(bits == 0xFF, 0x7F, bits) if tensor.dtype == FP8 else bits


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], label: str = "") -> None:
    assert sorted(found) == sorted(wanted), label
    for name, tensor in wanted.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape), (label, name)
        a, b = as_bits(found[name]), as_bits(tensor)
        differ = (a != b).nonzero().flatten()
        assert not len(differ), f"{label}, {name}: bytes {differ} are {a[differ]}, expected {b[differ]}"


def with_skipped(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with exceptions: also, for groups, of weights that have no whole number of them."""
    if config["quant_method"] == "fp8":
        return config | {"modules_to_not_convert": ["kept"]}
    return config | {"ignore": ["re:kep", *(("down", "row") if config is FORMATS["group"] else ())]}
