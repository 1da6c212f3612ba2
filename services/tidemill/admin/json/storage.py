"""The JSON of the space of disks, logs and topics."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import BROKER, NEXT_PAGE, UNREACHABLE, Schema

COUNTED = "Missing until the broker has counted the messages, seconds after its start."
TOPIC_BYTES = "Size of its messages in the log: live ones, and known dead ones that no pack freed."
LIVE_BYTES = "Size of the messages that can still be read."
KEPT_BY = (
    "Why live messages stay: the rules of its retention, `for ever`, or `archive gate` if the"
    " oldest messages stay only for the archive. Missing without a live message."
)


class LogBytesView(Schema):
    """Bytes of the log by state. Their sum is the size of its files."""

    live: int = Field(description="Messages that can still be read.")
    dead: int = Field(description="Dead messages that no pack has freed yet.")
    stub: int = Field(description="What packs keep of dead messages.")
    control: int = Field(
        description="All other records, messages of the last seconds, and messages that died before"
        " they were counted."
    )
    pinned: int = Field(description="Messages of pending timers, and files kept for them.")


class DerivedBytesView(Schema):
    """Sizes of the queue and index files, which are derived from the log."""

    queues: int = Field(description="Queue files: about 20 bytes per message of a queue.")
    index: int = Field(description="Index files: about 16 bytes per key or message id.")


class StateFloorView(Schema):
    """The begin of the records from which a start rebuilds the state of groups and timers."""

    offset: int = Field(description="Log offset. Before it, packs have only live messages.")
    stored_at_ms: int | None = Field(
        None, description="When the record there was stored (Unix, ms). Missing without a record."
    )


class BrokerGroupStorageView(Schema):
    """The disk and the log of one broker group."""

    broker: str = BROKER
    is_full: bool = Field(description="Whether the disk is full: sends are rejected.")
    free_bytes: int = Field(description="Free space of the disk.")
    total_bytes: int = Field(description="Size of the disk.")
    reserve_bytes: int = Field(
        description="With less free space, sends are rejected (`disk_reserve_bytes`)."
    )
    full_in_ms: int | None = Field(
        None,
        description="Time until sends are rejected, in ms, if the disk grows as in the last hour."
        " Missing if unknown.",
    )
    full_in_unknown: str | None = Field(
        None, description="Why `fullInMs` is unknown. Missing if it is known."
    )
    log: LogBytesView | None = Field(None, description=f"Bytes of the log by state. {COUNTED}")
    derived_bytes: DerivedBytesView = Field(
        description="Sizes of the derived files. Messages enter them with the next checkpoint."
    )
    state_floor: StateFloorView = Field(description="The state floor.")


class TopicAtBrokerView(Schema):
    """The space that a topic holds at one broker group."""

    broker: str = BROKER
    bytes: int | None = Field(None, description=f"{TOPIC_BYTES} {COUNTED}")
    live_bytes: int | None = Field(None, description=f"{LIVE_BYTES} {COUNTED}")
    kept_by: str | None = Field(
        None, description=KEPT_BY, examples=["retention.ms 3d", "archive gate", "for ever"]
    )


class TopicStorageView(Schema):
    """The space that a topic holds."""

    name: str = Field(description="Name of the topic.")
    bytes: int | None = Field(None, description=f"{TOPIC_BYTES} {COUNTED}")
    live_bytes: int | None = Field(None, description=f"{LIVE_BYTES} {COUNTED}")
    freed_by_deletion_bytes: int | None = Field(
        None,
        description="About how much a deletion of the topic frees at most, with the retries of its"
        " messages. The space of a segment returns when half of its bytes are dead, on a full disk"
        f" when 1 MiB or a quarter is. {COUNTED}",
    )
    broker_groups: list[TopicAtBrokerView] = Field(description="Per broker group.")


class StorageView(Schema):
    """The disks and logs of all broker groups, and a page of topics, ordered by name."""

    broker_groups: list[BrokerGroupStorageView] = Field(description="Per broker group.")
    topics: list[TopicStorageView] = Field(
        description="The topics of this page. Retry and dead-letter topics are included."
    )
    next_page_token: str | None = NEXT_PAGE
    unreachable: list[str] | None = UNREACHABLE
