"""The headers of buckets."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from epload.errors import LoadError
from epload.planning.buckets import HEADER_BYTES
from epload.transfer.framing import BucketHeader


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_other_bytes_are_no_header(raw: bytes) -> None:
    with pytest.raises(LoadError, match="out of step"):
        BucketHeader.unpack(torch.tensor(list(raw), dtype=torch.uint8))
