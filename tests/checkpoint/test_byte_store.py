"""Byte stores: one contract for local files and for a store that is not made of files, and checkpoints over both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from epload import CheckpointError
from epload.checkpoint import safetensors, torch_file
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_checkpoint import OpenFiles
from epload.checkpoint.local_store import LocalFile, LocalStore
from epload.checkpoint.object_clients import Address
from epload.checkpoint.object_store import ObjectFolder
from support.checkpoints import assert_same, read_all, tensor


class MemoryFile(StoredFile):
    """Bytes in memory."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        self.path = path
        self.content = path.read_bytes()
        self.nbytes = len(self.content)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.content[offset : offset + nbytes]

    def changed(self) -> str:
        return f"{self.name} was modified" if self.path.read_bytes() != self.content else ""


class MemoryStore(ByteStore):
    """Stands for a store that is not part of epload: no descriptors, no memory mapping."""

    def read(self, ranges: Tensor, buffer: Tensor) -> None:
        for file, offset, at, nbytes in ranges.tolist():
            part = self.files[file].read(offset, nbytes)
            if len(part) < nbytes:
                raise CheckpointError(f"{self.files[file].name} ends at byte {offset + len(part)}")
            memoryview(buffer.numpy())[at : at + nbytes] = part


def _local(paths: Sequence[Path]) -> ByteStore:
    return LocalStore([LocalFile(path) for path in paths])


def _memory(paths: Sequence[Path]) -> ByteStore:
    return MemoryStore([MemoryFile(path) for path in paths])


def _objects(paths: Sequence[Path]) -> ByteStore:
    """Object storage, by a scheme of fsspec."""
    folder = ObjectFolder(Address(f"file://{paths[0].parent}"))
    return folder.store(folder.open([path.name for path in paths]))


STORES = pytest.mark.parametrize("make", [_local, _memory, _objects])
Make = Callable[[Sequence[Path]], ByteStore]


def _files(folder: Path, nbytes: int = 1000) -> list[Path]:
    paths = [folder / "a", folder / "b"]
    for number, path in enumerate(paths):
        path.write_bytes(tensor(number, (nbytes,), torch.uint8).numpy().tobytes())
    return paths


REQUEST = 16 << 20
"""No request of a local file has more bytes."""


@STORES
def test_ranges_go_to_their_places(make: Make, tmp_path: Path) -> None:
    paths = _files(tmp_path, 2 * REQUEST + 999)
    store = make(paths)
    places = [(1, 7, 100), (0, 0, 2 * REQUEST + 999), (0, 3, 0), (1, 107, 20), (0, 5, 13)]
    rows, at = [], 3
    for file, offset, nbytes in places:
        rows.append((file, offset, at, nbytes))
        at += nbytes + 1  # the bytes in between stay
    buffer = torch.full((at,), 255, dtype=torch.uint8)
    expected = bytearray(b"\xff" * at)
    for file, offset, begin, nbytes in rows:
        expected[begin : begin + nbytes] = paths[file].read_bytes()[offset : offset + nbytes]
    for _ in range(2):  # opens the files again
        store.read(torch.tensor(rows), buffer)
        store.read(torch.empty(0, 4, dtype=torch.int64), buffer)
        assert buffer.numpy().tobytes() == expected
        store.close()


@STORES
def test_a_range_beyond_the_end_names_the_file(make: Make, tmp_path: Path) -> None:
    store = make(_files(tmp_path))
    with pytest.raises(CheckpointError, match="b ends at byte 1000"):
        store.read(torch.tensor([[0, 0, 0, 10], [1, 990, 10, 11]]), torch.zeros(21, dtype=torch.uint8))
    store.close()


@STORES
def test_a_change_of_an_opened_file_is_seen(make: Make, tmp_path: Path) -> None:
    paths = _files(tmp_path)
    store = make(paths)
    assert store.changed() == ""
    store.reopen()
    paths[1].write_bytes(bytes(1000))
    assert re.search("b was (modified|replaced)", store.changed())
    with pytest.raises(CheckpointError, match=r"b was (modified|replaced)"):
        store.reopen()
    store.close()


@STORES
@pytest.mark.parametrize("kind", ["safetensors", "torch", "views"])
def test_a_checkpoint_over_any_store(make: Make, kind: str, tmp_path: Path) -> None:
    state = {"weight": tensor(1, (4, 3)) if kind != "views" else tensor(1, (3, 4)).t(), "bias": tensor(2, (4,))}
    path = tmp_path / "model"
    if kind == "safetensors":
        save_file(state, path)
    else:
        torch.save(state, path)
    format = safetensors.FORMAT if kind == "safetensors" else torch_file.FORMAT
    store = make([path])
    facts = [format.facts(file) for file in store.files]
    checkpoint = format.read(OpenFiles(store.files, facts, store, str(path), None))
    assert (checkpoint.manifest.locations is None) == (kind == "views")
    assert_same(read_all(checkpoint), state)
    for verify in (False, True):
        model = nn.Linear(3, 4)
        epload.load(model, checkpoint, verify=verify, progress=False)
        assert_same(model.state_dict(), state)
