"""The models and parallelizations that a load is tested with, for each number of ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from support.models import (
    Block,
    Experts,
    Mlp,
    Spec,
    Stack,
    Tied,
    Transposed,
    ep_and_tp_then_fsdp,
    ep_then_fsdp,
    fsdp,
    fsdp_on_dim_1,
    fsdp_with_ignored,
    fused_tp_then_fsdp,
    nothing,
    offloaded_fsdp,
    partly_materialized,
    placed,
    pure_tp,
    sharded_buffers,
    tp_then_fsdp,
)


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
