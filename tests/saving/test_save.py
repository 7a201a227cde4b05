"""Saves of sharded models, against the full tensors and the libraries that read them; when one fails, or a rank ends, readers
find the old checkpoint, or the whole new one."""

from __future__ import annotations

import errno
import gc
import json
import os
import signal
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import epload
from epload.mapping import Convert, Rename, Reshape, Split
from epload.saving import folder as folders
from epload.saving import run
from epload.saving.folder import NewFolder
from epload.saving.layout import FilesLayout
from support import ranks
from support.checkpoints import assert_same, read_folder
from support.failures import error_of, must_raise
from support.synced_models import LAYOUTS, SHAPES, build, check, values, write

CASES: list[tuple[str, dict[str, Any]]] = [
    *((layout, {"max_shard_bytes": 4096}) for layout in LAYOUTS), ("fsdp", {}), ("tp0", {"dtype": torch.bfloat16}),
]  # fmt: skip


def save_and_load(rank: int, folder: str) -> list[epload.SaveReport]:
    reports = []
    for number, (layout, options) in enumerate(CASES):
        model, again = build(layout, dist.get_world_size()), build(layout, dist.get_world_size())
        write(model, 3)
        reports.append(epload.save(model, f"{folder}/{number}", **options))
        epload.load(again, f"{folder}/{number}", progress=False)
        check(again, 3, options.get("dtype", torch.float32))
    return reports


def test_saved_files_have_the_models_tensors(tmp_path: Path) -> None:
    of_cases = zip(*ranks.run(4, save_and_load, str(tmp_path / "steps")), strict=True)
    for number, reports in enumerate(of_cases):
        layout, options = CASES[number]
        folder = tmp_path / "steps" / str(number)
        found = read_folder(folder)
        assert_same(found, {name: values(name, 3).to(options.get("dtype", torch.float32)) for name in SHAPES})
        nbytes = sum(tensor.nbytes for tensor in found.values())
        assert sum(report.written for report in reports) == nbytes, f"{layout}: each byte once"
        assert max(report.written for report in reports) <= 0.35 * nbytes, f"{layout}: evenly"
        assert [(report.nbytes, report.tensors) for report in reports] == [(nbytes, len(SHAPES))] * 4
        files = sorted(file.name for file in folder.iterdir())
        if "max_shard_bytes" in options:
            index = json.loads((folder / "model.safetensors.index.json").read_text())
            assert index["metadata"]["total_size"] == nbytes
            for name, file in index["weight_map"].items():
                with safe_open(folder / file, "pt") as opened:
                    assert opened.metadata() == {"format": "pt"}
                    assert name in opened.keys()  # noqa: SIM118
            assert reports[0].files == len(files) - 1 > 2
        else:
            assert files == ["model.safetensors"]
    assert os.listdir(tmp_path) == ["steps"]
    assert len(os.listdir(tmp_path / "steps")) == len(CASES), "nothing is left beside the folders"


def save_states(rank: int, folder: str) -> list[str]:
    model = build("fsdp", dist.get_world_size())
    write(model, 1)
    epload.save({"model": model.state_dict(), "step": torch.tensor(7)}, folder)
    calls: list[tuple[Any, dict[str, Any]]] = [
        ({"w": torch.ones(2), "epoch": 3}, {}),
        ({"w": torch.ones(2)}, {}),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {"overwrite": True}),
        ({"w": torch.ones(2 + rank)}, {"overwrite": True}),
        ({"w": torch.ones(2)}, {"overwrite": True, "max_shard_bytes": 0}),
        ([torch.ones(2)], {}),
        (3, {}),
        ({}, {}),
    ]
    return [error_of(partial(epload.save, state, folder, **options)) for state, options in calls]


def test_state_dicts_and_mistakes(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    results = ranks.run(2, save_states, str(folder))
    assert results[0] == results[1]
    texts = (
        "ValueError: expected only tensors in the state dict, got epoch, a int",
        f"ValueError: {folder} exists and is not empty",
        "ValueError: w is torch.complex128, which safetensors files do not have",
        "ValueError: ranks 0 and 1 save different tensors",
        "ValueError: expected max_shard_bytes to be a number of bytes",
        "TypeError: expected a torch.nn.Module, or a list of Megatron-Core modules, got a list of Tensor",
        "TypeError: expected an nn.Module or a dict of tensors, got int",
        "ValueError: expected tensors to save, got none",
    )
    assert [text for error, text in zip(results[0], texts, strict=True) if not error.startswith(text)] == []
    expected = {f"model.{name}": values(name, 1) for name in SHAPES}
    assert_same(read_folder(folder), {**expected, "step": torch.tensor(7)})  # the first checkpoint is still there
    assert os.listdir(tmp_path) == ["c"]


def save_in_background(rank: int, folder: str) -> tuple[float, str]:
    model = build("tp1", dist.get_world_size())
    for version in (1, 2):
        write(model, version)
        epload.save(model, f"{folder}/old", overwrite=True, files=[f"{folder}/tokenizer.json"])
    model = build("fsdp", dist.get_world_size())
    write(model, 1)
    pending = epload.save_async(model, f"{folder}/1")
    write(model, 2)
    second = epload.save_async(model, f"{folder}/2")
    assert pending.done(), "the second waits for the first"
    write(model, 3)
    assert second.wait().written == pending.wait().written > 0
    return second.wait().seconds, error_of(epload.save_async(model, f"{folder}/1").wait)


def test_saves_in_the_background_and_into_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("old/file", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    for seconds, error in ranks.run(2, save_in_background, str(tmp_path)):
        assert seconds > 0
        assert error.startswith(f"ValueError: {tmp_path}/1 exists")
    for name, version in (("1", 1), ("2", 2), ("old", 2)):
        assert_same(read_folder(tmp_path / name), {name: values(name, version) for name in SHAPES})
    assert sorted(os.listdir(tmp_path / "old")) == ["model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "old", "tokenizer.json"]


def test_a_save_that_has_ended_keeps_no_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    weight = weakref.ref(model.weight)
    pending = epload.save_async(model, tmp_path / "new")
    copy = weakref.ref(pending._model.value.tensors[0])
    assert pending.wait().tensors == 2
    del model
    gc.collect()
    assert (weight(), copy()) == (None, None)


def test_rows_that_a_checkpoint_interleaves_and_a_flat_parameter(tmp_path: Path) -> None:
    rows = 1500
    model = torch.nn.ParameterDict({"a": torch.rand(rows, 4), "b": torch.rand(rows, 4), "flat": torch.rand(2 * rows)})
    both = torch.stack([model["a"].detach(), model["b"].detach()], 1).reshape(2 * rows, 4)
    state = {"both": both, "wide": model["flat"].detach().view(rows, 2)}
    save_file(state, tmp_path / "names.safetensors")
    apart = Convert(("both",), ("a", "b"), (Reshape((rows, 2, 4)), Split(1), Reshape((rows, 4))))
    flat = Convert(("wide",), ("flat",), (Reshape((-1,)),))
    options = {"mapping": epload.Mapping(converts=(apart, flat)), "names_from": tmp_path / "names.safetensors"}
    epload.save(model, tmp_path / "new", **options)
    assert_same(read_folder(tmp_path / "new"), state)


def test_a_tensor_that_is_made_of_several_dtypes(tmp_path: Path) -> None:
    half, wide = torch.full((2, 2), 0.5, dtype=torch.float16), torch.full((2, 2), 1 + 2.0**-20)
    save_file({"both": torch.zeros(4, 2)}, tmp_path / "names.safetensors")
    rules = epload.Mapping(converts=(Convert(("both",), ("a", "b"), (Split(),)),))
    options = {"mapping": rules, "names_from": tmp_path / "names.safetensors"}
    epload.save(torch.nn.ParameterDict({"a": half, "b": wide}), tmp_path / "new", **options)
    assert torch.equal(read_folder(tmp_path / "new")["both"], torch.cat([half, wide]))
    numbers = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.int64), requires_grad=False)
    model = torch.nn.ParameterDict({"a": numbers, "b": wide})
    text = "both would be made of tensors of float32 and int64"
    must_raise(epload.ModelMismatch, text, epload.save, model, tmp_path / "other", **options)


def test_names_of_another_checkpoint(tmp_path: Path) -> None:
    model, names = torch.nn.Linear(2, 3), tmp_path / "names.pt"
    torch.save({"weight": torch.zeros(3, 2)}, names)
    text = "have no place in the checkpoint and would be left out: 1 tensor: bias;"
    must_raise(epload.ModelMismatch, text, epload.save, model, tmp_path / "new", names_from=names)
    rename = epload.Mapping(renames=(Rename("^weight$", "w"),))
    text = "checkpoint names of the model's tensors cannot be derived"
    must_raise(ValueError, text, epload.save, model, tmp_path / "new", mapping=rename)
    assert os.listdir(tmp_path) == ["names.pt"]
    model = torch.nn.ParameterDict({"a": torch.ones(2), "empty": torch.ones(0, 3)})
    epload.save(model, tmp_path / "new", names_from={"a": torch.zeros(2)})  # without what is empty
    assert read_folder(tmp_path / "new").keys() == {"a"}


def test_places_and_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    epload.save({"w": torch.ones(2)}, "source")
    for path in ("s3://bucket/step-1", Path("gs://bucket/step-1")):
        for call, source in ((epload.save, {"w": torch.ones(2)}), (epload.convert, "source")):
            must_raise(ValueError, "expected the path of a local folder", call, source, path)
    assert os.listdir() == ["source"]
    # Nor may files to be copied replace those that are written.
    for name in ("a/model.safetensors.index.json", "a/model.safetensors", "a/tokenizer.json", "b/tokenizer.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    for names in ("a/model.safetensors.index.json", "a/model.safetensors", "a/tokenizer.json b/tokenizer.json"):
        files = [tmp_path / name for name in names.split()]
        must_raise(ValueError, "expected files=", epload.save, {"w": torch.ones(2)}, tmp_path / "c", files=files)
        assert not (tmp_path / "c").exists()


def test_a_tied_tensor_has_the_name_that_others_are_tied_to(tmp_path: Path) -> None:
    """Libraries save it so, whichever name the checkpoint of names_from has first."""
    model = torch.nn.ModuleDict({"z": torch.nn.Embedding(4, 2), "a": torch.nn.Linear(2, 4, bias=False)})
    model["a"].weight = model["z"].weight
    names = {"a.weight": torch.zeros(4, 2), "z.weight": torch.zeros(4, 2)}
    for first, second in (("a", "z"), ("z", "a")):
        mapping = epload.Mapping(ties=((f"{first}.weight", f"{second}.weight"),))
        epload.save(model, tmp_path / first, mapping=mapping, names_from=names)
        assert load_file(tmp_path / first / "model.safetensors").keys() == {f"{first}.weight"}


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

    for place, version in product(("read_model", "_copy_to_host"), (1, 2, 2)):
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
    must_raise(OSError, "not empty", second.commit)
    folders.discard(second.temporary)
    assert os.listdir(tmp_path / "d") == ["old"]
    assert sorted(os.listdir(tmp_path)) == ["c", "d"]


@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("case", ["not supported", "new folder", "parent"])
def test_folders_that_cannot_be_synced(
    case: str, overwrite: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    before = ["old"] * overwrite
    assert (os.listdir(path) if path.exists() else []) == (before if error else ["model.safetensors"])
    assert ("is saved, but may be lost if the machine fails soon" in caplog.text) == (case == "parent")
