"""J7: archived messages as messages to send, with original or scaled spacing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill_pipeline.rows import ENCODING
from tidemill_pipeline.transforms.setting import Expressions, with_columns

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Properties of a replayed message, which identify every repetition.
ORIGINAL_ID: Final = "tidemill-original-id"
ORIGINAL_PLACE: Final = "tidemill-original-place"  # topic/broker/queue/offset
ORIGINAL_GROUP: Final = "tidemill-original-group"
PROPERTIES_MAX: Final = 128  # per message; the limit of brokers
_STORED: Final = "stored_properties"  # original properties, besides those that --set replaces
_ENCODING: Final = "stored_encoding"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySchedule:
    """Due times: the first message at `begin_ms`, the others by original distance / speed."""

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


def due_ms(stored_ms: int, timing: ReplaySchedule) -> int:
    """Return the due time of a message that was stored at `stored_ms`."""
    return timing.begin_ms + int((stored_ms - timing.first_stored_ms) / timing.speed)


def to_send(
    messages: DataFrame,
    timing: ReplaySchedule | None,
    expressions: Expressions | None = None,
    *,
    is_packed: bool = True,
) -> DataFrame:
    """(body, body_encoding, tag, keys, message_group | due_timestamp, properties), in order.

    One row a message, as it was stored but for what `expressions` set: a packed body stays packed,
    where `is_packed` says that it comes so. Without a timing messages go at once and keep their
    message groups, unless a due time is set; delayed messages have none, and the group is a
    property.
    """
    given = expressions or {}
    packed = F.try_element_at("system_properties", F.lit(ENCODING))
    is_as_stored = is_packed and "body" not in given
    # What a message was known by stays beside what is set.
    kept = messages.withColumns(
        {_STORED: F.col("properties"), _ENCODING: packed if is_as_stored else _none()}
    )
    changed = with_columns(kept, given)
    common = [F.col("body"), F.col(_ENCODING).alias("body_encoding"), F.col("tag"), F.col("keys")]
    group = F.col("message_group")
    if timing is not None:
        behind_ms = (F.unix_millis("store_timestamp") - timing.first_stored_ms) / timing.speed
        due = F.timestamp_millis((F.lit(timing.begin_ms) + behind_ms).cast("bigint"))
        return changed.select(*common, due.alias("due_timestamp"), _properties(group=group))
    if "due_timestamp" not in given:
        return changed.select(*common, group, _properties(group=None))
    due = F.col("due_timestamp")
    return changed.select(
        *common,
        due,
        F.when(due.isNull(), group).alias("message_group"),
        _properties(group=F.when(due.isNotNull(), group)),
    )


def _none() -> Column:
    return F.lit(None).cast("string")


def _properties(*, group: Column | None) -> Column:
    """Return what a message has of its user, and where it was first; that alone has to have room.

    One that was replayed before keeps the id, and the place, that it had first, whatever is set.
    """
    place = F.concat_ws("/", "topic", "broker", "queue_id", "queue_offset")
    # What matters most comes first. Groups may be set, by properties too.
    added = {
        ORIGINAL_ID: (_STORED, F.col("message_id")),
        ORIGINAL_GROUP: ("properties", _none() if group is None else group),
        ORIGINAL_PLACE: (_STORED, place),
    }
    entries = [
        F.struct(
            F.lit(name).alias("key"),
            F.coalesce(F.try_element_at(before, F.lit(name)), value).alias("value"),
        )
        for name, (before, value) in added.items()
    ]
    told = F.filter(F.array(*entries), lambda each: each["value"].isNotNull())
    given = F.coalesce("properties", F.create_map().cast("map<string,string>"))
    own = F.map_filter(given, lambda name, _: ~name.isin(*added))
    room = F.greatest(F.lit(1), F.lit(PROPERTIES_MAX) - F.size(own))
    kept = F.map_from_entries(F.slice(told, F.lit(1), room))
    return F.map_concat(own, kept).alias("properties")
