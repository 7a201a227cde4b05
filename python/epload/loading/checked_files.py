"""Compares the files of a checkpoint with published checksums, before a load changes anything."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from epload.checkpoint.checksums import AnyChecksums, Checksums, HashedPart
from epload.core import threads
from epload.core.attempt import Attempt
from epload.loading.agreed import AgreedLoad
from epload.observe.render import count
from epload.ranks.membership import group_equal
from epload.ranks.topology import Topology
from epload.report import LoadReport
from epload.transfer.affinity import read_threads


def check_files(given: AnyChecksums, load: AgreedLoad, topology: Topology, report: LoadReport) -> None:
    """Compares all files with the list that the caller gives, if it does. Collective.

    Ranks of a node that have opened the same files share them, since another node may have another copy. All ranks share objects.

    Raises:
        LoadError, ValueError, TypeError: the same on every rank; CheckpointError if a file is another one, or is not in the list.
    """
    if given is False:
        return
    control, checkpoint, failure = topology.control, load.inputs.checkpoint, None
    listed = Attempt(lambda: None if checkpoint is None else Checksums.read(given, checkpoint))
    view = None
    if listed.result is not None and checkpoint is not None:
        versions = [f"{file} {file.identity}" if file.identity else file.version for file in checkpoint.files]
        where = f"node {topology.nodes.index(topology.node)}" if all(versions) else f"rank {topology.rank}"
        place = versions if all(file.identity for file in checkpoint.files) else [where, *versions]
        view = [listed.result.identity, hashlib.sha256(repr(place).encode()).hexdigest()]
    shares = control.agree("reading the checksums", listed.failure, view, _share)
    if listed.value is not None and checkpoint is not None:
        checksums, (first, step) = listed.value, shares[str(topology.rank)]

        def compare() -> None:
            own = [*checksums.other_parts(checkpoint), *checksums.parts(checkpoint)[first::step]]
            with report.timed("verify"), control.working("compares the files with their checksums") as done:
                check_parts(own, checksums.source, len(topology.node), done)
            report.hashed = sum(part.nbytes for part in own)

        failure = Attempt(compare).failure
        report.checksums = f"{count(len(checkpoint.files), 'file')} compared with {checksums.source}"
    control.agree("comparing the files with their checksums", failure, patience=2)


def check_parts(parts: Sequence[HashedPart], source: str, ranks: int, done: Callable[[int], None]) -> None:
    """Compares parts of files with their digests, by some threads. Raises CheckpointError for the first of those that differ.

    Args:
        ranks: number of ranks of this node.
    """
    threads.run_all("epload-hash", [partial(part.check, source, done) for part in parts], read_threads(ranks))


def _share(views: dict[int, Any]) -> dict[int, tuple[int, int]]:
    """Returns for each rank that has files which of their parts it hashes: the first, and the distance to the next. Called on the
    coordinator. Raises ValueError if ranks pass different lists."""
    lists = {rank: view[0] for rank, view in views.items() if view is not None}
    for rank, identity in lists.items():
        if identity != lists[first := min(lists)]:
            raise ValueError(f"ranks {first} and {rank} pass different checksums; pass the same list on every rank")
    groups = group_equal({rank: views[rank][1] for rank in lists})
    return {rank: (members.index(rank), len(members)) for members in groups for rank in members}
