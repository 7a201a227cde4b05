"""Wrong use of the coalesced broadcast: refused before anything moves, in the same words on all ranks; the next call succeeds."""

from __future__ import annotations

from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from epload import Topology, broadcast, coalesced_bcast
from support import ranks
from support.broadcasts import Refusals, agree


def wrong_arguments(rank: int) -> tuple[list[str], dict[str, str]]:
    """Every rank makes the same mistake."""
    see = Refusals(rank, [[0, 1], [2]])
    one = torch.full((4,), float(rank))
    mesh = init_device_mesh("cpu", (3,))
    dtensor = distribute_tensor(torch.ones(6), mesh, [Shard(0)])
    see.check("DTensor", "TypeError", ["to_local()", "tensor 1"], [one, dtensor])
    see.check("DTensor parameter", "TypeError", ["to_local()", "tensor 0"], [nn.Parameter(dtensor)])
    see.check("no tensor", "TypeError", ["list", "item 1"], [one, [1.0]])
    for src in (3, -1, 10**9):
        see.check(f"src {src}", "ValueError", [str(src), "[0, 1, 2]"], [one], src=src)
    see.check("algorithm", "ValueError", ["ring", "two_level", "striped"], [one], algorithm="ring")
    for size in (15, 0, -1):
        see.check(f"bucket {size}", "ValueError", ["16", str(size)], [one], bucket_bytes=size)
    see.check("huge bucket", "ValueError", ["bucket"], [one], bucket_bytes=2**62)
    see.check("sparse", "ValueError", ["tensor 1"], [one, torch.eye(3).to_sparse()])
    see.check("conj", "ValueError", ["tensor 1", "resolve_conj"], [one, torch.ones(3, dtype=torch.complex64).conj()])
    see.check("stream on cpu", "ValueError", ["stream", "cpu"], [one], stream=cpu_stream())
    see.check("meta", "ValueError", ["meta"], [one.to("meta")])
    see.check("two devices", "ValueError", ["tensor 1", "meta"], [one, one.to("meta")])
    freed = torch.ones(8)
    freed.untyped_storage().resize_(0)
    see.check("freed", "ValueError", ["tensor 1", "storage"], [one, freed])
    return see.answer()


def cpu_stream() -> torch.Stream:
    """Any stream object; a machine without a device has no better one."""
    return torch.Stream(stream_id=0, device_index=0, device_type=1)


def mistake_of_one(rank: int) -> tuple[list[str], dict[str, str]]:
    """Rank 2 alone is wrong; all hear of it and none is left waiting."""
    see = Refusals(rank, [[0, 1], [2]])
    odd = rank == 2
    one = torch.full((4,), float(rank))
    mesh = init_device_mesh("cpu", (3,))
    dtensor = distribute_tensor(torch.ones(12), mesh, [Shard(0)])
    see.check("DTensor", "TypeError", ["to_local()", "rank 2"], [dtensor if odd else one])
    see.check("src", "ValueError", ["7", "rank 2"], [one], src=7 if odd else 0)
    see.check("small bucket", "ValueError", ["16", "rank 2"], [one], bucket_bytes=4 if odd else 64)
    see.check("other src", "ManifestMismatch", ["src", "rank 0", "rank 2"], [one], src=1 if odd else 0)
    see.check("other bucket", "ManifestMismatch", ["bucket_bytes", "rank 2"], [one], bucket_bytes=80 if odd else 96)
    see.check(
        "algorithm", "ManifestMismatch", ["striped", "rank 2"], [one], algorithm="striped" if odd else "two_level"
    )
    two = torch.zeros(3, 2)
    see.check("count", "ManifestMismatch", ["2 tensors", "3", "rank 2"], [one, two] + [two] * odd)
    see.check("fewer", "ManifestMismatch", ["2 tensors", "1", "rank 2"], [one, two][: 1 if odd else 2])
    see.check("none", "ManifestMismatch", ["tensors", "0", "rank 2"], [] if odd else [one, one, one])
    see.check(
        "shape", "ManifestMismatch", ["tensor 1", "[3, 2]", "[2, 3]", "rank 2"], [one, two.view(2, 3) if odd else two]
    )
    see.check("dtype", "ManifestMismatch", ["tensor 1", "float32", "int32", "rank 2"], [one, two.int() if odd else two])
    return see.answer()


def unseen_by_the_list(rank: int) -> tuple[list[str], dict[str, str]]:
    """Rank 2 alone is wrong in what is no part of the compared list."""
    see = Refusals(rank, [[0, 1], [2]])
    odd = rank == 2
    one, two = torch.full((4,), float(rank)), torch.full((5,), float(rank))
    see.check("meta", "ValueError", ["meta"], [one, two.to("meta") if odd else two])
    see.check("stream", "ValueError", ["stream"], [one], stream=cpu_stream() if odd else None)
    if odd:
        two.untyped_storage().resize_(0)
    see.check("freed", "ValueError", ["storage"], [one, two])
    return see.answer()


def one_interrupted(rank: int) -> list[str]:
    """A list that all know is broadcast again and again; one rank is interrupted once, and the others are in the broadcast."""
    topology, ends = Topology.from_nodes([[0, 1]], timeout=20), []

    def interrupt(*args: object) -> None:
        raise KeyboardInterrupt

    for step in range(1, 7):
        tensors = [torch.full((10,), float(step) if rank == 0 else 0.0)]
        with mock.patch.object(broadcast, "_check_arguments", interrupt) if (rank, step) == (1, 4) else nullcontext():
            try:
                coalesced_bcast(tensors, 0, topology)
            except BaseException as error:
                ends.append(type(error).__name__)
            else:
                ends.append("right" if (tensors[0] == step).all() else f"{tensors[0][0]} at step {step}")
        dist.barrier()
    return ends


def test_a_rank_that_was_interrupted_does_not_get_the_values_of_another_call() -> None:
    first, second = ranks.run(2, one_interrupted)
    right = ["right"] * 2
    assert (second[:3], second[3:]) == (["right"] * 3, ["KeyboardInterrupt", *right])
    assert (first[:3], first[4:]) == (["right"] * 3, right)
    assert first[3] != "right"


def test_wrong_use_is_refused_before_anything_moves() -> None:
    agree(ranks.run(3, wrong_arguments))


def test_mistake_of_one_rank_reaches_all() -> None:
    agree(ranks.run(3, mistake_of_one))


def test_mistake_that_the_list_does_not_show_reaches_all() -> None:
    agree(ranks.run(3, unseen_by_the_list, limit=60))


def test_wrong_use_on_a_single_rank() -> None:
    """Also where there is nothing to send."""
    one = torch.ones(3)
    for text, tensors, options in (
        ("meta", [one.to("meta")], {}),
        ("tensor 1", [one, one.to("meta")], {}),
        ("stream", [one], {"stream": cpu_stream()}),
        ("bucket_bytes", [one], {"bucket_bytes": 8}),
        ("algorithm", [one], {"algorithm": "ring"}),
    ):
        with pytest.raises(ValueError, match=text):
            coalesced_bcast(tensors, **options)  # type: ignore[arg-type]
