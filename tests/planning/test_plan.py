"""Plans: how tensors are cut into buckets, what the fingerprint covers, and what whole loads leave on every rank."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor

from epload import Manifest, Mapping
from epload.core.placement import (
    Layout,
    Placement,
    Replicated,
    Sharded,
)
from epload.model.targets import Targets
from epload.native import ops
from epload.planning.plan import LoadPlan, make_plan
from support.checks import as_bytes
from support.shards import Coordinate, Cut, indices, torch_shards

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


U8, BF16, F32, F64 = torch.uint8, torch.bfloat16, torch.float32, torch.float64
CASTS: Described = {"down": ((7, 5), BF16), "up": ((5, 9), F64)}
"""The dtypes in the model of what the checkpoint has in others."""
MIXED: Described = {
    "down": ((7, 5), F32),
    "up": ((5, 9), BF16),
    "scalar": ((), F64),
    "bytes": ((97,), U8),
    "empty": ((3, 0), F32),
    "odd": ((7, 5), BF16),
    "wide": ((3, 61), F32),
    "experts": ((5, 7, 6), BF16),
    "one": ((1,), F32),
    "doubles": ((9, 3), F64),
    "long": ((257,), BF16),
    "thin": ((11, 1, 3), U8),
}


def manifest_of(tensors: Described) -> Manifest:
    return Manifest(
        tuple(tensors),
        tuple(shape for shape, _ in tensors.values()),
        tuple(kind for _, kind in tensors.values()),
        "test",
    )


def targets_of(
    tensors: Described,
    mesh_shape: tuple[int, ...] = (),
    placements: dict[str, tuple[Placement, ...]] | None = None,
    coordinate: Coordinate = (),
) -> Targets:
    """Targets with a layout of their own each; plans do not look at the tensors."""
    targets = Targets()
    for number, (name, (shape, dtype)) in enumerate(tensors.items()):
        targets.names.append(name)
        targets.dtypes.append(dtype)
        targets.layout.append(number)
        targets.index[name] = number
        default = tuple(Replicated() for _ in mesh_shape)
        targets.layouts.append(Layout(shape, mesh_shape, (placements or {}).get(name, default)))
        targets.coordinates.append(coordinate)
    return targets


BUCKET_BYTES = [96, 1000, 1 << 16]


def test_bucket_bytes_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 80"):
        make_plan(manifest_of(MIXED), targets_of(MIXED), Mapping(), 79)


def test_fingerprint_tells_any_difference() -> None:
    tensors: Described = {"a": ((4, 2), F32), "b": ((2, 4), F32), "c": ((8,), BF16)}
    manifest, targets = manifest_of(tensors), targets_of(tensors, (2,), {"a": (Sharded(0),)}, (0,))

    def fingerprint(
        manifest: Manifest = manifest, targets: Targets = targets, bucket_bytes: int = 128, options: str = ""
    ) -> bytes:
        return make_plan(manifest, targets, Mapping(), bucket_bytes, options).fingerprint

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
        "bucket_bytes": fingerprint(bucket_bytes=144),
        "options": fingerprint(options="strict=False"),
        "dim": fingerprint(targets=targets_of(tensors, (2,), {"a": (Sharded(1),)}, (0,))),
        "split factor": fingerprint(targets=targets_of(tensors, (2,), {"a": (Sharded(0, 2),)}, (0,))),
        "mesh": fingerprint(targets=targets_of(tensors, (4,), {"a": (Sharded(0),)}, (0,))),
        "plain": fingerprint(targets=targets_of(tensors)),
    }
    same = [(a, b) for a, b in product(different, repeat=2) if a < b and different[a] == different[b]]
    assert not same


# ---- whole loads, all ranks in this process ----


def values_of(tensors: Described) -> dict[str, Tensor]:
    """Elements that differ within and between tensors, as far as their dtype has bits for it."""
    made, first = {}, 1
    for name, (shape, dtype) in tensors.items():
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        made[name] = (torch.arange(first, first + prod(shape)) * 3).to(bits).view(dtype).reshape(shape)
        if name in CASTS:
            made[name] = (indices(shape) / 7 + 0.1).to(dtype)
        first += prod(shape)
    return made


def run_plan(plan: LoadPlan, manifest: Manifest, values: dict[str, Tensor], local: list[Tensor]) -> None:
    """Does with a plan what a loader does on one rank, without the transport."""
    sources = [as_bytes(values[name]) for name in manifest.names]
    for bucket in plan.buckets:
        data = torch.full((bucket.nbytes,), 0xEE, dtype=torch.uint8)
        for piece in bucket.pieces:
            source = sources[piece.tensor][piece.tensor_offset : piece.tensor_offset + piece.nbytes]
            data[piece.bucket_offset : piece.bucket_offset + piece.nbytes] = source
        ops.unpack(data, [local[target] for target in bucket.targets], bucket.copies.rows)


STRIDED = ([(1, 0, 1), (0, 0, 1)], (Sharded(0, 2), Sharded(0)))
FUSED = ([(1, 1, 3), (0, 0, 1)], (Sharded(0), Sharded(1, 3)))
PLACED: dict[str, tuple[list[Cut], tuple[Placement, ...]]] = {
    "down": ([(0, 0, 1)], (Sharded(0), Replicated())),
    "up": ([(1, 1, 1)], (Replicated(), Sharded(1))),
    "bytes": STRIDED,
    "empty": ([(0, 0, 1)], (Sharded(0), Replicated())),
    "odd": ([(0, 1, 1), (1, 0, 1)], (Sharded(1), Sharded(0))),
    "wide": FUSED,
    "experts": STRIDED,
    "one": ([(0, 0, 1), (1, 0, 1)], (Sharded(0), Sharded(0))),
    "doubles": ([(1, 1, 1)], (Replicated(), Sharded(1))),
    "long": ([(1, 0, 5)], (Replicated(), Sharded(0, 5))),
    "thin": ([(0, 2, 1), (1, 0, 1)], (Sharded(2), Sharded(0))),
}


@pytest.mark.parametrize("bucket_bytes", BUCKET_BYTES)
@pytest.mark.parametrize("mesh_shape", [(1, 2), (3, 2), (4, 2)], ids=str)
def test_a_whole_load_gives_every_rank_its_shards(mesh_shape: tuple[int, int], bucket_bytes: int) -> None:
    manifest, values, in_model = manifest_of(MIXED), values_of(MIXED), MIXED | CASTS
    shards = {
        name: torch_shards(values[name].to(dtype), mesh_shape, PLACED.get(name, ([], ()))[0])
        for name, (_, dtype) in in_model.items()
    }
    placements = {name: placement for name, (_, placement) in PLACED.items()}
    fingerprints = set()
    for coordinate in product(*map(range, mesh_shape)):
        targets = targets_of(in_model, mesh_shape, placements, coordinate)
        plan = make_plan(manifest, targets, Mapping(), bucket_bytes)
        fingerprints.add(plan.fingerprint)
        assert plan.casts == len(CASTS)
        local = [torch.empty(shards[name][coordinate].shape, dtype=dtype) for name, (_, dtype) in in_model.items()]
        for tensor in local:
            as_bytes(tensor).fill_(0xDD)
        run_plan(plan, manifest, values, local)
        for name, tensor in zip(in_model, local, strict=True):
            expected = as_bytes(shards[name][coordinate])
            assert torch.equal(as_bytes(tensor), expected), f"{name} at {coordinate} of {mesh_shape}"
    assert len(fingerprints) == 1
