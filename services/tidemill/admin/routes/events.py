"""Events: documents of the REST API after each of their changes, as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import StreamingResponse

from tidemill.admin.http.live import (
    ALIVE,
    DATA,
    END,
    LiveEvent,
    LiveResponse,
    LiveViews,
    Rendering,
    key_of,
)
from tidemill.admin.http.rest_calls import RestCalls
from tidemill.admin.routes import Access
from tidemill.common.errors import BadRequest

router = APIRouter(tags=["events"])

WATCHES_MAX: Final = 20  # of one stream
_WATCH: Final = (
    "(overview|(topic|group):[A-Za-z0-9_%|.-]{1,128}|operation:[A-Za-z0-9_.-]{1,64}:[0-9]{1,18})"
)
PERIOD_S: Final = 1.0  # between two reads of a document
PING_S: Final = 15.0
PING: Final = ": ping\n\n"
# The path of the document of each kind of watch.
PATHS: Final = {
    "overview": "/overview",
    "topic": "/topics/{}",
    "group": "/groups/{}",
    "operation": "/operations/{}",
}
NO_CONTENT: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "description": "Events. The name is the watch, and the data its document. `problem` has a"
        " watch and what is wrong with it; `end` is the last event.",
        "content": {"text/event-stream": {}},
    }
}


@router.get("/events", responses=NO_CONTENT, response_class=StreamingResponse)
async def stream_events(
    request: Request,
    access: Access,
    watch: Annotated[
        str,
        Query(
            min_length=1,
            max_length=4_096,
            description="What to watch, with commas: `overview`, `topic:NAME`, `group:NAME` and"
            f" `operation:ID`, at most {WATCHES_MAX}.",
            examples=["overview,group:billing"],
            json_schema_extra={"pattern": f"^{_WATCH}(,{_WATCH}){{0,{WATCHES_MAX - 1}}}$"},
        ),
    ],
) -> StreamingResponse:
    """Send whole documents as server-sent events: all of them first, then each after a change.

    A document is sent at most once per second, and `: ping` every 15 s. A viewer that reads nothing
    for 10 s is disconnected; after a reconnect it gets all documents.
    """
    paths = {name: _path_of(name) for name in dict.fromkeys(watch.split(","))}
    if len(paths) > WATCHES_MAX:
        raise BadRequest(f"{len(paths)} watches; a stream has at most {WATCHES_MAX}")
    views: LiveViews = request.app.state.live_views
    caller = key_of(request, "", access.user).caller
    calls = RestCalls(request.app.state.api or request.app, request.scope)

    def rendering(path: str) -> Rendering:
        async def render() -> str:
            return json.dumps(await calls.get(path))

        return render

    with contextlib.ExitStack() as opened:
        opened.enter_context(views.counted(caller))
        events = {}
        for name, path in paths.items():
            key = key_of(request, f"events {path}", access.user)
            view = views.opened(key, rendering(path), period_s=PERIOD_S)
            events[name] = opened.enter_context(view)
        return LiveResponse(_joined(events), opened.pop_all())


async def _joined(events: dict[str, AsyncIterator[LiveEvent]]) -> AsyncIterator[str]:
    """Yield the events of all watches, until each of them has ended."""

    async def following(name: str) -> tuple[str, LiveEvent]:
        return name, await anext(events[name])

    loop = asyncio.get_running_loop()
    waiting = {asyncio.create_task(following(name)) for name in events}
    sent_s = loop.time()
    try:
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name, event = task.result()
                if event.name != END:
                    waiting.add(asyncio.create_task(following(name)))
                if event.name != ALIVE:
                    yield _encoded(name, event)
                    sent_s = loop.time()
            # A silent watch has a sign of life every 2 s.
            if loop.time() - sent_s >= PING_S:
                yield PING
                sent_s = loop.time()
        yield LiveEvent(END, "").encoded
    finally:
        for task in waiting:
            task.cancel()


def _encoded(name: str, event: LiveEvent) -> str:
    if event.name == DATA:
        return LiveEvent(name, event.text).encoded
    problem = {"watch": name, "detail": event.text, "isOver": event.name == END}
    return LiveEvent("problem", json.dumps(problem)).encoded


def _path_of(watch: str) -> str:
    """Return the path of the document of a watch. Raises BadRequest."""
    kind, separator, name = watch.partition(":")
    path = PATHS.get(kind)
    is_whole = path is not None and bool(name) == ("{}" in path) and bool(name) == bool(separator)
    # More colons are of an action, such as `:pause`; the id of an operation has one.
    has_action = name.count(":") > (kind == "operation")
    if path is None or not is_whole or has_action or "/" in name or not name.isprintable():
        raise BadRequest(
            f"{watch[:64]!r} cannot be watched; write overview, topic:NAME, group:NAME or"
            " operation:ID"
        )
    return path.format(name)
