"""The progress of consumer groups, read in rounds before a scrape."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.disk.counted_work import Meter
from tests.support.worlds.round_world import RoundWorld, idle
from tidemill.broker.engine.layout.numbers import GroupId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.metrics.lag import LAG_AGE_MS_MAX, Lag
from tidemill.broker.server.admin.consumer_groups import ConsumerGroupAdmin
from tidemill.broker.server.admin.topics import TopicAdmin
from tidemill.broker.server.scrape import lag as lag_module
from tidemill.broker.server.scrape.lag import PROGRESS_A_ROUND, LagReader
from tidemill.common.errors import Overloaded
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def test_a_scrape_shows_the_previous_values_while_the_disk_stalls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lag_module, "LAG_WAIT_S", 0.05)

    async def main() -> None:
        world, lag = RoundWorld(), Lag()
        read = LagReader(world.rounds, lag, world.clock)
        async with world.running(), world.proxy() as proxy:
            await read()
            read_at_ms = lag.now_ms
            world.syncs.gate.clear()
            await proxy.send(world.append_frame("a"))
            await idle()
            world.advance(LAG_AGE_MS_MAX)
            await read()
            assert lag.now_ms == read_at_ms, "the previous values"
            world.syncs.gate.set()
            await proxy.reply()
            world.advance(LAG_AGE_MS_MAX)
            await read()
            assert lag.now_ms == read_at_ms + 2 * LAG_AGE_MS_MAX

    asyncio.run(main())


def wide_group(world: RoundWorld, queues: int) -> GroupId:
    """Let a group read some wide topics, with a message in each of two queues of each."""
    engine, now_ms = world.world.engine, world.world.now_ms
    for n in range(4):
        name = f"wide-{n}"
        world.world.topic(name, queues=queues)
        world.world.send("m", topic=name, queue_id=0)
        world.world.send("m", topic=name, queue_id=queues - 1)
        assert len(world.world.pop(1, group="wide", topic=name)) == 1
        # Queues that the group has never popped.
        engine.administration.put_topic(name, type_=None, queues=queues + 10, now_ms=now_ms)
        world.world.send("m", topic=name, queue_id=queues)
    return world.world.group("wide")


def test_a_round_reads_a_limited_number_of_queues() -> None:
    async def main() -> None:
        world, lag = RoundWorld(), Lag()
        queues = PROGRESS_A_ROUND
        group_id = wide_group(world, queues)
        read = LagReader(world.rounds, lag, world.clock)
        meter = Meter(world.world.engine)
        begin = world.rounds.read
        most = 0

        async def call(function: Any) -> Any:
            nonlocal most
            meter.take()
            result = await begin(function)
            most = max(most, meter.take().items)
            return result

        world.rounds.read = call  # type: ignore[method-assign]  # between two rounds
        async with world.running():
            await read()
            topics = [one for (id_, _, _), one in lag.of_topics.items() if id_ == group_id]
            assert len(topics) == 4
            assert {one.ready_count for one in topics} == {2}
            assert {one.in_flight_count for one in topics} == {1}
            assert 0 < most <= PROGRESS_A_ROUND
            most = 0
            admin = ConsumerGroupAdmin(world.rounds)
            answer = await admin.GetGroupProgress(pb.GetGroupProgressRequest(name="wide"))
            assert len(answer.queues) == 4 * (queues + 10)
            assert sum(one.ready_count for one in answer.queues) == 8
            assert 0 < most <= PROGRESS_A_ROUND

    asyncio.run(main())


def test_the_readers_of_a_priority_topic_are_read_in_limited_rounds() -> None:
    async def main() -> None:
        world = RoundWorld()
        engine, now_ms = world.world.engine, world.world.now_ms
        engine.administration.put_topic(
            "urgent", type_=TopicType.PRIORITY, queues=32, now_ms=now_ms
        )
        world.world.group("ordered", is_ordered=True)
        names = [f"reader-{n}" for n in range(2 * PROGRESS_A_ROUND // 32)]
        for level in (7, 7, 7, 3):
            world.world.send("m", topic="urgent", queue_id=level)
        for name in ("ordered", *names):
            [popped] = world.world.pop(1, group=name, topic="urgent")
        world.world.give_back(popped)  # The message of the last reader is ready again.
        meter = Meter(engine)
        begin, most = world.rounds.read, 0

        async def call(function: Any) -> Any:
            nonlocal most
            meter.take()
            result = await begin(function)
            most = max(most, meter.take().items)
            return result

        world.rounds.read = call  # type: ignore[method-assign]  # between two rounds
        async with world.running():
            request = pb.GetTopicStatusRequest(name="urgent", with_readers=True)
            status = await TopicAdmin(world.rounds).GetTopicStatus(request)
            assert 0 < most <= PROGRESS_A_ROUND
            readers = {
                reader.group: {
                    one.level: (one.ready_count, one.blocked_count, one.in_flight_count)
                    for one in reader.levels
                }
                for reader in status.readers
            }
            assert readers == {
                "ordered": {7: (0, 2, 1), 3: (1, 0, 0)},
                **{name: {7: (2, 0, 1), 3: (1, 0, 0)} for name in names},
                names[-1]: {7: (3, 0, 0), 3: (1, 0, 0)},
            }
            [ordered] = (one for one in status.readers if one.group == "ordered")
            assert {one.level: one.oldest_ready_at_ms > 0 for one in ordered.levels} == {
                7: False,
                3: True,
            }
            status = await TopicAdmin(world.rounds).GetTopicStatus(
                pb.GetTopicStatusRequest(name="urgent")
            )
            assert not status.readers, "only a request for readers reads them"

    asyncio.run(main())


def test_the_next_scrape_continues_an_unfinished_pass() -> None:
    async def main() -> None:
        world, lag = RoundWorld(), Lag()
        group_id = wide_group(world, PROGRESS_A_ROUND)
        read = LagReader(world.rounds, lag, world.clock)
        begin, calls_left = world.rounds.read, 3

        async def call(function: Any) -> Any:
            nonlocal calls_left
            calls_left -= 1
            if not calls_left:
                raise Overloaded("too many calls wait")
            return await begin(function)

        world.rounds.read = call  # type: ignore[method-assign]  # rejects now and then
        async with world.running():
            await read()
            assert not lag.of_topics
            calls_left = 5  # Rejects before a new pass would end.
            await read()
            found = [one for (id_, _, _), one in lag.of_topics.items() if id_ == group_id]
            assert sum(one.ready_count for one in found) == 8

    asyncio.run(main())
