"""Published checksums: what is compared, by whom, and what a load does when a file is another one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epload
from epload import CheckpointError, HierarchicalLoader, Topology
from epload.checkpoint import checksums, file_sets
from epload.checkpoint.checksums import Checksums
from epload.loading import checked_files
from epload.model.flat_state import FlatState
from support import ranks, s3_server
from support.failures import must_raise
from support.hub_server import HubServer, pointing, serving
from support.small_model import meta_net, state_for, wrong

CHUNK = 200
"""Bytes of a chunk in these tests."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", CHUNK)


def saved(folder: Path, files: int = 1, **options: Any) -> epload.SaveReport:
    state = state_for()
    limit = max(1, sum(tensor.nbytes for tensor in state.values()) // files) if files > 1 else 1 << 30
    return epload.save(state, folder, max_shard_bytes=limit, **{"checksums": True} | options)


def sha256sum(folder: Path) -> Path:
    names = sorted(path.name for path in folder.iterdir() if path.name != file_sets.CHECKSUMS)
    listed = folder.parent / "SHA256SUMS"
    listed.write_bytes(subprocess.run(["sha256sum", "--", *names], cwd=folder, capture_output=True, check=True).stdout)
    return listed


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def flip(path: Path, at: int = -1) -> None:
    """Changes a bit of a file, and not its times."""
    status = path.stat()
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def zeros() -> dict[str, Tensor]:
    return {name: torch.zeros_like(tensor) for name, tensor in state_for().items()}


def load(source: Any, given: Any, state: dict[str, Tensor] | None = None) -> epload.LoadReport:
    state = zeros() if state is None else state
    report = epload.load(FlatState(state), source, checksums=given, progress=False)
    assert all(torch.equal(tensor, state[name]) for name, tensor in state_for().items())
    return report


def check_list(folder: Path, digest: str) -> None:
    """Compares the list of a folder, of which ``digest`` is the digest, with what hashlib says of the files."""
    assert digest == f"sha256:{sha256(folder / file_sets.CHECKSUMS)}"
    listed = json.loads((folder / file_sets.CHECKSUMS).read_bytes())
    assert (listed["algorithm"], listed["chunk_bytes"]) == ("sha256", CHUNK)
    for path in {*folder.iterdir()} - {folder / file_sets.CHECKSUMS}:
        content = path.read_bytes()
        chunks = [hashlib.sha256(content[i : i + CHUNK]).hexdigest() for i in range(0, len(content), CHUNK)]
        assert listed["files"].pop(path.name) == {"bytes": len(content), "chunks": chunks}
    assert not listed["files"], "nothing else is listed"


def test_what_is_written_is_what_hashlib_says(tmp_path: Path) -> None:
    for files in (1, 3):
        folder = tmp_path / str(files)
        check_list(folder, saved(folder, files).checksums)
    check_list(tmp_path / "c", epload.convert(folder, tmp_path / "c", checksums=True).checksums)
    text, listed = r"expected files= without checksums\.json", [folder / file_sets.CHECKSUMS]
    must_raise(ValueError, text, epload.convert, folder, tmp_path / "d", checksums=True, files=listed)
    assert saved(tmp_path / "d", checksums=False).checksums == ""
    assert not (tmp_path / "d" / file_sets.CHECKSUMS).exists()


@pytest.mark.parametrize("kind", ["true", "digest", "path", "sha256sum", "dict", "elsewhere"])
def test_a_load_compares_all_files_first(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    digest = saved(folder, 3).checksums
    by_name = {path.name: sha256(path) for path in folder.glob("model*")}
    # Line ends of Windows, digests in capitals, the mark of a binary file, and paths from somewhere else.
    lines = [f"{digest.upper()} *./some/folder/{name}\r\n" for name, digest in by_name.items()]
    (tmp_path / "elsewhere").write_bytes("".join(["# made elsewhere\r\n\r\n", *lines]).encode())
    given: Any = {
        "true": True, "digest": digest, "path": folder / file_sets.CHECKSUMS, "sha256sum": sha256sum(folder), "dict": by_name,
        "elsewhere": tmp_path / "elsewhere",
    }[kind]  # fmt: skip
    report = load(folder, given)
    assert report.hashed == sum(path.stat().st_size for path in folder.glob("model*")), "the index, too"
    assert report.checksums.startswith(f"{len(by_name) - 1} files compared with ")
    assert report.checksums in str(report)
    last = sorted(folder.glob("*.safetensors"))[-1]
    flip(last)
    state = zeros()
    error = must_raise(CheckpointError, f"{last.name} is not the file that .* describes", load, folder, given, state)
    assert not any(tensor.any() for tensor in state.values()), "nothing has been changed"
    if kind in ("true", "digest", "path"):
        begin = (last.stat().st_size - 1) // CHUNK * CHUNK
        assert f"its bytes {begin} to {last.stat().st_size} have the digest" in str(error)
    epload.load(FlatState(state), folder, progress=False)  # without a list nobody knows


def test_malformed_lists() -> None:
    for content, text in (
        (b"", "has no digest of any file"),
        (b"# nothing\n", "has no digest of any file"),
        (b"hello\n", "expected lines of sha256sum.* got line 1: 'hello'"),
        (b"\xff\xfe", "expected lines of sha256sum"),
        (b"0" * 64 + b"  a\n" + b"1" * 64 + b"  a\n", "has two digests of a"),
        (b"{}", "is no list of checksums"),
        (b"{", "is no list of checksums"),
        (b'{"algorithm": "md5", "chunk_bytes": 1, "files": {}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 0, "files": {}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": 1}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": {"bytes": 1, "chunks": ["x"]}}}', "expected sha256"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": {"bytes": 0, "chunks": []}}}', "expected sha256"),
    ):  # fmt: skip
        must_raise(CheckpointError, text, Checksums.parse, content, "LIST")


def test_lists_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    saved(folder)
    listed = json.loads((folder / file_sets.CHECKSUMS).read_bytes())
    entry = listed["files"]["model.safetensors"]
    for changes in ({"bytes": entry["bytes"] + 1}, {"chunks": entry["chunks"][:-1]}, {"chunks": entry["chunks"] * 2}):
        (tmp_path / "list").write_text(json.dumps({**listed, "files": {"model.safetensors": entry | changes}}))
        text = "model.safetensors is not the file that .* describes: it has"
        must_raise(CheckpointError, text, load, folder, tmp_path / "list")
    twice = {f"{folder}/model.safetensors": "0" * 64 for folder in ("x", "y")} | {"y/model.safetensors": "1" * 64}
    for wrong_list, error, text in (
        ({"other": "0" * 64}, CheckpointError, "has no digest of model.safetensors"),
        ({"model.safetensors": "0" * 63}, CheckpointError, "expected sha256 digests"),
        (twice, CheckpointError, "names several files"),
        (tmp_path / "none", CheckpointError, "cannot read the checksums in .*none: No such file"),
        ("sha256:" + "0" * 64, CheckpointError, "is not the one that was asked for: expected sha256:00"),
        ("sha256:00", ValueError, "expected checksums='sha256:' and 64 hexadecimal digits"),
        ("sha256:", ValueError, "expected checksums='sha256:' and 64 hexadecimal digits"),
        ({"model.safetensors": "0" * 40}, CheckpointError, "expected sha256 digests"),
        ({"../model.safetensors": "0" * 64}, CheckpointError, "expected names of files in the folder"),
        (None, TypeError, "expected checksums to be True, a path"),
        (1, TypeError, "expected checksums to be True, a path"),
    ):
        must_raise(error, text, load, folder, wrong_list)
    (folder / file_sets.CHECKSUMS).unlink()
    for given in (True, "sha256:" + "0" * 64):
        must_raise(CheckpointError, "no checksums are published next to", load, folder, given)
    # What has no files of its own.
    saved(tmp_path / "b", base=folder, checksums=False)
    must_raise(ValueError, "files= and checksums= are for whole checkpoints", saved, tmp_path / "c", base=folder)
    for source in (state_for(), tmp_path / "b"):
        text = "checksums= compares the files of a checkpoint"
        must_raise(ValueError, text, load, source, {"model.safetensors": "0" * 64})
    # The index is one of the files.
    saved(tmp_path / "d", 3)
    by_name = {path.name: sha256(path) for path in (tmp_path / "d").glob("*.safetensors")}
    must_raise(CheckpointError, r"has no digest of model\.safetensors\.index\.json", load, tmp_path / "d", by_name)
    index = tmp_path / "d" / "model.safetensors.index.json"
    index.write_bytes(index.read_bytes().replace(b"\n", b" ", 1))
    must_raise(CheckpointError, "index.json is not the file", load, tmp_path / "d", True)


def test_the_hub_has_published_digests(tmp_path: Path) -> None:
    saved(tmp_path / "a", 2, checksums=False)
    with serving(HubServer(tmp_path / "a")) as server, pointing(server.address, tmp_path / "cache"):
        assert "the Hugging Face Hub" in load("hf://org/name", True).checksums
        (blob,) = {path.resolve() for path in (tmp_path / "cache").rglob("model-00002-*.safetensors")}
        flip(blob)
        text = "model-00002.* is not the file that the Hugging Face Hub describes"
        must_raise(CheckpointError, text, load, "hf://org/name", True)


def load_each(rank: int, address: str, cases: dict[str, tuple[Any, Any, str, list[list[int]]]]) -> dict[str, tuple[str, int]]:
    """Returns the error of each load, empty if it succeeded, and the bytes that this rank hashed. Lists are of values by rank."""
    os.environ.update(s3_server.environment(address))
    found = {}
    for case, (source, given, readers, nodes) in cases.items():
        source, given = (each[rank] if isinstance(each, list) else each for each in (source, given))
        model, hashed = meta_net(), 0
        with HierarchicalLoader(Topology.from_nodes(nodes), readers=readers, progress=False, timeout=30) as loader:
            try:
                hashed = loader.load(model, source, checksums=given).hashed
                error = "".join(wrong(model, state_for()))
            except (epload.LoadError, ValueError) as raised:
                error = f"{type(raised).__name__}: {raised}"
        found[case] = error, hashed
    return found


def test_ranks_share_what_is_compared(tmp_path: Path) -> None:
    """Each file is compared once, in every node, as it may be a copy; each object once. What is wrong is an error on all."""
    copies, damaged = [tmp_path / str(rank) for rank in range(4)], tmp_path / "damaged"
    saved(copies[0], 3)
    for folder in (*copies[1:], damaged):
        shutil.copytree(copies[0], folder)
    last = max(damaged.glob("*.safetensors"))
    flip(last)
    lists = [tmp_path / f"list-{rank}" for rank in range(4)]
    for rank, path in enumerate(lists):
        path.write_text(f"{rank}" * 64 + "  model.safetensors\n")
    together, apart = [[0, 1, 2, 3]], [[0, 1], [2, 3]]
    with s3_server.serving() as (moto, proxy):
        for folder in (copies[0], damaged):
            moto.put_folder(folder, folder.name)
        urls = [f"s3://{s3_server.BUCKET}/{folder.name}" for folder in (copies[0], damaged)]
        cases: dict[str, tuple[Any, Any, str, list[list[int]]]] = {
            **{readers: (copies[0], True, readers, together) for readers in ("every", "one", "partitioned")},
            "nodes": (copies[0], True, "every", apart), "objects": (urls[0], True, "every", apart),
            "copies": (copies, True, "every", together),
            "damaged object": (urls[1], True, "every", apart),
            "damaged copy": ([*copies[:2], damaged, copies[3]], True, "every", together),
            "lists": (copies[0], lists, "every", together),
            "one asks": (copies[0], [True, False, False, False], "auto", together),
        }  # fmt: skip
        results = ranks.run(4, load_each, proxy.address, cases)
    files = sum(path.stat().st_size for path in copies[0].glob("*.safetensors"))
    index = (copies[0] / "model.safetensors.index.json").stat().st_size  # which ranks that join do not open
    hashed = {case: [found[case][1] for found in results] for case in cases}
    for case in ("every", "one", "partitioned", "objects", "nodes"):
        assert {found[case][0] for found in results} == {""}
        assert sum(hashed[case]) == (2 if case == "nodes" else 1) * files + index, case
        assert [nbytes > 0 for nbytes in hashed[case]] == [True, *[case != "one"] * 3], case
    assert [found["copies"] for found in results] == [("", files + index), *[("", files)] * 3]
    for case, text in {
        "damaged object": f"CheckpointError: .*{last.name} is not the file that s3://",
        "damaged copy": f"CheckpointError: {last} is not the file",
        "lists": "ranks 0 and 1 pass different checksums",
        "one asks": "ManifestMismatch: .*checksums",
    }.items():
        assert re.search(text, results[0][case][0]), results[0][case]
        assert {found[case] for found in results} == {results[0][case]}, "the same on every rank"


def write_together(rank: int, source: Path, saved: Path, converted: Path) -> list[str]:
    """Saves one file, of more chunks than ranks; converts into files enough for all ranks, and an index."""
    checksums.CHUNK_BYTES = CHUNK
    model, options = meta_net(), {"max_shard_bytes": 400, "checksums": True, "topology": Topology.discover()}
    epload.load(model, source, readers="one", progress=False)
    return [epload.save(model, saved, checksums=True).checksums, epload.convert(source, converted, **options).checksums]


def test_ranks_share_what_is_hashed(tmp_path: Path) -> None:
    assert saved(tmp_path / "a").nbytes > 3 * CHUNK
    first, *others = ranks.run(3, write_together, tmp_path / "a", tmp_path / "b", tmp_path / "c")
    assert others == [first] * 2
    for folder, files, digest in zip((tmp_path / "b", tmp_path / "c"), (1, 5), first, strict=True):
        check_list(folder, digest)
        assert len([*folder.iterdir()]) > files
        for given in (sha256sum(folder), digest):
            load(folder, given)


def test_a_configuration_that_a_load_follows_counts(tmp_path: Path) -> None:
    """The blocks of fp8 weights are said in config.json alone."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {"w.weight": torch.ones(256, 256).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
    epload.save(state, tmp_path / "a", files=[tmp_path / "config.json"], checksums=True)
    model = nn.ModuleDict({"w": nn.Linear(256, 256, bias=False)})
    load = partial(epload.load, model, tmp_path / "a", checksums=True, progress=False)
    load()
    (tmp_path / "a" / "config.json").write_text(json.dumps(config).replace("128", "129"))
    must_raise(CheckpointError, r"config\.json is not the file", load)


PROGRAM = """
import sys, torch, epload
if __name__ == "__main__":
    epload.save_async({"a": torch.arange(100)}, sys.argv[1], checksums=True)
"""


def test_a_save_that_the_end_of_the_process_waits_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, tmp_path / "program.py", tmp_path / "a"], check=True, timeout=120)
    assert (tmp_path / "a" / file_sets.CHECKSUMS).exists()


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    flip(other)
    other.replace(path)


@pytest.mark.parametrize("change", [replaced, flip])
@pytest.mark.parametrize("verify", [False, True])
def test_a_file_that_changes_once_it_was_hashed(
    verify: bool, change: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "a")
    compare = checked_files.check_parts

    def then_change(*arguments: Any) -> None:
        compare(*arguments)
        change(tmp_path / "a" / "model.safetensors")

    monkeypatch.setattr(checked_files, "check_parts", then_change)
    options = {"checksums": True, "verify": verify, "progress": False}
    text = "model.safetensors was (replaced|modified)"
    must_raise(CheckpointError, text, epload.load, FlatState(zeros()), tmp_path / "a", **options)
