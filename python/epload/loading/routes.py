"""The route of a load: who reads, over which groups, in which memory, and why. Resolved once, before data moves."""

from __future__ import annotations

from dataclasses import replace

import torch

from epload.loading.request import Options
from epload.model.devices import CPU
from epload.planning.schedule import Flow, buckets_per_wave, crosses, wave_limit
from epload.ranks.topology import Route, Topology


class Router:
    """Resolves the routes of one loader's loads, from its options, its topology and the model's device."""

    def __init__(self, topology: Topology, options: Options) -> None:
        self._topology = topology
        self._options = options

    def may_read(self, device: torch.device) -> bool:
        """True if this rank may be asked to read. With ``"auto"`` each rank may that can."""
        readers = "every" if self._options.readers == "auto" else self._options.readers
        return self.flow(device, readers, shared=True).reads

    def stages_on_host(self, device: torch.device, readers: str) -> bool:
        """True if buckets are staged in host memory, where a buffer holds several."""
        return readers != "every" and (device == CPU or self._by_node(readers))

    def bucket_sizes(self, device: torch.device, readers: str, nbytes: int) -> tuple[int, int]:
        """Returns the number of buckets in a wave, which share a staging buffer, and the most bytes of a bucket, for a checkpoint
        of ``nbytes``."""
        wave = wave_limit(nbytes, self._options.bucket_bytes)
        on_host = self.stages_on_host(device, readers)
        per_wave = buckets_per_wave(self._topology.nodes, readers, wave) if on_host else 1
        return per_wave, wave // per_wave

    def flow(self, device: torch.device, readers: str, shared: bool) -> Flow:
        """``shared``: whether the ranks of a node have memory that they share."""
        topology, algorithm = self._topology, self._algorithm(device, readers, shared)[0]
        shared = shared and (device == CPU or self._by_node(readers))
        return Flow(topology.nodes, topology.rank, self._options.src, readers, algorithm, shared)

    def resolve(self, device: torch.device, readers: str, shared: bool) -> tuple[Flow, dict[int, Route], str]:
        """Collective where groups are not there yet.

        Returns:
            The rank that reads each bucket, and the ranks that pass it on. The groups over which this rank's buckets come, by the
            rank that reads them; empty where nothing moves between ranks. Why another algorithm is used than was asked for; empty
            if none is.
        """
        flow, note = self.flow(device, readers, shared), self._algorithm(device, readers, shared)[1]
        return flow, self._routes(flow, device == CPU or flow.shared), note

    def _algorithm(self, device: torch.device, readers: str, shared: bool) -> tuple[str, str]:
        """Returns the algorithm, and why it is not the one that was asked for."""
        algorithm, topology = self._options.algorithm, self._topology
        if algorithm == "auto":
            several = topology.even and len(topology.node) > 1
            striped = device != CPU and crosses(topology.nodes, readers) and several
            return "striped" if striped else "two_level", ""
        why = ""
        if algorithm == "striped" and readers != "every" and len(topology.ranks) > 1:
            if not topology.even:
                why = "node sizes differ"
            elif device == CPU and not shared:
                why = "the ranks of a node share no memory"
            elif device != CPU and readers == "per_node":
                why = "no bucket crosses nodes"
        return ("two_level", f"two_level in place of striped, as {why}") if why else (algorithm, "")

    def _routes(self, flow: Flow, on_host: bool) -> dict[int, Route]:
        src, topology = self._options.src, self._topology
        if flow.readers == "every" or (flow.shared and not flow.crosses):
            return {}
        if on_host:
            route = topology.route(src, flow.algorithm if flow.crosses else "two_level")
            return {reader: replace(route, src=reader) for reader in flow.turns}
        if len(topology.ranks) == 1:
            return {}
        if flow.readers == "per_node":
            route = topology.route(src, flow.algorithm)
            return {route.leader: replace(route, src=route.leader, inter_group="")}
        return {reader: topology.route(reader, flow.algorithm) for reader in flow.turns}

    def _by_node(self, readers: str) -> bool:
        """Returns True if the ranks of a node copy what they keep out of shared host memory, each to its own device:
        where buckets do not cross nodes, unless an algorithm for sending them was asked for."""
        nodes = self._topology.nodes
        in_nodes = readers != "every" and not crosses(nodes, readers)
        return self._options.algorithm == "auto" and in_nodes and any(len(node) > 1 for node in nodes)
