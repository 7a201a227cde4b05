"""What a loader keeps for models on a device, and how their buckets go: its streams, staging, flows and routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from epload.checkpoint.base import Checkpoint
from epload.cluster.topology import Route, Topology
from epload.control.control import Control
from epload.model.devices import CPU
from epload.planning.plan import LoadPlan
from epload.planning.schedule import Flow
from epload.report import LoadReport
from epload.staging.device import DeviceStaging
from epload.transport.device_transfer import DeviceTransfer
from epload.transport.framing import Framing
from epload.transport.local import Local
from epload.transport.upload import Uploader


class DeviceSide:
    """Of one loader. Streams and staging are made when first needed."""

    def __init__(self, topology: Topology, algorithm: str, src: int, given: torch.Stream | None) -> None:
        """``algorithm``: as asked for. ``given``: the stream that the loader was given."""
        self._topology = topology
        self._by_node = algorithm == "auto" and any(len(node) > 1 for node in topology.nodes)
        self._algorithm = "two_level" if algorithm == "auto" else algorithm
        self._src = src
        self._given = given
        self._own: dict[torch.device, torch.Stream] = {}
        self.staging: DeviceStaging | None = None

    def stream(self, device: torch.device) -> torch.Stream:
        """The one given, or the loader's own."""
        if self._given is not None:
            return self._given
        if device not in self._own:
            self._own[device] = torch.Stream(device)
        return self._own[device]

    def spelled(self, device: torch.device) -> str:
        """The stream as the report names it."""
        stream = self.stream(device)
        return f"{stream.device} {stream.stream_id}, {'the loader' if self._given is None else 'the caller'}'s"

    def by_node(self, readers: str) -> bool:
        """Whether the ranks of a node take what they keep out of buckets in memory that they share, each over its own link to
        its device: where buckets do not cross nodes, unless an algorithm for sending them was asked for."""
        crosses = len(self._topology.nodes) > 1 and readers != "per_node"
        return self._by_node and readers in ("one", "per_node", "partitioned") and not crosses

    def needs_memory(self, readers: str) -> bool:
        """Whether a load may need memory that the ranks of a node share."""
        return self.by_node("one" if readers == "auto" else readers)

    def why_not_striped(self, readers: str) -> str:
        """Empty if nothing speaks against it. Where no bucket moves between ranks, nothing does."""
        if readers == "every" or len(self._topology.ranks) == 1:
            return ""
        if not self._topology.even:
            return "node sizes differ"
        return "no bucket crosses nodes" if readers == "per_node" else ""

    def flow(self, readers: str, shared: bool = False) -> Flow:
        """``shared``: whether there is memory that a node's ranks share. Without it they have buffers of their own, and still
        go in stripes where every byte crosses nodes."""
        shared = shared and self.by_node(readers)
        algorithm = self._algorithm
        if algorithm == "striped" and self.why_not_striped(readers):
            algorithm = "two_level"
        return Flow(self._topology.nodes, self._topology.rank, self._src, readers, algorithm, shared)

    def route(self, flow: Flow, src: int) -> Route:
        """Collective where its groups are not there yet."""
        if flow.algorithm == "flat":
            return self._topology.flat_route(src)
        return (self._topology.striped_route if flow.algorithm == "striped" else self._topology.route)(src)

    def reserve(self, device: torch.device, nbytes: int, reads: bool) -> DeviceStaging:
        """Staging for a load, kept for the next one."""
        if self.staging is None or not self.staging.serves(device, nbytes, reads):
            self.staging = None
            self.staging = DeviceStaging(device, self.stream(device), nbytes, reads)
        return self.staging

    def forget(self) -> None:
        """The next load makes new staging."""
        self.staging = None

    def transfer(
        self,
        plan: LoadPlan,
        buckets: range,
        flow: Flow,
        local: Local,
        checkpoint: Checkpoint | None,
        report: LoadReport,
        control: Control,
        framing: Framing,
    ) -> DeviceTransfer:
        """Collective where the groups are not there yet. The staging is that of the last :meth:`reserve`."""
        assert self.staging is not None
        return DeviceTransfer(
            plan, buckets, flow, self._routes(flow), self.staging, local, checkpoint, report, control, framing
        )

    def uploader(self, local: Local, report: LoadReport) -> Uploader:
        """For a transfer through a node's memory, with the staging of the last :meth:`reserve`."""
        assert self.staging is not None
        return Uploader(self.staging, local, report)

    def _routes(self, flow: Flow) -> dict[int, Route]:
        """For each rank that reads for this one; none where nothing moves between ranks."""
        if flow.readers == "every" or len(self._topology.ranks) == 1:
            return {}
        if flow.readers == "per_node":
            route = self.route(flow, self._src)
            return {route.leader: replace(route, src=route.leader, inter_group="")}
        return {reader: self.route(flow, reader) for reader in flow.turns}

    @contextmanager
    def work(self, device: torch.device) -> Iterator[None]:
        """Queues what is done inside on the load's stream, between the waits for and of the caller's. On CPU nothing."""
        if device == CPU:
            yield
            return
        assert self.staging is not None
        with self.staging.entered():
            yield
