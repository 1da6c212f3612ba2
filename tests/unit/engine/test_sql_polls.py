"""Pops with SQL filters: matches, counters, slices, damage."""

from __future__ import annotations

from zlib import crc32

import pytest

from tests.support.worlds.engine_world import GROUP, World
from tests.unit.engine.test_damaged_messages import (
    HEAD,
    damage,
    dead_letters,
    restart_from_checkpoint,
)
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.message_filter import EVALUATION_ITEMS
from tidemill.broker.engine.pop.message_selection import SCAN_ENTRIES_MAX
from tidemill.broker.engine.queries.queue_reader import ENTRIES_A_STEP
from tidemill.broker.engine.tally import SLICE_BYTES
from tidemill.broker.server.wire.filters import find_filter
from tidemill.message.encoding import encode_stored
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

SQL = "region = 'eu' AND price > 5"
FIFO = "fifo"


def send_some(world: World) -> None:
    world.send("none")
    world.send("cheap", properties={"region": "eu", "price": "5"})
    world.send("first", properties={"region": "eu", "price": "5.5"})
    world.send("odd", properties={"region": "eu", "price": "high"})
    world.send("second", properties={"region": "eu", "price": "6"})


@pytest.mark.parametrize("group", [GROUP, FIFO])
def test_a_pop_takes_what_matches_and_passes_over_the_rest(group: str) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    send_some(world)
    popped = world.pop(group=group, sql=SQL)
    assert [one.body for one in popped] == ["first", "second"]
    world.ack(*popped)
    assert world.pop(group=group) == []
    names = ("scanned_sql", "matched_sql", "filter_unknown")
    counts = world.engine.state.counts
    assert [counts[name, world.group(group), world.topic()] for name in names] == [5, 2, 2]


def test_a_redelivery_is_compared_again() -> None:
    world = World()
    send_some(world)
    assert world.bodies(1, sql=SQL, invisible_ms=1_000) == ["first"]
    world.advance(1_000)
    assert world.bodies(sql="price < 5.6") == ["first"]
    world.advance(30_000)
    assert world.pop(sql="price < 5.2") == []
    assert world.engine.state.counts["filtered_retry", world.group(), world.topic()] == 1


def test_a_pull_returns_what_matches() -> None:
    world = World()
    send_some(world)
    queue = world.engine.catalog.queue(world.topic(), QueueId(0))
    reader = world.engine.inspection.read(
        queue, 0, wanted=find_filter((), SQL), max_messages=32, max_bytes=1 << 20
    )
    while reader.step():
        pass
    assert [found.queue_offset for found in reader.take()] == [2, 4]
    assert reader.next_offset == 5


@pytest.mark.parametrize("group", [GROUP, FIFO])
def test_a_sparse_filter_is_searched_in_slices_of_items_and_bytes(group: str) -> None:
    world = World()
    world.group(FIFO, is_ordered=True)
    tally, body = world.engine.tally, 64 << 10
    for number in range(2 * SCAN_ENTRIES_MAX // EVALUATION_ITEMS):
        world.send(f"m{number}", properties={"region": "us"}, size=body if number < 40 else 0)
    world.send("wanted", properties={"region": "eu"})
    slices = 0
    while True:
        slices += 1
        before_items, before_bytes = tally.items, tally.size_bytes
        found = world.bodies(group=group, sql="region = 'eu'")
        assert tally.items - before_items <= SCAN_ENTRIES_MAX + EVALUATION_ITEMS
        assert tally.size_bytes - before_bytes <= SLICE_BYTES + body + 1_000
        if found:
            break
        # The next turn goes on without a new message.
        assert (world.group(group), world.topic()) in world.engine.state.ready
    assert found == ["wanted"]
    assert slices > 3


def test_required_tags_are_compared_by_their_hash_alone() -> None:
    world = World()
    for _ in range(10):
        world.send(*(["dull"] * 300), tag="dull", properties={"region": "eu"})
    world.send("wanted", tag="bright", properties={"region": "eu"})
    before = world.engine.tally.items
    # The other tags need no read of the log.
    assert world.bodies(sql="TAGS = 'bright' AND region = 'eu'") == ["wanted"]
    assert world.engine.tally.items - before < 3_001 + 3 * EVALUATION_ITEMS


def test_an_sql_filter_selects_the_tag_star_alone() -> None:
    world = World()
    for tag in ("a", "*", ""):
        send_encoded(world, tag)
    assert [one.offset for one in world.pop(sql="TAGS = '*'")] == [1]


@pytest.mark.parametrize("position", range(HEAD, HEAD + 110))
def test_a_filter_does_not_skip_a_damaged_message(position: int) -> None:
    world = World()
    for number in range(4):
        world.send(f"m{number}", properties={"region": "eu"}, size=200)
    restart_from_checkpoint(world)
    damage(world, 1, position)
    assert world.bodies(sql="region = 'eu'") == ["m0", "m2", "m3"]
    assert len(dead_letters(world)) == 1


def send_encoded(world: World, tag: str, *, count: int = 1) -> None:
    """Send encoded messages: a filter on TAGS decodes the system properties."""
    system = v2.SystemProperties(message_id="id", tag=tag)
    message = v2.Message(user_properties={"region": "eu"}, system_properties=system, body=b"body")
    data = encode_stored(message, message_type=v2.NORMAL, now_ms=world.now_ms)
    topic_id, now_ms = world.topic(), world.now_ms
    for _ in range(count):
        world.engine.commands.send(
            topic_id, QueueId(0), data, crc32(data), now_ms=now_ms, firing_ms=now_ms
        )
    world.commit()


def send_other_region(world: World) -> None:
    send_encoded(world, "x", count=4 * SCAN_ENTRIES_MAX // EVALUATION_ITEMS)


@pytest.mark.parametrize("sql", ["region = 'us'", "TAGS = 'x' AND region = 'us'"])
def test_evaluations_after_a_match_of_the_tag_count_for_the_slice(sql: str) -> None:
    world = World()
    send_other_region(world)
    tally, counts = world.engine.tally, world.engine.state.counts
    before = tally.items
    assert world.pop(sql=sql) == []
    scanned = counts["scanned_sql", world.group(), world.topic()]
    assert scanned * EVALUATION_ITEMS <= tally.items - before
    assert scanned <= SCAN_ENTRIES_MAX // EVALUATION_ITEMS
    # A notification: the count of ready messages ends with its slice too.
    before = tally.items
    world.engine.consumption.ready_count(
        world.group(), world.topic(), wanted=find_filter((), sql), now_ms=world.now_ms
    )
    assert SCAN_ENTRIES_MAX <= tally.items - before <= SCAN_ENTRIES_MAX + 2 * EVALUATION_ITEMS


@pytest.mark.parametrize("sql", ["region = 'us'", "TAGS = 'x' AND region = 'us'"])
def test_a_step_of_a_pull_ends_after_a_bounded_number_of_evaluations(sql: str) -> None:
    world = World()
    send_other_region(world)
    queue = world.engine.catalog.queue(world.topic(), QueueId(0))
    reader = world.engine.inspection.read(
        queue, 0, wanted=find_filter((), sql), max_messages=32, max_bytes=1 << 20
    )
    assert reader.step()
    assert reader.next_offset <= ENTRIES_A_STEP // EVALUATION_ITEMS


@pytest.mark.parametrize(
    ("predicate", "value_bytes", "evaluations"),
    [
        ("p = 'b'", 10, 22),
        ("p BETWEEN 1.5 AND 2", 10, 4),
        # Each message takes more than a slice may.
        ("p CONTAINS 'aaaaaab'", 15_000, 1),
    ],
)
def test_the_cost_of_an_evaluation_follows_the_filter_and_the_message(
    predicate: str, value_bytes: int, evaluations: int
) -> None:
    world = World()
    world.send(*["m"] * 40, properties={"p": "a" * value_bytes})
    assert world.pop(sql=" OR ".join([predicate] * 124)) == []
    assert world.engine.state.counts["scanned_sql", world.group(), world.topic()] == evaluations
