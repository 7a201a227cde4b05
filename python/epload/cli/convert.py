"""``epload convert``: rewrites a checkpoint as safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import torch.distributed as dist

from epload.checkpoint.base import Checkpoint
from epload.cli.output import json_option, print_json, show, variant_option
from epload.core import dtypes
from epload.mapping.mapping import Rename
from epload.mapping.quantize import Quantize
from epload.observe.progress import Progress
from epload.ranks.topology import Topology
from epload.saving.convert import convert as rewrite

_size = click.FloatRange(min=0, min_open=True)
_dtype = click.Choice(dtypes.FLOAT_NAMES)
_file = click.Path(exists=True, dir_okay=False)


@click.command()
@click.argument("source")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--dtype", type=_dtype, help="Of floating-point tensors; as they are by default.")
@click.option(
    "--rename", "renames", multiple=True, metavar="PATTERN=TEXT", help="Replace a regular expression in names."
)
@click.option(
    "--quantize",
    metavar="CONFIG",
    help='Quantize weights to fp8, as the quantization_config of this folder or config.json says; "fp8" for blocks of 128 x 128.',
)
@click.option(
    "--weights", multiple=True, metavar="PATTERN", help="Quantize those whose names match, not those of layers."
)
@click.option("--prefix", default="", help="Of a DCP folder: where in it the model is.")
@click.option(
    "--max-shard-gb",
    type=_size,
    default=5.0,
    show_default=True,
    help="Of the tensors in a file, unless it has only one.",
)
@click.option("--file", "files", multiple=True, type=_file, help="Also copy it into FOLDER.")
@click.option("--checksums", is_flag=True, help="Also write the digests of all files, to checksums.json.")
@click.option("--overwrite", is_flag=True, help="Replace FOLDER, with all that is in it.")
@variant_option
@json_option
def convert(
    source: str, folder: Path, dtype: str | None, renames: tuple[str, ...], quantize: str | None, weights: tuple[str, ...],
    prefix: str, max_shard_gb: float, files: tuple[str, ...], checksums: bool, overwrite: bool, variant: str, as_json: bool,
) -> int:  # fmt: skip
    """Write the tensors of SOURCE to FOLDER, as safetensors files.

    SOURCE is as for inspect. FOLDER appears when it is complete, and on disk. Under torchrun the ranks divide the work:
    torchrun --nproc-per-node 4 -m epload convert SOURCE FOLDER.
    """
    rules = []
    for rename in renames:
        pattern, separator, text = rename.partition("=")
        if not separator:
            raise click.BadParameter(f"expected PATTERN=TEXT, got {rename}", param_hint="--rename")
        rules.append(Rename(pattern, text))
    if weights and quantize is None:
        raise click.BadParameter("expected --quantize with it", param_hint="--weights")
    rule = None if quantize is None else Quantize(None if quantize == "fp8" else quantize, weights)
    opened = Checkpoint.open(source, prefix=prefix, variant=variant)
    with _ranks() as topology:
        first = topology is None or topology.rank == topology.ranks[0]
        total = opened.manifest.nbytes // (1 if topology is None else len(topology.ranks))
        with Progress(total, first and not as_json) as bar:
            report = rewrite(
                opened, folder, dtype=dtype, renames=rules, quantize=rule,
                max_shard_bytes=int(max_shard_gb * 1e9), files=files, checksums=checksums, overwrite=overwrite,
                topology=topology, progress=bar.update,
            )  # fmt: skip
    if first and as_json:
        print_json(report.to_dict())
    elif first:
        show(report.summary + (f"; {report.checksums}" if checksums else ""))
    opened.close()
    return 0


@contextmanager
def _ranks() -> Iterator[Topology | None]:
    """Yields the ranks that torchrun has started; None without it."""
    if not dist.is_torchelastic_launched():
        yield None
        return
    dist.init_process_group("gloo")
    try:
        yield Topology.discover()
        dist.barrier()
    finally:
        dist.destroy_process_group()
