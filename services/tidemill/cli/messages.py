"""`tidemill message ...`."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import typer

from tidemill.cli.rest import Json, call, segment, show

app = typer.Typer(no_args_is_help=True, help="Look at messages without consuming them.")

Topic = Annotated[str, typer.Argument(help="Topic of the message.")]

COLUMNS = (
    "MESSAGE ID", "STORED AT", "STORED TOPIC", "QUEUE", "OFFSET", "ATTEMPT", "TAG", "REASON",
    "BODY",
)  # fmt: skip
BODY_SHOWN_MAX = 80  # characters of a table's cell


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


def _row(message: Json) -> tuple[object, ...]:
    body = message.get("bodyText")
    if body is None:
        body = f"({message['bodySize']} bytes)"
    return (
        message["messageId"],
        _utc(message["storedAtMs"]),
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


def _utc(at_ms: int) -> str:
    at = datetime.fromtimestamp(at_ms / 1000, tz=UTC)
    return at.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
