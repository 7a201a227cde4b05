"""The fp8 formats that weights are quantized to: blocks, scales and arithmetic, as configurations declare them.

The arithmetic repeats the operations of two references, so that results are equal bit for bit: ``Fp8Quantize`` of transformers
(``quant_method`` "fp8", DeepSeek's layout), and ``calculate_qparams`` and ``quantize`` of compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epload.checkpoint.quantization import parse_block
from epload.core.patterns import check_expressions
from epload.core.pieces import Block
from epload.core.views import Shape

FP8 = torch.float8_e4m3fn
_MAX = torch.finfo(FP8).max
_ALL = 0
"""The length of a block that spans a dim."""
_MX_GROUP = 32
"""Elements of a row that share a scale in MXFP8 (https://www.opencompute.org, OCP Microscaling Formats 1.0)."""
DEFAULT = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
"""DeepSeek's layout."""


class Fp8Format(NamedTuple):
    """A way to store weights as fp8 (e4m3) values and scales, which multiply them, as a ``quantization_config`` declares it.
    Equal on all ranks."""

    suffix: str
    """Appended to a weight's name, the name of its scales."""
    block: Block
    """Rows and columns that share a scale; ``_ALL`` for all of them."""
    scale_dtype: torch.dtype
    """float32, bfloat16, or for powers of two float8_e8m0fnu or, as the byte of their exponent, uint8."""
    skip: tuple[str, ...] = ()
    """Patterns of modules that are not quantized, see :meth:`skips`."""

    def skips(self, module: str) -> bool:
        """Returns True if a module is not quantized, as the library of the configuration decides."""
        if self.suffix == "_scale":
            return any(
                re.match(pattern[3:], module) is not None if pattern.startswith("re:") else pattern == module
                for pattern in self.skip
            )
        boundary = r"(?:(?<=\.)|(?=\.|$))"
        return any(re.match(rf"(?:{key}){boundary}", module) or module.endswith(key) for key in self.skip)

    def blocks(self, shape: Shape) -> Shape:
        """Returns the shape of the blocks of a weight of this shape. Each index of leading dims has blocks of its own."""
        last = (n or length for n, length in zip(self.block, shape[-2:], strict=True))
        return (1,) * (len(shape) - 2) + tuple(max(n, 1) for n in last)

    def grid(self, shape: Shape) -> Shape:
        """Returns the number of scales along each dim of a weight of this shape."""
        return grid(shape, self.blocks(shape))

    def scale_shape(self, shape: Shape) -> Shape:
        """Returns the shape of the scales of a weight of this shape."""
        if self.block == (_ALL, _ALL) and len(shape) == 2:
            return () if self._multiplies else (1,)
        return self.grid(shape)

    def check(self, name: str, shape: Shape) -> None:
        """Raises ValueError if a weight cannot be stored in the format."""
        if self.scale_dtype is torch.uint8 and shape[-1] % _MX_GROUP:
            raise ValueError(
                f"{name} has {shape[-1]} columns, expected a multiple of {_MX_GROUP} for MXFP8; list its module in the "
                "configuration's ignore"
            )

    @property
    def _multiplies(self) -> bool:
        """True for transformers' arithmetic, False for compressed-tensors'."""
        return self.scale_dtype in (torch.float32, torch.float8_e8m0fnu)

    def scales(self, maxima: Tensor) -> tuple[Tensor, Tensor]:
        """Returns what :meth:`narrow` takes for blocks with these largest absolute values (float32), and their scales."""
        if self.scale_dtype is torch.uint8:
            # Rounded to a power of two, up from 1.75 times one; the largest power of two in e4m3 is 2^8.
            rounded = (maxima.contiguous().view(torch.int32) + (1 << 21)) >> 23
            exponents = torch.where(maxima.isfinite(), rounded - 8, 255).clamp(0, 255)
            return (2.0 ** (exponents - 127).float()).to(torch.bfloat16), exponents.to(torch.uint8)
        if self.scale_dtype is torch.bfloat16:
            scales = maxima.to(torch.bfloat16) / torch.full((), _MAX, dtype=torch.bfloat16, device=maxima.device)
            scales = torch.where(scales == 0, torch.finfo(torch.bfloat16).eps, scales)
            return scales, scales
        positive = maxima > 0
        factors = _MAX / torch.where(positive, maxima, torch.ones_like(maxima))
        factors = torch.where(positive, factors, torch.ones_like(factors))
        scales = 1.0 / factors
        if self.scale_dtype is torch.float8_e8m0fnu:
            tiny = torch.finfo(torch.float32).tiny
            scales = torch.pow(2.0, torch.ceil(torch.log2(scales.clamp(min=tiny)))).to(self.scale_dtype)
            factors = 1.0 / scales.to(torch.float32)
        return factors, scales

    def narrow(self, values: Tensor, factors: Tensor) -> Tensor:
        """Returns values (bfloat16 or float16) as fp8. ``factors``: the first result of :meth:`scales`, for each value."""
        if self._multiplies:
            scaled = values.to(torch.float32) * factors
        else:
            scaled = values / factors + 0.0  # compressed-tensors adds a zero point of 0, which makes -0.0 a 0.0
        return torch.clamp(scaled, min=-_MAX, max=_MAX).to(FP8)


def grid(shape: Shape, blocks: Shape) -> Shape:
    """Returns the number of scales along each dim of a weight that is divided into blocks."""
    return tuple(-(-n // block) for n, block in zip(shape, blocks, strict=True))


def rounded(values: Tensor) -> Tensor:
    """Returns the values that are quantized: those of more than 16 bits rounded to bfloat16, which is what a trainer computes
    with. Another rounding than the forward pass sees would make an engine's probabilities differ from the trainer's."""
    return values if values.dtype.itemsize == 2 else values.to(torch.bfloat16)


# ---- configurations ----


def read_format(config: Mapping[str, Any]) -> Fp8Format:
    """Reads a ``quantization_config`` as weights are to be quantized.

    Raises ValueError for one that declares something else than fp8 weights with scales computed from the weights alone."""
    readers = {"fp8": _fine_grained, "compressed-tensors": _compressed_tensors}
    method = str(getattr(config.get("quant_method"), "value", config.get("quant_method"))).lower()
    if method not in readers:
        raise ValueError(f'expected quant_method "fp8" or "compressed-tensors" to quantize weights, got {method!r}')
    format = readers[method](config)
    patterns = [pattern.removeprefix("re:") for pattern in format.skip if method == "fp8" or pattern.startswith("re:")]
    check_expressions("the modules that the quantization_config excludes", patterns)
    return format


def _fine_grained(config: Mapping[str, Any]) -> Fp8Format:
    """Reads the configuration of transformers' fine-grained fp8, and of DeepSeek's checkpoints."""
    _expect(config, "activation_scheme", "dynamic", None)
    _expect(config, "fmt", "e4m3", "float8_e4m3fn", None)
    _expect(config, "expert_dtype", "fp8", None)
    _expect(config, "modules_to_convert", None, [], ())
    _expect(config, "scale_fmt", "float", "ue8m0", None)
    if "weight_block_size" not in config:
        raise ValueError(
            "expected weight_block_size in the quantization_config, the rows and columns of a block, or null for one scale per "
            "weight: without it transformers takes 128 x 128 and vLLM one scale"
        )
    size = config["weight_block_size"]
    block = (_ALL, _ALL) if size is None else parse_block("weight_block_size", size)
    exponents = config.get("scale_fmt") == "ue8m0"
    skip = _names(config.get("modules_to_not_convert") or config.get("ignored_layers"))
    return Fp8Format("_scale_inv", block, torch.float8_e8m0fnu if exponents else torch.float32, skip)


def _compressed_tensors(config: Mapping[str, Any]) -> Fp8Format:
    groups = list((config.get("config_groups") or {}).values())
    if len(groups) != 1 or list(groups[0].get("targets") or ()) != ["Linear"]:
        raise ValueError('expected one entry in config_groups, with targets ["Linear"], to quantize weights')
    _expect(config, "kv_cache_scheme", None)
    _expect(config, "transform_config", None, {})
    _expect(groups[0], "output_activations", None)
    weights, inputs = groups[0].get("weights") or {}, groups[0].get("input_activations")
    if inputs is not None:
        _expect(inputs, "dynamic", True)
    _expect(weights, "num_bits", 8)
    _expect(weights, "type", "float")
    _expect(weights, "symmetric", True, None)
    _expect(weights, "dynamic", False, None)
    strategy, dtype = weights.get("strategy"), torch.bfloat16
    blocks = {"tensor": (_ALL, _ALL), "channel": (1, _ALL)}
    if strategy == "block":
        blocks["block"] = parse_block("block_structure", weights.get("block_structure"))
    elif strategy == "group":
        _expect(weights, "group_size", _MX_GROUP)
        _expect(weights, "scale_dtype", "torch.uint8", "uint8", torch.uint8)
        blocks["group"], dtype = (1, _MX_GROUP), torch.uint8
    else:
        _expect(weights, "scale_dtype", None)
        _expect(weights, "strategy", *blocks)
    return Fp8Format("_scale", blocks[str(strategy)], dtype, _names(config.get("ignore")))


def _names(skipped: Any) -> tuple[str, ...]:
    """Returns the names of modules that are not quantized, of a list or None."""
    if not isinstance(skipped, list | tuple | None):
        raise ValueError(f"expected a list of the modules that are not quantized in the quantization_config, got {skipped!r}")
    return tuple(skipped or ())


def _expect(config: Mapping[str, Any], key: str, *supported: Any) -> None:
    if (value := config.get(key)) not in supported:
        listed = " or ".join(repr(option) for option in supported)
        raise ValueError(f"expected {key} to be {listed} in the quantization_config to quantize weights, got {value!r}")
