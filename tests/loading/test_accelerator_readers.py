"""Who reads, for models on a fake asynchronous accelerator: the contract of test_readers, from every source, over uneven nodes,
with files that differ between ranks and with readers that fail. As NCCL's: who reads does not depend on how groups behave."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import fakedev, ranks
from support import readers as contract
from support.accelerator import DEVICE
from support.checks import all_fine
from support.small_model import NODES

WAYS = [
    ("partitioned", "two_level"),
    ("every", "two_level"),
    ("auto", "auto"),
    ("one", "auto"),
    ("per_node", "auto"),
    ("partitioned", "auto"),
    ("one", "striped"),
]
"""With those that on CPU are like others, but for a model on a device go another way."""


pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.mark.parametrize("world", [3, 4])
def test_every_way_from_every_source(world: int, tmp_path: Path) -> None:
    for number in (1, 2):
        contract.save(tmp_path / str(number), number)
    all_fine(ranks.run(world, contract.matrix, world, tmp_path, DEVICE, WAYS, setup=fakedev.setup))


def test_partitioned_reads_each_byte_once_in_the_whole_job(tmp_path: Path) -> None:
    """The leaders read in turn: a bucket on a device is not shared by readers."""
    folder = contract.saved(tmp_path)
    per_rank = ranks.run(4, contract.pieces_read, folder, NODES, "striped", DEVICE, setup=fakedev.setup)
    contract.each_byte_once(per_rank, readers=2)


def test_every_reads_what_it_owns_and_moves_nothing(tmp_path: Path) -> None:
    path = contract.six_tensors(tmp_path)
    contract.own_and_no_more(ranks.run(4, contract.own_bytes, path, DEVICE, setup=fakedev.setup))


@pytest.mark.parametrize("readers", ["every", "auto"])
def test_a_file_that_is_another_on_one_rank(readers: str, tmp_path: Path) -> None:
    folder = contract.with_others(tmp_path)
    outcomes = ranks.run(4, contract.one_differs, folder, readers, 2, DEVICE, setup=fakedev.setup)
    contract.differences_are_reported(outcomes, folder, readers, 2)


@contract.IN_THE_MIDDLE
def test_a_reader_that_fails_in_the_middle(readers: str, algorithm: str, nodes: contract.Nodes) -> None:
    reading = range(4) if readers == "every" else [node[0] for node in nodes]
    outcomes = ranks.run(4, contract.in_the_middle, readers, algorithm, nodes, reading, DEVICE, setup=fakedev.setup)
    contract.first_failure_is_reported(outcomes, 10 if readers == "every" else 4)
