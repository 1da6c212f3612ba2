"""The newest messages of a topic, again each second."""

from __future__ import annotations

import asyncio
from typing import Final

from tidemill.admin.console.page import Page, PageCall, Values, url
from tidemill.admin.http.rest_calls import Document

SHOWN_MAX: Final = 50
# Queues that are read: those with the most messages. Each of them is one call per second.
QUEUES_MAX: Final = 24
READ_MIN: Final = 8  # messages of each queue
READ_BYTES_MAX: Final = 1 << 18  # of each queue
BODY_CHARS_MAX: Final = 120
PAUSED: Final = "paused"


async def load_tail(call: PageCall) -> Values:
    """Read the newest messages of all queues of a topic."""
    topic, tag = call.path["topic"], call.get("tag")
    status = await call.api.get(f"/topics/{topic}")
    queues = [one for one in status["queueStatus"] if one["maxOffset"] > one["minOffset"]]
    queues.sort(key=lambda one: one["minOffset"] - one["maxOffset"])
    read = queues[:QUEUES_MAX]
    limit = max(SHOWN_MAX // max(len(read), 1), READ_MIN)

    async def newest(queue: Document) -> list[Document]:
        page = await call.api.get(
            f"/topics/{topic}/queues/{queue['queueId']}/messages",
            broker=queue["broker"],
            fromOffset=max(queue["maxOffset"] - limit, queue["minOffset"]),
            limit=limit,
            maxBytes=READ_BYTES_MAX,
        )
        found: list[Document] = page["messages"]
        return found

    pages = await asyncio.gather(*map(newest, read))
    messages = [one for page in pages for one in page if tag is None or one.get("tag") == tag]
    messages.sort(key=lambda one: (-one["storedAtMs"], one["broker"], -one["queueOffset"]))
    kept = {"tag": tag or ""}
    path = f"/topics/{topic}/tail"
    is_paused = call.get(PAUSED) == "true"
    return {
        "topic": topic,
        "tag": tag or "",
        "messages": messages[:SHOWN_MAX],
        "unread": len(queues) - len(read),
        "body_chars_max": BODY_CHARS_MAX,
        "is_paused": is_paused,
        "toggle": url(path, **kept, paused=None if is_paused else "true"),
        "unreachable": status.get("unreachable", []),
        "is_live": not is_paused,
    }


PAGES: Final = (Page("/topics/{topic}/tail", "tail", load_tail),)
