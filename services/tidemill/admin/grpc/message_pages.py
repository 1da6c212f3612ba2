"""A page of stored messages, as messages of the protocol, with limits of count and bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from tidemill.admin.grpc.topic_calls import timestamp_of
from tidemill.message import stored_message
from tidemill.security.acl import Action
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from tidemill.admin.grpc.calls import AdminCall
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

# Of all messages of a page but a single one: gRPC clients accept 4 MiB by default.
PAGE_BYTES_MAX: Final = (4 << 20) - (64 << 10)


@final
class MessagePage:
    """The messages of one answer."""

    def __init__(self, call: AdminCall, limit: int) -> None:
        self._call = call
        self.limit = limit
        self.messages: list[v2.Message] = []
        self.size_bytes = 0

    def add(self, found: pb.FoundMessage) -> bool:
        """Add a message; return False if the page has no room for it."""
        if len(self.messages) >= self.limit:
            return False
        message = self._message_of(found)
        size_bytes = message.ByteSize()
        if self.messages and self.size_bytes + size_bytes > PAGE_BYTES_MAX:
            return False
        self.messages.append(message)
        self.size_bytes += size_bytes
        return True

    @property
    def is_full(self) -> bool:
        """Whether the page has no room for another message."""
        return len(self.messages) >= self.limit or self.size_bytes >= PAGE_BYTES_MAX

    def _message_of(self, found: pb.FoundMessage) -> v2.Message:
        """Return a stored message. Without Sub on its topic: no body, keys and properties."""
        fields = stored_message.decode(found.blob)
        system = v2.SystemProperties.FromString(found.blob[fields.system_at : fields.user_at])
        message = v2.Message.FromString(found.blob[fields.user_at :])
        topic = found.stored_topic or self._call.topic
        if not self._call.access.allows_topic(Action.SUB, topic):
            message.Clear()
            system.ClearField("keys")
            system.ClearField("body_digest")  # It would prove a guessed body.
        system.store_timestamp.CopyFrom(timestamp_of(found.stored_at_ms))
        system.queue_id = found.queue_id
        system.queue_offset = found.queue_offset
        system.delivery_attempt = found.delivery_attempt
        if fields.due_at_ms:
            system.delivery_timestamp.CopyFrom(timestamp_of(fields.due_at_ms))
        message.topic.CopyFrom(self._call.resource(topic))
        message.system_properties.CopyFrom(system)
        return message
