"""Models of diffusers: the keys of checkpoints that the library renames or ignores."""

from __future__ import annotations

import re

from torch import nn

from epload.mapping.mapping import Mapping, Rename

_DEPRECATED = {"query": "to_q", "key": "to_k", "value": "to_v", "proj_attn": "to_out.0"}
"""Names in checkpoints of attention layers that the library has renamed since."""


def from_diffusers(model: nn.Module) -> Mapping:
    """Returns what the library's ``from_pretrained`` does for a model without wrappers: what ``ModelMixin`` renames in
    ``_fix_state_dict_keys_on_load``, and ``_keys_to_ignore_on_load_unexpected``."""
    renamed = [name for name, module in model.named_modules() if getattr(module, "_from_deprecated_attn_block", False)]
    paths = "|".join(map(re.escape, renamed))
    renames = [Rename(rf"^({paths})\.{old}\.", rf"\1.{new}.") for old, new in _DEPRECATED.items()] if renamed else []
    ignored = tuple(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return Mapping(tuple(renames), required=False, ignore_unexpected=ignored)
