"""The journey of a transactional message: the events of its records."""

from __future__ import annotations

import pytest

from tests.support.worlds.engine_world import TOPIC, forget_event_lookups
from tests.support.worlds.packed_worlds import floors, move_floor
from tests.support.worlds.transaction_world import SENDER, TransactionWorld
from tidemill.broker.engine.events.event import Event, EventKind, EventQuery
from tidemill.broker.engine.layout.numbers import HalfId
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.message.resource_names import HALF_DEAD_LETTER_TOPIC

NO_END = 1 << 40


def read(world: TransactionWorld, query: EventQuery) -> list[Event]:
    forget_event_lookups(world.engine)
    reader = world.engine.events.read(
        query, from_position=0, log_bytes_max=NO_END, events_max=NO_END
    )
    while reader.step():
        pass
    return reader.take()


def journey(world: TransactionWorld, text: str, half_id: HalfId) -> list[tuple[str, str]]:
    """Return the kinds and reasons of the events of a message, which all name its topic."""
    events = read(world, EventQuery(message_id=f"id-{text}"))
    by_topic = read(world, EventQuery(topics=frozenset([TOPIC])))
    assert {event.position for event in events} <= {event.position for event in by_topic}
    assert {TOPIC, HALF_DEAD_LETTER_TOPIC} >= {event.topic for event in events}
    assert {event.half_id for event in events} >= {half_id}
    return [(event.kind.name, event.reason) for event in events]


def test_a_decision_has_an_event_with_the_half_id() -> None:
    world = TransactionWorld()
    yes, no = world.half("yes"), world.half("no")
    later = world.half("later", due_at_ms=world.now_ms + 60_000)
    for half_id in (yes, later):
        world.commit_half(half_id)
    world.roll_back(no)
    assert journey(world, "yes", yes) == [("HALF", ""), ("STORED", "committed")]
    assert journey(world, "no", no) == [("HALF", ""), ("ROLLED_BACK", "client")]
    assert journey(world, "later", later) == [("HALF", ""), ("SCHEDULED", "committed")]
    world.advance(61_000)
    assert journey(world, "later", later)[2:] == [("FIRED", "")]
    (first, *_) = read(world, EventQuery(message_id="id-yes"))
    assert (first.client_id, first.half_id) == (SENDER.client_id, yes)


def test_checks_expiry_and_recovery_are_events() -> None:
    world = TransactionWorld()
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=2))
    half_id = world.half("a")
    for _ in range(2):
        world.advance(1_100)
        world.write_checks()
    world.advance(1_100)
    world.recover(half_id)
    assert journey(world, "a", half_id) == [
        ("HALF", ""),
        ("CHECKED", ""),
        ("CHECKED", ""),
        ("DEAD_LETTERED", "transaction_expired"),
        ("HALF", "recovered"),
    ]
    checks = read(world, EventQuery(kinds=frozenset([EventKind.CHECKED])))
    assert [event.attempt for event in checks] == [1, 2]


@pytest.mark.parametrize("restarts", [False, True])
def test_a_copied_half_message_is_found_by_its_later_events(*, restarts: bool) -> None:
    world = TransactionWorld(segment_bytes=64 << 10)
    half_id = world.half("a")
    while len(world.engine.log.segments) < 4:
        world.send("filler", topic="filler", size=2_000)
    world.checkpoint()
    move_floor(world, floors(world)[0])
    if restarts:
        world.restart()
    world.advance(10_000)
    world.write_checks()
    assert journey(world, "a", half_id) == [("MOVED", ""), ("CHECKED", "")]
