"""A bad table, bucket or tensor of the batched region copy: refused before anything is copied."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epload.core import dtypes
from epload.native import ops
from support import ranks

INT64_MAX = 2**63 - 1
INT64_MIN = -(2**63)
GOOD = [0, 0, dtypes.code(torch.float32), 2, 1, 2, 3, 4, 6, 1]
"""A region of a float32 tensor of shape [4, 6] at the start of a bucket of 256 bytes."""
COLUMNS = ["tensor", "offset", "dtype", "ndim", "start0", "start1", "size0", "size1", "stride0", "stride1"]
UNMOVABLE = [12, 13, 14, 16, 17, 18, 19, 20, 21, 22, 30, 33, 36, 37, 40, 43]
"""Codes of quantized, bit and sub-byte dtypes: no Tensor.copy_ converts them."""
BAD_VALUES = {
    "tensor": [-1, 2, 2**32],
    "offset": [-1, -4, 256 - 60, 256, 2**40, INT64_MAX - 3],
    "dtype": [-1, 46, 47, 1000, 2**32 + 6, *UNMOVABLE],
    "ndim": [-1, 0, 1, 3, 2**32 + 2],
    "start0": [-1, 2, 4, INT64_MAX - 2],
    "start1": [-1, 3, 6, INT64_MAX - 3],
    "size0": [-1, 4, 5],
    "size1": [-1, 5, 7],
    "stride0": [-1, -6, 31, 64, 2**61, 2**62, INT64_MAX // 2 + 1, INT64_MAX // 4],
    "stride1": [-1, 18, 64, 2**61, 2**62, INT64_MAX // 3 + 1, INT64_MAX // 12],
}
PAIRS = (("start0", "size0"), ("stride0", "stride1"), ("offset", "stride0"), ("size0", "stride0"))


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
def test_bad_row_copies_nothing(unpack: bool) -> None:
    extremes = (INT64_MAX, INT64_MIN)
    changes = [{column: value} for column, values in BAD_VALUES.items() for value in (*values, *extremes)]
    changes += [dict.fromkeys(pair, value) for pair in PAIRS for value in (*extremes, 2**62)]
    for change in changes:
        bad = [1, *GOOD[1:]]
        for column, value in change.items():
            bad[COLUMNS.index(column)] = value
        refused(torch.tensor([GOOD, bad, GOOD]), unpack, "row 1 ")


def test_more_elements_than_can_be_counted_are_refused() -> None:
    """The tensor has them in one element, and so has the bucket."""
    row = [0, 0, dtypes.code(torch.float32), 2, 0, 0, 2**31, 2**31, 0, 0]
    with pytest.raises(ValueError, match="row 0 has more bytes than fit in an int64"):
        ops.unpack(torch.zeros(8, dtype=torch.uint8), [torch.zeros(1).expand(2**31, 2**31)], torch.tensor([row]))


def refused(table: Tensor, unpack: bool, match: str, bucket: Tensor | None = None) -> None:
    bucket = torch.arange(256, dtype=torch.uint8) if bucket is None else bucket
    tensors = [torch.full((4, 6), 7.0), torch.full((4, 6), 8.0)]
    before = [t.clone() for t in [bucket, *tensors]]
    with pytest.raises(ValueError, match=match):
        (ops.unpack if unpack else ops.pack)(bucket, tensors, table)
    for got, want in zip([bucket, *tensors], before, strict=True):
        assert torch.equal(got, want), "nothing was copied"


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
def test_bad_table_or_bucket_copies_nothing(unpack: bool) -> None:
    good = torch.tensor([GOOD])
    tables = [
        good.int(), good.double(), good[0], good[None],
        torch.nn.functional.pad(good, (0, 1)), good[:, :-1].contiguous(), good[:, :3].contiguous(), good[:, :7].contiguous(),
        torch.stack([good, good], dim=2)[:, :, 0], torch.tensor([GOOD, GOOD]).t().contiguous().t(),
    ]  # fmt: skip
    for table in tables:
        refused(table, unpack, "region_copy")
    raw = torch.zeros(512, dtype=torch.uint8)
    buckets = [
        raw[:256].to(torch.int8), raw[:256].view(torch.float32), raw[:256].bool(), raw[None, :256], raw[0], raw[::2],
        raw[:1].expand(256), raw[:63], raw[:0],
    ]  # fmt: skip
    for bucket in buckets:
        refused(good, unpack, "region_copy", bucket)


def test_row_that_just_fits() -> None:
    tensor = torch.zeros(4, 6)
    bucket = torch.arange(16, dtype=torch.float32).view(torch.uint8)
    ops.unpack(bucket, [tensor], torch.tensor([GOOD]))
    assert tensor[1:4, 2:6].tolist() == [[0, 1, 2, 3], [6, 7, 8, 9], [12, 13, 14, 15]]
    with pytest.raises(ValueError, match="row 0 reaches outside the bucket of 63 bytes"):
        ops.unpack(bucket[:63], [tensor], torch.tensor([GOOD]))


@pytest.mark.parametrize("unpack", [True, False], ids=["unpack", "pack"])
@pytest.mark.parametrize("kind", ["meta", "meta bucket", "sparse"])
def test_tensors_without_plain_memory_are_refused(unpack: bool, kind: str) -> None:
    """A meta tensor among others must not turn the whole call into a silent no-op."""
    good = torch.full((4, 6), 7.0)
    other = {"meta": good.to("meta"), "meta bucket": good, "sparse": good.to_sparse()}[kind]
    bucket = torch.arange(256, dtype=torch.uint8, device="meta" if kind == "meta bucket" else "cpu")
    second = [1, *GOOD[1:]]
    with pytest.raises(ValueError, match="region_copy"):
        (ops.unpack if unpack else ops.pack)(bucket, [good, other], torch.tensor([GOOD, second]))
    assert bool((good == 7).all())


def write_to_freed_storage() -> None:
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    with pytest.raises(ValueError, match="region_copy"):
        ops.unpack(torch.zeros(32, dtype=torch.uint8), [freed], torch.tensor([[0, 0, 6, 1, 0, 8, 1]]))


def test_freed_storage_is_refused() -> None:
    """As FSDP frees an unsharded parameter. In a process of its own, since writing to it would end the process."""
    assert ranks.run_alone(write_to_freed_storage) == (0, "")
