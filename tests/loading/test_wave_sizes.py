"""How large the waves of a load are where the caller does not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from epload.loading.request import Options
from epload.loading.routes import Router

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("readers", "algorithm", "bucket_bytes", "device", "only_src", "megabytes"),
    [
        ("partitioned", "auto", None, CPU, False, 256),
        ("auto", "auto", None, CPU, False, 256),  # "partitioned", unless it is "every"
        ("auto", "auto", None, CPU, True, 48),  # "one"
        ("partitioned", "auto", None, CPU, True, 256),
        ("one", "auto", None, CPU, False, 48),
        ("every", "auto", None, CPU, False, 64),
        ("partitioned", "striped", None, CPU, False, 256),
        ("partitioned", "auto", None, CUDA, False, 256),
        ("one", "auto", None, CUDA, False, 256),
        ("auto", "auto", None, CUDA, False, 256),
        ("auto", "auto", None, CUDA, True, 256),
        ("auto", "auto", 5 << 20, CPU, False, 5),
    ],
)
def test_on_64_nodes(
    readers: str, algorithm: str, bucket_bytes: int | None, device: torch.device, only_src: bool, megabytes: int
) -> None:
    topology: Any = SimpleNamespace(nodes=tuple((2 * i, 2 * i + 1) for i in range(64)), ranks=tuple(range(128)), rank=0)
    router = Router(topology, Options(readers, algorithm, 0, bucket_bytes, False))
    planned = router.planned_readers(only_src)
    per_wave, nbytes = router.bucket_sizes(device, planned, 1 << 40)
    in_wave = per_wave if router.stages_on_host(device, planned) else 1
    assert 0 <= (megabytes << 20) - in_wave * nbytes < in_wave
