"""Reads the model of a sender, version after version."""

from __future__ import annotations

import threading
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.attempt import Attempt
from epload.mapping.mapping import AnyMapping, quantize_rule
from epload.mapping.wrappers import names_added_by_adapters
from epload.model.targets import Targets
from epload.planning.holdings import Holdings, holdings_of_targets
from epload.ranks.maxima import reduce_maxima
from epload.ranks.topology import Topology
from epload.saving.catalog import catalog
from epload.saving.model_reader import read_targets
from epload.saving.quantized import QuantizedModel
from epload.saving.writer import exclusively
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
        self,
        model: nn.Module,
        mapping: AnyMapping,
        names_from: Any,
        snapshot: bool,
        through_host: bool,
        topology: Topology,
        timeout: timedelta,
    ) -> None:
        """
        Args:
            snapshot: whether a copy of the tensors is sent, so that the model may change.
            through_host: whether versions pass through host memory wherever the tensors are.
            topology: the sender's ranks, which quantize together.
            timeout: of what they do for that.
        """
        self._model = model
        self._mapping = mapping
        self._names_from = names_from
        self._snapshot = snapshot
        self._through_host = through_host
        self._last: tuple[Targets, frozenset[str]] | None = None
        """Targets of the version before, with the names that adapters have added: reading the rest anew takes long."""
        self._copies: list[Tensor] = []
        self._topology, self._timeout = topology, timeout
        self._creator = threading.current_thread()
        self._rule = quantize_rule(mapping)
        self._quantized: QuantizedModel | None = None

    def read(self) -> None:
        """Reads a version. Reshards FSDP2 modules. Collective if weights are quantized."""
        if self._rule is None:
            self.tensors = self._read()
        else:
            local = Attempt(self._read)
            with exclusively("send_weights()", self._topology, self, self._creator, self._timeout):
                self.tensors = self._quantize(local)
        if self._snapshot:
            layouts = [(tensor.shape, tensor.dtype) for tensor in self.tensors]
            if layouts != [(copy.shape, copy.dtype) for copy in self._copies]:
                self._copies = [torch.empty(shape, dtype=dtype, device="cpu") for shape, dtype in layouts]
            for copy, tensor in zip(self._copies, self.tensors, strict=True):
                copy.copy_(tensor.detach())
            self.tensors = self._copies
        self.access = DeviceAccess() if self._through_host else DeviceAccess.of_sender(self.tensors)

    def _read(self) -> list[Tensor]:
        """Returns the model's local tensors, once the manifest and the holdings are known."""
        targets = read_targets(self._model)
        added = names_added_by_adapters(self._model, targets.index)
        if self._last is None or not targets.matches(self._last[0]) or added != self._last[1]:
            self.manifest, placed, _ = catalog(self._model, targets, self._mapping, self._names_from)
            of_model = targets
            if self._rule is not None:
                self._quantized = QuantizedModel(self._model, targets, self.manifest, placed, self._rule)
                self.manifest, placed, of_model = (
                    self._quantized.manifest, self._quantized.placed, self._quantized.targets,
                )  # fmt: skip
            self.holdings = holdings_of_targets(self.manifest.shapes, self.manifest.dtypes, of_model, placed)
            self._last = targets, added
        return targets.local()

    def _quantize(self, local: Attempt[list[Tensor]]) -> list[Tensor]:
        """Returns the tensors that are sent. Collective."""
        exchange = partial(reduce_maxima, self._topology)
        if self._quantized is None:
            exchange(Attempt(lambda: local.value[0]))
        assert self._quantized is not None
        return self._quantized.quantize(local, exchange, on_host=self._snapshot)

    @property
    def basis(self) -> tuple[object, ...]:
        """The facts that a plan follows from on a sending rank."""
        access = self.access
        return self.holdings, access.device, access.kind, access.identity, bool(access.handle)

    def clear(self) -> None:
        """Frees memory."""
        self._last, self._copies, self.tensors, self._quantized = None, [], [], None
