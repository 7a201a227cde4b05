"""Waves: buckets that share a staging buffer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ALIGNMENT = 64
"""Bytes; where a bucket may start in its wave."""


@dataclass(frozen=True)
class Wave:
    """Buckets that are staged, moved and released together."""

    index: int
    """Position among the waves of its transfer."""
    numbers: Sequence[int]
    """Numbers of its buckets in the plan."""
    begins: tuple[int, ...]
    """Offset of each bucket in the staging buffer, bytes."""
    ends: tuple[int, ...]

    @classmethod
    def of(cls, index: int, numbers: Sequence[int], nbytes: Sequence[int]) -> Wave:
        """``nbytes``: of each bucket."""
        begins, ends = [], [0]
        for size in nbytes:
            begins.append(_aligned(ends[-1]))
            ends.append(begins[-1] + size)
        return cls(index, numbers, tuple(begins), tuple(ends[1:]))

    @property
    def nbytes(self) -> int:
        """Bytes of staging buffer that it takes."""
        return _aligned(self.ends[-1])


def make_waves(sizes: Sequence[int], per_wave: int = 1) -> list[Wave]:
    """Divides buckets of these sizes (bytes) into waves of ``per_wave``; the last may have fewer."""
    numbers = range(len(sizes))
    parts = [numbers[first : first + per_wave] for first in numbers[::per_wave]]
    return [Wave.of(index, part, [sizes[number] for number in part]) for index, part in enumerate(parts)]


def wave_bytes(sizes: Sequence[int], per_wave: int) -> int:
    """Returns the bytes of the largest wave of buckets of these sizes."""
    return max((wave.nbytes for wave in make_waves(sizes, per_wave)), default=0)


def group_buckets(sizes: Sequence[int], limit: int) -> list[range]:
    """Divides consecutive buckets into groups. See :func:`next_group`."""
    groups: list[range] = []
    while not groups or groups[-1].stop < len(sizes):
        groups.append(next_group(sizes, groups[-1].stop if groups else 0, limit))
    return groups if sizes else []


def next_group(sizes: Sequence[int], first: int, limit: int) -> range:
    """Returns bucket ``first`` and those after it that have at most ``limit`` bytes together with it.

    Args:
        sizes: bytes of each bucket that count, which may be fewer than the bucket has.
    """
    end = first
    while end < len(sizes) and (end == first or limit >= sizes[end]):
        limit -= sizes[end]
        end += 1
    return range(first, end)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
