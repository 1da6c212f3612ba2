"""A power cut at every disk operation of timers: no timer is lost, early, doubled or revived.

The scenario schedules, cancels, moves and delivers, near, far and beyond the ring. It flushes,
writes checkpoints, parks, compacts and drops timer log files, evacuates and retires segments. It
runs once per disk operation with a cut there (CI: per fourth operation), and most starts are cut
once more. The disk keeps, tears or loses each unsynced write independently, so files are behind and
ahead of each other in every way that their syncs permit. Afterwards the log and the replies to the
clients decide.

A second run has overlapping rounds: several are written, syncs begin and end between them, and
clients get replies for the committed ones.

Crash points of timers, and the operations that meet them:

    C1, C11, C13  write log/...: a schedule, a delivery or a cancel that is not durable
    C2, C10, C12  sync log/...: durable, and the process has done nothing with it
    C3            write timer/timerlog/..., any later write of the log
    C4, C5        write and sync timer/timerlog/..., with torn and lost parts
    C6, C7        write timer/wheel, page by page
    C8            sync timer/wheel, write and sync timer/state/...
    C9            write and sync timer/checkpoint.a and .b
    C14, C15      the operations of a retirement: sync log/..., rename log/...
    C16           rename and delete timer/timerlog/...
    C17           sync timer/timerlog/... after a parked record was linked again
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import TypeAlias

import pytest

from tests.support.disk.faulty_disk import FaultyDisk, PowerCut
from tests.support.disk.timer_log_fold import CANCELLED, DELIVERED
from tests.support.seeds import part_of, seed_base
from tests.support.worlds.engine_world import SMALL
from tests.support.worlds.overlapping import OverlappingTimerWorld
from tests.support.worlds.timer_world import (
    HOUR_MS,
    SECOND_MS,
    START_MS,
    TIMERS,
    TimerWorld,
    check_engine,
    without_timer_files,
)
from tidemill.broker.engine.timer.status import TimerState
from tidemill.common.errors import MessageNotFound

PARTS = 4  # a run with few examples cuts at every fourth operation
CHUNKS = 8  # the runs are divided among this many tests
CONFIG = replace(
    SMALL,
    segment_bytes=16 << 10,
    checkpoint_log_bytes=8 << 10,
    retention_ms=HOUR_MS,
    timer=replace(
        TIMERS,
        timer_log_file_bytes=64 * 32,
        load_chunk_records=16,
        flush_log_bytes=4 << 10,
        evacuation_lead_ms=HOUR_MS // 2,
    ),
)
DELAYS_MS = [
    *(700, 2_500, 4_000, 20_000, 600_000, 1_900_000),
    *(4_035_000, 4_037_000, 7_000_000, 3 * HOUR_MS, 5 * HOUR_MS, 9 * HOUR_MS),
]
SCHEDULE = 1  # seed of the syncs among overlapping rounds
OVERLAPS_MIN = 60  # at least this many rounds are written during another one's sync
OpenWorld: TypeAlias = Callable[[FaultyDisk], TimerWorld]
POINTS = {
    "C1 C11 C13": "write log/",
    "C2 C10 C12": "sync log/",
    "C5": "write timer/timerlog/",
    "C3 C4 C17": "sync timer/timerlog/",
    "C6 C7": "write timer/wheel",
    "C8": "sync timer/wheel",
    "C8 of the table": "write timer/state/",
    "C9 of a": "write timer/checkpoint.a",
    "C9 of b": "write timer/checkpoint.b",
    "C14 C15": "rename log/",
    "C16": "rename timer/timerlog/",
}


@dataclass
class TimerReplies:
    """The replies that the clients got, and their last requests without a reply."""

    scheduled: dict[int, str] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    due: dict[int, int] = field(default_factory=dict)
    unknown: set[int] = field(default_factory=set)


def run_scenario(world: TimerWorld, replies: TimerReplies) -> None:
    for turn in range(6):
        for n, delay_ms in enumerate(DELAYS_MS):
            text = f"m{turn}-{n}"
            done = world.schedule(text, delay_ms=delay_ms + turn, size=150, commit=n % 3 == 2)
            if n % 3 == 2:
                texts = {done.queue_offset - b: f"m{turn}-{n - b}" for b in range(3)}
                world.react(replies.scheduled.update, texts)
        world.sleep(3 * SECOND_MS)
        world.settle()
        ids = sorted(world.timers.open)
        cancel(world, replies, ids[len(ids) // 2])
        move(world, replies, ids[-1], world.now_ms + 5_000)
        move(world, replies, ids[len(ids) // 3], world.now_ms + 2 * HOUR_MS)
        world.sleep(8 * SECOND_MS)
        world.background()
        world.advance(25 * 60 * SECOND_MS)
        world.background()


def cancel(world: TimerWorld, replies: TimerReplies, timer_id: int) -> None:
    replies.unknown.add(timer_id)
    world.cancel(timer_id)
    world.react(replies.unknown.discard, timer_id)
    world.react(replies.cancelled.add, timer_id)


def move(world: TimerWorld, replies: TimerReplies, timer_id: int, due_at_ms: int) -> None:
    replies.unknown.add(timer_id)
    replies.due.pop(timer_id, None)
    world.reschedule(timer_id, due_at_ms)
    world.react(replies.unknown.discard, timer_id)
    world.react(replies.due.update, {timer_id: due_at_ms})


def check(world: TimerWorld, replies: TimerReplies, *, with_twin: bool) -> None:
    """Compare the recovered engine with its log and the clients, then let all timers fire."""
    world.check()
    if with_twin:
        disk = without_timer_files(world.disk.after_kill())
        twin = TimerWorld(disk, config=CONFIG, timer=CONFIG.timer, now_ms=world.now_ms)
        check_engine(twin.engine, world.timers)
    for timer_id in replies.unknown:
        # T-11: a repeated request gets a true reply.
        if timer_id % 2:
            try:
                world.cancel(timer_id)
            except MessageNotFound:
                assert world.timers.timers[timer_id].state == DELIVERED
            else:
                assert world.state(timer_id) == TimerState.CANCELLED
    world.sleep(3 * SECOND_MS)
    world.advance(10 * HOUR_MS)
    world.sleep(3 * SECOND_MS)
    world.background()
    world.check()
    fold = world.timers
    assert not fold.open, f"T-3: never delivered: {sorted(fold.open)[:9]}"
    for timer_id, text in replies.scheduled.items():
        assert timer_id in fold.timers, f"T-5: {text} was acknowledged and is lost"
        state = fold.timers[timer_id].state
        if timer_id in replies.cancelled:
            assert state == CANCELLED, f"T-11: {text} was cancelled, and is {state}"
        elif timer_id not in replies.unknown:
            assert state == DELIVERED, f"T-3: {text} is {state}"
    for timer_id, due_at_ms in replies.due.items():
        if timer_id not in replies.cancelled | replies.unknown:
            assert fold.timers[timer_id].due_at_ms == due_at_ms, f"T-13: {timer_id}"
    texts = Counter(world.texts())
    assert max(texts.values(), default=1) == 1, f"T-6: {texts.most_common(3)}"
    assert {one.text for one in world.delivered} == {fold_text(n) for n in fold.ids(DELIVERED)}


def fold_text(timer_id: int) -> str:
    turn, n = divmod(timer_id, len(DELAYS_MS))
    return f"m{turn}-{n}"


def cut_during_recovery(
    disk: FaultyDisk, before: TimerWorld | None, now_ms: int, seed: int
) -> tuple[FaultyDisk, TimerWorld | None]:
    """Cut the power again while the engine starts, delivers and writes its files."""
    disk.cut_at = Random(seed).randint(0, 40)
    world = before
    try:
        world = TimerWorld(disk, config=CONFIG, timer=CONFIG.timer, now_ms=now_ms, before=before)
        world.sleep(2 * SECOND_MS)
        world.background()
    except PowerCut:
        pass
    return disk.after_power_cut(), world


def one_by_one(disk: FaultyDisk) -> TimerWorld:
    return TimerWorld(disk, config=CONFIG, timer=CONFIG.timer)


def overlapping(disk: FaultyDisk) -> OverlappingTimerWorld:
    schedule = Random(SCHEDULE)
    return OverlappingTimerWorld(disk, config=CONFIG, timer=CONFIG.timer, schedule=schedule)


def count_operations(open_world: OpenWorld) -> list[str]:
    disk = FaultyDisk(Random(1))
    replies = TimerReplies()
    world = open_world(disk)
    run_scenario(world, replies)
    world.settle()
    evacuated = sum(one.copies for one in world.timers.timers.values())
    assert evacuated, "the scenario evacuates"
    assert world.engine.log.min_offset, "and retires segments"
    check(world, replies, with_twin=True)
    return disk.operations


OPERATIONS: dict[OpenWorld, list[str]] = {
    open_world: count_operations(open_world) for open_world in (one_by_one, overlapping)
}


@pytest.mark.parametrize("open_world", OPERATIONS)
@pytest.mark.parametrize("point", POINTS)
def test_the_scenario_meets_crash_point(open_world: OpenWorld, point: str) -> None:
    assert any(one.startswith(POINTS[point]) for one in OPERATIONS[open_world])


def test_rounds_of_the_scenario_overlap() -> None:
    world = overlapping(FaultyDisk(Random(1)))
    run_scenario(world, TimerReplies())
    assert world.overlaps > OVERLAPS_MIN


@pytest.mark.parametrize("open_world", OPERATIONS)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_power_cut_at_any_operation_loses_or_doubles_no_timer(
    open_world: OpenWorld, chunk: int
) -> None:
    operations = OPERATIONS[open_world]
    for cut_at in part_of(len(operations), parts=PARTS)[chunk::CHUNKS]:
        disk = FaultyDisk(Random(f"{seed_base()} {cut_at}"))
        disk.cut_at = cut_at
        replies = TimerReplies()
        world: TimerWorld | None = None
        now_ms = START_MS
        try:
            world = open_world(disk)
            run_scenario(world, replies)
        except PowerCut:
            pass
        if world is not None:
            now_ms = world.now_ms + cut_at % 3 * 700_000  # An outage, or none.
        disk = disk.after_power_cut()
        try:
            if cut_at % 3:
                disk, world = cut_during_recovery(disk, world, now_ms, cut_at)
                now_ms += 2 * SECOND_MS
            recovered = TimerWorld(
                disk, config=CONFIG, timer=CONFIG.timer, now_ms=now_ms, before=world
            )
            check(recovered, replies, with_twin=cut_at % 5 == 0)
        except AssertionError as error:
            raise AssertionError(
                f"power cut at operation {cut_at} ({operations[cut_at]}): {error}"
            ) from error
