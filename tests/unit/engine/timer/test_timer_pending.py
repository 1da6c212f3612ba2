"""Pending timers in order of their ids, page by page and in bounded slices."""

from __future__ import annotations

from random import Random

from tests.support.bodies import body_of
from tests.support.disk.counted_work import Meter
from tests.support.worlds.timer_world import TimerWorld
from tidemill.broker.engine.layout import timer_entry
from tidemill.broker.engine.layout.numbers import TopicId
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.broker.engine.timer.pending import BODIES_A_STEP, PendingQuery, PendingTimer
from tidemill.broker.engine.timer.status import DueRange
from tidemill.broker.engine.timer.table import PAGE_ENTRIES

HOUR_MS = 3_600_000
SIZE = 100_000


def page_of(world: TimerWorld, query: PendingQuery) -> tuple[list[PendingTimer], int | None]:
    walk, meter = world.engine.timers.commands.pending(query), Meter(world.engine)
    while walk.step():
        spent = meter.take()
        assert spent.items <= BODIES_A_STEP
        assert spent.size_bytes <= SLICE_BYTES + SIZE + 4096
    return walk.found, walk.next_id


def all_of(world: TimerWorld, query: PendingQuery) -> list[PendingTimer]:
    found, next_id = page_of(world, query)
    while next_id is not None:
        more, next_id = page_of(world, query._replace(from_id=next_id))
        found += more
    return found


def test_pages_contain_each_pending_timer_once_after_cancels_and_moves() -> None:
    world, random = TimerWorld(), Random(1)
    due: dict[int, int] = {}
    for n in range(600):
        due_at_ms = world.now_ms + HOUR_MS + random.randrange(HOUR_MS)
        due[world.schedule(f"m{n}", due_at_ms=due_at_ms).queue_offset] = due_at_ms
    for timer_id in random.sample(sorted(due), 200):
        match random.randrange(3):
            case 0:
                world.cancel(timer_id)
                del due[timer_id]
            case 1:
                world.fire(timer_id)
                del due[timer_id]
            case _:
                due[timer_id] = world.now_ms + 3 * HOUR_MS
                world.reschedule(timer_id, due[timer_id])
    world.run_due()
    for max_timers in (1_000, 77, 1):
        found = all_of(world, PendingQuery(max_timers=max_timers))
        assert [(one.timer_id, one.due_at_ms) for one in found] == sorted(due.items())
    assert {one.message_id for one in found} == {f"id-m{timer_id}" for timer_id in due}
    assert {one.blob for one in found} == {b""}
    begin_ms, end_ms = world.now_ms + HOUR_MS + 1_000_000, world.now_ms + 3 * HOUR_MS
    some = all_of(world, PendingQuery(due=DueRange(begin_ms, end_ms)))
    assert 0 < len(some) < len(due)
    assert {one.timer_id for one in some} == {
        timer_id for timer_id, at_ms in due.items() if begin_ms <= at_ms < end_ms
    }


def test_a_page_counts_timers_with_a_damaged_entry() -> None:
    world = TimerWorld()
    # More timers follow until the first page of the table leaves the cache.
    for _ in range(2):
        for n in range(10 * PAGE_ENTRIES):
            world.schedule(f"m{n}", delay_ms=HOUR_MS, commit=n % PAGE_ENTRIES == 0)
        world.sleep(12_000)
        world.background()
    world.disk.damage("timer/state/00000000000000000000", 3 * timer_entry.SIZE)
    walk = world.engine.timers.commands.pending(PendingQuery())
    while walk.step():
        pass
    assert [one.timer_id for one in walk.found[:5]] == [0, 1, 2, 4, 5]
    assert walk.damaged_count == 1


def test_the_wheel_slot_of_a_timer_follows_from_its_due_second() -> None:
    world = TimerWorld()
    slots = world.engine.timers.index.links.wheel.slot_count
    near = world.now_ms + HOUR_MS
    world.schedule("near", due_at_ms=near)
    world.schedule("far", due_at_ms=world.now_ms + 2 * slots * 1_000)
    assert [one.wheel_slot for one in all_of(world, PendingQuery())] == [
        near // 1_000 % slots,
        None,
    ]


def test_pages_of_one_topic_with_messages_are_bounded_in_bytes() -> None:
    world = TimerWorld()
    for n in range(40):
        world.schedule(f"m{n}", delay_ms=HOUR_MS, topic="a" if n % 2 else "b", size=SIZE)
    query = PendingQuery(topic_ids=[world.topic("a")], with_messages=True, max_bytes=5 * SIZE)
    page, next_id = page_of(world, query)
    assert (len(page), next_id) == (5, 11)
    found = all_of(world, query)
    assert [body_of(one.blob).decode().rstrip(".") for one in found] == [
        f"m{n}" for n in range(1, 40, 2)
    ]
    assert {one.scheduled_at_ms for one in found} == {world.now_ms}
    world.restart()
    assert all_of(world, query) == found


def test_a_filter_of_many_topics_in_any_order_matches_exactly() -> None:
    world = TimerWorld()
    names = [f"t{n}" for n in range(9)]
    ids = {name: world.topic(name) for name in names}
    for name in names:
        world.schedule(f"of {name}", delay_ms=HOUR_MS, topic=name)
    for wanted in (names[:1], names[-1:], names[::-2], [*names, *names]):
        query = PendingQuery(topic_ids=[ids[name] for name in wanted])
        assert {one.topic_id for one in all_of(world, query)} == {ids[name] for name in wanted}
    assert not all_of(world, PendingQuery(topic_ids=[TopicId(max(ids.values()) + 1)]))


def test_a_query_for_no_topic_does_not_read_the_table() -> None:
    world = TimerWorld()
    world.schedule("m", delay_ms=HOUR_MS)
    walk = world.engine.timers.commands.pending(PendingQuery(topic_ids=[]))
    assert not walk.step()
    assert (walk.found, walk.next_id) == ([], None)
