"""Where in the queues of a topic the messages of a time begin."""

from __future__ import annotations

from random import Random

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.metadata.catalog import Topic
from tidemill.broker.engine.store.consume_queue import ConsumeQueue
from tidemill.broker.engine.time_search import QUEUES_A_STEP

QUEUES = 40


def world_of_days(seed: int) -> tuple[World, Topic]:
    """Return a world with segments, checkpoints and merges, and messages a while apart."""
    random = Random(seed)
    world = World(FaultyDisk(random), segment_bytes=32 << 10, checkpoint_log_bytes=16 << 10)
    world.topic(queues=QUEUES)
    for n in range(400):
        world.now_ms += random.choice((0, 0, 1, 10, 1_000, 60_000))
        world.send(
            f"m{n}", queue_id=min(random.randrange(QUEUES), random.randrange(QUEUES)), size=300
        )
        if n % 10 == 0:
            world.background()
    topic = world.engine.catalog.find_topic("orders")
    assert topic is not None
    return world, topic


def by_brute_force(world: World, topic: Topic, time_ms: int) -> list[int]:
    store, found = world.engine.store, []
    for queue in world.engine.catalog.queues_of(topic):
        offsets = range(queue.min_offset, queue.max_offset)
        later = (offset for offset in offsets if store.stored_at(queue, offset)[1] >= time_ms)
        found.append(next(later, int(queue.max_offset)))
    return found


def test_a_time_is_found_in_all_queues_with_few_looks_at_the_log() -> None:
    for seed in range(6):
        world, topic = world_of_days(seed)
        begin_ms, end_ms = 1_000_000, world.now_ms
        times = [0, begin_ms, end_ms, end_ms + 1]
        times += [Random(seed).randrange(begin_ms, end_ms) for _ in range(20)]
        for time_ms in times:
            search = world.engine.inspection.look_up_time(topic, time_ms)
            looks: list[int] = []
            stored_at = world.engine.store.stored_at

            def counting(
                queue: ConsumeQueue, queue_offset: int, looks: list[int] = looks
            ) -> tuple[LogOffset, int]:
                looks.append(queue_offset)
                return stored_at(queue, queue_offset)  # noqa: B023  # Of this turn of the loop.

            world.engine.store.stored_at = counting  # type: ignore[method-assign]  # of this test
            steps = 1
            while search.step():
                steps += 1
            world.engine.store.stored_at = stored_at  # type: ignore[method-assign]  # as it was
            assert steps == -(-QUEUES // QUEUES_A_STEP)
            assert search.offsets == by_brute_force(world, topic, time_ms)
            # Not so many a queue: the first queues narrow it down for all.
            assert len(looks) <= 2 * QUEUES


def test_a_reset_by_offsets_is_limited_to_existing_offsets() -> None:
    world, topic = world_of_days(0)
    world.group()
    offsets = [0, 3, 1_000]
    target = ResetTarget(offsets=offsets)
    found = world.engine.administration.reset_offset("billing", "orders", target, world.now_ms)
    queues = world.engine.catalog.queues_of(topic)
    wanted = [*offsets, *[0] * (QUEUES - 3)]
    assert found == [
        min(max(offset, queue.min_offset), queue.max_offset)
        for offset, queue in zip(wanted, queues, strict=True)
    ]


def test_a_time_is_found_on_both_sides_of_a_clock_that_was_set_back() -> None:
    for seed in range(4):
        random = Random(seed)
        world = World(FaultyDisk(random), segment_bytes=32 << 10, checkpoint_log_bytes=16 << 10)
        world.topic(queues=QUEUES)
        stamps = []
        for n in range(300):
            if n in (100, 200):
                world.now_ms -= 3_600_000
                world.restart(power_cut=n == 200)
            world.now_ms += random.choice((0, 1_000, 60_000))
            stamps.append(world.now_ms)
            world.send(f"m{n}", queue_id=random.randrange(QUEUES), size=300)
            if n % 10 == 0:
                world.background()
        assert len(world.engine.catalog.clock_falls) == 2
        for _ in range(2):
            topic = world.engine.catalog.find_topic("orders")
            assert topic is not None
            for time_ms in random.choices(stamps, k=20):
                search = world.engine.inspection.look_up_time(topic, time_ms)
                while search.step():
                    pass
                assert search.offsets == by_brute_force(world, topic, time_ms)
            world.checkpoint()
            world.restart()  # A snapshot knows of it, too.
