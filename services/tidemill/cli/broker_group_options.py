"""Parameters of the commands with a broker group or a replica."""

from __future__ import annotations

import sys
from typing import Annotated, Final

import typer

from tidemill.cli.completion_names import complete_broker_group

DRY_QUERY: Final = {"dryRun": "true"}
Name = Annotated[
    str,
    typer.Argument(
        help="Name of the broker group, as `list` shows it.", autocompletion=complete_broker_group
    ),
]
AnyName = Annotated[
    str, typer.Argument(help="Broker group. Default: all.", autocompletion=complete_broker_group)
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]
YesOnTerminal = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask on a terminal.")]


def is_asked(*, is_sure: bool) -> bool:
    """Whether to ask: only a person can answer, and scripts run these commands without one."""
    return not is_sure and sys.stdin.isatty()
