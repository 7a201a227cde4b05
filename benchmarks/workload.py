"""The benchmark's model and checkpoint: a Mixture of Experts of 18,867 tensors, with dims scaled down to about 0.9 GB.

48 layers of 128 experts with three weights each: the names and counts of Qwen3-30B-A3B. Like the checkpoint, this model has one
Linear per expert and projection; the transformers model fuses the experts of a layer.
"""

from __future__ import annotations

import gc
import json
import os
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from epload.checkpoint.base import Checkpoint
from epload.core import garbage_collection
from epload.mapping.mapping import Mapping
from epload.model.modules import Modules
from epload.model.targets import collect
from epload.planning.plan import make_plan
from simulator import waves

FILE = "model.safetensors"


@dataclass(frozen=True)
class Size:
    """The size of the model. The defaults give 18,867 tensors and 0.92 GB in bf16."""

    layers: int = 48
    experts: int = 128
    hidden: int = 192
    intermediate: int = 128
    vocabulary: int = 4096


class Linear(nn.Linear):
    """No bias and no initial values: initializing on meta would take half of the construction time."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def reset_parameters(self) -> None:
        pass


class Expert(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate_proj = Linear(size.hidden, size.intermediate)
        self.up_proj = Linear(size.hidden, size.intermediate)
        self.down_proj = Linear(size.intermediate, size.hidden)


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.q_proj = Linear(size.hidden, 2 * size.hidden)
        self.k_proj = Linear(size.hidden, size.hidden // 4)
        self.v_proj = Linear(size.hidden, size.hidden // 4)
        self.o_proj = Linear(2 * size.hidden, size.hidden)
        self.q_norm = nn.RMSNorm(size.hidden // 12)
        self.k_norm = nn.RMSNorm(size.hidden // 12)


class Experts(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.gate = Linear(size.hidden, size.experts)
        self.experts = nn.ModuleList([Expert(size) for _ in range(size.experts)])


class Layer(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.self_attn = Attention(size)
        self.mlp = Experts(size)
        self.input_layernorm = nn.RMSNorm(size.hidden)
        self.post_attention_layernorm = nn.RMSNorm(size.hidden)


class Base(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(size.vocabulary, size.hidden)
        self.layers = nn.ModuleList([Layer(size) for _ in range(size.layers)])
        self.norm = nn.RMSNorm(size.hidden)


class Model(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.model = Base(size)
        self.lm_head = Linear(size.hidden, size.vocabulary)


def meta_model(size: Size) -> nn.Module:
    """The model on meta, in bf16, unsharded."""
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            return Model(size)
    finally:
        torch.set_default_dtype(default)


def sharded_model(size: Size, mesh: DeviceMesh | None = None) -> nn.Module:
    """The model on meta, sharded by FSDP2 over a mesh, by default the whole job, one group per layer."""
    with garbage_collection.paused():
        model = meta_model(size)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    gc.collect()  # so that no collection runs during a timed section
    return model


class MetaModel:
    """A sharded model that is returned to meta after a load, in a quarter of the time that building another takes."""

    def __init__(self, size: Size) -> None:
        self.model = sharded_model(size)
        self._meta = {name: tensor.detach() for name, tensor in self.model.state_dict(keep_vars=True).items()}

    def rewind(self) -> None:
        """Gives the model new parameters on meta and frees the old ones."""
        # With autograd on, replacing a parameter by one with storage costs 100 us.
        with garbage_collection.paused(), torch.no_grad():
            self.model.load_state_dict(self._meta, assign=True)
            for parameter in Modules(self.model).fsdp_parameters:
                # FSDP picks up the new parameters, but for meta tensors keeps the storage of the old ones.
                parameter._sharded_param_data = parameter.sharded_param.to_local().view(-1)
        gc.collect()


def write_checkpoint(folder: Path, size: Size, seed: int, files: int = 1, varied: bool = False) -> None:
    """Writes a safetensors checkpoint, with different bytes for each seed, and the config of the transformers model with these
    names and shapes. Streams the data, to need little memory.

    Args:
        files: of about equal size, with an index if there are several.
        varied: whether the parts of a file are made of the same random bytes, each in another way, by several threads: ten times
            as fast.
    """
    folder.mkdir(parents=True, exist_ok=True)
    state = meta_model(size).state_dict()
    most = -(-sum(tensor.nbytes for tensor in state.values()) // files)
    parts: list[dict[str, Tensor]] = [{}]
    for name, tensor in state.items():
        if parts[-1] and sum(other.nbytes for other in parts[-1].values()) + tensor.nbytes > most:
            parts.append({})
        parts[-1][name] = tensor
    generator = torch.Generator().manual_seed(seed)
    places = {}
    for number, part in enumerate(parts, 1):
        file = FILE if len(parts) == 1 else f"model-{number:05}-of-{len(parts):05}.safetensors"
        _write_file(folder / file, part, generator, varied)
        places.update(dict.fromkeys(part, file))
    if len(parts) > 1:
        (folder / f"{FILE}.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(library_config(size)))


def _write_file(
    path: Path,
    state: dict[str, Tensor],
    generator: torch.Generator,
    varied: bool,
) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in state.items():
        header[name] = {
            "dtype": "BF16",
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(raw)) + raw)
        step = 16 << 20
        if varied:
            _write_varied(file, offset, _random(step, generator))
            return
        for begin in range(0, offset, step):
            file.write(_random(min(step, offset - begin), generator).numpy().data)


def _random(nbytes: int, generator: torch.Generator) -> Tensor:
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
    data[1::2] &= 0x3F  # avoids NaN: the high bit of the exponent stays clear
    return data


def _write_varied(file: BinaryIO, nbytes: int, block: Tensor) -> None:
    """Each part is the block, rotated and with some bits turned, so that no two are alike."""
    file.flush()
    start, step, twice = file.tell(), len(block), torch.cat([block, block])

    def write(begin: int) -> None:
        number = begin // step
        turned = 2 * (7919 * number % (step // 2))
        part = twice[turned : turned + min(step, nbytes - begin)] ^ (number % 63)
        view = memoryview(part.numpy())  # type: ignore[arg-type]
        while view:
            written = os.pwrite(file.fileno(), view, start + begin)
            begin, view = begin + written, view[written:]

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(0, nbytes, step)))


def library_config(size: Size) -> dict[str, object]:
    """config.json of the transformers model for this checkpoint: Qwen3-MoE, which fuses experts in memory."""
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "vocab_size": size.vocabulary, "hidden_size": size.hidden, "num_hidden_layers": size.layers,
        "head_dim": size.hidden // 12, "num_attention_heads": 24, "num_key_value_heads": 3,
        "num_experts": size.experts, "num_experts_per_tok": 1, "moe_intermediate_size": size.intermediate,
        "intermediate_size": size.intermediate, "tie_word_embeddings": False,
        "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
    }  # fmt: skip


def full_tensors(folder: Path) -> dict[str, Tensor]:
    """The full tensors of the checkpoint, memory-mapped; does not use epload."""
    path = folder / FILE
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    flat = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    del header["__metadata__"]
    values = flat[8 + length :].view(torch.bfloat16)
    full = {}
    for name, entry in header.items():
        begin, end = (offset // values.itemsize for offset in entry["data_offsets"])
        full[name] = values[begin:end].view(entry["shape"])
    return full


def plan_buckets(folder: Path, size: Size, nodes: Sequence[Sequence[int]], readers: str) -> tuple[list[int], int]:
    """Bytes of each bucket in epload's plan for a checkpoint, and buckets per wave. Needs no process group."""
    manifest = Checkpoint.open(folder).manifest
    wave, per_wave = waves(manifest.nbytes, nodes, readers)
    plan = make_plan(manifest, collect(meta_model(size)), Mapping(), wave // per_wave)
    return [bucket.nbytes for bucket in plan.buckets], per_wave


def _fused(full: dict[str, Tensor], name: str) -> Tensor:
    """A weight of the transformers model: the stacked experts of a layer, gate above up."""
    if name in full:
        return full[name]
    layer, _, leaf = name.rpartition(".")
    parts = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else ("down_proj",)
    count = sum(1 for other in full if other.startswith(f"{layer}.") and other.endswith(f"{parts[0]}.weight"))
    return torch.stack([torch.cat([full[f"{layer}.{expert}.{part}.weight"] for part in parts]) for expert in range(count)])


class Reference:
    """The expected shards of one rank."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.full = full_tensors(folder)
        self._rank, self._world = rank, world
        self._shards: dict[tuple[str, int], Tensor] = {}

    def shard(self, name: str, dim: int) -> Tensor:
        """The rank's torch.chunk of a tensor along the sharded dim. Cached for tensors that the checkpoint has unchanged."""
        kept = self._shards.get((name, dim))
        if kept is None:
            whole = self.whole(name)
            chunks = torch.chunk(whole, self._world, dim)
            kept = chunks[self._rank] if self._rank < len(chunks) else whole.narrow(dim, 0, 0)
            if name in self.full:
                self._shards[name, dim] = kept
        return kept

    def whole(self, name: str) -> Tensor:
        return _fused(self.full, name)


def wrong_shards(model: nn.Module, reference: Reference) -> list[str]:
    """Names of parameters whose local shard differs from the checkpoint in any bit."""
    wrong = []
    with torch.no_grad():
        for name, parameter in model.state_dict(keep_vars=True).items():
            if isinstance(parameter, DTensor):
                (placement,) = parameter.placements
                assert isinstance(placement, Shard), f"{name} is {placement}"
                want, local = reference.shard(name, placement.dim), parameter.to_local()
            else:
                want, local = reference.whole(name), parameter
            if local.shape != want.shape or not torch.equal(local.cpu().view(torch.int16), want.contiguous().view(torch.int16)):
                wrong.append(name)
    return wrong
