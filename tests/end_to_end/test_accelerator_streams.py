"""The streams of a load into a device: what is queued where, and that nothing overtakes what it depends on."""

from __future__ import annotations

import threading
from collections import Counter
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from epload import HierarchicalLoader, Topology
from support import fakedev, ranks
from support.accelerator import DEVICE, NODES, SEMANTICS, for_readers, meta_net, wrong
from support.checks import all_fine
from support.failures import Filling
from support.small_model import BUCKET, state_for

pytestmark = pytest.mark.usefixtures("fake_device")


def _traced(rank: int, semantics: str) -> list[str]:
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


@SEMANTICS
def test_all_work_is_on_one_stream_but_the_copies_to_the_device(semantics: str) -> None:
    all_fine(ranks.run(4, _traced, semantics, setup=partial(fakedev.setup, semantics)))


ROWS, BUCKETS = 2000, 6
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""


def rows(count: int = BUCKETS) -> nn.ParameterList:
    return nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(count)]).to(DEVICE)


def values(salt: int, count: int = BUCKETS) -> dict[str, Tensor]:
    return {f"{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(count)}


def differing(tensors: list[Tensor], salt: int) -> list[int]:
    torch.accelerator.synchronize()
    return [i for i, value in enumerate(tensors) if not torch.equal(value.detach().cpu(), values(salt)[f"{i}"])]


def in_order(rank: int) -> list[str]:
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
        if found := differing(read, salt):
            problems.append(f"{source.__name__}, {count} buckets, {held} was held: rows {found} differ")
    return problems


def test_work_queued_before_and_after_is_in_order() -> None:
    """The caller writes to the parameters late before the load, and reads and overwrites them as soon as it has returned."""
    all_fine(ranks.run(1, in_order, setup=fakedev.setup))


def _late_values(rank: int) -> list[str]:
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
        found = [row.detach().cpu() for row in model]
        problems += [
            f"{readers}: row {i}" for i, row in enumerate(found) if not bool((row == 10.0 * salt + i + 1).all())
        ]
    return problems


def test_a_dict_on_the_device_is_read_after_what_the_caller_has_queued() -> None:
    all_fine(ranks.run(2, _late_values, setup=fakedev.setup))
