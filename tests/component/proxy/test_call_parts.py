"""Where the time of a slow call went, from the broker to the ring of slow calls."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.clocks import ManualClock
from tests.support.worlds.proxy_world import ProxyWorld, message, receive_request, run
from tidemill.broker.server.link import reply_frames
from tidemill.common.clock import SystemClock
from tidemill.common.slow_calls import SlowCall, SlowCalls
from tidemill.proxy.link.broker_parts import note_parts, parts_of, slowest_parts
from tidemill.proxy.link.commands import APPEND
from tidemill.proxy.server.boundary import Boundary
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2


def noting(world: ProxyWorld) -> SlowCalls:
    """Let every call of the world be a slow one."""
    calls = SlowCalls(0, ManualClock().wall_ms)
    world.boundary = Boundary(world.metrics, SystemClock(), calls)
    return calls


async def newest(world: ProxyWorld, calls: SlowCalls, *messages: v2.Message) -> SlowCall:
    # In a task of its own, as the transport serves a call.
    response = await asyncio.create_task(world.send(*messages))
    assert response.status.code == v2.OK
    return next(calls.newest_first())


def test_a_slow_call_has_the_parts_that_its_broker_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_frames, "TIMED_S_MIN", 0.0)

    async def scenario(world: ProxyWorld) -> None:
        calls = noting(world)
        await world.put_topic()
        call = await newest(world, calls, message())
        assert call.parts is not None
        assert call.parts.queue_ms is not None
        assert call.parts.sync_ms == 0
        assert call.parts.replicate_ms is None
        # The requests of several messages run side by side: no part is that of the call.
        assert (await newest(world, calls, message(), message())).parts is None
        # A poll waits for messages.
        await world.put_group()
        await world.receive(receive_request())
        assert not world.link.pending.slow

    run(scenario)


def test_a_call_with_a_fast_broker_has_no_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reply_frames, "TIMED_S_MIN", 3_600.0)

    async def scenario(world: ProxyWorld) -> None:
        calls = noting(world)
        await world.put_topic()
        assert (await newest(world, calls, message())).parts is None

    run(scenario)


def test_the_parts_are_there_while_the_link_resolves_a_request() -> None:
    async def scenario(world: ProxyWorld) -> None:
        pending, times = world.link.pending, link_pb2.RoundTimes(broker_ms=10, sync_ms=0)
        known, _ = pending.begin(APPEND, 10_000)
        seen = [
            (request_id, slowest_parts() is not None)
            for request_id, _ in pending.timed([(known, None), (known + 1, None)], times)
        ]
        assert seen == [(known, True), (known + 1, False)], "the second one has no caller"
        assert list(pending.slow) == [known]
        pending.forget(known)
        assert not pending.slow
        assert slowest_parts() is None

    run(scenario)


def test_the_rest_of_a_request_is_its_queue() -> None:
    assert parts_of(link_pb2.RoundTimes(broker_ms=10, sync_ms=70), 100.4) == (20, 10, 70, None)
    whole = link_pb2.RoundTimes(broker_ms=10, sync_ms=70, replicate_ms=15)
    assert parts_of(whole, 100) == (5, 10, 70, 15)
    assert parts_of(whole, 90) == (0, 10, 70, 15), "the clocks of two processes round"
    assert parts_of(link_pb2.RoundTimes(broker_ms=10), 100) == (None, 10, None, None)


def test_the_slowest_request_of_a_call_counts() -> None:
    async def call(*took_ms: int) -> int | None:
        for each in took_ms:
            note_parts(each, parts_of(link_pb2.RoundTimes(broker_ms=each, sync_ms=0), each))
        parts = slowest_parts()
        return None if parts is None else parts.broker_ms

    async def main() -> None:
        assert await asyncio.create_task(call(60, 90, 70)) == 90
        assert await asyncio.create_task(call()) is None, "another call"

    asyncio.run(main())
