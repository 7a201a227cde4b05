"""fp8 weights with block scales: kept as they are, or dequantized while loading; and dtypes by pattern."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import epload
from epload import Manifest, Mapping, ModelMismatch
from epload.core.pieces import Quantization
from epload.core.placement import Layout, Sharded
from epload.mapping import Convert, Reshape, Split
from epload.model.targets import collect
from epload.planning.plan import make_plan
from support.findings import differing
from support.fp8 import BF16, COLUMNS, FP8, MAPPING, ROWS, Tree, checkpoint, expected, store, weight
from support.models import mesh
from support.on_ranks import on_ranks


@on_ranks(4, store)
def test_pytorch_175884_fp8_weights_are_kept_or_dequantized(rank: int, tmp_path: Path) -> None:
    file = checkpoint()
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    for dtype, readers in ((BF16, "one"), (torch.float16, "every"), (torch.float32, "partitioned")):
        loader = epload.HierarchicalLoader(topology, readers=readers, bucket_bytes=20000, progress=False)
        values = expected(file, dtype)
        for dim in (0, 1):
            model, whole = Tree(values), Tree(values)
            for name, tensor in values.items():
                path, _, leaf = name.rpartition(".")
                whole.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            for each in (model, whole):
                fully_shard(each, mesh=mesh(("all", 4)), shard_placement_fn=_sharded(dim))
            report = loader.load(model, tmp_path, mapping=MAPPING)
            assert not report.missing_keys + report.unexpected_keys, str(report)
            assert [f"{name} {dtype} dim {dim}" for name in differing(model, whole)] == []
    kept = Tree(file)
    loader.load(kept, tmp_path)
    assert [f"{name} was not kept" for name in differing(kept, file)] == []


def _sharded(dim: int) -> Any:
    from torch.distributed.tensor import Shard

    # torch wants even shards along other dims than the first.
    return lambda parameter: Shard(dim if parameter.ndim > dim and parameter.shape[dim] % 4 == 0 else 0)


def one_rank(source: dict[str, Tensor] | Path, target: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    model = Tree(target)
    epload.load(model, source, progress=False, **options)
    return dict(model.state_dict())


VALUE, SCALE = weight(0)
WIDE = {"a.weight": torch.empty(ROWS, COLUMNS, dtype=BF16)}
MISTAKES: dict[str, tuple[dict[str, Tensor], dict[str, Tensor], str]] = {
    "a weight without its scale": ({"a.weight": VALUE}, WIDE, "its scale a.weight_scale_inv is not in the checkpoint"),
    "a scale without its weight": (
        {"a.weight": VALUE.to(BF16), "b.weight_scale_inv": SCALE}, WIDE, "b.weight_scale_inv is a scale without a weight"
    ),
    "a scale of the wrong shape": (
        {"a.weight": VALUE, "a.weight_scale_inv": SCALE[:, :1].repeat(1, 7)}, WIDE,
        r"a.weight_scale_inv has shape \[3, 7\].*a.weight of shape \[300, 200\]",
    ),
    "an integer in the model": (
        {"a.weight": VALUE, "a.weight_scale_inv": SCALE}, {"a.weight": torch.empty(ROWS, COLUMNS, dtype=torch.int32)},
        "cannot dequantize a.weight to int32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
@pytest.mark.parametrize("strict", [True, False])
def test_mistakes_are_named(case: str, strict: bool) -> None:
    source, target, message = MISTAKES[case]
    with pytest.raises(ModelMismatch, match=message):
        one_rank(source, target, strict=strict)


def test_the_scale_of_a_weight_that_is_skipped_is_not_unexpected() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 3, bias=False)})
    values = {f"{name}.weight": torch.ones(2, 2).to(torch.float8_e4m3fn) for name in "ab"}
    values |= {f"{name}.weight_scale_inv": torch.full((1,), 0.5) for name in "ab"}
    report = epload.load(model, values, ignore_mismatched_shapes=True, progress=False)
    assert (report.mismatched_keys, report.unexpected_keys) == (["b.weight"], [])
    assert torch.equal(model["a"].weight, torch.full((2, 2), 0.5))


def test_a_view_across_rows_is_refused() -> None:
    value, scale = weight(0, 256, 384)
    mapping = Mapping(converts=(Convert(("w$",), ("w",), (Reshape((384, 256)),)),))
    model = Tree({"w": torch.empty(384, 256, dtype=BF16)})
    with pytest.raises(ModelMismatch, match="across its rows"):
        epload.load(model, {"w": value, "w_scale_inv": scale}, mapping=mapping, progress=False)
    assert model.w.is_meta


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_is_for_any_part_of_a_weight(shape: tuple[int, ...]) -> None:
    value, scale = weight(0, 6, 4)[0], torch.full(shape, 3.0)
    mapping = Mapping(converts=(Convert(("^w$",), ("a", "b"), (Reshape((24,)), Split(0, "targets"))),))
    target = {"a": torch.empty(5, dtype=BF16), "b": torch.empty(19, dtype=BF16)}
    got = one_rank({"w": value, "w_scale_inv": scale}, target, mapping=mapping)
    assert torch.equal(torch.cat([got["a"], got["b"]]), (value.float() * 3).to(BF16).flatten())


def test_dtypes_by_pattern() -> None:
    names = ("layer.norm", "layer.weight", "gate.weight", "count", "flag")
    source = {name: torch.randn(4, 3) for name in names[:3]}
    source |= {"count": torch.arange(3), "flag": torch.tensor([True, False])}
    target = {name: torch.empty_like(t) for name, t in source.items()}
    got = one_rank(source, target, dtype={r"gate\.": torch.float16, r"weight$": BF16, "": torch.float64})
    kinds = {"layer.norm": torch.float64, "layer.weight": BF16, "gate.weight": torch.float16}
    for name, value in source.items():
        assert torch.equal(got[name], value.to(kinds.get(name, value.dtype))), name
        assert got[name].dtype == kinds.get(name, value.dtype)
    for pattern in ("nowhere", "count"):
        with pytest.raises(ValueError, match=f"the pattern '{pattern}' matches no floating-point parameter"):
            one_rank(source, target, dtype={pattern: BF16})


def test_each_rank_keeps_the_scales_of_what_it_owns() -> None:
    """Of 5 x 2 scales, those of rows 0-159, 160-319, 320-479, and 480-599."""
    declared = Quantization("fp8", blocks=((128, 128),))
    columns = (("w", "w_scale_inv"), ((600, 200), (5, 2)), (FP8, torch.float32))
    manifest = Manifest(*columns, "x", quantization=declared)
    targets = collect(Tree({"w": torch.empty(600, 200, dtype=BF16)}))
    shapes = []
    for rank in range(4):
        mine = replace(targets, layouts=[Layout((600, 200), (4,), (Sharded(0),))], coordinates=[(rank,)])
        plan = make_plan(manifest, mine, Mapping(), 1 << 20)
        shapes.append((plan.scalings[0].first, plan.targets.layouts[plan.targets.layout[1]].shape))
    assert shapes == [((0, 0), (2, 2)), ((1, 0), (2, 2)), ((2, 0), (2, 2)), ((3, 0), (2, 2))]
    empty = replace(targets, layouts=[Layout((600, 200), (601,), (Sharded(0),))], coordinates=[(600,)])
    plan = make_plan(manifest, empty, Mapping(), 1 << 20)
    assert (plan.targets.layouts[plan.targets.layout[1]].shape, plan.unexpected, plan.missing) == ((0, 0), (), ())
