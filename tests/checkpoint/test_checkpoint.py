"""Checkpoints: each kind of source against the safetensors library, and reads by request."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from epload import Checkpoint, CheckpointError, Manifest
from epload.checkpoint import safetensors as safetensors_format
from epload.checkpoint.local_store import READ_BYTES
from epload.checkpoint.safetensors import read_layout
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from support.checkpoints import State, assert_same, framed, index, raw_bytes, read_all, tensor


def small_state() -> State:
    shapes = {"b": (3, 5), "a": (7,), "scalar": (), "empty": (0, 4), "odd": (13,), "c.weight": (2, 3, 4)}
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.int32, torch.uint8, torch.float16]
    return {
        name: tensor(i, shape, kind) for i, ((name, shape), kind) in enumerate(zip(shapes.items(), kinds, strict=True))
    }


def split(state: State) -> tuple[State, State]:
    names = list(state)
    return {n: state[n] for n in names[::2]}, {n: state[n] for n in names[1::2]}


# ---- sources ----


def one_file(folder: Path, state: State) -> Any:
    save_file(state, folder / "weights.safetensors")
    return folder / "weights.safetensors"


def folder_with_index(folder: Path, state: State) -> Any:
    parts = dict(
        zip(("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"), split(state), strict=True)
    )
    for name, part in parts.items():
        save_file(part, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    save_file({"stray": tensor(9, (2,))}, folder / "adapter.safetensors")
    return folder


def the_index_itself(folder: Path, state: State) -> Any:
    return folder_with_index(folder, state) / "model.safetensors.index.json"


def folder_without_index(folder: Path, state: State) -> Any:
    for name, part in zip("yx", split(state), strict=True):
        save_file(part, folder / f"{name}.safetensors")
    return str(folder)


def folder_with_model_file(folder: Path, state: State) -> Any:
    save_file(state, folder / "model.safetensors")
    save_file({"stray": tensor(9, (2,))}, folder / "adapter.safetensors")
    return folder


def torch_file(folder: Path, state: State) -> Any:
    torch.save(state, folder / "weights.pt")
    return folder / "weights.pt"


def torch_folder_with_index(folder: Path, state: State) -> Any:
    parts = dict(zip(("pytorch_model-1.bin", "pytorch_model-2.bin"), split(state), strict=True))
    for name, part in parts.items():
        torch.save(part, folder / name)
    weight_map = {key: name for name, part in parts.items() for key in part}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    torch.save({"stray": tensor(9, (2,))}, folder / "training.bin")
    return folder


def torch_folder(folder: Path, state: State) -> Any:
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def wrapped(folder: Path, state: State) -> Any:
    torch.save({"state_dict": state}, folder / "trained.pth")
    return folder / "trained.pth"


def plain_dict(folder: Path, state: State) -> Any:
    return state


def opened(folder: Path, state: State) -> Any:
    return Checkpoint.open(one_file(folder, state))


SOURCES = [
    one_file, folder_with_index, the_index_itself, folder_without_index, folder_with_model_file, torch_file,
    torch_folder_with_index, torch_folder, wrapped, plain_dict, opened,
]  # fmt: skip


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_every_source_gives_the_same_tensors(source: Callable[[Path, State], Any], tmp_path: Path) -> None:
    state = small_state()
    checkpoint = Checkpoint.open(source(tmp_path, state))
    assert_same(read_all(checkpoint), state)
    assert checkpoint.manifest.nbytes == sum(value.nbytes for value in state.values())
    checkpoint.close()
    assert_same(read_all(checkpoint), state)  # usable again after close
    checkpoint.close()


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_any_pieces_in_any_order(source: Callable[[Path, State], Any], tmp_path: Path) -> None:
    state = {"x": tensor(1, (50,)), "y": tensor(2, (31,), torch.bfloat16), "z": tensor(3, (9, 9), torch.uint8)}
    checkpoint = Checkpoint.open(source(tmp_path, state))
    number = {name: i for i, name in enumerate(checkpoint.manifest.names)}
    wanted = [("z", 5, 0, 7), ("x", 100, 16, 100), ("y", 0, 128, 62), ("x", 0, 192, 4), ("z", 80, 208, 1)]
    bucket = torch.full((256,), 255, dtype=torch.uint8)
    checkpoint.fill(bucket, [Piece(number[name], start, at, nbytes) for name, start, at, nbytes in wanted])
    expected = torch.full((256,), 255, dtype=torch.uint8)
    for name, start, at, nbytes in wanted:
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


# ---- requests ----


class Requests:
    """Stands for os.preadv; notes the sizes asked for, and may give back fewer bytes than that."""

    def __init__(self, most: int | None = None) -> None:
        self.sizes: list[list[int]] = []
        self._real = os.preadv
        self._most = most

    def __call__(self, fd: int, views: Sequence[memoryview], offset: int) -> int:
        self.sizes.append([len(view) for view in views])
        if self._most is None:
            return self._real(fd, views, offset)
        kept, left = [], self._most
        for view in views:
            kept.append(view[:left])
            left -= len(kept[-1])
        return self._real(fd, kept, offset)


@pytest.mark.parametrize(
    ("size", "count", "requests"), [(64, 40, 1), (13, 40, 1), (13, 1100, 3)], ids=["aligned", "padded", "many"]
)
def test_adjacent_tensors_are_one_request(
    size: int, count: int, requests: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i:04}": tensor(i, (size,), torch.uint8) for i in range(count)}
    checkpoint = Checkpoint.open(one_file(tmp_path, state))
    seen = Requests()
    monkeypatch.setattr(os, "preadv", seen)
    got = read_all(checkpoint)
    checkpoint.close()
    assert len(seen.sizes) == requests
    assert max(map(len, seen.sizes)) <= 1024  # IOV_MAX of Linux
    assert sum(map(sum, seen.sizes)) == size * count
    assert_same(got, state)


def test_tensors_that_are_not_adjacent_are_requests_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {f"t{i}": tensor(i, (64,), torch.uint8) for i in range(5)}
    checkpoint = Checkpoint.open(one_file(tmp_path, state))
    seen = Requests()
    monkeypatch.setattr(os, "preadv", seen)
    bucket = torch.zeros(256, dtype=torch.uint8)
    checkpoint.fill(bucket, [Piece(0, 0, 0, 64), Piece(2, 0, 64, 64), Piece(3, 0, 128, 64)])
    checkpoint.close()
    assert sorted(seen.sizes) == [[64], [128]]


def test_requests_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"small": tensor(1, (100,), torch.uint8), "large": tensor(2, ((2 * READ_BYTES + 999) // 4,), torch.int32)}
    checkpoint = Checkpoint.open(one_file(tmp_path, state))
    seen = Requests()
    monkeypatch.setattr(os, "preadv", seen)
    got = read_all(checkpoint)
    checkpoint.close()
    assert READ_BYTES == 16 << 20
    assert len(seen.sizes) == 3
    assert max(map(sum, seen.sizes)) <= READ_BYTES
    assert all(torch.equal(got[name], value) for name, value in state.items())


@pytest.mark.parametrize("most", [1, 13, 100])
def test_short_reads_are_continued(most: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {f"t{i}": tensor(i, (17 + i,), torch.uint8) for i in range(6)}
    checkpoint = Checkpoint.open(one_file(tmp_path, state))
    monkeypatch.setattr(os, "preadv", Requests(most))
    got = read_all(checkpoint)
    checkpoint.close()
    assert_same(got, state)


def test_a_file_that_shrinks_after_opening(tmp_path: Path) -> None:
    path = one_file(tmp_path, {"a": tensor(1, (100,)), "b": tensor(2, (100,))})
    checkpoint = Checkpoint.open(path)
    os.truncate(path, path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match=str(path)):
        read_all(checkpoint)
    checkpoint.close()


def test_a_file_that_goes_away_after_opening(tmp_path: Path) -> None:
    path = one_file(tmp_path, {"a": tensor(1, (100,))})
    checkpoint = Checkpoint.open(path)
    checkpoint.close()
    path.unlink()
    assert checkpoint.changed() == f"{path} was removed"
    with pytest.raises(CheckpointError, match=str(path)):
        read_all(checkpoint)


def test_a_read_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, views: object, offset: int) -> int:
        raise OSError(5, "Input/output error")

    path = one_file(tmp_path, {"a": tensor(1, (100,))})
    checkpoint = Checkpoint.open(path)
    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(CheckpointError, match=f"{path}.*Input/output error"):
        read_all(checkpoint)
    checkpoint.close()


# ---- manifest ----


def test_compact_round_trip() -> None:
    state = {f"t.{name}.é\u4e16": tensor(i, (i, 2), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())}
    manifest = Checkpoint.open(state).manifest
    again = Manifest.from_compact(manifest.compact, manifest.provenance)
    assert again == manifest
    assert again.digest == manifest.digest
    nothing = Manifest((), (), (), "nothing")
    assert Manifest.from_compact(nothing.compact, nothing.provenance) == nothing


def _twice(
    first: State, second: State, folder: Path, how: Callable[[Path, State], Any]
) -> tuple[Checkpoint, Checkpoint]:
    """A checkpoint, and another that is opened when the first is known."""
    folders = folder / "first", folder / "second"
    for each in folders:
        each.mkdir()
    known = Checkpoint.open(how(folders[0], first))
    return known, Checkpoint.open(how(folders[1], second), known.manifest)


FILES = [one_file, folder_with_index, the_index_itself, folder_without_index, folder_with_model_file]


@pytest.mark.parametrize("source", FILES, ids=lambda f: f.__name__)
def test_headers_that_are_known_are_not_parsed_again(source: Callable[[Path, State], Any], tmp_path: Path) -> None:
    first = small_state()
    second = {name: value.flip(0) if value.ndim else value for name, value in first.items()}
    with mock.patch.object(safetensors_format, "read_layout", wraps=read_layout) as parse:
        known, again = _twice(first, second, tmp_path, source)
    parsed_once = {call.args[0].path.parent.name for call in parse.call_args_list}
    assert parsed_once == {"first"}
    assert_same(read_all(again), second)
    assert again.manifest.identity == known.manifest.identity
    assert "second" in again.manifest.source
    assert again.manifest.provenance == Checkpoint.open(source(tmp_path / "second", second)).manifest.provenance
    joined = Checkpoint.join(source(tmp_path / "second", second), again.manifest)
    assert_same(read_all(joined), second)
    for each in (known, again, joined):
        each.close()


@pytest.mark.parametrize("source", FILES, ids=lambda f: f.__name__)
@pytest.mark.parametrize("change", ["name", "shape", "dtype", "one less", "shorter"])
def test_a_header_that_changed_is_parsed(source: Callable[[Path, State], Any], change: str, tmp_path: Path) -> None:
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
    known, again = _twice(first, second, tmp_path, source)
    assert_same(read_all(again), second)
    assert again.manifest.identity != known.manifest.identity
    again.close()


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
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoint.open(path, known)


def test_digest_changes_with_any_change() -> None:
    base = Manifest(("a", "b", "c"), ((2, 3), (6,), (2, 3)), (torch.float32, torch.float32, torch.int32), "here")
    changed = [
        replace(base, names=("a", "b", "d")),
        replace(base, names=("b", "a", "c")),
        replace(base, names=('a","b', "b", "c")),
        replace(base, shapes=((3, 2), (6,), (2, 3))),
        replace(base, shapes=((2, 3), (6,), (6,))),
        replace(base, shapes=((2, 3), (6, 1), (2, 3))),
        replace(base, dtypes=(torch.float32, torch.int32, torch.int32)),
        replace(base, dtypes=(torch.bfloat16, torch.bfloat16, torch.int32)),
        Manifest(base.names[:2], base.shapes[:2], base.dtypes[:2], "here"),
    ]
    assert len({manifest.digest for manifest in [base, *changed]}) == len(changed) + 1
    assert replace(base, source="elsewhere").digest == base.digest


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


def test_consume_starts_over_after_a_load_that_stopped_inside_a_tensor() -> None:
    state = {"a": tensor(1, (20,))}
    checkpoint = Checkpoint.from_state_dict(state, consume=True)
    bucket = torch.zeros(80, dtype=torch.uint8)
    checkpoint.fill(bucket, [Piece(0, 0, 0, 40)])  # and then some rank failed
    checkpoint.fill(bucket, [Piece(0, 0, 0, 40)])
    checkpoint.fill(bucket, [Piece(0, 40, 40, 40)])
    assert not state
    assert raw_bytes(tensor(1, (20,))) == bytes(bucket.tolist())


def test_a_state_dict_is_kept_without_consume() -> None:
    state = {"a": tensor(1, (10,))}
    for _ in range(2):
        assert_same(read_all(Checkpoint.from_state_dict(state)), state)
    assert list(state) == ["a"]


def test_tensors_that_are_not_contiguous() -> None:
    base = tensor(1, (6, 8))
    values = torch.complex(tensor(2, (4,), torch.int32).float(), torch.ones(4))
    state = {
        "transposed": base.t(),
        "sliced": base[::2, 1:5],
        "expanded": base[:1].expand(3, 8),
        "parameter": torch.nn.Parameter(tensor(3, (4,), torch.bfloat16)),
        "conjugate": values.conj(),
        "imaginary": values.conj().imag,
    }
    expected = {name: value.detach().clone().resolve_conj().resolve_neg() for name, value in state.items()}
    assert_same(read_all(Checkpoint.open(state)), expected)


@pytest.mark.parametrize("source", [3, None, [tensor(1, (2,))], b"x.safetensors"], ids=["int", "none", "list", "bytes"])
def test_a_source_of_the_wrong_type(source: Any) -> None:
    with pytest.raises(TypeError, match=r"expected a checkpoint as (a|one) path"):
        Checkpoint.open(source)


def test_a_dict_with_something_that_is_no_full_tensor() -> None:
    with pytest.raises(TypeError, match="no tensors found; top-level keys: a, b"):
        Checkpoint.open({"a": {"w": tensor(1, (2,))}, "b": [1, 2]})
    with pytest.raises(CheckpointError, match="b is not a dense tensor"):
        Checkpoint.open({"a": tensor(1, (2,)), "b": torch.eye(3).to_sparse()})
    with pytest.raises(CheckpointError, match="b is not a dense tensor"):
        Checkpoint.open({"b": torch.empty(3, device="meta")})
    with pytest.raises((TypeError, CheckpointError)):
        Checkpoint.open({1: tensor(1, (2,))})
