"""HierarchicalLoader into models on a fake asynchronous accelerator, over groups that behave as NCCL's and as HCCL's: what a load
leaves, on which streams it works, which waits it needs, and what it refuses."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate

from epload import Checkpoint, HierarchicalLoader, Manifest, Topology
from epload.core.pieces import Piece
from epload.staging.device import DeviceStaging
from support import fakedev, ranks
from support.accelerator import (
    DEVICE,
    NODES,
    SEMANTICS,
    WAYS,
    ExternalStream,
    Odd,
    aborted_into,
    for_readers,
    meta_net,
    odd_state,
    wrong,
)
from support.checks import all_fine
from support.failures import Failing, Outcome, check, outcome, unpack_breaks_once
from support.small_model import BUCKET, Net, sharded, state_for

OTHER = f"{fakedev.NAME}:1"


pytestmark = pytest.mark.usefixtures("fake_device")


# ---- what a load leaves ----


def contract(rank: int, folder: Path) -> list[str]:
    """From meta, reload, after a forward; every choice of readers and algorithm; the stream given, current and own."""
    said: list[str] = []
    world = dist.get_world_size()
    topology = Topology.from_nodes(NODES[world])
    streams = {"own": None, "given": torch.Stream(DEVICE), "current": torch.accelerator.current_stream(DEVICE)}
    tokens = torch.arange(13).to(DEVICE)
    for number, (readers, algorithm) in enumerate(WAYS):
        which = list(streams)[number % len(streams)]
        loader = HierarchicalLoader(
            topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET, stream=streams[which]
        )
        case = f"{readers} {algorithm}, stream {which}"
        model = meta_net()
        report = loader.load(model, folder / "one.safetensors")
        said += [f"{case}, from meta: {text}" for text in wrong(model, state_for(1))]
        expected = {"striped": "striped" if world in (1, 2, 4) else "two_level"}.get(algorithm, algorithm)
        if report.buckets < 10 or report.algorithm != expected or not report.stream:
            said.append(f"{case}: {report} on {report.stream!r}")
        loader.load(model, for_readers(state_for(2), readers))
        said += [f"{case}, reload: {text}" for text in wrong(model, state_for(2))]
        model(tokens)
        loader.load(model, folder / "one.safetensors")
        said += [f"{case}, after a forward: {text}" for text in wrong(model, state_for(1))]
        if loader.stream is not None and not report.stream.endswith("the caller's"):
            said.append(f"{case}: {report.stream}")
    return said


@SEMANTICS
@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_the_model_has_its_shards(world: int, semantics: str, tmp_path: Path) -> None:
    save_file(state_for(1), tmp_path / "one.safetensors")
    all_fine(ranks.run(world, contract, tmp_path, setup=partial(fakedev.setup, semantics)))


class Bare(nn.Module):
    """No persistent buffer; of the computed one no checkpoint says where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(7, 5)])
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def _kinds(rank: int) -> list[str]:
    """Ties, buffers, 0-d, empty and split tensors, casts, tensors that stay on CPU, missing keys."""
    said = []
    topology = Topology.from_nodes(NODES[dist.get_world_size()])
    one = state_for(1)

    def fill(module: nn.Module, path: str, names: tuple[str, ...]) -> None:
        for name in names:
            getattr(module, name).fill_(-1)

    for readers in ("one", "partitioned", "every"):
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET)
        mesh = init_device_mesh(fakedev.NAME, (dist.get_world_size(),))
        with torch.device("meta"):
            odd = sharded(Odd(), mesh=mesh)
        for number in (1, 2):
            loader.load(odd, for_readers(odd_state(number), readers), strict=False, init_missing=fill)
            tied = {**odd_state(number), "head.weight": odd_state(number)["tail.weight"]}
            said += [f"{readers}, odd: {text}" for text in wrong(odd, tied)]
        if odd.head.weight is not odd.tail.weight or odd.angles.tolist() != [-1.0] * 4:
            said.append(f"{readers}: the tie is gone, or {odd.angles}")

        model = meta_net(torch.bfloat16)
        report = loader.load(model, for_readers(one, readers))
        said += [f"{readers}, cast: {text}" for text in wrong(model, one, dtype=torch.bfloat16)]
        if report.casts != len(list(model.parameters())):
            said.append(f"{readers}: {report.casts} casts")

        model = meta_net()
        model.table = torch.zeros(5, 3)  # on CPU, beside shards on the device
        loader.load(model, for_readers(one, readers))
        said += [f"{readers}, buffer on CPU: {text}" for text in wrong(model, one, on_cpu=["table"])]

        model = meta_net(offload_policy=CPUOffloadPolicy(pin_memory=False))
        for number in (1, 2):
            report = loader.load(model, for_readers(state_for(number), readers))
            on_device = [name for name, _ in model.named_buffers()]
            on_cpu = [name for name in one if name not in on_device]
            said += [f"{readers}, offloaded: {text}" for text in wrong(model, state_for(number), on_cpu=on_cpu)]

        with torch.device("meta"):
            bare = sharded(Bare(), mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
        state = {name: value for name, value in odd_state(1).items() if name.startswith("layers")}
        report = loader.load(bare, for_readers(state, readers), init_missing=fill)
        said += [f"{readers}, all offloaded: {text}" for text in wrong(bare, state, on_cpu=list(state))]
        if report.stream or str(bare.angles.device) != DEVICE or bare.angles.tolist() != [-1.0] * 4:
            said.append(f"{readers}: {report.stream!r}, {bare.angles}")

        model = meta_net()
        loader.load(model, for_readers(one, readers))
        partial_state = {name: value for name, value in state_for(2).items() if name != "scale"}
        report = loader.load(model, for_readers({**partial_state, "stray": torch.ones(3)}, readers), strict=False)
        if (report.missing_keys, report.unexpected_keys) != (["scale"], ["stray"]):
            said.append(f"{readers}: {report.missing_keys} {report.unexpected_keys}")
        said += [f"{readers}, partial: {text}" for text in wrong(model, {**partial_state, "scale": one["scale"]})]
    return said


@SEMANTICS
def test_kinds_of_tensors(semantics: str) -> None:
    all_fine(ranks.run(3, _kinds, setup=partial(fakedev.setup, semantics)))


# ---- when something goes wrong ----


def _in_the_middle(rank: int, readers: str, algorithm: str) -> Outcome:
    topology = Topology.from_nodes(NODES[4])
    loader = HierarchicalLoader(topology, readers=readers, algorithm=algorithm, bucket_bytes=BUCKET)
    one, two = state_for(1), state_for(2)
    reader = 0 if readers == "one" else 2
    failures: dict[str, tuple[str, str] | None] = {}
    said: list[str] = []
    loaded = meta_net()
    loader.load(loaded, for_readers(two, readers))

    def fails(case: str, model: nn.Module, source: Any) -> None:
        failures[case] = outcome(lambda: loader.load(model, source))
        said.extend(f"after {case}: {name} was aborted into" for name in aborted_into(model))
        loader.load(model, for_readers(two, readers))
        said.extend(f"after {case}: {text}" for text in wrong(model, two))

    for where, model in {"meta": meta_net(), "loaded": loaded}.items():
        error = OSError(5, "the disk is on fire")
        fails(f"read, {where}", model, Failing(one, error) if rank == reader else for_readers(one, readers))
        with unpack_breaks_once(3, "unpack"):
            fails(f"unpack, {where}", model, for_readers(one, readers))
    return failures, said


@SEMANTICS
@pytest.mark.parametrize(
    ("readers", "algorithm"),
    [
        ("one", "two_level"),
        ("one", "striped"),
        ("per_node", "two_level"),
        ("partitioned", "two_level"),
        ("every", "flat"),
    ],
)
def test_failures_in_the_middle(readers: str, algorithm: str, semantics: str) -> None:
    reader = 0 if readers == "one" else 2
    # The fourth that it reads: of its own turns, or of those that it needs something of.
    bucket = {"partitioned": "7 (", "every": ""}.get(readers, "3 (")
    read = ("LoadError", [f"rank {reader} could not read bucket {bucket}", "OSError", "the disk is on fire"])
    unpack = ("LoadError", ["rank 3 could not unpack bucket", "RuntimeError: no room to unpack"])
    expected = {"read, meta": read, "read, loaded": read, "unpack, meta": unpack, "unpack, loaded": unpack}
    check(ranks.run(4, _in_the_middle, readers, algorithm, setup=partial(fakedev.setup, semantics)), expected)


def _refused(rank: int, folder: Path) -> Outcome:
    topology = Topology.from_nodes(NODES[4])
    one, two = state_for(1), state_for(2)
    failures: dict[str, tuple[str, str] | None] = {}
    said: list[str] = []

    def refused(case: str, model: nn.Module, source: Any, topo: Topology = topology, **options: Any) -> None:
        before = {n: t if t.is_meta else t.detach().cpu() for n, t in model.state_dict().items()}
        failures[case] = outcome(lambda: HierarchicalLoader(topo, bucket_bytes=BUCKET, **options).load(model, source))
        for name, tensor in model.state_dict().items():
            if tensor.is_meta != before[name].is_meta or not (
                tensor.is_meta or bool((tensor.cpu() == before[name]).all())
            ):
                said.append(f"{case}: {name} has changed")

    two_devices = Net().to(DEVICE)
    two_devices.norm.to(OTHER)
    refused("two devices", two_devices, one)
    on_meta = meta_net()
    on_meta.table = torch.zeros(5, 3, device=OTHER)
    refused("two devices, on meta", on_meta, one)
    refused("stream of another device", meta_net(), one, stream=torch.Stream(OTHER))
    refused("stream for a model on cpu", Net(), one, stream=torch.Stream(DEVICE))
    host_only = Topology.from_nodes(NODES[4], dist.new_group(backend="gloo"))
    refused("no backend", meta_net(), one, topo=host_only)
    ascend = Topology.from_nodes(NODES[4], dist.new_group(backend=fakedev.AS_ASCEND))
    refused("no part for Ascend", meta_net(), one, topo=ascend)
    refused("external stream", meta_net(), one, stream=ExternalStream())
    refused("external stream, on the device", Net().to(DEVICE), one, stream=ExternalStream())
    on_side, elsewhere = torch.Stream(DEVICE), torch.Stream(OTHER)
    refused("rank 2's stream", Net().to(DEVICE), one, stream=elsewhere if rank == 2 else on_side)
    weight = torch.empty(3, device="meta")
    lacking = DTensor.from_local(weight, init_device_mesh("cuda", (4,)), [Replicate()], run_check=False)
    refused("no such device", nn.ParameterDict({"scale": nn.Parameter(lacking)}), one)
    on_cpu = Net() if rank == 3 else Net().to(DEVICE)
    refused("one rank on cpu", on_cpu, one)
    refused("missing file", meta_net(), folder / "absent")
    refused("keys", meta_net(), {n: v for n, v in one.items() if n != "scale"})
    refused("shape", meta_net(), {**one, "scale": torch.ones(2)})
    model = meta_net()
    HierarchicalLoader(topology, bucket_bytes=BUCKET).load(model, two)
    return failures, said + wrong(model, two)


def test_wrong_use_is_refused_before_anything_moves(tmp_path: Path) -> None:
    expected = {
        "two devices": ("ValueError", ["one accelerator", f"norm.weight on {OTHER}", f"on {DEVICE}"]),
        "two devices, on meta": ("ValueError", ["one accelerator", f"table on {OTHER}", f"on {DEVICE}"]),
        "stream of another device": ("ValueError", [f"a stream of {DEVICE}", f"got a stream of {OTHER}"]),
        "stream for a model on cpu": ("ValueError", ["stream=None for a model on cpu", DEVICE]),
        "no backend": ("ValueError", [f"a backend for {fakedev.NAME} tensors", "init_process_group"]),
        "no part for Ascend": ("ValueError", ["HCCL", "EPLOAD_NPU=1"]),
        "external stream": ("ValueError", ["ExternalStream", "torch.npu.Stream"]),
        "external stream, on the device": ("ValueError", ["ExternalStream", "torch.npu.Stream"]),
        "rank 2's stream": ("ValueError", [f"a stream of {DEVICE}", f"got a stream of {OTHER}", "rank 2"]),
        "no such device": ("ValueError", ["mesh of cuda devices", f"this torch has {fakedev.NAME}"]),
        "one rank on cpu": ("ManifestMismatch", ["device=cpu", f"device={fakedev.NAME}", "[3]"]),
        "missing file": ("CheckpointError", ["absent"]),
        "keys": ("ModelMismatch", ["1 parameter missing from the checkpoint: scale"]),
        "shape": ("ModelMismatch", ["scale has shape [2]"]),
    }
    check(ranks.run(4, _refused, tmp_path, setup=fakedev.setup), expected)


def _without_cpu_backend(rank: int) -> list[str]:
    said = []
    for readers, algorithm in (("one", "two_level"), ("partitioned", "striped"), ("every", "two_level")):
        loader = HierarchicalLoader(
            Topology.from_nodes(NODES[4]), readers=readers, algorithm=algorithm, bucket_bytes=BUCKET
        )
        model = meta_net()
        loader.load(model, for_readers(state_for(1), readers))
        said += [f"{readers}: {text}" for text in wrong(model, state_for(1))]
    return said


def device_only() -> str:
    fakedev.setup("hccl")
    return f"{fakedev.NAME}:fakeccl"


def test_a_job_whose_only_backend_is_the_devices() -> None:
    all_fine(ranks.run(4, _without_cpu_backend, setup=device_only))


# ---- streams ----


def _traced(rank: int, semantics: str) -> list[str]:
    """Broadcasts and unpacking of every bucket on the one stream, host to device on another; two communicators a rank."""
    said = []
    topology = Topology.from_nodes(NODES[4])
    streams = (None, torch.Stream(DEVICE), torch.accelerator.current_stream(DEVICE))
    for stream, readers in zip(streams, ("one", "partitioned", "one"), strict=True):
        loader = HierarchicalLoader(topology, readers=readers, bucket_bytes=BUCKET, stream=stream)
        model = meta_net()
        loader.load(model, for_readers(state_for(1), readers))
        with fakedev.traced() as seen:
            report = loader.load(model, for_readers(state_for(2), readers))
        said += wrong(model, state_for(2))
        staging = loader._resources.device.staging
        assert staging is not None
        ours, copies = staging.stream.stream_id, staging.copies.stream_id
        if stream is not None and ours != stream.stream_id:
            said.append(f"on stream {ours}, given {stream.stream_id}")
        theirs = {s.stream_id for s in fakedev.group_streams()}
        where: dict[str, Counter[int]] = {}
        for _, on, what in seen:
            where.setdefault(what, Counter())[on] += 1
        sent = where["broadcast"]
        groups = 2 if rank in (0, 2) else 1
        if sent.total() != groups * report.buckets or sent.total() != report.transport_steps:
            said.append(f"{sent} broadcasts for {report.buckets} buckets, reported {report.transport_steps}")
        if not set(sent) <= (theirs if semantics == "hccl" else {ours}):
            said.append(f"broadcasts on {sent}, not {ours}")
        if set(where["copy"]) != {ours}:
            said.append(f"unpacked on {where['copy']}, not {ours}")
        to_device = where.get("copy to device", Counter())
        mine = {"one": {0: report.buckets}, "partitioned": {0: -(-report.buckets // 2), 2: report.buckets // 2}}
        if to_device != +Counter({copies: mine[readers].get(rank, 0)}):
            said.append(f"host to device on {to_device}, expected {mine[readers].get(rank, 0)} on {copies}")
        headers = where.get("copy to host", Counter())
        if headers != +Counter({ours: report.buckets - mine[readers].get(rank, 0)}):
            said.append(f"copies to host: {headers}")
        if len(topology._groups.names) != groups:
            said.append(f"{len(topology._groups.names)} communicators")
    return said


@SEMANTICS
def test_all_work_is_on_one_stream_but_the_copies_to_the_device(semantics: str) -> None:
    all_fine(ranks.run(4, _traced, semantics, setup=partial(fakedev.setup, semantics)))


ROWS = 2000
BUCKETS_OF_ROWS = 6
ROW_BUCKET = 64 + 4 * ROWS
"""Bytes; a tensor a bucket."""


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(ROWS)) for _ in range(BUCKETS_OF_ROWS)])


class Counting(Checkpoint):
    """Says how many buckets have been read."""

    def __init__(self, salt: int) -> None:
        self.state = {f"rows.{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(BUCKETS_OF_ROWS)}
        self._inner = Checkpoint.from_state_dict(self.state)
        self.read = 0

    @property
    def manifest(self) -> Manifest:
        return self._inner.manifest

    def fill(self, bucket: Tensor, pieces: Sequence[Piece]) -> None:
        self._inner.fill(bucket, pieces)
        self.read += 1


class Scene:
    """Loads on one rank with a stream held, arranged so that a missing wait shows, and always does."""

    def __init__(self) -> None:
        self.given = torch.Stream(DEVICE)
        self.loader = HierarchicalLoader(bucket_bytes=ROW_BUCKET, stream=self.given)
        self.model = Rows().to(DEVICE)
        self.loader.load(self.model, Counting(0))
        torch.accelerator.synchronize()
        staging = self.loader._resources.device.staging
        assert staging is not None
        self.staging = staging
        self.unpacked = 0
        """Buckets of this load whose unpacking has been queued."""

    def _note(self, staging: DeviceStaging, bucket: int) -> None:
        self._unpacked(staging, bucket)
        self.unpacked += 1

    _unpacked = staticmethod(DeviceStaging.unpacked)

    def load(self, held: torch.Stream, salt: int, harm: Callable[[Counting], bool]) -> bool:
        """Releases the stream once the harm a missing wait does is done, or the load is where it has to wait."""
        source = Counting(salt)

        def release() -> None:
            until = time.monotonic() + (20 if broken else 0.01)
            while time.monotonic() < until and not harm(source):
                time.sleep(0.0005)
            time.sleep(0.002)
            fakedev.release(held)

        broken = self.broken
        self.unpacked = 0
        fakedev.hold(held)
        releasing = threading.Thread(target=release)
        releasing.start()
        with mock.patch.object(DeviceStaging, "unpacked", lambda staging, bucket: self._note(staging, bucket)):
            self.loader.load(self.model, source)
        releasing.join()
        torch.accelerator.synchronize()
        return all(torch.equal(p.detach().cpu(), source.state[f"rows.{i}"]) for i, p in enumerate(self.model.rows))

    broken = False

    def wait_until_copied(self, salt: int) -> bool:
        """A pinned buffer is filled again while the copy out of it has not begun."""
        return self.load(self.staging.copies, salt, lambda source: source.read > 2)

    def wait_until_unpacked(self, salt: int) -> bool:
        """A device buffer is copied into again while what was in it is not unpacked."""
        return self.load(
            self.given, salt, lambda source: source.read == BUCKETS_OF_ROWS and self.staging.copies.query()
        )

    def wait_for_copy(self, salt: int) -> bool:
        """A device buffer is unpacked while the copy into it has not begun."""
        return self.load(self.staging.copies, salt, lambda source: self.unpacked >= 1 and self.given.query())

    def enter(self, salt: int) -> bool:
        """The caller has yet to write to the tensors when the load is called."""
        caller = torch.Stream(DEVICE)
        with caller:
            fakedev.hold(caller)
            with torch.no_grad():
                for p in self.model.rows:
                    p.fill_(-1.0)
            return self.load(caller, salt, lambda source: self.unpacked == BUCKETS_OF_ROWS and self.given.query())

    def leave(self, salt: int) -> bool:
        """The caller reads the tensors as soon as the load has returned, and overwrites them. Two buckets, so that the host does
        not wait."""
        model = nn.ParameterList(list(self.model.rows)[:2])
        state = {f"{i}": torch.arange(float(ROWS)) + 10_000 * (i + salt) for i in range(2)}
        caller = torch.Stream(DEVICE)
        with caller, torch.no_grad(), fakedev.held(self.given):
            self.loader.load(model, state)
            read = [p.detach().clone() for p in model]
            for p in model:
                p.fill_(7.0)
            until = time.monotonic() + (20 if self.broken else 0.01)
            while not caller.query() and time.monotonic() < until:
                time.sleep(0.0005)
        torch.accelerator.synchronize()
        return all(torch.equal(r.cpu(), state[f"{i}"]) for i, r in enumerate(read))


RULES = ("wait_until_copied", "wait_until_unpacked", "wait_for_copy", "enter", "leave")
BROKEN_ROUNDS, RIGHT_ROUNDS = 10, 50


def _rounds(rank: int, rule: str) -> tuple[list[bool], list[bool]]:
    scene = Scene()
    right = [getattr(scene, rule)(salt) for salt in range(RIGHT_ROUNDS)]
    scene.broken = True
    with mock.patch.object(DeviceStaging, rule):
        return [getattr(scene, rule)(salt) for salt in range(100, 100 + BROKEN_ROUNDS)], right


@pytest.mark.parametrize("rule", RULES)
def test_each_wait_is_needed(rule: str) -> None:
    [(broken, right)] = ranks.run(1, _rounds, rule, setup=fakedev.setup)
    assert right == [True] * RIGHT_ROUNDS
    assert broken == [False] * BROKEN_ROUNDS


def _host_does_not_wait(rank: int) -> list[str]:
    """A reader queues all of two buckets on a stream that does not move, and so is not held up by others."""
    topology = Topology.from_nodes([[0, 1]])
    stream = torch.Stream(DEVICE)
    options = {"readers": "one", "algorithm": "two_level"}
    loader = HierarchicalLoader(topology, bucket_bytes=64 + 4 * ROWS * 3, stream=stream, **options)
    model = Rows().to(DEVICE)
    loader.load(model, Counting(0).state if rank == 0 else None)
    torch.accelerator.synchronize()
    staging, said = loader._resources.device.staging, []
    assert staging is not None
    source = Counting(5)
    moved = []
    if rank == 0:
        real = DeviceStaging.unpacked

        def note(self: DeviceStaging, bucket: int) -> None:
            real(self, bucket)
            moved.append(bucket)
            if moved == [0, 1]:
                said.extend(["the stream was idle"] * stream.query())
                fakedev.release(stream)

        settle = loader._control.settle

        def held(what: str, *args: Any, **options: Any) -> Any:
            answer = settle(what, *args, **options)
            if what == "materializing the model":
                fakedev.hold(stream)
            return answer

        with mock.patch.object(DeviceStaging, "unpacked", note), mock.patch.object(loader._control, "settle", held):
            loader.load(model, source)
    else:
        loader.load(model, None)
    if rank == 0 and moved != [0, 1]:
        said.append(f"queued {moved}")
    torch.accelerator.synchronize()
    return said + [
        f"row {i} differs"
        for i, p in enumerate(model.rows)
        if not torch.equal(p.detach().cpu(), source.state[f"rows.{i}"])
    ]


@SEMANTICS
def test_a_reader_queues_its_buckets_without_waiting(semantics: str) -> None:
    all_fine(ranks.run(2, _host_does_not_wait, setup=partial(fakedev.setup, semantics), limit=60))
