"""The answers to sends: the results of messages, joined without objects of protobuf."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from tidemill.message.recall_handle import RecallFields
from tidemill.message.wire import bytes_field, bytes_header, varint, varint_field
from tidemill.proxy.message_codec import OK_STATUS
from tidemill.proxy.server.call import CallStatus
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2

if TYPE_CHECKING:
    from tidemill.proxy.cluster.linked_group import LinkedGroup
    from tidemill.proxy.server.call import Call
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

OK: Final = CallStatus(v2.OK, "OK")
# Headers of SendMessageResponse.entries and SendResultEntry.message_id.
_ENTRY = bytes_header(2)
_ENTRY_MESSAGE_ID = bytes_header(2)


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
