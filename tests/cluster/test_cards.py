"""How many network cards of a machine the collectives of a device may use."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from epload.cluster import cards

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


EIGHT = {f"mlx5_{i}": [(ACTIVE, "400 Gb/sec (4X NDR)\n")] for i in range(8)}


def test_what_may_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "_SYSFS", machine(tmp_path, EIGHT))
    for name in ("NCCL_IB_DISABLE", "NCCL_NET", "NCCL_IB_HCA"):
        monkeypatch.delenv(name, raising=False)
    gpu = torch.device("cuda:0")
    assert cards.count(gpu) == 8
    assert cards.count(SimpleNamespace(type="npu")) > 10**6  # type: ignore[arg-type]
    for name, value, expected in (("NCCL_IB_HCA", "mlx5_0", 1), ("NCCL_NET", "Socket", 0), ("NCCL_IB_DISABLE", "1", 0)):
        monkeypatch.setenv(name, value)
        assert cards.count(gpu) == expected
        monkeypatch.delenv(name)


def test_a_machine_without_cards(tmp_path: Path) -> None:
    assert cards.count_rdma(tmp_path) == 0
    (tmp_path / "class/infiniband/mlx5_0/ports/1").mkdir(parents=True)  # nothing to read there
    assert cards.count_rdma(tmp_path) == 0


def test_cards_with_an_active_port(tmp_path: Path) -> None:
    down = {"mlx5_8": [(DOWN, "400 Gb/sec (4X NDR)\n")], "mlx5_9": [(DOWN, "10 Gb/sec\n"), (ACTIVE, "200 Gb/sec\n")]}
    assert cards.count_rdma(machine(tmp_path, {**EIGHT, **down})) == 9


def test_slow_cards_are_for_something_else(tmp_path: Path) -> None:
    slow = {"mlx5_bond_0": [(ACTIVE, "100 Gb/sec (4X EDR)\n")], "irdma0": [(ACTIVE, "2.5 Gb/sec (1X SDR)\n")]}
    assert cards.count_rdma(machine(tmp_path, {**EIGHT, **slow})) == 8


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", 8), ("mlx5", 8), ("mlx5_0:1,mlx5_3", 2), ("=mlx5_0,mlx5_1", 2), ("=mlx5", 0), ("^mlx5_0,mlx5_1", 6),
        ("^=mlx5_7", 7), ("ib", 0),
    ],
)  # fmt: skip
def test_the_choice_of_nccl(chosen: str, expected: int, tmp_path: Path) -> None:
    assert cards.count_rdma(machine(tmp_path, EIGHT), chosen) == expected
