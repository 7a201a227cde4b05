"""Plans: the fingerprint covers everything that ranks must share. tests/end_to_end/test_layouts.py has the loads."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from epload import Manifest, Mapping
from epload.core import dtypes
from epload.core.placement import Layout, Placement, Sharded
from epload.model.targets import Targets
from epload.planning.plan import make_plan
from support.shards import Coordinate

Described = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by name."""


BF16, F32 = torch.bfloat16, torch.float32


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
    copied = {
        (tensor, code)
        for bucket in plan.buckets
        for tensor, code in zip(bucket.origins[:, 0].tolist(), bucket.rows.dtype.tolist(), strict=True)
    }
    assert plan.holdings.class_of.tolist() == [0, 0]
    assert copied == {(0, dtypes.code(BF16)), (1, dtypes.code(F32))}


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
