"""The benchmark's model and checkpoint: a Mixture of Experts of 18,867 tensors whose dims are scaled down to about 0.9 GB.

48 layers of 128 experts with three weights each, and the names and counts of Qwen3-30B-A3B with per-expert Linear weights.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard


@dataclass(frozen=True)
class Size:
    """How large the model is; the defaults give 18,867 tensors and 0.92 GB in bf16."""

    layers: int = 48
    experts: int = 128
    hidden: int = 192
    intermediate: int = 128
    vocabulary: int = 4096


class Expert(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.up_proj = nn.Linear(size.hidden, size.intermediate, bias=False)
        self.down_proj = nn.Linear(size.intermediate, size.hidden, bias=False)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.q_proj = nn.Linear(size.hidden, 2 * size.hidden, bias=False)
        self.k_proj = nn.Linear(size.hidden, size.hidden // 4, bias=False)
        self.v_proj = nn.Linear(size.hidden, size.hidden // 4, bias=False)
        self.o_proj = nn.Linear(2 * size.hidden, size.hidden, bias=False)
        self.q_norm = nn.RMSNorm(size.hidden // 12)
        self.k_norm = nn.RMSNorm(size.hidden // 12)


class Experts(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = nn.Linear(size.hidden, size.experts, bias=False)
        self.experts = nn.ModuleList([Expert(size) for _ in range(size.experts)])


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = Experts(size)
        self.input_layernorm = nn.RMSNorm(size.hidden)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden)


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.hidden)
        self.lm_head = nn.Linear(size.hidden, size.vocabulary, bias=False)


def meta_model(size: Size) -> nn.Module:
    """On meta, in bf16, not sharded."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return Model(size)
    finally:
        torch.set_default_dtype(default)


def sharded_model(size: Size) -> nn.Module:
    """On meta, FSDP2 over the whole job, one group a layer."""
    model = meta_model(size)
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def write_checkpoint(path: Path, size: Size, seed: int) -> None:
    """One safetensors file, every 8 bytes of it distinct from one seed to another. Written as a stream: 0.9 GB need no
    0.9 GB of memory."""
    state = meta_model(size).state_dict()
    header, offset = {}, 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    generator = torch.Generator().manual_seed(seed)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        step = 16 << 20
        for begin in range(0, offset, step):
            data = torch.randint(0, 256, (min(step, offset - begin),), dtype=torch.uint8, generator=generator)
            data[1::2] &= 0x3F  # no NaN: the exponent's high bit stays clear
            file.write(data.numpy().data)


def reference(path: Path) -> dict[str, Tensor]:
    """The checkpoint's full tensors, memory-mapped; read without epload."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    flat = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    full = {}
    for name, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        full[name] = flat[begin:end].clone().view(torch.bfloat16).view(entry["shape"]) if begin % 2 else (
            flat[begin:end].view(torch.bfloat16).view(entry["shape"]))  # fmt: skip
    return full


def wrong_shards(model: nn.Module, full: dict[str, Tensor], rank: int, world: int) -> list[str]:
    """Names whose local shard is not, bit for bit, this rank's torch.chunk of the checkpoint's tensor."""
    wrong = []
    with torch.no_grad():
        for name, parameter in model.state_dict(keep_vars=True).items():
            chunks = torch.chunk(full[name], world)
            local = parameter.to_local()
            want = chunks[rank] if rank < len(chunks) else full[name][:0]
            if not torch.equal(local.view(torch.int16), want.view(torch.int16)):
                wrong.append(name)
    return wrong
