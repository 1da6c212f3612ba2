"""Queues are read in their order, and nothing is consumed: for `message peek` and `tail`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import typer

from tidemill.cli.rest import call, segment
from tidemill.common.rest_client import Json

PAGE_SIZE = 256  # messages of one call: the most that the API gives


class Queue(NamedTuple):
    """A queue of a topic, and what it holds: from the one offset up to but without the other."""

    broker: str
    queue_id: int
    min_offset: int
    max_offset: int


def queues_of(context: typer.Context, topic: str) -> tuple[list[Queue], list[str]]:
    """Return the queues of a topic, and the broker groups of which nobody knows them now."""
    shown = call(context, "GET", f"/topics/{segment(topic)}")
    queues = [
        Queue(each["broker"], each["queueId"], each["minOffset"], each["maxOffset"])
        for each in shown["queueStatus"]
    ]
    return queues, shown.get("unreachable", [])


def read_page(
    context: typer.Context, topic: str, queue: Queue, from_offset: int, limit: int
) -> Json:
    """Return some messages of a queue from an offset on, and where to go on."""
    path = f"/topics/{segment(topic)}/queues/{queue.queue_id}/messages"
    query = {
        "broker": queue.broker,
        "fromOffset": str(from_offset),
        "limit": str(min(limit, PAGE_SIZE)),
    }
    return call(context, "GET", path, query=query)


def read(
    context: typer.Context, topic: str, queue: Queue, from_offset: int, limit: int
) -> Iterator[Json]:
    """Yield up to `limit` messages of a queue up to the end that it has in `queue`."""
    while limit > 0 and from_offset < queue.max_offset:
        page = read_page(context, topic, queue, from_offset, limit)
        # What came behind that end meanwhile is read by the next look.
        found = [each for each in page["messages"] if each["queueOffset"] < queue.max_offset]
        yield from found
        limit -= len(found)
        if page["nextOffset"] <= from_offset:
            return
        from_offset = page["nextOffset"]
