"""Invariants 35 to 38 of pop.md section 10: filters, retries and dead letters."""

from __future__ import annotations

from zlib import crc32

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.worlds.engine_world import GROUP, TOPIC, World, blob
from tidemill.broker.engine.layout.numbers import GroupId, QueueId, TopicId
from tidemill.broker.server.wire.filters import find_filter
from tidemill.common.errors import IllegalGroup, IllegalTopic
from tidemill.message import stored_message
from tidemill.message.resource_names import check_group, check_topic


def with_hash_of(tag: str, data: bytes) -> bytes:
    """Return the stored message `data` as if its own tag had the hash of `tag`."""
    at = stored_message.TAG_HASH_AT
    return data[:at] + stored_message.tag_hash(tag).to_bytes(8, "big", signed=True) + data[at + 8 :]


def send_blob(world: World, data: bytes) -> None:
    world.engine.commands.send(
        TopicId(world.topic()),
        QueueId(0),
        data,
        crc32(data),
        now_ms=world.now_ms,
        firing_ms=world.now_ms,
    )
    world.commit()


@pytest.mark.parametrize("group", [GROUP, "fifo"])
@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_35_a_tag_of_equal_hash_is_never_delivered_and_is_settled(
    group: str, restarts: bool
) -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    colliding = with_hash_of("wanted", blob("other", tag="unwanted"))
    for data in (colliding, blob("m0", tag="wanted"), colliding):
        send_blob(world, data)
    if restarts:
        world.checkpoint()
        world.restart()
    popped = world.pop(group=group, tags=("wanted",))
    assert [one.body for one in popped] == ["m0"]
    world.ack(*popped)
    assert world.pop(group=group, tags=("wanted",)) == []
    found = world.engine.catalog.find_group(group)
    assert found is not None
    (progress,) = world.engine.inspection.group_progress(found)
    assert (progress.consumer_offset, progress.in_flight_count, progress.ready_count) == (3, 0, 0)


@given(
    tags=st.lists(st.sampled_from(["", "a", "b", "ab"]), max_size=20),
    wanted=st.sets(st.sampled_from(["a", "b", "ab", "c"])),
)
def test_invariant_35_delivered_messages_match_the_subscription(
    tags: list[str], wanted: set[str]
) -> None:
    world = World()
    for n, tag in enumerate(tags):
        world.send(f"m{n}", tag=tag)
    expected = [f"m{n}" for n, tag in enumerate(tags) if not wanted or tag in wanted]
    assert world.drain(tags=tuple(wanted)) == expected


def test_invariant_35_a_retry_outside_a_narrowed_subscription_is_counted() -> None:
    world = World()
    world.send("m0", tag="a")
    world.pop(1, tags=("a",), invisible_ms=1_000)
    world.advance(1_000)
    assert world.pop(1, tags=("b",)) == []
    assert world.engine.state.counts["filtered_retry", world.group(), world.topic()] == 1


@pytest.mark.parametrize("group", [GROUP, "fifo"])
@pytest.mark.parametrize("restarts", [False, True])
def test_invariant_36_the_kth_delivery_is_attempt_k_and_the_last_is_followed_by_the_dead_letter(
    group: str, restarts: bool
) -> None:
    world = World()
    world.group(max_attempts=3)
    world.group("fifo", is_ordered=True, max_attempts=3)
    world.send("m0", "m1")
    for attempt in (1, 2, 3):
        popped = world.pop(group=group, invisible_ms=1_000)
        assert [one.attempt for one in popped] == [attempt] * 2
        if group == "fifo":
            # The end of an ordered delivery counts as an attempt of its first message only.
            popped = [world.change(one, 1_000) for one in popped]
        if restarts:
            world.restart(power_cut=True)
        world.advance(1_000)
    assert world.pop(group=group) == []
    dead = world.pop(group="auditor", topic=f"%DLQ%{group}")
    assert sorted((one.body, one.origin) for one in dead) == [("m0", TOPIC), ("m1", TOPIC)]


@pytest.mark.parametrize("group", [GROUP, "fifo"])
@pytest.mark.parametrize("is_ready", [False, True])
def test_invariant_36_a_lowered_limit_counts_at_the_next_transition(
    group: str, is_ready: bool
) -> None:
    world = World()
    world.group("fifo", is_ordered=True)
    world.send("m0")
    for _ in range(3):
        world.pop(group=group, invisible_ms=1_000)
        world.now_ms += 1_000
    if is_ready:
        world.run_due()
    world.engine.administration.put_group(group, max_attempts=3, now_ms=world.now_ms)
    world.commit()
    assert world.bodies(group=group) == []
    assert world.bodies(group="auditor", topic=f"%DLQ%{group}") == ["m0"]


def test_invariant_36_a_suspended_delivery_does_not_count_as_an_attempt() -> None:
    world = World()
    world.group(max_attempts=2)
    world.send("m0")
    for _ in range(5):
        (m0,) = world.pop(1)
        assert m0.attempt == 1
        world.change(m0, 1_000, suspend=True)
        world.advance(1_000)
    for attempt in (1, 2):
        assert [one.attempt for one in world.pop(1, invisible_ms=1_000)] == [attempt]
        world.advance(1_000)
    assert world.bodies(group="auditor", topic=f"%DLQ%{GROUP}") == ["m0"]


def test_invariant_37_original_retry_and_dead_letter_have_the_same_bytes() -> None:
    world = World()
    world.group(max_attempts=2)
    data = blob("m0", message_id="the-id", tag="a", keys=("k1", "k2"), size=500)
    send_blob(world, data)
    for _ in range(2):
        world.pop(1, invisible_ms=1_000)
        world.advance(1_000)
    topic = world.engine.catalog.find_topic(TOPIC)
    assert topic is not None
    world.checkpoint()
    world.restart()
    for how in ({"message_id": "the-id"}, {"key": "k1"}, {"key": "k2"}):
        found = world.find(topic, **how)
        assert {one.stored_topic for one in found} == {
            TOPIC,
            f"%RETRY%{GROUP}+{TOPIC}",
            f"%DLQ%{GROUP}",
        }
        assert {one.blob for one in found} == {data}
    (batch,) = world.engine.commands.pop(
        GroupId(world.group("auditor")),
        TopicId(world.topic(f"%DLQ%{GROUP}")),
        max_messages=1,
        invisible_duration_ms=1,
        wanted=find_filter(["a"], ""),
        attempt_id="",
        now_ms=world.now_ms,
    )
    _, records = world.engine.consumption.read_batch(batch)
    assert [bytes(one.blob) for one in records] == [data]


@pytest.mark.parametrize(
    ("first", "second"),
    [(("g_a", "t"), ("g", "a_t")), (("g", "t_b"), ("g_t", "b")), (("g-", "t"), ("g", "-t"))],
)
def test_invariant_38_similar_names_have_separate_retry_topics(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    world = World()
    for group, topic in (first, second):
        world.send(f"of {group} {topic}", topic=topic)
        world.drain(group=group, topic=topic, invisible_ms=1_000)
    world.advance(1_000)
    for group, topic in (first, second):
        assert world.drain(group=group, topic=topic) == [f"of {group} {topic}"]


@given(
    st.tuples(st.text("ab_+%|"), st.text("ab_+%|")), st.tuples(st.text("ab_+%|"), st.text("ab_+%|"))
)
def test_invariant_38_valid_names_have_unique_retry_topics(
    first: tuple[str, str], second: tuple[str, str]
) -> None:
    for group, topic in (first, second):
        try:
            check_group(group)
            check_topic(topic)
        except (IllegalGroup, IllegalTopic):
            return
    if first != second:
        assert "+".join(first) != "+".join(second)
