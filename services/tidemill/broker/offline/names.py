"""Names by id, as the log and the snapshots say them: topics that were deleted keep theirs."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, final

from tidemill.broker.engine.layout import config, state
from tidemill.broker.engine.layout.record import RecordKind
from tidemill.broker.engine.layout.timer_checkpoint import UUID_SIZE
from tidemill.broker.engine.timer.status import TIMER_TOPIC
from tidemill.broker.offline.log_scan import Intact


@final
class Names:
    """What the configuration of a store says, as far as a check needs it."""

    def __init__(self) -> None:
        self._topics: dict[int, str] = {}
        self.handle_secret = ""  # which store it is: made once in its life

    def learn(self, item: dict[str, Any]) -> None:
        """Take in one configuration item."""
        match item.get("op"):
            case "topic":
                self._topics[item["topic"]["id"]] = item["topic"]["name"]
            case "broker":
                self.handle_secret = item["handleSecret"]

    def learn_record(self, found: Intact) -> None:
        """Take in a record of configuration; what is none is passed over."""
        if found.header.kind == RecordKind.CONFIG:
            self.learn(config.decode_item(found.body))
        elif found.header.kind == RecordKind.STATE and found.body[0] == state.StateKind.CONFIG:
            self.learn(config.decode_item(found.tail))

    def topic(self, topic_id: int) -> str:
        """Return a topic's name, or its number where nothing says the name."""
        return self._topics.get(topic_id, f"(topic {topic_id})")

    @property
    def timer_topic_id(self) -> int | None:
        """The hidden topic on which delayed messages wait."""
        return next((id_ for id_, name in self._topics.items() if name == TIMER_TOPIC), None)

    @property
    def store_uuid(self) -> bytes:
        """What the timer files call this store, b"" where nothing says so."""
        secret = bytes.fromhex(self.handle_secret)
        return blake2b(secret, digest_size=UUID_SIZE, person=b"store").digest() if secret else b""
