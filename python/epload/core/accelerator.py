"""Finds out whether this process uses an accelerator, without initializing its library."""

from __future__ import annotations

import torch


def is_in_use() -> bool:
    """Returns True if this process has initialized torch's part for an accelerator."""
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and bool(getattr(torch, accelerator.type).is_initialized())
