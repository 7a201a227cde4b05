"""Index files, such as ``model.safetensors.index.json``: which file of a checkpoint holds each tensor."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Container
from functools import cached_property
from typing import Any

from epload.checkpoint.byte_store import StoredFile
from epload.errors import CheckpointError

_MAX_BYTES = 100_000_000
"""The limit is that of a safetensors header. An index of 100,000 tensors has about 10 MB."""


def is_plain(name: object) -> bool:
    """Returns True if a value that is not trusted is the name of a file in its folder, and no path."""
    if not isinstance(name, str) or name in ("", ".", ".."):
        return False
    return name.encode(errors="replace").decode() == name and {"/", "\\", "\0"}.isdisjoint(name)


def without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns the content of a JSON object, for ``json.loads``. Raises ValueError for a key that comes twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"duplicate key {Counter(name for name, _ in pairs).most_common(1)[0][0]!r}")
    return content


class Index:
    """One index file, parsed when its content is asked for. Not trusted."""

    def __init__(self, file: StoredFile, limit: int = _MAX_BYTES, salt: bytes = b"") -> None:
        """Raises CheckpointError if it has more than ``limit`` bytes; OSError. ``salt``: anything else than the content on which
        the meaning of the index depends."""
        if file.nbytes > limit:
            raise CheckpointError(
                f"{file} has {file.nbytes} bytes, expected at most {limit} from its name: replace it, or save it again"
            )
        self.file = file
        self.raw = file.read(0, file.nbytes)
        self.digest = hashlib.sha256(self.raw + salt).hexdigest()[:32]

    @cached_property
    def weight_map(self) -> dict[str, str]:
        """The file that holds each tensor, by name; it may omit tensors. Raises CheckpointError if it is malformed, or names
        something else than files in its own folder."""
        try:
            weight_map = dict(json.loads(self.raw)["weight_map"].items())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f'{self.file}: expected a JSON object with a "weight_map" of tensor names to file names'
            ) from error
        for name in weight_map.values():
            if not is_plain(name):
                raise CheckpointError(
                    f"{self.file}: names the file {repr(name)[:200]}; expected a plain file name in the index's own folder"
                )
        return weight_map

    @property
    def file_names(self) -> list[str]:
        """The files that the index names, sorted. Raises as :attr:`weight_map`."""
        return sorted(set(self.weight_map.values()))

    def places(self, name: str, file_name: str) -> bool:
        """Returns True if the tensor ``name`` is to be read from this file, in which it is."""
        return self.weight_map.get(name, file_name) == file_name

    def check_complete(self, names: Container[str]) -> None:
        """Checks that all entries are among the names that the files have. Raises CheckpointError."""
        for name, file_name in self.weight_map.items():
            if name not in names:
                raise CheckpointError(f"{self.file}: places {name} in {file_name}, which does not contain it")
