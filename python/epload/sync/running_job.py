"""A running job as a checkpoint: ``epload://host:port``."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore

from epload.checkpoint.manifest import Manifest
from epload.errors import CheckpointError, LoadError, ModelMismatch, WaitTimeout
from epload.planning.holdings import Holdings
from epload.ranks.contents import fetch
from epload.ranks.topology import Topology, as_timedelta
from epload.sync.handing_on import Offer
from epload.sync.participants import OFFERS, Announcements, EngineRank
from epload.sync.receiver import WeightReceiver
from epload.sync.scope import Scope
from epload.sync.store import Address, connect, format_address, parse_address
from epload.sync.targets import ModelTarget, Target
from epload.transfer.received import ReceivedCheckpoint

_SCHEME = "epload://"
_PAUSE_SECONDS = 0.1


def address_of(checkpoint: Any) -> str | None:
    """Returns the address in ``epload://host:port``; None for another checkpoint."""
    text = os.fspath(checkpoint) if isinstance(checkpoint, str | os.PathLike) else ""
    return text.removeprefix(_SCHEME) if isinstance(text, str) and text.startswith(_SCHEME) else None


class RunningJob(ReceivedCheckpoint):
    """The version that engines of a :class:`epload.WeightSender` have, for :func:`epload.load`."""

    def __init__(self, model: Any, address: Address, timeout: timedelta | float | None) -> None:
        """
        Args:
            model: that is loaded.
            address: of the sender.
            timeout: of everything that waits for the job.

        Raises:
            ValueError, TypeError: it is none.
        """
        self._model = model
        self._target: _LoadTarget | None = None
        self._receiver: WeightReceiver | None = None
        self._is_canceled = False
        self._address = format_address(*parse_address(address))
        self._timeout = as_timedelta(timeout)
        self._opened: tuple[Manifest, bool] | None = None
        """The manifest, and whether the job verifies."""

    def prepare(self) -> None:
        """Waits until engines have a version. Raises LoadError."""
        if self._opened is None:
            store = connect(self._address, self._timeout)
            offers, until = Announcements(PrefixStore(OFFERS, store), self._timeout), time.monotonic()
            until += self._timeout.total_seconds()
            pause = _PAUSE_SECONDS
            while not (last := offers.last())[1]:
                if time.monotonic() >= until:
                    raise WaitTimeout(
                        f'no engine of the job at {self._address} has a version in host memory (stage="host") within '
                        f"{self._timeout.total_seconds():.0f} s"
                    )
                time.sleep(pause)
                pause = min(2 * pause, 1.0)
            offer = Offer(*offers.read(last[0], self._timeout))
            scope, manifest = Scope.decode(fetch(store, offer.original, self._timeout))
            if scope.adapter is not None:
                raise CheckpointError(f"the job at {self._address} sends an adapter alone; pass that of the base weights")
            self._opened = replace(manifest, source=f"{_SCHEME}{self._address}"), offer.verify

    @property
    def cannot_verify(self) -> str:
        self.prepare()
        assert self._opened is not None
        job = f"is up to the job at {self._address}, whose versions are not verified: pass it to its WeightSender and receivers"
        return "" if self._opened[1] else job

    @property
    def manifest(self) -> Manifest:
        self.prepare()
        assert self._opened is not None
        return self._opened[0]

    def receive(self, holdings: Holdings, tensors: list[Tensor], name: str, topology: Topology) -> tuple[int, str]:
        assert self._opened is not None
        manifest, verify = self._opened
        self._target = target = _LoadTarget(self._model, manifest, holdings, tensors)
        if self._is_canceled:
            target.cancel()
        engine = EngineRank(name, topology.ranks.index(topology.rank), len(topology.ranks))
        node = str(topology.nodes.index(topology.node))
        with WeightReceiver(
            target, self._address, engine=engine, node=node, timeout=self._timeout, stage="none", verify=verify
        ) as receiver:
            self._receiver = receiver
            try:
                report = receiver.receive_weights()
            finally:
                self._receiver, target.is_filled = None, False
        source = "engines" if report.from_engines else "the sender"
        return report.wire_bytes + report.pulled, f"version {report.version}, from {report.senders} ranks of {source}"

    def cancel(self) -> bool:
        self._is_canceled = True
        target, receiver = self._target, self._receiver
        is_filled = target is not None and target.cancel()
        if receiver is None:  # if the other thread makes it just now, no version comes into the tensors any more
            return False
        generation = receiver._generation
        if is_filled and generation is not None:
            generation.control.abort(LoadError("the load was canceled"))
            return True
        receiver._leave()  # the sender counts on it no more, whatever the other thread waits for
        return False


class _LoadTarget(ModelTarget):
    """The tensors of a load; see :class:`~epload.sync.targets.Target`."""

    def __init__(self, model: nn.Module, manifest: Manifest, holdings: Holdings, tensors: list[Tensor]) -> None:
        super().__init__(model, "auto", strict=False)
        self._manifest, self._holdings, self._tensors = manifest, holdings, tensors
        self.devices = {tensor.device for tensor in tensors}
        self._lock = threading.Lock()
        self._cancelled = False
        self.is_filled = False
        """True while a version may be written into the tensors."""

    def cancel(self) -> bool:
        """Keeps versions out of the tensors. Returns True if one may be on its way into them."""
        with self._lock:
            self._cancelled = True
            return self.is_filled

    def sync_target(self, strict: bool) -> Target:
        """See :class:`~epload.sync.targets.TargetProvider`."""
        return self

    def holdings(self, manifest: Manifest) -> Holdings:
        if (manifest.names, manifest.shapes) != (self._manifest.names, self._manifest.shapes):
            raise ModelMismatch("the job sends other tensors than when the load began; load again")
        self._check_mixing()
        return self._holdings

    def tensors(self) -> list[Tensor]:
        self._check_mixing()
        with self._lock:
            if self._cancelled:
                raise LoadError("the load was canceled")
            self.is_filled = True
        return self._tensors
