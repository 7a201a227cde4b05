"""Records what the ranks of a traced load do when, and brings it to the first rank."""

from __future__ import annotations

from epload.observe.trace import Events, merge_events
from epload.ranks.topology import Topology
from epload.report import LoadReport


def record_events(topology: Topology, report: LoadReport) -> None:
    """Starts to record, as events, what this rank does in the load."""
    report.events = Events(topology.rank, topology.nodes.index(topology.node))
    topology.control.events = report.events


def gather_events(topology: Topology, report: LoadReport) -> None:
    """Gives the first rank the events of all, if the load is traced. Collective."""
    control, first = topology.control, topology.ranks[0]
    if report.events is None:
        return
    received = control.exchange("the trace", {first: report.events.encode()})
    if topology.rank == first:
        report.merged = merge_events(map(Events.decode, received.values()))
