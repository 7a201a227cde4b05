"""Saves of what has changed since another checkpoint: with it they give every bit, and without it nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import epload
from epload.checkpoint import delta
from epload.checkpoint.opening import join_source
from epload.cli.main import main
from support import ranks, s3_server
from support.checkpoint_kinds import SOURCES, opened, plain_dict, small_state
from support.checkpoints import assert_same, read_all, read_folder, tensor
from support.checks import flipped
from support.failures import error_of, must_raise
from support.pretrained import random
from support.synced_models import LAYOUTS, SHAPES, build, check, values, write

INDEX = "epload-delta.json"


def save_chain(rank: int, folder: str) -> str:
    """Saves and loads versions, in each layout and every mode. Returns the error of a save whose bases differ."""
    for version, layout in enumerate(LAYOUTS, 1):
        model = build(layout, 2)
        write(model, version)
        options: dict[str, Any] = {"base": f"{folder}/{version - 1}"} if version > 1 else {}
        pending = epload.save_async(model, f"{folder}/{version}", **options)
        write(model, 77)
        pending.wait()
    ways = ("auto", "one", "per_node", "partitioned", "every")
    for version, layout, readers in zip((2, 3, 4, 4, 4), ("fsdp", *LAYOUTS), ways, strict=True):
        model = build(layout, 2)
        epload.load(model, f"{folder}/{version}", readers=readers, verify=True)
        check(model, version)
    return error_of(lambda: epload.save(model, f"{folder}/new", base=f"{folder}/{rank + 1}", timeout=30))


def test_chains_are_loaded_by_every_rank(tmp_path: Path) -> None:
    first, second = ranks.run(2, save_chain, str(tmp_path))
    assert first == second
    assert "ranks 0 and 1" in first
    assert sorted(os.listdir(tmp_path)) == ["1", "2", "3", "4"]
    for version in (2, 4):
        result = CliRunner().invoke(main, ["convert", str(tmp_path / str(version)), str(tmp_path / f"flat-{version}")])
        assert result.exit_code == 0, result.stderr
        assert_same(read_folder(tmp_path / f"flat-{version}"), {name: values(name, version) for name in SHAPES})
    # What has been flattened is as good a base as what it was made of.
    shutil.rmtree(tmp_path / "2")
    os.rename(tmp_path / "flat-2", tmp_path / "2")
    assert_same(read_all(epload.Checkpoint.open(tmp_path / "4")), {name: values(name, 4) for name in SHAPES})


def legacy_file(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    return folder / "old.pt"


def dcp_folder(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    dcp.save({"model": state}, checkpoint_id=folder / "dcp", no_dist=True)
    return folder / "dcp"


FILES = [*(each for each in SOURCES if each not in (plain_dict, opened)), legacy_file, dcp_folder]


@pytest.mark.parametrize("make", FILES, ids=lambda f: f.__name__)
def test_every_format_can_be_the_base(make: Callable[..., Any], tmp_path: Path) -> None:
    state = {**small_state(), "x": tensor(3, (40, 50)), "y": tensor(2, (31,), torch.bfloat16)}
    (tmp_path / "base").mkdir()
    base = make(tmp_path / "base", {name: flipped(value, 5) if name > "c" else value for name, value in state.items()})
    epload.save(state, tmp_path / "new", base=base)
    assert_same(read_all(epload.Checkpoint.open(tmp_path / "new")), state)
    narrow = {name: state[name].bfloat16() for name in "xy"}
    epload.save({name: state[name] for name in "xy"}, tmp_path / "narrow", base=tmp_path / "new", dtype=torch.bfloat16)
    assert_same(read_all(epload.Checkpoint.open(tmp_path / "narrow")), narrow)


def test_little_is_written_where_little_has_changed(tmp_path: Path) -> None:
    state = {"w": torch.arange(3_000_000, dtype=torch.int32).view(torch.bfloat16), "same": torch.randn(1000, 1000)}
    epload.save(state, tmp_path / "1")
    positions = torch.randperm(state["w"].numel(), generator=torch.Generator().manual_seed(1))[: len(state["w"]) // 50]
    new = {**state, "w": state["w"].clone()}
    new["w"].view(torch.int16)[positions] ^= 1
    report = epload.save(new, tmp_path / "2", base=tmp_path / "1")
    assert report.written == (tmp_path / "2" / "changes-00001-of-00001.epload").stat().st_size
    assert report.written <= 3.3 * len(positions)
    assert report.base == "../1"
    text = f"saved what has changed of 2 tensors, 16.0 MB in 1 file, {report.written / 1e3:.1f} kB by this rank"
    assert text in str(report)
    assert report.nbytes == sum(tensor.nbytes for tensor in new.values())


def test_sizes_that_a_network_file_system_does_not_know_yet(tmp_path: Path) -> None:
    """The attributes that the first rank has cached of another rank's file are those of the empty one."""
    stat, state = Path.stat, {"w": torch.ones(1000), "same": torch.ones(3)}
    epload.save(state, tmp_path / "1")

    def cached(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        return os.stat_result((*found[:6], 0, *found[7:])) if path.suffix == ".epload" else found

    new = {**state, "w": state["w"] + 1}
    with mock.patch.object(Path, "stat", cached):
        epload.save(new, tmp_path / "2", base=tmp_path / "1")
    assert_same(read_all(epload.Checkpoint.open(tmp_path / "2")), new)


def test_other_libraries_find_no_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    model = random("llama", 1)
    model.save_pretrained(tmp_path / "1")
    with torch.no_grad():
        model.lm_head.weight[3] += 1
    epload.save(model, tmp_path / "2", base=tmp_path / "1")
    assert sorted(os.listdir(tmp_path / "2")) == ["changes-00001-of-00001.epload", INDEX]
    for load in (AutoModelForCausalLM, AutoConfig):
        must_raise((OSError, ValueError), ".", load.from_pretrained, tmp_path / "2")
    other = random("llama", 2)
    epload.load(other, tmp_path / "2")
    assert_same(dict(other.state_dict()), dict(model.state_dict()))
    epload.convert(tmp_path / "2", tmp_path / "3")
    assert_same(dict(AutoModelForCausalLM.from_pretrained(tmp_path / "3").state_dict()), dict(model.state_dict()))


def test_the_index_declares_a_quantization(tmp_path: Path) -> None:
    state = {"w.weight": torch.ones(256, 256).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
    epload.save({**state, "w.weight_scale_inv": torch.zeros(2, 2)}, tmp_path / "1")
    epload.save(state, tmp_path / "2", base=tmp_path / "1")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    rewrite(tmp_path / "2" / INDEX, lambda index: index.update(config={"config.json": json.dumps(config)}))
    epload.convert(tmp_path / "2", tmp_path / "3")
    for name in "23":
        assert epload.Checkpoint.open(tmp_path / name).manifest.quantization.blocks == ((128, 128),)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Folders 1 to 3, of which the first is whole; one element of a large tensor changes in each."""
    state = {"big": torch.arange(3_000_000.0), "small": torch.arange(5, dtype=torch.uint8)}
    epload.save(state, tmp_path / "1")
    for version in (2, 3):
        state["big"][1_234_567] += version
        epload.save(state, tmp_path / f"{version}", base=tmp_path / f"{version - 1}")
    return tmp_path


def errors_of(folder: Path) -> list[str]:
    """Returns the errors of a load and of each command. No tensor is loaded."""
    state = {"big": torch.zeros(3_000_000), "small": torch.zeros(5, dtype=torch.uint8)}
    texts = [error_of(lambda: epload.load_state(state, folder))]
    assert texts[0].startswith("CheckpointError: ")
    plan = ["--model", "support.models:Block", "--mesh", "fsdp=1"]
    for command in (["verify"], ["diff", str(folder)], ["convert", str(folder / "new")], ["inspect"], ["plan", *plan]):
        if not (command[0] in ("inspect", "plan") and (folder.parent / "1").exists()):  # they read no tensors
            result = CliRunner().invoke(main, [command[0], str(folder), *command[1:]])
            assert result.exit_code == 1, result.output
            texts.append(result.stderr)
    return texts


def rewrite(path: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_without_its_base_it_is_nothing(chain: Path) -> None:
    os.rename(chain / "1", chain / "elsewhere")
    for text in errors_of(chain / "3"):
        assert "no checkpoint at" in text
        assert "which has to be there, too" in text
    os.rename(chain / "elsewhere", chain / "1")
    shutil.copytree(chain, chain / "copy" / "of all")
    assert float(read_all(epload.Checkpoint.open(chain / "copy" / "of all" / "3"))["big"][1_234_567]) == 1_234_572


@pytest.mark.parametrize("version", [1, 2])
def test_another_version_of_the_base_is_refused(version: int, chain: Path) -> None:
    """One element differs, which no sample of the base has."""
    flat = chain / "flat"
    epload.convert(chain / str(version), flat)
    state = load_file(flat / "model.safetensors")
    state["big"][2_345_678] += 1
    save_file(state, flat / "model.safetensors")
    shutil.rmtree(chain / str(version))
    os.rename(flat, chain / str(version))
    assert all("it has other values in big" in text for text in errors_of(chain / f"{version + 1}"))


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], object]]] = {
    "another version": ("expected version 2, got 1", lambda index: index.update(version=1)),
    "an absolute path": ("a relative path", lambda index: index["base"].update(path="/etc")),
    "a URL": ("a relative path", lambda index: index["base"].update(path="s3://bucket/x")),
    "a URL of the Hub": ("expected hf://org/name", lambda index: index["base"].update(path="hf://bucket/x/y")),
    "a chunk outside": ("reaches outside", lambda index: index["tensors"]["small"][2][0].__setitem__(-2, 1)),
    "no chunk": ("has no chunks", lambda index: index["tensors"]["small"][2].clear()),
    "a chunk of nothing": ("lacks changes", lambda index: index["tensors"]["small"][2][0].__setitem__(slice(2, 5), [0, 0, 0])),
    "changes outside": ("end outside their file", lambda index: index["tensors"]["big"][2][0].__setitem__(1, 10**9)),
    "a negative offset": ("integers for a chunk", lambda index: index["tensors"]["big"][2][0].__setitem__(1, -1)),
    "a file in another folder": ("plain names", lambda index: index["files"][0].__setitem__(0, "../x")),
    "a file anywhere": ("plain names", lambda index: index["config"].update({"../../x.pth": "import os"})),
    "an index of weights": ("files of a configuration", lambda index: index["config"].update({"x.safetensors.index.json": ""})),
    "an infinite size": ("OverflowError", lambda index: index["files"][0].__setitem__(1, float("inf"))),
    "a file of another size": ("copy the folder again", lambda index: index["files"][0].__setitem__(1, 10**6)),
    "another base": ("other names, shapes, dtypes or values", lambda index: index["base"].update(digest="0" * 32)),
    "itself": ("other names, shapes, dtypes or values|more than 16", lambda index: index["base"].update(path="../3")),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_index_is_refused(damage: str, chain: Path) -> None:
    text, edit = DAMAGE[damage]
    rewrite(chain / "3" / INDEX, edit)
    must_raise(epload.CheckpointError, text, lambda: read_all(epload.Checkpoint.open(chain / "3")))


def test_damaged_changes_are_refused(chain: Path) -> None:
    (file,) = (chain / "3").glob("*.epload")
    content = file.read_bytes()
    assert len(content) < 50
    for at in range(len(content)):  # those that are ignored, in the header, change nothing
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        if at not in (6, 7):
            text = "the changes of big are damaged"
            must_raise(epload.CheckpointError, text, lambda: read_all(epload.Checkpoint.open(chain / "3")))
    assert all("the changes of big are damaged" in text for text in errors_of(chain / "3"))


def test_chains_are_bounded(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta, "MAX_LINKS", 2)
    state = read_all(epload.Checkpoint.open(chain / "3"))
    must_raise(ValueError, "ends a chain of 2 deltas", epload.save, state, chain / "4", base=chain / "3")
    epload.convert(chain / "3", chain / "flat")
    epload.save(state, chain / "4", base=chain / "flat")
    os.link(chain / "flat" / "model.safetensors", chain / "4" / "model.safetensors")
    text = f"several sets of weights: model.safetensors, {INDEX}"
    must_raise(epload.CheckpointError, text, epload.Checkpoint.open, chain / "4")


def test_mistakes(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(chain)
    Path("note.txt").write_text("to be copied")
    before, state = sorted(os.listdir()), read_all(epload.Checkpoint.open("3"))
    epload.save(state, "3", base="2", overwrite=True)
    for path, options, kind, text in (
        ("2", {"base": "3", "overwrite": True}, ValueError, "changes of itself"),
        ("1", {"base": "3", "overwrite": True}, ValueError, "changes of itself"),
        ("4", {"base": "9"}, epload.CheckpointError, "no checkpoint at"),
        ("4", {"base": "1", "files": ["note.txt"]}, ValueError, "files= and checksums= are for whole checkpoints"),
        ("4", {"base": "s3://bucket/1"}, ValueError, "a path next to"),
        ("4", {"base": "hf://name"}, epload.CheckpointError, "expected hf://org/name"),
        ("4", {"base": {"a": torch.ones(1)}}, TypeError, "expected base to be the path"),
    ):
        must_raise(kind, text, epload.save, state, path, **options)
    assert sorted(os.listdir()) == before
    assert_same(read_all(epload.Checkpoint.open("3")), state)


def test_a_base_whose_file_is_a_link_is_not_replaced(tmp_path: Path) -> None:
    first, second, blob = tmp_path / "1", tmp_path / "2", tmp_path / "blob.safetensors"
    epload.save({"w": torch.tensor([1.0, 2.0])}, first)
    (first / "model.safetensors").rename(blob)
    (first / "model.safetensors").symlink_to(blob)
    epload.save({"w": torch.tensor([1.0, 3.0])}, second, base=first)
    for base in (first, second):
        options = {"base": base, "overwrite": True}
        must_raise(ValueError, "changes of itself", epload.save, {"w": torch.tensor([1.0, 4.0])}, first, **options)
    assert read_all(epload.Checkpoint.open(second))["w"].tolist() == [1, 3]
    epload.save({"w": torch.tensor([1.0, 5.0])}, first, base=first / "model.safetensors", overwrite=True)
    assert read_all(epload.Checkpoint.open(first))["w"].tolist() == [1, 5]


def test_object_storage(chain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = read_all(epload.Checkpoint.open(chain / "3"))
    with s3_server.serving() as (moto, proxy):
        for name, value in s3_server.environment(proxy.address).items():
            monkeypatch.setenv(name, value)
        url = f"s3://{s3_server.BUCKET}/run"
        moto.put_folder(chain, "run")
        for source in (f"{url}/3", f"{url}/3/{INDEX}"):
            checkpoint = epload.Checkpoint.open(source)
            assert_same(read_all(checkpoint), state)
            assert checkpoint.changed() == ""
            assert_same(read_all(join_source(source, checkpoint.manifest)), state)
        other = {**state, "small": state["small"] + 1}
        epload.save(other, chain / "1", overwrite=True)
        moto.put_folder(chain / "1", "run/1")
        assert "was replaced by another object" in checkpoint.changed()
        checkpoint.close()
        text = "is not the checkpoint that"
        must_raise(epload.CheckpointError, text, lambda: read_all(epload.Checkpoint.open(f"{url}/3")))
