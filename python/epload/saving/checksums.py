"""Writes the digests of a new checkpoint's files next to them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from epload.checkpoint import checksums
from epload.checkpoint.local_store import LocalFile
from epload.core.attempt import Attempt
from epload.ranks.control import Control
from epload.saving.folder import NewFolder
from epload.transfer.affinity import read_threads

Digests = Mapping[str, Sequence[str]]
"""The digests of the chunks of files, by their names."""


def hash_files(folder: NewFolder, control: Control) -> Digests:
    """Reads the files that all ranks have written, and returns their digests, on the first rank. Collective: each rank hashes
    some of the chunks. Raises LoadError, the same on every rank."""
    ranks, names = control.ranks, folder.layout.names
    index = ranks.index(control.rank)

    def hash_own() -> list[str]:
        with (
            control.working("hashes its part of the checkpoint") as done,
            ThreadPoolExecutor(read_threads(len(ranks))) as pool,
        ):
            files = [LocalFile(folder.path_of(number)) for number in range(len(names))]
            chunks = [(file, number) for file in files for number in range(checksums.chunk_count(file.nbytes))]
            hash_chunk = partial(checksums.hash_chunk, done=done)
            return list(pool.map(lambda chunk: hash_chunk(*chunk), chunks[index :: len(ranks)]))

    own = Attempt(hash_own)
    control.agree("hashing the files", own.failure, patience=2)
    received = control.exchange("the digests of files", {ranks[0]: json.dumps(own.value).encode()})
    if index > 0:
        return {}
    shares = [iter(json.loads(received[rank])) for rank in ranks]
    digests: dict[str, list[str]] = {name: [] for name in names}
    turn = 0
    for number, name in enumerate(names):
        for _ in range(checksums.chunk_count(folder.path_of(number).stat().st_size)):
            digests[name].append(next(shares[turn % len(ranks)]))
            turn += 1
    return digests


def publish(folder: Path, digests: Digests) -> str:
    """Writes the list of all files of a folder, those that are not hashed yet included. Returns its digest. Raises OSError."""
    files = [LocalFile(path) for path in sorted(folder.iterdir())]
    known = {
        file.name: digests.get(file.name)
        or [checksums.hash_chunk(file, number) for number in range(checksums.chunk_count(file.nbytes))]
        for file in files
    }
    content = checksums.render({file.name: file.nbytes for file in files}, known)
    with open(folder / checksums.FILE, "xb") as stream:
        stream.write(content)
    return checksums.digest_of(content)
