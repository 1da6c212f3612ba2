"""A fold of a log's timer records into dictionaries, which checks each state and transition.

It is independent of the engine: it shares only the record layouts, and has no wheel, table or slot.
It checks these guarantees:

    T-1   the broker delivers no message before its due time
    T-3   a timer is delivered, cancelled, dropped with a copy, or still pending
    T-6   a timer has at most one outcome
    T-8   the frontier only advances, and all timers due before it are settled
    T-11  a cancelled timer is never delivered
    T-12  each transition starts from the state after the previous one
    T-13  a rescheduled timer fires at its new due time
    T-26  an evacuated copy has the same message, due time and id
    D-7   a message that replaces another one has its dedup key, and so its pending timer
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from tidemill.broker.engine.layout import message, timer_control
from tidemill.broker.engine.layout.message import (
    FLAG_REMAINS,
    FLAG_SCHEDULE,
    FLAG_TIMER,
    TimerReason,
)
from tidemill.broker.engine.layout.record import RecordHeader, RecordKind
from tidemill.broker.engine.timer.status import REPLACED_QUEUE
from tidemill.message import stored_message

PENDING, DELIVERED, CANCELLED, DROPPED = "pending", "delivered", "cancelled", "dropped"
DUE_END = stored_message.DUE_AT + 8


class BrokenTimer(AssertionError):
    """A violation of a timer's guarantee in the log. The message begins with the guarantee's id."""


@dataclass
class OneTimer:
    """The state of a timer according to the log."""

    due_at_ms: int
    topic_id: int
    queue_id: int
    origin: str
    message_id: str
    content: int  # checksum of the stored message without its due time
    log_offset: int  # of the newest copy
    size: int
    state: str = PENDING
    settled_at_ms: int = 0
    copies: int = 0
    original: int | None = None  # log offset of the damaged message that this copy replaces


class TimerFold:
    """The fold of all timer records, in the order of the log."""

    def __init__(self) -> None:
        self.timers: dict[int, OneTimer] = {}
        self.frontier_ms = 0
        self.topics: dict[int, str] = {}
        self.quarantined: set[int] = set()  # damaged on purpose: the hand may pass them
        self._dues: list[tuple[int, int]] = []  # a heap; entries may be outdated

    @property
    def open(self) -> dict[int, OneTimer]:
        return {n: one for n, one in self.timers.items() if one.state == PENDING}

    def ids(self, state: str) -> set[int]:
        return {n for n, one in self.timers.items() if one.state == state}

    def fold(self, header: RecordHeader, body: bytes, tail: bytes) -> None:
        """Fold one record. Raises BrokenTimer."""
        if header.kind == RecordKind.MESSAGE and header.flags & FLAG_SCHEDULE:
            self._schedule(header, body, tail)
        elif header.kind == RecordKind.MESSAGE and header.flags & FLAG_TIMER:
            self._settle(header, body, tail)
        elif header.kind == RecordKind.TIMER:
            self._control(header, body)
        elif header.kind == RecordKind.FRONTIER:
            self._frontier(timer_control.decode_frontier(body).frontier_ms)

    def fold_config(self, config: dict[str, Any]) -> None:
        if config["op"] == "topic":
            self.topics[config["topic"]["id"]] = config["topic"]["name"]
        elif config["op"] == "deleteTopic":
            self.topics.pop(config["id"], None)

    # ------------------------------------------------------------ records

    def _schedule(self, header: RecordHeader, body: bytes, tail: bytes) -> None:
        place = message.MessagePosition._make(message.PLACE.unpack_from(body))
        target = message.decode_target(body)
        _check(self.topics.get(place.topic_id) == "%SYS%TIMER", "T-3", "on the hidden topic")
        if place.queue_id == REPLACED_QUEUE:
            self._replace(header, target, tail)
            return
        if place.queue_id:
            self._evacuate(header, target, body, tail)
            return
        _check(int(place.queue_offset) == int(target.timer_id), "T-6", f"{target} at {place}")
        _check(target.timer_id not in self.timers, "T-6", f"a second schedule of {target}")
        self.timers[target.timer_id] = _timer_of(header, target, tail)
        heapq.heappush(self._dues, (target.due_at_ms, target.timer_id))

    def _replace(self, header: RecordHeader, target: message.TimerTarget, tail: bytes) -> None:
        """Fold a message with the dedup key of a pending one."""
        one = self._pending(target.timer_id, "D-7: a replaced message")
        _check(target.topic_id == one.topic_id, "D-7", f"{target} is of another topic than {one}")
        self.timers[target.timer_id] = _timer_of(header, target, tail)
        heapq.heappush(self._dues, (target.due_at_ms, target.timer_id))

    def _evacuate(
        self, header: RecordHeader, target: message.TimerTarget, body: bytes, tail: bytes
    ) -> None:
        one = self._pending(target.timer_id, "T-26: a copy")
        _check(
            (target.due_at_ms, target.topic_id, target.origin)
            == (one.due_at_ms, one.topic_id, one.origin),
            "T-26",
            f"{target} is another one than {one}",
        )
        if header.flags & FLAG_REMAINS:
            _check(target.timer_id in self.quarantined, "T-26", f"{target} was not damaged")
            original = message.decode_remains(body).log_offset
            is_known = original in (one.log_offset, one.original)
            # If the earlier copy was damaged too, the original's exact offset is unknown.
            is_before = one.original is not None and 0 < -original <= one.log_offset
            _check(is_known or is_before, "T-26", f"{original} for {target}")
            one.original = original
        else:
            _check(target.queue_id == one.queue_id, "T-26", f"the copy of {target}")
            _check(_content(tail) == one.content, "T-26", f"another message: {target}")
            one.original = None
        one.log_offset, one.size = header.log_offset, header.size
        one.copies += 1

    def _settle(self, header: RecordHeader, body: bytes, tail: bytes) -> None:
        cause = message.decode_timer_cause(body)
        place = message.MessagePosition._make(message.PLACE.unpack_from(body))
        one = self._pending(cause.timer_id, "T-6: an outcome")
        _check(cause.due_at_ms == one.due_at_ms, "T-13", f"{cause}, due at {one.due_at_ms}")
        _check(
            header.stored_at_ms >= one.due_at_ms,
            "T-1",
            f"{cause.timer_id} at {header.stored_at_ms}, due at {one.due_at_ms}",
        )
        is_damaged = cause.reason == TimerReason.DAMAGED
        _check(not is_damaged or one.original is not None, "T-3", f"{cause} was not damaged")
        is_same = is_damaged or _content(tail) == one.content
        _check(is_same, "T-3", f"another message than {cause} scheduled")
        told_due = int.from_bytes(tail[stored_message.DUE_AT : DUE_END], "big")
        _check(told_due == one.due_at_ms, "T-13", f"the message says that it was due at {told_due}")
        if cause.reason == TimerReason.DELIVERED:
            _check(place.topic_id == one.topic_id, "T-3", f"{cause} in topic {place.topic_id}")
            _check(place.topic_id in self.topics, "T-3", f"{cause} in a topic that is gone")
            one.state = DELIVERED
        else:
            name = self.topics.get(place.topic_id)
            _check(name == "%DLQ%TIMER", "T-3", f"{cause} dropped into {name}")
            _check(cause.origin == one.origin, "T-3", f"{cause} came from {one.origin}")
            if cause.reason == TimerReason.TOPIC_DELETED:
                _check(one.topic_id not in self.topics, "T-3", f"{cause}: the topic is there")
            one.state = DROPPED
        one.settled_at_ms = header.stored_at_ms

    def _control(self, header: RecordHeader, body: bytes) -> None:
        control = timer_control.decode(body)
        one = self._pending(control.timer_id, f"T-12: {control}")
        _check(control.due_at_ms == one.due_at_ms, "T-12", f"{control}, due at {one.due_at_ms}")
        if control.operation == timer_control.TimerOperation.CANCEL:
            one.state, one.settled_at_ms = CANCELLED, header.stored_at_ms
            return
        _check(control.new_due_at_ms > 0, "T-13", f"{control} at {header.stored_at_ms}")
        one.due_at_ms = control.new_due_at_ms
        heapq.heappush(self._dues, (one.due_at_ms, control.timer_id))

    def _frontier(self, frontier_ms: int) -> None:
        _check(frontier_ms > self.frontier_ms, "T-8", f"{frontier_ms} after {self.frontier_ms}")
        self.frontier_ms = frontier_ms
        passed: list[tuple[int, int]] = []
        while self._dues and self._dues[0][0] // 1000 <= frontier_ms // 1000:
            due_at_ms, timer_id = heapq.heappop(self._dues)
            one = self.timers[timer_id]
            if one.state == PENDING and one.due_at_ms == due_at_ms:
                _check(timer_id in self.quarantined, "T-8", f"{timer_id} is left at {due_at_ms}")
                passed.append((due_at_ms, timer_id))
        for item in passed:
            heapq.heappush(self._dues, item)

    def _pending(self, timer_id: int, what: str) -> OneTimer:
        one = self.timers.get(timer_id)
        if one is None:
            raise BrokenTimer(f"{what} of timer {timer_id}, which never was")
        if one.state != PENDING:
            raise BrokenTimer(f"{what} of timer {timer_id}, which is {one.state} already")
        return one


def _timer_of(header: RecordHeader, target: message.TimerTarget, tail: bytes) -> OneTimer:
    """Return the pending timer of a SCHEDULE record."""
    return OneTimer(
        target.due_at_ms,
        target.topic_id,
        target.queue_id,
        target.origin,
        stored_message.message_id_of(tail),
        _content(tail),
        header.log_offset,
        header.size,
    )


def _content(blob: bytes) -> int:
    """Return a checksum of a stored message without its due time, which a reschedule changes."""
    return crc32(blob[DUE_END:], crc32(blob[: stored_message.DUE_AT]))


def _check(holds: bool, promise: str, what: str) -> None:
    if not holds:
        raise BrokenTimer(f"{promise}: {what}")
