"""Torch files as ranges of bytes, entries that hold no tensor, and state dicts of which no more than a piece is copied."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from epload import Checkpoint, CheckpointError, HierarchicalLoader, Manifest
from epload.checkpoint.file_checkpoint import FileCheckpoint
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from support.checkpoints import assert_same, raw_bytes, read_all, tensor


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


VIEWS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: tensor(4, (5, 3)).t(),
    "columns": lambda: tensor(5, (6, 8))[:, 2:5],
    "conjugate": lambda: torch.complex(tensor(6, (4,)).nan_to_num(), torch.ones(4)).conj(),
    "expanded": lambda: tensor(7, (1, 3)).expand(4, 3),
}


def _loader() -> HierarchicalLoader:
    return HierarchicalLoader(progress=False)


def test_tensors_of_a_torch_file_are_ranges_of_it(tmp_path: Path) -> None:
    torch.save(_state(), tmp_path / "model.pt")
    checkpoint = Checkpoint.open(tmp_path / "model.pt")
    assert type(checkpoint) is FileCheckpoint
    assert_same(read_all(checkpoint), _state())
    assert checkpoint.manifest.locations is not None
    assert all(a <= b for a, b in pairwise(checkpoint.manifest.locations.offset.tolist()))
    joined = join_source(
        tmp_path / "model.pt", Manifest.from_compact(checkpoint.manifest.compact, checkpoint.manifest.provenance)
    )
    assert_same(read_all(joined), _state())


def test_views_that_are_no_range_are_read_all_the_same(tmp_path: Path) -> None:
    for view, make in VIEWS.items():
        state = {**_state(), view: make()}
        torch.save(state, tmp_path / "model.pt")
        assert_same(read_all(Checkpoint.open(tmp_path / "model.pt")), {**state, view: state[view].resolve_conj()})


def test_the_format_before_torch_1_6(tmp_path: Path) -> None:
    since = {
        torch.uint16,
        torch.uint32,
        torch.uint64,
        *(dtype for dtype in SAFETENSORS.values() if "float8" in str(dtype)),
    }
    state = {name: value for name, value in _state().items() if value.dtype not in since}
    torch.save(state, tmp_path / "model.bin", _use_new_zipfile_serialization=False)
    checkpoint = Checkpoint.open(tmp_path / "model.bin")
    assert_same(read_all(checkpoint), state)
    assert checkpoint.changed() == ""
    os.truncate(tmp_path / "model.bin", 5)
    assert "was truncated" in checkpoint.changed()


def test_a_torch_file_that_is_laid_out_otherwise_is_parsed_again(tmp_path: Path) -> None:
    model, path, loader = nn.Linear(4, 4), tmp_path / "model.pt", _loader()
    states = [
        {"weight": tensor(1, (4, 4)), "bias": tensor(2, (4,))},
        {"bias": tensor(3, (4,)), "weight": tensor(4, (4, 4))},
        {"weight": tensor(5, (4, 4)).t(), "bias": tensor(6, (4,))},
        {"weight": tensor(7, (4, 4)), "bias": tensor(8, (16,))[4:8]},
    ]
    for state in states * 2:
        torch.save(state, path)
        loader.load(model, path)
        assert_same(model.state_dict(), state)


# ---- entries that hold no tensor ----

OTHERS: dict[str, Any] = {
    "head._extra_state": {"scale": 3, "raw": b"\x00"},
    "step": 17,
    "name": "a model",
    "nothing": None,
    "config": {"hidden": {"size": 3}},
    "sizes": [1, 2],
}


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
        path = tmp_path / "pytorch_model.bin.index.json"
        path.write_text(
            '{"weight_map": {"weight": "pytorch_model.bin", "bias": "pytorch_model.bin", "step": "pytorch_model.bin"}}'
        )
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
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint.open(path)
    torch.save(both | {"model": {}}, path, _use_new_zipfile_serialization=zipped)
    assert_same(read_all(Checkpoint.open(path)), both["state_dict"])


def test_a_dict_of_no_tensors(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    for known in (None, Checkpoint.open({}).manifest):
        with pytest.raises(
            CheckpointError, match=r"optimizer\.pt: no tensors found; top-level keys: state, param_groups$"
        ):
            Checkpoint.open(tmp_path / "optimizer.pt", known)
    with pytest.raises(TypeError, match="state dict: no tensors found; top-level keys: state, param_groups"):
        _loader().load(model, optimizer.state_dict())


# ---- pieces of tensors in memory ----


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


def test_one_file_beside_another_kind(tmp_path: Path) -> None:
    """An index that names a safetensors file and a torch file."""
    save_file({"weight": tensor(1, (4, 3))}, tmp_path / "a.safetensors")
    torch.save({"bias": tensor(2, (4,))}, tmp_path / "b.bin")
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"weight": "a.safetensors", "bias": "b.bin"}}'
    )
    with pytest.raises(CheckpointError, match=r"several formats \(.*; expected one format"):
        Checkpoint.open(tmp_path)
