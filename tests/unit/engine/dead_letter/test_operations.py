"""Operations: replays and discards by filter, in slices, through kills and failovers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from itertools import pairwise, product

import pytest

from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.letter_world import LetterWorld
from tests.support.worlds.packed_worlds import floors, forget_derived_files, move_floor, pack_all
from tidemill.broker.engine.layout import operation
from tidemill.broker.engine.layout.numbers import LogOffset
from tidemill.broker.engine.layout.operation import (
    ItemFailure,
    ItemsFailed,
    Operation,
    OperationBegun,
    OperationEnded,
    OperationKind,
    OperationState,
    StatedOperations,
)
from tidemill.broker.engine.layout.record import UnknownRecord
from tidemill.broker.engine.metadata import operations as operations_module
from tidemill.broker.engine.metadata import settled_letters
from tidemill.broker.engine.metadata.operations import ENDED_KEPT_MS, RUNNING_MAX, Operations
from tidemill.broker.engine.operation.runner import ITEMS_A_SLICE, PERIOD_MS
from tidemill.common.errors import OperationNotFound, Overloaded

REPLAY, DISCARD = OperationKind.REPLAY, OperationKind.DISCARD
RUNNING, DONE, CANCELLED, FAILED = OperationState
SECOND_MS = 1_000


def world_with(count: int, *, is_followed: bool = True, max_attempts: int = 2) -> LetterWorld:
    world = LetterWorld(is_followed=is_followed)
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(count)), max_attempts=max_attempts)
    return world


def run(world: LetterWorld, one: Operation) -> Operation:
    """Run an operation to its end."""
    for _ in range(1_000):
        found = world.engine.operations.find(one.id)
        if not found.is_running:
            return found
        world.now_ms += 10
        world.run_due()
    raise AssertionError("the operation does not end")


def done_in_slices(world: LetterWorld, one: Operation, count: int) -> list[int]:
    """Run some slices of each operation; return what one of them has done after each."""
    done = []
    for _ in range(count):
        for _ in world.engine.operations.due_slices(
            world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.now_ms
        ):
            pass
        done.append(one.done)
        world.commit()
        world.now_ms += 50
    return done


@pytest.mark.parametrize(("kind", "state"), [(REPLAY, "REPLAYED"), (DISCARD, "DISCARDED")])
def test_an_operation_settles_all_that_match_in_their_order(
    kind: OperationKind, state: str
) -> None:
    world = world_with(100)
    ended = run(world, world.begin_operation(kind))
    assert (ended.state, ended.done, ended.total) == (DONE, 100, 100)
    assert world.states() == [state] * 100
    bodies = world.drain()
    assert bodies == ([f"m{n}" for n in range(100)] if kind is REPLAY else [])


def test_a_filter_chooses() -> None:
    world = world_with(3)
    world.topic("other")
    world.send("red", topic="other", tag="red")
    world.fail(*world.pop(1, topic="other"))
    world.advance(SECOND_MS)
    world.dead("late")
    for wanted, count in (
        ({"topic": "other"}, 1),
        ({"tag": "red"}, 1),
        ({"reason": "damaged"}, 0),
        ({"from_ms": world.now_ms}, 1),
        ({"to_ms": world.now_ms}, 4),
        ({}, 5),
    ):
        assert world.begin_operation(DISCARD, **wanted).total == count
        world.engine.operations.cancel(list(world.engine.catalog.operations.by_id)[-1], 0)
    run(world, world.begin_operation(DISCARD, topic="other"))
    assert world.states() == ["OPEN"] * 3 + ["DISCARDED", "OPEN"]


def test_dead_letters_after_the_begin_stay_open() -> None:
    world = world_with(2)
    one = world.begin_operation(DISCARD)
    world.dead("later")
    assert run(world, one).done == 2
    assert world.states() == ["DISCARDED", "DISCARDED", "OPEN"]


def test_a_slice_is_bounded_and_other_operations_get_their_turns() -> None:
    world = world_with(60)
    first = world.begin_operation(DISCARD, rate_per_s=10_000)
    second = world.begin_operation(REPLAY, rate_per_s=10_000)
    assert done_in_slices(world, first, 2) == [1, 1 + ITEMS_A_SLICE]
    assert 0 < second.done <= 1 + ITEMS_A_SLICE
    run(world, first)
    run(world, second)
    assert first.done + second.done == 60
    assert "OPEN" not in world.states()


@pytest.mark.parametrize("kind", [REPLAY, DISCARD])
def test_a_slice_ends_after_a_mebibyte(kind: OperationKind) -> None:
    world = LetterWorld(segment_bytes=16 << 20, checkpoint_log_bytes=64 << 20)
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(10)), size=300_000)
    one = world.begin_operation(kind, rate_per_s=10_000)
    assert done_in_slices(world, one, 3) == [1, 5, 9]  # The first one begins the pace.
    assert run(world, one).done == 10


def test_the_rate_bounds_the_changes_of_a_second() -> None:
    world = world_with(60)
    one = world.begin_operation(DISCARD, rate_per_s=10)
    begun_ms = world.now_ms
    done = []
    for _ in range(30):
        world.now_ms += 100
        while world.engine.run_due(world.now_ms, firing_ms=world.now_ms):
            pass
        world.commit()
        done.append(one.done)
    assert 29 <= done[-1] <= 32
    assert all(after - before <= 2 for before, after in pairwise(done))
    due_ms = world.engine.next_due_ms(world.now_ms, firing_ms=world.now_ms)
    assert due_ms is not None
    assert world.now_ms <= due_ms <= world.now_ms + 100
    assert begun_ms < world.now_ms


def test_an_operation_leaves_pauses_to_other_work() -> None:
    world = world_with(200)
    one = world.begin_operation(DISCARD, rate_per_s=1_000)
    bursts = []
    for _ in range(200):
        before = one.done
        while world.engine.run_due(world.now_ms, firing_ms=world.now_ms):
            pass
        world.commit()
        if one.done > before:
            bursts.append((world.now_ms, one.done - before))
        world.now_ms += 1
    pauses = [after - before for (before, _), (after, _) in pairwise(bursts)]
    assert min(pauses) >= PERIOD_MS
    assert {count for _, count in bursts[1:]} <= {PERIOD_MS, PERIOD_MS + 1}


@pytest.mark.parametrize("how", ["kill", "power cut", "snapshot", "failover"])
@pytest.mark.parametrize("kind", [REPLAY, DISCARD])
def test_an_interrupted_operation_continues_and_repeats_no_item(
    how: str, kind: OperationKind
) -> None:
    world = world_with(50)
    one = world.begin_operation(kind, rate_per_s=10_000)
    world.now_ms += 50
    world.run_due()
    world.commit()
    before = world.engine.operations.find(one.id).done
    assert 0 < before < 50
    if how == "failover":
        world.fail_over()
    else:
        if how == "snapshot":
            world.checkpoint()
        world.restart(power_cut=how == "power cut")
        assert bool(world.report.snapshot) == (how == "snapshot")
    assert world.engine.operations.find(one.id).done == before
    ended = run(world, one)
    assert (ended.state, ended.done) == (DONE, 50)
    assert "OPEN" not in world.states()
    if kind is REPLAY:
        assert world.drain() == [f"m{n}" for n in range(50)]


def test_an_operation_survives_a_replay_from_the_state_floor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As with more than 1,024 ranges: a restatement has several records.
    monkeypatch.setattr(settled_letters, "RANGES_A_BLOCK", 2)
    world = LetterWorld(segment_bytes=64 << 10, checkpoint_log_bytes=32 << 10)
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(30)))
    for offset in range(0, 30, 3):
        world.discard(offset)
    ended = run(world, world.begin_operation(DISCARD, to_ms=1))
    one = world.begin_operation(DISCARD, rate_per_s=10_000)
    world.now_ms += 50
    world.run_due()
    done, states = one.done, world.states()
    for _ in range(4):
        world.send(*["gone"] * 8, topic="gone", size=8_000)
        world.purge("gone")
        world.checkpoint()
    move_floor(world, floors(world)[-1])
    pack_all(world)
    forget_derived_files(world)
    world.open()
    assert world.engine.log.state_floor > one.id
    found = world.engine.operations
    assert (found.find(ended.id).state, found.find(one.id).done) == (DONE, done)
    assert world.states() == states
    assert run(world, one).done == 20
    assert "OPEN" not in world.states()


def test_a_cancelled_operation_keeps_what_is_done() -> None:
    world = world_with(50)
    one = world.begin_operation(DISCARD, rate_per_s=10_000)
    world.now_ms += 50
    world.run_due()
    done = one.done
    world.engine.operations.cancel(one.id, world.now_ms)
    world.engine.operations.cancel(one.id, world.now_ms)
    world.commit()
    world.now_ms += SECOND_MS
    world.run_due()
    world.restart()
    ended = world.engine.operations.find(one.id)
    assert (ended.state, ended.done) == (CANCELLED, done)
    assert world.states().count("DISCARDED") == done
    assert world.engine.operations.next_due_ms(world.now_ms) is None


@pytest.mark.parametrize("how", ["kill", "failover"])
def test_a_dead_letter_that_cannot_be_replayed_is_a_failed_item(how: str) -> None:
    world = LetterWorld(is_followed=True)
    world.topic(TOPIC)
    world.group(max_attempts=1)
    for n in range(40):
        topic = "gone" if n in {0, 7, 8, 39} else TOPIC
        world.topic(topic)
        world.send(f"m{n}", topic=topic)
        world.fail(*world.pop(1, topic=topic))
    world.engine.administration.delete_topic("gone", world.now_ms)
    world.commit()
    one = world.begin_operation(REPLAY, rate_per_s=10_000)
    done_in_slices(world, one, 2)
    before = one.done, one.failed
    assert 0 < one.done < 36
    world.restart() if how == "kill" else world.fail_over()
    found = world.engine.operations.find(one.id)
    assert (found.done, found.failed) == before
    ended = run(world, one)
    assert (ended.state, ended.done, ended.failed) == (DONE, 36, 4)
    assert ended.failures == [(n, "TOPIC_DELETED") for n in (0, 7, 8, 39)]
    assert world.states().count("OPEN") == 4


def test_an_operation_of_a_deleted_group_fails() -> None:
    world = world_with(3)
    one = world.begin_operation(DISCARD)
    world.engine.administration.delete_group(GROUP, world.now_ms)
    world.commit()
    ended = run(world, one)
    assert (ended.state, ended.error) == (FAILED, "the consumer group was deleted")


def test_a_full_disk_pauses_a_replay() -> None:
    world = LetterWorld(disk_reserve_bytes=400_000)
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(6)), size=10_000)
    one = world.begin_operation(REPLAY)
    world.leave_room(100_000 + 25_000)
    for _ in range(20):
        world.now_ms += 500
        world.run_due()
        world.commit()
    assert one.is_running
    assert 0 < one.done < 6
    world.leave_room(10 << 20)
    assert run(world, one).done == 6


def test_a_full_disk_pauses_a_discard() -> None:
    world = LetterWorld(disk_reserve_bytes=400_000)
    world.topic(TOPIC)
    world.dead("a", "b")
    one = world.begin_operation(DISCARD)
    world.leave_room(0)
    world.now_ms += SECOND_MS
    world.run_due()
    assert (one.is_running, one.done) == (True, 0)
    world.leave_room(10 << 20)
    assert run(world, one).done == 2


def test_at_most_16_run_and_an_unknown_one_is_not_found() -> None:
    world = world_with(1, is_followed=False)
    for _ in range(RUNNING_MAX):
        world.begin_operation(DISCARD)
    with pytest.raises(Overloaded, match="16 operations run"):
        world.begin_operation(DISCARD)
    with pytest.raises(OperationNotFound):
        world.engine.operations.cancel(7, world.now_ms)


# ------------------------------------------------------------ the table


def begun(operations: Operations, id_: int) -> None:
    entry = OperationBegun(DISCARD, 1, 2, 0, 5, 9, 4, 10, json.dumps({"key": f"k{id_}"}))
    operations.begin(entry, LogOffset(id_), 100)


def ended(operations: Operations, state: OperationState) -> None:
    operations.end(OperationEnded(LogOffset(50), state, ""), 200)


EVENTS: dict[str, Callable[[Operations], None]] = {
    "begun": partial(begun, id_=50),
    "item": lambda operations: operations.note_items(50, cursor=7, count=1),
    "failure": lambda operations: operations.note_failures(
        ItemsFailed(LogOffset(50), 7, [ItemFailure(6, "DAMAGED")])
    ),
    **{state.name: partial(ended, state=state) for state in (DONE, CANCELLED, FAILED)},
}


@pytest.mark.parametrize(
    ("state", "event"), list(product([None, *OperationState], EVENTS)), ids=str
)
def test_each_event_in_each_state(state: OperationState | None, event: str) -> None:
    operations = Operations()
    if state is not None:
        begun(operations, 50)
        if state is not RUNNING:
            EVENTS[state.name](operations)
    if state is not None and event == "begun":
        return  # A log offset is that of one record.
    EVENTS[event](operations)
    found = operations.by_id.get(LogOffset(50))
    if state is None and event != "begun":
        assert found is None
        return
    assert found is not None
    if state in {None, RUNNING}:
        ends = event not in {"begun", "item", "failure"}
        assert found.state == (OperationState[event] if ends else RUNNING)
    else:
        assert found.state == state
    assert found.ended_at_ms == (200 if found.state != RUNNING else 0)
    assert found.done == (1 if event == "item" and state is RUNNING else 0)
    assert found.failed == (1 if event == "failure" and state is RUNNING else 0)


def test_an_item_moves_the_cursor_forward_only() -> None:
    operations = Operations()
    begun(operations, 50)
    for cursor in (6, 8, 7, 8):
        operations.note_items(50, cursor=cursor, count=1)
    assert (operations.by_id[LogOffset(50)].cursor, operations.by_id[LogOffset(50)].done) == (8, 2)


def test_old_operations_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "ENDED_MAX", 2)
    operations = Operations()
    for id_ in range(5):
        begun(operations, id_)
        if id_:
            operations.end(OperationEnded(LogOffset(id_), DONE, ""), 1_000)
    assert list(operations.by_id) == [0, 3, 4]
    assert [one.id for one in operations.known(1_000 + ENDED_KEPT_MS)] == [0]
    assert operations.find_by_key("k4", 2_000) is operations.by_id[LogOffset(4)]
    assert operations.find_by_key("k4", 1_000 + ENDED_KEPT_MS) is None
    assert operations.find_by_key("5", 2_000) is None  # The text is in the details.


def test_the_operation_that_ended_first_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operations_module, "ENDED_MAX", 2)
    operations = Operations()
    for id_ in range(4):
        begun(operations, id_)
    for id_, ended_at_ms in ((2, 1_000), (3, 1_001), (0, 1_002)):
        operations.end(OperationEnded(LogOffset(id_), DONE, ""), ended_at_ms)
        assert id_ in operations.by_id
    assert list(operations.by_id) == [0, 1, 3]
    assert [one.id for one in operations.running] == [1]


@pytest.mark.parametrize("event", ["begun", "ended"])
def test_an_operation_is_forgotten_7_days_after_its_end(event: str) -> None:
    operations = Operations()
    for id_ in range(3):
        begun(operations, id_)
    operations.end(OperationEnded(LogOffset(0), DONE, ""), 1_000)
    operations.end(OperationEnded(LogOffset(1), DONE, ""), 1_001)
    now_ms = 1_000 + ENDED_KEPT_MS
    if event == "ended":
        operations.end(OperationEnded(LogOffset(2), DONE, ""), now_ms)
        assert list(operations.by_id) == [1, 2]
    else:
        entry = OperationBegun(DISCARD, 1, 2, 0, 5, 9, 4, 10, "{}")
        operations.begin(entry, LogOffset(3), now_ms)
        assert list(operations.by_id) == [1, 2, 3]


def test_stated_operations_keep_their_order_and_only_running_ones_run() -> None:
    operations, stated = Operations(), Operations()
    for id_ in (3, 5, 7):
        begun(stated, id_)
    stated.end(OperationEnded(LogOffset(5), FAILED, ""), 1_000)
    begun(operations, 6)
    for section in stated.freeze():
        operations.apply_stated(operation.decode_operations(section), LogOffset(9))
    assert list(operations.by_id) == [3, 5, 6, 7]
    assert [one.id for one in operations.running] == [3, 6, 7]


def test_a_snapshot_has_the_operations_of_its_moment() -> None:
    operations = Operations()
    begun(operations, 1)
    frozen = operations.freeze()
    assert operations.section_count == 1
    operations.note_items(1, cursor=7, count=2)
    operations.end(OperationEnded(LogOffset(1), DONE, ""), 1_000)
    [section] = frozen
    [one] = operation.decode_operations(section).operations
    assert (one.cursor, one.done, one.state) == (5, 0, RUNNING)


def test_a_snapshot_has_all_operations() -> None:
    operations, copy = Operations(), Operations()
    for id_ in range(100):
        begun(operations, id_)
    sections = list(operations.freeze())
    assert len(sections) == operations.section_count == 2
    for section in sections:
        copy.apply_stated(operation.decode_operations(section), LogOffset(0))
    assert copy.by_id == operations.by_id
    # A stated operation that is known stays as it is.
    copy.note_items(5, cursor=6, count=1)
    copy.apply_stated(StatedOperations([operations.by_id[LogOffset(5)]]), LogOffset(1))
    assert copy.by_id[LogOffset(5)].cursor == 6


def test_unknown_operations_stop_a_start() -> None:
    body, tail = operation.encode(OperationBegun(DISCARD, 1, 2, 0, 5, 9, 4, 10, "{}"))
    for wrong in (
        bytes([3]) + body[1:],
        bytes([4]) + body[1:],
        body[:1] + bytes([77]) + body[2:],
        body[:-4],
        b"",
    ):
        with pytest.raises(UnknownRecord):
            operation.decode(wrong, tail)
    with pytest.raises(UnknownRecord):
        operation.decode_operations(b'[{"speed": 1}]')
