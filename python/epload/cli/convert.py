"""``epload convert``: rewrites a checkpoint as safetensors files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import click

from epload.cli.output import existing_file, json_option, not_read, prefix_option, print_json, show, variant_option
from epload.observe.progress import Progress

if TYPE_CHECKING:
    from epload.ranks.topology import Topology

_size = click.FloatRange(min=0, max=1e9, min_open=True)


@click.command()
@click.argument("source")
@click.argument("folder", type=click.Path())
@click.option(
    "--dtype",
    type=click.Choice(["float64", "float32", "float16", "bfloat16", "fp64", "fp32", "fp16", "bf16"]),
    help="Convert floating-point tensors to this dtype. The default is to leave them as they are.",
)
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="PATTERN=TEXT",
    help="Replace a regular expression in names by a text.",
)
@click.option(
    "--quantize",
    metavar="CONFIG",
    help='Quantize weights to fp8, as the quantization_config of this folder or config.json says, or "fp8" for blocks of '
    "128 x 128.",
)
@click.option(
    "--weights",
    multiple=True,
    metavar="PATTERN",
    help="Quantize the weights whose names match this regular expression. By default those of Linear layers and experts.",
)
@prefix_option
@click.option(
    "--max-shard-gb",
    type=_size,
    default=5.0,
    show_default=True,
    help="Write files of at most this many GB. A larger tensor gets a file of its own.",
)
@click.option("--file", "files", multiple=True, type=existing_file, help="Copy this file into FOLDER as well.")
@click.option("--checksums", is_flag=True, help="Write the digests of all files to checksums.json as well.")
@click.option("--overwrite", is_flag=True, help="Replace FOLDER, with all that is in it.")
@variant_option
@json_option
def convert(
    source: str, folder: str, dtype: str | None, renames: tuple[str, ...], quantize: str | None, weights: tuple[str, ...],
    prefix: str, max_shard_gb: float, files: tuple[str, ...], checksums: bool, overwrite: bool, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Rewrite a checkpoint as safetensors files.

    SOURCE is as for inspect. FOLDER appears when it is complete, and on disk. Under torchrun the ranks divide the work:
    torchrun --nproc-per-node 4 -m epload convert SOURCE FOLDER.
    """
    from epload.checkpoint.base import Checkpoint
    from epload.mapping.mapping import Rename
    from epload.mapping.quantize import Quantize
    from epload.saving.convert import convert as rewrite

    rules = []
    for rename in renames:
        pattern, *text = re.split(r"(?<!\(\?)(?<!\(\?<)=", rename, maxsplit=1)  # not the = of (?=...) and (?<=...)
        if not text:
            raise click.BadParameter(f"expected PATTERN=TEXT, got {rename}", param_hint="--rename")
        rules.append(Rename(pattern, text[0]))
    if weights and quantize is None:
        raise click.BadParameter("expected --quantize with it", param_hint="--weights")
    rule = None if quantize is None else Quantize(None if quantize == "fp8" else quantize, weights)
    with _ranks() as topology:  # before a download
        opened = Checkpoint.open(source, prefix=prefix, variant=variant)
        first = topology is None or topology.rank == topology.ranks[0]
        total = opened.manifest.nbytes // (1 if topology is None else len(topology.ranks))
        with Progress(total, first and not as_json) as bar:
            report = rewrite(
                opened, folder, dtype=dtype, renames=rules, quantize=rule,
                max_shard_bytes=max(1, int(max_shard_gb * 1e9)), files=files, checksums=checksums, overwrite=overwrite,
                topology=topology, progress=bar.update,
            )  # fmt: skip
    if first and as_json:
        print_json(report.to_dict())
    elif first:
        show(report.summary + (f"; {report.checksums}" if checksums else "") + not_read(opened.manifest))
    opened.close()
    return 0


@contextmanager
def _ranks() -> Iterator[Topology | None]:
    """Yields the ranks that torchrun has started; None without it."""
    import torch.distributed as dist

    from epload.ranks.topology import Topology

    if not dist.is_torchelastic_launched():
        yield None
        return
    dist.init_process_group("gloo", timeout=timedelta(minutes=5))  # a child of a job that inherits its environment waits in vain
    try:
        yield Topology.discover()
        dist.barrier()
    finally:
        dist.destroy_process_group()
