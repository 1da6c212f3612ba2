"""GetActivity: counts of topics and consumer groups, in pages and in limited rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any
from zlib import crc32

import pytest

from tests.support.disk.counted_work import Meter
from tests.support.worlds.engine_world import blob
from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.broker.metrics.lag import LAG_AGE_MS_MAX, Lag
from tidemill.broker.metrics.traffic import Traffic
from tidemill.broker.server.admin import activity
from tidemill.broker.server.admin.activity import ActivityAdmin
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND, LagReader
from tidemill.common.errors import Overloaded
from tidemill.message import stored_message
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

HOUR_MS = 3_600_000


class ActivityWorld(RoundWorld):
    """A broker in memory with the counters of its links."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()
        self.lag_reader = LagReader(self.rounds, Lag(), self.clock)
        self.admin = ActivityAdmin(self.rounds, self.traffic, self.lag_reader)

    async def page(self, after: pb.GetActivityRequest | None = None) -> pb.ActivityPage:
        self.advance(LAG_AGE_MS_MAX)
        return await self.admin.GetActivity(after or pb.GetActivityRequest())

    async def groups(self) -> dict[str, pb.GroupActivity]:
        return {group.name: group for page in await self.pages() for group in page.groups}

    async def topics(self) -> dict[str, pb.TopicActivity]:
        return {topic.name: topic for page in await self.pages() for topic in page.topics}

    async def pages(self) -> list[pb.ActivityPage]:
        pages = [await self.page()]
        while pages[-1].HasField("next_page"):
            pages.append(await self.admin.GetActivity(pages[-1].next_page))
        return pages


def run(scenario: Callable[[ActivityWorld], Awaitable[None]]) -> None:
    async def main() -> None:
        world = ActivityWorld()
        async with asyncio.timeout(60), world.running():
            await scenario(world)

    asyncio.run(main())


def test_a_topic_has_its_messages_and_its_pending_timers() -> None:
    async def scenario(world: ActivityWorld) -> None:
        inner = world.world
        topic_id = inner.topic("late")
        for n in range(3):
            inner.send(f"m{n}", topic="late")
        now_ms, plain = inner.now_ms, blob("timer", kind=stored_message.TYPE_DELAY)
        body, crc = with_due_time(plain, crc32(plain), 0)
        inner.engine.commands.send(
            topic_id,
            QueueId(0),
            bytes(body),
            crc,
            now_ms=now_ms,
            firing_ms=now_ms,
            delay_ms=HOUR_MS,
        )
        found = (await world.topics())["late"]
        assert (found.stored, found.messages, found.pending_timers) == (3, 3, 1)
        inner.engine.live_bytes.is_complete = False
        assert not (await world.topics())["late"].HasField("log_bytes")
        inner.engine.live_bytes.is_complete = True
        assert (await world.topics())["late"].HasField("log_bytes")

    run(scenario)


def test_a_group_has_its_progress_by_topic_and_its_counters() -> None:
    async def scenario(world: ActivityWorld) -> None:
        inner = world.world
        group_id, topic_id = inner.group("readers"), inner.topic("orders")
        for n in range(4):
            inner.send(f"m{n}", topic="orders")
        assert len(inner.pop(1, group="readers", topic="orders")) == 1
        world.traffic.delivered(topic_id, group_id, [1, 1], 10)
        world.traffic.delivered(topic_id, group_id, [2], 10)
        world.traffic.acked(topic_id, group_id, 1)
        world.traffic.acked(topic_id, group_id, 3)
        found = (await world.groups())["readers"]
        assert found.has_polled
        assert found.has_progress
        [topic] = found.topics
        assert (topic.topic, topic.ready, topic.in_flight, topic.blocked) == ("orders", 3, 1, 0)
        assert topic.oldest_unacked_at_ms > 0
        assert (topic.delivered, topic.redelivered, topic.acked) == (3, 1, 1)
        assert topic.has_progress

    run(scenario)


def test_counters_of_a_group_do_not_wait_for_its_progress() -> None:
    async def scenario(world: ActivityWorld) -> None:
        inner = world.world
        group_id, read_id, new_id = inner.group("readers"), inner.topic("read"), inner.topic("new")
        inner.topic("unread")
        inner.send("m", topic="read")
        assert len(inner.pop(1, group="readers", topic="read")) == 1
        await world.groups()
        world.traffic.polled(inner.topic("unread"), group_id)
        for topic_id in (read_id, new_id):
            world.traffic.delivered(topic_id, group_id, [1, 1], 10)
            world.traffic.acked(topic_id, group_id, 1)
        # A page after the first one reads no progress.
        page = await world.admin.GetActivity(pb.GetActivityRequest(after_topic_id=2**31))
        [found] = [group for group in page.groups if group.name == "readers"]
        rows = {one.topic: (one.delivered, one.acked, one.has_progress) for one in found.topics}
        assert rows == {"read": (2, 1, True), "new": (2, 1, False)}
        world.traffic.forget(new_id, group_id)
        page = await world.admin.GetActivity(pb.GetActivityRequest(after_topic_id=2**31))
        [found] = [group for group in page.groups if group.name == "readers"]
        assert [one.topic for one in found.topics] == ["read"]

    run(scenario)


def test_retries_count_for_their_topic() -> None:
    async def scenario(world: ActivityWorld) -> None:
        inner = world.world
        inner.group("readers")
        inner.topic("orders")
        inner.send("m", topic="orders")
        [popped] = inner.pop(1, group="readers", topic="orders")
        inner.change(popped, 1_000)
        world.advance(1_000)
        inner.now_ms += 1_000
        inner.run_due()
        found = (await world.groups())["readers"]
        assert [(one.topic, one.ready, one.in_flight) for one in found.topics] == [("orders", 1, 0)]

    run(scenario)


def test_messages_of_a_locked_queue_are_blocked() -> None:
    async def scenario(world: ActivityWorld) -> None:
        inner = world.world
        inner.group("ordered", is_ordered=True)
        inner.topic("ledger")
        for n in range(3):
            inner.send(f"m{n}", topic="ledger")
        assert len(inner.pop(1, group="ordered", topic="ledger")) == 1
        [topic] = (await world.groups())["ordered"].topics
        assert (topic.ready, topic.blocked, topic.in_flight, topic.locked_queues) == (0, 2, 1, 1)

    run(scenario)


def test_a_group_that_has_read_nothing_has_no_topics() -> None:
    async def scenario(world: ActivityWorld) -> None:
        world.world.group("new")
        found = (await world.groups())["new"]
        assert (found.has_polled, found.has_progress, len(found.topics)) == (False, True, 0)

    run(scenario)


def test_the_progress_is_unknown_until_a_pass_has_ended() -> None:
    async def scenario(world: ActivityWorld) -> None:
        world.world.group("early")
        begin = world.rounds.read

        async def refuse(function: Any) -> Any:
            raise Overloaded("too many calls wait")

        world.rounds.read = refuse  # type: ignore[method-assign]  # a scrape that fails
        world.advance(LAG_AGE_MS_MAX)
        await world.lag_reader()
        world.rounds.read = begin  # type: ignore[method-assign]  # as before
        page = await world.admin.GetActivity(pb.GetActivityRequest(after_topic_id=2**31))
        assert not any(group.has_progress for group in page.groups)
        assert (await world.groups())["early"].has_progress
        world.world.group("late")
        last = await world.admin.GetActivity(pb.GetActivityRequest(after_topic_id=2**31))
        assert {group.name: group.has_progress for group in last.groups}["late"] is False

    run(scenario)


def test_old_progress_is_unknown() -> None:
    async def scenario(world: ActivityWorld) -> None:
        world.world.group("readers")
        assert (await world.groups())["readers"].has_progress
        last = pb.GetActivityRequest(after_topic_id=2**31)
        for step_ms, is_known in ((activity.PROGRESS_AGE_MS_MAX, True), (1, False)):
            world.advance(step_ms)
            page = await world.admin.GetActivity(last)
            found = {group.name: group.has_progress for group in page.groups}
            assert found["readers"] is is_known

    run(scenario)


def test_pages_have_each_topic_and_group_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "TOPICS_A_PAGE", 3)
    monkeypatch.setattr(activity, "GROUPS_A_PAGE", 2)

    async def scenario(world: ActivityWorld) -> None:
        for n in range(7):
            world.world.topic(f"t{n}")
            world.world.group(f"g{n}")
        pages = await world.pages()
        topics = [topic.name for page in pages for topic in page.topics]
        groups = [group.name for page in pages for group in page.groups]
        assert len(topics) == len(set(topics))
        assert {f"t{n}" for n in range(7)} <= set(topics)
        assert len(groups) == len(set(groups))
        assert {f"g{n}" for n in range(7)} <= set(groups)
        assert max(len(page.topics) for page in pages) == 3
        assert max(len(page.groups) for page in pages) == 2
        assert {page.run for page in pages} == {pages[0].run}

    run(scenario)


def test_a_round_reads_a_limited_number_of_queues_and_topics() -> None:
    async def scenario(world: ActivityWorld) -> None:
        for n in range(3 * activity.TOPICS_A_SLICE):
            world.world.topic(f"t{n}")
        for n in range(activity.PAIRS_A_SLICE + 10):
            world.world.group(f"g{n}")
        meter = Meter(world.world.engine)
        begin, most, most_rows = world.rounds.read, 0, 0

        async def call(function: Any) -> Any:
            nonlocal most
            meter.take()
            result = await begin(function)
            most = max(most, meter.take().items)
            return result

        world.rounds.read = call  # type: ignore[method-assign]  # between two rounds
        add_topics, add_groups = world.admin._add_topics, world.admin._add_groups

        def counted(add: Any) -> Any:
            def add_some(page: pb.ActivityPage, ids: Any, engine: Any, turn: Any) -> Any:
                nonlocal most_rows
                rest = add(page, ids, engine, turn)
                most_rows = max(most_rows, len(ids) - len(rest))
                return rest

            return add_some

        world.admin._add_topics = counted(add_topics)  # type: ignore[method-assign]  # counts slices
        world.admin._add_groups = counted(add_groups)  # type: ignore[method-assign]  # counts slices
        await world.pages()
        assert most <= PROGRESS_A_ROUND
        assert activity.TOPICS_A_SLICE <= most_rows <= activity.PAIRS_A_SLICE

    run(scenario)


def test_two_callers_share_one_pass() -> None:
    async def scenario(world: ActivityWorld) -> None:
        for n in range(2 * PROGRESS_A_ROUND):
            world.world.group(f"g{n}")
        world.advance(LAG_AGE_MS_MAX)
        reader, begins = world.lag_reader, 0
        begin = reader._begin

        def counted() -> None:
            nonlocal begins
            begins += 1
            begin()

        reader._begin = counted  # type: ignore[method-assign]  # counts slices
        await asyncio.gather(reader(), reader(), world.admin.GetActivity(pb.GetActivityRequest()))
        assert begins == 1
        assert reader.lag.now_ms == world.clock.wall_ms()

    run(scenario)
