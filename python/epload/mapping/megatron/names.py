"""Names of Megatron-Core's tensors, each with the names of the Hugging Face checkpoints that have the same values.

Megatron's names are the keys of ``sharded_state_dict(metadata={"singleton_local_shards": True})``, in which layers and experts
have their global numbers. ``*`` is a number. A name may have several alternatives, for different families: those that the
checkpoint has are taken. Sources: megatron-core 0.16.1 and 0.19.2, the names that transformers 5.23 saves, and the tables of
megatron-bridge 0.6.2.
"""

from __future__ import annotations

from collections.abc import Iterator

Names = tuple[str, ...]
"""One name; or three, for the queries, the keys and the values that Megatron fuses."""


def _self_attention(kind: str) -> dict[str, tuple[Names, ...]]:
    """Returns the names of weights or biases."""
    qkv = tuple(f"self_attn.{letter}_proj.{kind}" for letter in "qkv")
    return {
        f"self_attention.linear_qkv.{kind}": (qkv,),
        f"self_attention.linear_proj.{kind}": ((f"self_attn.o_proj.{kind}",),),
    }


def _gated(megatron: str, *alternatives: tuple[str, str, str]) -> dict[str, tuple[Names, ...]]:
    """Returns the names of a gated MLP; ``alternatives``: the names of its gate, up and down projections."""
    return {
        f"{megatron}.{part}": tuple((f"{names[i]}.weight",) for names in alternatives)
        for i, part in enumerate(("linear_fc1.weight_w", "linear_fc1.weight_v", "linear_fc2.weight"))
    }


MODEL: dict[str, tuple[Names, ...]] = {
    "embedding.word_embeddings.weight": (("model.embed_tokens.weight",),),
    "decoder.final_layernorm.weight": (("model.norm.weight",),),
    "output_layer.weight": (("lm_head.weight",),),
}
"""Names outside of the layers. The first and the last, whose first dim is the vocabulary, may be padded in Megatron."""

LAYER: dict[str, tuple[Names, ...]] = {
    # Norms, which TransformerEngine fuses with the projection that follows, and whose names Megatron's own layers take over.
    "input_layernorm.weight": (("input_layernorm.weight",),),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",),),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",),),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",),),
    **_self_attention("weight"),
    **_self_attention("bias"),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), ("self_attn.q_a_layernorm.weight",)),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",),),
    # Multi-head latent attention.
    "self_attention.linear_q_proj.weight": (("self_attn.q_proj.weight",),),
    "self_attention.linear_q_down_proj.weight": (("self_attn.q_a_proj.weight",),),
    "self_attention.linear_q_up_proj.layer_norm_weight": (("self_attn.q_a_layernorm.weight",),),
    "self_attention.linear_q_up_proj.weight": (("self_attn.q_b_proj.weight",),),
    "self_attention.linear_kv_down_proj.weight": (("self_attn.kv_a_proj_with_mqa.weight",),),
    "self_attention.kv_layernorm.weight": (("self_attn.kv_a_layernorm.weight",),),
    "self_attention.linear_kv_up_proj.layer_norm_weight": (("self_attn.kv_a_layernorm.weight",),),
    "self_attention.linear_kv_up_proj.weight": (("self_attn.kv_b_proj.weight",),),
    # MLPs and experts.
    **_gated("mlp", ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")),
    **_gated(
        "mlp.experts.experts.*",
        ("mlp.experts.*.gate_proj", "mlp.experts.*.up_proj", "mlp.experts.*.down_proj"),
        ("block_sparse_moe.experts.*.w1", "block_sparse_moe.experts.*.w3", "block_sparse_moe.experts.*.w2"),
    ),
    **_gated(
        "mlp.shared_experts",
        ("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
    ),
    "mlp.router.weight": (("mlp.gate.weight",), ("block_sparse_moe.gate.weight",)),
    "mlp.router.expert_bias": (("mlp.gate.e_score_correction_bias",),),
    # Multi-token prediction. Its layers follow the others in the checkpoint.
    "enorm.weight": (("enorm.weight",),),
    "hnorm.weight": (("hnorm.weight",),),
    "eh_proj.weight": (("eh_proj.weight",),),
    "final_layernorm.weight": (("shared_head.norm.weight",),),
}
"""Names inside of a layer: of ``decoder.layers.*`` and, for multi-token prediction, of ``mtp.layers.*`` and the layer in it.
Those of a checkpoint are inside of ``model.layers.*``."""

PADDED = ("embedding.word_embeddings.weight", "output_layer.weight")
"""Names of which Megatron may pad the first dim."""
FLOAT32 = ("mlp.router.expert_bias",)
"""Names of a layer that Megatron keeps in float32, whatever the model's dtype is."""


def alternatives(key: str, layers: int) -> Iterator[Names]:
    """Yields the names in checkpoints of one of Megatron's keys; nothing for one that the tables lack.

    Args:
        layers: of the decoder; those for multi-token prediction follow them.
    """
    if key in MODEL:
        yield from MODEL[key]
        return
    root, _, rest = key.partition(".layers.")
    number, _, inner = rest.partition(".")
    if root not in ("decoder", "mtp") or not number.isdecimal():
        return
    layer = int(number) + (layers if root == "mtp" else 0)
    if root == "mtp":  # the name of the layer in it, before megatron-core 0.17 and since
        inner = inner.removeprefix("transformer_layer.").removeprefix("mtp_model_layer.")
    numbers = [part for part in inner.split(".") if part.isdecimal()]
    pattern = ".".join("*" if part.isdecimal() else part for part in inner.split("."))
    for names in LAYER.get(pattern, ()):
        yield tuple(f"model.layers.{layer}.{name.replace('*', '{}').format(*numbers)}" for name in names)


def pattern_of(name: str) -> str:
    """Returns the name of a checkpoint's tensor with ``*`` for the numbers of its expert and layer, as the tables have it."""
    parts = name.split(".")
    inner = parts[3:] if parts[:2] == ["model", "layers"] and len(parts) > 3 and parts[2].isdecimal() else parts
    return ".".join("*" if part.isdecimal() else part for part in inner)
