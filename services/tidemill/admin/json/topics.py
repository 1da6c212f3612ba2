"""The JSON of topics and their queues."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from tidemill.admin.json.schema import BROKER, NEXT_PAGE, UNREACHABLE, Schema


class TopicTypeView(StrEnum):
    """Which messages a topic takes."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


class TopicSettings(Schema):
    """What may be chosen about a topic; what is missing stays, or is the default of a new one."""

    message_type: TopicTypeView | None = Field(
        None,
        description="Messages it takes. A new topic is MIXED: NORMAL, FIFO and DELAY. Of a topic in"
        " use it changes with `force` only.",
    )
    queues: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of queues; it never shrinks, and is fixed where FIFO is taken. 8 for a"
        " new topic, unless the broker is set otherwise.",
    )
    delivery_spread_ms: int | None = Field(
        None,
        ge=0,
        le=3_600_000,
        description="By how much a delayed message may come later where its second is full.",
    )
    force: bool = Field(False, description="Change the type even of a topic that is in use.")


class TopicView(Schema):
    """A topic."""

    name: str = Field(description="Its name.")
    message_type: TopicTypeView = Field(description="Messages it takes.")
    queues: int = Field(description="Number of queues.")
    is_system: bool = Field(description="Whether it is a retry or dead-letter topic.")
    delivery_spread_ms: int | None = Field(
        None,
        description="By how much a delayed message may come later where its second is full; missing"
        " where it may not.",
    )


class TopicPutView(TopicView):
    """A topic as it is now."""

    is_new: bool = Field(description="Whether it was created by this call.")
    before: TopicView | None = Field(
        None, description="What it was; missing when it is new or has not changed."
    )


class TopicDeletionView(Schema):
    """What deleting a topic takes away."""

    dry_run: bool = Field(description="Whether nothing was done.")
    by: str = Field(description="Who asked: what the caller says of itself, and its address.")
    topic: TopicView = Field(description="The topic.")
    messages: int = Field(description="Messages that its queues hold, acked or not.")
    groups: list[str] = Field(description="Consumer groups that read it.")
    unreachable: list[str] | None = UNREACHABLE


class QueueView(Schema):
    """What a queue holds: messages from `minOffset` up to but without `maxOffset`."""

    broker: str = BROKER
    queue_id: int = Field(description="Its number there, from 0.")
    min_offset: int = Field(description="Offset of the oldest message it holds.")
    max_offset: int = Field(description="Offset that its next message gets.")
    sealed_offset: int | None = Field(
        None,
        description="Up to where an archive has sealed it: retention keeps what is not, while there"
        " is room. Missing: retention waits for nobody.",
    )


class TopicDetailsView(TopicView):
    """A topic and its queues."""

    queue_status: list[QueueView] = Field(description="What each of its queues holds.")
    unreachable: list[str] | None = UNREACHABLE


class TopicPageView(Schema):
    """Some topics, by name; `nextPageToken` asks for those after them."""

    topics: list[TopicView] = Field(description="The topics of this page.")
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE
