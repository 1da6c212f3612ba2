"""Retention per topic: which messages die, and which must not."""

from __future__ import annotations

import sys
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from tests.support.disk.faulty_disk import FaultyDisk
from tests.support.disk.log_checker import check_log
from tests.support.disk.quiet import has_pending
from tests.support.seeds import seeds
from tests.support.worlds.engine_world import SMALL, TOPIC, PoppedMessage, World
from tidemill.broker.engine.layout.numbers import QueueId, TopicId
from tidemill.broker.engine.layout.trim import TrimReason
from tidemill.broker.engine.metadata.catalog import Topic, TopicType
from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.engine.metadata.topic_retention import RetentionChange, TopicRetention
from tidemill.broker.engine.pop.deliveries import AckResult
from tidemill.broker.engine.upkeep.log_ages import SETTLE_MS
from tidemill.common.errors import BadRequest, Conflict, DiskFull, TopicNotFound
from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX

SECOND_MS = 1_000
MINUTE_MS = 60 * SECOND_MS
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
MIB = 1 << 20
ARCHIVE = "archive"


class RetainingWorld(World):
    """A world with a correct monotonic clock; the wall clock may be wrong."""

    monotonic_ms: int

    def __init__(self, disk: FaultyDisk | None = None, **changes: Any) -> None:
        self.monotonic_ms = 5_000
        super().__init__(disk or FaultyDisk(Random(0)), now_ms=1_700_000_000_000, **changes)

    def retain(self, topic: str = TOPIC, **change: Any) -> Topic:
        """Change the retention of a topic; create the topic if it is new."""
        put = self.engine.administration.put_topic(
            topic, type_=None, queues=0, retention=RetentionChange(**change), now_ms=self.now_ms
        )
        self.commit()
        return put

    def elapse(self, duration_ms: int, *, step_ms: int = 10 * SECOND_MS) -> None:
        """Advance both clocks, with a look at least every `step_ms`."""
        end_ms = self.monotonic_ms + duration_ms
        self.background()
        while self.monotonic_ms < end_ms:
            passed_ms = min(step_ms, end_ms - self.monotonic_ms)
            self.now_ms += passed_ms
            self.monotonic_ms += passed_ms
            self.run_due()
            self.background()

    def first(self, topic: str = TOPIC, queue_id: int = 0) -> int:
        """Return the offset of the first live message."""
        return int(self.engine.catalog.queue(self.topic(topic), QueueId(queue_id)).min_offset)

    def stored_bytes(self, topic: str = TOPIC) -> int:
        """Return the sizes of the live messages, by the entries of the queues."""
        found = self.engine.catalog.find_topic(topic)
        assert found is not None
        queues = self.engine.catalog.queues_of(found)
        return sum(size for queue in queues for _, size, _ in queue.walk(queue.min_offset))

    def removed(self, topic: str = TOPIC) -> dict[TrimReason, int]:
        """Return the messages that trims have removed, by reason."""
        topic_id = self.topic(topic)
        trims = self.engine.trims.messages
        return {reason: count for (id_, reason), count in trims.items() if id_ == topic_id}


def check_whole_log(world: World) -> None:
    """Check the promises of the log, unless retention has dropped its begin."""
    world.restart()
    if not world.engine.log.min_offset:
        check_log(world.disk)


# ------------------------------------------------------------ ms


def test_a_message_dies_after_the_time_of_its_topic() -> None:
    world = RetainingWorld()
    world.retain(ms=10 * MINUTE_MS)
    world.retain("kept", ms=-1)
    world.send("a", "b")
    world.send("k", topic="kept")
    world.send("d", topic="by default")
    world.elapse(9 * MINUTE_MS)
    assert world.first() == 0
    world.send("c")
    world.elapse(4 * MINUTE_MS)
    assert world.first() == 2
    assert world.removed() == {TrimReason.TIME: 2}
    assert world.drain() == ["c"]
    world.elapse(4 * DAY_MS, step_ms=HOUR_MS)
    assert (world.first(), world.first("kept"), world.first("by default")) == (3, 0, 1)
    check_log(world.disk)


def test_a_new_time_applies_to_present_messages() -> None:
    world = RetainingWorld()
    world.send("a")
    world.elapse(HOUR_MS)
    world.send("b")
    world.elapse(20 * SECOND_MS)
    assert world.first() == 0
    world.retain(ms=MINUTE_MS)
    world.elapse(10 * SECOND_MS)
    assert world.first() == 1
    world.retain(ms=0)
    world.elapse(HOUR_MS)
    assert world.first() == 1, "the default of the broker is 3 days"


@pytest.mark.parametrize("slice_number", range(12))
def test_a_longer_time_between_two_slices_keeps_the_messages(slice_number: int) -> None:
    world = RetainingWorld()
    world.topic(queues=40)
    world.retain(ms=MINUTE_MS)
    for queue_id in range(40):
        world.send("m", queue_id=queue_id)
    world.elapse(50 * SECOND_MS)
    world.now_ms += 5 * MINUTE_MS
    world.monotonic_ms += 5 * MINUTE_MS
    seen, live = 0, 40

    def live_count() -> int:
        return sum(world.first(queue_id=queue_id) == 0 for queue_id in range(40))

    def change() -> None:
        nonlocal seen, live
        seen += 1
        if seen == slice_number + 1:
            world.retain(ms=-1)
            live = live_count()

    world.background(between=change)
    assert live_count() == (live if seen > slice_number else 0)


def test_retries_have_the_time_of_their_topic_and_dead_letters_their_own() -> None:
    world = RetainingWorld()
    world.group(max_attempts=2)
    world.retain(ms=10 * MINUTE_MS)
    world.send("a")
    world.pop(1, invisible_ms=10 * SECOND_MS)
    world.elapse(30 * SECOND_MS)
    (retry,) = world.engine.catalog.retry_topic_ids.values()
    name = world.engine.catalog.topics[retry].name
    assert world.first(name) == 0
    world.pop(1, invisible_ms=10 * SECOND_MS)
    world.elapse(30 * SECOND_MS)
    dead = DEAD_LETTER_TOPIC_PREFIX + world.engine.catalog.groups[world.group()].name
    world.engine.administration.put_dead_letter_topic(
        dead, retention=RetentionChange(ms=HOUR_MS), is_dry=False, now_ms=world.now_ms
    )
    world.commit()
    world.elapse(12 * MINUTE_MS)
    assert (world.first(), world.first(name), world.first(dead)) == (1, 1, 0)
    world.elapse(HOUR_MS)
    assert world.first(dead) == 1


def test_a_dead_letter_topic_needs_its_group() -> None:
    world = RetainingWorld()
    with pytest.raises(TopicNotFound):
        world.engine.administration.put_dead_letter_topic(
            "%DLQ%nobody", retention=RetentionChange(ms=HOUR_MS), is_dry=True, now_ms=0
        )


@pytest.mark.parametrize("change", [{"ms": 59_999}, {"ms": -2}, {"bytes": MIB - 1}])
def test_a_retention_has_bounds(change: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        RetainingWorld().retain(**change)


def test_a_retention_needs_level_2_at_all_broker_groups() -> None:
    world = RetainingWorld(feature_level=1)
    world.send("a")
    with pytest.raises(Conflict, match="these broker groups are below it: broker-0;"):
        world.retain(ms=HOUR_MS)
    world.elapse(5 * DAY_MS, step_ms=HOUR_MS)
    assert world.first() == 0, "one segment alone does not go below level 2"
    world = RetainingWorld()
    groups = world.engine.broker_groups
    groups.found({"broker-0": "h:1", "broker-1": "h:2", "broker-2": "h:3"}, world.now_ms)
    groups.feature_levels["broker-2"] = 2
    with pytest.raises(Conflict, match="below it: broker-1;"):
        world.retain(ms=HOUR_MS)
    assert world.engine.catalog.find_topic(TOPIC) is None, "nothing was changed"
    groups.feature_levels["broker-1"] = 2
    assert world.retain(ms=HOUR_MS).retention.ms == HOUR_MS


@pytest.mark.parametrize("lost", [False, True])
def test_the_setting_survives_a_restart(*, lost: bool) -> None:
    world = RetainingWorld()
    world.retain(ms=HOUR_MS, bytes=5 * MIB, frees_acked=True)
    before = world.engine.catalog.find_topic(TOPIC)
    world.checkpoint()
    if lost:
        world.disk = world.disk.after_kill()
        for name in world.disk.names("snapshots"):
            world.disk.remove(name)
        world.disk.remove("checkpoint")
        world.open()
    else:
        world.restart(power_cut=True)
    assert world.engine.catalog.find_topic(TOPIC) == before


# ------------------------------------------------------------ clocks


@pytest.mark.parametrize("jump_ms", [4 * DAY_MS, -4 * DAY_MS])
def test_a_clock_step_trims_no_younger_message(jump_ms: int) -> None:
    world = RetainingWorld()
    world.retain(ms=HOUR_MS)
    world.elapse(2 * MINUTE_MS)
    world.send("a")
    world.elapse(10 * MINUTE_MS)
    world.now_ms += jump_ms
    world.send("b")
    world.elapse(40 * MINUTE_MS, step_ms=MINUTE_MS)
    assert world.first() == 0
    world.elapse(14 * MINUTE_MS, step_ms=10 * SECOND_MS)
    assert world.first() == 1
    world.elapse(12 * MINUTE_MS, step_ms=10 * SECOND_MS)
    assert world.first() == 2


def test_a_start_with_a_clock_ahead_trims_no_younger_message() -> None:
    world = RetainingWorld()
    world.retain(ms=HOUR_MS)
    world.send("a")
    world.elapse(20 * MINUTE_MS)
    world.now_ms += 4 * DAY_MS
    world.restart()
    world.monotonic_ms = 1_000
    world.elapse(SETTLE_MS // 2)
    world.now_ms -= 4 * DAY_MS
    world.elapse(30 * MINUTE_MS)
    assert world.first() == 0
    world.elapse(14 * MINUTE_MS)
    assert world.first() == 1


def test_a_wrong_clock_of_this_process_does_not_shorten_the_time() -> None:
    world = RetainingWorld()
    world.retain(ms=HOUR_MS)
    world.send("of an earlier process")
    world.elapse(30 * MINUTE_MS)
    world.restart()
    world.monotonic_ms = 1_000
    world.elapse(20 * MINUTE_MS)
    world.now_ms -= 4 * DAY_MS
    world.send("b")
    world.now_ms += 4 * DAY_MS
    world.elapse(14 * MINUTE_MS)
    assert world.first() == 1
    world.elapse(HOUR_MS)
    assert world.first() == 2


def test_a_message_of_a_clock_ahead_dies_in_time_after_a_start() -> None:
    world = RetainingWorld()
    world.retain(ms=HOUR_MS)
    world.now_ms += 400 * DAY_MS
    world.send("a")
    world.now_ms -= 400 * DAY_MS
    world.restart()
    world.monotonic_ms = 1_000
    world.elapse(SETTLE_MS)
    assert world.first() == 0
    world.elapse(HOUR_MS + 3 * MINUTE_MS)
    assert world.first() == 1


@pytest.mark.parametrize("seed", seeds("retention-time", 24))
def test_every_message_dies_between_its_time_and_the_bound(seed: int) -> None:
    """Clock steps, restarts, power cuts and failovers; the model knows the true age."""
    random = Random(seed)
    world = RetainingWorld(FaultyDisk(random), is_followed=random.random() < 0.5, files_merged=2)
    ms = random.choice([MINUTE_MS, 10 * MINUTE_MS, 2 * HOUR_MS])
    world.retain(ms=ms)
    world.group(max_attempts=16)
    true_ms = 0
    sent_at_ms: list[int] = []
    sent_at_start = 0  # messages of earlier processes: their clock must be right
    skew_ms = 0
    settled_ms = 0  # since when the process runs with a right clock
    for _ in range(40):
        match random.randrange(8):
            case 0 | 1 | 2:
                for _ in range(random.randrange(1, 20)):
                    world.send(f"{len(sent_at_ms)}", size=random.choice([10, 10, 20_000]))
                    sent_at_ms.append(true_ms)
            case 3 if skew_ms == 0:  # The check of the log has one clock for deliveries.
                world.pop(random.randrange(1, 20), invisible_ms=MINUTE_MS)
            case 4 if sent_at_start < len(sent_at_ms) or skew_ms:
                world.now_ms -= skew_ms
                skew_ms = random.choice([0, 0, DAY_MS, -DAY_MS])
                world.now_ms += skew_ms
            case 5:
                world.checkpoint()
            case 6 if skew_ms == 0 and random.random() < 0.6:
                world.background()
                if world.follower is not None and random.random() < 0.5:
                    world.fail_over()
                else:
                    world.restart(power_cut=random.random() < 0.5)
                sent_at_start, settled_ms = len(sent_at_ms), true_ms
            case _:
                pass
        step_ms = random.choice([MINUTE_MS // 2, ms // 2, ms])
        before = world.monotonic_ms
        world.elapse(step_ms, step_ms=10 * SECOND_MS if step_ms < HOUR_MS else MINUTE_MS)
        true_ms += world.monotonic_ms - before
        low = world.first()
        bound_ms = ms * 65 // 64 + 2 * MINUTE_MS
        assert all(true_ms - at_ms >= ms for at_ms in sent_at_ms[:low]), "a younger message died"
        for offset, at_ms in enumerate(sent_at_ms[low:], low):
            # The clock may have been wrong when an earlier process stored the message.
            begin_ms = max(at_ms, settled_ms + SETTLE_MS) if offset < sent_at_start else at_ms
            assert true_ms - begin_ms <= bound_ms, (offset, true_ms - at_ms)
    check_whole_log(world)


# ------------------------------------------------------------ bytes


def test_a_topic_keeps_its_newest_bytes() -> None:
    world = RetainingWorld()
    world.topic(queues=3)
    world.retain(bytes=2 * MIB)
    for n in range(60):
        world.send(f"{n}", queue_id=n % 3, size=100_000)
        world.send(f"other{n}", topic="other", size=100_000)
    world.elapse(20 * SECOND_MS)
    assert 2 * MIB - 110_000 <= world.stored_bytes() <= 2 * MIB * 65 // 64
    left = sorted(int(body) for body in world.drain())
    assert left == list(range(60 - len(left), 60)), "not the oldest died"
    assert world.first("other") == 0


@pytest.mark.parametrize("slice_number", range(0, 36, 3))
def test_a_purge_between_two_slices_saves_the_messages_behind_it(slice_number: int) -> None:
    world = RetainingWorld()
    world.topic(queues=40)
    world.retain(bytes=2 * MIB)
    for n in range(80):
        world.send(f"{n}", queue_id=n % 40, size=50_000)
    seen, live = 0, -1

    def live_count() -> int:
        topic = world.engine.catalog.topics[world.topic()]
        queues = world.engine.catalog.queues_of(topic)
        return sum(queue.max_offset - queue.min_offset for queue in queues)

    def purge() -> None:
        nonlocal seen, live
        seen += 1
        if seen == slice_number + 1:
            for queue_id in range(20):
                world.purge(queue_id=queue_id)
            live = live_count()

    world.background(between=purge)
    world.elapse(30 * SECOND_MS)
    if live >= 0:
        assert live_count() == live, "the rest fits, so nothing else dies"
    else:
        assert world.stored_bytes() <= 2 * MIB


def test_the_limit_of_the_broker_is_for_topics_without_their_own() -> None:
    world = RetainingWorld(retention_bytes=3 * MIB)
    world.retain("own", bytes=100 * MIB)
    for n in range(50):
        for topic in ("own", "a", "b"):
            world.send(f"{n}", topic=topic, size=50_000)
    world.elapse(20 * SECOND_MS)
    assert world.first("own") == 0
    kept = world.stored_bytes("a") + world.stored_bytes("b")
    assert 3 * MIB - SMALL.segment_bytes <= kept <= 3 * MIB
    assert 0 < world.first("a") < 50


def test_the_limit_of_the_broker_spares_topics_that_keep_messages_for_ever() -> None:
    world = RetainingWorld(retention_bytes=2 * MIB)
    world.retain("audit", ms=-1)
    for n in range(50):
        for topic in ("audit", "a"):
            world.send(f"{n}", topic=topic, size=50_000)
    world.elapse(20 * SECOND_MS)
    assert world.first("audit") == 0
    assert world.first("a") > 0
    assert 2 * MIB - SMALL.segment_bytes <= world.stored_bytes("a") <= 2 * MIB


# ------------------------------------------------------------ acked: free


def test_settled_messages_die_when_all_groups_have_settled_them() -> None:
    world = RetainingWorld()
    world.retain(frees_acked=True)
    world.send(*[f"m{n}" for n in range(10)])
    world.elapse(20 * SECOND_MS)
    assert world.first() == 0, "no group has begun the topic"
    one = world.pop(6, group="one", invisible_ms=HOUR_MS)
    two = world.pop(3, group="two", invisible_ms=HOUR_MS)
    world.ack(*one)
    world.elapse(20 * SECOND_MS)
    assert world.first() == 0
    world.ack(*two[1:])
    world.elapse(20 * SECOND_MS)
    assert world.first() == 0, "the first message is in flight"
    world.ack(two[0])
    world.elapse(20 * SECOND_MS)
    assert (world.first(), world.removed()) == (3, {TrimReason.ACKED: 3})
    world.engine.administration.delete_group("two", world.now_ms)
    world.commit()
    world.elapse(20 * SECOND_MS)
    assert world.first() == 6
    assert len(world.drain(group="three")) == 4


def test_settled_copies_die_as_their_messages_do() -> None:
    """Each delivery fails once, so each message has a copy in the retry topic."""
    world = RetainingWorld(segment_bytes=64 << 10, checkpoint_log_bytes=64 << 10)
    world.retain(ms=-1, frees_acked=True)
    for n in range(20):
        world.send(*[f"{n} {k}" for k in range(10)], size=2_000)
        assert len(world.pop(10, invisible_ms=10 * SECOND_MS)) == 10
        world.elapse(11 * SECOND_MS)
        copies = world.pop(10, invisible_ms=DAY_MS)
        assert [one.attempt for one in copies] == [2] * 10
        world.ack(*copies if n < 19 else [])
        world.elapse(10 * SECOND_MS)
    (retry,) = world.engine.catalog.retry_topic_ids.values()
    name = world.engine.catalog.topics[retry].name
    assert (world.first(), world.first(name)) == (200, 190), "the last ones are in flight"
    world.elapse(HOUR_MS, step_ms=MINUTE_MS)
    assert len(world.engine.log.segments) < 5


def test_settled_messages_are_looked_at_every_10_s_however_fast_the_log_grows() -> None:
    world = RetainingWorld()
    world.retain(frees_acked=True)
    world.send("a", "b", "c")
    world.background()
    for expected, passed_ms in ((0, 9 * SECOND_MS), (2, SECOND_MS), (2, 9 * SECOND_MS)):
        world.ack(*world.pop(1))
        world.now_ms += passed_ms
        world.monotonic_ms += passed_ms
        for _ in range(12):
            world.send("filler", topic="filler", size=100_000)
        world.background()
        assert world.first() == expected


def test_a_pulling_group_holds_what_it_has_not_pulled() -> None:
    world = RetainingWorld()
    world.retain(frees_acked=True)
    world.send(*[f"m{n}" for n in range(10)])
    world.ack(*world.pop(8, group="popping"))

    def pull(offset: int) -> None:
        world.engine.administration.update_pull_offset(
            world.group("pulling"), world.topic(), QueueId(0), offset, world.now_ms
        )
        world.commit()
        world.elapse(20 * SECOND_MS)

    pull(5)
    assert world.first() == 5
    pull(9)
    assert world.first() == 8
    # A group that does both has settled a message when both say so.
    world.ack(*world.pop(10, group="pulling"))
    world.ack(*world.pop(2, group="popping"))
    world.elapse(20 * SECOND_MS)
    assert world.first() == 9


def test_a_group_that_begun_elsewhere_holds_everything() -> None:
    world = RetainingWorld()
    world.engine.broker_groups.found({"broker-0": "h:1"}, world.now_ms)
    world.retain(frees_acked=True)
    group_id = world.group("elsewhere")
    begun = [(int(group_id), ((int(world.topic()), world.now_ms),))]
    for _ in world.engine.following.note_begun(begun, world.now_ms):
        pass
    world.send("a")
    world.ack(*world.pop(1))
    world.elapse(20 * SECOND_MS)
    assert world.first() == 0


def test_keep_is_the_default() -> None:
    world = RetainingWorld()
    world.send("a")
    world.ack(*world.pop(1))
    world.elapse(HOUR_MS)
    assert world.first() == 0


# ------------------------------------------------------------ deliveries, gate, segments


def test_acks_below_the_low_succeed_and_deadlines_make_no_copy() -> None:
    world = RetainingWorld()
    world.group(max_attempts=5)
    world.retain(ms=MINUTE_MS)
    world.send("a", "b", "c")
    acked, forgotten = world.pop(2, invisible_ms=10 * MINUTE_MS)
    world.elapse(3 * MINUTE_MS)
    assert world.first() == 3
    assert world.ack(acked) == [AckResult.APPLIED]
    world.elapse(10 * MINUTE_MS)
    assert world.drain() == []
    assert world.ack(forgotten) != [AckResult.APPLIED]
    group_id, topic_id = world.group(), world.topic()
    assert world.engine.state.counts["expired", group_id, topic_id] == 1
    assert world.engine.state.counts["expired_before_revive", group_id, topic_id] == 1
    check_log(world.disk)


def test_an_ordered_group_moves_to_the_low() -> None:
    world = RetainingWorld()
    world.group("ordered", is_ordered=True)
    world.retain(ms=5 * MINUTE_MS)
    world.send("a", "b", "c")
    [first] = world.pop(1, group="ordered", attempt_id="1", invisible_ms=HOUR_MS)
    world.elapse(3 * MINUTE_MS)
    world.send("d")
    world.elapse(4 * MINUTE_MS)
    assert world.first() == 3
    assert world.bodies(group="ordered", attempt_id="2") == ["d"]
    assert world.ack(first) == [AckResult.ALREADY], "its client gets OK"


@pytest.mark.parametrize("change", [{"ms": MINUTE_MS}, {"bytes": MIB}, {"frees_acked": True}])
def test_the_gate_bounds_each_rule_while_there_is_room(change: dict[str, Any]) -> None:
    world = RetainingWorld(archive_gate_group=ARCHIVE)
    world.leave_room(1 << 30)
    world.retain(**change)
    for n in range(40):
        world.send(f"{n}", size=60_000)
    world.ack(*world.pop(32))

    def seal(offset: int) -> None:
        world.engine.administration.update_pull_offset(
            world.group(ARCHIVE), world.topic(), QueueId(0), offset, world.now_ms
        )
        world.commit()
        world.elapse(2 * MINUTE_MS)

    seal(7)
    assert world.first() == 7
    assert world.engine.retention.gate.is_holding or "frees_acked" in change
    assert world.purge(low=12) == 5, "a purge does not wait"
    world.engine.room.measure()
    seal(20)
    assert world.first() == 20
    world.leave_room(3 * MIB)
    for _ in range(12):
        world.elapse(20 * SECOND_MS)
    if "frees_acked" not in change:
        assert world.first() > 20
    if "ms" in change:
        assert world.engine.retention.gate.passed_count > 0


def test_a_segment_goes_when_its_last_live_message_has_died() -> None:
    world = RetainingWorld()
    world.retain("short", ms=MINUTE_MS)
    world.retain("long", ms=10 * DAY_MS)
    for n in range(4):
        world.send(*[f"{n}-{m}" for m in range(9)], topic="short", size=100_000)
    world.elapse(3 * MINUTE_MS)
    assert world.engine.log.min_offset > 0, "no live message is left in the oldest segment"
    world.send("holds", topic="long")
    low = world.engine.log.min_offset
    for n in range(4):
        world.send(*[f"{n}-{m}" for m in range(9)], topic="short", size=100_000)
    world.elapse(4 * DAY_MS, step_ms=HOUR_MS)
    assert world.engine.log.min_offset <= low + 2 * SMALL.segment_bytes
    assert world.drain(topic="long") == ["holds"]
    world.elapse(7 * DAY_MS, step_ms=HOUR_MS)
    assert len(world.engine.log.segments) == 1


def test_a_follower_has_the_lows_of_its_master() -> None:
    world = RetainingWorld(is_followed=True)
    world.retain(ms=MINUTE_MS)
    world.send("a", "b")
    world.elapse(3 * MINUTE_MS)
    world.send("c")
    assert world.follower is not None
    queue = world.follower.engine.catalog.queue(world.topic(), QueueId(0))
    assert queue.min_offset == 2
    world.fail_over()
    assert world.drain() == ["c"]


def test_a_shorter_time_makes_room_on_a_full_disk() -> None:
    world = RetainingWorld(
        FaultyDisk(Random(0), capacity_bytes=10 * MIB),
        disk_reserve_bytes=4 * MIB,
        checkpoint_log_bytes=64 * MIB,
    )
    while world.engine.room.free_bytes >= 4 * MIB:
        world.send(f"big{world.disk.written_bytes}", size=100_000)
        world.engine.room.measure()
    world.elapse(5 * MINUTE_MS)
    with pytest.raises(DiskFull):
        world.send("one too many")
    world.retain(ms=MINUTE_MS)
    world.elapse(20 * SECOND_MS)
    world.send("later")
    assert world.drain() == ["later"]


def test_delayed_messages_leave_a_segment_although_a_message_in_it_is_kept_longer() -> None:
    """The state floor passes a segment when its events have been kept long enough."""
    world = RetainingWorld(retention_ms=DAY_MS, timer=replace(SMALL.timer, evacuation_lead_ms=0))
    engine = world.engine
    world.retain("kept", ms=-1)
    world.send("k", topic="kept")
    while len(engine.log.segments) < 3:
        world.send("filler", topic="filler", size=100_000)
    world.checkpoint()
    world.elapse(12 * HOUR_MS, step_ms=HOUR_MS)
    assert not engine.retention.is_near(world.now_ms, 6 * HOUR_MS)
    assert engine.retention.is_near(world.now_ms, 13 * HOUR_MS)
    world.elapse(DAY_MS, step_ms=HOUR_MS)
    assert engine.log.min_offset == 0
    assert engine.log.state_floor > 0
    world.checkpoint()
    world.elapse(20 * SECOND_MS)
    assert any(segment.pack for segment in engine.log.segments), "with the kept message alone"
    assert world.drain(topic="kept") == ["k"]
    world.retain("kept", ms=60 * HOUR_MS)
    world.elapse(2 * DAY_MS, step_ms=HOUR_MS)
    assert engine.log.min_offset > 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_follower_takes_the_setting_from_level_2_on(level: int) -> None:
    world = RetainingWorld(feature_level=level)
    following = world.engine.following
    home = Home(cluster_id="c", name="home", address="h:1")
    following.accept_home(home, may_join=True, is_complete=True, now_ms=world.now_ms)
    topic = Topic(
        id=TopicId(7),
        version=1,
        name=TOPIC,
        type=TopicType.NORMAL,
        queues=1,
        retention=TopicRetention(ms=HOUR_MS),
    )
    for _ in following.follow(
        [topic], [], deleted_topic_ids=(), deleted_group_ids=(), now_ms=world.now_ms
    ):
        pass
    world.commit()
    known = world.engine.catalog.find_topic(TOPIC)
    assert known is not None
    assert known.retention.ms == (HOUR_MS if level == 2 else None)


# ------------------------------------------------------------ live bytes


def recount(world: World) -> tuple[dict[TopicId, int], dict[int, int]]:
    """Return the live bytes per topic and per segment, by a full walk."""
    catalog, log = world.engine.catalog, world.engine.log
    topics: dict[TopicId, int] = {}
    segments: dict[int, int] = {}
    for queue in catalog.queues.values():
        if not catalog.is_alive(queue.topic_id):
            continue
        for log_offset, size, _ in queue.walk(queue.min_offset):
            topics[queue.topic_id] = topics.get(queue.topic_id, 0) + size
            start = next(one.start for one in log.segments if one.start <= log_offset < one.end)
            segments[int(start)] = segments.get(int(start), 0) + size
    return topics, segments


def check_live_bytes(world: World) -> None:
    world.engine.retention.request_look()
    for _ in world.engine.live_bytes.count():
        pass
    live = world.engine.live_bytes
    if not live.is_complete:  # A merge has dropped the entries of a deleted topic.
        for _ in live.count():
            pass
    topics, segments = recount(world)
    assert live.is_complete
    assert {id_: live.bytes_of_topic(id_) for id_ in world.engine.catalog.topics} == {
        id_: topics.get(id_, 0) for id_ in world.engine.catalog.topics
    }
    assert {one.start: live.live_bytes_in(one.start) for one in world.engine.log.segments} == {
        one.start: segments.get(int(one.start), 0) for one in world.engine.log.segments
    }


def count_live(world: World) -> None:
    for _ in world.engine.live_bytes.count():
        pass


def test_a_dropped_segment_leaves_the_counts_complete() -> None:
    """Below level 2 a segment goes with live messages. The entries are subtracted before."""
    world = RetainingWorld(feature_level=1, retention_bytes=2 * MIB)
    for n in range(40):
        world.send(f"{n}", size=100_000)
        if n % 5 == 0:
            world.checkpoint()
    count_live(world)
    counted = world.engine.live_bytes._queues[world.topic()][QueueId(0)]
    world.background()
    assert world.first() > 0
    count_live(world)
    again = world.engine.live_bytes._queues[world.topic()][QueueId(0)]
    assert counted is again, "the count began again"
    assert world.engine.live_bytes.bytes_of_topic(world.topic()) == world.stored_bytes()


def test_a_topic_that_is_deleted_before_a_merge_is_subtracted() -> None:
    """The merge deletes files that only the queue of the deleted topic names."""
    world = RetainingWorld(files_merged=2)
    for _ in range(4):
        world.send("m", topic="deleted", size=1_000)
        world.send("m", topic="stays", size=1_000)
        world.checkpoint()
    count_live(world)
    world.engine.administration.delete_topic("deleted", world.now_ms)
    world.commit()
    merges = world.engine.merges
    assert merges.is_due
    for files in merges.merge():
        for file in files:
            file.sync()
    count_live(world)
    assert world.engine.store.damaged_files == {}
    check_live_bytes(world)


@pytest.mark.parametrize("seed", seeds("live-bytes", 16))
def test_live_bytes_are_those_of_a_full_walk(seed: int) -> None:
    random = Random(seed)
    world = RetainingWorld(
        FaultyDisk(random),
        is_followed=random.random() < 0.3,
        files_merged=2,
        feature_level=random.choice([1, 2, 2]),
        retention_ms=20 * MINUTE_MS,
    )
    names = [f"t{n}" for n in range(4)]

    def disturb() -> None:
        if random.random() < 0.2:
            name = random.choice(names)
            match random.randrange(3):
                case 0 if world.engine.catalog.find_topic(name) is not None:
                    world.engine.administration.delete_topic(name, world.now_ms)
                    world.commit()
                case 1 if world.engine.catalog.feature_level > 1:
                    world.purge(name)
                case _:
                    world.send("more", topic=name, size=50_000)

    for _ in range(60):
        name = random.choice(names)
        match random.randrange(8):
            case 0 | 1 | 2:
                for _ in range(random.randrange(1, 9)):
                    world.send("m", topic=name, size=random.choice([10, 90_000]))
            case 3:
                disturb()
            case 4:
                world.checkpoint(disturb)
            case 5:
                world.background(between=disturb)
            case 6:
                world.elapse(5 * MINUTE_MS, step_ms=MINUTE_MS)
            case 7 if random.random() < 0.3:
                if world.follower is not None:
                    world.fail_over()
                else:
                    world.restart(power_cut=random.random() < 0.5)
        check_live_bytes(world)


# ------------------------------------------------------------ any order of events


@pytest.mark.parametrize("seed", seeds("retention-rules", 30))
def test_no_message_dies_too_early_in_any_order_of_events(seed: int) -> None:
    """Rules of all kinds among sends, pops, acks, restarts and failovers; and none comes back."""
    random = Random(seed)
    world = RetainingWorld(FaultyDisk(random), is_followed=random.random() < 0.5, files_merged=2)
    limit = 2 * MIB
    change: dict[str, Any] = random.choice(
        [{"ms": 10 * MINUTE_MS}, {"bytes": limit}, {"frees_acked": True}]
    )
    world.retain(**change)
    groups = {"plain": False, "ordered": True}
    for name, is_ordered in groups.items():
        world.group(name, is_ordered=is_ordered, max_attempts=100)
    sizes: list[int] = []
    sent_at_ms: list[int] = []
    true_ms = 0
    settled: dict[str, set[int]] = {name: set() for name in groups}
    begun: set[str] = set()
    out: list[tuple[str, PoppedMessage]] = []
    highest = 0

    def check() -> None:
        nonlocal highest
        low = world.first()
        assert low >= highest, "a low fell"
        highest = low
        if "ms" in change:
            assert all(true_ms - at_ms >= change["ms"] for at_ms in sent_at_ms[:low])
        elif "bytes" in change:
            assert low == 0 or sum(sizes[low - 1 :]) > limit, "more died than needed"
        elif low:
            assert begun, "no group has begun the topic"
            for name in begun:
                assert settled[name] >= set(range(low)), f"{name} has not settled them"

    def send() -> None:
        for _ in range(random.randrange(1, 6)):
            size = random.choice([10, 10, 60_000])
            queue = world.engine.catalog.queue(world.topic(), QueueId(0))
            world.send(f"{len(sizes)}", size=size)
            sizes.append(queue.entry(queue.max_offset - 1)[1])
            sent_at_ms.append(true_ms)

    for turn in range(100):
        match random.randrange(9):
            case 0 | 1 | 2:
                send()
            case 3 | 4:
                name = random.choice(list(groups))
                popped = world.pop(
                    random.randrange(1, 9), group=name, invisible_ms=MINUTE_MS, attempt_id=f"{turn}"
                )
                assert all(int(one.body) >= highest or one.attempt > 1 for one in popped)
                if popped and name not in begun:
                    begun.add(name)
                    settled[name] |= set(range(highest))  # A new group begins at the low.
                out += [(name, one) for one in popped]
            case 5 | 6 if out:
                for _ in range(random.randrange(1, 6)):
                    if out:
                        name, one = out.pop(random.randrange(len(out)))
                        # A plain group has a copy of a message whose deadline has passed.
                        if world.ack(one)[0] is not AckResult.GONE or name == "plain":
                            settled[name].add(int(one.body))
            case 7:
                world.checkpoint()
            case 8 if random.random() < 0.3:
                if world.follower is not None and random.random() < 0.5:
                    world.fail_over()
                else:
                    world.restart(power_cut=random.random() < 0.5)
        before = world.monotonic_ms
        # Below the deadline of deliveries: a copy in the retry topic settles a message too.
        world.elapse(random.choice([0, 0, 10 * SECOND_MS] if "ms" not in change else [MINUTE_MS]))
        true_ms += world.monotonic_ms - before
        if "frees_acked" in change:
            out = _settle_copied(world, out, settled)
        check()
    check_whole_log(world)


def _settle_copied(
    world: World, out: list[tuple[str, PoppedMessage]], settled: dict[str, set[int]]
) -> list[tuple[str, PoppedMessage]]:
    """Count messages that went to a retry topic as settled: their copy is live."""
    left = []
    for name, one in out:
        group = world.engine.catalog.find_group(name)
        assert group is not None
        retry = world.engine.catalog.retry_topic_ids.get((group.id, world.topic()))
        is_over = world.now_ms >= one.delivery.visible_at_ms
        if is_over and retry is not None:
            settled[name].add(int(one.body))
        else:
            left.append((name, one))
    return left


# ------------------------------------------------------------ scale


def test_a_look_at_very_many_topics_has_short_slices() -> None:
    """Ten thousand topics with their own times: the longest slice, in calls of functions."""
    world = RetainingWorld(topics_max=20_000)
    count = 10_000
    for n in range(count):
        world.engine.administration.put_topic(
            f"t{n}",
            type_=None,
            queues=1,
            retention=RetentionChange(ms=MINUTE_MS + n),
            now_ms=world.now_ms,
        )
        if n % 500 == 0:
            world.commit()
    world.commit()
    for n in range(0, count, 3):
        world.send("m", topic=f"t{n}")
    calls = longest = slices = 0

    def count_call(_frame: object, event: str, _argument: object) -> None:
        nonlocal calls
        calls += event in {"call", "c_call"}

    for _ in range(16):
        world.now_ms += 12 * SECOND_MS
        world.monotonic_ms += 12 * SECOND_MS
        while True:
            calls = 0
            sys.setprofile(count_call)
            try:
                files = world.engine.background.step(
                    world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.monotonic_ms
                )
            finally:
                sys.setprofile(None)
            if files is None:
                break
            if not files and not world.engine.checkpoints.is_due:
                longest, slices = max(longest, calls), slices + 1
            for file in files:
                file.sync()
            if has_pending(world.engine):
                world.commit()
    assert sum(world.engine.trims.messages.values()) == len(range(0, count, 3))
    assert slices > 16 * count // 256
    assert longest < 12_000
