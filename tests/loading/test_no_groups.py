"""A load in which no byte goes from rank to rank over a process group makes none: the manifest comes with the agreement."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from epload import HierarchicalLoader, Topology
from support import accelerator, fakedev, ranks
from support.checks import all_fine
from support.small_model import BUCKET, only_readers, state_for


def source(state: dict[str, torch.Tensor], options: dict[str, Any], rank: int) -> dict[str, torch.Tensor] | None:
    if options["readers"] in ("one", "auto"):
        return state if rank == options.get("src", 0) else None
    return only_readers(state, options["readers"])


def on_a_device(rank: int, options: dict[str, Any]) -> list[str]:
    topology = Topology.from_nodes([[0, 1], [2]] if options["readers"] == "every" else [[0, 1, 2]])
    loader = HierarchicalLoader(topology, bucket_bytes=BUCKET, timeout=60.0, **options)
    problems = []
    for number in (1, 2):
        model = accelerator.meta_net()
        loader.load(model, source(state_for(number), options, rank))
        problems += accelerator.wrong(model, state_for(number))
    return problems + topology.groups.names


@pytest.mark.usefixtures("fake_device")
@pytest.mark.parametrize("readers", ["every", "one"])
def test_a_device_needs_no_communicator(readers: str) -> None:
    all_fine(ranks.run(3, on_a_device, {"readers": readers}, setup=fakedev.setup))


def many_names(rank: int) -> list[str]:
    """A manifest of more than one value of the store: names that do not compress."""
    generator = torch.Generator().manual_seed(0)
    names = [bytes(torch.randint(97, 123, (2000,), generator=generator).tolist()).decode() for _ in range(8000)]
    topology = Topology.from_nodes([[0], [1]])
    model = nn.ParameterDict({names[0]: nn.Parameter(torch.zeros(3))})
    state = {name: torch.full((1,), float(i)) for i, name in enumerate(names)}
    state[names[0]] = torch.arange(3.0) + 1
    report = HierarchicalLoader(topology, readers="every", timeout=60.0).load(model, state, strict=False)
    right = model[names[0]].tolist() == [1, 2, 3] and len(report.unexpected_keys) == len(names) - 1
    return topology.groups.names + ([] if right else ["wrong"])


def test_a_manifest_of_megabytes_comes_in_parts() -> None:
    all_fine(ranks.run(2, many_names, tcp=True))
