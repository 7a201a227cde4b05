"""Small models of the transformers library, and how it and torch parallelize them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from support.models import mesh

EXPERTS = 12
SIZES: dict[str, Any] = {
    "vocab_size": 66, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None,
}  # fmt: skip


MOE = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32,
    "num_position_embeddings": 4, "deepstack_visual_indexes": [0],
}  # fmt: skip
ROPE = {"rope_type": "default", "mrope_section": [1, 1, 2]}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3MoeConfig", SIZES | MOE | {"num_experts": EXPERTS, "mlp_only_layers": [0]}),
    "mixtral": ("MixtralConfig", SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "deepseek_v3": (
        "DeepseekV3Config",
        SIZES | MOE | {
            "num_key_value_heads": 4, "n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
            "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
    "gpt_oss": ("GptOssConfig", SIZES | {"num_local_experts": EXPERTS, "num_experts_per_tok": 2}),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {"text_config": SIZES | MOE | {"num_experts": EXPERTS, "rope_scaling": ROPE}, "vision_config": VISION},
    ),
    "llama": ("LlamaConfig", SIZES | {"tie_word_embeddings": True}),
    "gemma3": ("Gemma3TextConfig", SIZES | {"pad_token_id": 0, "query_pre_attn_scalar": 8, "tie_word_embeddings": True}),
    "bert": ("BertConfig", {k: v for k, v in SIZES.items() if k not in ("head_dim", "num_key_value_heads")}),
}  # fmt: skip


def quiet() -> str:
    """Silences the library, whose plans have rules that match nothing in a small model. Returns the backend of a setup."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    return "gloo"


def config(kind: str, **options: Any) -> Any:
    import transformers

    name, usual = CONFIGS[kind]
    return getattr(transformers, name)(**deepcopy(usual) | options)


def build(kind: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Makes a model on the default device, in eval mode."""
    import transformers as hf

    auto = {"qwen3_vl_moe": hf.AutoModelForImageTextToText, "bert": hf.AutoModelForMaskedLM}.get(kind, hf.AutoModelForCausalLM)
    return auto.from_config(config(kind), dtype=dtype).eval()


def fsdp(model: Any, **axes: int) -> Any:
    """Two axes are HSDP."""
    return fsdp_on(model, mesh(*axes.items()))


def fsdp_on(model: Any, on: DeviceMesh) -> Any:
    """Shards layers and submodels by themselves, as users do."""
    for name, module in reversed(list(model.named_modules())):
        if isinstance(module, nn.ModuleList) and name.rpartition(".")[2] in ("layers", "layer", "blocks"):
            for layer in module:
                fully_shard(layer, mesh=on)
        elif name == "model" and not model.all_tied_weights_keys:  # torch wants tied weights in one group
            fully_shard(module, mesh=on)
    return fully_shard(model, mesh=on)


def by_the_library(model: Any, **sizes: int) -> Any:
    from transformers.distributed import DistributedConfig

    for name in model.all_tied_weights_keys:  # the library ties after loading; parallelizing, it wants a tensor each
        module, _, leaf = name.rpartition(".")
        owner = model.get_submodule(module)
        setattr(owner, leaf, nn.Parameter(getattr(owner, leaf).detach().clone()))
    if (ep := sizes.get("ep_size", 1)) > 1 and not hasattr(DistributedConfig, "dp_size"):
        # transformers 5.19 divides experts only among the ranks of one tensor; here all but the experts are whole.
        sizes |= {"tp_size": ep, "fsdp_size": sizes["fsdp_size"] // ep}
        model.tp_plan = {}
    config, _, manager = model.prepare_distribute_model(DistributedConfig(**sizes), None)
    return model.maybe_distribute_model(model, config, manager)


TP_PLAN: dict[str, ParallelStyle] = {
    **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel(output_layouts=Replicate()) for name in "qkv"},
    "model.layers.*.self_attn.o_proj": RowwiseParallel(input_layouts=Replicate()),
    "lm_head": ColwiseParallel(output_layouts=Replicate()),
    "bert.encoder.layer.*.attention.self.query": ColwiseParallel(output_layouts=Replicate()),
    "bert.encoder.layer.*.attention.output.dense": RowwiseParallel(input_layouts=Replicate()),
    "bert.encoder.layer.*.intermediate.dense": ColwiseParallel(),
    "bert.encoder.layer.*.output.dense": RowwiseParallel(),
}
"""A plan for the models that the library has none for, of which some names are there."""


def by_torch(model: Any, tp: int, dp: int) -> Any:
    on = mesh(("dp", dp), ("tp", tp))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the plan's names that the model has not
        parallelize_module(model, on["tp"], TP_PLAN)
    return fsdp_on(model, on["dp"])


@dataclass(frozen=True)
class Way:
    parallelize: Callable[[Any], Any]
    tolerance: float
    """Allowed difference of logits: sums are taken in another order than on one process."""


Ways = dict[int, dict[str, Way]]
"""The ways to parallelize by their names, for each number of ranks."""
WORLDS = (4, 6)
DENSE: Ways = {
    n: {"fsdp": Way(partial(fsdp, shard=n), 0), "hsdp": Way(partial(fsdp, replicate=2, shard=n // 2), 0)} for n in WORLDS
}
TP: Ways = {n: {"tp x fsdp": Way(partial(by_the_library, tp_size=2, fsdp_size=n // 2), 1e-5)} for n in WORLDS}
TORCH_TP: Ways = {n: {"tp x fsdp": Way(partial(by_torch, tp=2, dp=n // 2), 1e-5)} for n in WORLDS}
EP: Ways = {
    n: {
        "ep": Way(partial(by_the_library, ep_size=n, fsdp_size=n), 1e-5),
        "ep x fsdp": Way(partial(by_the_library, ep_size=n // 2, fsdp_size=n), 1e-5),
    }
    for n in WORLDS
}
MATRIX: dict[str, tuple[Ways, ...]] = {
    "qwen3_moe": (DENSE, TP, EP),
    "mixtral": (DENSE, TP, EP),
    "deepseek_v3": (DENSE, TP, EP),
    "gpt_oss": (DENSE, TORCH_TP, EP),
    "qwen3_vl_moe": (DENSE, TP, EP),
    "llama": (DENSE, TP),
    "bert": (DENSE, TORCH_TP),
}


def random(kind: str, seed: int) -> Any:
    """A model in one process, equal in all that make it."""
    torch.manual_seed(seed)
    model = build(kind)
    with torch.no_grad():
        for tensor in model.state_dict().values():  # biases and norms start as constants, which hides misplacement
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.05)
    return model


def prepare(folder: Path, kinds: Iterable[str] = ()) -> None:
    """Each model in the published form (experts one by one, where that is how they are published), and as it is in memory."""
    for number, kind in enumerate(kinds or MATRIX):
        model = random(kind, number)
        model.save_pretrained(folder / kind, max_shard_size="40KB")
        saved = published(folder / kind)
        state = model.state_dict()
        if any(f"experts.{EXPERTS - 1}." in name for name in saved):
            store(folder / f"{kind}, fused", state)
        elif kind == "qwen3_vl_moe":  # published as (experts, in, out); the library saves (experts, out, in) and takes both
            turned = {name: t.transpose(1, 2) if ".experts." in name else t for name, t in saved.items()}
            store(folder / f"{kind}, transposed", turned)


def store(folder: Path, state: dict[str, Tensor]) -> None:
    folder.mkdir()
    save_file(
        {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()},
        folder / "model.safetensors",
    )


def save_random(model: Any, folder: Path, architecture: str = "", std: float = 1.0) -> None:
    """Saves a model whose parameters are random, norms, too, which would all be 1, with the class that an engine looks for."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=std)
    model.save_pretrained(folder)
    described = json.loads((folder / "config.json").read_text())
    described["architectures"] = [architecture or type(model).__name__]
    (folder / "config.json").write_text(json.dumps(described))


def published(folder: Path) -> dict[str, Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def whole(folder: Path, kind: str) -> Any:
    """The library's model, in memory of its own: on the mapped file tensors lie unaligned, and sums come out otherwise."""
    model = build(kind)
    model.load_state_dict(type(model).from_pretrained(folder / kind, dtype=torch.float32).state_dict())
    return model


def small_llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 37}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 3, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**(sizes | options)))
