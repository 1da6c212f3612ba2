"""Pops of topics of type PRIORITY: strict and fair slots, retries, growth, ordered groups."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any
from zlib import crc32

import pytest
from structlog.testing import capture_logs

from tests.support.worlds.engine_world import GROUP, SMALL, TOPIC, PoppedMessage, World, blob
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS, TIMERS, TimerWorld
from tidemill.broker.engine.configuration import administration
from tidemill.broker.engine.configuration.administration import ResetTarget
from tidemill.broker.engine.layout.block_file import QUEUE_MAGIC
from tidemill.broker.engine.layout.numbers import QueueId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.pop import message_selection
from tidemill.broker.engine.pop.budget import ALONE_BYTES
from tidemill.broker.engine.pop.progress import PopSubscription
from tidemill.broker.engine.store.block_file import open_block_file
from tidemill.broker.engine.store.mappings import Mappings
from tidemill.broker.engine.upkeep import checkpoint
from tidemill.broker.server.wire import config_log
from tidemill.common.errors import BadRequest, Conflict
from tidemill.message import stored_message

HIGH = 7
# Retention removes a segment after a day. It first copies the pending timers of the segment.
RETAINING = replace(
    SMALL, segment_bytes=32 << 10, retention_ms=DAY_MS, checkpoint_log_bytes=8_000, timer=TIMERS
)


def level_of(message: PoppedMessage | str) -> int:
    """Return the level in the body of a message: `LEVEL-NUMBER`."""
    return int((message if isinstance(message, str) else message.body).split("-")[0])


class LevelWorld(World):
    """An engine with a PRIORITY topic of eight levels, and by default a follower."""

    def __init__(
        self,
        *,
        factor: int = 90,
        queues: int = 8,
        is_ordered: bool = False,
        is_followed: bool = True,
    ) -> None:
        super().__init__(is_followed=is_followed, segment_bytes=4 << 20)
        self.put_topic(queues)
        self.group(GROUP, priority_factor=factor, is_ordered=is_ordered)
        self.sent = 0

    def put_topic(self, queues: int) -> None:
        self.engine.administration.put_topic(
            TOPIC, type_=TopicType.PRIORITY, queues=queues, now_ms=self.now_ms
        )
        self.commit()

    def put(self, level: int, count: int = 1) -> None:
        """Send messages of a level."""
        begin, self.sent = self.sent, self.sent + count
        self.send(*(f"{level}-{number}" for number in range(begin, self.sent)), queue_id=level)

    def set_factor(self, factor: int) -> None:
        self.engine.administration.put_group(GROUP, priority_factor=factor, now_ms=self.now_ms)
        self.commit()

    @property
    def subscription(self) -> PopSubscription:
        """The queues of the consumer group, with its credit."""
        catalog = self.engine.catalog
        pair = catalog.group_ids[GROUP], catalog.topic_ids[TOPIC]
        return self.engine.state.subscriptions[pair]

    def levels(self, want: int = 32) -> list[int]:
        """Pop, ack, and return the levels of the messages."""
        popped = self.pop(want)
        self.ack(*popped)
        return [level_of(message) for message in popped]


def largest_distance(levels: list[int]) -> int:
    """Return the largest number of messages from one low message to the next one."""
    low = [-1, *(place for place, level in enumerate(levels) if level < HIGH)]
    return max(right - left for left, right in pairwise(low))


@pytest.mark.parametrize("want", [2, 8, 32])
def test_next_pop_has_the_high_message(want: int) -> None:
    world = LevelWorld()
    world.put(0, 1_000)
    world.levels(want)
    world.put(HIGH)
    assert world.levels(want)[0] == HIGH


def test_messages_of_a_level_keep_their_order() -> None:
    world = LevelWorld(factor=100)
    for _ in range(5):
        for level in (3, 0, 5):
            world.put(level)
    bodies = world.drain()
    assert [level_of(body) for body in bodies] == [5] * 5 + [3] * 5 + [0] * 5
    numbers = [int(body.split("-")[1]) for body in bodies]
    assert all(numbers[begin : begin + 5] == sorted(numbers[begin : begin + 5]) for begin in (0, 5))


@pytest.mark.parametrize("want", [1, 2, 7, 32])
@pytest.mark.parametrize(("factor", "distance"), [(90, 11), (50, 3), (75, 5)])
def test_low_levels_do_not_starve(want: int, factor: int, distance: int) -> None:
    """The high level is never empty. All low messages arrive, in the order of their sends."""
    world = LevelWorld(factor=factor)
    for number in range(70):
        world.put(number % HIGH)
    received: list[str] = []
    while sum(level_of(body) < HIGH for body in received) < 70:
        world.put(HIGH, want)
        popped = world.pop(want)
        world.ack(*popped)
        received += _in_slots_order(popped)
        assert len(received) <= 70 * distance + want
    low = [body for body in received if level_of(body) < HIGH]
    assert low == [f"{number % HIGH}-{number}" for number in range(70)]
    # A batch is sorted, so a distance is known to the size of a batch only.
    distances = largest_distance([level_of(body) for body in received])
    assert distances <= distance + (want - 1 if want > 1 else 0)


def test_low_levels_do_not_starve_in_a_long_run() -> None:
    """Level 7 is never empty for 35,000 deliveries. 100 messages of each low level arrive late."""
    world, answer = LevelWorld(is_followed=False), 32
    pauses = 35_000 // HIGH // answer
    delivered = 0
    for low in range(HIGH):
        world.put(low, 100)
        lows, waited = 0, 0
        for _ in range(pauses + 1):
            world.put(HIGH, answer)
            levels = world.levels(answer)
            assert levels[0] == HIGH, "P-2"
            assert len(levels) == answer
            delivered += answer
            waited += answer if lows < 100 else 0
            lows += levels.count(low)
            # P-4, and high messages keep their share.
            assert min(100, waited // 11) <= lows <= waited // 10 + 2
        assert lows == 100
    assert delivered >= 35_000


def _in_slots_order(popped: list[PoppedMessage]) -> list[str]:
    """Return high messages, then low ones by age: the sorting of an answer hides the slots."""
    high = [one.body for one in popped if level_of(one) == HIGH]
    low = sorted((one.body for one in popped if level_of(one) < HIGH), key=lambda b: int(b[2:]))
    return high + low


def test_factor_100_starves_and_warns() -> None:
    world = LevelWorld()
    before = world.engine.catalog.find_group(GROUP)
    world.set_factor(100)
    after = world.engine.catalog.find_group(GROUP)
    assert after is not None
    with capture_logs() as logs:
        config_log.group_put(before, after, by="")
    warnings = [line for line in logs if line["log_level"] == "warning"]
    assert [(line["event"], line["group"]) for line in warnings] == [
        ("low priorities can starve", GROUP)
    ]
    world.put(0, 3)
    for _ in range(50):
        world.put(HIGH, 4)
        assert world.levels(4) == [HIGH] * 4
    assert world.levels() == [0] * 3


def test_factor_0_is_oldest_first() -> None:
    world = LevelWorld(factor=0)
    sent = [7, 0, 3, 3, 7, 1, 0, 6, 7, 2]
    for level in sent:
        world.put(level)
    assert [world.levels(1)[0] for _ in sent] == sent


def test_factor_50_alternates() -> None:
    world = LevelWorld(factor=50)
    world.put(0, 10)
    world.put(HIGH, 10)
    assert [world.levels(1)[0] for _ in range(10)] == [7, 0] * 5


def test_old_credit_does_not_hold_back_the_high_level_after_a_change_of_the_factor() -> None:
    world = LevelWorld(factor=90)
    world.put(0, 300)
    world.put(HIGH, 600)
    for _ in range(8):
        world.levels(1)
    assert world.subscription.credit == 80
    world.set_factor(1)
    assert HIGH not in world.levels(), "factor 1: 99 of 100 messages are the oldest"
    world.set_factor(100)
    assert world.levels() == [HIGH] * 32


def test_a_restart_forgets_the_credit_and_no_message() -> None:
    world = LevelWorld(factor=90)
    world.put(0, 10)
    world.put(HIGH, 30)
    levels = [world.levels(1)[0] for _ in range(8)]
    assert world.subscription.credit == 80
    world.restart(power_cut=True)
    levels += [world.levels(1)[0] for _ in range(32)]
    assert sorted(levels) == [0] * 10 + [HIGH] * 30
    assert largest_distance(levels[:20]) == 18, "the bound grows by one round"


def test_one_answer_is_sorted_by_level_and_fair_slots_are_the_oldest() -> None:
    world = LevelWorld(factor=50)
    for level in (1, 0, 2, 7, 7, 7, 7):
        world.put(level)
    assert world.levels(6) == [7, 7, 7, 2, 1, 0]


def test_a_low_level_alone_is_delivered_at_once() -> None:
    world = LevelWorld()
    world.put(0, 5)
    assert world.levels(3) == [0] * 3
    assert world.levels() == [0] * 2
    assert world.levels() == []


# ------------------------------------------------------------ retries


@pytest.mark.parametrize("way", ["nack", "expired", "failover", "restart"])
def test_retry_of_a_high_message_overtakes_low_messages(way: str) -> None:
    world = LevelWorld()
    world.put(5)
    [high] = world.pop(1, invisible_ms=SECOND_MS)
    world.put(3, 50)
    if way == "nack":
        world.change(high, 10)
    if way == "failover":
        world.fail_over()
    if way == "restart":
        world.restart(power_cut=True)
    world.advance(SECOND_MS + 1)
    [again] = [one for one in world.pop(2) if level_of(one) == 5]
    assert (again.body, again.attempt) == (high.body, 2)
    retry = world.engine.catalog.find_topic(f"%RETRY%{GROUP}+{TOPIC}")
    assert retry is not None
    assert retry.queues == 8


def test_retries_of_all_levels_keep_their_order_of_levels() -> None:
    world = LevelWorld(factor=100)
    for level in (0, 7, 3):
        world.put(level, 2)
    assert len(world.pop(invisible_ms=SECOND_MS)) == 6
    world.advance(SECOND_MS + 1)
    world.put(4)
    world.fail_over()
    assert world.levels() == [7, 7, 4, 3, 3, 0, 0]


def test_a_dead_letter_has_one_queue() -> None:
    world = LevelWorld()
    world.engine.administration.put_group(GROUP, max_attempts=1, now_ms=world.now_ms)
    world.put(6)
    world.pop(invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    assert world.bodies(group="auditor", topic=f"%DLQ%{GROUP}") == ["6-0"]


def test_a_retry_that_waited_a_second_goes_first_in_its_level_only() -> None:
    world = LevelWorld(factor=100)
    world.put(3)
    world.pop(1, invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    world.put(3, 2)
    world.put(6)
    world.advance(2 * SECOND_MS)
    assert world.drain() == ["6-3", "3-0", "3-1", "3-2"]


@pytest.mark.parametrize("switch", ["none", "restart", "failover"])
def test_growing_queues_keeps_stored_levels(switch: str) -> None:
    world = LevelWorld(factor=100, queues=2)
    world.put(1, 2)
    world.put(0)
    world.pop(1, invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    world.put_topic(8)
    world.put(5)
    world.pop(1, invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    if switch == "restart":
        world.restart()
    if switch == "failover":
        world.fail_over()
    retry = world.engine.catalog.find_topic(f"%RETRY%{GROUP}+{TOPIC}")
    assert retry is not None
    assert retry.queues == 8
    assert world.levels() == [5, 1, 1, 0]


def test_a_topic_that_loses_its_type_still_delivers_the_retries_of_all_levels() -> None:
    world = LevelWorld()
    for level in (0, 3, 7):
        world.put(level)
    world.pop(invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    world.engine.administration.put_topic(
        TOPIC, type_=TopicType.NORMAL, queues=0, is_forced=True, now_ms=world.now_ms
    )
    world.commit()
    assert sorted(world.levels()) == [0, 3, 7]


def test_a_large_message_ends_a_pop_and_travels_alone() -> None:
    world = LevelWorld(factor=100)
    world.send("5-large", queue_id=5, size=ALONE_BYTES)
    world.put(7)
    world.put(3)
    assert [world.levels() for _ in range(3)] == [[7], [5], [3]]


def test_a_reset_applies_to_all_levels_and_their_retries() -> None:
    world = LevelWorld()
    for level in (7, 2, 0):
        world.put(level)
    world.pop(invisible_ms=SECOND_MS)
    world.advance(SECOND_MS + 1)
    target = ResetTarget(earliest=True)
    world.engine.administration.reset_offset(GROUP, TOPIC, target, world.now_ms)
    world.commit()
    assert world.levels() == [7, 2, 0]
    assert world.levels() == [], "the retries from before the reset are void"


# ------------------------------------------------------------ ordered groups


def test_ordered_group_blocks_one_level() -> None:
    world = LevelWorld(factor=100, is_ordered=True)
    for level in (7, 7, 3, 3, 0):
        world.put(level)
    first = world.pop(1)
    assert [one.body for one in first] == ["7-0"]
    assert world.bodies() == ["3-2", "3-3"]
    world.ack(*first)
    assert world.bodies() == ["7-1"]
    assert world.bodies() == ["0-4"]
    assert world.bodies() == []


def test_an_ordered_pop_takes_its_batch_from_one_level_and_fair_slots_are_batches() -> None:
    world = LevelWorld(factor=50, is_ordered=True)
    world.put(0, 6)
    world.put(2, 6)
    world.put(HIGH, 12)
    batches = [world.levels(2) for _ in range(8)]
    assert batches == [[7, 7], [0, 0]] * 3 + [[7, 7], [2, 2]]


# ------------------------------------------------------------ factors of single pops


@pytest.mark.parametrize("is_ordered", [False, True], ids=["unordered", "ordered"])
@pytest.mark.parametrize(
    ("factor", "level_below", "expected"), [(100, 0, 7), (0, 7, 0), (0, 1, 0), (100, 7, 3)]
)
def test_a_pop_with_its_own_factor_keeps_the_credit(
    is_ordered: bool, factor: int, level_below: int, expected: int
) -> None:
    """A proxy at several broker groups accounts for these messages."""
    world = LevelWorld(factor=50, is_ordered=is_ordered)
    for level in (0, 3, HIGH):
        world.put(level, 9)
    assert world.levels(1) == [HIGH]
    credit = world.subscription.credit
    for _ in range(3):
        popped = world.pop(1, priority_factor=factor, level_below=level_below)
        world.ack(*popped)
        assert [level_of(one) for one in popped] == [expected]
    assert world.subscription.credit == credit
    assert world.levels(1) == [0], "the next slot of the consumer group is fair"


def test_a_pop_below_a_level_finds_no_higher_message() -> None:
    world = LevelWorld()
    world.put(HIGH, 3)
    assert world.pop(2, priority_factor=0, level_below=HIGH) == []
    assert world.levels(2) == [HIGH, HIGH]


def test_a_priority_factor_above_100_is_rejected() -> None:
    world = LevelWorld()
    with pytest.raises(BadRequest, match="a priority factor is 0 to 100, not 101"):
        world.pop(1, priority_factor=101)


# ------------------------------------------------------------ filters


def test_a_level_that_does_not_match_does_not_hide_a_lower_level() -> None:
    world = LevelWorld()
    for number in range(3_000):
        world.send(f"7-{number}", queue_id=HIGH, tag="other")
    world.send("1-0", queue_id=1, tag="wanted")
    world.send("7-wanted", queue_id=HIGH, tag="wanted")
    received: list[str] = []
    for _ in range(4):
        received += world.bodies(tags=("wanted",))
    assert received == ["1-0", "7-wanted"]


def test_a_filter_keeps_the_order_of_levels_and_skips_other_messages() -> None:
    world = LevelWorld(factor=50)
    for number in range(6):
        for level in (0, 3, 7):
            tag = "wanted" if number % 2 else "other"
            world.send(f"{level}-{number}", queue_id=level, tag=tag)
    bodies = world.bodies(4, tags=("wanted",))
    assert bodies == ["7-1", "7-3", "3-1", "0-1"]
    bodies = world.drain(tags=("wanted",))
    assert bodies == ["7-5", "3-3", "3-5", "0-3", "0-5"]


@pytest.mark.parametrize("wanted", [{"sql": "kind = 'alarm'"}, {"tags": ("alarm",)}])
@pytest.mark.parametrize("levels", [8, 32])
def test_a_filter_does_not_let_low_levels_starve(wanted: dict[str, Any], levels: int) -> None:
    """All messages match. The levels below the highest one are full, too."""
    world = LevelWorld(queues=levels)

    def send(level: int, count: int) -> None:
        bodies = (f"{level}-{number}" for number in range(count))
        world.send(*bodies, queue_id=level, tag="alarm", properties={"kind": "alarm"})

    send(0, 1)
    for level in range(1, levels):
        send(level, 100)
    received = world.bodies(11, **wanted)
    assert received.count("0-0") == 1


@pytest.mark.parametrize("wanted", [{"sql": "kind = 'alarm'"}, {"tags": ("alarm",)}])
def test_many_levels_without_a_match_do_not_hide_the_lowest_one(wanted: dict[str, Any]) -> None:
    world = LevelWorld(queues=10)
    for level in range(1, 10):
        bodies = (f"{level}-{number}" for number in range(600))
        world.send(*bodies, queue_id=level, tag="noise", properties={"kind": "noise"})
    world.send("0-0", queue_id=0, tag="alarm", properties={"kind": "alarm"})
    assert world.bodies(4, **wanted) == ["0-0"]


# ------------------------------------------------------------ credit, damage, settings


@pytest.mark.parametrize(("factor", "rounds"), [(90, 40), (50, 10)])
def test_pops_that_empty_all_levels_do_not_hold_back_the_high_level(
    factor: int, rounds: int
) -> None:
    world = LevelWorld(factor=factor)
    for _ in range(rounds):
        world.put(HIGH)
        world.put(0)
        assert world.levels(2) == [HIGH, 0]
    world.put(HIGH, 5)
    world.put(0, 5)
    assert world.levels(2)[0] == HIGH


def test_damaged_entries_after_the_answer_do_not_end_a_pop(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pop reads cold messages ahead, up to 64 entries further on."""
    monkeypatch.setattr(checkpoint, "QUEUE_BLOCK_ENTRIES_MAX", 4)
    monkeypatch.setattr(message_selection, "WARM_BYTES", 0)
    world = LevelWorld()
    world.follower = None
    world.put(HIGH, 3)
    world.put(0, 40)
    world.checkpoint()
    world.restart()
    topic_id = world.engine.catalog.topic_ids[TOPIC]
    damaged = 0
    for name in world.disk.names("queues"):
        for row in open_block_file(Mappings(world.disk), name, QUEUE_MAGIC, {}).rows():
            if (row.key_1, row.key_2, row.first) == (topic_id, 0, 20):
                world.disk.damage(name, row.position + 5, bits=64)
                damaged += 1
    assert damaged == 1
    assert [world.levels(4), world.levels(4)] == [[HIGH, HIGH, HIGH, 0], [0, 0, 0, 0]]


def test_deliveries_count_by_slot_also_for_an_ordered_group() -> None:
    for is_ordered, strict, fair in ((False, 10, 10), (True, 10, 10)):
        world = LevelWorld(factor=50, is_ordered=is_ordered)
        world.put(0, 10)
        world.put(HIGH, 10)
        for _ in range(10):
            world.levels(2)
        [counts] = world.engine.state.delivered_by_level.values()
        assert sum(count for (_, is_fair), count in counts.items() if not is_fair) >= strict
        assert sum(counts.values()) == strict + fair


def test_a_topic_of_an_earlier_version_with_many_queues_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = LevelWorld()
    with monkeypatch.context() as patch:
        patch.setattr(administration, "LEVELS_MAX", 64)
        world.put_topic(64)
    put = partial(world.engine.administration.put_topic, TOPIC, now_ms=world.now_ms)
    put(type_=None, queues=0, delivery_spread_ms=1_000)
    world.commit()
    with pytest.raises(Conflict, match="at most 32 queues"):
        put(type_=None, queues=65)


# ------------------------------------------------------------ delays


@pytest.mark.parametrize("switch", ["none", "restart", "failover"])
def test_delayed_message_fires_into_its_level(switch: str) -> None:
    world = LevelWorld(factor=100)
    topic_id = world.topic()
    for level in (2, 6):
        data = blob(f"{level}-late", kind=stored_message.TYPE_DELAY)
        world.engine.commands.send(
            topic_id,
            QueueId(level),
            data,
            crc32(data),
            now_ms=world.now_ms,
            firing_ms=world.now_ms,
            delay_ms=5 * SECOND_MS,
        )
    world.commit()
    world.put(4)
    if switch == "restart":
        world.restart(power_cut=True)
    if switch == "failover":
        world.fail_over()
    assert world.bodies() == ["4-0"]
    world.put(4)
    world.put(6)
    world.advance(6 * SECOND_MS)
    assert world.bodies() == ["6-2", "6-late", "4-1", "2-late"]


@pytest.mark.parametrize("switch", ["none", "restart", "failover"])
@pytest.mark.parametrize("is_evacuated", [False, True])
@pytest.mark.parametrize("is_rescheduled", [False, True])
def test_a_changed_delayed_message_fires_into_its_level(
    *, is_rescheduled: bool, is_evacuated: bool, switch: str
) -> None:
    config = RETAINING if is_evacuated else replace(RETAINING, retention_ms=400 * DAY_MS)
    world = TimerWorld(config=config, is_followed=True)
    world.engine.administration.put_topic(
        TOPIC, type_=TopicType.PRIORITY, queues=8, now_ms=world.now_ms
    )
    world.group(GROUP, priority_factor=100)
    due_at_ms = world.now_ms + 10 * DAY_MS
    timers = {
        level: world.schedule(f"{level}-late", due_at_ms=due_at_ms, queue_id=level).queue_offset
        for level in (2, 6)
    }
    if is_rescheduled:
        due_at_ms += DAY_MS
        for timer_id in timers.values():
            world.reschedule(timer_id, due_at_ms)
    if is_evacuated:
        _evacuate(world)
    if switch == "restart":
        world.restart(power_cut=True)
    if switch == "failover":
        world.fail_over()
    world.advance(due_at_ms - SECOND_MS - world.now_ms)
    assert world.bodies() == [], "no message is due yet"
    for level in (4, 6):
        world.send(f"{level}-early", queue_id=level)
    world.advance(2 * SECOND_MS)
    assert world.bodies() == ["6-early", "6-late", "4-early", "2-late"]
    copies = [world.timers.timers[timer_id].copies for timer_id in timers.values()]
    assert all(copies) == any(copies) == is_evacuated


def _evacuate(world: TimerWorld) -> None:
    """Let retention remove the first segment, with the first copies of the timers."""
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="other", size=8_000)
    world.background()  # Notes the time of the messages.
    world.advance(DAY_MS + HOUR_MS)
    for _ in range(8):
        world.sleep(2 * SECOND_MS)
        world.checkpoint()
        world.background()
    assert world.engine.log.min_offset > 0, "the first segment is removed"
