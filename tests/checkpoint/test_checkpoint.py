"""Checkpoints: each kind of source against the safetensors library, and reads by request."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epload import Checkpoint, CheckpointError
from epload.checkpoint import object_store
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from support.checkpoint_kinds import (
    SOURCES,
    one_file,
    small_state,
)
from support.checkpoints import State, assert_same, framed, raw_bytes, read_all, tensor


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_every_source_gives_the_same_tensors(source: Callable[[Path, State], Any], tmp_path: Path) -> None:
    state = {**small_state(), "x": tensor(1, (50,)), "y": tensor(2, (31,), torch.bfloat16)}
    checkpoint = Checkpoint.open(source(tmp_path, state))
    assert_same(read_all(checkpoint), state)
    assert checkpoint.manifest.nbytes == sum(value.nbytes for value in state.values())
    checkpoint.close()
    assert_same(read_all(checkpoint), state)  # usable again after close
    pieces = [("odd", 5, 0, 7), ("x", 100, 16, 100), ("y", 0, 128, 62), ("x", 0, 192, 4), ("odd", 12, 208, 1)]
    bucket = torch.full((256,), 255, dtype=torch.uint8)
    index = checkpoint.manifest.names.index
    checkpoint.fill(bucket, [Piece(index(name), start, at, nbytes) for name, start, at, nbytes in pieces])
    expected = torch.full((256,), 255, dtype=torch.uint8)
    for name, start, at, nbytes in pieces:
        expected[at : at + nbytes] = state[name].reshape(-1).view(torch.uint8)[start : start + nbytes]
    assert torch.equal(bucket, expected)
    checkpoint.fill(bucket, [])
    assert torch.equal(bucket, expected)
    checkpoint.close()


def test_manifest_is_what_the_library_reports(tmp_path: Path) -> None:
    state = {f"t.{name}": tensor(i, (i + 1, 3), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())}
    path = one_file(tmp_path, state)
    manifest = Checkpoint.open(path).manifest
    reported = {n: (s, d) for n, s, d in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True)}
    with safe_open(path, "pt") as library:
        assert set(reported) == set(library.keys())
        for name, (shape, dtype) in reported.items():
            part = library.get_slice(name)
            assert (list(shape), dtype) == (part.get_shape(), SAFETENSORS[part.get_dtype()])
    loaded = load_file(path)
    assert {name: value.dtype for name, value in loaded.items()} == {n: d for n, (_, d) in reported.items()}
    assert_same(read_all(Checkpoint.open(path)), loaded)


def test_metadata_is_no_tensor_and_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    entries = {
        "late": {"dtype": "U8", "shape": [3], "data_offsets": [2, 5]},
        "__metadata__": {"format": "pt"},
        "early": {"dtype": "U8", "shape": [2], "data_offsets": [0, 2]},
        "nothing": {"dtype": "F32", "shape": [0], "data_offsets": [2, 2]},
    }
    path.write_bytes(framed(json.dumps(entries)) + b"abcde")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.manifest.names == ("early", "nothing", "late")
    assert raw_bytes(read_all(checkpoint)["late"]) == b"cde"
    checkpoint.close()


# ---- state dicts ----


def test_consume_frees_each_tensor_once_it_was_taken() -> None:
    state = {"a": tensor(1, (10,)), "b": tensor(2, (20,)), "c": tensor(3, (5,))}
    kept = dict(state)
    checkpoint = Checkpoint.from_state_dict(state, consume=True)
    bucket = torch.zeros(256, dtype=torch.uint8)
    checkpoint.fill(bucket, [Piece(0, 0, 0, 40), Piece(1, 0, 48, 32)])
    assert list(state) == ["b", "c"]
    assert raw_bytes(kept["a"]) == bytes(bucket[:40].tolist())
    checkpoint.fill(bucket, [Piece(1, 32, 0, 48)])
    assert list(state) == ["c"]
    assert raw_bytes(kept["b"])[32:] == bytes(bucket[:48].tolist())
    with pytest.raises(CheckpointError, match="a was consumed"):
        checkpoint.fill(bucket, [Piece(0, 0, 0, 40)])


def test_a_dict_with_something_that_is_no_full_tensor() -> None:
    with pytest.raises(TypeError, match="no tensors found; top-level keys: a, b"):
        Checkpoint.open({"a": {"w": tensor(1, (2,))}, "b": [1, 2]})
    with pytest.raises(CheckpointError, match="b is not a dense tensor"):
        Checkpoint.open({"a": tensor(1, (2,)), "b": torch.eye(3).to_sparse()})
    with pytest.raises(CheckpointError, match="b is not a dense tensor"):
        Checkpoint.open({"b": torch.empty(3, device="meta")})
    with pytest.raises(CheckpointError, match=r"b is not a dense tensor with data \(nested"):
        Checkpoint.open({"b": torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])})
    with pytest.raises((TypeError, CheckpointError)):
        Checkpoint.open({1: tensor(1, (2,))})


def test_joining_names_what_is_wrong_with_the_path(tmp_path: Path) -> None:
    (folder := tmp_path / "two").mkdir()
    for i in (1, 2):
        save_file({f"t{i}": torch.zeros(2)}, folder / f"model-0000{i}-of-00002.safetensors")
    manifest = Checkpoint.open(folder).manifest
    with pytest.raises(CheckpointError, match=r"cannot read .*nowhere, a file that the source rank reads"):
        join_source(tmp_path / "nowhere", manifest)
    with pytest.raises(CheckpointError, match="is one file, but the source rank reads 2 files"):
        join_source(folder / "model-00001-of-00002.safetensors", manifest)


def test_an_element_of_any_stride_and_a_folder_with_a_number_sign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"w": torch.arange(4.0)[2::2][:1], "imaginary": torch.tensor([1 + 2j]).imag}
    assert_same(read_all(Checkpoint.open(state)), {name: torch.tensor(value.tolist()) for name, value in state.items()})
    for name in ("run", "run#2"):
        save_file({"w": torch.tensor([float(len(name))])}, (tmp_path / name).with_suffix(".safetensors"))
    with pytest.raises(CheckpointError, match="a # begins"):
        Checkpoint.open(f"file://{tmp_path}/run#2.safetensors")
    assert read_all(Checkpoint.open(tmp_path / "run#2.safetensors"))["w"].item() == 5
    opened: list[str] = []
    monkeypatch.setattr(object_store, "connect", opened.append)
    object_store.ObjectStore("hdfs:///user/x")
    object_store.locate("hdfs:///user/x/model.safetensors", "", lambda nbytes: None, None)
    assert opened == ["hdfs:///user/x"] * 2
