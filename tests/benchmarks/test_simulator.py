"""The simulator: seconds computed by hand, and bytes compared with a testbed's link counters."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import costs
import launch
import simulate_sync
from costs import StoreRates, agreement
from epload.planning.exchange import plan_exchange
from epload.planning.holdings import full_holdings
from epload.planning.schedule import Flow
from epload.planning.streams import Members
from epload.planning.traffic import traffic
from epload.sync.transfer import ExchangeRoles
from netbed import INTERFACE, NetBed
from simulator import Cluster, SyncLoad, predict, predict_sync, sync_traffic
from support.testbed import require
from sync_planning import Tensors
from workload import Size, plan_buckets


def nodes_of(nodes: int, ranks: int) -> list[list[int]]:
    return [list(range(first, first + ranks)) for first in range(0, nodes * ranks, ranks)]


def test_the_flat_tree_of_gloo() -> None:
    """Eight ranks: rank 0 sends to 1, 2 and 4, rank 1 to 3 and 5. With two ranks per node, four copies leave node 0."""
    assert costs.tree_edges(range(8), 0) == [(0, 1), (0, 2), (1, 3), (0, 4), (1, 5), (2, 6), (3, 7)]
    assert costs.tree_copies(nodes_of(4, 2), 0) == (4, 1)
    assert costs.tree_copies(nodes_of(8, 1), 0) == (3, 0)
    assert sorted(receiver for _, receiver in costs.tree_edges(range(7), 3)) == [0, 1, 2, 4, 5, 6]


# ---- seconds ----

GB = 10**9
CLUSTER = Cluster(
    nodes=4, ranks=8, link=10 * GB, links=4, intra=100 * GB, storage=20 * GB, reader=5 * GB, unpack=50 * GB
)


def test_one_is_bound_by_reader_link_or_spreading() -> None:
    total = 1000 * GB
    assert predict("one/two_level", total, 10, CLUSTER) == pytest.approx(200, rel=0.01)
    fast = Cluster(nodes=4, ranks=8, link=10 * GB, links=4, intra=100 * GB)
    assert predict("one/two_level", total, 10, fast) == pytest.approx(100, rel=0.01)
    assert predict("one/striped", total, 10, fast) == pytest.approx(25, rel=0.02)
    many = Cluster(nodes=4, ranks=8, link=10 * GB, links=8, intra=20 * GB)
    assert predict("one/striped", total, 10, many) == pytest.approx(50, rel=0.01)


def test_a_flat_ring_uses_all_cards_and_two_level_one() -> None:
    fast = Cluster(nodes=4, ranks=8, link=10 * GB, links=8, intra=400 * GB)
    ring, two_level = (predict(mode, 1000 * GB, 10, fast) for mode in ("ring", "one/two_level"))
    assert two_level == pytest.approx(8 * ring, rel=0.01)


def test_modes_of_reading() -> None:
    total = 1000 * GB
    assert predict("every/two_level", total, 10, CLUSTER) == pytest.approx(total / (4 * 20 * GB), rel=0.01)
    shared = Cluster(nodes=4, ranks=8, link=10 * GB, storage=20 * GB, storage_all=40 * GB)
    assert predict("every/two_level", total, 10, shared) == pytest.approx(25, rel=0.01)
    assert predict("per_node/two_level", total, 10, shared) == pytest.approx(100, rel=0.01)
    assert predict("partitioned/two_level", total, 10, shared) == pytest.approx(75, rel=0.01), "the link carries 3/4"


def test_agreement_of_levels_and_ranks() -> None:
    """Node 33 is the first whose views pass another leader."""
    store = StoreRates(level=1.0, rank=1e-3)
    seconds = [agreement(nodes, 8 * nodes, 3, store).seconds for nodes in (1, 2, 33, 34, 2048)]
    assert seconds == pytest.approx([0.024, 3.048, 3.792, 6.816, 9 + 49.152])
    assert agreement(2048, 16384, 4, store).most == agreement(64, 512, 4, store).most <= 48


def follow(nodes: int, per_wave: int, bucket: int, waves: int, chunk: int, link: float, hop: float) -> float:
    """Seconds until every node has all buckets, chunk by chunk: each node's relay of a wave does its steps in order and ends when
    all is sent and received, and its next one begins then. What it reads is there at once."""
    flows = [
        Flow(tuple((rank,) for rank in range(nodes)), node, 0, "partitioned", "two_level", True)
        for node in range(nodes)
    ]
    begins = [0.0] * nodes
    for first in range(0, waves * per_wave, per_wave):
        steps = [flow.steps([(first + i, i * bucket, (i + 1) * bucket) for i in range(per_wave)]) for flow in flows]
        free, ends = list(begins), list(begins)
        arrived: dict[tuple[int, int], float] = {}
        waiting = list(range(nodes))
        while waiting:
            node = waiting.pop(0)
            left = steps[node]
            while left:
                begin, end, source, _, target, _ = left[0]
                chunks = range(begin, end, chunk)
                if source >= 0 and (node, chunks[-1]) not in arrived:
                    break  # the node before has not come so far
                left.pop(0)
                for at in chunks:
                    ready = arrived[node, at] if source >= 0 else begins[node]
                    ends[node] = max(ends[node], ready)
                    if target >= 0:
                        free[node] = max(free[node], ready) + min(chunk, end - at) / link
                        arrived[target, at] = max(free[node] + hop, begins[target])
            if left:
                waiting.append(node)
        begins = [max(*pair) for pair in zip(free, ends, strict=True)]
    return max(begins)


@pytest.mark.parametrize("link", [400e9, 50e9, 0.125e9], ids=["8 cards", "1 card", "1 Gbit"])
@pytest.mark.parametrize(("nodes", "per_wave"), [(2, 16), (3, 15), (16, 16), (8, 4), (48, 16)])
@pytest.mark.parametrize("chunk", [512 << 10, 4 << 20])
def test_what_hops_cost_partitioned_readers(nodes: int, per_wave: int, chunk: int, link: float) -> None:
    """Within an eighth, for parts of 4 MiB in 24 waves; four-bucket waves of many nodes are also filling their first ring."""
    bucket, waves_moved, hop = 4 << 20, 24, 9.6e-6
    total = waves_moved * per_wave * bucket
    extra = costs.partitioned_wave_overhead(
        total, nodes, per_wave * bucket, per_wave, chunk, costs.Rates([], link, hop=hop)
    )
    predicted = total * (nodes - 1) / nodes / link + extra
    followed = follow(nodes, per_wave, bucket, waves_moved, chunk, link, hop)
    assert predicted == pytest.approx(followed, rel=1 / 8)


# ---- against the test-bed ----


@pytest.mark.netbed
@pytest.mark.parametrize("shape", [(2, 2), (4, 1)], ids=["2x2", "4x1"])
def test_simulated_bytes_match_the_link_counters(shape: tuple[int, int], tmp_path: Path) -> None:
    """Within 6 %, for TCP and IP headers, the manifest and agreement."""
    require("the simulator's bytes against link counters")
    size = Size(layers=3)
    folders = launch.checkpoints(tmp_path, size)
    outcome = launch.Outcome()
    entries = [entry for entry in launch.loaders(("reload",), outcome, "epload_modes")["reload"] if "dict" not in entry]
    work = tmp_path / "run"
    work.mkdir()
    plan = launch.Plan(
        *shape, asdict(size), folders, {"reload": {entry: [] for entry in entries}}, repeat=1, interface=INTERFACE
    )
    with NetBed(shape[0], mbit=1000) as bed:
        launch.run(plan, work, outcome, bed)
    assert outcome.failures == []
    assert [sample["entry"] for sample in outcome.samples] == entries
    nodes = nodes_of(*shape)
    for sample in outcome.samples:
        readers, _, algorithm = sample["entry"].removeprefix("epload_modes:").partition("/")
        readers, algorithm = readers.replace("auto", "every"), algorithm.replace("auto", "two_level")
        buckets, per_wave = plan_buckets(Path(folders[0]), size, nodes, readers)
        simulated = traffic(buckets, per_wave, nodes, readers, algorithm)
        for node, counted in enumerate(sample["links"]):
            for direction, got, want in zip(
                ("received", "sent"), counted, (simulated.received[node], simulated.sent[node]), strict=True
            ):
                # A node that only sends also receives acknowledgements.
                allowed = 0.06 * (want or max(*simulated.received, *simulated.sent, sum(buckets)))
                assert abs(got - want) <= allowed, (
                    f"{sample['entry']}, node {node} {direction}: {got} counted, {want} simulated"
                )


def test_simulated_syncs_agree_with_measured_ones() -> None:
    """Within 5 %: less than what a link takes besides the bytes, so that the bound alone is not within."""
    runs = json.loads((Path(__file__).parents[2] / "docs" / "sync.json").read_text())
    checked = simulate_sync.check(runs)
    assert len(checked) == 4
    for row in checked:
        assert abs(row["error"]) <= 0.05, row
    assert all(runs[case]["bound"] < 0.95 * row["measured"] for case in ("2", "4") for row in checked)


def test_sync_of_few_waves_by_hand() -> None:
    """Chunks of 100 take 1 s a hop over links of 100, and 0.5 s more: around 3 nodes it is 3 s. Two links a node."""
    cluster = Cluster(nodes=1, ranks=2, link=100.0, links=2, hop=0.5, unpack=10.0)
    load = SyncLoad(total=8000, received=8000, sent=4000, trainers=2, rollouts=3, chain=3, waves=40, chunk=100)
    assert load.bound(cluster) == 40.0
    assert predict_sync(load, cluster, "host") == pytest.approx(40 + 3)
    # With memory for two waves, each pair of them takes as long as one goes around and a wave of 200 comes in.
    assert predict_sync(load, cluster, "none") == pytest.approx((40 * 3 + 40) / 2 + 3 + 200 / 2 / 10)


@pytest.mark.parametrize(("senders", "nodes"), [(1, 1), (2, 3), (4, 2)])
def test_bytes_of_a_sync_follow_the_steps_of_its_ranks(senders: int, nodes: int) -> None:
    """Each node gets every byte once; what ranks pass on is what the simulator counts."""
    shapes, dtypes = ((64, 4096), (300, 7), (5,)), (torch.float32,) * 3
    members = Members(
        tuple((rank,) for rank in range(senders)),
        tuple((senders + 2 * node, senders + 2 * node + 1) for node in range(nodes)),
    )
    holdings = full_holdings(shapes, dtypes)
    ranks = range(senders + 2 * nodes)
    summaries = {rank: holdings.summary() for rank in ranks}
    tensors = Tensors(("a", "b", "c"), shapes, dtypes)
    plans = {rank: plan_exchange(tensors, members, summaries, rank, holdings, 1 << 20) for rank in ranks}
    out, into = sync_traffic([plans[rank] for rank in members.senders], members)
    total = sum(torch.Size(shape).numel() * 4 for shape in shapes)
    assert out.received == [0] * senders
    assert sum(out.sent) == pytest.approx(total, rel=0.01)
    assert into.received == [plans[node[0]].nbytes for node in members.nodes]
    for nodes_of_job, counted in ((members.sender_nodes, out), (members.nodes, into)):
        for number, node in enumerate(nodes_of_job):
            received = sent = 0
            for rank in node:
                if rank not in members.rail_of:
                    continue
                roles = ExchangeRoles(plans[rank], members, rank)
                buckets = [(i, 0, bucket.nbytes) for i, bucket in enumerate(plans[rank].buckets)]
                for begin, end, before, _, after, _ in roles.steps(buckets):
                    received += (end - begin) * (before >= 0)
                    sent += (end - begin) * (after >= 0)
            assert (counted.received[number], counted.sent[number]) == (received, sent)
