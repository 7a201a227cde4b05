"""``epload verify``: whether all of a checkpoint can be read, and has finite values."""

from __future__ import annotations

from dataclasses import asdict

import click

from epload.checkpoint.base import Checkpoint
from epload.cli.output import count, json_option, print_json, show, size, variant_option
from epload.observe.progress import Progress
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
    found = []
    with Progress(manifest.nbytes, not as_json) as bar:
        for tensor in find_non_finite(opened, bar.update):
            found.append(tensor)
            if not as_json:
                bar.clear()
                show(str(tensor))
    if as_json:
        facts = {"source": manifest.source, "tensors": len(manifest.names), "nbytes": manifest.nbytes}
        print_json(facts | {"non_finite": [asdict(tensor) for tensor in found]})
    else:
        bad = count(len(found), "tensor") if found else "no tensor"
        show(
            f"{count(len(manifest.names), 'tensor')}, {size(manifest.nbytes)}: headers without overlaps or holes, "
            f"every byte read, {bad} with NaN or Inf"
        )
    return 1 if found else 0
