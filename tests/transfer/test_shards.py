"""A sync's shards on a device: what is under way when it fails does not arrive later. On a fake accelerator."""

from __future__ import annotations

import threading

import pytest
import torch

from epload.core import dtypes
from epload.core.copy_table import CopyTable
from epload.transfer.shards import Shards
from support import fakedev, ranks
from support.accelerator import DEVICE
from support.checks import all_fine

pytestmark = pytest.mark.usefixtures("fake_device")

ELEMENTS = 1000


class Bucket:
    nbytes = 64 + 4 * ELEMENTS
    targets = (0,)
    copies = CopyTable(torch.tensor([[0, 64, dtypes.code(torch.float32), 1, 0, ELEMENTS, 1]]))


class Plan:
    buckets = (Bucket(),)
    largest = Bucket.nbytes

    def describe(self, numbers: object) -> str:
        return "a bucket"


def failed(rank: int) -> list[str]:
    tensor, bucket = torch.zeros(ELEMENTS, device=DEVICE), torch.zeros(Bucket.nbytes, dtype=torch.uint8)
    shards = Shards(Plan(), [tensor], False, "rank 0", 1)
    bucket[64:].view(torch.float32).fill_(7.0)
    stream = shards._stream
    assert stream is not None
    torch.accelerator.synchronize()
    fakedev.hold(stream)
    threading.Timer(0.2, fakedev.release, [stream]).start()

    def fail() -> None:
        with shards.entered():
            shards.unpack(0, bucket)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    tensor.fill_(9.0)  # what a caller does who repairs it
    torch.accelerator.synchronize()
    stream.synchronize()
    return [f"holds {tensor[0].item()}"] if tensor[0].item() != 9.0 else []


def test_nothing_arrives_after_a_failure() -> None:
    all_fine(ranks.run(1, failed, setup=fakedev.setup))
