"""Who reads, receives and passes on what: all ranks' steps together, run against queues that keep order."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epload import _C
from epload.planning import schedule as flow_module
from epload.planning.schedule import (
    MIN_PART_BYTES,
    MIN_WAVE_BYTES,
    MIN_WAVES,
    STRIPE_ALIGNMENT,
    Flow,
    buckets_per_wave,
)
from epload.planning.schedule import wave_limit as limit_of

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
    """Of the first rank; the rest is common to all."""
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
        """For each staging buffer, how often each of its bytes was written."""
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


@settings(max_examples=400, deadline=None)
@given(flows(), waves())
def test_every_byte_reaches_every_staging_buffer_once(flow: Flow, buckets: Buckets) -> None:
    wave = Wave(flow, buckets)
    wave.run()
    expected = torch.zeros(wave.size, dtype=torch.int64)
    for _, begin, end in buckets:
        expected[begin:end] = 1
    for sharers, times in wave.times.items():
        assert torch.equal(times, expected), f"{sharers}: {times.tolist()}"


@settings(max_examples=400, deadline=None)
@given(flows(), waves())
def test_bytes_over_each_nodes_link(flow: Flow, buckets: Buckets) -> None:
    """In: what others read. Out: everything but what the next node reads, so never more than all."""
    wave = Wave(flow, buckets)
    wave.run()
    total = sum(end - begin for _, begin, end in buckets)
    count = len(flow.nodes)
    for at, node in enumerate(flow.nodes):
        own = sum(end - begin for number, begin, end in buckets if flow.reader(number) in node)
        of_next = sum(end - begin for n, begin, end in buckets if flow.reader(n) in flow.nodes[(at + 1) % count])
        crossing = count > 1 and flow.readers != "per_node"
        assert wave.bytes_in[at] == (total - own if crossing else 0)
        assert wave.bytes_out[at] == (total - of_next if crossing else 0) <= total


@given(flows(), st.integers(0, 99))
def test_all_ranks_know_the_same_readers(flow: Flow, bucket: int) -> None:
    views = views_of(flow)
    if flow.readers == "per_node":
        for node in flow.nodes:
            assert len({views[rank].reader(bucket) for rank in node}) == 1
            assert views[node[0]].reader(bucket) in node
        return
    readers = {view.reader(bucket) for view in views.values()}
    assert len(readers) == 1
    assert all(view.reads for rank, view in views.items() if rank in readers)


@given(flows())
def test_leaders(flow: Flow) -> None:
    assert [leader in node for leader, node in zip(flow.leaders, flow.nodes, strict=True)] == [True] * len(flow.nodes)
    assert flow.src in flow.leaders


@given(node_lists(), st.booleans())
def test_partitioned_turns_go_round_the_nodes(nodes: Nodes, shared: bool) -> None:
    """All nodes, then all that have a second rank, and so on; ranks that share no staging buffers read on their leader."""
    flow = Flow(nodes, nodes[0][0], nodes[-1][-1], "partitioned", "two_level", shared)
    node_of = {rank: i for i, node in enumerate(nodes) for rank in node}
    turns = [node_of[rank] for rank in flow.turns]
    assert len(set(flow.turns)) == len(flow.turns)
    if not shared:
        assert flow.turns == flow.leaders
        return
    assert sorted(flow.turns) == sorted(node_of)
    rounds = [[i for i, node in enumerate(nodes) if len(node) > turn] for turn in range(max(map(len, nodes)))]
    assert turns == [i for round_ in rounds for i in round_]


@given(node_lists())
def test_turns_of_the_other_readers(nodes: Nodes) -> None:
    src = nodes[-1][-1]
    one, per_node, every = (
        Flow(nodes, nodes[0][0], src, way, "two_level", True) for way in ("one", "per_node", "every")
    )
    assert one.turns == (src,)
    assert per_node.turns == per_node.leaders
    assert sorted(every.turns) == sorted(rank for node in nodes for rank in node)
    assert not every.crosses


def test_nothing_is_relayed_where_nothing_crosses() -> None:
    nodes = ((0, 1), (2, 3))
    assert Flow(nodes, 0, 0, "per_node", "two_level", True).relays == ()
    assert Flow(((0, 1, 2),), 0, 0, "one", "striped", True).relays == ()
    assert Flow(((0,),), 0, 0, "one", "two_level", False).relays == ()
    assert Flow(nodes, 1, 0, "one", "two_level", True).relays == (0,)
    assert Flow(nodes, 1, 0, "one", "striped", True).relays == (0, 1)


@given(
    st.integers(0, 10**6),
    st.integers(0, 10**6),
    st.integers(1, 17),
    st.sampled_from((_C.OP_ALIGNMENT, STRIPE_ALIGNMENT)),
)
def test_stripes_partition(begin: int, size: int, count: int, alignment: int) -> None:
    parts = [_C.stripe(begin, begin + size, count, i, alignment) for i in range(count)]
    assert (parts[0][0], parts[-1][1]) == (begin, begin + size)
    assert all(a[1] == b[0] for a, b in pairwise(parts))
    assert all(low <= high for low, high in parts)
    sizes = [high - low for low, high in parts]
    assert len(set(sizes[:-1])) <= 1, "equal, for an all-gather"
    assert sizes[0] % alignment == 0 or count == 1
    assert 0 <= sizes[-1] - sizes[0] < count * alignment


@given(node_lists(even=True), st.data(), st.integers(1, 2000))
def test_broadcasts_of_a_rank(nodes: Nodes, data: st.DataObject, nbytes: int) -> None:
    """Leaders take part between the nodes, all inside theirs; striped, each rank in that of its stripe, and the other nodes
    gather the equal stripes, and broadcast what the last one has more."""
    ranks = [rank for node in nodes for rank in node]
    src, rank = data.draw(st.sampled_from(ranks)), data.draw(st.sampled_from(ranks))
    node = next(sorted(node) for node in nodes if rank in node)
    inter, intra = len(nodes) > 1, node if len(node) > 1 else []
    leader = next(r for r in _C.leaders(nodes, src) if r in node)
    assert _C.broadcast_count(nbytes, False, inter and rank == leader, intra, rank, src, leader) == (
        (inter and rank == leader) + bool(intra)
    )
    parts = [_C.stripe(0, nbytes, len(node), i, _C.OP_ALIGNMENT) for i in range(len(node))]
    filled = [low < high for low, high in parts]
    rail = next(rail for rail in _C.rails(nodes) if rank in rail)
    root = next(r for r in rail if any(src in other and r in other for other in nodes))
    rest = parts[-1][1] - parts[-1][0] > parts[0][1]
    inside = 0 if not intra else 1 if src in node else filled[0] + rest
    expected = inside + (inter and filled[node.index(rank)])
    assert _C.broadcast_count(nbytes, True, inter, intra, rank, src, root) == expected


@given(node_lists(even=True))
def test_rails(nodes: Nodes) -> None:
    rails = _C.rails(nodes)
    assert sorted(rank for rail in rails for rank in rail) == sorted(rank for node in nodes for rank in node)
    for i, rail in enumerate(rails):
        assert all(sorted(node)[i] == rank for node, rank in zip(nodes, rail, strict=True))


@pytest.mark.parametrize(
    "call",
    [
        lambda: _C.stripe(5, 3, 1, 0, 16),
        lambda: _C.stripe(0, 3, 0, 0, 16),
        lambda: _C.stripe(0, 3, 2, 2, 16),
        lambda: _C.stripe(0, 3, 2, 0, 0),
        lambda: _C.stripe(0, 2**62, 2, 0, 16),
        lambda: _C.leaders([[0, 1], []], 0),
        lambda: _C.leaders([[0, 1]], 2),
        lambda: _C.rails([[0, 1], [2]]),
        lambda: _C.wave_steps([[0, 1]], 0, 5, False, True, True, [(0, 0, 9)], 64),
        lambda: _C.wave_steps([[0, 1]], 5, 0, False, True, True, [(0, 0, 9)], 64),
        lambda: _C.wave_steps([[0, 1]], 0, 5, True, True, True, [(0, 0, 9)], 64),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match="schedule: expected"):
        call()


@given(flows(), st.integers(0, 1 << 42), st.integers(0, 1 << 42))
def test_chunk_bytes(flow: Flow, a: int, b: int) -> None:
    """Equal on all ranks, grows with the load, and the fill of the longest chain is small compared with it."""
    less, more = sorted((a, b))
    assert {view.chunk_bytes(more) for view in views_of(flow).values()} == {flow.chunk_bytes(more)}
    low, high = flow_module._CHUNK_BYTES
    assert low <= flow.chunk_bytes(less) <= flow.chunk_bytes(more) <= high
    if flow.chunk_bytes(more) > low:
        hops = (len(flow.nodes) - 1) * flow.crosses + (0 if flow.shared else max(map(len, flow.nodes)) - 1)
        assert flow.chunk_bytes(more) * (hops - 1) <= more / 128


@pytest.mark.parametrize(
    ("nodes", "bucket", "per_wave"),
    [(2, 32 << 20, 2), (4, 16 << 20, 4), (8, 4 << 20, 16), (17, 4 << 20, 17), (128, 4 << 20, 128), (129, 32 << 20, 16)],
)
def test_a_chunk_is_a_small_part_of_what_a_node_reads_of_a_wave(nodes: int, bucket: int, per_wave: int) -> None:
    """So that it is forwarded while the node before still sends its own. Of two nodes none forwards."""
    flow = Flow(tuple((rank,) for rank in range(nodes)), 0, 0, "partitioned", "two_level", True)
    chunk = flow.chunk_bytes(1 << 40, bucket, per_wave)
    if nodes > 2:
        assert chunk <= max(bucket * max(per_wave // nodes, 1) / 16, 512 << 10)
    else:
        assert chunk == replace(flow, readers="one").chunk_bytes(1 << 40)


@given(st.integers(0, 1 << 45), st.integers(1, 1 << 35))
def test_wave_limit(total: int, most: int) -> None:
    limit = limit_of(total, most)
    assert 0 < limit <= most
    if limit > MIN_WAVE_BYTES:
        assert total // limit >= MIN_WAVES
    if limit < most:
        assert limit >= MIN_WAVE_BYTES


@given(node_lists(), st.integers(1, 1 << 30))
def test_buckets_per_wave(nodes: Nodes, wave: int) -> None:
    for readers in ("one", "per_node", "every"):
        assert buckets_per_wave(nodes, readers, wave) == 1
    count = buckets_per_wave(nodes, "partitioned", wave)
    assert 1 <= count <= sum(map(len, nodes))
    assert count == 1 or wave // count >= MIN_PART_BYTES
    assert count <= len(nodes) or count % len(nodes) == 0


@pytest.mark.parametrize(("wave", "count"), [(4, 1), (8, 2), (12, 2), (16, 4), (64, 4)])
def test_as_many_buckets_in_a_wave_as_leave_each_reader_enough(wave: int, count: int) -> None:
    assert buckets_per_wave([[0, 1], [2, 3]], "partitioned", wave << 20) == count
