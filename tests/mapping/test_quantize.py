"""Weights quantized to fp8: equal to what transformers and compressed-tensors make of whole tensors, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Placement, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import epload
from epload.mapping import Quantize
from support import ranks
from support.checks import all_fine, local_of
from support.fp8 import Tree
from support.models import mesh
from support.quantized import FORMATS, Trainer, as_bits, assert_same, expected, with_skipped

# ---- layouts ----


def sharded(sizes: tuple[int, ...], placements: list[Placement], model: nn.Module) -> nn.Module:
    """Every parameter with enough dims on one mesh; others whole."""
    on, dims = mesh(*((f"axis{i}", size) for i, size in enumerate(sizes))), [placement.dim for placement in placements]  # type: ignore[attr-defined]
    place_parameters(model, max(dims), partial(distribute_tensor, device_mesh=on, placements=placements))
    return model


def place_parameters(model: nn.Module, dim: int, distribute: Callable[..., Tensor]) -> None:
    """Distributes every parameter that has a dim."""
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.ndim > dim:
                made = nn.Parameter(distribute(parameter.detach(), src_data_rank=None), requires_grad=False)
                module.register_parameter(name, made)


def fsdp(model: nn.Module) -> nn.Module:
    scalars = {parameter for parameter in model.parameters() if not parameter.ndim}
    return fully_shard(model, mesh=mesh(("all", 4)), ignored_params=scalars)


def experts_on_two_axes(model: nn.Module) -> nn.Module:
    on = mesh(("fsdp", 2), ("ep", 2))
    place_parameters(model.experts, 0, partial(distribute_tensor, device_mesh=on["ep"], placements=[Shard(0)]))
    fully_shard(model.experts, mesh=on["fsdp"], shard_placement_fn=lambda p: Shard(int(p.shape[1] % 2 == 0)))
    return fsdp(model)


LAYOUTS = {
    "plain": lambda model: model,
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
        model = LAYOUTS[layout](Trainer())
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


# ---- loads ----


def load_layouts(rank: int, folder: Path) -> list[str]:
    problems = []
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for i, (layout, formats) in enumerate(pairs()):
        readers = ("one", "every", "partitioned", "per_node")[i % 4]
        with epload.HierarchicalLoader(
            topology, readers=readers, bucket_bytes=40_000, verify=i % 3 == 0, progress=False
        ) as loader:
            for name in formats:
                wanted, config = expected(Trainer(), FORMATS[name]), with_skipped(FORMATS[name])
                model = LAYOUTS[layout](Tree(wanted))
                report = loader.load(model, folder / "masters.safetensors", mapping=Quantize(config))
                problems += [f"{layout}, {name}: {key}" for key in report.missing_keys + report.unexpected_keys]
                placed = LAYOUTS[layout](filled(wanted))
                for (key, tensor), other in zip(model.named_parameters(), placed.parameters(), strict=True):
                    if not torch.equal(as_bits(local_of(tensor)), as_bits(local_of(other))):
                        problems.append(f"{layout}, {name}: {key} differs")
    return problems


def filled(tensors: dict[str, Tensor]) -> nn.Module:
    model = Tree(tensors).to_empty(device="cpu")
    model.load_state_dict(tensors)
    return model


def test_a_load_quantizes_into_every_layout(tmp_path: Path) -> None:
    save_file(
        {name: tensor.contiguous() for name, tensor in Trainer().state_dict().items()}, tmp_path / "masters.safetensors"
    )
    all_fine(ranks.run(4, load_layouts, tmp_path))
