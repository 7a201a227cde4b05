"""Simulated syncs: compared with those that bench_sync.py measured over shaped links; of 64 + 64 to 1,024 + 4,096 accelerators.

Inputs for the testbed: the rate of a link, which is that of the raw messages in the smaller case, where each link carries every
byte once; and the planning and unpacking phases of the same run. For clusters: the bytes and waves of the plans in
data/sync.json, the numbers in clusters.py, and the coefficients of agreement from bench_control.py.
"""

from __future__ import annotations

from clusters import NODES, cluster
from costs import StoreRates
from epload.planning.schedule import SYNC_WAVE_BYTES, wave_limit
from simulator import Cluster, SyncLoad, predict_sync
from summary import Row
from tables import Table, seconds, times

ROUNDS = 2
"""Agreement rounds of a steady sync."""
CHUNK = 1 << 20
"""Bytes that a node passes on at a time; see epload/sync/host_route.py."""
STAGES = ("none", "host")


def testbed(runs: dict[str, Row]) -> Cluster:
    """The nodes of the shaped-link cases."""
    run = runs["2"]
    floor = next(row for row in run["rows"] if row["entry"] == "floor")
    ours = next(row for row in run["rows"] if row["entry"] == "epload_sync:stage=none")
    phases = ours["phases"]
    return Cluster(
        nodes=1, ranks=run["ranks"], link=run["nbytes"] / floor["min"],
        unpack=run["nbytes"] / run["ranks"] / phases["receive: unpack"],
        fixed=max(phases["send: plan"], phases["receive: plan"]),
    )  # fmt: skip


def check(runs: dict[str, Row]) -> list[Row]:
    """Simulated and measured seconds of each shaped-link case and stage."""
    bed = testbed(runs)
    found = []
    for case in ("2", "4"):
        run = runs[case]
        nbytes = run["nbytes"]
        waves = -(-nbytes // wave_limit(nbytes, SYNC_WAVE_BYTES))
        load = SyncLoad(
            nbytes, nbytes, nbytes // run["trainers"], run["trainers"], run["rollouts"], run["rollouts"], waves, CHUNK
        )
        for stage in STAGES:
            row = next(row for row in run["rows"] if row["entry"] == f"epload_sync:stage={stage}")
            taken = predict_sync(load, bed, stage)
            found.append(
                {
                    "case": f"{run['trainers']} + {run['rollouts']} nodes, stage={stage}",
                    "measured": row["median"],
                    "predicted": taken,
                    "error": taken / row["median"] - 1,
                }
            )
    return found


def scale(planned: list[Row], store: StoreRates) -> list[Row]:
    """Simulated seconds of each plan, on each node type with a network card for each accelerator."""
    found = []
    for row in planned:
        trainers, rollouts = row["trainers"] // 8, row["rollouts"] // 8
        received = row["receiver"]
        load = SyncLoad(
            row["total"], received["nbytes"], 8 * row["sender"]["nbytes"], trainers, rollouts,
            rollouts, received["waves"], CHUNK,
        )  # fmt: skip
        for node in NODES:
            bed = cluster(node, rollouts, 8, "local", 0.0, ROUNDS, store)
            found.append(
                {
                    **{key: row[key] for key in ("model", "trainers", "rollouts", "engine")},
                    "node": node.name,
                    "received": received["nbytes"],
                    "bound": load.bound(bed),
                    "planning": max(row["sender"]["seconds"], received["seconds"]),
                    **{stage: predict_sync(load, bed, stage) for stage in STAGES},
                }
            )
    return found


def check_table(checked: list[Row]) -> Table:
    worst = max(abs(row["error"]) for row in checked)
    lines = [
        [row["case"], f"{row['measured']:.2f}", f"{row['predicted']:.2f}", f"{100 * row['error']:+.1f} %"] for row in checked
    ]
    title = f"Simulated and measured seconds of a sync; largest error: {100 * worst:.1f} %"
    return Table(title, ("case", "measured s", "simulated s", "error"), lines)


def scale_table(rows: list[Row]) -> Table:
    lines = [
        [
            f"{row['model']}, {row['node']}",
            f"{row['trainers']:,} + {row['rollouts']:,}",
            f"{8 * row['engine']}",
            f"{row['received'] / 1e9:.0f}",
            f"{row['bound']:.2f}",
            *(cell for stage in STAGES for cell in (seconds(row[stage]), times(row["bound"] / row[stage]))),
            seconds(row["planning"]),
        ]
        for row in rows
    ]
    columns = (
        "model, nodes", "accelerators", "of an engine", "GB into a node", "bound s", "stage=none s", "bound / time",
        "stage=host s", "bound / time", "first: planning s",
    )  # fmt: skip
    return Table("SIMULATED, a sync of all weights in bfloat16, 8 NICs a node", columns, lines)
