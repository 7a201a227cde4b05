"""Weights quantized to fp8: equal to what transformers and compressed-tensors make of whole tensors, in every layout."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

from safetensors.torch import load_file
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import epload
from epload.mapping import Quantize
from support import ranks
from support.models import mesh
from support.quantized import FORMATS, Trainer, assert_same, expected, with_skipped

# ---- layouts ----


def sharded(sizes: tuple[int, ...], placements: list[Placement]) -> nn.Module:
    """Every parameter with enough dims on one mesh; others whole."""
    model = Trainer()
    on = mesh(*((f"axis{i}", size) for i, size in enumerate(sizes)))
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            dims = [placement.dim for placement in placements if isinstance(placement, Shard | _StridedShard)]
            if max(dims) < parameter.ndim:
                made = distribute_tensor(parameter.detach(), on, placements, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(made))
    return model


def fsdp() -> nn.Module:
    return fully_shard(Trainer(), mesh=mesh(("all", 4)))


def experts_on_two_axes() -> nn.Module:
    model, on = Trainer(), mesh(("fsdp", 2), ("ep", 2))
    for name, parameter in list(model.experts.named_parameters()):
        made = distribute_tensor(parameter.detach(), on["ep"], [Shard(0)], src_data_rank=None)
        model.experts.register_parameter(name, nn.Parameter(made))
    fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda parameter: Shard(1))
    return fully_shard(model, mesh=mesh(("all", 4)))


LAYOUTS = {
    "plain": Trainer,
    "fsdp": fsdp,
    "rows": partial(sharded, (4,), [Shard(0)]),
    "columns": partial(sharded, (4,), [Shard(1)]),
    "strided rows": partial(sharded, (4,), [_StridedShard(0, split_factor=3)]),
    "strided columns": partial(sharded, (4,), [_StridedShard(1, split_factor=2)]),
    "rows twice": partial(sharded, (2, 2), [_StridedShard(0, split_factor=2), Shard(0)]),
    "columns, rows": partial(sharded, (2, 2), [Shard(1), Shard(0)]),
    "ep x fsdp": experts_on_two_axes,
}


def pairs() -> list[tuple[str, list[str]]]:
    """Each layout with a few formats: those whose blocks it divides in another way."""
    own, others = ["128 x 128", "mx", "tensor"], ["7 x 200", "one", "channel", "block", "group"]
    return [(layout, [*own, others[i % 5], others[(i + 2) % 5]]) for i, layout in enumerate(LAYOUTS)]


def save_layouts(rank: int, folder: Path) -> None:
    for layout, formats in pairs():
        model = LAYOUTS[layout]()
        for name in formats:
            epload.save(model, folder / layout / name, mapping=Quantize(with_skipped(FORMATS[name])))


def test_every_layout_is_quantized_as_the_whole_tensor(tmp_path: Path) -> None:
    ranks.run(4, save_layouts, tmp_path)
    wanted = {name: expected(Trainer(), config) for name, config in FORMATS.items()}
    for layout, formats in pairs():
        for name in formats:
            assert_same(load_file(tmp_path / layout / name / "model.safetensors"), wanted[name], f"{layout}, {name}")
            declared = json.loads((tmp_path / layout / name / "config.json").read_text())["quantization_config"]
            assert declared == json.loads(json.dumps(with_skipped(FORMATS[name])))
