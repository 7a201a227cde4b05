"""A model as VeOmni has them, converters of its checkpoint's tensors, the checkpoint, and what a load must leave."""

from __future__ import annotations

import re
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LAYERS, EXPERTS, WIDTH, INNER, VOCAB = 3, 5, 7, 3, 11


def numbers(*shape: int, start: int = 0) -> Tensor:
    """Every element unique."""
    count = torch.Size(shape).numel()
    return (torch.arange(count, dtype=torch.float32) + 1 + 1000 * start).reshape(shape)


class FuseExperts:
    """Stacks experts that come one by one, and concatenates gates and ups; keeps what it waits for."""

    pattern = re.compile(r"^(.*\.experts)\.(\d+)\.(gate|up|down)\.weight$")

    def __init__(self, count: int) -> None:
        self.count = count
        self.waiting: dict[tuple[str, str], dict[int, Tensor]] = {}
        self.stacked: dict[str, dict[str, Tensor]] = {}
        self.given: list[weakref.ref[Tensor]] = []
        self.most = 0

    def can_handle(self, name: str) -> bool:
        return bool(self.pattern.match(name))

    def convert(self, name: str, tensor: Tensor) -> Any:
        match = self.pattern.match(name)
        assert match is not None
        path, kind = match[1], match[3]
        found = self.waiting.setdefault((path, kind), {})
        found[int(match[2])] = tensor
        if len(found) < self.count:
            return None
        whole = torch.stack([found[i] for i in range(self.count)])
        del self.waiting[path, kind]
        if kind == "down":
            return self.result(f"{path}.down", whole)
        parts = self.stacked.setdefault(path, {})
        parts[kind] = whole
        if len(parts) < 2:
            return None
        del self.stacked[path]
        return self.result(f"{path}.gate_up", torch.cat([parts["gate"], parts["up"]], dim=1))

    def result(self, name: str, tensor: Tensor) -> Any:
        self.given.append(weakref.ref(tensor))
        self.most = max(self.most, sum(made() is not None for made in self.given))
        return SimpleNamespace(name=name, tensor=tensor)

    def finalize(self) -> list[Any]:
        if self.waiting or self.stacked:
            raise RuntimeError(f"incomplete: {sorted(self.waiting)} {sorted(self.stacked)}")
        return []


class Scaled(FuseExperts):
    """Also multiplies int8 weights by their scales, which come in any order; emits what is left over at the end."""

    def __init__(self, count: int) -> None:
        super().__init__(count)
        self.pairs: dict[str, dict[str, Tensor]] = {}

    def can_handle(self, name: str) -> bool:
        return super().can_handle(name) or name.endswith(".scale")

    def can_handle_tensor(self, name: str, tensor: Tensor) -> bool:
        return tensor.dtype == torch.int8

    def convert(self, name: str, tensor: Tensor) -> Any:
        if not name.endswith(".scale") and tensor.dtype != torch.int8:
            return super().convert(name, tensor)
        path, _, leaf = name.rpartition(".")
        pair = self.pairs.setdefault(path, {})
        pair[leaf] = tensor
        if len(pair) < 2:
            return None
        del self.pairs[path]
        return SimpleNamespace(name=f"{path}.weight", tensor=pair["weight"].float() * pair["scale"])

    def finalize(self) -> list[Any]:
        left = [(f"{path}.{leaf}", tensor) for path, pair in self.pairs.items() for leaf, tensor in pair.items()]
        return super().finalize() + [SimpleNamespace(name=name, tensor=tensor) for name, tensor in left]


class NeedsData(FuseExperts):
    """Looks at values, which meta tensors do not have."""

    def convert(self, name: str, tensor: Tensor) -> Any:
        assert float(tensor.sum()) > 0
        return super().convert(name, tensor)


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.zeros(EXPERTS, 2 * INNER, WIDTH))
        self.down = nn.Parameter(torch.zeros(EXPERTS, WIDTH, INNER))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = Experts()


class Model(nn.Module):
    """With an initialization, as VeOmni's models have: what is not loaded would be filled by it."""

    converter: type[FuseExperts] = FuseExperts

    def __init__(self, tie: bool | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.config = SimpleNamespace() if tie is None else SimpleNamespace(tie_word_embeddings=tie)

    @staticmethod
    def _create_checkpoint_tensor_converter(model: Model) -> FuseExperts:
        return model.converter(EXPERTS)

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, -1)


def store(folder: Path, **left_out: bool) -> dict[str, Tensor]:
    """Experts one by one, in two files, so that those of a layer are in both; returns what is stored."""
    tensors = {"embed.weight": numbers(VOCAB, WIDTH), "head.weight": numbers(VOCAB, WIDTH, start=1)}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        tensors[f"{at}.norm.weight"] = numbers(WIDTH, WIDTH, start=10 + layer)
        for expert in range(EXPERTS):
            shapes = {"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER)}
            for i, (kind, shape) in enumerate(shapes.items()):
                start = 100 * (layer + 1) + 10 * expert + i
                tensors[f"{at}.experts.{expert}.{kind}.weight"] = numbers(*shape, start=start)
    tensors = {name: tensor for name, tensor in tensors.items() if not left_out.get(name.replace(".", "_"))}
    write(folder, tensors)
    torch.save(tensors, folder / "stored.tensors")
    return tensors


def write(folder: Path, tensors: dict[str, Tensor]) -> None:
    names = list(tensors)
    for number in range(2):
        part = {name: tensors[name].contiguous() for name in names[number::2]}
        save_file(part, folder / f"model-{number}.safetensors")


def expected(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The model's tensors, put together by hand."""
    made = {name: tensor for name, tensor in stored.items() if ".experts." not in name}
    for layer in range(LAYERS):
        at = f"layers.{layer}.experts"

        def of(kind: str, at: str = at) -> list[Tensor]:
            return [stored[f"{at}.{expert}.{kind}.weight"] for expert in range(EXPERTS)]

        made[f"{at}.gate_up"] = torch.stack([torch.cat([g, u]) for g, u in zip(of("gate"), of("up"), strict=True)])
        made[f"{at}.down"] = torch.stack(of("down"))
    return made


def sharded(model: Any) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)
