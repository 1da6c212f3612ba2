"""Names of topics by id, from the log and the snapshots, those of deleted topics included."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, final

from tidemill.broker.engine.layout import config, state
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.timer_checkpoint import UUID_SIZE
from tidemill.broker.offline.log_scan import IntactRecord
from tidemill.message.resource_names import TIMER_TOPIC


@final
class TopicNames:
    """The configuration of a store, as far as a check needs it."""

    def __init__(self) -> None:
        self._topics: dict[int, str] = {}
        self.handle_secret = ""  # identifies the store

    def learn(self, item: dict[str, Any]) -> None:
        """Read one configuration item."""
        match item.get("op"):
            case "topic":
                self._topics[item["topic"]["id"]] = item["topic"]["name"]
            case "broker":
                self.handle_secret = item["handleSecret"]

    def learn_record(self, found: IntactRecord) -> None:
        """Read a configuration record; skip any other record."""
        if found.header.kind == RecordKind.CONFIG:
            self.learn(config.decode_item(found.body))
        elif found.header.kind == RecordKind.STATE and found.body[0] == state.StateKind.CONFIG:
            self.learn(config.decode_item(found.tail))

    def topic(self, topic_id: int) -> str:
        """Return a topic's name, or its id if the name is unknown."""
        return self._topics.get(topic_id, f"(topic {topic_id})")

    @property
    def timer_topic_id(self) -> int | None:
        """The hidden topic of pending delayed messages."""
        return next((id_ for id_, name in self._topics.items() if name == TIMER_TOPIC), None)

    @property
    def store_uuid(self) -> bytes:
        """The identity of this store in the timer files; b"" if it is unknown."""
        secret = bytes.fromhex(self.handle_secret)
        return blake2b(secret, digest_size=UUID_SIZE, person=b"store").digest() if secret else b""
