"""A new folder appears whole, or not at all, also where ranks disagree on what becomes of it."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path
from unittest import mock

import pytest
import torch

from epload.saving import folder as folders
from epload.saving.folder import NewFolder
from epload.saving.layout import FilesLayout

NO_FILES = FilesLayout([], [], [], torch.empty(0), torch.empty(0), 0, {})


def old(path: Path) -> Path:
    path.mkdir()
    (path / "old").write_text("old")
    return path


def new_folder(path: Path, overwrite: bool) -> NewFolder:
    new = NewFolder(path, path.with_name(f".{path.name}.0.saving"), overwrite, NO_FILES)
    new.create()
    return new


@pytest.mark.parametrize("exists", [True, False])
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
    with pytest.raises(OSError, match="not empty"):
        second.commit()
    folders.discard(second.temporary)
    assert os.listdir(tmp_path / "d") == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


@pytest.mark.parametrize("overwrite", [True, False])
def test_a_save_that_is_in_place_has_not_failed(
    overwrite: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The folder that it replaces would be deleted in vain."""
    path = old(tmp_path / "c") if overwrite else tmp_path / "c"
    new = new_folder(path, overwrite)
    new.add("a", b"a")
    sync = folders._sync

    def fails(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error", str(folder))
        sync(folder)

    with mock.patch.object(folders, "_sync", fails):
        new.commit()
    assert (os.listdir(tmp_path), os.listdir(path)) == (["c"], ["a"])
    assert "is saved, but may be lost if the machine fails soon" in caplog.text


@pytest.mark.parametrize(("number", "fails"), [(errno.EINVAL, False), (errno.EIO, True)])
def test_folders_that_need_not_be_synced(number: int, fails: bool, tmp_path: Path) -> None:
    new = new_folder(tmp_path / "c", overwrite=False)
    sync = os.fsync

    def of_folders(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(number, os.strerror(number))
        sync(fd)

    with mock.patch.object(folders.os, "fsync", of_folders):
        if fails:
            with pytest.raises(OSError, match=re.escape(str(new.temporary))):
                new.commit()
        else:
            new.commit()
    assert (tmp_path / "c").exists() != fails
