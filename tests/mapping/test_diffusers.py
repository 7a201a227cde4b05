"""Compares models of diffusers with its own ``from_pretrained`` and ``save_pretrained``: dtypes, files and configuration."""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import init_empty_weights
from click.testing import CliRunner
from diffusers import (
    Flux2Transformer2DModel,
    ParallelConfig,
    SD3Transformer2DModel,
    TensorParallelConfig,
    UNet2DModel,
    WanTransformer3DModel,
)
from diffusers.hooks import apply_group_offloading
from diffusers.hooks.tensor_parallel import apply_tensor_parallel
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import epload
from epload.cli.main import main
from support.checks import full_tensor
from support.findings import differing, must_be_refused, not_refused_by_all
from support.on_ranks import on_ranks

WAN: dict[str, Any] = {
    "patch_size": (1, 2, 2), "num_attention_heads": 2, "attention_head_dim": 12, "in_channels": 4, "out_channels": 4,
    "text_dim": 16, "freq_dim": 16, "ffn_dim": 32, "num_layers": 2, "cross_attn_norm": True, "rope_max_seq_len": 32,
}  # fmt: skip
"""Keeps norms, time embeddings and tables of shifts in float32."""
UNET: dict[str, Any] = {
    "sample_size": 8, "layers_per_block": 1, "block_out_channels": (8, 16), "norm_num_groups": 4,
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}  # fmt: skip
"""Keeps nothing in float32."""
SD3: dict[str, Any] = {
    "sample_size": 8, "num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "caption_projection_dim": 16,
    "joint_attention_dim": 8, "pooled_projection_dim": 16, "out_channels": 4, "in_channels": 4, "pos_embed_max_size": 8,
}  # fmt: skip
"""Has a persistent buffer, whose storage ``init_empty_weights`` makes in float32."""
FLUX2: dict[str, Any] = {
    "in_channels": 8, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 8, "num_attention_heads": 2,
    "joint_attention_dim": 16, "timestep_guidance_channels": 16, "axes_dims_rope": (2, 2, 2, 2),
}  # fmt: skip
"""Has matrices of several blocks that diffusers divides by tensor parallelism."""
MODELS = {"wan": (WanTransformer3DModel, WAN), "unet": (UNet2DModel, UNET), "sd3": (SD3Transformer2DModel, SD3)}


@pytest.fixture(params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder that diffusers has written, in several files."""
    kind, config = MODELS[request.param]
    torch.manual_seed(0)
    model = kind(**config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "saved", max_shard_size="20KB")
    return tmp_path / "saved"


def kind_of(folder: Path) -> Any:
    name = json.loads((folder / "config.json").read_text())["_class_name"]
    return next(kind for kind, _ in MODELS.values() if kind.__name__ == name)


def empty(folder: Path) -> Any:
    kind = kind_of(folder)
    with init_empty_weights():
        return kind.from_config(kind.load_config(folder))


def pretrained(folder: Path, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    state: dict[str, torch.Tensor] = kind_of(folder).from_pretrained(folder, torch_dtype=dtype).state_dict()
    return state


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_load_gives_the_dtypes_of_from_pretrained(folder: Path, dtype: torch.dtype) -> None:
    model, expected = empty(folder), pretrained(folder, dtype)
    report = epload.load(model, folder, dtype=dtype, progress=False)
    assert differing(model.state_dict(), expected) == []
    in_fp32 = {name for name, tensor in expected.items() if tensor.dtype == torch.float32}
    if dtype != torch.float32:
        assert set(report.kept_in_fp32) == in_fp32
    assert bool(in_fp32) == (dtype == torch.float32 or isinstance(model, WanTransformer3DModel))


def test_a_dict_of_dtypes_is_exact(folder: Path) -> None:
    model, pattern = empty(folder), "norm2|conv|linear"
    epload.load(model, folder, dtype={pattern: torch.bfloat16}, progress=False)
    for name, tensor in model.state_dict().items():
        assert tensor.dtype == (torch.bfloat16 if re.search(pattern, name) else torch.float32)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_what_is_saved_is_what_save_pretrained_writes(folder: Path, tmp_path: Path, dtype: torch.dtype | None) -> None:
    model = empty(folder)
    epload.load(model, folder, progress=False)
    epload.save(model, tmp_path / "ours", dtype=dtype, max_shard_bytes=20_000)
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    ours, theirs = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("ours", "theirs"))
    assert ours == theirs
    assert all(name.startswith(("diffusion_pytorch_model", "config.json")) for name in os.listdir(tmp_path / "ours"))
    assert (tmp_path / "ours" / "diffusion_pytorch_model.safetensors.index.json").exists()
    expected = pretrained(folder, dtype or torch.float32)
    assert differing(pretrained(tmp_path / "ours", dtype or torch.float32), expected) == []


def test_conversions_keep_names_and_what_from_pretrained_keeps_in_float32(folder: Path, tmp_path: Path) -> None:
    epload.convert(folder, tmp_path / "half", dtype="bf16", files=[folder / "config.json"])
    assert differing(pretrained(tmp_path / "half", torch.bfloat16), pretrained(folder, torch.bfloat16)) == []
    model = kind_of(folder).from_pretrained(folder)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    epload.save(model, tmp_path / "delta", base=folder)
    epload.convert(tmp_path / "delta", tmp_path / "whole")
    assert differing(pretrained(tmp_path / "whole", torch.float32), model.state_dict()) == []
    for name in ("half", "whole"):
        assert sorted(os.listdir(tmp_path / name)) == ["config.json", "diffusion_pytorch_model.safetensors"]


def test_the_plan_of_a_folder_builds_its_model(folder: Path) -> None:
    result = CliRunner().invoke(main, ["plan", str(folder), "--mesh", "fsdp=2", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["fit"]["matched"] == len(empty(folder).state_dict())


@pytest.mark.parametrize("name", ["Nothing", "utils", "WanPipeline"])
def test_a_configuration_of_no_model_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"_class_name": name}
    (folder / "config.json").write_text(json.dumps(config))
    for command in (["plan", str(folder)], ["convert", str(folder), str(tmp_path / "c"), "--dtype", "bf16"]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1
        assert f"has no model {name!r}" in result.stderr


def test_weights_that_are_offloaded_to_disk_are_rejected(folder: Path, tmp_path: Path) -> None:
    """The parameters are uninitialized memory between two forward passes."""
    cpu = torch.device("cpu")
    model = kind_of(folder).from_pretrained(folder)
    apply_group_offloading(model, cpu, cpu, "leaf_level", offload_to_disk_path=str(tmp_path / "disk"))
    for call in (lambda: epload.load(model, folder, progress=False), lambda: epload.save(model, tmp_path / "c")):
        with pytest.raises(epload.ModelMismatch, match="is offloaded by accelerate or diffusers"):
            call()


def save_wan(folder: Path) -> None:
    WanTransformer3DModel(**WAN).save_pretrained(folder / "wan")


@on_ranks(2, save_wan)
def test_a_model_under_fsdp2_is_saved_under_its_own_class(rank: int, tmp_path: Path) -> None:
    folder = tmp_path / "wan"
    expected, model = pretrained(folder, torch.bfloat16), empty(folder)
    for module in model.modules():  # each dtype in groups of its own
        if module is not model and (isinstance(module, nn.LayerNorm) or type(module).__name__ == "TimestepEmbedding"):
            fully_shard(module)
    fully_shard(model)
    exact = {"scale_shift_table": torch.bfloat16}  # which no group of its own can hold
    epload.load(model, folder, dtype={**exact, "time_emb|norm": torch.float32, ".": torch.bfloat16}, progress=False)
    state = {name: full_tensor(tensor) for name, tensor in model.state_dict().items()}
    epload.save(model, tmp_path / "sharded")
    again = WanTransformer3DModel.from_pretrained(tmp_path / "sharded").state_dict()
    assert json.loads((tmp_path / "sharded" / "config.json").read_text())["_class_name"] == "WanTransformer3DModel"
    rounded = [name for name in expected if "scale_shift_table" in name]
    assert [name for name in rounded if not torch.equal(state[name], expected[name].bfloat16())] == []
    assert [name for name in expected if not torch.equal(again[name], state[name].float())] == []


@on_ranks(1)
def test_a_group_of_two_dtypes_is_rejected(rank: int, folder: Path) -> None:
    load = partial(epload.load, fully_shard(empty(folder)), folder, dtype=torch.bfloat16, progress=False)
    if kind_of(folder) is WanTransformer3DModel:
        must_be_refused(load, "ModelMismatch", "from_pretrained keeps", "FSDP2 needs one dtype")
    else:
        load()


def test_keys_that_from_pretrained_ignores_are_no_error(tmp_path: Path) -> None:
    """Checkpoints of Wan 2.1 have a norm that the library's attention lacks."""
    model = WanTransformer3DModel(**WAN)
    state = model.state_dict() | {"blocks.0.attn2.norm_added_q.weight": torch.ones(24)}
    save_file(state, tmp_path / "diffusion_pytorch_model.safetensors")
    loaded = WanTransformer3DModel(**WAN)
    epload.load(loaded, tmp_path, progress=False)
    assert differing(loaded.state_dict(), model.state_dict()) == []


def test_old_names_of_attention_layers_are_those_that_from_pretrained_takes(tmp_path: Path) -> None:
    kind, config = MODELS["unet"]
    model = kind(**config)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    model.save_pretrained(tmp_path)
    file = tmp_path / "diffusion_pytorch_model.safetensors"
    old = {"to_q.": "query.", "to_k.": "key.", "to_v.": "value.", "to_out.0.": "proj_attn."}
    renamed = {
        re.sub(r"to_(q|k|v|out\.0)\.", lambda match: old[match[0]], name): tensor for name, tensor in load_file(file).items()
    }
    assert any(".proj_attn.bias" in name for name in renamed)
    save_file(renamed, file)
    loaded = empty(tmp_path)
    epload.load(loaded, tmp_path, progress=False)
    assert differing(loaded.state_dict(), model.state_dict()) == []
    assert differing(pretrained(tmp_path, torch.float32), model.state_dict()) == []
    epload.save(loaded, tmp_path / "saved")
    assert set(load_file(tmp_path / "saved" / file.name)) == set(model.state_dict())


@on_ranks(2)
def test_matrices_that_diffusers_divides_block_by_block_are_rejected(rank: int, tmp_path: Path) -> list[str]:
    """Its tensor parallelism asks for a GPU, and calls consecutive what is not."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = Flux2Transformer2DModel(**FLUX2)
    config = TensorParallelConfig(tp_degree=2, mesh=mesh)
    config.setup(rank, 2, torch.device("cpu"), mesh=mesh)
    with mock.patch("diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES", ("cpu",)):
        apply_tensor_parallel(model, config, model._tp_plan)
    model._parallel_config = ParallelConfig(tensor_parallel_config=config)
    state = {name: torch.zeros(tensor.shape) for name, tensor in model.state_dict().items()} if rank == 0 else None
    calls = (lambda: epload.load(model, state, progress=False), lambda: epload.save(model, tmp_path / "c"))
    return [problem for call in calls for problem in not_refused_by_all(call, "ModelMismatch", "block by block")]
