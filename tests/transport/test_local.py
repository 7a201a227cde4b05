"""What is worked out for tensors on CPU and kept: used for tensors of the same layouts, whichever they are, and for no others."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._pytree import tree_map_only

from epload import Checkpoint, HierarchicalLoader, LoadError, Topology
from epload.mapping.resolve import resolve_mapping
from epload.model.targets import collect
from epload.native import ops
from epload.planning.plan import LoadPlan, make_plan
from epload.transport.local import Local, PreparedPlan
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, NODES, State, meta_net, state_for, wrong

TABLE = torch.tensor([[0, 64, 6, 1, 0, 4, 1], [1, 80, 6, 1, 1, 2, 1]])
"""Four floats at byte 64 of a bucket, two at byte 80, for elements 0 to 4 of one tensor and 1 to 3 of another."""


def bucket() -> Tensor:
    values = torch.arange(1.0, 7.0).view(torch.uint8)
    return torch.cat([torch.zeros(64, dtype=torch.uint8), values])


def two() -> list[Tensor]:
    return [torch.zeros(4), torch.zeros(3)]


# ---- the native side ----


def list_of(tensors: list[Tensor], known: ops.Layouts | None = None) -> ops.TensorList:
    listed, foreign = ops.tensor_list(tensors, known)
    assert not foreign
    return listed


def test_only_what_is_prepared_is_filled() -> None:
    tensors = [*two(), torch.zeros(4)]
    listed = list_of(tensors)
    ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, [2, 1], TABLE, 88))
    assert [tensor.tolist() for tensor in tensors] == [[0] * 4, [0, 5, 6], [1, 2, 3, 4]]


def test_autograd_hears_of_it() -> None:
    tensors: list[Tensor] = [nn.Parameter(tensor) for tensor in two()]
    with torch.inference_mode():
        tensors.append(torch.zeros(4))
    before = [tensor._version for tensor in tensors[:2]]
    product = tensors[0] * tensors[0]
    listed = list_of(tensors)
    for which in ([0, 1], [2, 1]):
        ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, which, TABLE, 88))
    assert [tensor._version - version for tensor, version in zip(tensors, before, strict=False)] == [1, 2]
    assert tensors[2].tolist() == [1, 2, 3, 4]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        product.sum().backward()


def test_what_was_prepared_holds_for_others_of_equal_layouts() -> None:
    first, others = two(), two()
    listed = list_of(first)
    known = ops.layouts(listed)
    copies = ops.prepare_copies(listed, [0, 1], TABLE, 88)
    again = list_of(others, known)
    assert ops.has_layouts(again, known)
    ops.unpack_prepared(bucket(), again, copies)
    assert [tensor.tolist() for tensor in others] == [[1, 2, 3, 4], [0, 5, 6]]
    assert not any(tensor.any() for tensor in first)


OTHERS: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "fewer": lambda tensors: tensors[:1],
    "none": lambda tensors: [],
    "more": lambda tensors: [*tensors, torch.zeros(1)],
    "another shape": lambda tensors: [tensors[0], torch.zeros(2)],
    "other strides": lambda tensors: [torch.zeros(8)[::2], tensors[1]],
    "another dtype": lambda tensors: [torch.zeros(4, dtype=torch.int32), tensors[1]],
    "more dims": lambda tensors: [tensors[0].view(1, 4), tensors[1]],
    "another order": lambda tensors: tensors[::-1],
}


@pytest.mark.parametrize("other", OTHERS)
def test_and_for_no_others(other: str) -> None:
    tensors = two()
    listed = list_of(tensors)
    known = ops.layouts(listed)
    copies = ops.prepare_copies(listed, [0, 1], TABLE, 88)
    digests = ops.prepare_digests(listed, [0, 1], TABLE)
    changed = OTHERS[other](tensors)
    again = list_of(changed, known)
    assert not ops.has_layouts(again, known)
    for wrong_ones in (again, list_of(tensors), list_of(changed)):  # equal, but not found to be
        with pytest.raises(ValueError, match="expected tensors of the dtypes, shapes and strides"):
            ops.unpack_prepared(bucket(), wrong_ones, copies)
        with pytest.raises(ValueError, match="expected tensors of the dtypes, shapes and strides"):
            ops.digest_prepared(wrong_ones, digests)
    assert not any(tensor.any() for tensor in (*tensors, *changed))


UNUSABLE: dict[str, tuple[Callable[[], Tensor], str]] = {
    "freed": (lambda: freed(torch.zeros(4)), r"tensor 0 of shape \[4\] has a storage of 0 bytes"),
    "meta": (lambda: torch.zeros(4, device="meta"), "tensor 0 is on meta"),
    "sparse": (lambda: torch.zeros(4).to_sparse(), "tensor 0 is Sparse"),
    "quantized": (lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8), "tensor 0 is quantized"),
    "conjugate": (lambda: torch.zeros(4, dtype=torch.complex64).conj(), "tensor 0 is a lazy conjugate"),
    "mkldnn": (lambda: torch.zeros(4).to_mkldnn(), "tensor 0 is Mkldnn"),
}


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize("kind", UNUSABLE)
def test_tensors_without_memory_of_use_are_refused_where_they_are_filled(kind: str) -> None:
    make, text = UNUSABLE[kind]
    tensors = [make(), *two()]
    listed = list_of(tensors)
    ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, [1, 2], TABLE, 88))
    assert [tensor.tolist() for tensor in tensors[1:]] == [[1, 2, 3, 4], [0, 5, 6]]
    with pytest.raises(ValueError, match=text):
        ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, [0, 2], TABLE, 88))
    assert ops.has_layouts(list_of(tensors, ops.layouts(listed)), ops.layouts(listed))


def test_what_is_copied_when_it_is_written_to_is_copied_only_then() -> None:
    base = [torch.ones(4), torch.ones(4)]
    tensors = [*(torch._lazy_clone(tensor) for tensor in base), torch.zeros(3)]
    listed = list_of(tensors)
    ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, [0, 2], TABLE, 88))
    assert tensors[0].tolist() == [1, 2, 3, 4]
    assert base[0].tolist() == [1] * 4
    assert torch._C._is_cow_tensor(tensors[1])
    assert not torch._C._is_cow_tensor(tensors[0])


def test_what_is_prepared_keeps_no_tensor_alive() -> None:
    tensors = two()
    alive = weakref.ref(tensors[0])
    listed = list_of(tensors)
    kept = ops.layouts(listed), ops.prepare_copies(listed, [0, 1], TABLE, 88)
    ops.unpack_prepared(bucket(), listed, kept[1])
    tensors.clear()
    assert alive() is not None, "the tensors of a load live as long as it does"
    del listed
    assert alive() is None


def test_wrong_arguments_change_nothing() -> None:
    tensors = two()
    listed = list_of(tensors)
    copies = ops.prepare_copies(listed, [0, 1], TABLE, 88)
    for wrong_bucket in (bucket()[1:], bucket().view(torch.float32), bucket().view(1, -1)):
        with pytest.raises(ValueError, match="expected the bucket as a contiguous uint8 tensor of 88 bytes"):
            ops.unpack_prepared(wrong_bucket, listed, copies)
    for which, nbytes, text in (
        ([0, 2], 88, "expected the number of one of 2 tensors, got 2"),
        ([-1, 0], 88, "expected the number of one of 2 tensors, got -1"),
        ([0], 88, "row 1 names tensor 1 of 1"),
        ([1, 0], 88, "row 0 covers"),
        ([0, 1], 87, "row 1 reaches outside the bucket of 87 bytes"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.prepare_copies(listed, which, TABLE, nbytes)
    assert not any(tensor.any() for tensor in tensors)


def test_a_tensor_list_has_only_tensors() -> None:
    with pytest.raises(TypeError, match="expected a list of tensors, item 1 is of type int"):
        ops.tensor_list([torch.zeros(2), 3])  # type: ignore[list-item]
    with pytest.raises(RuntimeError, match="known"):
        ops.tensor_list([torch.zeros(2)], torch.zeros(2))  # type: ignore[arg-type]


class Unwraps(Tensor):
    """Hands plain copies of itself to every function."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = tree_map_only(cls, lambda it: it.as_subclass(Tensor).clone(), args)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*plain, **(kwargs or {}))


def test_a_class_that_takes_part_in_functions_is_not_asked() -> None:
    tensors = [tensor.as_subclass(Unwraps) for tensor in two()]
    listed = list_of(tensors)
    ops.unpack_prepared(bucket(), listed, ops.prepare_copies(listed, [0, 1], TABLE, 88))
    assert tensors[0].as_subclass(Tensor).tolist() == [1, 2, 3, 4]


def test_nothing_is_prepared_for_tensors_that_stand_for_others() -> None:
    with FakeTensorMode():
        fake = torch.zeros(4)
    listed, foreign = ops.tensor_list([torch.zeros(3), fake])
    assert foreign
    with pytest.raises(ValueError, match="expected tensors with memory of their own"):
        ops.prepare_copies(listed, [1, 0], TABLE, 88)


def test_reads_are_checked_when_they_are_prepared() -> None:
    tensors = two()
    listed = list_of(tensors)
    files, offsets, origins = torch.tensor([0, 1]), torch.tensor([0, 0]), torch.tensor([[0, 0], [1, 4]])
    good: dict[str, Any] = {
        "which": [0, 1], "copies": TABLE, "files": files, "offsets": offsets, "origins": origins, "file_count": 2,
    }  # fmt: skip
    for change, text in (
        ({"file_count": 1}, "row 1 names file 1 of 1"),
        ({"offsets": offsets[:1]}, "as many files as offsets"),
        ({"origins": torch.tensor([[0, 0], [2, 0]])}, "row 1 starts at byte 0 of tensor 2 of 2"),
        ({"which": [0]}, "row 1 names tensor 1 of 1"),
    ):
        with pytest.raises(ValueError, match=text):
            ops.prepare_reads(listed, **{**good, **change})
    reads = ops.prepare_reads(listed, **good)
    with pytest.raises(ValueError, match="expected 2 descriptors, got 1"):
        ops.read_prepared([0], listed, reads, 1)
    with pytest.raises(ValueError, match="expected tensors of the dtypes, shapes and strides"):
        ops.read_prepared([0, 0], list_of(tensors[:1]), reads, 1)


# ---- one plan's ----


def planned(model: nn.Module) -> LoadPlan:
    checkpoint, targets = Checkpoint.open({**model.state_dict()}), collect(model)
    return make_plan(checkpoint.manifest, targets, resolve_mapping("auto", model, targets.index), 4096)


def test_what_is_prepared_is_kept_for_the_same_plan_and_layouts() -> None:
    model = nn.Linear(3, 2)
    plan = planned(model)

    def prepared(known: PreparedPlan | None) -> PreparedPlan | None:
        return Local.on_cpu(plan, collect(model).local(), known).prepared

    first = prepared(None)
    assert prepared(first) is first
    model.weight = nn.Parameter(torch.ones(2, 3))
    assert prepared(first) is first, "another tensor of the same layout"
    model.weight.data = torch.ones(3, 2).t()
    second = prepared(first)
    assert second is not first, "another layout"
    plan = planned(model)
    assert prepared(second) is not second, "another plan"


# ---- loads ----


class Wrapped(Tensor):
    """Stands for another tensor, as a weight does that FSDP casts to float8 before it is gathered."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made: Wrapped = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device=inner.device
        )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        unwrapped, options = tree_map_only(cls, lambda it: it.inner, (args, kwargs or {}))
        result = func(*unwrapped, **options)
        return cls(result) if func is torch.ops.aten.detach.default else result


def wrapped(rank: int, folder: Path, readers: str) -> list[str]:
    model = plain_net()
    linear = model[2]
    assert isinstance(linear, nn.Linear)
    linear.weight = nn.Parameter(Wrapped(torch.zeros(3, 4)))
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=256)
    problems = []
    for turn in range(4):
        loader.load(model, folder / f"{turn % 2}.safetensors")
        for name, value in load_file(folder / f"{turn % 2}.safetensors").items():
            found = model.state_dict()[name]
            found = found.inner if isinstance(found, Wrapped) else found
            if not torch.equal(found, value):
                problems.append(f"turn {turn}: {name}")
    return problems


@pytest.mark.parametrize("readers", ["one", "every"])
def test_wrapped_tensors_are_filled_by_way_of_their_class(readers: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    all_fine(ranks.run(4, wrapped, tmp_path, readers))


def plain_net() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def between_loads(rank: int, folder: Path, states: list[State], way: tuple[str, str]) -> list[str]:
    """What a training loop may do to a model that is loaded again and again; every load has to be seen in the model."""
    model = plain_net()
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=way[0], algorithm=way[1], bucket_bytes=256)
    problems = []
    turn = 0

    def load(what: str) -> None:
        nonlocal turn
        turn += 1
        loader.load(model, folder / f"{turn % 2}.safetensors")
        found = model.state_dict()
        problems.extend(
            f"{what}: {name}" for name, value in states[turn % 2].items() if not torch.equal(found[name], value)
        )

    for again in range(3):
        load(f"load {again}")
    linear = model[2]
    assert isinstance(linear, nn.Linear)
    swapped = nn.Parameter(torch.zeros(3, 4))
    torch.utils.swap_tensors(linear.weight, swapped)
    load("swapped")
    if swapped.detach().eq(states[turn % 2]["2.weight"]).all():
        problems.append("the tensor that was swapped out was filled")
    linear.weight.data = torch.zeros(4, 3).t()
    load("other strides")
    linear.weight = nn.Parameter(torch.zeros(3, 4))
    load("a new parameter")
    alive = weakref.ref(linear.weight)
    linear.weight = nn.Parameter(torch.zeros(3, 4))
    gc.collect()
    if alive() is not None:
        problems.append("a parameter that was replaced is kept")
    model.double()
    model.float()
    load("converted there and back")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    load("trained")
    if rank == 1:
        linear.bias.untyped_storage().resize_(0)
    try:
        load("freed")
        problems.append("loaded into memory that was freed")
    except LoadError as error:
        if not re.search("rank 1 could not .*2.bias.*was it freed by FSDP", str(error)):
            problems.append(str(error))
    if rank == 1:
        linear.bias.untyped_storage().resize_(12)
    load("back again")
    return problems


def save_two(folder: Path) -> list[State]:
    states = []
    for number in range(2):
        torch.manual_seed(number)
        states.append({name: torch.rand_like(t.float()).to(t.dtype) for name, t in plain_net().state_dict().items()})
        save_file(states[-1], folder / f"{number}.safetensors")
    return states


@pytest.mark.parametrize("way", [("every", "two_level"), ("one", "two_level"), ("partitioned", "striped")])
def test_models_change_between_loads(way: tuple[str, str], tmp_path: Path) -> None:
    all_fine(ranks.run(4, between_loads, tmp_path, save_two(tmp_path), way))


def odd_ones(rank: int, folder: Path, readers: str) -> list[str]:
    """Buffers that the checkpoint lacks and that no load could fill."""
    model = plain_net()
    odd = {"freed", "quantized", "conjugate"}  # what is on meta is given storage; what is not strided is refused
    for name in odd:
        model.register_buffer(name, UNUSABLE[name][0]())
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, bucket_bytes=256)
    problems = []
    for turn in range(3):
        report = loader.load(model, folder / f"{turn % 2}.safetensors", strict=False)
        if sorted(report.missing_keys) != sorted(odd):
            problems.append(f"{report.missing_keys}")
        found = model.state_dict()
        values = load_file(folder / f"{turn % 2}.safetensors")
        problems += [f"turn {turn}: {name}" for name, value in values.items() if not torch.equal(found[name], value)]
    return problems


@pytest.mark.parametrize("readers", ["one", "every"])
def test_tensors_that_no_load_could_fill_are_left_alone(readers: str, tmp_path: Path) -> None:
    save_two(tmp_path)
    all_fine(ranks.run(4, odd_ones, tmp_path, readers))


def two_models(rank: int, folder: Path) -> list[str]:
    """In turns, by one loader, from files that lie otherwise: with a header of another length, and in two parts."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="every", bucket_bytes=BUCKET)
    models = [meta_net(), meta_net()]
    problems = []
    for turn in range(6):
        for number, model in enumerate(models):
            seed = (turn + number) % 3
            loader.load(model, folder / ("one.safetensors", "longer.safetensors", "parts")[seed])
            problems += [f"turn {turn}, model {number}: {text}" for text in wrong(model, state_for(seed))]
    return problems


def test_files_that_lie_otherwise_are_read_as_they_lie(tmp_path: Path) -> None:
    save_file(state_for(0), tmp_path / "one.safetensors")
    save_file(state_for(1), tmp_path / "longer.safetensors", metadata={"note": "x" * 1000})
    (tmp_path / "parts").mkdir()
    items = list(state_for(2).items())
    save_file(dict(items[: len(items) // 2]), tmp_path / "parts" / "part-0.safetensors")
    save_file(dict(items[len(items) // 2 :]), tmp_path / "parts" / "part-1.safetensors")
    all_fine(ranks.run(4, two_models, tmp_path))
