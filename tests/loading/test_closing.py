"""HierarchicalLoader as a context manager, and ``epload.load`` with the options of both."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

import epload
from epload import HierarchicalLoader, LoadOptions, Topology
from support import ranks
from support.small_model import BUCKET, meta_net, only_readers, state_for, wrong


def shared_buffers() -> int:
    gc.collect()
    return Path("/proc/self/maps").read_text().count("memfd:epload")


def closed(rank: int) -> None:
    topology = Topology.from_nodes([[0, 1]])
    with HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET) as loader:
        loader.load(meta_net(), only_readers(state_for(1)))
        assert shared_buffers(), "no memory is shared, so that nothing can be freed"
    assert not shared_buffers(), f"{shared_buffers()} shared buffers are left after the loader was closed"
    loader.close()
    half_closed = HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET, timeout=20)
    if rank == 1:
        half_closed.close()
    model = meta_net()
    for unusable in (loader, half_closed):
        with pytest.raises(ValueError, match="got one that was closed; make a new one"):
            unusable.load(model, only_readers(state_for(3)))
    assert all(parameter.is_meta for parameter in model.parameters()), "a closed loader has changed the model"
    HierarchicalLoader(topology, readers="one", bucket_bytes=BUCKET).load(model, only_readers(state_for(4)))
    assert wrong(model, state_for(4)) == []


def test_a_closed_loader_frees_its_memory_and_loads_no_more() -> None:
    ranks.run(2, closed, limit=60)


def test_load_takes_the_options_of_the_loader_and_of_its_load() -> None:
    model = nn.ParameterDict({"a": torch.zeros(3), "b": torch.zeros(2), "c": torch.zeros(1)})
    state = {"a": torch.arange(3.0), "b": torch.arange(4.0), "d": torch.zeros(1)}
    rare = LoadOptions(algorithm="two_level", bucket_bytes=4096)
    options = {"readers": "one", "verify": True, "progress": False, "options": rare}
    report = epload.load(model, state, strict=False, ignore_mismatched_shapes=True, **options)  # type: ignore[arg-type]
    assert torch.equal(model["a"].detach(), state["a"])
    assert (report.missing_keys, report.unexpected_keys, report.mismatched_keys) == (["c"], ["d"], ["b"])
    assert (report.readers, report.algorithm, report.verify) == ("one", "", True), "one rank sends nothing"
    with pytest.raises(TypeError, match="deadline"):
        epload.load(model, state, deadline=3)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="options"):
        epload.load(model, state, options={"src": 0})  # type: ignore[arg-type]
