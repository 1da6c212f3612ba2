"""`tidemill delivery ...`."""

from __future__ import annotations

from typing import Annotated, Final

import typer

from tidemill.cli.clients import is_unknown_client, warn_of_stranger
from tidemill.cli.completion_names import complete_group, complete_topic
from tidemill.cli.messages import printable
from tidemill.cli.rest import (
    PAGE_SIZE,
    call,
    check_filled,
    check_is_sure,
    has_several,
    in_namespace,
    say,
    segment,
    show,
    warn_unreachable,
)
from tidemill.common.clock import SystemClock
from tidemill.common.prompts import confirm
from tidemill.common.rest_client import Json
from tidemill.common.times import age, from_now

app = typer.Typer(no_args_is_help=True, help="List and release messages in flight.")

Name = Annotated[
    str,
    typer.Argument(
        metavar="GROUP",
        help="Name of the consumer group.",
        callback=in_namespace,
        autocompletion=complete_group,
    ),
]
Topic = Annotated[
    str | None,
    typer.Option(
        help="Only this topic, with its retries.",
        callback=in_namespace,
        autocompletion=complete_topic,
    ),
]
Queue = Annotated[
    int | None, typer.Option(min=0, help="Only queues with this number, without retries.")
]
Client = Annotated[
    str | None,
    typer.Option(help="Only deliveries to the client with this id.", callback=check_filled),
]
MessageId = Annotated[
    str | None,
    typer.Option(
        "--message", metavar="ID", help="Only the message with this id.", callback=check_filled
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the effect and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]

COLUMNS: Final = (
    "TOPIC",
    "QUEUE",
    "OFFSET",
    "MESSAGE ID",
    "ATTEMPT",
    "HELD BY",
    "SINCE",
    "ENDS",
    "RENEWED",
    "BROKER",
)


@app.command("list")
def list_deliveries(
    context: typer.Context,
    group: Name,
    topic: Topic = None,
    queue: Queue = None,
    client: Client = None,
    message: MessageId = None,
    limit: Annotated[int, typer.Option(min=1, help="Maximum number of messages.")] = 100,
) -> None:
    """List the messages in flight of a consumer group, the oldest first.

    ENDS is the end of the invisible duration: without an ack, another consumer then gets the
    message. RENEWED `yes`: the end moves on while the push consumer lives, for up to three hours.
    RENEWED `not yet`: the consumer has not confirmed that it has read the message.

    Examples:
    * `tidemill delivery list billing`
    * `tidemill delivery list billing --client worker-7@4711 --limit 1000 -o json`
    """
    query = _filter(topic=topic, queue=queue, clientId=client, messageId=message)
    given = {name: str(value) for name, value in query.items()}
    deliveries, has_more, unreachable = _pages(context, group, given, limit)
    now_ms = SystemClock().wall_ms()
    count = len(COLUMNS) if has_several(deliveries) else len(COLUMNS) - 1
    rows = [_row(delivery, now_ms)[:count] for delivery in deliveries]
    names = [each["messageId"] for each in deliveries if "messageId" in each]
    show(context, deliveries, COLUMNS[:count], rows, names=names)
    warn_unreachable({"unreachable": unreachable})
    if has_more:
        typer.echo(f"there are more than {limit} messages; raise --limit", err=True)


@app.command("release")
def release_deliveries(
    context: typer.Context,
    group: Name,
    topic: Topic = None,
    queue: Queue = None,
    client: Client = None,
    message: MessageId = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Release all messages of the group.")
    ] = False,
    is_dry: DryRun = False,
    is_sure: Yes = False,
) -> None:
    """Make messages in flight visible at once, so that other consumers get them.

    Use it for a hanging consumer. The delivery counts as an attempt. If the consumer still works on
    a message, the work is done twice, and its ack is rejected.

    Examples:
    * `tidemill delivery release billing --client worker-7@4711 --dry-run`
    * `tidemill delivery release billing --topic orders --queue 3`
    * `tidemill delivery release billing --all --yes`
    """
    body = _filter(topic=topic, queue=queue, clientId=client, messageId=message)
    if body and is_all:
        raise typer.BadParameter("--all cannot be combined with a filter")
    if not body and not is_all:
        raise typer.BadParameter(
            "no filter; give --topic, --queue, --client or --message, or --all for the whole group"
        )
    if is_all:
        body["all"] = True
    path = f"/groups/{segment(group)}/deliveries:release"
    if not is_dry:
        check_is_sure("delivery release", is_sure=is_sure)
    if is_dry or not is_sure:
        planned = call(context, "POST", path, body=body | {"dryRun": True})
        warn_unreachable(planned)
        _warn_of_stranger(context, client, planned)
        count = f"{'more than ' if planned['more'] else ''}{planned['messages']} messages"
        if is_dry:
            say(context, planned, f"{count} of group {group} would be released")
            return
        confirm(
            f"Release {count} of group {group}? Messages that consumers still work on are then"
            f" processed twice."
        )
    done = call(context, "POST", path, body=body)
    rest = "; there are more, so run the command again" if done["more"] else ""
    say(context, done, f"{done['messages']} messages of group {group} are released{rest}")
    _warn_of_stranger(context, client, done)
    warn_unreachable(done)


def _warn_of_stranger(context: typer.Context, client: str | None, release: Json) -> None:
    """Warn if no message was found for an unknown client: its id may be misspelt."""
    if client is None or release["messages"]:
        return
    if is_unknown_client(context, client):
        warn_of_stranger(client)


def _filter(**given: Json) -> dict[str, Json]:
    return {name: value for name, value in given.items() if value is not None}


def _pages(
    context: typer.Context, group: str, query: dict[str, str], limit: int
) -> tuple[list[Json], bool, list[str]]:
    """Return up to `limit` messages, whether there are more, and unreachable broker groups."""
    found: list[Json] = []
    unreachable: set[str] = set()
    while True:
        query["pageSize"] = str(min(limit - len(found), PAGE_SIZE))
        page = call(context, "GET", f"/groups/{segment(group)}/deliveries", query=query)
        found.extend(page["deliveries"])
        unreachable.update(page.get("unreachable", ()))
        token = page.get("nextPageToken")
        if not token or len(found) >= limit:
            return found, bool(token), sorted(unreachable)
        query["pageToken"] = token


def _row(delivery: Json, now_ms: int) -> tuple[object, ...]:
    renewed = "yes" if delivery["renewed"] else "no"
    return (
        delivery["topic"] + (" (retry)" if delivery["retry"] else ""),
        delivery["queue"],
        delivery["offset"],
        delivery.get("messageId"),
        delivery["attempt"],
        printable(delivery.get("clientId", "(unknown)")),
        age(delivery["sinceMs"], now_ms),
        from_now(delivery["untilMs"], now_ms),
        "not yet" if delivery["onItsWay"] else renewed,
        delivery["broker"],
    )
