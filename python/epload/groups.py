"""Makes c10d groups by their members alone, so that a part of a job can make them without the rest.

``dist.new_group`` either needs every rank of the job to call it for every group (at N nodes, N barriers of the whole job), or,
with ``use_local_synchronization``, names the group after its ranks and *how many groups this process is in already* (torch
2.11 to 2.15, ``distributed_c10d._hash_ranks_to_str``). Members that are in different numbers of groups then wait for each other
under different names for ever. So the members first bring that number level, with groups of one rank that are never used.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import distributed_c10d


def count() -> int:
    """How many groups this process is in."""
    return len(distributed_c10d._world.pg_names)


def level(to: int) -> None:
    """Brings :func:`count` to ``to``, which is no less than it is."""
    while (have := count()) < to:
        dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if count() == have:  # another torch counts otherwise; going on would hang
            raise RuntimeError(
                "cannot make process groups by their members alone with this torch; use an older epload or torch"
            )


def make(ranks: Sequence[int], timeout: timedelta, like: dist.ProcessGroup) -> str:
    """Name of a new group, with the backends of ``like``. All of ``ranks`` call this at one level."""
    backends = dist.get_backend_config(like)
    other = backends if backends != dist.get_backend_config() else None  # None: the job's
    made = dist.new_group(sorted(ranks), timeout=timeout, backend=other, use_local_synchronization=True)
    return str(made.group_name)
