"""epload as SGLang's model loader: ``--load-format private``."""

from __future__ import annotations

import torch
from sglang.srt.configs.device_config import DeviceConfig
from sglang.srt.configs.load_config import LoadConfig, LoadFormat
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.model_loader.loader import DefaultModelLoader, _get_quantization_config, _initialize_model
from sglang.srt.model_loader.utils import set_default_torch_dtype
from torch import nn

from epload.integrations.engine.model_loader import fill, open_weights, read_options, source_of, unsupported_weights
from epload.integrations.sglang.model import SglangModel, copies_weights


class SglangModelLoader(DefaultModelLoader):  # type: ignore[misc]
    """Each worker reads from the checkpoint what its part of the model keeps, and nothing else.

    ``--model-loader-extra-config '{"verify": true}'`` verifies the result against the checkpoint. With ``"strict": false``,
    parameters that the checkpoint lacks are no error; they are none by default for a quantized model. What SGLang loads later,
    with ``update_weights_from_disk``, it loads as with ``--load-format auto``.
    """

    def __init__(self, load_config: LoadConfig) -> None:
        self._options = read_options(load_config, "private")
        load_config.load_format, load_config.model_loader_extra_config = LoadFormat.AUTO, {}
        super().__init__(load_config)

    def download_model(self, model_config: ModelConfig) -> None:
        open_weights(_source(model_config)).close()

    def load_model(self, *, model_config: ModelConfig, device_config: DeviceConfig) -> nn.Module:
        device = torch.device(device_config.device)
        quant_config = _get_quantization_config(model_config, self.load_config)
        with set_default_torch_dtype(model_config.dtype):
            with device:
                model: nn.Module = _initialize_model(model_config, self.load_config, quant_config)
            engine = SglangModel([model], device)
            self.fill(engine, model_config)
            engine.finish()
        return model.eval()

    def fill(self, engine: SglangModel, model_config: ModelConfig) -> None:
        """Fills the model as ``load_weights`` does, before SGLang processes the weights.

        Raises:
            ValueError: the model needs what only SGLang's own loader does.
        """
        model = engine.model
        reason = _unsupported(model, model_config)
        if getattr(self.load_config, "draft_model_idx", None) is not None:
            reason = "is one of several layers that predict tokens, of which SGLang's own loader selects the weights"
        if reason:
            raise ValueError(f"{type(model).__name__} {reason}; use --load-format auto")
        fill(engine, _source(model_config), model_config.quantization is not None, self._options)


def _unsupported(model: nn.Module, model_config: ModelConfig) -> str:
    """Returns what keeps epload from loading the model; empty if nothing does."""
    if reason := unsupported_weights(model):
        return reason
    if copies_weights():
        return "runs with --enable-amd-monokernel, whose copies of weights epload does not make"
    if model_config.quantization is None:
        return ""
    settings = getattr(model_config.hf_config, "quantization_config", None)
    if settings is None:
        return f"is quantized with {model_config.quantization} while it is loaded, which epload does not do"
    if model_config.quantization != "fp8":
        return f"has a checkpoint quantized with {model_config.quantization}, and of these epload was tried with fp8 alone"
    return ""


def _source(model_config: ModelConfig) -> str:
    return source_of(str(model_config.model_path), model_config.revision, "SGLANG_USE_MODELSCOPE")
