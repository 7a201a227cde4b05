"""SGLang's models filled by epload, against their own ``load_weights`` on poisoned memory."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import CONFIGS, make_checkpoint, make_model, make_rank, poison, read_checkpoint
from transformers import LlamaConfig

from support import ranks
from support.recordings import copy_regions, manifest_of, same_bits, tensors_of

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
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def computed(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that are neither parameters nor buffers, such as those that ``post_load_weights`` makes."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def bytes_read() -> int:
    """By read calls, from files and the page cache."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["rchar"])


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
    weights, expected = read_checkpoint(folder), make_model(config)
    DefaultModelLoader.load_weights_and_postprocess(expected, iter(weights.items()), torch.device("cpu"))
    left = [name for name, tensor in expected.named_parameters() if tensor.isnan().any()]

    loader = get_model_loader(LoadConfig(load_format="private", model_loader_extra_config='{"verify": true}'), config)
    assert isinstance(loader, SglangModelLoader)
    before = bytes_read()
    loaded = loader.load_model(model_config=config, device_config=DeviceConfig("cpu"))
    read = bytes_read() - before

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


def differences(expected: torch.nn.Module, found: torch.nn.Module) -> list[str]:
    tensors = tensors_of(found) | computed(found)
    reference = tensors_of(expected) | computed(expected)
    assert tensors.keys() == reference.keys()
    return [name for name, tensor in reference.items() if not same_bits(tensor, tensors[name])]


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_as_its_load_weights_leaves_it(case: str, tmp_path: Path) -> None:
    name, tensor_parallel, expert_parallel, stages = CASES[case]
    make_checkpoint(tmp_path, CONFIGS[name])
    found = ranks.run(tensor_parallel * stages, load, tmp_path, tensor_parallel, expert_parallel)
    tensors = len(read_checkpoint(tmp_path))
    for rank in found:
        assert rank["unwritten"] == rank["changed by recording"] == rank["loaded"] == rank["recorded"] == []
        # DeepSeek's load_weights joins these two; what its post_load_weights computes is of no parameter.
        fused = name == "deepseek_v3"
        assert all("q_a_proj" in key or "kv_a_proj" in key for key in rank["passed through"]), rank
        assert bool(rank["passed through"]) == fused
        assert rank["placed"] < tensors if expert_parallel * stages > 1 or fused else rank["placed"] == tensors, rank
    if name == "deepseek_v3":
        assert found[0]["computed"] >= 2 * CONFIGS[name].num_hidden_layers
