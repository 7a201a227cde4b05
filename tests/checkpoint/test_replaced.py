"""Checkpoints that are replaced or overwritten while they are loaded, and what becomes of one that a caller keeps."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import epload
from campaigns.replaced import FILES, HOWS, READERS, Run, judged, outcomes_of, write
from epload import Checkpoint, CheckpointError, HierarchicalLoader
from epload.checkpoint.local_store import LocalFile
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.loading import run as load_run
from support import ranks
from support.checkpoints import assert_same, read_all, tensor
from support.failures import must_raise

SAMPLE = [Run.of(seed) for seed in range(1000, 1006)]
IN_THE_MIDDLE = [
    Run(readers, how, file, moment, actor=0, nth=1, container=container)
    for (readers, how, file), (moment, container) in zip(
        product(READERS, HOWS, FILES[:2]),
        [("read", "safetensors"), ("read", "torch"), ("at the end", "safetensors")] * 10,
        strict=True,
    )
]
"""Once everything is parsed, so that no load can be right by chance."""


def test_replaced_during_a_load() -> None:
    runs = SAMPLE + IN_THE_MIDDLE
    problems = []
    refused = set()
    for run, outcomes in zip(runs, outcomes_of(runs, limit=200), strict=True):
        verdict, why = judged(run, outcomes)
        problems += [f"{run}: {why}"] if why else []
        refused |= {run} if verdict == "refused" else set()
    assert not problems, "\n".join(problems)
    assert [run for run in IN_THE_MIDDLE if run not in refused] == []


def _small(folder: Path, value: float = 1.0) -> tuple[nn.Module, Path]:
    path = folder / "model.safetensors"
    save_file({"weight": torch.full((4, 3), value), "bias": torch.full((4,), value)}, path)
    return nn.Linear(3, 4), path


def _loader(**options: Any) -> HierarchicalLoader:
    return HierarchicalLoader(progress=False, **options)


CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "replaced": (lambda path: write(path, path.read_bytes(), "rename"), "was replaced by another file"),
    "overwritten": (lambda path: write(path, path.read_bytes(), "in place"), "was modified"),
    "grown": (lambda path: write(path, path.read_bytes() + b"x", "in place"), "was modified"),
    "truncated": (lambda path: os.truncate(path, 100), "was truncated"),
    "removed": (lambda path: path.unlink(), "was removed"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_error_says_what_has_changed(change: str, tmp_path: Path) -> None:
    """After the last byte was read."""
    model, path = _small(tmp_path)
    action, message = CHANGES[change]

    def hook(*_: object) -> None:
        action(path)

    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    with mock.patch("epload.loading.run.fill_missing", hook):
        text = rf"{re.escape(str(path))} {message}.*while it was loaded.*partly overwritten"
        must_raise(CheckpointError, text, _loader().load, model, path)


@pytest.mark.parametrize(("how", "change"), [("mapped", "replaced"), ("before torch 1.6", "overwritten")])
def test_files_that_are_not_read_as_ranges(how: str, change: str, tmp_path: Path) -> None:
    """Not truncated: that would be the end of a process that has the file mapped."""
    path, weight = tmp_path / "model.pt", tensor(1, (3, 4)).t()
    torch.save({"weight": weight, "bias": tensor(2, (4,))}, path, _use_new_zipfile_serialization=how == "mapped")
    action, message = CHANGES[change]
    fill = StateDictCheckpoint.fill

    def meanwhile(*arguments: Any) -> None:
        fill(*arguments)
        action(path)

    with mock.patch.object(StateDictCheckpoint, "fill", meanwhile):
        text = rf"{re.escape(str(path))} {message}.*partly overwritten"
        must_raise(CheckpointError, text, _loader(readers="one").load, nn.Linear(3, 4), path)


def test_a_file_is_opened_once(tmp_path: Path) -> None:
    """By whatever opens it."""
    for number, name in enumerate(("a", "b", "c")):
        save_file({name: tensor(number, (50, 3))}, tmp_path / f"part-{number}.safetensors")
    model = nn.ParameterDict({name: nn.Parameter(torch.empty(50, 3)) for name in ("a", "b", "c")})
    loader = _loader()
    opened: list[str] = []

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and active and str(arguments[0]).startswith(str(tmp_path)):
            opened.append(os.path.basename(arguments[0]))

    active = True
    sys.addaudithook(hook)  # for good; it does nothing any more when this test is over
    for _ in range(2):  # parsed, then known
        opened.clear()
        loader.load(model, tmp_path)
        assert sorted(name for name in opened if name) == [f"part-{number}.safetensors" for number in range(3)]
    active = False


def test_a_proof_reads_what_lies_at_the_path(tmp_path: Path) -> None:
    """Another file with the same bytes, renamed over the one that was read."""
    model, path = _small(tmp_path)
    prove = load_run._prove

    def hook(*arguments: Any) -> None:
        write(path, path.read_bytes(), "rename")
        prove(*arguments)

    with mock.patch.object(load_run, "_prove", hook):
        must_raise(CheckpointError, "was replaced by another file", _loader(verify=True).load, model, path)


def test_a_checkpoint_that_is_kept_and_whose_file_changes(tmp_path: Path) -> None:
    model, path = _small(tmp_path)
    checkpoint = Checkpoint.open(path)
    loader = _loader()
    loader.load(model, checkpoint)
    loader.load(model, checkpoint)
    before = model.weight.detach().clone()
    _small(tmp_path, 2.0)
    with pytest.raises(CheckpointError, match=r"since this epload\.Checkpoint opened it: open it again"):
        loader.load(model, checkpoint)
    assert torch.equal(model.weight, before)
    loader.load(model, Checkpoint.open(path))
    assert torch.equal(model.weight, torch.full((4, 3), 2.0))


def test_a_checkpoint_that_was_closed_reads_the_same_file_or_none(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", {"a": tensor(1, (10, 10))}
    save_file(state, path)
    checkpoint = Checkpoint.open(path)
    checkpoint.close()
    assert_same(read_all(checkpoint), state)
    checkpoint.close()
    write(path, path.read_bytes(), "rename")
    must_raise(CheckpointError, "was replaced by another file", read_all, checkpoint)


def test_a_change_right_after_opening_is_seen(tmp_path: Path) -> None:
    """Also within the same tick of the file system's clock as the change before."""
    path = tmp_path / "file"
    for turn in range(10):
        path.write_bytes(bytes([turn]))
        file = LocalFile(path)
        write(path, b"x", "in place")
        assert "was modified" in file.changed()
        file.close()


def _refused_early(rank: int, folder: str) -> list[str]:
    """A load that is refused after the files were opened leaves none open."""
    loader = HierarchicalLoader(progress=False)
    model = nn.Linear(5, 7, device="meta")
    for _ in range(2):
        with pytest.raises(epload.LoadError):
            loader.load(model, folder)
    found = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [target for target in map(os.readlink, found) if target.startswith(folder)]


def test_a_refused_load_keeps_no_file_open(tmp_path: Path) -> None:
    _small(tmp_path)
    assert ranks.run(2, _refused_early, str(tmp_path)) == [[], []]
