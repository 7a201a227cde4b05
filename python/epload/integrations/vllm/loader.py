"""epload as vLLM's model loader: ``vllm serve MODEL --load-format epload``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from torch import Tensor, nn
from vllm.config import ModelConfig
from vllm.config.load import LoadConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader, _has_online_quant
from vllm.transformers_utils.repo_utils import any_pattern_in_repo_files

from epload.checkpoint.base import read_tensor
from epload.errors import CheckpointError
from epload.integrations.engine import EngineModel
from epload.integrations.engine.model_loader import fill, open_weights, read_options, source_of, unsupported_weights

LOAD_FORMAT = "epload"
_BOTH_FORMATS = ("consolidated*.safetensors", "params.json", "model*.safetensors")
"""Files of a model in Mistral's format and in that of transformers."""


class EploadModelLoader(BaseModelLoader):  # type: ignore[misc]
    """Each worker reads from the checkpoint what its part of the model keeps, and nothing else.

    ``--model-loader-extra-config '{"verify": true}'`` verifies the result against the checkpoint. With ``"strict": false``,
    parameters that the checkpoint lacks are no error; they are none by default for a quantized model.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        self._options = read_options(load_config, LOAD_FORMAT)

    def download_model(self, model_config: ModelConfig) -> None:
        open_weights(_source(model_config)).close()

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        _check(model)
        if _has_online_quant(model):
            raise ValueError(
                "--load-format epload does not quantize weights while it loads them; use --load-format auto, or a checkpoint "
                "that is quantized"
            )
        fill(EngineModel(model), _source(model_config), model_config.quantization is not None, self._options)

    def get_all_weights(self, model_config: ModelConfig, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yields each tensor of the checkpoint in full, for vLLM's ``reload_weights``."""
        _check(model)
        with closing(open_weights(_source(model_config))) as checkpoint:
            for number, name in enumerate(checkpoint.manifest.names):
                yield name, read_tensor(checkpoint, number)
            if changed := checkpoint.changed():
                raise CheckpointError(f"{changed} while it was loaded; the model may be partly overwritten")


def _check(model: nn.Module) -> None:
    if reason := unsupported_weights(model):
        raise ValueError(f"{type(model).__name__} {reason}; use --load-format auto")


def _source(model_config: ModelConfig) -> str:
    if model_config.config_format in ("auto", "mistral") and all(_has(model_config, name) for name in _BOTH_FORMATS):
        raise ValueError(
            f"{model_config.model} has weights in Mistral's format and in that of transformers, of which vLLM takes the "
            "former and epload the latter; pass --config-format hf --tokenizer-mode auto, or use --load-format auto"
        )
    place = getattr(model_config, "model_weights", "") or model_config.model
    return source_of(str(place), model_config.revision, "VLLM_USE_MODELSCOPE")


def _has(model_config: ModelConfig, pattern: str) -> bool:
    found: bool = any_pattern_in_repo_files(model_config.model, [pattern], revision=model_config.revision)
    return found
