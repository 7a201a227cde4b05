"""The headers of buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epload.errors import LoadError
from epload.planning.buckets import HEADER_BYTES
from epload.transfer.framing import BucketHeader

NUMBERS = st.integers(0, 2**64 - 1)


def tensor_of(raw: bytes) -> torch.Tensor:
    return torch.tensor(list(raw), dtype=torch.uint8)


@given(st.integers(0, 2**32 - 1), st.booleans(), NUMBERS, NUMBERS, st.binary(min_size=16, max_size=16), NUMBERS)
def test_header_round_trip(
    index: int, aborted: bool, nbytes: int, checksum: int, fingerprint: bytes, version: int
) -> None:
    header = BucketHeader(index, aborted, nbytes, checksum, fingerprint, version)
    raw = header.pack()
    assert len(raw) == HEADER_BYTES
    assert BucketHeader.unpack(tensor_of(raw)) == header


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(LoadError, match="out of step"):
        BucketHeader.unpack(tensor_of(raw))
