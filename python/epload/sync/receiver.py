"""WeightReceiver: ranks of an inference or rollout job receive versions of a trainer's weights."""

from __future__ import annotations

import atexit
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from collections.abc import Mapping as MappingOf
from datetime import timedelta
from itertools import chain
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.distributed_c10d import Store

from epload.checkpoint.manifest import Manifest
from epload.core import garbage_collection, log
from epload.core.attempt import Attempt
from epload.core.default_device import on_cpu
from epload.errors import LoadError, WaitTimeout, message_of
from epload.mapping.mapping import Mapping
from epload.planning.holdings import Holdings, full_holdings
from epload.ranks.topology import Topology
from epload.sync.arrival import Arrival
from epload.sync.devices import DeviceAccess, accelerator_of
from epload.sync.endpoint import Endpoint, Stages, as_version, check_choice
from epload.sync.generation import Generation
from epload.sync.handing_on import TIMEOUT, Holder, Joining
from epload.sync.joining import JoinMessage
from epload.sync.participants import EngineRank, Participants, ReceiverRendezvous, Start, engine_of
from epload.sync.report import SyncReport
from epload.sync.scope import Scope
from epload.sync.store import Address, connect
from epload.sync.targets import FullTensors, TargetProvider, make_target

_MAX_FAILURES = 3
"""Number of times that receiving from other engines may fail until an engine waits for the sender's next version."""


class WeightReceiver(Endpoint):
    """Receives the weights of a :class:`WeightSender`, version after version. See docs/sync.md.

    Not thread-safe. With :meth:`close`, or at the end of a ``with`` block, it leaves, and the sender continues without this
    engine.

    Example::

        with epload.WeightReceiver(model, "trainer0:29600") as receiver:
            while True:
                receiver.receive_weights()   # while the old weights generate
                receiver.commit()            # copies the new ones in
    """

    @on_cpu
    def __init__(
        self,
        target: nn.Module | TargetProvider | Sequence[nn.Module | TargetProvider] | None,
        address: Address,
        *,
        mapping: Mapping | str = "auto",
        strict: bool = True,
        topology: Topology | None = None,
        engine: EngineRank | None = None,
        node: str = "",
        timeout: timedelta | float | None = None,
        stage: Stages = "host",
        verify: bool = False,
        progress: bool = False,
        token: str | None = None,
    ) -> None:
        """Joins the sender. Collective over the engine's ranks; all pass equal arguments, except ``target``, ``engine`` and
        ``node``.

        Args:
            target: a model with storage: any mix of DTensors and plain tensors; an :class:`epload.EngineModel`; a list of these,
                such as a model and its draft, which always get a version together; or None, to use only :meth:`tensors`.
            address: the sender's address. Waits until the sender is there.
            mapping: how the sender's names become regions of the model's tensors; see ``HierarchicalLoader.load``.
            strict: whether tensors that only one of the two jobs has are an error, among those in the part of the model that the
                sender sends.
            topology: the ranks of the engine; those of the job if None, or this process alone without ``torch.distributed``.
            engine: the engine that this rank belongs to, in place of a topology, for ranks that have no process group.
            node: a name. Ranks of a machine that pass different names share no memory, and each node receives for itself.
            timeout: seconds (or timedelta) to wait for a version, and without progress until a sync has failed; 30 minutes if
                None.
            stage: where a version arrives. With ``"host"``, in host memory that the ranks of a node share; :meth:`commit` copies
                it into the target. With ``"device"``, in separate tensors on the target's devices, which take as much memory
                there as the target until the commit. With ``"none"``, in the target, which must not be used meanwhile; if the
                sync fails, the target is partially updated. With any of them, tensors that a sender on the same machine has in
                device memory are copied straight out of it.
            verify: as for :class:`WeightSender`. Equal in both jobs.
            progress: whether the engine's first rank shows a bar when standard error is a terminal.
            token: the token of the :class:`WeightSender`; if None, the environment variable ``EPLOAD_SYNC_TOKEN``.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
            LoadError: no sender answers, or it has another version of epload or another token.
        """
        super().__init__(timeout, verify, progress)
        check_choice("stage", stage, Stages)
        if target is None and stage != "host":
            raise ValueError("expected stage='host' without a target: full tensors are made out of the memory for a version")
        if engine is not None and topology is not None:
            raise ValueError("expected topology= or engine=, got both")
        if not isinstance(engine, EngineRank | None):
            raise TypeError(f"expected engine to be an epload.EngineRank, got {engine!r}")
        self.stage = stage
        """Says where a version arrives; see the argument."""
        self._target = make_target(target, mapping, strict)
        if engine is None:
            engine, node = engine_of(topology, node, self._timeout)
        self.engine = engine
        self._store, beats, calls = (connect(address, self._timeout, token) for _ in range(3))
        self._node = engine.name_node(node, stage)
        self._rendezvous = ReceiverRendezvous(self._store, beats, engine, self._timeout)
        self._holder = Holder(calls, self._rendezvous, self._node, verify)
        """Hands versions on."""
        self._joining = Joining(self._store, self._rendezvous, self._timeout)
        # Also if nobody calls close(): else the sender would wait for this rank.
        self._leave = weakref.finalize(self, _leave, self._rendezvous, self._holder, self._store, os.getpid())
        atexit.register(self._leave)  # which ends threads before they are waited for; finalizers run after that
        self._arrival: Arrival | None = None
        """Holds the version that was received last, with ``stage="device"``."""
        self._receiving = threading.Lock()
        self._rejected = False
        """True if memory of a sender could not be opened in the generation before."""
        self._holdings = full_holdings((), ())
        self._joined_holdings = self._holdings
        """Holdings of the generation before."""
        self._manifest: Manifest | None = None
        """The manifest that the holdings are of, if they need not be read again."""
        self.version: int | None = None
        """Version that the target holds as a whole; None before the first, and while the target is partially updated."""
        self.staged: int | None = None
        """Version that has arrived, and that :meth:`commit` applies; None if there is none."""
        self.partially_updated = False
        """True if the target may have weights of two versions: while they are copied in, and if that has failed. The next version
        that is applied as a whole repairs it."""

    # ---- receiving ----

    @on_cpu
    def receive_weights(self, version: int | None = None) -> SyncReport:
        """Waits for the next version and receives it. Collective over the engine's ranks.

        An engine that joins late, or has missed a version, immediately receives the version that other engines have with
        ``stage="host"``, from these engines. It receives the next version from the sender.

        With ``stage="host"`` or ``"device"``, the target's values are not touched; modules of FSDP2 are resharded, and must not
        run meanwhile. A previous version that was not committed is discarded.
        With ``stage="none"``, the target holds the version when this returns.

        Args:
            version: the version to receive; any other is an error. If None, the newest: the one that the sender announces next,
                unless other engines have a version newer than this engine's.

        Raises:
            LoadError: a rank of either job failed, or the sender announces another version, or no version within the timeout; the
                same on every rank that took part. :attr:`version` is what it was, unless the target is partially updated.
            ValueError, TypeError: the receiver is closed, another thread is in this method, or ``version`` is no version.
        """
        self._check_open()
        if version is not None:
            version = as_version(version)
        began, until = perf_counter(), time.monotonic() + self._timeout.total_seconds()
        if not self._receiving.acquire(blocking=False):
            raise ValueError("expected one call of receive_weights() at a time; another thread is in it")
        try:
            self._discard()
            report = None
            while report is None:
                report = self._receive_from_engines(version, until) or self._receive_from_sender(version, until)
        finally:
            self._receiving.release()
        report.waited = perf_counter() - began - report.seconds
        return report

    def _receive_from_engines(self, version: int | None, until: float) -> SyncReport | None:
        """Receives the version that other engines have, if this one has none or an older one. Returns None if the sender's next
        version comes first, or they cannot send it."""
        after = -1 if self.version is None else self.version
        failures = 0
        while self._generation is None and failures < _MAX_FAILURES:
            found = self._joining.find_offer(after, version, self._read, timedelta(seconds=until - time.monotonic()))
            if found is None:
                return None
            number, offer = found
            report = SyncReport(version=offer.version, verify=self._verify, stage=self.stage, from_engines=True)
            if (ready := self._joining.get_ready(number)) is None:
                continue
            received = holds = False
            try:
                self._take_part(version, *ready, report)
                received, holds = True, self._generation is not None and self._generation.keeps_declared_dtypes
                return report
            except LoadError as error:
                failures += 1
                log.logger.warning("version %d did not come from other engines: %s", offer.version, message_of(error))
            finally:
                self._joining.end(number, received, holds)
        return None

    def _receive_from_sender(self, version: int | None, until: float) -> SyncReport | None:
        """Receives the sender's next version. Returns None if this rank came too late for it: other ranks of the engine may, too,
        and wait for that version from other engines."""
        if (left := until - time.monotonic()) <= 0:
            raise WaitTimeout(
                f"engine {self.engine.name} took part in no version within {self._timeout.total_seconds():.0f} s; have all "
                f"of its {self.engine.size} ranks called receive_weights(), and are they alive?"
            )
        number, announced = self._rendezvous.get_ready(timedelta(seconds=left))
        start, participants = self._rendezvous.wait_for_start(number, self._timeout), None
        if not self._continues(start):
            participants = Participants.fetch(self._store, start.participants, self._timeout)
            if self._rendezvous.participant not in participants.receivers:
                self._rendezvous.join_again()  # it may also have been taken for dead
                self._drop_generation()
                return None
        report = SyncReport(version=announced, verify=self._verify, stage=self.stage)
        try:
            self._take_part(version, start, participants, report)
        finally:
            self._rendezvous.versions.acknowledge(number)
        return report

    def _take_part(self, version: int | None, start: Start, participants: Participants | None, report: SyncReport) -> None:
        """Receives a version. ``participants``: of a new generation, else None."""
        began = perf_counter()
        self._holder.release()
        try:
            if participants is not None:
                with report.timed("plan"):
                    self._join_generation(start, participants)
            report.warnings += self._target.warnings
            self._receive(version, start, report)
        except BaseException as error:
            self._leave_generation(error)
            self._rendezvous.join_again()  # the sender may still count on the generation
            raise
        report.seconds = perf_counter() - began

    def _join_generation(self, start: Start, participants: Participants) -> None:
        before, manifest = self._joined_holdings, Attempt(lambda: self._read_manifest(participants))
        stages = self.stage == "host"
        device = accelerator_of({device for device in self._target.devices if not (stages and device.type == "cpu")})
        # What could not be opened is not tried again before the ranks have formed another generation.
        self._drop_generation()
        self._joined_holdings = self._holdings
        if self._node_version is not None and self._holdings.digest != before.digest:
            self._node_version = None  # it has what this rank needed then, for the local tensors that it had
        access = DeviceAccess.of(device, opens=not self._rejected)
        self._rejected = False
        own = self._rendezvous.participant
        message = JoinMessage(self._node, self._verify, access, stages)
        rank = participants.senders + participants.receivers.index(own)
        timeout = min(self._timeout, TIMEOUT) if participants.holders else self._timeout
        self._join(start, timeout, participants, rank, message, manifest.result, self._holdings, manifest.failure)

    def _read_manifest(self, participants: Participants) -> Manifest:
        """Returns the manifest of the sender's tensors, once this rank's holdings of them are known."""
        scope, manifest = participants.fetch_manifest(self._store, self._timeout)
        self._read(scope, manifest)
        self._manifest = None  # another generation reads the target again
        for warning in self._target.warnings:
            log.logger.warning("%s", warning)
        return manifest

    def _read(self, scope: Scope, manifest: Manifest) -> Holdings:
        """Returns this rank's holdings of the sender's tensors. Raises ModelMismatch if they do not fit."""
        if self._manifest is None or (self._target.scope, self._manifest.digest) != (scope, manifest.digest):
            self._manifest = None  # if it is refused, it is read again
            with garbage_collection.paused():
                self._target.scope = scope
                self._holdings, self._manifest = self._target.holdings(manifest), manifest
        return self._holdings

    def _receive(self, version: int | None, start: Start, report: SyncReport) -> None:
        """Receives the announced version into the node's memory, tensors of its own or the target."""
        generation, in_place = self._generation, self.stage == "none"
        assert generation is not None
        tensors = Attempt(lambda: self._tensors_to_fill(version, report.version, generation.device))

        # From then on every rank of an engine says the same, also one that nothing has reached yet.
        def begins(in_full: bool) -> None:
            if in_place:
                self._mark_partially_updated()

        show_progress = self._progress and self.engine.rank == 0
        generation.sync(start, tensors.result, report, None, show_progress, tensors.failure, begins)
        if self._arrival is not None:
            report.peak_staging += sum(tensor.nbytes for tensor in self._arrival.tensors)
        if generation.node_version is not None:
            self._holder.hold(report.version, generation.node_version)
        if in_place:
            self._target.finish()
            self._finish(report.version)
        else:
            self.staged = report.version

    def _tensors_to_fill(self, version: int | None, announced: int, device: torch.device | None) -> list[Tensor] | None:
        """Returns the tensors that a version arrives in; None for the node's memory. Raises LoadError if another version was
        asked for, or the tensors are not on the device that the generation needs them on."""
        if version is not None and version != announced:
            raise LoadError(f"engine {self.engine.name} expected version {version}, but the sender announced {announced}")
        if self.stage == "host":
            return None
        if self.stage == "device":
            self._arrival = Arrival(self._holdings, self._target.layouts())
            tensors = self._arrival.tensors
        else:
            if self._target.changes_on_prepare:
                self._mark_partially_updated()
            tensors = self._target.tensors()
        if device is not None and {tensor.device for tensor in tensors} != {device}:
            raise LoadError(
                f"the receiver's tensors are no longer all on {device}, to which versions came; the next version finds them "
                "where they are"
            )
        return tensors

    # ---- applying ----

    @on_cpu
    def commit(self) -> None:
        """Copies the last received version into the target. Local to this rank; does nothing with ``stage="none"``.

        Raises:
            ValueError: the receiver is closed, no version was received since the last commit, or another thread has received
                one meanwhile, so that the target is partially updated.
            LoadError: with ``verify=True``, the target does not hold what has arrived.
            OutOfMemoryError, or what an engine raises: the target is partially updated. Call ``commit()`` again.
        """
        if self.stage == "none":
            return
        generation, version = self._staged_version()

        def copy(tensors: MappingOf[int, Tensor]) -> None:
            self._mark_partially_updated()
            if self._arrival is not None:
                self._arrival.copy_into(tensors, self._verify)
            else:
                assert generation.node_version is not None
                generation.node_version.unpack(tensors)

        if self._target.changes_on_prepare:
            self._mark_partially_updated()
        self._target.fill(copy)
        self._check_staged(generation, version)
        self._finish(version)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields full tensors of the last received version, one after the other, for engines that take nothing else. The version
        counts as committed once the last tensor has been taken; until then the engine is partially updated.

        Raises:
            ValueError: no version was received since the last commit, the receiver has a target, or another version was received
                meanwhile.
        """
        if not isinstance(self._target, FullTensors):
            raise ValueError("expected a receiver without a target: WeightReceiver(None, address)")
        generation, version = self._staged_version()
        self._mark_partially_updated()
        assert generation.node_version is not None
        for item in chain(self._target.assemble(generation.node_version), [None]):
            self._check_staged(generation, version)
            if item is not None:
                yield item
        self._finish(version)

    @property
    def adapter_config(self) -> dict[str, Any] | None:
        """The content of ``adapter_config.json`` for the last received adapter; None for base weights."""
        return self._target.scope.adapter

    def _staged_version(self) -> tuple[Generation, int]:
        self._check_open()
        if self.staged is None or self._generation is None:
            raise ValueError("expected a version that was received and not committed; call receive_weights() first")
        return self._generation, self.staged

    def _check_staged(self, generation: Generation, version: int) -> None:
        if self._generation is not generation or self.staged != version:
            raise ValueError(f"version {version} was discarded, as another one was received meanwhile")

    def _mark_partially_updated(self) -> None:
        self.version, self.partially_updated = None, True

    def _finish(self, version: int) -> None:
        self.version, self.partially_updated = version, False
        self._discard()

    def _discard(self) -> None:
        """Drops what has arrived."""
        self.staged, self._arrival = None, None

    # ---- ending ----

    def sender_has_ended(self) -> bool:
        """Returns True if the sender was closed, or has died: a new one needs a new receiver, also at the same address."""
        try:
            self._rendezvous.last()
        except LoadError:
            return True
        return False

    def _drop_generation(self) -> None:
        self._discard()
        if self._generation is not None:
            self._rejected = self._generation.puller is not None and self._generation.puller.rejected
        super()._drop_generation()

    def close(self) -> None:
        """Leaves and frees memory. Not collective. May be called again."""
        self._holder.release()
        super().close()
        self._leave()
        atexit.unregister(self._leave)


def _leave(rendezvous: ReceiverRendezvous, holder: Holder, store: Store, process: int) -> None:
    if os.getpid() == process:  # and not a child of it, which ends
        holder.close(store)
        rendezvous.close()
