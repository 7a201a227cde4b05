"""Writes the digests of a new checkpoint's files next to them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path

from epload.checkpoint import checksums, file_sets
from epload.core import threads
from epload.core.attempt import Attempt
from epload.ranks.topology import Topology
from epload.saving.folder import NewFolder
from epload.transfer.affinity import read_threads

Digests = Mapping[str, Sequence[str]]
"""The digests of the chunks of files, by their names."""


def hash_files(folder: NewFolder, topology: Topology) -> Digests:
    """Reads the files that all ranks have written, and returns their digests, on the first rank. Collective: each rank hashes
    some of the chunks. Raises LoadError, the same on every rank."""
    control, ranks = topology.control, topology.control.ranks
    paths = [folder.path_of(number) for number in range(len(folder.layout.names))]
    index = ranks.index(control.rank)

    def hash_own() -> list[str]:
        chunks = [(path, number) for path in paths for number in _chunks(path)][index :: len(ranks)]
        with control.working("hashes its part of the checkpoint") as done:
            steps = [partial(checksums.hash_chunk, *chunk, done) for chunk in chunks]
            return threads.run_all("epload-hash", steps, read_threads(len(topology.node)))

    own = Attempt(hash_own)
    control.agree("hashing the files", own.failure, patience=2)
    received = control.exchange("the digests of files", {ranks[0]: json.dumps(own.value).encode()})
    if index > 0:
        return {}
    shares = cycle([iter(json.loads(received[rank])) for rank in ranks])
    return {path.name: [next(next(shares)) for _ in _chunks(path)] for path in paths}


def publish(folder: Path, digests: Digests) -> str:
    """Writes the list of all files of a folder, those that are not hashed yet included. Returns its digest. Raises OSError."""
    files = {}
    for path in sorted(folder.iterdir()):
        known = digests.get(path.name) or [checksums.hash_chunk(path, number) for number in _chunks(path)]
        files[path.name] = {"bytes": path.stat().st_size, "chunks": known}
    described = {"algorithm": "sha256", "chunk_bytes": checksums.CHUNK_BYTES, "files": files}
    content = json.dumps(described, indent=1).encode()
    with open(folder / file_sets.CHECKSUMS, "xb") as stream:
        stream.write(content)
    return checksums.PREFIX + hashlib.sha256(content).hexdigest()


def _chunks(path: Path) -> range:
    return range(checksums.chunk_count(path.stat().st_size, checksums.CHUNK_BYTES))
