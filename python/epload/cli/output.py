"""Defines what all commands share: options, tables, JSON, and errors as one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

from epload.errors import LoadError, redact
from epload.observe.render import list_first

if TYPE_CHECKING:
    from epload.checkpoint.manifest import Manifest

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
"""Every command has it."""
variant_option = click.option(
    "--variant",
    default="",
    help="Read this variant of the weights in a folder, such as fp16. The default is the one without.",
)
existing_file = click.Path(exists=True, dir_okay=False)
prefix_option = click.option("--prefix", default="", help="Take the model at this place in a DCP folder, such as app.model.")


class Commands(click.Group):
    """A group whose commands return their exit status, and end with one line on standard error if they fail."""

    def main(self, *args: Any, **options: Any) -> None:  # type: ignore[override]
        """Exits with 0, or with what the command returned; 1 if it failed; 2 for wrong arguments."""
        try:
            status = super().main(*args, **{"prog_name": "epload"} | options | {"standalone_mode": False})
        except click.ClickException as error:
            context = getattr(error, "ctx", None)  # of wrong arguments
            hint = f" Try '{context.command_path} --help'." if context is not None else ""
            message = error.format_message()
            status = _fail(f"{message.removesuffix('.')}.{hint}" if hint else message, error.exit_code)
        except click.Abort:
            status = _fail("interrupted", 130)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        except (LoadError, OSError, ValueError, TypeError, ImportError) as error:
            status = _fail(str(error).replace("overwrite=True", "--overwrite"), 1)
        sys.exit(status or 0)


def _fail(message: str, status: int) -> int:
    click.echo(redact(f"epload: {' '.join(message.split())}"), err=True)
    return status


def print_json(value: object) -> None:
    """Prints JSON without credentials. Numbers that JSON lacks, such as an infinite rate, are null."""
    click.echo(json.dumps(_printable(value), indent=2))


def _printable(value: Any) -> Any:
    if isinstance(value, dict):
        return {redact(str(key)): _printable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_printable(part) for part in value]
    if isinstance(value, str):
        return redact(value)
    return None if isinstance(value, float) and not isfinite(value) else value


def show(text: str = "") -> None:
    """Prints a text without credentials."""
    click.echo(redact(text))


def not_read(*manifests: Manifest) -> str:
    """Says which entries of the files are no tensors of a model; empty if there are none."""
    ignored = list(dict.fromkeys(name for manifest in manifests for name in manifest.ignored))
    return f"; not read, as no tensors of a model: {list_first(ignored)}" if ignored else ""


def facts(*rows: tuple[str, str]) -> str:
    """Returns names and values, aligned, without empty values."""
    return table([row for row in rows if row[1]])


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """Returns rows as aligned lines. ``right``: numbers of the columns that are aligned to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.rjust(widths[i]) if i in right else cell.ljust(widths[i]) for i, cell in enumerate(row)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
