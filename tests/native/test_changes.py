"""Changes between two buffers, encoded and applied or refused; checksums and digests of regions; against plain torch."""

from __future__ import annotations

import functools
import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epload.core import dtypes
from epload.native import ops
from support.failures import must_raise
from support.region_copies import Problem, problems, table_of

UNITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
CHUNK = 1 << 16


def random_bytes(nbytes: int, seed: int) -> Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def changed_bytes(base: Tensor, unit: int, positions: Tensor) -> Tensor:
    """A copy in which the units at these positions differ, each in one of its bytes."""
    copy = base.clone()
    copy.view(-1, unit)[positions, positions % unit] ^= 1
    return copy


def encode(base: Tensor, changed: Tensor, unit: int) -> tuple[Tensor, int]:
    out = torch.full((ops.encoded_limit(len(base)),), 0xA5, dtype=torch.uint8)
    nbytes, count = ops.encode_changes(base, changed, unit, out)
    return out[:nbytes].clone(), count


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("units", [0, 1, 7, 33, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK + 77])
def test_a_copy_of_the_base_becomes_what_has_changed(unit: int, units: int) -> None:
    base = random_bytes(units * unit, 1)
    for density in (0.0, 1e-4, 0.02, 0.2, 0.7, 0.999, 1.0):
        generator = torch.Generator().manual_seed(units)
        positions = torch.randperm(units, generator=generator)[: -int(-units * density // 1) if density else 0]
        changed = changed_bytes(base, unit, positions)
        encoded, count = encode(base, changed, unit)
        assert count == len(positions)
        assert len(encoded) <= ops.encoded_limit(len(base))
        copy = base.clone()
        assert ops.check_changes(encoded, len(base)) == ops.apply_changes(encoded, copy) >= count
        assert torch.equal(copy, changed)


def test_several_blocks_follow_one_another() -> None:
    base = random_bytes(3 * CHUNK + 8, 9)
    changed = changed_bytes(base, 4, torch.arange(0, len(base) // 4, 7))
    parts = zip(base.split(CHUNK), changed.split(CHUNK), (1, 2, 4, 8), strict=True)
    blocks = [encode(*part)[0] for part in parts]
    ops.apply_changes(torch.cat(blocks), base)
    assert torch.equal(base, changed)


def test_changes_that_are_not_whole_units_of_the_buffer_leave_it_as_it_was() -> None:
    """A block that does not begin at a multiple of its unit follows a valid one."""
    base = random_bytes(3 + 8, 10)
    blocks = [encode(part, part ^ 1, unit)[0] for part, unit in ((base[:3], 1), (base[3:].clone(), 8))]
    for call, of in ((ops.check_changes, len(base)), (ops.apply_changes, base)):
        must_raise(ValueError, "at a multiple of 8 bytes", call, torch.cat(blocks), of)
    assert torch.equal(base, random_bytes(3 + 8, 10))
    # Nor may a base lie at an address of no unit.
    memory = random_bytes(17, 10)
    base = memory[1:]
    blocks = [encode(part.clone(), part ^ 1, unit)[0] for part, unit in ((base[:8], 1), (base[8:], 8))]
    must_raise(ValueError, "starts and ends at a multiple of 8 bytes", ops.apply_changes, torch.cat(blocks), base)
    must_raise(ValueError, "expected the changes to be other memory", ops.apply_changes, memory[:8], base)
    assert torch.equal(memory, random_bytes(17, 10))


def test_tensors_at_any_address_are_compared() -> None:
    """Tensors as a memory-mapped checkpoint may have them."""
    memory = [random_bytes(4 * 10 + 1, seed) for seed in (11, 12)]
    memory[0][1:5], memory[1][1:5] = torch.zeros(4), torch.tensor([0, 0, 0, 0x80])  # -0.0 is another value than 0.0
    old, new = (torch.frombuffer(bytes_.numpy(), dtype=torch.float32, offset=1) for bytes_ in memory)
    copies = torch.tensor([[0, 0, dtypes.code(torch.float32), 1, 0, 10, 1]])
    out = torch.empty(ops.encoded_limit(40), dtype=torch.uint8)
    nbytes, _ = ops.encode_regions([old], [new], copies, 0, 40, out)
    copy = memory[0][1:].clone()
    ops.apply_changes(out[:nbytes].clone(), copy)
    assert torch.equal(copy, memory[1][1:])


def regions(*rows: tuple[int, int, torch.dtype, tuple[int, ...], tuple[int, ...], tuple[int, ...]]) -> Tensor:
    """A table of copies of tensors with two dims: target, offset, dtype, start, size, stride."""
    return torch.tensor(
        [[target, at, dtypes.code(dtype), 2, *start, *size, *stride] for target, at, dtype, start, size, stride in rows]
    )


ROWS = regions(
    (1, 64, torch.bfloat16, (3, 0), (300, 250), (250, 1)),
    (0, 64 + 150_000, torch.float32, (0, 4), (50, 30), (1, 50)),  # transposed in the bucket
    (2, 64 + 156_016, torch.complex128, (1, 2), (5, 3), (3, 1)),  # behind a gap
    (0, 64 + 156_256, torch.float32, (10, 0), (0, 4), (4, 1)),  # without elements
)
END = 64 + 156_256 + 7


def regions_before_and_after() -> tuple[list[Tensor], list[Tensor]]:
    shapes = ((50, 40), torch.float32), ((310, 250), torch.bfloat16), ((7, 6), torch.complex128)
    before, after = [], []
    for number, (shape, dtype) in enumerate(shapes):
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        old = random_bytes(nbytes, 20 + number)
        new = changed_bytes(old, 2, torch.randperm(nbytes // 2)[: nbytes // 100])
        before.append(old.view(dtype).reshape(shape))
        after.append(new.view(dtype).reshape(shape))
    return before, after


def packed_regions(tensors: list[Tensor]) -> Tensor:
    bucket = torch.zeros(END, dtype=torch.uint8)
    ops.pack(bucket, tensors, ROWS)
    return bucket


@pytest.mark.parametrize("is_packed", [False, True])
def test_regions_become_those_that_have_changed(is_packed: bool) -> None:
    before, after = regions_before_and_after()
    bucket, out = packed_regions(after), torch.empty(ops.encoded_limit(END, len(ROWS)), dtype=torch.uint8)
    nbytes, count = ops.encode_regions(before, bucket if is_packed else after, ROWS, 64, END, out)
    encoded = out[:nbytes].clone()
    body = packed_regions(before)[64:]
    assert ops.apply_changes(encoded, body) == count  # a receiver has the bucket
    assert torch.equal(body, bucket[64:])

    expected = [tensor.clone() for tensor in before]
    ops.unpack(bucket, expected, ROWS)
    assert ops.apply_regions(encoded, before, ROWS, 64, END) == count
    for found, want in zip(before, expected, strict=True):  # what is in no region has not changed
        assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))


def test_changes_of_other_regions_are_refused_before_any_is_applied() -> None:
    before, after = regions_before_and_after()
    out = torch.empty(ops.encoded_limit(END, len(ROWS)), dtype=torch.uint8)
    encoded = out[: ops.encode_regions(before, after, ROWS, 64, END, out)[0]].clone()
    unchanged = [tensor.clone() for tensor in before]
    for text, changes, copies, end in [
        ("got those of", encoded, regions((1, 64, torch.bfloat16, (3, 0), (300, 249), (249, 1))), END),
        ("got one of", encoded, regions((1, 64, torch.bfloat16, (3, 0), (301, 250), (250, 1))), END),
        ("in units of 4", encoded, regions((0, 64, torch.float32, (3, 0), (4, 4), (4, 1))), END),
        ("no changes between regions", encoded, ROWS[1:], END),
        ("those of more", encoded, ROWS[:1], 64 + 150_000),
        ("end", encoded[:-9], ROWS, END),
        ("no encoded changes", torch.cat([encoded[:1] ^ 255, encoded[1:]]), ROWS, END),
        ("follow one another", encoded, ROWS.flip(0), END),
    ]:
        must_raise(ValueError, text, ops.apply_regions, changes, before, copies, 64, end)
        for found, want in zip(before, unchanged, strict=True):
            assert torch.equal(found.view(torch.uint8), want.view(torch.uint8))
    for text, changed in (
        ("a bucket of at least", packed_regions(after)[:-1].clone()),
        ("changed tensor 1 to be as that of the base", [after[0], after[1][1:], after[2]]),
        ("expected 3 changed tensors, got 2", after[:2]),
        ("other memory", out),
        ("other memory", [*after[:2], out[:672].view(torch.complex128).view(7, 6)]),
    ):
        must_raise(ValueError, text, ops.encode_regions, before, changed, ROWS, 64, END, out)


def test_the_format_is_the_documented_one() -> None:
    """One change in the third of four units of two bytes, and one behind a gap of 300."""
    base = torch.zeros(2 * 400, dtype=torch.uint8)
    changed = base.clone()
    changed.view(torch.int16)[2], changed.view(torch.int16)[303] = 0x1234, 0x5678
    header = b"epld" + bytes([1, 2, 0, 0]) + (800).to_bytes(8, "little")
    gaps = bytes([3]) + (2).to_bytes(4, "little") + bytes([2, 255]) + (300).to_bytes(2, "little")
    assert bytes(encode(base, changed, 2)[0].tolist()) == header + gaps + b"\x34\x12\x78\x56"


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("density", [0.002, 0.3])
def test_damaged_changes_are_refused_or_stay_inside_the_base(unit: int, density: float) -> None:
    base, generator = random_bytes(unit * (CHUNK + 200), 4), random.Random(5)
    positions = torch.tensor(sorted(generator.sample(range(CHUNK + 200), int(density * CHUNK))))
    encoded, _ = encode(base, changed_bytes(base, unit, positions), unit)
    refused = 0
    for _ in range(400):
        damaged = encoded[: generator.choice([len(encoded), generator.randrange(len(encoded))])].clone()
        for _ in range(generator.randrange(3)):
            if len(damaged):
                at = generator.choice([generator.randrange(min(40, len(damaged))), generator.randrange(len(damaged))])
                damaged[at] = generator.randrange(256)
        guarded = torch.full((len(base) + 128,), 0x5A, dtype=torch.uint8)
        copy = guarded[64:-64].copy_(base)
        try:
            ops.apply_changes(damaged, copy)
        except ValueError:
            refused += 1
            assert torch.equal(copy, base)  # not by halves
        assert (torch.cat([guarded[:64], guarded[-64:]]) == 0x5A).all()
    assert refused > 100


@pytest.mark.parametrize("unit", UNITS)
def test_no_beginning_of_an_encoding_is_one(unit: int) -> None:
    base = torch.zeros(1000 * unit, dtype=torch.uint8)
    encoded, _ = encode(base, changed_bytes(base, unit, torch.tensor([2, 303, 900])), unit)
    assert ops.check_changes(encoded, len(base)) == 3
    for nbytes in range(len(encoded)):
        must_raise(ValueError, "damaged|no encoded changes", ops.check_changes, encoded[:nbytes].clone(), len(base))


def test_what_does_not_fit_is_refused() -> None:
    base, changed = random_bytes(64, 6), random_bytes(64, 7)
    encoded, _ = encode(base, changed, 2)
    for match, call in {
        "those of 64": lambda: ops.apply_changes(encoded, base[:32]),
        "128 bytes, got those of 64": lambda: ops.check_changes(encoded, 128),
        "no encoded changes": lambda: ops.apply_changes(random_bytes(64, 8), base),
        "too early": lambda: ops.check_changes(torch.cat([encoded, encoded[:1]]), 64),
        "0 bytes, got those of 64": lambda: ops.check_changes(torch.cat([encoded, encoded]), 64),
        "format 1, got 9": lambda: ops.check_changes(torch.cat([encoded[:4], torch.tensor([9], dtype=torch.uint8)]), 64),
        "unit of 1, 2, 4 or 8": lambda: encode(base, changed, 3),
        "multiple of 8": lambda: encode(base[:60], changed[:60], 8),
        "64 changed bytes": lambda: encode(base, changed[:60], 2),
        "room for 81": lambda: ops.encode_changes(base, changed, 2, torch.empty(80, dtype=torch.uint8)),
        "other memory": lambda: ops.encode_changes(base[:16], changed[:16], 2, changed),
    }.items():
        must_raise(ValueError, match, call)


@settings(max_examples=150)
@given(size=st.integers(0, 300), seed=st.integers(0, 9), data=st.data())
def test_a_checksum_sees_every_bit(size: int, seed: int, data: st.DataObject) -> None:
    bytes_ = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    before = ops.checksum(bytes_)
    assert 0 < before < 1 << 64
    assert before == ops.checksum(bytes_.clone())
    assert before != ops.checksum(torch.cat([bytes_, torch.zeros(1, dtype=torch.uint8)]))
    if size:
        bytes_[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
        assert before != ops.checksum(bytes_)


def reference(data: bytes) -> int:
    """The checksum as csrc/digest.cpp describes it."""

    def step(lane: int, word: int) -> int:
        product = (lane ^ word) * 0x9E3779B97F4A7C15
        return product % (1 << 64) ^ product >> 64

    lanes = [1, 2, 3, 4]
    for at in range(0, len(data), 32):
        block = data[at : at + 32].ljust(32, b"\0")
        lanes = [step(lane, int.from_bytes(block[8 * i : 8 * i + 8], "little")) for i, lane in enumerate(lanes)]
    return functools.reduce(step, lanes, len(data)) or 1


@pytest.mark.parametrize("size", [0, 1, 7, 8, 31, 32, 33, 64, 100, 1000])
def test_a_checksum_is_that_of_the_description(size: int) -> None:
    """Whatever instructions the machine has: ranks of different machines compare theirs."""
    data = bytes(i * 37 % 256 for i in range(size))
    assert ops.checksum(torch.tensor(list(data), dtype=torch.uint8)) == reference(data)
    must_raise(ValueError, "checksum: expected a contiguous tensor", ops.checksum, torch.zeros(4, 4)[:, 1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_signs_do_not_undo_each_other(dtype: torch.dtype) -> None:
    """A multiplication alone passes a change of the highest bit on as it is, which another sign could undo."""
    per_word = 8 // dtype.itemsize
    values = torch.arange(1, 1 + 12 * per_word).to(dtype)
    of_one_lane = [4 * word * per_word + element for word in range(3) for element in range(per_word)]
    flips = [chosen for count in range(5) for chosen in itertools.combinations(of_one_lane, count)]
    seen = set()
    for chosen in flips:
        changed = values.clone()
        changed[list(chosen)] *= -1
        seen.add(ops.checksum(changed))
    assert len(seen) == len(flips)


@settings(max_examples=200)
@given(problem=problems())
def test_digests_are_those_of_the_regions(problem: Problem) -> None:
    """Digests of tensors are of the region's elements one after the other, those of a bucket of what unpacking makes of it."""
    bucket, tensors = problem.bucket(), problem.tensors([base.clone() for base in problem.bases])
    table = table_of(problem.rows, problem.dims)
    ops.unpack(bucket, tensors, table)
    boxes = [
        tensors[row.tensor][tuple(slice(a, a + n) for a, n in zip(row.start, row.size, strict=True))] for row in problem.rows
    ]
    digests = ops.digest_tensors(tensors, table).tolist()
    assert [digest & (1 << 64) - 1 for digest in digests] == [ops.checksum(box.contiguous()) for box in boxes]
    for row, number in zip(table, table[:, 0].tolist(), strict=True):
        row[0] = dtypes.code(tensors[number].dtype)
    assert ops.digest_bucket(bucket, table).tolist() == digests


def test_a_table_that_reaches_outside_the_bucket_is_refused() -> None:
    bucket = torch.zeros(64, dtype=torch.uint8)
    good = torch.tensor([[dtypes.code(torch.float32), 0, dtypes.code(torch.float32), 1, 0, 16, 1]])
    ops.digest_bucket(bucket, good)
    for column, value, text in (
        (0, 999, "dtype code"), (1, -1, "outside the bucket"), (1, 61, "outside the bucket"), (2, 999, "dtype code"),
        (3, 2, "dims"), (5, 17, "outside the bucket"), (5, -1, "negative"), (6, 1 << 62, "outside the bucket"),
    ):  # fmt: skip
        table = good.clone()
        table[0, column] = value
        must_raise(ValueError, text, ops.digest_bucket, bucket, table)
