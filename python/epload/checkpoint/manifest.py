"""What a checkpoint holds and where it lies, in the form in which it travels from the rank that parsed it to the others."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor

from epload.checkpoint.safetensors import FileFacts
from epload.core import dtypes

_EXPENSIVE = ("compact", "digest", "identity", "nbytes")


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds, in the order its bytes lie. One entry a tensor in each column; equal on all ranks."""

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    source: str
    """For messages: the path, or "state dict"."""
    places: Places | None = None
    """Where the bytes lie, of a checkpoint that other ranks can read without parsing it; not part of what it holds."""
    ignored: tuple[str, ...] = ()
    """Names of entries that hold no tensor, such as ``_extra_state``: listed in reports, and otherwise left alone."""

    @cached_property
    def compact(self) -> bytes:
        """Compressed JSON with shapes and dtypes listed once each, of all but the source and the files' facts."""
        shapes = {shape: i for i, shape in enumerate(dict.fromkeys(self.shapes))}
        kinds = {dtype: i for i, dtype in enumerate(dict.fromkeys(self.dtypes))}
        columns = {
            "names": self.names,
            "shapes": list(shapes),
            "shape": [shapes[shape] for shape in self.shapes],
            "dtypes": [dtypes.name(dtype) for dtype in kinds],
            "dtype": [kinds[dtype] for dtype in self.dtypes],
            "places": self.places and self.places.to_json(self.nbytes_of()),
        }
        return zlib.compress(json.dumps(columns, separators=(",", ":")).encode(), level=1)

    @classmethod
    def from_compact(cls, raw: bytes, about: list[Any]) -> Manifest:
        """``about`` as given by :attr:`about`."""
        columns = json.loads(zlib.decompress(raw))
        shapes = [tuple(shape) for shape in columns["shapes"]]
        kinds = [dtypes.from_name(text) for text in columns["dtypes"]]
        made = cls(
            tuple(columns["names"]),
            tuple([shapes[i] for i in columns["shape"]]),
            tuple([kinds[i] for i in columns["dtype"]]),
            "",
        )
        if columns["places"] is not None:
            made = replace(made, places=Places.from_json(columns["places"], made.nbytes_of()))
        made.__dict__["compact"] = raw
        return made.seen_as(about)

    @property
    def about(self) -> list[Any]:
        """What may differ between two checkpoints of the same tensors in the same places, as JSON: source, files, and what else
        is in them."""
        files = None if self.places is None else [self.places.index, *map(list, self.places.files)]
        return [self.source, files, list(self.ignored)]

    def seen_as(self, about: list[Any]) -> Manifest:
        """The same tensors in the same places, but of another checkpoint: nothing is computed again."""
        source, files, ignored = about
        places = self.places
        if places is not None:
            index, *facts = files
            places = replace(places, index=index, files=tuple(FileFacts(*of_file) for of_file in facts))
        made = replace(self, source=source, places=places, ignored=tuple(ignored))
        made.__dict__.update({name: self.__dict__[name] for name in _EXPENSIVE if name in self.__dict__})
        return made

    def nbytes_of(self) -> list[int]:
        """Bytes of each tensor."""
        pairs = list(zip(self.shapes, self.dtypes, strict=True))
        known = {pair: prod(pair[0]) * pair[1].itemsize for pair in set(pairs)}
        return [known[pair] for pair in pairs]

    @cached_property
    def digest(self) -> bytes:
        """16 bytes that two manifests share only if their tensors are the same in the same order."""
        shapes = {shape: i for i, shape in enumerate(dict.fromkeys(self.shapes))}
        kinds = {dtype: i for i, dtype in enumerate(dict.fromkeys(self.dtypes))}
        layout = [(*shapes, *kinds), [shapes[s] for s in self.shapes], [kinds[d] for d in self.dtypes]]
        return hashlib.blake2b(json.dumps(self.names).encode() + repr(layout).encode(), digest_size=16).digest()

    @cached_property
    def identity(self) -> str:
        """Shared by two manifests only if they differ in nothing but :attr:`about`."""
        return hashlib.blake2b(self.compact, digest_size=16).hexdigest()

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.nbytes_of())


@dataclass(frozen=True)
class Places:
    """Where the tensors of safetensors files lie, and by what another rank knows that it sees the same files."""

    files: tuple[FileFacts, ...]
    file: Tensor
    """int64, for each tensor of the manifest an index into ``files``."""
    offset: Tensor
    """int64, from the start of the file, bytes."""
    index: str = ""
    """Digest of the index that names the files; empty without one."""

    def same_layout(self, index: str, files: Sequence[FileFacts]) -> bool:
        """Whether files with these facts, under an index with this digest, hold the same tensors in the same places."""
        seen = [(facts.nbytes, facts.header) for facts in files]
        return index == self.index and seen == [(facts.nbytes, facts.header) for facts in self.files]

    def to_json(self, nbytes: list[int]) -> list[Any]:
        """``nbytes`` of each tensor: most lie right behind the one before, so that gaps compress to nothing."""
        gaps = self.offset - self._expected(self.offset, nbytes)
        return [self.file.tolist(), gaps.tolist()]

    @classmethod
    def from_json(cls, columns: list[Any], nbytes: list[int]) -> Places:
        file, gaps = columns
        sizes = torch.tensor(nbytes, dtype=torch.int64)
        steps = torch.tensor(gaps, dtype=torch.int64)
        steps[1:] += sizes[:-1]
        return cls((), torch.tensor(file, dtype=torch.int64), steps.cumsum(0))

    @staticmethod
    def _expected(offset: Tensor, nbytes: list[int]) -> Tensor:
        """Where each tensor would lie if it followed the one before."""
        expected = torch.zeros_like(offset)
        expected[1:] = offset[:-1] + torch.tensor(nbytes[:-1], dtype=torch.int64)
        return expected
