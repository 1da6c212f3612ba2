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

    One row per message, as stored, with the columns that `expressions` set. A packed body stays
    packed (`is_packed`). Without a timing, messages are sent at once and keep their message groups,
    unless a due time is set. A delayed message has no message group; a property keeps it.
    """
    given = expressions or {}
    packed = F.try_element_at("system_properties", F.lit(ENCODING))
    is_as_stored = is_packed and "body" not in given
    # The original id and position stay besides the new values.
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
    """Return the user properties and the origin of a message, at most PROPERTIES_MAX.

    A message that was replayed before keeps its first id and position.
    """
    place = F.concat_ws("/", "topic", "broker", "queue_id", "queue_offset")
    # The most important property first. Expressions may set groups, also by properties.
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
