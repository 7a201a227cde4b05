"""The op on a fake asynchronous accelerator, over groups that behave as NCCL's and as HCCL's: the same contract as on CPU,
one explicit stream, and what is queued before, beside and after a call."""

from __future__ import annotations

import time
from contextlib import ExitStack
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epload import Topology, coalesced_bcast
from epload.native import ops
from support import broadcasts as contract
from support import fakedev, ranks
from support.accelerator import DEVICE, SEMANTICS, ExternalStream
from support.broadcasts import Refusals, agree
from support.failures import raised

pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.mark.parametrize(("world", "semantics"), [(1, "nccl"), (2, "hccl"), (3, "nccl"), (4, "hccl")])
def test_every_byte_arrives(world: int, semantics: str) -> None:
    setup = partial(fakedev.setup, semantics)
    assert ranks.run(world, contract.matrix, contract.MATRIX[world], DEVICE, setup=setup) == [[]] * world


@SEMANTICS
def test_tensors_sent_in_place_and_parameters(semantics: str) -> None:
    assert ranks.run(3, contract.in_place_and_parameters, DEVICE, setup=partial(fakedev.setup, semantics)) == [[]] * 3


def test_raw_op_with_groups_of_new_group() -> None:
    assert ranks.run(4, contract.raw_op, DEVICE, setup=partial(fakedev.setup, "nccl")) == [[]] * 4


def on_streams(rank: int, semantics: str) -> list[str]:
    """The work is on the stream that was given, else on the current one, and nowhere else."""
    wrong = []
    topo = Topology.from_nodes([[0, 1], [2, 3]])
    side, given, default = torch.Stream(DEVICE), torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE)
    ways = [(default, None), (default, given), (side, None), (side, given), (side, side), (side, default)]
    for salt, (current, stream) in enumerate(ways):
        with current:
            case = f"current {current.stream_id}, given {stream.stream_id if stream else None}"
            for src, nbytes in ((0, 1000), (3, 100), (1, 1 << 20)):
                options = {"stream": stream, "bucket_bytes": nbytes}
                wrong += contract.exchange(rank, src, topo, contract.SHAPES, salt, DEVICE, **options)
            if torch.accelerator.current_stream(DEVICE) != current:
                wrong.append(f"{case}: the current stream was changed")
            tensors = [torch.zeros(50, device=DEVICE)[::2] for _ in range(4)]
            with fakedev.traced() as seen:
                coalesced_bcast(tensors, topology=topo, bucket_bytes=300, stream=stream)
            ours = {(stream or current).stream_id}
            theirs = {s.stream_id for s in fakedev.group_streams()} if semantics == "hccl" else ours
            moved, sent = ({stream for _, stream, name in seen if name == what} for what in ("copy", "broadcast"))
            if moved != ours or not sent <= theirs:
                wrong.append(f"{case}: packed or unpacked on streams {moved}, broadcast on {sent}")
    return wrong


@SEMANTICS
def test_given_current_and_side_streams(semantics: str) -> None:
    assert ranks.run(4, on_streams, semantics, setup=partial(fakedev.setup, semantics)) == [[]] * 4


def without_waiting(rank: int) -> list[str]:
    """NCCL's way: the host queues the whole call, of several buckets, on a stream that does not move."""
    topo = Topology.from_nodes([[0, 1]])
    stream = torch.Stream(DEVICE)
    contents = [torch.arange(60.0) + 100 * i for i in range(5)]
    tensors = [(c if rank == 0 else torch.zeros(60)).to(DEVICE) for c in contents]
    coalesced_bcast(tensors, topology=topo, bucket_bytes=500, stream=stream)  # makes groups and compares the lists
    torch.accelerator.synchronize()
    with fakedev.holding(stream):
        coalesced_bcast(tensors, topology=topo, bucket_bytes=500, stream=stream)
        idle = stream.query()
    differ = [i for i, content in enumerate(contents) if not torch.equal(tensors[i].cpu(), content)]
    return ["the stream was idle"] * idle + [f"tensor {i} differs" for i in differ]


@SEMANTICS
def test_the_host_does_not_wait(semantics: str) -> None:
    assert ranks.run(2, without_waiting, setup=partial(fakedev.setup, semantics), limit=40) == [[]] * 2


def wrong_use(rank: int) -> tuple[list[str], dict[str, str]]:
    see = Refusals(rank, [[0, 1], [2]], DEVICE)
    one = torch.full((4,), float(rank), device=DEVICE)
    other = torch.full((4,), float(rank), device=f"{fakedev.NAME}:1")
    see.check("two devices", "ValueError", ["tensor 1", f"{fakedev.NAME}:1", "one device"], [one, other])
    see.check("device and cpu", "ValueError", ["tensor 1", "cpu", "one device"], [one, one.cpu()])
    see.check("stream", "ValueError", [DEVICE, f"{fakedev.NAME}:1"], [one], stream=torch.Stream(other.device))
    see.check("stream on cpu", "ValueError", ["stream", "cpu"], [one.cpu()], stream=torch.Stream(DEVICE))
    external, of_npu = ["ExternalStream", "torch.npu.Stream"], ExternalStream()
    see.check("external stream", "ValueError", external, [one], stream=of_npu)
    host_only = Topology.from_nodes([[0, 1], [2]], dist.new_group(backend="gloo"))
    see.check("no backend", "ValueError", ["cpu:gloo", f"a backend for {fakedev.NAME}"], [one], topology=host_only)
    ascend = Topology.from_nodes([[0, 1], [2]], dist.new_group(backend=fakedev.AS_ASCEND))
    see.check("hccl", "ValueError", ["HCCL", "EPLOAD_NPU=1"], [one], topology=ascend)
    odd, two = rank == 2, torch.full((5,), float(rank), device=DEVICE)
    on = torch.Stream(DEVICE)
    mine = torch.Stream(other.device) if odd else on
    see.check("rank 2's stream", "ValueError", [f"{fakedev.NAME}:1", "rank 2"], [one, two], stream=mine)
    see.check("rank 2's external", "ValueError", [*external, "rank 2"], [one, two, one], stream=of_npu if odd else on)
    see.check("rank 2's devices", "ValueError", ["one device", "rank 2"], [two, other if odd else one])
    wrong, texts = see.answer()

    def refused(parts: list[str], more: list[Tensor], *arguments: Any) -> None:
        kind, text = raised(lambda: ops.coalesced_bcast([one, one + 1, *more], *arguments))
        if kind != "ValueError" or any(part not in text for part in parts) or one.tolist() != [rank] * 4:
            wrong.append(f"{arguments}: {kind}: {text}, {one}")

    everyone = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    host_group = str(host_only.group.group_name)  # type: ignore[union-attr]
    ascend_group = str(ascend.group.group_name)  # type: ignore[union-attr]
    two, rest = [f"{fakedev.NAME}:1", DEVICE], (100, "two_level")
    for group in (everyone, ""):  # "" is that of one rank
        refused(two, [other], 0, group, "", *rest)
        refused(two, [], 0, group, "", *rest, torch.Stream(other.device))
    for group, parts in ((host_group, [host_group, fakedev.NAME]), (ascend_group, ["HCCL", "EPLOAD_NPU=1"])):
        refused(parts, [], 0, group, "", *rest)
        refused(parts, [], 0, "", group, *rest)
    return wrong, texts


def test_wrong_use_is_refused_before_anything_moves() -> None:
    agree(ranks.run(3, wrong_use, setup=partial(fakedev.setup, "hccl")))


def host_job() -> str:
    fakedev.setup()
    return "cpu:gloo"


def in_a_group_of_its_own(rank: int) -> list[str]:
    """The job has no backend for the device, the topology's group has."""
    topo = Topology.from_nodes([[0, 1], [2]], dist.new_group(backend=fakedev.BACKENDS))
    wrong = []
    for src, algorithm in ((0, "two_level"), (2, "striped")):
        wrong += contract.exchange(rank, src, topo, contract.SHAPES, src, DEVICE, algorithm=algorithm)
    return wrong


def test_the_backends_are_those_of_the_topologys_group() -> None:
    assert ranks.run(3, in_a_group_of_its_own, setup=host_job) == [[]] * 3


class Scene:
    """Calls on a stream of their own, two packed buckets each, while one of the streams does not move for a while."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.topology = Topology.from_nodes([[0, 1], [2, 3]])
        self.caller, self.given = torch.Stream(DEVICE), torch.Stream(DEVICE)
        self.default = torch.accelerator.current_stream(DEVICE)

    def contents(self, salt: int) -> list[Tensor]:
        return [torch.arange(75.0) + 1000 * i + 10_000 * (salt + 1) for i in range(6)]

    def own(self, salt: int) -> list[Tensor]:
        return [content if self.rank == 0 else torch.zeros(75) for content in self.contents(salt)]

    def tensors(self, salt: int) -> list[Tensor]:
        made = [content.to(DEVICE) for content in self.own(salt)]
        torch.accelerator.synchronize()
        return made

    def call(self, tensors: list[Tensor], late: torch.Stream) -> None:
        """``late``: the stream that has to wait; what does not wait for it is done long before."""
        coalesced_bcast(tensors, topology=self.topology, bucket_bytes=1000, stream=self.given)
        until = time.monotonic() + 0.01
        while not late.query() and time.monotonic() < until:
            time.sleep(0.0005)

    def equal(self, tensors: list[Tensor], salt: int) -> bool:
        torch.accelerator.synchronize()
        return all(map(torch.equal, [t.cpu() for t in tensors], self.contents(salt)))

    def values_that_come_late(self, salt: int) -> bool:
        tensors, values = self.tensors(salt), [content.pin_memory() for content in self.own(salt + 1)]
        with self.caller:
            with fakedev.holding(self.caller):
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value, non_blocking=True)
                self.call(tensors, self.given)
            return self.equal(tensors, salt + 1)

    def tensors_that_are_read_and_overwritten_at_once(self, salt: int) -> bool:
        tensors = self.tensors(salt)
        with self.caller:
            with fakedev.holding(self.given):
                self.call(tensors, self.caller)
                read = [t.clone() for t in tensors]
                for tensor in tensors:
                    tensor.fill_(7.0)
            return self.equal(read, salt)

    def memory_that_another_stream_asks_for(self, salt: int) -> bool:
        tensors = self.tensors(salt)
        with self.caller:
            with fakedev.holding(self.given):
                self.call(tensors, self.caller)
                with self.default:
                    mine = [torch.full((1000,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
                self.default.synchronize()
            return self.equal(tensors, salt) and all(bool((m == 7).all()) for m in mine)

    def groups_that_are_slow(self, salt: int) -> bool:
        """Their own streams, where they have such, have not sent the first bucket when the second could be packed."""
        tensors = self.tensors(salt)
        with ExitStack() as stack:
            for stream in fakedev.group_streams():
                stack.enter_context(fakedev.holding(stream))
            self.call(tensors, self.given)
        return self.equal(tensors, salt)


SITUATIONS = (
    Scene.values_that_come_late, Scene.tensors_that_are_read_and_overwritten_at_once, Scene.memory_that_another_stream_asks_for,
    Scene.groups_that_are_slow,
)  # fmt: skip


def in_order(rank: int) -> list[str]:
    scene, wrong = Scene(rank), []
    scene.call(scene.tensors(0), scene.given)
    for salt, situation in product(range(20), SITUATIONS):
        wrong += [] if situation(scene, salt) else [f"{situation.__name__}, round {salt}"]
        dist.barrier()
    return wrong


@SEMANTICS
def test_no_stream_overtakes_another(semantics: str) -> None:
    assert ranks.run(4, in_order, setup=partial(fakedev.setup, semantics)) == [[]] * 4
