"""The trace of a message as a timeline, for `tidemill message trace`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence

import typer

from tidemill.cli.rest import call, has_several, options_of, segment
from tidemill.common.rest_client import Json
from tidemill.common.times import utc
from tidemill.message.namespaces import namespace_of

COLUMNS = ("AT", "AFTER", "EVENT", "GROUP", "ATTEMPT", "PLACE", "DETAIL", "BROKER")
_MIB = 1 << 20


def follow(context: typer.Context, message_id: str) -> Json:
    """Return all events of a message, with unreachable broker groups and damaged bytes.

    If the command has a namespace, return only the events of its topics: clients choose the ids.
    A terminal shows how much of the log remains to be read. Ctrl-C ends the search early.
    """
    path = f"/messages/{segment(message_id)}/trace"
    events: list[Json] = []
    unreachable: list[str] = []
    damaged: Counter[str] = Counter()
    cursor = ""
    try:
        while True:
            page = call(context, "GET", path, query={"cursor": cursor} if cursor else {})
            events += [event for event in page["events"] if _is_shown(context, event)]
            unreachable += [one for one in page.get("unreachable", []) if one not in unreachable]
            damaged.update(page.get("damagedBytes", {}))
            cursor = page.get("cursor", "")
            if not cursor:
                break
            _show_progress(f"{page['leftBytes'] // _MIB} MiB of log remain to be read")
    except KeyboardInterrupt:
        typer.echo("stopped; the following list is incomplete", err=True)
    events.sort(key=lambda event: (event["atMs"], event["broker"], event["position"]))
    answer: Json = {"messageId": message_id, "events": events}
    if cursor:
        answer["cursor"] = cursor
    if unreachable:
        answer["unreachable"] = unreachable
    if damaged:
        answer["damagedBytes"] = dict(damaged)
    return answer


def _is_shown(context: typer.Context, event: Json) -> bool:
    """Return whether the topic of an event is of the namespace, if there is one."""
    namespace = options_of(context).namespace
    return not namespace or namespace_of(event["topic"]) == namespace


def warn_damaged(journey: Json) -> None:
    """Warn about damaged parts of the logs."""
    for broker, size in sorted(journey.get("damagedBytes", {}).items()):
        typer.echo(
            f"{size} bytes of the log of {broker} are damaged; events of the message in them are"
            " missing from this list",
            err=True,
        )


def _show_progress(progress: str) -> None:
    if sys.stderr.isatty():
        typer.echo(progress, err=True)


def columns_of(events: Sequence[Json]) -> Sequence[str]:
    """Return the columns of the timeline."""
    return COLUMNS if has_several(events) else COLUMNS[:-1]


def rows_of(events: Sequence[Json]) -> list[Sequence[object]]:
    """Return the timeline: a row per event, with the time since the first event."""
    first_ms = events[0]["atMs"] if events else 0
    count = len(columns_of(events))
    return [_row(event, first_ms)[:count] for event in events]


def _row(event: Json, first_ms: int) -> tuple[object, ...]:
    place = f"{event['topic'] or '?'} {event['queueId']}:{event['queueOffset']}"
    if event["event"] in {"scheduled", "moved", "recalled"}:
        place = f"{event['topic'] or '?'} timer {event['queueOffset']}"
    return (
        utc(event["atMs"]),
        after(event["atMs"] - first_ms),
        event["event"].replace("_", "-"),
        event.get("consumerGroup"),
        event.get("attempt"),
        place,
        _detail(event),
        event["broker"],
    )


def _detail(event: Json) -> str:
    parts = []
    if due_at_ms := event.get("dueAtMs"):
        name = "due" if event["event"] in {"scheduled", "fired", "recalled", "moved"} else "until"
        parts.append(f"{name} {after(due_at_ms - event['atMs'])}")
    if client_id := event.get("clientId"):
        parts.append(f"by {client_id}")
    if reason := event.get("reason"):
        parts.append(reason.replace("_", " "))
    if body_size := event.get("bodySize"):
        parts.append(f"{body_size} bytes")
    return ", ".join(parts)


def after(duration_ms: int) -> str:
    """Return a signed duration, such as +1m 2.500s."""
    sign, duration_ms = ("-", -duration_ms) if duration_ms < 0 else ("+", duration_ms)
    seconds, ms = divmod(duration_ms, 1000)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    text = f"{seconds}.{ms:03d}s"
    for value, unit in ((minutes, "m"), (hours, "h"), (days, "d")):
        if value:
            text = f"{value}{unit} {text}"
    return sign + text
