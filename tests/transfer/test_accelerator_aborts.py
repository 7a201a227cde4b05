"""A bucket that cannot be read ends the load into a device: what it holds reaches no tensor, nor does what comes after it, and
all ranks move the same buckets. On a fake accelerator."""

from __future__ import annotations

import pytest

from support import fakedev, ranks
from support.aborts import WHO, at_each_bucket
from support.accelerator import DEVICE
from support.checks import all_fine

pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("readers", "algorithm"), [("one", "striped"), ("partitioned", "two_level")])
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(readers: str, algorithm: str, who: str) -> None:
    all_fine(ranks.run(4, at_each_bucket, readers, algorithm, who, DEVICE, setup=fakedev.setup))
