"""Reads of queues in order, without consuming, for `message peek` and `tail`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import typer

from tidemill.cli.rest import call, segment
from tidemill.common.rest_client import Json

PAGE_SIZE = 256  # messages per call; the limit of the API


class QueueRange(NamedTuple):
    """A queue of a topic with its first offset and the offset after its last message."""

    broker: str
    queue_id: int
    min_offset: int
    max_offset: int


def queues_of(context: typer.Context, topic: str) -> tuple[list[QueueRange], list[str]]:
    """Return the queues of a topic, and the unreachable broker groups."""
    shown = call(context, "GET", f"/topics/{segment(topic)}")
    queues = [
        QueueRange(each["broker"], each["queueId"], each["minOffset"], each["maxOffset"])
        for each in shown["queueStatus"]
    ]
    return queues, shown.get("unreachable", [])


def read_page(
    context: typer.Context, topic: str, queue: QueueRange, from_offset: int, limit: int
) -> Json:
    """Return a page of messages of a queue, with the offset of the next page."""
    path = f"/topics/{segment(topic)}/queues/{queue.queue_id}/messages"
    query = {
        "broker": queue.broker,
        "fromOffset": str(from_offset),
        "limit": str(min(limit, PAGE_SIZE)),
    }
    return call(context, "GET", path, query=query)


def read(
    context: typer.Context, topic: str, queue: QueueRange, from_offset: int, limit: int
) -> Iterator[Json]:
    """Yield up to `limit` messages of a queue, at most up to its `max_offset`."""
    while limit > 0 and from_offset < queue.max_offset:
        page = read_page(context, topic, queue, from_offset, limit)
        # The next call of the caller reads newer messages.
        found = [each for each in page["messages"] if each["queueOffset"] < queue.max_offset]
        yield from found
        limit -= len(found)
        if page["nextOffset"] <= from_offset:
            return
        from_offset = page["nextOffset"]
