"""Reads, receives and sends: all ranks' steps together, run against queues that keep order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epload import _C
from epload.planning.schedule import STRIPE_ALIGNMENT, Flow

Nodes = tuple[tuple[int, ...], ...]
Buckets = list[tuple[int, int, int]]


@st.composite
def node_lists(draw: st.DrawFn, even: bool = False) -> Nodes:
    """Nodes of any sizes whose ranks are in any order and need not be 0, 1, 2..."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    if even:
        sizes = [sizes[0]] * len(sizes)
    ranks = draw(st.permutations(range(2, 2 + sum(sizes))))
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return tuple(tuple(ranks[end - size : end]) for size, end in zip(sizes, ends, strict=True))


@st.composite
def flows(draw: st.DrawFn) -> Flow:
    """Draws the flow of the first rank; the rest is common to all."""
    algorithm = draw(st.sampled_from(("two_level", "striped")))
    nodes = draw(node_lists(even=algorithm == "striped"))
    ranks = [rank for node in nodes for rank in node]
    readers = draw(st.sampled_from(("one", "per_node", "partitioned")))
    shared = algorithm == "striped" or draw(st.booleans())
    return Flow(nodes, ranks[0], draw(st.sampled_from(ranks)), readers, algorithm, shared)


@st.composite
def waves(draw: st.DrawFn) -> Buckets:
    """Consecutive buckets with small gaps between them, from any number on."""
    first = draw(st.integers(0, 9))
    buckets, at = [], 0
    for number in range(first, first + draw(st.integers(1, 6))):
        size = draw(st.integers(1, 700))
        buckets.append((number, at, at + size))
        at += -(-size // 64) * 64
    return buckets


def views_of(flow: Flow) -> dict[int, Flow]:
    return {rank: replace(flow, rank=rank) for node in flow.nodes for rank in node}


class Wave:
    """One wave as all ranks see it. A message is the range of bytes that it holds."""

    def __init__(self, flow: Flow, buckets: Buckets) -> None:
        self.views = views_of(flow)
        self.buckets = buckets
        self.node_of = {rank: i for i, node in enumerate(flow.nodes) for rank in node}
        self.size = buckets[-1][2]
        self.times: dict[tuple[int, ...], torch.Tensor] = {
            view.sharers: torch.zeros(self.size, dtype=torch.int64) for view in self.views.values()
        }
        """Number of times that each byte was written, by staging buffer."""
        self.bytes_in: dict[int, int] = defaultdict(int)
        self.bytes_out: dict[int, int] = defaultdict(int)
        for rank, view in self.views.items():
            for number, begin, end in buckets:
                if view.reader(number) == rank:
                    self.times[view.sharers][begin:end] += 1

    def run(self) -> None:
        """Every rank in turn goes as far as it can; fails when none gets any further."""
        left = {rank: deque(view.steps(self.buckets)) for rank, view in self.views.items() if rank in view.relays}
        queues: dict[tuple[int, int], deque[tuple[int, int]]] = defaultdict(deque)
        moved = True
        while moved:
            moved = False
            for rank, steps in left.items():
                while steps and self._do(rank, steps[0], queues):
                    steps.popleft()
                    moved = True
        stuck = {rank: steps[0] for rank, steps in left.items() if steps}
        assert not stuck, f"wait for ever: {stuck}"
        unread = {pair: queue for pair, queue in queues.items() if queue}
        assert not unread, f"sent and never received: {unread}"

    def _do(self, rank: int, step: tuple[int, ...], queues: dict[tuple[int, int], deque[tuple[int, int]]]) -> bool:
        begin, end, from_inter, from_intra, to_inter, to_intra = step
        staging = self.times[self.views[rank].sharers]
        source = from_inter if from_inter >= 0 else from_intra
        assert min(from_inter, from_intra) == -1, "comes from one rank at most"
        assert begin % STRIPE_ALIGNMENT == 0 or begin == end
        if source >= 0 and begin < end:
            queue = queues[source, rank]
            if not queue:
                return False
            assert queue.popleft() == (begin, end), "neighbors agree on the order and the size of messages"
            staging[begin:end] += 1
            if from_inter >= 0:
                self.bytes_in[self.node_of[rank]] += end - begin
        for to, inter in ((to_inter, True), (to_intra, False)):
            if to >= 0:
                assert inter == (self.node_of[to] != self.node_of[rank]), "each group joins the ranks it is for"
                assert to in self.views[to].relays, "whoever is sent to listens"
                if begin < end:
                    assert bool((staging[begin:end] == 1).all()), "passes on only what has come"
                    queues[rank, to].append((begin, end))
                    self.bytes_out[self.node_of[rank]] += (end - begin) * inter
        return True


@settings(max_examples=400)
@given(flows(), waves())
def test_every_byte_reaches_every_staging_buffer_once(flow: Flow, buckets: Buckets) -> None:
    """And crosses each node's link once: into it what others read, out of it everything but what the next node reads."""
    wave = Wave(flow, buckets)
    wave.run()
    expected = torch.zeros(wave.size, dtype=torch.int64)
    for _, begin, end in buckets:
        expected[begin:end] = 1
    for sharers, times in wave.times.items():
        assert torch.equal(times, expected), f"{sharers}: {times.tolist()}"
    total = sum(end - begin for _, begin, end in buckets)
    count = len(flow.nodes)
    for at, node in enumerate(flow.nodes):
        own = sum(end - begin for number, begin, end in buckets if flow.reader(number) in node)
        of_next = sum(end - begin for n, begin, end in buckets if flow.reader(n) in flow.nodes[(at + 1) % count])
        crossing = count > 1 and flow.readers != "per_node"
        assert wave.bytes_in[at] == (total - own if crossing else 0)
        assert wave.bytes_out[at] == (total - of_next if crossing else 0) <= total


@given(node_lists(), st.booleans())
def test_partitioned_turns_go_round_the_nodes(nodes: Nodes, shared: bool) -> None:
    """All nodes, then all that have a second rank, and so on; ranks that share no staging buffers read on their leader."""
    flow = Flow(nodes, nodes[0][0], nodes[-1][-1], "partitioned", "two_level", shared)
    if not shared:
        assert flow.turns == flow.leaders
        return
    assert sorted(flow.turns) == sorted(rank for node in nodes for rank in node)
    rounds = [[i for i, node in enumerate(nodes) if len(node) > turn] for turn in range(max(map(len, nodes)))]
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    assert [node_of[rank] for rank in flow.turns] == [i for round_ in rounds for i in round_]


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.leaders([[0, 1], []], 0),
        lambda: _C.leaders([[0, 1]], 2),
        lambda: _C.rails([[0, 1], [2]]),
        lambda: _C.wave_steps([[0, 1]], 0, 5, "two_level", True, True, [(0, 0, 9)], 64),
        lambda: _C.wave_steps([[0, 1]], 0, 0, "tree", True, True, [(0, 0, 9)], 64),
        lambda: _C.wave_steps([[0, 1]], 5, 0, "two_level", True, True, [(0, 0, 9)], 64),
        lambda: _C.wave_steps([[0, 1]], 0, 5, "striped", True, True, [(0, 0, 9)], 64),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="schedule: expected"):
        call()
