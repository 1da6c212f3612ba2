"""The message of a copy of a dead letter: that of the dead letter, with changes."""

from __future__ import annotations

import base64
from typing import Final

from tidemill.admin.json.dead_letters import DeadLetterCopyRequest
from tidemill.admin.json.messages import NewMessage
from tidemill.common.errors import BadRequest
from tidemill.message import stored_message
from tidemill.message.dedup_key import DEDUP_PROPERTY
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

COPY_OF: Final = "TIDEMILL_COPY_OF"  # user property of a copy: the id of the copied message


def changed_message(found: pb.GetDeadLetterReply, changes: DeadLetterCopyRequest) -> NewMessage:
    """Return the message of a copy. Raises BadRequest if it has no body."""
    has_body = changes.body is not None or changes.body_base64 is not None
    head = found.letter.head
    if head:
        fields = stored_message.StoredMessage._make(stored_message.FIXED.unpack_from(head))
        system = v2.SystemProperties.FromString(head[fields.system_at : fields.user_at])
    else:
        system = v2.SystemProperties()
    is_damaged = not found.blob or found.letter.reason == "damaged"
    if is_damaged and not has_body:
        raise BadRequest("the body of the dead letter is lost; give the copy another body")
    message = v2.Message() if not found.blob else _message_of(found.blob)
    if not has_body and system.body_encoding != v2.IDENTITY:
        raise BadRequest("the body of the dead letter is compressed; give the copy another body")
    properties = changes.properties
    if properties is None:
        # The copy is another message: with the dedup key it would be a repeat, and not be stored.
        kept = message.user_properties.items()
        properties = {name: value for name, value in kept if name != DEDUP_PROPERTY}
    body_base64 = changes.body_base64
    if not has_body:
        body_base64 = base64.b64encode(message.body).decode()
    return NewMessage(
        body=changes.body,
        body_base64=body_base64,
        tag=changes.tag if changes.tag is not None else (system.tag or None),
        keys=list(system.keys) if changes.keys is None else changes.keys,
        properties={**properties, COPY_OF: system.message_id},
        message_group=system.message_group or None,
        priority=system.priority if system.HasField("priority") else None,
    )


def _message_of(blob: bytes) -> v2.Message:
    fields = stored_message.decode(blob)
    return v2.Message.FromString(blob[fields.user_at :])
