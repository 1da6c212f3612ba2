"""The link to a stalled broker: waiting requests are limited and end at their deadline."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.worlds.engine_world import blob
from tests.support.worlds.proxy_world import ProxyWorld, eventually, message, receive_request, run
from tidemill.common.deadlines import TICK_S
from tidemill.common.errors import BrokerTimeout, GroupNotFound, Overloaded
from tidemill.message.receipt_handle import HandleFields
from tidemill.proxy.cluster.cluster import TIMEOUT_MAX_MS
from tidemill.proxy.link import batching, broker_link, commands, stream
from tidemill.proxy.link.batching import FrameBatcher
from tidemill.proxy.link.commands import CHANGE_INVISIBLE
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1.broker_pb2 import Batch, EnsureRequest, PopRequest

SOON_MS = 100
LATER_MS = 10_000
FIRST = blob("first")


def handles(count: int) -> list[HandleFields]:
    return [HandleFields(1, 1, 1, index) for index in range(count)]


async def stall(world: ProxyWorld) -> None:
    """Let the broker accept a frame without an answer. Later requests then wait in the link."""
    await world.send(message())
    world.broker.is_reading.clear()
    first = asyncio.create_task(world.link.append(1, 0, FIRST, timeout_ms=LATER_MS))
    await eventually(lambda: world.link.batching.unanswered > 0)
    assert not first.done()


async def send_until(code: int, world: ProxyWorld) -> None:
    """Send messages until the answer has a code."""
    while (await world.send(message(b"next"))).status.code != code:  # noqa: ASYNC110 - the proxy reads the frame meanwhile
        await asyncio.sleep(0.001)


def test_a_send_that_times_out_unsent_is_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        response = await world.send(message(b"late"), deadline_s=SOON_MS / 1000)
        assert response.status.code == v2.PROXY_TIMEOUT
        assert "not sent" in response.status.message
        assert world.link.pending.bytes == len(FIRST)
        world.broker.is_reading.set()
        assert (await world.send(message(b"next"))).status.code == v2.OK
        assert [b"late" in stored.blob for stored in world.broker.engine.log] == [False] * 3

    run(scenario)


def test_unsent_messages_are_refused_while_the_broker_can_confirm_none() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        waiting = asyncio.create_task(world.send(message(b"waits")))
        await asyncio.sleep(0)
        world.broker.reject_sends("too few replicas are in sync")
        for response in (await waiting, await world.send(message(b"new"))):
            assert response.status.code == v2.HA_NOT_AVAILABLE
            assert "too few replicas are in sync; nothing was stored" in response.status.message
        assert world.link.pending.bytes == len(FIRST), "the sent one waits for its reply"
        world.broker.reject_sends("")
        world.broker.is_reading.set()
        await send_until(v2.OK, world)
        stored = [one.blob for one in world.broker.engine.log]
        assert not any(b"waits" in blob or b"new" in blob for blob in stored)

    run(scenario)


def test_a_new_stream_accepts_messages_again() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        world.broker.reject_sends("too few replicas are in sync")
        await send_until(v2.HA_NOT_AVAILABLE, world)
        world.broker.drop_links()
        await eventually(lambda: not world.link.is_connected)
        assert (await world.send(message())).status.code == v2.OK

    run(scenario)


def test_a_sent_message_has_an_unknown_outcome_after_a_timeout() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message())
        world.broker.is_reading.clear()
        response = await world.send(message(), deadline_s=SOON_MS / 1000)
        assert response.status.code == v2.PROXY_TIMEOUT
        assert "unknown" in response.status.message

    run(scenario)


def test_an_ack_that_times_out_unsent_is_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        late = asyncio.create_task(world.link.ack(1, 1, handles(3), timeout_ms=SOON_MS))
        kept = asyncio.create_task(world.link.ack(1, 1, handles(2), timeout_ms=LATER_MS))
        with pytest.raises(BrokerTimeout, match="not sent"):
            await late
        world.broker.is_reading.set()
        assert len(await kept) == 2
        assert sum(len(frame.acks.request_ids) for frame in world.broker.frames) == 2

    run(scenario)


def test_a_pop_cancelled_unsent_is_never_sent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        calls = [
            asyncio.ensure_future(
                world.link.pop(
                    PopRequest(
                        group_id=1, topic_id=1, max_messages=1, invisible_duration_ms=10_000
                    ),
                    timeout_ms=LATER_MS,
                )
            )
            for _ in range(3)
        ]
        await asyncio.sleep(0)
        for call in calls[:2]:
            call.cancel()
        await asyncio.wait(calls[:2])
        frames = len(world.broker.frames)
        world.broker.is_reading.set()
        with pytest.raises(GroupNotFound):
            await calls[2]
        sent = world.broker.frames[frames:]
        assert sum(len(frame.pops) for frame in sent) == 1
        assert not any(frame.cancelled_polls for frame in sent)

    run(scenario)


def test_a_send_cancelled_unsent_is_never_sent_and_is_freed() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        calls = [asyncio.ensure_future(world.send(message(b"gone" * 1_000))) for _ in range(5)]
        await eventually(lambda: len(world.link.pending) == 6)
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        assert world.link.pending.bytes == len(FIRST)
        frames = len(world.broker.frames)
        world.broker.is_reading.set()
        assert (await world.send(message(b"next"))).status.code == v2.OK
        sent = [blob for frame in world.broker.frames[frames:] for blob in frame.appends.blobs]
        assert [b"gone" in blob for blob in sent] == [False, False], "the first, and the next"

    run(scenario)


def test_one_sweep_removes_all_withdrawn_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """A disconnected broker has many waiting requests; none may scan all others."""
    looks = 0
    sweep = FrameBatcher._sweep

    def counted(self: FrameBatcher) -> None:
        nonlocal looks
        looks += bool(self._withdrawn)
        sweep(self)

    monkeypatch.setattr(FrameBatcher, "_sweep", counted)
    monkeypatch.setattr(batching, "FRAMES_MAX", 1)

    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        link = world.link
        poll = PopRequest(group_id=1, topic_id=1, max_messages=1, invisible_duration_ms=10_000)
        calls = [
            asyncio.create_task(call)
            for n in range(300)
            for call in (
                link.ack(1, 1, handles(3), timeout_ms=LATER_MS),
                link.pop(PopRequest.FromString(poll.SerializeToString()), timeout_ms=LATER_MS),
                link.append(1, 0, blob(f"m{n}"), timeout_ms=LATER_MS, may_repeat=True),
                link.ask(commands.ENSURE, EnsureRequest(topic=f"t{n}"), timeout_ms=LATER_MS),
            )
        ]
        await asyncio.sleep(0)  # All requests wait.
        assert len(link.pending) == 1_201
        for call in calls:
            call.cancel()
            await asyncio.wait([call])
        assert len(link.pending) == 1
        assert link.pending.bytes == len(FIRST)
        assert len(link.pending.repeatable) == 0
        frames = len(world.broker.frames)
        world.broker.is_reading.set()
        assert (await world.send(message(b"next"))).status.code == v2.OK
        sent = world.broker.frames[frames:]
        assert sum(len(frame.appends.blobs) for frame in sent) == 2, "the first, and the next"
        assert not any(frame.acks.request_ids or frame.pops or frame.ensures for frame in sent)
        assert looks < 10

    run(scenario)


def test_messages_are_given_back_after_an_outage() -> None:
    async def scenario(world: ProxyWorld) -> None:
        link = world.link
        await stall(world)
        batch = Batch(slot=1, delivery_id=7, visible_at_ms=1, indexes=[0, 1])
        link.give_back(1, 1, [batch])
        sent = link._pops.unanswered_returns(frozenset())
        assert [request.index for _, request in sent] == [0, 1]
        # The link sends the requests, and the stream breaks before their answers.
        link.batching.clear()
        link._close("the broker is restarted")
        link.give_back(1, 1, [Batch(slot=1, delivery_id=8, visible_at_ms=1, indexes=[0])])
        waiting = [request.delivery_id for _, request in link.batching.rows_of(CHANGE_INVISIBLE)]
        assert waiting == [7, 7, 8], "the older ones first"
        link._pops.forget_returns([request_id for request_id, _ in sent])
        assert len(link._pops.unanswered_returns(frozenset())) == 1

    run(scenario)


def test_a_broker_that_answers_only_pings_is_silent() -> None:
    async def scenario(world: ProxyWorld) -> None:
        assert world.link.state().word == "up"
        await stall(world)
        world.link.batching._unanswered_since_s -= stream.SILENT_S + 1
        assert world.link.state().word == "silent"
        world.broker.is_reading.set()
        await eventually(lambda: world.link.batching.unanswered == 0)
        assert world.link.state().word == "up"

    run(scenario)


def test_waiting_acks_count_as_bytes() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await stall(world)
        world.link.pending.bytes_max = 10 * broker_link.ACK_BYTES
        waiting = asyncio.create_task(world.link.ack(1, 1, handles(9), timeout_ms=LATER_MS))
        await asyncio.sleep(0)
        with pytest.raises(Overloaded):
            await world.link.ack(1, 1, handles(1), timeout_ms=LATER_MS)
        world.broker.is_reading.set()
        assert len(await waiting) == 9
        await eventually(lambda: world.link.pending.bytes == 0)

    run(scenario)


def test_a_frame_has_a_limited_number_of_acks(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(world: ProxyWorld) -> None:
        monkeypatch.setattr(commands, "ACKS_PER_FRAME_MAX", 4)
        await stall(world)
        requests = [
            asyncio.create_task(world.link.ack(1, 1, handles(3), timeout_ms=LATER_MS))
            for _ in range(5)
        ]
        await asyncio.sleep(0)
        world.broker.is_reading.set()
        assert [len(results) for results in await asyncio.gather(*requests)] == [3] * 5
        counts = [len(frame.acks.request_ids) for frame in world.broker.frames]
        assert [count for count in counts if count] == [6, 6, 3]

    run(scenario)


@pytest.mark.parametrize("deadline_s", [3_600.0, 1e12])
def test_a_distant_deadline_keeps_no_timer(deadline_s: float) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.send(message(), deadline_s=deadline_s)
        await world.receive(receive_request(poll_ms=0), deadline_s=deadline_s)
        latest_s = max(world.link.pending._deadlines._ticks) * TICK_S
        assert latest_s - asyncio.get_running_loop().time() <= TIMEOUT_MAX_MS / 1000 + 1

    run(scenario)
