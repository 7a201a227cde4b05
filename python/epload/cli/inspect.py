"""``epload inspect``: what a checkpoint contains."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import click
from rich.tree import Tree

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cli.folding import fold, numbered
from epload.cli.output import facts, filter_option, json_option, print_json, show, size, table, variant_option
from epload.core.dtypes import name as dtype_name
from epload.observe.render import count


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
    summary = _summarize(manifest, pattern)
    if as_json:
        print_json(summary)
        return
    show(facts(_rows(summary, len(manifest.names))))
    lines = fold({each["name"]: (each["dtype"], tuple(each["shape"])) for each in summary["tensors"]})
    if lines:
        show()
    if tree:
        show(_tree(manifest.source, lines))
    elif lines:
        rows = [[f"{n:,}", dtype, str(list(shape)), name] for name, (dtype, shape), n in lines]
        show(table(("tensors", "dtype", "shape", "name"), rows, right=(0,)))


def _summarize(manifest: Manifest, pattern: re.Pattern[str] | None) -> dict[str, Any]:
    """Returns what is printed as JSON about the tensors whose names match."""
    columns = zip(manifest.names, manifest.dtypes, manifest.shapes, manifest.nbytes_of(), strict=True)
    tensors: list[dict[str, Any]] = [
        {"name": name, "dtype": dtype_name(dtype), "shape": list(shape), "nbytes": nbytes}
        for name, dtype, shape, nbytes in columns
        if pattern is None or pattern.search(name)
    ]
    dtypes: dict[str, dict[str, int]] = {}
    for each in tensors:
        kind = dtypes.setdefault(each["dtype"], {"tensors": 0, "nbytes": 0})
        kind["tensors"] += 1
        kind["nbytes"] += each["nbytes"]
    return {
        "source": manifest.source,
        # Bytes by name; empty if the tensors are not byte ranges of files.
        "files": {file.name: file.nbytes for file in manifest.locations.files} if manifest.locations else {},
        "count": len(tensors),
        "elements": sum(prod(each["shape"]) for each in tensors),
        "nbytes": sum(each["nbytes"] for each in tensors),
        "dtypes": dtypes,
        "numbered": numbered(each["name"] for each in tensors),
        "ignored": list(manifest.ignored),
        "tensors": tensors,
    }


def _rows(summary: dict[str, Any], total: int) -> list[tuple[str, str]]:
    """``total``: the number of tensors that the checkpoint has."""
    chosen, files = summary["count"], summary["files"]
    of = f" of {total:,}" if chosen < total else ""
    dtypes = (f"{name}: {count(k['tensors'], 'tensor')}, {size(k['nbytes'])}" for name, k in summary["dtypes"].items())
    rows = [
        ("checkpoint", summary["source"]),
        ("files", f"{len(files):,} ({size(sum(files.values()))})" if files else ""),
        ("tensors", f"{chosen:,}{of} ({summary['elements']:,} elements, {size(summary['nbytes'])})"),
        ("dtypes", "; ".join(dtypes)),
        ("layers", ", ".join(f"{prefix}: {n:,}" for prefix, n in summary["numbered"].items()) or "none"),
        ("without data", ", ".join(summary["ignored"])),
    ]
    return [(title, text) for title, text in rows if text]


def _tree(root: str, lines: list[tuple[str, tuple[str, tuple[int, ...]], int]]) -> Tree:
    """``lines``: folded name, dtype and shape, and number of tensors."""
    branches: dict[str, Tree] = {"": Tree(root)}
    for name, (dtype, shape), n in lines:
        path, parts = "", name.replace("..", "\0").split(".")  # the dots of {0..3}
        for part in parts[:-1]:
            above, path = branches[path], f"{path}.{part}"
            branches[path] = branches.get(path) or above.add(part.replace("\0", ".."))
        times = f"  x {n:,}" if n > 1 else ""
        branches[path].add(f"{parts[-1]}  {dtype} {list(shape)}{times}".replace("\0", ".."))
    return branches[""]
