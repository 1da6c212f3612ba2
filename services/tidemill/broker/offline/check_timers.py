"""The files of timers: their damage, and the state of one timer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from tidemill.broker.engine.layout import timer_checkpoint, timer_entry, timer_record, timer_slot
from tidemill.broker.engine.layout.timer_checkpoint import TimerCheckpoint
from tidemill.broker.engine.timer import table, timer_log, wheel
from tidemill.broker.engine.timer.config import TimerConfig
from tidemill.broker.engine.timer.flush import FILES as CHECKPOINTS
from tidemill.broker.engine.timer.flush import FOLDERS
from tidemill.broker.engine.timer.janitor import TABLE_FILES_KEPT
from tidemill.broker.engine.timer.status import TimerState
from tidemill.broker.offline.findings import AffectedTimer, Damage
from tidemill.broker.offline.names import TopicNames
from tidemill.broker.offline.source import Source


class TimerDamage(NamedTuple):
    """A damaged range of a timer file."""

    damage: Damage
    file: str
    position: int
    size: int
    why: str
    is_missing: bool = False  # the whole file


def newest_checkpoint(source: Source) -> TimerCheckpoint | None:
    """Return the checkpoint that a start uses."""
    found = [timer_checkpoint.find(source.read(name)) for name in CHECKPOINTS]
    return max(filter(None, found), key=lambda one: one.generation, default=None)


def find_damage(source: Source, config: TimerConfig, store_uuid: bytes) -> list[TimerDamage]:
    """Return all damage.

    The checkpoint is read first: the other files are at least as new.
    """
    if not any(source.names(folder) for folder in FOLDERS):
        return []
    checkpoint = newest_checkpoint(source)
    found = [*_check_checkpoints(source, checkpoint, store_uuid)]
    for damage, file, damages in (
        (Damage.TIMER_TABLE, table.FOLDER, _check_table(source, config, checkpoint)),
        (Damage.TIMER_WHEEL, wheel.FILE, _check_wheel(source, config, checkpoint)),
        (Damage.TIMER_LOG, timer_log.FOLDER, _check_log(source, config, checkpoint)),
    ):
        try:
            found += damages
        except FileNotFoundError:
            found.append(TimerDamage(damage, file, 0, 0, "a file vanished while it was read"))
    return found


def _check_checkpoints(
    source: Source, newest: TimerCheckpoint | None, store_uuid: bytes
) -> Iterator[TimerDamage]:
    for name in CHECKPOINTS:
        data = source.read(name)
        if data is not None and timer_checkpoint.find(data) is None:
            yield TimerDamage(Damage.TIMER_CHECKPOINT, name, 0, len(data), "checksum mismatch")
    if newest is not None and store_uuid and newest.store_uuid != store_uuid:
        name = CHECKPOINTS[newest.generation % 2]
        yield TimerDamage(Damage.TIMER_CHECKPOINT, name, 0, 0, "it is of another store")


def _stems(source: Source, folder: str) -> dict[int, str]:
    """Return the names of the files whose names are numbers, by number."""
    names = source.names(folder)
    return {int(stem): name for name in names if (stem := name.rpartition("/")[2]).isdigit()}


def _read(source: Source, name: str) -> bytes:
    file = source.open(name)
    try:
        return file.read_at(0, file.size())
    finally:
        file.close()


def _runs(is_damaged: np.ndarray) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of true values."""
    edges = np.flatnonzero(np.diff(is_damaged, prepend=False, append=False))
    for first, end in edges.reshape(-1, 2).tolist():
        yield first, end - first


# ---------------------------------------------------------------- the table


def _check_table(
    source: Source, config: TimerConfig, checkpoint: TimerCheckpoint | None
) -> Iterator[TimerDamage]:
    known_ids = checkpoint.queue_offset if checkpoint else 0
    entries = config.table_file_entries
    files = _stems(source, table.FOLDER)
    for first_id, name in files.items():
        data = _read(source, name)
        if len(data) < entries * timer_entry.SIZE and first_id < known_ids:
            yield TimerDamage(Damage.TIMER_TABLE, name, len(data), 0, "the file has been cut")
        rows = np.frombuffer(data, timer_entry.DTYPE, len(data) // timer_entry.SIZE)
        is_known = np.arange(len(rows)) + first_id < known_ids
        is_gap = (rows["state"] == TimerState.UNUSED) & is_known
        for at, count in _runs(~timer_entry.is_intact(rows) | is_gap):
            yield TimerDamage(
                Damage.TIMER_TABLE,
                name,
                at * timer_entry.SIZE,
                count * timer_entry.SIZE,
                f"{count} entries are damaged, from timer {first_id + at} on",
            )
    if checkpoint is None:
        return
    end = -(-known_ids // entries)
    expected = {*range(max(end - TABLE_FILES_KEPT, 0), end), *(checkpoint.live_files or ())}
    for number in sorted(expected - {first_id // entries for first_id in files}):
        name = f"{table.FOLDER}/{number * entries:020d}"
        yield TimerDamage(Damage.TIMER_TABLE, name, 0, 0, "the file is missing", is_missing=True)


def find_timer(source: Source, names: TopicNames, timer_id: int) -> AffectedTimer | None:
    """Return the state of a timer in the table, None if it is missing or damaged."""
    files = [one for one in _stems(source, table.FOLDER).items() if one[0] <= timer_id]
    if not files:
        return None
    first_id, name = max(files)
    try:
        file = source.open(name)
    except FileNotFoundError:
        return None
    data = file.read_at((timer_id - first_id) * timer_entry.SIZE, timer_entry.SIZE)
    file.close()
    if (
        len(data) < timer_entry.SIZE
        or not timer_entry.is_intact(np.frombuffer(data, timer_entry.DTYPE)).all()
    ):
        return None
    entry = timer_entry.read(memoryview(data), 0)
    if entry.state == TimerState.UNUSED:
        return None
    return AffectedTimer(
        timer_id=timer_id,
        due_at_ms=entry.due_at_ms,
        topic=names.topic(entry.topic_id),
        state=TimerState(entry.state).name if entry.state in set(TimerState) else "",
    )


# ---------------------------------------------------------------- the wheel, and its chains


def _check_wheel(
    source: Source, config: TimerConfig, checkpoint: TimerCheckpoint | None
) -> Iterator[TimerDamage]:
    # Listed before the wheel is read: the wheel never refers to files that were deleted by then.
    log_begin = min(_stems(source, timer_log.FOLDER), default=0)
    data = source.read(wheel.FILE)
    if data is None or len(data) != config.wheel_slots * timer_slot.SIZE:
        if checkpoint is not None:
            is_missing = data is None
            why = "the file is missing" if is_missing else "the file has been cut"
            yield TimerDamage(Damage.TIMER_WHEEL, wheel.FILE, len(data or b""), 0, why, is_missing)
        return
    slots = np.frombuffer(data, timer_slot.DTYPE)
    used = np.flatnonzero(np.frombuffer(data, np.uint64).reshape(len(slots), -1).any(axis=1))
    found = slots[used]
    is_intact = (
        timer_slot.is_intact(found)
        & (found["time"] % 1000 == 0)
        & (found["time"] // 1000 % len(slots) == used)
    )
    if checkpoint is not None:
        has_passed = found["time"] <= checkpoint.hand_ms
        is_intact &= (found["first"] >= log_begin) | has_passed
    is_damaged = np.zeros(len(slots), dtype=bool)
    is_damaged[used[~is_intact]] = True
    for slot, count in _runs(is_damaged):
        yield TimerDamage(
            Damage.TIMER_WHEEL,
            wheel.FILE,
            slot * timer_slot.SIZE,
            count * timer_slot.SIZE,
            f"{count} slots are damaged",
        )
    if checkpoint is not None and len(used) < checkpoint.slots_used:
        lost = checkpoint.slots_used - len(used)
        yield TimerDamage(Damage.TIMER_WHEEL, wheel.FILE, 0, 0, f"{lost} slots are zeros")


def _check_log(
    source: Source, config: TimerConfig, checkpoint: TimerCheckpoint | None
) -> Iterator[TimerDamage]:
    """Find damaged records among those that the checkpoint counts as durable."""
    files = _stems(source, timer_log.FOLDER)
    if checkpoint is None or not (files or checkpoint.pending_count):
        return
    end, file_bytes = checkpoint.timer_log_position, config.timer_log_file_bytes
    # If a checkpoint ends with a file, the next file may not exist yet.
    first = min(files, default=(end - 1) // file_bytes * file_bytes)
    for begin in range(first, end, file_bytes):
        name = f"{timer_log.FOLDER}/{begin:020d}"
        if begin not in files:
            yield TimerDamage(Damage.TIMER_LOG, name, 0, 0, "the file is missing", is_missing=True)
            continue
        data = _read(source, name)
        if len(data) != file_bytes:
            yield TimerDamage(Damage.TIMER_LOG, name, len(data), 0, "the file has been cut")
        count = min(end - begin, len(data)) // timer_record.SIZE
        rows = np.frombuffer(data, timer_record.DTYPE, count)
        sealed = rows.copy()
        timer_record.seal(sealed)
        is_intact = (sealed["crc"] == rows["crc"]) & (rows["size"] == timer_record.SIZE)
        for at, count in _runs(~is_intact):
            yield TimerDamage(
                Damage.TIMER_LOG,
                name,
                at * timer_record.SIZE,
                count * timer_record.SIZE,
                f"{count} records are damaged",
            )
