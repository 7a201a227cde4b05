"""Who reads: partitioned, every, and the choice between ways; what each rank reads; files that differ between ranks."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from unittest import mock

import pytest

from epload import HierarchicalLoader, Topology
from epload.loading import agreement
from epload.planning import choose
from support import ranks
from support.checks import all_fine
from support.readers import (
    IN_THE_MIDDLE,
    SHAPES,
    Nodes,
    differences_are_reported,
    each_byte_once,
    first_failure_is_reported,
    in_the_middle,
    matrix,
    one_differs,
    own_and_no_more,
    own_bytes,
    pieces_read,
    save,
    saved,
    six_tensors,
    small_waves,
    with_others,
)
from support.small_model import BUCKET, NODES, meta_net, state_for, wrong

# ---- everything everywhere ----


@pytest.mark.parametrize("world", SHAPES)
def test_every_way_from_every_source(world: int, tmp_path: Path) -> None:
    for number in (1, 2):
        save(tmp_path / str(number), number)
    all_fine(ranks.run(world, matrix, world, tmp_path))


# ---- the choice ----


def choices(rank: int, folder: Path) -> list[str]:
    """A rule that is too strict for any load, and one that all ranks are told the result of."""
    small_waves()
    problems = []
    strict = mock.patch.multiple(choose, SMALL_BYTES=-1, MAX_FILE_READS=0.5)
    algorithms = ("two_level", "striped")
    for nodes, algorithm in product(([[0, 1], [2, 3]], [[0, 1, 2], [3]]), algorithms):
        for way in ("every", "partitioned", "one"):
            told = mock.patch.object(agreement, "choose_readers", return_value=(way, f"auto -> {way}: told"))
            loader = HierarchicalLoader(
                Topology.from_nodes(nodes), src=2, algorithm=algorithm, bucket_bytes=BUCKET, timeout=20
            )
            model = meta_net()
            for number in (1, 2):
                case = f"{nodes}, {algorithm}, {way} chosen"
                with strict if way == "partitioned" else told:
                    report = loader.load(model, folder / str(number) / "one.safetensors")
                problems += [f"{case}: {text}" for text in wrong(model, state_for(number))]
                if report.readers != way or f"auto -> {way}: " not in report.reason:
                    problems.append(f"{case}: {report.readers}, {report.reason}")
                if (report.peak_staging == 0) != (way == "every"):
                    problems.append(f"{case}: {report.peak_staging} bytes of staging memory")
    return problems


def test_whatever_auto_chooses_is_loaded_right(tmp_path: Path) -> None:
    all_fine(ranks.run(4, choices, saved(tmp_path)))


# ---- who reads what ----


def test_partitioned_reads_each_byte_once_in_the_whole_job(tmp_path: Path) -> None:
    per_rank = ranks.run(4, pieces_read, saved(tmp_path), [[0, 1, 2], [3]], "two_level")
    each_byte_once(per_rank, readers=4)


def test_every_reads_what_it_owns_and_moves_nothing(tmp_path: Path) -> None:
    own_and_no_more(ranks.run(4, own_bytes, six_tensors(tmp_path)))


# ---- files that differ ----


@pytest.mark.parametrize("readers", ["every", "partitioned", "auto"])
def test_a_file_that_is_another_on_one_rank(readers: str, tmp_path: Path) -> None:
    differences_are_reported(ranks.run(4, one_differs, with_others(tmp_path), readers), tmp_path, readers)


def without_a_path(rank: int, folder: Path, what: str) -> list[str]:
    """Rank 0 has a path. The others pass what they may where only rank 0 reads, or look in another way at the same."""
    loader = HierarchicalLoader(Topology.from_nodes(NODES), bucket_bytes=BUCKET, timeout=60)
    others = {"nothing": None, "its first file": folder / "1" / "parts" / "part-0.safetensors"}[what]
    model = meta_net()
    report = loader.load(model, folder / "1" / "parts" if rank == 0 else others)
    return wrong(model, state_for(1)) + ([] if report.readers == "one" else [report.reason])


@pytest.mark.parametrize("what", ["nothing", "its first file"])
def test_auto_needs_the_checkpoint_on_the_source_alone(what: str, tmp_path: Path) -> None:
    all_fine(ranks.run(4, without_a_path, saved(tmp_path), what))


# ---- failures in the middle ----


@IN_THE_MIDDLE
def test_a_reader_that_fails_in_the_middle(readers: str, algorithm: str, nodes: Nodes) -> None:
    outcomes = ranks.run(4, in_the_middle, readers, algorithm, nodes)
    first_failure_is_reported(outcomes, 10 if readers == "every" else 6)
