"""Checkpoints that are not what they should be: headers, indices, folders and torch files are refused, by a clear error."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from epload import Checkpoint, CheckpointError
from epload.checkpoint.safetensors import MAX_HEADER_BYTES
from support.checkpoints import assert_same, entry, framed, header, index, read_all, tensor

# ---- headers ----


def text(shape: str = "[4]", offsets: str = "[0,16]", data: int = 16) -> bytes:
    return framed(f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}') + bytes(data)


HUGE = "1" + "0" * 4000
BAD_FILES = {
    "empty file": (b"", "0 bytes"),
    "too short": (b"\1\0\0", "3 bytes"),
    "header of 2^64 - 1": (b"\xff" * 8 + b"{}", "header"),
    "not JSON": (framed("{]"), "not JSON"),
    "not text": (framed(b"\xff\xfe\xfd\x80" * 4), "not JSON"),
    "deep nesting": (framed('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"), "not JSON"),
    "list": (framed("[]"), "list"),
    "duplicate names": (
        framed(
            '{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        )
        + b"ab",
        "duplicate key 'w'",
    ),
    "entry is a list": (header(w=[1, 2]), "w lacks"),
    "no dtype": (header(w={"shape": [4], "data_offsets": [0, 16]}), "w lacks"),
    "three offsets": (header(w=entry(offsets=[0, 8, 16])), "w lacks"),
    "unknown dtype": (header(w=entry(dtype="F33")), "F33"),
    "shape is a number": (header(w=entry(shape=4)), "w"),
    "shape is an object": (header(data=4, w=entry(shape={}, offsets=[0, 4])), "w"),
    "negative dim": (header(w=entry(shape=[-4])), "non-negative integers"),
    "float dim": (header(w=entry(shape=[4.0])), "non-negative integers"),
    "bool dim": (header(data=4, w=entry(shape=[True], offsets=[0, 4])), "non-negative integers"),
    "nested dim": (header(w=entry(shape=[[4]])), "non-negative integers"),
    "NaN dim": (text(shape="[NaN]"), "non-negative integers"),
    "negative offset": (header(w=entry(offsets=[-16, 0])), "non-negative integers"),
    "offsets swapped": (header(w=entry(offsets=[16, 0])), "w"),
    "dims whose product wraps": (header(w=entry(shape=[2**32, 2**32, 4], offsets=[0, 16])), "w"),
    "dims of 4000 digits": (text(f"[{HUGE},{HUGE}]"), "w"),
    "dims whose product has 5000 digits": (header(w=entry(shape=[2**62] * 300)), "more than a tensor can have"),
    "more bytes than int64 holds": (header(data=0, w=entry([0, 1 << 63], [0, 0])), "more than a tensor can have"),
    "strides that overflow": (header(data=0, w=entry([0, 1 << 62, 1 << 62], [0, 0])), "more than a tensor can have"),
    "65 dims": (header(data=0, w=entry([0] * 65, [0, 0])), "more than a tensor can have"),
    "thousands of dims": (header(w=entry(shape=[1] * 5000)), "more than a tensor can have"),
    "long name": (header(**{"w" * 50_000: entry(shape=[5])}), "www"),
    "offset of 5000 digits": (text(offsets=f"[0,1{HUGE}{HUGE}]"), "not JSON"),
    "shape takes more": (header(w=entry(shape=[5])), "takes 20"),
    "shape takes less": (header(w=entry(shape=[3])), "w has 16 bytes"),
    "same bytes twice": (header(v=entry(), w=entry()), "w overlaps v"),
    "overlap": (header(data=24, v=entry(), w=entry(offsets=[8, 24])), "w overlaps v"),
    "hole": (header(data=36, v=entry(), w=entry(offsets=[20, 36])), "w leaves a hole after v"),
    "beyond the end": (header(data=15, w=entry()), "truncated"),
    "trailing bytes": (header(data=17, w=entry()), "belong to no tensor"),
    "bytes of no tensor": (header(data=1), "belong to no tensor"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_hostile_files(case: str, tmp_path: Path) -> None:
    content, message = BAD_FILES[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(path))


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    with pytest.raises(CheckpointError, match=f"bad.safetensors.*{MAX_HEADER_BYTES + 1} bytes"):
        Checkpoint.open(path)


# ---- folders, indices and torch files ----


@pytest.mark.parametrize("outside", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", ".", ""])
def test_an_index_that_points_out_of_its_folder(outside: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for target in (tmp_path / "x.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"w": tensor(1, (2,))}, target)
    name = str(tmp_path / "x.safetensors") if outside.startswith("/") else outside
    with pytest.raises(CheckpointError, match=r"index\.json.*plain file name"):
        Checkpoint.open(index(folder, {"weight_map": {"w": name}}))


@pytest.mark.parametrize(
    "content",
    ["{", "", "[]", "null", "3", {}, {"weight_map": None}, {"weight_map": ["w"]}, {"weight_map": {"w": 3}},
     {"weight_map": {"w": ["x.safetensors"]}}, "[" * 100_000],
    ids=lambda content: repr(content)[:40],
)  # fmt: skip
def test_an_index_that_is_none(content: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(index(tmp_path, content))


def test_an_index_whose_file_lacks_a_key(tmp_path: Path) -> None:
    save_file({"v": tensor(1, (2,))}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"places w in x\.safetensors, which does not contain it"):
        Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x.safetensors", "w": "x.safetensors"}}))
    torch.save({"v": tensor(1, (2,))}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"places w in x\.bin, which does not contain it"):
        Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x.bin", "w": "x.bin"}}))


def test_a_key_in_two_files(tmp_path: Path) -> None:
    first, second = {"v": tensor(1, (2,)), "w": tensor(2, (2,))}, {"w": tensor(3, (2,))}
    save_file(first, tmp_path / "x-0.safetensors")
    save_file(second, tmp_path / "x-1.safetensors")
    with pytest.raises(CheckpointError, match=r"w is both in .*x-0\.safetensors and in .*x-1\.safetensors"):
        Checkpoint.open(tmp_path)
    # An index settles which of the two counts.
    checkpoint = Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x-0.safetensors", "w": "x-1.safetensors"}}))
    assert_same(read_all(checkpoint), {"v": first["v"], "w": second["w"]})
    checkpoint.close()
    folder = tmp_path / "torch"
    folder.mkdir()
    torch.save(first, folder / "x-0.bin")
    torch.save(second, folder / "x-1.bin")
    with pytest.raises(CheckpointError, match=r"w is both in .*x-0\.bin and in .*x-1\.bin"):
        Checkpoint.open(folder)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, sprung = tmp_path / "trap.pt", tmp_path / "sprung"
    torch.save({"w": tensor(1, (2,)), "x": Trap(sprung)}, path)
    with pytest.raises(CheckpointError, match=r"trap\.pt"):
        Checkpoint.open(path)
    assert not sprung.exists()


def test_torch_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"w": tensor(1, (2,))}, path)
    good = path.read_bytes()
    contents = {"empty": b"", "random": b"\x80\x02}q\x00." * 9, "cut": good[: len(good) // 2]}
    for case, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.pt"):
            pytest.fail(f"{case}: {Checkpoint.open(path).manifest}")
    for value in (tensor(1, (2,)), [tensor(1, (2,))], {"w": 3}, {"state_dict": {"w": 3}}):
        torch.save(value, path)
        message = (
            "no tensors found; top-level keys: " if isinstance(value, dict) else "expected a dict of tensors, got a "
        )
        with pytest.raises(CheckpointError, match=rf"bad\.pt: {message}"):
            Checkpoint.open(path)
