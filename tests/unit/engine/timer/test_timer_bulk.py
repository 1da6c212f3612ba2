"""Operations on timers: filters, outcomes, failures, and interruptions without a repeated item."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.worlds.engine_world import SMALL, TOPIC
from tests.support.worlds.timer_bulk_world import CANCEL, FIRE, RESCHEDULE, TimerBulkWorld
from tests.support.worlds.timer_world import DAY_MS, HOUR_MS, SECOND_MS
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.operation import (
    FAILURES_KEPT_MAX,
    ItemFailure,
    ItemsFailed,
    Operation,
    OperationKind,
    OperationState,
)
from tidemill.broker.engine.metadata.operations import Operations
from tidemill.broker.engine.tally import SLICE_BYTES, Tally
from tidemill.broker.engine.timer import bulk_matches
from tidemill.broker.engine.timer import keyed as keyed_module
from tidemill.broker.engine.timer.bulk_changes import TimerOutcome
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.status import TimerState

DONE, CANCELLED = OperationState.DONE, OperationState.CANCELLED
PENDING, GONE = TimerState.PENDING, TimerState.CANCELLED


def world_with(count: int, *, is_followed: bool = True) -> TimerBulkWorld:
    """Return a world with timers that are due in two hours."""
    world = TimerBulkWorld(is_followed=is_followed)
    for n in range(count):
        world.delay(f"m{n}", world.now_ms + 2 * HOUR_MS)
    return world


def states(world: TimerBulkWorld) -> list[TimerState]:
    return [world.state(n) for n in range(world.engine.timers.index.next_id)]


def run_a_part(world: TimerBulkWorld, one: Operation) -> int:
    """Run some slices of an operation, and return how many items are done."""
    while not one.done:
        world.now_ms += 10
        for _ in world.engine.operations.due_slices(
            world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.now_ms
        ):
            pass
    world.commit()
    assert 0 < one.done < one.total
    return one.done


def test_a_filter_chooses() -> None:
    world = TimerBulkWorld()
    base = world.now_ms + HOUR_MS
    world.delay("a", base, tag="red", keys=("k1",))
    world.delay("b", base + 1_000, keys=("k1", "k2"))
    world.delay("c", base + 2_000, tag="red")
    world.delay("d", base, topic="other", tag="red", keys=("k1",))
    change = TimerChange(CANCEL)
    for wanted, ids in (
        ({}, [0, 1, 2]),
        ({"topic": "other"}, [3]),
        ({"topic": ""}, [0, 1, 2, 3]),
        ({"tag": "red"}, [0, 2]),
        ({"key": "k1"}, [0, 1]),
        ({"topic": "", "key": "k1"}, [0, 1, 3]),
        ({"key": "k1", "tag": "red"}, [0]),
        ({"key": "none"}, []),
        ({"from_ms": base + 1_000}, [1, 2]),
        ({"to_ms": base + 1_000}, [0]),
        ({"key": "k2", "from_ms": base + 1_001}, []),
    ):
        count = world.count_timers(change, **wanted)
        assert (count.count, count.sample) == (len(ids), ids), wanted
    ended = world.run_operation(world.begin_timers(CANCEL, topic="", key="k1"))
    assert (ended.state, ended.done) == (DONE, 3)
    assert states(world) == [GONE, GONE, PENDING, GONE]


def test_a_count_has_topics_and_hours() -> None:
    world = TimerBulkWorld()
    hour_ms = world.now_ms - world.now_ms % HOUR_MS + 2 * HOUR_MS
    for at_ms in (hour_ms, hour_ms + 1, hour_ms + HOUR_MS):
        world.delay("m", at_ms)
    count = world.count_timers(TimerChange(CANCEL))
    assert dict(count.topics) == {world.topic(TOPIC): 3}
    assert dict(count.hours) == {hour_ms: 2, hour_ms + HOUR_MS: 1}
    assert count.size_bytes > 0
    assert count.fullest_second == (0, 0)


def test_the_fullest_second_has_the_timers_that_are_there() -> None:
    world = TimerBulkWorld()
    second_ms = (world.now_ms // SECOND_MS + 600) * SECOND_MS
    for n in range(3):
        world.delay("there", second_ms + n, topic="other")
    for n in range(4):
        world.delay("moved", second_ms + HOUR_MS // 2 + n * SECOND_MS)
    change = TimerChange(RESCHEDULE, due_at_ms=second_ms + 5)
    assert world.count_timers(change).fullest_second == (second_ms // SECOND_MS, 7)
    shifted = TimerChange(RESCHEDULE, shift_ms=-(HOUR_MS // 2))
    assert world.count_timers(shifted).fullest_second == (second_ms // SECOND_MS, 4)
    spread = TimerChange(RESCHEDULE, due_at_ms=second_ms, spread_ms=4 * SECOND_MS)
    assert world.count_timers(spread).fullest_second[1] < 7


def test_timers_after_the_count_stay() -> None:
    world = world_with(3)
    as_of_ms = world.now_ms
    world.now_ms += 1
    world.delay("later", world.now_ms + HOUR_MS)
    one = world.begin_timers(CANCEL, as_of_ms=as_of_ms)
    world.delay("latest", world.now_ms + HOUR_MS)
    assert world.run_operation(one).done == 3
    assert states(world) == [GONE] * 3 + [PENDING] * 2
    # Another broker of the group counts the same timers.
    world.fail_over()
    assert world.count_timers(TimerChange(CANCEL), as_of_ms=as_of_ms).end == 3


@pytest.mark.parametrize("how", ["kill", "power cut", "snapshot", "failover"])
@pytest.mark.parametrize("kind", [CANCEL, RESCHEDULE, FIRE])
def test_an_interrupted_operation_continues_and_repeats_no_item(
    how: str, kind: OperationKind
) -> None:
    world = world_with(100)
    due_ms = world.due(0)
    one = world.begin_timers(kind, shift_ms=HOUR_MS)
    before = run_a_part(world, one)
    if how == "failover":
        world.fail_over()
    else:
        if how == "snapshot":
            world.background()
            world.checkpoint()
        world.restart(power_cut=how == "power cut")
    assert world.engine.operations.find(one.id).done == before
    ended = world.run_operation(one)
    assert (ended.state, ended.done, ended.failed) == (DONE, 100, 0)
    world.run_due()
    match kind:
        case OperationKind.CANCEL_TIMERS:
            assert states(world) == [GONE] * 100
        case OperationKind.RESCHEDULE_TIMERS:
            assert {world.due(n) for n in range(100)} == {due_ms + HOUR_MS}
        case _:
            world.sleep(SECOND_MS)
            assert states(world) == [TimerState.DELIVERED] * 100
            assert sorted(world.texts()) == sorted(f"m{n}" for n in range(100))
    world.check()


def test_a_key_is_searched_again_after_a_failover() -> None:
    world = TimerBulkWorld(is_followed=True)
    for n in range(60):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=("even",) if n % 2 == 0 else ("odd",))
    due_ms = world.due(0)
    one = world.begin_timers(RESCHEDULE, key="even", shift_ms=HOUR_MS)
    assert one.total == 30
    run_a_part(world, one)
    world.fail_over()
    assert world.run_operation(one).done == 30
    assert [world.due(n) - due_ms for n in range(60)] == [HOUR_MS, 0] * 30


def test_a_cancelled_operation_keeps_what_is_done() -> None:
    world = world_with(100)
    one = world.begin_timers(CANCEL)
    done = run_a_part(world, one)
    world.engine.operations.cancel(one.id, world.now_ms)
    world.commit()
    world.now_ms += SECOND_MS
    world.run_due()
    world.restart()
    ended = world.engine.operations.find(one.id)
    assert (ended.state, ended.done) == (CANCELLED, done)
    assert states(world) == [GONE] * done + [PENDING] * (100 - done)


def test_two_operations_shift_each_timer_once_each() -> None:
    world = world_with(60)
    due_ms = world.due(0)
    both = [world.begin_timers(RESCHEDULE, shift_ms=shift) for shift in (SECOND_MS, HOUR_MS)]
    run_a_part(world, both[0])
    world.fail_over()
    for one in both:
        assert world.run_operation(one).done == 60
    assert {world.due(n) for n in range(60)} == {due_ms + SECOND_MS + HOUR_MS}


def test_a_timer_that_was_settled_meanwhile_is_skipped() -> None:
    world = world_with(40)
    one = world.begin_timers(FIRE)
    world.cancel(39)
    world.fire(38)
    world.run_due()
    ended = world.run_operation(one)
    assert (ended.total, ended.done, ended.failed) == (40, 38, 0)


def test_a_due_time_that_stays_counts_as_done() -> None:
    world = world_with(3)
    due_ms = world.due(0)
    ended = world.run_operation(world.begin_timers(RESCHEDULE, due_at_ms=due_ms))
    assert (ended.done, {world.due(n) for n in range(3)}) == (3, {due_ms})
    world.check()


def test_the_past_means_now() -> None:
    world = world_with(3)
    world.run_operation(world.begin_timers(RESCHEDULE, shift_ms=-DAY_MS))
    world.sleep(SECOND_MS)
    assert sorted(world.texts()) == ["m0", "m1", "m2"]


def test_a_spread_is_even_and_the_same_for_a_repeat() -> None:
    world = world_with(100)
    at_ms = world.now_ms + HOUR_MS
    world.run_operation(world.begin_timers(RESCHEDULE, due_at_ms=at_ms, spread_ms=10_000))
    due = [world.due(n) - at_ms for n in range(100)]
    assert all(0 <= one <= 10_000 for one in due)
    seconds = [sum(n * 1_000 <= one < (n + 1) * 1_000 for one in due) for n in range(10)]
    assert max(seconds) <= 12
    change = TimerChange(RESCHEDULE, due_at_ms=at_ms, spread_ms=10_000)
    assert [change.due_of(n, 0, firing_ms=0) - at_ms for n in range(100)] == due
    world.check()


@pytest.mark.parametrize("how", ["kill", "failover"])
def test_a_timer_that_cannot_be_changed_is_a_failed_item(how: str) -> None:
    world = world_with(40)
    horizon_ms = world.config.timer.max_delay_ms
    late = (0, 5, 6, 39)
    for n in late:
        world.reschedule(n, world.now_ms + horizon_ms - SECOND_MS)
    one = world.begin_timers(RESCHEDULE, shift_ms=DAY_MS)
    before = run_a_part(world, one)
    failed = one.failed
    assert failed
    if how == "kill":
        world.restart(power_cut=True)
    else:
        world.fail_over()
    found = world.engine.operations.find(one.id)
    assert (found.done, found.failed) == (before, failed)
    ended = world.run_operation(one)
    assert (ended.state, ended.done, ended.failed) == (DONE, 36, 4)
    assert ended.failures == [ItemFailure(n, TimerOutcome.TOO_LATE) for n in late]


def test_a_quarantined_timer_can_only_be_cancelled() -> None:
    world = world_with(2, is_followed=False)
    world.engine.timers.quarantined[0] = world.topic(TOPIC)
    assert world.count_timers(TimerChange(FIRE)).quarantined_count == 1
    ended = world.run_operation(world.begin_timers(FIRE))
    assert (ended.done, ended.failures) == (1, [(0, "QUARANTINED")])
    assert world.change_timer(TimerChange(RESCHEDULE, shift_ms=1), 0) == "QUARANTINED"
    assert world.run_operation(world.begin_timers(CANCEL)).done == 1
    assert world.state(0) == GONE


def test_the_outcomes_of_single_timers() -> None:
    world = world_with(3)
    world.cancel(0)
    world.fire(1)
    world.run_due()
    change = TimerChange(RESCHEDULE, shift_ms=1)
    late = TimerChange(RESCHEDULE, shift_ms=world.config.timer.max_delay_ms)
    end = world.engine.log.log_end
    for which, timer_id, outcome in (
        (change, 0, "ALREADY_CANCELLED"),
        (change, 1, "ALREADY_DELIVERED"),
        (change, 77, "NOT_FOUND"),
        (late, 2, "TOO_LATE"),
    ):
        assert world.change_timer(which, timer_id) == outcome
    assert world.engine.log.log_end == end
    due_ms = world.due(2)
    assert world.change_timer(change, 2) == "DONE"
    assert world.due(2) == due_ms + 1


def test_a_slice_looks_at_a_bounded_part_of_the_table() -> None:
    world = TimerBulkWorld()
    for n in range(3):
        world.delay(f"m{n}", world.now_ms + HOUR_MS)
    parts = world.engine.timers.changes.parts
    wanted = bulk_matches.TimerFilter(world.topic("other"))
    matches = bulk_matches.TimerMatches(parts, wanted, end=3)
    assert matches.find(0, 16, pages_max=1).position == 3
    before = parts.tally.items
    assert matches.find(0, 16, pages_max=1).ids.tolist() == []
    assert parts.tally.items - before <= 512


def test_a_walk_over_several_pages_finds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    world = TimerBulkWorld()
    for n in range(1_300):
        world.schedule(f"m{n}", due_at_ms=world.now_ms + HOUR_MS, commit=n % 100 == 99)
    world.commit()
    monkeypatch.setattr(bulk_matches, "COUNTED_PAGES_A_STEP", 1)
    assert world.count_timers(TimerChange(CANCEL)).count == 1_300
    parts = world.engine.timers.changes.parts
    matches = bulk_matches.TimerMatches(
        parts, bulk_matches.TimerFilter(world.topic(TOPIC)), end=1_250
    )
    position, found = 0, []
    while position < 1_250:
        part = matches.find(position, 7, pages_max=1)
        assert len(part.ids) <= 7
        found += part.ids.tolist()
        position = part.position
    assert found == list(range(1_250))


def test_a_key_of_many_messages_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_module, "KEY_MATCHES_MAX", 2)
    world = TimerBulkWorld()
    for n in range(3):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=("k",))
    count = world.count_timers(TimerChange(CANCEL), key="k")
    assert (count.count, count.is_cut) == (2, True)


def test_an_operation_changes_at_most_max_count_timers() -> None:
    world = world_with(40)
    due_ms = world.due(0) + HOUR_MS
    for n in range(20):
        world.reschedule(n, due_ms)
    one = world.begin_timers(CANCEL, from_ms=due_ms)
    assert one.total == 20
    world.reschedule(30, due_ms)
    world.reschedule(20, due_ms)
    world.cancel(3)
    ended = world.run_operation(one)
    assert (ended.state, ended.done) == (OperationState.FAILED, 20)
    assert states(world) == [GONE] * 21 + [PENDING] * 19


def test_later_messages_with_the_key_change_no_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed_module, "KEY_MATCHES_MAX", 4)
    world = TimerBulkWorld()
    for n in range(4):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=("k",))
    one = world.begin_timers(CANCEL, key="k")
    for n in range(3):
        world.delay(f"later{n}", world.now_ms + HOUR_MS, keys=("k",))
    world.restart()
    ended = world.run_operation(one)
    assert (ended.state, ended.done) == (DONE, 4)
    assert states(world) == [GONE] * 4 + [PENDING] * 3


def test_an_operation_fails_if_messages_after_the_count_cut_its_key(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = TimerBulkWorld()
    for n in range(3):
        world.delay(f"m{n}", world.now_ms + HOUR_MS, keys=("k",))
    one = world.begin_timers(CANCEL, key="k")
    monkeypatch.setattr(keyed_module, "KEY_MATCHES_MAX", 2)
    ended = world.run_operation(one)
    assert (ended.state, ended.done) == (OperationState.FAILED, 0)
    assert "without the key" in ended.error
    assert states(world) == [PENDING] * 3


def all_ids(matches: bulk_matches.TimerMatches, tally: Tally | None = None) -> list[int]:
    """Return the ids of timers that match. No slice may read much more than its bound."""
    found: list[int] = []
    position = 0
    while position < matches.end:
        before = 0 if tally is None else tally.size_bytes
        part = matches.find(position, 16, pages_max=1)
        assert tally is None or tally.size_bytes - before < SLICE_BYTES + 400_000
        found += part.ids.tolist()
        position = part.position
    return found


def test_copies_of_timers_behind_the_begin_are_found() -> None:
    config = replace(
        SMALL, segment_bytes=256 << 10, retention_ms=DAY_MS, checkpoint_log_bytes=32 << 10
    )
    world = TimerBulkWorld(config=config)
    for n in range(6):
        world.delay(f"m{n}", world.now_ms + 60 * DAY_MS, keys=("k",))
    begin = world.engine.log.log_end
    for _ in range(40):
        world.now_ms += DAY_MS // 4
        for n in range(30):
            world.send(f"x{n}", size=3_000)
        world.run_due()
        world.background()
        world.checkpoint()
    assert world.engine.log.min_offset > begin
    matches = bulk_matches.TimerMatches(
        world.engine.timers.changes.parts, bulk_matches.TimerFilter(key="k"), end=6, before=begin
    )
    assert all_ids(matches) == list(range(6))


def test_a_slice_over_a_key_reads_a_bounded_size() -> None:
    world = TimerBulkWorld()
    for n in range(8):
        world.schedule(f"m{n}", due_at_ms=world.now_ms + HOUR_MS, size=300_000, keys=("k",))
    parts = world.engine.timers.changes.parts
    matches = bulk_matches.TimerMatches(parts, bulk_matches.TimerFilter(key="k"), end=8)
    assert all_ids(matches, parts.tally) == list(range(8))


# ------------------------------------------------------------ the table


def test_failures_move_the_cursor_and_the_first_100_are_kept() -> None:
    world = world_with(1)
    one = world.begin_timers(CANCEL)
    operations = Operations()
    operations.by_id[one.id] = one
    for first in range(0, 160, 16):
        failures = [ItemFailure(n, "DAMAGED") for n in range(first, first + 16)]
        entry = ItemsFailed(LogOffset(one.id), first + 16, failures)
        operations.note_failures(entry)
        operations.note_failures(entry)  # As a replay may do.
    assert (one.cursor, one.failed, len(one.failures)) == (160, 160, FAILURES_KEPT_MAX)
    operations.note_items(one.id, cursor=150, count=1)
    assert one.done == 0
