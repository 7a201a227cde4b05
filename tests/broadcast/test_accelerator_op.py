"""The op on a fake asynchronous accelerator, over groups that behave as NCCL's and as HCCL's: the same contract as on CPU,
one explicit stream, and every wait and lifetime rule shown to be needed by a library that lacks it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload import Topology, coalesced_bcast
from epload.native import ops
from support import broadcasts as contract
from support import fakedev, ranks
from support.accelerator import DEVICE, SEMANTICS, ExternalStream
from support.broadcasts import Refusals, agree
from support.failures import raised
from support.fakedev import build
from support.on_ranks import on_ranks
from support.region_copies import Problem, check_equal, problems

pytestmark = pytest.mark.usefixtures("fake_device")


@pytest.mark.parametrize(("world", "semantics"), [(1, "nccl"), (2, "hccl"), (3, "nccl"), (4, "hccl")])
def test_every_byte_arrives(world: int, semantics: str) -> None:
    setup = partial(fakedev.setup, semantics)
    assert ranks.run(world, contract.matrix, contract.MATRIX[world], DEVICE, setup=setup) == [[]] * world


@SEMANTICS
def test_tensors_sent_in_place_and_parameters(semantics: str) -> None:
    setup = partial(fakedev.setup, semantics)
    assert ranks.run(3, contract.in_place_and_parameters, DEVICE, setup=setup) == [[]] * 3


def test_raw_op_with_groups_of_new_group() -> None:
    assert ranks.run(4, contract.raw_op, DEVICE, setup=partial(fakedev.setup, "nccl")) == [[]] * 4


@SEMANTICS
@on_ranks(4)
def test_given_current_and_side_streams(rank: int, semantics: str) -> list[str]:
    """The work is on the stream that was given, else on the current one, and nowhere else."""
    wrong = []
    topo = Topology.from_nodes([[0, 1], [2, 3]])
    side, given = torch.Stream(DEVICE), torch.Stream(DEVICE)
    default = torch.accelerator.current_stream(DEVICE)
    for salt, (current, stream) in enumerate(
        [(default, None), (default, given), (side, None), (side, given), (side, side), (side, default)]
    ):
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
            ours = (stream or current).stream_id
            theirs = {s.stream_id for s in fakedev.group_streams()}
            steps = {(name, stream) for _, stream, name in seen if name in ("copy", "broadcast")}
            moved = {stream for name, stream in steps if name == "copy"}
            sent = {stream for name, stream in steps if name == "broadcast"}
            if moved != {ours}:
                wrong.append(f"{case}: packed or unpacked on streams {moved}")
            if not sent <= (theirs if semantics == "hccl" else {ours}):
                wrong.append(f"{case}: broadcast on streams {sent}")
    return wrong


@SEMANTICS
@on_ranks(2, limit=40)
def test_the_host_does_not_wait(rank: int, semantics: str) -> list[str]:
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
    return ["the stream was idle"] * idle + [
        f"tensor {i} differs" for i, c in enumerate(contents) if not torch.equal(tensors[i].cpu(), c)
    ]


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
    see.check(
        "rank 2's stream",
        "ValueError",
        [f"{fakedev.NAME}:1", "rank 2"],
        [one, two],
        stream=torch.Stream(other.device) if odd else on,
    )
    see.check("rank 2's external", "ValueError", [*external, "rank 2"], [one, two, one], stream=of_npu if odd else on)
    see.check("rank 2's devices", "ValueError", ["one device", "rank 2"], [two, other if odd else one])
    differs = ["tensor 0", f"[5] {fakedev.NAME} on rank 0", "[5] cpu on rank 2"]
    see.check("rank 2 on cpu", "ManifestMismatch", differs, [two.cpu() if odd else two])
    wrong, texts = see.answer()

    def refused(what: str, parts: list[str], call: Callable[[list[Tensor]], object]) -> None:
        kind, text = raised(lambda: call([one, one + 1]))
        if kind != "ValueError" or any(part not in text for part in parts) or one.tolist() != [rank] * 4:
            wrong.append(f"{what}: {kind}: {text}, {one}")

    everyone = str(dist.group.WORLD.group_name)  # type: ignore[union-attr]
    host_group = str(host_only.group.group_name)  # type: ignore[union-attr]
    ascend_group = str(ascend.group.group_name)  # type: ignore[union-attr]
    two = [f"{fakedev.NAME}:1", DEVICE]
    elsewhere = torch.Stream(other.device)
    refused("op, devices", two, lambda t: ops.coalesced_bcast([*t, other], 0, everyone, "", 100, "two_level"))
    refused("op, stream", two, lambda t: ops.coalesced_bcast(t, 0, everyone, "", 100, "two_level", elsewhere))
    refused("one rank, devices", two, lambda t: ops.coalesced_bcast([*t, other], 0, "", "", 100, "two_level"))
    refused("one rank, stream", two, lambda t: ops.coalesced_bcast(t, 0, "", "", 100, "two_level", elsewhere))
    for what, group, parts in (
        ("no backend", host_group, [host_group, fakedev.NAME]),
        ("hccl", ascend_group, ["HCCL", "EPLOAD_NPU=1"]),
    ):
        refused(what, parts, lambda t: ops.coalesced_bcast(t, 0, group, "", 100, "two_level"))  # noqa: B023
        refused(f"{what}, node", parts, lambda t: ops.coalesced_bcast(t, 0, "", group, 100, "two_level"))  # noqa: B023
    return wrong, texts


def test_wrong_use_is_refused_before_anything_moves() -> None:
    agree(ranks.run(3, wrong_use, setup=partial(fakedev.setup, "hccl")))


def host_job() -> str:
    fakedev.setup()
    return "cpu:gloo"


@on_ranks(3, setup=host_job)
def test_the_backends_are_those_of_the_topologys_group(rank: int) -> list[str]:
    """The job has no backend for the device, the topology's group has."""
    topo = Topology.from_nodes([[0, 1], [2]], dist.new_group(backend=fakedev.BACKENDS))
    wrong = []
    for src, algorithm in ((0, "two_level"), (2, "striped")):
        wrong += contract.exchange(rank, src, topo, contract.SHAPES, src, DEVICE, algorithm=algorithm)
    return wrong


@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck), database=None)
@given(problems(), st.booleans())
def without_kernels(problem: Problem, unpack: bool) -> None:
    check_equal(problem, unpack, ops.unpack if unpack else ops.pack, DEVICE)


@on_ranks(1, setup=fakedev.setup)
def test_region_copy_of_a_device_without_its_own(rank: int) -> None:
    without_kernels()


BROKEN_ROUNDS, RIGHT_ROUNDS = 5, 20


class Scene:
    """Calls of the library that can be broken, arranged so that a rule's absence shows on some rank, and always does."""

    def __init__(self, rank: int) -> None:
        torch.ops.load_library(str(build.library()))
        self.rank = rank
        self.topology = Topology.from_nodes([[0, 1], [2, 3]])  # holds the groups
        self.route = self.topology.route(0)
        self.caller, self.given = torch.Stream(DEVICE), torch.Stream(DEVICE)
        self.default = torch.accelerator.current_stream(DEVICE)

    def contents(self, salt: int) -> list[Tensor]:
        return [torch.arange(75.0) + 1000 * i + 10_000 * (salt + 1) for i in range(6)]

    def tensors(self, salt: int) -> list[Tensor]:
        made = [(c if self.rank == 0 else torch.zeros(75)).to(DEVICE) for c in self.contents(salt)]
        torch.accelerator.synchronize()
        return made

    def call(self, tensors: list[Tensor]) -> None:
        """Two buckets, packed, since three of the tensors fit in each."""
        torch.ops.epload_test.coalesced_bcast(
            tensors, 0, self.route.inter_group, self.route.intra_group, 1000, "two_level", self.given
        )

    def agree(self, stream: torch.Stream, broken: bool) -> None:
        """Lets a broken library do its harm. The right one is still waiting, as it should, after any time."""
        until = time.monotonic() + (20 if broken else 0.01)
        while not stream.query() and time.monotonic() < until:
            time.sleep(0.0005)

    def equal(self, tensors: list[Tensor], salt: int) -> bool:
        torch.accelerator.synchronize()
        return all(map(torch.equal, [t.cpu() for t in tensors], self.contents(salt)))

    def entry_wait(self, salt: int, broken: bool) -> bool:
        """The values are not there yet when the op is called."""
        tensors = self.tensors(salt)
        values = [(c if self.rank == 0 else torch.zeros(75)).pin_memory() for c in self.contents(salt + 1)]
        with self.caller:
            with fakedev.holding(self.caller):
                for tensor, value in zip(tensors, values, strict=True):
                    tensor.copy_(value, non_blocking=True)
                self.call(tensors)
                self.agree(self.given, broken)
            return self.equal(tensors, salt + 1)

    def exit_wait(self, salt: int, broken: bool) -> bool:
        """The tensors are read as soon as the op has returned, and overwritten."""
        tensors = self.tensors(salt)
        with self.caller:
            with fakedev.holding(self.given):
                self.call(tensors)
                read = [t.clone() for t in tensors]
                for tensor in tensors:
                    tensor.fill_(7.0)
                self.agree(self.caller, broken)
            return self.equal(read, salt)

    def allocation(self, salt: int, broken: bool) -> bool:
        """Another stream asks for memory while the op is still to run."""
        tensors = self.tensors(salt)
        with self.caller:
            with fakedev.holding(self.given):
                self.call(tensors)
                with self.default:
                    mine = [torch.full((1000,), 7, dtype=torch.uint8, device=DEVICE) for _ in range(4)]
                self.default.synchronize()
            right = self.equal(tensors, salt)
            return right and all(bool((m == 7).all()) for m in mine)

    def staging_reuse(self, salt: int, broken: bool) -> bool:
        """The groups' own streams, where there are such, have not sent the first bucket when the second could be packed."""
        tensors = self.tensors(salt)
        streams = fakedev.group_streams()
        for stream in streams:
            fakedev.hold(stream)
        self.call(tensors)
        self.agree(self.given, broken)
        for stream in streams:
            fakedev.release(stream)
        return self.equal(tensors, salt)


def rounds(rank: int, rule: str) -> tuple[list[bool], list[bool]]:
    """Whether this rank was right in each round: of the broken library, of the right one."""
    scene = Scene(rank)
    scene.call(scene.tensors(0))
    answers: tuple[list[bool], list[bool]] = ([], [])
    for broken, count, answer in ((False, RIGHT_ROUNDS, answers[1]), (True, BROKEN_ROUNDS, answers[0])):
        os.environ["EPLOAD_TEST_BREAK"] = rule if broken else ""
        for salt in range(count):
            answer.append(getattr(scene, rule)(salt, broken))
            dist.barrier()
    return answers


RULES = [
    *[(rule, semantics) for rule in ("entry_wait", "exit_wait", "allocation") for semantics in fakedev.SEMANTICS],
    ("staging_reuse", "hccl"),  # over NCCL's way there is no work to wait for: the one stream's order does it
]


@pytest.mark.parametrize(("rule", "semantics"), RULES)
def test_each_rule_is_needed(rule: str, semantics: str) -> None:
    answers = ranks.run(4, rounds, rule, setup=partial(fakedev.setup, semantics))
    broken = [all(rank[0][i] for rank in answers) for i in range(BROKEN_ROUNDS)]
    right = [all(rank[1][i] for rank in answers) for i in range(RIGHT_ROUNDS)]
    assert right == [True] * RIGHT_ROUNDS
    assert broken == [False] * BROKEN_ROUNDS
