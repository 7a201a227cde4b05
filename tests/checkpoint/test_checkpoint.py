"""Checkpoints and their manifests: each kind of source against the safetensors library, and files that are replaced meanwhile."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import epload
import slow_store
from campaigns.replaced import FILES, HOWS, READERS, Run, judged, outcomes_of, write
from epload import Checkpoint, CheckpointError, HierarchicalLoader, Manifest
from epload.checkpoint import object_store
from epload.checkpoint.local_store import LocalFile
from epload.checkpoint.opening import join_source
from epload.checkpoint.state_dict import StateDictCheckpoint
from epload.core.dtypes import SAFETENSORS
from epload.core.pieces import Piece
from epload.loading import run as load_run
from page_cache import cached, drop
from support.checkpoint_kinds import SOURCES, folder_without_index, one_file, small_state, the_index_itself
from support.checkpoints import State, assert_same, entry, header, index, raw_bytes, read_all, tensor
from support.failures import error_of, must_raise
from support.on_ranks import on_ranks


@pytest.mark.parametrize("source", SOURCES, ids=lambda f: f.__name__)
def test_every_source_gives_the_same_tensors(source: Callable[[Path, State], Any], tmp_path: Path) -> None:
    state = {**small_state(), "x": tensor(1, (50,)), "y": tensor(2, (31,), torch.bfloat16)}
    checkpoint = Checkpoint.open(source(tmp_path, state))
    assert_same(read_all(checkpoint), state)
    assert checkpoint.manifest.nbytes == sum(value.nbytes for value in state.values())
    checkpoint.close()
    assert_same(read_all(checkpoint), state)  # usable again after close
    pieces = [("odd", 5, 0, 7), ("x", 100, 16, 100), ("y", 0, 128, 62), ("x", 0, 192, 4), ("odd", 12, 208, 1)]
    bucket = torch.full((256,), 255, dtype=torch.uint8)
    index = checkpoint.manifest.names.index
    checkpoint.fill(bucket, [Piece(index(name), start, at, nbytes) for name, start, at, nbytes in pieces])
    expected = torch.full((256,), 255, dtype=torch.uint8)
    for name, start, at, nbytes in pieces:
        expected[at : at + nbytes] = state[name].reshape(-1).view(torch.uint8)[start : start + nbytes]
    assert torch.equal(bucket, expected)
    checkpoint.fill(bucket, [])
    assert torch.equal(bucket, expected)
    checkpoint.close()


def test_manifest_is_what_the_library_reports(tmp_path: Path) -> None:
    state = {f"t.{name}": tensor(i, (i + 1, 3), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())}
    path = one_file(tmp_path, state)
    manifest = Checkpoint.open(path).manifest
    reported = {n: (list(s), d) for n, s, d in zip(manifest.names, manifest.shapes, manifest.dtypes, strict=True)}
    with safe_open(path, "pt") as library:
        parts = {name: library.get_slice(name) for name in library.keys()}  # noqa: SIM118
        assert reported == {name: (part.get_shape(), SAFETENSORS[part.get_dtype()]) for name, part in parts.items()}
    assert_same(read_all(Checkpoint.open(path)), load_file(path))


def test_metadata_is_no_tensor_and_order_is_that_of_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    late, early, nothing = entry([3], [2, 5], "U8"), entry([2], [0, 2], "U8"), entry([0], [2, 2])
    path.write_bytes(header(0, late=late, __metadata__={"format": "pt"}, early=early, nothing=nothing) + b"abcde")
    checkpoint = Checkpoint.open(path)
    assert checkpoint.manifest.names == ("early", "nothing", "late")
    assert raw_bytes(read_all(checkpoint)["late"]) == b"cde"


def test_a_dict_with_something_that_is_no_full_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    for kind, text, state in (
        (TypeError, "no tensors found; top-level keys: a, b", {"a": {"w": tensor(1, (2,))}, "b": [1, 2]}),
        (CheckpointError, "b is not a dense tensor", {"a": tensor(1, (2,)), "b": torch.eye(3).to_sparse()}),
        (CheckpointError, "b is not a dense tensor", {"b": torch.empty(3, device="meta")}),
        (CheckpointError, r"b is not a dense tensor with data \(nested", {"b": nested}),
        ((TypeError, CheckpointError), "1", {1: tensor(1, (2,))}),
    ):
        must_raise(kind, text, Checkpoint.open, state)


def test_a_running_job_is_no_stored_checkpoint() -> None:
    text = r"expected a stored checkpoint, got epload:/.*trainer0:29600, a running job; pass it to epload\.load\(\)"
    for source in ("epload://trainer0:29600", Path("epload://trainer0:29600")):
        must_raise(ValueError, text, Checkpoint.open, source)
        with epload.HierarchicalLoader(progress=False) as loader:
            must_raise(ValueError, text, loader.load, torch.nn.Linear(2, 2), source)


def test_joining_names_what_is_wrong_with_the_path(tmp_path: Path) -> None:
    (folder := tmp_path / "two").mkdir()
    for i in (1, 2):
        save_file({f"t{i}": torch.zeros(2)}, folder / f"model-0000{i}-of-00002.safetensors")
    manifest = Checkpoint.open(folder).manifest
    text = "cannot read .*nowhere, a file that the source rank reads"
    must_raise(CheckpointError, text, join_source, tmp_path / "nowhere", manifest)
    text = "is one file, but the source rank reads 2 files"
    must_raise(CheckpointError, text, join_source, folder / "model-00001-of-00002.safetensors", manifest)


def test_an_element_of_any_stride_and_a_folder_with_a_number_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.arange(4.0)[2::2][:1], "imaginary": torch.tensor([1 + 2j]).imag}
    assert_same(read_all(Checkpoint.open(state)), {name: torch.tensor(value.tolist()) for name, value in state.items()})
    for name in ("run", "run#2"):
        save_file({"w": torch.tensor([float(len(name))])}, (tmp_path / name).with_suffix(".safetensors"))
    must_raise(CheckpointError, "a # or \\? begins", Checkpoint.open, f"file://{tmp_path}/run#2.safetensors")
    assert read_all(Checkpoint.open(tmp_path / "run#2.safetensors"))["w"].item() == 5
    opened: list[str] = []
    monkeypatch.setattr(object_store, "connect", opened.append)
    object_store.ObjectStore("hdfs:///user/x")
    object_store.locate("hdfs:///user/x/model.safetensors", "", lambda nbytes: None, None)
    assert opened == ["hdfs:///user/x"] * 2


ODD_NAMES = ["\ud83d\ude00", "\U0001f600", "\ud83d", "\\ud83d\\ude00", "a\nb", 'a","b', "\x00", "\u2028", ""]


def test_what_is_sent_of_a_manifest_is_all_of_it(tmp_path: Path) -> None:
    """Odd names arrive as they are, too, and differ: two surrogates are not the character that they encode in UTF-16."""
    odd = [
        Manifest(names, ((2,),) * len(names), (torch.uint8,) * len(names), "a test")
        for names in (*zip(ODD_NAMES), tuple(ODD_NAMES))
    ]
    kinds = {f"t.{name}.é\u4e16": tensor(i, (i, 2), dtype) for i, (name, dtype) in enumerate(SAFETENSORS.items())}
    assert Checkpoint.open(kinds).manifest.nbytes_of() == [value.nbytes for value in kinds.values()]
    alike = {f"{i}": tensor(i, (3 if i < 40 else i,), torch.bfloat16 if i < 50 else torch.float32) for i in range(60)}
    for name, state in (("alike", alike), ("different", alike | kinds)):
        save_file(state, tmp_path / f"{name}.safetensors")
    opened = [Checkpoint.open(source).manifest for source in (kinds, *tmp_path.glob("*.safetensors"))]
    manifests = [*odd, *opened, Manifest((), (), (), "nothing")]
    for manifest in manifests:
        again = Manifest.from_compact(manifest.compact, manifest.provenance)
        for what in ("names", "shapes", "dtypes", "nbytes", "digest", "identity"):
            assert getattr(again, what) == getattr(manifest, what)
        assert (again.compact, again.provenance) == (manifest.compact, manifest.provenance)
        if manifest.locations is not None:
            numbers = range(len(manifest.names))
            assert [*map(again.locations.of_tensor, numbers)] == [*map(manifest.locations.of_tensor, numbers)]
    for what in ("digest", "identity"):
        assert len({getattr(manifest, what) for manifest in manifests}) == len(manifests)


def test_an_expanded_tensor_does_not_get_in_the_way(tmp_path: Path) -> None:
    huge = torch.zeros(1, dtype=torch.float64).expand(2**31, 2**31)
    state = {"weight": torch.ones(1, 2), "bias": torch.ones(1), "huge": huge}
    torch.save(state, tmp_path / "pytorch_model.bin")
    for source in (state, tmp_path / "pytorch_model.bin"):
        model = torch.nn.Linear(2, 1)
        report = epload.load(model, source, strict=False, progress=False)
        assert report.unexpected_keys == ["huge"]
        assert_same(dict(model.state_dict()), {name: state[name] for name in ("weight", "bias")})


@pytest.mark.parametrize("change", ["", "name", "shape", "dtype", "one less", "shorter"])
@pytest.mark.parametrize("source", [one_file, the_index_itself, folder_without_index], ids=lambda f: f.__name__)
def test_whatever_is_known_a_checkpoint_is_opened_as_it_is(
    source: Callable[[Path, State], Any], change: str, tmp_path: Path
) -> None:
    first = {f"t{i}": tensor(i, (6, 4)) for i in range(4)}
    second = {name: value * 2 for name, value in first.items()}
    last = second.pop("t3")
    second |= {
        "": {"t3": last}, "name": {"u3": last}, "shape": {"t3": last.reshape(4, 6)}, "dtype": {"t3": last.view(torch.int32)},
        "one less": {}, "shorter": {"t3": last[:2]},
    }[change]  # fmt: skip
    folders = tmp_path / "first", tmp_path / "second"
    for folder in folders:
        folder.mkdir()
    known = Checkpoint.open(source(folders[0], first)).manifest
    path = source(folders[1], second)
    again = Checkpoint.open(path, known)
    assert_same(read_all(again), second)
    assert (again.manifest.identity == known.identity) == (change == "")
    assert again.manifest.provenance == Checkpoint.open(path).manifest.provenance
    assert_same(read_all(join_source(path, again.manifest)), second)


def test_an_index_that_changed_is_read(tmp_path: Path) -> None:
    """The same files with the same headers, but another of two holds the tensor."""
    a, b = {"w": tensor(1, (3,))}, {"w": tensor(2, (3,)), "v": tensor(3, (3,))}
    save_file(a, tmp_path / "x.safetensors")
    save_file(b, tmp_path / "y.safetensors")
    place = {"w": "x.safetensors", "v": "y.safetensors"}
    known = Checkpoint.open(index(tmp_path, {"weight_map": place}))
    assert_same(read_all(known), {**b, **a})
    path = index(tmp_path, {"weight_map": dict.fromkeys("vw", "y.safetensors")})
    assert_same(read_all(Checkpoint.open(path, known.manifest)), b)


def test_a_damaged_file_is_refused_also_when_its_like_is_known(tmp_path: Path) -> None:
    path = one_file(tmp_path, small_state())
    known, raw = Checkpoint.open(path).manifest, path.read_bytes()
    for length in (-1, 4, 20):  # no header, and part of it
        path.write_bytes(raw[:length])
        must_raise(CheckpointError, str(path), Checkpoint.open, path, known)


REQUESTS = [
    ("SLOW_MOST", 1), ("SLOW_MOST", 13), ("SLOW_MOST", 100), ("SLOW_ERROR", errno.EIO), ("SLOW_DIRECT_ERROR", 0),
    ("SLOW_DIRECT_ERROR", errno.EINVAL),
]  # fmt: skip
"""Requests that are short, or fail. The last two go past the page cache, which the file system refuses or not."""


def main(folder: Path, log: Path) -> None:
    """Prints of each case the tensors that are wrong, the error, requests, and if the file is cached before and after."""
    for name, value in REQUESTS:
        cold = name == "SLOW_DIRECT_ERROR"
        state = {f"t{i}": tensor(i, (1 << 20 if cold else 17 + i,), torch.uint8) for i in range(6)}
        path = one_file(folder, state)
        checkpoint, pieces, at = Checkpoint.open(path), list[Piece](), 64
        for number, key in enumerate(checkpoint.manifest.names):
            pieces.append(Piece(number, 0, at, state[key].nbytes))
            at += state[key].nbytes + 64
        checkpoint.configure_reads(cold)
        drop(path)
        in_memory = cached(path) > 0  # a file system that is its own cache
        buffer, before = torch.zeros(at, dtype=torch.uint8), len(slow_store.requests(log))
        os.environ[name] = str(value)
        error = error_of(partial(checkpoint.fill, buffer, pieces))
        del os.environ[name]
        expected = [state[key] for key in checkpoint.manifest.names]
        wrong = [p.tensor for p in pieces if not torch.equal(buffer[p.bucket_offset :][: p.nbytes], expected[p.tensor])]
        print(json.dumps([wrong, error, len(slow_store.requests(log)) - before, in_memory, cached(path) > 0.9]))


def test_requests_that_are_short_or_fail(tmp_path: Path) -> None:
    store = tmp_path / "store"
    store.mkdir()
    environment = os.environ | slow_store.environment(store, tmp_path / "log", 0)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", __name__, store, tmp_path / "log"]
    ran = subprocess.run(command, env=environment, check=True, timeout=120, stdout=subprocess.PIPE)
    *short, (_, failed, *_), direct, refused = map(json.loads, ran.stdout.splitlines())
    for (_, most), (wrong, error, requests, *_) in zip(REQUESTS, short, strict=False):
        assert (wrong, error) == ([], "")
        assert requests >= sum(range(17, 23)) / most
    assert re.search(f"^CheckpointError: .*{store}/weights.safetensors.*Input/output error", failed), failed
    assert direct[:2] == refused[:2] == [[], ""]
    assert (direct[4], refused[4]) == (direct[3], True), "read past the cache unless the file system refuses"


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    """Also those of a closed checkpoint, which are opened again."""
    path = one_file(tmp_path, small_state())
    checkpoint = Checkpoint.open(path)
    checkpoint.close()

    def refuse(*args: object, **kwargs: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    with mock.patch.object(os, "open", refuse):
        for call in (lambda: Checkpoint.open(path), lambda: read_all(checkpoint)):
            text = f"cannot read {path}: Too many open files; raise the limit on open files (ulimit -n)"
            must_raise(CheckpointError, re.escape(text), call)


def test_a_file_that_was_truncated_is_named(tmp_path: Path) -> None:
    path = one_file(tmp_path, {"a": tensor(1, (100,))})
    checkpoint = Checkpoint.open(path)
    os.truncate(path, 150)
    must_raise(CheckpointError, f"{path} was truncated", read_all, checkpoint)


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
    """After the last byte was read, and before a proof."""
    action, message = CHANGES[change]
    for where, verify in (("fill_missing", False), ("_prove", True)):
        model, path = _small(tmp_path)
        inner = getattr(load_run, where)

        def hook(*arguments: Any) -> None:
            action(path)  # noqa: B023
            inner(*arguments)  # noqa: B023

        model.register_buffer("scratch", torch.zeros(2), persistent=False)
        with mock.patch.object(load_run, where, hook):
            text = f"{path} {message}" + ("" if verify else ".*while it was loaded.*partly overwritten")
            must_raise(CheckpointError, text, _loader(verify=verify).load, model, path)


@pytest.mark.parametrize(("how", "change"), [("mapped", "replaced"), ("before torch 1.6", "overwritten")])
def test_files_that_are_not_read_as_ranges(how: str, change: str, tmp_path: Path) -> None:
    """A truncation would be the end of a process that has the file mapped."""
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


def test_a_checkpoint_that_is_kept_and_whose_file_changes(tmp_path: Path) -> None:
    model, path = _small(tmp_path)
    checkpoint = Checkpoint.open(path)
    loader = _loader()
    loader.load(model, checkpoint)
    loader.load(model, checkpoint)
    before = model.weight.detach().clone()
    _small(tmp_path, 2.0)
    must_raise(CheckpointError, r"since this epload\.Checkpoint opened it: open it again", loader.load, model, checkpoint)
    assert torch.equal(model.weight, before)
    checkpoint = Checkpoint.open(path)
    loader.load(model, checkpoint)
    assert torch.equal(model.weight, torch.full((4, 3), 2.0))
    checkpoint.close()  # and it reads the same file or none
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


@on_ranks(2, _small)
def test_a_refused_load_keeps_no_file_open(rank: int, tmp_path: Path) -> list[str]:
    """A load that is refused after the files were opened leaves none open."""
    loader, model = HierarchicalLoader(progress=False), nn.Linear(5, 7, device="meta")
    for _ in range(2):
        must_raise(epload.LoadError, ".", loader.load, model, tmp_path)
    found = [entry for entry in Path("/proc/self/fd").iterdir() if entry.exists()]
    return [target for target in map(os.readlink, found) if target.startswith(str(tmp_path))]


def test_a_file_is_opened_once(tmp_path: Path) -> None:
    """Counts opens by any code of the process."""
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


def test_a_relative_path_stays_that_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The working directory may change after it was opened; messages have the path as it was passed."""
    monkeypatch.chdir(tmp_path)
    save_file({"weight": torch.ones(2, 2)}, "m.safetensors")
    opened, model = Checkpoint.open("m.safetensors"), nn.Linear(2, 2, bias=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for _ in range(2):  # the second load opens the file again
        epload.load(model, opened, progress=False)
    assert bool((model.weight == 1).all())
    (tmp_path / "m.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"^m\.safetensors was removed"):
        epload.load(model, opened, progress=False)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
