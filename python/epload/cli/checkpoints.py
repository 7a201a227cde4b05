"""``epload inspect``, ``verify`` and ``diff``: what a checkpoint contains, whether it can be read, how two of them differ."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import prod
from typing import Any

import click
from rich.tree import Tree

from epload.checkpoint.base import Checkpoint
from epload.checkpoint.manifest import Manifest
from epload.cli.folding import fold, numbered
from epload.cli.output import facts, json_option, print_json, show, size, table, variant_option
from epload.core.dtypes import name as dtype_name
from epload.observe.progress import Progress
from epload.observe.render import count
from epload.verify.audit import find_non_finite
from epload.verify.compare import HeaderDifferences, ValueDifference, compare_headers, compare_values


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


_tolerance = click.FloatRange(min=0)


# ---- inspect ----


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
    lines = fold({tensor["name"]: (tensor["dtype"], tuple(tensor["shape"])) for tensor in summary["tensors"]})
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
    for tensor in tensors:
        kind = dtypes.setdefault(tensor["dtype"], {"tensors": 0, "nbytes": 0})
        kind["tensors"] += 1
        kind["nbytes"] += tensor["nbytes"]
    return {
        "source": manifest.source,
        # Bytes by name; empty if the tensors are not byte ranges of files.
        "files": {file.name: file.nbytes for file in manifest.locations.files} if manifest.locations else {},
        "count": len(tensors),
        "elements": sum(prod(tensor["shape"]) for tensor in tensors),
        "nbytes": sum(tensor["nbytes"] for tensor in tensors),
        "dtypes": dtypes,
        "numbered": numbered(tensor["name"] for tensor in tensors),
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


# ---- verify ----


@click.command()
@click.argument("checkpoint")
@variant_option
@json_option
def verify(checkpoint: str, variant: str, as_json: bool) -> int:
    """Read all of a checkpoint, and list the tensors with NaN or Inf.

    Exits with 1 if there are any. CHECKPOINT is as for inspect. Headers are checked for overlaps and holes.
    """
    opened = Checkpoint.open(checkpoint, variant=variant)
    manifest = opened.manifest
    bad = []
    with Progress(manifest.nbytes, not as_json) as bar:
        for tensor in find_non_finite(opened, bar.update):
            bad.append(tensor)
            if not as_json:
                bar.clear()
                show(f"{tensor.name}: {tensor.nans} NaN and {tensor.infs} Inf in {tensor.count} elements")
    if as_json:
        facts = {"source": manifest.source, "tensors": len(manifest.names), "nbytes": manifest.nbytes}
        print_json(facts | {"non_finite": [asdict(tensor) for tensor in bad]})
    else:
        show(
            f"{count(len(manifest.names), 'tensor')}, {size(manifest.nbytes)}: headers without overlaps or holes, "
            f"every byte read, {count(len(bad), 'tensor') if bad else 'no tensor'} with NaN or Inf"
        )
    return 1 if bad else 0


# ---- diff ----


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--rtol", type=_tolerance, default=0.0, show_default=True, help="Tolerance relative to SECOND's value.")
@click.option("--atol", type=_tolerance, default=0.0, show_default=True, help="Absolute tolerance.")
@click.option("--headers", "headers_only", is_flag=True, help="Compare names, shapes and dtypes only.")
@filter_option
@variant_option
@json_option
def diff(
    first: str, second: str, rtol: float, atol: float, headers_only: bool, pattern: re.Pattern[str] | None, variant: str,
    as_json: bool,
) -> int:  # fmt: skip
    """Compare two checkpoints: names, shapes, dtypes and values.

    FIRST and SECOND are as for inspect, and may have different formats. Exits with 1 if they differ, in values by more than the
    tolerances. Values are compared across dtypes; a different dtype is a difference.
    """
    one, two = (Checkpoint.open(path, variant=variant) for path in (first, second))
    headers = compare_headers(one, two, pattern)
    values: list[ValueDifference] = []
    if not headers_only:
        sizes = dict(zip(one.manifest.names, one.manifest.nbytes_of(), strict=True))
        with Progress(sum(sizes[name] for name in headers.common), not as_json) as bar:
            values = list(compare_values(one, two, headers.common, rtol, atol, bar.update))
    if as_json:
        print_json({**asdict(headers), "common": len(headers.common), "values": list(map(asdict, values))})
    else:
        _print_differences(headers, values, "not compared" if headers_only else "equal")
    return 1 if headers.any or values else 0


def _print_differences(headers: HeaderDifferences, values: list[ValueDifference], others: str) -> None:
    """``others``: says what the values of the other tensors are."""
    shapes = {name: f"{list(a.shape)} / {list(b.shape)}" for name, (a, b) in headers.shapes.items()}
    dtypes = {name: f"{a.dtype} / {b.dtype}" for name, (a, b) in headers.dtypes.items()}
    rows = [
        [difference, f"{n:,}", name, value]
        for difference, names in (
            ("only in FIRST", dict.fromkeys(headers.only_first, "")),
            ("only in SECOND", dict.fromkeys(headers.only_second, "")),
            ("shape", shapes),
            ("dtype", dtypes),
        )
        for name, value, n in fold(names)
    ]
    if rows:
        show(table(("difference", "tensors", "name", "FIRST / SECOND"), rows, right=(1,)))
        show()
    if values:
        listed = [
            [f"{value.largest:.4g}", f"{value.mean:.4g}", f"{value.differing:,} of {value.count:,}", value.name]
            for value in values
        ]
        show(table(("max", "mean", "elements that differ", "name"), listed, right=(0, 1, 2)))
        show()
    counts = {
        "with other values": len(values),
        "of another shape": len(shapes),
        "of another dtype": len(dtypes),
        "in one only": len(headers.only_first) + len(headers.only_second),
    }
    equal = f"{count(len(headers.common) - len(values), 'tensor')} with {others} values"
    show(", ".join([equal, *(f"{n:,} {what}" for what, n in counts.items() if n)]))
