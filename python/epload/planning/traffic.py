"""Counts the bytes that a load moves between nodes, along the same schedule. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from epload.planning.schedule import Flow
from epload.planning.waves import make_waves


def traffic(
    buckets: Sequence[int], per_wave: int, nodes: Sequence[Sequence[int]], readers: str, algorithm: str = "two_level"
) -> tuple[list[int], list[int]]:
    """Returns the bytes that each node receives from other nodes, and those that it sends to them, in a load whose nodes share
    staging buffers.

    Args:
        buckets: bytes of each bucket, in order.
        per_wave: number of buckets in a wave.
        nodes: the global ranks of each node.
        readers: not ``"auto"``.
        algorithm: ``"two_level"`` or ``"striped"``.
    """
    received, sent = [0] * len(nodes), [0] * len(nodes)
    flows = [Flow(tuple(map(tuple, nodes)), rank, 0, readers, algorithm, True) for node in nodes for rank in node]
    relays = [flow for flow in flows if flow.crosses and flow.rank in flow.relays]
    for wave in make_waves(buckets, per_wave) if relays else ():
        ranges = list(zip(wave.numbers, wave.begins, wave.ends, strict=True))
        for flow in relays:
            for begin, stop, source, _, target, _ in flow.steps(ranges):
                received[flow.node] += (stop - begin) * (source >= 0)
                sent[flow.node] += (stop - begin) * (target >= 0)
    return received, sent
