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
from support.small_model import BUCKET, meta_net, state_for, wrong


def replaced(rank: int, folder: Path, readers: str) -> None:
    """Each rank has a copy of its own. First that of the source alone is replaced, then all are."""
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, bucket_bytes=BUCKET, timeout=60.0)
    model, path = meta_net(), folder / f"{rank}.safetensors"
    for versions in ((1, 1), (1, 1), (2, 1), (2, 2), (2, 2)):
        save_file(state_for(versions[rank]), f"{path}.new")
        Path(f"{path}.new").replace(path)
        torch.distributed.barrier()
        if versions == (2, 1) and readers == "every":
            with pytest.raises(CheckpointError, match="is not the file that the source rank has"):
                loader.load(model, path)
            continue
        loader.load(model, path)
        assert wrong(model, state_for(versions[0])) == [], versions


@pytest.mark.parametrize("readers", ["every", "auto"])
def test_a_file_that_was_replaced_for_some_ranks(readers: str, tmp_path: Path) -> None:
    ranks.run(2, replaced, tmp_path, readers)


def alike(value: float) -> dict[str, torch.Tensor]:
    """Two of these differ in no sample by which ranks compare files."""
    tensor = torch.zeros(1 << 16)
    tensor[200:300] = value
    return {"w": tensor}


def other_names(rank: int, folder: Path, readers: str) -> None:
    """Loads files that look alike: a folder that gets another file, and commits of a model in the cache of the hub."""
    from huggingface_hub import constants

    model = nn.ParameterDict({"w": nn.Parameter(torch.full((1 << 16,), -1.0), requires_grad=False)})
    with (
        mock.patch.multiple(constants, HF_HUB_CACHE=str(folder), HF_HUB_OFFLINE=True),
        HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, timeout=60.0) as loader,
    ):

        def load(source: Path | str, value: float) -> None:
            loader.load(model, source)
            assert torch.equal(model["w"], alike(value)["w"]), f"{source}: {model['w'][250].item()} in place of {value}"

        load(folder / "own", 1.0)
        torch.distributed.barrier()
        if rank == 0:
            save_file(alike(2.0), folder / "own/model.safetensors")
        torch.distributed.barrier()
        load(folder / "own", 2.0)
        load(folder / "own/a.safetensors", 1.0)
        load(folder / "own", 2.0)
        for commit, value in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
            load(f"hf://org/name@{commit * 40}", value)


@pytest.mark.parametrize("readers", ["partitioned", "every"])
def test_another_file_or_commit_that_looks_alike(readers: str, tmp_path: Path) -> None:
    model = tmp_path / "models--org--name"
    commits = {model / "snapshots" / (name * 40): value for name, value in (("a", 1.0), ("b", 2.0))}
    for folder in (tmp_path / "own", *commits, model / "blobs", model / "refs"):
        folder.mkdir(parents=True)
    for folder, value in commits.items():
        save_file(alike(value), folder / "model.safetensors")
    save_file(alike(1.0), tmp_path / "own/a.safetensors")
    ranks.run(2, other_names, tmp_path, readers)
