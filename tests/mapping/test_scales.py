"""Scales of fp8 weights: their dtypes and their blocks, as the checkpoint's configuration declares them; else refused by name."""

from __future__ import annotations

import json
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
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

import epload
from epload import CheckpointError, ModelMismatch
from support.checks import as_bytes, local_of
from support.fp8 import BF16, FP8, Tree
from support.models import mesh
from support.on_ranks import on_ranks

GROUP = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}
MX: dict[str, tuple[str, dict[str, Any]]] = {
    "mxfp8": ("config.json", {"quantization_config": {"quant_method": "mxfp8", "weight_block_size": [1, 32]}}),
    "mxfp8 alone": ("config.json", {"quantization_config": {"quant_method": "mxfp8"}}),
    "ue8m0": (
        "config.json",
        {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0"}},
    ),
    "compressed-tensors": (
        "config.json",
        {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "mxfp8-quantized",
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": GROUP}},
            }
        },
    ),
    "text": ("config.json", {"text_config": {"quantization_config": {"quant_method": "mxfp8"}}}),
    "modelopt": ("hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "MXFP8"}}),
}


def fp8(*shape: int, dtype: torch.dtype = FP8) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def expand(scale: Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> Tensor:
    """The scale of each element of a weight of this shape."""
    full = scale.repeat_interleave(block[0], -2)[..., : shape[-2], :]
    return full.repeat_interleave(block[1], -1)[..., : shape[-1]]


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


def declare(rows: int, columns: int, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "fp8", "weight_block_size": [rows, columns], **more}}


# ---- dtypes ----


@pytest.mark.parametrize("case", MX)
@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_mx_exponents(case: str, suffix: str, tmp_path: Path) -> None:
    name, config = MX[case]
    value, scale = fp8(6, 128), torch.arange(100, 124, dtype=torch.uint8).reshape(6, 4)
    got = load(write(tmp_path, {"w": value, f"w{suffix}": scale}, config, name), 6, 128)
    assert torch.equal(got, (value.float() * expand(2.0 ** (scale.float() - 127), (1, 32), (6, 128))).to(BF16))
    assert torch.equal(got, Fp8Dequantize(None)._dequantize_one(value, scale, BF16))


def test_every_exponent(tmp_path: Path) -> None:
    """Exponents as torch converts them, from 2^-127 to 2^127, and 255, which is NaN."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(8, 32)
    value = torch.ones(8, 1024).to(FP8)
    factors = scale.view(torch.float8_e8m0fnu).float()
    assert bool(factors[-1, -1].isnan())
    full = expand(factors, (1, 32), (8, 1024)).to(BF16)
    for stored, config in ((scale, MX["mxfp8"][1]), (scale.view(torch.float8_e8m0fnu), declare(1, 32))):
        got = load(write(tmp_path, {"w": value, "w_scale_inv": stored}, config), 8, 1024)
        assert torch.equal(as_bytes(got), as_bytes(full))


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("kind", [FP8, torch.float8_e5m2])
def test_float_scales_are_factors_in_an_mx_checkpoint_too(
    dtype: torch.dtype, kind: torch.dtype, tmp_path: Path
) -> None:
    value, scale = fp8(6, 128, dtype=kind), (torch.rand(6, 4) + 0.1).to(dtype)
    got = load(write(tmp_path, {"w": value, "w_scale_inv": scale}, MX["ue8m0"][1]), 6, 128)
    assert torch.equal(got, (value.float() * expand(scale.float(), (1, 32), (6, 128))).to(BF16))


@pytest.mark.parametrize("config", [None, declare(1, 32), {"quantization_config": {"quant_method": "fp8"}}, {}])
def test_undeclared_uint8_scales_are_refused(config: Any, tmp_path: Path) -> None:
    tensors = {"w": fp8(6, 128), "w_scale_inv": torch.full((6, 4), 126, dtype=torch.uint8)}
    with pytest.raises(ModelMismatch, match="w_scale_inv is uint8, which may hold exponents or factors"):
        load(write(tmp_path, tensors, config), 6, 128)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.int64, torch.float64, FP8, torch.bool])
def test_scales_of_other_dtypes_are_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    tensors = {"w": fp8(6, 128), "w_scale": torch.ones(6, 4).to(dtype)}
    with pytest.raises(ModelMismatch, match=r"w_scale is \w+, expected a scale of one of the dtypes float32, "):
        load(write(tmp_path, tensors, MX["mxfp8"][1]), 6, 128)


# ---- blocks ----


@pytest.mark.parametrize("shape", [(192, 64), (200, 130), (96, 64), (95, 1), (288, 63), (2, 200, 130)], ids=str)
@pytest.mark.parametrize("block", [(96, 64), (128, 128), (1, 32), (7, 200)], ids=str)
def test_declared_blocks(shape: tuple[int, ...], block: tuple[int, int], tmp_path: Path) -> None:
    grid = (*shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1]))
    value, scale = fp8(*shape), torch.rand(grid) + 0.1
    got = load(write(tmp_path, {"w": value, "w_scale_inv": scale}, declare(*block)), *shape)
    assert torch.equal(got, (value.float() * expand(scale, block, shape)).to(BF16))


GROUPS = {
    "all": {"weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [96, 64]}},
    "some": {"weights": {"num_bits": 8, "type": "float", "strategy": "channel", "group_size": None}},
}


@pytest.mark.parametrize("grid", [(2, 2), (192, 1), (192,), (1,), (), (1, 1)], ids=str)
def test_groups_of_weights(grid: tuple[int, ...], tmp_path: Path) -> None:
    """compressed-tensors declares each group's blocks, and not which tensors are in it."""
    value, scale = fp8(192, 100), torch.rand(grid) + 0.1
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": GROUPS}}
    rows = scale.reshape(grid if len(grid) == 2 else (*grid, 1) if grid else (1, 1))
    block = (96, 64) if grid == (2, 2) else (192 // rows.shape[0], 100)
    got = load(write(tmp_path, {"w": value, "w_scale": scale}, config), 192, 100)
    assert torch.equal(got, (value.float() * expand(rows, block, (192, 100))).to(BF16))


def test_declared_blocks_that_are_the_same_for_a_weight(tmp_path: Path) -> None:
    """A row is as well divided into groups of 64 as into blocks of 96 x 64."""
    groups = GROUPS | {"rows": {"weights": {"strategy": "group", "group_size": 64}}}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": groups}}
    value, scale = fp8(1, 130), torch.rand(1, 3) + 0.1
    got = load(write(tmp_path, {"w": value, "w_scale": scale}, config), 1, 130)
    assert torch.equal(got, (value.float() * expand(scale, (1, 64), (1, 130))).to(BF16))


UNKNOWN = {
    "equal blocks or blocks of 128": ((192, 256), (2, 2)),
    "uneven rows": ((129, 256), (2, 2)),
    "uneven columns": ((256, 576), (2, 5)),
    "parts of a fused weight": ((384, 64), (3,)),
    "parts as a column": ((384, 64), (3, 1)),
    "parts of experts": ((5, 384, 64), (5, 3)),
    "more dims than the weight": ((8, 6), (1, 8, 6)),
    "too many": ((8, 6), (9, 6)),
    "none": ((8, 6), (0, 6)),
}


@pytest.mark.parametrize("case", UNKNOWN)
@pytest.mark.parametrize("options", [{}, {"strict": False, "ignore_mismatched_shapes": True}])
def test_unknown_blocks_are_refused(case: str, options: dict[str, bool], tmp_path: Path) -> None:
    shape, grid = UNKNOWN[case]
    tensors = {"w": fp8(*shape), "w_scale": torch.ones(grid)}
    for source in (tensors, write(tmp_path, tensors), write(tmp_path, tensors, {}) / "model.safetensors"):
        with pytest.raises(ModelMismatch, match=r"w_scale has shape .* in exactly one way.*pass the folder"):
            load(source, *shape, **options)


@pytest.mark.parametrize("grid", [(3, 2), (2, 3), (3,), (2,), (192, 64)], ids=str)
def test_scales_that_contradict_the_configuration_are_refused(grid: tuple[int, ...], tmp_path: Path) -> None:
    tensors = {"w": fp8(192, 128), "w_scale": torch.ones(grid)}
    with pytest.raises(ModelMismatch, match=r"does not divide w of shape \[192, 128\] into blocks of \[96, 64\]"):
        load(write(tmp_path, tensors, declare(96, 64)), 192, 128)


@pytest.mark.parametrize(
    ("shape", "grid", "block"),
    [
        ((256, 384), (2, 3), (128, 128)),
        ((64, 512), (64, 16), (1, 32)),
        ((6, 4), (1, 4), (6, 1)),
        ((3, 8, 6), (3,), (8, 6)),
        ((3, 8, 6), (3, 1, 1), (8, 6)),
        ((3, 8, 6), (3, 8), (1, 6)),
        ((0, 6), (0, 1), (1, 6)),
    ],
    ids=str,
)
def test_blocks_that_shapes_leave_no_doubt_about(
    shape: tuple[int, ...], grid: tuple[int, ...], block: tuple[int, int]
) -> None:
    value, scale = fp8(*shape), torch.rand(grid) + 0.1
    rows = scale.reshape((*grid, *[1] * (len(shape) - len(grid))))
    got = load({"w": value, "w_scale_inv": scale}, *shape)
    assert torch.equal(got, (value.float() * expand(rows, block, shape)).to(BF16))


# ---- which tensors ----


@pytest.mark.parametrize("other", ["_zero_point", "_scale_2", "_global_scale", "_g_idx"])
def test_what_a_product_alone_does_not_give_is_refused(other: str) -> None:
    source = {"w": fp8(6, 4), "w_scale": torch.ones(6, 1), f"w{other}": torch.ones(6, 1)}
    with pytest.raises(ModelMismatch, match=f"cannot dequantize w: it has w{other} besides its scale"):
        load(source, 6, 4, strict=False)


def test_two_scales_are_refused() -> None:
    source = {"w": fp8(6, 4), "w_scale": torch.full((6, 1), 2.0), "w_scale_inv": torch.full((6, 1), 3.0)}
    with pytest.raises(ModelMismatch, match="w: it has w_scale besides its scale w_scale_inv"):
        load(source, 6, 4, strict=False)


def test_a_scale_of_a_wide_weight_is_refused() -> None:
    with pytest.raises(ModelMismatch, match="w_scale_inv is a scale, but w is bfloat16 in the checkpoint"):
        load({"w": torch.ones(6, 4, dtype=BF16), "w_scale_inv": torch.full((6, 1), 3.0)}, 6, 4, strict=False)


def test_scales_of_activations_are_not_those_of_weights() -> None:
    value, names = fp8(6, 4), ("layer.input_scale", "layer.activation_scale", "layer.k_scale", "layer.v_scale")
    source = {"layer.weight": value, **dict.fromkeys(names, torch.tensor(7.0))}
    target = {"layer.weight": torch.empty(6, 4, dtype=BF16)}
    with pytest.raises(ModelMismatch, match=r"its scale layer\.weight_scale_inv is not in the checkpoint"):
        epload.load(Tree(target), source, strict=False, progress=False)
    model = Tree(target)
    report = epload.load(model, {**source, "layer.weight_scale": torch.tensor([0.5])}, strict=False, progress=False)
    assert report.unexpected_keys == list(names)
    assert torch.equal(model.layer.weight, (value.float() * 0.5).to(BF16))


def test_dtype_does_not_round_scales() -> None:
    """``dtype=`` is for weights: as in from_pretrained, what they are decoded with keeps the model's dtype."""
    names = ("layer.weight_scale_inv", "layer.activation_scale")
    source = {"layer.weight": fp8(6, 4), "norm": torch.rand(3), **{name: torch.rand(6, 1) for name in names}}
    for dtype in (BF16, {"": BF16}):
        model = Tree(source)
        epload.load(model, source, dtype=dtype, progress=False)
        state = model.state_dict()
        assert torch.equal(as_bytes(state["layer.weight"]), as_bytes(source["layer.weight"]))
        assert torch.equal(state["norm"], source["norm"].to(BF16))
        assert all(state[name].dtype is torch.float32 and torch.equal(state[name], source[name]) for name in names)


# ---- the configuration ----

VALUE, SCALE = fp8(192, 64), torch.tensor([[0.5], [3.0]])
RIGHT = (VALUE.float() * expand(SCALE, (96, 64), (192, 64))).to(BF16)


@pytest.mark.parametrize("as_object", [False, True])
def test_the_model_declares_what_the_checkpoint_does_not(as_object: bool, tmp_path: Path) -> None:
    from transformers import FineGrainedFP8Config

    declared = declare(96, 64)["quantization_config"]
    tensors = {"w": VALUE, "w_scale_inv": SCALE}
    for source in (tensors, write(tmp_path, tensors)):
        model = Tree({"w": torch.empty(192, 64, dtype=BF16)})
        quantization = FineGrainedFP8Config(weight_block_size=(96, 64)) if as_object else declared
        model.config = SimpleNamespace(quantization_config=quantization)
        assert torch.equal(load(source, model=model), RIGHT)
    model.config.quantization_config = declare(128, 128)["quantization_config"]
    assert torch.equal(load(write(tmp_path, tensors, declare(96, 64)), model=model), RIGHT)


def _stored(kind: str, folder: Path) -> Any:
    """VALUE and SCALE in one of the formats of a folder, next to a configuration."""
    tensors = {"w": VALUE, "w_scale_inv": SCALE}
    if kind == "dcp":
        dcp.save({"model": tensors}, checkpoint_id=folder, no_dist=True)
    elif kind == "torch":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif kind == "torch, mapped":
        torch.save({**tensors, "w": VALUE.T.contiguous().T}, folder / "pytorch_model.bin")
    else:
        save_file({"w": VALUE}, folder / "model-00001-of-00002.safetensors")
        save_file({"w_scale_inv": SCALE}, folder / "model-00002-of-00002.safetensors")
    if kind == "index":
        where = {"w": "model-00001-of-00002.safetensors", "w_scale_inv": "model-00002-of-00002.safetensors"}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (folder / "config.json").write_text(json.dumps(declare(96, 64)))
    if kind == "objects":
        remote = fsspec.filesystem("memory")
        for file in folder.iterdir():
            remote.pipe(f"/scales/{file.name}", file.read_bytes())
        return "memory://scales"
    return folder / "model.safetensors.index.json" if kind == "index" else folder


@pytest.mark.parametrize("kind", ["files", "index", "torch", "torch, mapped", "dcp", "objects"])
def test_the_configuration_of_every_format(kind: str, tmp_path: Path) -> None:
    assert torch.equal(load(_stored(kind, tmp_path), 192, 64), RIGHT)


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
        load(write(tmp_path, {"w": VALUE, "w_scale_inv": SCALE}, MALFORMED[case]), 192, 64)
    for other in ({}, {"mask": torch.ones(3, dtype=torch.uint8)}):
        assert torch.equal(load(write(tmp_path, {"w": RIGHT, **other}, MALFORMED[case]), 192, 64, strict=False), RIGHT)


@on_ranks(4)
def test_ranks_take_the_declaration_of_the_one_that_reads(rank: int, tmp_path: Path) -> None:
    topology = epload.Topology.from_nodes([[0, 1], [2, 3]])
    cases = {
        "mx": (MX["mxfp8"][1], (1, 32), torch.arange(110, 110 + 200 * 5).remainder(150).byte().reshape(200, 5)),
        "ragged": (declare(96, 64), (96, 64), torch.rand(3, 3, generator=torch.Generator().manual_seed(1)) + 0.1),
    }
    value = fp8(200, 160)
    for name, (config, block, scale) in cases.items():
        factors = scale.view(torch.float8_e8m0fnu).float() if scale.dtype is torch.uint8 else scale
        right = (value.float() * expand(factors, block, (200, 160))).to(BF16)
        if rank == 0:
            write(tmp_path, {"w": value, "w_scale_inv": scale}, config)
        torch.distributed.barrier()
        for readers in ("one", "every", "partitioned"):
            loader = epload.HierarchicalLoader(topology, readers=readers, bucket_bytes=8192, progress=False)
            fsdp, tensor_parallel = (Tree({"w": right}) for _ in range(2))
            fully_shard(fsdp, mesh=mesh(("all", 4)))
            tensor_parallel.w = nn.Parameter(distribute_tensor(tensor_parallel.w, mesh(("tp", 4)), [Shard(1)]))
            for model in (fsdp, tensor_parallel):
                loader.load(model, tmp_path)
                got = model.state_dict()["w"]
                wanted = local_of(distribute_tensor(right, got.device_mesh, got.placements))
                assert torch.equal(as_bytes(local_of(got)), as_bytes(wanted)), (
                    f"{name}, readers={readers}, {got.placements}"
                )
        torch.distributed.barrier()


@on_ranks(2)
def test_another_declaration_of_the_same_tensors(rank: int, tmp_path: Path) -> None:
    """The same tensors under another configuration, with the same loader."""
    loader = epload.HierarchicalLoader(epload.Topology.from_nodes([[0], [1]]), progress=False)
    model = Tree({"w": torch.empty(192, 64, dtype=BF16)})
    for block in ((96, 64), (128, 64), (96, 64), (96, 128)):
        if rank == 0:
            write(tmp_path, {"w": VALUE, "w_scale_inv": SCALE}, declare(*block))
        torch.distributed.barrier()
        loader.load(model, tmp_path)
        assert torch.equal(model.w, (VALUE.float() * expand(SCALE, block, (192, 64))).to(BF16)), str(block)
        torch.distributed.barrier()
