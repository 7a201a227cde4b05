"""What a loader keeps from load to load: staging memory, and what was computed from the layouts of a model."""

from __future__ import annotations

import torch

from epload.cluster.topology import Topology
from epload.loading.agreement import AgreedLoad
from epload.loading.request import Options
from epload.loading.routes import Router
from epload.staging.device import DeviceStaging
from epload.staging.device_resources import DeviceResources
from epload.staging.shared_memory import NodeMemory
from epload.transport.local import PreparedPlan
from epload.transport.sinks import upload_bytes
from epload.verify.proof import Proof


class Resources:
    """Of one loader. Everything is made when first needed."""

    def __init__(self, topology: Topology, options: Options, router: Router, stream: torch.Stream | None) -> None:
        """``stream``: that of the models' device, if the caller gave one."""
        self._topology = topology
        self._options = options
        self._router = router
        self.memory: NodeMemory | None = None
        self.device = DeviceResources(stream)
        self.prepared: PreparedPlan | None = None
        self._proof: Proof | None = None

    def clear_board(self) -> None:
        """Before the first round of a load: all ranks have come through the last round of the one before, and none of them moves
        data before all have come to this one."""
        if self.memory is not None:
            self.memory.board.clear()

    def reserve_memory(self, nbytes: int) -> NodeMemory:
        """Host staging with buffers of at least ``nbytes``. Collective when there is none yet."""
        if self.memory is None or self.memory.nbytes < nbytes:
            self.memory = None
            options, ranks = self._options, self._topology.ranks
            if options.algorithm == "flat" or options.readers == "every" or len(ranks) == 1:
                self.memory = NodeMemory.private(self._topology.rank, nbytes)
            else:
                self.memory = NodeMemory.for_node(self._topology.control, self._topology.nodes, nbytes)
        return self.memory

    def reserve_staging(self, load: AgreedLoad, shared: bool) -> DeviceStaging:
        """Staging on the load's device. ``shared``: whether there is memory that the ranks of a node share."""
        readers = self._options.readers
        if readers == "auto":
            readers = "every" if load.all_read else "one"
        flow = self._router.flow(load.device, readers, shared)
        largest, uploaded = load.plan.largest, upload_bytes(load.plan)
        if flow.shared:
            nbytes = uploaded
        elif readers == "every":
            # With "auto", buckets may move between ranks once the trials are over.
            nbytes = max(largest, uploaded) if self._options.readers == "auto" else uploaded
        else:
            nbytes = largest
        return self.device.reserve(load.device, nbytes, reads=flow.shared or flow.reads)

    def proof(self, load: AgreedLoad, verifiers: tuple[int, ...]) -> Proof:
        """The proof of a plan, kept for the next load of the same plan."""
        if self._proof is None or not self._proof.fits(load.plan, verifiers):
            self._proof = Proof(load.plan, verifiers, self._options.verify == "sample")
        return self._proof

    def forget_staging(self) -> None:
        """After a failed transfer: the next load makes new staging memory."""
        self.memory = None
        self.device.staging = None

    def close(self) -> None:
        """Frees everything."""
        self.forget_staging()
        self.prepared = self._proof = None
