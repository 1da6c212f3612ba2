"""`tidemill filter ...`: SQL92 filters, without a connection."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.rest import say
from tidemill.common.errors import IllegalFilter
from tidemill.common.exit_codes import EXIT_PROBLEM
from tidemill.common.prompts import fail
from tidemill.message import limits
from tidemill.message.sql92.conditions import PropertyNumbers
from tidemill.message.sql92.grammar import parse

RESULTS: Final = ("FALSE", "UNKNOWN", "TRUE")

app = typer.Typer(no_args_is_help=True, help="Check SQL filters of consumers.")


@app.callback()
def _commands() -> None:
    """Make a group of the only command."""


@app.command("check")
def check(
    context: typer.Context,
    expression: Annotated[str, typer.Argument(help="The SQL92 filter.", metavar="FILTER")],
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="A user property of a message."),
    ] = None,
    tag: Annotated[str, typer.Option(help="The tag of the message.")] = "",
    keys: Annotated[list[str] | None, typer.Option("--key", help="A key of the message.")] = None,
) -> None:
    """Show how a filter is read, and whether a message matches it. It needs no broker.

    A condition on a missing property, or on a value that cannot be compared, is UNKNOWN. Only TRUE
    matches. TAGS is the tag, and KEYS are all keys with blanks between them. The exit status of an
    illegal filter is 4.

    Examples:
    - tidemill filter check "price > 10 AND region IN ('eu', 'us')"

    - tidemill filter check "price > 10" --property price=12.5
    """
    try:
        limits.SQL_FILTER.check_text(expression)
        condition = parse(expression)
    except IllegalFilter as error:
        fail(error.message, EXIT_PROBLEM)
    answer = {"expression": condition.canonical()}
    text = condition.canonical()
    if properties or tag or keys:
        values = dict(map(_property, properties or ()))
        values |= {"TAGS": tag} if tag else {}
        values |= {"KEYS": " ".join(keys)} if keys else {}
        numbers = PropertyNumbers()
        evaluate = condition.compiled(numbers)
        answer["result"] = RESULTS[evaluate([values.get(name) for name in numbers.by_name])]
        matches = "matches" if answer["result"] == "TRUE" else "does not match"
        text += f"\n{answer['result']}: the message {matches}"
    say(context, answer, text)


def _property(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise typer.BadParameter(f"--property {text}: write NAME=VALUE")
    return name, value
