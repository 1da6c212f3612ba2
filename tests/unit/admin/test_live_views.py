"""Streams of live parts: one rendering for all viewers, bounds, and ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from http import HTTPStatus

import pytest

from tidemill.admin.http.live import (
    ALIVE,
    DATA,
    END,
    PROBLEM,
    STREAMS_MAX,
    STREAMS_OF_ONE_MAX,
    VIEWS_OF_ONE_MAX,
    LiveEvent,
    LiveViews,
    ViewKey,
)
from tidemill.admin.http.rest_calls import CallProblem
from tidemill.common.errors import Overloaded

KEY = ViewKey("/ui/topics", "ops", "10.0.0.1", ())
OTHER = KEY._replace(credentials=("another cookie",))
ELSEWHERE = KEY._replace(address="10.0.0.2")
WAIT_S = 30


class Renderings:
    """Texts that change with each rendering, until one is a problem."""

    def __init__(self, *, problem_at: int = 0, status: HTTPStatus = HTTPStatus.OK) -> None:
        self.count = 0
        self._problem_at = problem_at
        self._status = status

    async def __call__(self) -> str:
        self.count += 1
        if self.count == self._problem_at:
            raise CallProblem(self._status, "Problem", "broker-1 cannot be reached")
        return f"rendering {self.count}"


async def first(events: AsyncIterator[LiveEvent], count: int) -> list[LiveEvent]:
    """Return the first events, without signs of life."""
    found: list[LiveEvent] = []
    async with asyncio.timeout(WAIT_S):
        async for event in events:
            if event.name != ALIVE:
                found.append(event)
            if len(found) == count:
                break
    return found


def test_all_viewers_of_a_view_share_one_rendering() -> None:
    async def main() -> None:
        views, render = LiveViews(), Renderings()
        with contextlib.ExitStack() as streams:
            opened = [
                streams.enter_context(views.opened(KEY, render, period_s=60)) for _ in range(50)
            ]
            found = await asyncio.gather(*[first(events, 1) for events in opened])
            assert found == [[LiveEvent(DATA, "rendering 1")]] * 50
            assert render.count == 1
            other = Renderings()
            with views.opened(OTHER, other, period_s=60) as events:
                await first(events, 1)
            assert (render.count, other.count) == (1, 1)
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        await asyncio.wait(tasks, timeout=WAIT_S)
        assert all(task.done() for task in tasks), "nobody views it, so nothing is rendered"

    asyncio.run(main())


def test_a_change_is_sent_and_silence_has_signs_of_life() -> None:
    async def main() -> None:
        with LiveViews().opened(KEY, Renderings(), period_s=0.01) as events:
            assert len(await first(events, 3)) == 3

        async def same() -> str:
            return "same"

        with LiveViews().opened(KEY, same, period_s=0.01) as events:
            async with asyncio.timeout(WAIT_S):
                assert [await anext(events), await anext(events)] == [
                    LiveEvent(DATA, "same"),
                    LiveEvent(ALIVE, ""),
                ]

    asyncio.run(main())


@pytest.mark.parametrize("status", [401, 403, 405])
def test_a_lasting_problem_ends_the_stream(status: int) -> None:
    async def main() -> None:
        render = Renderings(problem_at=2, status=HTTPStatus(status))
        with LiveViews().opened(KEY, render, period_s=0.01) as events:
            async with asyncio.timeout(WAIT_S):
                found = [event async for event in events if event.name != ALIVE]
        assert found[-1] == LiveEvent(END, "broker-1 cannot be reached")

    asyncio.run(main())


def test_a_new_stream_does_not_join_an_ended_view() -> None:
    async def main() -> None:
        views = LiveViews()
        ended = Renderings(problem_at=1, status=HTTPStatus.NOT_FOUND)
        with views.opened(KEY, ended, period_s=0.01) as before:
            assert [event.name for event in await first(before, 1)] == [END]
            again = Renderings()
            with views.opened(KEY, again, period_s=30) as after:
                assert await first(after, 1) == [LiveEvent(DATA, "rendering 1")]
            with views.opened(KEY, again, period_s=30) as later:
                assert await first(later, 1) == [LiveEvent(DATA, "rendering 2")]
        with views.opened(KEY, again, period_s=30) as last:
            assert await first(last, 1) == [LiveEvent(DATA, "rendering 3")]

    asyncio.run(main())


def test_a_problem_that_passes_is_shown_and_the_stream_goes_on() -> None:
    async def main() -> None:
        render = Renderings(problem_at=1, status=HTTPStatus.SERVICE_UNAVAILABLE)
        with LiveViews().opened(KEY, render, period_s=0.01) as events:
            found = await first(events, 2)
        assert found[0] == LiveEvent(PROBLEM, "broker-1 cannot be reached")
        assert found[1].text.startswith("rendering")

    asyncio.run(main())


def test_a_defect_ends_the_stream_with_a_text() -> None:
    async def broken() -> str:
        raise KeyError("defect")

    async def main() -> None:
        with LiveViews().opened(KEY, broken, period_s=0.01) as events:
            async with asyncio.timeout(WAIT_S):
                found = [event async for event in events if event.name != ALIVE]
        assert found == [LiveEvent(END, "internal error; see the log of the admin process")]

    asyncio.run(main())


def test_streams_are_bounded() -> None:
    async def main() -> None:
        views = LiveViews()
        with contextlib.ExitStack() as streams:
            for number in range(STREAMS_MAX):
                caller = f"user-{number % 4}"
                key = KEY._replace(caller=caller)
                streams.enter_context(views.counted(key.caller))
            assert views.streams == STREAMS_MAX
            with pytest.raises(Overloaded, match="200 open streams"):
                streams.enter_context(views.counted("another"))
        with views.counted("another"):
            assert views.streams == 1

    asyncio.run(main())


def test_one_caller_leaves_streams_for_others() -> None:
    async def main() -> None:
        views = LiveViews()
        with contextlib.ExitStack() as streams:
            for _ in range(STREAMS_OF_ONE_MAX):
                streams.enter_context(views.counted("ops"))
            with pytest.raises(Overloaded, match="you have 60 open streams"):
                streams.enter_context(views.counted("ops"))
            streams.enter_context(views.counted("another"))

    asyncio.run(main())


def test_the_different_views_of_one_caller_are_bounded() -> None:
    async def main() -> None:
        views = LiveViews()
        with contextlib.ExitStack() as streams:

            def open_view(number: int, caller: str = "ops") -> None:
                key = ViewKey(f"/ui/topics/t{number}", caller, "10.0.0.1", ())
                streams.enter_context(views.opened(key, Renderings(), period_s=60))

            for number in range(VIEWS_OF_ONE_MAX):
                open_view(number)
            with pytest.raises(Overloaded, match="100 different views"):
                open_view(VIEWS_OF_ONE_MAX)
            open_view(0)  # Another stream of the same view costs nothing.
            open_view(VIEWS_OF_ONE_MAX, "another")
        with views.opened(KEY, Renderings(), period_s=60):
            pass

    asyncio.run(main())


def test_callers_at_two_addresses_share_no_rendering() -> None:
    """Rights may depend on the address."""

    async def main() -> None:
        views, one, other = LiveViews(), Renderings(), Renderings()
        with (
            views.opened(KEY, one, period_s=60) as events,
            views.opened(ELSEWHERE, other, period_s=60) as others,
        ):
            await asyncio.gather(first(events, 1), first(others, 1))
        assert (one.count, other.count) == (1, 1)

    asyncio.run(main())


def test_a_stop_ends_all_streams() -> None:
    async def main() -> None:
        views = LiveViews()
        with views.opened(KEY, Renderings(), period_s=60) as events:
            await first(events, 1)
            await views.end()
            async with asyncio.timeout(WAIT_S):
                found = [event async for event in events if event.name != ALIVE]
        assert found[-1] == LiveEvent(END, "the admin process stops")

    asyncio.run(main())


def test_an_event_has_a_line_for_each_line_of_its_data() -> None:
    assert LiveEvent(DATA, "a\nb").encoded == "data: a\ndata: b\n\n"
    assert LiveEvent(END, "").encoded == "event: end\ndata: \n\n"
