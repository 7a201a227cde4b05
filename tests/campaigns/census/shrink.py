"""Shrinks the configurations of the transformers library until their models build in a few megabytes.

Widths are divided by one factor, so that what holds between them (heads times head size is the hidden size, a sum is a
concatenation) still holds; layers, experts and vocabularies are cut to small numbers. If a model does not build so, a gentler
rung of :data:`LADDER` is tried.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, PreTrainedConfig


@dataclass(frozen=True)
class Rung:
    """One way to shrink."""

    divisor: int
    """Divides widths."""
    cut_layers: bool
    lists: bool = True
    """True if lists, such as the type of each layer, are shortened; else the class computes its own."""


LADDER = (
    Rung(16, True), Rung(16, True, lists=False), Rung(8, True), Rung(4, True), Rung(4, True, lists=False), Rung(16, False),
    Rung(2, True), Rung(4, False), Rung(2, True, lists=False), Rung(1, True), Rung(1, True, lists=False), Rung(1, False),
)  # fmt: skip

_LAYERS = re.compile(
    r"(^|_)(num|n)_(\w+_)?(layers?|blocks?|stages_layers)$|^(n_layers?|layers|depth|\w+_(layers|depth)|n_blocks?|\w+_num_layers)$"
    r"|^(num_layers|num_hidden_groups|num_block_repeats|n_head_layers)$|layers$"
)
_NOT_LAYERS = re.compile(r"upsampl|downsampl|feat_extract|feature_layer|conv|adapter_layers|mlp_only|vq|fpn|num_stages")
_DEPTHS = re.compile(r"^(\w+_)?depths?$|^layer_depths$|^num_blocks$|^(\w+_)?num_layers$|^layers$")
_WIDTHS = re.compile(
    r"hidden|dim|d_model|d_kv|d_ff|d_inner|ffn|inner|intermediate|width|channels|filters|rank|embed|features|units|_size$|^size$"
    r"|n_embd|n_inner|mlp_size|d_state|embedding"
)
_NOT_WIDTHS = re.compile(
    r"vocab|patch|image|kernel|window|^num_|_num_|position|crop|frames|batch|token|chunk|block|bucket|num_channels|in_channels"
    r"|_layers?$|bins|codebook_size|pool|stride|input_size|img|ratio|spatial|downsampl|group|memory_size|max_|sample|act|shape"
)
_EXPERTS = re.compile(r"(^|_)(num|n)_?(\w+_)?experts$|^(moe_)?num_(local_)?experts$|^n_routed_experts$|^num_routed_experts$")
_CHOSEN = re.compile(r"experts_per_tok|^top_?k(_experts?)?$|moe_(top_?)?k$|num_selected_experts")
_PADDING = re.compile(r"(pad\w*|blank_token)(_id|_idx|_index)$")

EXPERTS, LAYERS, VOCABULARY, POSITIONS = 8, 2, 320, 256


def candidates(config_class: type[PreTrainedConfig]) -> Iterator[tuple[Rung, Callable[[], Any]]]:
    """Shrunken configurations of a class, the smallest first, each with a function that makes it."""
    special = SPECIAL.get(config_class.__name__)
    for rung in LADDER:
        if special is not None:
            yield rung, lambda rung=rung: special(config_class, rung)
        else:
            yield rung, lambda rung=rung: shrunk(config_class(**NEEDED.get(config_class.__name__, {})), rung)


def shrunk(config: PreTrainedConfig, rung: Rung, **more: Any) -> Any:
    """A configuration like this one, but small. ``more`` are arguments that are taken as they are."""
    return type(config)(**{**NEEDED.get(type(config).__name__, {}), **changes(config, rung), **more})


def changes(config: PreTrainedConfig, rung: Rung) -> dict[str, Any]:
    """The arguments with which the class makes a smaller configuration; those that do not change are left out."""
    plain = {name: value for name, value in config.__dict__.items() if not name.startswith("_")}
    kept, length = _layers(plain, rung)
    changed: dict[str, Any] = {}
    for name, value in plain.items():
        new = _smaller(name, value, rung, kept, length)
        if new is not value:
            changed[name] = new
    vocabulary = changed.get("vocab_size", plain.get("vocab_size"))
    for name, value in plain.items():
        if isinstance(value, int) and isinstance(vocabulary, int) and _PADDING.search(name) and value >= vocabulary:
            changed[name] = vocabulary - 1
    return changed


def _given(config: PreTrainedConfig) -> dict[str, Any]:
    """Returns how a configuration within another differs from its class's own."""
    plain = {name: value for name, value in config.__dict__.items() if not name.startswith("_")}
    needed = NEEDED.get(type(config).__name__, {})
    try:
        usual = type(config)().__dict__
    except Exception:
        return {**plain, **needed}
    given = {k: v for k, v in plain.items() if not isinstance(v, PreTrainedConfig) and (k not in usual or usual[k] != v)}
    return {**given, **needed}


def _layers(plain: dict[str, Any], rung: Rung) -> tuple[list[int], int]:
    """Returns which layers are kept, and how many there were: two, and one of each kind."""
    counts = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    length = next((plain[name] for name in counts if isinstance(plain.get(name), int)), 0)
    if not rung.cut_layers:
        return list(range(length)), length
    kinds = [
        value
        for value in plain.values()
        if isinstance(value, list) and len(value) == length and all(isinstance(v, str | bool) for v in value)
    ]
    kept = list(range(min(LAYERS, length)))
    seen = {tuple(kind[i] for kind in kinds) for i in kept}
    for i in range(length):
        of_layer = tuple(kind[i] for kind in kinds)
        if of_layer not in seen and len(kept) < 6:
            seen.add(of_layer)
            kept.append(i)
    return kept, length


def _smaller(name: str, value: Any, rung: Rung, kept: list[int], length: int) -> Any:
    if isinstance(value, PreTrainedConfig):
        # As an object: a class that takes any configuration would not know a dictionary's class.
        return type(value)(**{**_given(value), **changes(value, rung)})
    if isinstance(value, bool) or value is None or isinstance(value, str | float):
        return value
    if isinstance(value, dict):
        if name.startswith("rope_") and "mrope_section" in value:
            sections = value["mrope_section"]
            if all(size % rung.divisor == 0 for size in sections) and rung.divisor > 1:
                return {**value, "mrope_section": [size // rung.divisor for size in sections]}
            return value
        if name.endswith("config") and value:
            return {k: _smaller(k, v, rung, kept, length) for k, v in value.items()}
        return value
    if isinstance(value, int):
        return _smaller_int(name, value, rung, kept, length)
    if isinstance(value, list | tuple) and value and rung.lists:
        return _smaller_list(name, value, rung, kept, length)
    return value


def _smaller_int(name: str, value: int, rung: Rung, kept: list[int], length: int) -> int:
    if _LAYERS.search(name) and not _NOT_LAYERS.search(name):
        if not rung.cut_layers or value <= LAYERS:
            return value
        return len(kept) if value == length else LAYERS
    if name in ("upsample_groups", "adapter_input_size"):
        return value // rung.divisor if value % rung.divisor == 0 else value
    if name.endswith("vocab_size") or re.search(r"(^|_)vocab_size", name) or name in ("n_vocab", "num_embeddings"):
        return min(value, VOCABULARY)
    if "position_embeddings" in name or name in ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length"):
        return min(value, POSITIONS) if value > 1024 else value
    if _EXPERTS.search(name):
        return min(value, EXPERTS)
    if _CHOSEN.search(name):
        return min(value, 2)
    if _WIDTHS.search(name) and not _NOT_WIDTHS.search(name) and value >= 16 and value % rung.divisor == 0:
        return value // rung.divisor
    return value


def _smaller_list(name: str, value: Any, rung: Rung, kept: list[int], length: int) -> Any:
    numbers = all(isinstance(v, int) and not isinstance(v, bool) for v in value)
    if numbers and _DEPTHS.search(name) and rung.cut_layers:
        return [min(v, 2) for v in value]
    if length > len(kept) and len(value) == length and name not in ("out_indices", "out_features", "stage_names"):
        return [value[i] for i in kept]
    if numbers and re.search(r"layers|indices|indexes|idxs|_idx", name) and "out_" not in name and length > len(kept):
        return [v for v in value if v < len(kept)]
    is_width = numbers and _WIDTHS.search(name) and not _NOT_WIDTHS.search(name)
    if is_width and all(v >= 16 and v % rung.divisor == 0 for v in value):
        return [v // rung.divisor for v in value]
    return value


# ---- classes whose configuration says nothing by itself ----


def _of(model_type: str, rung: Rung, **more: Any) -> Any:
    return shrunk(AutoConfig.for_model(model_type), rung, **more)


def _encoder_decoder(encoder: str, decoder: str) -> Callable[[type[Any], Rung], Any]:
    def make(config_class: type[Any], rung: Rung) -> Any:
        first, second = _of(encoder, rung), _of(decoder, rung, is_decoder=True, add_cross_attention=True)
        return config_class.from_encoder_decoder_configs(first, second)

    return make


def _dual(vision: str, text: str) -> Callable[[type[Any], Rung], Any]:
    def make(config_class: type[Any], rung: Rung) -> Any:
        return config_class.from_vision_text_configs(_of(vision, rung), _of(text, rung))

    return make


def _rag(config_class: type[Any], rung: Rung) -> Any:
    return config_class.from_question_encoder_generator_configs(_of("dpr", rung), _of("bart", rung))


def _musicgen(config_class: type[Any], rung: Rung) -> Any:
    decoder = "musicgen_melody_decoder" if "Melody" in config_class.__name__ else "musicgen_decoder"
    return config_class(text_encoder=_of("t5", rung), audio_encoder=_of("encodec", rung), decoder=_of(decoder, rung))


_LAYER_TYPES = {"layer_types": ["conv", "full_attention"] * 16}
NEEDED: dict[str, dict[str, Any]] = {
    "AutoformerConfig": {"prediction_length": 8},
    "InformerConfig": {"prediction_length": 8},
    "TimeSeriesTransformerConfig": {"prediction_length": 8},
    "BeitConfig": {"num_hidden_layers": 4, "out_indices": [1, 2, 3, 4]},
    "ChameleonConfig": {"vocabulary_map": {"<image>": 4, "<s>": 1, "IMGIMGA": 5}},
    "Dots1Config": {"n_routed_experts": 8},
    "DiffusionGemmaTextConfig": {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "top_k_experts": 2,
        "moe_intermediate_size": 64,
    },
    "EsmConfig": {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32},
    "HieraConfig": {"decoder_hidden_size": 32, "decoder_depth": 2, "decoder_num_heads": 4},
    "HunYuanDenseV1Config": {"head_dim": 128},
    "HunYuanMoEV1Config": {"head_dim": 128},
    "HunYuanVLTextConfig": {"head_dim": 128},
    "Lfm2MoeConfig": _LAYER_TYPES,
    "MinistralConfig": {"head_dim": 128},
    "NemotronConfig": {"num_key_value_heads": 8},
    "Granite4VisionConfig": {"deepstack_layer_map": {0: 0}},
    "DeepseekOcr2TextConfig": {"mlp_layer_types": ["dense", "sparse"] * 6},
    "ReformerConfig": {"is_decoder": True},
}
"""Options that the configuration of a class has to be given, since its own values do not make a model."""

SPECIAL: dict[str, Callable[[type[Any], Rung], Any]] = {
    "EncoderDecoderConfig": _encoder_decoder("bert", "bert"),
    "VisionEncoderDecoderConfig": _encoder_decoder("vit", "bert"),
    "SpeechEncoderDecoderConfig": _encoder_decoder("wav2vec2", "bert"),
    "VisionTextDualEncoderConfig": _dual("vit", "bert"),
    "RagConfig": _rag,
    "MusicgenConfig": _musicgen,
    "MusicgenMelodyConfig": _musicgen,
}


def copy_of(config: Any) -> Any:
    """Models change the configuration that they are made from."""
    return copy.deepcopy(config)
