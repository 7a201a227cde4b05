"""Published checksums: what is compared, by whom, and what a load does when a file is another one."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
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
from support.checks import all_fine
from support.failures import error_of
from support.findings import not_refused
from support.hub_server import HubServer, pointing, serving
from support.small_model import meta_net, state_for, wrong

CHUNK = 200
"""Bytes of a chunk in these tests."""


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "CHUNK_BYTES", CHUNK)


def saved(folder: Path, files: int = 1, **options: Any) -> epload.SaveReport:
    """Saves the small state, with a list of digests unless the options say otherwise."""
    state = state_for()
    limit = max(1, sum(tensor.nbytes for tensor in state.values()) // files) if files > 1 else 1 << 30
    return epload.save(state, folder, max_shard_bytes=limit, **{"checksums": True} | options)


def sha256sum(folder: Path) -> Path:
    """The list that the program writes of a folder's files."""
    names = sorted(path.name for path in folder.iterdir() if path.name != file_sets.CHECKSUMS)
    listed = folder.parent / "SHA256SUMS"
    listed.write_bytes(subprocess.run(["sha256sum", "--", *names], cwd=folder, capture_output=True, check=True).stdout)
    return listed


def flip(path: Path, at: int) -> None:
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
    raw = (folder / file_sets.CHECKSUMS).read_bytes()
    assert digest == f"sha256:{hashlib.sha256(raw).hexdigest()}"
    listed = json.loads(raw)
    assert (listed["algorithm"], listed["chunk_bytes"]) == ("sha256", CHUNK)
    for path in {*folder.iterdir()} - {folder / file_sets.CHECKSUMS}:
        content = path.read_bytes()
        chunks = [hashlib.sha256(content[i : i + CHUNK]).hexdigest() for i in range(0, len(content), CHUNK)]
        assert listed["files"].pop(path.name) == {"bytes": len(content), "chunks": chunks}
    assert not listed["files"], "nothing else is listed"


@pytest.mark.parametrize("files", [1, 3])
def test_what_save_writes_is_what_hashlib_says(files: int, tmp_path: Path) -> None:
    check_list(tmp_path / "a", saved(tmp_path / "a", files).checksums)
    assert saved(tmp_path / "b", files, checksums=False).checksums == ""
    assert not (tmp_path / "b" / file_sets.CHECKSUMS).exists()


@pytest.mark.parametrize("kind", ["true", "digest", "path", "sha256sum", "dict"])
def test_a_load_compares_all_files_first(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "a"
    digest = saved(folder, 3).checksums
    by_name = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("model*")}
    given: Any = {
        "true": True, "digest": digest, "path": folder / file_sets.CHECKSUMS, "sha256sum": sha256sum(folder), "dict": by_name,
    }[kind]  # fmt: skip
    report = load(folder, given)
    assert report.hashed == sum(path.stat().st_size for path in folder.glob("model*")), "the index, too"
    assert report.checksums.startswith(f"{len(by_name) - 1} files compared with ")
    assert report.checksums in str(report)
    last = sorted(folder.glob("*.safetensors"))[-1]
    flip(last, last.stat().st_size - 1)
    state = zeros()
    with pytest.raises(CheckpointError, match=f"{last.name} is not the file that .* describes") as caught:
        load(folder, given, state)
    assert not any(tensor.any() for tensor in state.values()), "nothing has been changed"
    if kind in ("true", "digest", "path"):
        begin = (last.stat().st_size - 1) // CHUNK * CHUNK
        assert f"its bytes {begin} to {last.stat().st_size} have the digest" in str(caught.value)
    epload.load(FlatState(state), folder, progress=False)  # without a list nobody knows


def test_the_index_counts(tmp_path: Path) -> None:
    saved(tmp_path / "a", 3)
    listed = {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in (tmp_path / "a").glob("*.safetensors")
    }
    with pytest.raises(CheckpointError, match=r"has no digest of model\.safetensors\.index\.json"):
        load(tmp_path / "a", listed)
    flip(tmp_path / "a" / "model.safetensors.index.json", 1)  # a space of the indentation, or a line break
    with pytest.raises(CheckpointError):
        load(tmp_path / "a", True)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "has no digest of any file"),
        (b"# nothing\n", "has no digest of any file"),
        (b"hello\n", "expected lines of sha256sum.* got line 1: 'hello'"),
        (b"0" * 64 + b"  a\n" + b"1" * 64 + b"  a\n", "has two digests of a"),
        (b"{}", "is no list of checksums"),
        (b"{", "is no list of checksums"),
        (b'{"algorithm": "md5", "chunk_bytes": 1, "files": {}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 0, "files": {}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": 1}}', "is no list of checksums"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": {"bytes": 1, "chunks": ["x"]}}}', "expected sha256"),
        (b'{"algorithm": "sha256", "chunk_bytes": 9, "files": {"a": {"bytes": 0, "chunks": []}}}', "expected sha256"),
        (b"\xff\xfe", "expected lines of sha256sum"),
    ],
)  # fmt: skip
def test_malformed_lists(content: bytes, text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        Checksums.parse(content, "LIST")


def test_lists_that_do_not_fit(tmp_path: Path) -> None:
    folder = tmp_path / "a"
    saved(folder)
    listed = json.loads((folder / file_sets.CHECKSUMS).read_bytes())
    entry = listed["files"]["model.safetensors"]

    def given(**changes: Any) -> Path:
        content = {**listed, "files": {"model.safetensors": entry | changes}}
        (tmp_path / "list").write_text(json.dumps(content))
        return tmp_path / "list"

    for path in (
        given(bytes=entry["bytes"] + 1),
        given(chunks=entry["chunks"][:-1]),
        given(chunks=entry["chunks"] * 2),
    ):
        with pytest.raises(CheckpointError, match=r"model.safetensors is not the file that .* describes: it has"):
            load(folder, path)
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
        with pytest.raises(error, match=text):
            load(folder, wrong_list)
    (folder / file_sets.CHECKSUMS).unlink()
    for given_ in (True, "sha256:" + "0" * 64):
        with pytest.raises(CheckpointError, match="no checksums are published next to"):
            load(folder, given_)


def test_what_has_no_files_of_its_own(tmp_path: Path) -> None:
    saved(tmp_path / "a", base=None)
    saved(tmp_path / "b", base=tmp_path / "a", checksums=False)
    with pytest.raises(ValueError, match="files= and checksums= are for whole checkpoints"):
        saved(tmp_path / "c", base=tmp_path / "a")
    for source in (state_for(), tmp_path / "b"):
        with pytest.raises(ValueError, match="checksums= compares the files of a checkpoint"):
            load(source, {"model.safetensors": "0" * 64})


def test_the_hub_has_published_digests(tmp_path: Path) -> None:
    saved(tmp_path / "a", 2, checksums=False)
    with serving(HubServer(tmp_path / "a")) as server, pointing(server.address, tmp_path / "cache"):
        report = load("hf://org/name", True)
        assert "the Hugging Face Hub" in report.checksums
        (blob,) = {path.resolve() for path in (tmp_path / "cache").rglob("model-00002-*.safetensors")}
        flip(blob, blob.stat().st_size - 1)
        with pytest.raises(CheckpointError, match=r"model-00002.* is not the file that the Hugging Face Hub describes"):
            load("hf://org/name", True)


# ---- several ranks ----


def load_on(
    rank: int, world: int, path: str, given: Any, readers: str, nodes: list[list[int]] | None = None
) -> tuple[str, int]:
    """Returns the error of the load, empty if it succeeded, and the bytes that this rank hashed."""
    own = path.replace("RANK", str(rank))
    model, topology = meta_net(), Topology.from_nodes(nodes or [[*range(world)]])
    with HierarchicalLoader(topology, readers=readers, progress=False, timeout=30) as loader:
        given = given.replace("RANK", str(rank)) if isinstance(given, str) else given
        reports: list[epload.LoadReport] = []
        if error := error_of(lambda: reports.append(loader.load(model, own, checksums=given))):
            return error, 0
    assert not wrong(model, state_for())
    return "", reports[0].hashed


@pytest.mark.parametrize("readers", ["every", "one", "partitioned"])
def test_ranks_share_the_files(readers: str, tmp_path: Path) -> None:
    saved(tmp_path / "a", 3)
    total = sum(path.stat().st_size for path in (tmp_path / "a").glob("model*"))
    outcomes = ranks.run(3, load_on, 3, str(tmp_path / "a"), True, readers)
    assert {text for text, _ in outcomes} == {""}
    hashed = [nbytes for _, nbytes in outcomes]
    assert sum(hashed) == total, "each byte once in the job"
    assert [nbytes > 0 for nbytes in hashed] == ([True, False, False] if readers == "one" else [True] * 3)


def load_objects(rank: int, address: str, url: str) -> tuple[str, int]:
    os.environ.update(s3_server.environment(address))
    return load_on(rank, 4, url, True, "every", [[0, 1], [2, 3]])


def test_nodes_share_objects_and_not_files(tmp_path: Path) -> None:
    """Nodes compare each object once, and each its own files, which may be copies. A changed object is an error on all."""
    saved(tmp_path / "a", 3)
    total = sum(path.stat().st_size for path in (tmp_path / "a").glob("*.safetensors"))
    index = (tmp_path / "a" / "model.safetensors.index.json").stat().st_size  # which ranks that join do not open
    outcomes = ranks.run(4, load_on, 4, str(tmp_path / "a"), True, "every", [[0, 1], [2, 3]])
    assert {text for text, _ in outcomes} == {""}
    assert sum(nbytes for _, nbytes in outcomes) == 2 * total + index
    with s3_server.serving() as (moto, proxy):
        moto.put_folder(tmp_path / "a", "a")
        outcomes = ranks.run(4, load_objects, proxy.address, f"s3://{s3_server.BUCKET}/a")
        assert {text for text, _ in outcomes} == {""}
        assert sum(nbytes for _, nbytes in outcomes) == total + index
        assert all(nbytes for _, nbytes in outcomes)
        last = max((tmp_path / "a").glob("*.safetensors"))
        flip(last, last.stat().st_size - 1)
        moto.put_folder(tmp_path / "a", "a")
        texts = {text for text, _ in ranks.run(4, load_objects, proxy.address, f"s3://{s3_server.BUCKET}/a")}
    assert len(texts) == 1, "the same on every rank"
    assert f"{last.name} is not the file that s3://" in texts.pop()


def test_copies_are_each_compared(tmp_path: Path) -> None:
    """A node's own copy is not proved by another node's. One with another bit is found, wherever it is."""
    saved(tmp_path / "0", 2)
    for rank in (1, 2):
        shutil.copytree(tmp_path / "0", tmp_path / str(rank))
    total = sum(path.stat().st_size for path in (tmp_path / "0").glob("*.safetensors"))
    index = (tmp_path / "0" / "model.safetensors.index.json").stat().st_size  # which ranks that join do not open
    outcomes = ranks.run(3, load_on, 3, str(tmp_path / "RANK"), True, "every")
    assert outcomes == [("", total + index), ("", total), ("", total)]
    last = max((tmp_path / "2").glob("*.safetensors"))
    flip(last, last.stat().st_size - 1)
    texts = {text for text, _ in ranks.run(3, load_on, 3, str(tmp_path / "RANK"), True, "every")}
    assert len(texts) == 1, "the same on every rank"
    assert f"CheckpointError: {last} is not the file" in texts.pop()


def test_ranks_that_pass_different_lists(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    for rank in range(2):
        (tmp_path / f"list-{rank}").write_text(f"{rank}" * 64 + "  model.safetensors\n")
    texts = {text for text, _ in ranks.run(2, load_on, 2, str(tmp_path / "a"), str(tmp_path / "list-RANK"), "every")}
    assert len(texts) == 1
    assert "ranks 0 and 1 pass different checksums" in texts.pop()


def some_ask(rank: int, path: str) -> list[str]:
    with HierarchicalLoader(progress=False, timeout=30) as loader:
        return not_refused(lambda: loader.load(meta_net(), path, checksums=rank == 0), "ManifestMismatch", "checksums")


def test_one_rank_alone_that_asks_for_it(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    all_fine(ranks.run(2, some_ask, str(tmp_path / "a")))


def save_on(rank: int, source: str, path: str) -> str:
    """Into one file, of more chunks than ranks."""
    checksums.CHUNK_BYTES = CHUNK
    model = meta_net()
    epload.load(model, source, readers="one", progress=False)
    return epload.save(model, path, checksums=True).checksums


def convert_on(rank: int, source: str, path: str) -> str:
    """Into files enough for all ranks, and an index."""
    checksums.CHUNK_BYTES = CHUNK
    return epload.convert(source, path, max_shard_bytes=400, checksums=True, topology=Topology.discover()).checksums


@pytest.mark.parametrize(("work", "files"), [(save_on, 1), (convert_on, 5)])
def test_ranks_share_what_is_hashed(work: Callable[..., str], files: int, tmp_path: Path) -> None:
    assert saved(tmp_path / "a").nbytes > 3 * CHUNK
    (digest,) = {*ranks.run(3, work, str(tmp_path / "a"), str(tmp_path / "b"))}
    check_list(tmp_path / "b", digest)
    assert len([*(tmp_path / "b").iterdir()]) > files
    for given in (sha256sum(tmp_path / "b"), digest):
        load(tmp_path / "b", given)


def test_convert_writes_the_list(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    check_list(tmp_path / "b", epload.convert(tmp_path / "a", tmp_path / "b", checksums=True).checksums)
    with pytest.raises(ValueError, match=r"expected files= without checksums\.json"):
        epload.convert(tmp_path / "a", tmp_path / "c", checksums=True, files=[tmp_path / "b" / file_sets.CHECKSUMS])


def test_a_configuration_that_a_load_follows_counts(tmp_path: Path) -> None:
    """The blocks of fp8 weights are said in config.json alone."""
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    state = {"w.weight": torch.ones(256, 256).to(torch.float8_e4m3fn), "w.weight_scale_inv": torch.ones(2, 2)}
    epload.save(state, tmp_path / "a", files=[tmp_path / "config.json"], checksums=True)
    model = nn.ModuleDict({"w": nn.Linear(256, 256, bias=False)})
    epload.load(model, tmp_path / "a", checksums=True, progress=False)
    (tmp_path / "a" / "config.json").write_text(json.dumps(config).replace("128", "129"))
    with pytest.raises(CheckpointError, match=r"config\.json is not the file"):
        epload.load(model, tmp_path / "a", checksums=True, progress=False)


PROGRAM = """
import sys, torch, epload
if __name__ == "__main__":
    epload.save_async({"a": torch.arange(100)}, sys.argv[1], checksums=True)
"""


def test_a_save_that_the_end_of_the_process_waits_for(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    subprocess.run([sys.executable, tmp_path / "program.py", tmp_path / "a"], check=True, timeout=120)
    assert (tmp_path / "a" / file_sets.CHECKSUMS).exists()


# ---- files that change ----


def replaced(path: Path) -> None:
    other = path.with_name("other")
    shutil.copy2(path, other)
    flip(other, other.stat().st_size - 1)
    other.replace(path)


@pytest.mark.parametrize(
    "change", [replaced, lambda path: flip(path, path.stat().st_size - 1)], ids=["new", "in_place"]
)
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
    with pytest.raises(CheckpointError, match=r"model.safetensors was (replaced|modified)"):
        epload.load(FlatState(zeros()), tmp_path / "a", checksums=True, verify=verify, progress=False)


def test_lists_of_other_systems(tmp_path: Path) -> None:
    """Line ends of Windows, digests in capitals, the mark of a binary file, and paths from somewhere else."""
    saved(tmp_path / "a")
    digest = hashlib.sha256((tmp_path / "a" / "model.safetensors").read_bytes()).hexdigest()
    listed = tmp_path / "list"
    listed.write_bytes(f"# made elsewhere\r\n\r\n{digest.upper()} *./some/folder/model.safetensors\r\n".encode())
    load(tmp_path / "a", listed)
