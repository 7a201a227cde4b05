"""Plans of syncs, carried out in one process against the full tensors; the fingerprint of plans; the rule of ``readers=auto``."""

from __future__ import annotations

import random
import zlib
from collections.abc import Collection
from dataclasses import replace
from itertools import combinations, product
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload import Manifest, Mapping
from epload.core import dtypes, placement
from epload.core.placement import Layout, Placement, Sharded, box_slices, owned_intervals, owned_regions
from epload.core.views import Assembly, Shape, View, reshape, transpose
from epload.errors import ModelMismatch
from epload.mapping import Convert, Reshape, Transpose
from epload.mapping.place import place
from epload.model.targets import Targets
from epload.native import ops
from epload.planning import exchange, schedule
from epload.planning.choose import MAX_FILE_READS, SMALL_BYTES, choose_readers
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import Holdings, Share, copies_of_box, full_holdings, holdings_of_targets, local_views
from epload.planning.plan import make_plan
from epload.planning.pulls import Strided
from epload.planning.streams import Members
from support.shards import Coordinate


def holdings_of(layouts: Any, at: Shape, tensors: Manifest, dtype: Any, flipped: Collection[int] = ()) -> Holdings:
    """``flipped``: tensors whose local ones have their dims in reverse, as the layouts say."""
    shares = []
    for i, (shape, layout) in enumerate(zip(tensors.shapes, layouts, strict=True)):
        step = -1 if i in flipped else 1
        view = View((0,) * len(shape), shape[::step], 0, placement.row_major_strides(shape)[::step])
        shares.append(Share(shape, tuple(local_views(view, owned_regions(layout, at))), dtype))
    return Holdings(torch.arange(len(shares)), tuple(shares), [(i,) for i in range(len(shares))])


def test_a_digest_does_not_depend_on_the_zlib_of_a_process() -> None:
    given, compress = full_holdings([(500, 3)] * 90, [torch.float32] * 90), zlib.compress
    other, encoded = replace(given), given.encode()
    with mock.patch.object(zlib, "compress", lambda data, level: compress(data, 0)):
        assert other.encode() != encoded
        assert other.digest == given.digest


def local_of(full: Tensor, layout: Layout, coordinate: Shape) -> Tensor:
    """Returns a local tensor, by index arithmetic alone."""
    for dim in range(len(layout.shape)):
        intervals = owned_intervals(layout, dim, coordinate)
        index = torch.tensor([i for start, size in intervals for i in range(start, start + size)], dtype=torch.int64)
        full = full.index_select(dim, index)
    return full.clone()


def random_layouts(chance: random.Random, shapes: tuple[Shape, ...], mesh: Shape) -> list[Layout]:
    def chosen(shape: Shape) -> Sharded | None:
        if not shape or chance.random() >= 0.7:
            return None
        return Sharded(chance.randrange(len(shape)), chance.choice((1, 1, 1, 2)))

    return [Layout(shape, mesh, tuple(chosen(shape) for _ in mesh)) for shape in shapes]


def random_nodes(chance: random.Random, ranks: range) -> tuple[tuple[int, ...], ...]:
    nodes: list[tuple[int, ...]] = []
    while left := ranks[sum(map(len, nodes)) :]:
        nodes.append(tuple(left[: chance.randint(1, len(left))]))
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
    lengths = (1, 2, 3, 5, 7, 8, 16, 33)
    shapes = tuple(tuple(chance.choice(lengths) for _ in range(chance.randint(0, 3))) for _ in range(count))
    sent, kept = (chance.choice((torch.float32, torch.bfloat16)) for _ in range(2))
    tensors = Manifest(tuple(f"t{i}" for i in range(count)), shapes, (sent,) * count, "the trainer")
    meshes = [chance.choice(((1,), (2,), (3,), (2, 2), (4,), (3, 2))) for _ in range(2)]
    flipped = [{i for i in range(count) if chance.random() < 0.3} for _ in meshes]
    theirs, ours = (
        random_layouts(chance, tuple(shape[:: -1 if i in some else 1] for i, shape in enumerate(shapes)), mesh)
        for mesh, some in zip(meshes, flipped, strict=True)
    )
    senders, receivers = (list(product(*map(range, mesh))) for mesh in meshes)
    first = len(senders)
    full = [(torch.arange(prod(shape)).reshape(shape) + 1000.0 * i).to(sent) for i, shape in enumerate(shapes)]
    of_theirs, of_ours = (
        [tensor.permute(tuple(range(tensor.ndim))[:: -1 if i in some else 1]) for i, tensor in enumerate(full)]
        for some in flipped
    )
    all_holdings = [holdings_of(theirs, at, tensors, sent, flipped[0]) for at in senders]
    all_holdings += [holdings_of(ours, at, tensors, kept, flipped[1]) for at in receivers]
    members = Members(random_nodes(chance, range(first)), random_nodes(chance, range(first, first + len(receivers))))
    reaching = [node for node in range(len(members.nodes)) if chance.random() < 0.6]
    reach = {node: tuple(rank for rank in range(first) if chance.random() < 0.6) for node in reaching}
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
                targets = [filled[target] for target in bucket.targets]
                ops.unpack(on_the_way[plans[rank].identity(number)], targets, bucket.copies.rows)
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


@pytest.mark.parametrize("seed", range(120))
def test_every_rank_gets_its_elements(seed: int) -> None:
    check_case(seed)


def test_a_replica_on_the_machine_is_copied_and_no_part_comes_from_others() -> None:
    """A trainer of HSDP: four machines, each with all of the model in two shards, and an engine."""
    shape = (4096, 4096)
    tensors = Manifest(tuple(f"w{i}" for i in range(4)), (shape,) * 4, (torch.float32,) * 4, "the trainer")
    layouts = [Layout(shape, (4, 2), (None, Sharded(0)))] * 4
    holdings = [holdings_of(layouts, at, tensors, torch.float32) for at in product(range(4), range(2))]
    holdings += [holdings_of([Layout(shape, (), ())] * 4, (), tensors, torch.float32)] * 4
    members = Members(tuple((2 * i, 2 * i + 1) for i in range(4)), tuple((8 + i,) for i in range(4)))
    reach = {i: (2 * i, 2 * i + 1) for i in range(4)}
    plans = [
        plan_exchange(tensors, members, dict(enumerate(holdings)), rank, holdings[rank], 1 << 26, reach=reach)
        for rank in range(12)
    ]
    assert len({plan.fingerprint for plan in plans}) == 1
    assert [sum(bucket.nbytes for bucket in plan.buckets) for plan in plans] == [0] * 12
    assert [plan.pulls is not None for plan in plans] == [False] * 8 + [True] * 4


def test_what_nobody_has_and_dtypes_that_do_not_convert_are_named() -> None:
    shapes, half = ((8, 2),), Layout((8, 2), (2,), (Sharded(0),))
    for dtype, text in (
        (torch.float32, r"no sender has w of the trainer from \[4, 0\] on"),
        (torch.float8_e4m3fn, "w is float8_e4m3fn in the trainer"),
    ):
        tensors = Manifest(("w",), shapes, (dtype,), "the trainer")
        sender = holdings_of([half], (0,), tensors, dtype)
        if dtype != torch.float32:
            sender = full_holdings(shapes, (dtype,))
        receiver = full_holdings(shapes, (torch.float32,))
        with pytest.raises(ModelMismatch, match=text):
            plan_exchange(tensors, Members(((0,),), ((1,),)), {0: sender, 1: receiver}, 1, receiver, 64 << 20)


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


Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""
BF16, F32 = torch.bfloat16, torch.float32


def manifest_of(tensors: Described) -> Manifest:
    shapes, kinds = zip(*tensors.values(), strict=True)
    return Manifest(tuple(tensors), shapes, kinds, "test")


def targets_of(
    tensors: Described, mesh_shape: tuple[int, ...] = (), placements: dict[str, tuple[Placement, ...]] | None = None,
    coordinate: Coordinate = (),
) -> Targets:  # fmt: skip
    """Targets with a layout of their own each; plans do not look at the tensors."""
    targets = Targets()
    for number, (name, (shape, dtype)) in enumerate(tensors.items()):
        targets.names.append(name)
        targets.dtypes.append(dtype)
        targets.layout.append(number)
        targets.index[name] = number
        default = tuple(None for _ in mesh_shape)
        targets.layouts.append(Layout(shape, mesh_shape, (placements or {}).get(name, default)))
        targets.coordinates.append(coordinate)
    return targets


def test_bucket_bytes_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 80"):
        make_plan(manifest_of({"a": ((4, 2), F32)}), targets_of({"a": ((4, 2), F32)}), Mapping(), 79)


def test_tensors_of_one_class_keep_their_own_dtypes() -> None:
    """Pieces of equal extents, of tensors that fill equal targets, are copied as what the checkpoint has."""
    targets = targets_of({"a": ((32,), F32), "b": ((32,), F32)})
    targets.layout[1] = 0
    plan = make_plan(manifest_of({"a": ((32,), BF16), "b": ((32,), F32)}), targets, Mapping(), 64 + 64)
    pairs = [(bucket.origins[:, 0].tolist(), bucket.rows.dtype.tolist()) for bucket in plan.buckets]
    copied = {pair for origins, codes in pairs for pair in zip(origins, codes, strict=True)}
    assert plan.holdings.class_of.tolist() == [0, 0]
    assert copied == {(0, dtypes.code(BF16)), (1, dtypes.code(F32))}


def test_fingerprint_tells_any_difference() -> None:
    tensors: Described = {"a": ((4, 2), F32), "b": ((2, 4), F32), "c": ((8,), BF16)}
    manifest, targets = manifest_of(tensors), targets_of(tensors, (2,), {"a": (Sharded(0),)}, (0,))

    def fingerprint(manifest: Any = manifest, targets: Targets = targets, size: int = 128, options: str = "") -> bytes:
        return make_plan(manifest, targets, Mapping(), size, options).fingerprint

    def both(changed: Described) -> bytes:
        return fingerprint(manifest_of(changed), targets_of(changed, (2,), {"a": (Sharded(0),)}, (0,)))

    assert fingerprint() == both(tensors)
    different = {
        "the same": fingerprint(),
        "name": both({"a": ((4, 2), F32), "b2": ((2, 4), F32), "c": ((8,), BF16)}),
        "shape": both({"a": ((4, 2), F32), "b": ((4, 2), F32), "c": ((8,), BF16)}),
        "dtype": both({"a": ((4, 2), F32), "b": ((2, 4), F32), "c": ((8,), torch.float16)}),
        "dtype of the model alone": fingerprint(targets=replace(targets, dtypes=[F32, F32, F32])),
        "order": both({"b": ((2, 4), F32), "a": ((4, 2), F32), "c": ((8,), BF16)}),
        "one more in the checkpoint": fingerprint(manifest_of({**tensors, "d": ((1,), F32)})),
        "one more in the model": fingerprint(targets=targets_of({**tensors, "d": ((1,), F32)}, (2,), {}, (0,))),
        "bucket_bytes": fingerprint(size=144),
        "options": fingerprint(options="strict=False"),
        "dim": fingerprint(targets=targets_of(tensors, (2,), {"a": (Sharded(1),)}, (0,))),
        "split factor": fingerprint(targets=targets_of(tensors, (2,), {"a": (Sharded(0, 2),)}, (0,))),
        "mesh": fingerprint(targets=targets_of(tensors, (4,), {"a": (Sharded(0),)}, (0,))),
        "plain": fingerprint(targets=targets_of(tensors)),
    }
    assert [(a, b) for a, b in combinations(different, 2) if different[a] == different[b]] == []


GB = 10**9


def sharded(nodes: int, ranks: int, replicas: int = 1) -> list[list[int]]:
    """Bytes that each rank keeps of 64 GB; ``replicas``: ranks that keep the same."""
    return [[64 * GB * replicas // (nodes * ranks)] * ranks for _ in range(nodes)]


@pytest.mark.parametrize(
    ("kept", "objects", "expected"),
    [
        (sharded(8, 8), True, "every"),
        (sharded(1, 8, replicas=8), False, "every"),  # the node has each byte in its page cache
        (sharded(1, 8, replicas=8), True, "partitioned"),  # nothing is cached
        (sharded(4, 8, replicas=32), False, "every"),  # each node reads each byte once
        (sharded(5, 8, replicas=5), False, "partitioned"),
        ([[32 * GB, 32 * GB], [16 * GB]], True, "every"),  # 1.25 times
        ([[32 * GB, 32 * GB], [17 * GB]], True, "partitioned"),
        ([[0, 64 * GB], [0, 0]], True, "every"),
    ],
)
def test_storage_is_not_read_too_often(kept: list[list[int]], objects: bool, expected: str) -> None:
    readers, reason = choose_readers(64 * GB, kept, all_read=True, objects=objects, src=0)
    assert readers == expected, reason
    assert reason.startswith(f"auto -> {expected}: ")


@pytest.mark.parametrize("objects", [False, True])
def test_small_shards_are_read_by_every_rank(objects: bool) -> None:
    many = 4 * int(MAX_FILE_READS)
    assert choose_readers(SMALL_BYTES, [[SMALL_BYTES]] * many, all_read=True, objects=objects, src=0) == (
        "every", "auto -> every: per-rank data is small, so each rank reads its own shards",
    )  # fmt: skip
    assert choose_readers(0, [[0]], all_read=True, objects=objects, src=0)[0] == "every"


def test_one_reads_what_others_may_not_see() -> None:
    readers, reason = choose_readers(64 * GB, sharded(2, 2), all_read=False, objects=False, src=3)
    assert (readers, reason) == ("one", "auto -> one: only rank 3 is known to have the checkpoint")


def test_parts_of_strewn_rows_are_found_by_where_they_begin() -> None:
    """A receiver whose model has rows of a checkpoint's tensor apart has thousands of parts, which are not all searched."""
    steps = Reshape((3, 20, 2, 5)), Transpose(1, 2), Reshape((3, 40, 5))
    placed = place(Mapping(converts=(Convert(("^w$",), ("t",), steps),)), ["w"], [(3, 40, 5)], {"t": (3, 40, 5)})
    targets = Targets(["t"], layout=[0], dtypes=[torch.float32], layouts=[Layout((3, 40, 5), (), ())], coordinates=[()])
    targets.index["t"] = 0
    holdings = holdings_of_targets([(3, 40, 5)], targets, placed)
    assert len(holdings.parts[0]) > 16
    for box in product(*(boxes_along(length) for length in (3, 40, 5))):
        start, size = zip(*box, strict=True)
        near = copies_of_box((start, size), holdings, 0, torch.float32, once=False)
        with mock.patch.object(Holdings, "parts_near", lambda self, number, _: self.parts[number]):
            assert copies_of_box((start, size), holdings, 0, torch.float32, once=False) == near
        assert sum(prod(copy[4 + holdings.dims :][: copy[3]]) for copy in near) == prod(size)


def boxes_along(length: int) -> list[tuple[int, int]]:
    return [(0, length), (0, 1), (length - 1, 1), (length // 3, length // 2 + 1)]
