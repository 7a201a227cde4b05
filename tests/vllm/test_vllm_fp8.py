"""fp8 engines of vLLM and a trainer in bfloat16 that quantizes, against vLLM's own load of each version's fp8 checkpoint.

The environment lacks the compiled operation that packs fp8 weights for CPUs: one that reverses rows is in its place.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from engine import calls, make_checkpoint, make_engine, make_trainer
from transformers import LlamaConfig, Qwen3MoeConfig

import epload
from epload.mapping import Quantize
from support.jobs import Job, Meeting, run
from support.pretrained import published
from support.recordings import same_bits, tensors_of

VERSIONS = (1, 2, 3)
BLOCKS = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": [f"model.layers.{i}.mlp.gate" for i in range(2)],  # routers, which vLLM else quantizes
}
# vLLM demands that blocks do not cross the shards of a fused or divided dim; the hidden size ends within a block.
SIZES: dict[str, Any] = {
    "hidden_size": 192,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 256,
    "vocab_size": 67,
    "tie_word_embeddings": False,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3_moe": Qwen3MoeConfig(moe_intermediate_size=256, num_experts=4, num_experts_per_tok=2, **SIZES),
}


def train(rank: int, meeting: Meeting, folder: Path) -> list[Any]:
    """Sends and saves versions of a sharded model; returns the bytes that each sent."""
    rule = Quantize(BLOCKS)
    model, engine = make_trainer(meeting, folder, 2, verify=True, mapping=rule, delta="auto")
    sent: list[Any] = []
    send = engine._sender.send_weights
    engine._sender.send_weights = lambda version: sent.append(send(version))
    for version in VERSIONS:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.to_local().view(-1)[version::1009] = 0  # few values and scales, once they are quantized
        epload.save(model, folder / f"version-{version}", mapping=rule)
        engine.send_weights()
        dist.barrier()
    engine.shutdown()
    return [report.wire_bytes for report in sent]


def serve(rank: int, meeting: Meeting, folder: Path, expert_parallel: bool) -> dict[str, Any]:
    """A worker of 2, tensor parallel; returns the names of what differs from its own load of each version's checkpoint."""
    from vllm.config import set_current_vllm_config
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading

    from epload.integrations import vllm as adapter

    adapter.register()
    pack_on_any_cpu()
    own_folder = folder / f"engine-{rank}"
    own_folder.mkdir()
    settings = json.loads((folder / "config.json").read_text())
    (own_folder / "config.json").write_text(json.dumps(settings | {"quantization_config": BLOCKS}))
    transfer_config = WeightTransferConfig(backend="epload")
    model, config = make_engine(own_folder, 2, "bfloat16", expert_parallel, weight_transfer_config=transfer_config)
    record_metadata_for_reloading(model)
    device = torch.device("cpu")

    with set_current_vllm_config(config):
        process_weights_after_loading(model, config.model_config, device)
    engine = WeightTransferEngineFactory.create_engine(config.weight_transfer_config, config, device, model)
    differences: list[list[str]] = []
    for method, arguments in calls(meeting, rank, 1 + 3 * len(VERSIONS)):
        with set_current_vllm_config(config):
            if method == "init_weight_transfer_engine":
                engine.init_transfer_engine(engine.parse_init_info(*arguments))
            else:
                getattr(engine, method)(*arguments)
            if method == "finish_weight_update":
                config.compilation_config.static_forward_context.clear()  # for a second model
                expected = initialize_model(vllm_config=config)
                weights = published(folder / f"version-{len(differences) + 1}")
                expected.load_weights(iter(weights.items()))
                process_weights_after_loading(expected, config.model_config, device)
                tensors = tensors_of(model)
                assert tensors.keys() == tensors_of(expected).keys()
                differences.append(
                    [name for name, tensor in tensors_of(expected).items() if not same_bits(tensor, tensors[name])]
                )
    engine.shutdown()
    scales = {name.rpartition(".")[0].rpartition(".")[2] for name in tensors if name.endswith("weight_scale_inv")}
    return {"differences": differences, "layers with scales": scales}


def pack_on_any_cpu() -> None:
    """Lets vLLM choose its fp8 kernels for CPUs with AMX; the weights are packed, but nothing is computed with them."""
    from vllm import _custom_ops

    torch.library.define("_C::convert_weight_packed", "(Tensor weight) -> Tensor")
    torch.library.impl("_C::convert_weight_packed", "CPU", lambda weight: weight.view(torch.uint8).flip(-1).view(weight.dtype))
    torch.cpu._is_amx_tile_supported = lambda: True
    _custom_ops._supports_cpu_fp8_w8a16 = True


@pytest.mark.parametrize(
    ("name", "expert_parallel"),
    [("llama", False), ("qwen3_moe", False), ("qwen3_moe", True)],
    ids=["llama", "tp", "ep"],
)
def test_an_fp8_engine_holds_what_its_own_loader_gives(name: str, expert_parallel: bool, tmp_path: Path) -> None:
    """2 FSDP ranks, which quantize and send what has changed, to 2 workers."""
    make_checkpoint(tmp_path, CONFIGS[name])
    sent, found = run([Job(2, train, (tmp_path,)), Job(2, serve, (tmp_path, expert_parallel))], limit=240)
    mlp = {"gate_up_proj", "down_proj"} if name == "llama" else {"routed_experts"}
    quantized = {"qkv_proj", "o_proj", *mlp}
    assert found == [{"differences": [[]] * len(VERSIONS), "layers with scales": quantized}] * 2
    full, *changes = map(sum, zip(*sent, strict=True))
    in_bf16 = (tmp_path / "model.safetensors").stat().st_size
    assert full <= 0.55 * in_bf16, (full, in_bf16)  # the embedding and the head stay
    assert max(changes) <= 0.05 * full, (changes, full)
