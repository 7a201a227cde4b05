"""Pickles that would take for ever or all memory are refused at once, wherever pickles are loaded; others load as in torch."""

from __future__ import annotations

import collections
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import epload
from epload import Checkpoint, CheckpointError
from epload.checkpoint import torch_file
from support import ranks
from support.checkpoints import assert_same, read_all, tensor

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
    return (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + storage
        + b"K\0"
        + size
        + b"K\0\x85\x89ccollections\nOrderedDict\n)RtR"
    )


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
        with pytest.raises(CheckpointError, match=f"^{path}: not "):
            Checkpoint.open(path.parent)


@pytest.mark.parametrize(
    ("write", "name"),
    [(archive, "m.bin"), (legacy, "m.pt"), (Path.write_bytes, ".metadata")],
    ids=["archive", "legacy", "metadata"],
)
def test_bombs_are_refused(write: Callable[[Path, bytes], None], name: str, tmp_path: Path) -> None:
    status, output = ranks.run_alone(_refuse_all, write, tmp_path / name, limit=LIMIT)
    assert status == 0, output


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
    with pytest.raises(CheckpointError, match=r"value of value cannot be loaded .*many times as large"):
        epload.load_state({"w": torch.zeros(4, 3), "value": 1}, folder, progress=False)
    stream = io.BytesIO()
    torch.save(Bomb(), stream)
    torch.distributed.checkpoint.save({"w": torch.ones(4, 3)}, checkpoint_id=folder)
    next(folder.glob("*.distcp")).write_bytes(stream.getvalue())
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.offset, info.length = 0, len(stream.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"expected a tensor as torch\.save writes it, .*many times as large"):
        Checkpoint.open(folder)


def test_a_value_and_an_item_of_a_dcp_folder(tmp_path: Path) -> None:
    status, output = ranks.run_alone(_load_values, tmp_path, limit=LIMIT)
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
    with pytest.raises(CheckpointError, match=f"its pickle has {(1 << 20) + 3} bytes, expected at most"):
        Checkpoint.open(tmp_path / "other")


def test_strings_and_dicts_that_occur_often_are_loaded(tmp_path: Path) -> None:
    """A string is hashed once, and a dict never."""
    path, options = "shard-" + "x" * 300, {f"option-{i}": list(range(20)) for i in range(30)}
    state = {"w": torch.arange(3.0), "paths": dict.fromkeys(range(20000), path), "groups": [options] * 3000}
    for number, options_of_save in enumerate(({}, {"_use_new_zipfile_serialization": False})):
        torch.save(state, tmp_path / f"{number}.pt", **options_of_save)
        assert_same(read_all(Checkpoint.open(tmp_path / f"{number}.pt")), {"w": state["w"]})


def _of_many_kinds() -> dict[str, Any]:
    """Returns tensors and whatever else checkpoints have."""
    weights = {f"layers.{i}.w": tensor(i, (i % 4, 2)) for i in range(300)}  # with memo indices of one byte and of four
    betas = (0.9, 0.999)
    shared: list[Any] = [1, {"x": (1, (2, 3))}]
    return {
        **weights,
        "scalar": torch.tensor(3.5),
        "high": tensor(7, (2, 3, 1, 2, 1)),
        "tied": weights["layers.3.w"],
        "view": tensor(5, (4, 6))[1:, ::2],
        "parameter": nn.Parameter(tensor(6, (3,))),
        "groups": [{"betas": betas, "lr": 1e-3} for _ in range(50)],
        "shared": [shared] * 20,
        "random": (3, tuple(range(625)), None),
        "keys": {(0, 1): "a", "b": 2**40, 2.5: -(2**70), None: True, b"c": bytearray(b"d\xff"), ("x", (1, 2)): {1, 2}},
        "ordered": collections.OrderedDict(a=1),
        "counted": collections.Counter("hello"),
        "dtype": torch.bfloat16,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
        "complex": 1 + 2j,
    }


@pytest.mark.parametrize("format", [True, False], ids=["archive", "legacy"])
def test_whatever_torch_saves_is_loaded(format: bool, tmp_path: Path) -> None:
    state = _of_many_kinds()
    torch.save(state, tmp_path / "m.bin", _use_new_zipfile_serialization=format)
    expected = torch.load(tmp_path / "m.bin", weights_only=True)
    tensors = {name: value.detach() for name, value in expected.items() if isinstance(value, torch.Tensor)}
    assert len(tensors) == 305
    assert_same(read_all(Checkpoint.open(tmp_path / "m.bin")), tensors)
