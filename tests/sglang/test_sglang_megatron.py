"""Megatron-Core's ranks send versions to SGLang's own model classes, against SGLang's own load of the same checkpoints."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from engine import differences, make_model, make_rank

from support.jobs import Job, Meeting, run
from support.pretrained import published
from support.small_syncs import receiving, take

sys.path.append(str(Path(__file__).parents[1] / "megatron"))
import megatron_models as models

VERSIONS, WORKERS, CPU = (1, 2), 2, torch.device("cpu")


def serve(rank: int, meeting: Meeting, folder: Path, expert_parallel: int) -> list[list[str]]:
    """Returns the tensors that differ from what SGLang's own loader makes, for each version."""
    from sglang.srt.model_loader.loader import DefaultModelLoader

    from epload.integrations.sglang.model import SglangModel

    config = make_rank(folder / "1", WORKERS, ep_size=expert_parallel, context_length=64)
    model, found = make_model(config), []
    with receiving(meeting, SglangModel([model], CPU), timeout=100) as receiver:
        for version in VERSIONS:
            take(receiver, version)
            expected = make_model(config)
            weights = published(folder / str(version))
            DefaultModelLoader.load_weights_and_postprocess(expected, iter(weights.items()), CPU)
            found.append(differences(expected, model))
    return found


@pytest.mark.parametrize(
    ("family", "parallel", "expert_parallel"),
    [("qwen3_moe", (2, 2, 2), 2), ("qwen3_moe", (2, 1, 2, 2), 1), ("llama", (2, 2), 1)],
)
def test_megatron_fills_sglangs_models(family: str, parallel: tuple[int, ...], expert_parallel: int, tmp_path: Path) -> None:
    for version in VERSIONS:
        models.write_checkpoint(family, tmp_path / str(version), seed=version)
        config = tmp_path / str(version) / "config.json"
        content = json.loads(config.read_text())
        content["architectures"] = [{"llama": "LlamaForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM"}[family]]
        config.write_text(json.dumps(content))
    layout = models.Layout(*parallel)
    jobs = [
        Job(4, models.send, (family, layout, tmp_path, VERSIONS, WORKERS)),
        Job(WORKERS, serve, (tmp_path, expert_parallel)),
    ]
    assert run(jobs, limit=200)[1] == [[[], []]] * WORKERS
