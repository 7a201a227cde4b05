"""SGLang's models filled by epload, against their own ``load_weights`` on poisoned memory."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engine import CONFIGS, computed, differences, make_checkpoint, make_model, make_rank
from transformers import LlamaConfig

import epload
from support import ranks
from support.memory import bytes_read
from support.pretrained import published
from support.recordings import copy_regions, manifest_of, tensors_of
from support.small_syncs import outcome

CASES = {
    "llama-tp": ("llama", 2, 1, 1),
    "tied-tp": ("qwen2_tied", 2, 1, 1),
    "tied-pp": ("qwen2_tied", 1, 1, 2),
    "qwen3-tp": ("qwen3", 2, 1, 1),
    "mixtral-tp-ep": ("mixtral", 2, 2, 1),
    "qwen3_moe-tp": ("qwen3_moe", 2, 1, 1),
    "qwen3_moe-tp-ep-pp": ("qwen3_moe", 2, 2, 2),
    "deepseek_v3-tp": ("deepseek_v3", 2, 1, 1),
    "deepseek_v3-tp-ep": ("deepseek_v3", 2, 2, 1),
}
"""The model, and how many ranks share its tensors, its experts and its layers."""
FP8_CONFIG = LlamaConfig(
    vocab_size=320, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    head_dim=64, tie_word_embeddings=False,
)  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def load(rank: int, folder: Path, tensor_parallel: int, expert_parallel: int) -> dict[str, Any]:
    from sglang.srt.configs.device_config import DeviceConfig
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import DefaultModelLoader, get_model_loader

    from epload.integrations.engine.recording import record
    from epload.integrations.sglang import register
    from epload.integrations.sglang.loader import SglangModelLoader
    from epload.integrations.sglang.model import SglangModel

    register()
    register()
    config = make_rank(folder, tensor_parallel, ep_size=expert_parallel)
    weights, expected = published(folder), make_model(config)
    DefaultModelLoader.load_weights_and_postprocess(expected, iter(weights.items()), torch.device("cpu"))
    left = [name for name, tensor in expected.named_parameters() if tensor.isnan().any()]

    extra = json.dumps({"verify": expert_parallel > 1})
    loader = get_model_loader(LoadConfig(load_format="private", model_loader_extra_config=extra), config)
    assert isinstance(loader, SglangModelLoader)
    nbytes = []
    for _ in range(3):  # the first reads modules, too; where the machine is busy, one takes the store for slow
        before = bytes_read()
        loaded = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
        nbytes.append(bytes_read() - before)
    read = min(nbytes)

    recorded = make_model(config)
    target = SglangModel([recorded], torch.device("cpu"))
    recording = record(target.load_weights, manifest_of(weights), tensors_of(recorded))
    changed = [name for name, tensor in recorded.named_parameters() if not tensor.isnan().all()]
    recording.fill_constants(tensors_of(recorded))
    copy_regions(recording, tensors_of(recorded), weights)
    passed_through = {name: weights[name] for name in recording.passed_through}
    if passed_through:
        with torch.no_grad():
            target.load_weights(iter(passed_through.items()))
    target.finish()
    return {
        "unwritten": left,
        "changed by recording": changed,
        "passed through": sorted(passed_through),
        "loaded": differences(expected, loaded),
        "recorded": differences(expected, recorded),
        "computed": len(computed(expected)),
        "placed": sum(map(bool, recording.regions)),
        "read": read,
    }


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_as_its_load_weights_leaves_it(case: str, tmp_path: Path) -> None:
    name, tensor_parallel, expert_parallel, stages = CASES[case]
    make_checkpoint(tmp_path, CONFIGS[name])
    found = ranks.run(tensor_parallel * stages, load, tmp_path, tensor_parallel, expert_parallel)
    tensors = len(published(tmp_path))
    for rank in found:
        assert rank["unwritten"] == rank["changed by recording"] == rank["loaded"] == rank["recorded"] == []
        # DeepSeek's load_weights joins these two; what its post_load_weights computes is of no parameter.
        fused = name == "deepseek_v3"
        assert bool(rank["passed through"]) == fused
        assert all("q_a_proj" in key or "kv_a_proj" in key for key in rank["passed through"]), rank
        assert rank["placed"] < tensors if expert_parallel * stages > 1 or fused else rank["placed"] == tensors, rank
    if case in ("llama-tp", "tied-tp", "qwen3-tp"):
        size = (tmp_path / "model.safetensors").stat().st_size
        # Next to the shards: the header, what both ranks keep, gaps in narrow rows, and reads that time the store.
        assert sum(rank["read"] for rank in found) <= 1.6 * size, (size, found)
    if name == "deepseek_v3":
        assert found[0]["computed"] >= 2 * CONFIGS[name].num_hidden_layers


def load_fp8(rank: int, folder: Path) -> dict[str, Any]:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    from epload.errors import ModelMismatch
    from epload.integrations.sglang import register
    from epload.integrations.sglang.model import SglangModel, check_updatable

    register()
    config = make_rank(folder, 1, dtype="bfloat16")
    weights, expected, model = published(folder), make_model(config), make_model(config)
    expected.load_weights(iter(weights.items()))
    loader = get_model_loader(LoadConfig(load_format="private"), config)
    loader.fill(SglangModel([model], torch.device("cpu")), config)
    with pytest.raises(ModelMismatch) as error:
        check_updatable(model)
    return {
        "differs": differences(expected, model),
        "scales": sum("weight_scale_inv" in name for name in tensors_of(model)),
        "refused": str(error.value),
    }


def test_an_fp8_checkpoint_fills_what_its_load_weights_fills(tmp_path: Path) -> None:
    """Before SGLang processes the weights, for which a CPU needs AMX."""
    from epload.mapping import Quantize

    make_checkpoint(tmp_path / "bf16", FP8_CONFIG)
    epload.convert(tmp_path / "bf16", tmp_path / "fp8", quantize=Quantize(FP8))
    settings = json.loads((tmp_path / "bf16" / "config.json").read_text())
    (tmp_path / "fp8" / "config.json").write_text(json.dumps(settings | {"quantization_config": FP8}))
    found = ranks.run(1, load_fp8, tmp_path / "fp8")[0]
    assert found["differs"] == []
    assert found["scales"] == 4 * FP8_CONFIG.num_hidden_layers
    assert "is quantized by Fp8LinearMethod" in found["refused"]


def refuse(rank: int, folder: Path) -> list[str]:
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import get_model_loader

    from epload.integrations.sglang import register
    from epload.integrations.sglang.model import SglangModel

    register()
    config = make_rank(folder, 1)
    texts = []
    for options in ({"model_loader_extra_config": {"verfy": True}}, {"download_dir": str(folder)}):
        texts.append(outcome(lambda: get_model_loader(LoadConfig(load_format="private", **options), config)))  # noqa: B023
    loader, model = get_model_loader(LoadConfig(load_format="private"), config), make_model(config)
    for changes, quantization in (({"secondary_weights": ["another"]}, None), ({}, "fp8"), ({}, "gptq")):
        vars(model).update(changes)
        config.quantization = quantization
        if quantization == "gptq":
            config.hf_config.quantization_config = {}
        texts.append(outcome(partial(loader.fill, SglangModel([model], torch.device("cpu")), config)))
        for name in changes:
            delattr(model, name)
    return texts


def test_what_the_loader_does_not_do_is_refused_by_name(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, CONFIGS["llama"])
    texts = ranks.run(1, refuse, tmp_path)[0]
    expected = [
        "got verfy",
        "HF_HUB_CACHE",
        "a second checkpoint",
        "with fp8 while it is loaded",
        "quantized with gptq",
    ]
    assert [part for part, text in zip(expected, texts, strict=True) if part not in text] == []
