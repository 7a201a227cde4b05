"""Every way torch shards a model, on real ranks: a load from meta leaves what sharding the materialized model leaves.

The oracle is the same parallelization of a model that holds its weights: each rank's ``to_local()``, bit for bit. Neither
``distribute_tensor`` nor the offset helpers of torch are one, since they disagree with fully_shard on uneven strided shards.
"""

from __future__ import annotations

import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from math import prod
from pathlib import Path
from zlib import crc32

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import epload
import ranks
from epload.planning import schedule

Shape = tuple[int, ...]
Spec = dict[str, Shape | tuple[Shape, torch.dtype]]
"""Shapes by name; float32 where no dtype is given."""
NODES: dict[int, tuple[list[list[int]], ...]] = {
    1: ([[0]],),
    2: ([[0, 1]], [[0], [1]], [[1], [0]]),
    3: ([[0, 1, 2]], [[0], [1], [2]], [[0, 2], [1]]),
    4: ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]),
    7: ([[0, 1, 2], [3, 4], [5, 6]],),
}
MODES = (
    ("one", "two_level"),
    ("per_node", "two_level"),
    ("one", "flat"),
    ("partitioned", "two_level"),
    ("every", "two_level"),
    ("partitioned", "striped"),
    ("auto", "auto"),
)
BUCKET_BYTES = (200, 1000, 1 << 20)
WAYS_PER_CASE = 3
"""Each case is loaded in other ways; the first case in all."""


# ---- models ----


class Block(nn.Module):
    """Parameters and buffers of given shapes."""

    def __init__(self, parameters: Spec, buffers: Spec | None = None) -> None:
        super().__init__()
        for name, tensor in empty(parameters):
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=tensor.is_floating_point()))
        for name, tensor in empty(buffers or {}):
            self.register_buffer(name, tensor)


def empty(spec: Spec) -> Iterator[tuple[str, Tensor]]:
    for name, entry in spec.items():
        if entry and isinstance(entry[-1], torch.dtype):
            shape, dtype = entry
        else:
            shape, dtype = entry, torch.float32
        yield name, torch.empty(shape, dtype=dtype)


class Transposed(nn.Module):
    """A parameter whose elements do not lie in row-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, 2, 5).permute(2, 0, 1))


class Stack(nn.Module):
    """Layers below a root with parameters of its own, as fully_shard is usually applied."""

    def __init__(self, layers: Sequence[Spec], root: Spec | None = None, buffers: Spec | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(layer, buffers) for layer in layers)
        self.top = Block(root or {})


class Tied(nn.Module):
    """An embedding whose weight is also the head's."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 3)
        self.inner = nn.Linear(3, 5)
        self.head = nn.Linear(3, 7)
        self.head.weight = self.embed.weight


class Mlp(nn.Module):
    """What tensor parallelizm is for; sizes from the case, so that they may be uneven."""

    def __init__(self, vocabulary: int, hidden: int, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, width)
        self.down = nn.Linear(width, hidden)


class Experts(nn.Module):
    """A layer with a stack of experts and a dense part."""

    def __init__(self, experts: int, dense: Spec) -> None:
        super().__init__()
        self.experts = Block({"gate_up": (experts, 4, 6), "down": (experts, 6, 2)})
        self.dense = Block(dense, {"count": ((), torch.int64)})


# ---- parallelizations ----


where = torch.device("cpu")
"""The models' device, in this rank's process."""


@cache
def mesh(*axes: tuple[str, int]) -> DeviceMesh:
    return init_device_mesh(where.type, tuple(n for _, n in axes), mesh_dim_names=tuple(name for name, _ in axes))


def fsdp(model: nn.Module, axes: Sequence[tuple[str, int]]) -> None:
    """Two axes are HSDP."""
    on = mesh(*axes)
    for layer in getattr(model, "layers", ()):
        fully_shard(layer, mesh=on)
    fully_shard(model, mesh=on)


def offloaded_fsdp(model: nn.Module, size: int) -> None:
    fully_shard(model, mesh=mesh(("fsdp", size)), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp_on_dim_1(model: nn.Module, size: int) -> None:
    fully_shard(model, mesh=mesh(("fsdp", size)), shard_placement_fn=lambda parameter: Shard(1))


def fsdp_with_ignored(model: nn.Module, size: int) -> None:
    ignored = {parameter for name, parameter in model.named_parameters() if name in ("scalar", "kept")}
    fully_shard(model, mesh=mesh(("fsdp", size)), ignored_params=ignored)


def tp(model: nn.Module, on: DeviceMesh) -> None:
    plan = {
        "embed": RowwiseParallel(),
        "norm": SequenceParallel(),
        "up": ColwiseParallel(),
        "down": RowwiseParallel(),
    }
    parallelize_module(model, on, plan)


def pure_tp(model: nn.Module, size: int) -> None:
    tp(model, mesh(("tp", size)))


def tp_then_fsdp(model: nn.Module, axes: Sequence[tuple[str, int]]) -> None:
    """The last axis is TP's; one before it is FSDP's, two are HSDP's."""
    on = mesh(*axes)
    tp(model, on["tp"])
    fully_shard(model, mesh=on[tuple(name for name, _ in axes[:-1])])


def place(block: nn.Module, on: DeviceMesh, placements: Sequence[Placement]) -> None:
    """Makes every parameter of a block a DTensor."""
    for name, parameter in list(block.named_parameters(recurse=False)):
        made = distribute_tensor(parameter.detach(), on, placements, src_data_rank=None)
        block.register_parameter(name, nn.Parameter(made, requires_grad=parameter.requires_grad))


def placed(model: nn.Module, axes: Sequence[tuple[str, int]], placements: Sequence[Placement]) -> None:
    place(model, mesh(*axes), placements)


def ep_then_fsdp(model: nn.Module, sizes: tuple[int, int], dim: int) -> None:
    """Experts lie on (fsdp, ep) and FSDP shards ``dim`` of theirs; the dense part is sharded over all ranks."""
    assert isinstance(model, Experts)
    on = mesh(("fsdp", sizes[0]), ("ep", sizes[1]))
    place(model.experts, on["ep"], [Shard(0)])
    fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda parameter: Shard(dim))
    fully_shard(model.dense, mesh=mesh(("all", prod(sizes))))


def ep_and_tp_then_fsdp(model: nn.Module, sizes: tuple[int, int, int], tp_placement: Placement) -> None:
    on = mesh(("fsdp", sizes[0]), ("ep", sizes[1]), ("tp", sizes[2]))
    place(model, on["ep", "tp"], [Shard(0), tp_placement])
    fully_shard(model, mesh=on["fsdp"])


def fused_tp_then_fsdp(model: nn.Module, sizes: tuple[int, int], dim: int) -> None:
    """TP keeps a piece of each of the parts of a fused projection; then FSDP cuts ``dim`` 0."""
    on = mesh(("fsdp", sizes[0]), ("tp", sizes[1]))
    place(model, on["tp"], [_StridedShard(dim, split_factor=2)])
    fully_shard(model, mesh=on["fsdp"])


def sharded_buffers(model: nn.Module, size: int) -> None:
    for name, buffer in list(model.named_buffers()):
        placement = Shard(0) if buffer.ndim else Replicate()
        made = distribute_tensor(buffer, mesh(("all", size)), [placement], src_data_rank=None)
        model.register_buffer(name, made)


def nothing(model: nn.Module) -> None:
    """Plain tensors: the whole model on every rank."""


def partly_materialized(model: nn.Module) -> None:
    """One tensor of a model on meta has storage already."""
    a = model.get_parameter("a")
    if a.is_meta:
        model.register_parameter("a", nn.Parameter(torch.full_like(a, -1.0, device=where)))


# ---- cases ----


@dataclass(frozen=True)
class Case:
    """A model and how it is parallelized."""

    name: str
    model: Callable[[], nn.Module]
    """Not yet parallelized, on the default device."""
    parallelize: Callable[[nn.Module], None]
    absent: tuple[str, ...] = ()
    """Names of the model that the checkpoint does not have, since another name of the same parameter is in it."""


BF16, F64, FP8 = torch.bfloat16, torch.float64, torch.float8_e4m3fn
UNEVEN: list[Spec] = [{"w": (5, 7), "b": (7,), "one": (1,)}, {"w": (7, 3), "b": (1, 4), "tall": (9, 1, 2)}]
MIXED_BUFFERS: Spec = {
    "step": ((), torch.int64),
    "mask": ((3, 5), torch.bool),
    "void": (0, 4),
    "code": ((11,), torch.uint8),
    "scale": ((3,), FP8),
    "mean": ((5,), F64),
}
MIXED_PARAMETERS: Spec = {
    "a": (5, 3),
    "b": ((7, 3), BF16),
    "c": ((1,), F64),
    "d": ((6, 5), FP8),
    "e": ((9,), torch.float16),
    "none": (0, 3),
    "flat": (3, 0),
}


def runs_with_fsdp_on_dim_1(experts: int, fsdp_size: int, ep_size: int) -> bool:
    """On a dim other than 0, torch wants even sizes, and cannot initialize FSDP on a rank that has no expert at all."""
    each = -(-experts // ep_size)
    return 4 % fsdp_size == 0 == 6 % fsdp_size and each * (ep_size - 1) < experts


def cases(world: int) -> list[Case]:
    """The first one has every dtype."""
    everything = partial(Stack, [MIXED_PARAMETERS], {"w": (2, 2)}, MIXED_BUFFERS)
    stack = partial(Stack, UNEVEN, {"w": (5,)}, {"seen": ((), torch.int64)})
    plain = partial(Block, {**MIXED_PARAMETERS, "zero_d": ()}, MIXED_BUFFERS)
    found = [
        Case("fsdp, mixed dtypes", everything, partial(fsdp, axes=[("fsdp", world)])),
        Case("fsdp, uneven", stack, partial(fsdp, axes=[("fsdp", world)])),
        Case("fsdp, offloaded", stack, partial(offloaded_fsdp, size=world)),
        Case(
            "fsdp on dim 1",
            partial(Block, {"w": (3, 2 * world), "v": (2, world, 3)}),
            partial(fsdp_on_dim_1, size=world),
        ),
        Case(
            "fsdp, some parameters plain",
            partial(Block, {"w": (5, 2), "scalar": (), "kept": (3, 2)}),
            partial(fsdp_with_ignored, size=world),
        ),
        Case("fsdp, tied", Tied, partial(fsdp, axes=[("fsdp", world)])),
        Case("fsdp, tied, one name stored", Tied, partial(fsdp, axes=[("fsdp", world)]), ("head.weight",)),
        Case("plain, tied, other name stored", Tied, nothing, ("embed.weight",)),
        Case("plain", plain, nothing),
        Case("plain, transposed", Transposed, nothing),
        Case("sharded buffers", plain, partial(sharded_buffers, size=world)),
        Case("plain, partly materialized", partial(Block, {"a": (4, 3), "b": (5,)}), partly_materialized),
        Case("tp, even", partial(Mlp, 2 * world, 3 * world, 4 * world), partial(pure_tp, size=world)),
        Case("tp, uneven", partial(Mlp, 7, 5, 6), partial(pure_tp, size=world)),
        Case(
            "replicated dtensors",
            partial(Block, {"w": (5, 2), "zero_d": (), "none": (0,), "b": ((3,), BF16)}),
            partial(placed, axes=[("all", world)], placements=[Replicate()]),
        ),
    ]
    for dim, parts, size in ((0, 2, 7), (0, 3, 12), (1, 3, 7), (1, 2, 12)):
        spec: Spec = {"w": (size, 5) if dim == 0 else (5, size), "v": (parts * world, parts * world, 2)}
        found.append(
            Case(
                f"lone strided, dim {dim} of {size} in {parts} parts",
                partial(Block, spec),
                partial(placed, axes=[("tp", world)], placements=[_StridedShard(dim, split_factor=parts)]),
            )
        )
    for left in [n for n in range(1, world + 1) if world % n == 0]:
        sizes = (left, world // left)
        shape = f"{sizes[0]} x {sizes[1]}"
        square = min(sizes) > 1  # else one axis has nothing to cut, and one size of each kind will do
        found += [
            Case(f"hsdp {shape}", stack, partial(fsdp, axes=[("replicate", sizes[0]), ("shard", sizes[1])])),
            *(
                Case(
                    f"fsdp x tp {shape}, {vocabulary} {hidden} {width}",
                    partial(Mlp, vocabulary, hidden, width),
                    partial(tp_then_fsdp, axes=[("dp", sizes[0]), ("tp", sizes[1])]),
                )
                for vocabulary, hidden, width in ((7, 5, 3), (5, 6, 7), (8, 4, 12))[: 3 if square else 1]
            ),
            *(
                Case(
                    f"ep x fsdp {shape}, {experts} experts, dim {dim}",
                    partial(Experts, experts, {"w": (5, 3), "b": (7,)}),
                    partial(ep_then_fsdp, sizes=sizes, dim=dim),
                )
                for experts, dim in product((7, 4, 5, 6) if square else (7,), (0, 1))
                if dim == 0 or runs_with_fsdp_on_dim_1(experts, *sizes)
            ),
            *(
                Case(
                    f"fsdp x fused tp {shape}, dim {dim} of {size}",
                    partial(Block, {"w": (size, 5) if dim == 0 else (5, size), "v": (size, size)}),
                    partial(fused_tp_then_fsdp, sizes=sizes, dim=dim),
                )
                for dim, size in product((0, 1), (8, 11) if square else (11,))
            ),
            *(
                Case(
                    f"shards {list(map(str, placements))} on {shape}",
                    partial(Block, {"w": (7, 5), "v": (3, 2, 2)}),
                    partial(placed, axes=[("left", sizes[0]), ("right", sizes[1])], placements=placements),
                )
                for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(-1), Replicate()])
            ),
        ]
    if world == 4:
        for three in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
            shape = " x ".join(map(str, three))
            found += [
                Case(
                    f"hsdp x tp {shape}",
                    partial(Mlp, 7, 6, 5),
                    partial(tp_then_fsdp, axes=[("replicate", three[0]), ("shard", three[1]), ("tp", three[2])]),
                ),
                *(
                    Case(
                        f"fsdp x ep x tp {shape}, {placement}",
                        partial(Block, {"w": (7, 5, 3), "v": (5, 8)}),
                        partial(ep_and_tp_then_fsdp, sizes=three, tp_placement=placement),
                    )
                    for placement in (
                        Shard(0),
                        Shard(1),
                        _StridedShard(1, split_factor=2),
                        _StridedShard(0, split_factor=2),
                    )
                ),
            ]
    return found


# ---- values ----


def bits(name: str, shape: Shape, dtype: torch.dtype, salt: int = 0) -> Tensor:
    """Elements that differ within a tensor and from those of other names, as far as the dtype has bits for it."""
    index = torch.arange(prod(shape)) + (crc32(name.encode()) + salt) % 2**30
    if dtype == torch.bool:
        return (index * 5 // 3 % 2).to(dtype).reshape(shape)
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    return index.to(integer).view(dtype).reshape(shape)


def full_values(model: nn.Module, salt: int = 0) -> dict[str, Tensor]:
    """By name, tied names alike."""
    first: dict[int, str] = {}
    return {
        name: bits(first.setdefault(id(tensor), name), tuple(tensor.shape), tensor.dtype, salt)
        for name, tensor in model.state_dict(keep_vars=True).items()
    }


def meta_model(case: Case) -> nn.Module:
    with torch.device("meta"):
        return case.model()


def stored_values(case: Case, salt: int = 0) -> dict[str, Tensor]:
    return {name: t for name, t in full_values(meta_model(case), salt).items() if name not in case.absent}


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def local_of(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ---- what a rank does ----


@dataclass(frozen=True)
class Way:
    """One way to run a load."""

    nodes: list[list[int]]
    src: int
    readers: str
    algorithm: str
    bucket_bytes: int
    stored: str
    """``"file"`` or ``"dict"``."""
    twice: bool
    """Whether other values are loaded first, through the same loader into the same model."""


def ways(world: int) -> list[Way]:
    found: list[Way] = []
    for nodes, src, (readers, algorithm) in product(NODES[world], sorted({0, world // 2, world - 1}), MODES):
        number = len(found)
        bucket_bytes = BUCKET_BYTES[number % len(BUCKET_BYTES)]
        stored = ("file", "dict")[number % 2]
        found.append(Way(nodes, src, readers, algorithm, bucket_bytes, stored, number % 5 == 0))
    return found


def ways_of_case(number: int, world: int, count: int) -> list[Way]:
    found = ways(world)
    return [found[(number + turn * len(found) // count) % len(found)] for turn in range(count)] if number else found


def check_cases(
    rank: int, world: int, folder: str, device: str = "cpu", ways_per_case: int = WAYS_PER_CASE
) -> list[str]:
    """What is wrong, a line a tensor."""
    global where
    where = torch.device(device)
    schedule.MIN_PART_BYTES = 100  # in this rank's process, so that readers share waves of small buckets too
    failures: list[str] = []
    topologies = {str(nodes): epload.Topology.from_nodes(nodes) for nodes in NODES[world]}
    for number, case in enumerate(cases(world)):
        what = case.name
        try:
            expected = oracle(case)
            for way in ways_of_case(number, world, ways_per_case):
                what = f"{case.name}, {way}"
                loaded = load(case, way, topologies[str(way.nodes)], rank, checkpoint_path(folder, number))
                failures += [f"rank {rank}: {what}: {wrong}" for wrong in differences(expected, loaded)]
        except Exception:
            failures.append(f"rank {rank}: {what}: {traceback.format_exc(limit=-3)}")
    return failures


def oracle(case: Case) -> nn.Module:
    with where:
        model = case.model()
    values = full_values(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(values[name])
    case.parallelize(model)
    return model


@cache
def stream() -> torch.Stream | None:
    """On a device it also says where plain tensors on meta go."""
    return None if where.type == "cpu" else torch.Stream(where)


def load(case: Case, way: Way, topology: epload.Topology, rank: int, path: Path) -> nn.Module:
    model = meta_model(case)
    case.parallelize(model)
    loader = epload.HierarchicalLoader(
        topology,
        src=way.src,
        readers=way.readers,
        algorithm=way.algorithm,
        bucket_bytes=way.bucket_bytes,
        timeout=60,
        stream=stream(),
        progress=False,
    )
    all_read = way.readers in ("partitioned", "every")
    reads = rank in (topology.leaders(way.src) if way.readers == "per_node" else (way.src,)) or all_read
    if way.twice:
        loader.load(model, stored_values(case, salt=77) if reads else None)
    if way.stored == "file":
        report = loader.load(model, path)
    else:
        report = loader.load(model, stored_values(case) if reads else None)
    assert not report.missing_keys, report.missing_keys
    assert not report.unexpected_keys, report.unexpected_keys
    return model


def differences(expected: nn.Module, loaded: nn.Module) -> Iterator[str]:
    """Where two models of one rank are not alike: names, ties, placements, local shapes, dtypes, bits."""
    ours, theirs = expected.state_dict(keep_vars=True), loaded.state_dict(keep_vars=True)
    if list(ours) != list(theirs):
        yield f"expected names {list(ours)}, got {list(theirs)}"
        return
    if ties(ours) != ties(theirs):
        yield f"expected ties {ties(ours)}, got {ties(theirs)}"
    for name, a in ours.items():
        b = theirs[name]
        for attribute in ("shape", "dtype", "requires_grad", "placements", "device"):
            if getattr(a, attribute, None) != getattr(b, attribute, None):
                wanted, got = getattr(a, attribute, None), getattr(b, attribute, None)
                yield f"{name}: expected {attribute} {wanted}, got {got}"
        local_a, local_b = local_of(a), local_of(b)
        where = f"{name} {list(a.shape)} {getattr(a, 'placements', 'plain')}"
        if local_a.shape != local_b.shape or local_a.dtype != local_b.dtype or local_b.is_meta:
            yield (
                f"{where}: expected a local {local_a.dtype} {list(local_a.shape)}, "
                f"got {local_b.dtype} {list(local_b.shape)} on {local_b.device}"
            )
        elif not torch.equal(as_bytes(local_a), as_bytes(local_b)):
            count = int((as_bytes(local_a) != as_bytes(local_b)).sum())
            yield f"{where}: {count} of {local_a.nbytes} bytes of the local {list(local_a.shape)} differ"


def ties(state: dict[str, Tensor]) -> list[list[str]]:
    names = defaultdict(list)
    for name, tensor in state.items():
        names[id(tensor)].append(name)
    return [group for group in names.values() if len(group) > 1]


def checkpoint_path(folder: str, number: int) -> Path:
    return Path(folder) / f"case-{number}.safetensors"


@pytest.mark.parametrize("world", list(NODES))
def test_a_load_equals_sharding_the_loaded_model(world: int, tmp_path: Path) -> None:
    none_fails(ranks.run(world, check_cases, world, stored(tmp_path, world)))


def stored(folder: Path, world: int) -> str:
    """The folder, with a file for each case."""
    found = cases(world)
    assert len({case.name for case in found}) == len(found)
    for number, case in enumerate(found):
        save_file(stored_values(case), checkpoint_path(str(folder), number))
    return str(folder)


def none_fails(of_ranks: Sequence[Sequence[str]]) -> None:
    failures = [line for lines in of_ranks for line in lines]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])
