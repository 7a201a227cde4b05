"""Reading a model again from a snapshot: the same as collecting anew, and no change goes unnoticed."""

from __future__ import annotations

import gc
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from epload import _C, HierarchicalLoader, Topology
from epload.model import dtensor
from epload.model.devices import Devices, devices_of
from epload.model.snapshot import Snapshot
from epload.model.targets import Targets, collect
from support import ranks
from support.checks import all_fine
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


def same(read: tuple[Targets, Devices] | None, collected: Targets) -> bool:
    return (
        read is not None
        and read[0].matches(collected)
        and read[0].unsaved_meta == collected.unsaved_meta
        and [id(t) for t in read[0].tensors] == [id(t) for t in collected.tensors]
        and read[1] == devices_of(collected, set(), None)
    )


def snapshot_of(model: nn.Module) -> Snapshot:
    targets = collect(model)
    return Snapshot(model, targets, devices_of(targets, set(), None), None)


def test_an_unchanged_model_is_read_as_collected() -> None:
    model = Small()
    snapshot = snapshot_of(model)
    assert same(snapshot.read(model, None), collect(model))
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(1)
    model.eval().requires_grad_(False)
    assert same(snapshot.read(model, None), collect(model)), "values, modes and gradients are no concern"


def retie(model: Any) -> None:
    model.head.weight = nn.Parameter(torch.zeros(5, 3))


def tie(model: Any) -> None:
    model.inner[1].bias = model.inner[1].weight


def rename(model: Any) -> None:
    model.inner[1]._parameters["scale"] = model.inner[1]._parameters.pop("weight")


def swap_persistence(model: Any) -> None:
    model.register_buffer("saved", model.saved, persistent=False)
    model.register_buffer("unsaved", model.unsaved, persistent=True)


def other_size(model: Any) -> None:
    model.inner[0].weight.data = torch.zeros(4, 3)


CHANGES: dict[str, Callable[[Any], object]] = {
    "parameter replaced": lambda m: setattr(m.inner[0], "weight", nn.Parameter(torch.zeros(3, 3))),
    "parameter removed": lambda m: setattr(m.head, "bias", None),
    "parameter renamed": rename,
    "untied": retie,
    "tied": tie,
    "dtype": lambda m: m.bfloat16(),
    "dtype of one": lambda m: m.inner[0].to(torch.float64),
    "dtype of a buffer": lambda m: setattr(m, "saved", m.saved.double()),
    "device": lambda m: m.inner[0].to("meta"),
    "size, in place": other_size,
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
    "hook on a leaf": lambda m: m.relu._register_state_dict_hook(lambda *_: None),
    "hook on the root": lambda m: m.register_state_dict_post_hook(lambda *_: None),
    "load hook on a leaf": lambda m: m.relu.register_load_state_dict_pre_hook(lambda *_: None),
    "load hook on the root": lambda m: m.register_load_state_dict_post_hook(lambda *_: None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changes_are_noticed(change: str) -> None:
    model = Small()
    snapshot = snapshot_of(model)
    assert snapshot.read(model, None) is not None
    CHANGES[change](model)
    assert snapshot.read(model, None) is None
    assert snapshot.read(model, None) is None, "nor is the change accepted the second time"


def test_two_buffers_that_change_roles_are_noticed() -> None:
    model = Small()
    snapshot, before = snapshot_of(model), collect(model)
    swap_persistence(model)
    assert set(collect(model).names) != set(before.names)
    assert snapshot.read(model, None) is None


def test_other_models_and_other_dtypes_are_not_taken_for_it() -> None:
    model = Small()
    snapshot = snapshot_of(model)
    assert snapshot.read(Small(), None) is None
    assert snapshot.read(model.inner, None) is None
    assert snapshot.read(model, torch.bfloat16) is None
    assert same(snapshot.read(model, None), collect(model))


class OwnState(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}mine"] = self.weight


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return torch.zeros(1)


@pytest.mark.parametrize("kind", [OwnState, Extra])
def test_modules_with_a_say_in_their_state_are_always_asked(kind: type[nn.Linear]) -> None:
    model = nn.Sequential(kind(2, 2))
    assert snapshot_of(model).read(model, None) is None


def test_buffers_that_nothing_fills_are_always_looked_for() -> None:
    with torch.device("meta"):
        model = Small()
    assert collect(model).unsaved_meta.keys() == {"unsaved"}
    assert snapshot_of(model).read(model, None) is None


def test_a_model_is_not_kept_alive() -> None:
    model = Small()
    weights = weakref.ref(model.head.bias.untyped_storage())
    alive = weakref.ref(model)
    snapshot = snapshot_of(model)
    assert snapshot.read(model, None) is not None
    del model
    gc.collect()
    assert alive() is None
    assert weights() is None


def test_scripted_modules_are_read_as_collected_or_anew() -> None:
    """Their containers are no dicts."""
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.BatchNorm1d(2)))
    snapshot = snapshot_of(model)
    assert snapshot.read(model, None) is None or same(snapshot.read(model, None), collect(model))


def test_a_model_does_not_keep_the_snapshots_before() -> None:
    model = Small()
    snapshots = [weakref.ref(snapshot_of(model)) for _ in range(3)]
    gc.collect()
    assert [snapshot() for snapshot in snapshots] == [None] * 3


def test_a_child_that_has_died_is_missed_wherever_the_next_one_lies() -> None:
    model = Small()
    snapshot = snapshot_of(model)
    places = model._modules
    for _ in range(50):  # sooner or later at the address of the one before
        places["relu"] = None
        places["relu"] = nn.ReLU()
        assert snapshot.read(model, None) is None


def test_what_slots_hold_is_found_and_told_by_address() -> None:
    class Slotted:
        __slots__ = ("one", "other")

    class Derived(Slotted):
        pass

    filled, derived, empty = Slotted(), Derived(), Slotted()
    filled.one, filled.other, derived.one = object(), object(), filled
    slot = Slotted.one  # type: ignore[attr-defined]
    objects = [filled, derived, empty, 3, filled]
    held, empty_places = _C.held(objects, slot)
    assert np.frombuffer(held, np.int64).tolist() == [id(filled.one), 0, 0, 0, id(filled.one)]
    assert empty_places == [1, 2, 3]
    assert _C.held([], slot) == (b"", [])
    before = sys.getrefcount(filled.one)
    values, others = _C.values(objects, slot)
    assert values == [filled.one, None, None, None, filled.one]
    assert others == [1, 2, 3]
    counted = sys.getrefcount(filled.one) - before
    assert counted == 2, "what a list holds is counted"
    assert _C.values([], slot) == ([], [])
    for other in (object(), Slotted.__init__, type.__flags__, len):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="expected the descriptor of a slot"):
            _C.held([filled], other)
        with pytest.raises(TypeError, match="expected the descriptor of a slot"):
            _C.values([filled], other)


def test_what_weak_references_give() -> None:
    class Module:
        def __init__(self, places: object) -> None:
            self.places = places

    modules = [Module([i]) for i in range(100)]
    references: list[Any] = list(map(weakref.ref, modules))
    before = sys.getrefcount(modules[0].places)
    found = _C.attributes(references, "places")
    counted = sys.getrefcount(modules[0].places) - before
    assert counted == 1, "what a list holds is counted"
    assert list(map(id, found)) == [id(module.places) for module in modules]
    assert _C.attributes([], "places") == []
    del modules[50]
    for bad, error in ((references, AttributeError), ([Module([])], TypeError), ([*references[:3], 3], TypeError)):
        with pytest.raises(error):
            _C.attributes(bad, "places")
    growing: list[Any] = []

    class Grows:
        @property
        def places(self) -> int:
            if len(growing) < 2000:
                growing.extend([growing[0]] * 1000)
            return 1

    owner = Grows()
    growing.append(weakref.ref(owner))
    found = _C.attributes(growing, "places")
    assert found == [1] * len(growing)


def test_the_contents_of_dicts_are_told_by_address_and_in_order() -> None:
    a, b, name = object(), object(), "name"
    many: list[dict[str, Any]] = [{f"key{i}": i for i in range(i % 7)} for i in range(100)]
    assert _C.contents(many) == _C.contents([dict(each) for each in many])
    assert _C.contents(many)[1] == [value for each in many for value in each.values()]
    assert _C.contents([{name: a}, {}])[0] != _C.contents([{}, {name: a}])[0]
    assert _C.contents([{name: a}])[0] != _C.contents([{name: b}])[0]
    assert _C.contents([{"x": a, "y": b}])[0] != _C.contents([{"y": b, "x": a}])[0]
    assert _C.contents([]) == (b"", [])
    before = sys.getrefcount(a)
    listed = _C.contents([{name: a}, {name: b, "other": a}])[1]
    assert sys.getrefcount(a) - before == 2, "what a list holds is counted"
    del listed
    assert sys.getrefcount(a) == before
    for told in (_C.contents, _C.addresses):
        with pytest.raises(TypeError, match="expected dicts"):
            told([*many, []])  # type: ignore[list-item]
    for dicts in (many, [{name: a}, {}], []):
        assert _C.addresses(dicts) == _C.contents(dicts)[0]
    assert _C.all_empty([{}, [], OrderedDict(), set()] * 30)
    assert not _C.all_empty([*[{}] * 50, {1: 2}])
    assert not _C.all_empty([*[{}] * 50, [0]])
    with pytest.raises(TypeError):
        _C.all_empty([3])  # type: ignore[list-item]


def test_a_list_that_shrinks_while_it_is_read() -> None:
    """What is asked for its length may run any code."""
    containers: list[Any] = []

    class Emptying(list[int]):
        def __len__(self) -> int:
            containers.clear()
            return 0

    for place in (0, 20, 39):
        containers[:] = [[] for _ in range(40)]
        containers[place] = Emptying()
        assert _C.all_empty(containers)
        assert containers == []


def test_a_model_in_the_place_of_a_dead_one_is_read_anew() -> None:
    model = Small()
    snapshot = snapshot_of(model)
    del model
    for _ in range(20):
        other = Small()
        assert snapshot.read(other, None) is None
        del other


# ---- on ranks ----


def reparallelized(rank: int) -> list[str]:
    said = []
    mesh = init_device_mesh("cpu", (2,))

    def check(what: str, model: nn.Module, change: Callable[[], object], noticed: bool = True) -> None:
        snapshot = snapshot_of(model)
        if not same(snapshot.read(model, None), collect(model)):
            said.append(f"{what}: not read as collected")
        change()
        read = snapshot.read(model, None)
        if noticed and read is not None:
            said.append(f"{what}: unnoticed")
        if not noticed and not same(read, collect(model)):
            said.append(f"{what}: {read}")

    net = Net()
    check("fully_shard", net, lambda: sharded(net))
    check("forward", net, lambda: net(torch.arange(13)), noticed=False)
    check("forward and backward", net, lambda: net(torch.arange(13)).sum().backward(), noticed=False)
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

    def exchange(what: str, value: object) -> None:
        kept.append(getattr(mlp[0].weight, what))
        setattr(mlp[0].weight, what, value)

    check("another local tensor, within", mlp, lambda: exchange("_local_tensor", torch.empty(6, 4)))
    check("another layout, within", mlp, lambda: exchange("_spec", weight._spec))
    offloaded = fully_shard(nn.Linear(4, 4), offload_policy=CPUOffloadPolicy(pin_memory=False))
    check("offloaded", offloaded, lambda: None, noticed=False)
    return said


def test_a_model_that_is_parallelized_again_is_noticed() -> None:
    all_fine(ranks.run(2, reparallelized))


def after_loads(rank: int) -> list[str]:
    """Moves and swaps of a model between loads work, and the loads behind them are right."""
    said = []
    loader = HierarchicalLoader(Topology.from_nodes([[0, 1]]), bucket_bytes=BUCKET, readers="one")
    model = meta_net()
    number = 0

    def load(what: str, dtype: torch.dtype = torch.float32) -> None:
        nonlocal number
        number += 1
        loader.load(model, state_for(number))
        expected = state_for(number, dtype)  # Module.to casts buffers too
        said.extend(f"after {what}: {text}" for text in wrong(model, expected))

    for what in ("meta", "a load", "two loads", "three"):
        load(what)
    if loader._agreement.inputs.snapshot is None or loader._agreement.inputs.snapshot.read(model, (None, None)) is None:
        said.append("no snapshot is in use")
    model(torch.arange(13)).sum().backward()
    load("a step")
    weight = model.embed.weight
    model.to(torch.bfloat16)
    load("to bfloat16", torch.bfloat16)
    load("to bfloat16, again", torch.bfloat16)
    model.to(torch.float32)
    load("to float32")
    load("to float32, again")
    model.to_empty(device="cpu")
    load("to_empty")
    load("to_empty, again")
    fresh = nn.Parameter(torch.zeros_like(weight))
    torch.utils.swap_tensors(model.embed.weight, fresh)
    load("swap_tensors")
    model.table = torch.zeros(5, 3)
    load("a new buffer")
    alive = weakref.ref(model)
    model = meta_net()
    gc.collect()
    if alive() is not None:
        said.append("the loader keeps a model alive that was trained and dropped")
    load("another model")
    return said


def test_models_can_be_moved_and_dropped_between_loads() -> None:
    all_fine(ranks.run(2, after_loads))


def both_ways(rank: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2))
    model = meta_net().to_empty(device="cpu")
    tensors: list[Tensor] = [*model.parameters(), *model.buffers(), torch.zeros(()), nn.Parameter(torch.zeros(3))]
    for placements in ([Shard(0), Shard(0)], [Replicate(), Shard(1)], [Replicate(), Replicate()]):
        made = distribute_tensor(torch.zeros(5, 3), mesh, placements)
        tensors += [made, nn.Parameter(made), made.to("meta")]
    said = []
    for one, other in zip(
        dtensor.local_tensors(tensors, private=True), dtensor.local_tensors(tensors, private=False), strict=True
    ):
        if (one.shape, one.dtype, one.device, one.requires_grad) != (other.shape, other.dtype, other.device, False):
            said.append(f"{one} {other}")
        if not one.is_meta and one.data_ptr() != other.data_ptr():
            said.append("not the same memory")
    for private in (True, False):
        record = dtensor.MetadataRecord(tensors, private)
        if not record.matches([*tensors]):
            said.append(f"private={private}: not equal to itself")
        for i, tensor in enumerate(tensors):
            for what, other in ("dtype", tensor.to(torch.float64)), ("device", tensor.to("meta")):
                if (tensor.dtype, tensor.device) == (other.dtype, other.device):
                    continue
                if record.matches([*tensors[:i], other, *tensors[i + 1 :]]):
                    said.append(f"private={private}: another {what} of tensor {i} is unnoticed")
        for i, one in enumerate(tensors[-9::3]):
            if [dtensor.MetadataRecord([one], private).matches([t]) for t in tensors[-9::3]] != [
                i == j for j in range(3)
            ]:
                said.append(f"private={private}: placements are not told apart")
    return said


def test_private_and_public_ways_to_read_dtensors_agree() -> None:
    all_fine(ranks.run(4, both_ways))
