"""``epload inspect``: what a checkpoint contains."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from math import prod

import click
from rich.tree import Tree

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cli.folding import fold, numbered
from epload.cli.output import count, facts, json_option, print_json, show, size, table, variant_option
from epload.core.dtypes import name as dtype_name


def _compiled(context: click.Context, parameter: click.Parameter, value: str | None) -> re.Pattern[str] | None:
    try:
        return None if value is None else re.compile(value)
    except re.error as error:
        raise click.BadParameter(f"expected a regular expression, got {value!r}: {error}") from None


filter_option = click.option(
    "--filter",
    "pattern",
    metavar="RE",
    callback=_compiled,
    help="Only tensors whose name this expression matches anywhere.",
)


@click.command()
@click.argument("checkpoint")
@click.option("--tree", is_flag=True, help="Show the names as a tree.")
@filter_option
@variant_option
@json_option
def inspect(checkpoint: str, tree: bool, pattern: re.Pattern[str] | None, variant: str, as_json: bool) -> None:
    """Check a checkpoint's headers, and show what it contains.

    CHECKPOINT is a file (safetensors, .pt, .bin), a folder, also one of torch.distributed.checkpoint, a model on the Hugging Face
    Hub (org/name) or a URL (s3://, gs://, az://, https://). Only headers are read. Tensors whose names differ in numbers only
    are one line.
    """
    opened = Checkpoint.open(checkpoint, variant=variant)
    manifest = opened.manifest
    opened.close()
    chosen = [i for i, name in enumerate(manifest.names) if pattern is None or pattern.search(name)]
    summary = Summary.of(manifest, chosen)
    if as_json:
        print_json(asdict(summary) | {"tensors": _tensors(manifest, chosen)})
        return
    show(facts(summary.rows(len(manifest.names))))
    lines = fold({manifest.names[i]: (dtype_name(manifest.dtypes[i]), manifest.shapes[i]) for i in chosen})
    if lines:
        show()
    if tree:
        show(_tree(manifest.source, lines))
    elif lines:
        rows = [[f"{n:,}", dtype, str(list(shape)), name] for name, (dtype, shape), n in lines]
        show(table(("tensors", "dtype", "shape", "name"), rows, right=(0,)))


Line = tuple[str, tuple[str, tuple[int, ...]], int]
"""Folded name, dtype and shape, and number of tensors."""


@dataclass(frozen=True)
class Summary:
    """Summarizes some tensors of a checkpoint."""

    source: str
    files: dict[str, int]
    """Bytes by name; empty if the tensors are not byte ranges of files."""
    count: int
    elements: int
    nbytes: int
    dtypes: dict[str, dict[str, int]]
    """Number of tensors and of bytes, by dtype."""
    numbered: dict[str, int]
    """Prefixes of names, and how many numbers follow each; see :func:`numbered`."""
    ignored: list[str]
    """Entries that hold no tensor."""

    @classmethod
    def of(cls, manifest: Manifest, chosen: Sequence[int]) -> Summary:
        nbytes = manifest.nbytes_of()
        dtypes: dict[str, dict[str, int]] = {}
        for i in chosen:
            kind = dtypes.setdefault(dtype_name(manifest.dtypes[i]), {"tensors": 0, "nbytes": 0})
            kind["tensors"] += 1
            kind["nbytes"] += nbytes[i]
        return cls(
            source=manifest.source,
            files={file.name: file.nbytes for file in manifest.locations.files} if manifest.locations else {},
            count=len(chosen),
            elements=sum(prod(manifest.shapes[i]) for i in chosen),
            nbytes=sum(nbytes[i] for i in chosen),
            dtypes=dtypes,
            numbered=numbered(manifest.names[i] for i in chosen),
            ignored=list(manifest.ignored),
        )

    def rows(self, of: int) -> list[tuple[str, str]]:
        """``of``: how many tensors the checkpoint has."""
        filtered = f" of {of:,}" if self.count < of else ""
        rows = [("checkpoint", self.source)]
        if self.files:
            rows.append(("files", f"{len(self.files):,} ({size(sum(self.files.values()))})"))
        rows.append(("tensors", f"{self.count:,}{filtered} ({self.elements:,} elements, {size(self.nbytes)})"))
        dtypes = (f"{name}: {count(k['tensors'], 'tensor')}, {size(k['nbytes'])}" for name, k in self.dtypes.items())
        rows.append(("dtypes", "; ".join(dtypes)))
        rows.append(("layers", ", ".join(f"{prefix}: {n:,}" for prefix, n in self.numbered.items()) or "none"))
        if self.ignored:
            rows.append(("without data", ", ".join(self.ignored)))
        return rows


def _tensors(manifest: Manifest, chosen: Sequence[int]) -> list[dict[str, object]]:
    nbytes = manifest.nbytes_of()
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, nbytes, strict=True)
    rows = [
        {"name": name, "dtype": dtype_name(dtype), "shape": list(shape), "nbytes": n}
        for name, dtype, shape, n in columns
    ]
    return [rows[i] for i in chosen]


def _tree(root: str, lines: Iterable[Line]) -> Tree:
    made = Tree(root)
    branches: dict[str, Tree] = {"": made}
    for name, (dtype, shape), n in lines:
        path, parts = "", name.replace("..", "\0").split(".")  # the dots of {0..3}
        for part in parts[:-1]:
            above, path = branches[path], f"{path}.{part}"
            branches[path] = branches.get(path) or above.add(part.replace("\0", ".."))
        times = f"  x {n:,}" if n > 1 else ""
        branches[path].add(f"{parts[-1]}  {dtype} {list(shape)}{times}".replace("\0", ".."))
    return made
