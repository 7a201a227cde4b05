"""epload as vLLM's model loader: ``vllm serve MODEL --load-format epload``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader, _has_online_quant

from epload.checkpoint.base import Checkpoint
from epload.core.log import logger
from epload.integrations.engine import EngineModel, load_engine

LOAD_FORMAT = "epload"


class EploadModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Each worker reads from the checkpoint what its part of the model keeps, and nothing else.

    ``--model-loader-extra-config '{"verify": true}'`` proves the result against the checkpoint. With ``"strict": false``,
    parameters that the checkpoint lacks are no error; they are none by default for a quantized model.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        options: dict[str, Any] = dict(load_config.model_loader_extra_config or {})
        self._verify = options.pop("verify", False)
        self._strict = options.pop("strict", None)
        if options:
            raise ValueError(
                f"expected model_loader_extra_config to have verify and strict only, got {', '.join(options)}"
            )
        if load_config.download_dir:
            raise ValueError("--load-format epload has no --download-dir: set HF_HUB_CACHE instead")

    def download_model(self, model_config: ModelConfig) -> None:
        Checkpoint.open(_source(model_config)).close()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if getattr(model, "secondary_weights", ()):
            raise ValueError(
                f"{type(model).__name__} has weights in a second checkpoint, which --load-format epload does not read; "
                "use --load-format auto"
            )
        if getattr(model, "allow_patterns_overrides", None):
            raise ValueError(
                f"{type(model).__name__} selects files of the checkpoint, which --load-format epload does not; use "
                "--load-format auto"
            )
        if _has_online_quant(model):
            raise ValueError(
                "--load-format epload does not quantize weights while it loads them; use --load-format auto, or a checkpoint "
                "that is quantized"
            )
        # As in vLLM's own loader, a quantized model may have parameters that its checkpoint lacks.
        strict = self._strict if self._strict is not None else model_config.quantization is None
        report = load_engine(EngineModel(model), _source(model_config), strict=strict, verify=self._verify)
        logger.info("%s", report)


def _source(model_config: ModelConfig) -> str:
    place = str(getattr(model_config, "model_weights", "") or model_config.model)
    if "://" in place or Path(place).exists():
        return place
    return f"hf://{place}@{model_config.revision}" if model_config.revision else f"hf://{place}"
