"""The JSON of deliveries in flight and of queue locks."""

from __future__ import annotations

from typing import Self

from pydantic import ConfigDict, Field, StrictBool, StrictInt, model_validator

from tidemill.admin.json.schema import (
    BY,
    DRY_RUN,
    NEXT_PAGE,
    UNREACHABLE,
    Schema,
    Text,
    given,
    missing,
    refuse,
)

FILTERS = ("topic", "queue", "clientId", "messageId")  # of a release


class QueueLockView(Schema):
    """The lock of a queue: a batch in flight that blocks the queue for a FIFO group."""

    topic: str = Field(description="Name of the topic.")
    broker: str = Field(description="Name of the broker group of the queue.")
    queue: int = Field(description="Number of the queue, from 0.")
    messages: int = Field(description="Unacknowledged messages of the batch.")
    offset: int = Field(description="Queue offset of the first unacknowledged message.")
    message_id: str | None = Field(
        None, description="Id of this message. Missing if it cannot be read."
    )
    client_id: str | None = Field(
        None, description="Client with the batch. Missing after a restart of the broker."
    )
    since_ms: int = Field(description="Time of the pop (Unix, ms).")
    until_ms: int = Field(description="End of the invisible duration (Unix, ms).")
    waiting: int = Field(description="Messages that the batch blocks.")


class LockReleaseRequest(Schema):
    """The queue to unlock."""

    topic: Text = Field(min_length=1, description="Name of the topic.")
    queue: StrictInt = Field(ge=0, le=2**31, description="Number of its queue, from 0.")
    broker: Text | None = Field(
        None,
        description="Name of the broker group of the queue. Required if several broker groups have"
        " locked a queue with this number.",
    )


class LockReleaseView(Schema):
    """The released lock. Its messages are visible again."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: str = Field(description="Name of the group.")
    released: QueueLockView = Field(
        description="The released lock. In a dry run: the lock, with its client and messages."
    )


class DeliveryView(Schema):
    """A message in flight: delivered and not acked."""

    topic: str = Field(description="Topic of the message.")
    broker: str = Field(description="Name of the broker group that stores it.")
    queue: int = Field(description="Queue of the topic, or with `retry` of its retry topic.")
    offset: int = Field(description="Offset in this queue.")
    retry: bool = Field(description="Whether it is a redelivery from the retry topic.")
    message_id: str | None = Field(
        None, description="Id of the message. Missing if it cannot be read."
    )
    attempt: int = Field(description="Delivery attempt, from 1.")
    client_id: str | None = Field(
        None, description="Client with the message. Missing if it is unknown."
    )
    since_ms: int = Field(description="Time of the pop (Unix, ms).")
    until_ms: int = Field(
        description="End of the invisible duration (Unix, ms). It moves if the delivery is"
        " `renewed`."
    )
    renewed: bool = Field(
        description="Whether the broker extends the invisible duration while the client is alive,"
        " as for push consumers."
    )
    on_its_way: bool = Field(
        description="Whether the client of a renewed delivery has not confirmed its arrival yet."
        " Until then it is not extended."
    )


class DeliveryPageView(Schema):
    """A page of deliveries in flight, the oldest first."""

    deliveries: list[DeliveryView] = Field(description="The deliveries of this page.")
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class DeliveryReleaseRequest(Schema):
    """The deliveries to release: those that match all given filters, or `all` alone."""

    model_config = ConfigDict(
        json_schema_extra=refuse(
            {"properties": {**missing(*FILTERS)["properties"], "all": {"const": False}}},
            *(
                {
                    "required": ["all", field],
                    "properties": {**given(field)["properties"], "all": {"const": True}},
                }
                for field in FILTERS
            ),
        )
    )

    topic: Text | None = Field(
        None, min_length=1, description="Only of this topic, retries included."
    )
    queue: StrictInt | None = Field(
        None,
        ge=0,
        le=2**31,
        description="Only of the queue with this number, from 0, without retries.",
    )
    client_id: Text | None = Field(None, min_length=1, description="Only messages of this client.")
    message_id: Text | None = Field(
        None, min_length=1, description="Only the message with this id."
    )
    all: StrictBool = Field(False, description="All deliveries in flight of the group.")
    dry_run: StrictBool = Field(False, description="Only count the deliveries.")

    @model_validator(mode="after")
    def one_selection(self) -> Self:
        """Accept either filters or `all`."""
        has_filter = any(
            one is not None for one in (self.topic, self.queue, self.client_id, self.message_id)
        )
        if has_filter == self.all:
            raise ValueError("give topic, queue, clientId or messageId, or only all")
        return self


class BrokerGroupCountView(Schema):
    """The number of messages at one broker group."""

    broker: str = Field(description="Name of the broker group.")
    messages: int = Field(description="Number of messages.")


class DeliveryReleaseView(Schema):
    """The number of released deliveries."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: str = Field(description="Name of the group.")
    messages: int = Field(description="Number of released messages, or of matches in a dry run.")
    brokers: list[BrokerGroupCountView] = Field(description="The same by broker group.")
    more: bool = Field(description="Whether deliveries remain. If so, repeat the request.")
    unreachable: list[str] | None = UNREACHABLE
