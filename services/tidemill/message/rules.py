"""Rules for the content, the size and the topic of a message.

The limits are those of the public protocol, so applications behave as with other servers.
"""

from __future__ import annotations

import re
from hashlib import md5, sha1
from zlib import crc32

from tidemill.common.errors import (
    BadRequest,
    IllegalKey,
    IllegalMessageGroup,
    IllegalMessageId,
    IllegalPropertyKey,
    IllegalTag,
    MessageBodyEmpty,
    MessageBodyTooLarge,
    MessageCorrupted,
    MessageTypeConflict,
    NotBuilt,
)
from tidemill.common.item_bytes import DELIVERY_BYTES
from tidemill.message import limits
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
RESERVED_PROPERTY_KEYS = _words(
    """
    TRACE_ON MSG_REGION KEYS TAGS WAIT DELAY RETRY_TOPIC REAL_TOPIC REAL_QID TRAN_MSG PGROUP
    MIN_OFFSET MAX_OFFSET BUYER_ID ORIGIN_MESSAGE_ID TRANSFER_FLAG CORRECTION_FLAG MQ2_FLAG
    RECONSUME_TIME UNIQ_KEY MAX_RECONSUME_TIMES CONSUME_START_TIME POP_CK POP_CK_OFFSET
    1ST_POP_TIME TRAN_PREPARED_QUEUE_OFFSET DUP_INFO EXTEND_UNIQ_INFO INSTANCE_ID
    CORRELATION_ID REPLY_TO_CLIENT TTL ARRIVE_TIME PUSH_REPLY_TIME CLUSTER MSG_TYPE
    INNER_MULTI_QUEUE_OFFSET TIMER_DELAY_MS TIMER_DELAY_SEC TIMER_DELIVER_MS
    TIMER_ENQUEUE_MS TIMER_DEQUEUE_MS TIMER_ROLL_TIMES TIMER_OUT_MS TIMER_DEL_UNIQKEY
    TIMER_DELAY_LEVEL TIMER_ROLL_LABEL __STARTDELIVERTIME
    __BORNHOST BORN_TIMESTAMP DLQ_ORIGIN_TOPIC DLQ_ORIGIN_MESSAGE_ID __CRC32#
    """
)

# Of the first check of a half message. A shorter duration counts as the minimum.
FIRST_CHECK_MS_MIN = 1_000
FIRST_CHECK_MS_MAX = 3_600_000

_ACCEPTED_TYPES: dict[int, list[v2.MessageType.ValueType]] = {
    link_pb2.TOPIC_TYPE_UNSPECIFIED: [v2.NORMAL],
    link_pb2.TOPIC_TYPE_NORMAL: [v2.NORMAL],
    link_pb2.TOPIC_TYPE_FIFO: [v2.FIFO],
    link_pb2.TOPIC_TYPE_DELAY: [v2.DELAY],
    link_pb2.TOPIC_TYPE_TRANSACTION: [v2.TRANSACTION],
    link_pb2.TOPIC_TYPE_LITE: [v2.LITE],
    link_pb2.TOPIC_TYPE_PRIORITY: [v2.PRIORITY, v2.NORMAL, v2.DELAY],
    link_pb2.TOPIC_TYPE_MIXED: [v2.NORMAL, v2.FIFO, v2.DELAY, v2.TRANSACTION],
}
SERVED_TYPES = frozenset({v2.NORMAL, v2.FIFO, v2.DELAY, v2.TRANSACTION, v2.PRIORITY})


def check_message(message: v2.Message) -> None:
    """Raise the error for invalid names or sizes in `message`, if there are any."""
    properties = message.system_properties
    check_message_id(properties.message_id)
    limits.BORN_HOST.check_text(properties.born_host)
    tag, keys = properties.tag, properties.keys
    limits.KEYS.check_count(len(keys))
    # An empty tag means that there is none.
    if tag:
        check_tag(tag)
    for key in keys:
        check_key(key)
    if properties.HasField("message_group"):
        check_message_group(properties.message_group)
    if tag or keys or message.user_properties:
        check_properties(message, tag)
    check_body(message.body)
    if properties.HasField("body_digest"):
        check_digest(properties.body_digest, message.body)


def check_message_id(message_id: str) -> None:
    """Raise IllegalMessageId for a blank or long id; other ids are valid."""
    if not message_id.strip():
        raise IllegalMessageId("the message id is blank")
    limits.MESSAGE_ID.check_text(message_id)


def check_tag(tag: str) -> None:
    """Raise IllegalTag unless a filter can select `tag`: sends and filters have the same rule.

    The tag `*` is allowed, as in RocketMQ. The filter `*` selects it with all other messages,
    and the SQL filter `TAGS = '*'` selects it alone.
    """
    if not tag.strip():
        raise IllegalTag("the message tag is blank")
    if tag != tag.strip():
        raise IllegalTag("a message tag must not begin or end with a blank, which filters ignore")
    limits.TAG.check_text(tag)
    if "|" in tag:
        raise IllegalTag("a message tag must not contain |, which separates tags in a filter")
    if _CONTROL_CHARACTER.search(tag):
        raise IllegalTag("a message tag must not contain control characters")


def check_key(key: str) -> None:
    """Raise IllegalKey for a blank key or control characters."""
    if not key.strip():
        raise IllegalKey("a message key is blank")
    if _CONTROL_CHARACTER.search(key):
        raise IllegalKey("a message key must not contain control characters")


def check_message_group(group: str) -> None:
    """Raise IllegalMessageGroup for a blank or long name or control characters."""
    if not group.strip():
        raise IllegalMessageGroup("the message group is blank")
    limits.MESSAGE_GROUP.check_text(group)
    if _CONTROL_CHARACTER.search(group):
        raise IllegalMessageGroup("a message group must not contain control characters")


def check_properties(message: v2.Message, tag: str) -> None:
    """Check the user properties and their total size with tag and keys."""
    properties_bytes = len(tag.encode())
    for key in message.system_properties.keys:
        properties_bytes += len(key.encode())
    user_properties = message.user_properties
    if user_properties:
        limits.USER_PROPERTIES.check_count(len(user_properties))
        for name, value in user_properties.items():
            if name in RESERVED_PROPERTY_KEYS:
                raise IllegalPropertyKey(f"the user property {name} is reserved")
            if _CONTROL_CHARACTER.search(name) or _CONTROL_CHARACTER.search(value):
                raise IllegalPropertyKey("user properties must not contain control characters")
            properties_bytes += len(name.encode()) + len(value.encode())
    limits.PROPERTIES.check_count(properties_bytes)


def check_body(body: bytes) -> None:
    """Check the size of a body as sent."""
    if not body:
        raise MessageBodyEmpty("the message has no body")
    limits.BODY.check_count(len(body))


def check_digest(digest: v2.Digest, body: bytes) -> None:
    """Raise MessageCorrupted if a body is not the one that its sender has hashed.

    Consumers get a digest of the stored body. It must not vouch for another body. Clients write
    CRC32 in three ways.
    """
    if not digest.checksum:
        return
    match digest.type:
        case v2.MD5:
            expected = [md5(body, usedforsecurity=False).hexdigest()]
        case v2.SHA1:
            expected = [sha1(body, usedforsecurity=False).hexdigest()]
        case v2.CRC32:
            checksum = crc32(body)
            expected = [f"{checksum:x}", f"{checksum:08x}", f"{checksum}"]
        case other:
            raise BadRequest(f"unknown type {other} of the body digest; use MD5, SHA1 or CRC32")
    if digest.checksum.lower() not in expected:
        raise MessageCorrupted("the body does not match its digest; send the message again")


def check_item(blob: bytes, item_bytes_max: int) -> None:
    """Raise MessageBodyTooLarge if a stored message would be too large for clients to receive."""
    size_bytes = len(blob) + DELIVERY_BYTES
    if size_bytes > item_bytes_max:
        raise MessageBodyTooLarge(
            f"the message takes {size_bytes} bytes when it is received, with its properties and its"
            f" handle; the limit is {item_bytes_max} (message_item_bytes_max)"
        )


def message_type(properties: v2.SystemProperties) -> v2.MessageType.ValueType:
    """Return the type that the properties of a message imply.

    Raises MessageTypeConflict if the properties contradict each other or the declared type, and
    BadRequest for a negative priority.
    """
    declared = properties.message_type
    found: list[v2.MessageType.ValueType] = []
    # A transaction may have a delivery time: its message is scheduled by the commit.
    if properties.HasField("delivery_timestamp") and declared != v2.TRANSACTION:
        found.append(v2.DELAY)
    if properties.HasField("message_group"):
        found.append(v2.FIFO)
    if properties.HasField("lite_topic"):
        found.append(v2.LITE)
    if properties.HasField("priority"):
        if properties.priority < 0:
            raise BadRequest(f"priority is {properties.priority}; it must be 0 or higher")
        # A delayed message with a priority has type DELAY, and its topic must be a PRIORITY topic.
        if found != [v2.DELAY]:
            found.append(v2.PRIORITY)
    if declared == v2.TRANSACTION:
        found.append(v2.TRANSACTION)
    if len(found) > 1:
        names = " and ".join(v2.MessageType.Name(kind) for kind in found)
        raise MessageTypeConflict(
            f"a message has one type; the properties of this one imply {names}"
        )
    derived = found[0] if found else v2.NORMAL
    if derived != v2.TRANSACTION and properties.HasField("orphaned_transaction_recovery_duration"):
        raise MessageTypeConflict(
            "the message has an orphaned_transaction_recovery_duration and is not transactional;"
            " declare type TRANSACTION, or remove the duration"
        )
    if declared == derived:
        return derived
    if properties.HasField("priority"):
        if derived == v2.DELAY and declared == v2.PRIORITY:
            return derived
        if derived == v2.PRIORITY and declared == v2.NORMAL and not properties.priority:
            return declared  # Node.js declares the type NORMAL for a priority of 0.
    if declared not in (v2.MESSAGE_TYPE_UNSPECIFIED, derived):
        raise MessageTypeConflict(
            f"the message declares type {type_name(declared)}, and its properties imply"
            f" {type_name(derived)}"
        )
    return derived


def type_for_topic(
    kind: v2.MessageType.ValueType, properties: v2.SystemProperties
) -> v2.MessageType.ValueType:
    """Return the type that a topic must accept to store a message of type `kind`.

    Only a topic of type PRIORITY stores a delayed message with a priority.
    """
    return v2.PRIORITY if properties.HasField("priority") else kind


def first_check_ms(properties: v2.SystemProperties) -> int:
    """Return the time until the first check of a half message; 0 if the message has none.

    Raises BadRequest.
    """
    if not properties.HasField("orphaned_transaction_recovery_duration"):
        return 0
    duration = properties.orphaned_transaction_recovery_duration
    duration_ms = duration.seconds * 1_000 + duration.nanos // 1_000_000
    if not 0 < duration_ms <= FIRST_CHECK_MS_MAX:
        raise BadRequest(
            f"orphaned_transaction_recovery_duration is {duration_ms} ms; it must be positive and"
            f" at most {FIRST_CHECK_MS_MAX} ms"
        )
    return max(duration_ms, FIRST_CHECK_MS_MIN)


def accepted_types(topic_type: link_pb2.TopicType.ValueType) -> list[v2.MessageType.ValueType]:
    """Return the message types that a topic of this type accepts."""
    return _ACCEPTED_TYPES[topic_type]


def advertised_types(topic_type: link_pb2.TopicType.ValueType) -> list[v2.MessageType.ValueType]:
    """Return the message types in a route: those that are served, or the only one of the topic."""
    accepted = _ACCEPTED_TYPES[topic_type]
    return [kind for kind in accepted if kind in SERVED_TYPES] or accepted


def check_type(
    kind: v2.MessageType.ValueType,
    topic: str,
    topic_type: link_pb2.TopicType.ValueType,
    *,
    exists: bool,
) -> None:
    """Raise MessageTypeConflict or NotBuilt unless `topic` accepts messages of this type.

    `kind` is `type_for_topic` of the message. A missing topic has the type that its first use would
    give to it.
    """
    command = f"tidemill topic {'set' if exists else 'create'} {topic}"
    if kind not in accepted_types(topic_type):
        accepted = ", ".join(type_name(accepted) for accepted in accepted_types(topic_type))
        text = f"the topic {topic} accepts messages of type {accepted}, not {type_name(kind)}"
        if kind == v2.PRIORITY:
            text += f"; to accept priorities, run `{command} --type PRIORITY`"
        elif topic_type != link_pb2.TOPIC_TYPE_PRIORITY and kind in accepted_types(
            link_pb2.TOPIC_TYPE_MIXED
        ):
            text += f"; to accept both, run `{command} --type MIXED`"
        raise MessageTypeConflict(text)
    if kind not in SERVED_TYPES:
        raise NotBuilt(f"messages of type {type_name(kind)} are not served yet")


def type_name(kind: v2.MessageType.ValueType) -> str:
    """Return the name of a message type for people."""
    # A newer client may declare an unknown type.
    return v2.MessageType.Name(kind) if kind in v2.MessageType.values() else str(kind)
