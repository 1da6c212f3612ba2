"""Listings of messages in flight: their holders, their order, their pages."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest

from tests.support.seeds import seeds
from tests.support.worlds.engine_world import GROUP, TOPIC, PoppedMessage, World
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.queries import in_flight
from tidemill.broker.engine.queries.in_flight import (
    InFlight,
    InFlightFilter,
    InFlightListing,
    PopPosition,
    QueuePosition,
)
from tidemill.common.errors import InvalidReceiptHandle, Overloaded

HIDDEN_MS = 3_600_000
NEVER = 1 << 62


def look(
    world: World,
    *,
    after: PopPosition | None = None,
    count: int = 1_000,
    before_id: int = NEVER,
    topic: str = "",
    queue_id: int | None = None,
    client_id: str = "",
    message_id: str = "",
) -> tuple[list[InFlight], PopPosition | None]:
    wanted = InFlightFilter(
        frozenset([world.group()]),
        world.topic(topic) if topic else None,
        None if queue_id is None else QueueId(queue_id),
        client_id,
        message_id,
        before_id,
    )
    listing = world.engine.inspection.in_flight(wanted, after=after, max_messages=count)
    found: list[InFlight] = []
    while listing.step(world.now_ms):
        found += listing.take()
    return found + listing.take(), listing.next_position


def by_queue(
    world: World, *, first: QueuePosition | None = None, count: int
) -> InFlightListing[QueuePosition]:
    """Begin a page in the order of queues."""
    return world.engine.inspection.in_flight_by_queue(
        InFlightFilter(), first=first or QueuePosition(), max_messages=count
    )


def ids(found: list[InFlight]) -> list[str]:
    return [one.message_id.removeprefix("id-") for one in found]


def release(world: World, *found: InFlight) -> None:
    for one in found:
        world.engine.commands.release(one.delivery, world.now_ms)
    world.commit()
    world.run_due()


def test_the_oldest_delivery_comes_first_with_all_its_fields() -> None:
    world = World()
    world.send("m0", "m1", "m2")
    world.pop(2, invisible_ms=HIDDEN_MS, client_id="one")
    world.advance(5_000)
    world.pop(1, invisible_ms=60_000, client_id="two", renews=True)
    found, end = look(world)
    assert end is None
    assert [
        (
            one.message_id,
            one.queue_offset,
            one.client_id,
            one.delivery_attempt,
            one.popped_at_ms - world.now_ms,
            one.delivery.visible_at_ms - world.now_ms,
            one.renews,
            one.is_retry,
        )
        for one in found
    ] == [
        ("id-m0", 0, "one", 1, -5_000, HIDDEN_MS - 5_000, False, False),
        ("id-m1", 1, "one", 1, -5_000, HIDDEN_MS - 5_000, False, False),
        ("id-m2", 2, "two", 1, 0, 60_000, True, False),
    ]


def test_deliveries_settled_void_expired_or_of_other_groups_are_omitted() -> None:
    world = World()
    world.send("acked", "kept", "run out", topic="a")
    world.send("void", topic="b")
    world.send("gone", topic="c")
    acked, _ = world.pop(2, topic="a", invisible_ms=HIDDEN_MS)
    world.ack(acked)
    world.pop(topic="a", invisible_ms=1_000)
    world.pop(topic="a", invisible_ms=HIDDEN_MS, group="other")
    world.pop(topic="b", invisible_ms=HIDDEN_MS)
    world.pop(topic="c", invisible_ms=HIDDEN_MS)
    assert ids(look(world)[0]) == ["kept", "run out", "void", "gone"]
    world.now_ms += 1_000
    assert ids(look(world)[0]) == ["kept", "void", "gone"]
    world.advance(1)
    world.engine.administration.delete_topic("c", world.now_ms)
    assert ids(look(world)[0]) == ["kept", "void"]
    world.engine.administration.reset_offset(GROUP, "b", ResetTarget(earliest=True), world.now_ms)
    assert ids(look(world)[0]) == ["kept"]
    before = world.engine.log.log_end
    world.pop(topic="b", invisible_ms=HIDDEN_MS)
    assert ids(look(world)[0]) == ["kept", "void"]
    assert ids(look(world, before_id=before)[0]) == ["kept"]


def test_a_changed_message_of_an_ordered_group_shows_its_current_attempt() -> None:
    world = World()
    world.group(is_ordered=True)
    world.send("m0", "m1")
    m0, _ = world.pop(invisible_ms=HIDDEN_MS)
    world.change(m0, HIDDEN_MS)
    found, _ = look(world)
    assert [one.delivery_attempt for one in found] == [1, 1]


def test_a_released_delivery_of_a_locked_queue_is_not_in_flight() -> None:
    world = World()
    world.group(is_ordered=True)
    world.send("m0", "m1")
    world.pop(1, invisible_ms=HIDDEN_MS)
    assert ids(look(world)[0]) == ["m0"]
    world.release_lock()
    assert look(world)[0] == []


def test_filters_combine_and_a_topic_includes_its_retries() -> None:
    world = World()
    world.topic("a", queues=2)
    world.send("m0", topic="a")
    world.pop(topic="a", invisible_ms=1_000, client_id="one")
    world.advance(1_000)
    world.pop(topic="a", invisible_ms=HIDDEN_MS, client_id="one")
    world.send("m1", topic="b")
    world.pop(topic="b", invisible_ms=HIDDEN_MS, client_id="two")
    (retried,) = look(world, topic="a")[0]
    assert (retried.is_retry, retried.delivery_attempt) == (True, 2)
    assert retried.delivery.topic_id == world.topic("a")
    assert ids(look(world, topic="a", queue_id=0)[0]) == []
    assert ids(look(world, topic="b", queue_id=0)[0]) == ["m1"]
    assert ids(look(world, client_id="two")[0]) == ["m1"]
    assert ids(look(world, client_id="two", topic="a")[0]) == []
    assert ids(look(world, client_id="nobody")[0]) == []
    assert ids(look(world, message_id="id-m0")[0]) == ["m0"]
    assert ids(look(world, message_id="id-m0", client_id="two")[0]) == []


@pytest.mark.parametrize("searched", [1, 3, 1_024])
@pytest.mark.parametrize("count", [1, 2, 5, 100])
def test_pages_contain_each_message_once_in_order(
    count: int, searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_flight, "SEARCHED_A_PAGE", searched)
    monkeypatch.setattr(in_flight, "SLOTS_A_STEP", 1_000)
    monkeypatch.setattr(in_flight, "MESSAGES_A_STEP", 2)
    world = World()
    world.topic(TOPIC, queues=3)
    for n in range(6):
        world.send(*[f"{n}-{m}" for m in range(3)], topic=TOPIC)
        world.pop(3, invisible_ms=HIDDEN_MS, client_id=f"client-{n % 2}")
        world.advance(n % 2)
    everything, _ = look(world)
    found: list[InFlight] = []
    after: PopPosition | None = None
    while True:
        page, after = look(world, after=after, count=count)
        assert len(page) <= count
        found += page
        if after is None:
            break
    places = [one.position for one in found]
    assert places == sorted(set(places))
    assert len(found) == 18
    assert ids(found) == ids(everything)
    wanted: list[InFlight] = []
    after = None
    while not wanted:
        wanted, after = look(world, after=after, message_id="id-4-1")
    assert ids(wanted) == ["4-1"]


@pytest.mark.parametrize("is_ordered", [False, True])
@pytest.mark.parametrize("power_cut", [False, True])
def test_a_released_message_is_redelivered_and_its_handles_are_rejected(
    is_ordered: bool, power_cut: bool
) -> None:
    world = World()
    world.topic()
    world.group(is_ordered=is_ordered)
    world.send("m0", "m1")
    m0, m1 = world.pop(2, invisible_ms=HIDDEN_MS, client_id="hangs")
    found, _ = look(world, client_id="hangs")
    release(world, *found)
    counts = world.engine.state.counts
    assert counts["given_back_released", world.group(), world.topic()] == 2
    for _ in range(2):
        assert look(world)[0] == []
        assert [result.name for result in world.ack(m0, m1)] == ["GONE", "GONE"]
        with pytest.raises(InvalidReceiptHandle):
            world.change(m1, 5_000)
        world.restart(power_cut=power_cut)
    assert sorted((one.body, one.attempt) for one in world.pop()) == [("m0", 2), ("m1", 2)]


def test_all_messages_of_a_stuck_consumer_can_be_released_from_a_full_table() -> None:
    world = World(deliveries_max=40)
    world.send(*[f"m{number}" for number in range(42)])
    for _ in range(40):
        world.pop(1, invisible_ms=60_000, client_id="hung", renews=True)
    for _ in range(30):
        world.alive("hung")
        world.advance(10_000)
    with pytest.raises(Overloaded):
        world.pop(1)
    found, _ = look(world, count=100)
    assert len(found) == 40
    release(world, *found)
    assert len(world.drain(invisible_ms=1_000)) == 42


def test_a_renewed_delivery_leaves_the_table_when_its_handles_end() -> None:
    world = World()
    world.send("m", "n")
    released, acked = world.pop(2, invisible_ms=60_000, client_id="one", renews=True)
    for _ in range(30):
        world.alive("one")
        world.advance(10_000)
    release(world, look(world)[0][0])
    assert world.ack(released) == [AckResult.GONE]
    assert world.ack(acked) == [AckResult.APPLIED]
    world.run_due()
    assert world.engine.state.table.used_count == 0
    assert world.ack(released) == [AckResult.GONE]


def test_a_valid_handle_is_rejected_after_a_release() -> None:
    world = World()
    world.send("m")
    (popped,) = world.pop(1, invisible_ms=60_000, client_id="one", renews=True)
    world.advance(50_000)
    release(world, *look(world)[0])
    assert world.ack(popped) == [AckResult.GONE]
    world.advance(10_000)
    assert world.engine.state.table.used_count == 0
    assert world.ack(popped) == [AckResult.GONE]


def test_a_release_beyond_the_reserve_is_rejected() -> None:
    world = World(deliveries_max=4)
    world.send("m0", "m1", "m2", "m3", "m4", "m5", "m6")
    world.pop(7, invisible_ms=60_000)
    found, _ = look(world)
    for one in found[:5]:
        world.engine.commands.release(one.delivery, world.now_ms)
    with pytest.raises(Overloaded):
        world.engine.commands.release(found[5].delivery, world.now_ms)
    world.commit()
    world.run_due()
    release(world, *found[5:])
    assert len(world.drain(invisible_ms=1_000)) == 7


def pages(
    world: World, *groups: str, count: int = 1_000, between: Callable[[], None] = lambda: None
) -> list[list[InFlight]]:
    """Return all messages in flight by page. `between` runs between any two slices."""
    group_ids = frozenset(map(world.group, groups)) if groups else None
    found: list[list[InFlight]] = []
    wanted = InFlightFilter(group_ids)
    first: QueuePosition | None = QueuePosition()
    while first is not None:
        page = world.engine.inspection.in_flight_by_queue(wanted, first=first, max_messages=count)
        while page.step(world.now_ms):
            between()
        found.append(page.take())
        assert len(found[-1]) <= count
        assert page.next_position is None or page.next_position > first
        first = page.next_position
        between()
    return found


def walk(world: World, *groups: str, count: int = 1_000) -> list[InFlight]:
    return [one for page in pages(world, *groups, count=count) for one in page]


def of_queue(one: InFlight) -> tuple[int, int, bool, int, int]:
    """Return the identity of a message, which renewals do not change."""
    delivery = one.delivery
    return (delivery.group_id, delivery.topic_id, one.is_retry, int(one.queue_id), one.queue_offset)


@pytest.fixture
def small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_flight, "OWNERS_A_STEP", 2)
    monkeypatch.setattr(in_flight, "OWNERS_A_PAGE", 3)
    monkeypatch.setattr(in_flight, "SLOTS_A_STEP", 16)
    monkeypatch.setattr(in_flight, "MESSAGES_A_STEP", 2)


def test_pages_of_any_size_contain_each_message_in_flight_once(small_slices: None) -> None:
    world = World()
    world.topic(TOPIC, queues=5)
    world.send(*[f"m{n}" for n in range(90)])
    for number in range(12):
        for group in (GROUP, "shipping"):
            taken = world.pop(1 + number % 5, group=group, invisible_ms=HIDDEN_MS)
            world.ack(*taken[::3])
    out = {
        group: {(one.delivery.delivery_id, one.delivery.message_index) for one in found}
        for group in (GROUP, "shipping")
        if (found := walk(world, group))
    }
    assert len(out[GROUP]) == len(look(world)[0])
    for count in (1, 7, 1_000):
        everything = walk(world, count=count)
        places = [(one.delivery.delivery_id, one.delivery.message_index) for one in everything]
        assert len(places) == len(set(places))
        assert set(places) == out[GROUP] | out["shipping"]
        assert [of_queue(one) for one in everything] == sorted(map(of_queue, everything))
    world.advance(HIDDEN_MS + 1)
    assert walk(world) == [], "revive handles expired deliveries"


def test_no_page_contains_void_released_or_deleted_deliveries() -> None:
    world = World()
    for topic in ("kept", "reset", "deleted"):
        world.send(topic, topic=topic)
        world.pop(topic=topic, invisible_ms=HIDDEN_MS)
    assert sorted(ids(walk(world))) == ["deleted", "kept", "reset"]
    target = ResetTarget(earliest=True)
    world.engine.administration.reset_offset(GROUP, "reset", target, world.now_ms)
    world.engine.administration.delete_topic("deleted", world.now_ms)
    assert ids(walk(world)) == ["kept"]
    world.commit()
    world.restart()
    assert ids(walk(world)) == ["kept"]


def test_a_page_shows_its_messages_as_of_one_moment() -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(10)])
    taken = [world.pop(1, invisible_ms=HIDDEN_MS)[0] for _ in range(10)]
    page = by_queue(world, count=100)
    page.step(world.now_ms)
    world.ack(*taken[:9])
    while page.step(world.now_ms):
        pass
    assert ids(page.take()) == ["m9"]


def test_a_message_renewed_between_two_pages_appears_once() -> None:
    """Its new delivery may be in a slot before or after the last page."""
    world = World()
    world.send(*[f"m{n}" for n in range(30)])
    taken = [world.pop(1, invisible_ms=HIDDEN_MS)[0] for _ in range(30)]
    page = by_queue(world, count=10)
    while page.step(world.now_ms):
        pass
    assert ids(page.take()) == [f"m{n}" for n in range(10)]
    world.ack(*taken[:5])
    for one in (*taken[5:10], *taken[20:25]):
        world.change(one, 2 * HIDDEN_MS)
    assert page.next_position is not None
    rest = by_queue(world, first=page.next_position, count=100)
    while rest.step(world.now_ms):
        pass
    assert ids(rest.take()) == [f"m{n}" for n in range(10, 30)]


@pytest.mark.parametrize("count", range(1, 8))
def test_pages_keep_the_queue_order_of_nested_deliveries(count: int) -> None:
    world = World()
    world.send(*[f"m{n}" for n in range(6)])
    taken = world.pop(6, invisible_ms=HIDDEN_MS)
    for one in taken[2:4]:
        world.change(one, 2 * HIDDEN_MS)
    assert ids(walk(world, count=count)) == [f"m{n}" for n in range(6)]


def test_pages_are_full_where_deliveries_have_gaps(small_slices: None) -> None:
    """A delivery that ended before the page does not count."""
    world = World()
    for n in range(400):
        world.send(f"m{n}", tag="paid" if n % 2 else "open")
    while world.pop(8, tags=("paid",), invisible_ms=HIDDEN_MS):
        pass
    found = pages(world, count=20)
    assert [one.queue_offset for page in found for one in page] == list(range(1, 400, 2))
    assert [len(page) for page in found if page] == [20] * 10
    (first,) = {one.delivery.group_id for page in found for one in page}
    topic_id = found[0][0].delivery.topic_id
    nothing = by_queue(world, first=QueuePosition(first, topic_id, 0, 2**62), count=20)
    while nothing.step(world.now_ms):
        pass
    assert (nothing.take(), nothing.next_position) == ([], None)


@pytest.mark.parametrize("seed", seeds("in flight", 6))
@pytest.mark.parametrize("count", [1, 7, 1_000])
def test_a_message_in_flight_throughout_appears_once_while_others_change(
    count: int, seed: int, small_slices: None
) -> None:
    chance = Random(seed)
    world = World()
    world.topic(TOPIC, queues=4)
    held: dict[str, PoppedMessage] = {}

    def pop() -> None:
        for group in (GROUP, "shipping"):
            for one in world.pop(chance.randint(1, 6), group=group, invisible_ms=HIDDEN_MS):
                held[f"{group} id-{one.body}"] = one

    def live() -> None:
        """Settle some messages, renew some, and pop others."""
        for name in chance.sample(sorted(held), min(len(held), 3)):
            if chance.random() < 0.3:
                world.ack(held.pop(name))
                were_out.discard(name)
            else:
                held[name] = world.change(held[name], HIDDEN_MS)
        if chance.random() < 0.3:
            pop()

    world.send(*[f"m{n}" for n in range(200)])
    for _ in range(10):
        pop()
    were_out = set(held)
    listed = [
        f"{GROUP if one.delivery.group_id == world.group() else 'shipping'} {one.message_id}"
        for page in pages(world, count=count, between=live)
        for one in page
    ]
    assert len(listed) == len(set(listed))
    assert were_out <= set(listed)
