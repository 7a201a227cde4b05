"""Torch files: what is loaded is what torch loads."""

from __future__ import annotations

import collections
import os
import re
import zipfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from epload import Checkpoint, CheckpointError, HierarchicalLoader
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from support.checkpoints import assert_same, index, raw_bytes, read_all, tensor
from support.failures import must_raise


def _state() -> dict[str, Any]:
    base = tensor(1, (7, 6))
    return {
        **{f"of.{name}": tensor(i, (3, 5), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())},
        "base": base,
        "tied": base,
        "rows of base": base[2:5],
        "parameter": nn.Parameter(tensor(2, (4,))),
        "scalar": tensor(3, ()),
        "empty": torch.empty(0, 3),
    }


def _loader() -> HierarchicalLoader:
    return HierarchicalLoader(progress=False)


def test_tensors_of_a_torch_file_are_ranges_of_it(tmp_path: Path) -> None:
    """Views that are none are read all the same."""
    path = tmp_path / "model.pt"
    torch.save(_state(), path)
    checkpoint = Checkpoint.open(path)
    assert_same(read_all(checkpoint), _state())
    assert checkpoint.manifest.locations is not None
    assert all(a <= b for a, b in pairwise(checkpoint.manifest.locations.offset.tolist()))
    assert_same(read_all(join_source(path, checkpoint.manifest)), _state())
    for view in ("transposed", "inner columns", "conjugate", "expanded"):
        state = {**_state(), view: SHAPED[view]()}
        torch.save(state, path)
        assert_same(read_all(Checkpoint.open(path)), {**state, view: state[view].resolve_conj()})


def test_the_format_before_torch_1_6(tmp_path: Path) -> None:
    since = re.compile(r"torch\.(uint16|uint32|uint64|float8.*)")
    state = {name: value for name, value in _state().items() if not since.fullmatch(str(value.dtype))}
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint.open(tmp_path / "model.bin")
    assert_same(read_all(checkpoint), state)
    assert checkpoint.changed() == ""
    os.truncate(tmp_path / "model.bin", 5)
    assert "was truncated" in checkpoint.changed()


def test_a_torch_file_that_is_laid_out_otherwise_is_parsed_again(tmp_path: Path) -> None:
    model, path, loader = nn.Linear(4, 4), tmp_path / "model.pt", _loader()
    weight, bias = tensor(1, (4, 4)), tensor(2, (4,))
    states = [
        {"weight": weight, "bias": bias}, {"bias": bias + 1, "weight": weight + 1}, {"weight": weight.t(), "bias": bias},
        {"weight": weight, "bias": tensor(8, (16,))[4:8]},
    ]  # fmt: skip
    for state in states * 2:
        torch.save(state, path)
        loader.load(model, path)
        assert_same(model.state_dict(), state)


OTHERS: dict[str, Any] = {
    "head._extra_state": {"scale": 3, "raw": b"\x00"}, "step": 17, "name": "a model", "nothing": None,
    "config": {"hidden": {"size": 3}}, "sizes": [1, 2],
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "wrapper"),
    [("zip", "state_dict"), ("before 1.6", "model"), ("views", ""), ("index", "model"), ("dict", "")],
)
def test_entries_that_hold_no_tensor_are_listed_and_left_alone(source: str, wrapper: str, tmp_path: Path) -> None:
    weight = tensor(1, (4, 3)) if source != "views" else tensor(1, (3, 4)).t()
    state: dict[str, Any] = {"weight": weight, **OTHERS, "bias": tensor(2, (4,))}
    whole = {wrapper: state, "epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(2)}}}} if wrapper else state
    path: Any = tmp_path / "pytorch_model.bin"
    if source == "dict":
        path = state
    else:
        torch.save(whole, path, _use_new_zipfile_serialization=source != "before 1.6")
    if source == "index":
        path = index(tmp_path, {"weight_map": dict.fromkeys(("weight", "bias", "step"), "pytorch_model.bin")})
    model = nn.Linear(3, 4)
    report = _loader().load(model, path)
    assert_same(model.state_dict(), {"weight": weight, "bias": state["bias"]})
    other_keys = {"epoch", "optimizer"} if wrapper and source != "dict" else set()
    assert set(report.ignored_keys) == {*OTHERS, *other_keys}
    assert report.unexpected_keys == []
    assert re.search(r"\n  ignored +\d+ tensors?: ", str(report))


@pytest.mark.parametrize(("wrapper", "zipped"), [("", True), ("state_dict", False)])
def test_two_state_dicts_in_one_file(wrapper: str, zipped: bool, tmp_path: Path) -> None:
    one = {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}
    both: dict[str, Any] = {"model": one, "state_dict": {name: value + 1 for name, value in one.items()}, "step": 3}
    path = tmp_path / "model.pt"
    torch.save({wrapper: both} if wrapper else both, path, _use_new_zipfile_serialization=zipped)
    place = "torch.load(FILE)['state_dict']['model']" if wrapper else "torch.load(FILE)['model']"
    message = f"has a state dict under each of 'state_dict' and 'model'; pass the one that is meant, e.g. {place}"
    must_raise(CheckpointError, re.escape(message), Checkpoint.open, path)
    torch.save(both | {"model": {}}, path, _use_new_zipfile_serialization=zipped)
    assert_same(read_all(Checkpoint.open(path)), both["state_dict"])


def test_a_dict_of_no_tensors(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for known in (None, Checkpoint.open({}).manifest):
        text = r"optimizer\.pt: no tensors found; top-level keys: state, param_groups$"
        must_raise(CheckpointError, text, Checkpoint.open, tmp_path / "optimizer.pt", known)
    text = "state dict: no tensors found; top-level keys: state, param_groups"
    must_raise(TypeError, text, _loader().load, model, optimizer.state_dict())
    # An index may not name files of two formats.
    save_file({"weight": tensor(1, (4, 3))}, tmp_path / "a.safetensors")
    path = index(tmp_path, {"weight_map": {"weight": "a.safetensors", "bias": "optimizer.pt"}})
    must_raise(CheckpointError, r"several formats \(.*; expected one format", Checkpoint.open, path)


SHAPED: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: tensor(1, (64, 50)).t(),
    "inner columns": lambda: tensor(2, (30, 80))[:, 3:70],
    "permuted": lambda: tensor(3, (9, 10, 11)).permute(2, 0, 1),
    "every other": lambda: tensor(4, (40, 60))[::2, ::3],
    "conjugate": lambda: torch.complex(torch.arange(900.0), torch.ones(900)).view(30, 30).conj(),
    "negative": lambda: torch._neg_view(torch.arange(900.0).view(30, 30)),
    "contiguous": lambda: tensor(5, (30, 50)),
    "expanded": lambda: tensor(6, (1, 50)).expand(30, 50),
    "imaginary": lambda: torch.complex(torch.arange(900.0), torch.ones(900)).conj().imag,
    "parameter": lambda: nn.Parameter(tensor(7, (400,), torch.bfloat16)),
}


@pytest.mark.parametrize("shaped", SHAPED)
def test_pieces_of_any_tensor(shaped: str) -> None:
    """Pieces that are no box of the tensor, some of them not even whole elements."""
    value = SHAPED[shaped]()
    expected = raw_bytes(value.detach().resolve_conj().resolve_neg())
    checkpoint = Checkpoint.open({"value": value})
    for length in (100, 402, 1000):
        for begin in range(0, value.nbytes, length):
            nbytes = min(length, value.nbytes - begin)
            bucket = torch.full((64 + nbytes + 8,), 255, dtype=torch.uint8)
            checkpoint.fill(bucket, [Piece(0, begin, 64, nbytes)])
            assert bytes(bucket.tolist()) == b"\xff" * 64 + expected[begin:][:nbytes] + b"\xff" * 8


def test_compressed_archives(tmp_path: Path) -> None:
    """An archive that was zipped again. torch loads them unless it maps them, and then takes the compressed bytes."""
    state = {"zeros": torch.zeros(1000), "noise": torch.randint(256, (20_000,), dtype=torch.uint8)}
    torch.save(state, tmp_path / "stored.bin")
    (tmp_path / "other").mkdir()
    with (
        zipfile.ZipFile(tmp_path / "stored.bin") as stored,
        zipfile.ZipFile(tmp_path / "other" / "m.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    assert_same(read_all(Checkpoint.open(tmp_path / "other")), state)


def _of_many_kinds() -> dict[str, Any]:
    """Returns tensors and whatever else checkpoints have."""
    weights = {f"layers.{i}.w": tensor(i, (i % 4, 2)) for i in range(300)}  # with memo indices of one byte and of four
    shared: list[Any] = [1, {"x": (1, (2, 3))}]
    return {
        **weights,
        "scalar": torch.tensor(3.5), "high": tensor(7, (2, 3, 1, 2, 1)), "tied": weights["layers.3.w"],
        "view": tensor(5, (4, 6))[1:, ::2], "parameter": nn.Parameter(tensor(6, (3,))),
        "groups": [{"betas": (0.9, 0.999), "lr": 1e-3} for _ in range(50)], "shared": [shared] * 20,
        "random": (3, tuple(range(625)), None),
        "keys": {(0, 1): "a", "b": 2**40, 2.5: -(2**70), None: True, b"c": bytearray(b"d\xff"), ("x", (1, 2)): {1, 2}},
        "ordered": collections.OrderedDict(a=1), "counted": collections.Counter("hello"), "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]), "device": torch.device("cpu"), "complex": 1 + 2j,
    }  # fmt: skip


@pytest.mark.parametrize("format", [True, False], ids=["archive", "legacy"])
def test_whatever_torch_saves_is_loaded(format: bool, tmp_path: Path) -> None:
    state = _of_many_kinds()
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=format)
    expected = torch.load(tmp_path / "m.bin", weights_only=True)
    tensors = {name: value.detach() for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 305
    assert_same(read_all(Checkpoint.open(tmp_path / "m.bin")), tensors)
