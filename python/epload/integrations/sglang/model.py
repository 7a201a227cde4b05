"""SGLang's models as targets of versions and checkpoints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.kernel_plugins.amd import binding
from sglang.srt.layers.quantization import unquant
from sglang.srt.model_loader.loader import DefaultModelLoader, _modules_with_quant_method
from sglang.srt.model_loader.weight_utils import RUNAI_STREAMER_TENSOR_ATTR
from torch import Tensor, nn

from epload.errors import ModelMismatch
from epload.integrations.engine.model import EngineModel

_PLAIN = (unquant.UnquantizedLinearMethod, unquant.UnquantizedEmbeddingMethod, unquant.UnquantizedFusedMoEMethod)
_HOOK = "post_load_weights"
_COMPUTED_ONCE = ("q_b_proj_qrep_weight", "w_kc_qrep", "_hpc_q_norm_w_fp32", "_jit_mix_ok")
"""Attributes of modules with which these compute from values of weights that are made once (SGLang 0.5.23), if they have any."""


class SglangModel(EngineModel):
    """A rank's model, and perhaps its drafts, which may share parameters with it.

    Some classes end ``load_weights`` with a call of their ``post_load_weights``, which computes with parameters. That call is
    put off until :meth:`finish`, when all parameters have their values.
    """

    def __init__(self, models: Sequence[nn.Module], device: torch.device) -> None:
        """
        Args:
            models: the target model first. Each version is for all of them.
            device: on which SGLang processes weights.
        """
        self._models = tuple(models)
        combined = nn.ModuleList(models) if len(self._models) > 1 else self._models[0]
        super().__init__(combined, self._load)
        self._device = device
        self._deferred: dict[nn.Module, dict[str, Any]] = {}
        """Modules whose ``post_load_weights`` was put off, with its keyword arguments."""

    def _load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        tensors = _for_this_thread(weights) if len(self._models) == 1 else list(_for_this_thread(weights))
        with self._without_hooks():
            for model in self._models:
                model.load_weights(iter(tensors))  # type: ignore[operator]

    @contextmanager
    def _without_hooks(self) -> Iterator[None]:
        modules = [module for module in self.model.modules() if callable(getattr(module, _HOOK, None))]
        for module in modules:

            def defer(*arguments: Any, _module: nn.Module = module, **options: Any) -> None:
                if arguments:
                    raise TypeError(f"{type(_module).__name__} passes {_HOOK} arguments without names")
                # A call for some weights alone becomes one for all of them.
                self._deferred[_module] = {name: value for name, value in options.items() if name != "weight_names"}

            module.__dict__[_HOOK] = defer
        try:
            yield
        finally:
            for module in modules:
                del module.__dict__[_HOOK]

    def begin(self, written: Collection[str] | None) -> None:
        for model in self._models:
            DefaultModelLoader.restore_weights_before_loading(model, self._device)

    @torch.no_grad()
    def finish(self) -> None:
        before = [(module, {**vars(module), **module._buffers}) for module in self.model.modules()]
        for module, options in self._deferred.items():
            getattr(module, _HOOK)(**options)
        for model in self._models:
            DefaultModelLoader.postprocess_weights(model, self._device)
        holders = Counter(id(value) for _, attributes in before for value in attributes.values())
        for module, attributes in before:  # what CUDA graphs compute with stays where it is
            for name, old in attributes.items():
                new = getattr(module, name, None)
                if new is old or not isinstance(old, Tensor) or not isinstance(new, Tensor) or holders[id(old)] > 1:
                    continue
                if (old.shape, old.stride(), old.dtype, old.device) == (new.shape, new.stride(), new.dtype, new.device):
                    setattr(module, name, old.copy_(new))


def _for_this_thread(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Marks tensors as those that SGLang copies at once, not in a pool of threads in which nothing is traced."""
    for name, tensor in weights:
        setattr(tensor, RUNAI_STREAMER_TENSOR_ATTR, True)
        yield name, tensor


def copies_weights() -> bool:
    """Returns True if SGLang copies tensors of the checkpoint while it loads them, next to ``load_weights``."""
    return binding._backend() is not None


def check_updatable(model: nn.Module) -> None:
    """Raises ModelMismatch if SGLang changes weights after loading, so that a running engine cannot take others.

    Few of its quantization methods restore what ``load_weights`` fills, and none was tried.
    """
    if copies_weights():
        raise ModelMismatch(f"--enable-amd-monokernel keeps copies of the weights of {type(model).__name__}; serve without it")
    for module in model.modules():
        for attribute in _COMPUTED_ONCE:
            if (value := getattr(module, attribute, None)) is not None and value is not False:
                raise ModelMismatch(
                    f"a {type(module).__name__} of {type(model).__name__} computes values from its weights once ({attribute}), "
                    "and SGLang would go on with those of the old weights; restart the engine to change them"
                )
    for module, method in _modules_with_quant_method(model):
        reason = ""
        if type(method) not in _PLAIN:
            reason = f"is quantized by {type(method).__name__}"
        elif getattr(module, "use_intel_amx_backend", False):
            reason = "is packed for AMX"
        elif getattr(method, "use_flashinfer_trtllm_moe", False) or (
            unquant._use_aiter and isinstance(method, unquant.UnquantizedFusedMoEMethod)
        ):
            reason = "is shuffled for its MoE kernel"
        elif getattr(method, "w13_swiglu_interleaved", False):
            reason = "is interleaved for its MoE kernel (SGLANG_OPT_FUSE_SWIGLU_INTERLEAVED)"
        if reason:
            name = next(name for name, other in model.named_modules() if other is module)
            raise ModelMismatch(
                f"{name} of {type(model).__name__} {reason}, and epload updates running SGLang engines without such layers only; "
                "serve the model unquantized, choose another kernel backend, or use update_weights_from_disk"
            )
