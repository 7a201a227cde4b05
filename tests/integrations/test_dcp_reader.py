"""``dcp.load`` with epload's storage reader and with torch's: the same values in every tensor, from every kind of folder."""

from __future__ import annotations

import inspect
import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner, FileSystemReader, HuggingFaceStorageReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
from torch.utils._pytree import tree_map_only

import epload
from epload import CheckpointError
from epload.integrations.dcp import StorageReader
from support import fp8, ranks
from support.checks import full_values, local_of
from support.dcp_checkpoints import BF16, FORMATS, MODELS, folder_of, save_all, sharded
from support.findings import differing_values
from support.on_ranks import on_ranks
from support.tensor_classes import Halved


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
    for model, form in product(MODELS, FORMATS):
        case, path = f"{model} {form}", folder_of(folder, model, form)
        ours, theirs = state_of(model, form), state_of(model, form)
        dcp.load(ours, storage_reader=StorageReader(path))
        if form == "safetensors":  # torch's reader fails on what its own writer has written so
            theirs = state_of(model, form, salt=0)
        else:
            dcp.load(theirs, storage_reader=torchs(form, path))
        assert differing_values(state_of(model, form), theirs), f"{case}: torch has loaded nothing"
        assert differing_values(ours, theirs) == [], case


def test_dcp_folders_load_as_with_torchs_reader(tmp_path: Path) -> None:
    """Saved by 4 ranks: 2 ranks load what lies in two parts."""
    ranks.run(4, save_all, tmp_path)
    for world in (2, 4):
        ranks.run(world, same_as_torch, tmp_path)


def test_the_nesting_of_what_was_saved_is_known(tmp_path: Path) -> None:
    saved = {"model": {"a.w": torch.arange(2.0), "l": [torch.zeros(1), torch.ones(1)]}, "step": 3}
    dcp.save(saved, checkpoint_id=tmp_path, no_dist=True)
    states: list[dict[str, Any]] = [{}, {}]
    for state, reader in zip(states, (FileSystemReader(tmp_path), StorageReader(tmp_path)), strict=True):
        _load_state_dict(state, reader, planner=_EmptyStateDictLoadPlanner(), no_dist=True)
    assert states[0]["model"]["l"][1].item() == 1
    assert tree_map_only(Tensor, Tensor.tolist, states[0]) == tree_map_only(Tensor, Tensor.tolist, states[1])


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


@on_ranks(4, save_whole)
def test_safetensors_folders_load_as_with_torchs_reader_also_into_another_dtype(rank: int, tmp_path: Path) -> None:
    for model, dtype in product(MODELS, (None, BF16)):
        path = folder_of(tmp_path, model, "whole")
        ours, theirs = (state_of(model, "whole", dtype) for _ in range(2))
        if dtype is not None:  # fp8 without scales stays fp8
            for name in [n for n, t in state_of(model, "whole").items() if t.dtype is fp8.FP8]:
                del ours[name], theirs[name]
        dcp.load(ours, storage_reader=StorageReader(path))
        dcp.load(theirs, storage_reader=HuggingFaceStorageReader(str(path)))
        assert differing_values(ours, theirs) == [], f"{model} {dtype}"


@on_ranks(2, fp8.store)
def test_fp8_weights_are_multiplied_by_their_scales(rank: int, tmp_path: Path) -> None:
    """The shards of two ranks begin and end inside blocks."""
    mesh = init_device_mesh("cpu", (2,))
    shapes = {name: t.shape for name, t in fp8.checkpoint().items() if not name.endswith("_scale_inv") and t.ndim == 2}
    for dtype, placement in product((torch.float32, BF16), (Shard(0), Shard(1), Replicate())):
        ours, theirs = (
            {n: distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, [placement]) for n, shape in shapes.items()}
            for _ in range(2)
        )
        dcp.load(ours, storage_reader=StorageReader(tmp_path))
        dcp.load(theirs, storage_reader=QuantizedHuggingFaceStorageReader(str(tmp_path), target_dtype=dtype))
        assert differing_values(ours, theirs) == [], f"{dtype} {placement}"


def load(state: dict[str, Any], path: Path, **options: Any) -> None:
    dcp.load(state, storage_reader=StorageReader(path), no_dist=True, **options)


def refused(text: str, state: dict[str, Any], path: Path, **options: Any) -> None:
    with pytest.raises(dcp.api.CheckpointException, match=text):
        load(state, path, **options)


def test_fp8_weights_stay_fp8_in_fp8_and_need_their_scales_elsewhere(tmp_path: Path) -> None:
    weight, scale = fp8.weight(3)
    save_file({"w": weight, "w_scale_inv": scale}, tmp_path / "model.safetensors")
    state = {"w": torch.zeros_like(weight), "w_scale_inv": torch.zeros_like(scale)}
    load(state, tmp_path)
    assert torch.equal(state["w"].float(), weight.float())
    assert torch.equal(state["w_scale_inv"], scale)
    save_file({"w": weight, "v": scale}, tmp_path / "model.safetensors")
    wide = {"v": torch.zeros_like(scale), "w": torch.zeros(weight.shape)}
    refused("but its scale w_scale_inv is not in the checkpoint", wide, tmp_path)
    assert not wide["v"].any()


def test_fp8_weights_under_two_names_of_one_tensor_are_scaled_once(tmp_path: Path) -> None:
    weight, scale = torch.randn(16, 16).to(torch.float8_e4m3fn), torch.full((1, 1), 3.0)
    state = {"v": weight, "v_scale_inv": scale, "w": weight.clone(), "w_scale_inv": scale.clone()}
    save_file(state, tmp_path / "model.safetensors")
    single = {"w": torch.zeros(weight.shape)}
    load(single, tmp_path)
    tied = torch.zeros(weight.shape)
    load({"v": tied, "w": tied}, tmp_path)
    assert torch.equal(tied, single["w"])
    assert torch.equal(tied, weight.float() * 3)


def test_quantized_integers_are_not_converted(tmp_path: Path) -> None:
    packed = torch.arange(12, dtype=torch.int8).reshape(3, 4)
    source = {"l.weight": packed, "l.weight_scale": torch.ones(3, 1), "ids": packed.clone()}
    save_file(source, tmp_path / "model.safetensors")
    state, quantized = {"ids": torch.zeros(3, 4)}, {"l.weight": torch.zeros(3, 4)}
    load(state, tmp_path)
    assert torch.equal(state["ids"], packed.float())
    refused(r"a quantized weight that l\.weight_scale belongs to", quantized, tmp_path)
    assert not quantized["l.weight"].any()


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
    load(state, tmp_path, planner=planner)
    assert torch.equal(state["w"], 2 * torch.arange(12.0).reshape(3, 4))
    assert planner.committed == ["w"]


def test_a_part_of_the_state_may_be_missing_where_the_planner_allows_it(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(3.0), "step": 3}, checkpoint_id=tmp_path, no_dist=True)
    state = {"w": torch.zeros(3), "other": torch.ones(2), "step": 0}
    refused("Missing key in checkpoint state_dict: other", state, tmp_path)
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

    refused("was replaced .* while it was loaded", {"w": torch.ones(12)}, tmp_path, planner=Replacing())


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


def save_two(folder: Path) -> None:
    save_file({"loaded": torch.arange(5.0), "skipped": torch.ones(5)}, folder / "model.safetensors")


@on_ranks(2, save_two)
def test_planners_may_choose_what_is_read(rank: int, tmp_path: Path) -> None:
    for when in ("global", "in place", "own", "never"):
        state = {"loaded": torch.zeros(5), "skipped": torch.zeros(5)}
        dcp.load(state, storage_reader=StorageReader(tmp_path), planner=Choosing(when))
        skipped = torch.ones(5) if when == "never" else torch.zeros(5)
        assert differing_values(state, {"loaded": torch.arange(5.0), "skipped": skipped}) == [], when


def save_rows(folder: Path) -> None:
    save_file({"w": torch.arange(8.0)}, folder / "rows.safetensors")


@on_ranks(2, save_rows)
def test_rows_that_are_apart_are_refused(rank: int, tmp_path: Path) -> None:
    """torch's planner takes them for consecutive ones, so that its own readers fill them wrongly."""
    on = init_device_mesh("cpu", (2,))
    value = DTensor.from_local(torch.zeros(4), on, [_StridedShard(0, split_factor=2)], run_check=False)
    with pytest.raises(BaseException, match=r"w has placements .* which give this rank rows that are apart"):
        dcp.load({"w": value}, storage_reader=StorageReader(tmp_path / "rows.safetensors"))
    assert not local_of(value).any()


def test_a_tensor_that_hands_out_copies_is_filled_by_its_own_copy(tmp_path: Path) -> None:
    save_rows(tmp_path)

    class Filled(Halved):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.copy_.default:
                args[0].inner.copy_(args[1] / 2)
                return args[0]
            return super().__torch_dispatch__(func, types, args, kwargs)

    value = Filled(torch.zeros(8))
    dcp.load({"w": value}, storage_reader=StorageReader(tmp_path / "rows.safetensors"))
    assert torch.equal(value.inner, torch.arange(8.0) / 2)


def test_an_error_that_one_rank_meets_once_is_not_tried_again() -> None:
    """torch tries again with ``rank=`` if it may, and then goes on without the others."""
    assert not [*inspect.signature(StorageReader("x").read_metadata).parameters]


def test_chunks_that_are_plain_tuples(tmp_path: Path) -> None:
    """Megatron-FSDP writes them."""

    class Plain(DefaultSavePlanner):
        def create_global_plan(self, plans: Any) -> Any:
            plans, metadata = super().create_global_plan(plans)
            entry: Any = metadata.state_dict_metadata["w"]
            entry.chunks = [ChunkStorageMetadata(tuple(c.offsets), tuple(c.sizes)) for c in entry.chunks]  # type: ignore[arg-type]
            return plans, metadata

    dcp.save({"w": torch.arange(8.0)}, checkpoint_id=tmp_path / "saved", planner=Plain())
    state = {"w": torch.zeros(8)}
    epload.load_state(state, tmp_path / "saved")
    assert torch.equal(state["w"], torch.arange(8.0))


def test_what_has_a_state_of_its_own_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(8.0)}, checkpoint_id=tmp_path / "saved")
    model = nn.Linear(2, 2)
    divided = torch.zeros(4)
    divided.global_offsets = ()  # type: ignore[attr-defined]
    for value, text in ((model, r"app is a Linear; pass its state_dict\(\)"), (divided, "app is a Tensor that is divided among")):
        with pytest.raises(TypeError, match=text):
            epload.load_state({"w": torch.zeros(8), "app": value}, tmp_path / "saved", strict=False)
