"""`GET /events` under many requests at once: its limits, and the end of its streams."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from tidemill.admin.console.routes import add_console
from tidemill.admin.http.live import STREAMS_MAX, STREAMS_OF_ONE_MAX, VIEWS_OF_ONE_MAX, LiveViews
from tidemill.admin.routes import events
from tidemill.common.errors import ServiceError, codes_of

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Scope, Send

WAIT_S = 60
Headers = Sequence[tuple[str, str]]


async def answer_error(_request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ServiceError)
    return JSONResponse({"detail": error.message}, codes_of(error).http)


class EventWorld:
    """The operation and the console in front of an API that counts its calls."""

    def __init__(self) -> None:
        self.reads: Counter[str] = Counter()
        self.status = HTTPStatus.OK
        self.app = FastAPI()
        self.app.include_router(events.router, prefix="/api/v1")
        self.app.state.api, self.app.state.needs_identity = self._api, False
        self.views = self.app.state.live_views = LiveViews()
        add_console(self.app)
        self.app.exception_handler(ServiceError)(answer_error)

    async def _api(self, scope: Scope, _receive: Receive, send: Send) -> None:
        self.reads[scope["path"]] += 1
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps({"detail": "x"}).encode()})

    @asynccontextmanager
    async def open(
        self, path: str, query: Callable[[int], str], count: int, *, headers: Headers = ()
    ) -> AsyncIterator[list[int]]:
        """Open streams at once, and yield the statuses. The end of the block disconnects."""
        leaves, statuses = asyncio.Event(), []
        begun = asyncio.Semaphore(0)

        async def view(number: int) -> None:
            host = f"10.0.0.{number % 4}" if count > STREAMS_MAX else "10.0.0.1"
            named = [(b"host", b"127.0.0.1"), (b"cookie", f"junk={number}".encode())]
            named += [(name.encode(), value.encode()) for name, value in headers]
            scope: dict[str, Any] = {"type": "http", "http_version": "1.1", "method": "GET"}
            scope |= {"path": path, "raw_path": path.encode(), "scheme": "http", "root_path": ""}
            scope |= {"query_string": query(number).encode(), "headers": named}
            scope |= {"client": (host, 5), "server": ("127.0.0.1", 80)}
            scope["asgi"] = {"version": "3.0", "spec_version": "2.3"}

            async def receive() -> Message:
                await leaves.wait()
                return {"type": "http.disconnect"}

            async def send(message: Message) -> None:
                if message["type"] == "http.response.start":
                    statuses.append(message["status"])
                    begun.release()

            await self.app(scope, receive, send)

        async with asyncio.timeout(WAIT_S), asyncio.TaskGroup() as streams:
            for number in range(count):
                streams.create_task(view(number))
            for _ in range(count):
                await begun.acquire()
            yield statuses
            leaves.set()


def watch_overview(_number: int) -> str:
    return "watch=overview"


@pytest.mark.parametrize(
    ("path", "query"), [("/api/v1/events", "watch=overview"), ("/ui/events", "view=/ui/topics")]
)
def test_streams_that_open_at_once_keep_to_the_limit(path: str, query: str) -> None:
    async def main() -> None:
        world = EventWorld()
        for _ in range(2):  # Streams that have ended are not counted.
            async with world.open(path, lambda _number: query, STREAMS_OF_ONE_MAX + 9) as statuses:
                assert Counter(statuses) == {200: STREAMS_OF_ONE_MAX, 429: 9}
            assert world.views.streams == 0

    asyncio.run(main())


def test_streams_of_several_callers_at_once_keep_to_the_limit() -> None:
    async def main() -> None:
        world = EventWorld()
        async with world.open("/api/v1/events", watch_overview, STREAMS_MAX + 20) as statuses:
            assert Counter(statuses) == {200: STREAMS_MAX, 429: 20}
        assert world.views.streams == 0

    asyncio.run(main())


@pytest.mark.parametrize("mark", ["", "Basic b3BzOnNlY3JldA=="])
def test_a_cookie_that_identifies_nobody_makes_no_view_of_its_own(mark: str) -> None:
    """Each request of the world has a junk cookie of its own."""

    async def main() -> None:
        world = EventWorld()
        headers = [("authorization", mark)] if mark else []
        async with world.open("/api/v1/events", watch_overview, 50, headers=headers) as statuses:
            assert Counter(statuses) == {200: 50}
            assert world.reads["/api/v1/overview"] == 1

    asyncio.run(main())


def test_the_watches_of_one_caller_are_bounded() -> None:
    def watches(number: int) -> str:
        names = (f"topic:t{number}-{index}" for index in range(events.WATCHES_MAX))
        return f"watch={','.join(names)}"

    async def main() -> None:
        world = EventWorld()
        streams = VIEWS_OF_ONE_MAX // events.WATCHES_MAX
        async with world.open("/api/v1/events", watches, streams + 3) as statuses:
            assert Counter(statuses) == {200: streams, 429: 3}
        assert world.views.streams == 0
        # A refused stream keeps none of its watches.
        async with world.open("/api/v1/events", watches, streams) as statuses:
            assert Counter(statuses) == {200: streams}

    asyncio.run(main())


@pytest.mark.parametrize(
    ("watch", "status"),
    [
        ("group:g:pause", 400),
        ("topic:t:purge", 400),
        ("operation:broker-0:5:cancel", 400),
        ("operation:broker-0:5", 200),
    ],
)
def test_an_action_cannot_be_watched(watch: str, status: int) -> None:
    async def main() -> None:
        async with EventWorld().open("/api/v1/events", lambda _: f"watch={watch}", 1) as statuses:
            assert statuses == [status]

    asyncio.run(main())
