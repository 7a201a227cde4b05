"""Files that are not to be trusted, further than their header: what is accepted is loaded as it lies there, or refused."""

from __future__ import annotations

import json
import tempfile
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import epload
from epload import Checkpoint, CheckpointError, LoadError, LoadOptions
from epload.checkpoint.local_store import LocalFile
from epload.checkpoint.safetensors import read_layout
from support.checkpoints import entry, header
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


@pytest.mark.parametrize(
    "shape", [[0, 1 << 63], [0, 1 << 62, 1 << 62], [1 << 70, 0], [0] * 65, [1] * 65], ids=lambda shape: f"{shape[:3]}"
)
def test_a_shape_that_no_tensor_can_have_is_refused(shape: list[int], tmp_path: Path) -> None:
    nbytes = 4 * prod(shape)
    path = tmp_path / "model.safetensors"
    path.write_bytes(header(data=nbytes, w=entry(shape, [0, nbytes])))
    with pytest.raises(CheckpointError, match=r"w has shape .*, more than a tensor can have"):
        Checkpoint.open(path)


PATHS = st.one_of(
    st.text(max_size=8),
    st.sampled_from(["..", ".", "/", "../secret.safetensors", "/etc/passwd", "a/../b", "x\0y", "here.safetensors"]),
)


@settings(max_examples=60, deadline=None)
@given(
    mapping=st.dictionaries(st.sampled_from(["w", "v", "", "../w"]), PATHS, max_size=3)
    | st.recursive(st.none() | st.integers() | st.text(max_size=3), lambda inner: st.lists(inner, max_size=3))
)
def test_an_index_reads_no_file_outside_its_folder(mapping: Any) -> None:
    with tempfile.TemporaryDirectory() as outer:
        folder = Path(outer) / "checkpoint"
        folder.mkdir()
        (Path(outer) / "secret.safetensors").write_bytes(header(w=entry()))
        (folder / "here.safetensors").write_bytes(header(w=entry()))
        index = folder / "model.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": mapping}))
        try:
            found = Checkpoint.open(folder)
        except CheckpointError:
            return
        assert set(found.manifest.names) <= {"w"}
        assert found.manifest.locations is None or {facts.name for facts in found.manifest.locations.files} <= {
            "here.safetensors"
        }
