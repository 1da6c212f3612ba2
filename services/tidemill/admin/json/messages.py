"""The JSON of messages."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from tidemill.admin.json.schema import (
    BROKER,
    EXACT_MAX,
    ITEMS_MAX,
    UNREACHABLE,
    Few,
    IsoTime,
    Schema,
    Text,
    millis_of,
)


class MessageEventView(Schema):
    """One thing that happened to a message."""

    event: str = Field(
        description="stored, scheduled, fired, recalled, moved, delivered, acked, renewed, nacked,"
        " revived, dead_lettered, expired or reset."
    )
    at_ms: int = Field(description="When (Unix, ms), by the broker's clock.")
    broker: str = BROKER
    position: int = Field(description="Of its record in the broker group's log.")
    index: int = Field(description="Which of the record's events it is.")
    topic: str = Field(description="Where the message stands by it, or stood.")
    queue_id: int = Field(description="Number of its queue.")
    queue_offset: int = Field(description="Of a delayed message that is not fired, its timer's id.")
    consumer_group: str | None = Field(None, description="To which it happened.")
    attempt: int | None = Field(None, description="Which delivery it is, from 1.")
    due_at_ms: int | None = Field(
        None,
        description="When a delayed message is due, or the invisible duration of a delivery ends.",
    )
    client_id: str | None = Field(None, description="Who got it.")
    reason: str | None = Field(None, description="Why, in a word.")
    origin_topic: str | None = Field(None, description="Of a copy: where the message stood first.")
    body_size: int | None = Field(None, description="Bytes of the body as stored.")


class MessageTraceView(Schema):
    """A part of a message's journey."""

    events: list[MessageEventView] = Field(description="In the order of each broker group's log.")
    cursor: str | None = Field(
        None, description="Where to go on, as long as there is more log to look at."
    )
    read_bytes: int = Field(description="How much log this call has looked at.")
    left_bytes: int = Field(description="How much is left behind the cursor.")
    damaged_bytes: dict[str, int] | None = Field(
        None, description="By broker group, how much of that is damaged: nobody knows what it told."
    )
    unreachable: list[str] | None = UNREACHABLE


class NewMessage(Schema):
    """A message to send: one kind of body, and at most one way to say when it is delivered."""

    body: Text | None = Field(None, description="The body as text, stored as UTF-8.")
    body_base64: str | None = Field(None, description="The body as bytes.")
    tag: Text | None = Field(None, description="Tag, by which consumers filter.")
    keys: Annotated[list[Text], Few] = Field(
        [], max_length=ITEMS_MAX, description="Keys, by which it is found."
    )
    properties: Annotated[dict[Text, Text], Few] = Field(
        {}, max_length=ITEMS_MAX, description="Properties, which consumers get."
    )
    message_group: Text | None = Field(None, description="Messages of one group stay in order.")
    deliver_at_ms: int | None = Field(
        None,
        ge=-EXACT_MAX,
        le=EXACT_MAX,
        strict=True,
        description="Deliver not before this time (Unix, ms).",
    )
    deliver_at: IsoTime | None = Field(None, description="The same, as a time with its zone.")
    delay_ms: int | None = Field(
        None,
        ge=0,
        le=EXACT_MAX,
        strict=True,
        description="Deliver so long after the broker has it.",
    )
    delay_level: int | None = Field(
        None,
        ge=1,
        strict=True,
        description="One of 18 delays from 1 s to 2 h; a higher level is the 18th.",
    )

    @model_validator(mode="after")
    def one_body_and_time(self) -> Self:
        """Accept exactly one body and at most one time."""
        if (self.body is None) == (self.body_base64 is None):
            raise ValueError("give either body or bodyBase64")
        times = (self.deliver_at_ms, self.deliver_at, self.delay_ms, self.delay_level)
        if sum(time is not None for time in times) > 1:
            raise ValueError("give at most one of deliverAtMs, deliverAt, delayMs and delayLevel")
        return self

    @property
    def due_at_ms(self) -> int | None:
        """When it is to be delivered, however that was written; None: it does not say."""
        return millis_of(self.deliver_at) if self.deliver_at else self.deliver_at_ms


class SentMessageView(Schema):
    """Where a message went: into a queue, or to the timers until it is due."""

    message_id: str = Field(description="Its id, by which it is found.")
    broker: str = Field(description="Name of the broker group that has it.")
    queue_id: int = Field(description="The queue that has it, or will have.")
    queue_offset: int | None = Field(None, description="Where it is there; missing: it waits.")
    timer_id: int | None = Field(None, description="Number of the timer with which it waits.")
    deliver_at_ms: int | None = Field(None, description="When it will be delivered (Unix, ms).")
    recall_handle: str | None = Field(
        None, description="What a producer's client recalls the message with."
    )


class MessageView(Schema):
    """One stored copy of a message: the original, a retry, or a dead letter."""

    message_id: str = Field(description="Its id.")
    topic: str = Field(description="The topic that was asked for.")
    stored_topic: str = Field(description="Where this copy is: there, or a topic of the broker.")
    broker: str = BROKER
    queue_id: int = Field(description="Its queue.")
    queue_offset: int = Field(description="Its offset in the queue.")
    log_offset: int = Field(description="Where its record begins in the log.")
    message_type: str = Field(description="NORMAL, FIFO or DELAY.")
    tag: str | None = Field(None, description="Its tag.")
    keys: list[str] = Field(description="Its keys.")
    message_group: str | None = Field(None, description="Group within which it stays in order.")
    born_at_ms: int = Field(description="When its producer made it (Unix, ms).")
    born_host: str = Field(description="Host of its producer.")
    stored_at_ms: int = Field(description="When this copy was stored (Unix, ms).")
    deliver_at_ms: int | None = Field(None, description="When it was to be delivered (Unix, ms).")
    delivery_attempt: int = Field(description="1 for the first delivery.")
    consumer_group: str | None = Field(None, description="Group that this copy was made for.")
    origin_topic: str | None = Field(None, description="Topic that this copy came from.")
    reason: str | None = Field(None, description="Why the copy was made.")
    properties: dict[str, str] = Field(description="Its properties.")
    body_encoding: str = Field(description="IDENTITY or GZIP.")
    body_size: int = Field(description="Bytes of the body.")
    body_base64: str = Field(description="The body as bytes.")
    body_text: str | None = Field(None, description="The body, when it is UTF-8 text.")


class MessageListView(Schema):
    """Messages that were found."""

    messages: list[MessageView] = Field(description="The copies that were found.")
    unreachable: list[str] | None = UNREACHABLE


class QueueMessagesView(Schema):
    """Messages of a queue, in their order."""

    messages: list[MessageView] = Field(description="The messages; what is damaged is left out.")
    next_offset: int = Field(description="`fromOffset` of what follows.")
    min_offset: int = Field(description="Offset of the oldest message that the queue holds.")
    max_offset: int = Field(description="Offset that its next message gets.")
