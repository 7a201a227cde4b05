"""Every way torch shards a model, on real ranks: a load from meta leaves what sharding the materialized model leaves.

The oracle is the same parallelization of a model that holds its weights: each rank's ``to_local()``, bit for bit. Neither
``distribute_tensor`` nor the offset helpers of torch are one, since they disagree with fully_shard on uneven strided shards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support.accelerator import run_on
from support.layout_loads import PARTS, check_cases, none_fails, stored


# Semantics are one broadcast's affair and know no layouts, so that one world shows HCCL's: the smallest with uneven nodes.
@pytest.mark.parametrize(
    ("world", "part", "parts", "place"),
    [*((*part, "cpu") for part in PARTS), *((*part, "nccl") for part in PARTS if part[0] in (2, 4)), (3, 0, 1, "hccl")],
)
def test_a_load_equals_sharding_the_loaded_model(world: int, part: int, parts: int, place: str, tmp_path: Path) -> None:
    none_fails(run_on(place, world, check_cases, part, parts, stored(tmp_path, world)))
