"""What each rank of ``epload bench`` runs, under torchrun: every loader into a model with the checkpoint's own names."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator
from ctypes import c_char
from hashlib import blake2b
from pathlib import Path
from time import perf_counter
from typing import Any

import click
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.core.dtypes import name as dtype_name
from epload.core.pieces import Piece
from epload.errors import LoadError
from epload.loader import HierarchicalLoader

Loader = Callable[[nn.Module, str], str]
"""Fills a model that is on meta from the checkpoint at a path; returns a note for the table."""


class Unsupported(RuntimeError):
    """What a loader cannot do, found before anything is sent."""


def make_model(manifest: Manifest) -> nn.Module:
    """On meta, with the checkpoint's names; FSDP2 of every numbered module that is in no other, and of the whole. What FSDP does
    not shard (integers, scalars) are buffers.

    Raises:
        ValueError: a name cannot be that of a parameter.
    """
    root = nn.Module()
    layers: dict[str, nn.Module] = {}
    for name, shape, dtype in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True):
        module, path = root, ""
        *parents, leaf = name.split(".")
        try:
            for part in parents:
                path = f"{path}.{part}"
                if part not in module._modules:
                    module.add_module(part, nn.Module())
                module = module.get_submodule(part)
                if part.isdecimal() and not any(path.startswith(f"{layer}.") for layer in layers):
                    layers[path] = module
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            if dtype.is_floating_point and dtype.itemsize > 1 and shape and tensor.numel():
                module.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))
            else:
                module.register_buffer(leaf, tensor)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"bench makes a model of the checkpoint's names, and {name} cannot be one: {error}"
            ) from None
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("fsdp",))
    for layer in layers.values():
        if any(True for _ in layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(root, mesh=mesh)
    return root


# ---- loaders ----

_SENT_BY_GLOO = {
    "float32", "float64", "float16", "bfloat16", "int8", "uint8", "bool", "int32", "int64", "complex64", "complex128",
}  # fmt: skip
"""See GENERATE_ALL_TYPES in torch's ProcessGroupGloo; complex numbers are sent as pairs."""


def epload_with(readers: str) -> Loader:
    def load(model: nn.Module, path: str) -> str:
        with HierarchicalLoader(readers=readers, progress=False) as loader:
            report = loader.load(model, path)
        return report.readers if readers == "auto" else ""

    return load


def broadcast_per_parameter(model: nn.Module, path: str) -> str:
    """Rank 0 reads; one broadcast a tensor, of which each rank keeps its shard."""
    model.to_empty(device="cpu")
    state = model.state_dict()
    shapes = {name: tensor.shape for name, tensor in state.items()}
    for name, full in _tensors(path) if dist.get_rank() == 0 else _empty(state, path):
        dist.broadcast(full.reshape(-1).view(torch.uint8), 0)  # gloo knows no fp8
        target = state[name]
        if isinstance(target, DTensor):
            full = full.reshape(shapes[name])
            shard = distribute_tensor(full, target.device_mesh, target.placements, src_data_rank=None)
            target.to_local().copy_(shard.to_local())
        else:
            target.copy_(full.reshape(shapes[name]))
    return ""


def torch_from_rank_0(model: nn.Module, path: str) -> str:
    """Rank 0 reads; torch.distributed.checkpoint.state_dict sends."""
    if others := sorted({dtype_name(dtype) for dtype in Checkpoint.open(path).manifest.dtypes} - _SENT_BY_GLOO):
        raise Unsupported(f"gloo has no broadcast of {', '.join(others)}")
    model.to_empty(device="cpu")
    state: dict[str, Any] = dict(_tensors(path)) if dist.get_rank() == 0 else {}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return ""


def _tensors(path: str) -> Iterator[tuple[str, Tensor]]:
    checkpoint = Checkpoint.open(path)
    manifest = checkpoint.manifest
    columns = zip(manifest.names, manifest.shapes, manifest.dtypes, manifest.nbytes_of(), strict=True)
    for number, (name, shape, dtype, nbytes) in enumerate(columns):
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if nbytes:
            checkpoint.fill(buffer, [Piece(number, 0, 0, nbytes)])
        yield name, buffer.view(dtype).reshape(shape)
    checkpoint.close()


def _empty(state: dict[str, Tensor], path: str) -> Iterator[tuple[str, Tensor]]:
    for name in Checkpoint.open(path).manifest.names:
        yield name, torch.empty(state[name].shape, dtype=state[name].dtype)


PEERS: dict[str, Loader] = {
    "torch set_model_state_dict(broadcast_from_rank0)": torch_from_rank_0,
    "one broadcast per parameter": broadcast_per_parameter,
}


# ---- measuring ----


def digests(model: nn.Module) -> list[bytes]:
    """Of this rank's shard of each tensor."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in model.state_dict().values()]
    return [
        blake2b((c_char * each.nbytes).from_address(each.data_ptr())).digest() for each in map(Tensor.contiguous, local)
    ]


def measure(path: str, loader: Loader, repeat: int, expected: list[bytes]) -> dict[str, object]:
    """Seconds of the slowest rank, but for the first run, of which every shard is compared with ``expected`` instead."""
    manifest = Checkpoint.open(path).manifest
    seconds, note, same = [], "", torch.zeros(1)
    for number in range(repeat + 1):
        model = make_model(manifest)
        dist.barrier()
        begin = perf_counter()
        try:
            note = loader(model, path)
        except (Unsupported, LoadError) as error:  # of all ranks alike
            return {"error": " ".join(str(error).split())}
        taken = torch.tensor([perf_counter() - begin], dtype=torch.float64)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if number:
            seconds.append(float(taken))
            continue
        same = torch.tensor([digests(model) == expected], dtype=torch.int32)
        dist.all_reduce(same, dist.ReduceOp.MIN)
    return {"seconds": seconds, "median": statistics.median(seconds), "equal": bool(same), "note": note}


def _reference(path: str) -> list[bytes]:
    model = make_model(Checkpoint.open(path).manifest)
    broadcast_per_parameter(model, path)
    return digests(model)


@click.command()
@click.argument("path")
@click.argument("result", type=click.Path(path_type=Path))
@click.option("--readers", multiple=True)
@click.option("--repeat", type=int)
def main(path: str, result: Path, readers: tuple[str, ...], repeat: int) -> None:
    """Writes what was measured to RESULT, from rank 0."""
    dist.init_process_group("gloo")
    try:
        expected = _reference(path)
        loaders = {f"epload {each}": epload_with(each) for each in readers} | PEERS
        found = {name: measure(path, loader, repeat, expected) for name, loader in loaders.items()}
    except Exception as error:
        if dist.get_rank() == 0:
            print(f"epload: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
