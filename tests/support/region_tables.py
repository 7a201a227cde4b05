"""The contract of kept region tables and of guards, for every device with kernels."""

from __future__ import annotations

import struct

import pytest
import torch
from torch import Tensor

from epload.native.region_tables import Guard, can_guard, can_guard_table, region_table, unpack_table
from support.region_copies import Problem, Row, check_equal, packed, table_of

HEADER = 64
NOT_COMPARED = range(16, 32)
MANY, FEW = 3000, 5
"""Regions of a table that is too large for the arguments of a launch, and of one that is not."""


def check_table(problem: Problem, device: str) -> None:
    """One table, used twice with each of two buckets and two sets of targets, does to each what plain torch does."""
    table = region_table(table_of(problem.rows, problem.dims))

    def twice(bucket: Tensor, targets: list[Tensor], copies: Tensor) -> None:
        before = [target.clone() for target in targets]
        unpack_table(bucket, targets, table)
        for target, values in zip(targets, before, strict=True):
            target.copy_(values)
        unpack_table(bucket, targets, table)

    kept = problem.bucket().to(device)  # lies where the first bucket of check_equal does not
    unpack_table(kept, [t.to(device) for t in problem.tensors(problem.bases)], table)
    for _ in range(2):
        check_equal(problem, True, twice, device)


def strided_regions(count: int, device: str) -> tuple[list[Tensor], Tensor, Tensor]:
    """Targets, a table and, on CPU, the content of a bucket after its header."""
    targets = [torch.zeros(1 + i % 9, 5, device=device)[:, ::2] for i in range(count)]
    rows, at = [], HEADER
    for i, target in enumerate(targets):
        rows.append(Row(i, at, torch.float32, [0, 0], list(target.shape), packed(list(target.shape))))
        at += target.numel() * 4
    return targets, table_of(rows, 2), torch.arange(1.0, 1 + (at - HEADER) // 4)


def header(number: int, **fields: bytes | int) -> Tensor:
    """As the loader's (transport/framing.py)."""
    of = {"magic": b"epload!!", "index": number, "status": 0, "nbytes": 7, "checksum": 8, "fingerprint": b"f" * 16}
    return torch.frombuffer(bytearray(struct.pack("<8sIIQQ16s16x", *(of | fields).values())), dtype=torch.uint8)


class Guarded:
    """Buckets of one stream, with the two words that their guards share."""

    def __init__(self, device: str, count: int = FEW) -> None:
        self.device = device
        self.targets, copies, self.content = strided_regions(count, device)
        self.table = region_table(copies)
        self.stopped = torch.zeros(1, dtype=torch.int32, device=device)
        self.flag = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def bucket(self, found: Tensor) -> Tensor:
        return torch.cat([found, self.content.view(torch.uint8)]).to(self.device)

    def unpack(self, expected: Tensor, bucket: Tensor) -> None:
        guard = Guard(expected.clone(), self.stopped, self.flag)
        unpack_table(bucket, self.targets, self.table, guard)
        guard.expected.zero_()  # which the call has read

    def copied(self, expected: Tensor, found: Tensor) -> bool:
        """Whether all was copied rather than nothing."""
        for target in self.targets:
            target.zero_()
        self.unpack(expected, self.bucket(found))
        torch.accelerator.synchronize()
        got = torch.cat([target.cpu().flatten() for target in self.targets])
        assert torch.equal(got, self.content) or not got.any()
        return bool(got.any())

    def state(self) -> tuple[int, int]:
        return int(self.stopped.item()), int(self.flag.item())

    def reset(self) -> None:
        self.stopped.zero_()
        self.flag.zero_()


def check_header(device: str) -> None:
    """Every byte of the header counts but for size and checksum."""
    for count in (FEW, MANY):
        guarded = Guarded(device, count)
        assert can_guard(torch.device(device))
        assert can_guard_table(guarded.bucket(header(4)), guarded.targets, guarded.table)
        changes = {
            "magic": b"epload!?", "index": 5, "status": 1, "fingerprint": b"f" * 15 + b"g", "nbytes": 1 << 40, "checksum": 0,
        }  # fmt: skip
        for name, value in changes.items():
            same = name in ("nbytes", "checksum")
            assert guarded.copied(header(4), header(4, **{name: value})) is same, name
            assert guarded.state() == ((0, 0) if same else (1, 5)), name
            guarded.reset()
    for byte in range(HEADER):
        found = header(4)
        found[byte] ^= 0x80
        assert guarded.copied(header(4), found) is (byte in NOT_COMPARED), byte
        assert guarded.state() == ((0, 0) if byte in NOT_COMPARED else (1, 5)), byte
        guarded.reset()


def check_sticky(device: str) -> None:
    """Nothing is copied after a bucket that was stopped; the flag names the first one."""
    guarded = Guarded(device)
    assert guarded.copied(header(6), header(6))
    assert guarded.state() == (0, 0)
    assert not guarded.copied(header(7), header(6))
    assert guarded.state() == (1, 8)
    for index in (8, 9):
        assert not guarded.copied(header(index), header(index))
        assert not guarded.copied(header(index), header(0))
        assert guarded.state() == (1, 8)
    guarded.flag.zero_()
    assert not guarded.copied(header(3), header(3))
    assert guarded.state() == (1, 4), "stopped by what came before"
    unpack_table(guarded.bucket(header(0)), guarded.targets, guarded.table)
    assert torch.equal(torch.cat([t.cpu().flatten() for t in guarded.targets]), guarded.content), "no guard, no stop"


def check_guard_alone(device: str) -> None:
    """A table without rows is for its guard."""
    guarded = Guarded(device)
    guarded.table, guarded.targets = region_table(torch.zeros(0, 4, dtype=torch.int64)), []
    assert can_guard_table(guarded.bucket(header(1)), [], guarded.table)
    guarded.unpack(header(1), guarded.bucket(header(1)))
    torch.accelerator.synchronize()
    assert guarded.state() == (0, 0)
    guarded.unpack(header(1), guarded.bucket(header(2)))
    torch.accelerator.synchronize()
    assert guarded.state() == (1, 2)


def check_refusals(device: str) -> None:
    """What is no guard, and regions that kernels do not copy, are refused before anything is copied."""
    guarded = Guarded(device)
    bucket, expected = guarded.bucket(header(0)), header(0)
    stopped, flag = guarded.stopped, guarded.flag
    wrong = [
        Guard(expected[:63], stopped, flag),
        Guard(expected.to(torch.int8), stopped, flag),
        Guard(expected.to(device), stopped, flag),
        Guard(expected, stopped.cpu(), flag),
        Guard(expected, stopped.long(), flag),
        Guard(expected, stopped, flag.clone()),
        Guard(expected, stopped, stopped),
        Guard(expected, stopped, torch.zeros(2, dtype=torch.int32, pin_memory=True)),
        Guard(expected, stopped, None),  # type: ignore[arg-type]
    ]
    for guard in wrong:
        with pytest.raises(ValueError, match="unpack_table"):
            unpack_table(bucket, guarded.targets, guarded.table, guard)
    with pytest.raises(ValueError, match="compares 64 bytes"):
        unpack_table(
            bucket[:60], [], region_table(torch.zeros(0, 4, dtype=torch.int64)), Guard(expected, stopped, flag)
        )
    converted = torch.zeros(3, dtype=torch.int64, device=device)
    rows = [Row(0, HEADER, torch.float32, [0], [3], [1])]
    odd = region_table(table_of(rows, 1))
    assert not can_guard_table(bucket, [converted], odd)
    with pytest.raises(ValueError, match="copied by torch"):
        unpack_table(bucket, [converted], odd, Guard(expected, stopped, flag))
    torch.accelerator.synchronize()
    assert not converted.any()
    assert not any(target.any() for target in guarded.targets)
    unpack_table(bucket, [converted], odd)
    assert converted.tolist() == guarded.content[:3].tolist(), "without a guard"
    assert guarded.state() == (0, 0)
