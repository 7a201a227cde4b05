"""Keys that a class of transformers says to ignore: no error in a strict load, listed, and initialized where they are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import (
    BertConfig,
    BertModel,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MarianConfig,
    MarianMTModel,
)

import epload
from epload import Mapping, ModelMismatch

Made = tuple[type[Any], Any]


def llama() -> Made:
    return LlamaForCausalLM, LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, vocab_size=33
    )


def bert() -> Made:
    return BertModel, BertConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=33
    )


def deepseek() -> Made:
    config = DeepseekV3Config(
        hidden_size=16, intermediate_size=24, moe_intermediate_size=8, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, vocab_size=33, n_routed_experts=4, num_experts_per_tok=2, n_group=2, topk_group=1,
        q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, first_k_dense_replace=1,
    )  # fmt: skip
    return DeepseekV3ForCausalLM, config


def marian() -> Made:
    config = MarianConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=33, pad_token_id=32, max_position_embeddings=19,
        decoder_start_token_id=32,
    )  # fmt: skip
    return MarianMTModel, config


def built(made: Made) -> Any:
    torch.manual_seed(3)
    return made[0](made[1]).eval()


def on_meta(made: Made) -> Any:
    with torch.device("meta"):
        return made[0](made[1])


def state_of(model: nn.Module, without: str = "") -> dict[str, Tensor]:
    """Each tensor once."""
    seen: set[int] = set()
    state = {}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in seen and not (without and without in name):
            seen.add(tensor.data_ptr())
            state[name] = tensor.clone()
    return state


def differing(got: nn.Module, want: nn.Module) -> list[str]:
    pairs = zip(
        [*got.named_parameters(), *got.named_buffers()], [*want.named_parameters(), *want.named_buffers()], strict=True
    )
    return [name for (name, a), (_, b) in pairs if not torch.equal(a, b)]


EXTRA = {
    "old rotary frequencies": (llama, {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    "old position ids": (bert, {"embeddings.position_ids": (1, 512)}),
    "an extra prediction layer": (
        deepseek,
        {"model.layers.61.eh_proj.weight": (16, 32), "model.layers.61.mlp.experts.0.gate_proj.weight": (8, 16)},
    ),
}


@pytest.mark.parametrize("case", EXTRA)
def test_keys_that_the_class_ignores_may_be_left_over(case: str, tmp_path: Path) -> None:
    make, extra = EXTRA[case]
    whole = built(make())
    state = state_of(whole)
    save_file(state | {name: torch.ones(shape) for name, shape in extra.items()}, tmp_path / "model.safetensors")
    model = on_meta(make())
    report = epload.load(model, tmp_path, progress=False)
    assert differing(model, whole) == []
    assert (sorted(report.ignored_keys), report.unexpected_keys, report.missing_keys) == (sorted(extra), [], [])
    assert sorted(extra)[0] in str(report)


def test_ignored_missing_keys_are_computed(tmp_path: Path) -> None:
    """Marian saves no position tables: they are sines."""
    whole = built(marian())
    whole.save_pretrained(tmp_path)
    model = on_meta(marian())
    report = epload.load(model, tmp_path, progress=False)
    assert differing(model, whole) == []
    tables = ["model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight"]
    assert sorted(report.ignored_keys) == tables
    assert set(tables) <= set(report.initialized)
    assert report.missing_keys == []


def test_other_keys_are_still_an_error(tmp_path: Path) -> None:
    state = state_of(built(llama()), without="layers.1.mlp.up_proj")
    state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.extra.weight": torch.ones(2)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatch) as raised:
        epload.load(on_meta(llama()), tmp_path, progress=False)
    assert "model.layers.1.mlp.up_proj.weight" in str(raised.value)
    assert "model.extra.weight" in str(raised.value)
    assert "inv_freq" not in str(raised.value)


def test_a_mapping_ignores_what_it_says() -> None:
    model = nn.Linear(3, 2)
    state = {"w": torch.ones(2, 3), "bias": torch.zeros(2), "old.steps": torch.ones(1)}
    rename = (epload.mapping.Rename("^w$", "weight"),)
    with pytest.raises(ModelMismatch, match=r"old\.steps"):
        epload.load(model, state, mapping=Mapping(rename), progress=False)
    ignoring = Mapping(rename, ignore_unexpected=(r"^old\.",), ignore_missing=("^bias$",))
    assert epload.load(model, state, mapping=ignoring, progress=False).ignored_keys == ["old.steps"]
    del state["bias"]
    assert epload.load(model, state, mapping=ignoring, progress=False).ignored_keys == ["bias", "old.steps"]
    with pytest.raises(ValueError, match="regular expressions"):
        Mapping(ignore_missing=("(",))
