"""Megatron-Core's ranks send versions to vLLM's own model classes, against vLLM's own reload of the same checkpoints."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from engine import differences, start_engine

import epload
from support.jobs import Job, Meeting, run
from support.pretrained import published
from support.recordings import poison, tensors_of
from support.small_syncs import receiving, take

sys.path.append(str(Path(__file__).parents[1] / "megatron"))
import megatron_models as models

VERSIONS = (1, 2)
WORKERS = 2


def serve(rank: int, meeting: Meeting, folder: Path) -> list[list[str]]:
    """Returns the tensors that differ from what vLLM's own loader makes, for each version."""
    from epload.integrations.vllm import VllmModel

    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"
    model, config = start_engine(folder / "1", WORKERS)
    with pytest.raises(epload.ModelMismatch, match=r"changes its weights after loading them .*VllmModel"):
        epload.EngineModel(model).sync_target(strict=True)
    differing = []
    with receiving(meeting, VllmModel(model, config, torch.device("cpu")), timeout=100) as receiver, torch.no_grad():
        for version in VERSIONS:
            poison(model)
            take(receiver, version)
            assert not any(tensor.isnan().any() for tensor in tensors_of(model).values())
            differing.append(differences(model, config, published(folder / str(version))))
    return differing


@pytest.mark.parametrize(("family", "parallel"), [("qwen3_moe", (2, 2, 2)), ("llama", (2, 2, 1))])
def test_megatron_fills_vllms_models(family: str, parallel: tuple[int, int, int], tmp_path: Path) -> None:
    for version in VERSIONS:
        models.write_checkpoint(family, tmp_path / str(version), seed=version)
    jobs = [
        Job(4, models.send, (family, models.Layout(*parallel), tmp_path, VERSIONS, WORKERS)),
        Job(WORKERS, serve, (tmp_path,)),
    ]
    assert run(jobs, limit=200)[1] == [[[], []]] * WORKERS
