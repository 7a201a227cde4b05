"""Counts the network cards of a machine that are for RDMA."""

from __future__ import annotations

from pathlib import Path

from epload.ranks import cards

ACTIVE, DOWN = "4: ACTIVE\n", "1: DOWN\n"


def machine(folder: Path, ports: dict[str, list[tuple[str, str]]]) -> Path:
    """A /sys with these cards; of each port the state and the rate."""
    for card, each in ports.items():
        for number, (state, rate) in enumerate(each, start=1):
            port = folder / "class/infiniband" / card / "ports" / str(number)
            port.mkdir(parents=True)
            (port / "state").write_text(state)
            (port / "rate").write_text(rate)
    return folder


def test_only_fast_cards_with_an_active_port_count(tmp_path: Path) -> None:
    assert cards.count_rdma(tmp_path) == 0
    (tmp_path / "class/infiniband/mlx5_7/ports/1").mkdir(parents=True)  # nothing to read there
    assert cards.count_rdma(tmp_path) == 0
    ports = {f"mlx5_{i}": [(ACTIVE, "400 Gb/sec (4X NDR)\n")] for i in range(4)} | {
        "mlx5_8": [(DOWN, "400 Gb/sec (4X NDR)\n")],
        "mlx5_9": [(DOWN, "10 Gb/sec\n"), (ACTIVE, "200 Gb/sec\n")],
        "mlx5_bond_0": [(ACTIVE, "100 Gb/sec (4X EDR)\n")],
        "irdma0": [(ACTIVE, "2.5 Gb/sec (1X SDR)\n")],
    }
    assert cards.count_rdma(machine(tmp_path, ports)) == 5
