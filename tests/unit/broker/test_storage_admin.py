"""GetStorage: the disk, the log, and pages of topics."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.support.worlds.round_world import RoundWorld
from tidemill.broker.engine.metadata.topic_retention import RetentionChange
from tidemill.broker.engine.upkeep.log_space import TOPICS_A_SLICE
from tidemill.broker.server.admin.storage import TOPICS_MAX, StorageAdmin
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

DAY_MS = 86_400_000


def run(scenario: Callable[[RoundWorld, StorageAdmin], Awaitable[None]]) -> None:
    """Run `scenario` over a broker in memory with its topic "orders"."""

    async def main() -> None:
        world = RoundWorld()
        async with asyncio.timeout(60), world.running():
            await scenario(world, StorageAdmin(world.rounds))

    asyncio.run(main())


def get(after: str = "", topics_max: int = TOPICS_MAX) -> pb.GetStorageRequest:
    return pb.GetStorageRequest(after_topic=after, topics_max=topics_max)


def test_the_disk_and_the_log_are_those_of_the_engine() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        engine = world.world.engine
        world.world.send("a", size=1_000)
        world.world.background()
        reply = await admin.GetStorage(get())
        assert not reply.is_full
        assert reply.free_bytes == engine.room.free_bytes
        assert reply.total_bytes == engine.disk.total_bytes()
        assert reply.reserve_bytes == engine.config.disk_reserve_bytes
        assert reply.log.live > 1_000
        states = reply.log.live, reply.log.dead, reply.log.stub, reply.log.control
        assert sum(states) + reply.log.pinned == engine.log.log_end
        assert reply.floor_offset == engine.log.min_offset
        assert reply.floor_stored_at_ms == engine.log_space.floor_stored_at_ms()

    run(scenario)


def test_the_derived_files_are_those_of_the_engine() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        world.world.send("a")
        world.world.checkpoint()
        found = (await admin.GetStorage(get())).derived_bytes
        derived = world.world.engine.log_space.derived_bytes
        assert (found.queues, found.index) == (derived.queues, derived.index)
        assert 0 < found.queues != found.index > 0

    run(scenario)


def test_counts_are_missing_until_all_messages_are_counted() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        world.world.send("a")
        world.world.background()
        # As after a start, before the first count. The next one is due after 10 s.
        world.world.engine.live_bytes.is_complete = False
        reply = await admin.GetStorage(get())
        assert not reply.HasField("log")
        assert not reply.topics[0].HasField("live_bytes")
        assert not reply.topics[0].HasField("log_bytes")
        assert not reply.topics[0].HasField("freed_by_deletion_bytes")

    run(scenario)


def test_a_full_disk_is_reported() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        world.world.leave_room(-1)
        reply = await admin.GetStorage(get())
        assert reply.is_full
        assert reply.free_bytes == 0

    run(scenario)


def test_a_topic_has_its_space_and_its_retention() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        inner = world.world
        inner.engine.administration.put_topic(
            "orders",
            type_=None,
            queues=1,
            retention=RetentionChange(bytes=5 << 20, frees_acked=True),
            now_ms=inner.now_ms,
        )
        inner.send("a", "b", size=1_000)
        inner.background()
        inner.purge(low=1)
        inner.background()
        (topic,) = (await admin.GetStorage(get())).topics
        assert topic.name == "orders"
        assert topic.log_bytes == 2 * topic.live_bytes > 2_000
        assert topic.live_bytes < topic.freed_by_deletion_bytes < topic.log_bytes
        assert topic.retention.ms == inner.engine.config.retention_ms
        assert topic.retention.bytes == 5 << 20
        assert topic.retention.frees_acked
        assert not topic.waits_for_archive

    run(scenario)


def test_pages_have_each_topic_once_in_order() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        names = ["orders", *(f"t{n:03}" for n in range(2 * TOPICS_A_SLICE + 5))]
        for name in names[1:]:
            world.world.topic(name)
        for size in (1, TOPICS_A_SLICE, TOPICS_A_SLICE + 1, TOPICS_MAX):
            found: list[str] = []
            after = ""
            while True:
                reply = await admin.GetStorage(get(after, size))
                assert len(reply.topics) <= size
                found += [topic.name for topic in reply.topics]
                after = reply.last_topic
                if not after:
                    break
            assert found == names

    run(scenario)


def test_a_page_has_at_most_1000_topics() -> None:
    async def scenario(world: RoundWorld, admin: StorageAdmin) -> None:
        put = world.world.engine.administration.put_topic
        for n in range(TOPICS_MAX):
            put(f"t{n:04}", type_=None, queues=1, now_ms=world.world.now_ms)
        world.world.commit()
        reply = await admin.GetStorage(get(topics_max=1 << 31))
        assert len(reply.topics) == TOPICS_MAX
        assert reply.last_topic == reply.topics[-1].name == f"t{TOPICS_MAX - 2:04}"

    run(scenario)
