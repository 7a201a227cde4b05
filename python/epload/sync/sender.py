"""WeightSender: a trainer hands versions of its weights to receivers in other jobs."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from epload.core import garbage_collection, threads
from epload.core.attempt import Attempt
from epload.core.default_device import on_cpu
from epload.errors import LoadError, message_of
from epload.mapping.mapping import AnyMapping
from epload.model.megatron import Model, as_module
from epload.ranks.contents import publish
from epload.ranks.membership import local_network
from epload.ranks.single_flight import Call, add_to_background, exclusive, preparing_call, wait_for_background
from epload.ranks.topology import Topology, as_topology
from epload.sync.endpoint import Deltas, Endpoint, Snapshots, Transports, as_version, check_choice
from epload.sync.generation import Generation
from epload.sync.handing_on import Offer, Offers
from epload.sync.joining import JoinMessage
from epload.sync.participants import Announcements, Participant, Participants, SenderRendezvous, Start
from epload.sync.report import SyncReport
from epload.sync.scope import Selection
from epload.sync.sources import SentModel
from epload.sync.store import Address, ServedStore, connect, format_address, parse_address, serve

_ABORT_SECONDS = 0.1
"""Seconds between two attempts to end a send in the background."""


class WeightSender(Endpoint):
    """Sends a model's weights to the ranks of other jobs, version after version. See docs/sync.md.

    Not thread-safe. :meth:`close`, or the end of a ``with`` block, frees its memory and ends its store; receivers that wait for a
    version then fail.

    Example::

        with epload.WeightSender(model, "trainer0:29600", receivers=8) as sender:
            for step in range(steps):
                train(model)
                sender.send_weights(step)
    """

    @on_cpu
    def __init__(
        self,
        model: Model,
        address: Address,
        *,
        receivers: int,
        mapping: AnyMapping = "auto",
        names_from: Any = None,
        topology: Topology | None = None,
        timeout: timedelta | float | None = None,
        snapshot: Snapshots = "none",
        delta: Deltas = "off",
        transport: Transports = "auto",
        verify: bool = False,
        progress: bool = False,
        only: Selection = None,
        token: str | None = None,
    ) -> None:
        """Creates a sender. Collective over the topology's ranks; all pass equal arguments.

        Args:
            model: any mix of DTensors and plain tensors with storage. Or this rank's modules of Megatron-Core: one, or a list of
                pipeline stages.
            address: ``"host:port"``, ``"[v6 address]:port"`` or ``(host, port)``, where the first rank serves the store of both
                jobs. With port 0, the system chooses a port; see :attr:`address`. Without a token, anyone who can connect to the
                address can join.
            receivers: number of receiving ranks, over all engines, that have to join before the first version is sent.
            mapping: how names in checkpoints become regions of the model's tensors; tensors are sent under the checkpoint names.
                ``"auto"`` is what a transformers model declares; for other models, names as they are. ``Quantize`` sends fp8
                weights and their scales.
            names_from: a checkpoint that gives the names and shapes of the sent tensors, for a mapping of your own, or for
                modules of Megatron-Core.
            topology: discovered over the whole job if None.
            timeout: seconds (or timedelta) without progress after which a sync has failed; 30 minutes if None.
            snapshot: ``"host"`` copies this rank's shards to memory first, so that :meth:`send_weights` with ``wait=False``
                returns as soon as the model may change again.
            delta: with ``"auto"``, receivers with ``stage="host"`` that have the previous version get only what has changed
                since, unless that takes more than half of the bytes; others, and from time to time all receivers, get the version
                in full. With ``"always"``, the size of the changes does not matter. The sender keeps a copy of its shards in host
                memory, shared with ``snapshot="host"``. See docs/sync.md.
            transport: with ``"auto"``, receivers copy out of the device memory of senders on their machine, where possible.
                Otherwise versions go from device to device over their backend, such as NCCL, if all ranks of both jobs have their
                tensors on devices; else through host memory, over gloo. With ``"host"``, always through host memory.
            verify: whether to verify that receivers hold what the sender's shards hold. Digests verify that each bucket holds
                what it was packed from, a checksum that it has arrived unchanged, and digests that it was unpacked correctly.
                Equal in both jobs.
            progress: a bar on the first rank when standard error is a terminal.
            only: a function that takes a tensor's name and returns True if the tensor is sent, equal on all ranks and for all
                versions; or ``"adapter"``, which sends the active adapter of a PEFT model, as its ``save_pretrained`` would write
                it. If None, all base weights are sent.
            token: a secret that receivers have to know to use the store. If None, the environment variable ``EPLOAD_SYNC_TOKEN``;
                if that is not set, there is no token. See docs/sync.md for what it protects.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
            LoadError: the address cannot be served; the same on every rank.
        """
        super().__init__(timeout, verify, progress)
        host, port = parse_address(address)
        check_choice("snapshot", snapshot, Snapshots)
        check_choice("delta", delta, Deltas)
        check_choice("transport", transport, Transports)
        if not isinstance(receivers, int) or isinstance(receivers, bool) or receivers < 1:
            raise ValueError(f"expected receivers to be the number of receiving ranks, at least 1, got {receivers!r}")
        wait_for_background()
        self.topology = as_topology(topology, self._timeout)
        through_host = transport == "host"
        self._model = SentModel(
            as_module(model),
            mapping,
            names_from,
            snapshot == "host",
            through_host,
            delta,
            only,
            self.topology,
            self._timeout,
        )
        self._snapshot = snapshot
        self._creator = threading.current_thread()
        self._first = self.topology.rank == self.topology.ranks[0]
        self._basis: tuple[object, ...] = ()
        """The basis of the generation's plan on this rank."""
        self._generations = 0
        self._receivers: tuple[Participant, ...] = ()
        self._unacknowledged = 0
        """Ranks that say when they know how the last version that has started has ended."""
        self._version: int | None = None
        self._sending: futures.Future[SyncReport] | None = None
        self._token = token
        self._served: ServedStore | None = None
        self._store, port = self._open_store(host, port)
        self.address: str = format_address(host, port)
        """Address at which receivers find this sender."""
        self._rendezvous = SenderRendezvous(self._store, receivers) if self._first else None
        self._offers = Offers(partial(connect, self.address, self._timeout, self._token))

    def _open_store(self, host: str, port: int) -> tuple[TCPStore, int]:
        """Returns a connection to the store, and its port."""
        control, token = self.topology.control, self._token
        served = Attempt(lambda: serve((host, port), self._timeout, token) if self._first else None)
        call = Call("WeightSender()", self.topology)
        try:
            with exclusive(call, self._timeout) if control.store is not None else control.load(self._timeout), control.guard():
                ports = control.agree(
                    "serving the sync",
                    served.failure,
                    served.result and served.result.port,
                    lambda views: list(views.values()),
                )
                port, self._served = next(filter(None, ports)), served.value
                own = served.result and served.result.store
                store = Attempt(lambda: own or connect((host, port), self._timeout, token))
                control.agree("connecting to the sync's store", store.failure)
        except BaseException:
            if served.result is not None:
                served.result.close()
            raise
        return store.value, port

    # ---- sending ----

    @on_cpu
    def send_weights(self, version: int, *, wait: bool = True) -> SyncReport | None:
        """Sends the current weights to all receivers. Collective over the sender's ranks.

        Returns when every receiver has the whole version and has checked it; receivers apply it when they choose to. Receivers
        that have joined since the previous version take part; those that have left do not.

        Args:
            version: a number greater than that of any version sent before.
            wait: whether to wait until every receiver has the version. If False, which needs ``snapshot="host"``, returns when
                the model may change; with ``delta``, that is once all receivers are ready and the changes are known. Call
                :meth:`wait` before the next version is sent.

        Raises:
            LoadError: a rank of either job failed, or did not answer within the timeout; the same on every rank. Receivers keep
                the version that they had. The next call forms a new generation from the remaining ranks.
            ValueError, TypeError: a caller's mistake; nothing was sent.
        """
        self._check_open()
        began = perf_counter()
        report = SyncReport(version=version, verify=self._verify)
        with report.timed("plan"), garbage_collection.paused(), preparing_call(self.topology):
            report.version = version = as_version(version)
            if self._version is not None and version <= self._version:
                raise ValueError(f"expected version to be greater than {self._version}, the last one sent, got {version}")
            if not wait and self._snapshot != "host":
                raise ValueError("expected snapshot='host' for wait=False: else the model changes while it is sent")
            if self._sending is not None:
                raise ValueError("expected wait() to be called before the next version is sent")
            wait_for_background()
            failure = Attempt(self._model.read).failure
            if not wait and failure is None and self._model.base_version is not None:
                # The thread has the caller's stream of one device only.
                for device in {tensor.device for tensor in self._model.tensors if not tensor.is_cpu}:
                    torch.accelerator.current_stream(device).synchronize()
        if failure is not None and self._model.is_read_together:
            self._announce_failure(version, failure)
            raise failure
        if wait:
            return self._send(report, began, failure)
        number = self.topology.control.next_load()  # in the order of the caller's calls
        may_change, interrupted = threading.Event(), threading.Event()

        def copied() -> None:
            if interrupted.is_set():
                raise LoadError("interrupted before the weights were copied")
            may_change.set()

        try:
            self._sending = threads.call("epload-send", lambda: self._send(report, began, failure, copied, number))
            self._sending.add_done_callback(lambda _: may_change.set())
            add_to_background(self._sending, f"send_weights({version}, wait=False)", self.topology)
            if self._model.base_version is not None:
                may_change.wait()
        except BaseException as error:
            interrupted.set()
            if self._sending is None and isinstance(error, Exception):
                self._send(report, began, error, number=number)  # on all ranks, where it raises this
            raise
        return None

    def wait(self) -> SyncReport:
        """Waits for the version that :meth:`send_weights` with ``wait=False`` has begun to send.

        Raises:
            LoadError: as :meth:`send_weights`.
            ValueError: no version is being sent.
        """
        if self._sending is None:
            raise ValueError("expected a version that is being sent; call send_weights(version, wait=False) first")
        futures.wait([self._sending])
        sending, self._sending = self._sending, None
        return sending.result()

    def _send(
        self,
        report: SyncReport,
        began: float,
        failure: Exception | None,
        copied: Callable[[], None] = lambda: None,
        number: int | None = None,
    ) -> SyncReport:
        """
        Args:
            copied: called when the model may change.
            number: of the call, if it was taken before.
        """
        topology, model = self.topology, self._model

        def begins(in_full: bool) -> list[Tensor] | None:
            tensors = model.let_change(in_full)
            copied()
            return tensors

        with exclusive(Call("send_weights()", topology, self, self._creator), self._timeout, number):
            try:
                with report.timed("plan"):
                    with topology.control.guard():
                        start = self._start_version(report.version, failure)
                    if not self._continues(start):
                        participants = Participants.fetch(self._store, start.participants, self._timeout)
                        node = f"sender {local_network()} {topology.nodes.index(topology.node)}"
                        message = JoinMessage(node, self._verify, model.access)
                        rank = topology.ranks.index(topology.rank)
                        check = partial(self._rendezvous.check, self._receivers) if self._rendezvous else lambda: None
                        own = rank, message, model.manifest, model.holdings
                        self._join(start, self._timeout, participants, *own, check=check)
                        self._basis = model.basis
                assert self._generation is not None
                show_progress = self._progress and self._first
                self._generation.sync(start, model.tensors, report, model.base_version, show_progress, begins=begins)
                report.peak_staging += sum(copy.nbytes for copy in model.copies.tensors)
                self._version = report.version  # of which receivers know from now on
                committed = Attempt(lambda: model.commit(start.key, in_full=report.changed is None))
                if committed.failure is not None:
                    model.copies.forget()
                    why = message_of(committed.failure)
                    self._warn(report, f"the next version is sent in full: the copy of this one has failed: {why}")
                offered = Attempt(partial(self._offer, report.version, self._generation) if self._first else lambda: None)
                if offered.failure is not None:
                    self._warn(report, f"engines do not hand this version on: {message_of(offered.failure)}")
            except BaseException as error:  # receivers may have left the generation
                model.copies.comparison = None
                self._leave_generation(error)
                if self._rendezvous is not None and self._unacknowledged:  # for those that have not read the start yet
                    with suppress(RuntimeError):
                        self._cancel(report.version, error, self._rendezvous)
                raise
            finally:
                model.tensors = []  # a trainer that moves its weights elsewhere replaces them
                if not self._first:
                    Announcements(self._store, self._timeout).acknowledge()
        report.seconds = perf_counter() - began
        return report

    def _start_version(self, version: int, failure: Exception | None) -> Start:
        """The sender's ranks agree on the model, and learn which receivers take part."""
        control, model = self.topology.control, self._model
        is_new = self._generation is None or self._basis != model.basis
        message = [version, model.digest, is_new] if failure is None else None
        try:
            if control.agree("reading the model", failure, message, _check_same_model):
                self._drop_generation()
        except BaseException as error:
            self._announce_failure(version, error)
            raise
        start = Attempt(lambda: self._gather(version, self._rendezvous) if self._rendezvous else None)
        decision = control.agree(
            "waiting for receivers", start.failure, start.result, lambda views: views[control.ranks[0]], patience=2
        )
        return Start(*decision)

    def _gather(self, version: int, rendezvous: SenderRendezvous) -> Start:
        """Announces a version, and waits for receivers. Called on the first rank."""
        control = self.topology.control
        self._unacknowledged = 0
        rendezvous.require(self._offers.withdraw(self._store))
        rendezvous.announce(version)
        control.doing = f"waits for receivers of version {version}"

        def check() -> None:
            if (failure := control.published_failure()) is not None:
                raise failure.error()

        try:
            receivers = rendezvous.gather(version, self._timeout, check)
            if self._generation is None or receivers != self._receivers:
                self._generations += 1
            self._receivers = receivers
            manifest = publish(self._store, self._model.scope.encode(self._model.manifest))
            participants = Participants(len(self.topology.ranks), receivers, manifest)
            key = f"{version} {secrets.token_hex(8)}" if self._model.base_version is not None else ""
            start = Start(self._generations, participants.publish(self._store), key=key)
        except BaseException as error:
            self._cancel(version, error, rendezvous)
            raise
        rendezvous.start(start)
        self._unacknowledged = len(receivers) + len(self.topology.ranks) - 1
        return start

    def _announce_failure(self, version: int, error: BaseException) -> None:
        """Tells receivers, on the first rank: they may wait for this version, and do nothing else."""
        if self._rendezvous is not None:
            self._unacknowledged = 0
            self._rendezvous.announce(version)
            self._cancel(version, error, self._rendezvous)

    def _cancel(self, version: int, error: BaseException, rendezvous: SenderRendezvous) -> None:
        reason = message_of(error).removeprefix(f"version {version}: ")
        rendezvous.start(Start(failed=f"the sender canceled version {version}: {reason}"))

    def _offer(self, version: int, generation: Generation) -> None:
        """Lets engines that have a version hand it on to those that join."""
        scope, manifest = self._model.scope, self._model.manifest
        received = replace(manifest, dtypes=generation.plan.dtypes)
        names = [publish(self._store, scope.encode(tensors)) for tensors in (received, manifest)]
        senders = len(self.topology.ranks)
        holders = [self._receivers[rank - senders] for rank in generation.holders]
        self._offers.offer(Offer(version, names[0], names[1], self._verify), holders)

    # ---- ending ----

    def __exit__(self, *error: object) -> None:
        is_failure = isinstance(error[1], Exception | KeyboardInterrupt)
        while is_failure and self._sending is not None and not self._sending.done():  # it may wait for receivers
            left = LoadError(f"rank {self.topology.rank} has left its WeightSender by {type(error[1]).__name__}")
            generation = self._generation
            self.topology.control.abort(left, alone=True)
            if generation is not None:
                generation.control.abort(left)
            futures.wait([self._sending], _ABORT_SECONDS)
        super().__exit__(*error)

    def close(self) -> None:
        """Ends the store and frees memory. Not collective. May be called again.

        The first rank waits up to 5 s until all others know that receivers have the last version, or why it has failed. Until
        then they need the store.
        """
        if self._sending is not None:
            futures.wait([self._sending])
        super().close()
        self._model.clear()
        if self._rendezvous is not None:
            with suppress(RuntimeError):
                self._offers.close()
                self._rendezvous.end(self._unacknowledged)
        self._rendezvous = None
        if self._served is not None:
            self._served.close()
        self._served = None
        if hasattr(self, "_store"):
            del self._store  # which ends it, and frees its port


def _check_same_model(views: dict[int, tuple[int, str, bool]]) -> bool:
    """Returns True if any rank has no generation, or another model than when it began. Raises ValueError or LoadError if the
    ranks do not send the same."""
    first, (version, manifest, _) = next(iter(views.items()))
    for rank, (other, tensors, _) in views.items():
        if other != version:
            raise ValueError(f"the ranks send different versions: {version}, and {other} on rank {rank}")
        if tensors != manifest:
            raise LoadError(f"ranks {first} and {rank} have models with different tensors, or different mappings; send one model")
    return any(changed for *_, changed in views.values())
