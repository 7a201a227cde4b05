"""Saves where ranks do not see one file system. The path leads through the working directory, which is each node's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch.distributed as dist
from safetensors.torch import load_file

import epload
from support import ranks
from support.failures import error_of
from support.synced_models import SHAPES, build, values, write

PATH = "/proc/self/cwd/step/1"


def save(rank: int, nodes: list[list[int]], disks: list[str], in_background: bool) -> str:
    """``disks``: the directory of each rank."""
    os.chdir(disks[rank])
    model = build("fsdp", dist.get_world_size())
    write(model, 3)
    options = {"topology": epload.Topology.from_nodes(nodes), "timeout": 30}
    if in_background:
        return error_of(lambda: epload.save_async(model, PATH, **options).wait())
    return error_of(lambda: epload.save(model, PATH, **options))


def make_disks(folder: Path, names: str) -> list[str]:
    for name in names:
        (folder / name).mkdir(exist_ok=True)
    return [str(folder / name) for name in names]


@pytest.mark.parametrize(
    ("nodes", "disks", "others", "in_background"),
    [
        ([[1, 2], [0]], "abb", "ranks 1, 2 do", False),
        ([[0, 1], [2]], "aba", "ranks 1 do", True),  # as in containers with file systems of their own
    ],
)
def test_another_file_system_is_refused(
    nodes: list[list[int]], disks: str, others: str, in_background: bool, tmp_path: Path
) -> None:
    texts = ranks.run(len(disks), save, nodes, make_disks(tmp_path, disks), in_background)
    assert len(set(texts)) == 1
    assert texts[0].startswith("LoadError")
    assert f"{others} not see the folder that rank 0 has made there, and nothing was saved" in texts[0]
    assert "save to a folder that all nodes share" in texts[0]
    assert not [name for disk in tmp_path.iterdir() for name in os.listdir(disk) if os.listdir(disk / name)]


def save_on_one_node(rank: int, disks: list[str]) -> None:
    os.chdir(disks[rank])
    group = dist.new_group([2, 3])
    if rank >= 2:
        model = build("plain", 1)
        write(model, 3)
        epload.save(model, PATH, topology=epload.Topology.discover(group), timeout=30)


def test_the_ranks_of_one_node_save_to_its_disk(tmp_path: Path) -> None:
    ranks.run(4, save_on_one_node, make_disks(tmp_path, "aabb"))
    assert os.listdir(tmp_path / "a") == []
    found = load_file(tmp_path / "b" / "step" / "1" / "model.safetensors")
    assert all(found[name].equal(values(name, 3)) for name in SHAPES)


def test_one_file_system_under_paths_of_several_nodes(tmp_path: Path) -> None:
    assert ranks.run(3, save, [[0], [1, 2]], make_disks(tmp_path, "aaa"), False) == ["", "", ""]
    assert os.listdir(tmp_path / "a" / "step") == ["1"]
