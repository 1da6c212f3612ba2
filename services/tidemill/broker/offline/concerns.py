"""Whom damage to the log concerns: by what is left of a record, by the queues, and by what lacks.

A message whose head is damaged is named by the queue file that lists it; one that no file lists
yet, by the gap that it leaves between its neighbours in the queue.
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
from tidemill.broker.offline.findings import Concern, TimerConcern
from tidemill.broker.offline.log_scan import Broken, Intact
from tidemill.broker.offline.names import Names
from tidemill.broker.offline.source import Source
from tidemill.message import salvage

CONCERNS_MAX = 10_000  # messages named in all; of a missing segment there may be a million
_ENTRIES = np.dtype([("log_offset", ">i8"), ("size", ">u4"), ("tag_hash", ">i8")])
assert _ENTRIES.itemsize == SIZE, "an array of entries is what their layout says"


class _Seen(NamedTuple):
    """The newest message of a queue that was met."""

    queue_offset: int
    log_offset: int


class _Listed(NamedTuple):
    """A message that a queue file lists in a damaged stretch, or that lacks in its queue."""

    topic_id: int
    queue_id: int
    queue_offset: int
    log_offset: int  # -1: somewhere in the stretch


@final
class Concerns:
    """What is learnt of the messages in damaged stretches while all files are walked."""

    def __init__(self, source: Source, names: Names) -> None:
        self._source = source
        self._names = names
        self._broken: list[Broken] = []
        self._seen: dict[tuple[int, int], _Seen] = {}
        self._listed: dict[int, dict[tuple[int, int, int], _Listed]] = defaultdict(dict)
        self._room = CONCERNS_MAX
        # By where its message stands that could not be copied: a timer, as the log has it.
        self._originals: dict[int, SalvagedTimer] = {}
        # By timer: what is newest of one of which the log has what is left, and that waits.
        self._left: dict[int, tuple[SalvagedTimer, str]] = {}

    def expect(self, broken: Broken) -> None:
        """Note a damaged stretch of the log."""
        self._broken.append(broken)
        if broken.header is not None and broken.header.kind == RecordKind.MESSAGE:
            place = _place(broken.remains[HEADER_SIZE:])
            self._seen[place.topic_id, place.queue_id] = _Seen(
                place.queue_offset, broken.log_offset
            )

    def see(self, found: Intact) -> None:
        """Take in an intact message: those that lack before it in its queue were in a stretch."""
        self._note_timer(found)
        place = _place(found.body)
        key = place.topic_id, place.queue_id
        before = self._seen.get(key)
        self._seen[key] = _Seen(place.queue_offset, found.log_offset)
        if before is None or not self._broken or place.queue_offset <= before.queue_offset + 1:
            return
        for broken in self._broken:
            if broken.header is None and before.log_offset < broken.log_offset < found.log_offset:
                missing = range(before.queue_offset + 1, place.queue_offset)
                for queue_offset in missing[: self._room]:
                    self._list(broken, _Listed(*key, queue_offset, -1))
                return

    def see_control(self, found: Intact) -> None:
        """Take in a TIMER record."""
        control = timer_control.decode(found.body)
        if control.operation == timer_control.TimerOperation.CANCEL:
            self._left.pop(control.timer_id, None)

    def _note_timer(self, found: Intact) -> None:
        flags = found.header.flags
        if flags & FLAG_REMAINS:
            remains = message.decode_remains(found.body)
            self._originals[remains.log_offset] = remains
            self._left[remains.target.timer_id] = remains, _id_of(bytes(found.tail))
        elif flags & FLAG_SCHEDULE:
            self._left.pop(message.decode_target(found.body).timer_id, None)
        elif flags & FLAG_TIMER:
            self._left.pop(message.decode_timer_cause(found.body).timer_id, None)

    def set_aside(self, log_from: int) -> Iterator[tuple[int, Concern]]:
        """Yield the timers that wait and whose message the log has not, with where it stands."""
        for remains, message_id in self._left.values():
            original, timer = remains.log_offset, self._timer(remains.target)
            # The table may know more than a log that is damaged.
            if 0 <= original < log_from and timer.state in ("", TimerState.PENDING.name):
                yield original, self._timers_concern(timer, message_id)

    def _timers_concern(self, timer: TimerConcern, message_id: str) -> Concern:
        return Concern(
            topic=self._names.topic(self._names.timer_topic_id or 0),
            queue_id=SCHEDULE_QUEUE,
            queue_offset=timer.timer_id,
            message_id=message_id,
            timer=timer,
        )

    def look_up(self, row: DirectoryRow, data: bytes) -> None:
        """Take in a block of a queue file."""
        if not self._broken:
            return
        offsets = np.frombuffer(data, dtype=_ENTRIES)["log_offset"].astype(np.int64)
        self._broken.sort(key=lambda broken: broken.log_offset)
        begins = np.array([broken.log_offset for broken in self._broken])
        which = np.searchsorted(begins, offsets, side="right") - 1
        for number in np.flatnonzero(which >= 0).tolist():
            broken = self._broken[which[number]]
            if offsets[number] < broken.end and broken.header is None and self._room:
                listed = _Listed(row.key_1, row.key_2, row.first + number, int(offsets[number]))
                self._list(broken, listed)

    def _list(self, broken: Broken, listed: _Listed) -> None:
        known = self._listed[broken.log_offset]
        key = listed[:3]
        if key not in known or known[key].log_offset < 0:
            self._room -= key not in known
            known[key] = listed

    def of(self, broken: Broken) -> Iterator[Concern]:
        """Yield the messages that a stretch concerns."""
        if broken.header is not None:
            if broken.header.kind == RecordKind.MESSAGE:
                yield self._of_record(broken, broken.header)
            return
        listed = sorted(self._listed[broken.log_offset].values())
        for one in listed:
            remains = b""
            if one.log_offset >= 0:
                remains = broken.remains[one.log_offset - broken.log_offset :]
            elif len(listed) == 1:
                remains = broken.remains
            yield self._concern(one, remains)
        if not listed and (found := _salvaged(broken.remains)):
            yield Concern(topic="", queue_id=-1, queue_offset=-1, message_id=found)

    def of_held(self, broken: Broken) -> Iterator[Concern]:
        """Yield the timers whose messages a stretch of a segment that was set aside concerns."""
        for log_offset, remains in sorted(self._originals.items()):
            if broken.log_offset <= log_offset < broken.end:
                message_id = _salvaged(broken.remains[log_offset - broken.log_offset :])
                yield self._timers_concern(self._timer(remains.target), message_id)

    def _of_record(self, broken: Broken, header: record.RecordHeader) -> Concern:
        """Return whom a record concerns whose head is intact."""
        body = broken.remains[HEADER_SIZE : header.head_size]
        place = _place(body)
        timer = None
        if header.flags & FLAG_SCHEDULE:
            timer = self._timer(message.decode_target(body))
        return Concern(
            topic=self._names.topic(place.topic_id),
            queue_id=place.queue_id,
            queue_offset=place.queue_offset,
            message_id=_id_of(broken.remains[header.head_size :]),
            timer=timer,
        )

    def _timer(self, target: TimerTarget) -> TimerConcern:
        known = check_timers.find_timer(self._source, self._names, target.timer_id)
        return known or TimerConcern(
            timer_id=target.timer_id,
            due_at_ms=target.due_at_ms,
            topic=self._names.topic(target.topic_id),
            state="",
        )

    def _concern(self, listed: _Listed, remains: bytes) -> Concern:
        timer = None
        is_schedule = listed.topic_id == self._names.timer_topic_id
        if is_schedule and listed.queue_id == SCHEDULE_QUEUE:
            timer = check_timers.find_timer(self._source, self._names, listed.queue_offset)
        return Concern(
            topic=self._names.topic(listed.topic_id),
            queue_id=listed.queue_id,
            queue_offset=listed.queue_offset,
            message_id=_salvaged(remains),
            timer=timer,
        )


def _place(body: bytes | memoryview) -> MessagePosition:
    return MessagePosition._make(message.PLACE.unpack_from(body))


def _id_of(blob: bytes) -> str:
    return salvage.properties_of(blob).message_id.decode(errors="replace")


def _salvaged(remains: bytes) -> str:
    """Return the id of the message whose record begins there, "" where none can be vouched for."""
    begins = [HEADER_SIZE + message.PLACE_SIZE]
    if len(remains) >= HEADER_SIZE:
        begins.insert(0, record.HEADER.unpack_from(remains)[record.HEAD_SIZE])
    return next(filter(None, (_id_of(remains[begin:]) for begin in begins)), "")
