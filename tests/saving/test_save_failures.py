"""Saves that fail, or whose ranks end: readers find the old checkpoint, or the whole new one."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import epload
from epload.saving import folder as folders
from epload.saving import run
from epload.saving.folder import NewFolder
from epload.saving.layout import FilesLayout
from support import ranks
from support.failures import error_of, must_raise
from support.synced_models import SHAPES, build, values, write

PLACES = {
    "writing": (folders.NewFolder, "write"), "making the folder": (folders.os, "truncate"),
    "before the rename": (folders, "_sync"), "after the rename": (folders.shutil, "rmtree"),
}  # fmt: skip


def one_acts(rank: int, folder: str, place: str, culprit: int, act: Callable[[], None], base: str | None = None) -> str:
    """``act``: of the culprit, instead of what is at the place."""
    model = build("fsdp", dist.get_world_size())
    write(model, 2)
    owner, name = PLACES[place]

    def instead(*args: object, **kwargs: object) -> None:
        act()

    began = time.monotonic()
    with mock.patch.object(owner, name, instead) if rank == culprit else nullcontext():
        error = error_of(lambda: epload.save(model, folder, overwrite=True, base=base, timeout=30))
    assert time.monotonic() - began < 20
    return error


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(28, "No space left on device")


def old_checkpoint(path: Path) -> Path:
    path.mkdir()
    save_file({name: values(name, 1) for name in SHAPES}, path / "model.safetensors")
    return path


def version_at(path: Path) -> int:
    found = load_file(path / "model.safetensors")
    version = next(v for v in (1, 2) if torch.equal(found["big"], values("big", v)))
    assert all(torch.equal(found[name], values(name, version)) for name in SHAPES)
    return version


@pytest.mark.parametrize(
    ("place", "culprit", "version"),
    [("writing", 1, 1), ("making the folder", 0, 1), ("before the rename", 0, 1), ("after the rename", 0, 2)],
)
def test_a_rank_is_killed(place: str, culprit: int, version: int, tmp_path: Path) -> None:
    path = old_checkpoint(tmp_path / "c")
    texts = ranks.run(3, one_acts, str(path), place, culprit, kill, dying=[culprit], tcp=True)
    assert version_at(path) == version
    left = [text for rank, text in enumerate(texts) if rank != culprit]
    assert left[0] == left[1]
    assert f"rank {culprit} has exited" in left[0]
    if version == 1:
        assert os.listdir(tmp_path) == ["c"], "those that live delete what was written"


def one_fails(rank: int, folder: str, base: str) -> list[str]:
    cases = product([("writing", 1), ("before the rename", 0)], (None, base))
    return [one_acts(rank, folder, *case, full, since) for case, since in cases]


def test_a_rank_fails(tmp_path: Path) -> None:
    path, base = old_checkpoint(tmp_path / "c"), old_checkpoint(tmp_path / "base")
    first, *others = ranks.run(3, one_fails, str(path), str(base))
    assert version_at(path) == 1
    assert others == [first] * 2
    for text, culprit in zip(first, (1, 1, 0, 0), strict=True):
        assert f"rank {culprit}" in text
        assert "No space left on device" in text
    assert sorted(os.listdir(tmp_path)) == ["base", "c"]


def saves_after_an_interrupt(rank: int, folder: str) -> list[str]:
    """Rank 1 is interrupted before it takes part in a save, and trains on."""
    model, texts = build("fsdp", dist.get_world_size()), []

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for place, version in product(("read_model", "_copy"), (1, 2, 2)):
        write(model, version)
        with mock.patch.object(run, place, interrupt) if (rank, version) == (1, 1) else nullcontext():
            try:
                texts.append(error_of(lambda: epload.save_async(model, folder, overwrite=True, timeout=30).wait()))
            except KeyboardInterrupt:
                texts.append("interrupted")
        dist.barrier()
    return texts


def test_an_interrupted_rank_does_not_pair_its_next_save_with_the_last_one(tmp_path: Path) -> None:
    first, second = ranks.run(2, saves_after_an_interrupt, str(tmp_path / "c"))
    assert second == ["interrupted", "", ""] * 2
    for i in (0, 3):
        assert "interrupted before the call [rank 1]" in first[i]
        assert first[i + 1 : i + 3] == ["", ""]
    assert version_at(tmp_path / "c") == 2


NO_FILES = FilesLayout([], [], [], torch.empty(0), torch.empty(0), 0, {})


def old(path: Path) -> Path:
    path.mkdir()
    (path / "old").write_text("old")
    return path


def new_folder(path: Path, overwrite: bool) -> NewFolder:
    new = NewFolder(path, path.with_name(f".{path.name}.0.saving"), overwrite, NO_FILES)
    new.create()
    return new


def test_a_file_system_without_sizes_is_written_to(tmp_path: Path) -> None:
    with mock.patch.object(folders.shutil, "disk_usage", return_value=SimpleNamespace(total=0, used=0, free=0)):
        epload.save({"w": torch.ones(2)}, tmp_path / "saved")


def test_a_file_system_that_renames_no_folders_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Mounts of object storage rename none that hold files. Nothing stays behind there."""

    def rename(source: Path, target: Path) -> None:
        if any(Path(source).iterdir()):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        os_rename(source, target)

    os_rename = os.rename
    with mock.patch.object(os, "rename", rename):
        text = "Too many open files, as this file system does not rename folders that hold files"
        must_raise(epload.LoadError, text, epload.save, {"w": torch.ones(2)}, tmp_path / "saved")
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("exists", [True, False])
def test_a_mount_point_is_refused_before_anything_is_written(exists: bool, tmp_path: Path) -> None:
    path = tmp_path / "mounted"
    path.mkdir()
    if exists:
        (path / "file").touch()
    with mock.patch.object(Path, "is_mount", lambda self: self == path):
        must_raise(ValueError, "is a mount point", epload.save, {"w": torch.ones(2)}, path, overwrite=True)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("exists", [False, True])
def test_a_folder_that_is_being_deleted_cannot_appear(exists: bool, tmp_path: Path) -> None:
    """A rank has noticed a failure and deletes files, while the first rank completes the folder."""
    path = old(tmp_path / "c") if exists else tmp_path / "c"
    first = new_folder(path, overwrite=True)
    first.add("a", b"a")
    first.add("b", b"b")
    other = NewFolder(path, first.temporary, True, NO_FILES)
    delete, errors = folders.shutil.rmtree, []

    def delete_while_the_first_commits(folder: Path, **options: bool) -> None:
        (folder / "a").unlink()
        try:
            first.commit()
        except OSError as error:
            errors.append(error)
        delete(folder, **options)

    with mock.patch.object(folders.shutil, "rmtree", delete_while_the_first_commits):
        folders.discard(other.temporary)
    assert [type(error) for error in errors] == [FileNotFoundError]
    assert os.listdir(tmp_path) == (["c"] if exists else [])
    assert not exists or os.listdir(path) == ["old"]


def test_a_folder_that_has_appeared_or_come_meanwhile_stays(tmp_path: Path) -> None:
    first = new_folder(old(tmp_path / "c"), overwrite=True)
    second = new_folder(tmp_path / "d", overwrite=False)
    first.add("a", b"a")
    first.commit()
    folders.discard(first.temporary)
    assert os.listdir(tmp_path / "c") == ["a"]
    second.add("a", b"a")
    old(tmp_path / "d")
    must_raise(OSError, "not empty", second.commit)
    folders.discard(second.temporary)
    assert os.listdir(tmp_path / "d") == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("case", ["not supported", "new folder", "parent"])
def test_folders_that_cannot_be_synced(case: str, overwrite: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once the new folder is in place the save has not failed: the one that it replaces would be deleted in vain."""
    path, sync = tmp_path / "c", os.fsync
    if overwrite:
        old(path)

    def of_folders(fd: int) -> None:
        target = os.readlink(f"/proc/self/fd/{fd}")
        if os.path.isdir(target) and (case == "not supported" or (target == str(tmp_path)) == (case == "parent")):
            number = errno.EINVAL if case == "not supported" else errno.EIO
            raise OSError(number, os.strerror(number), target)
        sync(fd)

    with mock.patch.object(folders.os, "fsync", of_folders):
        error = error_of(lambda: epload.save({"w": torch.ones(2)}, path, overwrite=overwrite))
    assert (".saving" in error and "Input/output error" in error) == (error != "") == (case == "new folder")
    assert os.listdir(tmp_path) == (["c"] if path.exists() else [])
    before = ["old"] * overwrite
    assert (os.listdir(path) if path.exists() else []) == (before if error else ["model.safetensors"])
    assert ("is saved, but may be lost if the machine fails soon" in caplog.text) == (case == "parent")


def saves_where_folders_cannot_be_exchanged(rank: int, folder: str) -> str:
    class Library:
        def __init__(self, *args: object, **kwargs: object) -> None: ...

        def renameat2(self, *args: object) -> int:
            ctypes.set_errno(errno.EINVAL)
            return -1

    with mock.patch.object(folders.ctypes, "CDLL", Library), mock.patch.object(folders.NewFolder, "write") as write_part:
        error = error_of(lambda: epload.save({"w": torch.ones(2)}, folder, overwrite=True, timeout=30))
    write_part.assert_not_called()
    return error


def test_a_file_system_that_cannot_exchange_folders_says_so_before_anything_is_written(tmp_path: Path) -> None:
    path = old(tmp_path / "c")
    first, second = ranks.run(2, saves_where_folders_cannot_be_exchanged, str(path))
    assert first == second
    assert f"cannot make {path}: " in first
    assert "this file system cannot replace a folder in one step; save to another path" in first
    assert os.listdir(path) == ["old"]
    assert os.listdir(tmp_path) == ["c"]
