"""``epload diff``: how two checkpoints differ."""

from __future__ import annotations

import re
from dataclasses import asdict

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.folding import fold
from epload.cli.inspect import filter_option
from epload.cli.output import count, json_option, print_json, show, table, variant_option
from epload.observe.progress import Progress
from epload.verify.compare import HeaderDifferences, Kind, ValueDifference, compare_headers, compare_values

_tolerance = click.FloatRange(min=0)


@click.command()
@click.argument("first")
@click.argument("second")
@click.option("--rtol", type=_tolerance, default=0.0, show_default=True, help="Tolerance relative to SECOND's value.")
@click.option("--atol", type=_tolerance, default=0.0, show_default=True, help="Absolute tolerance.")
@click.option("--headers", is_flag=True, help="Compare names, shapes and dtypes only.")
@filter_option
@variant_option
@json_option
def diff(
    first: str,
    second: str,
    rtol: float,
    atol: float,
    headers: bool,
    pattern: re.Pattern[str] | None,
    variant: str,
    as_json: bool,
) -> int:
    """Compare two checkpoints: names, shapes, dtypes and values.

    FIRST and SECOND are as for inspect, and may have different formats. Exits with 1 if they differ, in values by more than the
    tolerances. Values are compared across dtypes; a different dtype is a difference.
    """
    one, two = (Checkpoint.open(each, variant=variant) for each in (first, second))
    found = compare_headers(one, two, pattern)
    values: list[ValueDifference] = []
    if not headers:
        sizes = dict(zip(one.manifest.names, one.manifest.nbytes_of(), strict=True))
        with Progress(sum(sizes[name] for name in found.common), not as_json) as bar:
            values = list(compare_values(one, two, found.common, rtol, atol, bar.update))
    if as_json:
        print_json({**asdict(found), "common": len(found.common), "values": [asdict(each) for each in values]})
    else:
        _print(found, values, "not compared" if headers else "equal")
    return 1 if found.any or values else 0


def _print(found: HeaderDifferences, values: list[ValueDifference], others: str) -> None:
    rows = [
        *_rows("only in FIRST", dict.fromkeys(found.only_first, "")),
        *_rows("only in SECOND", dict.fromkeys(found.only_second, "")),
        *_rows("shape", {name: f"{list(a.shape)} / {list(b.shape)}" for name, (a, b) in found.shapes.items()}),
        *_rows("dtype", {name: _both_dtypes(a, b) for name, (a, b) in found.dtypes.items()}),
    ]
    if rows:
        show(table(("difference", "tensors", "name", "FIRST / SECOND"), rows, right=(1,)))
    if values:
        if rows:
            show()
        listed = [
            [f"{each.largest:.4g}", f"{each.mean:.4g}", f"{each.differing:,} of {each.count:,}", each.name]
            for each in values
        ]
        show(table(("max", "mean", "elements that differ", "name"), listed, right=(0, 1, 2)))
    if rows or values:
        show()
    equal = len(found.common) - len(values)
    parts = [f"{count(equal, 'tensor')} with {others} values"]
    parts += [f"{len(values):,} with other values"] * bool(values)
    parts += [f"{len(found.shapes):,} of another shape"] * bool(found.shapes)
    parts += [f"{len(found.dtypes):,} of another dtype"] * bool(found.dtypes)
    parts += [f"{len(found.only_first) + len(found.only_second):,} in one only"] * bool(
        found.only_first or found.only_second
    )
    show(", ".join(parts))


def _rows(what: str, names: dict[str, str]) -> list[list[str]]:
    return [[what, f"{n:,}", name, value] for name, value, n in fold(names)]


def _both_dtypes(a: Kind, b: Kind) -> str:
    return f"{a.dtype} / {b.dtype}"
