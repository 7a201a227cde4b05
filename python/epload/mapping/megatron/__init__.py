"""Megatron-Core's models: where the tensors of Hugging Face checkpoints are in the parameters of one rank."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import chain

from epload.core.views import Shape
from epload.errors import ModelMismatch
from epload.mapping.mapping import Mapping
from epload.mapping.megatron.names import LAYER, MODEL, pattern_of
from epload.mapping.megatron.regions import place_shards
from epload.mapping.megatron.shards import read_shards
from epload.model.megatron import MegatronChunks

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of the tensors that a model may tie."""
_COMPUTED = r"(^|\.)rotary_emb\.inv_freq$"
"""Pattern of what older checkpoints have, and every model computes."""


def check_is_auto(mapping: object) -> None:
    """Raises ValueError for the mapping of a caller, which Megatron-Core's models do not take."""
    if mapping != "auto":
        raise ValueError(
            f"expected mapping='auto' for a Megatron-Core model, got {mapping!r}; add names of your own to the tables in "
            "epload.mapping.megatron.names"
        )


def from_megatron(chunks: MegatronChunks, names: Sequence[str], shapes: Sequence[Shape]) -> Mapping:
    """Returns the mapping by which a Hugging Face checkpoint fills the modules of one rank.

    Args:
        names, shapes: of the checkpoint's tensors.

    Raises:
        ModelMismatch, ValueError: see :func:`~epload.mapping.megatron.shards.read_shards` and
            :func:`~epload.mapping.megatron.regions.place_shards`; or the model ties what has different shapes.
    """
    shards, tensors = read_shards(chunks)
    placed, _ = place_shards(shards, tensors, chunks.config, names, shapes)
    if chunks.ties_embeddings and HEAD in names and EMBEDDING in names:  # whose values the load compares
        embedding, head = names.index(EMBEDDING), names.index(HEAD)
        if shapes[embedding] != shapes[head]:
            raise ModelMismatch(
                f"{HEAD} and {EMBEDDING} have different shapes in the checkpoint, and Megatron's model has "
                "share_embeddings_and_output_weights; build it without"
            )
        alias_of = {name: alias for alias, name in chunks.tied_names().items()}
        placed[head] = tuple((alias_of[name], view) for name, view in placed[embedding] if name in alias_of)
    ignored = (_COMPUTED, *prediction_patterns(names, chunks.config))
    return Mapping(places=tuple(placed), ignore_unexpected=ignored)


def prediction_patterns(names: Sequence[str], config: object) -> list[str]:
    """Returns patterns of what a checkpoint has for multi-token prediction that Megatron's model does not hold: the whole layers
    if it predicts one token, else their copies of the embedding and of the head."""
    if getattr(config, "mtp_num_layers", None):
        return [f"^{re.escape(name)}$" for name in prediction_copies(names)]
    return [f"^{re.escape(layer)}" for layer in _prediction_layers(names)]


def prediction_copies(names: Sequence[str]) -> dict[str, str]:
    """Returns the copies of other tensors in a checkpoint's layers for multi-token prediction, with the names of the others."""
    copies = {"embed_tokens.weight": EMBEDDING, "shared_head.head.weight": HEAD}
    pairs = {f"{layer}{inner}": name for layer in _prediction_layers(names) for inner, name in copies.items()}
    return {name: pairs[name] for name in names if name in pairs}


def _prediction_layers(names: Sequence[str]) -> list[str]:
    """Returns the prefixes of a checkpoint's layers for multi-token prediction."""
    matches = (re.fullmatch(r"(model\.layers\.\d+\.)eh_proj\.weight", name) for name in names)
    return [match[1] for match in matches if match]


def unknown_names(names: Sequence[str], config: object) -> tuple[list[str], list[str]]:
    """Returns which names of a checkpoint no Megatron model holds as they are computed or copies, and which the tables lack."""
    ignored = re.compile("|".join((_COMPUTED, *prediction_patterns(names, config))))
    patterns = {name for options in (MODEL | LAYER).values() for name in chain.from_iterable(options)}
    left_out = [name for name in names if ignored.search(name)]
    return left_out, [name for name in names if not ignored.search(name) and pattern_of(name) not in patterns]
