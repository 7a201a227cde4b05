"""Syncs the weights of a trainer into an inference engine of another job after each of three optimizer steps, and checks them.

    make demo-sync                  # or: python examples/demo/demo_sync.py, in an environment with epload and transformers

Writes a small Qwen3-MoE checkpoint with transformers and starts two jobs under torchrun: sync_trainer.py trains it under FSDP2,
sync_engine.py serves it under the library's own tensor parallelism. Read those two as recipes.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig
from transformers.utils import logging

logging.disable_progress_bar()

LIMIT = 180.0
"""Seconds that both jobs may take, far more than they need on an idle machine."""


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
        intermediate_size=512, moe_intermediate_size=128, num_experts=32, num_experts_per_tok=4,
    )  # fmt: skip


def start(script: str, folder: str) -> subprocess.Popen[bytes]:
    torchrun = [
        sys.executable,
        *["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"],
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
    return subprocess.Popen(
        [*torchrun, str(Path(__file__).with_name(script)), folder],
        env=environment,
        start_new_session=True,
    )


def wait(jobs: dict[str, subprocess.Popen[bytes]]) -> str:
    """Waits until all jobs have ended well. Returns what went wrong, or an empty string."""
    until = time.monotonic() + LIMIT
    while any(job.poll() is None for job in jobs.values()):
        for name, job in jobs.items():
            if job.poll():
                return f"{name} ended with exit code {job.returncode}"
        if time.monotonic() >= until:
            return f"the jobs have not ended within {LIMIT:.0f} s"
        time.sleep(0.1)
    return "".join(
        f"{name} ended with exit code {job.returncode}"
        for name, job in jobs.items()
        if job.returncode
    )


def stop(job: subprocess.Popen[bytes]) -> None:
    """Ends a job and all its ranks."""
    job.terminate()
    with suppress(subprocess.TimeoutExpired):
        job.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(job.pid, signal.SIGKILL)


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="epload-demo-sync-") as folder:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config(), dtype=torch.float32).save_pretrained(folder)
        print(
            "Qwen3-MoE: a trainer (FSDP2 on 2 ranks), and an engine (tensor parallelism on 2 ranks) in another job"
        )
        jobs = {script: start(script, folder) for script in ("sync_trainer.py", "sync_engine.py")}
        try:
            failure = wait(jobs)
        finally:
            for job in jobs.values():
                stop(job)
    if failure:
        sys.exit(failure)
    print(
        "three versions: every shard equal to the trainer's weights, logits within 0.05, in bf16"
    )


if __name__ == "__main__":
    main()
