"""A dead-letter topic that is deleted, and maybe created again, while something reads it."""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import product
from typing import Protocol, final

import pytest

from tests.support.settled_ranges import ranges_of
from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.letter_world import DEAD, LetterWorld
from tidemill.broker.engine.dead_letter.bulk import LetterCount, LetterFilter, LetterMatches
from tidemill.broker.engine.dead_letter.inspection import LetterQuery, LetterSearch, LetterSummary
from tidemill.broker.engine.layout.operation import Operation, OperationKind, OperationState
from tidemill.broker.engine.metadata import settled_letters
from tidemill.broker.engine.operation.runner import (
    RETRY_MS,
    OperationRunner,
    OperationTurn,
    WorkResult,
)
from tidemill.common.errors import Conflict, DiskFull, Repairing

REPLAY, DISCARD = OperationKind.REPLAY, OperationKind.DISCARD
COUNT = 200  # several slices


class Steps(Protocol):
    """Work in slices."""

    def step(self) -> bool:
        """Do one slice."""
        ...


def world_with(count: int) -> LetterWorld:
    world = LetterWorld()
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(count)))
    return world


def delete(world: LetterWorld, *, new_count: int | None = None) -> None:
    """Delete the dead-letter topic; maybe create it again with some dead letters."""
    world.engine.administration.delete_topic(DEAD, world.now_ms)
    world.commit()
    world.now_ms += 1
    if new_count == 0:
        world.engine.administration.ensure(DEAD, GROUP, world.now_ms)
        world.commit()
    elif new_count is not None:
        world.dead(*(f"n{n}" for n in range(new_count)))


def search(world: LetterWorld) -> LetterSearch:
    return LetterSearch(world.engine.letter_inspection, LetterQuery(COUNT))


def tagged_search(world: LetterWorld) -> LetterSearch:
    return LetterSearch(world.engine.letter_inspection, LetterQuery(COUNT, tag="none"))


def summary(world: LetterWorld) -> LetterSummary:
    return LetterSummary(world.engine.letter_inspection)


def count_of(world: LetterWorld) -> LetterCount:
    group, inspection = world.found_group(), world.engine.letter_inspection
    return LetterCount(inspection, group, LetterFilter(), as_of_ms=world.now_ms)


@pytest.mark.parametrize("new_count", [None, 0, 5])
@pytest.mark.parametrize("slices", range(4))
@pytest.mark.parametrize("begin", [search, tagged_search, summary])
def test_a_list_and_a_summary_end_without_the_deleted_topic(
    begin: Callable[[LetterWorld], Steps], slices: int, new_count: int | None
) -> None:
    world = world_with(COUNT)
    reader = begin(world)
    for _ in range(slices):
        assert reader.step()
    delete(world, new_count=new_count)
    queues = set(world.engine.catalog.queues)
    more_slices = 0
    while reader.step():
        more_slices += 1
    if slices:  # The reader knows the deleted topic, and looks at none of its other entries.
        assert more_slices == 0
    if isinstance(reader, LetterSearch):
        assert len(reader.found) < COUNT
        assert not reader.has_more
    assert set(world.engine.catalog.queues) == queues


@pytest.mark.parametrize("new_count", [None, 0, COUNT])
def test_a_count_is_rejected_if_its_topic_is_deleted(new_count: int | None) -> None:
    world = world_with(COUNT)
    count = count_of(world)
    assert count.step()
    delete(world, new_count=new_count)
    with pytest.raises(Conflict, match="was deleted while its dead letters were counted"):
        count.step()


@pytest.mark.parametrize("is_restarted", [False, True])
@pytest.mark.parametrize(
    ("kind", "new_count", "tag"),
    list(product([REPLAY, DISCARD], [None, 0, 10, 49, 60], ["", "red"])),
)
def test_an_operation_fails_if_its_topic_is_deleted(
    kind: OperationKind, new_count: int | None, tag: str, *, is_restarted: bool
) -> None:
    world = world_with(50)
    if tag:
        world.topic("other")
        world.send(*(f"x{n}" for n in range(40)), topic="other", tag=tag)
        while popped := world.pop(32, topic="other"):
            world.fail(*popped)
    one = world.begin_operation(kind, rate_per_s=1, tag=tag)
    world.now_ms += 2_000
    world.run_due()
    world.commit()
    done = one.done
    delete(world, new_count=new_count)
    if is_restarted:
        world.restart()
    for _ in range(3):
        world.now_ms += 1_000
        world.run_due()
        world.commit()
    ended = world.engine.operations.find(one.id)
    assert (ended.state, ended.done) == (OperationState.FAILED, done)
    assert ended.error.startswith("the dead-letter topic was deleted")
    # A replayed message may be dead again.
    assert set(world.states()) <= {"OPEN"}
    assert len(world.states()) >= (new_count or 0)
    (notice,) = world.engine.operations.take_notices()
    assert (notice.operation_id, notice.reason, notice.defect) == (one.id, ended.error, None)
    assert world.engine.operations.take_notices() == []


def test_no_dead_letter_is_behind_the_end_of_the_queue() -> None:
    world = world_with(2)
    topic = world.engine.catalog.find_topic(DEAD)
    assert topic is not None
    for wanted in (LetterFilter(), LetterFilter(tag="red")):
        catalog, letters = world.engine.catalog, world.engine.dead_letters
        matches = LetterMatches(letters, catalog, topic, wanted, as_of_ms=world.now_ms)
        assert [matches.find(offset) for offset in (2, 3, 1 << 40)] == [None] * 3
        assert (matches.find(1) is None) == bool(wanted.tag)
    for offset in (2, 3, 1 << 40):
        with pytest.raises(LookupError, match="has no message at offset"):
            world.engine.dead_letters.read(topic, offset)


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_deleted_topic_is_not_stated_again(
    monkeypatch: pytest.MonkeyPatch, *, is_deleted: bool
) -> None:
    monkeypatch.setattr(settled_letters, "RANGES_A_BLOCK", 2)
    world = world_with(8)
    for offset in range(0, 8, 2):
        world.discard(offset)
    end = world.engine.log.log_end
    steps = world.engine.retention._restatement._restate_letters(end, world.now_ms)
    next(steps)  # The first of two blocks.
    if is_deleted:
        delete(world)
    before = world.engine.log.log_end
    for _ in steps:
        pass
    assert (world.engine.log.log_end == before) == is_deleted
    assert (world.engine.catalog.settled_letters.topic_ids == []) == is_deleted


def test_a_restatement_leaves_out_the_letters_that_a_purge_has_removed() -> None:
    world = world_with(8)
    for offset in range(0, 8, 2):
        world.discard(offset)
    world.purge(DEAD, low=5)
    end = world.engine.log.log_end
    for _ in world.engine.retention._restatement._restate_letters(end, world.now_ms):
        pass
    topic = world.engine.catalog.find_topic(DEAD)
    assert topic is not None
    letters = world.engine.catalog.settled_letters
    assert [one.begin for one in ranges_of(letters, topic.id)] == [6]


# ------------------------------------------------------------ defects


@final
class DefectiveWork:
    """Work with a defect: it raises, maybe after a change."""

    def __init__(self, world: LetterWorld, error: Exception, *, changes: bool) -> None:
        self._world, self._error, self._changes = world, error, changes

    def run(self, operation: Operation, position: int, turn: OperationTurn) -> WorkResult:
        """Raise the error."""
        if self._changes:
            letters, group = self._world.engine.dead_letters, self._world.found_group()
            letters.discard(group, [position], turn.now_ms, operation_id=operation.id)
        raise self._error


def runner_of(world: LetterWorld, error: Exception, *, changes: bool = False) -> OperationRunner:
    engine, work = world.engine, DefectiveWork(world, error, changes=changes)
    return OperationRunner(
        engine.catalog, engine.fold, engine.room, {DISCARD: work}, lambda: engine.state_mark
    )


def run_slice(runner: OperationRunner, world: LetterWorld) -> None:
    for _ in runner.due_slices(world.now_ms, firing_ms=world.now_ms, monotonic_ms=world.now_ms):
        pass


def test_an_unexpected_error_fails_the_operation_alone() -> None:
    world = world_with(3)
    one = world.begin_operation(DISCARD)
    runner = runner_of(world, struct.error("no entry"))
    run_slice(runner, world)
    world.commit()
    world.restart()
    ended = world.engine.operations.find(one.id)
    assert ended.state == OperationState.FAILED
    assert ended.error == "unexpected error: no entry; the broker's log has the details"
    (notice,) = runner.take_notices()
    assert (notice.operation_id, str(notice.defect)) == (one.id, "no entry")


@pytest.mark.parametrize("error", [Repairing(), DiskFull("full")])
def test_an_operation_tries_again_while_a_message_is_mended_or_the_disk_is_full(
    error: Exception,
) -> None:
    world = world_with(3)
    one = world.begin_operation(DISCARD)
    runner = runner_of(world, error)
    for _ in range(3):
        run_slice(runner, world)
        assert one.is_running
        assert runner.next_due_ms(world.now_ms) == world.now_ms + RETRY_MS
        world.now_ms += RETRY_MS
    assert runner.take_notices() == []


@pytest.mark.parametrize(
    ("error", "changes"),
    [(struct.error("late"), True), (OSError("disk"), False), (AssertionError("broken"), False)],
)
def test_an_error_after_a_change_or_of_the_disk_ends_the_broker(
    error: Exception, *, changes: bool
) -> None:
    world = world_with(3)
    one = world.begin_operation(DISCARD)
    with pytest.raises(type(error), match=str(error)):
        run_slice(runner_of(world, error, changes=changes), world)
    assert one.is_running
