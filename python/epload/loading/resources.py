"""Keeps a loader's resources from load to load: its topology and options, streams and staging memory."""

from __future__ import annotations

import threading
from contextlib import suppress

import torch

from epload.core import threads
from epload.errors import LoadError
from epload.loading.request import Options
from epload.loading.routes import Router
from epload.model.devices import check_stream
from epload.native import ops
from epload.planning.schedule import STRIPE_ALIGNMENT
from epload.ranks.topology import Topology
from epload.transfer.device import DeviceStaging
from epload.transfer.device_pipe import DevicePipe
from epload.transfer.shared_memory import NodeMemory


class Resources:
    """Holds the resources of one loader. Streams and staging memory are made when first needed."""

    def __init__(self, topology: Topology, options: Options, stream: torch.Stream | None) -> None:
        """``stream``: of the models' device, if the caller gave it. Raises as :func:`check_stream`."""
        check_stream(stream)
        self.topology = topology
        self.options = options
        self.router = Router(topology, options)
        self.streams = [stream] if stream is not None else []
        """Streams of the models' device that the caller gave."""
        self.memory: NodeMemory | None = None
        """Host staging of this rank's node."""
        self._rejoined = topology.control.rejoined
        """Its value when the memory was made."""
        self.staging: DeviceStaging | None = None
        """Staging on the device of the last model that was on one."""
        self._own_streams: dict[torch.device, torch.Stream] = {}
        self._preparing: threading.Thread | None = None
        self._pipe: DevicePipe | None = None
        """Made by the thread, until the staging has it."""

    def stream(self, device: torch.device) -> torch.Stream:
        """Returns the caller's stream, or the loader's own."""
        if self.streams:
            return self.streams[0]
        if device not in self._own_streams:
            self._own_streams[device] = torch.Stream(device)
        return self._own_streams[device]

    def describe_stream(self, device: torch.device) -> str:
        """Describes the stream for the report."""
        stream = self.stream(device)
        return f"{stream.device} {stream.stream_id}, {'the caller' if self.streams else 'the loader'}'s"

    def restart(self) -> None:
        """Begins a load. All ranks have come through the last round of the load before, or none has the memory that was used in
        it, and none moves data before all are in this load."""
        if self._rejoined != self.topology.control.rejoined:
            self.release()
            self._rejoined = self.topology.control.rejoined
        if self.memory is not None:
            self.memory.restart()

    def reserve_memory(self, nbytes: int) -> NodeMemory:
        """Returns host staging with buffers of at least ``nbytes``. Collective when there is none yet."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # before more is allocated
            self.memory = NodeMemory.for_node(self.topology.control, self.topology.nodes, nbytes)
        return self.memory

    def prepare(self, device: torch.device) -> None:
        """Begins to make what a first load needs on a device while it is planned, if this rank surely brings bytes there."""
        sure = len(self.topology.ranks) == 1 or self.options.readers in ("every", "auto")
        if device.type == "cpu" or not sure or self.staging is not None or self._preparing is not None:
            return

        def make() -> None:
            with suppress(Exception):  # it is made again, and fails again, where that is reported
                torch.accelerator.set_device_index(device)
                if device.type == "cuda":
                    ops.cuda_obstacle(device)
                self._pipe = DevicePipe.of(device, len(self.topology.node))

        with suppress(LoadError):  # the process has reached its limit on threads
            self._preparing = threads.start("epload-pipe", make)

    def _end_preparing(self) -> None:
        if self._preparing is not None:
            self._preparing.join()
            self._preparing = None

    def reserve_staging(self, device: torch.device, readers: str, bucket_bytes: int, shared: bool) -> DeviceStaging:
        """Returns staging on the load's device.

        Args:
            bucket_bytes: of the largest bucket.
            shared: whether there is memory that the ranks of a node share.
        """
        self._end_preparing()
        flow, ranks = self.router.flow(device, readers, shared), len(self.topology.node)
        in_buckets = not flow.shared and readers != "every"
        stripes = ranks * STRIPE_ALIGNMENT  # as many bytes as make whole ones of any bucket
        nbytes = -(-bucket_bytes // stripes) * stripes if in_buckets else 0
        brings_bytes, staging = flow.shared or flow.reads, self.staging
        lacks_pipe = brings_bytes and (staging is None or staging.pipe is None)
        if staging is None or lacks_pipe or staging.device != device or staging.nbytes < nbytes:
            self.staging = staging = None  # before more is allocated
            staging = DeviceStaging(device, nbytes, self.stream(device), ranks=ranks if brings_bytes else 0)
            self.staging = staging
        self._pipe = None
        return staging

    def release(self) -> None:
        """Frees staging memory, at the end or after a failed transfer: the next load makes it anew."""
        self._end_preparing()
        self.memory = self.staging = self._pipe = None
