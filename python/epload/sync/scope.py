"""The part of a sender's model that its versions are: base weights, all or some, or the active adapter alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from epload.checkpoint.manifest import Manifest
from epload.errors import ModelMismatch

ADAPTER = "adapter"
"""Selects the active adapter."""
MERGED, APART = "merged", "apart"
Selection = Callable[[str], bool] | str | None
"""Selects what is sent: a predicate on names, :data:`ADAPTER`, or None for all base weights."""

merged_bases: WeakSet[nn.Module] = WeakSet()
"""Base models that this process has sent or received with an adapter merged into their weights, so that an engine that gets the
adapter alone would apply it twice."""


@dataclass(frozen=True)
class Scope:
    """Describes what the versions of a sender are."""

    adapter: dict[str, Any] | None = None
    """Configuration of the adapter that is sent alone, as ``adapter_config.json`` has it; None for base weights."""
    adapters: str = ""
    """:data:`MERGED` or :data:`APART`: the relation of base weights to the sender's adapters; empty if its model has none."""
    left_out: tuple[str, ...] = ()
    """Names of base weights that are not sent."""

    def encode(self, manifest: Manifest) -> bytes:
        """Returns the scope with the manifest of the tensors that are sent."""
        return json.dumps(asdict(self)).encode() + b"\n" + manifest.compact

    @classmethod
    def decode(cls, content: bytes) -> tuple[Scope, Manifest]:
        """Returns what :meth:`encode` was given."""
        header, _, compact = content.partition(b"\n")
        fields = json.loads(header)
        manifest = Manifest.from_compact(compact, ["the sender's model", None, []])
        return cls(fields["adapter"], fields["adapters"], tuple(fields["left_out"])), manifest


def check_not_merged(base: nn.Module) -> None:
    """Raises ModelMismatch if engines would apply an adapter that is sent alone twice."""
    if base in merged_bases:
        raise ModelMismatch(
            "the base weights were last sent with an adapter merged into them, and an engine that has these would apply the "
            "adapter twice; send the base weights without it (model.base_model.disable_adapter_layers()) before the adapter alone"
        )
