"""Fixtures of all folders. ``npu``, ``vllm``, ``sglang``, ``verl`` and ``megatron`` need torch_npu, vLLM, SGLang, verl and
Megatron-Core; targets of the Makefile with these names run them in environments of their own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

collect_ignore = ["npu", "vllm", "sglang", "verl", "megatron"]
pytest.register_assert_rewrite("support")
# The same examples each time; campaigns/fuzz.py looks for others.
settings.register_profile("fuzz", deadline=None)
settings.register_profile("epload", deadline=None, derandomize=True)
settings.load_profile("epload")


@pytest.fixture(scope="session")
def fake_device() -> None:
    """Compiles the fake accelerator and epload's library for it once, outside the time limit of the ranks that load them."""
    from support.fakedev import build

    build.library()


@pytest.fixture(scope="session")
def gpu() -> Iterator[None]:
    if not torch.cuda.is_available():
        if os.environ.get("EPLOAD_FAIL_WITHOUT_CUDA") == "1":
            pytest.fail(f"EPLOAD_FAIL_WITHOUT_CUDA=1, but torch {torch.__version__} finds no CUDA device")
        pytest.skip(f"torch {torch.__version__} finds no CUDA device")
    yield
    torch.cuda.synchronize()
