"""Reads the model of a sender, version after version."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from itertools import compress
from operator import not_
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

from epload.checkpoint.manifest import Manifest
from epload.core.attempt import Attempt
from epload.core.views import View
from epload.errors import ModelMismatch
from epload.mapping.mapping import AnyMapping, Mapping, quantize_rule
from epload.mapping.place import Place
from epload.mapping.wrappers import AdapterFile, adapter_file, adapters_in_base, names_added_by_adapters, unwrap
from epload.model.targets import Targets
from epload.observe.render import list_keys
from epload.planning.holdings import Holdings, digest_of, holdings_of_targets
from epload.ranks.maxima import reduce_maxima
from epload.ranks.single_flight import Call, exclusive
from epload.ranks.topology import Topology
from epload.saving.catalog import catalog, check_names
from epload.saving.model_reader import ModelReader
from epload.saving.quantized import QuantizedModel
from epload.sync.committed import CommittedTensors
from epload.sync.devices import DeviceAccess
from epload.sync.scope import ADAPTER, APART, MERGED, Scope, Selection, check_not_merged, merged_bases

_Part = AdapterFile | tuple[frozenset[str], str]
"""The adapter that is sent alone; or the names that adapters have added to the base weights, and how these relate to them."""
_adapter_senders: WeakSet[SentModel] = WeakSet()
"""All models that are open and send an adapter alone."""


class SentModel:
    """The model of a sender, on one rank."""

    manifest: Manifest
    """The tensors that are sent, once :meth:`read` was called."""
    scope: Scope
    """The part of the model that they are, likewise."""
    holdings: Holdings
    """The parts of them that this rank has."""
    tensors: list[Tensor]
    """The model's own local tensors that are sent, or a copy of them in host memory."""
    access: DeviceAccess

    def __init__(
        self,
        model: nn.Module,
        mapping: AnyMapping,
        names_from: Any,
        snapshot: bool,
        through_host: bool,
        delta: str,
        only: Selection,
        topology: Topology,
        timeout: timedelta,
    ) -> None:
        """
        Args:
            only: see :class:`epload.WeightSender`.
            snapshot: whether a copy of the tensors is sent, so that the model may change.
            through_host: whether versions pass through host memory wherever the tensors are.
            delta: see :class:`~epload.WeightSender`.
            topology: the sender's ranks, which quantize together.
            timeout: of what they do for that.
        """
        if only is not None and only != ADAPTER and not callable(only):
            raise TypeError(f"expected only to be a function of a name, {ADAPTER!r} or None, got {only!r}")
        if only == ADAPTER and (mapping != "auto" or names_from is not None):
            raise ValueError(
                "expected no mapping= and no names_from= with only='adapter', whose tensors are sent under PEFT's names"
            )
        check_names(model, mapping, names_from)
        self._model = model
        self._reader = ModelReader(model, own_names=isinstance(mapping, Mapping))
        self._base: nn.Module = unwrap(model, ())[0]
        self._only = only
        self._mapping, self._rules = mapping, ""
        self._names_from = names_from
        self._snapshot = snapshot
        self._through_host = through_host
        self.copies = CommittedTensors(delta)
        """The copy of the tensors that is sent, or with which they are compared."""
        self.base_version = self.copies if delta != "off" else None
        """The same if changes may be sent."""
        self._last: tuple[Targets, _Part] | None = None
        """Targets and part of the version before: reading the rest anew takes long."""
        self._sent: list[int] = []
        """Numbers of the targets that are sent."""
        self._topology, self._timeout = topology, timeout
        self._creator = threading.current_thread()
        self._rule = quantize_rule(mapping)
        self._quantized: QuantizedModel | None = None

    @property
    def is_read_together(self) -> bool:
        """True if a failure to read a version is the same on all ranks, as they quantize it together."""
        return self._rule is not None

    def read(self) -> None:
        """Reads a version. Reshards FSDP2 modules. Collective if weights are quantized.

        Raises:
            ModelMismatch: merged adapters would mix with adapters apart.
        """
        self.copies.finish()
        if self._rule is None:
            tensors = self._read()
        else:
            local = Attempt(self._read)
            call = Call("send_weights()", self._topology, self, self._creator)
            with exclusive(call, self._timeout), self._topology.control.guard():
                tensors = self._quantize(local)
        self.tensors = [tensors[number] for number in self._sent]
        through_host = self._through_host or self._snapshot
        self.access = DeviceAccess() if through_host else DeviceAccess.of_sender(self.tensors)
        if self.base_version is None:
            self.let_change(in_full=True)
        elif not self.copies.tensors:
            self.copies.reserve(self.tensors)

    def _read(self) -> list[Tensor]:
        """Returns the model's local tensors, once the manifest and the holdings are known."""
        targets = self._reader.read()
        part = self._read_part(targets)
        if self._last is None or not targets.matches(self._last[0]) or part != self._last[1]:
            self._last = None  # until all of this is known
            self.manifest, placed, self.scope = self._select(targets, part)
            of_model = targets
            if self._rule is not None:
                self._quantized = QuantizedModel(
                    self._model, targets, self.manifest, placed, self._rule, is_part=bool(self.scope.left_out)
                )
                self.manifest, placed, of_model = (
                    self._quantized.manifest, self._quantized.placed, self._quantized.targets,
                )  # fmt: skip
            holdings = holdings_of_targets(self.manifest.shapes, of_model, placed)
            self._sent = sorted({number for numbers in holdings.targets for number in numbers})
            position = {number: i for i, number in enumerate(self._sent)}
            own = [tuple(position[number] for number in numbers) for numbers in holdings.targets]
            self.holdings = replace(holdings, targets=own)
            self._last = replace(targets, tensors=[]), part
            self.copies.forget()
        return targets.local()

    def _quantize(self, local: Attempt[list[Tensor]]) -> list[Tensor]:
        """Returns the tensors that are sent. Collective."""
        if self._quantized is None:
            reduce_maxima(self._topology, Attempt(lambda: local.value[0]))
        assert self._quantized is not None
        return self._quantized.quantize(local, self._topology, on_host=self._snapshot)

    def let_change(self, in_full: bool) -> list[Tensor] | None:
        """Makes the copy, if one is sent; then the model may change. Returns it.

        Args:
            in_full: whether receivers get all of it. If all of them do, nobody has the version before any more, and what is kept
                for the next comparison is copied while it is sent.
        """
        copies = self.copies
        if not self._snapshot:
            on_cpu = all(tensor.is_cpu for tensor in self.tensors)
            if self.base_version is not None and copies.comparison is None and on_cpu:
                copies.copy_meanwhile(self.tensors)
        elif not in_full:  # their changes are sent, which are not part of the model
            copies.copy_left_out(self.tensors, self.holdings)
        elif self.tensors is not copies.tensors:
            copies.copy(self.tensors)
            self.tensors = copies.tensors
            return self.tensors
        return None

    def commit(self, key: str, in_full: bool) -> None:
        """Called when receivers have the version that was read last, with which the next one is compared. See
        :meth:`CommittedTensors.commit`."""
        if self.scope.adapter is None and self.scope.adapters != MERGED and not self.scope.left_out:
            merged_bases.discard(self._base)
        if self.base_version is not None:
            if not self._snapshot and self.copies.comparison is not None:
                self.copies.copy_left_out(self.tensors, self.holdings)
            elif not self._snapshot and not self.copies.finish():
                self.copies.copy(self.tensors)
            self.copies.commit(key, in_full)

    def _read_part(self, targets: Targets) -> _Part:
        """Returns the part of the model that is sent."""
        if self._only == ADAPTER:
            part = adapter_file(self._model, targets.index)
            check_not_merged(self._base)
            _adapter_senders.add(self)
            return part
        if not self._reader.has_adapters:
            return frozenset(), ""
        added = names_added_by_adapters(self._model, targets.index)
        merged = adapters_in_base(self._model)[0] if added else ""
        if merged and any(other._base is self._base for other in _adapter_senders):
            raise ModelMismatch(
                f"the adapter of {merged} is merged into the base weights, and another sender sends the adapter alone, so that "
                "an engine would apply it twice; call unmerge_adapter() and disable the adapters for the base weights, or close "
                "the other sender"
            )
        if merged:
            merged_bases.add(self._base)
        return added, MERGED if merged else APART if added else ""

    def _select(self, targets: Targets, part: _Part) -> tuple[Manifest, list[tuple[Place, ...]], Scope]:
        """Returns the manifest of what is sent, its places in the model, and what it is of the model."""
        if isinstance(part, AdapterFile):
            numbers = [targets.index[name] for name in part.names.values()]
            shapes = tuple(map(targets.shape, numbers))
            dtypes = tuple(targets.dtypes[number] for number in numbers)
            places = [((name, View.whole(shape)),) for name, shape in zip(part.names.values(), shapes, strict=True)]
            return Manifest(tuple(part.names), shapes, dtypes, "the adapter"), [*places], Scope(part.config)
        manifest, placed, _, self._rules = catalog(self._model, targets, self._mapping, self._names_from)
        if not callable(self._only):
            return manifest, placed, Scope(adapters=part[1])
        sent = list(map(self._only, manifest.names))
        if not any(sent):
            raise ModelMismatch(
                f"only= selects none of the tensors that are sent: {list_keys(manifest.names)}; only='adapter' sends an adapter"
            )
        names, shapes = tuple(compress(manifest.names, sent)), tuple(compress(manifest.shapes, sent))
        selected = Manifest(names, shapes, tuple(compress(manifest.dtypes, sent)), "the model")
        left_out = tuple(compress(manifest.names, map(not_, sent)))
        if self._rule is not None:
            left_out += tuple(f"{name}{self._rule.format.suffix}" for name in left_out)
        return selected, list(compress(placed, sent)), Scope(None, part[1], left_out)

    @property
    def digest(self) -> str:
        """Digest of what is sent, without its values."""
        return self.manifest.digest.hex() + digest_of(repr((self.scope, self._rules)).encode())

    @property
    def basis(self) -> tuple[object, ...]:
        """The facts that a plan follows from on a sending rank."""
        access = self.access
        return self.scope, self.holdings, access.device, access.kind, access.identity, bool(access.handle)

    def clear(self) -> None:
        """Frees memory."""
        self.copies.finish()
        self._last, self.tensors, self._quantized = None, [], None
        self.copies.forget()
        _adapter_senders.discard(self)
