"""Loads again and again into a model whose tensors change between loads, or are of no use to any load; and from a path whose
file, or which file it stands for, changes between loads. See tests/model/test_snapshot.py, too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import epload
from epload import CheckpointError, HierarchicalLoader, LoadError, Topology
from epload.model.copies import forget_casts
from epload.model.megatron import MegatronChunks
from support.findings import differing
from support.on_ranks import on_ranks
from support.readers import saved
from support.small_model import BUCKET, NODES, State, meta_net, state_for, wrong
from support.tensor_classes import Halved, Opaque, Requantized, Wrapped


def freed(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


UNUSABLE: dict[str, Callable[[], Tensor]] = {
    "freed": lambda: freed(torch.zeros(4)),
    "quantized": lambda: torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8),
    "conjugate": lambda: torch.zeros(4, dtype=torch.complex64).conj(),
}


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def test_a_tensor_that_hands_out_copies_is_refused() -> None:
    net, state = two_layers(), two_layers().state_dict()
    net[1].weight = nn.Parameter(Halved(torch.ones(2, 3)), requires_grad=False)
    before = net[0].weight.clone()
    for verify in (False, True):
        with pytest.raises(epload.ModelMismatch, match=r"1\.weight is a Halved, which hands out copies of its elem"):
            epload.load(net, state, verify=verify, progress=False)
    assert torch.equal(net[0].weight, before)
    net[1].weight = nn.Parameter(Requantized(torch.tensor([[1.0, 0.5, 3.0], [2.0, 7.0, 8.0]])), requires_grad=False)
    kept = net[1].weight.inner.clone()
    with pytest.raises(epload.ModelMismatch, match=r"1\.weight is a Requantized, which hands out copies"):
        epload.load(net, {}, strict=False, progress=False)
    assert torch.equal(net[1].weight.inner, kept)
    net[1].weight = nn.Parameter(Wrapped(torch.ones(2, 3)), requires_grad=False)
    epload.load(net, state, progress=False)
    assert torch.equal(net[1].weight.inner, state["1.weight"])


def test_a_tensor_that_cannot_be_read_is_refused_before_anything_is_loaded() -> None:
    net, state = two_layers(), two_layers().state_dict()
    before = net[0].weight.clone()
    state["1.weight"] = Opaque(state["1.weight"])
    with pytest.raises(CheckpointError, match=r"1\.weight is a Opaque, whose elements cannot be read as bytes"):
        epload.load(net, state, progress=False)
    assert torch.equal(net[0].weight, before)


def save_layers(folder: Path, *way: str) -> None:
    save_file(two_layers().state_dict(), folder / "model.safetensors")


@pytest.mark.parametrize(("readers", "algorithm"), [("every", "two_level"), ("one", "two_level"), ("partitioned", "striped")])
@on_ranks(4, save_layers)
def test_what_no_load_could_fill(rank: int, tmp_path: Path, readers: str, algorithm: str) -> None:
    """Buffers that the checkpoint lacks are left alone; a parameter that it has is an error."""
    model, path = two_layers(), tmp_path / "model.safetensors"
    for name, make in UNUSABLE.items():
        model.register_buffer(name, make())
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers=readers, algorithm=algorithm, bucket_bytes=80)
    for size in (8, 0, 8):
        if rank == 1:
            model[1].bias.untyped_storage().resize_(size)
        if size:
            assert sorted(loader.load(model, path, strict=False).missing_keys) == sorted(UNUSABLE)
            assert differing(dict(model.named_parameters()), load_file(path)) == []
            continue
        with pytest.raises(LoadError, match=r"rank 1 could not .* of shape \[2\] .*was it freed by FSDP"):
            loader.load(model, path, strict=False)


def test_weights_that_are_tied_after_a_load() -> None:
    """One load would write the values of both to the same memory."""
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    state = {"0.weight": torch.ones(3, 3), "1.weight": torch.full((3, 3), 2.0)}
    with HierarchicalLoader(progress=False) as loader:
        for _ in range(2):
            loader.load(model, state)
        model[1].weight.data = model[0].weight.data
        with pytest.raises(LoadError, match=r"the model ties 0\.weight and 1\.weight, but"):
            loader.load(model, state)
        loader.load(model, {name: torch.ones(3, 3) for name in state})
        model[1].weight.data = torch.zeros(1, 3).expand(3, 3)
        with pytest.raises(LoadError, match=r"1\.weight is expanded"):
            loader.load(model, state)


# ---- files ----


def save_elsewhere(folder: Path) -> None:
    save_file(state_for(0), saved(folder) / "longer.safetensors", metadata={"note": "x" * 1000})


@on_ranks(4, save_elsewhere)
def test_files_that_lie_otherwise_are_read_as_they_lie(rank: int, tmp_path: Path) -> None:
    """One loader loads in turns from files that lie otherwise: with a header of another length, and in two parts."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), readers="every", bucket_bytes=BUCKET)
    models = [meta_net(), meta_net()]
    sources = (("1/one.safetensors", 1), ("longer.safetensors", 0), ("2/parts", 2))
    for turn in range(6):
        for number, model in enumerate(models):
            path, seed = sources[(turn + number) % 3]
            loader.load(model, tmp_path / path)
            assert wrong(model, state_for(seed)) == [], f"turn {turn}, model {number}"


@pytest.mark.parametrize("readers", ["every", "auto"])
@on_ranks(2)
def test_a_file_that_was_replaced_for_some_ranks(rank: int, tmp_path: Path, readers: str) -> None:
    """Each rank has a copy of its own. First that of the source alone is replaced, then all are."""
    loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, bucket_bytes=BUCKET, timeout=60.0)
    model, path = meta_net(), tmp_path / f"{rank}.safetensors"
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


def alike(value: float) -> State:
    """Two of these differ in no sample by which ranks compare files."""
    tensor = torch.zeros(1 << 16)
    tensor[200:300] = value
    return {"w": tensor}


def save_alike(folder: Path, readers: str) -> None:
    hub = folder / "models--org--name"
    for name, value in (
        ("own/a", 1.0),
        (f"{hub}/snapshots/{'a' * 40}/model", 1.0),
        (f"{hub}/snapshots/{'b' * 40}/model", 2.0),
    ):
        (folder / name).parent.mkdir(parents=True)
        save_file(alike(value), folder / f"{name}.safetensors")
    for name in ("blobs", "refs"):
        (hub / name).mkdir()


@pytest.mark.parametrize("readers", ["partitioned", "every"])
@on_ranks(2, save_alike)
def test_another_file_or_commit_that_looks_alike(rank: int, tmp_path: Path, readers: str) -> None:
    """Loads files that look alike: a folder that gets another file, and commits of a model in the cache of the hub."""
    from huggingface_hub import constants

    model = nn.ParameterDict({"w": nn.Parameter(torch.full((1 << 16,), -1.0), requires_grad=False)})
    with (
        mock.patch.multiple(constants, HF_HUB_CACHE=str(tmp_path), HF_HUB_OFFLINE=True),
        HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, timeout=60.0) as loader,
    ):

        def load(source: Path | str, value: float) -> None:
            loader.load(model, source)
            assert torch.equal(model["w"], alike(value)["w"]), f"{source}: {model['w'][250].item()} for {value}"

        load(tmp_path / "own", 1.0)
        torch.distributed.barrier()
        if rank == 0:
            save_file(alike(2.0), tmp_path / "own/model.safetensors")
        torch.distributed.barrier()
        load(tmp_path / "own", 2.0)
        load(tmp_path / "own/a.safetensors", 1.0)
        load(tmp_path / "own", 2.0)
        for commit, value in (("a", 1.0), ("b", 2.0), ("a", 1.0)):
            load(f"hf://org/name@{commit * 40}", value)


class Chunk(nn.Module):
    is_first = False

    def set_is_first_microbatch(self) -> None:
        self.is_first = True


def test_what_megatron_has_cast_is_cast_anew() -> None:
    model = MegatronChunks([Chunk(), Chunk()])
    forget_casts(model)
    assert [chunk.is_first for chunk in model] == [True, True]


def test_the_scale_that_torchao_has_computed_for_the_next_pass_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", ModuleType("torchao"))
    model: Any = nn.Linear(2, 2)
    model.weight._precomputed_scale = torch.ones(())
    epload.load(model, {"weight": torch.ones(2, 2), "bias": torch.ones(2)}, progress=False)
    assert model.weight._precomputed_scale is None


def test_what_autocast_has_cast_is_cast_anew() -> None:
    model = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        for value in (1.0, 2.0):
            epload.load(model, {"weight": torch.full((4, 4), value), "bias": torch.zeros(4)}, progress=False)
            assert model(torch.ones(4)).tolist() == [4 * value] * 4


@on_ranks(2)
def test_a_load_between_forward_and_backward_is_seen_by_autograd(rank: int) -> None:
    for shard in (False, True):
        model = nn.Linear(4, 4, bias=False)
        if shard:
            mesh = init_device_mesh("cpu", (2,))
            parallelize_module(model, mesh, ColwiseParallel(output_layouts=Replicate()))
        loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        epload.load(model, {"weight": torch.ones(4, 4)}, progress=False)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
