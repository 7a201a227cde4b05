"""Bounded memory: above the shards, a load takes two buckets, and little else."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from support import ranks
from support.memory import anonymous_and_shared

BUCKET = 8 << 20
LAYERS, WIDTH = 96, 768  # 226 MB of float32


def load_and_watch(rank: int, path: str, readers: str) -> tuple[int, int]:
    """Bytes of this rank's shards, and the most memory above the start that was seen."""
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    loader = epload.HierarchicalLoader(
        epload.Topology.from_nodes([[0, 1], [2, 3]]), readers=readers, bucket_bytes=BUCKET, progress=False
    )
    start = peak = anonymous_and_shared()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.001):
            peak = max(peak, anonymous_and_shared())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        report = loader.load(model, path)
    finally:
        done.set()
        watcher.join()
    assert report.peak_staging <= 2 * BUCKET
    return sum(p.to_local().nbytes for p in model.parameters()), max(peak, anonymous_and_shared()) - start


def test_transformers_43749_45649_ms_swift_9980_pytorch_149640_peak_memory_is_shards_and_two_buckets(
    tmp_path: Path,
) -> None:
    state = {f"{i}.weight": torch.full((WIDTH, WIDTH), float(i)) for i in range(LAYERS)}
    save_file(state, tmp_path / "model.safetensors")
    for readers in ("one", "per_node"):
        for rank, (shards, peak) in enumerate(ranks.run(4, load_and_watch, str(tmp_path), readers)):
            allowed = shards + 2 * BUCKET + (100 << 20)
            assert peak <= allowed, f"{readers}: rank {rank} took {peak} bytes, allowed {allowed}"
            assert shards == LAYERS * WIDTH * WIDTH  # a quarter of 4 bytes an element
