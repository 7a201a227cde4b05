"""Loads of every layout case, each compared with sharding the loaded model. On CPU or on a device."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from support.checks import differences, full_values
from support.layout_cases import Case, cases
from support.models import device, use_device
from support.readers import small_waves

NODES: dict[int, tuple[list[list[int]], ...]] = {
    1: ([[0]],),
    2: ([[0, 1]], [[0], [1]], [[1], [0]]),
    3: ([[0, 1, 2]], [[0], [1], [2]], [[0, 2], [1]]),
    4: ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]),
    7: ([[0, 1, 2], [3, 4], [5, 6]],),
}
MODES = (
    ("one", "two_level"),
    ("per_node", "two_level"),
    ("partitioned", "two_level"),
    ("every", "two_level"),
    ("partitioned", "striped"),
    ("auto", "auto"),
)
BUCKET_BYTES = (200, 1000, 1 << 20)
PARTS = [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 3), (4, 1, 3), (4, 2, 3), (7, 0, 1)]
"""Number of ranks, and which part of how many parts of the cases one test loads."""


def meta_model(case: Case) -> nn.Module:
    with torch.device("meta"):
        return case.model()


def stored_values(case: Case, salt: int = 0) -> dict[str, Tensor]:
    return {name: t for name, t in full_values(meta_model(case), salt).items() if name not in case.absent}


@dataclass(frozen=True)
class Way:
    """One way to run a load."""

    nodes: list[list[int]]
    src: int
    readers: str
    algorithm: str
    bucket_bytes: int
    stored: str
    """``"file"`` or ``"dict"``."""
    twice: bool
    """Whether other values are loaded first, through the same loader into the same model."""


def ways(world: int) -> list[Way]:
    found: list[Way] = []
    for nodes, src, (readers, algorithm) in product(NODES[world], sorted({0, world // 2, world - 1}), MODES):
        number = len(found)
        bucket_bytes = BUCKET_BYTES[number % len(BUCKET_BYTES)]
        stored = ("file", "dict")[number % 2]
        found.append(Way(nodes, src, readers, algorithm, bucket_bytes, stored, number % 5 == 0))
    return found


def ways_of_case(number: int, world: int) -> list[Way]:
    """Returns the way in which a case is loaded; the first case, which has every dtype, is loaded in every mode."""
    all_ways = ways(world)
    if number == 0:
        return all_ways[-len(MODES) :]
    return [all_ways[7 * number % len(all_ways)]]  # 7 divides no number of ways, so that no way is left out


def check_cases(rank: int, on: str, part: int, parts: int, folder: str) -> list[str]:
    """Returns what is wrong, a line a tensor."""
    use_device(on)
    small_waves()
    world = dist.get_world_size()
    failures: list[str] = []
    topologies = {str(nodes): epload.Topology.from_nodes(nodes) for nodes in NODES[world]}
    for number, case in list(enumerate(cases(world)))[part::parts]:
        what = case.name
        try:
            expected = oracle(case)
            for way in ways_of_case(number, world):
                what = f"{case.name}, {way}"
                loaded = load(case, way, topologies[str(way.nodes)], rank, checkpoint_path(folder, number))
                failures += [f"rank {rank}: {what}: {wrong}" for wrong in differences(expected, loaded)]
        except Exception:
            failures.append(f"rank {rank}: {what}: {traceback.format_exc(limit=-3)}")
    return failures


def oracle(case: Case) -> nn.Module:
    with device():
        model = case.model()
    values = full_values(model)
    with torch.no_grad():
        for name, tensor in model.state_dict(keep_vars=True).items():
            tensor.copy_(values[name])
    case.parallelize(model)
    return model


@cache
def stream() -> torch.Stream | None:
    """On a device it also says where plain tensors on meta go."""
    return None if device().type == "cpu" else torch.Stream(device())


def load(case: Case, way: Way, topology: epload.Topology, rank: int, path: Path) -> nn.Module:
    model = meta_model(case)
    case.parallelize(model)
    loader = epload.HierarchicalLoader(
        topology,
        src=way.src,
        readers=way.readers,
        algorithm=way.algorithm,
        bucket_bytes=way.bucket_bytes,
        timeout=60,
        stream=stream(),
        progress=False,
    )
    all_read = way.readers in ("partitioned", "every")
    reads = rank in (topology.leaders(way.src) if way.readers == "per_node" else (way.src,)) or all_read
    if way.twice:
        loader.load(model, stored_values(case, salt=77) if reads else None)
    if way.stored == "file":
        report = loader.load(model, path)
    else:
        report = loader.load(model, stored_values(case) if reads else None)
    assert not report.missing_keys, report.missing_keys
    assert not report.unexpected_keys, report.unexpected_keys
    return model


def checkpoint_path(folder: str, number: int) -> Path:
    return Path(folder) / f"case-{number}.safetensors"


def stored(folder: Path, world: int) -> str:
    """The folder, with a file for each case."""
    found = cases(world)
    assert len({case.name for case in found}) == len(found)
    for number, case in enumerate(found):
        save_file(stored_values(case), checkpoint_path(str(folder), number))
    return str(folder)


def none_fails(of_ranks: Sequence[Sequence[str]]) -> None:
    failures = [line for lines in of_ranks for line in lines]
    assert not failures, f"{len(failures)} failures:\n" + "\n".join(failures[:40])
