"""WeightSender: a trainer hands versions of its weights to receivers in other jobs."""

from __future__ import annotations

import threading
from contextlib import suppress
from datetime import timedelta
from time import perf_counter
from types import TracebackType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from epload.checkpoint.manifest import Manifest
from epload.cluster.membership import local_network
from epload.cluster.single_flight import Call, Refused, exclusive
from epload.cluster.topology import Topology, as_timedelta
from epload.core import garbage_collection, log, threads
from epload.core.attempt import attempt
from epload.core.default_device import on_cpu
from epload.errors import LoadError, message_of
from epload.mapping.mapping import Mapping
from epload.mapping.wrappers import names_added_by_adapters
from epload.model.targets import Targets
from epload.planning.shares import Share, share_of_targets
from epload.saving.catalog import catalog
from epload.saving.model_reader import ModelReader
from epload.sync.device_route import DeviceLink, link_of
from epload.sync.epoch import Epoch, SyncOptions
from epload.sync.formation import Attendee, describe_ranks, form_epoch
from epload.sync.lobby import LEASE_SECONDS, Lobby, Member, Offer, Participants, fetch_members, publish_members
from epload.sync.pulling import Probe
from epload.sync.report import SyncReport
from epload.sync.store import Address, connect, format_address, parse_address, publish, serve

SNAPSHOTS = ("none", "host")
TRANSPORTS = ("auto", "host")
_FAILED_SECONDS = 3.0
"""Seconds that the store outlives a failed version, as ranks that have ended do not say that they know of it."""


class _Read(NamedTuple):
    """A sender's model as it was read for one version."""

    targets: Targets
    manifest: Manifest
    """The tensors that are sent."""
    share: Share
    """The parts of them that this rank has."""
    added: frozenset[str]
    """Names of the tensors that adapters have added."""


class WeightSender:
    """Sends a model's weights to the ranks of other jobs, version after version. See docs/sync.md.

    Not thread-safe. As a context manager, or with :meth:`close`, it frees its memory and ends its store, so that receivers which
    wait for a version fail.

    Example::

        with epload.WeightSender(model, "trainer0:29600", receivers=8) as sender:
            for step in range(steps):
                train(model)
                sender.send_weights(step)
    """

    @on_cpu
    def __init__(
        self,
        model: nn.Module,
        address: Address,
        *,
        receivers: int,
        mapping: Mapping | str = "auto",
        names_from: Any = None,
        topology: Topology | None = None,
        timeout: timedelta | float | None = None,
        snapshot: str = "none",
        transport: str = "auto",
        verify: bool = False,
        progress: bool = False,
    ) -> None:
        """Collective over the topology's ranks; arguments equal on all of them.

        Args:
            model: any mix of DTensors and plain tensors with storage.
            address: at which the first rank serves both jobs' store: ``"host:port"``, ``"[v6 address]:port"`` or
                ``(host, port)``. Port 0 has one chosen; see :attr:`address`. Whoever can connect to it can join: there is no
                authentication.
            receivers: receiving ranks, over all engines, that have to be there before the first version is sent.
            mapping: how names in checkpoints become regions of the model's tensors; tensors are sent under these names.
                ``"auto"`` is what a transformers model declares, else names as they are.
            names_from: a checkpoint whose names and shapes tensors are sent under, for a mapping of your own.
            topology: discovered over the whole job if None.
            timeout: seconds (or timedelta) without progress after which a sync has failed; 30 minutes if None.
            snapshot: ``"host"`` copies this rank's shards to memory first, so that :meth:`send_weights` with ``wait=False``
                returns as soon as the model may change again.
            transport: ``"auto"``: from device to device over their backend, such as NCCL, where all ranks of both jobs have their
                tensors on one; else through host memory, over gloo. ``"host"``: always that.
            verify: proves that receivers hold what the sender's shards do: by digests that each bucket holds what it was packed
                from, by its checksum that it has arrived so, and by digests that it was unpacked so. Equal in both jobs.
            progress: a bar on the first rank when standard error is a terminal.

        Raises:
            ValueError, TypeError: an argument is out of range, or of another type.
            LoadError: the address cannot be served; the same on every rank.
        """
        log.configure()
        host, port = parse_address(address)
        if snapshot not in SNAPSHOTS:
            raise ValueError(f"expected snapshot to be one of {', '.join(SNAPSHOTS)}, got {snapshot!r}")
        if transport not in TRANSPORTS:
            raise ValueError(f"expected transport to be one of {', '.join(TRANSPORTS)}, got {transport!r}")
        if not isinstance(receivers, int) or isinstance(receivers, bool) or receivers < 1:
            raise ValueError(f"expected receivers to be the number of receiving ranks, at least 1, got {receivers!r}")
        self._options = SyncOptions(as_timedelta(timeout), verify)
        self.topology = topology if topology is not None else Topology.default(timeout=self._options.timeout)
        self._reader = ModelReader(model, filled=False)
        self._mapping = mapping
        self._names_from = names_from
        self._snapshot = snapshot
        self._transport = transport
        self._progress = progress
        self._made_by = threading.current_thread()
        self._first = self.topology.rank == self.topology.ranks[0]
        self._known: _Read | None = None
        """The model as it was read for the previous version, if any."""
        self._epoch: Epoch | None = None
        self._link: DeviceLink | None = None
        """Link of this version's tensors."""
        self._epoch_link: DeviceLink | None = None
        """Link of the tensors that the epoch was formed with."""
        self._probe: Probe | None = None
        """The probe of this version's tensors; None if versions have to pass through host memory."""
        self._epoch_shares = False
        """True if other processes can open the memory of those that the epoch was formed with."""
        self._epochs = 0
        self._members: tuple[Member, ...] = ()
        self._version: int | None = None
        self._sending: threading.Thread | None = None
        self._sent: SyncReport | Exception | None = None
        self._copies: list[Tensor] = []
        self._offer: Offer | None = None
        """The last, if receivers took part in it."""
        self._complete = False
        """True if they have its version."""
        self._closed = False
        store = self._open_store(host, port)
        self._store = store
        self.address: str = format_address(host, store.port)
        """Address at which receivers find this sender."""
        self._lobby = Lobby(store, receivers) if self._first else None

    def _open_store(self, host: str, port: int) -> TCPStore:
        control = self.topology.control
        store, failure = attempt(lambda: serve((host, port)) if self._first else None)
        control.begin(self._options.timeout)
        with control.guard():
            port = control.settle(
                "serving the sync", failure, store.port if store is not None else 0, lambda views: max(views.values())
            )
            if store is None:
                store, failure = attempt(lambda: connect((host, port), self._options.timeout))
            control.settle("connecting to the sync's store", failure)
        control.end()
        assert store is not None
        return store

    # ---- sending ----

    @on_cpu
    def send_weights(self, version: int, *, wait: bool = True) -> SyncReport | None:
        """Sends the present weights to all receivers. Collective over the sender's ranks.

        Returns when every receiver has the whole version and has checked it; receivers apply it when they like. Receivers that
        have joined since the version before take part; those that are gone do not.

        Args:
            version: a number greater than that of any version that was sent before.
            wait: whether to wait for that. Otherwise, with ``snapshot="host"``, returns when the model may change; then
                :meth:`wait` has to be called before the next version is sent.

        Raises:
            LoadError: a rank of either job failed, or did not answer within the timeout; the same on every rank. Receivers keep
                the version that they had. The next call forms a new epoch out of those that are left.
            ValueError, TypeError: a caller's mistake; nothing was sent.
        """
        if not isinstance(version, int) or isinstance(version, bool) or not 0 <= version < 1 << 63:
            raise TypeError(f"expected version to be an int of at least 0, got {version!r}")
        if self._version is not None and version <= self._version:
            raise ValueError(f"expected a version after {self._version}, got {version}: versions grow")
        if not wait and self._snapshot != "host":
            raise ValueError("expected snapshot='host' for wait=False: else the model changes while it is sent")
        if self._closed:
            raise ValueError("expected an open WeightSender, got one that was closed; make a new one")
        if self._sending is not None:
            raise ValueError("expected wait() to be called before the next version is sent")
        began = perf_counter()
        report = SyncReport(version=version, verify=self._options.verify)
        with report.timed("plan"), garbage_collection.paused():
            read, failure = attempt(self._read_model)
        tensors = None
        if read is not None:
            tensors, failure = attempt(lambda: self._tensors_of(read.targets))
        if tensors is not None and self._transport == "auto":
            self._link = link_of({tensor.device for tensor in tensors})
            self._probe = Probe.of(tensors)
        if wait:
            return self._send(version, report, began, read, failure, tensors)
        self._sending = threads.start(
            "epload-send", lambda: self._send_in_thread(version, report, began, read, failure, tensors)
        )
        return None

    def wait(self) -> SyncReport:
        """Waits for what :meth:`send_weights` with ``wait=False`` has begun.

        Raises:
            LoadError: as :meth:`send_weights`.
            ValueError: nothing was begun.
        """
        if self._sending is None:
            raise ValueError("expected a version that is being sent; call send_weights(version, wait=False) first")
        self._sending.join()
        self._sending, sent = None, self._sent
        if isinstance(sent, SyncReport):
            return sent
        assert sent is not None
        raise sent

    def _send_in_thread(self, *args: Any) -> None:
        try:
            self._sent = self._send(*args)
        except Exception as error:
            self._sent = error

    def _send(
        self,
        version: int,
        report: SyncReport,
        began: float,
        read: _Read | None,
        failure: Exception | None,
        tensors: list[Tensor] | None,
    ) -> SyncReport:
        try:
            self._offer = None
            with exclusive(Call("send_weights()", self.topology, self, self._made_by), self._options.timeout):
                with self.topology.control.guard(), report.timed("plan"):
                    participants = self._agree(version, read, failure)
                assert read is not None
                assert tensors is not None
                self._move(version, participants, read, tensors, report)
        except Refused as refused:
            raise refused.failure.error() from None
        except BaseException:  # receivers may have left the epoch
            self._drop_epoch()
            raise
        self._version, self._complete = version, True
        report.seconds = perf_counter() - began
        return report

    def _read_model(self) -> _Read:
        targets = self._reader.read()
        added = names_added_by_adapters(self._reader.model, targets.index)
        if self._known is not None and targets.matches(self._known.targets) and added == self._known.added:
            return self._known._replace(targets=targets)
        manifest, placed, _ = catalog(self._reader.model, targets, self._mapping, self._names_from)
        share = share_of_targets(manifest.shapes, manifest.dtypes, targets, placed)
        return _Read(targets, manifest, share, added)

    def _tensors_of(self, targets: Targets) -> list[Tensor]:
        """Returns the tensors to send: the model's own local tensors, or a copy of them in host memory."""
        return self._snapshot_of(targets.local()) if self._snapshot == "host" else targets.local()

    def _snapshot_of(self, tensors: list[Tensor]) -> list[Tensor]:
        """Copies in host memory, which is used again for the next version."""
        kept = self._copies
        same = [(tensor.shape, tensor.dtype) for tensor in tensors] == [(copy.shape, copy.dtype) for copy in kept]
        if not same:
            self._copies = kept = [tensor.detach().to("cpu", copy=True).contiguous() for tensor in tensors]
        else:
            for copy, tensor in zip(kept, tensors, strict=True):
                copy.copy_(tensor.detach())
        return kept

    def _agree(self, version: int, read: _Read | None, failure: Exception | None) -> Participants:
        """The sender's ranks agree on the model, and hear which receivers take part."""
        control = self.topology.control
        changed = (
            read is None
            or self._known is None
            or self._known.share is not read.share
            or self._link != self._epoch_link
            or self._shares != self._epoch_shares
        )
        digest = read.manifest.digest.hex() if read is not None else ""

        def check(views: dict[int, Any]) -> bool:
            for rank, (digest, of_rank, _) in views.items():
                first = next(iter(views.values()))
                if of_rank != first[1]:
                    raise ValueError(f"the ranks send different versions: {first[1]}, and {of_rank} on rank {rank}")
                if digest != first[0]:
                    raise LoadError(
                        f"ranks {control.ranks[0]} and {rank} have models with different tensors; send one model"
                    )
            return any(changed for _, _, changed in views.values())

        renew = control.settle("reading the model", failure, [digest, version, changed], check)
        assert read is not None
        self._known = read
        if renew:
            self._drop_epoch()
        found, failure = attempt(lambda: self._gather(version, read.manifest) if self._lobby is not None else None)
        said = control.settle(
            "waiting for receivers", failure, found, lambda views: views[control.ranks[0]], patience=2
        )
        members = fetch_members(self._store, said["members"], self._options.timeout)
        return Participants(said["epoch"], members, said["manifest"], said["senders"])

    def _gather(self, version: int, manifest: Manifest) -> dict[str, Any]:
        """Offers a version, and waits for receivers. Called on the first rank."""
        assert self._lobby is not None
        control = self.topology.control
        offer = self._lobby.offer(version)
        control.doing = f"waits for receivers of version {version}"

        def check() -> None:
            if (failure := control.known()) is not None:
                raise failure.error()

        try:
            members = self._lobby.gather(offer, self._options.timeout, check)
            if self._epoch is None or members != self._members:
                self._epochs += 1
            self._members = members
            name = publish(self._store, manifest.compact)
            said = {"epoch": self._epochs, "members": publish_members(self._store, members), "manifest": name}
            said["senders"] = len(self.topology.ranks)
        except BaseException as error:
            self._lobby.close(offer, {"failed": f"the sender gave up version {version}: {message_of(error)}"})
            raise
        self._lobby.close(offer, said)
        self._offer, self._complete = offer, False
        return said

    def _move(
        self,
        version: int,
        participants: Participants,
        read: _Read,
        tensors: list[Tensor],
        report: SyncReport,
    ) -> None:
        _, manifest, share, _ = read
        if self._epoch is None or self._epoch.number != participants.epoch:
            with report.timed("plan"):
                self._join(participants, manifest, share)
        epoch = self._epoch
        assert epoch is not None
        epoch.sync(version, tensors, report, self._options, self._progress and self._first)

    def _join(self, participants: Participants, manifest: Manifest, share: Share) -> None:
        self._drop_epoch()
        self._epoch_link, self._epoch_shares = self._link, self._shares
        ranks = self.topology.ranks
        rank = ranks.index(self.topology.rank)
        node = next(i for i, node in enumerate(self.topology.nodes) if self.topology.rank in node)
        self._epoch = form_epoch(
            self._store,
            participants.epoch,
            len(ranks) + len(participants.members),
            Attendee(rank, f"sender {local_network()} {node}", sends=True, link=self._link, probe=self._probe),
            manifest,
            share,
            None,
            self._options,
            describe_ranks(len(ranks), participants.members),
        )

    @property
    def _shares(self) -> bool:
        return self._probe is not None and bool(self._probe.handle)

    def _drop_epoch(self) -> None:
        if self._epoch is not None:
            self._epoch.close()
            self._epoch = None

    # ---- ending ----

    def close(self) -> None:
        """Ends the store, and frees memory. Not collective. May be called again.

        The first rank waits up to 10 s until all receivers know that they have the last version, for which they need the store;
        if it has failed, up to 3 s until they know why.
        """
        if self._sending is not None:
            self._sending.join()
        self._drop_epoch()
        self._copies = []
        self._known = None
        if self._closed:
            return
        self._closed = True
        if self._lobby is not None:
            with suppress(RuntimeError):
                if self._offer is not None:
                    seconds = LEASE_SECONDS if self._complete else _FAILED_SECONDS
                    self._lobby.wait_for_confirmation(self._offer, len(self._members), seconds)
                self._lobby.end()
        self._lobby = None
        del self._store  # which ends it, and frees its port

    def __enter__(self) -> WeightSender:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
