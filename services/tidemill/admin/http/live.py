"""Streams of server-sent events, for pages of the console (ADR 0090) and for `GET /events`.

All streams of the same view and the same credentials share one task, which renders the view once
per period. So the calls to the brokers do not grow with the number of tabs.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from http import HTTPStatus
from typing import TYPE_CHECKING, Final, NamedTuple, final

import structlog
from fastapi import Request
from fastapi.responses import StreamingResponse

from tidemill.admin.http.rest_calls import CallProblem
from tidemill.admin.http.sessions import find_cookie
from tidemill.common.errors import Overloaded

if TYPE_CHECKING:
    from starlette.types import Receive, Scope, Send

STREAMS_MAX: Final = 200
# Without an event for 5 s, a page shows that it is disconnected.
SILENCE_S: Final = 2.0
DATA, ALIVE, PROBLEM, END = "", "alive", "problem", "end"  # names of events
STREAMS_OF_ONE_MAX: Final = 60  # of one caller
# Different views of one caller. Each is rendered once per period, however many streams show it.
VIEWS_OF_ONE_MAX: Final = 100
# Problems that end a stream. 429 is an answer to wrong credentials, too.
LASTING: Final = frozenset(
    {
        HTTPStatus.BAD_REQUEST,
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.FORBIDDEN,
        HTTPStatus.NOT_FOUND,
        HTTPStatus.METHOD_NOT_ALLOWED,
        HTTPStatus.TOO_MANY_REQUESTS,
    }
)
STOPPING: Final = "the admin process stops"
BUG: Final = "internal error; see the log of the admin process"

log = structlog.get_logger()


class ViewKey(NamedTuple):
    """The common parts of all streams of one rendering."""

    view: str  # path and query of the page, or a watch of the REST API
    caller: str  # its user, or its address without one
    address: str  # Rights may depend on it.
    credentials: tuple[str, ...]  # that the access control reads


def key_of(request: Request, view: str, user: str) -> ViewKey:
    """Return the key of a view for the caller of a request; without a user "", its address."""
    # As for the access control: the header decides, then the cookie of the session.
    credentials = tuple(request.headers.getlist("authorization"))
    if not credentials and (cookie := find_cookie(request.scope)) is not None:
        credentials = (cookie,)
    address = request.client.host if request.client else ""
    return ViewKey(view, user or address, address, credentials)


class LiveEvent(NamedTuple):
    """An event: the newest rendering, a sign of life, a problem, or the end with its reason."""

    name: str
    text: str

    @property
    def encoded(self) -> str:
        """The event as a stream has it; its text may have several lines."""
        head = f"event: {self.name}\n" if self.name else ""
        return head + "".join(f"data: {line}\n" for line in self.text.splitlines() or [""]) + "\n"


Rendering = Callable[[], Awaitable[str]]


@final
class LiveViews:
    """The open streams."""

    def __init__(self) -> None:
        self._shared: dict[ViewKey, _SharedView] = {}
        self._streams: Counter[str] = Counter()  # by caller
        self._views: Counter[str] = Counter()  # different ones, by caller

    @property
    def streams(self) -> int:
        """Number of open streams."""
        return self._streams.total()

    def _check_room(self, caller: str) -> None:
        if self._streams[caller] >= STREAMS_OF_ONE_MAX:
            raise Overloaded(
                f"you have {STREAMS_OF_ONE_MAX} open streams; close some pages, or reload this one"
            )
        if self.streams >= STREAMS_MAX:
            raise Overloaded(
                f"this process has {STREAMS_MAX} open streams; reload the page instead"
            )

    @contextlib.contextmanager
    def counted(self, caller: str) -> Iterator[None]:
        """Count a stream of a caller until the block ends. Raises Overloaded beyond a limit."""
        self._check_room(caller)
        self._streams[caller] += 1
        try:
            yield
        finally:
            _count_down(self._streams, caller)

    @contextlib.contextmanager
    def opened(
        self, key: ViewKey, render: Rendering, *, period_s: float
    ) -> Iterator[AsyncIterator[LiveEvent]]:
        """Yield the events of a view until the block ends. Raises Overloaded beyond a limit."""
        shared = self._shared.get(key)
        if shared is None:
            self._count_view(key.caller)
        if shared is None or shared.is_over:
            # A viewer of an ended view may still read its end.
            shared = self._shared[key] = _SharedView(render, period_s)
        shared.viewers += 1
        try:
            yield shared.events()
        finally:
            shared.viewers -= 1
            if not shared.viewers:
                if self._shared.get(key) is shared:
                    del self._shared[key]
                    _count_down(self._views, key.caller)
                shared.stop()

    def _count_view(self, caller: str) -> None:
        if self._views[caller] >= VIEWS_OF_ONE_MAX:
            raise Overloaded(
                f"your open streams have {VIEWS_OF_ONE_MAX} different views; close some of the"
                " streams, or watch less"
            )
        self._views[caller] += 1

    async def end(self) -> None:
        """End all streams, since the process stops."""
        for shared in list(self._shared.values()):
            await shared.end(STOPPING)


def _count_down(counts: Counter[str], caller: str) -> None:
    counts[caller] -= 1
    if not counts[caller]:
        del counts[caller]


@final
class LiveResponse(StreamingResponse):
    """Events of views that are open already. The end of the response closes them.

    The views are open before the response begins, so that requests at the same time cannot exceed
    a limit.
    """

    def __init__(self, events: AsyncIterator[str], opened: contextlib.ExitStack) -> None:
        """Send `events`, and close `opened` afterwards."""
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._opened = opened

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until their end, or until the viewer disconnects."""
        with self._opened:
            await super().__call__(scope, receive, send)


class _SharedView:
    """One rendering for all its viewers."""

    def __init__(self, render: Rendering, period_s: float) -> None:
        self.viewers = 0
        self._period_s = period_s
        self._render = render
        self._version = 0
        self._event = LiveEvent(DATA, "")
        self._is_over = False
        self._changed = asyncio.Condition()
        self._task = asyncio.create_task(self._rendering(), name="live view")

    @property
    def is_over(self) -> bool:
        """Whether no rendering follows."""
        return self._is_over

    async def end(self, text: str) -> None:
        """End the streams of all viewers, with a text."""
        self._task.cancel()
        await self._announce(LiveEvent(END, text), is_over=True)

    def stop(self) -> None:
        """End the rendering: nobody views it."""
        self._task.cancel()

    async def events(self) -> AsyncIterator[LiveEvent]:
        """Yield the newest event after each change, and a sign of life in silence."""
        seen = 0
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._wait_for_change(seen)
            except TimeoutError:
                yield LiveEvent(ALIVE, "")
                continue
            seen, is_over = self._version, self._is_over
            yield self._event
            if is_over:
                return

    async def _wait_for_change(self, seen: int) -> None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._version > seen)

    async def _rendering(self) -> None:
        while not self._is_over:
            try:
                event = LiveEvent(DATA, await self._render())
            except CallProblem as problem:
                # A reload of the page shows a lasting problem as the page itself.
                self._is_over = problem.status in LASTING
                event = LiveEvent(END if self._is_over else PROBLEM, problem.detail)
            except Exception as error:
                log.exception("live view failed", error=type(error).__name__)
                event, self._is_over = LiveEvent(END, BUG), True
            if event != self._event:
                await self._announce(event, is_over=self._is_over)
            await asyncio.sleep(self._period_s)

    async def _announce(self, event: LiveEvent, *, is_over: bool) -> None:
        async with self._changed:
            self._event, self._is_over = event, is_over
            self._version += 1
            self._changed.notify_all()
