"""The content of a checkpoint, read from its headers alone: without torch if its files are safetensors."""

from __future__ import annotations

import re
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from epload.checkpoint import safetensors
from epload.checkpoint.byte_store import ByteStore
from epload.checkpoint.finding import choose, located, open_named
from epload.checkpoint.index import Index
from epload.checkpoint.open_files import OpenFiles

if TYPE_CHECKING:
    from epload.checkpoint.manifest import Manifest


class TensorHeader(NamedTuple):
    """A tensor, as a header describes it."""

    dtype: str
    """Its name in torch, such as ``"bfloat16"``."""
    shape: tuple[int, ...]
    nbytes: int


class Headers(NamedTuple):
    """The content of a checkpoint."""

    source: str
    """The path or URL."""
    tensors: dict[str, TensorHeader]
    """The tensors, by name."""
    files: dict[str, int]
    """The bytes of each file, by its name; empty if the tensors are not byte ranges of files."""
    ignored: tuple[str, ...] = ()
    """Names of entries that hold no tensor."""


def read_headers(source: str, variant: str = "") -> Headers:
    """Reads the headers of the checkpoint at a path or URL. Arguments and errors are those of :meth:`Checkpoint.open`."""
    with located(source, variant) as (store, name):
        opened = _open_safetensors(store, choose(store, name, "", variant))
        tensors = {} if opened is None else opened.tensors(safetensors.read(opened))
        store.close()
    if opened is None:
        from epload.checkpoint.base import Checkpoint

        checkpoint = Checkpoint.open(source, variant=variant)
        checkpoint.close()
        return headers_of(checkpoint.manifest)
    described = {
        name: TensorHeader(chunks[0].dtype.name, shape, prod(shape) * chunks[0].dtype.itemsize)
        for name, (shape, chunks) in tensors.items()
    }
    return Headers(opened.source, described, {file.name: file.nbytes for file in store.files})


def compare_headers(first: Headers, second: Headers, pattern: re.Pattern[str]) -> dict[str, Any]:
    """Returns the names in only one of two checkpoints (``only_first``, ``only_second``), the pairs of dtype and shape of tensors
    whose shapes differ (``shapes``) or only the dtypes (``dtypes``), and the names of tensors of equal shape (``common``).

    Args:
        pattern: compares only tensors whose name it matches anywhere.
    """
    a, b = (
        {name: (tensor.dtype, list(tensor.shape)) for name, tensor in headers.tensors.items() if pattern.search(name)}
        for headers in (first, second)
    )
    both = {name: (a[name], b[name]) for name in a if name in b}
    shapes = {name: pair for name, pair in both.items() if pair[0][1] != pair[1][1]}
    common = [name for name in both if name not in shapes]
    return {
        "only_first": [name for name in a if name not in both],
        "only_second": [name for name in b if name not in both],
        "shapes": shapes,
        "dtypes": {name: both[name] for name in common if a[name] != b[name]},
        "common": common,
    }


def _open_safetensors(store: ByteStore, chosen: list[str]) -> OpenFiles | None:
    """Opens the files that :func:`choose` has chosen, or an index names. Returns None if they have another format."""
    index, names = None, chosen
    if chosen[0].endswith(".index.json"):
        index = Index(store.open_description(chosen[0]))
        names = index.file_names
    if not all(name.endswith(".safetensors") for name in names):
        return None
    if index is not None:
        open_named(store, index, names)
        return OpenFiles(store, (), str(store), index)
    store.open(names)
    return OpenFiles(store, (), store.path_of(names[0]) if len(names) == 1 else str(store))


def headers_of(manifest: Manifest) -> Headers:
    """Returns the same of a checkpoint that is open."""
    from epload.core.dtypes import name as dtype_name

    columns = zip(manifest.dtypes, manifest.shapes, manifest.nbytes_of(), strict=True)
    described = (TensorHeader(dtype_name(dtype), shape, nbytes) for dtype, shape, nbytes in columns)
    files = {file.name: file.nbytes for file in manifest.locations.files} if manifest.locations else {}
    return Headers(manifest.source, dict(zip(manifest.names, described, strict=True)), files, manifest.ignored)
