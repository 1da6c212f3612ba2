"""`tidemill message ...`.

`send_message` is one piece because each of its options is a parameter.
"""

from __future__ import annotations

import base64
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tidemill.cli.completion_names import complete_topic
from tidemill.cli.message_stream import send_lines
from tidemill.cli.reading import queues_of, read
from tidemill.cli.rest import (
    call,
    has_several,
    in_namespace,
    output_of,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.cli.tracing import columns_of, follow, rows_of, warn_damaged
from tidemill.cli.watching import watch
from tidemill.common.exit_codes import EXIT_REFUSED
from tidemill.common.rest_client import Json
from tidemill.common.times import DURATION, INSTANT, duration_ms, instant_ms, utc

app = typer.Typer(
    no_args_is_help=True, help="Send messages, and look at them without consuming them."
)

Topic = Annotated[
    str,
    typer.Argument(
        help="Topic of the message.", callback=in_namespace, autocompletion=complete_topic
    ),
]

COLUMNS = (
    "MESSAGE ID",
    "STORED AT",
    "STORED TOPIC",
    "QUEUE",
    "OFFSET",
    "ATTEMPT",
    "TAG",
    "ORIGIN",
    "REASON",
    "BODY",
    "BROKER",
)
BODY_SHOWN_MAX = 80  # characters of a table's cell
TAIL_COLUMNS = ("STORED", "POSITION", "BODY")
TAIL_EVERY_S = 1.0  # between two looks: people read no faster


class Begin(StrEnum):
    """Where to begin to read a topic."""

    EARLIEST = "earliest"
    LATEST = "latest"


def _checked_key(key: str | None) -> str | None:
    """Return a key that a header can have."""
    if key is not None and (not key.isprintable() or key != key.strip() or not key):
        raise typer.BadParameter(f"{key!r} is empty, or has control characters or spaces at an end")
    return key


@app.command("send")
def send_message(
    context: typer.Context,
    topic: Annotated[
        str,
        typer.Argument(
            help="Topic to send to.", callback=in_namespace, autocompletion=complete_topic
        ),
    ],
    body: Annotated[
        str | None,
        typer.Argument(help="The body, as text; -: a message per line of standard input."),
    ] = None,
    body_file: Annotated[
        Path | None, typer.Option(help="Take the body from this file instead; - is standard input.")
    ] = None,
    delay: Annotated[
        str | None, typer.Option(metavar=DURATION, help="Delay of the delivery, such as 1h30m.")
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
    tag: Annotated[str | None, typer.Option(help="Tag for filters of consumers.")] = None,
    keys: Annotated[
        list[str] | None, typer.Option("--key", help="Key to find it by; repeat for more.")
    ] = None,
    properties: Annotated[
        list[str] | None,
        typer.Option("--property", metavar="NAME=VALUE", help="Property; repeat for more."),
    ] = None,
    group: Annotated[
        str | None, typer.Option(help="Message group; its messages stay in order.")
    ] = None,
    priority: Annotated[
        int | None,
        typer.Option(min=0, help="Priority on a PRIORITY topic; a higher one is delivered first."),
    ] = None,
    idempotency_key: Annotated[
        str | None,
        typer.Option(
            callback=_checked_key,
            help="Dedup key: a topic with deduplication stores the message once, and a repeat"
            " prints the first answer.",
        ),
    ] = None,
    is_json_lines: Annotated[
        bool,
        typer.Option(
            "--json-lines",
            help="With -: each line is a JSON object with fields of REST, such as body, tag, keys,"
            " properties, delayMs, messageGroup, idempotencyKey.",
        ),
    ] = False,
    rate: Annotated[
        float | None,
        typer.Option(min=0.001, help="With -: messages per second at most. Default: no limit."),
    ] = None,
    is_creation: Annotated[
        bool, typer.Option("--create", help="Create the topic if it is missing. Default: an error.")
    ] = False,
) -> None:
    """Send a message, at once or for a later time; or one per line of standard input.

    The type of the topic must be NORMAL or MIXED; with a delay DELAY or MIXED, with a message group
    FIFO or MIXED, with a priority PRIORITY. `tidemill timer` cancels or reschedules a delayed
    message until it is due.

    Examples:
    * `tidemill message send orders "hello" --tag new --key order-17`
    * `tidemill message send orders "pay up" --delay 1h30m`
    * `tidemill message send orders "happy new year" --at 2027-01-01T00:00:00+01:00`
    * `date | tidemill message send orders --body-file -`
    * `tidemill message send orders "hello" --idempotency-key order-17`
    * `tidemill message send orders - --rate 100 < bodies.txt`
    * `tidemill message send orders - --json-lines < messages.jsonl`

    With `-`, the lines are sent in their order, in batches. A line waits at most 50 ms for the next
    ones. Exit status: 5 if some lines failed or are unknown, 1 if all failed.
    """
    is_stream = body == "-"
    if not is_stream and (is_json_lines or rate is not None):
        raise typer.BadParameter("--json-lines and --rate need the body -")
    if is_stream and idempotency_key is not None:
        raise typer.BadParameter("with -, --idempotency-key would be the same for each line")
    if (body is None) == (body_file is None):
        raise typer.BadParameter("give either a body or --body-file")
    if sum(time is not None for time in (delay, at, level)) > 1:
        raise typer.BadParameter("give at most one of --delay, --at and --level")
    fields = {
        "body": None if is_stream else body,
        "bodyBase64": None if body_file is None else file_base64(body_file),
        "delayMs": None if delay is None else duration_ms(delay),
        "deliverAtMs": None if at is None else instant_ms(at),
        "delayLevel": level,
        "tag": tag,
        "keys": keys,
        "properties": named_values(properties or []),
        "messageGroup": group,
        "priority": priority,
    }
    given = {name: value for name, value in fields.items() if value is not None}
    path = f"/topics/{segment(topic)}/messages"
    query = {"create": "true"} if is_creation else None
    if is_stream:
        send_lines(context, path, given, query=query, is_json=is_json_lines, rate=rate)
        return
    headers = None if idempotency_key is None else {"Idempotency-Key": idempotency_key}
    sent = call(context, "POST", path, query=query, body=given, headers=headers)
    if sent.get("duplicate"):
        say(context, sent, f"not stored again: message {sent['messageId']} has this key")
    elif "timerId" in sent:
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
    """Show the history of a message from the log: stored, delivered, acked and other events.

    The command reads the log from the first record of the message to the current end. Ctrl-C shows
    the events found so far. Events that retention has removed are missing.

    Examples:
    * `tidemill message trace 01A2B3`
    * `tidemill -o json message trace 01A2B3`
    """
    journey = follow(context, message_id)
    events = journey["events"]
    show(context, journey, columns_of(events), rows_of(events), items=events, names=[message_id])
    warn_damaged(journey)
    warn_unreachable(journey)


@app.command("find")
def find_messages(
    context: typer.Context,
    topic: Topic,
    key: Annotated[str, typer.Option(help="One of the keys that the producer set.")],
    limit: Annotated[int, typer.Option(min=1, max=256, help="Maximum number of messages.")] = 32,
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
        int, typer.Option("--limit", "-n", min=1, max=10_000, help="Maximum per queue.")
    ] = 10,
    queue: Annotated[int | None, typer.Option(min=0, help="Only this queue. Default: all.")] = None,
    broker: Annotated[str | None, typer.Option(help="Only this broker group.")] = None,
    from_offset: Annotated[
        int | None, typer.Option("--from", min=0, help="First offset. Default: the oldest message.")
    ] = None,
) -> None:
    """Show the first messages of each queue of a topic, without consuming them.

    The list contains acked and unacked messages alike.

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
        typer.echo("no messages", err=True)


@app.command("verify")
def verify_message(
    context: typer.Context,
    topic: Topic,
    message_id: Annotated[str, typer.Argument(metavar="ID", help="Id of the message.")],
    client: Annotated[
        str, typer.Option(help="Id of the client that consumes it (see `tidemill client list`).")
    ],
    timeout: Annotated[
        str,
        typer.Option(
            metavar=DURATION, help="Time to wait for the answer of the client; at most 20s."
        ),
    ] = "5s",
    force: Annotated[
        bool, typer.Option("--force", help="Send it even if the subscriptions are unknown.")
    ] = False,
) -> None:
    """Let one client consume a message again, and show the result.

    The listener of the client gets the message like a delivery, with all side effects. Nothing is
    acked, and no progress changes. Only Java push consumers can do this, and only for topics of
    their subscriptions.

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
            help="latest: only new messages; earliest: stored messages first.",
        ),
    ] = Begin.LATEST,
) -> None:
    """Show the messages of a topic as they arrive, until Ctrl-C, without consuming them.

    The messages of a queue are in order. --output json prints one line per message.

    Examples:
    * `tidemill message tail orders`
    * `tidemill message tail orders --from earliest -o json`
    """
    known: dict[tuple[str, int], int] = {}
    unreachable: list[str] = []
    output = output_of(context)
    is_first_message = True

    def look() -> bool:
        nonlocal unreachable, is_first_message
        is_first, earlier_unreachable = not known, unreachable
        queues, unreachable = queues_of(context, topic)
        if unreachable and unreachable != earlier_unreachable:
            warn_unreachable({"unreachable": unreachable})
        for queue in queues:
            name = queue.broker, queue.queue_id
            # A queue that appears later is new, and so are its messages. But the messages of a
            # broker group that was unreachable may be old.
            was_unreachable = queue.broker in earlier_unreachable
            is_skipped = begin is Begin.LATEST and (is_first or was_unreachable)
            behind = known.get(name, queue.max_offset if is_skipped else queue.min_offset)
            for message in read(context, topic, queue, behind, queue.max_offset):
                output.stream(
                    message,
                    TAIL_COLUMNS,
                    _tail_row(message),
                    name=message["messageId"],
                    is_first=is_first_message,
                )
                is_first_message = False
            known[name] = queue.max_offset
        return True

    watch(look, TAIL_EVERY_S)


def _tail_row(message: Json) -> tuple[str, str, str]:
    place = f"{message['broker']} {message['queueId']}:{message['queueOffset']}"
    return utc(message["storedAtMs"]), place, _shown_body(message)


def file_base64(path: Path) -> str:
    """Return the content of a file, or of standard input for `-`, in base64."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"cannot read the body: {error}") from error
    return base64.b64encode(data).decode()


def named_values(given: list[str]) -> dict[str, str]:
    """Return properties from texts NAME=VALUE."""
    pairs = [text.partition("=") for text in given]
    if wrong := [name for name, separator, _ in pairs if not separator]:
        raise typer.BadParameter(f"property {wrong[0]!r} is not NAME=VALUE")
    return {name: value for name, _, value in pairs}


def show_messages(context: typer.Context, answer: Json, messages: list[Json]) -> None:
    """Print `answer` as JSON, or its messages as a table; warn about missing parts."""
    # If a broker group is unreachable, the name of the other ones matters.
    is_several = has_several(messages) or bool(answer.get("unreachable"))
    count = len(COLUMNS) if is_several else len(COLUMNS) - 1
    rows = [_row(message)[:count] for message in messages]
    names = [message["messageId"] for message in messages]
    show(context, answer, COLUMNS[:count], rows, items=messages, names=names)
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
        message.get("originTopic"),
        message.get("reason"),
        _shown_body(message),
        message["broker"],
    )


def _shown_body(message: Json) -> str:
    body = message.get("bodyText")
    if body is None:
        hidden = "hidden, " if message.get("bodyHidden") else ""
        body = f"({hidden}{message['bodySize']} bytes)"
    return printable(body if len(body) <= BODY_SHOWN_MAX else body[:BODY_SHOWN_MAX] + "...")


def printable(text: str) -> str:
    """Return `text` with escapes for control characters of the terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
