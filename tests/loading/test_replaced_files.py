"""Loads again and again from a path whose file, or which file it stands for, changes between loads."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from epload import CheckpointError, HierarchicalLoader, Topology
from support import ranks
from support.checks import all_fine
from support.small_model import BUCKET, meta_net, state_for, wrong


def replaced(rank: int, folder: Path, readers: str) -> list[str]:
    """Each rank has a copy of its own. First that of the source alone is replaced, then all are."""
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, bucket_bytes=BUCKET, timeout=60.0)
    model, path = meta_net(), folder / f"{rank}.safetensors"
    problems = []
    for versions in ((1, 1), (1, 1), (2, 1), (2, 2), (2, 2)):
        save(versions[rank], path)
        torch.distributed.barrier()
        try:
            loader.load(model, path)
        except CheckpointError as error:
            if versions == (2, 1) and readers == "every" and "is not the file that the source rank has" in str(error):
                continue
            raise
        if versions == (2, 1) and readers == "every":
            problems.append("a rank with another file has loaded")
        problems += [f"{versions}: {text}" for text in wrong(model, state_for(versions[0]))]
    return problems


@pytest.mark.parametrize("readers", ["every", "auto"])
def test_a_file_that_was_replaced_for_some_ranks(readers: str, tmp_path: Path) -> None:
    all_fine(ranks.run(2, replaced, tmp_path, readers))


class Vector(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.full((1 << 16,), -1.0), requires_grad=False)


def alike(value: float) -> dict[str, torch.Tensor]:
    """Two of these differ in no sample by which ranks compare files."""
    tensor = torch.zeros(1 << 16)
    tensor[200:300] = value
    return {"w": tensor}


def same_everywhere(model: Vector, value: float) -> list[str]:
    return [] if torch.equal(model.w, alike(value)["w"]) else [f"{model.w[250].item()} in place of {value}"]


def other_name(rank: int, folder: Path, readers: str) -> list[str]:
    """The folder that was loaded has another file, which is the one to load now."""
    model, problems = Vector(), []
    with HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, timeout=60.0) as loader:
        loader.load(model, folder)
        problems += same_everywhere(model, 1.0)
        torch.distributed.barrier()
        if rank == 0:
            save_file(alike(2.0), folder / "model.safetensors")
        torch.distributed.barrier()
        loader.load(model, folder)
        problems += same_everywhere(model, 2.0)
        loader.load(model, folder / "a.safetensors")
        problems += same_everywhere(model, 1.0)
        loader.load(model, folder)
        problems += same_everywhere(model, 2.0)
    return problems


@pytest.mark.parametrize("readers", ["partitioned", "every"])
def test_a_file_of_another_name_that_looks_alike(readers: str, tmp_path: Path) -> None:
    save_file(alike(1.0), tmp_path / "a.safetensors")
    all_fine(ranks.run(2, other_name, tmp_path, readers))


def other_commit(rank: int, cache: Path, readers: str) -> list[str]:
    from huggingface_hub import constants

    model, problems = Vector(), []
    with (
        mock.patch.multiple(constants, HF_HUB_CACHE=str(cache), HF_HUB_OFFLINE=True),
        HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, timeout=60.0) as loader,
    ):
        for commit, value in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
            loader.load(model, f"hf://org/name@{commit * 40}")
            problems += same_everywhere(model, value)
    return problems


@pytest.mark.parametrize("readers", ["partitioned", "every"])
def test_another_commit_that_looks_alike(readers: str, tmp_path: Path) -> None:
    for commit, value in (("a", 1.0), ("b", 2.0)):
        snapshot = tmp_path / "models--org--name" / "snapshots" / (commit * 40)
        snapshot.mkdir(parents=True)
        save_file(alike(value), snapshot / "model.safetensors")
    for name in ("blobs", "refs"):
        (tmp_path / "models--org--name" / name).mkdir()
    all_fine(ranks.run(2, other_commit, tmp_path, readers))


def save(seed: int, path: Path) -> None:
    save_file({key: value.contiguous() for key, value in state_for(seed).items()}, f"{path}.new")
    Path(f"{path}.new").replace(path)
