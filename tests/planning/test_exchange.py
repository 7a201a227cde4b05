"""Plans of syncs between two jobs: carried out in one process, against the full tensors."""

from __future__ import annotations

import random
from collections.abc import Collection
from itertools import product
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload import Manifest
from epload.core.placement import Layout, Sharded, box_slices, owned_intervals, owned_regions, row_major_strides
from epload.core.views import Assembly, Shape, View, reshape, transpose
from epload.errors import ModelMismatch
from epload.native import ops
from epload.planning import exchange, schedule
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings, Share, full_holdings, local_views
from epload.planning.pulls import Strided
from epload.planning.streams import Members


def manifest_of(names: tuple[str, ...], shapes: tuple[Shape, ...], dtype: torch.dtype) -> Manifest:
    return Manifest(names, shapes, (dtype,) * len(names), "the trainer")


def holdings_of(
    layouts: list[Layout], coordinate: Shape, tensors: Manifest, dtype: torch.dtype, flipped: Collection[int] = ()
) -> Holdings:
    """``flipped``: tensors whose local ones have their dims in reverse, as the layouts say."""
    shares = []
    for i, (shape, layout) in enumerate(zip(tensors.shapes, layouts, strict=True)):
        step = -1 if i in flipped else 1
        view = View((0,) * len(shape), shape[::step], 0, row_major_strides(shape)[::step])
        shares.append(Share(shape, tuple(local_views(view, owned_regions(layout, coordinate))), dtype))
    return Holdings(torch.arange(len(shares)), tuple(shares), [(i,) for i in range(len(shares))])


def local_of(full: Tensor, layout: Layout, coordinate: Shape) -> Tensor:
    """Returns a local tensor, by index arithmetic alone."""
    for dim in range(len(layout.shape)):
        intervals = owned_intervals(layout, dim, coordinate)
        index = torch.tensor([i for start, size in intervals for i in range(start, start + size)], dtype=torch.int64)
        full = full.index_select(dim, index)
    return full.clone()


def random_layouts(chance: random.Random, shapes: tuple[Shape, ...], mesh: Shape) -> list[Layout]:
    return [
        Layout(
            shape,
            mesh,
            tuple(
                Sharded(chance.randrange(len(shape)), chance.choice((1, 1, 1, 2)))
                if shape and chance.random() < 0.7
                else None
                for _ in mesh
            ),
        )
        for shape in shapes
    ]


def random_nodes(chance: random.Random, ranks: range) -> tuple[tuple[int, ...], ...]:
    left, nodes = list(ranks), []
    while left:
        count = chance.randint(1, len(left))
        nodes.append(tuple(left[:count]))
        left = left[count:]
    return tuple(nodes)


def in_allocations(chance: random.Random, tensors: list[Tensor]) -> tuple[list[Tensor], Tensor, list[Strided], Tensor]:
    """Copies of tensors in two allocations, their dims in any order in memory; and what a sender says of where they lie."""
    allocations, at = [torch.full((1 << 20,), 0x5A, dtype=torch.uint8) for _ in range(2)], [0, 0]
    layouts: dict[Strided, int] = {}
    layout, places = [], []
    for tensor in tensors:
        number = chance.randrange(2)
        order = chance.sample(range(tensor.ndim), tensor.ndim)
        at[number] += tensor.element_size() * chance.randrange(5) + -at[number] % tensor.element_size()
        memory = allocations[number][at[number] :][: tensor.nbytes].view(tensor.dtype)
        placed = memory.reshape([tensor.shape[dim] for dim in order])
        placed = placed.permute([order.index(dim) for dim in range(tensor.ndim)])
        placed.copy_(tensor)
        layout.append(layouts.setdefault((tensor.dtype, placed.shape, placed.stride()), len(layouts)))
        places.append([number if tensor.numel() else -1, at[number]])
        at[number] += tensor.nbytes
    return allocations, torch.tensor(layout), list(layouts), torch.tensor(places)


def check_case(seed: int) -> None:
    """A receiver has what came in buckets, and what it has copied out of the memory of senders."""
    chance = random.Random(seed)
    count = chance.randint(1, 9)
    shapes = tuple(
        tuple(chance.choice((1, 2, 3, 5, 7, 8, 16, 33)) for _ in range(chance.randint(0, 3))) for _ in range(count)
    )
    dtypes = torch.float32, torch.bfloat16
    sent, kept = chance.choice(dtypes), chance.choice(dtypes)
    tensors = manifest_of(tuple(f"t{i}" for i in range(count)), shapes, sent)
    meshes = [chance.choice(((1,), (2,), (3,), (2, 2), (4,), (3, 2))) for _ in range(2)]
    flipped = [{i for i in range(count) if chance.random() < 0.3} for _ in meshes]
    theirs, ours = (
        random_layouts(chance, tuple(shape[:: -1 if i in some else 1] for i, shape in enumerate(shapes)), mesh)
        for mesh, some in zip(meshes, flipped, strict=True)
    )
    senders, receivers = (list(product(*map(range, mesh))) for mesh in meshes)
    first = len(senders)
    full = [
        (torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000.0 * i).to(sent) for i, shape in enumerate(shapes)
    ]
    of_theirs, of_ours = (
        [tensor.permute(tuple(range(tensor.ndim))[:: -1 if i in some else 1]) for i, tensor in enumerate(full)]
        for some in flipped
    )
    all_holdings = [holdings_of(theirs, at, tensors, sent, flipped[0]) for at in senders]
    all_holdings += [holdings_of(ours, at, tensors, kept, flipped[1]) for at in receivers]
    members = Members(random_nodes(chance, range(first)), random_nodes(chance, range(first, first + len(receivers))))
    reach = {
        node: tuple(rank for rank in range(first) if chance.random() < 0.6)
        for node in range(len(members.nodes))
        if chance.random() < 0.6
    }
    of_ranks = {rank: Holdings.decode(*holdings.encode()) for rank, holdings in enumerate(all_holdings)}
    with (
        mock.patch.object(schedule, "MIN_WAVE_BYTES", 128),
        mock.patch.object(exchange, "MIN_BUCKET_BYTES", chance.choice((64, 512, 4 << 20))),
        mock.patch.object(exchange, "MAX_WAVES", chance.choice((2, 2048))),
    ):
        wave_bytes = chance.choice((256, 1024, 1 << 20))
        plans = [
            plan_exchange(tensors, members, of_ranks, rank, holdings, wave_bytes, reach=reach)
            for rank, holdings in enumerate(all_holdings)
        ]
    assert len({plan.fingerprint for plan in plans}) == 1
    on_the_way, memory = {}, []
    for rank, at in enumerate(senders):
        local = [local_of(tensor, layout, at) for tensor, layout in zip(of_theirs, theirs, strict=True)]
        memory.append(in_allocations(chance, local))
        for number, bucket in enumerate(plans[rank].buckets):
            buffer = torch.zeros(bucket.nbytes, dtype=torch.uint8)
            ops.pack(buffer, [local[target] for target in bucket.targets], bucket.copies.rows)
            assert on_the_way.setdefault(plans[rank].identity(number), buffer) is buffer
    for node in members.nodes:
        received = {tuple(map(plans[rank].identity, range(len(plans[rank].buckets)))) for rank in node}
        assert len(received) == 1, "ranks of a node do not expect the same"
        for rank in node:
            at = receivers[rank - first]
            expected = [local_of(tensor.to(kept), layout, at) for tensor, layout in zip(of_ours, ours, strict=True)]
            filled = [torch.full_like(tensor, -7) for tensor in expected]
            for number, bucket in enumerate(plans[rank].buckets):
                ops.unpack(
                    on_the_way[plans[rank].identity(number)],
                    [filled[target] for target in bucket.targets],
                    bucket.copies.rows,
                )
            pulls = plans[rank].pulls
            assert pulls is None or {*pulls.owners} <= {*reach[members.nodes.index(node)]}
            for owner in pulls.owners if pulls is not None else []:
                allocations, *places = memory[owner]
                shared = of_ranks[owner].with_targets(all_holdings[owner].encode_targets())
                copies, local = pulls.copies(owner, shared, places[0], places[1])
                allocation, begin = places[2][local].unbind(1)
                copies.offset.add_(begin)
                for number in range(2):
                    ops.unpack(allocations[number], filled, copies.rows[allocation == number])
            for i, (a, b) in enumerate(zip(filled, expected, strict=True)):
                assert torch.equal(a, b), f"rank {rank}, tensor {i}"
    assert any(plan.lent for plan in plans[:first]) == any(plan.pulls is not None for plan in plans[first:])


@pytest.mark.parametrize("seeds", [range(i, i + 40) for i in range(0, 120, 40)], ids=str)
def test_every_rank_gets_its_elements(seeds: range) -> None:
    for seed in seeds:
        try:
            check_case(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}") from error


def test_replicas_share_the_sending() -> None:
    """Tensors that several ranks have are sent once, in equal parts."""
    tensors = manifest_of(("large", "small"), ((64, 4096), (3,)), torch.float32)
    holdings = full_holdings(tensors.shapes, tensors.dtypes)
    members = Members(((0, 1), (2, 3)), ((4,),))
    of_ranks = dict.fromkeys(range(5), holdings)
    sent = [plan_exchange(tensors, members, of_ranks, rank, holdings, 64 << 20).nbytes for rank in range(4)]
    assert max(sent) - min(sent) < 1024
    assert sum(sent) == pytest.approx(64 * 4096 * 4, rel=0.01)


def test_what_nobody_has_is_named() -> None:
    tensors = manifest_of(("w",), ((8, 2),), torch.float32)
    sender = holdings_of([Layout((8, 2), (2,), (Sharded(0),))], (0,), tensors, torch.float32)
    receiver = full_holdings(tensors.shapes, tensors.dtypes)
    of_ranks = {0: sender, 1: receiver}
    with pytest.raises(ModelMismatch, match=r"no sender has w of the trainer from \[4, 0\] on"):
        plan_exchange(tensors, Members(((0,),), ((1,),)), of_ranks, 1, receiver, 64 << 20)


def test_dtypes_that_do_not_convert_are_named() -> None:
    tensors = manifest_of(("w",), ((8, 2),), torch.float8_e4m3fn)
    sender, receiver = (full_holdings(tensors.shapes, (dtype,)) for dtype in (torch.float8_e4m3fn, torch.bfloat16))
    of_ranks = {0: sender, 1: receiver}
    with pytest.raises(ModelMismatch, match="w is float8_e4m3fn in the trainer"):
        plan_exchange(tensors, Members(((0,),), ((1,),)), of_ranks, 0, sender, 64 << 20)


@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4), (24,), (1, 24), (4, 1, 6)])
def test_parts_of_reshaped_views(shape: Shape) -> None:
    """Each element of a reshaped and transposed tensor is in one part, where the view has it."""
    source = torch.arange(24).reshape(2, 12)
    assembly = reshape(Assembly.of(0, (2, 12)), shape)
    expected = source.reshape(shape)
    if len(shape) > 1:
        assembly, expected = transpose(assembly, 0, 1), expected.transpose(0, 1)
    found = torch.full(assembly.shape, -1)
    for _, view in assembly.parts:
        layout = Layout(assembly.shape, (), ())
        share = Share((2, 12), tuple(local_views(view, owned_regions(layout, ()))), torch.int64)
        for part in Holdings(torch.tensor([0]), (share,), [(0,)]).parts[0]:
            box = source[box_slices(*part.box)]
            local_start, size = part.within(*part.box)
            order = [dim for dim in part.dims if dim >= 0]
            rest = [dim for dim in range(2) if dim not in order]
            assert all(box.shape[dim] == 1 for dim in rest)
            found[box_slices(local_start, size)] = box.permute(*order, *rest).reshape(size)
    assert torch.equal(found, expected)
