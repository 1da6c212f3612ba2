"""`tidemill storage ...`."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from tidemill.cli.rest import (
    PAGE_SIZE,
    call,
    has_several,
    is_text,
    show,
    show_table,
    warn_unreachable,
)
from tidemill.common.rest_client import Json
from tidemill.common.times import age

TOPICS_SHOWN = 20  # default
STATES = ("live", "dead", "stub", "control", "pinned")
DERIVED = ("queues", "index")
COLUMNS = (
    *("BROKER GROUP", "DISK", "FREE", "RESERVE"),
    *map(str.upper, (*STATES, *DERIVED)),
    "STATE FLOOR",
)

app = typer.Typer(no_args_is_help=True, help="Show what holds the space of the disks.")


@app.command("show")
def show_storage(
    context: typer.Context,
    topics_max: Annotated[
        int, typer.Option("--topics", min=0, help=f"Number of the largest topics; {TOPICS_SHOWN}.")
    ] = TOPICS_SHOWN,
) -> None:
    """Show the disk and the log of each broker group, and the largest topics.

    The log has live messages, dead messages, what packs keep of dead messages (STUB), other records
    (CONTROL), and messages of pending timers (PINNED). QUEUES and INDEX are the files that the
    broker derives from the log: about 20 bytes per message, and 16 bytes per key or message id.

    FREED is about what a deletion of the topic frees at most. The space of a segment returns when
    half of it is dead, on a full disk when 1 MiB or a quarter is. JSON has all topics.

    Example: tidemill storage show --topics 50
    """
    storage = _read(context)
    groups = storage["brokerGroups"]
    show(context, storage, COLUMNS, [_group_row(group) for group in groups], items=groups)
    if is_text(context):
        _show_topics(context, storage, topics_max)
    warn_unreachable(storage)


def _show_topics(context: typer.Context, storage: Json, topics_max: int) -> None:
    """Print the largest topics."""
    groups = storage["brokerGroups"]
    topics = sorted(storage["topics"], key=lambda topic: (-topic.get("bytes", 0), topic["name"]))
    shown = topics[:topics_max]
    if shown:
        typer.echo()
        columns = ["TOPIC", "BYTES", "LIVE", "FREED", "KEPT BY"]
        if has_several(groups):
            columns.insert(1, "BROKER")
        show_table(
            context, columns, [row for topic in shown for row in _topic_rows(topic, columns)]
        )
    if len(topics) > len(shown):
        typer.echo(f"{len(topics) - len(shown)} smaller topics are not shown; see --topics.")


def _read(context: typer.Context) -> Json:
    """Read all pages of topics. The broker groups are those of the last page."""
    topics: list[Json] = []
    query = {"pageSize": str(PAGE_SIZE)}
    while True:
        page = call(context, "GET", "/storage", query=query)
        topics += page["topics"]
        token = page.pop("nextPageToken", None)
        if token is None:
            return {**page, "topics": topics}
        query["pageToken"] = token


def _group_row(group: Json) -> list[str | None]:
    log, floor = group.get("log"), group["stateFloor"]
    disk = "FULL" if group["isFull"] else "ok"
    counts = ["counting" if log is None else _mib(log[state]) for state in STATES]
    derived = [_mib(group["derivedBytes"][kind]) for kind in DERIVED]
    floor_age = age(floor.get("storedAtMs"), int(time.time() * 1_000))
    free, reserve = _mib(group["freeBytes"]), _mib(group["reserveBytes"])
    return [group["broker"], disk, free, reserve, *counts, *derived, floor_age]


def _topic_rows(topic: Json, columns: list[str]) -> list[list[str | None]]:
    """Return the row of a topic, or one row per broker group if there are several."""
    freed = _mib(topic.get("freedByDeletionBytes"))
    groups = topic["brokerGroups"]
    if "BROKER" not in columns:
        kept_by = groups[0].get("keptBy")
        return [
            [topic["name"], _mib(topic.get("bytes")), _mib(topic.get("liveBytes")), freed, kept_by]
        ]
    return [
        [
            topic["name"],
            group["broker"],
            _mib(group.get("bytes")),
            _mib(group.get("liveBytes")),
            freed if number == 0 else None,
            group.get("keptBy"),
        ]
        for number, group in enumerate(groups)
    ]


def _mib(size_bytes: int | None) -> str:
    return "counting" if size_bytes is None else f"{size_bytes / (1 << 20):.1f} MiB"
