"""A model of your own: fused where its checkpoint is not, with other names, and a table more.

torchrun --standalone --nproc-per-node 2 examples/own_model.py tiny/moe tiny/own
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from transformers import AutoModelForCausalLM

import epload
from epload.mapping import Concatenate, Convert, Mapping, Rename, Stack

H, HEADS, KV, D, EXPERTS, WIDTH, VOCABULARY, LAYERS = 64, 4, 2, 16, 8, 48, 128, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(H, eps=1e-6), nn.RMSNorm(H, eps=1e-6)
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)
        self.qkv, self.out = (
            nn.Linear(H, (HEADS + 2 * KV) * D, False),
            nn.Linear(HEADS * D, H, False),
        )
        self.router = nn.Linear(H, EXPERTS, False)
        self.up, self.down = (
            nn.Parameter(torch.empty(EXPERTS, 2 * WIDTH, H)),
            nn.Parameter(torch.empty(EXPERTS, H, WIDTH)),
        )
        self.register_buffer("frequencies", torch.empty(D // 2), persistent=False)

    def reset_parameters(self) -> None:  # of what no checkpoint has: see init_missing below
        self.frequencies.copy_(10000.0 ** -(torch.arange(0, D, 2) / D))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.norm1(x)).unflatten(-1, (-1, D)).split((HEADS, KV, KV), 2)
        angles = torch.arange(x.shape[1], device=x.device)[
            :, None, None
        ] * self.frequencies.repeat(2)
        q, k = (norm(part) for norm, part in zip((self.q_norm, self.k_norm), parts, strict=False))
        turned = (torch.cat((-part[..., D // 2 :], part[..., : D // 2]), -1) for part in (q, k))
        q, k = (a * angles.cos() + b * angles.sin() for a, b in zip((q, k), turned, strict=True))
        heads = (part.transpose(1, 2) for part in (q, k, parts[2]))
        attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        weights, chosen = self.router(y).softmax(-1).topk(2)
        gate, up = torch.einsum("bth,eih->btei", y, self.up).chunk(2, -1)
        of_experts = torch.einsum("btei,ehi->bteh", F.silu(gate) * up, self.down)
        return x + (
            of_experts.gather(2, chosen[..., None].expand(-1, -1, -1, H)) * weights[..., None]
        ).sum(2)


class Model(nn.Sequential):
    def __init__(self) -> None:
        layers = (Layer() for _ in range(LAYERS))
        head = nn.RMSNorm(H, eps=1e-6), nn.Linear(H, VOCABULARY, False)
        super().__init__(nn.Embedding(VOCABULARY, H), *layers, *head)


EXPERT = r"mlp\.experts\.(?P<index>\d+)\."
MAPPING = Mapping(
    renames=(
        Rename(r"^model\.embed_tokens", "0"),
        Rename(
            r"^model\.layers\.(\d+)", r"\1", shift=1
        ),  # layer 0 is the module after the embedding
        Rename(r"^model\.norm", f"{LAYERS + 1}"),
        Rename(r"^lm_head", f"{LAYERS + 2}"),
        Rename(r"input_layernorm", "norm1"),
        Rename(r"post_attention_layernorm", "norm2"),
        Rename(r"self_attn\.o_proj", "out"),
        Rename(r"self_attn\.([qk]_norm)", r"\1"),
        Rename(r"mlp\.gate\.", "router."),
    ),
    converts=(
        Convert(tuple(rf"self_attn\.{x}_proj" for x in "qkv"), ("qkv",), (Concatenate(0),)),
        Convert(
            (rf"{EXPERT}gate_proj\.weight", rf"{EXPERT}up_proj\.weight"),
            ("up",),
            (Stack(0), Concatenate(1)),
        ),
        Convert((rf"{EXPERT}down_proj\.weight",), ("down",), (Stack(0),)),
    ),
)


def main(checkpoint: str, folder: str) -> None:
    dist.init_process_group("gloo")
    with torch.device("meta"):
        model = Model()
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    report = epload.load(model, checkpoint, mapping=MAPPING, init_missing="reset_parameters")
    config = f"{checkpoint}/config.json"
    epload.save(
        model, folder, mapping=MAPPING, names_from=checkpoint, files=[config], overwrite=True
    )
    tokens = torch.arange(64).reshape(2, 32)
    loss = F.cross_entropy(model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).item()
    if dist.get_rank() == 0:
        print(report)
        theirs = AutoModelForCausalLM.from_pretrained(folder).to(tokens.device)
        their_loss = theirs(tokens, labels=tokens).loss.item()
        print(f"loss {loss:.4f}, {their_loss:.4f} of transformers' model of what was saved")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
