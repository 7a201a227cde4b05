"""A model whose experts are one fused parameter, and its checkpoint."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

EXPERTS, WIDTH, HIDDEN = 12, 6, 4


def checkpoint() -> dict[str, Tensor]:
    """Experts one by one, every element of its own value."""
    made = {
        f"experts.{i}.{part}": (i * 2 + n) * 1000.0 + torch.arange(WIDTH * HIDDEN).reshape(WIDTH, HIDDEN)
        for i in range(EXPERTS)
        for n, part in enumerate(("gate", "up"))
    }
    return made | {"norm": torch.arange(7.0)}


def fused() -> Tensor:
    file = checkpoint()
    return torch.stack([torch.cat([file[f"experts.{i}.gate"], file[f"experts.{i}.up"]]) for i in range(EXPERTS)])


class Fused(nn.Module):
    """This rank's experts in one plain parameter, which looks like a whole one."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.experts = nn.Module()
        self.experts.gate_up = nn.Parameter(torch.empty(experts, 2 * WIDTH, HIDDEN))
        self.norm = nn.Parameter(torch.empty(7))


def store(folder: Path) -> None:
    save_file(checkpoint(), folder / "model.safetensors")
    save_file({"experts.gate_up": fused(), "norm": checkpoint()["norm"]}, folder / "fused.safetensors")
