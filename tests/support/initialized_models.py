"""A small model of transformers, and the loader, of the tests of what a checkpoint does not fill."""

from __future__ import annotations

from typing import Any

import epload
from epload import Topology

NODES = [[0, 1], [2, 3]]
HEAD = "lm_head.weight"


def loader() -> epload.HierarchicalLoader:
    return epload.HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=4096, progress=False, timeout=60)


def llama(**options: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 24, "intermediate_size": 36, "num_hidden_layers": 2, "vocab_size": 37}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 3, "tie_word_embeddings": False}
    return LlamaForCausalLM(LlamaConfig(**(sizes | options)))
