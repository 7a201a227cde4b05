"""The mapping of a load: what the caller passed, or for ``"auto"`` what the model or its library declares."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

from torch import nn

from epload.checkpoint.manifest import Manifest
from epload.checkpoint.quantization import declared_quantization
from epload.core.dtypes import FP8
from epload.core.views import Shape
from epload.mapping.mapping import AnyMapping, Mapping, Rename
from epload.mapping.megatron import check_is_auto, from_megatron
from epload.mapping.quantize import Quantize
from epload.mapping.transformers import from_transformers
from epload.mapping.wrappers import adapter_pairs, is_from_package, unwrap
from epload.model.initialization import is_diffusers
from epload.model.megatron import MegatronChunks

_DEPRECATED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names in checkpoints of attention layers that the library has renamed since."""


def from_model(model: nn.Module, names: Collection[str] | None = None) -> Mapping:
    """Returns the mapping that ``mapping="auto"`` uses: what a model of transformers or diffusers declares for its architecture,
    else the identity.

    Wrappers (torch.compile, DistributedDataParallel, PEFT) are looked through. An operation that computes values, such as
    dequantizing, is an error only when a checkpoint tensor needs it.

    Args:
        names: names of the model's tensors; None for those of its parameters and buffers.

    Example::

        rules = epload.mapping.from_model(model)
        prefix = epload.mapping.Rename(r"^module\\.", "")
        epload.load(model, path, mapping=dataclasses.replace(rules, renames=(prefix, *rules.renames)))
    """
    if names is None:
        tensors = chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
        names = [name for name, _ in tensors]
    inner, aliases, copies = unwrap(model, names)
    mapping = Mapping()
    if is_from_package(inner, "transformers"):
        mapping = from_transformers(inner)
    elif is_diffusers(type(inner)):
        mapping = from_diffusers(inner)
    return replace(mapping, aliases=aliases, ties=mapping.ties + copies)


def from_diffusers(model: nn.Module) -> Mapping:
    """Returns what the library's ``from_pretrained`` does for a model without wrappers: what ``ModelMixin`` renames in
    ``_fix_state_dict_keys_on_load``, and ``_keys_to_ignore_on_load_unexpected``."""
    renamed = [name for name, module in model.named_modules() if getattr(module, "_from_deprecated_attn_block", False)]
    paths = "|".join(map(re.escape, renamed))
    renames = [Rename(rf"^({paths})\.{old}\.", rf"\1.{new}.") for old, new in _DEPRECATED.items()] if renamed else []
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Mapping(tuple(renames), required=False, ignore_unexpected=ignored)


def resolve_mapping(
    mapping: AnyMapping,
    model: nn.Module,
    names: Collection[str],
    checkpoint: Sequence[str] = (),
    shapes: Sequence[Shape] = (),
) -> Mapping:
    """Returns ``mapping`` itself, or for ``"auto"`` :func:`from_model`; for the file of a PEFT adapter, the names of the active
    adapter; for Megatron-Core's modules, the places of the checkpoint's tensors in them. A Quantize is added to what ``"auto"``
    is; one without a configuration gets that of the model.

    Args:
        names: of the model's tensors.
        checkpoint, shapes: names and shapes of the checkpoint's tensors.

    Raises:
        ValueError: neither a Mapping, nor a Quantize, nor ``"auto"``.
        ModelMismatch: an adapter's file that cannot be loaded into this model.
    """
    if isinstance(model, MegatronChunks):
        check_is_auto(mapping)
        return from_megatron(model, checkpoint, shapes)
    if isinstance(mapping, Quantize):
        mapping = replace(resolve_mapping("auto", model, names, checkpoint), quantize=mapping)
    if isinstance(mapping, Mapping):
        rule = mapping.quantize
        declared = _declared(model) if rule is not None and rule.config is None else None
        return replace(mapping, quantize=replace(rule, config=declared)) if rule is not None and declared else mapping
    check_mapping(mapping)
    if pairs := adapter_pairs(model, names, checkpoint):
        last = {target: key for key, target in pairs}  # PEFT saves the biases of trained modules twice
        twice = tuple(f"^{re.escape(key)}$" for key, target in pairs if key and last[target] != key)
        return Mapping(only=tuple((key, target) for target, key in last.items()), ignore_unexpected=twice)
    return from_model(model, names)


def check_mapping(mapping: object) -> None:
    """Raises ValueError for what is neither a Mapping, nor a Quantize, nor ``"auto"``."""
    if mapping != "auto" and not isinstance(mapping, Mapping | Quantize):
        raise ValueError(f"expected mapping to be 'auto' or an epload.Mapping, got {mapping!r}")


def with_quantization_of(model: nn.Module, manifest: Manifest) -> Manifest:
    """Returns the manifest with the quantization that the model's configuration declares, if fp8 weights lack a declaration.

    Raises:
        ValueError: the model declares a malformed block size.
    """
    if manifest.quantization is not None or set(FP8).isdisjoint(manifest.dtypes):
        return manifest
    declared = _declared(model)
    return replace(manifest, quantization=declared_quantization(declared) if declared is not None else None)


def _declared(model: nn.Module) -> dict[str, Any] | None:
    """Returns the quantization that a model's configuration declares."""
    declared: Any = getattr(getattr(unwrap(model, ())[0], "config", None), "quantization_config", None)
    declared = declared.to_dict() if hasattr(declared, "to_dict") else declared
    return declared if isinstance(declared, dict) else None
