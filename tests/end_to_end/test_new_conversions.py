"""Models whose conversions the newest transformers added: loaded from checkpoints as their authors have them, and saved."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import epload
from epload import ModelMismatch
from support import ranks
from support.failures import error_of
from support.findings import differing

_SHARED = {"vocab_size": 70, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
_INKLING = _SHARED | {
    "unpadded_vocab_size": 66, "num_hidden_layers": 3, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2,
    "swa_head_dim": 8, "d_rel": 4, "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 2,
    "layer_types": ["hybrid_sliding", "hybrid", "hybrid"], "eos_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "dory": _SHARED | {
        "intermediate_size": 48, "num_hidden_layers": 6, "layer_types": ["sliding_attention", "mlp"] * 3, "n_input_layers": 2,
        "n_recurrent_layers": 2, "n_output_layers": 2,
    },
    "inkling2_text": _INKLING,
    "inkling2_loop_text": _INKLING | {
        "loop_layer_index_start": 1, "loop_layer_index_end": 3, "n_layers_per_attn_res_block": 1, "loop_gate_rank": 4,
    },
    "lara_mini": _SHARED | {
        "num_hidden_layers": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "num_experts": 6,
        "layer_types": ["linear_attention", "full_attention"], "eos_token_id": 1,
    },
    "sarvam_moe": _SHARED | {"num_hidden_layers": 2, "intermediate_size": 48, "moe_intermediate_size": 24, "num_experts": 6},
    "exaone": _SHARED | {"num_hidden_layers": 2, "intermediate_size": 48, "eos_token_id": 1, "bos_token_id": 0},
    "mixtral": _SHARED | {"num_hidden_layers": 2, "intermediate_size": 48, "num_local_experts": 6},
}  # fmt: skip
KINDS = [kind for kind in CONFIGS if kind in CONFIG_MAPPING]
"""Families that the installed transformers has; every supported version has the last."""


def config(kind: str) -> Any:
    return AutoConfig.for_model(kind, **CONFIGS[kind])


def random(kind: str) -> Any:
    model = AutoModelForCausalLM.from_config(config(kind)).eval()
    torch.manual_seed(5)
    for tensor in (*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())):
        tensor.data.copy_(torch.randn(tensor.shape))
    return model


def collapsed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of a Dory model under the names of its authors: two layers for each layer."""
    names = {"lambda_1": "attn_alpha", "lambda_2": "mlp_alpha", "self_attn": "mixer", "mlp": "mixer"}
    renamed = {}
    for name, tensor in tensors.items():
        parts = name.split(".")
        if "layers" in parts:
            number, part = parts.index("layers") + 1, parts.index("layers") + 2
            if parts[part] in names:
                odd = parts[part] in ("mlp", "lambda_2")
                parts[number], parts[part] = str(2 * int(parts[number]) + odd), names[parts[part]]
        renamed[".".join(parts)] = tensor
    assert renamed.keys() != tensors.keys()
    return {name: tensor.contiguous() for name, tensor in renamed.items()}


def on_meta(kind: str) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config(kind)).eval()


@pytest.mark.parametrize("kind", KINDS)
def test_loads_and_saves_as_the_library_does(kind: str, tmp_path: Path) -> None:
    original = random(kind)
    original.save_pretrained(tmp_path / "theirs")
    epload.save(original, tmp_path / "ours")
    ours, theirs = (load_file(tmp_path / name / "model.safetensors") for name in ("ours", "theirs"))
    assert differing(ours, theirs) == []
    if kind == "dory":
        save_file(collapsed(theirs), tmp_path / "theirs/model.safetensors", {"format": "pt"})
    model = on_meta(kind)
    epload.load(model, tmp_path / "theirs", progress=False)
    for expected in (original, AutoModelForCausalLM.from_pretrained(tmp_path / "theirs")):
        assert differing(model, expected) == []
    if kind == "inkling2_loop_text":  # whose experts may be quantized
        (name,) = [name for name in theirs if name.endswith("layers.2.mlp.experts.w2_weight")]
        theirs[f"{name}_scale"] = torch.full((6, 32, 1), 127, dtype=torch.uint8)
        save_file(theirs, tmp_path / "theirs/model.safetensors", {"format": "pt"})
        with pytest.raises(ModelMismatch, match=r"w2_weight_scale.*Inkling2LoopDequantizeExperts is not supported"):
            epload.load(on_meta(kind), tmp_path / "theirs", strict=False, progress=False)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=torch.arange(1, 9)[None], use_cache=False).logits


def divide_fused_experts(rank: int, folder: str) -> tuple[list[str], float]:
    """Returns what loads with two plans raise, and how far logits with the second are from those of one process."""
    from transformers.distributed import DistributedConfig

    whole = AutoModelForCausalLM.from_pretrained(folder).eval()
    models, texts = [], []
    for style in ("colwise", "packed_colwise"):
        plan = {name: style if name.endswith("gate_up_proj") else how for name, how in whole.tp_plan.items()}
        model = on_meta("inkling2_text")
        options, _, manager = model.prepare_distribute_model(DistributedConfig(tp_size=2, tp_plan=plan), None)
        models.append(model.maybe_distribute_model(model, options, manager))
        texts.append(error_of(lambda: epload.load(models[-1], folder, progress=False)))
    return texts, float((logits(models[1]) - logits(whole)).abs().max())


@pytest.mark.skipif("inkling2_text" not in KINDS, reason="this transformers has no such model")
def test_a_plan_that_divides_fused_experts_in_consecutive_rows_is_rejected(tmp_path: Path) -> None:
    """Loaded by their placements they are on other ranks than the library's loader puts them, and logits differ."""
    model = random("inkling2_text")
    model.save_pretrained(tmp_path)
    scale = float(logits(model).abs().max())
    for (error, loaded), distance in ranks.run(2, divide_fused_experts, str(tmp_path)):
        assert re.search(r'gate_up_proj is divided by Shard\(dim=1\).*change "colwise" to "packed_colwise"', error)
        assert loaded == ""
        assert distance < 1e-4 * scale
