"""Checkpoints and their manifests: each kind of source against the safetensors library, over any store of bytes."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from safetensors.torch import to_bytes as to_bytes
from torch import Tensor, nn

import epload
from epload import Checkpoint, CheckpointError, Manifest
from epload.checkpoint import finding, object_store, opening
from epload.checkpoint.byte_store import ByteStore, StoredFile
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.local_store import LocalStore
from epload.checkpoint.object_store import ObjectStore
from epload.checkpoint.open_files import FileFacts, OpenFiles, StoredTensor
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from page_cache import cached
from support.checkpoint_kinds import (
    SOURCES,
    folder_without_index,
    one_file,
    small_state,
    the_index_itself,
)
from support.checkpoints import State, assert_same, framed, index, make_cold, raw_bytes, read_all, tensor
from support.failures import must_raise
from support.traced_reads import Traced, fill


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
    must_raise(CheckpointError, "a was consumed", checkpoint.fill, bucket, [Piece(0, 0, 0, 40)])


def test_a_dict_with_something_that_is_no_full_tensor() -> None:
    with pytest.raises(TypeError, match="no tensors found; top-level keys: a, b"):
        Checkpoint.open({"a": {"w": tensor(1, (2,))}, "b": [1, 2]})
    with pytest.raises(CheckpointError, match="b is not a dense tensor"):
        Checkpoint.open({"a": tensor(1, (2,)), "b": torch.eye(3).to_sparse()})
    must_raise(CheckpointError, "b is not a dense tensor", Checkpoint.open, {"b": torch.empty(3, device="meta")})
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


def test_compact_round_trip(tmp_path: Path) -> None:
    state = {f"t.{name}.é\u4e16": tensor(i, (i, 2), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())}
    manifest = Checkpoint.open(state).manifest
    again = Manifest.from_compact(manifest.compact, manifest.provenance)
    assert again == manifest
    assert again.digest == manifest.digest
    alike = {f"{i}": tensor(i, (3 if i < 40 else i,), torch.bfloat16 if i < 50 else torch.float32) for i in range(60)}
    for name, value in (("alike", alike), ("different", {**alike, **state})):
        save_file(value, tmp_path / f"{name}.safetensors")
        manifest = Checkpoint.open(tmp_path / f"{name}.safetensors").manifest
        again = Manifest.from_compact(manifest.compact, manifest.provenance)
        assert (again.names, again.shapes, again.dtypes) == (manifest.names, manifest.shapes, manifest.dtypes)
        assert again.nbytes_of() == [value[key].nbytes for key in again.names]
        assert again.nbytes == manifest.nbytes == sum(each.nbytes for each in value.values())
        assert [*map(again.locations.of_tensor, range(60))] == [*map(manifest.locations.of_tensor, range(60))]
        assert again.digest == manifest.digest
    nothing = Manifest((), (), (), "nothing")
    assert Manifest.from_compact(nothing.compact, nothing.provenance) == nothing


def _manifest(names: tuple[str, ...], shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.uint8) -> Manifest:
    return Manifest(names, (shape,) * len(names), (dtype,) * len(names), "a test")


ODD_NAMES = ["\ud83d\ude00", "\U0001f600", "\ud83d", "\\ud83d\\ude00", "a\nb", 'a","b', "\x00", "\u2028", ""]


def test_odd_names_arrive_as_they_are_and_differ() -> None:
    """Two surrogates are not the character that they encode in UTF-16."""
    manifests = [_manifest((name,)) for name in ODD_NAMES] + [_manifest(tuple(ODD_NAMES))]
    for manifest in manifests:
        again = Manifest.from_compact(manifest.compact, manifest.provenance)
        assert (again.names, again.digest, again.identity) == (manifest.names, manifest.digest, manifest.identity)
    assert len({manifest.digest for manifest in manifests}) == len(manifests)
    assert len({manifest.identity for manifest in manifests}) == len(manifests)


def test_an_expanded_tensor_does_not_get_in_the_way(tmp_path: Path) -> None:
    huge = torch.zeros(1, dtype=torch.float64).expand(2**31, 2**31)
    state = {"weight": torch.ones(1, 2), "bias": torch.ones(1), "huge": huge}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for source in (state, tmp_path / "pytorch_model.bin"):
        model = torch.nn.Linear(2, 1)
        report = epload.load(model, source, strict=False, progress=False)
        assert report.unexpected_keys == ["huge"]
        assert_same(dict(model.state_dict()), {name: state[name] for name in ("weight", "bias")})


@pytest.mark.parametrize("change", ["", "name", "shape", "dtype", "one less", "shorter"])
@pytest.mark.parametrize("source", [one_file, the_index_itself, folder_without_index], ids=lambda f: f.__name__)
def test_whatever_is_known_a_checkpoint_is_opened_as_it_is(
    source: Callable[[Path, State], Any], change: str, tmp_path: Path
) -> None:
    first = {f"t{i}": tensor(i, (6, 4)) for i in range(4)}
    second = {name: value * 2 for name, value in first.items()}
    match change:
        case "name":
            second["u0"] = second.pop("t0")
        case "shape":
            second["t1"] = second["t1"].reshape(4, 6)
        case "dtype":
            second["t1"] = second["t1"].view(torch.int32)
        case "one less":
            del second["t2"]
        case "shorter":
            second["t3"] = second["t3"][:2]
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    known = Checkpoint.open(source(folders[0], first)).manifest
    path = source(folders[1], second)
    again = Checkpoint.open(path, known)
    assert_same(read_all(again), second)
    assert (again.manifest.identity == known.identity) == (change == "")
    assert again.manifest.provenance == Checkpoint.open(path).manifest.provenance
    assert_same(read_all(join_source(path, again.manifest)), second)


def test_an_index_that_changed_is_read(tmp_path: Path) -> None:
    """The same files with the same headers, but another of two holds the tensor."""
    a, b = {"w": tensor(1, (3,))}, {"w": tensor(2, (3,)), "v": tensor(3, (3,))}
    save_file(a, tmp_path / "x.safetensors")
    save_file(b, tmp_path / "y.safetensors")
    place = {"w": "x.safetensors", "v": "y.safetensors"}
    known = Checkpoint.open(index(tmp_path, {"weight_map": place}))
    assert_same(read_all(known), {**b, **a})
    place["w"] = "y.safetensors"
    again = Checkpoint.open(
        index(tmp_path, {"weight_map": {"v": "y.safetensors", "w": "y.safetensors"}}), known.manifest
    )
    assert_same(read_all(again), b)
    for each in (known, again):
        each.close()


@pytest.mark.parametrize("damage", ["truncated", "no header", "header cut"])
def test_a_damaged_file_is_refused_also_when_its_like_is_known(damage: str, tmp_path: Path) -> None:
    path = one_file(tmp_path, small_state())
    known = Checkpoint.open(path).manifest
    raw = path.read_bytes()
    path.write_bytes({"truncated": raw[:-1], "no header": raw[:4], "header cut": raw[:20]}[damage])
    must_raise(CheckpointError, str(path), Checkpoint.open, path, known)


def read_in_order(path: Path, state: Mapping[str, Tensor], most: int = 0) -> Traced:
    """All tensors, one behind the other and 64 bytes apart; checks that they are the state's."""
    names, pieces, at = Checkpoint.open(path).manifest.names, [], 64
    for number, name in enumerate(names):
        pieces.append(Piece(number, 0, at, state[name].nbytes))
        at += state[name].nbytes + 64
    traced = fill(path, pieces, at, most=most)
    assert not traced.error
    for piece in pieces:
        got = traced.buffer[piece.bucket_offset :][: piece.nbytes]
        assert torch.equal(got, state[names[piece.tensor]].reshape(-1).view(torch.uint8))
    return traced


@pytest.mark.parametrize("most", [1, 13, 100])
def test_short_reads_are_continued(most: int, tmp_path: Path) -> None:
    state = {f"t{i}": tensor(i, (17 + i,), torch.uint8) for i in range(6)}
    seen = read_in_order(one_file(tmp_path, state), state, most).requests
    assert len(seen) >= sum(value.nbytes for value in state.values()) / most


def test_a_read_error_names_the_file(tmp_path: Path) -> None:
    path = one_file(tmp_path, {"a": tensor(1, (100,))})
    traced = fill(path, [Piece(0, 0, 0, 400)], 400, error=errno.EIO)
    assert str(path) in traced.error
    assert "Input/output error" in traced.error


@pytest.fixture
def large_file(tmp_path: Path) -> Path:
    """A cold file of one tensor of 1 MiB."""
    path = one_file(tmp_path, {"a": tensor(1, (1 << 20,), torch.uint8)})
    make_cold(path)
    return path


@pytest.mark.parametrize("refused", [0, errno.EINVAL], ids=["read", "refused"])
def test_a_cold_file_is_read_past_the_cache_unless_its_file_system_refuses(refused: int, large_file: Path) -> None:
    traced = fill(large_file, [Piece(0, 0, 0, 1 << 20)], 1 << 20, direct_error=refused)
    assert traced.error == ""
    assert torch.equal(traced.buffer, tensor(1, (1 << 20,), torch.uint8))
    assert (cached(large_file) > 0.9) == bool(refused)


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
    must_raise(CheckpointError, "b was (modified|replaced)", store.reopen)
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
    return FileCheckpoint.of(
        opened, (StoredTensor(names[i], torch.float32, shapes[i], 0, None, i) for i in range(len(names)))
    )


def test_a_scheme_and_a_format_are_a_row_in_a_table_each(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}
    store = MemoryStore({"model.safetensors": to_bytes(state), "bias.numbers": tensor(3, (5,)).numpy().tobytes()})

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
