"""Keeps a loader's resources from load to load: staging memory, and what was computed from the layouts of a model."""

from __future__ import annotations

import torch

from epload.loading.agreed import AgreedLoad
from epload.loading.request import Options
from epload.loading.routes import Router
from epload.model.devices import check_stream
from epload.planning.algorithms import STRIPE_ALIGNMENT
from epload.ranks.topology import Topology
from epload.transfer.device import DeviceResources, DeviceStaging
from epload.transfer.shared_memory import NodeMemory


class Resources:
    """Holds the resources of one loader. Everything is made when first needed."""

    def __init__(
        self,
        topology: Topology,
        options: Options,
        router: Router,
        stream: torch.Stream | None,
    ) -> None:
        """``stream``: of the models' device, if the caller gave it. Raises as :func:`check_stream`."""
        check_stream(stream)
        self.topology = topology
        self.options = options
        self.router = router
        self.memory: NodeMemory | None = None
        self.device = DeviceResources(stream)

    def clear_board(self) -> None:
        """Before the first round of a load: all ranks have come through the last round of the one before, and none of them moves
        data before all have come to this one."""
        if self.memory is not None:
            self.memory.counters.clear()

    def reserve_memory(self, nbytes: int) -> NodeMemory:
        """Host staging with buffers of at least ``nbytes``. Collective when there is none yet."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None  # before more is allocated
            self.memory = NodeMemory.for_node(self.topology.control, self.topology.nodes, nbytes)
        return self.memory

    def reserve_staging(self, load: AgreedLoad, shared: bool) -> DeviceStaging:
        """Staging on the load's device. ``shared``: whether there is memory that the ranks of a node share."""
        flow = self.router.flow(load.device, load.readers, shared)
        in_buckets = not flow.shared and load.readers != "every"
        stripes = len(self.topology.node) * STRIPE_ALIGNMENT  # as many bytes as make whole ones of any bucket
        nbytes = -(-load.plan.largest // stripes) * stripes if in_buckets else 0
        ranks = len(self.topology.node) if flow.shared or flow.reads else 0
        return self.device.reserve(load.device, nbytes, ranks)

    def forget_staging(self) -> None:
        """After a failed transfer: the next load makes new staging memory."""
        self.memory = None
        self.device.clear()

    def close(self) -> None:
        """Frees everything."""
        self.forget_staging()
