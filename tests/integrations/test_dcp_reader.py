"""``dcp.load`` with epload's storage reader and with torch's: the same values in every tensor, from every kind of folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from epload import CheckpointError
from epload.integrations.dcp import StorageReader
from support import fp8, ranks
from support.checks import full_values
from support.dcp_checkpoints import BF16, FORMATS, MODELS, folder_of, save_all, sharded


def local_of(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


def differ(ours: Any, theirs: Any, name: str = "") -> list[str]:
    """Lists what two nested state dicts have that is not bit for bit the same."""
    if isinstance(theirs, dict):
        if list(ours) != list(theirs):
            return [f"{name}: {list(ours)}, not {list(theirs)}"]
        return [text for key in theirs for text in differ(ours[key], theirs[key], f"{name}.{key}")]
    a, b = local_of(ours), local_of(theirs)
    if isinstance(b, Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape
        return [] if same and torch.equal(a, b) else [f"{name}: {a}, not {b}"]
    return [] if a == b else [f"{name}: {a!r}, not {b!r}"]


def state_of(model: str, form: str, dtype: torch.dtype | None = None, salt: int = 99) -> dict[str, Any]:
    """Returns what to load into. With salt 0 the tensors have the checkpoint's values, otherwise others."""
    made: nn.Module = sharded(model, values=True, salt=salt)
    state: dict[str, Any] = (made.to(dtype) if dtype is not None else made).state_dict()
    if form == "torch":
        return {"model": state, "optim": {"step": 0, "model": torch.zeros(3)}, "epoch": 0}
    state = {key: value for key, value in state.items() if value.numel()}
    return {"app": {"model": state}} if form == "safetensors" else state


def torchs(form: str, path: Path) -> dcp.StorageReader:
    return HuggingFaceStorageReader(str(path)) if form in ("shards", "whole") else FileSystemReader(path)


def same_as_torch(rank: int, folder: Path) -> None:
    for model in MODELS:
        for form in FORMATS:
            path = folder_of(folder, model, form)
            ours, theirs = state_of(model, form), state_of(model, form)
            dcp.load(ours, storage_reader=StorageReader(path))
            if form == "safetensors":  # torch's reader fails on what its own writer has written so
                theirs = state_of(model, form, salt=0)
            else:
                dcp.load(theirs, storage_reader=torchs(form, path))
            assert differ(state_of(model, form), theirs), f"{model} {form}: torch has loaded nothing"
            assert differ(ours, theirs) == [], f"{model} {form}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    ranks.run(4, save_all, folder)
    return folder


@pytest.mark.parametrize("world", [2, 4])
def test_dcp_folders_load_as_with_torchs_reader(saved: Path, world: int) -> None:
    """Saved by 4 ranks: 2 ranks load what lies in two parts."""
    ranks.run(world, same_as_torch, saved)


def save_whole(folder: Path) -> None:
    """Saves some files and an index, as on the Hub."""
    for name, (make, _) in MODELS.items():
        path = folder_of(folder, name, "whole")
        path.mkdir(parents=True)
        full = {key: value.clone() for key, value in full_values(make(), 0).items() if value.numel()}
        files = {key: f"model-{i % 3 + 1:05d}-of-00003.safetensors" for i, key in enumerate(full)}
        for file in {*files.values()}:
            save_file({key: value for key, value in full.items() if files[key] == file}, path / file)
        (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def whole(rank: int, folder: Path) -> None:
    for model in MODELS:
        path = folder_of(folder, model, "whole")
        for dtype in (None, BF16):
            # fp8 without scales stays fp8.
            lost = {key for key, t in state_of(model, "whole").items() if dtype is not None and t.dtype is fp8.FP8}
            ours, theirs = (
                {key: t for key, t in state_of(model, "whole", dtype).items() if key not in lost} for _ in range(2)
            )
            dcp.load(ours, storage_reader=StorageReader(path))
            dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(path)))
            assert differ(ours, theirs) == [], f"{model} {dtype}"


def test_safetensors_folders_load_as_with_torchs_reader_also_into_another_dtype(tmp_path: Path) -> None:
    save_whole(tmp_path)
    ranks.run(4, whole, tmp_path)


def fp8_loads(rank: int, folder: Path) -> None:
    """The shards of two ranks begin and end inside blocks."""
    mesh = init_device_mesh("cpu", (2,))
    for dtype in (torch.float32, BF16):
        for placement in (Shard(0), Shard(1), Replicate()):
            full = {name: t for name, t in fp8.checkpoint().items() if not name.endswith("_scale_inv")}
            ours, theirs = (
                {
                    n: distribute_tensor(torch.zeros(t.shape, dtype=dtype), mesh, [placement])
                    for n, t in full.items()
                    if t.ndim == 2
                }
                for _ in range(2)
            )
            dcp.load(ours, storage_reader=StorageReader(folder))
            dcp.load(theirs, storage_reader=QuantizedHuggingFaceStorageReader(str(folder), target_dtype=dtype))
            assert differ(ours, theirs) == [], f"{dtype} {placement}"


def test_fp8_weights_are_multiplied_by_their_scales(tmp_path: Path) -> None:
    fp8.store(tmp_path)
    ranks.run(2, fp8_loads, tmp_path)


def test_fp8_weights_stay_fp8_in_fp8_and_need_their_scales_elsewhere(tmp_path: Path) -> None:
    weight, scale = fp8.weight(3)
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros_like(weight), "w_scale_inv": torch.zeros_like(scale)}
    dcp.load(state, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["w"].float(), weight.float())
    assert torch.equal(state["w_scale_inv"], scale)
    save_file({"w": weight, "v": scale}, tmp_path / "model.safetensors")
    wide = {"v": torch.zeros_like(scale), "w": torch.zeros(weight.shape)}
    with pytest.raises(dcp.api.CheckpointException, match="but its scale w_scale_inv is not in the checkpoint"):
        dcp.load(wide, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert not wide["v"].any()


def test_quantized_integers_are_not_converted(tmp_path: Path) -> None:
    packed = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    save_file(
        {"l.weight": packed, "l.weight_scale": torch.ones(3, 1), "ids": packed.clone()}, tmp_path / "model.safetensors"
    )
    state = {"ids": torch.zeros(3, 4)}
    dcp.load(state, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert torch.equal(state["ids"], packed.float())
    state = {"l.weight": torch.zeros(3, 4)}
    with pytest.raises(dcp.api.CheckpointException, match=r"a quantized weight that l\.weight_scale belongs to"):
        dcp.load(state, storage_reader=StorageReader(tmp_path), no_dist=True)
    assert not state["l.weight"].any()


# ---- one process ----


class Transposed(DefaultLoadPlanner):
    """A planner of one's own: it has tensors read into others, and puts them into the state dict afterwards."""

    committed: list[str]

    def resolve_tensor(self, read_item: Any) -> Tensor:
        self.buffer = torch.empty(tuple(read_item.lengths)[::-1]).t()
        return self.buffer

    def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
        self.state_dict[read_item.dest_index.fqn].copy_(2 * tensor)
        self.committed.append(read_item.dest_index.fqn)


def test_planners_are_asked_for_tensors_and_told_of_each(tmp_path: Path) -> None:
    save_file({"w": torch.arange(12.0).reshape(3, 4)}, tmp_path / "model.safetensors")
    planner, state = Transposed(), {"w": torch.zeros(3, 4)}
    planner.committed = []
    dcp.load(state, storage_reader=StorageReader(tmp_path), planner=planner, no_dist=True)
    assert torch.equal(state["w"], 2 * torch.arange(12.0).reshape(3, 4))
    assert planner.committed == ["w"]


def test_a_part_of_the_state_may_be_missing_where_the_planner_allows_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3.0), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(3), "other": torch.ones(2), "step": 0}
    with pytest.raises(dcp.api.CheckpointException, match="Missing key in checkpoint state_dict: other"):
        dcp.load(state, storage_reader=StorageReader(tmp_path), no_dist=True)
    planner = DefaultLoadPlanner(allow_partial_load=True)
    dcp.load(state, checkpoint_id=tmp_path, storage_reader=StorageReader(), planner=planner, no_dist=True)
    assert state["w"].tolist() == [0.0, 1.0, 2.0]
    assert (state["other"].tolist(), state["step"]) == ([1.0, 1.0], 3)


def test_one_reader_loads_one_folder_after_another(tmp_path: Path) -> None:
    for number in (1, 2):
        dcp.save({"w": torch.full((3,), float(number))}, checkpoint_id=tmp_path / str(number), no_dist=True)
    reader, state = StorageReader(), {"w": torch.zeros(3)}
    for number in (1, 2, 1):
        dcp.load(state, checkpoint_id=tmp_path / str(number), storage_reader=reader, no_dist=True)
        assert state["w"].tolist() == [number] * 3


def test_a_file_that_changes_during_the_load_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"w": torch.arange(12.0)}, path)

    class Replacing(DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Tensor:
            path.rename(tmp_path / "old")
            save_file({"w": torch.zeros(12)}, path)
            return super().resolve_tensor(read_item)

    with pytest.raises(dcp.api.CheckpointException, match=r"was replaced .* while it was loaded"):
        dcp.load({"w": torch.ones(12)}, storage_reader=StorageReader(tmp_path), planner=Replacing(), no_dist=True)


def test_what_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a path: pass it to"):
        StorageReader().read_metadata()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        StorageReader(tmp_path).read_metadata()
    dcp.save({"w": torch.arange(1000.0)}, checkpoint_id=tmp_path, no_dist=True)
    next(tmp_path.glob("*.distcp")).unlink()
    with pytest.raises((CheckpointError, OSError), match="distcp"):
        StorageReader(tmp_path).read_metadata()
    assert StorageReader.validate_checkpoint_id(tmp_path)
    assert not StorageReader.validate_checkpoint_id(tmp_path / "none")


class Choosing(DefaultLoadPlanner):
    """Looks at the items of all ranks on one of them, or at a rank's own when they are back."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.when = when

    def create_global_plan(self, global_plan: list[Any]) -> list[Any]:
        for plan in global_plan if self.when == "in place" else ():
            plan.items[:] = self.without(plan).items
        return [self.without(plan) for plan in global_plan] if self.when == "global" else global_plan

    def finish_plan(self, new_plan: Any) -> Any:
        return self.without(new_plan) if self.when == "own" else new_plan

    @staticmethod
    def without(plan: Any) -> Any:
        return replace(plan, items=[item for item in plan.items if item.dest_index.fqn != "skipped"])


def chosen(rank: int, folder: Path) -> None:
    for when in ("global", "in place", "own", "never"):
        state = {"loaded": torch.zeros(5), "skipped": torch.zeros(5)}
        dcp.load(state, storage_reader=StorageReader(folder), planner=Choosing(when))
        expected = {"loaded": torch.arange(5.0), "skipped": torch.zeros(5) if when != "never" else torch.ones(5)}
        assert differ(state, expected) == [], when


def test_planners_may_choose_what_is_read(tmp_path: Path) -> None:
    save_file({"loaded": torch.arange(5.0), "skipped": torch.ones(5)}, tmp_path / "model.safetensors")
    ranks.run(2, chosen, tmp_path)
