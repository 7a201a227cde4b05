"""Memory of a device that another process opens, on the fake accelerator, which gives it out in allocations as CUDA does."""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import pytest
import torch

from epload.native import ops
from support import fakedev
from support.accelerator import DEVICE
from support.checks import all_fine
from support.failures import raised
from support.jobs import Job, Meeting, run

pytestmark = pytest.mark.usefixtures("fake_device")

setup = partial(fakedev.setup, "nccl")


def values(number: int) -> torch.Tensor:
    return torch.arange(400_000) * (number + 1)


def lend(rank: int, meeting: Meeting) -> list[str]:
    """Small tensors in one allocation, a large one in its own; a view and an empty tensor. Then all of them are freed."""
    small = [values(i)[:1000].to(DEVICE) for i in range(3)]
    large = values(3).to(DEVICE)
    tensors = [*small, large, large[5000:].view(-1, 5), torch.empty(0, device=DEVICE)]
    places, handles, sizes = ops.share_memory(tensors)
    wrong = []
    if len({place for place, _ in places.tolist()[:3]}) != 1 or len(handles) != 2:
        wrong.append(f"expected two allocations, got {places.tolist()} in {sizes}")
    if places[4, 1] - places[3, 1] != 5000 * 8 or places[5].tolist() != [-1, 0]:
        wrong.append(f"a view or an empty tensor: {places.tolist()}")
    if ops.share_memory([large, large])[1] != handles[1:]:
        wrong.append("the handle of an allocation changes")
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
    return wrong


def borrow(rank: int, meeting: Meeting) -> list[str]:
    places, handles, sizes, _ = eval(meeting.hear("lent"))
    opened = [
        ops.open_memory(handle, nbytes, torch.device(DEVICE)) for handle, nbytes in zip(handles, sizes, strict=True)
    ]
    again = ops.open_memory(handles[1], sizes[1], torch.device(DEVICE))
    wrong = []

    def look(number: int, count: int) -> torch.Tensor:
        allocation, begin = places[number]
        return opened[allocation][begin : begin + 8 * count].view(torch.int64).cpu()

    wrong += [f"tensor {i}" for i in range(3) if not torch.equal(look(i, 1000), values(i)[:1000])]
    if not torch.equal(look(3, 400_000), values(3)):
        wrong.append("the large tensor")
    if {memory.device for memory in opened} != {torch.device(DEVICE)} or [memory.nbytes for memory in opened] != sizes:
        wrong.append(f"{opened}")
    meeting.say("opened")
    meeting.hear("changed")
    if not (look(3, 10) == -1).all():
        wrong.append("what the other process has written is not seen")
    meeting.say("seen")
    handle, nbytes = eval(meeting.hear("freed"))
    if not (again[:8] != 0).any():
        wrong.append("memory that is open goes with its owner's")
    kind, text = raised(lambda: ops.open_memory(handle, nbytes, torch.device(DEVICE)))
    if kind != "RuntimeError" or "cannot be opened on fakedev:0: invalid resource handle" not in text:
        wrong.append(f"memory that was freed: {text}")
    return wrong


def test_another_process_reads_what_is_there() -> None:
    all_fine([wrong for job in run([Job(1, lend, setup=setup), Job(1, borrow, setup=setup)]) for wrong in job])


def refusals(rank: int, meeting: Meeting) -> list[str]:
    here, there = torch.ones(4, device=DEVICE), torch.ones(4, device="fakedev:1")
    _, (handle,), (nbytes,) = ops.share_memory([here])

    def opening(handle: str, nbytes: int = nbytes, device: str = DEVICE) -> Any:
        return lambda: ops.open_memory(handle, nbytes, torch.device(device))

    cases: list[tuple[Any, str, str]] = [
        (lambda: ops.share_memory([]), "ValueError", "expected at least one tensor"),
        (lambda: ops.share_memory([here, there]), "ValueError", "tensor 1 is on fakedev:1"),
        (lambda: ops.share_memory([torch.ones(4)]), "RuntimeError", "memory of cpu cannot be shared"),
        (lambda: ops.close_memory(here), "ValueError", "expected memory that open_memory has opened"),
        (opening(handle, device="cpu"), "RuntimeError", "memory of cpu cannot be shared"),
        (opening(handle), "RuntimeError", "cannot be opened on fakedev:0"),
        (opening(handle[:-2]), "ValueError", "a handle of 64 bytes"),
        (opening("x" * 128), "ValueError", "non-hexadecimal"),
        (opening("00" * 64), "RuntimeError", "cannot be opened on fakedev:0"),
        (opening(handle, 0), "ValueError", "expected the bytes of an allocation, got 0"),
    ]
    outcomes = [(kind, text, raised(call)) for call, kind, text in cases]
    return [f"{text}: {error}" for kind, text, error in outcomes if error[0] != kind or text not in error[1]]


def test_what_is_refused() -> None:
    """Also what the process shares itself, which it cannot open."""
    all_fine(run([Job(1, refusals, setup=setup)])[0])
