"""``epload diff``: how two checkpoints differ."""

from __future__ import annotations

import re
from dataclasses import asdict

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.folding import fold
from epload.cli.output import filter_option, json_option, print_json, show, table, variant_option
from epload.observe.progress import Progress
from epload.observe.render import count
from epload.verify.compare import HeaderDifferences, ValueDifference, compare_headers, compare_values

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
    first: str, second: str, rtol: float, atol: float, headers: bool, pattern: re.Pattern[str] | None, variant: str,
    as_json: bool,
) -> int:  # fmt: skip
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
    """``others``: says what the values of the other tensors are."""
    shapes = {name: f"{list(a.shape)} / {list(b.shape)}" for name, (a, b) in found.shapes.items()}
    dtypes = {name: f"{a.dtype} / {b.dtype}" for name, (a, b) in found.dtypes.items()}
    rows = [
        [difference, f"{n:,}", name, value]
        for difference, names in (
            ("only in FIRST", dict.fromkeys(found.only_first, "")),
            ("only in SECOND", dict.fromkeys(found.only_second, "")),
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
            [f"{each.largest:.4g}", f"{each.mean:.4g}", f"{each.differing:,} of {each.count:,}", each.name]
            for each in values
        ]
        show(table(("max", "mean", "elements that differ", "name"), listed, right=(0, 1, 2)))
        show()
    counts = {
        "with other values": len(values),
        "of another shape": len(shapes),
        "of another dtype": len(dtypes),
        "in one only": len(found.only_first) + len(found.only_second),
    }
    equal = f"{count(len(found.common) - len(values), 'tensor')} with {others} values"
    show(", ".join([equal, *(f"{n:,} {what}" for what, n in counts.items() if n)]))
