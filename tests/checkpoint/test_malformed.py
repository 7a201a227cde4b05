"""Files, folders and indices that are not what they should be: each is refused, by a clear error, with the path in it."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, LoadError, LoadOptions, Topology
from epload.checkpoint.local_store import LocalFile
from epload.checkpoint.safetensors import MAX_HEADER_BYTES, read_layout
from epload.cli.main import main
from epload.core.dtypes import SAFETENSORS
from support import ranks
from support.checkpoints import assert_same, entry, framed, header, index, read_all, tensor
from support.failures import error_of, must_raise


def text(shape: str = "[4]", offsets: str = "[0,16]", data: int = 16) -> bytes:
    return framed(f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}') + bytes(data)


HUGE = "1" + "0" * 4000
TWO_BYTES = '"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}'
BAD_FILES = {
    "empty file": (b"", "0 bytes"),
    "too short": (b"\1\0\0", "3 bytes"),
    "header of 2^64 - 1": (b"\xff" * 8 + b"{}", "header"),
    "not JSON": (framed("{]"), "not JSON"),
    "not text": (framed(b"\xff\xfe\xfd\x80" * 4), "not JSON"),
    "deep nesting": (framed('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"), "not JSON"),
    "list": (framed("[]"), "list"),
    "duplicate names": (framed(f"{{{TWO_BYTES},{TWO_BYTES}}}") + b"ab", "duplicate key 'w'"),
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
    error = must_raise(CheckpointError, re.escape(message), Checkpoint.open, path)
    assert str(path) in str(error)
    assert len(str(error)) < 1000 + len(str(path))


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    must_raise(CheckpointError, f"bad.safetensors.*{MAX_HEADER_BYTES + 1} bytes", Checkpoint.open, path)


def test_an_index_that_points_out_of_its_folder(tmp_path: Path) -> None:
    folder, outside = tmp_path / "model", tmp_path / "x.safetensors"
    (folder / "sub").mkdir(parents=True)
    for target in (outside, folder / "sub" / "x.safetensors"):
        save_file({"w": tensor(1, (2,))}, target)
    for name in ("../x.safetensors", str(outside), "sub/x.safetensors", "..", ".", ""):
        content = index(folder, {"weight_map": {"w": name}})
        must_raise(CheckpointError, r"index\.json.*plain file name", Checkpoint.open, content)


def test_an_index_that_is_none_or_whose_file_lacks_a_key(tmp_path: Path) -> None:
    maps = (None, ["w"], {"w": 3}, {"w": ["x.safetensors"]})
    for content in ("{", "", "[]", "null", "3", {}, *({"weight_map": each} for each in maps), "[" * 100_000):
        must_raise(CheckpointError, r"index\.json", Checkpoint.open, index(tmp_path, content))
    for name, save in (("x.safetensors", save_file), ("x.bin", torch.save)):
        save({"v": tensor(1, (2,))}, tmp_path / name)
        path = index(tmp_path, {"weight_map": dict.fromkeys("vw", name)})
        must_raise(CheckpointError, f"places w in {name}, which does not contain it", Checkpoint.open, path)


def test_a_key_in_two_files(tmp_path: Path) -> None:
    first, second = {"v": tensor(1, (2,)), "w": tensor(2, (2,))}, {"w": tensor(3, (2,))}
    for end, save in (("safetensors", save_file), ("bin", torch.save)):
        (folder := tmp_path / end).mkdir()
        for number, state in enumerate((first, second)):
            save(state, folder / f"x-{number}.{end}")
        must_raise(CheckpointError, f"w is both in .*x-0.{end} and in .*x-1.{end}", Checkpoint.open, folder)
        # An index settles which of the two counts.
        checkpoint = Checkpoint.open(index(folder, {"weight_map": {"v": f"x-0.{end}", "w": f"x-1.{end}"}}))
        assert_same(read_all(checkpoint), {"v": first["v"], "w": second["w"]})


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_torch_files_that_are_none(tmp_path: Path) -> None:
    path, sprung = tmp_path / "bad.pt", tmp_path / "sprung"
    torch.save({"w": tensor(1, (2,)), "x": Trap(sprung)}, path)
    must_raise(CheckpointError, "bad.pt", Checkpoint.open, path)
    assert not sprung.exists()
    torch.save({"w": tensor(1, (2,))}, path)
    good = path.read_bytes()
    for content in (b"", b"\x80\x02}q\x00." * 9, good[: len(good) // 2]):
        path.write_bytes(content)
        must_raise(CheckpointError, "bad.pt", Checkpoint.open, path)
    for value in (tensor(1, (2,)), [tensor(1, (2,))], {"w": 3}, {"state_dict": {"w": 3}}):
        torch.save(value, path)
        text = "no tensors found; top-level keys: " if isinstance(value, dict) else "expected a dict of tensors, got a "
        must_raise(CheckpointError, f"bad.pt: {text}", Checkpoint.open, path)


STATE = {"weight": tensor(1, (4, 3)), "bias": tensor(2, (4,))}
LIMIT = 60.0
"""Seconds after which a run that waits for a FIFO is ended."""


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has at most 107 characters
    try:
        with socket.socket(socket.AF_UNIX) as endpoint:
            endpoint.bind(path.name)
    finally:
        os.chdir(here)


def _zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _linked_fifo(path: Path) -> None:
    os.mkfifo(path.with_name("somewhere"))
    path.symlink_to("somewhere")


SPECIAL = [(os.mkfifo, "a FIFO"), (_linked_fifo, "a FIFO"), (_socket, "a socket"), (_zeros, "a character device")]
NAMES = [
    "model.safetensors", "model.safetensors.index.json", "part-1.safetensors", ".metadata", "pytorch_model.bin",
    "pytorch_model.bin.index.json", "x.pt",
]  # fmt: skip


def _open_each(folder: Path) -> None:
    for number, (make, kind) in enumerate(SPECIAL):
        for name in NAMES:
            path = folder / str(number) / name[1:] / name
            path.parent.mkdir(parents=True)
            make(path)
            for source in (path, path.parent):
                text = f"^cannot read {path}: expected a regular file, got {kind}"
                must_raise(CheckpointError, text, Checkpoint.open, source)


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "blob")
    path = tmp_path / "model.safetensors"
    path.symlink_to("blob")
    for other, target in (("loop", "loop"), ("long", "x" * 300)):  # beside it, which are nobody's
        (tmp_path / other).symlink_to(target)
    assert_same(read_all(Checkpoint.open(tmp_path)), STATE)
    assert os.get_blocking(LocalFile(path).fd)
    for target in ("nowhere", path.name):
        path.unlink()
        path.symlink_to(target)
        for source in (tmp_path, path):
            must_raise(CheckpointError, f"{path}: ", Checkpoint.open, source)


@pytest.mark.parametrize("name", ["model.safetensors", "x.bin", ".metadata", "model.safetensors.index.json"])
def test_files_without_a_size_and_descriptions_of_any_size(name: str, tmp_path: Path) -> None:
    """The latter have no content on disk, and would fill the memory."""
    path = tmp_path / name
    for target in ("/proc/self/mem", "/proc/version"):
        path.symlink_to(target)
        must_raise(CheckpointError, str(path), Checkpoint.open, tmp_path)
        path.unlink()
    if name in (".metadata", "model.safetensors.index.json"):
        path.touch()
        os.truncate(path, 1 << 42)
        must_raise(CheckpointError, f"{name} has {1 << 42} bytes, expected at most", Checkpoint.open, tmp_path)


def test_a_file_whose_lease_has_to_be_released(tmp_path: Path) -> None:
    """A file server holds one on a file that its clients use: to open it takes until the lease is released, but it works."""
    path = tmp_path / "model.safetensors"
    save_file(STATE, path)
    holder = os.open(path, os.O_RDWR)
    before = signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK))
    try:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        assert_same(read_all(Checkpoint.open(path)), STATE)
    finally:
        signal.signal(signal.SIGIO, before)
        os.close(holder)


def _load_fifo(rank: int, folder: Path) -> str:
    """Ranks see different files under the same name, as on nodes with file systems of their own."""
    os.chdir(folder / ("fifo" if rank else "file"))
    with HierarchicalLoader(Topology.from_nodes([[0, 1]]), readers="every", progress=False) as loader:
        return error_of(lambda: loader.load(nn.Linear(3, 4), "model.safetensors"))


def test_all_ranks_refuse_a_fifo(tmp_path: Path) -> None:
    for name in ("fifo", "file"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    save_file(STATE, tmp_path / "file" / "model.safetensors")
    first, second = ranks.run(2, _load_fifo, tmp_path, limit=LIMIT)
    assert first == second
    assert first.startswith("CheckpointError: cannot read model.safetensors: expected a regular file, got a FIFO")


def _other_files(folder: Path) -> None:
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    save_file(STATE, folder / "model.safetensors")
    refusals: list[tuple[Any, type[Exception]]] = [
        (lambda: epload.convert(folder / "model.safetensors", folder / "out", files=[fifo]), ValueError),
        (lambda: epload.save(nn.Linear(3, 4), folder / "saved", names_from=fifo), CheckpointError),
        (lambda: epload.save(nn.Linear(3, 4), folder / "saved", files=[fifo]), ValueError),
    ]
    for call, kind in refusals:
        must_raise(kind, "fifo", call)
    for command, *others in (["inspect"], ["verify"], ["diff", str(fifo)], ["convert", str(folder / "out")]):
        result = CliRunner().invoke(main, [command, str(fifo), *others])
        assert result.exit_code in (1, 2), result.output
        assert "fifo" in result.output


@pytest.mark.parametrize("read", [_open_each, _other_files])
def test_the_path_and_the_kind_are_named(read: Callable[[Path], None], tmp_path: Path) -> None:
    status, output = ranks.run_alone(read, tmp_path, limit=LIMIT)
    assert status == 0, output


FUZZED = header(
    data=40, __metadata__={"format": "pt"}, v=entry(), w=entry(shape=[2, 3], offsets=[16, 40]), e=entry([0], [40, 40])
)
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from(list(SAFETENSORS)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(SAFETENSORS)) | JSON_VALUES,
        "shape": st.lists(st.integers(-1, 5), max_size=3) | JSON_VALUES,
        "data_offsets": st.lists(st.integers(-1, 50), min_size=2, max_size=2) | JSON_VALUES,
    }
)


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    raw = bytearray(FUZZED)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(raw)))
        end = min(len(raw), at + draw(st.integers(0, 3)))
        raw[at:end] = draw(st.binary(max_size=3) | st.sampled_from([b"0", b"-", b"9" * 30, b"[", b"{", b'"', b",", b"e9"]))
    return bytes(raw)


FILES = st.one_of(
    mutated(),
    st.binary(max_size=64),
    st.binary(max_size=64).map(framed),
    st.dictionaries(st.text(max_size=3), ENTRIES | JSON_VALUES, max_size=3).map(lambda made: header(40, **made)),
)


@settings(max_examples=100)
@given(content=FILES, bucket_bytes=st.sampled_from([80, 96, 1 << 20]))
def test_a_file_is_loaded_as_it_is_or_refused(content: bytes, bucket_bytes: int) -> None:
    filled = nn.ParameterDict({"v": torch.zeros(4), "w": torch.zeros(2, 3), "e": torch.zeros(0)})  # as FILES also have
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            options = LoadOptions(bucket_bytes=bucket_bytes)
            report = epload.load(filled, path, strict=False, readers="one", verify=True, options=options)
        except LoadError:
            return
        found = {stored.name: stored for stored in read_layout(LocalFile(path))}
    for name, parameter in filled.named_parameters():
        if name in report.missing_keys or (name not in found and parameter.numel() == 0):  # which needs nothing
            assert not parameter.detach().any()
            continue
        _, dtype, shape, offset, *_ = found[name]
        raw = content[offset : offset + prod(shape) * dtype.itemsize]
        value = torch.frombuffer(bytearray(raw), dtype=torch.uint8) if raw else torch.zeros(0, dtype=torch.uint8)
        expected = value.view(dtype).reshape(shape).to(parameter.dtype)
        assert torch.equal(parameter.detach().view(torch.int32), expected.view(torch.int32))
