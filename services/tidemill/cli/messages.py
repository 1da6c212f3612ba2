"""`tidemill message ...`."""

from __future__ import annotations

import base64
import sys
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.rest import Json, call, say, segment, show
from tidemill.cli.times import DURATION, INSTANT, duration_ms, instant_ms, utc

app = typer.Typer(
    no_args_is_help=True, help="Send messages, and look at them without consuming them."
)

Topic = Annotated[str, typer.Argument(help="Topic of the message.")]

COLUMNS = (
    "MESSAGE ID", "STORED AT", "STORED TOPIC", "QUEUE", "OFFSET", "ATTEMPT", "TAG", "REASON",
    "BODY",
)  # fmt: skip
BODY_SHOWN_MAX = 80  # characters of a table's cell


@app.command("send")
def send_message(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic to send to.")],
    body: Annotated[str | None, typer.Argument(help="The body, as text.")] = None,
    body_file: Annotated[
        Path | None,
        typer.Option(help="Take the body from this file instead; - is standard input."),
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar=DURATION, help="Deliver so long from now, as 1h30m.")
    ] = None,
    at: Annotated[
        str | None, typer.Option(metavar=INSTANT, help="Deliver at this time, not earlier.")
    ] = None,
    level: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Deliver after one of 18 delays: 1s 5s 10s 30s 1m 2m ... 10m 20m 30m 1h 2h. "
            "Above 18 it is 2h.",
        ),
    ] = None,
    tag: Annotated[str | None, typer.Option(help="Tag, by which consumers filter.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", help="Key to find it by; repeat for more.")
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="Property; repeat for more."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Message group: those of one group stay in order.")
    ] = None,
) -> None:
    """Send a message, at once or for a later time.

    The topic takes it if it is of type NORMAL or MIXED; with a delay DELAY or MIXED, with a group
    FIFO or MIXED. What is delayed can be cancelled or moved until then: see `tidemill timer`.

    Examples:
    * `tidemill message send orders "hello" --tag new --key order-17`
    * `tidemill message send orders "pay up" --delay 1h30m`
    * `tidemill message send orders "happy new year" --at 2027-01-01T00:00:00+01:00`
    * `date | tidemill message send orders --body-file -`
    """
    if (body is None) == (body_file is None):
        raise typer.BadParameter("give either a body or --body-file")
    if sum(time is not None for time in (delay, at, level)) > 1:
        raise typer.BadParameter("give at most one of --delay, --at and --level")
    fields = {
        "body": body,
        "bodyBase64": None if body_file is None else _read_base64(body_file),
        "delayMs": None if delay is None else duration_ms(delay),
        "deliverAtMs": None if at is None else instant_ms(at),
        "delayLevel": level,
        "tag": tag,
        "keys": keys,
        "properties": _properties(properties or []),
        "messageGroup": group,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    sent = call(context, "POST", f"/topics/{segment(topic)}/messages", body=given)
    if "timerId" in sent:
        when = f"will be delivered at {utc(sent['deliverAtMs'])}, as timer {sent['timerId']}"
        say(context, sent, f"message {sent['messageId']} {when}")
    else:
        place = f"queue {sent['queueId']}, offset {sent['queueOffset']}"
        say(context, sent, f"message {sent['messageId']} is stored: {place}")


@app.command("show")
def show_message(
    context: typer.Context,
    topic: Topic,
    message_id: Annotated[str, typer.Argument(help="Id that the producer got.")],
) -> None:
    """Show a message and its copies on retry and dead-letter topics.

    Example: tidemill message show orders 01A2B3 -o json
    """
    path = f"/topics/{segment(topic)}/messages/{segment(message_id)}"
    answer = call(context, "GET", path)
    show(context, answer, COLUMNS, [_row(message) for message in answer["messages"]])


@app.command("find")
def find_messages(
    context: typer.Context,
    topic: Topic,
    key: Annotated[str, typer.Option(help="One of the keys that the producer set.")],
    limit: Annotated[int, typer.Option(min=1, max=256, help="At most so many.")] = 32,
) -> None:
    """Find messages by key, the newest first.

    Example: tidemill message find orders --key order-17
    """
    query = {"key": key, "limit": str(limit)}
    answer = call(context, "GET", f"/topics/{segment(topic)}/messages", query=query)
    show(context, answer, COLUMNS, [_row(message) for message in answer["messages"]])
    if not answer["messages"]:
        typer.echo(f"nothing found: topic {topic} holds no message with the key {key}", err=True)


def _read_base64(path: Path) -> str:
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read the body: {error}") from error
    return base64.b64encode(data).decode()


def _properties(given: list[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, separator, _ in pairs if not separator]:
        raise typer.BadParameter(f"a property is given as NAME=VALUE, not {wrong[0]!r}")
    return {name: value for name, _, value in pairs}


def _row(message: Json) -> tuple[object, ...]:
    body = message.get("bodyText")
    if body is None:
        body = f"({message['bodySize']} bytes)"
    return (
        message["messageId"],
        utc(message["storedAtMs"]),
        message["storedTopic"],
        message["queueId"],
        message["queueOffset"],
        message["deliveryAttempt"],
        message.get("tag"),
        message.get("reason"),
        printable(body if len(body) <= BODY_SHOWN_MAX else body[:BODY_SHOWN_MAX] + "..."),
    )


def printable(text: str) -> str:
    """Return `text` with escapes for what would move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
