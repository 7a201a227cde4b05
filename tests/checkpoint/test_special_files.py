"""FIFOs, devices, sockets and folders in place of a file: refused at once, by all ranks, with the path in the error."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import save_file
from torch import nn

import epload
from epload import Checkpoint, CheckpointError, HierarchicalLoader, Topology
from epload.checkpoint.local_store import LocalFile
from epload.cli.main import main
from support import ranks
from support.checkpoints import assert_same, read_all, tensor

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
        with pytest.raises(CheckpointError, match=rf"{tmp_path}/model\.safetensors: "):
            Checkpoint.open(source)


@pytest.mark.parametrize("name", ["model.safetensors", "x.bin", ".metadata", "model.safetensors.index.json"])
@pytest.mark.parametrize("file", ["/proc/self/mem", "/proc/version"])
def test_files_without_a_size(name: str, file: str, tmp_path: Path) -> None:
    (tmp_path / name).symlink_to(file)
    with pytest.raises(CheckpointError, match=str(tmp_path / name)):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors.index.json", ".metadata"])
def test_a_description_of_any_size(name: str, tmp_path: Path) -> None:
    """A file without content on disk, which would fill the memory."""
    with open(tmp_path / name, "wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(CheckpointError, match=rf"{name} has {1 << 42} bytes, expected at most"):
        Checkpoint.open(tmp_path)


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
        with pytest.raises(kind, match=r"fifo"):
            call()
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
