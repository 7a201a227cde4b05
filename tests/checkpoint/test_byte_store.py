"""Byte stores: one contract for local files and for objects, and checkpoints over both."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import save
from torch import nn

import epload
from epload import Checkpoint, CheckpointError
from epload.checkpoint import finding, opening
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.local_store import LocalStore
from epload.checkpoint.manifest import FileFacts, OpenFiles, StoredTensor
from epload.checkpoint.object_store import ObjectStore
from support.checkpoints import assert_same, read_all, tensor

Make = Callable[[Path], ByteStore]


def _objects(folder: Path) -> ByteStore:
    """Object storage, by a scheme of fsspec."""
    return ObjectStore(f"file://{folder}")


STORES = pytest.mark.parametrize("make", [LocalStore, _objects])


def _opened(make: Make, folder: Path, nbytes: int = 1000) -> ByteStore:
    for number, name in enumerate("ab"):
        (folder / name).write_bytes(Random(number).randbytes(nbytes))
    store = make(folder)
    store.open(["a", "b"])
    return store


REQUEST = 16 << 20
"""No request of a local file has more bytes."""


@STORES
def test_ranges_go_to_their_places(make: Make, tmp_path: Path) -> None:
    store = _opened(make, tmp_path, REQUEST + 999)
    places = [(1, 7, 100), (0, 0, REQUEST + 999), (0, 3, 0), (1, 107, 20), (0, 5, 13)]
    rows, at = [], 3
    for file, offset, nbytes in places:
        rows.append((file, offset, at, nbytes))
        at += nbytes + 1  # the bytes in between stay
    buffer = torch.full((at,), 255, dtype=torch.uint8)
    expected = bytearray(b"\xff" * at)
    for file, offset, begin, nbytes in rows:
        expected[begin : begin + nbytes] = (tmp_path / "ab"[file]).read_bytes()[offset : offset + nbytes]
    for _ in range(2):  # opens the files again
        store.read(torch.tensor(rows), buffer)
        store.read(torch.empty(0, 4, dtype=torch.int64), buffer)
        assert buffer.numpy().tobytes() == expected
        store.close()


@STORES
def test_a_range_beyond_the_end_names_the_file(make: Make, tmp_path: Path) -> None:
    store = _opened(make, tmp_path)
    with pytest.raises(CheckpointError, match="b ends at byte 1000"):
        store.read(torch.tensor([[0, 0, 0, 10], [1, 990, 10, 11]]), torch.zeros(21, dtype=torch.uint8))
    store.close()


@STORES
def test_a_change_of_an_opened_file_is_seen(make: Make, tmp_path: Path) -> None:
    store = _opened(make, tmp_path)
    assert store.changed() == ""
    store.reopen()
    (tmp_path / "b").write_bytes(bytes(1000))
    assert re.search("b was (modified|replaced)", store.changed())
    with pytest.raises(CheckpointError, match=r"b was (modified|replaced)"):
        store.reopen()
    store.close()


class MemoryFile(StoredFile):
    def __init__(self, name: str, content: bytes) -> None:
        self.name, self.content, self.nbytes = name, content, len(content)

    def read(self, offset: int, nbytes: int) -> bytes:
        return self.content[offset : offset + nbytes]


class MemoryStore(ByteStore):
    """Stands for a store that is not part of epload."""

    def __init__(self, contents: dict[str, bytes]) -> None:
        super().__init__()
        self.contents = contents

    def names(self, standard: Sequence[str] = ()) -> list[str]:
        return sorted(self.contents)

    def path_of(self, name: str) -> str:
        return f"memory://{name}"

    def open_files(self, names: Sequence[str]) -> list[StoredFile]:
        return [MemoryFile(name, self.contents[name]) for name in names]

    def read(self, ranges: torch.Tensor, buffer: torch.Tensor) -> None:
        for file, offset, at, nbytes in ranges.tolist():
            memoryview(buffer.numpy())[at : at + nbytes] = self.files[file].read(offset, nbytes)


def _numbers(opened: OpenFiles) -> FileCheckpoint:
    """A format whose files are one vector each."""
    names = [file.name.partition(".")[0] for file in opened.store.files]
    shapes = [(file.nbytes // 4,) for file in opened.store.files]
    return FileCheckpoint.of(opened, (StoredTensor(names[i], torch.float32, shapes[i], 0, None, i) for i in range(len(names))))


def test_a_scheme_and_a_format_are_a_row_in_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}
    store = MemoryStore({"model.safetensors": save(state), "bias.numbers": tensor(3, (5,)).numpy().tobytes()})

    def locate(source: object, *_: object) -> tuple[ByteStore, str] | None:
        scheme, _, name = str(source).partition("://")
        return (MemoryStore(store.contents), name) if scheme == "memory" else None

    monkeypatch.setattr(finding, "STORES", (locate, *finding.STORES))
    monkeypatch.setattr(opening, "FORMATS", {".numbers": (FileFacts.of, _numbers), **opening.FORMATS})
    assert_same(read_all(Checkpoint.open("memory://bias.numbers")), {"bias": tensor(3, (5,))})
    for verify in (False, True):
        model = nn.Linear(3, 4)
        epload.load(model, "memory://", verify=verify, progress=False)
        assert_same(model.state_dict(), state)
