"""Chooses the readers of a load with ``readers="auto"``: a rule over what all ranks know before data moves. Pure."""

from __future__ import annotations

from collections.abc import Sequence

SMALL_BYTES = 64 << 20
"""Every rank reads its own part if none reads more bytes than this: nothing else would pay for its buffers and groups."""
MAX_OBJECT_READS = 1.25
"""Times that object storage may be read: nothing is cached there, and each byte takes the network and may be billed."""
MAX_FILE_READS = 4.0
"""Times that files may be read. A node's own disk serves its node whatever the others do, and a shared file system serves a few
readers of the same bytes well; sending buckets instead makes every node wait for the slowest reader and link."""


def choose_readers(total: int, owned: Sequence[Sequence[int]], *, all_read: bool, objects: bool, src: int) -> tuple[str, str]:
    """Chooses who reads the checkpoint.

    Args:
        total: bytes of the load.
        owned: for each node, the bytes that each of its ranks would read if it read its own shards.
        all_read: True if every rank can read the checkpoint.
        objects: True if it is in object storage, where nothing is cached; the ranks of a node share the page cache of files.
        src: the global rank that surely has the checkpoint.

    Returns:
        The readers, and the reason in words.
    """
    if not all_read:
        return "one", f"auto -> one: only rank {src} is known to have the checkpoint"
    if max(map(max, owned)) <= SMALL_BYTES:
        return "every", "auto -> every: per-rank data is small, so each rank reads its own shards"
    read = sum(sum(node) if objects else min(total, sum(node)) for node in owned)
    times = read / total
    if times <= (MAX_OBJECT_READS if objects else MAX_FILE_READS):
        return "every", f"auto -> every: storage is read {times:.1f} times"
    return (
        "partitioned",
        f"auto -> partitioned: with every rank reading its own shards, storage would be read {times:.1f} times",
    )
