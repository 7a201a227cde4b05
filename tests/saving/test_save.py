"""Saves of sharded models, against the full tensors and the libraries that read them."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import weakref
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import epload
from epload.mapping import Convert, Mapping, Rename, Reshape, Split
from epload.saving import run
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


def test_no_page_is_shared_by_what_an_nfs_client_would_write_over(tmp_path: Path) -> None:
    """Files have their full size when the first byte is written, cannot be read around a write, and have tensors on other pages
    than the header."""
    pwrite, seen = os.pwrite, set()

    def noting(fd: int, data: memoryview, offset: int) -> int:
        is_write_only = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY
        seen.add((offset, len(data), os.fstat(fd).st_size, is_write_only))
        return pwrite(fd, data, offset)

    with mock.patch.object(os, "pwrite", noting):
        epload.save({"w": torch.arange(100.0), "v": torch.ones(3)}, tmp_path / "c")
    assert seen == {(0, 4096, 4508, True), (4096, 400, 4508, True), (4496, 12, 4508, True)}
    assert load_file(tmp_path / "c" / "model.safetensors")["w"].equal(torch.arange(100.0))


def save_states(rank: int, folder: str) -> list[str]:
    model = build("fsdp", dist.get_world_size())
    write(model, 1)
    epload.save({"model": model.state_dict(), "step": torch.tensor(7)}, folder)
    two, exchange = {"q": torch.ones(2), "k": torch.zeros(2)}, (Rename(r"^q$", "x"), Rename(r"^k$", "q"), Rename(r"^x$", "k"))
    calls: list[tuple[Any, dict[str, Any]]] = [
        ({"w": torch.ones(2), "epoch": 3}, {}),
        ({"w": torch.ones(2)}, {}),
        ({"w": torch.ones(2, dtype=torch.complex128)}, {"overwrite": True}),
        ({"w": torch.ones(2 + rank)}, {"overwrite": True}),
        ({"w": torch.ones(2)}, {"overwrite": True, "max_shard_bytes": 0}),
        ({"w": torch.ones(2)}, {"overwrite": "false"}),
        (two, {"overwrite": True, "names_from": two, "mapping": Mapping(renames=exchange if rank else ())}),
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
        "TypeError: expected overwrite to be a bool, got 'false'",
        "ValueError: ranks 0 and 1 save different tensors, or pass a different mapping",
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
    state = Path(folder, "state")
    pending = epload.save_async(model, f"{folder}/1", files=[state])
    dist.barrier()
    state.unlink(missing_ok=True)  # it has been read
    write(model, 2)
    second = epload.save_async(model, f"{folder}/2")
    assert pending.done(), "the second waits for the first"
    write(model, 3)
    assert second.wait().written == pending.wait().written > 0
    return second.wait().seconds, error_of(epload.save_async(model, f"{folder}/1").wait)


def test_saves_in_the_background_and_into_a_folder_that_exists(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    for name in ("old/file", "tokenizer.json", "state"):
        (tmp_path / name).write_text("{}")
    for seconds, error in ranks.run(2, save_in_background, str(tmp_path)):
        assert seconds > 0
        assert error.startswith(f"ValueError: {tmp_path}/1 exists")
    for name, version in (("1", 1), ("2", 2), ("old", 2)):
        assert_same(read_folder(tmp_path / name), {name: values(name, version) for name in SHAPES})
    assert sorted(os.listdir(tmp_path / "old")) == ["model.safetensors", "tokenizer.json"]
    assert sorted(os.listdir(tmp_path / "1")) == ["model.safetensors", "state"]
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "old", "tokenizer.json"]


def test_a_save_that_has_ended_keeps_no_tensors(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3)
    kept, copy = [weakref.ref(model.weight)], run._copy

    def copy_and_look(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        copies = copy(tensors)
        kept.extend(weakref.ref(each) for each in copies)
        return copies

    with mock.patch.object(run, "_copy", copy_and_look):
        pending = epload.save_async(model, tmp_path / "new")
    report = pending.wait()
    assert report.tensors == 2
    assert report.peak_staging == model.weight.nbytes + model.bias.nbytes
    del model
    gc.collect()
    assert [tensor() for tensor in kept] == [None] * 3


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
            must_raise(ValueError, "expected the path of a folder to write, got /, which is", call, source, "/")
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


def test_a_file_has_a_header_that_libraries_read(tmp_path: Path) -> None:
    """It has at most 100 MB there, whatever the size of the tensors."""
    state = {f"w{i}": torch.full((2,), float(i)) for i in range(7)}
    with mock.patch("epload.saving.layout._MOST_TENSORS", 3):
        epload.save(state, tmp_path / "saved")
    assert [len(load_file(path)) for path in sorted((tmp_path / "saved").glob("*.safetensors"))] == [3, 3, 1]
    assert_same(read_folder(tmp_path / "saved"), state)
