"""Which ranks read and over what a load's buckets go, as a loader's options, its topology and the model's device have it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from epload.cluster.topology import Route, Topology
from epload.model.devices import CPU
from epload.planning.plan import HEADER_BYTES
from epload.planning.schedule import ALGORITHMS, READERS, Flow, buckets_per_wave
from epload.transport.device_side import DeviceSide
from epload.verify.proof import VERIFY


@dataclass(frozen=True)
class Options:
    """Of one loader, equal on all its ranks. See ``HierarchicalLoader``."""

    readers: str
    """One of READERS, or "auto"."""
    algorithm: str
    src: int
    bucket_bytes: int
    verify: str

    def __post_init__(self) -> None:
        """Raises ValueError, TypeError."""
        for name, allowed in (("readers", ("auto", *READERS)), ("algorithm", ALGORITHMS), ("verify", VERIFY)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"expected {name} to be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        if self.readers == "per_node" and self.algorithm == "flat":
            raise ValueError("readers='per_node' has no step between nodes, so it does not go with algorithm='flat'")
        if not isinstance(self.bucket_bytes, int) or isinstance(self.bucket_bytes, bool):
            raise TypeError(
                f"expected bucket_bytes to be a number of bytes as an int, such as 500 * 10**6, got {self.bucket_bytes!r}"
            )
        if self.bucket_bytes < HEADER_BYTES + 16:
            raise ValueError(f"expected bucket_bytes of at least {HEADER_BYTES + 16}, got {self.bucket_bytes}")

    @property
    def checksums(self) -> bool:
        """Whether buckets carry them. Where every byte is proven after the load there is nothing left for them to find."""
        return self.verify in ("buckets", "sample")

    @property
    def proves(self) -> bool:
        """Whether shards are compared with the checkpoint after the load."""
        return self.verify in ("sample", "full")


class Ways:
    """Of one loader. Collective only where :meth:`route` or :meth:`route_of` has to make groups."""

    def __init__(self, topology: Topology, options: Options, device: DeviceSide) -> None:
        self._topology = topology
        self._readers = options.readers
        self._algorithm = options.algorithm
        self._src = options.src
        self._device = device

    def flow(self, device: torch.device, shared: bool, readers: str) -> Flow:
        """``shared``: whether a node's ranks share their staging buffers in host memory."""
        if device != CPU:
            return self._device.flow(readers, shared)
        algorithm = self._algorithm
        if algorithm == "striped" and self._why_not_striped(device, shared, readers):
            algorithm = "two_level"
        return Flow(self._topology.nodes, self._topology.rank, self._src, readers, algorithm, shared)

    def fallback(self, device: torch.device, shared: bool, readers: str) -> str:
        """What to tell of an algorithm that is not used though it was asked for; empty if there is none."""
        why = self._why_not_striped(device, shared, readers) if self._algorithm == "striped" else ""
        return f"two_level in place of striped, as {why}" if why else ""

    def _why_not_striped(self, device: torch.device, shared: bool, readers: str) -> str:
        """Empty if nothing speaks against it. Where no bucket moves between ranks, nothing does."""
        if device != CPU:
            return self._device.why_not_striped(readers)
        if readers == "every" or len(self._topology.ranks) == 1:
            return ""
        if not self._topology.even:
            return "node sizes differ"
        return "" if shared else "the ranks of a node share no memory"

    def may_read(self, device: torch.device) -> bool:
        """Whether this rank may be asked to read. With "auto" whoever can."""
        readers = "every" if self._readers == "auto" else self._readers
        return self.flow(device, True, readers).reads

    def route(self, device: torch.device) -> Route:
        """That of the manifest, and of the data unless it is striped."""
        if device != CPU:
            return self._device.route(self._device.flow("one"), self._src)
        topology = self._topology
        return topology.flat_route(self._src) if self._algorithm == "flat" else topology.route(self._src)

    def route_of(self, flow: Flow, route: Route) -> Route:
        """Of buckets in host memory; ``route`` is the manifest's."""
        striped = flow.algorithm == "striped" and flow.crosses
        return self._topology.striped_route(self._src) if striped else route

    def share_buffers(self, device: torch.device) -> bool:
        """Whether several buckets may be in one staging buffer."""
        return device == CPU or self._device.needs_memory(self._readers)

    def per_wave(self, device: torch.device, wave: int) -> int:
        """Buckets that make a wave of ``wave`` bytes: those that share a staging buffer, or on a device one for each leader that
        reads."""
        if self.share_buffers(device):
            return buckets_per_wave(self._topology.nodes, self._readers, wave)
        return len(self._topology.nodes) if self._readers in ("partitioned", "auto") else 1
