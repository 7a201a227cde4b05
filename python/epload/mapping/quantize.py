"""The rule by which weights are quantized to fp8."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from epload.checkpoint.finding import read_config
from epload.checkpoint.quantization import quantization_section
from epload.core import dtypes
from epload.core.patterns import check_expressions
from epload.mapping.fp8 import DEFAULT, Fp8Format, read_format
from epload.observe.render import list_first


@dataclass(frozen=True)
class Quantize:
    """Quantizes weights to fp8 (e4m3) with scales. Passed as ``mapping=``, where it is added to what ``"auto"`` means, or as the
    ``quantize`` of a :class:`Mapping` of your own.

    On a ``WeightSender``, in ``save`` and in ``convert``, each weight becomes a tensor in fp8 and one with its scales, under the
    names of the configuration's format. In a load, weights fill the fp8 weights of the model, and their scales. What is quantized
    is bfloat16 (or float16): float32 weights are rounded first.

    Example::

        # In the layout of this engine's checkpoint.
        rule = epload.mapping.Quantize("/models/Qwen3-8B-FP8")
        with epload.WeightSender(model, address, receivers=8, mapping=rule) as sender: ...
        epload.load(fp8_model, "/models/Qwen3-8B", mapping=epload.mapping.Quantize())
    """

    config: Any = None
    """A ``quantization_config``: a dict, an object of transformers, a configuration that has one, or a folder whose
    ``config.json`` does. With ``quant_method`` "fp8", blocks of ``weight_block_size``, or one scale per weight, and scales
    ``weight_scale_inv``: float32, or E8M0 with ``scale_fmt`` "ue8m0" (MXFP8 with blocks of [1, 32]). With "compressed-tensors",
    the strategies "tensor", "channel" and "block", and MXFP8 (groups of 32), with scales ``weight_scale``. None: in a load what
    the model's configuration declares, else blocks of 128 x 128 in DeepSeek's layout."""
    weights: tuple[str, ...] = ()
    """Regular expressions of the names of weights in the checkpoint, in place of those of Linear layers and of experts. Modules
    that the configuration excludes stay."""

    def __post_init__(self) -> None:
        """Raises ValueError or TypeError for a configuration or a pattern that is none, CheckpointError if it cannot be read."""
        if isinstance(self.weights, str):
            raise TypeError(f"expected weights to be a tuple of regular expressions, got {self.weights!r}")
        object.__setattr__(self, "weights", tuple(self.weights))
        check_expressions("weights", self.weights)
        if self.config is not None and not (isinstance(self.config, str) and self.config.startswith("{")):
            # As text, which is equal on all ranks.
            object.__setattr__(self, "config", json.dumps(_section(self.config), sort_keys=True, default=str))
        self.format  # noqa: B018 raises if it is not supported

    @property
    def quantization_config(self) -> dict[str, Any]:
        """The configuration, as ``config.json`` has it."""
        return DEFAULT if self.config is None else dict(json.loads(self.config))

    @cached_property
    def format(self) -> Fp8Format:
        """The format that the configuration declares, and the modules that it excludes."""
        return read_format(self.quantization_config)

    def check_used(self, names: Sequence[str]) -> None:
        """Raises ValueError if a pattern of the weights matches none of these names."""
        for pattern in self.weights:
            if not any(re.search(pattern, name) for name in names):
                raise ValueError(
                    f"{pattern!r}, a pattern of the weights to quantize, matches no tensor; there are {list_first(names)}"
                )

    def selects(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        """Returns True if a tensor of the checkpoint is quantized, as far as its name says: matrices, and stacks of them, of at
        least 16 bits. Raises ValueError if it cannot be."""
        if len(shape) < 2 or 0 in shape or not dtypes.is_wide(dtype) or self.format.skips(name.removesuffix(".weight")):
            return False
        if self.weights and not any(re.search(pattern, name) for pattern in self.weights):
            return False
        self.format.check(name, shape)
        return True


def _section(config: Any) -> Mapping[str, Any]:
    """Returns the ``quantization_config`` that a caller means."""
    passed = config
    if isinstance(config, str | os.PathLike):
        config = read_config(config)
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise TypeError(f"expected a quantization_config, or a folder whose config.json has one, got {passed!r}")
    section = config if "quant_method" in config else quantization_section(config)
    if section is None:
        raise ValueError(f"expected a quantization_config, but {passed!r} has none; pass a dict, or None for the default")
    beside = {key: config[key] for key in ("expert_dtype",) if key in config}  # as in DeepSeek-V4's configuration
    return {**beside, **section}
