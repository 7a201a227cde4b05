"""Reads the model of a sender, version after version."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.mapping.mapping import Mapping
from epload.mapping.wrappers import names_added_by_adapters
from epload.model.targets import Targets
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.saving.catalog import catalog
from epload.saving.model_reader import ModelReader
from epload.sync.committed import CommittedTensors
from epload.sync.devices import DeviceAccess


class SentModel:
    """The model of a sender, on one rank."""

    manifest: Manifest
    """The tensors that are sent, once :meth:`read` was called."""
    holdings: Holdings
    """The parts of them that this rank has."""
    tensors: list[Tensor]
    """The model's own local tensors, or a copy of them in host memory."""
    access: DeviceAccess

    def __init__(
        self, model: nn.Module, mapping: Mapping | str, names_from: Any, snapshot: bool, through_host: bool, delta: str
    ) -> None:
        """
        Args:
            snapshot: whether a copy of the tensors is sent, so that the model may change.
            through_host: whether versions pass through host memory wherever the tensors are.
            delta: see :class:`~epload.WeightSender`.
        """
        self._model = model
        self._reader = ModelReader(model)
        self._mapping = mapping
        self._names_from = names_from
        self._snapshot = snapshot
        self._through_host = through_host
        self.committed = CommittedTensors(delta)
        """The copy of the tensors that is sent, or with which they are compared."""
        self.base = self.committed if delta != "off" else None
        """The same if changes may be sent."""
        self._last: tuple[Targets, frozenset[str]] | None = None
        """Targets of the version before, with the names that adapters have added: reading the rest anew takes long."""

    def read(self) -> None:
        """Reads a version. Reshards FSDP2 modules."""
        targets = self._reader.read()
        added = names_added_by_adapters(self._model, targets.index)
        if self._last is None or not targets.matches(self._last[0]) or added != self._last[1]:
            self.manifest, placed, _ = catalog(self._model, targets, self._mapping, self._names_from)
            self.holdings = holdings_of_targets(self.manifest.shapes, self.manifest.dtypes, targets, placed)
            self._last = targets, added
            self.committed.key = ""
        self.tensors = targets.local()
        through_host = self._through_host or self._snapshot
        self.access = DeviceAccess() if through_host else DeviceAccess.of_sender(self.tensors)
        if self.base is None:
            self.let_change()

    def let_change(self) -> list[Tensor] | None:
        """Makes the copy, if one is sent; then the model may change. Returns it."""
        if not self._snapshot:
            return None
        if self.tensors is not self.committed.tensors:
            self.committed.copy(self.tensors)
            self.tensors = self.committed.tensors
        return self.tensors

    def commit(self, key: str, in_full: bool) -> None:
        """Makes what was sent the version with which the next one is compared. See :meth:`CommittedTensors.commit`."""
        if self.base is not None:
            if not self._snapshot:
                self.base.copy(self.tensors)
            self.base.commit(key, in_full)

    @property
    def basis(self) -> tuple[object, ...]:
        """The facts that a plan follows from on a sending rank."""
        access = self.access
        return self.holdings, access.device, access.kind, access.identity, bool(access.handle)

    def clear(self) -> None:
        """Frees memory."""
        self._last, self.tensors = None, []
        self.committed.tensors = []
