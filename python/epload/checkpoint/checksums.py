"""Published checksums of files: lists in the format of sha256sum, digests of chunks in a ``checksums.json``, and what the cache
of the Hugging Face Hub knows. They say that files are those that somebody has described; who that was, they do not say."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path, PurePosixPath
from posixpath import normpath
from typing import Any, NamedTuple, TypeAlias

import torch

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import ByteStore, Progress, StoredFile
from epload.checkpoint.file_sets import CHECKSUMS
from epload.checkpoint.index import without_duplicates
from epload.checkpoint.local_store import LocalFile
from epload.core.buffers import as_memoryview
from epload.errors import CheckpointError, redact
from epload.files import read_regular

CHUNK_BYTES = 64 << 20
"""Bytes of the chunks whose digests ``checksums.json`` has."""
AnyChecksums: TypeAlias = bool | str | os.PathLike[str] | Mapping[str, str]
"""True for those that are published next to the files; the digest ``"sha256:HEX"`` of the ``checksums.json`` next to them; the
path of a list, in the format of sha256sum or of ``checksums.json``; or a dict of sha256 digests by file name. False for none."""
_READ_BYTES = 4 << 20
PREFIX = "sha256:"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_IN_CACHE = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")
"""Digest of a file in the cache of the Hub: sha256, or the one that git has for it."""
_LINE = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")
"""A line of sha256sum."""


class FileDigests(NamedTuple):
    """The published digests of one file."""

    digests: tuple[str, ...]
    """Lowercase hexadecimal: sha256 of the file or of each of its chunks; or one that git has for the file, of 40 digits."""
    chunk_bytes: int = 0
    """Bytes of a chunk, of which the last may have fewer; 0 if the digest is of the whole file."""
    nbytes: int | None = None
    """Bytes of the file, if they are known."""


class HashedPart(NamedTuple):
    """A part of a file that is hashed at once."""

    file: StoredFile
    read: Callable[[int, int], Any]
    """Returns bytes of the file, by their offset and number."""
    offset: int
    nbytes: int
    digest: str
    """The published one."""

    def check(self, source: str, done: Progress) -> None:
        """Reads the part, and compares its digest. Raises CheckpointError, naming the file and the chunk, if it is another."""
        is_git = len(self.digest) == 40
        digest = hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False) if is_git else hashlib.sha256()
        _hash(self.read, self.offset, self.nbytes, digest, done)
        if digest.hexdigest() != self.digest:
            whole = self.nbytes == self.file.nbytes
            what = "it has" if whole else f"its bytes {self.offset} to {self.offset + self.nbytes} have"
            raise CheckpointError(
                f"{self.file} is not the file that {source} describes: {what} the digest {digest.hexdigest()} in place of "
                f"{self.digest}; download or copy it again"
            )


@dataclass(frozen=True)
class Checksums:
    """A list of published digests."""

    source: str
    """The path of the list, or who has it, for messages."""
    files: Mapping[str, FileDigests]
    """The digests of each file, by its name, or its path in the folder."""

    @property
    def identity(self) -> str:
        """A digest of the whole list, for ranks to compare."""
        return hashlib.sha256(repr(sorted(self.files.items())).encode()).hexdigest()

    @cached_property
    def _by_name(self) -> dict[str, set[FileDigests]]:
        by_name: dict[str, set[FileDigests]] = {}
        for path, digests in self.files.items():
            by_name.setdefault(PurePosixPath(path).name, set()).add(digests)
        return by_name

    @classmethod
    def read(cls, given: AnyChecksums, checkpoint: Checkpoint) -> Checksums:
        """Reads what a caller passes.

        Args:
            checkpoint: the checkpoint whose files are meant.

        Raises:
            CheckpointError: there is no list, or it cannot be read, or has another digest than is given.
            ValueError, TypeError: ``given`` is nothing that names one, or the checkpoint has no files to compare.
        """
        store = checkpoint._store
        if store is None or not checkpoint.files:
            raise ValueError(
                f"checksums= compares the files of a checkpoint, and {redact(checkpoint.manifest.source)} has none of its own: "
                "leave it out"
            )
        if isinstance(given, Mapping):
            digests = {name: FileDigests((str(digest).lower().removeprefix(PREFIX),)) for name, digest in given.items()}
            return cls("checksums=", _checked(digests, "checksums="))
        if given is True:
            return cls._next_to(checkpoint, "")
        if isinstance(given, str) and given.startswith(PREFIX):
            if not _SHA256.fullmatch(digest := given.removeprefix(PREFIX).lower()):
                raise ValueError(f"expected checksums='sha256:' and 64 hexadecimal digits, got {given!r}")
            return cls._next_to(checkpoint, digest)
        if not isinstance(given, str | os.PathLike):
            raise TypeError(f"expected checksums to be True, a path, 'sha256:HEX' or a dict of digests, got {given!r}")
        try:
            return cls.parse(read_regular(given), os.fspath(given))
        except OSError as error:
            raise CheckpointError(f"cannot read the checksums in {given}: {error.strerror}") from error

    @classmethod
    def _next_to(cls, checkpoint: Checkpoint, digest: str) -> Checksums:
        """``digest``: expected of the list itself; empty for any, also those of the Hub's cache."""
        store = checkpoint._store
        assert store is not None
        path = store.path_of(CHECKSUMS)
        try:
            raw = store.peek(CHECKSUMS)
        except FileNotFoundError:
            digests = {file.name: store.published(file) for file in (*store.files, *store.descriptions)}
            published = {name: FileDigests((known,)) for name, known in digests.items() if _IN_CACHE.fullmatch(known)}
            if digest or not published:
                raise CheckpointError(
                    f"no checksums are published next to {store}: it has no {CHECKSUMS}; pass the path of a list, in the format "
                    "of sha256sum"
                ) from None
            return cls("the Hugging Face Hub", published)
        except OSError as error:
            raise CheckpointError(f"cannot read the checksums in {path}: {error.strerror or error}") from error
        if digest and (actual := hashlib.sha256(raw).hexdigest()) != digest:
            raise CheckpointError(f"{path} is not the one that was asked for: expected {PREFIX}{digest}, got {PREFIX}{actual}")
        return cls.parse(raw, path)

    @classmethod
    def parse(cls, raw: bytes, source: str) -> Checksums:
        """Parses a list. Raises CheckpointError if it is malformed."""
        if raw.lstrip()[:1] == b"{":
            return cls(source, _checked(_parse_chunks(raw, source), source))
        files: dict[str, FileDigests] = {}
        for number, line in enumerate(raw.decode(errors="replace").splitlines(), 1):
            if not line.strip() or line.startswith("#"):
                continue
            if (match := _LINE.fullmatch(line)) is None:
                raise CheckpointError(
                    f"{source}: expected lines of sha256sum, a digest of 64 digits, two spaces and a name, got line {number}: "
                    f"{line[:120]!r}"
                )
            digests = FileDigests((match[1].lower(),))
            if files.setdefault(normpath(match[2]), digests) != digests:
                raise CheckpointError(f"{source} has two digests of {match[2]}; remove one of them")
        return cls(source, _checked(files, source))

    def parts(self, checkpoint: Checkpoint) -> list[HashedPart]:
        """Returns the parts of the files with tensors that are to be hashed. Raises as :meth:`parts_of`."""
        store, parts = checkpoint._store, []
        assert store is not None
        for number, file in enumerate(checkpoint.files):
            if isinstance(file, LocalFile):
                parts += self.parts_of(file, file.read)
                file.fd  # noqa: B018 opens it before threads read it, if it was closed
            else:
                parts += self.parts_of(file, partial(_read, store, number))
        return parts

    def other_parts(self, checkpoint: Checkpoint) -> list[HashedPart]:
        """Returns the same for the other files that a load follows: an index, which has to be listed, and configurations, which
        are compared if they are. Raises as :meth:`parts_of`."""
        store, parts = checkpoint._store, []
        assert store is not None
        for file in store.descriptions:
            parts += self.parts_of(file, file.read)
        for name in sorted({*store.peeked} & {*self._by_name}):
            (file,) = store.open_files([name])
            parts += self.parts_of(file, file.read)
        return parts

    def parts_of(self, file: StoredFile, read: Callable[[int, int], Any]) -> list[HashedPart]:
        """Returns the parts of a file. Raises CheckpointError if the list does not name the file, or names several, or describes
        one of another size."""
        named = self._by_name.get(file.name, set())
        if len(named) > 1:
            raise CheckpointError(f"{self.source} names several files {file.name}, in other folders; pass a list of one folder")
        if not named:
            raise CheckpointError(
                f"{self.source} has no digest of {file.name}, so that nothing proves what is in it; pass a list of all files"
            )
        (known,) = named
        chunk_bytes = known.chunk_bytes or max(file.nbytes, 1)
        if chunk_count(file.nbytes, chunk_bytes) != len(known.digests) or known.nbytes not in (None, file.nbytes):
            expected = "" if known.nbytes is None else f" in place of {known.nbytes}"
            raise CheckpointError(
                f"{file} is not the file that {self.source} describes: it has {file.nbytes} bytes{expected}; download or copy it "
                "again"
            )
        begins = range(0, max(file.nbytes, 1), chunk_bytes)
        return [
            HashedPart(file, read, begin, min(chunk_bytes, file.nbytes - begin), digest)
            for begin, digest in zip(begins, known.digests, strict=True)
        ]


def _read(store: ByteStore, number: int, offset: int, nbytes: int) -> memoryview:
    """Returns bytes of one of the files with tensors of a store that is not local."""
    buffer = torch.empty(nbytes, dtype=torch.uint8)
    store.read(torch.tensor([[number, offset, 0, nbytes]]), buffer)
    return as_memoryview(buffer)


def _hash(read: Callable[[int, int], Any], offset: int, nbytes: int, digest: Any, done: Progress) -> None:
    end = offset + nbytes
    while offset < end:
        data = read(offset, min(_READ_BYTES, end - offset))
        if not data:
            raise CheckpointError(f"a file ends at byte {offset}, and had more bytes when it was opened; load again")
        digest.update(data)
        offset += len(data)
        done(len(data))


def _parse_chunks(raw: bytes, source: str) -> dict[str, FileDigests]:
    """Returns the content of a ``checksums.json``. Raises CheckpointError."""
    try:
        content = json.loads(raw, object_pairs_hook=without_duplicates)
        chunk_bytes, files = content["chunk_bytes"], {}
        if content["algorithm"] != "sha256" or type(chunk_bytes) is not int or chunk_bytes < 1:
            raise ValueError(f"algorithm {content['algorithm']!r}, chunk_bytes {chunk_bytes!r}")
        for name, entry in content["files"].items():
            if type(entry["bytes"]) is not int or not isinstance(entry["chunks"], list):
                raise ValueError(f"an entry {name!r}")
            chunks = tuple(str(digest).lower() for digest in entry["chunks"])
            files[normpath(name)] = FileDigests(chunks, chunk_bytes, entry["bytes"])
        return files
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'{source} is no list of checksums: expected "algorithm": "sha256", "chunk_bytes" and "files" with "bytes" and '
            f'"chunks" each ({type(error).__name__}: {error})'
        ) from error


def _checked(files: dict[str, FileDigests], source: str) -> dict[str, FileDigests]:
    """Returns them. Raises CheckpointError if there are none, one is no digest, or a file is not in the folder."""
    if not files:
        raise CheckpointError(f"{source} has no digest of any file")
    for name, known in files.items():
        if not known.digests or not all(map(_SHA256.fullmatch, known.digests)):
            raise CheckpointError(
                f"{source}: expected sha256 digests of {name}, of 64 hexadecimal digits, got {known.digests[:1]}"
            )
        if name.startswith("../") or "\0" in name:
            raise CheckpointError(f"{source}: expected names of files in the folder, got {name!r}")
    return files


# ---- publishing them ----


def hash_chunk(path: Path, number: int, done: Progress = lambda nbytes: None) -> str:
    """Returns the sha256 digest of a chunk of a file, by its number."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        begin, end = number * CHUNK_BYTES, stream.seek(0, os.SEEK_END)

        def read(offset: int, nbytes: int) -> bytes:
            stream.seek(offset)
            return stream.read(nbytes)

        _hash(read, begin, min(CHUNK_BYTES, end - begin), digest, done)
    return digest.hexdigest()


def chunk_count(nbytes: int, chunk_bytes: int) -> int:
    """Returns the number of chunks of a file; an empty one has one."""
    return max(1, -(-nbytes // chunk_bytes))
