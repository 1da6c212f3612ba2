"""The JSON of messages."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final

from pydantic import Field, StrictInt

from tidemill.admin.json.schema import (
    BROKER,
    EXACT_MAX,
    MAX_OFFSET,
    MIN_OFFSET,
    UNREACHABLE,
    ExclusiveSchema,
    IsoTime,
    LimitedSize,
    Schema,
    Text,
    millis_of,
)
from tidemill.message import limits

# Documented patterns. The rules of messages refuse other texts, with codes of their own.
_CONTROL = "\\x00-\\x1f\\x7f-\\x9f"
_ANY_TEXT = f"^[^{_CONTROL}]*$"
_NOT_BLANK = f"^[^\\s{_CONTROL}][^{_CONTROL}]*$"
_TAG = f"^[^\\s*|{_CONTROL}]([^|{_CONTROL}]*[^\\s|{_CONTROL}])?$"
Body = Annotated[Text, Field(json_schema_extra={"minLength": 1})]
Tag = Annotated[Text, Field(json_schema_extra={"pattern": _TAG})]
Key = Annotated[Text, Field(json_schema_extra={"pattern": _NOT_BLANK})]
MessageGroup = Annotated[
    Text, Field(json_schema_extra={"pattern": _NOT_BLANK, "maxLength": limits.MESSAGE_GROUP.limit})
]
PropertyText = Annotated[Text, Field(json_schema_extra={"pattern": _ANY_TEXT})]
Base64 = Annotated[
    str,
    Field(
        json_schema_extra={
            "contentEncoding": "base64",
            "minLength": 1,
            "pattern": "^([A-Za-z0-9+/]{4})*([A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
        }
    ),
]


PRIORITY_MAX: Final = (1 << 31) - 1  # an int32 of the protocol


class MessageEventView(Schema):
    """One event of a message."""

    event: str = Field(
        description="stored, scheduled, fired, recalled, moved, delivered, acked, renewed, nacked,"
        " revived, dead_lettered, replayed, discarded, expired or reset."
    )
    at_ms: int = Field(description="Time of the event (Unix, ms), by the clock of the broker.")
    broker: str = BROKER
    position: int = Field(description="Position of its record in the log of the broker group.")
    index: int = Field(description="Index of the event within its record, from 0.")
    topic: str = Field(description="Topic of the message at this event.")
    queue_id: int = Field(description="Number of the queue, from 0.")
    queue_offset: int = Field(
        description="Offset in the queue. Of a pending delayed message: its timer id."
    )
    consumer_group: str | None = Field(None, description="Consumer group of the delivery.")
    attempt: int | None = Field(None, description="Delivery attempt, from 1.")
    due_at_ms: int | None = Field(
        None,
        description="Due time of a delayed message, or end of the invisible duration (Unix, ms).",
    )
    client_id: str | None = Field(None, description="Client that received the message.")
    reason: str | None = Field(None, description="Reason in one word.")
    origin_topic: str | None = Field(None, description="Of a copy: topic of the original message.")
    body_size: int | None = Field(None, description="Stored bytes of the body.")


class MessageTraceView(Schema):
    """A part of the trace of a message."""

    events: list[MessageEventView] = Field(
        description="The events, in the order of the log of each broker group."
    )
    cursor: str | None = Field(
        None, description="Cursor for the next call. Missing if the logs are read."
    )
    read_bytes: int = Field(description="Bytes of log that this call read.")
    left_bytes: int = Field(description="Bytes of log that are not read yet.")
    damaged_bytes: dict[str, int] | None = Field(
        None, description="Damaged bytes by broker group. Their events are unknown."
    )
    unreachable: list[str] | None = UNREACHABLE


class NewMessage(ExclusiveSchema):
    """A message to send, with one kind of body and at most one kind of delivery time."""

    exactly_one = ("body", "body_base64")
    at_most_one = ("deliver_at_ms", "deliver_at", "delay_ms", "delay_level")

    body: Body | None = Field(None, description="The body as text, stored as UTF-8.")
    body_base64: Base64 | None = Field(None, description="The body as bytes.")
    tag: Tag | None = Field(None, description="Tag for the filters of consumers.")
    keys: Annotated[list[Key], LimitedSize] = Field(
        [], description="Keys for searches.", json_schema_extra={"maxItems": limits.KEYS.limit}
    )
    properties: Annotated[dict[Text, PropertyText], LimitedSize] = Field(
        {},
        description="Properties for consumers.",
        json_schema_extra={
            "maxProperties": limits.USER_PROPERTIES.limit,
            "propertyNames": {"pattern": _ANY_TEXT},
        },
    )
    message_group: MessageGroup | None = Field(
        None, description="Messages of one message group are delivered in order."
    )
    deliver_at_ms: StrictInt | None = Field(
        None, ge=-EXACT_MAX, le=EXACT_MAX, description="Earliest delivery time (Unix, ms)."
    )
    deliver_at: IsoTime | None = Field(None, description="The same as a time with a zone.")
    delay_ms: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="Delay of the delivery after storage, in ms."
    )
    priority: StrictInt | None = Field(
        None,
        ge=0,
        le=PRIORITY_MAX,
        description="A message with a higher priority is delivered earlier. Only topics of type"
        " PRIORITY accept it.",
    )
    delay_level: StrictInt | None = Field(
        None,
        ge=1,
        le=EXACT_MAX,
        description="One of 18 delays from 1 s to 2 h. A higher level means the 18th.",
    )

    @property
    def due_at_ms(self) -> int | None:
        """The delivery time from either field; None without one."""
        return millis_of(self.deliver_at) if self.deliver_at else self.deliver_at_ms


class SentMessageView(Schema):
    """The position of a sent message: in a queue, or in a timer until it is due."""

    message_id: str = Field(description="Id of the message, for searches.")
    broker: str = Field(description="Name of the broker group that stores it.")
    queue_id: int = Field(description="Its queue, also if it is delayed.")
    queue_offset: int | None = Field(
        None, description="Offset in the queue. Missing if it is delayed."
    )
    timer_id: int | None = Field(None, description="Id of the timer of a delayed message.")
    deliver_at_ms: int | None = Field(None, description="Delivery time (Unix, ms).")
    recall_handle: str | None = Field(
        None, description="Handle with which a producer recalls the message."
    )
    duplicate: bool | None = Field(
        None,
        description="Whether an earlier message has the dedup key. If true, nothing was stored, and"
        " this is the answer to that message. Missing for a message without `Idempotency-Key` that"
        " is stored.",
    )


class BatchLine(NewMessage):
    """A line of a batch: a message, and its dedup key."""

    idempotency_key: Text | None = Field(
        None,
        description="Dedup key of the message, as the header Idempotency-Key of a single send.",
    )


class LineOutcome(StrEnum):
    """What became of a line."""

    STORED = "STORED"
    DUPLICATE = "DUPLICATE"
    REFUSED = "REFUSED"
    UNKNOWN = "UNKNOWN"
    NOT_SENT = "NOT_SENT"


class LineOutcomeView(Schema):
    """The outcome of one line of a batch."""

    outcome: LineOutcome = Field(
        description="DUPLICATE: an earlier message has the dedup key. UNKNOWN: the broker did not"
        " answer, so the message may be stored. NOT_SENT: an earlier line is UNKNOWN."
    )
    message: SentMessageView | None = Field(
        None, description="The message. Missing if it is not known to be stored."
    )
    title: str | None = Field(None, description="Name of the error, as in a problem document.")
    detail: str | None = Field(None, description="What failed, why, and what to do.")
    code: int | None = Field(None, description="Code of apache.rocketmq.v2 for the same error.")


class BatchOutcomeView(Schema):
    """The outcomes of a batch of messages."""

    sent: int = Field(description="Number of lines with the outcome STORED or DUPLICATE.")
    outcomes: list[LineOutcomeView] = Field(description="One for each line, in their order.")


class MessageView(Schema):
    """One stored copy of a message: the original, a retry, or a dead letter."""

    message_id: str = Field(description="Id of the message.")
    topic: str = Field(description="The requested topic.")
    stored_topic: str = Field(description="Topic of this copy, or its retry or dead-letter topic.")
    broker: str = BROKER
    queue_id: int = Field(description="Queue of this copy, from 0.")
    queue_offset: int = Field(description="Offset in the queue.")
    log_offset: int = Field(description="Offset of its record in the log.")
    message_type: str = Field(description="NORMAL, FIFO, DELAY, TRANSACTION or PRIORITY.")
    priority: int | None = Field(None, description="Priority of the message, as sent.")
    tag: str | None = Field(None, description="Tag of the message.")
    keys: list[str] | None = Field(
        None, description="Keys of the message. Missing if the body is hidden."
    )
    message_group: str | None = Field(None, description="Message group of a FIFO message.")
    born_at_ms: int = Field(description="Time at which the producer created it (Unix, ms).")
    born_host: str = Field(description="Host of the producer.")
    stored_at_ms: int = Field(description="Time at which this copy was stored (Unix, ms).")
    deliver_at_ms: int | None = Field(None, description="Requested delivery time (Unix, ms).")
    delivery_attempt: int = Field(
        description="Delivery attempt, from 1. Of a dead letter: the last attempt, 0 if it had"
        " none."
    )
    consumer_group: str | None = Field(None, description="Consumer group of a copy.")
    origin_topic: str | None = Field(None, description="Of a copy: topic of the original message.")
    reason: str | None = Field(None, description="Reason for the copy.")
    properties: dict[str, str] | None = Field(
        None, description="Properties of the message. Missing if the body is hidden."
    )
    body_encoding: str = Field(description="IDENTITY or GZIP.")
    body_size: int = Field(description="Bytes of the body.")
    body_hidden: bool | None = Field(
        None,
        description="True: the user may not read the body, the keys and the properties. This needs"
        " the right Sub on the topic.",
    )
    body_base64: str | None = Field(None, description="The body as bytes. Missing if it is hidden.")
    body_text: str | None = Field(None, description="The body, when it is UTF-8 text.")


class MessageListView(Schema):
    """The result of a search."""

    messages: list[MessageView] = Field(description="The found copies.")
    unreachable: list[str] | None = UNREACHABLE


class QueueMessagesView(Schema):
    """Messages of a queue, in order."""

    messages: list[MessageView] = Field(description="The messages, without damaged ones.")
    next_offset: int = Field(description="`fromOffset` of the next call.")
    min_offset: int = MIN_OFFSET
    max_offset: int = MAX_OFFSET
