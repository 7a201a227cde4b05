"""``epload verify``: whether all of a checkpoint can be read, and has finite values."""

from __future__ import annotations

from dataclasses import asdict

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.output import json_option, print_json, show, size, variant_option
from epload.observe.progress import Progress
from epload.observe.render import count
from epload.verify.audit import find_non_finite


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
