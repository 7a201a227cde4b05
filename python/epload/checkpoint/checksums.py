"""Published checksums of files: lists in the format of sha256sum, digests of chunks in a ``checksums.json``, and what the cache
of the Hugging Face Hub knows. They say that files are those that somebody has described; who that was, they do not say."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple, TypeAlias

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.byte_store import StoredFile
from epload.errors import CheckpointError, redact
from epload.files import read_regular
from epload.observe.render import list_first

FILE = "checksums.json"
CHUNK_BYTES = 64 << 20
"""Bytes of the chunks whose digests ``checksums.json`` has."""
AnyChecksums: TypeAlias = bool | str | os.PathLike[str] | Mapping[str, str]
"""True for those that are published next to the files; the digest ``"sha256:HEX"`` of the ``checksums.json`` next to them; the
path of a list, in the format of sha256sum or of ``checksums.json``; or a dict of sha256 digests by file name. False for none."""
Done = Callable[[int], None]
"""Called with the number of bytes after each part; may raise to stop."""
_READ_BYTES = 4 << 20
_PREFIX = "sha256:"
_SHA256 = re.compile(r"[0-9a-f]{64}")
_GIT_SHA1 = re.compile(r"[0-9a-f]{40}")
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
    offset: int
    nbytes: int
    digest: str
    """The published one."""

    def check(self, source: str, done: Done) -> None:
        """Reads the part, and compares its digest. Raises CheckpointError, naming the file and the chunk, if it is another."""
        is_git = len(self.digest) == 40
        found = hashlib.sha1(b"blob %d\0" % self.nbytes, usedforsecurity=False) if is_git else hashlib.sha256()
        _hash(self.file, self.offset, self.nbytes, found, done)
        if found.hexdigest() != self.digest:
            whole = self.nbytes == self.file.nbytes
            what = "it has" if whole else f"its bytes {self.offset} to {self.offset + self.nbytes} have"
            raise CheckpointError(
                f"{self.file} is not the file that {source} describes: {what} the digest {found.hexdigest()} in place of "
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
        if store is None or checkpoint.verified or not checkpoint.files:
            raise ValueError(
                f"checksums= compares the files of a checkpoint, and {redact(checkpoint.manifest.source)} has none of its own: "
                "leave it out"
            )
        if isinstance(given, Mapping):
            digests = {
                name: FileDigests((str(digest).lower().removeprefix(_PREFIX),)) for name, digest in given.items()
            }
            return cls("checksums=", _checked(digests, "checksums="))
        if given is True or (isinstance(given, str) and given.startswith(_PREFIX)):
            return cls._next_to(checkpoint, "" if given is True else str(given).removeprefix(_PREFIX).lower())
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
        path = store.path_of(FILE)
        try:
            raw = store.peek(FILE)
        except FileNotFoundError:
            published = {file.name: FileDigests((store.published(file),)) for file in checkpoint.files}
            published = {name: known for name, known in published.items() if _is_digest(known)}
            if digest or not published:
                raise CheckpointError(
                    f"no checksums are published next to {store}: it has no {FILE}; pass the path of a list, in the format of "
                    "sha256sum"
                ) from None
            return cls("the Hugging Face Hub", _checked(published, str(store)))
        except OSError as error:
            raise CheckpointError(f"cannot read the checksums in {path}: {error.strerror or error}") from error
        if digest and (found := hashlib.sha256(raw).hexdigest()) != digest:
            raise CheckpointError(
                f"{path} is not the one that was asked for: expected {_PREFIX}{digest}, got {_PREFIX}{found}"
            )
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
            if files.setdefault(match[2], digests) != digests:
                raise CheckpointError(f"{source} has two digests of {match[2]}; remove one of them")
        return cls(source, _checked(files, source))

    def of(self, file: StoredFile) -> FileDigests | None:
        """Returns the digests of a file; None if the list does not name it. Raises CheckpointError if it names several."""
        found = {digests for name, digests in self.files.items() if PurePosixPath(name).name == file.name}
        if len(found) > 1:
            raise CheckpointError(
                f"{self.source} names several files {file.name}, in other folders; pass a list of one folder"
            )
        return next(iter(found), None)

    def parts(self, files: Sequence[StoredFile], required: bool = True) -> list[HashedPart]:
        """Returns the parts of files that are to be hashed.

        Args:
            required: whether a file that the list does not name is an error, and not left out.

        Raises:
            CheckpointError: the list does not name a file, or describes one of another size.
        """
        parts: list[HashedPart] = []
        if required and (missing := [file.name for file in files if self.of(file) is None]):
            raise CheckpointError(
                f"{self.source} has no digest of {list_first(missing)}, so that nothing proves what is in them; pass a list of "
                "all files"
            )
        for file in files:
            if (known := self.of(file)) is None:
                continue
            chunk_bytes = known.chunk_bytes or max(file.nbytes, 1)
            count = max(1, -(-file.nbytes // chunk_bytes))
            if count != len(known.digests) or known.nbytes not in (None, file.nbytes):
                raise CheckpointError(
                    f"{file} is not the file that {self.source} describes: it has {file.nbytes} bytes"
                    f"{'' if known.nbytes is None else f' in place of {known.nbytes}'}; download or copy it again"
                )
            for number, digest in enumerate(known.digests):
                begin = number * chunk_bytes
                parts.append(HashedPart(file, begin, min(chunk_bytes, file.nbytes - begin), digest))
        return parts


def _hash(file: StoredFile, offset: int, nbytes: int, digest: Any, done: Done) -> None:
    end = offset + nbytes
    while offset < end:
        data = file.read(offset, min(_READ_BYTES, end - offset))
        if not data:
            raise CheckpointError(f"{file} ends at byte {offset}, and had {file.nbytes} bytes when it was opened")
        digest.update(data)
        offset += len(data)
        done(len(data))


def _parse_chunks(raw: bytes, source: str) -> dict[str, FileDigests]:
    """Returns the content of a ``checksums.json``. Raises CheckpointError."""
    try:
        content = json.loads(raw)
        assert content["algorithm"] == "sha256"
        chunk_bytes = int(content["chunk_bytes"])
        assert chunk_bytes > 0
        return {
            str(name): FileDigests(tuple(map(str, entry["chunks"])), chunk_bytes, int(entry["bytes"]))
            for name, entry in content["files"].items()
        }
    except (AssertionError, AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise CheckpointError(
            f'{source} is no list of checksums: expected "algorithm": "sha256", "chunk_bytes" and "files" with "bytes" and '
            f'"chunks" each ({type(error).__name__}: {error})'
        ) from error


def _is_digest(known: FileDigests) -> bool:
    of_git = not known.chunk_bytes and all(map(_GIT_SHA1.fullmatch, known.digests))
    return bool(known.digests) and (of_git or all(map(_SHA256.fullmatch, known.digests)))


def _checked(files: dict[str, FileDigests], source: str) -> dict[str, FileDigests]:
    """Returns them. Raises CheckpointError if there are none, or one is no digest."""
    if not files:
        raise CheckpointError(f"{source} has no digest of any file")
    for name, known in files.items():
        if not _is_digest(known):
            raise CheckpointError(
                f"{source}: expected sha256 digests of {name}, of 64 hexadecimal digits, got {known.digests[:1]}"
            )
    return files


# ---- publishing them ----


def hash_chunk(file: StoredFile, number: int, done: Done = lambda nbytes: None) -> str:
    """Returns the sha256 digest of a chunk of a file, by its number."""
    begin, digest = number * CHUNK_BYTES, hashlib.sha256()
    _hash(file, begin, min(CHUNK_BYTES, file.nbytes - begin), digest, done)
    return digest.hexdigest()


def chunk_count(nbytes: int) -> int:
    """Returns the number of chunks of a file; an empty one has one."""
    return max(1, -(-nbytes // CHUNK_BYTES))


def render(sizes: Mapping[str, int], digests: Mapping[str, Sequence[str]]) -> bytes:
    """Returns the content of a ``checksums.json``.

    Args:
        sizes: bytes of each file.
        digests: of the chunks of each file.
    """
    files = {name: {"bytes": sizes[name], "chunks": list(digests[name])} for name in sorted(sizes)}
    return json.dumps({"algorithm": "sha256", "chunk_bytes": CHUNK_BYTES, "files": files}, indent=1).encode()


def digest_of(content: bytes) -> str:
    """Returns the digest of a list, as a load takes it."""
    return _PREFIX + hashlib.sha256(content).hexdigest()
