"""REST models of stored messages, timers and dead letters, parsed from their stored encoding."""

from __future__ import annotations

import base64
from typing import Any

from tidemill.admin.json.dead_letters import DeadLetterDetailView, DeadLetterView
from tidemill.admin.json.messages import MessageView
from tidemill.admin.json.timers import TimerStateView, TimerView
from tidemill.admin.json.transactions import TransactionStateView, TransactionView
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb


def message_of(
    found: pb.FoundMessage, *, topic: str, broker: str, is_hidden: bool = False
) -> MessageView:
    """Return the model of a message found under `topic`.

    If it `is_hidden`, the model is without body, keys and properties.
    """
    fields = stored_message.decode(found.blob)
    system = v2.SystemProperties.FromString(found.blob[fields.system_at : fields.user_at])
    wire = v2.Message.FromString(found.blob[fields.user_at :])
    body = wire.body
    body_hidden = True if is_hidden else None
    shown = MessageView(
        message_id=system.message_id,
        topic=topic,
        stored_topic=found.stored_topic or topic,
        broker=broker,
        queue_id=found.queue_id,
        queue_offset=found.queue_offset,
        log_offset=found.log_offset,
        message_type=v2.MessageType.Name(system.message_type),
        tag=system.tag if system.HasField("tag") else None,
        message_group=system.message_group if system.HasField("message_group") else None,
        priority=system.priority if system.HasField("priority") else None,
        born_at_ms=fields.born_at_ms,
        born_host=system.born_host,
        stored_at_ms=found.stored_at_ms,
        deliver_at_ms=fields.due_at_ms or None,
        delivery_attempt=found.delivery_attempt,
        consumer_group=found.group or None,
        origin_topic=found.origin_topic or None,
        reason=found.reason or None,
        body_encoding=v2.Encoding.Name(system.body_encoding),
        body_size=len(body),
        body_hidden=body_hidden,
    )
    if body_hidden:
        return shown
    shown.keys = list(system.keys)
    shown.properties = dict(wire.user_properties)
    shown.body_base64 = base64.b64encode(body).decode()
    shown.body_text = _text(body)
    return shown


def timer_of(timer: pb.Timer, *, broker: str, with_keys: bool = True) -> TimerView:
    """Return the model of a timer, with the head of its message if it is still stored."""
    shown = TimerView(
        timer_id=timer.timer_id,
        broker=broker,
        state=TimerStateView(pb.TimerState.Name(timer.state).removeprefix("TIMER_STATE_")),
        topic=timer.topic or None,
        queue_id=timer.queue_id,
        due_at_ms=timer.due_at_ms,
        scheduled_at_ms=timer.scheduled_at_ms,
        size=timer.size,
    )
    if timer.head:
        # The head has the sizes of the whole message, so `decode` would reject it.
        fields = stored_message.StoredMessage._make(stored_message.FIXED.unpack_from(timer.head))
        system = v2.SystemProperties.FromString(timer.head[fields.system_at : fields.user_at])
        shown.message_id = system.message_id
        shown.tag = system.tag if system.HasField("tag") else None
        shown.keys = list(system.keys) if with_keys else []
        shown.born_at_ms = fields.born_at_ms
        shown.born_host = system.born_host
    return shown


def transaction_of(transaction: pb.Transaction, *, broker: str) -> TransactionView:
    """Return the model of a transaction."""
    is_open = transaction.state == pb.TRANSACTION_STATE_OPEN
    return TransactionView(
        transaction_id=transaction.transaction_id or None,
        broker=broker,
        state=TransactionStateView(
            pb.TransactionState.Name(transaction.state).removeprefix("TRANSACTION_STATE_")
        ),
        topic=transaction.topic or None,
        topic_deleted=transaction.is_topic_deleted,
        message_id=transaction.message_id or None,
        client_id=transaction.client_id or None,
        sent_at_ms=transaction.sent_at_ms or None,
        checks=transaction.checks,
        checks_max=transaction.checks_max,
        next_check_at_ms=transaction.time_ms if is_open else None,
        ended_at_ms=None if is_open else transaction.time_ms,
    )


def dead_letter_of(letter: pb.DeadLetter, *, broker: str, with_keys: bool) -> DeadLetterView:
    """Return the model of a dead letter, with the head of its message if that can be read."""
    return DeadLetterView(**_letter_fields(letter, broker, with_keys=with_keys))


def dead_letter_detail_of(
    found: pb.GetDeadLetterReply, *, broker: str, is_hidden: bool
) -> DeadLetterDetailView:
    """Return the model of a dead letter with its message.

    If it `is_hidden`, the model is without body, keys and properties.
    """
    shown = DeadLetterDetailView(**_letter_fields(found.letter, broker, with_keys=not is_hidden))
    shown.body_hidden = True if is_hidden else None
    if not found.blob:
        return shown
    fields = stored_message.decode(found.blob)
    system = v2.SystemProperties.FromString(found.blob[fields.system_at : fields.user_at])
    shown.born_at_ms, shown.born_host = fields.born_at_ms, system.born_host
    shown.body_encoding = v2.Encoding.Name(system.body_encoding)
    if is_hidden:
        return shown
    wire = v2.Message.FromString(found.blob[fields.user_at :])
    shown.properties = dict(wire.user_properties)
    shown.body_base64 = base64.b64encode(wire.body).decode()
    shown.body_text = _text(wire.body)
    return shown


def _letter_fields(letter: pb.DeadLetter, broker: str, *, with_keys: bool) -> dict[str, Any]:
    shown: dict[str, Any] = {
        "id": f"{broker}:{letter.offset}",
        "broker": broker,
        "group": letter.group,
        "state": pb.DeadLetterState.Name(letter.state).removeprefix("DEAD_LETTER_STATE_"),
        "reason": letter.reason.upper(),
        "origin_topic": letter.origin_topic,
        "topic_deleted": letter.is_topic_deleted,
        "body_size": letter.body_size,
        "attempts": letter.attempts,
        "replays": letter.replays,
        "first_failed_at_ms": letter.first_popped_at_ms or None,
        "dead_at_ms": letter.dead_at_ms or None,
        "settled_at_ms": letter.settled_at_ms or None,
        "settled_by": letter.settled_by or None,
    }
    if letter.head:
        fields = stored_message.StoredMessage._make(stored_message.FIXED.unpack_from(letter.head))
        system = v2.SystemProperties.FromString(letter.head[fields.system_at : fields.user_at])
        shown["message_id"] = system.message_id
        shown["tag"] = system.tag if system.HasField("tag") else None
        shown["message_group"] = system.message_group if system.HasField("message_group") else None
        shown["keys"] = list(system.keys) if with_keys else None
    return shown


def _text(body: bytes) -> str | None:
    try:
        return body.decode("utf-8")
    except UnicodeDecodeError:
        return None
