"""Defines what all commands share: options, tables, JSON, sizes in words, and errors as one line."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from epload.errors import LoadError, redact

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
"""Every command has it."""
variant_option = click.option(
    "--variant", default="", help="Of the weights in a folder, e.g. fp16; by default those without a variant."
)


class Commands(click.Group):
    """A group whose commands return their exit status, and end with one line on standard error if they fail."""

    def main(  # type: ignore[override]
        self, args: Sequence[str] | None = None, prog_name: str | None = None, **extra: Any
    ) -> None:
        """Exits with 0, or with what the command returned; 1 if it failed; 2 for wrong arguments."""
        extra["standalone_mode"] = False
        try:
            status = super().main(args, prog_name or "epload", **extra)
        except click.UsageError as error:
            where = error.ctx.command_path if error.ctx is not None else "epload"
            status = _fail(f"{error.format_message()} Try '{where} --help'.", 2)
        except click.Abort:
            status = _fail("interrupted", 130)
        except click.ClickException as error:
            status = _fail(error.format_message(), 1)
        except BrokenPipeError:  # the reader of a pipe has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            status = 1
        except (LoadError, OSError, ValueError, TypeError, ImportError) as error:
            status = _fail(str(error), 1)
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
    return None if isinstance(value, float) and value - value != 0 else value


def show(part: Table | str = "") -> None:
    """Prints to standard output; to a terminal in colors, elsewhere without a limit to the width of a line."""
    terminal = sys.stdout.isatty()
    width = None if terminal else 10_000
    console = Console(width=width, force_terminal=terminal, highlight=False, markup=False, emoji=False)
    with console.capture() as captured:
        console.print(part)
    click.echo(redact("\n".join(line.rstrip() for line in captured.get().splitlines())))


def facts(*rows: tuple[str, str]) -> Table:
    """Returns names and values, aligned, without empty values."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for title, text in rows:
        if text:
            grid.add_row(title, text)
    return grid


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> Table:
    """``right``: the columns aligned to the right, by number."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for number, column in enumerate(columns):
        grid.add_column(column, justify="right" if number in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid


def size(nbytes: float) -> str:
    """``"1.5 GB"``; a GB is 1e9 bytes."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}" if nbytes < 1000 * factor else f"{nbytes / factor:,.0f} {unit}"
    return f"{nbytes:.0f} B"
