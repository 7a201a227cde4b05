"""The models and parallelizations that a load is tested with, for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, product
from math import prod

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from support.models import (
    Block,
    Experts,
    Mlp,
    Spec,
    Stack,
    Tied,
    device,
    fsdp,
    mesh,
    nothing,
    place,
    placed,
    tp,
    tp_then_fsdp,
)


@dataclass(frozen=True)
class Case:
    """A model and how it is parallelized."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the model on the default device, not yet parallelized."""
    parallelize: Callable[[nn.Module], None]
    absent: tuple[str, ...] = ()
    """Names of the model that the checkpoint does not have, since another name of the same parameter is in it."""


BF16, F64, FP8 = torch.bfloat16, torch.float64, torch.float8_e4m3fn
UNEVEN: list[Spec] = [{"w": (5, 7), "b": (7,), "one": (1,)}, {"w": (7, 3), "b": (1, 4), "tall": (9, 1, 2)}]
MIXED_BUFFERS: Spec = {
    "step": ((), torch.int64), "mask": ((3, 5), torch.bool), "void": (0, 4), "code": ((11,), torch.uint8), "scale": ((3,), FP8),
    "mean": ((5,), F64),
}  # fmt: skip
MIXED_PARAMETERS: Spec = {
    "a": (5, 3), "b": ((7, 3), BF16), "c": ((1,), F64), "d": ((6, 5), FP8), "e": ((9,), torch.float16), "none": (0, 3),
    "flat": (3, 0),
}  # fmt: skip


class Transposed(nn.Module):
    """A parameter whose elements do not lie in row-major order."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(3, 2, 5).permute(2, 0, 1))


def offloaded_fsdp(model: nn.Module, size: int) -> None:
    fully_shard(model, mesh=mesh(("fsdp", size)), offload_policy=CPUOffloadPolicy(pin_memory=False))


def fsdp_on_dim_1(model: nn.Module, size: int) -> None:
    fully_shard(model, mesh=mesh(("fsdp", size)), shard_placement_fn=lambda parameter: Shard(1))


def fsdp_with_ignored(model: nn.Module, size: int) -> None:
    ignored = {parameter for name, parameter in model.named_parameters() if name in ("scalar", "kept")}
    fully_shard(model, mesh=mesh(("fsdp", size)), ignored_params=ignored)


def pure_tp(model: nn.Module, size: int) -> None:
    tp(model, mesh(("tp", size)))


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


def partly_materialized(model: nn.Module) -> None:
    """One tensor of a model on meta has storage already."""
    a = model.get_parameter("a")
    if a.is_meta:
        model.register_parameter("a", nn.Parameter(torch.full_like(a, -1.0, device=device())))


def of_one_axis(world: int) -> Iterator[Case]:
    """Yields cases of models that are cut once or not at all; the first one has every dtype."""
    stack = partial(Stack, UNEVEN, {"w": (5,)}, {"seen": ((), torch.int64)})
    plain = partial(Block, {**MIXED_PARAMETERS, "zero_d": ()}, MIXED_BUFFERS)
    sharded = partial(fsdp, axes=[("fsdp", world)])
    yield Case("fsdp, mixed dtypes", partial(Stack, [MIXED_PARAMETERS], {"w": (2, 2)}, MIXED_BUFFERS), sharded)
    yield Case("fsdp, uneven", stack, sharded)
    yield Case("fsdp, offloaded", stack, partial(offloaded_fsdp, size=world))
    on_dim_1 = partial(Block, {"w": (3, 2 * world), "v": (2, world, 3)})
    yield Case("fsdp on dim 1", on_dim_1, partial(fsdp_on_dim_1, size=world))
    some_plain = partial(Block, {"w": (5, 2), "scalar": (), "kept": (3, 2)})
    yield Case("fsdp, some parameters plain", some_plain, partial(fsdp_with_ignored, size=world))
    yield Case("fsdp, tied", Tied, sharded)
    yield Case("fsdp, tied, one name stored", Tied, sharded, ("head.weight",))
    yield Case("plain, tied, other name stored", Tied, nothing, ("embed.weight",))
    yield Case("plain", plain, nothing)
    yield Case("plain, transposed", Transposed, nothing)
    yield Case("sharded buffers", plain, partial(sharded_buffers, size=world))
    yield Case("plain, partly materialized", partial(Block, {"a": (4, 3), "b": (5,)}), partly_materialized)
    yield Case("tp, even", partial(Mlp, 2 * world, 3 * world, 4 * world), partial(pure_tp, size=world))
    yield Case("tp, uneven", partial(Mlp, 7, 5, 6), partial(pure_tp, size=world))
    replicated = partial(Block, {"w": (5, 2), "zero_d": (), "none": (0,), "b": ((3,), BF16)})
    yield Case("replicated dtensors", replicated, partial(placed, axes=[("all", world)], placements=[Replicate()]))
    for dim, parts, size in ((0, 2, 7), (1, 3, 7), (1, 2, 12)):
        spec: Spec = {"w": (size, 5) if dim == 0 else (5, size), "v": (parts * world, parts * world, 2)}
        strided = partial(placed, axes=[("tp", world)], placements=[_StridedShard(dim, split_factor=parts)])
        yield Case(f"lone strided, dim {dim} of {size} in {parts} parts", partial(Block, spec), strided)


def of_two_axes(left: int, right: int) -> Iterator[Case]:
    sizes, shape = (left, right), f"{left} x {right}"
    square = min(sizes) > 1  # else one axis has nothing to cut, and one size of each kind will do
    stack = partial(Stack, UNEVEN, {"w": (5,)}, {"seen": ((), torch.int64)})
    yield Case(f"hsdp {shape}", stack, partial(fsdp, axes=[("replicate", left), ("shard", right)]))
    for widths in ((7, 5, 3), (8, 4, 12))[: 1 + square]:
        parallelize = partial(tp_then_fsdp, axes=[("dp", left), ("tp", right)])
        yield Case(f"fsdp x tp {shape}, {widths}", partial(Mlp, *widths), parallelize)
    for experts, dim in product((7, 4, 5) if square else (7,), (0, 1)):
        # On a dim other than 0, torch wants even sizes, and cannot initialize FSDP on a rank that has no expert at all.
        even = 4 % left == 0 == 6 % left and -(-experts // right) * (right - 1) < experts
        if dim == 0 or even:
            model = partial(Experts, experts, {"w": (5, 3), "b": (7,)})
            yield Case(f"ep x fsdp {shape}, {experts} experts, dim {dim}", model, partial(ep_then_fsdp, sizes=sizes, dim=dim))
    for dim, size in product((0, 1), (8, 11) if square else (11,)):
        fused = partial(Block, {"w": (size, 5) if dim == 0 else (5, size), "v": (size, size)})
        yield Case(f"fsdp x fused tp {shape}, dim {dim} of {size}", fused, partial(fused_tp_then_fsdp, sizes=sizes, dim=dim))
    for placements in ([Shard(0), Shard(0)], [Shard(1), Shard(0)], [Shard(-1), Replicate()]):
        parallelize = partial(placed, axes=[("left", left), ("right", right)], placements=placements)
        model = partial(Block, {"w": (7, 5), "v": (3, 2, 2)})
        yield Case(f"shards {list(map(str, placements))} on {shape}", model, parallelize)


def of_three_axes(*sizes: int) -> Iterator[Case]:
    shape = " x ".join(map(str, sizes))
    axes = list(zip(("replicate", "shard", "tp"), sizes, strict=True))
    yield Case(f"hsdp x tp {shape}", partial(Mlp, 7, 6, 5), partial(tp_then_fsdp, axes=axes))
    for placement in (Shard(0), Shard(1), _StridedShard(1, split_factor=2), _StridedShard(0, split_factor=2)):
        model = partial(Block, {"w": (7, 5, 3), "v": (5, 8)})
        parallelize = partial(ep_and_tp_then_fsdp, sizes=sizes, tp_placement=placement)
        yield Case(f"fsdp x ep x tp {shape}, {placement}", model, parallelize)


def cases(world: int) -> list[Case]:
    two = [of_two_axes(left, world // left) for left in range(1, world + 1) if world % left == 0]
    three = [of_three_axes(*sizes) for sizes in ((1, 2, 2), (2, 1, 2), (2, 2, 1)) if world == 4]
    return [*of_one_axis(world), *chain(*two, *three)]
