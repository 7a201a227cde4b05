"""Places of checkpoint tensors in Megatron-Core's parameters, against chunks of full tensors. See tests/megatron, too."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from epload.core.placement import box_slices
from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.mapping.megatron import unknown_names
from epload.mapping.megatron.names import alternatives
from epload.mapping.megatron.regions import place_shards
from epload.mapping.megatron.shards import MegatronShard

GROUPS, HEADS, CHANNELS, HIDDEN = 4, 12, 2, 3
CONFIG = SimpleNamespace(
    num_layers=2, num_query_groups=GROUPS, num_attention_heads=HEADS, kv_channels=CHANNELS, mtp_num_layers=None
)
QKV, ATTENTION = "decoder.layers.1.self_attention.linear_qkv", "model.layers.1.self_attn"


def fill(shard: MegatronShard, state: dict[str, Tensor], shape: Shape, config: SimpleNamespace = CONFIG) -> Tensor:
    """Returns a parameter of this shape, with what the places of a checkpoint put into it."""
    parameter = torch.full(shape, -1.0)
    names, shapes = list(state), [tuple(tensor.shape) for tensor in state.values()]
    places, missing = place_shards([shard], {shard.target: parameter}, config, names, shapes)
    assert missing == {}
    for tensor, placed in zip(state.values(), places, strict=True):
        for target, view in placed:
            assert target == shard.target
            box = parameter[box_slices(view.start, view.size)]
            assert (box == -1).all(), "an element has two places"
            box.copy_(tensor.as_strided(view.size, view.strides, view.offset))
    return parameter


def numbered(first: int, *shape: int) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel(), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("size", [1, 2, 4, 8, 20, 40])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_fused_attention_is_divided_also_within_groups(size: int, kind: str) -> None:
    rest = (HIDDEN,) if kind == "weight" else ()
    lengths = HEADS * CHANNELS, GROUPS * CHANNELS, GROUPS * CHANNELS
    parts = [numbered(1000 * i, length, *rest) for i, length in enumerate(lengths)]
    state = {f"{ATTENTION}.{letter}_proj.{kind}": part for letter, part in zip("qkv", parts, strict=True)}
    fused = torch.cat([part.view(GROUPS, -1, *rest) for part in parts], 1).flatten(0, 1)
    for rank, local in enumerate(fused.chunk(size)):
        start = (rank * len(local), *([0] * len(rest)))
        shard = MegatronShard(f"{QKV}.{kind}", "p", tuple(fused.shape), start, tuple(local.shape), 0, local.stride())
        assert torch.equal(fill(shard, state, tuple(local.shape)), local)


@pytest.mark.parametrize("rank", range(4))
def test_padding_has_no_place(rank: int) -> None:
    embedding, name = numbered(0, 5, HIDDEN), "embedding.word_embeddings.weight"
    shard = MegatronShard(name, "p", (8, HIDDEN), (rank * 2, 0), (2, HIDDEN), 0, (HIDDEN, 1))
    wanted = torch.cat([embedding, torch.full((3, HIDDEN), -1.0)]).chunk(4)[rank]
    assert torch.equal(fill(shard, {"model.embed_tokens.weight": embedding}, (2, HIDDEN)), wanted)


def test_parts_of_a_parameter_and_columns_go_where_they_are_in_memory() -> None:
    """The second half of a gated projection, and a transposed part."""
    up = numbered(0, 4, HIDDEN)
    name, target = "model.layers.0.mlp.up_proj.weight", "decoder.layers.0.mlp.linear_fc1.weight_v"
    half = MegatronShard(target, "p", (4, HIDDEN), (2, 0), (2, HIDDEN), 6, (HIDDEN, 1))
    assert torch.equal(fill(half, {name: up}, (4, HIDDEN)), torch.cat([torch.full((2, HIDDEN), -1.0), up[2:]]))
    columns = half._replace(start=(0, 1), size=(4, 2), offset=0, strides=(1, 4))
    assert torch.equal(fill(columns, {name: up}, (2, 4)), up[:, 1:].T)


def test_layers_for_prediction_follow_the_others() -> None:
    at = "model.layers.62"
    names = [(f"{at}.mlp.experts.7.up_proj.weight",), (f"{at}.block_sparse_moe.experts.7.w3.weight",)]
    for target, expected in {
        "mtp.layers.1.transformer_layer.mlp.experts.experts.7.linear_fc1.weight_v": names,
        "mtp.layers.1.mtp_model_layer.mlp.experts.experts.7.linear_fc1.weight_v": names,
        "mtp.layers.0.final_layernorm.weight": [("model.layers.61.shared_head.norm.weight",)],
        "decoder.layers.0.mlp.linear_fc1.weight": [],  # not gated
        "decoder.layers.x.input_layernorm.weight": [],
    }.items():
        assert list(alternatives(target, 61)) == expected
    parts = ("0.input_layernorm", "2.eh_proj", "2.embed_tokens")
    checkpoint, other = [f"model.layers.{part}.weight" for part in parts], "model.rotary_emb.inv_freq"
    assert unknown_names([*checkpoint, other, "visual.x"], CONFIG) == ([*checkpoint[1:], other], ["visual.x"])
    predicting = SimpleNamespace(**vars(CONFIG) | {"mtp_num_layers": 1})
    assert unknown_names(checkpoint, predicting) == (checkpoint[2:], [])


def test_a_shorter_vocabulary_than_padding_explains_is_refused() -> None:
    shard = MegatronShard("output_layer.weight", "p", (4096, HIDDEN), (0, 0), (2048, HIDDEN), 0, (HIDDEN, 1))
    text = r"lm_head.weight has shape \[2048, 3\] in the checkpoint, expected \[4096, 3\]"
    with pytest.raises(ModelMismatch, match=text):
        fill(shard, {"lm_head.weight": torch.ones(2048, HIDDEN)}, (2048, HIDDEN))
