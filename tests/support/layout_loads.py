"""Loads of every layout case, each compared with sharding the loaded model. On CPU or on a device."""

from __future__ import annotations

import traceback
from functools import cache
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

import epload
from support.checks import all_fine, differences, full_values
from support.layout_cases import Case, cases
from support.models import device, on_meta, use_device
from support.readers import small_waves

NODES: dict[int, tuple[list[list[int]], ...]] = {
    1: ([[0]],),
    2: ([[0, 1]], [[0], [1]], [[1], [0]]),
    3: ([[0, 1, 2]], [[0], [1], [2]], [[0, 2], [1]]),
    4: ([[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]], [[0, 1, 2], [3]], [[0, 2], [1, 3]]),
    7: ([[0, 1, 2], [3, 4], [5, 6]],),
}
MODES = (
    ("one", "two_level"), ("per_node", "two_level"), ("partitioned", "two_level"), ("every", "two_level"),
    ("partitioned", "striped"), ("auto", "auto"),
)  # fmt: skip
none_fails = all_fine
BUCKET_BYTES = (200, 1000, 1 << 20)
PARTS = [(1, 0, 1), (2, 0, 1), (3, 0, 1), (4, 0, 2), (4, 1, 2), (7, 0, 1)]
"""Number of ranks, and which part of how many parts of the cases one test loads."""


def meta_model(case: Case) -> nn.Module:
    return on_meta(case.model)  # type: ignore[no-any-return]


def stored_values(case: Case, salt: int = 0) -> dict[str, Tensor]:
    return {name: t for name, t in full_values(meta_model(case), salt).items() if name not in case.absent}


class Way(NamedTuple):
    """One way to run a load."""

    number: int
    nodes: list[list[int]]
    src: int
    mode: tuple[str, str]


def ways_of_case(number: int, world: int) -> list[Way]:
    """Returns the way in which a case is loaded; the first case, which has every dtype, is loaded in every mode."""
    ways = [Way(i, *way) for i, way in enumerate(product(NODES[world], sorted({0, world // 2, world - 1}), MODES))]
    # 7 divides no number of ways, so that no way is left out.
    return ways[-len(MODES) :] if number == 0 else [ways[7 * number % len(ways)]]


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
    """Returns the stream of loads, which on a device also says where plain tensors on meta go."""
    return None if device().type == "cpu" else torch.Stream(device())


def load(case: Case, way: Way, topology: epload.Topology, rank: int, path: Path) -> nn.Module:
    """Loads a model from a file or a dict; at times after other values, through the same loader."""
    model = meta_model(case)
    case.parallelize(model)
    (readers, algorithm), bucket_bytes = way.mode, BUCKET_BYTES[way.number % len(BUCKET_BYTES)]
    loader = epload.HierarchicalLoader(
        topology, src=way.src, readers=readers, algorithm=algorithm, bucket_bytes=bucket_bytes, timeout=60, stream=stream(),
        progress=False,
    )  # fmt: skip
    leads = rank in (topology.leaders(way.src) if readers == "per_node" else (way.src,))
    reads = leads or readers in ("partitioned", "every")
    if way.number % 5 == 0:
        loader.load(model, stored_values(case, salt=77) if reads else None)
    report = loader.load(model, path if way.number % 2 == 0 else stored_values(case) if reads else None)
    assert not report.missing_keys, report.missing_keys
    assert not report.unexpected_keys, report.unexpected_keys
    return model


def checkpoint_path(folder: str, number: int) -> Path:
    return Path(folder) / f"case-{number}.safetensors"


def stored(folder: Path, world: int) -> str:
    """The folder, with a file for each case."""
    all_cases = cases(world)
    assert len({case.name for case in all_cases}) == len(all_cases)
    for number, case in enumerate(all_cases):
        save_file(stored_values(case), checkpoint_path(str(folder), number))
    return str(folder)
