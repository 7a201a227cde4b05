"""Models with the weight loaders that inference engines have: fused, sharded by tensor and expert parallelism, padded."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

import epload

Weights = Iterable[tuple[str, Tensor]]


class Fused(nn.Module):
    """A parameter whose ``loader(parameter, tensor, shard_id)`` takes several checkpoint tensors."""

    def __init__(self, shape: tuple[int, ...], loader: Callable[..., None], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full(shape, -1.0).to(dtype), requires_grad=False)
        self.weight.weight_loader = loader


def shard(tensor: Tensor, dim: int, size: int, rank: int) -> Tensor:
    return tensor.narrow(dim, rank * size, size)


class Engine(nn.Module):
    """One rank of a small engine; ``load_weights`` is driven by the names, as in vLLM.

    2 tensor-parallel ranks, each of which has half of 4 experts.
    """

    HIDDEN, HEADS, HEAD, INNER, EXPERTS, VOCAB, PADDED = 6, 4, 2, 10, 4, 13, 16

    def __init__(self, rank: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        h, self.rank = self.HIDDEN, rank
        self.embed = Fused((self.PADDED // 2, h), self._load_vocabulary, dtype)
        self.qkv = Fused((2 * self.HEAD + 2 * self.HEAD, h), self._load_qkv, dtype)  # 2 of 4 heads; 1 of 2 key-value heads
        self.gate_up = Fused((self.INNER, h), self._load_merged, dtype)
        self.down = Fused((h, self.INNER // 2), self._load_row, dtype)
        self.w13 = Fused((self.EXPERTS // 2, 2 * self.INNER, h), self._load_w13, dtype)
        self.w2 = Fused((self.EXPERTS // 2, h, self.INNER), self._load_w2, dtype)
        self.router = Fused((h, self.EXPERTS), self._load_transposed, dtype)
        self.norm = Fused((h,), self._load_default, dtype)
        self.register_buffer("scale", torch.full((), -1.0, dtype=dtype))

    # ---- loaders ----

    def _load_vocabulary(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        rows = self.PADDED // 2
        begin = self.rank * rows
        tensor = tensor.narrow(0, begin, min(rows, self.VOCAB - begin))
        parameter[: tensor.shape[0]].data.copy_(tensor)
        parameter[tensor.shape[0] :].data.fill_(0)

    def _load_qkv(self, parameter: nn.Parameter, tensor: Tensor, which: str) -> None:
        size = self.HEAD * (2 if which == "q" else 1)
        offset = {"q": 0, "k": 2 * self.HEAD, "v": 3 * self.HEAD}[which]
        parameter.data.narrow(0, offset, size).copy_(shard(tensor, 0, size, self.rank))

    def _load_merged(self, parameter: nn.Parameter, tensor: Tensor, which: int) -> None:
        half = self.INNER // 2
        piece = torch.chunk(tensor, 2, 0)[self.rank]
        assert parameter.data[which * half : (which + 1) * half].shape == piece.shape
        parameter.data[which * half : (which + 1) * half] = piece

    def _load_row(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        piece = torch.tensor_split(tensor, 2, dim=1)[self.rank]
        parameter.data.copy_(piece.contiguous())

    def _load_w13(self, parameter: nn.Parameter, tensor: Tensor, which: int, expert: int) -> None:
        local = expert - self.rank * self.EXPERTS // 2
        if 0 <= local < self.EXPERTS // 2:
            parameter.data[local].narrow(0, which * self.INNER, self.INNER).copy_(tensor)

    def _load_w2(self, parameter: nn.Parameter, tensor: Tensor, expert: int) -> None:
        local = expert - self.rank * self.EXPERTS // 2
        if 0 <= local < self.EXPERTS // 2:
            torch.Tensor.copy_(parameter[local], tensor.t().contiguous().t())

    def _load_transposed(self, parameter: nn.Parameter, tensor: Tensor) -> None:
        parameter.data[...] = tensor.t()

    def _load_default(self, parameter: Tensor, tensor: Tensor) -> None:
        parameter.data.copy_(tensor.to(torch.float64).to(parameter.dtype))

    # ---- by name ----

    def load_weights(self, weights: Weights) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            module, _, rest = name.partition(".")
            if module == "scale":
                self._load_default(self.scale, tensor)
            elif module in ("q", "k", "v"):
                self.qkv.weight.weight_loader(self.qkv.weight, tensor, module)
            elif module in ("gate", "up"):
                self.gate_up.weight.weight_loader(self.gate_up.weight, tensor, int(module == "up"))
            elif module == "experts":
                expert, which = rest.split(".")
                if which == "down":
                    self.w2.weight.weight_loader(self.w2.weight, tensor, int(expert))
                else:
                    self.w13.weight.weight_loader(self.w13.weight, tensor, int(which == "up"), int(expert))
            elif module in self._modules:
                parameter = self._modules[module].weight
                parameter.weight_loader(parameter, tensor)
            loaded.add(name)
        return loaded


class Computing(Engine):
    """Doubles one tensor, and reads the value of another."""

    def load_weights(self, weights: Weights) -> set[str]:
        def changed() -> Any:
            for name, tensor in weights:
                if name == "scale":
                    self.scale.fill_(tensor.item())
                else:
                    yield name, tensor * 2 if name == "down" else tensor

        return super().load_weights(changed())


def engine_checkpoint(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Elements are unique in bfloat16, too, as far as it has bits."""
    e = Engine
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (e.VOCAB, e.HIDDEN), "q": (e.HEADS * e.HEAD, e.HIDDEN), "k": (2 * e.HEAD, e.HIDDEN), "v": (2 * e.HEAD, e.HIDDEN),
        "gate": (e.INNER, e.HIDDEN), "up": (e.INNER, e.HIDDEN), "down": (e.HIDDEN, e.INNER), "router": (e.EXPERTS, e.HIDDEN),
        "norm": (e.HIDDEN,), "scale": (), "rotary": (3,),  # which the engine does not have
    }  # fmt: skip
    for expert in range(e.EXPERTS):
        for which in ("gate", "up"):
            shapes[f"experts.{expert}.{which}"] = (e.INNER, e.HIDDEN)
        shapes[f"experts.{expert}.down"] = (e.HIDDEN, e.INNER)
    return unique(shapes, dtype)


def unique(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random tensors of these shapes without equal elements, as far as the dtype has bits."""
    generator = torch.Generator().manual_seed(len(shapes))
    total = sum(torch.Size(shape).numel() for shape in shapes.values())
    values = (torch.randperm(total, generator=generator) + 1).to(torch.float64).div(7).to(dtype)
    made, at = {}, 0
    for name, shape in shapes.items():
        count = torch.Size(shape).numel()
        made[name] = values[at : at + count].reshape(shape)
        at += count
    return made


class Processing(epload.EngineModel):
    """Computes with negated parameters, and has those that ``load_weights`` fills only while these come."""

    def __init__(self, model: nn.Module, load_weights: Any = None, device: str = "cpu") -> None:
        super().__init__(model, load_weights)
        self.device = torch.device(device)
        self.most = 0
        """Number of parameters that the engine had twice at once."""
        self._kept: dict[str, nn.Parameter] = {}

    @contextmanager
    def recordable(self) -> Iterator[None]:
        self._open(dict(self.model.named_parameters()), torch.device("meta"))
        yield
        self._close()

    def filled_as_a_whole(self) -> list[list[str]]:
        return [[name] for name, _ in self.model.named_parameters()]

    def begin(self, written: Collection[str] | None) -> None:
        self._open(dict(self.model.named_parameters()).keys() & (written or ()), self.device)
        self.most = max(self.most, len(self._kept))

    def process(self) -> None:
        for name, kept in self._kept.items():
            kept.data.copy_(-self.model.get_parameter(name))
        self._close()

    def finish(self) -> None:
        self.process()

    def _open(self, names: Iterable[str], device: torch.device) -> None:
        for name in names:
            kept = self._kept.setdefault(name, self.model.get_parameter(name))
            filled = nn.Parameter(torch.full_like(kept, torch.nan, device=device), requires_grad=False)
            filled.__dict__.update(kept.__dict__)
            self._set(name, filled)

    def _close(self) -> None:
        for name, kept in self._kept.items():
            self._set(name, kept)
        self._kept.clear()

    def _set(self, name: str, parameter: nn.Parameter) -> None:
        path, _, leaf = name.rpartition(".")
        setattr(self.model.get_submodule(path), leaf, parameter)


class Loader(nn.Module):
    """One parameter or several, and a loader that a test gives."""

    def __init__(self, load: Callable[[Loader, Weights], Any], **shapes: tuple[int, ...]) -> None:
        super().__init__()
        self._load = load
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.full(shape, -1.0), requires_grad=False))

    def load_weights(self, weights: Weights) -> Any:
        return self._load(self, weights)
