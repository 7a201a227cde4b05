"""Files that are not to be trusted, further than their header: what is accepted is loaded as it lies there, or refused."""

from __future__ import annotations

import tempfile
from math import prod
from pathlib import Path

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import epload
from epload import LoadError, LoadOptions
from epload.checkpoint.local_store import LocalFile
from epload.checkpoint.safetensors import read_layout
from support.malformed import FILES


def model() -> nn.Module:
    """With names and shapes that the files of FILES also have."""
    return nn.ParameterDict({"v": torch.zeros(4), "w": torch.zeros(2, 3), "e": torch.zeros(0)})


@settings(max_examples=100, deadline=None)
@given(content=FILES, bucket_bytes=st.sampled_from([80, 96, 1 << 20]))
def test_a_file_is_loaded_as_it_is_or_refused(content: bytes, bucket_bytes: int) -> None:
    filled = model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            report = epload.load(
                filled,
                path,
                strict=False,
                readers="one",
                verify=True,
                progress=False,
                options=LoadOptions(bucket_bytes=bucket_bytes),
            )
        except LoadError:
            return
        found = {stored.name: stored for stored in read_layout(LocalFile(path))}
    for name, parameter in filled.named_parameters():
        if name in report.missing_keys or (name not in found and parameter.numel() == 0):  # which needs nothing
            assert not parameter.detach().any()
            continue
        _, dtype, shape, offset, *_ = found[name]
        raw = content[offset : offset + prod(shape) * dtype.itemsize]
        value = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)
        expected = value.view(dtype).reshape(shape).to(parameter.dtype)
        assert torch.equal(parameter.detach().view(torch.int32), expected.view(torch.int32))
