"""Messages with dedup keys in a world of the engine."""

from __future__ import annotations

import struct
from typing import Any
from zlib import crc32

from tests.support.worlds.engine_world import TOPIC, blob
from tests.support.worlds.transaction_world import SENDER, TransactionWorld
from tidemill.broker.engine.dedup.deduplication import RepeatedSend
from tidemill.broker.engine.dedup.first_messages import FirstMessage
from tidemill.broker.engine.layout.dedup import KeyRow
from tidemill.broker.engine.layout.numbers import HalfId, QueueId, TimerId
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.dedup_policy import DedupChange
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.message import stored_message
from tidemill.message.dedup_key import DEDUP_PROPERTY

WINDOW_MS = 120_000


class DedupWorld(TransactionWorld):
    """A world with a topic that has dedup keys; each command is a round, unless told otherwise."""

    wall_step_ms = 0  # of the wall clock since the start; the monotonic clock has no steps

    def turn_on(self, *, topic: str = TOPIC, queues: int = 1, **fields: Any) -> None:
        """Turn the deduplication of a topic on, or change it."""
        self.put_dedup(DedupChange(is_on=True, **fields), topic=topic, queues=queues)

    def turn_off(self, *, topic: str = TOPIC) -> None:
        """Turn the deduplication of a topic off."""
        self.put_dedup(DedupChange(is_off=True), topic=topic)

    def put_dedup(self, change: DedupChange, *, topic: str = TOPIC, queues: int = 1) -> None:
        """Change the deduplication of a topic."""
        self.note_round()
        self.engine.administration.put_topic(
            topic, type_=TopicType.MIXED, queues=queues, dedup=change, now_ms=self.wall_ms
        )
        self.commit()

    @property
    def wall_ms(self) -> int:
        """The time of the wall clock."""
        return self.now_ms + self.wall_step_ms

    def note_round(self) -> None:
        """Note the time of the next round."""
        self.engine.deduplication.note_time(self.wall_ms, self.now_ms)

    def run_due(self) -> None:
        """Do all work that is due, as the round loop does: until the next deadline is later."""
        self.note_round()
        super().run_due()
        for _ in range(1_000):
            due_ms = self.engine.next_due_ms(self.now_ms, firing_ms=self.now_ms)
            if due_ms is None or due_ms > self.now_ms:
                return
            self.engine.take_ready()
            super().run_due()
        raise AssertionError("the due work does not come to an end")

    def store(
        self,
        text: str,
        *,
        key: str | None = None,
        message_id: str = "",
        topic: str = TOPIC,
        due_at_ms: int | None = None,
        is_half: bool = False,
        is_ended: bool = True,
        key_version: int = 0,
    ) -> FirstMessage:
        """Send a message, and return its answer; raise RepeatedSend for a repeat."""
        self.note_round()
        kind = stored_message.TYPE_DELAY if due_at_ms is not None else 1
        kind = stored_message.TYPE_TRANSACTION if is_half else kind
        properties = {} if key is None else {DEDUP_PROPERTY: key}
        message_id = message_id or f"id-{text}"
        data = bytearray(blob(text, message_id=message_id, properties=properties, kind=kind))
        struct.pack_into(">q", data, stored_message.DUE_AT, due_at_ms or 0)
        topic_id = self.engine.catalog.topic_ids[topic]
        try:
            number, due_ms = self.engine.commands.send(
                topic_id,
                QueueId(0),
                bytes(data),
                crc32(data),
                now_ms=self.wall_ms,
                firing_ms=self.now_ms,
                sender=HalfSender(SENDER) if is_half else None,
                key_version=key_version,
            )
        finally:
            if is_ended:
                self.commit()
        if is_half:
            return FirstMessage(message_id, 0, 0, number)
        return FirstMessage(message_id, number, due_ms, 0)

    def repeat(self, text: str, **options: Any) -> FirstMessage:
        """Send a message that must be a repeat, and return the first answer."""
        try:
            self.store(text, **options)
        except RepeatedSend as repeat:
            return repeat.first
        raise AssertionError("the message was stored")

    def cancel(self, timer_id: int) -> None:
        """Cancel a delayed message."""
        self.engine.timers.commands.cancel(TimerId(timer_id), now_ms=self.now_ms)
        self.commit()

    def recover(self, half_id: HalfId) -> HalfId:
        self.note_round()
        return super().recover(half_id)

    def rows(self, *, topic: str = TOPIC) -> list[KeyRow]:
        """Return the known keys of a topic, by hash."""
        tables, topic_id = self.engine.key_tables, self.engine.catalog.topic_ids[topic]
        policy = tables.policy_of(topic_id)
        table = tables.tables.get(topic_id)
        if policy is None or table is None:
            return []
        now_ms = self.engine.key_tables.clock.now_ms
        known = [
            row
            for row in table.walk()
            if table.is_known(row, now_ms=now_ms, window_ms=policy.window_ms)
        ]
        return sorted(known)
