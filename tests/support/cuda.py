"""The GPU of tests on real hardware, and the groups over it."""

from __future__ import annotations

import torch

DEVICE = "cuda:0"


def gloo() -> str:
    return "cpu:gloo,cuda:gloo"


def nccl() -> str:
    torch.cuda.set_device(0)
    return "cpu:gloo,cuda:nccl"
