"""The root command: options anywhere, former names, repetition and exit codes."""

from __future__ import annotations

import contextlib
import io
import sys
import time
from collections.abc import Sequence
from typing import Any, Final

import typer
from typer.core import TyperGroup

from tidemill.cli.former_names import present_command
from tidemill.cli.rest import partial_answers
from tidemill.common.exit_codes import EXIT_INTERRUPTED, EXIT_PARTIAL
from tidemill.common.times import duration_within_ms

# Options of the root that may also stand behind a command, where most people write them.
WITH_VALUE: Final = (
    "-o",
    "--output",
    "--admin",
    "--context",
    "--confirm",
    "--token",
    "--token-file",
    "--secret-file",
    "--admin-ca-file",
    "--namespace",
    "--interval",
)
FLAGS: Final = ("-w", "--watch", "--no-color", "-q", "--quiet", "--insecure", "--plain-token")
# Verbs of commands that only show something.
WATCHED: Final = frozenset(
    {"list", "show", "summary", "history", "histogram", "settings", "status", "slow-calls"}
)
CLEAR: Final = "\x1b[H\x1b[J"  # cursor to the first line, and clear from there


class RootGroup(TyperGroup):
    """The root command.

    It exits with 5 if a part of the answer to a command is missing, and with 130 after Ctrl-C.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the options of the root, which may stand anywhere."""
        return super().parse_args(ctx, move_shared(args))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find a command, also by a former name."""
        return super().resolve_command(ctx, present_command(args))

    def invoke(self, ctx: Any) -> Any:
        """Run a command, with --watch again and again."""
        try:
            with partial_answers() as has_partial:
                if ctx.params.get("is_watched"):
                    self._watch(ctx, ctx.params["interval"])
                result = super().invoke(ctx)
                if has_partial():
                    raise typer.Exit(EXIT_PARTIAL)
                return result
        except KeyboardInterrupt:
            raise typer.Exit(EXIT_INTERRUPTED) from None

    def _watch(self, ctx: Any, interval: str) -> None:
        """Run a command until Ctrl-C, or until it fails. A terminal shows the last output alone."""
        # click keeps the name of the command here, and has no public way to run it again.
        arguments = present_command([*ctx._protected_args, *ctx.args])  # noqa: SLF001
        if len(arguments) < 2 or arguments[1] not in WATCHED:
            raise typer.BadParameter("--watch is for commands that list or show something")
        interval_ms = duration_within_ms("--interval", interval, least="10ms", most="1h")
        while True:
            ctx._protected_args, ctx.args = arguments[:1], arguments[1:]  # noqa: SLF001
            if sys.stdout.isatty():
                self._redraw(ctx)
            else:
                super().invoke(ctx)
                sys.stdout.flush()
            time.sleep(interval_ms / 1_000)

    def _redraw(self, ctx: Any) -> None:
        """Replace the content of the terminal by the output of a command, without flicker."""
        screen = _Screen()
        with contextlib.redirect_stdout(screen):
            super().invoke(ctx)
        sys.stdout.write(CLEAR + screen.getvalue())
        sys.stdout.flush()


class _Screen(io.StringIO):
    """The output of one run, as for a terminal."""

    def isatty(self) -> bool:
        """Whether it is a terminal."""
        return True


def move_shared(arguments: Sequence[str]) -> list[str]:
    """Move the options of the root to the front."""
    first: list[str] = []
    rest: list[str] = []
    remaining = iter(arguments)
    for argument in remaining:
        if argument == "--":
            rest += [argument, *remaining]
        elif argument in WITH_VALUE:
            first.extend((argument, next(remaining, "")))
        elif argument in FLAGS or argument.startswith(tuple(f"{each}=" for each in WITH_VALUE[1:])):
            first.append(argument)
        else:
            rest.append(argument)
    return [*first, *rest]
