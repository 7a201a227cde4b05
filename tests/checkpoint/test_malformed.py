"""Files, folders and indices that are not what they should be: each is refused, by a clear error, with the path in it."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import struct
import tempfile
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
from support import ranks
from support.checkpoints import assert_same, entry, framed, header, index, read_all, tensor
from support.failures import must_raise
from support.malformed import FILES

# ---- headers ----


def text(shape: str = "[4]", offsets: str = "[0,16]", data: int = 16) -> bytes:
    return framed(f'{{"w":{{"dtype":"F32","shape":{shape},"data_offsets":{offsets}}}}}') + bytes(data)


HUGE = "1" + "0" * 4000
BAD_FILES = {
    "empty file": (b"", "0 bytes"),
    "too short": (b"\1\0\0", "3 bytes"),
    "header of 2^64 - 1": (b"\xff" * 8 + b"{}", "header"),
    "not JSON": (framed("{]"), "not JSON"),
    "not text": (framed(b"\xff\xfe\xfd\x80" * 4), "not JSON"),
    "deep nesting": (framed('{"w":' + "[" * 100_000 + "]" * 100_000 + "}"), "not JSON"),
    "list": (framed("[]"), "list"),
    "duplicate names": (
        framed(
            '{"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"w":{"dtype":"U8","shape":[2],"data_offsets":[0,2]}}'
        )
        + b"ab",
        "duplicate key 'w'",
    ),
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
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 1000 + len(str(path))


def test_a_header_over_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "bad.safetensors"
    path.write_bytes(struct.pack("<Q", MAX_HEADER_BYTES + 1))
    os.truncate(path, 2 * MAX_HEADER_BYTES)
    must_raise(CheckpointError, f"bad.safetensors.*{MAX_HEADER_BYTES + 1} bytes", Checkpoint.open, path)


# ---- folders, indices and torch files ----


@pytest.mark.parametrize("outside", ["../x.safetensors", "/x.safetensors", "sub/x.safetensors", "..", ".", ""])
def test_an_index_that_points_out_of_its_folder(outside: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for target in (tmp_path / "x.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"w": tensor(1, (2,))}, target)
    name = str(tmp_path / "x.safetensors") if outside.startswith("/") else outside
    with pytest.raises(CheckpointError, match=r"index\.json.*plain file name"):
        Checkpoint.open(index(folder, {"weight_map": {"w": name}}))


@pytest.mark.parametrize(
    "content",
    ["{", "", "[]", "null", "3", {}, {"weight_map": None}, {"weight_map": ["w"]}, {"weight_map": {"w": 3}},
     {"weight_map": {"w": ["x.safetensors"]}}, "[" * 100_000],
    ids=lambda content: repr(content)[:40],
)  # fmt: skip
def test_an_index_that_is_none(content: Any, tmp_path: Path) -> None:
    must_raise(CheckpointError, r"index\.json", Checkpoint.open, index(tmp_path, content))


def test_an_index_whose_file_lacks_a_key(tmp_path: Path) -> None:
    save_file({"v": tensor(1, (2,))}, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match=r"places w in x\.safetensors, which does not contain it"):
        Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x.safetensors", "w": "x.safetensors"}}))
    torch.save({"v": tensor(1, (2,))}, tmp_path / "x.bin")
    with pytest.raises(CheckpointError, match=r"places w in x\.bin, which does not contain it"):
        Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x.bin", "w": "x.bin"}}))


def test_a_key_in_two_files(tmp_path: Path) -> None:
    first, second = {"v": tensor(1, (2,)), "w": tensor(2, (2,))}, {"w": tensor(3, (2,))}
    save_file(first, tmp_path / "x-0.safetensors")
    save_file(second, tmp_path / "x-1.safetensors")
    must_raise(CheckpointError, r"w is both in .*x-0\.safetensors and in .*x-1\.safetensors", Checkpoint.open, tmp_path)
    # An index settles which of the two counts.
    checkpoint = Checkpoint.open(index(tmp_path, {"weight_map": {"v": "x-0.safetensors", "w": "x-1.safetensors"}}))
    assert_same(read_all(checkpoint), {"v": first["v"], "w": second["w"]})
    checkpoint.close()
    folder = tmp_path / "torch"
    folder.mkdir()
    torch.save(first, folder / "x-0.bin")
    torch.save(second, folder / "x-1.bin")
    must_raise(CheckpointError, r"w is both in .*x-0\.bin and in .*x-1\.bin", Checkpoint.open, folder)


class Trap:
    """Unpickling it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def test_a_pickle_with_code_is_refused_and_not_run(tmp_path: Path) -> None:
    path, sprung = tmp_path / "trap.pt", tmp_path / "sprung"
    torch.save({"w": tensor(1, (2,)), "x": Trap(sprung)}, path)
    must_raise(CheckpointError, r"trap\.pt", Checkpoint.open, path)
    assert not sprung.exists()


def test_torch_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "bad.pt"
    torch.save({"w": tensor(1, (2,))}, path)
    good = path.read_bytes()
    contents = {"empty": b"", "random": b"\x80\x02}q\x00." * 9, "cut": good[: len(good) // 2]}
    for case, content in contents.items():
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=r"bad\.pt"):
            pytest.fail(f"{case}: {Checkpoint.open(path).manifest}")
    for value in (tensor(1, (2,)), [tensor(1, (2,))], {"w": 3}, {"state_dict": {"w": 3}}):
        torch.save(value, path)
        message = (
            "no tensors found; top-level keys: " if isinstance(value, dict) else "expected a dict of tensors, got a "
        )
        must_raise(CheckpointError, rf"bad\.pt: {message}", Checkpoint.open, path)


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
                with pytest.raises(CheckpointError) as caught:
                    Checkpoint.open(source)
                assert str(caught.value).startswith(f"cannot read {path}: expected a regular file, got {kind}")


def test_the_path_and_the_kind_are_named(tmp_path: Path) -> None:
    status, output = ranks.run_alone(_open_each, tmp_path, limit=LIMIT)
    assert status == 0, output


def test_links_to_files_are_followed(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to("blob")
    assert_same(read_all(Checkpoint.open(tmp_path)), STATE)
    assert os.get_blocking(LocalFile(tmp_path / "model.safetensors").fd)


@pytest.mark.parametrize("to", ["nowhere", "model.safetensors"])
def test_a_link_to_nothing(to: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(to)
    for source in (tmp_path, tmp_path / "model.safetensors"):
        must_raise(CheckpointError, rf"{tmp_path}/model\.safetensors: ", Checkpoint.open, source)


@pytest.mark.parametrize("name", ["model.safetensors", "x.bin", ".metadata", "model.safetensors.index.json"])
@pytest.mark.parametrize("file", ["/proc/self/mem", "/proc/version"])
def test_files_without_a_size(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(file)
    must_raise(CheckpointError, str(tmp_path / name), Checkpoint.open, tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", ".metadata"])
def test_a_description_of_any_size(name: str, tmp_path: Path) -> None:
    """A file without content on disk, which would fill the memory."""
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 42)
    must_raise(CheckpointError, rf"{name} has {1 << 42} bytes, expected at most", Checkpoint.open, tmp_path)


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
    with (
        HierarchicalLoader(Topology.from_nodes([[0, 1]]), readers="every", progress=False) as loader,
        pytest.raises(CheckpointError) as caught,
    ):
        loader.load(nn.Linear(3, 4), "model.safetensors")
    return str(caught.value)


def test_all_ranks_refuse_a_fifo(tmp_path: Path) -> None:
    for name in ("fifo", "file"):
        (tmp_path / name).mkdir()
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    save_file(STATE, tmp_path / "file" / "model.safetensors")
    first, second = ranks.run(2, _load_fifo, tmp_path, limit=LIMIT)
    assert first == second
    assert first.startswith("cannot read model.safetensors: expected a regular file, got a FIFO")


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
    for command in (
        ["inspect", str(fifo)], ["verify", str(fifo)], ["diff", str(fifo), str(fifo)],
        ["convert", str(fifo), str(folder / "out")],
    ):  # fmt: skip
        result = CliRunner().invoke(main, command)
        assert result.exit_code in (1, 2), result.output
        assert "fifo" in result.output


def test_other_files_that_are_read(tmp_path: Path) -> None:
    status, output = ranks.run_alone(_other_files, tmp_path, limit=LIMIT)
    assert status == 0, output


def fuzzed_model() -> nn.Module:
    """With names and shapes that the files of FILES also have."""
    return nn.ParameterDict({"v": torch.zeros(4), "w": torch.zeros(2, 3), "e": torch.zeros(0)})


@settings(max_examples=100, deadline=None)
@given(content=FILES, bucket_bytes=st.sampled_from([80, 96, 1 << 20]))
def test_a_file_is_loaded_as_it_is_or_refused(content: bytes, bucket_bytes: int) -> None:
    filled = fuzzed_model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        path.write_bytes(content)
        try:
            report = epload.load(
                filled,
                path,
                strict=False,
                readers="one",
                verify=True,
                progress=False,
                options=LoadOptions(bucket_bytes=bucket_bytes),
            )
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
