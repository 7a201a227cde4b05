"""Writes two tiny random checkpoints that the recipes beside this file run on, a dense and a Mixture-of-Experts model.

    python examples/tiny.py tiny

The folders tiny/dense and tiny/moe look like published Qwen3 checkpoints. Weights are larger than those
of an untrained model, so that a weight in the wrong place changes the loss.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

SIZES = {
    "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "initializer_range": 0.2, "tie_word_embeddings": False, "use_cache": False,
}  # fmt: skip


def main(folder: str) -> None:
    torch.manual_seed(0)
    dense = Qwen3Config(**SIZES)
    moe = Qwen3MoeConfig(**SIZES, moe_intermediate_size=48, num_experts=8, num_experts_per_tok=2)
    for name, config in (("dense", dense), ("moe", moe)):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(f"{folder}/{name}")
        print(f"wrote {folder}/{name}, {model.num_parameters()} parameters")


if __name__ == "__main__":
    main(sys.argv[1])
