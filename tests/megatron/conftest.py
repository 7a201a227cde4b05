"""Ranks are forked from a process that has imported Megatron-Core."""

from __future__ import annotations

import os
import warnings

from support import ranks

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
warnings.simplefilter("ignore")  # Megatron-Core says at each import what it does without
os.environ.setdefault("PYTHONWARNINGS", "ignore")
ranks._context.set_forkserver_preload(
    [
        "torch", "torch._dynamo", "torch.distributed.fsdp", "epload", "pytest", "transformers.modeling_utils",
        "transformers.models.auto.modeling_auto", "transformers.conversion_mapping", "megatron.core.models.gpt",
        "megatron.core.models.gpt.gpt_layer_specs", "megatron.core.dist_checkpointing",
    ]
)  # fmt: skip
