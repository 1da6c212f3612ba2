"""Sends and their answers: the results of messages, joined without objects of protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from tidemill.message.recall_handle import RecallFields
from tidemill.message.wire import bytes_field, bytes_header, varint, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.proxy.server.call import CallStatus
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.proxy.cluster.send_target import SendTarget
    from tidemill.proxy.link.commands import Appended
    from tidemill.proxy.server.call import Call
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

OK: Final = CallStatus(v2.OK, "OK")

# The outcome of one message: its status, and its encoded SendResultEntry. A plain tuple, since
# every send makes one.
Outcome: TypeAlias = tuple[CallStatus, bytes]
# Headers of SendMessageResponse.entries and SendResultEntry.message_id.
_ENTRY = bytes_header(2)
_ENTRY_MESSAGE_ID = bytes_header(2)


class MessageSend(NamedTuple):
    """One message to store, its target, and whether it may be repeated."""

    message_id: str
    message_group: str
    blob: bytes
    target: SendTarget
    may_repeat: bool  # whether to send it again to a broker that may have stored it
    is_delayed: bool
    key: bytes | None = None  # dedup key: its owner stores the message, and once
    first_check_ms: int | None = None  # of a half message; 0: the policy of the topic decides


def encode_stored_entry(
    broker: LinkedGroup,
    topic: str,
    message_id: str,
    appended: Appended,
    *,
    may_be_elsewhere: bool = False,
) -> bytes:
    """Join the SendResultEntry of a stored message.

    `may_be_elsewhere`: whether another broker group may have stored it as well.
    """
    queue_offset, due_at_ms, repeat = appended
    if repeat is not None:
        return encode_repeat(broker, topic, repeat, queue_offset, due_at_ms, message_id)
    if not due_at_ms:
        return encode_entry(OK, message_id, queue_offset)
    handle = ""
    if not may_be_elsewhere:
        # A handle names one timer. A second timer at another broker group would still fire.
        fields = RecallFields(queue_offset, due_at_ms, message_id)
        handle = broker.recall_signer.sign(topic, fields)
    return encode_entry(OK, message_id, recall_handle=handle)


def encode_repeat(
    broker: LinkedGroup,
    topic: str,
    repeat: link_pb2.RepeatedKey,
    queue_offset: int,
    due_at_ms: int,
    message_id: str,
) -> bytes:
    """Join the SendResultEntry of a message that repeats a dedup key: the first answer."""
    message_id = repeat.message_id or message_id
    handle = transaction_id = ""
    if due_at_ms:
        handle = broker.recall_signer.sign(topic, RecallFields(queue_offset, due_at_ms, message_id))
        queue_offset = 0
    if repeat.half_id:
        transaction_id = broker.transaction_signer.sign(repeat.half_id, topic, message_id)
    return encode_entry(OK, message_id, queue_offset, handle, transaction_id)


def encode_entry(
    status: CallStatus,
    message_id: str,
    queue_offset: int = 0,
    recall_handle: str = "",
    transaction_id: str = "",
) -> bytes:
    """Join the SendResultEntry of one message, with its header."""
    encoded_id = message_id.encode()
    entry = b"".join(
        (
            OK_STATUS if status is OK else status.encode(),
            _ENTRY_MESSAGE_ID,
            varint(len(encoded_id)),
            encoded_id,
            varint_field(4, queue_offset),
        )
    )
    if recall_handle:
        entry += bytes_field(5, recall_handle.encode())
    if transaction_id:
        entry += bytes_field(3, transaction_id.encode())
    return b"".join((_ENTRY, varint(len(entry)), entry))


def encode_response(call: Call, overall: CallStatus, *entries: bytes) -> bytes:
    """Join a SendMessageResponse: the overall status, and the entry of each message."""
    call.response_code = overall.code
    return b"".join((OK_STATUS if overall is OK else overall.encode(), *entries))
