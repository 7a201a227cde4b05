"""Needs an accelerator: the Trainer with FSDP2, whose weights epload distributes from rank 0.

torchrun --standalone --nproc-per-node 2 examples/trainer.py tiny/moe
"""

import sys

import torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import epload


def main(checkpoint: str) -> None:
    if not torch.accelerator.is_available():
        sys.exit(
            "trainer.py needs an accelerator, and torch finds none: accelerate shards models on "
            "accelerators only."
        )
    arguments = TrainingArguments(
        fsdp=True,
        fsdp_config={"version": 2, "cpu_ram_efficient_loading": True},
        per_device_train_batch_size=2,
        max_steps=3,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
    )
    model = AutoModelForCausalLM.from_pretrained(checkpoint)  # weights on rank 0 only
    rows = [{"input_ids": row, "labels": row} for row in torch.arange(64).reshape(2, 32)]
    trainer = Trainer(model, arguments, train_dataset=rows * arguments.world_size)
    with epload.patch("accelerate"):
        trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    if trainer.is_world_process_zero():
        print(f"{type(trainer.model).__name__} on {arguments.world_size} ranks")
        print(f"loss {losses[0]:.4f}, {losses[-1]:.4f} after {len(losses) - 1} steps")


if __name__ == "__main__":
    main(sys.argv[1])
