"""Digests of regions: what a rank claims to hold, how claims are sent, and how they compare with what the files hold."""

from __future__ import annotations

import ctypes
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from epload.core.copy_table import CopyTable


class LocalRegions(NamedTuple):
    """The regions of one bucket that this rank holds."""

    bucket: int
    targets: list[int]
    table: Tensor
    """A copy table; column 0 is an index into ``targets``."""


class Claim(NamedTuple):
    """The rows of a table of regions and the digests of a rank that belong together."""

    rank: int
    digests: slice
    rows: slice
    """Ranks that hold the same regions share rows."""


class BucketClaims(NamedTuple):
    """The parts of one bucket that all ranks claim to hold."""

    bucket: int
    table: Tensor
    """A copy table of the regions; column 0 is the code of the shard's dtype."""
    origins: Tensor
    """See ``buckets.Bucket.origins``."""
    claims: list[Claim]

    def mismatches(self, expected: Tensor, digests: Mapping[int, Tensor]) -> list[tuple[int, int]]:
        """Tensors whose digest is not the one expected, by index in the manifest, each with the rank that claims it.

        Args:
            expected: int64 [n], for each region the digest that it should have.
            digests: int64, all digests that each rank sent.
        """
        found = []
        for rank, part, rows in self.claims:
            differs = expected[rows] != digests[rank][part]
            found += [(tensor, rank) for tensor in self.origins[rows][differs, 0].tolist()]
        return found


# ---- what travels ----


def encode_tables(regions: Sequence[tuple[int, Tensor]]) -> bytes:
    """Compresses copy tables, each with the index of its bucket; empty if there are none."""
    # Column by column: most values in a column are equal.
    words = [part for bucket, table in regions for part in (torch.tensor([bucket, *table.shape]), table.T.reshape(-1))]
    return zlib.compress(_bytes(torch.cat(words)), level=1) if words else b""


def decode_tables(tables: bytes) -> Iterator[tuple[int, Tensor]]:
    """The inverse of :func:`encode_tables`."""
    words = torch.frombuffer(bytearray(zlib.decompress(tables)), dtype=torch.int64)
    position = 0
    while position < len(words):
        bucket, rows, columns = words[position : position + 3].tolist()
        position += 3
        yield bucket, words[position : position + rows * columns].view(columns, rows).T.contiguous()
        position += rows * columns


def encode(tables: bytes, digests: Sequence[Tensor]) -> bytes:
    """Encoded tables with the digests of their regions; empty if there are none."""
    return len(tables).to_bytes(8, "little") + tables + _bytes(torch.cat(list(digests))) if digests else b""


def decode(message: bytes) -> tuple[bytes, Tensor]:
    """The inverse of :func:`encode`."""
    begin = 8 + int.from_bytes(message[:8], "little")
    return message[8:begin], torch.frombuffer(bytearray(message[begin:]), dtype=torch.int64)


# ---- the claims of all ranks ----


def claims_by_bucket(tables: Mapping[int, bytes]) -> dict[int, tuple[Tensor, list[Claim]]]:
    """Returns for each bucket one table of all regions, and the claims of each rank.

    Args:
        tables: what :func:`encode_tables` returned on each rank.
    """
    decoded = {rank: list(decode_tables(data)) for rank, data in tables.items()}
    # A rank's tables are as wide as its own targets require.
    columns = max((table.shape[1] for regions in decoded.values() for _, table in regions), default=0)
    parts: dict[int, list[tuple[int, slice, Tensor]]] = {}
    for rank, regions in decoded.items():
        first = 0
        for bucket, table in regions:
            part = slice(first, first + len(table))
            wide = table if table.shape[1] == columns else CopyTable(table).widened(columns)
            parts.setdefault(bucket, []).append((rank, part, wide))
            first = part.stop
    return {bucket: _merged(parts[bucket]) for bucket in sorted(parts)}


def _merged(parts: Sequence[tuple[int, slice, Tensor]]) -> tuple[Tensor, list[Claim]]:
    """One table, in which equal ones are there once."""
    rows_of: dict[bytes, slice] = {}
    tables: list[Tensor] = []
    claims = []
    length = 0
    for rank, digests, table in parts:
        raw = _bytes(table)
        if raw not in rows_of:
            rows_of[raw] = slice(length, length + len(table))
            tables.append(table)
            length += len(table)
        claims.append(Claim(rank, digests, rows_of[raw]))
    return torch.cat(tables), claims


def _bytes(words: Tensor) -> bytes:
    """The bytes of a contiguous tensor."""
    return ctypes.string_at(words.data_ptr(), words.nbytes)
