"""Every way torch shards a model, on real ranks: a load from meta leaves what sharding the materialized model leaves.

The oracle is the same parallelization of a model that holds its weights: each rank's ``to_local()``, bit for bit. Neither
``distribute_tensor`` nor the offset helpers of torch are one, since they disagree with fully_shard on uneven strided shards.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from support import ranks
from support.layout_loads import PARTS, check_cases, none_fails, stored


@pytest.mark.parametrize(("world", "part", "parts"), PARTS)
def test_a_load_equals_sharding_the_loaded_model(world: int, part: int, parts: int, tmp_path: Path) -> None:
    none_fails(ranks.run(world, check_cases, world, part, parts, stored(tmp_path, world)))
