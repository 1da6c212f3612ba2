"""The JSON of topics and their queues."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, StrictInt

from tidemill.admin.json.activity import SAMPLED_AT, TopicGroupView, TopicNumbersView
from tidemill.admin.json.schema import (
    BROKER,
    BY,
    CLIENTS,
    DRY_RUN,
    EXACT_MAX,
    MAX_OFFSET,
    MIN_OFFSET,
    NEXT_PAGE,
    UNREACHABLE,
    AnyCaseEnum,
    ExclusiveSchema,
    Schema,
)

DELIVERY_SPREAD = (
    "Time by which a delayed message may come later if too many are due in its second, in ms."
)


RETENTION_MS = (
    "Time for which a message is kept at least, 60,000 ms to 400 days; -1: for ever. The broker"
    " removes it at most 1/64 of the time and 2 minutes later."
)
RETENTION_BYTES = (
    "Limit of the sizes of the topic's messages in the log, per broker group. The oldest messages"
    " are removed."
)
RETENTION_ACKED = (
    "`free`: a message is removed when all consumer groups that have begun the topic have settled"
    " it. `keep`: it stays for readers and resets."
)


RETENTION_MS_MIN, RETENTION_MS_MAX = 60_000, 400 * 86_400_000


def _check_ms(ms: int) -> int:
    if ms != -1 and ms < RETENTION_MS_MIN:
        raise ValueError(
            f"a retention is {RETENTION_MS_MIN} to {RETENTION_MS_MAX} ms, or -1 for ever"
        )
    return ms


class AckedView(AnyCaseEnum):
    """What happens with messages that all consumer groups have settled."""

    KEEP = "keep"
    FREE = "free"


class RetentionSettings(Schema):
    """When the messages of a topic are removed. A missing field does not change."""

    ms: (
        Annotated[
            StrictInt,
            Field(
                ge=-1,
                le=RETENTION_MS_MAX,
                json_schema_extra={"not": {"minimum": 0, "maximum": RETENTION_MS_MIN - 1}},
            ),
            AfterValidator(_check_ms),
        ]
        | None
    ) = Field(None, description=f"{RETENTION_MS} null: the broker's default.")
    bytes: StrictInt | None = Field(
        None, ge=1 << 20, le=1 << 50, description=f"{RETENTION_BYTES} null: no limit."
    )
    acked: AckedView | None = Field(
        None, description=f"{RETENTION_ACKED} Default, and null: `keep`."
    )


class RetentionView(Schema):
    """When the messages of a topic are removed. A missing field is the broker's default."""

    ms: int | None = Field(None, description=RETENTION_MS)
    bytes: int | None = Field(None, description=RETENTION_BYTES)
    acked: AckedView | None = Field(None, description=RETENTION_ACKED)


FIRST_CHECK_MS = "Time from a half message to its first check, 1,000 to 3,600,000 ms."
CHECK_PERIOD_MS = (
    "Time between two checks, and from the last check to the expiry, 1,000 to 3,600,000 ms."
)
CHECK_ATTEMPTS = "Checks that producers get before the half message expires, 1 to 100."


class TransactionSettings(Schema):
    """When half messages are checked. A missing field does not change.

    A change applies to new half messages.
    """

    first_check_ms: StrictInt | None = Field(
        None, ge=1_000, le=3_600_000, description=f"{FIRST_CHECK_MS} Default: 6,000."
    )
    period_ms: StrictInt | None = Field(
        None, ge=1_000, le=3_600_000, description=f"{CHECK_PERIOD_MS} Default: 30,000."
    )
    attempts: StrictInt | None = Field(
        None, ge=1, le=100, description=f"{CHECK_ATTEMPTS} Default: 15."
    )


class TransactionPolicyView(Schema):
    """When half messages are checked."""

    first_check_ms: int = Field(description=FIRST_CHECK_MS)
    period_ms: int = Field(description=CHECK_PERIOD_MS)
    attempts: int = Field(description=CHECK_ATTEMPTS)


class KeySourceView(AnyCaseEnum):
    """The origin of the dedup key of a message."""

    PROPERTY = "property"
    MESSAGE_ID = "messageId"
    PROPERTY_OR_MESSAGE_ID = "propertyOrMessageId"


class DedupModeView(AnyCaseEnum):
    """What happens with a message that repeats a dedup key."""

    FIRST = "first"
    REPLACE = "replace"


DEDUP_WINDOW_MS = (
    "Time for which a dedup key is known, from the store time of the first message, 1,000 to"
    " 86,400,000 ms."
)
DEDUP_KEY_FROM = (
    "Origin of the dedup key: the user property `dedup-key`, the message id, or the property and"
    " else the message id. With `property`, a message without it is not checked."
)
DEDUP_MODE = (
    "`first`: a repeat is not stored and gets the first answer. `replace`: it replaces a pending"
    " delayed message with the key."
)
DEDUP_MAX_WAIT_MS = (
    "Time from the first schedule of a key to its delivery at the latest, 1,000 ms to the maximum"
    " delay. Required for the mode `replace`, and not allowed for `first`."
)
DEDUP_MEMORY_BYTES = (
    "Memory for the topic's keys, per broker group, from 1,048,576 to `dedup_memory_bytes`. Topics"
    " without a share compete for the rest."
)


class DedupSettings(Schema):
    """The deduplication of a topic. A missing field does not change, or has its default."""

    window_ms: StrictInt | None = Field(
        None, ge=1_000, le=86_400_000, description=f"{DEDUP_WINDOW_MS} Default: 120,000."
    )
    key_from: KeySourceView | None = Field(
        None, description=f"{DEDUP_KEY_FROM} Default: `propertyOrMessageId`."
    )
    mode: DedupModeView | None = Field(None, description=f"{DEDUP_MODE} Default: `first`.")
    max_wait_ms: StrictInt | None = Field(
        None, ge=1_000, le=EXACT_MAX, description=DEDUP_MAX_WAIT_MS
    )
    memory_bytes: StrictInt | None = Field(
        None, ge=1 << 20, le=4 << 30, description=f"{DEDUP_MEMORY_BYTES} null: no share."
    )


class DedupView(Schema):
    """The deduplication of a topic."""

    window_ms: int = Field(description=DEDUP_WINDOW_MS)
    key_from: KeySourceView = Field(description=DEDUP_KEY_FROM)
    mode: DedupModeView = Field(description=DEDUP_MODE)
    max_wait_ms: int | None = Field(None, description=DEDUP_MAX_WAIT_MS)
    memory_bytes: int | None = Field(
        None, description=f"{DEDUP_MEMORY_BYTES} Missing if the topic has no share."
    )
    broker_groups: list[str] | None = Field(
        None,
        description="The broker groups that own the keys, as of the time when the deduplication was"
        " turned on, or of the last spread. Missing for a single broker group.",
    )
    moving_from: list[str] | None = Field(
        None,
        description="While a spread is open: the broker groups that owned the keys before it and"
        " may know keys that other broker groups own now.",
    )


class TopicTypeView(AnyCaseEnum):
    """The message types that a topic accepts."""

    NORMAL = "NORMAL"
    FIFO = "FIFO"
    DELAY = "DELAY"
    TRANSACTION = "TRANSACTION"
    PRIORITY = "PRIORITY"
    LITE = "LITE"
    MIXED = "MIXED"


class TopicFields(Schema):
    """The settings of a topic. A missing field does not change, or has the default if it is new."""

    message_type: TopicTypeView | None = Field(
        None,
        description="Accepted message types. Default: MIXED (NORMAL, FIFO and DELAY). To change the"
        " type of a topic with messages, set `force`.",
    )
    queues: StrictInt | None = Field(
        None,
        ge=1,
        le=1024,
        description="Number of queues. It cannot decrease, and cannot change if the topic accepts"
        " FIFO messages. Default: the setting of the broker, 8.",
    )
    delivery_spread_ms: StrictInt | None = Field(
        None, ge=0, le=3_600_000, description=DELIVERY_SPREAD
    )
    retention: RetentionSettings | None = Field(
        None,
        description="When messages are removed. The only setting of a dead-letter topic (`%DLQ%`"
        " and the consumer group). Needs feature level 2 at all broker groups.",
    )
    transaction: TransactionSettings | None = Field(
        None,
        description="When half messages are checked. Needs feature level 4 at all broker groups.",
    )
    dedup: DedupSettings | None = Field(
        None,
        description="Store each dedup key once within a window. null turns it off and forgets all"
        " keys of the topic. Needs feature level 4 at all broker groups.",
    )


class TopicSettings(TopicFields):
    """The settings of a topic. A missing field does not change, or has the default if it is new."""

    force: StrictBool = Field(False, description="Change the type even if the topic has messages.")


class TopicView(Schema):
    """A topic."""

    name: str = Field(description="Name of the topic.")
    message_type: TopicTypeView = Field(description="Accepted message types.")
    queues: int = Field(description="Number of queues.")
    is_system: bool = Field(description="Whether it is a retry or dead-letter topic.")
    delivery_spread_ms: int | None = Field(
        None, description=f"{DELIVERY_SPREAD} Missing if the topic has no spread."
    )
    retention: RetentionView | None = Field(
        None, description="When messages are removed. Missing: by the defaults of the broker."
    )
    transaction: TransactionPolicyView | None = Field(
        None,
        description="When half messages are checked. Missing: by the defaults, after 6 s, then"
        " every 30 s, 15 times.",
    )
    dedup: DedupView | None = Field(None, description="The deduplication. Missing: it is off.")
    dedup_off_pending: list[str] | None = Field(
        None,
        description="After the deduplication was turned off: the broker groups that may still know"
        " keys, because they have not reported that they have received the change. Until then, it"
        " cannot be turned on again. Missing if there is none.",
    )
    created_by: str | None = Field(
        None,
        description="The user that created it, or `FIRST_USE` if the first use by a client did."
        " Missing if that is unknown.",
        examples=["ops"],
    )
    created_by_unknown: str | None = Field(
        None, description="Why the creator is unknown.", examples=["created without a user"]
    )


class TopicPutView(TopicView):
    """A topic after a change."""

    expired_messages: int | None = Field(
        None,
        description="In a dry run: stored messages that are older than the new `retention.ms`. The"
        " change removes them. Missing if it does not change, or if the number is unknown: a broker"
        " group is unreachable, overloaded or too old.",
    )

    is_new: bool = Field(description="Whether this call created it.")
    before: TopicView | None = Field(
        None, description="The previous state. Missing if it is new or has not changed."
    )
    warning: str | None = Field(
        None,
        description="A side effect on other topics. Present if the share of the memory for dedup"
        " keys leaves less for topics without a share than they use.",
    )


class TopicDeletionView(Schema):
    """The data that the deletion of a topic removes."""

    dry_run: bool = DRY_RUN
    by: str = BY
    topic: TopicView = Field(description="The topic.")
    messages: int = Field(description="Messages in its queues, acknowledged or not.")
    delayed_messages: int = Field(description="Delayed messages that will be delivered to it.")
    groups: list[str] = Field(description="Consumer groups that read it.")
    clients: list[str] = CLIENTS
    unreachable: list[str] | None = UNREACHABLE


class PurgeSettings(ExclusiveSchema):
    """The messages that a purge removes: exactly one of `all` and `beforeTimestampMs`."""

    exactly_one = ("all", "before_timestamp_ms")

    all: Literal[True] | None = Field(None, description="Remove all messages.")
    before_timestamp_ms: StrictInt | None = Field(
        None,
        ge=0,
        le=EXACT_MAX,
        description="Remove the messages stored before this time (Unix, ms).",
    )
    queue: StrictInt | None = Field(
        None, ge=0, le=1023, description="Only this queue, at each broker group."
    )
    include_retries: StrictBool = Field(
        False, description="Also the retries of the topic's messages, of all consumer groups."
    )


class BrokerGroupPurgeView(Schema):
    """The messages that a purge removes at one broker group."""

    broker: str = BROKER
    messages: int = Field(description="Messages, acknowledged or not.")
    bytes: int = Field(description="Size of their records in the log.")


class TopicPurgeView(Schema):
    """The messages that a purge removes, and those that stay."""

    dry_run: bool = DRY_RUN
    by: str = BY
    topic: TopicView = Field(description="The topic.")
    broker_groups: list[BrokerGroupPurgeView] = Field(description="Per broker group.")
    delayed_messages: int = Field(
        description="Delayed messages that will be delivered to the topic. They stay: see"
        " `tidemill timer list`."
    )
    groups: list[str] = Field(description="Consumer groups that read it.")
    unreachable: list[str] | None = UNREACHABLE


class TopicSpreadView(Schema):
    """The owners of the dedup keys of a topic, before and after a spread."""

    dry_run: bool = DRY_RUN
    by: str = BY
    topic: TopicView = Field(description="The topic.")
    before: TopicView | None = Field(
        None, description="The previous state. Missing if all active broker groups are owners."
    )


class QueueView(Schema):
    """A queue with the messages from `minOffset` to `maxOffset` - 1."""

    broker: str = BROKER
    queue_id: int = Field(description="Number of the queue at its broker group, from 0.")
    min_offset: int = MIN_OFFSET
    max_offset: int = MAX_OFFSET
    sealed_offset: int | None = Field(
        None,
        description="End of the archived messages. Retention keeps later messages while the disk"
        " has room. Missing if retention does not wait for an archive.",
    )


class LevelReaderView(Schema):
    """The progress of a consumer group in a level, retries included."""

    group: str = Field(description="Name of the group.")
    ready: int = Field(description="Messages that a consumer can receive now.")
    blocked: int = Field(
        description="Messages of a level that a batch in flight locks for a FIFO group."
    )
    in_flight: int = Field(description="Messages in flight: delivered and not acked.")
    oldest_ready_at_ms: int | None = Field(
        None,
        description="Time at which the oldest ready message was stored, or its last retry (Unix,"
        " ms). Missing if no message is ready.",
    )


class LevelView(Schema):
    """A level of a PRIORITY topic: the queues of this number at all broker groups."""

    level: int = Field(
        description="Number of the level, from 0. A higher level is delivered first."
    )
    messages: int = Field(description="Stored messages, acknowledged or not, without retries.")
    groups: list[LevelReaderView] = Field(
        description="Consumer groups that read the topic and that the caller may see, by name."
    )


class TopicRowView(TopicView, TopicNumbersView):
    """A topic with its numbers."""


class TopicDetailsView(TopicRowView):
    """A topic, its numbers, its queues and the levels of a PRIORITY topic."""

    queue_status: list[QueueView] = Field(description="The queues of the topic.")
    levels: list[LevelView] | None = Field(
        None, description="The levels of a PRIORITY topic, from 0. Missing for other types."
    )
    groups: list[TopicGroupView] | None = Field(
        None,
        description="Consumer groups that read it and that the caller may see, by name. Missing if"
        " they are unknown.",
    )
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = UNREACHABLE


class TopicPageView(Schema):
    """A page of topics, ordered by name or by `sort`."""

    topics: list[TopicRowView] = Field(description="The topics of this page.")
    next_page_token: str | None = NEXT_PAGE
    sampled_at_ms: int | None = SAMPLED_AT
    unreachable: list[str] | None = UNREACHABLE
