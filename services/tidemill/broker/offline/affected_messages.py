"""The messages that damage to the log affects.

A message with a damaged head is known from the queue file that lists it. If no file lists it yet,
it is known from the gap between its neighbours in the queue.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple, final

import numpy as np

from tidemill.broker.engine.layout import message, record, timer_control
from tidemill.broker.engine.layout.block_file import DirectoryRow
from tidemill.broker.engine.layout.message import (
    FLAG_REMAINS,
    FLAG_SCHEDULE,
    FLAG_TIMER,
    MessagePosition,
    SalvagedTimer,
    TimerTarget,
)
from tidemill.broker.engine.layout.queue_entry import SIZE
from tidemill.broker.engine.layout.record import HEADER_SIZE, RecordKind
from tidemill.broker.engine.timer.status import SCHEDULE_QUEUE, TimerState
from tidemill.broker.offline import check_timers
from tidemill.broker.offline.findings import AffectedMessage, AffectedTimer
from tidemill.broker.offline.log_scan import BrokenRange, IntactRecord
from tidemill.broker.offline.names import TopicNames
from tidemill.broker.offline.source import Source
from tidemill.message import salvage

CONCERNS_MAX = 10_000  # messages in all; a missing segment may have had a million
_ENTRIES = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert _ENTRIES.itemsize == SIZE, "the array of entries has the size of their layout"


class _LastMessage(NamedTuple):
    """The newest message of a queue so far."""

    queue_offset: int
    log_offset: int


class _LostMessage(NamedTuple):
    """A message of a damaged range: lost in a queue file, or missing in its queue."""

    topic_id: int
    queue_id: int
    queue_offset: int
    log_offset: int  # -1: somewhere in the range


@final
class AffectedMessageCollector:
    """The facts about messages in damaged ranges, gathered while all files are read."""

    def __init__(self, source: Source, names: TopicNames) -> None:
        self._source = source
        self._names = names
        self._broken: list[BrokenRange] = []
        self._last: dict[tuple[int, int], _LastMessage] = {}
        self._lost: dict[int, dict[tuple[int, int, int], _LostMessage]] = defaultdict(dict)
        self._room = CONCERNS_MAX
        # Salvaged timers by the log offset of their original message.
        self._originals: dict[int, SalvagedTimer] = {}
        # Pending salvaged timers by id: the newest record, and the message id.
        self._salvaged: dict[int, tuple[SalvagedTimer, str]] = {}

    def add_damage(self, broken: BrokenRange) -> None:
        """Add a damaged range of the log."""
        self._broken.append(broken)
        if broken.header is not None and broken.header.kind == RecordKind.MESSAGE:
            place = _place(broken.remains[HEADER_SIZE:])
            self._last[place.topic_id, place.queue_id] = _LastMessage(
                place.queue_offset, broken.log_offset
            )

    def add_message(self, found: IntactRecord) -> None:
        """Add an intact message. Messages missing before it in its queue were in a range."""
        self._note_timer(found)
        place = _place(found.body)
        key = place.topic_id, place.queue_id
        before = self._last.get(key)
        self._last[key] = _LastMessage(place.queue_offset, found.log_offset)
        if before is None or not self._broken or place.queue_offset <= before.queue_offset + 1:
            return
        for broken in self._broken:
            if broken.header is None and before.log_offset < broken.log_offset < found.log_offset:
                missing = range(before.queue_offset + 1, place.queue_offset)
                for queue_offset in missing[: self._room]:
                    self._add_lost(broken, _LostMessage(*key, queue_offset, -1))
                return

    def add_control(self, found: IntactRecord) -> None:
        """Add a TIMER record."""
        control = timer_control.decode(found.body)
        if control.operation == timer_control.TimerOperation.CANCEL:
            self._salvaged.pop(control.timer_id, None)

    def _note_timer(self, found: IntactRecord) -> None:
        flags = found.header.flags
        if flags & FLAG_REMAINS:
            remains = message.decode_remains(found.body)
            self._originals[remains.log_offset] = remains
            self._salvaged[remains.target.timer_id] = remains, _id_of(bytes(found.tail))
        elif flags & FLAG_SCHEDULE:
            self._salvaged.pop(message.decode_target(found.body).timer_id, None)
        elif flags & FLAG_TIMER:
            self._salvaged.pop(message.decode_timer_cause(found.body).timer_id, None)

    def find_missing_originals(self, log_from: int) -> Iterator[tuple[int, AffectedMessage]]:
        """Yield the pending timers with an original before the log, and its log offset."""
        for remains, message_id in self._salvaged.values():
            original, timer = remains.log_offset, self._timer(remains.target)
            # The table may know more than a damaged log.
            if 0 <= original < log_from and timer.state in ("", TimerState.PENDING.name):
                yield original, self._affected_by_timer(timer, message_id)

    def _affected_by_timer(self, timer: AffectedTimer, message_id: str) -> AffectedMessage:
        return AffectedMessage(
            topic=self._names.topic(self._names.timer_topic_id or 0),
            queue_id=SCHEDULE_QUEUE,
            queue_offset=timer.timer_id,
            message_id=message_id,
            timer=timer,
        )

    def add_queue_block(self, row: DirectoryRow, data: bytes) -> None:
        """Add a block of a queue file."""
        if not self._broken:
            return
        offsets = np.frombuffer(data, dtype=_ENTRIES)["log_offset"].astype(np.int64)
        self._broken.sort(key=lambda broken: broken.log_offset)
        begins = np.array([broken.log_offset for broken in self._broken])
        which = np.searchsorted(begins, offsets, side="right") - 1
        for number in np.flatnonzero(which >= 0).tolist():
            broken = self._broken[which[number]]
            if offsets[number] < broken.end and broken.header is None and self._room:
                lost = _LostMessage(row.key_1, row.key_2, row.first + number, int(offsets[number]))
                self._add_lost(broken, lost)

    def _add_lost(self, broken: BrokenRange, lost: _LostMessage) -> None:
        known = self._lost[broken.log_offset]
        key = lost[:3]
        if key not in known or known[key].log_offset < 0:
            self._room -= key not in known
            known[key] = lost

    def of_log(self, broken: BrokenRange) -> Iterator[AffectedMessage]:
        """Yield the messages that a damaged range of the log affects."""
        if broken.header is not None:
            if broken.header.kind == RecordKind.MESSAGE:
                yield self._of_record(broken, broken.header)
            return
        lost = sorted(self._lost[broken.log_offset].values())
        for one in lost:
            remains = b""
            if one.log_offset >= 0:
                remains = broken.remains[one.log_offset - broken.log_offset :]
            elif len(lost) == 1:
                remains = broken.remains
            yield self._affected_message(one, remains)
        if not lost and (found := _salvaged(broken.remains)):
            yield AffectedMessage(topic="", queue_id=-1, queue_offset=-1, message_id=found)

    def of_held(self, broken: BrokenRange) -> Iterator[AffectedMessage]:
        """Yield the timers with originals in a damaged range of a held segment."""
        for log_offset, remains in sorted(self._originals.items()):
            if broken.log_offset <= log_offset < broken.end:
                message_id = _salvaged(broken.remains[log_offset - broken.log_offset :])
                yield self._affected_by_timer(self._timer(remains.target), message_id)

    def _of_record(self, broken: BrokenRange, header: record.RecordHeader) -> AffectedMessage:
        """Return the message of a record with an intact head."""
        body = broken.remains[HEADER_SIZE : header.head_size]
        place = _place(body)
        timer = None
        if header.flags & FLAG_SCHEDULE:
            timer = self._timer(message.decode_target(body))
        return AffectedMessage(
            topic=self._names.topic(place.topic_id),
            queue_id=place.queue_id,
            queue_offset=place.queue_offset,
            message_id=_id_of(broken.remains[header.head_size :]),
            timer=timer,
        )

    def _timer(self, target: TimerTarget) -> AffectedTimer:
        known = check_timers.find_timer(self._source, self._names, target.timer_id)
        return known or AffectedTimer(
            timer_id=target.timer_id,
            due_at_ms=target.due_at_ms,
            topic=self._names.topic(target.topic_id),
            state="",
        )

    def _affected_message(self, lost: _LostMessage, remains: bytes) -> AffectedMessage:
        timer = None
        is_schedule = lost.topic_id == self._names.timer_topic_id
        if is_schedule and lost.queue_id == SCHEDULE_QUEUE:
            timer = check_timers.find_timer(self._source, self._names, lost.queue_offset)
        return AffectedMessage(
            topic=self._names.topic(lost.topic_id),
            queue_id=lost.queue_id,
            queue_offset=lost.queue_offset,
            message_id=_salvaged(remains),
            timer=timer,
        )


def _place(body: bytes | memoryview) -> MessagePosition:
    return MessagePosition._make(message.PLACE.unpack_from(body))


def _id_of(blob: bytes) -> str:
    return salvage.properties_of(blob).message_id.decode(errors="replace")


def _salvaged(remains: bytes) -> str:
    """Return the id of the message of a record; "" if it is not intact."""
    begins = [HEADER_SIZE + message.PLACE_SIZE]
    if len(remains) >= HEADER_SIZE:
        begins.insert(0, record.HEADER.unpack_from(remains)[record.HEAD_SIZE])
    return next(filter(None, (_id_of(remains[begin:]) for begin in begins)), "")
