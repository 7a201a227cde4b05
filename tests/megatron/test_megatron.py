"""Loads, saves and syncs of Megatron-Core's models, against what each rank has to hold and against transformers."""

from __future__ import annotations

from pathlib import Path

import megatron_models as models
import pytest
import safetensors.torch
import torch
from megatron_models import Layout

import epload
from support import ranks

IDS = torch.tensor([[5, 9, 100, 322, 7, 1, 2, 3]])
LAYOUTS = [
    ("llama", 2, Layout(tp=2)),
    ("llama", 4, Layout(pp=4)),
    ("qwen2", 4, Layout(tp=2, pp=2)),
    ("qwen3", 2, Layout(tp=2)),
    ("qwen3", 8, Layout(tp=8)),
    ("qwen3", 2, Layout(pp=2, vp=2)),
    ("qwen3_moe", 4, Layout(tp=2, pp=2, ep=2)),
    ("qwen3_moe", 4, Layout(tp=2, ep=2, etp=2)),
    ("mixtral", 4, Layout(tp=2, ep=4)),
    ("deepseek_v3", 4, Layout(tp=2, pp=2, ep=2)),
]
NAMES = [f"{family} {layout}" for family, _, layout in LAYOUTS]


def load(rank: int, family: str, layout: Layout, folder: Path) -> list[str]:
    chunks = models.build(family, layout)
    epload.load(chunks, folder, timeout=60, progress=False)
    return models.differences(chunks, family, safetensors.torch.load_file(folder / "model.safetensors"))


@pytest.mark.parametrize(("family", "world", "layout"), LAYOUTS, ids=NAMES)
def test_each_rank_has_its_part(family: str, world: int, layout: Layout, tmp_path: Path) -> None:
    models.write_checkpoint(family, tmp_path)
    for wrong in ranks.run(world, load, family, layout, tmp_path):
        assert wrong == []
