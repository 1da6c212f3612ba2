"""The dedup keys of messages, as proxies read them to choose the broker group (ADR 0087)."""

from __future__ import annotations

from tidemill.message.dedup_key import DEDUP_PROPERTY, check_key
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2


def dedup_key_of(message: v2.Message, policy: link_pb2.DedupPolicy) -> bytes | None:
    """Return the dedup key of a message; None if it is not checked. Raises IllegalPropertyKey."""
    if policy.key_from != link_pb2.DEDUP_KEY_SOURCE_MESSAGE_ID:
        if DEDUP_PROPERTY in message.user_properties:
            return check_key(message.user_properties[DEDUP_PROPERTY].encode())
        if policy.key_from == link_pb2.DEDUP_KEY_SOURCE_PROPERTY:
            return None
    return message.system_properties.message_id.encode()
