"""Models of the transformers library: a trainer under FSDP2 or expert parallelism, engines that are parallelized in other ways.

The oracle is the library itself: the same weights built in one process and parallelized as the engine is, tensor by tensor and
bit for bit, and for full tensors what ``save_pretrained`` writes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.checkpoints import assert_same
from support.checks import all_fine, differences, fill
from support.jobs import Job, Meeting, run
from support.pretrained import build, by_the_library, by_torch, fsdp, published, quiet, random
from support.small_syncs import receiving, sending, take

VERSIONS = (1, 2)
FSDP = partial(fsdp, shard=2)
TP = partial(by_the_library, tp_size=2)
TORCH_TP = partial(by_torch, tp=2, dp=1)
EP = partial(by_the_library, ep_size=2, fsdp_size=2)
Parallelize = Callable[[Any], Any]

CASES: dict[str, tuple[Parallelize, tuple[Parallelize, ...]]] = {
    "qwen3_moe": (FSDP, (TP, EP)),
    "mixtral": (FSDP, (TP, EP)),
    "deepseek_v3": (FSDP, (TP, EP)),
    "gpt_oss": (FSDP, (TORCH_TP, EP)),
    "qwen3_vl_moe": (EP, (TP, FSDP)),
    "llama": (FSDP, (TP,)),
    "gemma3": (FSDP, (TP,)),
}


def train(rank: int, meeting: Meeting, kind: str, parallelize: Parallelize, receivers: int) -> list[str]:
    model = parallelize(random(kind, 0))
    with sending(meeting, model, receivers, delta="always") as sender:
        for version in VERSIONS:
            fill(model, random(kind, version).state_dict())
            sender.send_weights(version)
    return []


def serve(rank: int, meeting: Meeting, kind: str, parallelize: Parallelize) -> list[str]:
    model = parallelize(build(kind))
    wrong = []
    with receiving(meeting, model) as receiver:
        for version in VERSIONS:
            take(receiver, version)
            expected = parallelize(random(kind, version))
            wrong += [f"version {version}: {text}" for text in differences(expected, model)]
    return wrong


def take_full_tensors(rank: int, meeting: Meeting, kind: str, folder: Path) -> list[str]:
    with receiving(meeting, None) as receiver:
        for version in VERSIONS:
            receiver.receive_weights(version)
            random(kind, version).save_pretrained(folder / str(version))
            assert_same(dict(receiver.tensors()), published(folder / str(version)))
    return []


@pytest.mark.parametrize("kind", CASES)
def test_engines_get_the_models_that_the_library_makes(kind: str, tmp_path: Path) -> None:
    trainer, engines = CASES[kind]
    jobs = [Job(2, train, (kind, trainer, 2 * len(engines) + 1)), Job(1, take_full_tensors, (kind, tmp_path))]
    jobs += [Job(2, serve, (kind, engine)) for engine in engines]
    all_fine([wrong for job in run([job._replace(setup=quiet) for job in jobs]) for wrong in job])
