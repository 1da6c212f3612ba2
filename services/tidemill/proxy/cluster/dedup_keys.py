"""The dedup keys of messages, as proxies read them to choose the broker group (ADR 0087)."""

from __future__ import annotations

from typing import NamedTuple

from tidemill.message.dedup_key import DEDUP_PROPERTY, check_key, read_fields
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2


class StoredKey(NamedTuple):
    """The dedup key of an encoded message."""

    key: bytes
    is_message_id: bool
    body_crc: int


def dedup_key_of(message: v2.Message, policy: link_pb2.DedupPolicy) -> bytes | None:
    """Return the dedup key of a message; None if it is not checked. Raises IllegalPropertyKey."""
    if policy.key_from != link_pb2.DEDUP_KEY_SOURCE_MESSAGE_ID:
        if DEDUP_PROPERTY in message.user_properties:
            return check_key(message.user_properties[DEDUP_PROPERTY].encode())
        if policy.key_from == link_pb2.DEDUP_KEY_SOURCE_PROPERTY:
            return None
    return message.system_properties.message_id.encode()


def find_stored_key(blob: bytes, topic: link_pb2.TopicConfig) -> StoredKey | None:
    """Return the dedup key of an encoded message, as brokers with this topic read it.

    None: the topic does not check the message. Raises IllegalPropertyKey.
    """
    if not topic.HasField("dedup"):
        return None
    fields, key_from = read_fields(blob), topic.dedup.key_from
    if fields.key is not None and key_from != link_pb2.DEDUP_KEY_SOURCE_MESSAGE_ID:
        return StoredKey(check_key(fields.key), False, fields.body_crc)
    if key_from == link_pb2.DEDUP_KEY_SOURCE_PROPERTY:
        return None
    return StoredKey(fields.message_id, True, fields.body_crc)
