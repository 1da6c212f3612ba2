"""J7: archived messages as messages to send, with the spacing that was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

# Properties that a replayed message carries, so that every repeat of it is known.
ORIGINAL_ID: Final = "tidemill-original-id"
ORIGINAL_PLACE: Final = "tidemill-original-place"  # topic/broker/queue/offset
ORIGINAL_GROUP: Final = "tidemill-original-group"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """When messages come: the first at `begin_ms`, others as far behind as they were, / speed."""

    first_stored_ms: int
    begin_ms: int
    speed: float = 1.0


def between(messages: DataFrame, *, since_ms: int | None, until_ms: int | None) -> DataFrame:
    """Return the messages that were stored from `since_ms` on and before `until_ms`."""
    stored_ms = F.unix_millis("store_timestamp")
    kept = messages
    if since_ms is not None:
        kept = kept.where(stored_ms >= since_ms)
    if until_ms is not None:
        kept = kept.where(stored_ms < until_ms)
    return kept


def to_send(messages: DataFrame, timing: Timing | None) -> DataFrame:
    """(body, tag, keys, message_group | due_timestamp, properties), one row a message, in order.

    Without a timing messages go at once and keep their message groups; with one they are delayed
    messages, which have none, and the group is a property.
    """
    place = F.concat_ws("/", "topic", "broker", "queue_id", "queue_offset")
    added = F.create_map(F.lit(ORIGINAL_ID), F.col("message_id"), F.lit(ORIGINAL_PLACE), place)
    own = F.map_filter(
        "properties", lambda name, _: ~name.isin(ORIGINAL_ID, ORIGINAL_PLACE, ORIGINAL_GROUP)
    )
    common = [F.col("body"), F.col("tag"), F.col("keys")]
    if timing is None:
        return messages.select(
            *common, "message_group", F.map_concat(own, added).alias("properties")
        )
    behind_ms = (F.unix_millis("store_timestamp") - timing.first_stored_ms) / timing.speed
    due = F.timestamp_millis((F.lit(timing.begin_ms) + behind_ms).cast("bigint"))
    group = F.when(
        F.col("message_group").isNotNull(),
        F.create_map(F.lit(ORIGINAL_GROUP), F.col("message_group")),
    ).otherwise(F.create_map().cast("map<string,string>"))
    return messages.select(
        *common, due.alias("due_timestamp"), F.map_concat(own, added, group).alias("properties")
    )
