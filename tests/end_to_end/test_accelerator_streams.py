"""Loads into a device: nothing overtakes what it depends on; failures of one rank while others are in a collective with it."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epload import HierarchicalLoader, Topology
from epload.native import ops
from support import fakedev, ranks
from support.aborts import WHO, at_each_bucket
from support.accelerator import DEVICE, NODES, SEMANTICS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.failures import Filling, Raised, check_raised, raised_by
from support.on_ranks import on_ranks
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")


ROWS, BUCKETS = 2000, 6
ROW_BUCKET = 64 + 4 * ROWS


def rows(count: int = BUCKETS) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(count)]).to(DEVICE)


def values(salt: int, count: int = BUCKETS) -> dict[str, Tensor]:
    return {f"{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(count)}


@on_ranks(1, setup=fakedev.setup)
def test_work_queued_before_and_after_is_in_order(rank: int) -> list[str]:
    """Holds each of the streams in turn, while the load goes as far as it can."""
    problems = []
    given, caller = torch.Stream(DEVICE), torch.Stream(DEVICE)
    loader = HierarchicalLoader(readers="one", bucket_bytes=ROW_BUCKET, stream=given)
    with fakedev.traced() as seen:
        loader.load(rows(), Filling(values(0)))
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    uploading = {on for _, on, what in seen if what == "copy to device"}
    copying = [torch.Stream(stream_id=on, device_index=0, device_type=kind) for on in uploading]
    assert copying
    # A load of two buckets returns while its stream is held; with more, the host waits for a buffer.
    for salt, (held, source, count) in enumerate(product([given, caller, *copying], (dict, Filling), (2, BUCKETS))):
        model = rows(count)
        torch.accelerator.synchronize()
        with caller, torch.no_grad():
            fakedev.hold(held)
            for row in model:
                row.fill_(-1.0)
            threading.Timer(0.1, fakedev.release, [held]).start()
            loader.load(model, source(values(salt, count)))
            read = [row.detach().clone() for row in model]
            for row in model:
                row.fill_(7.0)
        torch.accelerator.synchronize()
        if found := [i for i, row in enumerate(read) if not torch.equal(row.cpu(), values(salt)[f"{i}"])]:
            problems.append(f"{source.__name__}, {count} buckets, {held} was held: rows {found} differ")
    return problems


@on_ranks(2, setup=fakedev.setup)
def test_a_dict_on_the_device_is_read_after_what_the_caller_has_queued(rank: int) -> list[str]:
    """The caller has yet to write the tensors of a dict on the device when the load is called."""
    problems = []
    for salt, readers in enumerate(["partitioned", "every"] * 2):
        loader = HierarchicalLoader(Topology.from_nodes([[0], [1]]), readers=readers, bucket_bytes=ROW_BUCKET)
        model, state = rows(), {name: torch.zeros(ROWS, device=DEVICE) for name in values(0)}
        torch.accelerator.synchronize()
        current = torch.accelerator.current_stream(DEVICE)
        fakedev.hold(current)
        for i, value in enumerate(state.values()):
            value.fill_(10.0 * salt + i + 1)
        threading.Timer(0.3, fakedev.release, [current]).start()
        loader.load(model, state)
        torch.accelerator.synchronize()
        right = [bool((row.detach().cpu() == 10.0 * salt + i + 1).all()) for i, row in enumerate(model)]
        problems += [] if all(right) else [f"{readers}: {right}"]
    return problems


SOON = 20.0
"""Seconds for what takes one or two on a machine with nothing else to do; the groups' own timeout is more than 100."""


@contextmanager
def broadcasts(fatal: int = -1) -> Iterator[mock.Mock]:
    """Counts the broadcasts of this process, which does not survive one of them."""
    broadcast = ops.coalesced_bcast

    def call(*args: Any, **options: Any) -> None:
        if patched.call_count == fatal + 1:
            os.kill(os.getpid(), signal.SIGKILL)
        broadcast(*args, **options)

    with mock.patch.object(ops, "coalesced_bcast", side_effect=call) as patched:
        yield patched


def killed_in_a_collective(
    rank: int, victim: int, which: int, readers: str, algorithm: str, wedged: bool, folder: Path
) -> tuple[Raised, list[str]]:
    """``which``: the broadcast in which the victim ends; if negative, that many before the end of a second load."""
    fakedev.wedge_aborts(wedged)
    options: dict[str, Any] = {"readers": readers, "algorithm": algorithm, "bucket_bytes": BUCKET, "timeout": 90.0}
    loader = HierarchicalLoader(Topology.from_nodes(NODES[4]), verify=which < 0, **options)
    model = meta_net()
    if which < 0:
        with broadcasts() as counted:
            loader.load(model, for_readers(state_for(1), readers))
        which += counted.call_count
    with broadcasts(which if rank == victim else -1):
        raised = raised_by(lambda: loader.load(model, for_readers(state_for(1), readers)))
    if wedged:
        return raised, []
    torch.accelerator.synchronize()  # nothing is stuck on any stream
    # The process lives, and loads again with the ranks that are left.
    dist.destroy_process_group()
    left = [other for other in range(4) if other != victim]
    init = f"file://{folder}/again"
    dist.init_process_group(fakedev.BACKENDS, init_method=init, rank=left.index(rank), world_size=3)
    model = meta_net()
    HierarchicalLoader(Topology.from_nodes(NODES[3]), **options).load(model, for_readers(state_for(2), readers))
    return raised, wrong(model, state_for(2))


@pytest.mark.parametrize(
    ("semantics", "victim", "which", "readers", "algorithm", "wedged"),
    [
        ("hccl", 2, 1, "one", "two_level", False),
        ("nccl", 0, 3, "one", "two_level", False),
        ("nccl", 3, 4, "one", "striped", False),
        ("hccl", 2, 3, "partitioned", "two_level", False),
        ("nccl", 2, -2, "one", "two_level", False),  # the reader goes on to the proof, which copies from the device
        ("hccl", 2, 3, "one", "two_level", True),  # an abort that does not return
    ],
)
def test_the_others_raise_and_load_again(
    semantics: str, victim: int, which: int, readers: str, algorithm: str, wedged: bool, tmp_path: Path
) -> None:
    began = time.monotonic()
    results = ranks.run(
        4, killed_in_a_collective, victim, which, readers, algorithm, wedged, tmp_path,
        setup=partial(fakedev.setup, semantics), dying=(victim,), limit=100,
    )  # fmt: skip
    lived = [result for result in results if result is not None]
    check_raised([raised for raised, _ in lived], f"rank {victim} has exited", seconds=SOON)
    assert [bad for _, bad in lived] == [[]] * 3
    assert time.monotonic() - began < 3 * SOON, "processes end, too"


def on_device_1(rank: int) -> list[int]:
    """Contexts that loads of a rank on ``fakedev:1`` make."""
    torch.accelerator.set_device_index(1)
    topology = Topology.from_nodes(NODES[2])
    for readers in ("one", "partitioned", "every", "per_node"):
        model = meta_net(where=DEVICE.replace("0", "1"))
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET, timeout=60.0)
        for turn in range(2):
            loader.load(model, for_readers(state_for(turn), readers))
    return fakedev.contexts()


def test_each_thread_uses_the_ranks_own_device() -> None:
    assert ranks.run(2, on_device_1, setup=fakedev.setup) == [[1], [1]]


@pytest.mark.parametrize("who", WHO)
@pytest.mark.parametrize(("readers", "algorithm"), [("one", "striped"), ("partitioned", "two_level")])
def test_all_ranks_end_at_one_bucket_and_none_unpacks_it(readers: str, algorithm: str, who: str) -> None:
    all_fine(ranks.run(4, at_each_bucket, readers, algorithm, who, DEVICE, setup=fakedev.setup))


@SEMANTICS
@on_ranks(4)
def test_all_work_is_on_one_stream_but_the_copies_to_the_device(rank: int, semantics: str) -> list[str]:
    """Broadcasts and unpacking of every bucket on the one stream, host to device on others; two communicators a rank."""
    problems = []
    topology = Topology.from_nodes(NODES[4])
    cases = (("one", "two_level"), ("partitioned", "two_level"), ("one", "striped"))
    for stream, (readers, algorithm) in zip((torch.Stream(DEVICE), None, torch.Stream(DEVICE)), cases, strict=True):
        loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, stream=stream)
        model = meta_net()
        loader.load(model, for_readers(state_for(1), readers))
        with fakedev.traced() as seen:
            report = loader.load(model, for_readers(state_for(2), readers))
        problems += wrong(model, state_for(2))
        sent = Counter(what for _, _, what in seen if what in ("broadcast", "allgather"))
        groups = 2 if rank in (0, 2) or algorithm == "striped" else 1
        if sent.total() != groups * report.buckets or sent.total() != report.transport_steps:
            problems.append(f"{sent} for {report.buckets} buckets, reported {report.transport_steps}")
        # In stripes, the source's node broadcasts each bucket, then all send their stripe; the other node gathers at once.
        if algorithm == "striped" and sent["allgather"] != (report.buckets if rank in (2, 3) else 0):
            problems.append(f"{sent} for {report.buckets} buckets in stripes")
        of_groups = {s.stream_id for s in fakedev.group_streams()}
        unpacking = {on for _, on, what in seen if what == ("region copy" if semantics == "nccl" else "copy")}
        sending = {on for _, on, what in seen if what in ("broadcast", "allgather")}
        uploading = {on for _, on, what in seen if what == "copy to device"}
        reads = rank == 0 or (readers == "partitioned" and rank == 2)  # and takes what it keeps of that from the host
        if semantics == "hccl" and not sending <= of_groups:
            problems.append(f"{readers} {algorithm}: broadcasts on {sending}, not on {of_groups}")
        one = (set() if reads else unpacking) | (sending if semantics == "nccl" else set())
        if len(one) > 1 or (stream is not None and not one <= {stream.stream_id}):
            problems.append(f"{readers} {algorithm}: works on the streams {one}, given {stream}")
        if uploading & (one | {stream.stream_id if stream is not None else None}) or bool(uploading) != reads:
            problems.append(f"{readers} {algorithm}: host to device on {uploading}, with {one} for what follows")
    return problems
