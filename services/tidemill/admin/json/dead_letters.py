"""The JSON of dead letters."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Final, Self

from pydantic import Field, StrictBool, StrictInt, model_validator

from tidemill.admin.json.bulk_changes import BEGINS_OPERATION, BulkChangeView, BulkRequest
from tidemill.admin.json.messages import Base64, Body, Key, PropertyText, Tag
from tidemill.admin.json.schema import (
    BROKER,
    BY,
    DRY_RUN,
    EXACT_MAX,
    NEXT_PAGE,
    UNREACHABLE,
    AnyCaseEnum,
    ExclusiveSchema,
    LimitedSize,
    Schema,
    Text,
    given,
)
from tidemill.message import limits

_ID = "Id of the dead letter: its broker group and its offset there."
_EXAMPLE = "broker-0:17"
_GROUP = "Name of the consumer group."
_TOPIC = "Topic that the message was sent to."
_TRUE: Final = {"const": True}


class DeadLetterStateView(AnyCaseEnum):
    """The state of a dead letter. REPLAYED and DISCARDED are final."""

    OPEN = "OPEN"
    REPLAYED = "REPLAYED"
    DISCARDED = "DISCARDED"


class DeadLetterReason(AnyCaseEnum):
    """Why a message is a dead letter."""

    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    FORWARDED_BY_CLIENT = "FORWARDED_BY_CLIENT"
    DAMAGED = "DAMAGED"


class DeadLetterOutcome(StrEnum):
    """The result of a replay or a discard of one dead letter."""

    REPLAYED = "REPLAYED"
    ALREADY_REPLAYED = "ALREADY_REPLAYED"
    DISCARDED = "DISCARDED"
    TOPIC_DELETED = "TOPIC_DELETED"
    DAMAGED = "DAMAGED"
    EXPIRED = "EXPIRED"
    NOT_FOUND = "NOT_FOUND"


class CopyTarget(AnyCaseEnum):
    """Who receives a copy of a dead letter."""

    GROUP = "group"
    TOPIC = "topic"


_NOT_TO_TOPIC: Final = {"to": {"not": {"const": CopyTarget.TOPIC.value}}}


class DeadLetterView(Schema):
    """A dead letter of a consumer group."""

    id: str = Field(description=_ID, examples=[_EXAMPLE])
    broker: str = BROKER
    group: str = Field(description=_GROUP)
    state: DeadLetterStateView = Field(
        description="OPEN: it is neither replayed nor discarded. The other states are final."
    )
    reason: DeadLetterReason = Field(
        description="ATTEMPTS_EXHAUSTED: the group has failed all attempts. FORWARDED_BY_CLIENT: a"
        " client has given the message up. DAMAGED: its body is lost."
    )
    origin_topic: str = Field(description=_TOPIC)
    topic_deleted: bool = Field(False, description="Whether the topic was deleted.")
    message_id: str | None = Field(
        None, description="Id of the message. Missing if the dead letter cannot be read."
    )
    message_group: str | None = Field(None, description="Message group, if it has one.")
    tag: str | None = Field(None, description="Tag, if it has one.")
    keys: list[str] | None = Field(
        None, description="Keys. Missing if the caller lacks Sub on the consumer group."
    )
    body_size: int = Field(description="Stored bytes of the body.")
    attempts: int = Field(description="Deliveries that were made, since the last replay.")
    replays: int = Field(description="Replays of the message before this dead letter.")
    first_failed_at_ms: int | None = Field(
        None,
        description="When the group received the message for the first time, which failed (Unix,"
        " ms).",
    )
    dead_at_ms: int | None = Field(
        None, description="When the message became a dead letter (Unix, ms)."
    )
    settled_at_ms: int | None = Field(
        None, description="When it was replayed or discarded (Unix, ms). Missing if unknown."
    )
    settled_by: str | None = Field(
        None,
        description="User that replayed or discarded it. Missing if the audit log no longer has the"
        " call, or if the call had no user.",
    )


class DeadLetterDetailView(DeadLetterView):
    """A dead letter with its message."""

    born_at_ms: int | None = Field(None, description="When the producer made it (Unix, ms).")
    born_host: str | None = Field(None, description="Address of the producer.")
    properties: dict[str, str] | None = Field(None, description="Properties of the message.")
    body_encoding: str | None = Field(None, description="IDENTITY or GZIP.")
    body_base64: str | None = Field(None, description="The body as bytes.")
    body_text: str | None = Field(None, description="The body, if it is UTF-8.")
    body_hidden: bool | None = Field(
        None,
        description="Whether body, keys and properties are left out, because the caller lacks Sub"
        " on the consumer group.",
    )


class DeadLetterPageView(Schema):
    """A page of dead letters, the newest first."""

    dead_letters: list[DeadLetterView] = Field(
        description="The dead letters of this page. A page may be short, or empty, and have a"
        " successor: each call looks at a bounded number of dead letters."
    )
    unreachable: list[str] | None = UNREACHABLE
    next_page_token: str | None = NEXT_PAGE


class DeadLetterCountView(Schema):
    """Open dead letters with the same topic or the same reason."""

    topic: str | None = Field(None, description=_TOPIC)
    reason: DeadLetterReason | None = Field(None, description="Why they are dead letters.")
    open: int = Field(description="Number of open dead letters.")


class DeadLetterGroupView(Schema):
    """The dead letters of a consumer group, in numbers."""

    group: str = Field(description=_GROUP)
    open: int = Field(description="Number of open dead letters.")
    replayed: int = Field(description="Number of replayed ones that are still stored.")
    discarded: int = Field(description="Number of discarded ones that are still stored.")
    oldest_open_at_ms: int | None = Field(
        None, description="When the oldest open one became a dead letter (Unix, ms)."
    )
    deleted_from_at_ms: int | None = Field(
        None,
        description="When retention may delete the oldest open one (Unix, ms). Missing if none is"
        " open, or if it is kept for ever.",
    )


class DeadLetterSummaryView(Schema):
    """The dead letters that the caller may see, in numbers."""

    groups: list[DeadLetterGroupView] = Field(
        description="Consumer groups with dead letters, those with the most open ones first."
    )
    topics: list[DeadLetterCountView] = Field(description="Open ones by topic.")
    reasons: list[DeadLetterCountView] = Field(description="Open ones by reason.")
    deleted_from_at_ms: int | None = Field(
        None, description="When retention may delete the first open one (Unix, ms)."
    )
    partial: bool | None = Field(
        None,
        description="Whether `topics` and `reasons` count only the newest 100,000 open ones of a"
        " broker group.",
    )
    unreachable: list[str] | None = UNREACHABLE


class DeadLetterFilterView(Schema):
    """Open dead letters of the consumer group. A missing field matches all of them."""

    topic: Text | None = Field(None, min_length=1, max_length=255, description=_TOPIC)
    reason: DeadLetterReason | None = Field(None, description="Why they are dead letters.")
    tag: Text | None = Field(None, min_length=1, max_length=255, description="Tag of the messages.")
    from_ms: StrictInt | None = Field(
        None, ge=0, le=EXACT_MAX, description="Dead at or after this time (Unix, ms)."
    )
    to_ms: StrictInt | None = Field(
        None,
        ge=1,  # The broker reads 0 as no limit.
        le=EXACT_MAX,
        description="Dead before this time (Unix, ms).",
    )


class DeadLettersRequest(BulkRequest):
    """The dead letters to replay or to discard: by ids, or all open ones that match a filter.

    Replays by ids keep their order at each broker group.
    """

    filter: DeadLetterFilterView | None = Field(None, description=BEGINS_OPERATION)


class DeadLetterOutcomeView(Schema):
    """The result for one dead letter."""

    id: str = Field(description=_ID, examples=[_EXAMPLE])
    outcome: DeadLetterOutcome | None = Field(
        None,
        description="REPLAYED, or DISCARDED: done; a discard of a discarded one too. A replay"
        " changes nothing with the other outcomes. ALREADY_REPLAYED: another call has replayed it"
        " before. TOPIC_DELETED: copy it to another topic. DAMAGED: the body is lost; copy it with"
        " a new body. EXPIRED: retention has removed it. Missing: unknown, see `stoppedBy` and"
        " `unreachable`.",
    )


class DeadLetterChangeView(BulkChangeView):
    """The results of a replay or a discard."""

    group: str = Field(description=_GROUP)
    outcomes: list[DeadLetterOutcomeView] | None = Field(
        None, description="One result for each id, in their order. Missing with a filter."
    )
    sample: list[DeadLetterView] | None = Field(
        None, description="With a filter: up to 10 of those that match, the oldest first."
    )


class DeadLetterCopyRequest(ExclusiveSchema):
    """The changes of a copy of a dead letter. A missing field keeps that of the dead letter."""

    at_most_one = ("body", "body_base64")
    refused_objects = (
        {**given("topic"), "properties": {**given("topic")["properties"], **_NOT_TO_TOPIC}},
        {**given("discard"), "properties": {"discard": _TRUE, **_NOT_TO_TOPIC}},
    )

    body: Body | None = Field(None, description="Another body as text, stored as UTF-8.")
    body_base64: Base64 | None = Field(None, description="Another body as bytes.")
    tag: Tag | None = Field(None, description="Another tag.")
    keys: Annotated[list[Key], LimitedSize] | None = Field(
        None, description="Other keys.", json_schema_extra={"maxItems": limits.KEYS.limit}
    )
    properties: Annotated[dict[Text, PropertyText], LimitedSize] | None = Field(
        None, description="Other properties, in place of all properties."
    )
    to: CopyTarget = Field(
        CopyTarget.GROUP,
        description="group: only this consumer group receives the copy, and the dead letter is"
        " REPLAYED. topic: all consumer groups of the topic receive it.",
    )
    topic: Text | None = Field(
        None,
        description="Of a copy to a topic: its name. Default: the topic of the dead letter.",
        json_schema_extra={"minLength": 1},
    )
    discard: StrictBool = Field(
        False, description="Of a copy to a topic: discard the dead letter afterwards."
    )

    @model_validator(mode="after")
    def for_a_topic(self) -> Self:
        """Reject fields that belong to a copy to a topic."""
        if self.to is CopyTarget.GROUP and (self.topic is not None or self.discard):
            raise ValueError("topic and discard belong to a copy with `to: topic`")
        return self


class DeadLetterCopyView(Schema):
    """A copy of a dead letter."""

    dry_run: bool = DRY_RUN
    by: str = BY
    group: str = Field(description=_GROUP)
    id: str = Field(description=_ID, examples=[_EXAMPLE])
    message_id: str | None = Field(None, description="Id of the copy. Missing in a dry run.")
    topic: str = Field(description="Topic of the copy.")
    receivers: list[str] = Field(
        description="Consumer groups that receive the copy: those with consumers of the topic."
    )
    outcome: DeadLetterOutcome | None = Field(
        None, description="The result for the dead letter. Missing if it stays as it is."
    )
    warnings: list[str] | None = Field(
        None, description="Of a dry run: why consumers may not get the copy as expected."
    )
