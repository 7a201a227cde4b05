"""Regions that cross between the host and a device through a pipe, each wait of it, and memory that processes share. On the fake
accelerator."""

from __future__ import annotations

import ctypes
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from epload.core.copy_table import CopyTable
from epload.native import ops
from epload.transfer import host_copies
from epload.transfer.host_copies import copy_to_host, host_memory_for
from support import fakedev, ranks
from support.accelerator import DEVICE, SEMANTICS
from support.checks import all_fine
from support.failures import must_raise
from support.jobs import Job, Meeting, run
from support.on_ranks import on_ranks
from support.region_reads import BF16, F32, Files, Row, box, filled, table_of

pytestmark = pytest.mark.usefixtures("fake_device")

PIECE = 64 << 10
Case = tuple[list[Row], list[Tensor]]


def pipe(threads: int, piece: int = PIECE) -> ops.Pipe:
    return ops.device_pipe(torch.device(DEVICE), threads, piece)


def random_case(rng: random.Random, files: Files, converts: bool) -> Case:
    """Boxes of tensors in files, at random offsets, into disjoint rows of targets: contiguous, of rows, of single elements."""
    rows: list[Row] = []
    targets: list[Tensor] = []
    offset = {number: rng.randrange(70) for number in range(len(files.paths))}
    for _ in range(rng.randrange(1, 9)):
        dtype = rng.choice([F32, BF16, torch.uint8, torch.float64])
        cast = rng.choice([F32, BF16, torch.float64]) if converts and dtype.is_floating_point else dtype
        shape = (rng.randrange(1, 9), rng.randrange(1, 5), rng.choice([1, 3, 40, 700, 30_000]))
        start = tuple(rng.randrange(n) for n in shape) if rng.random() < 0.5 else (0, 0, 0)
        size = tuple(rng.randrange(1, n - a + 1) for n, a in zip(shape, start, strict=True))
        file = rng.randrange(len(files.paths))
        begin = offset[file]
        offset[file] += torch.Size(shape).numel() * dtype.itemsize + rng.choice([0, 0, 9, 5000])
        if offset[file] <= len(files.raw[file]):
            rows.append(Row(file, begin, shape, dtype, start, size, len(targets), (rng.randrange(3), 0, 0)))
            targets.append(filled((shape[0] + 2, shape[1], shape[2] + rng.choice([0, 0, 5])), cast))
    return rows, targets


@SEMANTICS
@on_ranks(1)
def test_regions_cross_both_ways(rank: int, tmp_path: Path, semantics: str) -> list[str]:
    """Compares what is read and what is uploaded from memory with what slicing and copy_ make of the files; and back."""
    files, problems = Files(tmp_path), []
    for nbytes in (3 << 20, 1 << 20, 700_001):
        number = files.add(nbytes)
        # Of all bytes those between 0x30 and 0x3F: a number of any dtype, and none that conversions treat in ways of their own.
        raw = (torch.frombuffer(files.raw[number], dtype=torch.uint8) * 37 >> 3) % 16 + 0x30
        files.raw[number][:] = raw.numpy().tobytes()
        files.paths[number].write_bytes(files.raw[number])
    for seed in range(60):
        rng = random.Random(seed)
        rows, targets = random_case(rng, files, converts=seed % 2 == 0)
        if not rows:
            continue
        expected = [target.clone() for target in targets]
        for row in rows:
            box(expected[row.target], row.at, row.size).copy_(box(files.tensor(row), row.start, row.size))
        way = pipe(rng.randrange(1, 4), rng.choice([4096, PIECE, 1 << 20]))
        where = table_of(rows)
        placed = [target.to(DEVICE) for target in targets]
        read, *bad = ops.read_regions(files.descriptors, *where[:3], placed, where[3], 1, False, way)
        wanted = sum(torch.Size(row.size).numel() * row.dtype.itemsize for row in rows)
        if bad != [-1, 0, 0] or read < wanted:
            problems.append(f"seed {seed}: {bad}, {read} bytes read of {wanted}")
        memory = [torch.frombuffer(raw, dtype=torch.uint8) for raw in files.raw]
        file, offset, origins, table = where
        origins = torch.stack([file[origins[:, 0]], offset[origins[:, 0]] + origins[:, 1]], 1)
        uploaded = [target.to(DEVICE) for target in targets]
        ops.upload(memory, origins, uploaded, table, way)
        for i, each in enumerate(expected):
            problems += [f"seed {seed}: read {i} differs"] * (not torch.equal(placed[i].cpu(), each))
            problems += [f"seed {seed}: uploaded {i} differs"] * (not torch.equal(uploaded[i].cpu(), each))
        problems += [f"seed {seed}: {text}" for text in goes_back(tmp_path, rows, where, placed, memory, way)]
    files.close()
    return problems


def goes_back(
    folder: Path, rows: list[Row], where: tuple[Tensor, ...], placed: list[Tensor], memory: list[Tensor], way: ops.Pipe
) -> list[str]:
    """Only what the rows cover is written; of what was converted, what the tensors make of it."""
    file, offset, origins, table = where
    written = [torch.full_like(each, 0x5A) for each in memory]
    downloaded = [each.clone() for each in written]
    expected = [each.clone() for each in written]
    for row in rows:
        nbytes = torch.Size(row.shape).numel() * row.dtype.itemsize
        whole = expected[row.file][row.offset :][:nbytes]
        typed = whole.clone().view(row.dtype).reshape(row.shape)
        box(typed, row.start, row.size).copy_(box(placed[row.target].cpu(), row.at, row.size))
        whole.copy_(typed.reshape(-1).view(torch.uint8))
    absolute = torch.stack([file[origins[:, 0]], offset[origins[:, 0]] + origins[:, 1]], 1)
    ops.download(placed, table, downloaded, absolute, way)
    descriptors = []
    for i, each in enumerate(written):
        path = folder / f"written-{i}"
        path.write_bytes(each.numpy().tobytes())
        descriptors.append(os.open(path, os.O_RDWR))
    _, *bad = ops.write_from_device(descriptors, file, offset, origins, placed, table, way)
    problems = [f"writing: {bad}"] if bad != [-1, 0, 0] else []
    for i, each in enumerate(expected):
        content = (folder / f"written-{i}").read_bytes()
        problems += [f"written {i} differs"] * (content != each.numpy().tobytes())
        problems += [f"downloaded {i} differs"] * (not torch.equal(downloaded[i], each))
        os.close(descriptors[i])
    return problems


ELEMENTS = 6 * PIECE // 4
"""Elements of float32: three turns of a lane of two pieces."""
BROKEN_ROUNDS, RIGHT_ROUNDS = 5, 10
WAITS = ("piece_reuse", "pipe_entry", "pipe_exit", "piece_write")


ORIGIN = torch.zeros(1, 2, dtype=torch.int64)


def whole(tensor: Tensor) -> Tensor:
    return CopyTable.of_bytes(torch.tensor([0]), torch.tensor([tensor.nbytes])).rows


class Scene:
    """One lane, and a stream that is held, arranged so that a missing wait shows, and always does."""

    def __init__(self) -> None:
        self.broken = False
        self.pipe: ops.Pipe | None = pipe(1)
        self.lane = self._find_lane()

    def _find_lane(self) -> torch.Stream:
        with fakedev.traced() as seen:
            self.upload(torch.zeros(4), torch.zeros(4, device=DEVICE))
        (found,) = {stream for _, stream, what in seen if what == "copy to device"}
        kind = torch._C._autograd.DeviceType.PrivateUse1.value
        return torch.Stream(stream_id=found, device_index=0, device_type=kind)

    def upload(self, source: Tensor, target: Tensor) -> None:
        ops.upload([source], ORIGIN, [target.view(torch.uint8)], whole(source), self.pipe)

    @contextmanager
    def held(self, stream: torch.Stream) -> Iterator[Callable[[], None]]:
        """Until the body ends, if a wait is missing; else for a moment, since the body may have to wait for it."""
        fakedev.hold(stream)
        releasing = threading.Timer(0.02, fakedev.release, [stream])
        if not self.broken:
            releasing.start()
        try:
            yield
        finally:
            if self.broken:
                fakedev.release(stream)
            else:
                releasing.join()

    def piece_reuse(self, values: Tensor) -> bool:
        """A piece is filled again while the copy out of it has not begun."""
        target = torch.zeros(ELEMENTS, device=DEVICE)
        with self.held(self.lane):
            self.upload(values, target)
        return torch.equal(target.cpu(), values)

    def pipe_entry(self, values: Tensor) -> bool:
        """Work that the caller has queued on its stream has yet to write to the target."""
        some = values[: PIECE // 4]
        target = torch.zeros(len(some), device=DEVICE)
        with self.held(torch.accelerator.current_stream(DEVICE)):
            target.fill_(-1.0)
            self.upload(some, target)
            while self.broken and not self.lane.query():
                time.sleep(0.0005)
        return torch.equal(target.cpu(), some)

    def pipe_exit(self, values: Tensor) -> bool:
        """The caller reads the target as soon as the op returns."""
        some = values[: PIECE // 4]
        target = torch.zeros(len(some), device=DEVICE)
        torch.accelerator.synchronize()
        with self.held(self.lane):
            self.upload(some, target)
            read = target.clone()
            while self.broken and not torch.accelerator.current_stream(DEVICE).query():
                time.sleep(0.0005)
        return torch.equal(read.cpu(), some)

    def piece_write(self, values: Tensor) -> bool:
        """A piece is copied to where it goes before it has come from the device."""
        source, target = values[: PIECE // 4].to(DEVICE), torch.zeros(PIECE // 4)
        torch.accelerator.synchronize()
        with self.held(self.lane):
            ops.download([source.view(torch.uint8)], whole(source), [target], ORIGIN, self.pipe)
        return torch.equal(target, values[: PIECE // 4])


def rounds(rank: int) -> list[str]:
    problems = []
    values = torch.arange(float(ELEMENTS))
    for rule in WAITS:
        scene = Scene()
        if not all(getattr(scene, rule)(values + salt) for salt in range(RIGHT_ROUNDS)):
            problems.append(f"{rule}: wrong with the wait")
        scene.broken = True
        os.environ["EPLOAD_TEST_BREAK"] = rule
        if any(getattr(scene, rule)(values + salt) for salt in range(100, 100 + BROKEN_ROUNDS)):
            problems.append(f"{rule}: right without the wait")
        del os.environ["EPLOAD_TEST_BREAK"]
    return problems


def freed(rank: int) -> list[str]:
    scene, problems, busy = Scene(), [], torch.empty(1 << 26, device=DEVICE)
    for salt in range(3):
        values = torch.arange(float(PIECE // 4)) + salt
        target = torch.zeros(PIECE // 4, device=DEVICE)
        torch.accelerator.synchronize()
        fakedev.hold(scene.lane)
        with scene.lane:
            for _ in range(3):
                busy.fill_(1.0)  # takes a while
        scene.upload(values, target)
        problems += [f"{salt}: on another lane, so that this shows nothing"] * scene.lane.query()
        fakedev.release(scene.lane)
        scene.pipe = None
        arrived = ctypes.string_at(target.data_ptr(), PIECE)  # the fake's memory is the host's
        problems += [f"{salt}: freed too early"] * (arrived != values.numpy().tobytes())
        scene.pipe = pipe(1)
    return problems


@pytest.mark.parametrize("check", [rounds, freed])
def test_each_wait_is_needed_and_a_pipe_is_freed_when_its_last_copy_is_done(check: Callable[[int], list[str]]) -> None:
    all_fine(ranks.run(1, check, setup=fakedev.setup))


setup = partial(fakedev.setup, "nccl")


def numbers(number: int) -> torch.Tensor:
    return torch.arange(400_000) * (number + 1)


@on_ranks(1, setup=setup)
def test_copies_in_pinned_memory(rank: int) -> None:
    on_device = [filled((3, 5), F32), torch.tensor(2.5, dtype=BF16), torch.empty(0, 3), torch.arange(24.0).view(4, 6).T > 7]
    tensors = [torch.arange(7), *(tensor.to(DEVICE) for tensor in on_device)]
    with mock.patch.object(host_copies, "_BLOCK_BYTES", 256):
        memory = host_memory_for([*tensors, *tensors])
    assert len({tensor.untyped_storage().data_ptr() for tensor in memory if tensor.numel()}) == 4, "two blocks, two on CPU"
    memory = host_memory_for(tensors)
    assert [(t.shape, t.dtype, t.is_cpu) for t in memory] == [(t.shape, t.dtype, True) for t in tensors]
    assert len({tensor.untyped_storage().data_ptr() for tensor in memory[1:]}) == 1, "they share one pinned block"
    copy_to_host(tensors, memory)
    assert all(torch.equal(copy, tensor.cpu()) for copy, tensor in zip(memory, tensors, strict=True))
    must_raise(ValueError, "expected 1 to 281474976710656 bytes, got 0", ops.pinned_memory, 0, torch.device(DEVICE))
    must_raise(ValueError, "a device with its index, got cpu", ops.pinned_memory, 4, torch.device("cpu"))


def lend(rank: int, meeting: Meeting) -> None:
    """Small tensors in one allocation, a large one in its own; a view and an empty tensor. Then all of them are freed."""
    small, large = [numbers(i)[:1000].to(DEVICE) for i in range(3)], numbers(3).to(DEVICE)
    tensors = [*small, large, large[5000:].view(-1, 5), torch.empty(0, device=DEVICE)]
    places, handles, sizes = ops.share_memory(tensors)
    assert len({place for place, _ in places.tolist()[:3]}) == 1
    assert len(handles) == 2
    assert (places[4, 1] - places[3, 1], places[5].tolist()) == (5000 * 8, [-1, 0])
    assert ops.share_memory([large, large])[1] == handles[1:]
    torch.accelerator.synchronize()
    meeting.say("lent", repr((places.tolist(), handles, sizes, os.getpid())))
    meeting.hear("opened")
    for tensor in [*small, large]:
        tensor.fill_(-1)
    torch.accelerator.synchronize()
    meeting.say("changed")
    meeting.hear("seen")
    handle, nbytes = handles[1], sizes[1]
    del tensors, large, small, tensor
    torch.accelerator.empty_cache()
    meeting.say("freed", repr((handle, nbytes)))


def borrow(rank: int, meeting: Meeting) -> None:
    places, handles, sizes, _ = eval(meeting.hear("lent"))
    device = torch.device(DEVICE)
    opened = [ops.open_memory(handle, nbytes, device) for handle, nbytes in zip(handles, sizes, strict=True)]
    again = ops.open_memory(handles[1], sizes[1], device)

    def look(number: int, count: int) -> torch.Tensor:
        allocation, begin = places[number]
        return opened[allocation][begin : begin + 8 * count].view(torch.int64).cpu()

    for number, count in ((0, 1000), (1, 1000), (2, 1000), (3, 400_000)):
        assert torch.equal(look(number, count), numbers(number)[:count]), number
    assert [(memory.device, memory.nbytes) for memory in opened] == [(device, nbytes) for nbytes in sizes]
    meeting.say("opened")
    meeting.hear("changed")
    assert (look(3, 10) == -1).all(), "what the other process has written is not seen"
    meeting.say("seen")
    handle, nbytes = eval(meeting.hear("freed"))
    ops.close_memory(opened[1])
    assert (again[:8] != 0).any(), "memory that is open goes with its owner's, or when it is closed that was opened before"
    ops.close_memory(again)
    text = "cannot be opened on fakedev:0: invalid resource handle"
    must_raise(RuntimeError, text, ops.open_memory, handle, nbytes, device)


def test_another_process_reads_what_is_there() -> None:
    run([Job(1, lend, setup=setup), Job(1, borrow, setup=setup)])


def refusals(rank: int, meeting: Meeting) -> None:
    here, there = torch.ones(4, device=DEVICE), torch.ones(4, device="fakedev:1")
    _, (handle,), (nbytes,) = ops.share_memory([here])

    def opening(handle: str, nbytes: int = nbytes, device: str = DEVICE) -> Any:
        return lambda: ops.open_memory(handle, nbytes, torch.device(device))

    for call, kind, text in (
        (lambda: ops.share_memory([]), ValueError, "expected at least one tensor"),
        (lambda: ops.share_memory([here, there]), ValueError, "tensor 1 is on fakedev:1"),
        (lambda: ops.share_memory([torch.ones(4)]), RuntimeError, "memory of cpu cannot be shared"),
        (lambda: ops.close_memory(here), ValueError, "expected memory that open_memory has opened"),
        (opening(handle, device="cpu"), RuntimeError, "memory of cpu cannot be shared"),
        (opening(handle), RuntimeError, "cannot be opened on fakedev:0"),  # what the process shares itself
        (opening(handle[:-2]), ValueError, "a handle of 64 bytes"),
        (opening("x" * 128), ValueError, "non-hexadecimal"),
        (opening("00" * 64), RuntimeError, "cannot be opened on fakedev:0"),
        (opening(handle, 0), ValueError, "expected the bytes of an allocation, got 0"),
    ):
        must_raise(kind, text, call)


def test_what_is_refused() -> None:
    run([Job(1, refusals, setup=setup)])
