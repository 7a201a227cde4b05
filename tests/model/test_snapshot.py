"""Loads with one loader of a model that changes in between: each is as one of a new loader, which has read the model anew."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from functools import partial
from inspect import signature
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_state
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import epload
from epload import HierarchicalLoader, Topology
from epload.model import dtensor
from epload.native import ops
from support.checks import full_values
from support.failures import error_of
from support.findings import differing
from support.on_ranks import on_ranks
from support.small_model import BUCKET, Net, meta_net, sharded, state_for, wrong


class Small(nn.Module):
    """Tied weights, a leaf without tensors, an empty place for a parameter, buffers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5)
        self.head.weight = self.embed.weight
        self.relu = nn.ReLU()
        self.inner = nn.Sequential(nn.Linear(3, 3, bias=False), nn.BatchNorm1d(3))
        self.absent = None
        self.register_buffer("saved", torch.zeros(2))
        self.register_buffer("other", torch.zeros(3))
        self.register_buffer("unsaved", torch.zeros(3), persistent=False)


def loaded_twice(model: nn.Module) -> HierarchicalLoader:
    loader = HierarchicalLoader(progress=False, readers="one", bucket_bytes=BUCKET)
    for salt in (1, 2):
        loader.load(model, full_values(model, salt))
    return loader


def remembers(loader: HierarchicalLoader, model: nn.Module) -> bool:
    snapshot = loader._agreement.inputs.snapshot
    return snapshot is not None and snapshot.read(model, (None, (), None)) is not None


def tied_together(model: Any) -> None:
    model.inner[1].bias = model.inner[1].weight


def rename(model: Any) -> None:
    model.inner[1]._parameters["scale"] = model.inner[1]._parameters.pop("weight")


CHANGES: dict[str, Callable[[Any], object]] = {
    "none": lambda m: None,
    "modes and gradients": lambda m: m.eval().requires_grad_(False),
    "other memory of the same kind": lambda m: setattr(m.inner[0].weight, "data", torch.zeros(3, 3)),
    "parameter replaced": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "parameter removed": lambda m: setattr(m.head, "bias", None),
    "parameter renamed": rename,
    "untied": lambda m: setattr(m.head, "weight", nn.Parameter(torch.zeros(5, 3))),
    "tied": tied_together,
    "dtype": lambda m: m.bfloat16(),
    "dtype of one": lambda m: m.inner[0].to(torch.float64),
    "dtype of a buffer": lambda m: setattr(m, "saved", m.saved.double()),
    "device": lambda m: m.inner[0].to("meta"),
    "size, in place": lambda m: setattr(m.inner[0].weight, "data", torch.zeros(4, 3)),
    "strides, in place": lambda m: setattr(m.inner[0].weight, "data", torch.zeros(3, 3).t()),
    "expanded": lambda m: setattr(m.inner[0].weight, "data", torch.zeros(1, 3).expand(3, 3)),
    "tied by storage": lambda m: setattr(m.inner[1].bias, "data", m.inner[1].weight.data),
    "a part of another": lambda m: setattr(m.saved, "data", m.other.data[1:]),
    "freed": lambda m: setattr(m.inner[0].weight, "data", torch.empty(0)),
    "buffer replaced": lambda m: setattr(m, "saved", torch.zeros(2)),
    "buffer that is not saved replaced": lambda m: setattr(m, "unsaved", torch.zeros(3, device="meta")),
    "buffer removed": lambda m: delattr(m, "saved"),
    "buffer added": lambda m: m.register_buffer("more", torch.zeros(1)),
    "buffer on a module that had none": lambda m: m.relu.register_buffer("more", torch.zeros(1)),
    "parameter on a leaf without any": lambda m: m.relu.register_parameter("more", nn.Parameter(torch.zeros(1))),
    "buffer no longer saved": lambda m: m.register_buffer("saved", m.saved, persistent=False),
    "buffer saved now": lambda m: m.register_buffer("unsaved", m.unsaved, persistent=True),
    "child added to a leaf": lambda m: m.relu.add_module("more", nn.Linear(1, 1)),
    "child added": lambda m: m.inner.append(nn.Linear(1, 1)),
    "child replaced by its like": lambda m: m.inner.__setitem__(0, nn.Linear(3, 3, bias=False)),
    "child removed": lambda m: m.inner.pop(1),
    "child emptied": lambda m: setattr(m, "relu", None),
    "child with parameters emptied": lambda m: setattr(m, "head", None),
    "children exchanged": lambda m: setattr(m, "embed", m.inner[0]),
    "all dicts replaced": lambda m: m.inner[0].__dict__.update(deepcopy(m.inner[0]).__dict__),
    "state set": lambda m: m.inner[1].__setstate__(deepcopy(m.inner[1]).__dict__),
    "parameters in another dict": lambda m: setattr(m.head, "_parameters", deepcopy(m.head._parameters)),
    "buffers where there were none": lambda m: setattr(m.relu, "_buffers", {"more": torch.zeros(1)}),
    "children where there were none": lambda m: setattr(m.relu, "_modules", {"more": nn.Linear(1, 1)}),
    "another set of what is not saved": lambda m: setattr(m, "_non_persistent_buffers_set", {"saved"}),
    "hook on a leaf": lambda m: m.relu._register_state_dict_hook(lambda *_: None),
    "hook on the root": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "load hook on a leaf": lambda m: m.relu.register_load_state_dict_pre_hook(lambda *_: None),
    "load hook on the root": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_between_loads_is_seen(change: str) -> None:
    errors = []
    for again in (True, False):
        model = Small()
        loader = loaded_twice(model)
        assert remembers(loader, model)
        CHANGES[change](model)
        loader = loader if again else HierarchicalLoader(progress=False)
        for salt in (3, 4):
            values = full_values(model, salt)
            errors.append(error_of(partial(loader.load, model, values)))
            assert errors[-1] or differing(model, values) == []
    assert errors == [errors[-1]] * 4


class OwnState(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}mine"] = self.weight


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.zeros(1)


@pytest.mark.parametrize("make", [OwnState, Extra, lambda *sizes: torch.jit.script(nn.Linear(*sizes))])
def test_modules_with_a_say_in_their_state_are_always_asked(make: Callable[..., nn.Module]) -> None:
    model: Any = nn.Sequential(make(2, 2))
    loader = loaded_twice(model)
    assert not remembers(loader, model)
    model[0].weight = nn.Parameter(torch.zeros(2, 2))
    values = {name: value for name, value in full_values(model, 3).items() if "extra" not in name}
    loader.load(model, values)
    assert torch.equal(model[0].weight, values["0.mine" if make is OwnState else "0.weight"])


def test_other_models_and_other_dtypes_are_not_taken_for_it() -> None:
    model, other = Small(), Small()
    loader = loaded_twice(model)
    with pytest.raises(ValueError, match="already has storage"):
        loader.load(model, full_values(model), dtype=torch.bfloat16)
    for each in (other, model.inner):
        loader.load(each, full_values(each, 3))
        assert differing(each, full_values(each, 3)) == []


def test_a_child_that_has_died_is_missed_wherever_the_next_one_lies() -> None:
    model = Small()
    loader = loaded_twice(model)
    for salt in range(50):  # sooner or later at the address of the one before
        model.inner._modules["0"] = None
        model.inner._modules["0"] = nn.Linear(3, 3, bias=False)
        loader.load(model, full_values(model, salt))
        assert differing(model, full_values(model, salt)) == []


# ---- on ranks ----


@on_ranks(2)
def test_a_model_that_is_parallelized_again_is_noticed(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2,))

    def check(what: str, model: nn.Module, change: Callable[[], object]) -> None:
        loader = loaded_twice(model)
        change()
        values = full_values(model, 3)
        loader.load(model, values)
        assert differing(model, values) == [], what

    net = Net()
    check("fully_shard", net, lambda: sharded(net))
    check("forward and backward", net, lambda: net(torch.arange(13)).sum().backward())
    check("to dtype", net, lambda: net.to(torch.bfloat16))
    mlp = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4))
    check("parallelize_module", mlp, lambda: parallelize_module(mlp, mesh, {"0": ColwiseParallel()}))

    weight = distribute_tensor(torch.zeros(6, 4), mesh, [Shard(1)])
    check("another placement", mlp, lambda: setattr(mlp[0], "weight", nn.Parameter(weight)))

    kept: list[object] = []  # so that a change is seen for itself, and not by what it lets go of

    def swap_in(tensor: Tensor) -> None:
        kept.append(nn.Parameter(tensor))
        torch.utils.swap_tensors(mlp[0].weight, kept[-1])

    replicated = distribute_tensor(torch.zeros(6, 4), mesh, [Replicate()])
    check("another placement, swapped in", mlp, lambda: swap_in(replicated))
    check("another device, swapped in", mlp, lambda: swap_in(replicated.to("meta")))
    offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    check("offloaded", offloaded, lambda: None)


@on_ranks(2)
def test_models_can_be_moved_and_dropped_between_loads(rank: int) -> None:
    """Moves and swaps of a model between loads work, and the loads behind them are right."""
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), bucket_bytes=BUCKET, readers="one")
    model = meta_net()
    number = 0

    def load(what: str, dtype: torch.dtype = torch.float32) -> None:
        nonlocal number
        number += 1
        loader.load(model, state_for(number))
        expected = state_for(number, dtype)  # Module.to casts buffers too
        assert wrong(model, expected) == [], f"after {what}"

    for what in ("meta", "a load", "two loads", "three"):
        load(what)
    assert remembers(loader, model), "no snapshot is in use"
    model(torch.arange(13)).sum().backward()
    load("a step")
    weight = model.embed.weight
    for dtype in (torch.bfloat16, torch.float32):
        model.to(dtype)
        load(f"to {dtype}", dtype)
        load(f"to {dtype}, again", dtype)
    model.to_empty(device="cpu")
    load("to_empty")
    load("to_empty, again")
    fresh = nn.Parameter(torch.zeros_like(weight))
    torch.utils.swap_tensors(model.embed.weight, fresh)
    load("swap_tensors")
    model.table = torch.zeros(5, 3)
    load("a new buffer")
    alive = [weakref.ref(each) for each in (model, model.norm.weight)]
    model = meta_net()
    gc.collect()
    assert [each() for each in alive] == [None, None], "the loader keeps a model alive that was trained and dropped"
    load("another model")


@on_ranks(4)
def test_private_and_public_ways_to_read_dtensors_agree(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    model = meta_net().to_empty(device="cpu")
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), torch.zeros(()), nn.Parameter(torch.zeros(3))]
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        tensor = distribute_tensor(torch.zeros(5, 3), mesh, placements)
        tensors += [tensor, nn.Parameter(tensor), tensor.to("meta"), tensor.double()]
    public_local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    for a, b in zip(dtensor.local_tensors(tensors), public_local, strict=True):
        assert (a.shape, a.dtype, a.device, a.requires_grad) == (b.shape, b.dtype, b.device, False), f"{a} {b}"
        assert a.is_meta or a.data_ptr() == b.data_ptr(), "not the same memory"
    said = [(t.shape, t.placements, t.device_mesh) if isinstance(t, DTensor) else None for t in tensors]
    memory = ops.describe_memory([tensor.detach() for tensor in public_local])
    public, private = (
        list(zip(shardings, described[:, 2:].tolist(), strict=True))
        for shardings, described in ((said, memory), dtensor.metadata(tensors))
    )
    for i, j in product(range(len(tensors)), repeat=2):
        text = f"only one way distinguishes {tensors[i]} and {tensors[j]}"
        assert (public[i] == public[j]) == (private[i] == private[j]), text


# ---- modules that a pass has left unsharded, or for which FSDP2 has gathered ahead ----


class Layer(nn.Linear):
    fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise RuntimeError("out of memory")
        return super().forward(x)


class Passed(nn.Sequential):
    def __init__(self) -> None:
        layers = nn.Sequential(Layer(4, 4), Layer(4, 4), Layer(4, 4))
        body = nn.Sequential(OrderedDict(layers=layers, norm=nn.LayerNorm(4)))
        super().__init__(OrderedDict(embed=nn.Linear(4, 4), body=body, head=nn.Linear(4, 4)))


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


PASSES: list[Callable[[Any], Any]] = [failed_forward, prefetched, lambda model: model(X)]
if "cast_output_dtype" in signature(_fsdp_state._register_group_forward_hooks).parameters:
    PASSES.append(part_of_a_group)  # torch 2.11 does not gather a group again after such a pass and its own reshard()


@on_ranks(2)
def test_what_passes_leave_unsharded_is_filled(rank: int) -> None:
    torch.manual_seed(3)
    reference = Passed()
    state = {name: tensor.detach() for name, tensor in reference.state_dict().items()}
    for use in PASSES:
        for again in (False, True):
            model: Any = Passed()
            for layer in model.body.layers:
                fully_shard(layer)
            fully_shard([model.body.norm, model.head], reshard_after_forward=False)
            fully_shard(model)
            with epload.HierarchicalLoader(progress=False, timeout=60) as loader:
                if again:  # the second load has a snapshot of the model
                    loader.load(model, {name: torch.zeros_like(tensor) for name, tensor in state.items()})
                use(model)
                loader.load(model, state)
                assert remembers(loader, model), f"{use.__name__}, {again}"
            result = model(X)
            assert torch.allclose(result, reference(X)), f"{use.__name__}, {again}: the next pass has other weights"
            (result.sum() * 0).backward()
            for module in model.modules():
                if hasattr(module, "reshard"):
                    module.reshard()
            assert differing(model, state) == [], f"{use.__name__}, {again}"


@on_ranks(2)
def test_a_part_of_a_model_is_filled_where_the_whole_has_gathered_it(rank: int) -> None:
    """A pass without a backward pass leaves what the outermost module gathers unsharded."""
    model: Any = Passed()
    fully_shard(model)
    with epload.HierarchicalLoader(progress=False, timeout=60) as loader:
        for salt in (1, 2):  # the second load has a snapshot of the part
            with torch.no_grad():
                model(X)
            values = {name: torch.full(tensor.shape, salt * 1.0) for name, tensor in model.embed.state_dict().items()}
            loader.load(model.embed, values)
            model.reshard()
            assert differing(model.embed, values) == []
