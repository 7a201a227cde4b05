"""Compares the files of a checkpoint with published checksums, before a load changes anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from epload.checkpoint.checksums import AnyChecksums, Checksums, HashedPart
from epload.core.attempt import Attempt
from epload.loading.agreed import AgreedLoad
from epload.observe.render import count
from epload.ranks.topology import Topology
from epload.report import LoadReport
from epload.transfer.affinity import read_threads


def check_files(given: AnyChecksums, load: AgreedLoad, topology: Topology, report: LoadReport) -> None:
    """Compares all files with the list that the caller gives, if it does. Collective.

    Ranks that have opened the same files, in one file system, share them. Others, such as those of a node that has a copy on its
    own disk, compare theirs.

    Raises:
        LoadError, ValueError, TypeError: the same on every rank; CheckpointError if a file is another one, or is not in the list.
    """
    if given is False:
        return
    control, checkpoint = topology.control, load.inputs.checkpoint
    own: Attempt[tuple[Checksums, list[HashedPart]] | None] = Attempt(lambda: None)
    if checkpoint is not None:

        def read() -> tuple[Checksums, list[HashedPart]]:
            checksums = Checksums.read(given, checkpoint)
            return checksums, checksums.parts(checkpoint.files)

        own = Attempt(read)
    view = None
    if own.result is not None and checkpoint is not None:
        view = [own.result[0].identity, [file.version for file in checkpoint.files]]
    shares = control.agree("reading the checksums", own.failure, view, _share)
    failure = None
    if own.value is not None and checkpoint is not None:
        checksums, parts = own.value
        first, step = shares[str(topology.rank)]
        with report.timed("verify"), control.working("compares the files with their checksums") as done:
            index = [part for part in checksums.parts(checkpoint.descriptions, required=False) if not first]
            failure = Attempt(
                lambda: hash_all([*index, *parts[first::step]], checksums.source, len(topology.node), done)
            ).failure
        report.hashed = sum(part.nbytes for part in parts[first::step])
        report.checksums = f"{count(len(checkpoint.files), 'file')} compared with {checksums.source}"
    control.agree("comparing the files with their checksums", failure, patience=2)


def hash_all(parts: Sequence[HashedPart], source: str, ranks: int, done: Callable[[int], None]) -> None:
    """Compares parts of files with their digests, by some threads. Raises CheckpointError for the first of those that differ.

    Args:
        ranks: number of ranks of this node.
    """
    if not parts:
        return
    with ThreadPoolExecutor(read_threads(ranks)) as pool:
        attempts = list(pool.map(lambda part: Attempt(lambda: part.check(source, done)), parts))
    if failure := next(filter(None, (attempt.failure for attempt in attempts)), None):
        raise failure


def _share(views: dict[int, Any]) -> dict[int, tuple[int, int]]:
    """Returns for each rank that has files which of their parts it hashes: the first, and the distance to the next. Called on the
    coordinator. Raises ValueError if ranks pass different lists."""
    lists = {rank: view[0] for rank, view in views.items() if view is not None}
    for rank, identity in lists.items():
        if identity != lists[first := min(lists)]:
            raise ValueError(f"ranks {first} and {rank} pass different checksums; pass the same list on every rank")
    alike: dict[str, list[int]] = {}
    for rank in sorted(lists):
        versions = views[rank][1]
        alike.setdefault(repr(versions) if all(versions) else f"rank {rank}", []).append(rank)
    return {rank: (members.index(rank), len(members)) for members in alike.values() for rank in members}
