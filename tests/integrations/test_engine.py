"""Checkpoints in an engine's model, against the engine's own ``load_weights``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from epload.integrations.engine import load_engine
from support.engines import Computing, Engine, Loader, Weights, engine_checkpoint
from support.findings import differing
from support.on_ranks import on_ranks
from support.recordings import tensors_of


def saved(folder: Path, dtype: torch.dtype, without: str = "", factor: int = 1) -> tuple[Path, dict[str, Tensor]]:
    weights = {name: factor * tensor for name, tensor in engine_checkpoint(dtype).items() if name != without}
    weights["unused"] = torch.ones(3)
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors")
    return folder, weights


def save_as_float32(folder: Path) -> None:
    saved(folder, torch.float32)


def load(model: Any, path: Path, **options: Any) -> epload.LoadReport:
    return load_engine(epload.EngineModel(model), path, **options)


@pytest.mark.parametrize("kind", [Engine, Computing])
@pytest.mark.parametrize(("dtype", "verify"), [(torch.float32, False), (torch.bfloat16, True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_the_model_is_as_load_weights_makes_it(
    kind: type[Engine], dtype: torch.dtype, verify: bool, rank: int, tmp_path: Path
) -> None:
    expected, model = kind(rank), kind(rank)
    for factor in (1, 2):
        path, weights = saved(tmp_path, dtype, factor=factor)
        with torch.no_grad():
            expected.load_weights(iter(weights.items()))
        report = load(model, path, verify=verify)
        assert differing(tensors_of(model), tensors_of(expected)) == []
    assert (report.missing_keys, report.unexpected_keys, report.verify) == ([], [], verify)
    assert "unused" in report.ignored_keys
    experts = [name for name in report.ignored_keys if name.startswith("experts.")]
    assert {name.split(".")[1] for name in experts} == ({"2", "3"} if rank == 0 else {"0", "1"}), "the other rank's"


def test_buffers_that_are_not_saved_are_the_engines(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, torch.float32)
    model = Engine(0)
    model.register_buffer("table", torch.arange(4.0), persistent=False)
    assert load(model, path).warnings == []
    assert torch.equal(model.table, torch.arange(4.0))

    def fill_table(model: Loader, weights: Weights) -> None:
        for _, tensor in weights:
            model.table.copy_(tensor)

    model = Loader(fill_table)
    model.register_buffer("table", torch.zeros(2), persistent=False)
    save_file({"w": torch.tensor([1.0, 2.0])}, tmp_path / "w.safetensors")
    load(model, tmp_path / "w.safetensors")
    assert model.table.tolist() == [1, 2]


@pytest.mark.parametrize("persistent", [True, False])
def test_a_model_that_is_partly_on_meta_is_refused(persistent: bool, tmp_path: Path) -> None:
    path, _ = saved(tmp_path, torch.float32)
    model = Engine(0)
    model.register_buffer("table", torch.zeros(2, device="meta"), persistent=persistent)
    with pytest.raises(epload.ModelMismatch, match=r"partly on meta \(1 tensor: table\)"):
        load(model, path, strict=False)


def test_tensors_that_load_weights_takes_in_full_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """They take longer, and memory next to the model."""
    path, _ = saved(tmp_path, torch.float32)
    with caplog.at_level("INFO", logger="epload"):
        load(Computing(0), path)
    assert "load_weights takes 1 tensor in full, the first is down (is changed by mul)" in caplog.text


def test_what_is_not_written_is_an_error(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, torch.float32, without="norm")
    for kind in (Engine, Computing):
        with pytest.raises(epload.ModelMismatch, match=r"leaves 1 of the engine's parameters unwritten.*norm\.weight"):
            load(kind(0), path)
        engine = kind(0)
        load(engine, path, strict=False)
        assert torch.all(engine.norm.weight == -1)
    save_file({"w": torch.ones(2)}, tmp_path / "w.safetensors")
    for value in RECORDED.values():
        engine = Loader(partial(fill, value, lambda model, name: model.a.data[1:]), a=(3,), b=(0,))
        with pytest.raises(epload.ModelMismatch, match=r"in part or as a whole \(a\)"):
            load(engine, tmp_path / "w.safetensors")


RECORDED = {"recorded": lambda tensor: tensor, "not recorded": lambda tensor: float(tensor.sum())}


def fill(value: Any, target: Any, model: Loader, weights: Weights) -> None:
    for name, tensor in weights:
        target(model, name)[:] = value(tensor)


class Processing(epload.EngineModel):
    """Processes a and b together."""

    def filled_as_a_whole(self) -> list[list[str]]:
        return [["a", "b"], ["c"]]


@pytest.mark.parametrize("value", RECORDED.values(), ids=RECORDED)
def test_what_is_processed_together_is_filled_as_a_whole(value: Callable[[Tensor], Any], tmp_path: Path) -> None:
    function = partial(fill, value, lambda model, name: getattr(model, name).data)
    for names, torn in (("a", "b"), ("c", ""), ("ab", "")):
        save_file({name: torch.ones(2) for name in names}, tmp_path / "w.safetensors")
        engine = Processing(Loader(function, a=(2,), b=(2,), c=(2,)))
        text = r"leaves 1 tensor: b unwritten.*send these layers as a whole"
        with pytest.raises(epload.ModelMismatch, match=text) if torn else nullcontext():
            load_engine(engine, tmp_path / "w.safetensors", strict=False)


class TiedByMemory(nn.Module):
    """Has a head whose parameter is another one than the embedding's, with its memory."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4, 3)
        self.head = nn.Linear(3, 4, bias=False)
        self.head.weight = nn.Parameter(self.embedding.weight.data)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)


def test_a_weight_that_is_tied_by_its_memory_is_written_once(tmp_path: Path) -> None:
    save_file({"embedding.weight": torch.arange(12.0).view(4, 3)}, tmp_path / "m.safetensors")
    model = TiedByMemory()
    load(model, tmp_path / "m.safetensors")
    assert torch.equal(model.head.weight, torch.arange(12.0).view(4, 3))


def test_experts_that_move_while_the_engine_runs_are_for_loads_alone(tmp_path: Path) -> None:
    """vLLM's layers have a state of their load balancing. A load comes before it moves anything."""
    path, _ = saved(tmp_path, torch.float32)
    model = Engine(0)
    model.w13.eplb_state = object()
    load(model, path)
    with pytest.raises(epload.ModelMismatch, match="vLLM moves experts of w13 while it runs"):
        epload.WeightReceiver(epload.EngineModel(model), "127.0.0.1:1", timeout=5)


def test_a_file_that_changes_before_the_last_tensors_are_read(tmp_path: Path) -> None:
    path, _ = saved(tmp_path, torch.float32)
    model = Computing(0)

    def load_weights(weights: Weights) -> None:
        for name, tensor in weights:
            if type(tensor) is Tensor:  # not while it is recorded
                os.utime(path / "model.safetensors")
            model.load_weights([(name, tensor)])

    with pytest.raises(epload.CheckpointError, match="while it was loaded"):
        load_engine(epload.EngineModel(model, load_weights), path)


@on_ranks(2, save_as_float32)
def test_ranks_of_a_job_load_by_themselves(rank: int, tmp_path: Path) -> None:
    """Rank 0 comes first, and waits for nobody."""
    if rank == 1:
        torch.distributed.barrier()
    engine, expected = Engine(rank), Engine(rank)
    load(engine, tmp_path)
    if rank == 0:
        torch.distributed.barrier()
    with torch.no_grad():
        expected.load_weights(iter(engine_checkpoint(torch.float32).items()))
    assert differing(tensors_of(engine), tensors_of(expected)) == []
