"""The ``epload`` command: parses arguments and prints results."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress

import torch

from epload.checkpoint.base import Checkpoint
from epload.core.dtypes import name as dtype_name
from epload.errors import LoadError
from epload.native.info import build_info
from epload.verify.audit import find_non_finite


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``epload info``, ``epload inspect CHECKPOINT`` or ``epload verify CHECKPOINT``.

    Args:
        arguments: default: ``sys.argv[1:]``.

    Returns:
        The exit status: 0, or 1 if the checkpoint cannot be read or verification finds NaN or Inf.

    Raises:
        SystemExit: the arguments are wrong (status 2), or ask for help.
    """
    parser = argparse.ArgumentParser(prog="epload", description="Loads model weights into sharded PyTorch models.")
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("info", help="show the version and build options")
    inspect = commands.add_parser("inspect", help="check a checkpoint's headers and list its tensors")
    verify_help = "check a checkpoint's headers, read all of its data, and list the tensors with NaN or Inf"
    for command in (inspect, commands.add_parser("verify", help=verify_help)):
        command.add_argument("checkpoint", help="a safetensors or torch file, or a folder of them")
    options = parser.parse_args(arguments)
    if options.command == "info":
        if torch.cuda.is_available():
            with suppress(RuntimeError):
                torch.cuda.init()  # type: ignore[no-untyped-call]  # so that it can be asked whether the kernels run
        for key, value in build_info().items():
            print(f"{key}: {value}")
        return 0
    try:
        checkpoint = Checkpoint.open(options.checkpoint)
        if options.command == "verify":
            return _verify(checkpoint)
    except LoadError as error:
        print(f"epload: {error}", file=sys.stderr)
        return 1
    manifest = checkpoint.manifest
    for name, dtype, shape in zip(manifest.names, manifest.dtypes, manifest.shapes, strict=True):
        print(f"{dtype_name(dtype):<14}{list(shape)!s:<24}{name}")
    print(f"{len(manifest.names)} tensors, {manifest.nbytes / 1e9:.3f} GB")
    return 0


def _verify(checkpoint: Checkpoint) -> int:
    """Reads the whole checkpoint and prints the tensors with NaN or Inf. Returns 1 if there are any, else 0."""
    found = 0
    for tensor in find_non_finite(checkpoint):
        found += 1
        print(tensor)
    manifest = checkpoint.manifest
    print(
        f"{len(manifest.names)} tensors, {manifest.nbytes / 1e9:.3f} GB: headers without overlaps or holes, every byte read, "
        f"{found or 'no'} tensor{'s' if found > 1 else ''} with NaN or Inf"
    )
    return 1 if found else 0
