"""The ``epload`` command. Each command parses, calls the library and prints."""

from __future__ import annotations

import click

from epload.cli.checkpoints import diff, inspect, verify
from epload.cli.convert import convert
from epload.cli.output import Commands, facts, json_option, print_json, show, table
from epload.cli.plan import plan


@click.group(cls=Commands, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="epload", prog_name="epload")
@click.pass_context
def main(context: click.Context) -> None:
    """Work with the checkpoints that epload loads into sharded PyTorch models.

    Each command exits with 0 if all is well; with 1 if it failed, or found what it looks for (NaN, differences, a failed check);
    and with 2 for wrong arguments, but with 1 if only the work itself shows that they are wrong.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


@main.command()
@json_option
def info(as_json: bool) -> None:
    """Show the version and the options of this build."""
    from epload.cli.doctor import full_build_info

    built = full_build_info()
    if as_json:
        print_json(built)
    else:
        show(facts(*((key, str(value)) for key, value in built.items())))


@main.command()
@json_option
def doctor(as_json: bool) -> int:
    """Check this machine: build, devices, memory, limits, network.

    Each check is ok, warn (loads may be slow, or fail in some modes) or fail, with what to do. Exits with 1 if one fails. A
    build that does not fit the installed torch fails in every command, with how to rebuild it.
    """
    from epload.cli.doctor import CHECKS

    findings = {name: check() for name, check in CHECKS.items()}
    if as_json:
        keys = ("check", "status", "found", "advice")
        print_json({"findings": [dict(zip(keys, (name, *row), strict=True)) for name, row in findings.items()]})
    else:
        show(table([("check", "", "found"), *((name, status, found) for name, (status, found, _) in findings.items())]))
        if advice := [(name, advice) for name, (_, _, advice) in findings.items() if advice]:
            show()
            show(table([("check", "what to do"), *advice]))
    return int(any(status == "fail" for status, _, _ in findings.values()))


for command in (inspect, verify, diff, plan, convert):
    main.add_command(command)
