"""Reads the model of a sender, version after version."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.mapping.mapping import Mapping
from epload.mapping.wrappers import names_added_by_adapters
from epload.model.targets import Targets
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.saving.catalog import catalog
from epload.saving.model_reader import read_targets
from epload.sync.devices import DeviceLink, Probe, accelerator_of


@dataclass(frozen=True)
class SentTensors:
    """One rank's tensors of one version."""

    manifest: Manifest
    """The tensors that are sent."""
    holdings: Holdings
    """The parts of them that this rank has."""
    tensors: list[Tensor]
    """The model's own local tensors, or a copy of them in host memory."""
    link: DeviceLink
    probe: Probe


class SentModel:
    """The model of a sender, on one rank."""

    def __init__(
        self, model: nn.Module, mapping: Mapping | str, names_from: Any, snapshot: bool, through_host: bool
    ) -> None:
        """
        Args:
            snapshot: whether a copy of the tensors is sent, so that the model may change.
            through_host: whether versions pass through host memory wherever the tensors are.
        """
        self._model = model
        self._mapping = mapping
        self._names_from = names_from
        self._snapshot = snapshot
        self._through_host = through_host
        self._last: tuple[Targets, frozenset[str], Manifest, Holdings] | None = None
        """The previous version, with the names that adapters have added: reading it anew takes long."""
        self._copies: list[Tensor] = []

    def read(self) -> SentTensors:
        """Reads the model. Reshards FSDP2 modules."""
        targets = read_targets(self._model, filled=False)
        added = names_added_by_adapters(self._model, targets.index)
        if self._last is None or not targets.matches(self._last[0]) or added != self._last[1]:
            manifest, placed, _ = catalog(self._model, targets, self._mapping, self._names_from)
            holdings = holdings_of_targets(manifest.shapes, manifest.dtypes, targets, placed)
            self._last = targets, added, manifest, holdings
        tensors = self._copy(targets.local()) if self._snapshot else targets.local()
        if self._through_host:
            return SentTensors(*self._last[2:], tensors, DeviceLink(), Probe())
        link = DeviceLink.of(accelerator_of({tensor.device for tensor in tensors}))
        return SentTensors(*self._last[2:], tensors, link, Probe.of(tensors))

    def _copy(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies tensors to host memory, which is used again for the next version."""
        layouts = [(tensor.shape, tensor.dtype) for tensor in tensors]
        if layouts != [(copy.shape, copy.dtype) for copy in self._copies]:
            self._copies = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        else:
            for copy, tensor in zip(self._copies, tensors, strict=True):
                copy.copy_(tensor.detach())
        return self._copies

    def clear(self) -> None:
        """Frees memory."""
        self._last, self._copies = None, []
