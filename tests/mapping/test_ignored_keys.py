"""Keys that a class of transformers says to ignore: no error in a strict load, listed, and initialized where they are missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import MarianConfig, MarianMTModel

import epload
from epload import Mapping, ModelMismatch
from support.findings import differing
from support.models import on_meta
from support.pretrained import build
from support.recordings import tensors_of


def marian() -> Any:
    config = MarianConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=24, decoder_ffn_dim=24, vocab_size=33, pad_token_id=32, max_position_embeddings=19,
        decoder_start_token_id=32,
    )  # fmt: skip
    return MarianMTModel(config).eval()


EXTRA = {
    "old rotary frequencies": ("llama", {"model.layers.0.self_attn.rotary_emb.inv_freq": (4,)}),
    "old position ids": ("bert", {"bert.embeddings.position_ids": (1, 512)}),
    "an extra prediction layer": (
        "deepseek_v3",
        {"model.layers.61.eh_proj.weight": (16, 32), "model.layers.61.mlp.experts.0.gate_proj.weight": (8, 16)},
    ),
}


@pytest.mark.parametrize("case", EXTRA)
def test_keys_that_the_class_ignores_may_be_left_over(case: str, tmp_path: Path) -> None:
    kind, extra = EXTRA[case]
    whole = build(kind)
    whole.save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    save_file(state | {name: torch.ones(shape) for name, shape in extra.items()}, tmp_path / "model.safetensors")
    model = on_meta(lambda: build(kind))
    report = epload.load(model, tmp_path, progress=False)
    assert differing(tensors_of(model), tensors_of(whole)) == []
    assert (sorted(report.ignored_keys), report.unexpected_keys, report.missing_keys) == (sorted(extra), [], [])
    assert sorted(extra)[0] in str(report)


def test_ignored_missing_keys_are_computed(tmp_path: Path) -> None:
    """Marian saves no position tables: they are sines."""
    whole = marian()
    whole.save_pretrained(tmp_path)
    model = on_meta(marian)
    report = epload.load(model, tmp_path, progress=False)
    assert differing(tensors_of(model), tensors_of(whole)) == []
    tables = ["model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight"]
    assert sorted(report.ignored_keys) == tables
    assert set(tables) <= set(report.initialized)
    assert report.missing_keys == []


def test_other_keys_are_still_an_error(tmp_path: Path) -> None:
    state = dict(build("llama").state_dict())
    del state["lm_head.weight"], state["model.layers.1.mlp.up_proj.weight"]
    state |= {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4), "model.extra.weight": torch.ones(2)}
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(ModelMismatch) as raised:
        epload.load(on_meta(lambda: build("llama")), tmp_path, progress=False)
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
