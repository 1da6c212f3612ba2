"""The JSON of dedup keys: those of a topic, and one of them."""

from __future__ import annotations

from pydantic import Field

from tidemill.admin.json.schema import BROKER, BY, DRY_RUN, UNREACHABLE, Schema
from tidemill.admin.json.topics import DedupView

OLDEST_AT_MS = (
    "Store time of the oldest known key (Unix, ms), without keys of pending delayed"
    " messages and open half messages. Missing if there is none."
)


class DedupCountsView(Schema):
    """The dedup keys of a topic. Counts are since the start of the broker."""

    keys: int = Field(description="Known keys. Some of them may be over for a second.")
    pending_keys: int = Field(
        description="Keys of pending delayed messages and open half messages. They are known also"
        " after their window."
    )
    bytes: int = Field(description="Memory of the known keys.")
    bytes_max: int = Field(
        description="Memory for the keys of the topic. Topics without a share have the rest of"
        " `dedup_memory_bytes` together."
    )
    oldest_at_ms: int | None = Field(None, description=OLDEST_AT_MS)
    hits: int = Field(description="Messages that repeated a key.")
    mismatches: int = Field(description="Those of the hits that had another body.")
    rejected: int = Field(description="Messages that were rejected, such as for lack of memory.")
    replaced: int = Field(description="Delayed messages that a message with their key replaced.")


class BrokerGroupDedupView(DedupCountsView):
    """The dedup keys of a topic at one broker group."""

    broker: str = BROKER


class DedupStatusView(DedupCountsView):
    """The dedup keys of a topic at all reachable broker groups."""

    topic: str = Field(description="Name of the topic.")
    dedup: DedupView = Field(description="The deduplication of the topic.")
    broker_groups: list[BrokerGroupDedupView] = Field(description="The same by broker group.")
    unreachable: list[str] | None = UNREACHABLE


class DedupKeyView(Schema):
    """A known dedup key, and the first message with it."""

    key: str = Field(description="The key.", examples=["order-17"])
    message_group: str | None = Field(None, description="Message group of the messages.")
    broker: str = BROKER
    message_id: str | None = Field(
        None, description="Id of the first message. Missing if retention has freed the message."
    )
    stored_at_ms: int = Field(description="Store time of the first message (Unix, ms).")
    window_end_ms: int = Field(
        description="End of the window (Unix, ms). The key of a pending delayed message or an open"
        " half message is known also after it."
    )
    timer_id: int | None = Field(None, description="Timer of the pending delayed message.")
    transaction_id: str | None = Field(
        None, description="Id of the transaction whose half message is open."
    )
    unreachable: list[str] | None = UNREACHABLE


class DedupKeyDeletionView(DedupKeyView):
    """A freed dedup key. The next message with this key is stored."""

    dry_run: bool = DRY_RUN
    by: str = BY
