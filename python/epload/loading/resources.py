"""Keeps a loader's resources from load to load: its topology and options, and staging memory."""

from __future__ import annotations

import torch

from epload.loading.request import Options
from epload.loading.routes import Router
from epload.model.devices import check_stream
from epload.planning.algorithms import STRIPE_ALIGNMENT
from epload.ranks.topology import Topology
from epload.transfer.device import DeviceResources, DeviceStaging
from epload.transfer.shared_memory import NodeMemory


class Resources:
    """Holds the resources of one loader. Staging memory is made when first needed."""

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
        self.device = DeviceResources(stream)

    def reserve_memory(self, nbytes: int) -> NodeMemory:
        """Returns host staging with buffers of at least ``nbytes``. Collective when there is none yet."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # before more is allocated
            self.memory = NodeMemory.for_node(self.topology.control, self.topology.nodes, nbytes)
        return self.memory

    def reserve_staging(self, device: torch.device, readers: str, bucket_bytes: int, shared: bool) -> DeviceStaging:
        """Returns staging on the load's device.

        Args:
            bucket_bytes: of the largest bucket.
            shared: whether there is memory that the ranks of a node share.
        """
        flow, ranks = self.router.flow(device, readers, shared), len(self.topology.node)
        in_buckets = not flow.shared and readers != "every"
        stripes = ranks * STRIPE_ALIGNMENT  # as many bytes as make whole ones of any bucket
        nbytes = -(-bucket_bytes // stripes) * stripes if in_buckets else 0
        return self.device.reserve(device, nbytes, ranks if flow.shared or flow.reads else 0)

    def release(self) -> None:
        """Frees staging memory, at the end or after a failed transfer: the next load makes it anew."""
        self.memory = None
        self.device.clear()
