"""The ranks that a topology covers, and the machine that each runs on."""

from __future__ import annotations

import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch.distributed as dist

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def machine_identity() -> str:
    """Returns the kernel's boot id: equal on two processes exactly if they run on the same machine."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return f"{platform.node()}-{uuid.getnode():x}"


def namespace(kind: str) -> str:
    """Returns a text that is equal on two processes exactly if they share a machine and a namespace of this kind."""
    try:
        return f"{machine_identity()} {os.readlink(f'/proc/self/ns/{kind}')}"
    except OSError:
        return f"{machine_identity()} ?"


def local_network() -> str:
    """Returns a text that is equal on two processes exactly if they can connect to each other inside their machine."""
    return namespace("net")


def group_equal(of_rank: Mapping[int, str]) -> list[list[int]]:
    """Returns the ranks that have each text, in the order of the ranks."""
    ranks_of: dict[str, list[int]] = {}
    for rank, text in sorted(of_rank.items()):
        ranks_of.setdefault(text, []).append(rank)
    return list(ranks_of.values())


def first_difference(views: Mapping[int, object]) -> tuple[int, int] | None:
    """Returns the first rank, and the first one that has another view than it; None if all are equal."""
    first = min(views)
    return next(((first, rank) for rank in sorted(views) if views[rank] != views[first]), None)


def membership(group: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, int, tuple[int, ...]]:
    """Resolves ``group``, by default the whole job.

    Returns:
        The group, None without ``torch.distributed``; this process's global rank; the sorted global ranks of the group.

    Raises:
        ValueError, TypeError: this process is not in the group, or it is no group.
    """
    if not dist.is_initialized():
        if group is not None:
            raise ValueError("got a process group, but torch.distributed is not initialized")
        return None, 0, (0,)
    if group is not None and not isinstance(group, dist.ProcessGroup):
        if group == dist.GroupMember.NON_GROUP_MEMBER:
            raise ValueError(f"rank {dist.get_rank()} is not in the group")
        raise TypeError(f"expected group to be a torch.distributed.ProcessGroup, got {group!r}")
    group = group or dist.group.WORLD
    assert group is not None
    rank, ranks = dist.get_rank(), tuple(sorted(dist.get_process_group_ranks(group)))
    if rank not in ranks:
        raise ValueError(f"rank {rank} is not in the group of ranks {list(ranks)}")
    return group, rank, ranks


def check_partition(nodes: list[list[int]], ranks: Sequence[int]) -> None:
    """Raises ValueError if ``nodes`` is not a partition of ``ranks``."""
    listed = {rank for node in nodes for rank in node}
    if not all(nodes) or len(listed) != sum(map(len, nodes)):
        raise ValueError(f"expected nodes that are not empty and share no rank, got {nodes}")
    if unknown := sorted(listed - set(ranks)):
        raise ValueError(f"nodes list ranks {unknown}, which are not among the group's ranks {list(ranks)}")
    if missing := sorted(set(ranks) - listed):
        raise ValueError(
            f"ranks {missing} are in no node of {nodes}; list every rank of the group, or pass group= with the ranks that load "
            "together"
        )


def uninitialized_warning() -> str:
    """Returns a warning if a launcher has started several ranks but ``torch.distributed`` is not initialized; else empty."""
    rank, size = os.environ.get("RANK"), os.environ.get("WORLD_SIZE", "1")
    if rank is None or size in ("", "1") or dist.is_initialized():
        return ""
    return (
        f"WORLD_SIZE is {size}, but torch.distributed is not initialized, so rank {rank} loads alone, as does "
        "every other rank: each reads the whole checkpoint. Call torch.distributed.init_process_group() before epload"
    )
