"""epload as vLLM's model loader: ``vllm serve MODEL --load-format epload``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader, _has_online_quant

from epload.checkpoint.base import Checkpoint
from epload.compat.engine import load_engine
from epload.core.log import logger
from epload.sync.engine_model import EngineModel

LOAD_FORMAT = "epload"


class EploadModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Each worker reads from the checkpoint what its part of the model keeps, and nothing else.

    ``--model-loader-extra-config '{"verify": "full"}'`` proves the result against the checkpoint.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self._verify = options.pop("verify", "off")
        if options:
            raise ValueError(f"expected no other model_loader_extra_config than verify, got {', '.join(options)}")

    def download_model(self, model_config: ModelConfig) -> None:
        Checkpoint.open(_source(model_config)).close()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if getattr(model, "secondary_weights", ()):
            raise ValueError(
                f"{type(model).__name__} has weights in a second checkpoint, which --load-format epload does not read; "
                "use --load-format auto"
            )
        if _has_online_quant(model):
            raise ValueError(
                "--load-format epload does not quantize weights while it loads them; use --load-format auto, or a checkpoint "
                "that is quantized"
            )
        report = load_engine(EngineModel(model), _source(model_config), verify=self._verify)
        logger.info("%s", report)


def _source(model_config: ModelConfig) -> str:
    place = str(getattr(model_config, "model_weights", "") or model_config.model)
    if "://" in place or Path(place).exists():
        return place
    return f"hf://{place}@{model_config.revision}" if model_config.revision else f"hf://{place}"
