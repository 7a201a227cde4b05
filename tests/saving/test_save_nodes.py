"""Saves where nodes do not share a file system. The path leads through the working directory, which is each node's own."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import epload
from epload.saving import folder as folders
from epload.saving import writer
from support import ranks
from support.synced_models import LAYOUTS, SHAPES, build, values, write

PATH = "/proc/self/cwd/step/1"


def save(rank: int, nodes: list[list[int]], disks: list[str], layout: str, in_background: bool) -> epload.SaveReport:
    """``disks``: the directory of each node."""
    node = next(i for i, node in enumerate(nodes) if rank in node)
    os.chdir(disks[node])
    model = build(layout, dist.get_world_size())
    write(model, 3)
    topology = epload.Topology.from_nodes(nodes)
    options = {"topology": topology, "max_shard_bytes": 1 << 14, "timeout": 30}
    if not in_background:
        return epload.save(model, PATH, **options)
    pending = epload.save_async(model, PATH, **options)
    write(model, 4)
    return pending.wait()


def check_disk(disk: Path, version: int = 3) -> None:
    assert os.listdir(disk / "step") == ["1"], "nothing is left beside the folder"
    found = {}
    for file in (disk / "step" / "1").glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == SHAPES.keys()
    for name in SHAPES:
        assert found[name].equal(values(name, version)), (disk.name, name)


def make_disks(folder: Path, names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return [str(folder / name) for name in names]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_disk_has_the_whole_checkpoint(layout: str, tmp_path: Path) -> None:
    reports = ranks.run(4, save, [[0, 1], [2, 3]], make_disks(tmp_path, "ab"), layout, False)
    for name in "ab":
        check_disk(tmp_path / name)
    nbytes = sum(values(name, 3).nbytes for name in SHAPES)
    assert sum(report.written for report in reports) == 2 * nbytes, "each byte once on each disk"
    assert all(report.folders == 2 for report in reports)
    assert "on each of 2 file systems" in str(reports[0])


@pytest.mark.parametrize(
    ("nodes", "disks"),
    [
        ([[0], [1], [2]], "abb"),  # two nodes share a disk that is not the first one's
        ([[1, 2], [0]], "ab"),  # the first rank is in the second node
        ([[0, 1, 2], [3]], "ab"),
        ([[0], [1, 2], [3]], "aba"),
    ],
)
@pytest.mark.parametrize("in_background", [False, True])
def test_nodes_and_disks(nodes: list[list[int]], disks: str, in_background: bool, tmp_path: Path) -> None:
    world = sum(map(len, nodes))
    reports = ranks.run(world, save, nodes, make_disks(tmp_path, disks), "fsdp", in_background)
    for name in set(disks):
        check_disk(tmp_path / name)
    assert [report.folders for report in reports] == [len(set(disks))] * world


def failing(rank: int, nodes: list[list[int]], disks: list[str], culprit: int, act: Callable[[], None] | None) -> str:
    def instead(*args: object) -> None:
        assert act is not None
        act()

    try:
        if rank == culprit and act is not None:
            with mock.patch.object(writer, "write_all", instead):
                save(rank, nodes, disks, "fsdp", False)
        else:
            save(rank, nodes, disks, "fsdp", False)
    except (epload.LoadError, ValueError) as error:
        return str(error)
    return ""


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def full() -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("culprit", [1, 2])
@pytest.mark.parametrize("act", [kill, full])
def test_a_rank_fails_while_it_writes(culprit: int, act: Callable[[], None], tmp_path: Path) -> None:
    disks = make_disks(tmp_path, "ab")
    dying = [culprit] if act is kill else []
    texts = ranks.run(4, failing, [[0, 1], [2, 3]], disks, culprit, act, dying=dying, tcp=True)
    left = [text for rank, text in enumerate(texts) if rank not in dying]
    assert len(set(left)) == 1, left
    assert f"rank {culprit}" in left[0]
    assert ("has exited" if act is kill else "No space left on device") in left[0]
    assert [os.listdir(tmp_path / disk / "step") for disk in "ab"] == [[], []]


def test_a_folder_that_must_not_be_overwritten_on_one_node(tmp_path: Path) -> None:
    disks = make_disks(tmp_path, "ab")
    (tmp_path / "b" / "step" / "1").mkdir(parents=True)
    (tmp_path / "b" / "step" / "1" / "file").touch()
    texts = ranks.run(4, failing, [[0, 1], [2, 3]], disks, -1, None)
    assert len(set(texts)) == 1
    assert "exists and is not empty" in texts[0]
    assert os.listdir(tmp_path / "a" / "step") == []
    assert os.listdir(tmp_path / "b" / "step") == ["1"]


def small_files_fail(rank: int, disks: list[str]) -> str:
    with (
        mock.patch.object(folders.NewFolder, "add", side_effect=OSError(28, "No space left on device"))
        if rank == 2
        else nullcontext()
    ):
        return failing(rank, [[0, 1], [2, 3]], disks, -1, None)


def test_no_folder_appears_before_all_can(tmp_path: Path) -> None:
    texts = ranks.run(4, small_files_fail, make_disks(tmp_path, "ab"))
    assert len(set(texts)) == 1
    assert "No space left on device" in texts[0]
    assert [os.listdir(tmp_path / disk / "step") for disk in "ab"] == [[], []]


def late(rank: int, disks: list[str]) -> epload.SaveReport:
    """The folder of the first rank is not seen at once by the node of rank 1, which is on the same file system."""
    asked = iter([False])
    seen = folders.NewFolder.exists

    def exists(folder: folders.NewFolder) -> bool:
        return bool(seen.fget(folder)) and next(asked, True)  # type: ignore[attr-defined]

    with mock.patch.object(folders.NewFolder, "exists", property(exists)) if rank == 1 else nullcontext():
        return save(rank, [[1], [0]], disks * 2, "fsdp", False)


def test_a_folder_that_is_seen_late(tmp_path: Path) -> None:
    reports = ranks.run(2, late, make_disks(tmp_path, "a"))
    assert [report.folders for report in reports] == [1, 1]
    check_disk(tmp_path / "a")


def apart(rank: int, disks: list[str]) -> str:
    return failing(rank, [[0, 1], [2]], [disks[rank] if rank < 2 else disks[0]] * 2, -1, None)


def test_ranks_of_a_node_that_see_different_folders(tmp_path: Path) -> None:
    texts = ranks.run(3, apart, make_disks(tmp_path, "ab"))
    assert len(set(texts)) == 1
    assert "ranks 0 and 1 are on one node, but do not see the same folder" in texts[0]
    assert [os.listdir(folder / "step") for folder in tmp_path.iterdir() if (folder / "step").exists()] in (
        [[]],
        [[], []],
    )
