"""Manifests: what is parsed again, what a known manifest saves, and what changes its digest."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import epload
from epload import Checkpoint, CheckpointError, Manifest
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from support.checkpoint_kinds import (
    folder_without_index,
    one_file,
    small_state,
    the_index_itself,
)
from support.checkpoints import State, assert_same, index, read_all, tensor


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
    with pytest.raises(CheckpointError, match=str(path)):
        Checkpoint.open(path, known)
