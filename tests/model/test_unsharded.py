"""FSDP2 modules that a pass has left unsharded, or for which it has gathered ahead: a load fills what is kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from support.checks import full_tensor
from support.on_ranks import on_ranks


class Layer(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().forward(x)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(4, 4), Layer(4, 4), Layer(4, 4)])
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.norm(x)
        return result


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.body = Body()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.body(self.embed(x)))
        return result


X = torch.arange(8.0).reshape(2, 4)


def fail(model: Any, layer: Any) -> None:
    """Runs a pass that fails in a layer."""
    layer.fails = True
    with suppress(RuntimeError):
        model(X)
    layer.fails = False


def failed_forward(model: Any) -> None:
    fail(model, model.body.layers[1])


def prefetched(model: Any) -> None:
    first, *others = model.body.layers
    first.set_modules_to_forward_prefetch(others)
    fail(model, first)


def part_of_a_group(model: Any) -> None:
    model(X)
    model.body(X)


def whole_pass(model: Any) -> None:
    model(X)


PASSES: tuple[Callable[[Any], None], ...] = (failed_forward, prefetched, part_of_a_group, whole_pass)


@on_ranks(2)
def test_what_passes_leave_unsharded_is_filled(rank: int) -> None:
    torch.manual_seed(3)
    reference = Net()
    state = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    for use in PASSES:
        for again in (False, True):
            model: Any = Net()
            for layer in model.body.layers:
                fully_shard(layer)
            fully_shard([model.body.norm, model.head], reshard_after_forward=False)
            fully_shard(model)
            with epload.HierarchicalLoader(progress=False, timeout=60) as loader:
                if again:  # the second load has a snapshot of the model
                    loader.load(model, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
                use(model)
                loader.load(model, state)
            result = model(X)
            assert torch.allclose(result, reference(X)), f"{use.__name__}, {again}: the next pass has other weights"
            (result.sum() * 0).backward()
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            assert [
                f"{use.__name__}, {again}: {name}"
                for name, parameter in model.named_parameters()
                if not torch.equal(full_tensor(parameter), state[name])
            ] == []
