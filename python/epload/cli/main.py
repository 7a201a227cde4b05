"""The ``epload`` command. Each command parses, calls the library and prints."""

from __future__ import annotations

import click

from epload.cli.checkpoints import diff, inspect, verify
from epload.cli.convert import convert
from epload.cli.doctor import doctor, full_build_info
from epload.cli.output import Commands, facts, json_option, print_json, show
from epload.cli.plan import plan
from epload.native.info import build_info


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(build_info()["version"], prog_name="epload")
@click.pass_context
def main(context: click.Context) -> None:
    """Loads model weights into sharded PyTorch models.

    Commands exit with 0; with 1 if they failed, or found what they look for (NaN, differences, a failed check); with 2 for wrong
    arguments.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@json_option
def info(as_json: bool) -> None:
    """Show the version and the options of this build."""
    built = full_build_info()
    if as_json:
        print_json(built)
    else:
        show(facts(*((key, str(value)) for key, value in built.items())))


for command in (inspect, verify, diff, plan, doctor, convert):
    main.add_command(command)
