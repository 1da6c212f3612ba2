"""Lifecycle events: the events of each record, also when the records it refers to have expired."""

from __future__ import annotations

from random import Random

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.worlds.engine_world import GROUP, TOPIC, World, forget_event_lookups
from tests.support.worlds.following import Follower
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.events.reader import RECORDS_A_STEP
from tidemill.broker.engine.layout.ack import ENTRIES_MAX
from tidemill.broker.engine.layout.message import PLACE
from tidemill.broker.engine.layout.pop_checkpoint import MESSAGES_MAX
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.pop.renewals import MINUTE_MS
from tidemill.common.errors import LogChanged

HOUR_MS = 3_600_000
SEGMENT = 16_384
NO_END = 1 << 40


def read(world: World | Follower, query: EventQuery | None = None, begin: int = 0) -> list[Event]:
    """Read all committed events with empty caches."""
    forget_event_lookups(world.engine)
    reader = world.engine.events.read(
        query or EventQuery(), from_position=begin, log_bytes_max=NO_END, events_max=NO_END
    )
    while reader.step():
        pass
    return reader.take()


def of_kinds(events: list[Event], *kinds: EventKind) -> list[Event]:
    return [event for event in events if event.kind in kinds]


def ids(events: list[Event]) -> list[str]:
    return [event.message_id for event in events]


def small() -> World:
    return World(FaultyDisk(Random(0)), segment_bytes=SEGMENT, retention_bytes=2 * SEGMENT)


def fill(world: World, count: int = 4) -> None:
    """Let the log grow by segments, and let retention remove what it may."""
    for n in range(count):
        world.send(*[f"filler{world.now_ms}-{n}-{m}" for m in range(4)], topic="filler", size=3_000)
        world.checkpoint()
        world.background()


def test_a_renewal_has_events_of_live_messages_only() -> None:
    world = World()
    world.send("m0", "m1", "m2")
    popped = world.pop(3, invisible_ms=MINUTE_MS, client_id="client-1", renews=True)
    world.engine.consumption.renewals.confirm_handovers(
        [popped[0].delivery[2:4]], now_ms=world.now_ms
    )
    world.ack(popped[1])
    world.alive("client-1")
    world.advance(MINUTE_MS)
    renewed = of_kinds(read(world), EventKind.RENEWED)
    assert ids(renewed) == ["id-m0", "id-m2"]
    assert [event.delivery_index for event in renewed] == [0, 2]
    assert {event.due_at_ms for event in renewed} == {world.now_ms + MINUTE_MS}
    assert {event.client_id for event in renewed} == {"client-1"}
    world.end("client-1")
    nacked = of_kinds(read(world), EventKind.NACKED)
    assert [(event.message_id, event.reason) for event in nacked] == [
        ("id-m0", "client_ended"),
        ("id-m2", "client_ended"),
    ]


def test_a_changed_message_continues_as_another_delivery() -> None:
    world = World()
    world.send("m0")
    (popped,) = world.pop(1, invisible_ms=30_000)
    longer = world.change(popped, 60_000)
    shorter = world.change(longer, 10_000)
    world.give_back(shorter)
    events = read(world)
    kinds = EventKind.DELIVERED, EventKind.RENEWED, EventKind.NACKED
    chosen = of_kinds(events, *kinds)
    assert [(event.kind, event.reason) for event in chosen] == [
        (EventKind.DELIVERED, ""),
        (EventKind.RENEWED, ""),
        (EventKind.NACKED, ""),
        (EventKind.NACKED, "unread"),
    ]
    positions = [event.position for event in chosen]
    assert [event.delivery_id for event in chosen] == [positions[0], *positions[:-1]]


def test_an_ack_has_its_message_after_its_delivery_has_expired() -> None:
    world = small()
    world.send("m0", "m1", "m2")
    popped = world.pop(3, invisible_ms=HOUR_MS, client_id="client-1", renews=True)
    world.engine.consumption.renewals.confirm_handovers(
        [popped[0].delivery[2:4]], now_ms=world.now_ms
    )
    fill(world)
    assert world.engine.log.min_offset > popped[0].delivery.delivery_id
    world.ack(popped[1])
    world.end("client-1")
    (acked,) = of_kinds(read(world), EventKind.ACKED)
    assert (acked.topic, acked.queue_offset, acked.consumer_group) == (TOPIC, 1, GROUP)
    assert (acked.client_id, acked.message_id) == ("client-1", ""), "the message itself has expired"
    assert (acked.delivery_id, acked.delivery_index) == (popped[1].delivery.delivery_id, 1)
    given_back = of_kinds(read(world), EventKind.NACKED)
    assert {(event.topic, event.queue_offset) for event in given_back} == {(TOPIC, 0), (TOPIC, 2)}


def test_an_ack_of_an_unknown_delivery_has_only_the_delivery_id() -> None:
    world = small()
    world.send("m0")
    popped = world.pop(1, invisible_ms=HOUR_MS)
    world.send("l0", "l1", topic="filler", size=12_000)
    world.ack(*popped)
    while not world.engine.log.min_offset:
        fill(world, 1)
    events = read(world)
    (acked,) = of_kinds(events, EventKind.ACKED)
    assert (acked.topic, acked.consumer_group) == ("", "")
    assert acked.delivery_id == popped[0].delivery.delivery_id


def test_a_message_in_flight_expires_at_its_deadline() -> None:
    world = small()
    world.send("m0", "m1")
    popped = world.pop(2, invisible_ms=HOUR_MS)
    fill(world)
    world.ack(popped[0])
    world.advance(HOUR_MS)
    events = of_kinds(read(world), EventKind.ACKED, EventKind.EXPIRED, EventKind.REVIVED)
    of_topic = [event for event in events if event.topic == TOPIC]
    assert [(e.kind, e.queue_offset, e.end_offset, e.reason) for e in of_topic] == [
        (EventKind.ACKED, 0, 0, ""),
        (EventKind.EXPIRED, 1, 2, "in_flight"),
    ]


def test_an_expired_range_has_one_event_per_group() -> None:
    world = small()
    world.send("m0", "m1", "m2", "m3")
    world.ack(*world.pop(1))
    world.pop(1, group="other")
    world.group("idle")
    fill(world)
    expired = of_kinds(read(world), EventKind.EXPIRED)
    assert [(e.consumer_group, e.queue_offset, e.end_offset, e.reason) for e in expired] == [
        (GROUP, 1, 4, "retention"),
        ("other", 1, 4, "retention"),
    ]
    key = world.group(), world.topic()
    assert world.engine.state.counts["expired", *key] == 3
    assert world.bodies() == []


def test_an_expiry_survives_a_kill_before_the_segment_is_removed() -> None:
    world = small()
    world.send("m0", "m1", "m2")
    world.ack(*world.pop(1))
    world.send("filler", topic="filler", size=15_000)
    world.checkpoint()
    for _ in world.engine.retention.retire_oldest(world.now_ms):
        world.commit()
        if of_kinds(read(world), EventKind.EXPIRED):
            break
    world.restart()
    assert world.engine.log.min_offset == 0, "the segment exists"
    assert world.bodies() == []
    world.checkpoint()
    world.retire()
    assert len(of_kinds(read(world), EventKind.EXPIRED)) <= 1
    assert world.engine.log.min_offset > 0


@pytest.mark.parametrize("with_snapshot", [True, False])
def test_names_of_deleted_topics_and_groups_stay_while_the_log_has_records_of_them(
    with_snapshot: bool,
) -> None:
    world = small()
    world.topic("gone")
    world.group("went", max_attempts=9)
    fill(world)  # The records that created the names have expired.
    world.send("m0", topic="gone")
    popped = world.pop(1, group="went", topic="gone", invisible_ms=1_000)
    world.advance(1_000)
    again = world.pop(1, group="went", topic="gone", invisible_ms=1_000)
    assert popped
    assert again
    world.engine.administration.delete_group("went", world.now_ms)
    world.engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    world.advance(10_000)
    world.topic("gone")
    begin = popped[0].delivery.delivery_id
    fill(world, 1)
    if with_snapshot:
        world.restart()
        assert world.report.snapshot
    else:
        disk = world.disk.after_kill()
        for folder in ("queues", "index", "snapshots"):
            for name in disk.names(folder):
                disk.remove(name)
        world.disk = disk
        world.open()
    assert world.engine.log.min_offset <= begin
    delivered = of_kinds(read(world, begin=begin), EventKind.DELIVERED)
    topics = ["gone", "%RETRY%went+gone"]
    assert [(e.topic, e.consumer_group) for e in delivered[:2]] == [(t, "went") for t in topics]
    new = world.engine.catalog.topic_ids["gone"]
    assert delivered[0].topic_id != new
    fill(world, 6)
    assert not world.engine.catalog.deleted_names, "the log has no record of them"


def test_a_start_does_not_restore_expired_names() -> None:
    world = small()
    world.topic("gone")
    world.group("went")
    world.engine.administration.delete_group("went", world.now_ms)
    world.engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    world.send("filler-0", "filler-1", topic="filler", size=12_000)
    world.checkpoint()
    assert world.engine.catalog.deleted_names
    # Retention continues after the newest snapshot, which has the names.
    world.retire()
    assert not world.engine.catalog.deleted_names
    world.restart()
    assert world.report.snapshot
    assert not world.engine.catalog.deleted_names


@pytest.mark.parametrize("where", ["of a message", "behind those of a delivery"])
def test_an_index_beyond_the_events_of_a_record_is_rejected(where: str) -> None:
    world = World()
    world.send("m0", "m1", "m2")
    world.pop(3)
    events = read(world)
    position, index = {
        "of a message": (events[0].position, 2),
        "behind those of a delivery": (events[-1].position, 4),
    }[where]

    def read_from(index: int) -> list[Event]:
        reader = world.engine.events.read(
            EventQuery(),
            from_position=position,
            from_index=index,
            log_bytes_max=NO_END,
            events_max=NO_END,
        )
        while reader.step():
            pass
        return reader.take()

    with pytest.raises(LogChanged):
        read_from(index)
    following = [
        event for event in events if (event.position, event.number) >= (position, index - 1)
    ]
    assert read_from(index - 1) == following


def test_an_ordered_redelivery_has_delivery_events_again() -> None:
    world = World()
    world.group(is_ordered=True)
    world.send("m0", "m1")
    world.ack(world.pop(2, invisible_ms=1_000)[0])
    world.advance(1_000)
    world.pop(2, invisible_ms=1_000)
    summary = [(e.kind, e.message_id, e.attempt) for e in read(world)]
    assert summary[2:] == [
        (EventKind.DELIVERED, "id-m0", 1),
        (EventKind.DELIVERED, "id-m1", 1),
        (EventKind.ACKED, "id-m0", 1),
        (EventKind.DELIVERED, "id-m1", 2),
    ]


def test_a_reset_has_one_event_per_queue() -> None:
    world = World()
    world.topic(TOPIC, queues=2)
    world.send("m0")
    world.pop(1)
    target = ResetTarget(earliest=True)
    world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    reset = of_kinds(read(world), EventKind.RESET)
    assert [(e.topic, e.queue_id, e.queue_offset, e.consumer_group) for e in reset] == [
        (TOPIC, 0, 0, GROUP),
        (TOPIC, 1, 0, GROUP),
    ]


def test_the_deletion_of_a_group_has_one_event_for_any_topic_filter() -> None:
    world = World()
    world.topic(TOPIC, queues=2)
    world.send("m0")
    world.pop(1)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    world.send("m1")
    for query in (EventQuery(), EventQuery(topics=frozenset(["another"]))):
        (reset,) = of_kinds(read(world, query), EventKind.RESET)
        assert (reset.topic, reset.consumer_group, reset.reason) == ("", GROUP, "group_deleted")
    assert of_kinds(read(world, EventQuery(message_id="id-m0")), EventKind.RESET) == []


def test_the_removal_of_a_broker_group_has_an_event_for_any_topic_filter() -> None:
    world = World()
    world.topic(TOPIC, queues=2)
    world.send("m0")
    world.now_ms += 5
    world.engine.administration.record(
        {"op": "deleteBrokerGroup", "name": "broker-b"}, world.now_ms
    )
    world.commit()
    for query in (EventQuery(), EventQuery(topics=frozenset(["another"]))):
        (removed,) = of_kinds(read(world, query), EventKind.BROKER_GROUP_REMOVED)
        assert (removed.topic, removed.reason, removed.at_ms) == ("", "broker-b", world.now_ms)
    for query in (EventQuery(message_id="id-m0"), EventQuery(kinds=frozenset([EventKind.RESET]))):
        assert of_kinds(read(world, query), EventKind.BROKER_GROUP_REMOVED) == []


def test_a_slice_is_bounded_for_a_record_of_many_deliveries() -> None:
    """The filter matches none of its events, and the messages of the deliveries are unknown."""
    world = World()
    for n in range(0, 2_048, MESSAGES_MAX):
        world.send(*[f"m{n + m}" for m in range(MESSAGES_MAX)])
    popped = [one for _ in range(64) for one in world.pop(MESSAGES_MAX)]
    world.ack(*popped)
    engine = world.engine
    forget_event_lookups(engine)
    query = EventQuery(message_id="none", kinds=frozenset([EventKind.ACKED]))
    begin = popped[0].delivery.delivery_id  # After the messages, which would be in the caches.
    reader = engine.events.read(query, from_position=begin, log_bytes_max=NO_END, events_max=NO_END)
    has_more, most, steps = True, 0, 0
    while has_more:
        before = engine.tally.items
        has_more = reader.step()
        most, steps = max(most, engine.tally.items - before), steps + 1
    assert reader.take() == []
    assert steps > 10
    assert most <= RECORDS_A_STEP + MESSAGES_MAX + 2
    assert len(popped) == 2_048 <= ENTRIES_MAX


def test_a_read_skips_damaged_records() -> None:
    world = World()
    for n in range(5):
        world.send(f"m{n}")
    events = read(world)
    name = world.engine.log.segments[0].name
    world.disk.damage(name, events[2].position + 12)
    assert ids(read(world)) == [f"id-m{n}" for n in (0, 1, 3, 4)]
    reader = world.engine.events.read(
        EventQuery(), from_position=0, log_bytes_max=NO_END, events_max=NO_END
    )
    while reader.step():
        pass
    assert reader.damaged_bytes == events[3].position - events[2].position


def test_a_damaged_byte_of_a_message_never_leads_to_a_wrong_event() -> None:
    world = World()
    world.send("m0", "m1", "m2")
    (popped, *_) = world.pop(1)
    world.ack(popped)
    events = read(world)
    name = world.engine.log.segments[0].name
    second, third = events[1].position, events[2].position
    others = [event for event in events if event.position != second]
    for at in range(second, third):
        world.disk.damage(name, at)
        reader = world.engine.events.read(
            EventQuery(), from_position=0, log_bytes_max=NO_END, events_max=NO_END
        )
        while reader.step():
            pass
        assert reader.damaged_bytes == third - second, at - second
        assert reader.take() == others
        # Other filters may return the event: the intact head has the topic.
        for query in (
            EventQuery(topics=frozenset(["other"])),
            EventQuery(kinds=frozenset([EventKind.ACKED])),
        ):
            asked = world.engine.events.read(
                query, from_position=0, log_bytes_max=NO_END, events_max=NO_END
            )
            while asked.step():
                pass
            is_in_head = at < second + HEADER_SIZE + PLACE.size
            assert asked.damaged_bytes in ({0, third - second} if is_in_head else {0}), at - second
        world.disk.damage(name, at)  # Restore the byte.
    assert read(world) == events


@pytest.mark.parametrize("events_max", [1, 2, NO_END])
@pytest.mark.parametrize("log_bytes_max", [1, NO_END])
def test_damaged_bytes_are_counted_once_wherever_pages_end(
    events_max: int, log_bytes_max: int
) -> None:
    world = World()
    for n in range(6):
        world.send(f"m{n}")
    events = read(world)
    name = world.engine.log.segments[0].name
    for damaged in (0, 2, 3):
        world.disk.damage(name, events[damaged].position + 12)
    at, damaged_bytes, end = 0, 0, world.engine.log.committed_offset
    while at < end:
        reader = world.engine.events.read(
            EventQuery(), from_position=at, log_bytes_max=log_bytes_max, events_max=events_max
        )
        while reader.step():
            pass
        at, damaged_bytes = reader.next_position, damaged_bytes + reader.damaged_bytes
    assert damaged_bytes == 3 * (events[3].position - events[2].position)


def test_a_read_reports_the_begin_of_an_expired_range() -> None:
    world = small()
    world.send("m0")
    fill(world)
    reader = world.engine.events.read(
        EventQuery(), from_position=100, log_bytes_max=NO_END, events_max=1
    )
    assert (reader.gone_from, reader.next_position) == (100, world.engine.log.min_offset)
    while reader.step():
        pass
    late = world.engine.events.read(
        EventQuery(), from_position=reader.next_position, log_bytes_max=NO_END, events_max=1
    )
    assert late.gone_from == 0
    fill(world)
    while late.step():
        pass
    assert late.gone_from == reader.next_position, "retention was faster"
    following = world.engine.events.read(
        EventQuery(), from_position=reader.next_position, log_bytes_max=NO_END, events_max=1
    )
    assert following.gone_from == reader.next_position


def test_retention_may_remove_a_record_between_two_slices_of_its_events() -> None:
    world = small()
    popped = []
    for n in range(0, 2_048, MESSAGES_MAX):
        world.send(*[f"m{n + m}" for m in range(MESSAGES_MAX)])
        popped += world.pop(MESSAGES_MAX)
    begin = world.engine.log.committed_offset
    world.ack(*popped)
    reader = world.engine.events.read(
        EventQuery(), from_position=begin, log_bytes_max=NO_END, events_max=NO_END
    )
    assert reader.step(), "the record has events left"
    assert reader.next_index
    fill(world)
    while reader.step():
        pass
    assert begin < reader.gone_from <= world.engine.log.min_offset


def test_a_read_returns_committed_events_only() -> None:
    world = World()
    world.send("m0")
    log = world.engine.log
    log.has_replicas = True  # No other replica has the records of this disk.
    world.send("m1")
    assert log.committed_offset < log.durable_offset
    assert ids(read(world)) == ["id-m0"]
    log.note_committed(log.durable_offset)
    assert ids(read(world)) == ["id-m0", "id-m1"]


def test_a_replica_returns_the_same_events() -> None:
    world = World(FaultyDisk(Random(0)), segment_bytes=SEGMENT, is_followed=True)
    world.send(*[f"m{n}" for n in range(8)])
    popped = world.pop(8, invisible_ms=1_000)
    world.ack(*popped[:2])
    world.change(popped[3], 5_000)
    world.advance(60_000)
    world.checkpoint()
    events = read(world)
    assert world.follower is not None
    assert read(world.follower) == events
    world.fail_over()
    world.ack(*world.pop(1))
    behind = read(world)
    assert behind[: len(events)] == events
    assert [e.kind for e in behind[len(events) :]] == [EventKind.DELIVERED, EventKind.ACKED]


def test_a_damaged_tail_of_an_ack_loses_only_its_own_events() -> None:
    world = World()
    world.send("m0", "m1")
    popped = world.pop(2)
    world.ack(popped[0])
    world.send("m2")
    before = ids(of_kinds(read(world), EventKind.STORED))

    def breaks(_record: object) -> None:
        raise ValueError("the tail is damaged")

    reader = world.engine.events.read(
        EventQuery(), from_position=0, log_bytes_max=NO_END, events_max=NO_END
    )
    reader._makers[RecordKind.ACK] = breaks  # type: ignore[assignment]
    while reader.step():
        pass
    found = reader.take()
    assert ids(of_kinds(found, EventKind.STORED)) == before
    assert not of_kinds(found, EventKind.ACKED)
