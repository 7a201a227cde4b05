"""Small models of transformers, the same models of Megatron-Core on CPU ranks, and what each rank of the latter has to hold.

What a rank holds is computed here with views, splits and chunks of full tensors, in Megatron's own names of its modules, without
the keys that epload reads.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import epload
from support.jobs import Meeting
from support.pretrained import published as read_checkpoint
from support.small_syncs import sending

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
VOCABULARY, PADDED = 323, 336
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}


class Layout(NamedTuple):
    """Sizes of Megatron's groups."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1
    vp: int | None = None
    """Interleaved stages of each rank."""


def hf_config(family: str) -> Any:
    match family:
        case "llama":
            return transformers.LlamaConfig(**SIZES, head_dim=8)
        case "qwen2":  # biases of queries, keys and values; tied embeddings
            return transformers.Qwen2Config(**SIZES | {"tie_word_embeddings": True})
        case "qwen3":
            return transformers.Qwen3Config(**SIZES, head_dim=16)
        case "qwen3_moe":
            return transformers.Qwen3MoeConfig(**SIZES, head_dim=16, **EXPERTS, mlp_only_layers=[], decoder_sparse_step=1)
        case "mixtral":
            return transformers.MixtralConfig(**SIZES, head_dim=8, num_local_experts=8, num_experts_per_tok=2)
        case "deepseek_v3":
            return transformers.DeepseekV3Config(
                **SIZES | {"num_key_value_heads": 8}, **LATENT, moe_intermediate_size=32, n_routed_experts=8, n_group=1,
                topk_group=1, num_experts_per_tok=2, n_shared_experts=2, first_k_dense_replace=1, routed_scaling_factor=1.0,
                num_nextn_predict_layers=1, rope_interleave=True,
            )  # fmt: skip
    raise ValueError(family)


def write_checkpoint(family: str, folder: Path, seed: int = 0) -> dict[str, Tensor]:
    """Saves a model of transformers with random weights, and returns its checkpoint's tensors. DeepSeek's files have a layer for
    multi-token prediction, too, with copies of the embedding and of the head."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(hf_config(family), dtype=torch.float32)
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if "inv_freq" not in name:
            tensor.data.normal_(std=0.2).add_(1.0 if "norm" in name else 0.0)
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    state = safetensors.torch.load_file(path)
    if family == "deepseek_v3":
        last, following = "model.layers.3.", "model.layers.4."
        extra = {name.replace(last, following): torch.randn_like(state[name]) for name in state if name.startswith(last)}
        for name in ("enorm", "hnorm", "shared_head.norm"):
            extra[f"{following}{name}.weight"] = torch.randn(64)
        extra[f"{following}eh_proj.weight"] = torch.randn(64, 128)
        extra[f"{following}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        extra[f"{following}shared_head.head.weight"] = state["lm_head.weight"].clone()
        state |= extra
        safetensors.torch.save_file(state, path, {"format": "pt"})
    return state


def quantize_checkpoint(folder: Path, quantized: Path, block: int) -> dict[str, Tensor]:
    """Saves the checkpoint in a folder with fp8 projections and their scales, and replaces it by the values that these stand for,
    which it returns."""
    narrow, wide = {}, read_checkpoint(folder)
    for name, tensor in wide.items():
        narrow[name] = tensor
        if name.endswith("_proj.weight") and "eh_proj" not in name:
            rows, columns = tensor.shape
            scales = torch.rand(-(-rows // block), -(-columns // block)) + 0.5
            narrow[name], narrow[f"{name}_scale_inv"] = tensor.to(torch.float8_e4m3fn), scales
            repeated = scales.repeat_interleave(block, 0)[:rows].repeat_interleave(block, 1)[:, :columns]
            wide[name] = narrow[name].float() * repeated
    quantized.mkdir()
    safetensors.torch.save_file(narrow, quantized / "model.safetensors", {"format": "pt"})
    safetensors.torch.save_file(wide, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [block, block]}
    (quantized / "config.json").write_text(json.dumps(config))
    return wide


def transformer_config(family: str, layout: Layout, **options: Any) -> Any:
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    hf = hf_config(family)
    fields: dict[str, Any] = {
        "num_layers": hf.num_hidden_layers, "hidden_size": hf.hidden_size, "ffn_hidden_size": hf.intermediate_size,
        "num_attention_heads": hf.num_attention_heads, "layernorm_epsilon": hf.rms_norm_eps, "normalization": "RMSNorm",
        "use_cpu_initialization": True, "sequence_parallel": False, "gated_linear_unit": True,
        "activation_func": nn.functional.silu, "tensor_model_parallel_size": layout.tp, "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vp, "expert_model_parallel_size": layout.ep,
        "expert_tensor_parallel_size": layout.etp, "add_bias_linear": False, "add_qkv_bias": family == "qwen2",
        "qk_layernorm": family in ("qwen3", "qwen3_moe", "deepseek_v3"), "hidden_dropout": 0.0, "attention_dropout": 0.0,
        "bias_activation_fusion": False, "gradient_accumulation_fusion": False, "persist_layer_norm": False,
        "apply_rope_fusion": False, "masked_softmax_fusion": False, "bias_dropout_fusion": False,
        "attention_softmax_in_fp32": True, "pipeline_dtype": torch.float32, "params_dtype": torch.float32,
    }  # fmt: skip
    if family in ("qwen3_moe", "mixtral", "deepseek_v3"):
        fields |= {
            "num_moe_experts": 8, "moe_router_topk": 2, "moe_layer_freq": 1, "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather", "moe_router_pre_softmax": False,
            "moe_ffn_hidden_size": 128 if family == "mixtral" else 32,
        }  # fmt: skip
    if family == "deepseek_v3":
        fields |= {
            "q_lora_rank": 24, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 4, "v_head_dim": 8,
            "rope_type": "rope", "moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid",
            "moe_layer_freq": [0, 1, 1, 1],
            "moe_shared_expert_intermediate_size": 64, "mtp_num_layers": 1, "rotary_base": 10000.0,
        }  # fmt: skip
        return MLATransformerConfig(**fields | options)
    return TransformerConfig(**fields, num_query_groups=4, kv_channels=getattr(hf, "head_dim", None), **options)


def build(family: str, layout: Layout, **options: Any) -> list[nn.Module]:
    """Returns the modules of this rank, every element of which is -7.5, after making Megatron's groups."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_mtp_block_spec

    torch.cuda.current_device = lambda: "cpu"  # the rotary embedding asks for it
    Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]  # where tied embeddings are made equal
    _let_latent_attention_build()
    parallel_state.initialize_model_parallel(
        layout.tp, layout.pp, virtual_pipeline_model_parallel_size=layout.vp, expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
    )  # fmt: skip
    config = transformer_config(family, layout, **options)
    chunks = []
    for stage in range(layout.vp or 1):
        where = {"vp_stage": stage} if layout.vp else {}
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm", **where)
        last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, **where)
        mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False, **where) if config.mtp_num_layers else None
        model = GPTModel(
            config, spec, PADDED, 64, pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, **where),
            post_process=last, share_embeddings_and_output_weights=family == "qwen2", position_embedding_type="rope",
            rotary_base=10000, mtp_block_spec=mtp, **where,
        )  # fmt: skip
        chunks.append(model)
    with torch.no_grad():
        for chunk in chunks:
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                if "expert_bias" in name or tensor.requires_grad:
                    tensor.fill_(-7.5)
    return chunks


def _let_latent_attention_build() -> None:
    """Lets latent attention be built without TransformerEngine, whose attention alone takes its sizes in megatron-core 0.16."""
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.dot_product_attention import DotProductAttention

    construct = DotProductAttention.__init__

    def without_channels(self: Any, *args: Any, k_channels: Any = None, v_channels: Any = None, **kwargs: Any) -> None:
        construct(self, *args, **kwargs)

    if "k_channels" not in construct.__code__.co_varnames:
        DotProductAttention.__init__ = without_channels
    if not isinstance(multi_latent_attention.TELinear, type):
        multi_latent_attention.TELinear = type("TELinear", (), {})


def expected(chunk: Any, family: str, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns what a module of this rank has to hold of a checkpoint, by its own names. Padding stays as it is."""
    from megatron.core import parallel_state as groups

    sizes, held = groups.get_tensor_model_parallel_world_size(), {}
    rank = groups.get_tensor_model_parallel_rank()
    expert_sizes, expert_rank = groups.get_expert_tensor_parallel_world_size(), groups.get_expert_tensor_parallel_rank()
    first_expert = groups.get_expert_model_parallel_rank() * 8 // groups.get_expert_model_parallel_world_size()
    for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
        parts = name.split(".")
        if parts[0] in ("embedding", "output_layer"):
            full = state["model.embed_tokens.weight" if parts[0] == "embedding" or family == "qwen2" else "lm_head.weight"]
            full = torch.cat([full, torch.full((PADDED - VOCABULARY, 64), -7.5)])
            held[name] = full.chunk(sizes)[rank]
            continue
        if name == "decoder.final_layernorm.weight":
            held[name] = state["model.norm.weight"]
            continue
        if parts[1] != "layers":
            continue
        if parts[0] == "decoder":
            number, inner = chunk.decoder.layers[int(parts[2])].layer_number - 1, ".".join(parts[3:])
        else:
            inner_layer = parts[3] in ("transformer_layer", "mtp_model_layer")
            number, inner = 4 + int(parts[2]), ".".join(parts[4 if inner_layer else 3 :])
        full = of_layer(
            inner, f"model.layers.{number}.", state, expert_sizes if "local_experts" in inner else sizes, first_expert
        )
        if full is not None:
            ways, index = (expert_sizes, expert_rank) if "local_experts" in inner else (sizes, rank)
            divided = [dim for dim in range(full.ndim) if full.shape[dim] != tensor.shape[dim]]
            held[name] = full.chunk(ways, divided[0])[index] if divided else full
    return held


def of_layer(inner: str, to: str, state: dict[str, Tensor], ways: int, first_expert: int) -> Tensor | None:
    """Returns Megatron's full tensor, in which the parts of a gated projection are in the order of the ranks."""
    names = {
        "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm", "enorm": "enorm",
        "hnorm": "hnorm", "eh_proj": "eh_proj", "final_layernorm": "shared_head.norm", "mlp.linear_fc2": "mlp.down_proj",
        "mlp.shared_experts.linear_fc2": "mlp.shared_experts.down_proj", "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.k_layernorm": "self_attn.k_norm", "self_attention.linear_q_down_proj": "self_attn.q_a_proj",
        "self_attention.linear_q_up_proj": "self_attn.q_b_proj", "self_attention.kv_layernorm": "self_attn.kv_a_layernorm",
        "self_attention.linear_kv_down_proj": "self_attn.kv_a_proj_with_mqa", "mlp.router": "mlp.gate",
        "self_attention.linear_kv_up_proj": "self_attn.kv_b_proj", "self_attention.q_layernorm": "self_attn.q_norm",
    }  # fmt: skip
    path, _, kind = inner.rpartition(".")
    if f"{to}self_attn.q_a_layernorm.weight" in state:
        names["self_attention.q_layernorm"] = "self_attn.q_a_layernorm"
    if f"{to}block_sparse_moe.gate.weight" in state:
        names["mlp.router"] = "block_sparse_moe.gate"
    if kind == "expert_bias":
        return state[f"{to}mlp.gate.e_score_correction_bias"]
    if kind not in ("weight", "bias"):
        return None
    if path == "self_attention.linear_qkv":
        q, k, v = (state[f"{to}self_attn.{letter}_proj.{kind}"] for letter in "qkv")
        groups = [tensor.view(4, -1, *tensor.shape[1:]) for tensor in (q, k, v)]
        return torch.cat(groups, 1).flatten(0, 1)
    if path in names:
        return state[f"{to}{names[path]}.{kind}"]
    where, gate, up, down = path.rpartition(".")[0].replace("mlp.experts.", "mlp."), "gate_proj", "up_proj", "down_proj"
    if "local_experts" in path:
        expert = first_expert + int(path.split(".")[3])
        where = f"mlp.experts.{expert}"
        if f"{to}block_sparse_moe.experts.{expert}.w1.weight" in state:
            where, gate, up, down = f"block_sparse_moe.experts.{expert}", "w1", "w3", "w2"
    if path.endswith("linear_fc2"):
        return state[f"{to}{where}.{down}.weight"]
    if path.endswith("linear_fc1"):
        halves = (state[f"{to}{where}.{name}.weight"].chunk(ways) for name in (gate, up))
        return torch.cat([part for pair in zip(*halves, strict=True) for part in pair])
    return None


def differences(chunks: list[Any], family: str, state: dict[str, Tensor]) -> list[str]:
    """Returns the parameters and expert biases of this rank that are not what the checkpoint says, bit for bit."""
    wrong = []
    for i, chunk in enumerate(chunks):
        held = expected(chunk, family, state)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
            if name not in held:
                wrong += [f"chunk {i}: {name} was not compared"] if tensor.requires_grad else []
            elif tensor.shape != held[name].shape or not torch.equal(tensor.detach(), held[name]):
                wrong.append(f"chunk {i}: {name} {list(tensor.shape)} {list(held[name].shape)}")
    return wrong


@torch.no_grad()
def logits(model: Any, ids: Tensor) -> Tensor:
    """Returns the logits of a Megatron model without pipeline stages, of the whole vocabulary without its padding."""
    import torch.distributed as dist
    from megatron.core import parallel_state

    own = forward(model.eval(), ids).contiguous()
    parts = [torch.empty_like(own) for _ in range(parallel_state.get_tensor_model_parallel_world_size())]
    dist.all_gather(parts, own, group=parallel_state.get_tensor_model_parallel_group())
    return torch.cat(parts, -1)[..., :VOCABULARY]


def forward(model: Any, ids: Tensor) -> Tensor:
    """Returns the logits of this rank's part of the vocabulary."""
    from megatron.core.tensor_parallel import random

    random.CudaRNGStatesTracker.fork = lambda self, name="": contextlib.nullcontext()  # for dropout, of which there is none
    length = ids.shape[1]
    mask = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    out: Tensor = model(ids, torch.arange(length)[None], mask)
    return out


def send(rank: int, meeting: Meeting, family: str, layout: Layout, folder: Path, versions: Sequence[int], receivers: int) -> None:
    """Loads the checkpoints of versions, each in a folder of its number, and sends them."""
    chunks = build(family, layout)
    with sending(meeting, chunks, receivers, timeout=100, names_from=folder / "1") as sender:
        for version in versions:
            epload.load(chunks, folder / str(version), timeout=60, progress=False)
            sender.send_weights(version)
