"""The JSON of deliveries in flight and of queue locks."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from tidemill.admin.json.schema import NEXT_PAGE, UNREACHABLE, Schema, Text


class QueueLockView(Schema):
    """What keeps a FIFO group from the rest of a queue."""

    topic: str = Field(description="Name of the topic.")
    broker: str = Field(description="Name of the broker group that has the queue.")
    queue: int = Field(description="Number of its queue there, from 0.")
    messages: int = Field(description="How many of the batch are not acknowledged.")
    offset: int = Field(description="Queue offset of the first of them.")
    message_id: str | None = Field(None, description="Its id, where it can be read.")
    client_id: str | None = Field(
        None, description="Who holds it; missing where the broker has started since."
    )
    since_ms: int = Field(description="When the batch was popped (Unix, ms).")
    until_ms: int = Field(description="When it becomes visible by itself (Unix, ms).")
    waiting: int = Field(description="Messages behind it, which nobody gets before.")


class LockReleaseRequest(Schema):
    """A queue of a topic whose lock is to go."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    queue: int = Field(ge=0, le=2**31, description="Number of its queue, from 0.")
    broker: Text | None = Field(
        None,
        description="Name of the broker group that has the queue; needed where several have one of"
        " that number locked.",
    )


class LockReleaseView(Schema):
    """What was locked, and is visible again."""

    by: str = Field(description="Who asked, as the broker's log says it.")
    group: str = Field(description="Name of the group.")
    released: QueueLockView = Field(description="What locked the queue.")


class DeliveryView(Schema):
    """A message that a consumer has and has not acked."""

    topic: str = Field(description="Topic of the message.")
    broker: str = Field(description="Name of the broker group that has it.")
    queue: int = Field(description="Queue of the topic, or with `retry` of its retry topic.")
    offset: int = Field(description="Its place in that queue.")
    retry: bool = Field(description="Whether it was delivered before: it is on the retry topic.")
    message_id: str | None = Field(None, description="Its id; none where it cannot be read.")
    attempt: int = Field(description="1 for the first delivery.")
    client_id: str | None = Field(None, description="Who has it; none where that is not known.")
    since_ms: int = Field(description="When it was popped (Unix, ms).")
    until_ms: int = Field(
        description="When it goes to another consumer if nobody acks it (Unix, ms); that moves on"
        " where it is `renewed`."
    )
    renewed: bool = Field(
        description="Whether the broker extends it while its client lives, as for push consumers."
    )
    on_its_way: bool = Field(
        description="Whether it is to be renewed, and its client has not told yet that it has it:"
        " until then it is not extended."
    )


class DeliveryPageView(Schema):
    """Some messages in flight, those out longest first; `nextPageToken` asks for the next ones."""

    deliveries: list[DeliveryView] = Field(description="The messages of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class DeliveryReleaseRequest(Schema):
    """Which messages in flight to give back: what is given must all hold, or `all` alone."""

    topic: Text | None = Field(
        None, min_length=1, description="Only of this topic, retries included."
    )
    queue: int | None = Field(
        None, ge=0, le=2**31, description="Only of this queue of `topic`, from 0; no retries."
    )
    client_id: Text | None = Field(None, min_length=1, description="Only what this client has.")
    message_id: Text | None = Field(
        None, min_length=1, description="Only the message with this id."
    )
    all: bool = Field(False, description="All that the group has in flight.")
    dry_run: bool = Field(False, description="Count them, and do nothing.")

    @model_validator(mode="after")
    def says_which(self) -> Self:
        """Accept a filter, or `all`, and not both; a queue with its topic."""
        has_filter = any(
            one is not None for one in (self.topic, self.queue, self.client_id, self.message_id)
        )
        if has_filter == self.all:
            raise ValueError("give topic, queue, clientId or messageId, or all for all of them")
        if self.queue is not None and self.topic is None:
            raise ValueError("a queue is one of a topic: give topic too")
        return self


class BrokerGroupCountView(Schema):
    """How many messages at one broker group."""

    broker: str = Field(description="Name of the broker group.")
    messages: int = Field(description="How many messages.")


class DeliveryReleaseView(Schema):
    """What was given back."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked, as the brokers' logs say it.")
    group: str = Field(description="Name of the group.")
    messages: int = Field(description="How many messages were given back, or would be.")
    brokers: list[BrokerGroupCountView] = Field(description="The same by broker group.")
    more: bool = Field(description="Whether there are more: ask again.")
    unreachable: list[str] | None = UNREACHABLE
