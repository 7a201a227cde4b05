"""vLLM's own model classes on CPU ranks over gloo."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import DeepseekV3Config, LlamaConfig, Qwen2Config, Qwen3MoeConfig

from support.jobs import Meeting
from support.pretrained import fsdp, published, save_random
from support.recordings import poison, same_bits, tensors_of

os.environ.update(VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="WARNING", HF_HUB_OFFLINE="1")


SMALL: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(
        vocab_size=320,
        moe_intermediate_size=64,  # which the CPU kernels need not pad
        num_experts=8,
        num_experts_per_tok=2,
        tie_word_embeddings=False,
        **SMALL,
    ),
    # Its attention has matrices that vLLM computes after loading.
    "deepseek_v3": DeepseekV3Config(
        vocab_size=320,
        moe_intermediate_size=128,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=16,
        qk_nope_head_dim=16,
        v_head_dim=16,
        num_nextn_predict_layers=0,
        topk_method="noaux_tc",
        scoring_func="sigmoid",
        moe_layer_freq=1,
        **(SMALL | {"num_key_value_heads": 4}),
    ),
    "llama": LlamaConfig(vocab_size=323, tie_word_embeddings=False, **SMALL),
    "llama_biased": LlamaConfig(vocab_size=323, tie_word_embeddings=False, attention_bias=True, **SMALL),
    "llama_tied": LlamaConfig(vocab_size=323, tie_word_embeddings=True, **SMALL),
    # A Qwen2 with a layer that predicts a second token, which is the engine's draft.
    "mimo": Qwen2Config(vocab_size=323, tie_word_embeddings=False, num_nextn_predict_layers=1, **SMALL),
}


def make_checkpoint(folder: Path, config: Any) -> None:
    """Writes a transformers model's configuration and checkpoint, whose elements are random."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = with_draft(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16))
    save_random(model, folder, "MiMoForCausalLM" if has_draft(config) else "")


def has_draft(config: Any) -> bool:
    return bool(getattr(config, "num_nextn_predict_layers", 0))


def read_model(folder: Path) -> Any:
    """The trainer's model, which has the weights of the draft, too."""
    from transformers import AutoModelForCausalLM

    model = with_draft(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16))
    if has_draft(model.config):
        model.load_state_dict(published(folder))
    return model


def with_draft(model: Any) -> Any:
    if has_draft(model.config):
        layer, size = type(model.model.layers[0])(model.config, 0), model.config.hidden_size
        for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
            layer.add_module(name, type(model.model.norm)(size))
        layer.input_proj = nn.Linear(2 * size, size, bias=False)
        model.model.mtp_layers = nn.ModuleList([layer]).to(torch.bfloat16)
    return model


def make_draft(model: Any, config: Any) -> tuple[nn.Module, Any]:
    """The draft of an engine's model, whose embedding and head it shares, and vLLM's configuration of it."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.utils import initialize_model

    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        draft: Any = initialize_model(vllm_config=config, model_config=draft_config)
    draft.model.embed_tokens, draft.lm_head = model.model.embed_tokens, model.lm_head
    return draft, draft_config


def start_engine(folder: Path, tensor_parallel: int) -> tuple[nn.Module, Any]:
    """The same with the folder's weights, which vLLM has processed, as in a worker that serves."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
    from vllm.model_executor.model_loader.utils import process_weights_after_loading

    model, config = make_engine(folder, tensor_parallel)
    record_metadata_for_reloading(model)
    with set_current_vllm_config(config):
        model.load_weights(iter(published(folder).items()))
        process_weights_after_loading(model, config.model_config, torch.device("cpu"))
    return model, config


def make_engine(
    folder: Path, tensor_parallel: int, dtype: str = "float32", expert_parallel: bool = True, **arguments: Any
) -> tuple[nn.Module, Any]:
    """This rank's part of the model, without weights, and vLLM's configuration. The rest of the world are pipeline stages."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel, model_parallel_is_initialized
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe
    from vllm.model_executor.model_loader.utils import initialize_model

    cpu_moe.cpu_prepack_moe_weight = lambda weight, isa: weight  # a compiled op, which the environment lacks
    world = dist.get_world_size()
    os.environ.update(RANK=str(dist.get_rank()), LOCAL_RANK=str(dist.get_rank()), WORLD_SIZE=str(world))
    config = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        tensor_parallel_size=tensor_parallel,
        pipeline_parallel_size=world // tensor_parallel,
        enable_expert_parallel=expert_parallel and "Moe" in (folder / "config.json").read_text(),
        enforce_eager=True,
        dtype=dtype,
        max_model_len=128,
        load_format="dummy",
        distributed_executor_backend="external_launcher",
        **arguments,
    ).create_engine_config()
    with set_current_vllm_config(config):
        if not model_parallel_is_initialized():
            init_distributed_environment(world, dist.get_rank(), "env://", dist.get_rank(), "gloo")
            initialize_model_parallel(tensor_parallel, world // tensor_parallel)
        torch.set_default_dtype(config.model_config.dtype)
        return initialize_model(vllm_config=config), config


def make_trainer(meeting: Meeting, folder: Path, workers: int, **options: Any) -> tuple[Any, Any]:
    """The trainer's model, sharded as FSDP2 does over 2 ranks, and vLLM's engine that sends it."""
    from vllm.distributed.weight_transfer import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from epload.integrations.vllm import EploadTrainerInitInfo

    model = fsdp(read_model(folder), shard=2)
    info = EploadTrainerInitInfo("127.0.0.1:0", workers, rank=dist.get_rank(), timeout=200, **options)
    client = Client(meeting, workers)
    return model, WeightTransferTrainerFactory.trainer_init(info, client=client, source=ModuleSource(model))


def calls(meeting: Meeting, rank: int, count: int) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yields the methods that the trainer calls, with their arguments, to a worker that does each before it asks for the next."""
    for number in range(1, count + 1):
        method, argument = json.loads(meeting.hear(f"call-{number}", 200))
        yield method, () if argument is None else (argument,)
        meeting.say(f"done-{number}-{rank}")


class Client:
    """The trainer's view of the engine, over files."""

    def __init__(self, meeting: Meeting, workers: int) -> None:
        self._meeting = meeting
        self._workers = workers
        self._calls = 0

    def _call(self, method: str, argument: Any = None) -> None:
        self._calls += 1
        self._meeting.say(f"call-{self._calls}", json.dumps([method, argument]))
        for worker in range(self._workers):
            self._meeting.hear(f"done-{self._calls}-{worker}", 200)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._call("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        self._call("start_weight_update")

    def start_draft_weight_update(self) -> None:
        self._call("start_draft_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._call("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._call("finish_weight_update")


def differences(model: Any, config: Any, weights: dict[str, torch.Tensor], model_config: Any = None) -> list[str]:
    """Names of parameters and buffers that vLLM's own layer-wise reload leaves with other values."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    before = {name: tensor.detach().clone() for name, tensor in tensors_of(model).items()}
    poison(model)
    with set_current_vllm_config(config), torch.device("cpu"):
        initialize_layerwise_reload(model)
        model.load_weights(iter(weights.items()))
        finalize_layerwise_reload(model, model_config or config.model_config)
    return [name for name, tensor in tensors_of(model).items() if not same_bits(tensor, before[name])]
