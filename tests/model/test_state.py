"""State that is more than sharded parameters, each test named after the thread in which a user met it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import epload
from epload import Topology
from support.checks import as_bytes, bits, full_values, local_of
from support.findings import not_refused
from support.models import Rotary, Tied, mesh, on_meta
from support.on_ranks import on_ranks

NODES = [[0, 1], [2, 3]]


def loader(**options: Any) -> epload.HierarchicalLoader:
    return epload.HierarchicalLoader(
        Topology.from_nodes(NODES), bucket_bytes=400, progress=False, timeout=60, **options
    )


def fsdp(model: nn.Module, **options: Any) -> None:
    fully_shard(model, mesh=mesh(("all", 4)), **options)


@on_ranks(4)
def test_skyrl_1709_lmms_engine_185_inv_freq(rank: int) -> list[str]:
    """Only some ranks made their model for real; the others get what they cannot compute from the lowest of these."""
    problems = []
    expected = Rotary().inv_freq
    for makers in ((0,), (2, 3)):
        model: Any = Rotary() if rank in makers else on_meta(Rotary)
        if rank == 3 and rank in makers:
            model.inv_freq.zero_()  # not the lowest rank: its own values are replaced too
        fsdp(model)
        report = loader().load(model, {"w": bits("w", (6, 4), torch.bfloat16)} if rank == 0 else None)
        if model.inv_freq.dtype != torch.float32 or not torch.equal(model.inv_freq, expected) or report.initialized:
            problems.append(f"{makers}: inv_freq is {model.inv_freq}, initialized {report.initialized}")
    for make, kind, text in (
        (lambda: on_meta(Rotary), "ModelMismatch", "the model's own initialization fills 1 tensor on meta: inv_freq"),
        (
            lambda: Rotary() if rank == 1 else on_meta(lambda: Rotary().bfloat16()),
            "ManifestMismatch",
            "expected buffer inv_freq to be the same on every rank",
        ),
    ):
        model = make()
        fsdp(model)
        source = {"w": bits("w", (6, 4), torch.bfloat16)} if rank == 0 else None
        problems += not_refused(lambda: loader().load(model, source), kind, text)  # noqa: B023
        if model.w.is_meta is (rank == 1 and kind == "ManifestMismatch"):
            problems.append(f"{kind}: {model.w}")
    return problems


# ---- layouts and ties, through a full state dict on one rank ----


@on_ranks(4)
def test_ties_that_parallelizing_broke(rank: int) -> list[str]:
    """Parallelizing part by part makes two parameters of one; a declared tie fills both."""
    model = on_meta(Tied)
    fully_shard(model.embed, mesh=mesh(("all", 4)))
    fsdp(model)
    if model.head.weight is model.embed.weight:
        return ["expected fully_shard to break the tie"]
    values = full_values(on_meta(Tied))
    weight = values.pop("head.weight")
    ties = epload.Mapping(ties=(("head.weight", "embed.weight"),))
    loader().load(model, values if rank == 0 else None, mapping=ties)
    part = weight.chunk(4)
    mine = as_bytes(part[rank] if rank < len(part) else torch.empty(0))
    return [n for n in ("head", "embed") if not torch.equal(as_bytes(local_of(getattr(model, n).weight)), mine)]
