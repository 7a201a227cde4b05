"""Torch files: what is loaded is what torch loads, and pickles that would take for ever or all memory are refused at once."""

from __future__ import annotations

import collections
import io
import os
import pickle
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

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader
from epload.checkpoint import torch_file
from epload.checkpoint.opening import join_source
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from support import ranks
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
    for key in ("ema", "state_dict_ema"):  # which some programs load in place of the model's
        torch.save({"model": one, key: one, "schema": one}, path, _use_new_zipfile_serialization=zipped)
        must_raise(CheckpointError, f"a state dict under each of '{key}' and 'model'; pass", Checkpoint.open, path)
        torch.save({"model": one, key: {"decay": tensor(1, (1,))}}, path, _use_new_zipfile_serialization=zipped)
        assert_same(read_all(Checkpoint.open(path)), one)


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


LIMIT = 60.0
"""Seconds after which a process that loads a pickle is ended."""
START = b"\x80\x02"


def _laughs(levels: int = 60) -> bytes:
    """A tuple that has a tuple twice that has a tuple twice, and so on: it has 2^levels elements."""
    return b"N\x85q\0" + b"".join(b"h%c\x86q%c" % (i, i + 1) for i in range(levels))


def _list_of_lists(levels: int = 60) -> bytes:
    """The same of lists, each of which is filled when it is in its place."""
    empty = b"".join(b"]q%c" % i for i in range(levels + 1))
    return empty + b"".join(b"h%c(h%ch%ce" % (i, i + 1, i + 1) for i in range(levels)) + b"h\0"


def _text(content: bytes) -> bytes:
    return b"X" + len(content).to_bytes(4, "little") + content


def _one_element(count: int) -> bytes:
    """A tensor of so many elements that are all views of one."""
    storage = _text(b"storage") + b"ctorch\nLongStorage\n" + _text(b"0") + _text(b"cpu") + b"K\1tQ"
    size = b"\x8a\5" + count.to_bytes(5, "little") + b"\x85"
    rest = b"K\0\x85\x89ccollections\nOrderedDict\n)RtR"
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + storage + b"K\0" + size + rest


_LATER = (
    b"}" + _text(b"x") + b"(ctorch._utils\n_rebuild_tensor_v2\nq\0" + _text(b"storage") + b"q\1ctorch\nLongStorage\nq\2"
    + _text(b"cpu") + b"q\3ccollections\nOrderedDict\nq\4" + _text(b"w") + b"q\5h\0((h\1h\2" + _text(b"0")
    + b"q\6h\3K\1tq\7QK\0))\x89h\4)Rq\x0atq\x0bRq\5c__builtin__\nbytearray\nh\5\x85Rts."
)  # fmt: skip
"""Gives the number of a string to a tensor, and passes what has that number to a function."""

BOMBS = {
    "a set of a tensor": b"}" + _text(b"x") + b"c__builtin__\nset\n" + _one_element(1 << 38) + b"\x85Rs.",
    "a size of a tensor": b"}" + _text(b"x") + b"ctorch\nSize\n" + _one_element(1 << 38) + b"\x85Rs.",
    "a count of a tensor": b"}" + _text(b"x") + b"ccollections\nCounter\n" + _one_element(1 << 38) + b"\x85Rs.",
    "a copy of a tensor": (
        b"}" + _text(b"x") + b"ctorch._utils\n_rebuild_device_tensor_from_cpu_tensor\n(" + _one_element(1 << 38)
        + b"ctorch\nfloat32\n" + _text(b"cpu") + b"\x89tRs."
    ),
    "a number that is given twice": _LATER,
    "a key": b"}" + _laughs() + b"K\1s.",
    "one of many keys": b"}(" + _laughs() + b"K\1u.",
    "in a set": b"c__builtin__\nset\n(]" + _laughs() + b"atR.",
    "in an OrderedDict": b"ccollections\nOrderedDict\n(](" + _laughs() + b"K\1\x86etR.",
    "in a Counter": b"ccollections\nCounter\n(](" + _laughs() + b"etR.",
    "in a state": b"ccollections\nOrderedDict\n)R](" + _laughs() + b"K\1\x86eb.",
    "three levels of 5,000": b"}((" + 5000 * b"N" + b"tq\0(" + 5000 * b"h\0" + b"tq\1(" + 5000 * b"h\1" + b"tK\1u.",
    "a large key 100,000 times": b"}((" + 50_000 * b"N" + b"tq\0K\1" + 100_000 * b"h\0K\1" + b"u.",
    "deeper than the stack": b"}N" + 3_000_000 * b"\x85" + b"K\1s.",
    "a tuple in an error message": _laughs() + b"N\x85R.",
    "a list in an error message": _list_of_lists() + b"N\x85R.",
    "a long string in an error message": _text(bytes(1 << 20)) + b"q\0(" + 100_000 * b"h\0" + b"tN\x85R.",
    "a key of a storage": b"(" + _text(b"storage") + b"ctorch\nFloatStorage\n" + _list_of_lists() + _text(b"cpu") + b"K\1tQ.",
    "a list in itself": b"]q\0h\0a.",
    "many arguments 100,000 times": b"}(" + 100_000 * b"N" + b"tq\0ctorch._utils\n_rebuild_tensor_v2\nq\1("
    + 100_000 * b"h\1h\0R" + b"tK\1s.",
    "64 GiB of zeros": b"c__builtin__\nbytearray\n\x8a\6\0\0\0\0\x10\0\x85R.",
    "64 GiB of zeros by another function": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + 2 * b"c__builtin__\nbytearray\n" + b"\x8a\6\0\0\0\0\x10\0\x85NtR."
    ),
    "a set of a tensor by another function": (
        b"ctorch._tensor\n_rebuild_from_type_v2\n(" + 2 * b"c__builtin__\nset\n" + _one_element(1 << 38) + b"\x85NtR."
    ),
    "a set of a tensor in a list of arguments": b"c__builtin__\nset\n](" + _one_element(1 << 38) + b"eR.",
    "an encoding that takes a square of time": b"c_codecs\nencode\n" + _text(b"a" * 100) + _text(b"punycode") + b"\x86R.",
    "a memo of 4 billion values": b"}r\xff\xff\xff\xff.",
    "a string of 4 GiB": b"X\xff\xff\xff\xff.",
    "nothing": b"",
    "no end": b"}",
    "items of nothing": b"u.",
}  # fmt: skip


def archive(path: Path, body: bytes, compression: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", compression) as file:
        for name, content in (("data.pkl", body), ("byteorder", b"little"), ("version", b"3\n")):
            file.writestr(f"archive/{name}", content)


def legacy(path: Path, body: bytes) -> None:
    """The format before torch 1.6."""
    parts = [pickle.dumps(part, 2) for part in (0x1950A86A20F9469CFC6C, 1001, {"little_endian": True})]
    path.write_bytes(b"".join([*parts, body, pickle.dumps([], 2)]))


def _refuse_all(write: Callable[[Path, bytes], None], path: Path) -> None:
    for bomb, body in BOMBS.items():
        print(bomb, flush=True)  # shown if the process is ended
        write(path, START + body if body else b"")
        must_raise(CheckpointError, f"^{path}: not ", Checkpoint.open, path.parent)


class Bomb:
    """A value that pickles as a dict whose key is one of the tuples."""

    def __reduce__(self) -> Any:
        key: tuple[Any, ...] = (1,)
        for _ in range(60):
            key = (key, key)
        return collections.OrderedDict, ([[key, 1]],)


def _load_values(folder: Path) -> None:
    """The second takes the place of a tensor's item, which is loaded to find the tensor in it."""
    torch.distributed.checkpoint.save({"w": torch.ones(4, 3), "value": Bomb()}, checkpoint_id=folder)
    text, state = "value of value cannot be loaded .*many times as large", {"w": torch.zeros(4, 3), "value": 1}
    must_raise(CheckpointError, text, epload.load_state, state, folder, progress=False)
    stream = io.BytesIO()
    torch.save(Bomb(), stream)
    torch.distributed.checkpoint.save({"w": torch.ones(4, 3)}, checkpoint_id=folder)
    next(folder.glob("*.distcp")).write_bytes(stream.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    text = r"expected a tensor as torch\.save writes it, .*many times as large"
    must_raise(CheckpointError, text, Checkpoint.open, folder)


BOMBED: dict[str, tuple[Callable[..., None], Any, str]] = {
    "archive": (_refuse_all, (archive,), "m.bin"),
    "legacy": (_refuse_all, (legacy,), "m.pt"),
    "metadata": (_refuse_all, (Path.write_bytes,), ".metadata"),
    "value and item of DCP": (_load_values, (), ""),
}


@pytest.mark.parametrize("case", BOMBED)
def test_bombs_are_refused(case: str, tmp_path: Path) -> None:
    refuse, arguments, name = BOMBED[case]
    status, output = ranks.run_alone(refuse, *arguments, tmp_path / name, limit=LIMIT)
    assert status == 0, output


def test_compressed_archives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    archive(tmp_path / "other" / "m.bin", START + b"N" * (1 << 20) + b".", zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(torch_file, "_MAX_PICKLE_BYTES", 1 << 20)
    torch.save({"bomb": torch.zeros(5 << 18)}, tmp_path / "bomb.bin")
    with (
        zipfile.ZipFile(tmp_path / "bomb.bin") as stored,
        zipfile.ZipFile(tmp_path / "packed.bin", "w", zipfile.ZIP_DEFLATED) as packed,
    ):
        for entry in stored.infolist():
            packed.writestr(entry.filename, stored.read(entry))
    must_raise(CheckpointError, "it unpacks to 5[0-9]* bytes, expected at most", Checkpoint.open, tmp_path / "packed.bin")
    text = f"its pickle has {(1 << 20) + 3} bytes, expected at most"
    must_raise(CheckpointError, text, Checkpoint.open, tmp_path / "other")


def _of_many_kinds() -> dict[str, Any]:
    """Returns tensors and whatever else checkpoints have. A string that occurs often is hashed once, and a dict never."""
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
        "paths": dict.fromkeys(range(20_000), "shard-" + "x" * 300),
        "options": [{f"option-{i}": list(range(20)) for i in range(30)}] * 3000,
    }  # fmt: skip


@pytest.mark.parametrize("format", [True, False], ids=["archive", "legacy"])
def test_whatever_torch_saves_is_loaded(format: bool, tmp_path: Path) -> None:
    state = _of_many_kinds()
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=format)
    expected = torch.load(tmp_path / "m.bin", weights_only=True)
    tensors = {name: value.detach() for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 305
    assert_same(read_all(Checkpoint.open(tmp_path / "m.bin")), tensors)
