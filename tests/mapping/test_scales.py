"""fp8 weights with scales: kept as they are, or dequantized while loading, by blocks and dtypes of scales as the checkpoint's
configuration declares them; else refused by name. And dtypes by pattern."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import epload
from epload import CheckpointError, Mapping, ModelMismatch
from epload.mapping import Convert, Reshape, Split
from support import fp8 as mapped
from support.checkpoint_kinds import folder_without_index, the_index_itself, torch_folder
from support.checks import as_bytes, local_of
from support.findings import differing
from support.fp8 import BF16, FP8, Tree
from support.models import mesh
from support.on_ranks import on_ranks


def configured(method: str, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


def declare(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return configured("fp8", weight_block_size=[rows, columns], **more)


GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": GROUP}}
MX: dict[str, dict[str, Any]] = {
    "mxfp8": configured("mxfp8", weight_block_size=[1, 32]),
    "mxfp8 alone": configured("mxfp8"),
    "ue8m0": declare(1, 32, scale_fmt="ue8m0"),
    "compressed-tensors": configured("compressed-tensors", format="mxfp8-quantized", config_groups=GROUPS),
    "text": {"text_config": configured("mxfp8")},
    "modelopt": {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}},
}


def fp8(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def dequantized(value: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """The reference: every element times the scale of its block, exponents as torch converts them."""
    factors = scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale
    factors = factors.float().reshape((*scale.shape, *[1] * (value.ndim - scale.ndim)))
    full = factors.repeat_interleave(block[0], -2)[..., : value.shape[-2], :]
    return (value.float() * full.repeat_interleave(block[1], -1)[..., : value.shape[-1]]).to(BF16)


def write(folder: Path, tensors: dict[str, Tensor], config: Any = None, name: str = "config.json") -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    if config is not None:
        (folder / name).write_bytes(config if isinstance(config, bytes) else json.dumps(config).encode())
    return folder


def load(source: Any, *shape: int, model: nn.Module | None = None, **options: Any) -> Tensor:
    """The weight ``w`` as bf16."""
    model = model or Tree({"w": torch.empty(shape, dtype=BF16)})
    epload.load(model, source, progress=False, **options)
    return model.state_dict()["w"]


def check(
    folder: Path, value: Tensor, scale: Tensor, block: tuple[int, int], config: Any = None, name: str = "config.json",
    suffix: str = "_scale_inv",
) -> Tensor:  # fmt: skip
    got = load(write(folder, {"w": value, f"w{suffix}": scale}, config, name), *value.shape)
    assert torch.equal(as_bytes(got), as_bytes(dequantized(value, scale, block)))
    return got


# ---- dtypes ----


@pytest.mark.parametrize("case", MX)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_mx_exponents(case: str, suffix: str, tmp_path: Path) -> None:
    value, scale = fp8(6, 128), torch.arange(100, 124, dtype=torch.uint8).reshape(6, 4)
    name = "hf_quant_config.json" if case == "modelopt" else "config.json"
    got = check(tmp_path, value, scale, (1, 32), MX[case], name, suffix)
    assert torch.equal(got, Fp8Dequantize(None)._dequantize_one(value, scale, BF16))


def test_scales_of_blocks_as_modelopt_writes_them(tmp_path: Path) -> None:
    config = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8_PB_WO"}}
    value, scale = fp8(200, 256), torch.rand(2, 2) + 0.1
    folder = write(tmp_path, {"w": value, "w_scale": scale.reshape(2, 1, 2, 1)}, config, "hf_quant_config.json")
    assert torch.equal(load(folder, 200, 256), dequantized(value, scale, (128, 128)))


def test_models_made_in_inference_mode_are_filled_outside_of_it(tmp_path: Path) -> None:
    with torch.inference_mode():
        model = Tree({"w": torch.empty(200, 256, dtype=BF16)})
    value, scale = fp8(200, 256), torch.rand(2, 2) + 0.1
    folder = write(tmp_path, {"w": value, "w_scale_inv": scale}, declare(128, 128))
    assert torch.equal(load(folder, 200, 256, model=model), dequantized(value, scale, (128, 128)))


def test_every_exponent(tmp_path: Path) -> None:
    """Exponents from 2^-127 to 2^127, and 255, which is NaN."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    for stored, config in ((scale, MX["mxfp8"]), (scale.view(torch.float8_e8m0fnu), declare(1, 32))):
        got = check(tmp_path, torch.ones(8, 1024).to(FP8), stored, (1, 32), config)
        assert bool(got[-1, -1].isnan())


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", [FP8, torch.float8_e5m2])
def test_float_scales_are_factors_in_an_mx_checkpoint_too(dtype: torch.dtype, kind: torch.dtype, tmp_path: Path) -> None:
    check(tmp_path, fp8(6, 128, dtype=kind), (torch.rand(6, 4) + 0.1).to(dtype), (1, 32), MX["ue8m0"])


# ---- blocks ----


SHAPES = [(192, 64), (200, 130), (96, 64), (95, 1), (288, 63), (2, 200, 130)]
SOME = {
    "all": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 64]}},
    "some": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}},
}
ROWS = {"rows": {"weights": {"strategy": "group", "group_size": 64}}}
BLOCKS: list[tuple[tuple[int, ...], tuple[int, ...], tuple[int, int], Any]] = [
    (shape, (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])), block, declare(*block))
    for shape, block in product(SHAPES, [(96, 64), (128, 128), (1, 32), (7, 200)])
]
# compressed-tensors declares each group's blocks, and not which tensors are in it. A row is as well divided into groups of 64
# as into blocks of 96 x 64.
GROUPED, ALSO_ROWS = (configured("compressed-tensors", config_groups=groups) for groups in (SOME, SOME | ROWS))
BLOCKS += [
    ((192, 100), (2, 2), (96, 64), GROUPED), ((192, 100), (192, 1), (1, 100), GROUPED), ((192, 100), (192,), (1, 100), GROUPED),
    ((192, 100), (1,), (192, 100), GROUPED), ((192, 100), (), (192, 100), GROUPED), ((192, 100), (1, 1), (192, 100), GROUPED),
    ((1, 130), (1, 3), (1, 64), ALSO_ROWS),
]  # fmt: skip
# Shapes that leave no doubt.
BLOCKS += [
    ((256, 384), (2, 3), (128, 128), None), ((64, 512), (64, 16), (1, 32), None), ((6, 4), (1, 4), (6, 1), None),
    ((3, 8, 6), (3,), (8, 6), None), ((3, 8, 6), (3, 1, 1), (8, 6), None), ((3, 8, 6), (3, 8), (1, 6), None),
    ((0, 6), (0, 1), (1, 6), None),
]  # fmt: skip


@pytest.mark.parametrize(("shape", "grid", "block", "config"), BLOCKS)
def test_blocks(shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int], config: Any, tmp_path: Path) -> None:
    for suffix in ("_scale_inv", "_scale"):
        check(tmp_path / suffix, fp8(*shape), torch.rand(grid) + 0.1, block, config, suffix=suffix)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_one_scale_is_for_any_part_of_a_weight(shape: tuple[int, ...]) -> None:
    value = fp8(6, 4)
    mapping = Mapping(converts=(Convert(("^w$",), ("a", "b"), (Reshape((24,)), Split(0, "targets"))),))
    model = Tree({"a": torch.empty(5, dtype=BF16), "b": torch.empty(19, dtype=BF16)})
    epload.load(model, {"w": value, "w_scale_inv": torch.full(shape, 3.0)}, mapping=mapping, progress=False)
    assert torch.equal(torch.cat([model.a, model.b]), (value.float() * 3).to(BF16).flatten())


# ---- refusals ----

LAX = {"strict": False, "ignore_mismatched_shapes": True}
Refused = tuple[dict[str, Tensor], Any, str]
"""The checkpoint's tensors, its configuration, and the message."""
TWO, WIDE = torch.full((6, 1), 2.0), torch.ones(6, 4, dtype=BF16)
EXPONENTS = {"w": fp8(6, 128), "w_scale_inv": torch.full((6, 4), 126, dtype=torch.uint8)}
REFUSED: dict[str, Refused] = {
    f"uint8, declared as {config}": (EXPONENTS, config, "w_scale_inv is uint8, which may hold exponents or factors")
    for config in (None, declare(1, 32), configured("fp8"), {})
}
REFUSED |= {
    f"a scale in {dtype}": (
        {"w": fp8(6, 128), "w_scale": torch.ones(6, 4).to(dtype)}, MX["mxfp8"],
        r"w_scale is \w+, expected a scale of one of the dtypes float32, ",
    )
    for dtype in (torch.int8, torch.int32, torch.int64, torch.float64, FP8, torch.bool)
}  # fmt: skip
REFUSED |= {
    f"{grid} scales for blocks of 96 x 64": (
        {"w": fp8(192, 128), "w_scale": torch.ones(grid)}, declare(96, 64),
        r"does not divide w of shape \[192, 128\] into blocks of \[96, 64\]",
    )
    for grid in ((3, 2), (2, 3), (3,), (2,), (192, 64))
}  # fmt: skip
REFUSED |= {
    name: (
        {"w": fp8(*shape), "w_scale": torch.ones(grid)}, None, "w_scale has shape .* in exactly one way.*pass the folder"
    )
    for name, shape, grid in (
        ("equal blocks or blocks of 128", (192, 256), (2, 2)),
        ("uneven rows", (129, 256), (2, 2)),
        ("uneven columns", (256, 576), (2, 5)),
        ("parts of a fused weight", (384, 64), (3,)),
        ("parts as a column", (384, 64), (3, 1)),
        ("parts of experts", (5, 384, 64), (5, 3)),
        ("more dims than the weight", (8, 6), (1, 8, 6)),
        ("too many", (8, 6), (9, 6)),
        ("none", (8, 6), (0, 6)),
    )
}  # fmt: skip
REFUSED |= {
    f"also {other}": (
        {"w": fp8(6, 4), "w_scale": TWO, f"w{other}": TWO + 1}, None, f"cannot dequantize w: it has w{other} besides its scale"
    )
    for other in ("_zero_point", "_scale_2", "_global_scale", "_g_idx")
}  # fmt: skip
REFUSED |= {
    "two scales": (
        {"w": fp8(6, 4), "w_scale": TWO, "w_scale_inv": TWO + 1}, None, "w: it has w_scale besides its scale w_scale_inv"
    ),
    "of a wide weight": (
        {"w": WIDE, "w_scale_inv": TWO}, None, "w_scale_inv is a scale, but w is bfloat16 in the checkpoint"
    ),
    "a weight without its scale": ({"w": fp8(6, 4)}, None, "its scale w_scale_inv is not in the checkpoint"),
    "a scale without its weight": ({"w": WIDE, "b_scale_inv": TWO}, None, "b_scale_inv is a scale without a weight"),
    "a scale of the wrong shape": (
        {"w": fp8(300, 200), "w_scale_inv": torch.ones(3, 7)}, mapped.CONFIG,
        r"w_scale_inv has shape \[3, 7\].*w of shape \[300, 200\]",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_dequantized_is_refused(case: str, tmp_path: Path) -> None:
    tensors, config, message = REFUSED[case]
    sources: list[Any] = [write(tmp_path, tensors, config)]
    if config is None:
        sources += [tensors, write(tmp_path / "alone", tensors, {}) / "model.safetensors"]
    for source in sources:
        for options in ({}, {"strict": False}, LAX):
            with pytest.raises(ModelMismatch, match=message):
                load(source, *tensors["w"].shape, **options)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"l.weight": WIDE, "l.weight_scale": TWO}, "weight_scale is a scale, but l.weight is bfloat16 in the checkpoint"),
        ({"l.weight": fp8(6, 4), "l.weight_scale": TWO, "l.pre_quant_scale": TWO}, "it has l.pre_quant_scale besides its scale"),
    ],
)
def test_other_scales_are_refused(tensors: dict[str, Tensor], message: str) -> None:
    model = Tree({"l.weight": torch.empty(tensors["l.weight"].shape, dtype=BF16)})
    with pytest.raises(ModelMismatch, match=message):
        epload.load(model, tensors, strict=False, progress=False)


def test_an_integer_in_the_model_is_refused() -> None:
    model = Tree({"w": torch.empty(6, 4, dtype=torch.int32)})
    for options in ({}, {"strict": False}, LAX):
        with pytest.raises(ModelMismatch, match="cannot dequantize w to int32"):
            load({"w": fp8(6, 4), "w_scale_inv": TWO}, model=model, **options)


def test_a_view_across_rows_is_refused() -> None:
    value, scale = mapped.weight(0, 256, 384)
    mapping = Mapping(converts=(Convert(("w$",), ("w",), (Reshape((384, 256)),)),))
    model = Tree({"w": torch.empty(384, 256, dtype=BF16)})
    with pytest.raises(ModelMismatch, match="across its rows"):
        load({"w": value, "w_scale_inv": scale}, model=model, mapping=mapping)
    assert model.w.is_meta


def test_scales_of_activations_are_not_those_of_weights() -> None:
    value, names = fp8(6, 4), ("layer.input_scale", "layer.activation_scale", "layer.k_scale", "layer.v_scale")
    source = {"layer.weight": value, **dict.fromkeys(names, torch.tensor(7.0))}
    model = Tree({"layer.weight": torch.empty(6, 4, dtype=BF16)})
    with pytest.raises(ModelMismatch, match=r"its scale layer\.weight_scale_inv is not in the checkpoint"):
        epload.load(model, source, strict=False, progress=False)
    report = epload.load(model, {**source, "layer.weight_scale": torch.tensor([0.5])}, strict=False, progress=False)
    assert report.unexpected_keys == list(names)
    assert torch.equal(model.layer.weight, (value.float() * 0.5).to(BF16))


def test_the_scale_of_a_weight_that_is_skipped_is_not_unexpected() -> None:
    model = nn.ModuleDict({"a": nn.Linear(2, 2, bias=False), "b": nn.Linear(2, 3, bias=False)})
    values = {f"{name}.weight": torch.ones(2, 2).to(FP8) for name in "ab"}
    values |= {f"{name}.weight_scale_inv": torch.full((1,), 0.5) for name in "ab"}
    report = epload.load(model, values, ignore_mismatched_shapes=True, progress=False)
    assert (report.mismatched_keys, report.unexpected_keys) == (["b.weight"], [])
    assert torch.equal(model["a"].weight, torch.full((2, 2), 0.5))


# ---- dtypes of the model ----


def test_dtype_does_not_round_scales() -> None:
    """``dtype=`` is for weights: as in from_pretrained, what they are decoded with keeps the model's dtype."""
    scales = {name: torch.rand(6, 1) for name in ("layer.weight_scale_inv", "layer.activation_scale")}
    source = {"layer.weight": fp8(6, 4), "norm": torch.rand(3), **scales}
    for dtype in (BF16, {"": BF16}):
        model = Tree(source)
        epload.load(model, source, dtype=dtype, progress=False)
        assert differing(model, source | {"norm": source["norm"].to(BF16)}) == []


def test_dtypes_by_pattern() -> None:
    source = {name: torch.randn(4, 3) for name in ("layer.norm", "layer.weight", "gate.weight")}
    source |= {"count": torch.arange(3), "flag": torch.tensor([True, False])}
    model = Tree(source)
    dtypes = {r"gate\.": torch.float16, r"weight$": BF16, "": torch.float64}
    epload.load(model, source, dtype=dtypes, progress=False)
    kinds = {"layer.norm": torch.float64, "layer.weight": BF16, "gate.weight": torch.float16}
    assert differing(model, {name: t.to(kinds.get(name, t.dtype)) for name, t in source.items()}) == []
    for pattern in ("nowhere", "count"):
        with pytest.raises(ValueError, match=f"the pattern '{pattern}' matches no floating-point parameter"):
            epload.load(Tree(source), source, dtype={pattern: BF16}, progress=False)


# ---- the configuration ----

VALUE, SCALE = fp8(192, 64), torch.tensor([[0.5], [3.0]])
TENSORS, RIGHT = {"w": VALUE, "w_scale_inv": SCALE}, dequantized(VALUE, SCALE, (96, 64))


@pytest.mark.parametrize("as_object", [False, True])
def test_the_model_declares_what_the_checkpoint_does_not(as_object: bool, tmp_path: Path) -> None:
    declared = declare(96, 64)["quantization_config"]
    for source in (TENSORS, write(tmp_path, TENSORS)):
        model = Tree({"w": torch.empty(192, 64, dtype=BF16)})
        quantization = FineGrainedFP8Config(weight_block_size=(96, 64)) if as_object else declared
        model.config = SimpleNamespace(quantization_config=quantization)
        assert torch.equal(load(source, model=model), RIGHT)
    model.config.quantization_config = declare(128, 128)["quantization_config"]
    assert torch.equal(load(write(tmp_path, TENSORS, declare(96, 64)), model=model), RIGHT)


def in_dcp(folder: Path, tensors: dict[str, Tensor]) -> Path:
    dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    return folder


def torch_folder_with_strides(folder: Path, tensors: dict[str, Tensor]) -> Any:
    return torch_folder(folder, {**tensors, "w": tensors["w"].T.contiguous().T})


def objects(folder: Path, tensors: dict[str, Tensor]) -> str:
    remote = fsspec.filesystem("memory")
    for file in write(folder, tensors).iterdir():
        remote.pipe(f"/scales/{file.name}", file.read_bytes())
    return "memory://scales"


@pytest.mark.parametrize(
    "store", [folder_without_index, the_index_itself, torch_folder, torch_folder_with_strides, in_dcp, objects]
)
def test_the_configuration_of_every_format(store: Any, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(declare(96, 64)))
    assert torch.equal(load(store(tmp_path, TENSORS), 192, 64), RIGHT)


MALFORMED = {
    "not JSON": b"{",
    "not UTF-8": b"\xff\xfe{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "one number": json.dumps(declare(96, 64)).replace("[96, 64]", "96").encode(),
    "three numbers": json.dumps(declare(96, 64)).replace("[96, 64]", "[1, 96, 64]").encode(),
    "zero": json.dumps(declare(0, 64)).encode(),
    "text": json.dumps(declare(96, 64)).replace("96", '"96"').encode(),
    "a fraction": json.dumps(declare(96, 64)).replace("96", "96.5").encode(),
    "large": b" " * (16 << 20) + b"{}",
}


@pytest.mark.parametrize("case", MALFORMED)
def test_a_malformed_configuration(case: str, tmp_path: Path) -> None:
    """An error where fp8 weights depend on it, and of no interest elsewhere."""
    with pytest.raises(CheckpointError, match=r"cannot read the quantization of fp8 weights from .*config\.json"):
        load(write(tmp_path, TENSORS, MALFORMED[case]), 192, 64)
    for other in ({}, {"mask": torch.ones(3, dtype=torch.uint8)}):
        assert torch.equal(load(write(tmp_path, {"w": RIGHT, **other}, MALFORMED[case]), 192, 64, strict=False), RIGHT)


# ---- on ranks ----


def loader(readers: str = "auto", bucket_bytes: int = 8192) -> epload.HierarchicalLoader:
    nodes = [[0, 1], [2, 3]] if torch.distributed.get_world_size() == 4 else [[0], [1]]
    topology = epload.Topology.from_nodes(nodes)
    return epload.HierarchicalLoader(topology, readers=readers, bucket_bytes=bucket_bytes, progress=False)


@on_ranks(4)
def test_ranks_take_the_declaration_of_the_one_that_reads(rank: int, tmp_path: Path) -> None:
    value, exponents = fp8(200, 160), torch.arange(110, 110 + 200 * 5).remainder(150).byte().reshape(200, 5)
    factors = torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) + 0.1
    for config, block, scale in ((MX["mxfp8"], (1, 32), exponents), (declare(96, 64), (96, 64), factors)):
        right = dequantized(value, scale, block)
        if rank == 0:
            write(tmp_path, {"w": value, "w_scale_inv": scale}, config)
        torch.distributed.barrier()
        for readers in ("one", "every", "partitioned"):
            fsdp, tensor_parallel = (Tree({"w": right}) for _ in range(2))
            fully_shard(fsdp, mesh=mesh(("all", 4)))
            tensor_parallel.w = nn.Parameter(distribute_tensor(tensor_parallel.w, mesh(("tp", 4)), [Shard(1)]))
            for model in (fsdp, tensor_parallel):
                loader(readers).load(model, tmp_path)
                got = model.state_dict()["w"]
                wanted = local_of(distribute_tensor(right, got.device_mesh, got.placements))
                assert torch.equal(as_bytes(local_of(got)), as_bytes(wanted)), f"{block} {readers} {got.placements}"
        torch.distributed.barrier()


@on_ranks(2)
def test_another_declaration_of_the_same_tensors(rank: int, tmp_path: Path) -> None:
    """The same tensors under another configuration, with the same loader."""
    runs, model = loader(), Tree({"w": torch.empty(192, 64, dtype=BF16)})
    for block in ((96, 64), (128, 64), (96, 64), (96, 128)):
        if rank == 0:
            write(tmp_path, TENSORS, declare(*block))
        torch.distributed.barrier()
        runs.load(model, tmp_path)
        assert torch.equal(model.w, dequantized(VALUE, SCALE, block)), block
        torch.distributed.barrier()


def shard(dim: int, parameter: Tensor) -> Shard:
    """torch wants even shards along other dims than the first."""
    return Shard(dim if parameter.ndim > dim and parameter.shape[dim] % 4 == 0 else 0)


@on_ranks(4, mapped.store)
def test_pytorch_175884_fp8_weights_are_kept_or_dequantized(rank: int, tmp_path: Path) -> None:
    """Weights are fused, transposed and reshaped by a mapping, and sharded along either dim."""
    file = mapped.checkpoint()
    for dtype, readers in ((BF16, "one"), (torch.float16, "every"), (torch.float32, "partitioned")):
        runs, values = loader(readers, 20000), mapped.expected(file, dtype)
        for dim in (0, 1):
            model, whole = Tree(values), Tree(values)
            for name, tensor in values.items():
                path, _, leaf = name.rpartition(".")
                whole.get_submodule(path)._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
            for each in (model, whole):
                fully_shard(each, mesh=mesh(("all", 4)), shard_placement_fn=partial(shard, dim))
            report = runs.load(model, tmp_path, mapping=mapped.MAPPING)
            assert report.missing_keys + report.unexpected_keys == [], str(report)
            assert differing(model, whole) == [], f"{dtype} dim {dim}"
    kept = Tree(file)
    runs.load(kept, tmp_path)
    assert differing(kept, file) == [], "not kept"
