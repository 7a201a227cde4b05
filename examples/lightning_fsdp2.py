"""Lightning with FSDP2: configure_model builds the model on meta, shards it and loads it.

torchrun --standalone --nproc-per-node 2 examples/lightning_fsdp2.py tiny/dense
"""

import sys

import lightning
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import epload


class LanguageModel(lightning.LightningModule):
    def __init__(self, checkpoint: str) -> None:
        super().__init__()
        self.checkpoint, self.model, self.losses = checkpoint, None, []

    def configure_model(self) -> None:
        if self.model is not None:  # Lightning may call it again
            return
        with torch.device("meta"):
            self.model = AutoModelForCausalLM.from_config(
                AutoConfig.from_pretrained(self.checkpoint)
            )
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        report = epload.load(self.model, self.checkpoint)
        self.print(report)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def training_step(self, tokens: torch.Tensor) -> torch.Tensor:
        loss = self.model(tokens, labels=tokens).loss
        self.losses.append(loss.item())
        return loss


def main(checkpoint: str) -> None:
    module = LanguageModel(checkpoint)
    data = DataLoader([torch.arange(64).reshape(2, 32)] * 6, batch_size=None)
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(module, data)
    module.print(
        f"loss {module.losses[0]:.4f}, {module.losses[-1]:.4f} "
        f"after {len(module.losses) - 1} steps"
    )


if __name__ == "__main__":
    main(sys.argv[1])
