"""`tidemill message ...`."""

from __future__ import annotations

import base64
import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.reading import queues_of, read
from tidemill.cli.rest import (
    OutputFormat,
    call,
    has_several,
    options_of,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.cli.tracing import columns_of, follow, rows_of, warn_damaged
from tidemill.cli.watching import watch
from tidemill.common.prompts import EXIT_REFUSED
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, INSTANT, duration_ms, instant_ms, utc

app = typer.Typer(
    no_args_is_help=True, help="Send messages, and look at them without consuming them."
)

Topic = Annotated[str, typer.Argument(help="Topic of the message.")]

COLUMNS = (
    "MESSAGE ID",
    "STORED AT",
    "STORED TOPIC",
    "QUEUE",
    "OFFSET",
    "ATTEMPT",
    "TAG",
    "REASON",
    "BODY",
    "BROKER",
)
BODY_SHOWN_MAX = 80  # characters of a table's cell
TAIL_EVERY_S = 1.0  # between two looks: people read no faster


class Begin(StrEnum):
    """Where to begin to read a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


@app.command("send")
def send_message(
    context: typer.Context,
    topic: Annotated[str, typer.Argument(help="Topic to send to.")],
    body: Annotated[str | None, typer.Argument(help="The body, as text.")] = None,
    body_file: Annotated[
        Path | None, typer.Option(help="Take the body from this file instead; - is standard input.")
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
    show_messages(context, answer, answer["messages"])


@app.command("trace")
def trace_message(
    context: typer.Context,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Id that the producer got.")],
) -> None:
    """Show what happened to a message, by the log: stored, delivered, acked, and the like.

    The log is read from the message's first record to where it ends now; Ctrl-C shows what was
    found until then. What retention has taken of it nobody can tell.

    Examples:
    * `tidemill message trace 01A2B3`
    * `tidemill -o json message trace 01A2B3`
    """
    journey = follow(context, message_id)
    events = journey["events"]
    show(context, journey, columns_of(events), rows_of(events))
    warn_damaged(journey)
    warn_unreachable(journey)


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
    show_messages(context, answer, answer["messages"])
    if not answer["messages"]:
        typer.echo(f"nothing found: topic {topic} holds no message with the key {key}", err=True)


@app.command("peek")
def peek_messages(
    context: typer.Context,
    topic: Topic,
    limit: Annotated[
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="At most so many a queue.")
    ] = 10,
    queue: Annotated[
        int | None, typer.Option(min=0, help="Only of this queue; of all by default.")
    ] = None,
    broker: Annotated[str | None, typer.Option(help="Only of this broker group.")] = None,
    from_offset: Annotated[
        int | None, typer.Option("--from", min=0, help="Begin at this offset, not at the oldest.")
    ] = None,
) -> None:
    """Show the first messages of each queue of a topic; nothing is consumed.

    Those that no group has acked and those that all have look alike: it is what the topic holds.

    Examples:
    * `tidemill message peek orders`
    * `tidemill message peek orders --queue 3 --from 1700 --limit 1 -o json`
    """
    found: list[Json] = []
    queues, unreachable = queues_of(context, topic)
    for each in queues:
        if queue not in (None, each.queue_id) or broker not in (None, each.broker):
            continue
        begin = each.min_offset if from_offset is None else from_offset
        found += read(context, topic, each, begin, limit)
    show_messages(context, {"messages": found, "unreachable": unreachable}, found)
    if not found:
        typer.echo("nothing found: no message is there", err=True)


@app.command("verify")
def verify_message(
    context: typer.Context,
    topic: Topic,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    client: Annotated[
        str, typer.Option(help="Id of the client that is to consume it (`tidemill client ls`).")
    ],
    timeout: Annotated[
        str, typer.Option(metavar=DURATION, help="How long to wait for the client's answer.")
    ] = "5s",
    force: Annotated[
        bool,
        typer.Option("--force", help="Also where it is not known what the client subscribes to."),
    ] = False,
) -> None:
    """Let one client consume a message once more, and show what came of it.

    Its listener gets the message as at a delivery, with all that it does; nothing is acked, and no
    group's progress changes. Java push consumers do it, with messages of topics that they subscribe
    to; clients of other languages cannot.

    Example: tidemill message verify orders 01A... --client host@4711@0@abc
    """
    body = {"topic": topic, "messageId": message_id, "timeoutMs": duration_ms(timeout)}
    body |= {"force": True} if force else {}
    answer = call(context, "POST", f"/clients/{segment(client)}:verify", body=body)
    outcome = "consumed" if answer["consumed"] else "FAILED to consume"
    reason = f": {printable(answer['reason'])}" if answer.get("reason") else ""
    say(context, answer, f"client {printable(client)} {outcome} message {message_id}{reason}")
    if not answer["consumed"]:
        raise typer.Exit(EXIT_REFUSED)


@app.command("tail")
def tail_messages(
    context: typer.Context,
    topic: Topic,
    begin: Annotated[
        Begin,
        typer.Option(
            "--from",
            case_sensitive=False,
            help="latest: only what comes from now on; earliest: first all that is there.",
        ),
    ] = Begin.LATEST,
) -> None:
    """Show the messages of a topic as they come, until Ctrl-C; nothing is consumed.

    Each queue is shown in its order. With --output json a line a message.

    Examples:
    * `tidemill message tail orders`
    * `tidemill message tail orders --from earliest -o json`
    """
    known: dict[tuple[str, int], int] = {}
    away: list[str] = []
    is_json = options_of(context).output is OutputFormat.JSON

    def look() -> bool:
        nonlocal away
        is_first, were_away = not known, away
        queues, away = queues_of(context, topic)
        if away and away != were_away:
            warn_unreachable({"unreachable": away})
        for queue in queues:
            name = queue.broker, queue.queue_id
            # A queue that appears later is new, and so is all that it holds; but what a broker
            # group has that was away until now may be old.
            is_skipped = begin is Begin.LATEST and (is_first or queue.broker in were_away)
            behind = known.get(name, queue.max_offset if is_skipped else queue.min_offset)
            for message in read(context, topic, queue, behind, queue.max_offset):
                typer.echo(json.dumps(message, ensure_ascii=False) if is_json else _line(message))
            known[name] = queue.max_offset
        return True

    watch(look, TAIL_EVERY_S)


def _line(message: Json) -> str:
    place = f"{message['broker']} {message['queueId']}:{message['queueOffset']}"
    return f"{utc(message['storedAtMs'])}  {place}  {_shown_body(message)}"


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


def show_messages(context: typer.Context, answer: Json, messages: list[Json]) -> None:
    """Print `answer` as JSON, or its messages as a table; say what is missing in it."""
    # Also where others are away: what is shown is then of some, and whose it is says something.
    is_several = has_several(messages) or bool(answer.get("unreachable"))
    count = len(COLUMNS) if is_several else len(COLUMNS) - 1
    show(context, answer, COLUMNS[:count], [_row(message)[:count] for message in messages])
    warn_unreachable(answer)


def _row(message: Json) -> tuple[object, ...]:
    return (
        message["messageId"],
        utc(message["storedAtMs"]),
        message["storedTopic"],
        message["queueId"],
        message["queueOffset"],
        message["deliveryAttempt"],
        message.get("tag"),
        message.get("reason"),
        _shown_body(message),
        message["broker"],
    )


def _shown_body(message: Json) -> str:
    body = message.get("bodyText")
    if body is None:
        body = f"({message['bodySize']} bytes)"
    return printable(body if len(body) <= BODY_SHOWN_MAX else body[:BODY_SHOWN_MAX] + "...")


def printable(text: str) -> str:
    """Return `text` with escapes for what would move the cursor or colour the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
