"""SGLang's own model classes on CPU ranks over gloo, and checkpoints for them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import DeepseekV3Config, LlamaConfig, MixtralConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from support.pretrained import save_random
from support.recordings import poison, same_bits, tensors_of

os.environ.update(SGLANG_USE_CPU_ENGINE="1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
# An entry for each rank, or these may not outnumber the NUMA nodes.
os.environ["SGLANG_CPU_OMP_THREADS_BIND"] = "0|1|0|1"

SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "rope_theta": 10000.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
CONFIGS = {
    "llama": LlamaConfig(vocab_size=323, tie_word_embeddings=False, head_dim=16, **SMALL),
    "qwen2_tied": Qwen2Config(vocab_size=323, tie_word_embeddings=True, **SMALL),
    "qwen3": Qwen3Config(vocab_size=323, tie_word_embeddings=False, head_dim=16, **SMALL),
    "mixtral": MixtralConfig(vocab_size=320, num_local_experts=8, num_experts_per_tok=2, **SMALL),
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=320, moe_intermediate_size=64, num_experts=8, num_experts_per_tok=2, head_dim=16,
        tie_word_embeddings=False, **SMALL,
    ),
    "deepseek_v3": DeepseekV3Config(
        vocab_size=323, moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, n_group=2, topk_group=1,
        first_k_dense_replace=1, moe_layer_freq=1, topk_method="noaux_tc", scoring_func="sigmoid", rope_parameters=YARN,
        q_lora_rank=32, kv_lora_rank=32, qk_rope_head_dim=16, qk_nope_head_dim=16, v_head_dim=16,
        **(SMALL | {"num_key_value_heads": 4}),
    ),
    # Embeddings of 40 MB, so that a version takes several buckets.
    "large": LlamaConfig(vocab_size=10240, tie_word_embeddings=False, head_dim=128, **(SMALL | {"hidden_size": 512})),
}  # fmt: skip


def make_checkpoint(folder: Path, config: Any, seed: int = 0, std: float = 1.0) -> None:
    """Writes a transformers model's configuration and checkpoint, whose elements are random."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    save_random(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder, std=std)


def server_arguments(folder: Path, tensor_parallel: int, **arguments: Any) -> dict[str, Any]:
    """Arguments of SGLang's ServerArgs and Engine that work on CPU."""
    return {
        "model_path": str(folder),
        "skip_tokenizer_init": True,
        "device": "cpu",
        "tp_size": tensor_parallel,
        "dtype": "float32",
        "attention_backend": "torch_native",
        "disable_cuda_graph": True,
        "mem_fraction_static": 0.05,
        "max_total_tokens": 512,
        "context_length": 128,
        **arguments,
    }


def make_rank(folder: Path, tensor_parallel: int, **arguments: Any) -> Any:
    """Makes SGLang's groups of this rank and returns its configuration of the model. Pipeline stages are what else there is."""
    from sglang.srt.distributed import bootstrap
    from sglang.srt.runtime_context import get_server_args

    config = set_arguments(folder, tensor_parallel, **arguments)
    bootstrap.init_parallel_runtime(server_args=get_server_args(), device="cpu", dist_port=0)
    bootstrap.init_layer_runtime(model_config=config)
    return config


def set_arguments(folder: Path, tensor_parallel: int, **arguments: Any) -> Any:
    """Sets the arguments of a server as this process's; returns the configuration of the model."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.runtime_context import SpawnRanks, publish
    from sglang.srt.server_args import ServerArgs

    stages = dist.get_world_size() // tensor_parallel
    server = ServerArgs(**server_arguments(folder, tensor_parallel, pp_size=stages, load_format="dummy", **arguments))
    publish(server, role="scheduler", ranks=SpawnRanks(world_rank=dist.get_rank(), gpu_id=dist.get_rank(), dp_rank=None))
    return ModelConfig.from_server_args(server)


def make_model(config: Any) -> nn.Module:
    """This rank's part of the model, poisoned: what load_weights does not write is NaN."""
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.model_loader.loader import _get_quantization_config, _initialize_model
    from sglang.srt.model_loader.utils import set_default_torch_dtype

    load_config = LoadConfig()
    with set_default_torch_dtype(config.dtype):
        model: nn.Module = _initialize_model(config, load_config, _get_quantization_config(config, load_config))
    poison(model)
    return model


def computed(model: nn.Module) -> dict[str, Tensor]:
    """Tensors that are neither parameters nor buffers, such as those that ``post_load_weights`` makes."""
    return {
        f"{path}.{name}": value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, Tensor)
    }


def differences(expected: nn.Module, found: nn.Module) -> list[str]:
    tensors = tensors_of(found) | computed(found)
    reference = tensors_of(expected) | computed(expected)
    assert tensors.keys() == reference.keys()
    return [name for name, tensor in reference.items() if not same_bits(tensor, tensors[name])]
