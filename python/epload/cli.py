"""The command line: parsing only."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from epload.build import build_info
from epload.checkpoint import Checkpoint
from epload.dtypes import name as dtype_name
from epload.errors import LoadError


def main(arguments: Sequence[str] | None = None) -> int:
    """``epload info`` and ``epload inspect CHECKPOINT``. Returns the exit status."""
    parser = argparse.ArgumentParser(prog="epload", description="Loads model weights into sharded PyTorch models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="what this build has")
    inspect = commands.add_parser("inspect", help="check a checkpoint's headers and list its tensors")
    inspect.add_argument("checkpoint", help="a safetensors or torch file, or a folder of them")
    options = parser.parse_args(arguments)
    if options.command == "info":
        for key, value in build_info().items():
            print(f"{key}: {value}")
        return 0
    try:
        manifest = Checkpoint.open(options.checkpoint).manifest
    except LoadError as error:
        print(f"epload: {error}", file=sys.stderr)
        return 1
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        print(f"{dtype_name(dtype):<14}{list(shape)!s:<24}{name}")
    print(f"{len(manifest.names)} tensors, {manifest.nbytes / 1e9:.3f} GB")
    return 0
