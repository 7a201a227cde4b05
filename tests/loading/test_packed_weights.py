"""Checkpoints of packed weights: refused by name where the model has the weights as a whole, whatever the options allow, and
copied bit for bit where the model has the packed tensors."""

from __future__ import annotations

import json
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from transformers import GptOssForCausalLM, MixtralForCausalLM
from transformers.integrations.bitnet import BitLinear

import epload
from epload import ModelMismatch
from support.findings import differing, must_be_refused, must_be_refused_by_all
from support.fp8 import Tree
from support.models import mesh, on_meta
from support.on_ranks import on_ranks
from support.pretrained import config

LAX = {"strict": False, "ignore_mismatched_shapes": True}
F16, F32, BF16, FP8 = torch.float16, torch.float32, torch.bfloat16, torch.float8_e4m3fn
U8, I8, I16, I32, I64 = torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64
Parts = dict[str, tuple[tuple[int, ...], torch.dtype]]
WEIGHT = (32, 64)
LAYOUTS: dict[str, tuple[Parts, str]] = {
    "GPTQ": (
        {"qweight": ((8, 32), I32), "qzeros": ((1, 4), I32), "scales": ((1, 32), F16), "g_idx": ((64,), I32)}, "GPTQ or AWQ",
    ),
    "AWQ": ({"qweight": ((64, 4), I32), "qzeros": ((1, 4), I32), "scales": ((1, 32), F16)}, "GPTQ or AWQ"),
    "compressed-tensors": (
        {"weight_packed": ((32, 8), I32), "weight_scale": ((32, 1), BF16), "weight_shape": ((2,), I64)},
        "compressed-tensors",
    ),
    "sparse": ({"compressed": ((1024,), BF16), "bitmask": ((32, 8), U8)}, "compressed-tensors"),
    "HQQ": ({"W_q": ((16, 64), U8), "scale": ((32, 1), F16), "zero": ((32, 1), F16)}, "HQQ"),
    "HQQ of 3 bits": ({"W_q": ((4, 64), I32), "scale": ((32, 1), F16), "zero": ((32, 1), F16)}, "HQQ"),
    "quanto": ({"weight._data": ((32, 64), I8), "weight._scale": ((32, 1), BF16), "input_scale": ((), F32)}, "quanto"),
    "quanto fp8": ({"weight._data": ((32, 64), FP8), "weight._scale": ((32, 1), BF16)}, "quanto"),
    "AQLM": ({"codes": ((32, 8, 1), I8), "codebooks": ((1, 256, 1, 8), F16), "scales": ((32, 1, 1, 1), F16)}, "AQLM"),
    "SpQR": ({"dense_weights": ((128,), I64), "in_perm": ((64,), I16), "col_vals": ((9,), I32)}, "SpQR"),
    "VPTQ": ({"indices": ((1, 8, 20), I32), "centroids.weight": ((1, 4096), BF16)}, "VPTQ"),
    "VPTQ as floats": ({"indices": ((1, 8, 20), BF16), "centroids.weight": ((1, 4096), BF16)}, "VPTQ"),
    "BitNet": ({"weight": ((8, 64), U8), "weight_scale": ((1,), BF16)}, "weight, uint8"),
    "EETQ": ({"weight": ((64, 32), I8), "weight_scales": ((32,), F16)}, "EETQ"),
    "HIGGS": ({"weight": ((16, 32), I16), "scales": ((1, 32), F16), "tables2": ((16, 16, 1), F32)}, "HIGGS"),
    "bitsandbytes nf4": (
        {"weight": ((1024, 1), U8), "weight.absmax": ((32,), U8), "weight.quant_state.bitsandbytes__nf4": ((80,), U8)},
        "4-bit weights of bitsandbytes",
    ),
    "bitsandbytes fp4": (
        {"weight": ((1024, 1), U8), "weight.absmax": ((32,), F32), "weight.quant_state.bitsandbytes__fp4": ((9,), U8)},
        "4-bit weights of bitsandbytes",
    ),
    "NVFP4 of ModelOpt": (
        {"weight": ((32, 32), U8), "weight_scale": ((32, 4), FP8), "weight_scale_2": ((), F32), "input_scale": ((), F32)},
        "NVFP4",
    ),
    "NVFP4 of compressed-tensors": (
        {"weight_packed": ((32, 32), U8), "weight_scale": ((32, 4), FP8), "weight_global_scale": ((1,), F32)},
        "compressed-tensors",
    ),
    "fp4 of DeepSeek": ({"weight": ((32, 32), I8), "scale": ((32, 2), torch.float8_e8m0fnu)}, "weight, int8"),
    "MXFP4": ({"weight_blocks": ((32, 2, 16), U8), "weight_scales": ((32, 2), U8)}, "mxfp4"),
    "MXFP4 of Quark": ({"weight": ((32, 32), U8), "weight_scale": ((32, 2), U8)}, "weight, uint8"),
    "MLX": ({"weight": ((32, 8), torch.uint32), "scales": ((32, 1), F16), "biases": ((32, 1), F16)}, "weight, uint32"),
    "ExLlama 2": ({"q_weight": ((8, 32), I32), "q_scale": ((1, 4), I32), "q_invperm": ((64,), I16)}, "ExLlama"),
    "ExLlama 3": ({"trellis": ((4, 2, 64), I16), "suh": ((64,), F16), "svh": ((32,), F16)}, "ExLlama"),
    "QuIP#": ({"Qidxs": ((32, 8), I64), "SU": ((64,), F16), "SV": ((32,), F16)}, "QuIP#"),
    "torchao": ({"_weight_qdata": ((32, 64), I8), "_weight_scale": ((32, 1), F32)}, "torchao"),
    "torchao fp8": ({"weight:qdata": ((32, 64), FP8), "weight:scale": ((32, 1), F32)}, "torchao"),
    "Marlin": ({"B": ((4, 64), I32), "s": ((1, 32), F16)}, r"layer\.B, int32"),
}  # fmt: skip
"""The tensors of one layer in each format, and what the error says of them."""


def values(parts: Parts, prefix: str = "layer.") -> dict[str, Tensor]:
    tensors = {}
    for name, (shape, dtype) in parts.items():
        nbytes = torch.empty(shape, dtype=dtype).nbytes
        raw = torch.arange(nbytes).add(sum(map(ord, name))).remainder(59).byte()
        tensors[f"{prefix}{name}"] = raw.view(dtype).reshape(shape)
    return tensors


def plain(device: str = "cpu") -> nn.Module:
    model = Tree({"layer.weight": torch.empty(WEIGHT, dtype=BF16), "norm": torch.empty(3)})
    if device != "meta":
        model.to_empty(device=device)
        for parameter in model.parameters():
            nn.init.constant_(parameter, 7)
    return model


@pytest.mark.parametrize("case", LAYOUTS)
def test_packed_weights_are_refused_by_a_plain_model_and_copied_into_a_packed_one(case: str) -> None:
    parts, what = LAYOUTS[case]
    state = {**values(parts), "norm": torch.arange(3.0)}
    for device, options in (("meta", LAX), ("cpu", LAX), ("cpu", {"strict": False}), ("cpu", {})):
        model = plain(device)
        with pytest.raises(ModelMismatch, match=f"has layer.weight as .*{what}.*, which epload does not unpack"):
            epload.load(model, state, progress=False, **options)
        assert all(p.is_meta if device == "meta" else bool((p == 7).all()) for p in model.parameters())
    packed = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    epload.load_state(packed, state, progress=False)
    assert differing(packed, state) == []


@pytest.mark.parametrize("scale", ["weight_scale", "SCB"])
def test_int8_weights_are_not_copied_as_integers(scale: str) -> None:
    """Scales of integers are not applied, and their values alone are not the weight."""
    state = {"layer.weight": torch.ones(WEIGHT, dtype=I8), f"layer.{scale}": torch.ones(32), "norm": torch.ones(3)}
    with pytest.raises(ModelMismatch, match=r"layer\.weight is int8 in the checkpoint"):
        epload.load(plain(), state, progress=False, **LAX)


def test_the_method_of_an_unknown_format_is_named(tmp_path: Path) -> None:
    """The configuration tells that these are parts of weights, though there are no integers."""
    state = {"layer.a": torch.ones(32, 4), "layer.b": torch.ones(4, 64), "norm": torch.ones(3)}
    save_file(state | {"steps": torch.ones(2).int()}, tmp_path / "model.safetensors")
    load = partial(epload.load, plain(), tmp_path, strict=False, progress=False)
    assert load().missing_keys == ["layer.weight"]
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "new_method"}}))
    must_be_refused(load, "ModelMismatch", "has layer.weight as a packed weight of new_method (layer.a, float32)")


def test_what_only_resembles_packed_weights_is_loaded() -> None:
    """A layer that the checkpoint has packed and the model lacks, counters, indices next to a weight that is missing, and a
    head of another size."""
    state = {
        **values(LAYOUTS["GPTQ"][0], "text."),
        "layer.weight": torch.ones(WEIGHT, dtype=BF16),
        "layer.steps": torch.tensor(3),
        "norm": torch.ones(3),
        "head.weight": torch.ones(5, 2),
        "head.label_ids": torch.arange(5),
        "codes.index": torch.arange(6).reshape(2, 3),
    }
    target = {"layer.weight": torch.empty(WEIGHT, dtype=BF16), "norm": torch.empty(3), "head.weight": torch.empty(4, 2)}
    model = Tree(target | {"codes.index": torch.zeros(2, 3).long(), "codes.weight": torch.empty(6, 5)})
    model.to_empty(device="cpu")
    report = epload.load(model, state, progress=False, **LAX)
    assert (list(report.mismatched_keys), report.missing_keys) == (["head.weight"], ["codes.weight"])
    assert torch.equal(model.codes.index, state["codes.index"])
    assert torch.equal(model.layer.weight, state["layer.weight"])


@on_ranks(2)
def test_packed_experts_are_refused_on_every_rank(rank: int) -> None:
    """Experts that are fused in the model, and not in the checkpoint."""
    model = on_meta(lambda: MixtralForCausalLM(config("mixtral", num_hidden_layers=1, num_local_experts=2)))
    state = {n: torch.zeros(t.shape) for n, t in model.state_dict().items() if ".experts." not in n}
    for expert, name in product(range(2), ("w1", "w2", "w3")):
        state |= values(LAYOUTS["GPTQ"][0], f"model.layers.0.block_sparse_moe.experts.{expert}.{name}.")
    gate = next(name for name in state if "gate.weight" in name)
    state["model.layers.0.block_sparse_moe.gate.weight"] = state.pop(gate)
    fully_shard(model, mesh=mesh(("all", 2)))
    loader = epload.HierarchicalLoader(epload.Topology.from_nodes([[0], [1]]), progress=False)
    load = partial(loader.load, model, state if rank == 0 else None, **LAX)
    must_be_refused_by_all(load, "gate_up_proj as packed int4 weights of GPTQ or AWQ")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_mxfp4_experts_of_gpt_oss_are_refused() -> None:
    model = GptOssForCausalLM(config("gpt_oss", num_hidden_layers=1, num_local_experts=2))
    state = dict(model.state_dict())
    for name in ("gate_up_proj", "down_proj"):
        key = f"model.layers.0.mlp.experts.{name}"
        rows = state.pop(key).shape[2]
        state[f"{key}_blocks"] = torch.zeros(2, rows, 1, 16, dtype=U8)
        state[f"{key}_scales"] = torch.zeros(2, rows, 1, dtype=U8)
    with pytest.raises(ModelMismatch, match=r"experts\.\w+_proj as packed mxfp4 weights: .*Mxfp4Config"):
        epload.load(model, state, progress=False, **LAX)


def test_a_quantized_layer_of_transformers_is_copied() -> None:
    model = nn.Module()
    model.layer = BitLinear(64, 32, bias=False)
    state = values({name: (tuple(b.shape), b.dtype) for name, b in model.layer.named_buffers()})
    assert state["layer.weight"].dtype is U8
    epload.load(model, state, progress=False)
    assert differing(model, state) == []
