"""The native functions that list what slots, dicts and weak references hold, by address."""

from __future__ import annotations

import sys
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from epload import _C


def test_what_slots_hold_is_found_by_address() -> None:
    class Slotted:
        __slots__ = ("one", "other")

    class Derived(Slotted):
        pass

    filled, derived, empty = Slotted(), Derived(), Slotted()
    filled.one, filled.other, derived.one = object(), object(), filled
    slot = Slotted.one  # type: ignore[attr-defined]
    objects = [filled, derived, empty, 3, filled]
    contents, empty_places = _C.slot_addresses(objects, slot)
    assert np.frombuffer(contents, np.int64).tolist() == [id(filled.one), 0, 0, 0, id(filled.one)]
    assert empty_places == [1, 2, 3]
    assert _C.slot_addresses([], slot) == (b"", [])
    before = sys.getrefcount(filled.one)
    values, others = _C.slot_values(objects, slot)
    assert values == [filled.one, None, None, None, filled.one]
    assert others == [1, 2, 3]
    counted = sys.getrefcount(filled.one) - before
    assert counted == 2, "what a list holds is counted"
    assert _C.slot_values([], slot) == ([], [])
    for other in (object(), Slotted.__init__, type.__flags__, len):  # type: ignore[attr-defined]
        with pytest.raises(TypeError, match="expected the descriptor of a slot"):
            _C.slot_addresses([filled], other)
        with pytest.raises(TypeError, match="expected the descriptor of a slot"):
            _C.slot_values([filled], other)


def test_kinds_of_tensors() -> None:
    class Slotted(torch.Tensor):
        __slots__ = ("mark",)

    def marked(dtype: torch.dtype, mark: object) -> torch.Tensor:
        tensor = torch.zeros(3, dtype=dtype).as_subclass(Slotted)
        tensor.mark = mark  # type: ignore[attr-defined]
        return tensor

    slot, a, b, double = Slotted.mark, object(), object(), torch.float64  # type: ignore[attr-defined]
    tensors = [
        torch.zeros(2), torch.zeros(4, 4), torch.zeros(2, dtype=double), torch.zeros(2, device="meta"),
        nn.Parameter(torch.zeros(2)), marked(double, a), marked(double, b), marked(torch.int8, a), marked(double, a),
        torch.zeros(1, device="meta"),
    ]  # fmt: skip
    assert _C.tensor_kinds(tensors, slot) == ([0, 0, 1, 2, 3, 4, 5, 6, 4, 2], [0, 2, 3, 4, 5, 6, 7])
    assert _C.tensor_kinds([], slot) == ([], [])
    with pytest.raises(TypeError, match="tensor_kinds: expected a list of tensors, item 1 is of type int"):
        _C.tensor_kinds([tensors[0], 1], slot)
    with pytest.raises(TypeError, match="expected the descriptor of a slot"):
        _C.tensor_kinds(tensors, object())


def test_what_weak_references_give() -> None:
    class Module:
        def __init__(self, places: object) -> None:
            self.places = places

    modules = [Module([i]) for i in range(100)]
    references: list[Any] = list(map(weakref.ref, modules))
    before = sys.getrefcount(modules[0].places)
    found = _C.weakref_attributes(references, "places")
    counted = sys.getrefcount(modules[0].places) - before
    assert counted == 1, "what a list holds is counted"
    assert list(map(id, found)) == [id(module.places) for module in modules]
    assert _C.weakref_attributes([], "places") == []
    del modules[50]
    for bad, error in ((references, AttributeError), ([Module([])], TypeError), ([*references[:3], 3], TypeError)):
        with pytest.raises(error):
            _C.weakref_attributes(bad, "places")
    growing: list[Any] = []

    class Grows:
        @property
        def places(self) -> int:
            if len(growing) < 2000:
                growing.extend([growing[0]] * 1000)
            return 1

    owner = Grows()
    growing.append(weakref.ref(owner))
    found = _C.weakref_attributes(growing, "places")
    assert found == [1] * len(growing)


def test_the_contents_of_dicts_are_listed_by_address_and_in_order() -> None:
    a, b, name = object(), object(), "name"
    many: list[dict[str, Any]] = [{f"key{i}": i for i in range(i % 7)} for i in range(100)]
    assert _C.dict_contents(many) == _C.dict_contents([dict(each) for each in many])
    assert _C.dict_contents(many)[1] == [value for each in many for value in each.values()]
    assert _C.dict_contents([{name: a}, {}])[0] != _C.dict_contents([{}, {name: a}])[0]
    assert _C.dict_contents([{name: a}])[0] != _C.dict_contents([{name: b}])[0]
    assert _C.dict_contents([{"x": a, "y": b}])[0] != _C.dict_contents([{"y": b, "x": a}])[0]
    assert _C.dict_contents([]) == (b"", [])
    before = sys.getrefcount(a)
    listed = _C.dict_contents([{name: a}, {name: b, "other": a}])[1]
    assert sys.getrefcount(a) - before == 2, "what a list holds is counted"
    del listed
    assert sys.getrefcount(a) == before
    for function in (_C.dict_contents, _C.dict_addresses):
        with pytest.raises(TypeError, match="expected dicts"):
            function([*many, []])  # type: ignore[list-item]
    for dicts in (many, [{name: a}, {}], []):
        assert _C.dict_addresses(dicts) == _C.dict_contents(dicts)[0]
    assert _C.nonempty([{}, [], OrderedDict(), set()] * 30) == []
    assert _C.nonempty([*[{}] * 50, {1: 2}, set(), [0], OrderedDict(a=1)]) == [50, 52, 53]
    with pytest.raises(TypeError):
        _C.nonempty([3])  # type: ignore[list-item]


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
        assert _C.nonempty(containers) == []
        assert containers == []


# ---- modules ----


def walked(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """By torch: each module under every name, and the prefix of its tensors."""
    return [(f"{path}." if path else "", module) for path, module in model.named_modules(remove_duplicate=False)]


def test_modules_are_found_in_the_order_of_the_state_dict() -> None:
    inner = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    model = nn.ModuleDict({"a": inner, "b": nn.ModuleList([inner, nn.BatchNorm1d(2)]), "c": nn.Identity()})
    model["c"].absent = None
    model["c"].register_module("nothing", None)
    prefixes, modules = _C.find_modules(model)
    assert list(zip(prefixes, modules, strict=True)) == walked(model)
    owners = [prefix for prefix, module in zip(prefixes, modules, strict=True) for _ in module._parameters]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert owners == [name.rpartition(".")[0] + "." for name in names]


def test_named_values() -> None:
    a, b = object(), object()
    prefixes, dicts = ["x.", "", "y.z."], [{"a": a, "none": None}, OrderedDict(b=b), {}]
    assert _C.named_values(prefixes, dicts) == (["x.a", "b"], [a, b])
    assert _C.named_values([], []) == ([], [])
    scripted = torch.jit.script(nn.Linear(2, 2))
    names, values = _C.named_values(["in."], [scripted._parameters])
    assert names == ["in.weight", "in.bias"]
    assert [value.shape for value in values] == [(2, 2), (2,)]
    for bad, error in ((([], dicts), ValueError), ((["x."], [{1: a}]), TypeError), (([1], [{"a": a}]), TypeError)):
        with pytest.raises(error):
            _C.named_values(*bad)


def test_modules_whose_containers_are_no_dicts() -> None:
    model = nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.ReLU())))
    assert list(zip(*_C.find_modules(model), strict=True)) == walked(model)


def test_modules_that_contain_one_another_are_an_error() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].again = model
    with pytest.raises(
        ValueError, match=r"expected modules that do not contain one another, got one at the path 0\.again\.0\."
    ):
        _C.find_modules(model)


class Plain:
    def __init__(self) -> None:
        self.a, self.b = [1], [2]


class Described(Plain):
    """A descriptor comes before an object's own attribute."""

    @property
    def a(self) -> str:
        return "described"

    @a.setter
    def a(self, value: object) -> None:
        self.__dict__["a"] = value


class InClass(Plain):
    b = "of the class"

    def __init__(self) -> None:
        self.a = [3]


class Intercepted(Plain):
    def __getattribute__(self, name: str) -> object:
        return "intercepted" if name in ("a", "b") else super().__getattribute__(name)


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self) -> None:
        self.a, self.b = 1, 2


class Computed:
    def __getattr__(self, name: str) -> str:
        return f"no {name}"


def test_attributes_are_those_that_python_gives() -> None:
    objects = [kind() for kind in (Plain, Described, InClass, Intercepted, Slotted, Computed)] * 20
    assert _C.attributes(objects, ["a", "b"]) == [[x.a for x in objects], [x.b for x in objects]]
    assert _C.attributes([], ["a", "b"]) == [[], []]
    assert _C.attributes(objects, []) == []
    with pytest.raises(AttributeError, match="c"):
        _C.attributes([Plain()], ["a", "c"])
    before = sys.getrefcount(objects[0].a)
    found = _C.attributes(objects[:1], ["a"])
    counted = sys.getrefcount(objects[0].a) - before
    assert counted == 1, "what a list holds is counted"
    assert found == [[[1]]]
