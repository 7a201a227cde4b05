"""Materializing: the private and the public path give equal models, which FSDP2 can run and a load can fill."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

import epload
from epload import HierarchicalLoader, Topology
from epload.mapping.precision import set_dtypes
from epload.model.materialize import materialize
from epload.model.modules import Modules
from epload.model.targets import Targets, collect
from support.models import on_meta
from support.on_ranks import on_ranks
from support.small_model import BUCKET, NODES, local_of, only_readers, wrong

CPU = torch.device("cpu")


def collect_as(model: nn.Module, dtype: torch.dtype | None) -> Targets:
    targets = collect(model)
    set_dtypes(model, Modules(model), targets, dtype)
    return targets


class Tied(nn.Module):
    """Ties, frozen parameters, buffers of both kinds, strides that are not row-major, several dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.layers[1].weight.requires_grad_(False)
        self.layers[2].bias = self.layers[1].bias
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 13, bias=False)
        self.head.weight = self.embed.weight
        self.narrow = nn.Parameter(torch.zeros(5, 2, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        self.register_buffer("angles", torch.zeros(4), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(self.norm(hidden)) + self.narrow.sum()


class Plain(Tied):
    """The same without any DTensor, and with a parameter of odd strides."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.zeros(3, 4).t())
        self.also = self.turned


def by_layer() -> nn.Module:
    """The tied bias lies in two modules, so they are one group; a module without parameters has none."""
    model = on_meta(Tied)
    model.nothing = fully_shard(nn.Sequential())
    fully_shard(model.layers[0])
    return fully_shard(model)


def as_one(**options: Any) -> nn.Module:
    return fully_shard(on_meta(Tied), **options)


def on_two_axes(**options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return fully_shard(on_meta(Tied), mesh=mesh, **options)


def partly_made() -> nn.Module:
    model = on_meta(Tied)
    model.norm.to_empty(device="cpu")
    return model


def description(model: nn.Module) -> dict[str, Any]:
    first: dict[int, str] = {}
    found: dict[str, Any] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        dtensor = isinstance(tensor, DTensor)
        local = tensor.to_local() if dtensor else tensor
        found[name] = (
            type(tensor).__name__, isinstance(tensor, nn.Parameter), tuple(tensor.shape), tensor.stride(), tensor.dtype,
            str(tensor.device), tensor.requires_grad, tensor.is_leaf, tuple(local.shape), local.stride(), local.dtype,
            str(local.device), first.setdefault(id(tensor), name),
            (tensor.device_mesh, tensor.placements, tensor._spec.tensor_meta) if dtensor else None,
        )  # fmt: skip
    return found


def full_state(model: nn.Module, number: int) -> dict[str, Tensor]:
    made: dict[int, Tensor] = {}
    state = {}
    for i, (name, tensor) in enumerate(model.state_dict(keep_vars=True).items()):
        if id(tensor) not in made:
            values = torch.arange(tensor.numel()).reshape(tensor.shape) + 200 * i + 5000 * number
            values = values / 10_000 if tensor.is_floating_point() else values
            made[id(tensor)] = values.to(tensor.dtype)
        state[name] = made[id(tensor)]
    return state


def memory_of(model: nn.Module) -> dict[str, int]:
    local = {name: t.to_local() for name, t in model.named_parameters() if isinstance(t, DTensor)}
    return {name: t.data_ptr() for name, t in local.items() if t.numel()}


def loader_of() -> HierarchicalLoader:
    return HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET)


MAKERS: list[Callable[[], nn.Module]] = [
    lambda: on_meta(Plain), partly_made, by_layer, as_one, on_two_axes,
    lambda: as_one(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
    lambda: as_one(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    lambda: on_two_axes(shard_placement_fn=lambda p: Shard(p.ndim - 1)),
]  # fmt: skip


def materialized(case: str, make: Callable[[], nn.Module], dtype: torch.dtype | None, private: bool) -> nn.Module:
    model = make()
    objects = {n: p for n, p in model.named_parameters() if isinstance(p, DTensor) or not p.is_meta}
    ties = {name: entry[-2] for name, entry in description(model).items()}
    targets = collect_as(model, dtype)
    materialize(model, targets, CPU, private=private)
    after, state = dict(model.named_parameters()), model.state_dict(keep_vars=True)
    assert [n for n in objects if objects[n] is not after[n]] == [], f"{case}: other objects"
    assert all(t is state[n] for n, t in zip(targets.names, targets.tensors, strict=True)), f"{case}: other targets"
    assert ties == {name: entry[-2] for name, entry in description(model).items()}, f"{case}: ties differ"
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers())), f"{case}: something is on meta"
    return model


def run_and_trained(case: str, model: nn.Module, loader: HierarchicalLoader, number: int) -> list[Tensor]:
    """Outputs of a model as it is, loaded again, and after a step of training."""
    memory = memory_of(model)  # a state dict of before the first forward, in which FSDP looks at its parameters
    outputs = [model(torch.arange(13))]
    for module in Modules(model).fsdp:
        module.reshard()
    assert memory == memory_of(model), f"{case}: FSDP has made other tensors"
    loader.load(model, only_readers(full_state(model, number)))
    outputs.append(model(torch.arange(13)))
    take_step(model)
    return [*outputs, model(torch.arange(13))]


@on_ranks(4)
def test_both_paths_give_equal_models(rank: int) -> None:
    loader = loader_of()
    for number, make in enumerate(MAKERS):
        for dtype in (None, torch.float16):
            if make is partly_made and dtype is not None:
                continue  # part of it has storage of another dtype, which is refused
            described, outputs = [], []
            for private in (True, False):
                case = f"model {number} dtype={dtype} private={private}"
                model = materialized(case, make, dtype, private)
                described.append(description(model))
                full = full_state(model, number)
                loader.load(model, only_readers(full))
                assert wrong(model, full) == [], case
                outputs.append(run_and_trained(case, model, loader, number + 1) if dtype is None else [])
            assert described[0] == described[1], case
            assert all(map(torch.equal, *outputs)), f"{case}: the two paths' models give different outputs"


def take_step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=0.1)
    model(torch.arange(13)).float().square().mean().backward()
    optimizer.step()


@on_ranks(4)
def test_a_loaded_model_trains_as_one_that_was_never_on_meta(rank: int) -> None:
    reference = Tied()
    with torch.no_grad():
        for i, tensor in enumerate(reference.parameters()):
            tensor.copy_((torch.arange(tensor.numel()).reshape(tensor.shape) % 7 - 3 + i) / 10)
    full = {name: value.detach().clone() for name, value in reference.state_dict().items()}
    take_step(reference)
    for private in (True, False):
        model = as_one()
        materialize(model, collect(model), CPU, private=private)
        loader_of().load(model, only_readers(full), init_missing=lambda module, path, names: None)
        take_step(model)
        for name, tensor in model.named_parameters():
            expected = local_of(reference.get_parameter(name).detach(), tensor)
            assert torch.allclose(tensor.to_local().detach().float(), expected.float(), rtol=1e-2, atol=1e-3), (private, name)


@on_ranks(4)
def test_a_model_that_was_run_and_moved_to_meta(rank: int) -> None:
    """FSDP has looked at its parameters once, and does not do so again by itself."""
    for private in (True, False):
        model, outputs = by_layer(), []
        for number in (1, 1, 2):
            materialize(model, collect(model), CPU, private=private)
            loader_of().load(model, only_readers(full_state(model, number)), init_missing=lambda module, path, names: None)
            outputs.append(model(torch.arange(13)))
            model.to("meta")
        assert torch.equal(outputs[0], outputs[1]), f"private={private}: {[output.sum() for output in outputs]}"
        assert not torch.equal(outputs[0], outputs[2]), f"private={private}: {[output.sum() for output in outputs]}"


@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*:DeprecationWarning")
def test_a_scripted_module_on_meta() -> None:
    """Its containers are no dicts."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), torch.jit.script(nn.Linear(3, 3)))
    full = {name: torch.full(tensor.shape, 1.0 + i) for i, (name, tensor) in enumerate(model.state_dict().items())}
    epload.load(model, full, progress=False)
    assert all(torch.equal(tensor, full[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("private", [True, False])
def test_a_buffer_of_two_modules_stays_one(private: bool) -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        for layer in model:
            layer.register_buffer("x", model[0].x if layer is model[1] else torch.zeros(3))
    materialize(model, collect(model), CPU, private=private)
    assert model[0].x is model[1].x
    assert model[0].x.device == CPU


def test_plain_tensors_get_what_empty_like_would_give() -> None:
    """One module has parameters with and without a gradient, buffers, and memory that is not contiguous or is shared."""
    with torch.device("meta"):
        module = nn.Linear(4, 3)
        module.frozen = nn.Parameter(torch.empty(3), requires_grad=False)
        module.columns = nn.Parameter(torch.empty(4, 6).t())
        module.register_buffer("mean", torch.empty(3))
        module.register_buffer("count", torch.empty((), dtype=torch.int64))
        module.register_buffer("ids", torch.arange(5).expand(1, -1), persistent=False)
        module.register_buffer("rows", torch.empty(5).expand(3, 5), persistent=False)
    before = dict([*module.named_parameters(), *module.named_buffers()])
    materialize(module, collect(module), CPU)
    after = dict([*module.named_parameters(), *module.named_buffers()])
    assert {*after} == {*before}

    def kind(tensor: Tensor) -> Any:
        nbytes = tensor.untyped_storage().nbytes()
        return type(tensor), tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad, nbytes

    for name, tensor in after.items():
        like = torch.empty_like(before[name].detach(), device=CPU)
        if isinstance(before[name], nn.Parameter):
            like = nn.Parameter(like, before[name].requires_grad)
        assert kind(tensor) == kind(like), name
        assert tensor.is_leaf, name


# ---- parameters that get their storage in place ----


@on_ranks(1)
def test_a_parameter_keeps_its_identity_and_attributes(rank: int) -> None:
    model = as_one()
    weight = model.norm.weight
    reference = weakref.ref(weight)  # torch's own path refuses tensors with weak references, and drops attributes
    weight.tag = "kept"
    materialize(model, collect(model), CPU)
    assert model.norm.weight is weight
    assert reference() is weight
    assert weight.tag == "kept"
    assert (isinstance(weight, nn.Parameter), weight.is_leaf, weight.requires_grad) == (True, True, True)
    assert not model.layers[1].weight.requires_grad
    storages = {p.to_local().untyped_storage()._cdata for p in model.parameters()}
    assert len(storages) == len(list(model.parameters())), "torch.save must see no memory that they share"


@on_ranks(1)
def test_a_parameter_that_a_graph_has_is_left_to_torch(rank: int) -> None:
    """torch swaps it if the graph is never run, and otherwise poisons the graph."""
    model = as_one()
    weight = model.norm.weight
    node = torch.autograd.graph.get_gradient_edge(weight).node
    materialize(model, collect(model), CPU)
    assert model.norm.weight is weight
    assert not weight.is_meta
    assert node is not None
