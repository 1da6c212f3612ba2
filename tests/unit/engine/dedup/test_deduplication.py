"""Producer deduplication: known keys, their windows, and the answers of repeats (ADR 0087)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.worlds.dedup_world import WINDOW_MS, DedupWorld
from tests.support.worlds.engine_world import TOPIC
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tidemill.broker.engine.dedup.config import DedupConfig
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.dedup.key_memory import COUNTED_BYTES
from tidemill.broker.engine.dedup.key_table import KEY_BYTES
from tidemill.broker.engine.layout.numbers import HalfId, TimerId
from tidemill.broker.engine.metadata.dedup_policy import DedupKeySource, DedupMode, KeyPlacement
from tidemill.broker.engine.metadata.membership import Home
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import (
    Conflict,
    DedupKeyNotFound,
    IllegalPropertyKey,
    KeyOwnerChanged,
    Overloaded,
)

HOUR_MS = 3_600_000


@pytest.fixture
def world() -> DedupWorld:
    world = DedupWorld(is_followed=True)
    world.turn_on()
    return world


def test_a_repeat_gets_the_first_answer_and_stores_nothing(world: DedupWorld) -> None:
    first = world.store("a", key="k", message_id="first")
    assert world.repeat("a", key="k", message_id="second") == first
    assert first.message_id == "first"
    assert world.drain() == ["a"]


def test_the_message_id_is_the_key_of_a_message_without_the_property(world: DedupWorld) -> None:
    first = world.store("a", message_id="m-1")
    assert world.repeat("a", message_id="m-1") == first
    world.store("b", message_id="m-2")
    assert world.drain() == ["a", "b"]


def test_a_message_without_the_property_is_not_checked_if_the_key_is_a_property() -> None:
    world = DedupWorld()
    world.turn_on(key_from=DedupKeySource.PROPERTY)
    world.store("a", message_id="m-1")
    world.store("a", message_id="m-1")
    world.store("b", key="k")
    world.repeat("b", key="k")
    assert world.drain() == ["a", "a", "b"]


def test_the_property_does_not_count_if_the_key_is_the_message_id() -> None:
    world = DedupWorld()
    world.turn_on(key_from=DedupKeySource.MESSAGE_ID)
    world.store("a", message_id="m-1", key="k")
    world.store("b", message_id="m-2", key="k")
    world.repeat("c", message_id="m-1", key="other")


def test_two_messages_of_one_round_with_one_key_are_stored_once(world: DedupWorld) -> None:
    first = world.store("a", key="k", is_ended=False)
    assert world.repeat("b", key="k", is_ended=False) == first
    assert world.engine.deduplication.hits[world.topic(), "in_flight"] == 1
    world.commit()
    assert world.drain() == ["a"]


@pytest.mark.parametrize("size", [0, 256])
def test_a_key_outside_its_bounds_is_rejected(world: DedupWorld, size: int) -> None:
    with pytest.raises(IllegalPropertyKey):
        world.store("a", key="k" * size)


def test_keys_of_two_topics_are_apart(world: DedupWorld) -> None:
    world.turn_on(topic="other")
    world.store("a", key="k")
    world.store("a", key="k", topic="other")


@pytest.mark.parametrize("owners", [(), ("another",)])
def test_a_broker_group_outside_the_list_of_owners_stores_no_key(owners: tuple[str, ...]) -> None:
    """An empty list means the home."""
    world = DedupWorld()
    world.turn_on()
    catalog = world.engine.catalog
    topic = catalog.topics[world.topic()]
    catalog.topics[topic.id] = replace(topic, placement=KeyPlacement(groups=owners, version=1))
    catalog.membership.home = Home(cluster_id="c1", name="another", address="another:8082")
    with pytest.raises(KeyOwnerChanged, match="another owns the dedup key"):
        world.store("a", key="k")
    catalog.membership.home = Home(cluster_id="c1", name=catalog.broker_name, address="own:8082")
    if not owners:
        world.store("a", key="k")


@pytest.mark.parametrize("step_ms", [0, HOUR_MS, -HOUR_MS])
def test_window_is_exact_to_the_millisecond(world: DedupWorld, step_ms: int) -> None:
    """Also if the wall clock is set in between."""
    world.store("a", key="k")
    world.now_ms += WINDOW_MS - 1
    world.wall_step_ms = step_ms
    world.repeat("b", key="k")
    world.now_ms += 1
    world.store("c", key="k")
    assert world.drain() == ["a", "c"]


@pytest.mark.parametrize("step_ms", [HOUR_MS, -HOUR_MS])
def test_a_window_outlives_a_step_of_the_clock_and_a_restart(
    world: DedupWorld, step_ms: int
) -> None:
    world.store("a", key="k")
    world.wall_step_ms = step_ms
    world.store("b", key="later")
    world.now_ms += 1_000
    # A start reads the wall clock, which was set.
    stepped = world.now_ms + step_ms
    world.now_ms, world.wall_step_ms = max(stepped, world._latest_ms), 0
    world.restart()
    world.repeat("c", key="k")


def test_repeats_do_not_extend_the_window(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.now_ms += WINDOW_MS - 1
    world.repeat("a", key="k")
    world.now_ms += 1
    world.store("a", key="k")


def test_a_shorter_window_applies_at_once(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.now_ms += 2_000
    world.turn_on(window_ms=1_000)
    world.store("b", key="k")


def test_a_longer_window_applies_to_known_keys_only(world: DedupWorld) -> None:
    world.turn_on(window_ms=1_000)
    world.store("over", key="over")
    world.now_ms += 900
    world.store("known", key="known")
    world.now_ms += 200
    world.turn_on(window_ms=HOUR_MS)
    world.store("over", key="over")
    world.repeat("known", key="known")
    world.now_ms += HOUR_MS - 300
    world.repeat("known", key="known")


def test_a_key_is_known_after_a_longer_window_and_a_start_with_an_earlier_clock(
    world: DedupWorld,
) -> None:
    world.turn_on(window_ms=1_000)
    world.now_ms += 2 * HOUR_MS
    world.turn_on(window_ms=WINDOW_MS)
    world.checkpoint()
    world.now_ms -= HOUR_MS
    world.restart()
    world.store("a", key="k")
    world.repeat("b", key="k")


def test_a_free_key_stays_free_after_a_start_from_the_floor_with_a_longer_window() -> None:
    world = DedupWorld(segment_bytes=64 << 10, checkpoint_log_bytes=64 << 10)
    world.turn_on(window_ms=1_000)
    for n in range(40):
        world.send(f"before {n}", topic="other", size=4_000)
    message_at = world.engine.log.log_end
    world.store("a", key="k")
    world.now_ms += 5_000
    world.turn_on(window_ms=HOUR_MS)
    for n in range(40):
        world.send(f"after {n}", topic="other", size=4_000)
    world.checkpoint()
    # The first record of the topic is before the floor, and the message with the key is not.
    floor = [found for found in floors(world) if found <= message_at][-1]
    assert floor > world.engine.log.min_offset
    move_floor(world, floor)
    world.purge("other")
    pack_all(world)
    forget_derived_files(world)
    world.open()
    world.store("b", key="k")


def test_turning_it_off_forgets_all_keys(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.turn_off()
    world.turn_on()
    world.store("b", key="k")
    assert world.drain() == ["a", "b"]


def test_deleting_the_topic_forgets_its_keys(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.engine.administration.delete_topic("orders", world.now_ms)
    world.commit()
    world.turn_on()
    world.store("b", key="k")


def test_another_body_is_counted(world: DedupWorld) -> None:
    world.store("a", key="k")
    with pytest.raises(RepeatedSend) as repeated:
        world.store("another", key="k")
    assert repeated.value.is_mismatch
    assert world.engine.deduplication.mismatches[world.topic()] == 1


# ---------------------------------------------------------------- delayed messages


def test_a_repeat_of_a_delayed_message_gets_its_timer(world: DedupWorld) -> None:
    first = world.store("a", key="k", due_at_ms=world.now_ms + 60_000)
    assert world.repeat("b", key="k", due_at_ms=world.now_ms + 5_000) == first
    assert world.repeat("b", key="k") == first
    world.advance(60_000)
    assert world.drain() == ["a"]


def test_a_pending_timer_keeps_its_key_after_the_window(world: DedupWorld) -> None:
    first = world.store("a", key="k", due_at_ms=world.now_ms + 3 * WINDOW_MS)
    world.advance(2 * WINDOW_MS)
    assert world.repeat("b", key="k") == first
    world.advance(WINDOW_MS)
    world.store("c", key="k")
    assert world.drain() == ["a", "c"]


def test_the_key_of_a_fired_timer_is_known_until_the_window_is_over(world: DedupWorld) -> None:
    first = world.store("a", key="k", due_at_ms=world.now_ms + 1_000)
    world.advance(2_000)
    assert world.repeat("b", key="k") == first
    world.advance(WINDOW_MS - 2_000)
    world.store("c", key="k")


def test_cancel_frees_the_key(world: DedupWorld) -> None:
    first = world.store("a", key="k", due_at_ms=world.now_ms + 60_000)
    world.cancel(first.queue_offset)
    world.store("b", key="k", due_at_ms=world.now_ms + 60_000)
    world.advance(60_000)
    assert world.drain() == ["b"]


def test_reschedule_and_fire_now_keep_the_key(world: DedupWorld) -> None:
    first = world.store("a", key="k", due_at_ms=world.now_ms + 60_000)
    timers, timer_id = world.engine.timers.commands, TimerId(first.queue_offset)
    due_at_ms = world.now_ms + 2 * WINDOW_MS
    timers.reschedule(timer_id, due_at_ms=due_at_ms, now_ms=world.now_ms, firing_ms=world.now_ms)
    world.commit()
    world.advance(WINDOW_MS + 1)
    assert world.repeat("b", key="k").queue_offset == timer_id
    timers.fire(timer_id, now_ms=world.now_ms, firing_ms=world.now_ms)
    world.advance(10)
    assert world.drain() == ["a"]


# ---------------------------------------------------------------- transactions


def test_a_repeat_of_a_half_message_gets_its_transaction(world: DedupWorld) -> None:
    first = world.store("a", key="k", is_half=True)
    assert world.repeat("b", key="k", is_half=True) == first
    world.commit_half(HalfId(first.half_id))
    assert world.repeat("c", key="k", is_half=True) == first
    assert world.drain() == ["a"]


def test_an_open_half_message_keeps_its_key_after_the_window(world: DedupWorld) -> None:
    world.turn_on(window_ms=1_000)
    first = world.store("a", key="k", is_half=True)
    world.now_ms += 1_001
    assert world.repeat("a", key="k", is_half=True) == first
    world.commit_half(HalfId(first.half_id))
    world.store("b", key="k")


def test_rollback_frees_the_key(world: DedupWorld) -> None:
    first = world.store("a", key="k", is_half=True)
    world.roll_back(HalfId(first.half_id))
    world.store("b", key="k")
    assert world.drain() == ["b"]


def test_expiry_frees_the_key_and_a_recovery_takes_it_again(world: DedupWorld) -> None:
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    first = world.store("a", key="k", is_half=True)
    world.advance(1_000)
    world.write_checks()
    world.advance(1_000)
    assert world.rows() == []
    recovered = world.recover(HalfId(first.half_id))
    assert world.repeat("b", key="k", is_half=True).half_id == recovered
    world.commit_half(recovered)
    assert world.drain() == ["a"]


def test_a_recovery_is_rejected_if_another_message_has_the_key(world: DedupWorld) -> None:
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    first = world.store("a", key="k", is_half=True)
    world.advance(1_000)
    world.write_checks()
    world.advance(1_000)
    world.store("b", key="k")
    with pytest.raises(Conflict):
        world.recover(HalfId(first.half_id))


def test_a_recovered_message_takes_its_key_only_within_the_memory() -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=64 << 10))
    world.turn_on(window_ms=60_000)
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    half_id = HalfId(world.store("half", key="k", is_half=True).half_id)
    world.advance(1_000)
    world.write_checks()
    world.advance(1_000)
    with pytest.raises(Overloaded):
        store_new_keys(world, 2_000)
    with pytest.raises(Overloaded, match="takes no new key"):
        world.recover(half_id)
    world.advance(60_000)
    world.advance(2_000)
    world.recover(half_id)
    world.repeat("again", key="k")


def test_a_committed_message_with_a_due_time_keeps_its_key_until_it_fires(
    world: DedupWorld,
) -> None:
    due_at_ms = world.now_ms + 2 * WINDOW_MS
    first = world.store("a", key="k", is_half=True, due_at_ms=due_at_ms)
    world.commit_half(HalfId(first.half_id))
    world.advance(WINDOW_MS + 1)
    world.repeat("b", key="k")
    world.advance(WINDOW_MS)
    world.store("c", key="k")
    assert world.drain() == ["a", "c"]


# ---------------------------------------------------------------- mode replace


@pytest.fixture
def debounce() -> DedupWorld:
    world = DedupWorld(is_followed=True)
    world.turn_on(mode=DedupMode.REPLACE, max_wait_ms=10_000)
    return world


def test_a_send_replaces_a_pending_message(debounce: DedupWorld) -> None:
    world, begin_ms = debounce, debounce.now_ms
    first = world.store("a", key="k", due_at_ms=begin_ms + 3_000)
    world.advance(2_000)
    second = world.store("b", key="k", due_at_ms=begin_ms + 5_000)
    assert second.queue_offset == first.queue_offset
    assert (second.message_id, second.due_at_ms) == ("id-b", begin_ms + 5_000)
    world.advance(2_999)
    assert world.drain() == []
    world.advance(1)
    assert world.drain() == ["b"]


def test_a_busy_key_fires_after_the_longest_wait(debounce: DedupWorld) -> None:
    world, begin_ms = debounce, debounce.now_ms
    for n in range(10):
        sent = world.store(f"m{n}", key="k", due_at_ms=world.now_ms + 3_000)
        assert sent.due_at_ms == min(world.now_ms + 3_000, begin_ms + 10_000)
        world.advance(1_000)
    assert world.drain() == ["m9"]


def test_the_first_message_waits_no_longer_than_the_longest_wait(debounce: DedupWorld) -> None:
    sent = debounce.store("a", key="k", due_at_ms=debounce.now_ms + 50_000)
    assert sent.due_at_ms == debounce.now_ms + 10_000


@pytest.mark.parametrize("open_ms", [4_000, 20_000])
def test_a_committed_message_waits_no_longer_than_the_longest_wait(
    debounce: DedupWorld, open_ms: int
) -> None:
    """From its first send; if that is long ago, not at all."""
    world, begin_ms = debounce, debounce.now_ms
    half = world.store("a", key="k", is_half=True, due_at_ms=begin_ms + HOUR_MS)
    world.advance(open_ms)
    world.commit_half(HalfId(half.half_id))
    world.advance(max(10_000 - open_ms - 1, 0))
    assert world.drain() == []
    world.advance(1)
    assert world.drain() == ["a"]


def test_a_message_without_a_delay_fires_the_timer_now(debounce: DedupWorld) -> None:
    debounce.store("a", key="k", due_at_ms=debounce.now_ms + 5_000)
    debounce.store("b", key="k")
    debounce.advance(10)
    assert debounce.drain() == ["b"]


def test_a_fired_key_is_free(debounce: DedupWorld) -> None:
    debounce.store("a", key="k", due_at_ms=debounce.now_ms + 1_000)
    debounce.advance(1_000)
    assert debounce.rows() == []
    later = debounce.store("b", key="k", due_at_ms=debounce.now_ms + 50_000)
    assert later.due_at_ms == debounce.now_ms + 10_000


def test_an_old_handle_cancels_the_replaced_timer(debounce: DedupWorld) -> None:
    first = debounce.store("a", key="k", due_at_ms=debounce.now_ms + 5_000)
    debounce.store("b", key="k", due_at_ms=debounce.now_ms + 6_000)
    debounce.cancel(first.queue_offset)
    debounce.advance(10_000)
    assert debounce.drain() == []
    debounce.store("c", key="k")
    assert debounce.drain() == ["c"]


def test_without_a_pending_timer_the_mode_acts_as_first(debounce: DedupWorld) -> None:
    first = debounce.store("a", key="k")
    assert debounce.repeat("b", key="k", due_at_ms=debounce.now_ms + 1_000) == first


# ---------------------------------------------------------------- starts, floors, memory


def _forget_timer(world: DedupWorld, timer_id: int) -> None:
    """Forget a timer, as the check of the timer files does if the log has no record of it."""
    index = world.engine.timers.index
    index.link_gathered()
    entry = index.get(TimerId(timer_id))
    index.table.put(TimerId(timer_id), entry._replace(state=TimerState.FORGOTTEN))
    index.count(TimerId(timer_id), entry, -1)


def test_the_key_of_a_forgotten_timer_takes_a_new_timer() -> None:
    world = DedupWorld()
    world.turn_on(mode=DedupMode.REPLACE, max_wait_ms=10_000)
    _forget_timer(world, world.store("a", key="k", due_at_ms=world.now_ms + 5_000).queue_offset)
    world.store("b", key="k", due_at_ms=world.now_ms + 1_000)
    world.advance(1_000)
    assert world.drain() == ["b"]


def test_the_key_of_a_forgotten_timer_is_known_until_its_window_is_over() -> None:
    world = DedupWorld()
    world.turn_on()
    _forget_timer(world, world.store("a", key="k", due_at_ms=world.now_ms + HOUR_MS).queue_offset)
    world.repeat("b", key="k")
    topic, keys = world.engine.catalog.topics[world.topic()], world.engine.key_inspection
    keys.free(topic, keys.find(topic, b"k", ""), world.now_ms)
    world.commit()
    _forget_timer(world, world.store("c", key="k", due_at_ms=world.now_ms + HOUR_MS).queue_offset)
    world.now_ms += WINDOW_MS
    world.note_round()
    with pytest.raises(DedupKeyNotFound):
        keys.find(topic, b"k", "")
    world.store("d", key="k")


def test_a_timer_with_a_damaged_entry_is_not_replaced(debounce: DedupWorld) -> None:
    world = debounce
    timer_id = world.store("a", key="k", due_at_ms=world.now_ms + 5_000).queue_offset
    world.engine.timers.index.link_gathered()
    world.engine.timers.index.table._damaged.add(timer_id)
    end = world.engine.log.log_end
    with pytest.raises(Conflict, match="restart the broker"):
        world.store("b", key="k", due_at_ms=world.now_ms + 5_000)
    assert world.engine.log.log_end == end


def _kill(world: DedupWorld) -> None:
    world.restart()


def _cut_power(world: DedupWorld) -> None:
    world.restart(power_cut=True)


def _lose_files(world: DedupWorld) -> None:
    forget_derived_files(world)
    world.open()


def _fail_over(world: DedupWorld) -> None:
    world.fail_over()


def _start_from_snapshot(world: DedupWorld) -> None:
    world.checkpoint()
    world.restart()


def _move_floor(world: DedupWorld) -> None:
    while len(world.engine.log.segments) < 3:
        world.send("filler", topic="filler", size=2_000)
    world.checkpoint()
    world.purge("filler")
    world.engine.timers.evacuation._is_due = lambda _now_ms: True
    world.advance(2_000)
    world.engine.timers.evacuation._is_due = lambda _now_ms: False
    move_floor(world, floors(world)[-1])
    assert world.engine.log.state_floor > world.engine.log.min_offset
    pack_all(world)
    forget_derived_files(world)
    world.open()


DISTURBANCES = [_kill, _cut_power, _lose_files, _fail_over, _start_from_snapshot, _move_floor]


@pytest.mark.parametrize("disturb", DISTURBANCES)
def test_rows_survive(disturb: Callable[[DedupWorld], None]) -> None:
    """Plain, pending, replaced and open keys, through each kind of start."""
    world = DedupWorld(is_followed=True, segment_bytes=64 << 10)
    world.turn_on()
    world.turn_on(topic="debounce", mode=DedupMode.REPLACE, max_wait_ms=HOUR_MS)
    world.store("plain", key="plain")
    world.store("later", key="later", due_at_ms=world.now_ms + HOUR_MS // 2)
    half = world.store("half", key="half", is_half=True)
    world.store("freed", key="freed", is_half=True)
    world.roll_back(HalfId(world.repeat("freed", key="freed", is_half=True).half_id))
    due_at_ms = world.now_ms + HOUR_MS // 2
    timer = world.store("a", key="k", topic="debounce", due_at_ms=due_at_ms)
    world.store("b", key="k", topic="debounce", due_at_ms=due_at_ms)
    before = world.rows(), world.rows(topic="debounce")
    disturb(world)
    world.note_round()
    assert (world.rows(), world.rows(topic="debounce")) == before
    assert world.repeat("x", key="plain").message_id in {"id-plain", "id-x"}
    assert world.repeat("x", key="later").message_id == "id-later"
    assert world.repeat("x", key="half", is_half=True).half_id == half.half_id
    again = world.store("c", key="k", topic="debounce", due_at_ms=due_at_ms)
    assert again.queue_offset == timer.queue_offset
    world.store("y", key="freed")
    world.advance(HOUR_MS // 2)
    assert world.drain(topic="debounce") == ["c"]


def test_failover_before_commit_stores_the_repeat_once() -> None:
    world = DedupWorld(is_followed=True)
    world.turn_on()
    world.store("a", key="k", is_ended=False)  # The master is lost with this round.
    assert world.follower is not None
    world.disk, follower, world.follower = world.follower.disk, world.follower, None
    world.engine = follower.take_over(world.now_ms)
    world.store("b", key="k")
    world.repeat("c", key="k")
    assert world.drain() == ["b"]


def test_purge_keeps_the_key(world: DedupWorld) -> None:
    first = world.store("a", key="k")
    world.purge(world.engine.catalog.topics[world.topic()].name)
    assert world.repeat("b", key="k") == first
    assert world.drain() == []


def test_a_key_of_a_freed_message_answers_with_the_repeat() -> None:
    world = DedupWorld(segment_bytes=64 << 10)
    world.turn_on(window_ms=HOUR_MS)
    world.store("a", key="k")
    world.purge("orders")
    _move_floor(world)
    assert world.repeat("b", key="k")[:2] == ("id-b", 0)


def store_new_keys(world: DedupWorld, count: int, *, topic: str = TOPIC) -> None:
    for n in range(count):
        world.store("a", key=f"new {n}", topic=topic, is_ended=False)


def test_memory_bounds_new_keys_only() -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=64 << 10))
    world.turn_on()
    count = 64 * 1024 // 54 - 100  # less than a step of the index
    for n in range(count):
        world.store("a", key=f"k{n}", is_ended=False)
    with pytest.raises(Overloaded):
        store_new_keys(world, 200)
    assert world.engine.key_tables.memory_bytes <= 64 << 10
    world.repeat("a", key="k0")
    world.repeat("a", key=f"k{count - 1}")
    # The window ends, and its keys make room.
    world.advance(WINDOW_MS)
    world.advance(2_000)
    assert world.engine.key_tables.key_count == 0
    world.store("b", key="new")


def test_an_idle_engine_has_no_work_for_keys(world: DedupWorld) -> None:
    world.store("a", key="k")
    assert world.engine.deduplication.next_due_ms(world.now_ms) is not None
    world.advance(WINDOW_MS)
    world.advance(1_000)
    assert world.engine.deduplication.next_due_ms(world.now_ms) is None


def test_a_key_that_is_over_is_taken_again_before_the_sweep_removes_it(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.now_ms += WINDOW_MS  # without a sweep
    world.store("b", key="k")
    assert world.repeat("c", key="k").message_id == "id-b"


def test_a_key_stays_known_at_a_start_after_a_step_of_the_wall_clock(world: DedupWorld) -> None:
    """The checkpoint has the step of the clock, which the record of the key noted."""
    world.store("a", key="before")
    world.checkpoint()
    world.restart()
    world.note_round()
    world.wall_step_ms = HOUR_MS
    world.store("b", key="k")
    world.checkpoint()
    world.restart()
    world.repeat("c", key="k")


def test_a_recovered_half_message_takes_its_message_id_as_the_key(world: DedupWorld) -> None:
    world.set_policy(PolicyChange(first_check_ms=1_000, period_ms=1_000, attempts=1))
    half = world.store("a", message_id="m-1", is_half=True)
    world.advance(1_000)
    world.write_checks()
    world.advance(1_000)
    world.run_due()
    world.recover(HalfId(half.half_id))
    world.repeat("b", message_id="m-1")


def test_topics_without_a_share_use_the_rest_of_the_memory_together() -> None:
    world = DedupWorld()
    world.turn_on()
    world.turn_on(topic="other")
    empty, bound = world.engine.deduplication.memory.shared()
    world.store("a", key="k")
    one, _ = world.engine.deduplication.memory.shared()
    world.store("a", key="k", topic="other")
    both, _ = world.engine.deduplication.memory.shared()
    assert empty < one < both
    world.turn_on(topic="other", memory_bytes=1 << 20)
    used, rest = world.engine.deduplication.memory.shared()
    assert 0 < used < both, "only the keys of the topic without a share"
    assert rest == bound - (1 << 20)


def test_shares_shrink_alike_after_a_start_with_less_memory() -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=4 << 20))
    world.turn_on()
    for topic in ("a", "b"):
        world.turn_on(topic=topic, memory_bytes=2 << 20)
    world.config = replace(world.config, dedup=DedupConfig(memory_bytes=1 << 20))
    world.restart()
    memory, ids = world.engine.deduplication.memory, world.engine.catalog.topic_ids
    assert [memory.bound_of(ids[name]) for name in ("a", "b")] == [1 << 19, 1 << 19]
    assert memory.bound_of(world.topic()) == 0
    assert world.engine.key_inspection.usage_of(world.topic()).memory_bytes_max == 0
    world.store("a", key="k", topic="a")
    with pytest.raises(Overloaded, match="topics with a share have 4194304"):
        world.store("b", key="k")


def test_a_share_of_all_memory_takes_none_that_other_topics_use() -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=1 << 20))
    world.turn_on()
    store_new_keys(world, 1_000)
    catalog, deduplication = world.engine.catalog, world.engine.deduplication
    world.turn_on(topic="small", memory_bytes=1 << 20)
    topic = catalog.topics[catalog.topic_ids["small"]]
    used, bound = deduplication.memory.shared()
    assert bound == 0 < used
    assert f"they use {used}; messages with new keys" in deduplication.share_warning(topic)
    deduplication.memory.memory_bytes = world.engine.key_tables.memory_bytes + 100 * KEY_BYTES
    with pytest.raises(Overloaded, match="other topics use a part of them"):
        store_new_keys(world, 1_000, topic="small")
    assert len(world.rows(topic="small")) >= 100
    assert world.engine.key_tables.memory_bytes <= deduplication.memory.memory_bytes


@pytest.mark.parametrize("other_share_bytes", [None, 1 << 20])
def test_a_lower_share_gives_others_no_memory_that_its_keys_still_use(
    other_share_bytes: int | None,
) -> None:
    world = DedupWorld(dedup=DedupConfig(memory_bytes=2 << 20))
    world.turn_on(topic="lowered", memory_bytes=2 << 20)
    with pytest.raises(Overloaded):
        store_new_keys(world, 100_000, topic="lowered")
    world.turn_on(topic="lowered", memory_bytes=1 << 20)
    share = {} if other_share_bytes is None else {"memory_bytes": other_share_bytes}
    world.turn_on(topic="other", **share)
    with pytest.raises(Overloaded):
        store_new_keys(world, 100_000, topic="other")
    # The table of the other topic takes some bytes without keys, too.
    assert world.engine.key_tables.memory_bytes <= (2 << 20) + COUNTED_BYTES


def test_a_share_beside_enough_memory_has_no_warning(world: DedupWorld) -> None:
    world.store("a", key="k")
    world.turn_on(topic="other", memory_bytes=1 << 20)
    catalog, deduplication = world.engine.catalog, world.engine.deduplication
    for topic in catalog.topics.values():
        assert deduplication.share_warning(topic) == ""
