"""A rank of a recipe on CPU: ``run_recipe.py [--fsdp-on-cpu] RECIPE ARGUMENTS``, under torchrun."""

from __future__ import annotations

import os
import runpy
import sys
from typing import Any


def let_accelerate_shard_on_cpu() -> None:
    """accelerate ignores an FSDP plugin if there is no accelerator, although all that it does with one works over gloo."""
    from accelerate.state import AcceleratorState, PartialState
    from accelerate.utils import DistributedType

    original = AcceleratorState.__init__

    def initialize(self: Any, *args: Any, fsdp_plugin: Any = None, **options: Any) -> None:
        original(self, *args, fsdp_plugin=fsdp_plugin, **options)
        if self.distributed_type == DistributedType.MULTI_CPU and fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = initialize
    os.environ["ACCELERATE_USE_CPU"] = "true"


sys.argv.pop(0)
if sys.argv[0] == "--fsdp-on-cpu":
    sys.argv.pop(0)
    let_accelerate_shard_on_cpu()
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
# A thread of gloo may still be about to free tensors of the last collective, for which it needs Python. Where the interpreter
# ends first, torch aborts the process.
os._exit(0)
