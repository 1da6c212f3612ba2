"""The end of ReadEvents calls over a broker with several pages."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import pytest

from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import ProxyWorld, run
from tidemill.proxy.cluster.broker_calls import BrokerCalls
from tidemill.proxy.server.pipeline_events import EventPageRelay
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.transport.aio.call import RpcCall

PAGE_BYTES = 100  # of the log
LOG_END = 250
PAGES_MAX = 20  # per call; more means that the call does not end


class Log:
    """A broker's log, read in pages of equal size."""

    def __init__(self) -> None:
        self.end = LOG_END
        self.asked: list[int] = []

    async def read(self, _call: RpcCall, request: bytes) -> bytes:
        asked = pb.ReadEventsRequest.FromString(request)
        self.asked.append(asked.from_position)
        until = min(self.end, asked.until_position or self.end)
        following = max(asked.from_position, min(until, asked.from_position + PAGE_BYTES))
        reply = pb.ReadEventsReply(next_position=following, log_id="log", log_end=self.end)
        return reply.SerializeToString()


def calls_to(log: Log) -> AbstractAsyncContextManager[BrokerCalls]:
    """Return calls to a broker with `log`."""
    return calls_of(ReadEvents=log.read)


async def read(
    events: EventPageRelay, log: Log, start: int, until: int, *, cut_to: int = 0
) -> list[int]:
    """Return the ends of the pages of a call; the log is cut after the first page."""
    request = pb.ReadEventsRequest(from_position=start, until_position=until)
    found: list[int] = []
    async for page in events.read_events(request, "10.0.0.1"):
        found.append(pb.ReadEventsReply.FromString(page).next_position)
        log.end = cut_to or log.end
        if len(found) == PAGES_MAX:
            break
    return found


@pytest.mark.parametrize(
    ("start", "until", "ends"),
    [
        (0, 0, [100, 200, 250]),
        (0, 150, [100, 150]),
        (0, LOG_END + 1, [100, 200, 250]),
        (LOG_END, LOG_END + 1, [250]),
        (LOG_END, 0, [250]),
    ],
)
def test_a_call_ends_at_the_end_of_the_log(start: int, until: int, ends: list[int]) -> None:
    async def scenario(world: ProxyWorld) -> None:
        log = Log()
        async with calls_to(log) as calls:
            assert await read(EventPageRelay(world.cluster, calls), log, start, until) == ends

    run(scenario)


def test_a_call_ends_at_the_end_of_a_restored_log() -> None:
    async def scenario(world: ProxyWorld) -> None:
        log = Log()
        async with calls_to(log) as calls:
            events = EventPageRelay(world.cluster, calls)
            assert await read(events, log, 0, LOG_END, cut_to=120) == [100, 120]

    run(scenario)
