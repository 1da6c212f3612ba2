"""Half messages in a world of the engine."""

from __future__ import annotations

import struct
from zlib import crc32

from tests.support.bodies import text_of
from tests.support.worlds.engine_world import TOPIC, World, blob
from tidemill.broker.engine.layout.numbers import HalfId, QueueId
from tidemill.broker.engine.layout.transaction import TransactionState
from tidemill.broker.engine.metadata.catalog import TopicType
from tidemill.broker.engine.metadata.transaction_policy import PolicyChange
from tidemill.broker.engine.transaction.transactions import HalfSender
from tidemill.common.errors import TransactionNotFound
from tidemill.message import stored_message
from tidemill.message.client_key import ClientKey

SENDER = ClientKey("producer-1", 7)


class TransactionWorld(World):
    """A world with half messages; each command is a round."""

    def set_policy(self, change: PolicyChange, *, topic: str = TOPIC) -> None:
        """Change the checks of a topic."""
        self.engine.administration.put_topic(
            topic, type_=TopicType.MIXED, queues=1, transaction=change, now_ms=self.now_ms
        )
        self.commit()

    def half(
        self,
        text: str,
        *,
        topic: str = TOPIC,
        due_at_ms: int = 0,
        first_check_ms: int | None = None,
        size: int = 0,
    ) -> HalfId:
        """Send a half message."""
        topic_id = self.topic(topic)
        data = bytearray(blob(text, kind=stored_message.TYPE_TRANSACTION, size=size))
        struct.pack_into(">q", data, stored_message.DUE_AT, due_at_ms)
        half_id, _ = self.engine.commands.send(
            topic_id,
            QueueId(0),
            bytes(data),
            crc32(data),
            now_ms=self.now_ms,
            firing_ms=self.now_ms,
            sender=HalfSender(SENDER, first_check_ms),
        )
        self.commit()
        return HalfId(half_id)

    def commit_half(self, half_id: HalfId) -> None:
        """Commit a half message."""
        self.engine.transactions.commit(half_id, now_ms=self.now_ms, firing_ms=self.now_ms)
        self.commit()

    def roll_back(self, half_id: HalfId) -> None:
        """Roll a half message back."""
        self.engine.transactions.roll_back(half_id, now_ms=self.now_ms)
        self.commit()

    def recover(self, half_id: HalfId) -> HalfId:
        """Open an expired half message again."""
        recovered = self.engine.transactions.recover(half_id, now_ms=self.now_ms)
        self.commit()
        return recovered

    def state(self, half_id: HalfId) -> TransactionState | None:
        """Return the state of a transaction; None if it is unknown."""
        try:
            return self.engine.transactions.status(half_id).state
        except TransactionNotFound:
            return None

    def take_checks(self) -> dict[HalfId, str]:
        """Return the due checks with the bodies of their messages."""
        self.run_due()
        checks = {}
        half_checks = self.engine.half_checks
        for topic_id in list(half_checks.due):
            while (check := half_checks.take_check(topic_id, self.now_ms)) is not None:
                checks[check.half_id] = text_of(check.blob)
        return checks

    def write_checks(self) -> dict[HalfId, str]:
        """Take the due checks, and report that producers' streams have taken all of them."""
        checks = self.take_checks()
        for half_id in checks:
            self.engine.half_checks.note_written(half_id, self.now_ms)
        self.commit()
        return checks
