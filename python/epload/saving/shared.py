"""Checks that the ranks of a save write to one file system, before any tensor is written."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from epload.core.attempt import Attempt
from epload.errors import LoadError
from epload.observe.render import list_first
from epload.ranks.topology import Topology
from epload.saving.folder import NewFolder

_ONE_NODE = "to the disk of one node, with topology=Topology.discover(group) over that node's ranks"


def check_shared(topology: Topology, folder: NewFolder) -> None:
    """Collective. If ranks of several nodes write to one file, the first of each node writes a byte to a file, as not every file
    system keeps all of them.

    Raises:
        LoadError: a rank does not see the folder that the first rank has made, or a byte is lost; the same on every rank.
    """
    control, path, nodes = topology.control, folder.temporary / "probe", topology.nodes
    is_first, is_leader = topology.rank == topology.ranks[0], topology.rank == topology.node[0]
    is_probed = len(nodes) > 1 and any(folder.layout.sizes)  # a save of changes has a file for each rank
    made = Attempt(lambda: _make(path, len(nodes)) if is_first and is_probed else None)
    is_seen = folder.temporary.is_dir()
    control.agree("finding the folder", made.failure, is_seen, lambda views: _check_seen(folder.path.parent, views))
    if is_probed:
        wrote = Attempt(lambda: _write(path, nodes.index(topology.node), folder.path.parent) if is_leader else None)
        control.agree("writing a byte of each node", wrote.failure)
        found = Attempt(lambda: _check_written(path, folder.path.parent, nodes) if is_first else None)
        control.agree("reading the byte of each node", found.failure)


def _check_seen(parent: Path, seen: Mapping[int, bool]) -> None:
    """Raises LoadError unless every rank sees the hidden folder that the first rank has made in ``parent``.

    The folder's name is that of no other save, so that a rank does not see another one in its place.
    """
    if others := [rank for rank, sees in seen.items() if not sees]:
        raise LoadError(
            f"{parent} is on several file systems: ranks {list_first(others)} do not see the folder that rank "
            f"{min(seen)} has made there, and nothing was saved; save to a folder that all nodes share, or {_ONE_NODE}"
        )


def _make(path: Path, nbytes: int) -> None:
    with open(path, "xb") as stream:
        stream.truncate(nbytes)  # without a write, as in NewFolder.create()


def _write(path: Path, offset: int, parent: Path) -> None:
    """Raises LoadError if the byte cannot be written."""
    try:
        fd = os.open(path, os.O_WRONLY)
        try:
            os.pwrite(fd, b"\1", offset)
            os.fsync(fd)
        finally:
            os.close(fd)
    except OSError as error:
        raise LoadError(
            f"{parent} does not let several nodes write to one file ({error.strerror}), and nothing was saved; save to a file "
            f"system that does, such as NFS or Lustre, or {_ONE_NODE}"
        ) from error


def _check_written(path: Path, parent: Path, nodes: Sequence[Sequence[int]]) -> None:
    """Raises LoadError if a byte is lost. Deletes the file."""
    content = path.read_bytes().ljust(len(nodes), b"\0")
    path.unlink()
    if lost := [node[0] for node, byte in zip(nodes, content, strict=True) if byte != 1]:
        raise LoadError(
            f"{parent} does not keep what several nodes write to one file: a byte of each of ranks {list_first(lost)} is lost, "
            f"and nothing was saved; save to a file system that keeps it, such as NFS or Lustre, or {_ONE_NODE}"
        )
