"""Every way torch shards a model, for models on a fake asynchronous accelerator: the cases and the oracle of test_layouts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from support import fakedev, ranks
from support import layout_loads as contract
from support.accelerator import DEVICE

pytestmark = pytest.mark.usefixtures("fake_device")


# Semantics are one broadcast's affair and know no layouts, so that one world shows HCCL's: the smallest with uneven nodes.
@pytest.mark.parametrize(
    ("world", "part", "parts", "semantics"), [*((*part, "nccl") for part in contract.PARTS), (3, 0, 1, "hccl")]
)
def test_a_load_equals_sharding_the_loaded_model(
    world: int, part: int, parts: int, semantics: str, tmp_path: Path
) -> None:
    folder = contract.stored(tmp_path, world)
    setup = partial(fakedev.setup, semantics)
    contract.none_fails(ranks.run(world, contract.check_cases, world, part, parts, folder, DEVICE, setup=setup))
