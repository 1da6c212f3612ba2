"""A world in which an operator changes many timers at once."""

from __future__ import annotations

import json
from zlib import crc32

from tests.support.worlds.engine_world import TOPIC, blob
from tests.support.worlds.timer_world import TimerWorld
from tidemill.broker.engine.layout.numbers import QueueId, TimerId, TopicId
from tidemill.broker.engine.layout.operation import Operation, OperationBegun, OperationKind
from tidemill.broker.engine.timer.bulk_changes import TimerOutcome
from tidemill.broker.engine.timer.bulk_matches import TimerCount, TimerFilter
from tidemill.broker.engine.timer.due_change import TimerChange
from tidemill.broker.engine.timer.patch import with_due_time
from tidemill.message import stored_message

CANCEL, RESCHEDULE, FIRE = (
    OperationKind.CANCEL_TIMERS,
    OperationKind.RESCHEDULE_TIMERS,
    OperationKind.FIRE_TIMERS,
)


class TimerBulkWorld(TimerWorld):
    """A world with operations on timers."""

    def delay(
        self,
        text: str,
        due_at_ms: int,
        *,
        topic: str = TOPIC,
        tag: str = "",
        keys: tuple[str, ...] = (),
    ) -> int:
        """Send a delayed message with a tag, and return its timer id."""
        plain = blob(text, keys=keys, tag=tag, kind=stored_message.TYPE_DELAY)
        data, crc = with_due_time(plain, crc32(plain), due_at_ms)
        queue_offset, _ = self.engine.commands.send(
            TopicId(self.topic(topic)),
            QueueId(0),
            bytes(data),
            crc,
            now_ms=self.now_ms,
            firing_ms=self.now_ms,
        )
        self.commit()
        return queue_offset

    def count_timers(
        self,
        change: TimerChange,
        *,
        topic: str = TOPIC,
        as_of_ms: int | None = None,
        **wanted: object,
    ) -> TimerCount:
        """Count the timers that match; `topic` of "": in all topics."""
        topic_id = self.topic(topic) if topic else 0
        count = TimerCount(
            self.engine.timers.changes.parts,
            TimerFilter(topic_id, **wanted),  # type: ignore[arg-type]  # the caller's business
            change,
            as_of_ms=self.now_ms if as_of_ms is None else as_of_ms,
            firing_ms=self.now_ms,
            due_max_ms=self.now_ms + self.config.timer.max_delay_ms,
            quarantined=list(self.engine.timers.quarantined),
        )
        while count.step():
            pass
        return count

    def begin_timers(
        self,
        kind: OperationKind,
        *,
        due_at_ms: int | None = None,
        shift_ms: int = 0,
        spread_ms: int = 0,
        rate_per_s: int = 10_000,
        topic: str = TOPIC,
        as_of_ms: int | None = None,
        **wanted: object,
    ) -> Operation:
        """Begin an operation on the timers that match, as a count has found them."""
        change = TimerChange(kind, due_at_ms, shift_ms, spread_ms)
        count = self.count_timers(change, topic=topic, as_of_ms=as_of_ms, **wanted)
        topic_id = self.topic(topic) if topic else 0
        details = {
            "filter": wanted,
            "change": {"due_at_ms": due_at_ms, "shift_ms": shift_ms, "spread_ms": spread_ms},
            "max_count": count.count,
            "replaced_from": count.replaced_from,
            "by": "ops",
            "user": "",
            "key": "",
        }
        entry = OperationBegun(
            kind,
            0,
            topic_id,
            self.now_ms,
            count.begin,
            count.end,
            count.count,
            rate_per_s,
            json.dumps(details),
        )
        operation = self.engine.operations.begin(entry, self.now_ms)
        self.commit()
        return operation

    def run_operation(self, one: Operation) -> Operation:
        """Run an operation to its end."""
        for _ in range(1_000):
            found = self.engine.operations.find(one.id)
            if not found.is_running:
                return found
            self.now_ms += 10
            self.run_due()
        raise AssertionError("the operation does not end")

    def change_timer(self, change: TimerChange, timer_id: int) -> TimerOutcome:
        """Change one timer without an operation."""
        outcome = self.engine.timers.changes.apply(
            change, TimerId(timer_id), now_ms=self.now_ms, firing_ms=self.now_ms
        )
        self.commit()
        return outcome

    def due(self, timer_id: int) -> int:
        return self.engine.timers.commands.status(TimerId(timer_id)).due_at_ms
