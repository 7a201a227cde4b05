"""epload as vLLM's model loader: ``vllm serve MODEL --load-format epload``."""

from __future__ import annotations

from torch import nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader, _has_online_quant

from epload.checkpoint.base import Checkpoint
from epload.integrations.engine import EngineModel
from epload.integrations.engine.model_loader import LoaderOptions, source_of, unsupported_weights

LOAD_FORMAT = "epload"


class EploadModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Each worker reads from the checkpoint what its part of the model keeps, and nothing else.

    ``--model-loader-extra-config '{"verify": true}'`` proves the result against the checkpoint. With ``"strict": false``,
    parameters that the checkpoint lacks are no error; they are none by default for a quantized model.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = LoaderOptions.read(load_config, LOAD_FORMAT)

    def download_model(self, model_config: ModelConfig) -> None:
        Checkpoint.open(_source(model_config)).close()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        if reason := unsupported_weights(model):
            raise ValueError(f"{type(model).__name__} {reason}; use --load-format auto")
        if _has_online_quant(model):
            raise ValueError(
                "--load-format epload does not quantize weights while it loads them; use --load-format auto, or a checkpoint "
                "that is quantized"
            )
        self._options.load(EngineModel(model), _source(model_config), model_config.quantization is not None)


def _source(model_config: ModelConfig) -> str:
    place = getattr(model_config, "model_weights", "") or model_config.model
    return source_of(str(place), model_config.revision)
