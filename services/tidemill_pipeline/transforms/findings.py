"""Findings of an audit: their kinds, and the functions that select their rows.

A finding is a row of FINDINGS. Kinds:

    missing      acknowledged and not stored; due and not fired; skipped for a group that received
                 later messages, or whose next pop begins later; or delivered, and neither settled
                 nor delivered again, although it is not in flight
    unexpected   fired or delivered after a recall
    duplicate    delivered to a group after its ack; or fired several times
    redelivered  delivered again without an earlier ack
    early        fired or first delivered before it was due
    late         fired more than `late_ms` after it was due
    orphan-ack   an ack of a delivery without an event
    unknown      acknowledged without an event, but events of that time may be missing; or a
                 missing, early or orphan-ack that an unreadable part of the log may explain
    unreadable   a part of a log without events: damaged, or removed during the read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.transforms.places import PLACE

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KINDS: Final = (
    "missing",
    "unexpected",
    "duplicate",
    "redelivered",
    "early",
    "late",
    "orphan-ack",
    "unknown",
    "unreadable",
)
# Errors: an audit with one of them ends with status 2.
BROKEN: Final = ("missing", "unexpected", "early")
# Largest time from the store of a message to the ack of its send: network, retries, clock error.
ACK_MS: Final = 60_000
NEVER_MS: Final = 2**53  # after every instant
JOURNEY_MAX: Final = 200  # events per finding: a message can be redelivered without end
FINDINGS: Final = (
    "kind string, topic string, consumer_group string, broker string, topic_id bigint,"
    " queue_id int, queue_offset bigint, timer_id bigint, message_id string, at timestamp,"
    " detail string"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditRules:
    """Rules of an audit."""

    late_ms: int = 1_000
    window: str = "5 minutes"
    # Nothing that became due or was stored at or after it is called missing.
    closed_at_ms: int = NEVER_MS
    # Events of this time and later were not read.
    ends_at_ms: int = NEVER_MS
    # Events of messages stored before this time may have expired; 0: all events exist.
    begins_at_ms: int = 0
    # Consumer groups with a filter, which do not get every message.
    filtered_groups: Sequence[str] = ()
    # Events of all topics were read. Otherwise expired dead letters are unknown.
    is_whole: bool = True


def _finding(kind: str, frame: DataFrame, *, at: str, detail: Column) -> DataFrame:
    """Return rows of findings. Columns that the kind does not have are null."""
    types = dict(part.split() for part in FINDINGS.split(", "))
    there = set(frame.columns)
    values = {
        name: F.col(name).cast(of_type) if name in there else F.lit(None).cast(of_type)
        for name, of_type in types.items()
    } | {"kind": F.lit(kind), "at": F.col(at).cast("timestamp"), "detail": detail.cast("string")}
    return frame.select(*(value.alias(name) for name, value in values.items()))


def closed_at(rules: AuditRules) -> Column:
    """Return the time from which nothing is called missing."""
    return F.timestamp_millis(F.lit(rules.closed_at_ms))


def missing_timers(timers: DataFrame, rules: AuditRules) -> DataFrame:
    """Return findings of due timers that were not fired."""
    lost = timers.where(
        F.col("fired_at").isNull()
        & (F.col("recalled") == 0)
        & (F.col("dead_lettered") == 0)
        & (F.col("due") < closed_at(rules))
    ).drop("topic_id", "queue_id", "queue_offset")
    return _finding("missing", lost, at="due", detail=F.lit("it was due, and was not fired"))


def untimely(timers: DataFrame, rules: AuditRules) -> DataFrame:
    """Return findings of timers that fired early or late."""
    off_ms = F.unix_millis("fired_at") - F.unix_millis("due")
    fired = timers.where(F.col("fired_at").isNotNull() & F.col("due").isNotNull())
    fired = fired.withColumn("off_ms", off_ms)
    early = _finding(
        "early",
        fired.where("off_ms < 0"),
        at="fired_at",
        detail=F.concat(F.lit("fired "), -F.col("off_ms"), F.lit(" ms before it was due")),
    )
    late = _finding(
        "late",
        fired.where(F.col("off_ms") > rules.late_ms),
        at="fired_at",
        detail=F.concat(F.lit("fired "), F.col("off_ms"), F.lit(" ms after it was due")),
    )
    return early.unionByName(late)


def unexpected(timers: DataFrame) -> DataFrame:
    """Return findings of recalled timers that were fired or delivered."""
    at = F.coalesce("fired_at", "delivered_at")
    there = timers.where(F.col("recalled") > 0).withColumn("at", at).where("at is not null")
    what = F.when(F.col("fired_at").isNotNull(), F.lit("fired")).otherwise(F.lit("delivered"))
    return _finding(
        "unexpected",
        there.drop("topic_id", "queue_id", "queue_offset"),
        at="at",
        detail=F.concat(F.lit("it was recalled, and "), what, F.lit(" all the same")),
    )


def fired_again(timers: DataFrame) -> DataFrame:
    """Return findings of timers that fired several times."""
    # Several positions: the timer identifies the message.
    again = timers.where("fired > 1").drop("topic_id", "queue_id", "queue_offset")
    return _finding(
        "duplicate",
        again,
        at="fired_at",
        detail=F.concat(F.lit("fired "), F.col("fired"), F.lit(" times")),
    )


def missing_messages(lost: DataFrame) -> DataFrame:
    """Return findings of messages that a group did not get; `lost` has the details."""
    return _finding("missing", lost, at="at", detail=F.col("detail"))


def redelivered(groups: DataFrame, kind: str, count: str) -> DataFrame:
    """Return findings of messages with a `count` of further deliveries."""
    what = " times after its ack" if kind == "duplicate" else " times more, without an ack before"
    return _finding(
        kind,
        groups.where(F.col(count) > 0),
        at="last_delivered_at",
        detail=F.concat(F.lit("delivered "), F.col(count), F.lit(what)),
    )


def delivered_early(groups: DataFrame, available: DataFrame) -> DataFrame:
    """Return findings of messages that a group got before they were due."""
    due = available.where("due is not null").select(*PLACE, "due", "timer_id")
    early = groups.join(due, [*PLACE]).where(F.col("first_delivered_at") < F.col("due"))
    before_ms = F.unix_millis("due") - F.unix_millis("first_delivered_at")
    return _finding(
        "early",
        early,
        at="first_delivered_at",
        detail=F.concat(F.lit("delivered "), before_ms, F.lit(" ms before it was due")),
    )


def orphan_acks(groups: DataFrame) -> DataFrame:
    """Return findings of acks whose delivery has no event."""
    return _finding(
        "orphan-ack",
        groups.where("orphans > 0"),
        at="acked_at",
        detail=F.concat(F.col("orphans"), F.lit(" acks of deliveries without an event")),
    )


def with_doubts(found: DataFrame, events: DataFrame) -> DataFrame:
    """Return findings; a finding that an unreadable part may explain becomes unknown.

    All events of messages after the last unreadable part are readable. An unreadable part may
    contain the recall of a timer that was due later, and the store of any send.
    """
    parts = (
        events.where(F.col("event") == UNREADABLE)
        .groupBy("broker")
        .agg(F.max("end_offset").alias("ends_at"))
    )
    behind = (
        events.where(F.col("event_ts").isNotNull())
        .join(F.broadcast(parts), "broker")
        .where(F.col("log_position") >= F.col("ends_at"))
        .groupBy("broker")
        .agg(F.min("event_ts").alias("since"))
    )
    since = F.coalesce(F.unix_millis("since"), F.lit(2**53))
    entries = F.collect_list(F.struct("broker", since.alias("since_ms")))
    holes = parts.join(behind, "broker", "left").agg(F.map_from_entries(entries).alias("holes"))
    # Clocks are set back by less.
    until_ms = ACK_MS + F.when(
        F.col("broker").isNull(), F.array_max(F.map_values("holes"))
    ).otherwise(F.try_element_at("holes", F.col("broker")))
    of_timer = F.col("timer_id").isNotNull() & F.col("queue_offset").isNull()
    is_young = (F.col("kind") != "missing") | of_timer | F.col("at").isNull()
    is_doubted = (
        F.col("kind").isin("missing", "early", "orphan-ack")
        & until_ms.isNotNull()
        & (is_young | (F.unix_millis("at") < until_ms))
    )
    told = F.concat(F.col("kind"), F.lit(", if a part of a log that cannot be read told nothing: "))
    return found.crossJoin(F.broadcast(holes)).select(
        F.when(is_doubted, F.lit("unknown")).otherwise(F.col("kind")).alias("kind"),
        *(name for name in found.columns if name not in {"kind", "detail"}),
        F.when(is_doubted, F.concat(told, "detail")).otherwise(F.col("detail")).alias("detail"),
    )


def unreadable_parts(events: DataFrame) -> DataFrame:
    """Return findings of parts of a log without events."""
    parts = events.where(F.col("event") == UNREADABLE).select("broker", "detail")
    return _finding(
        "unreadable", parts.withColumn("at", F.lit(None)), at="at", detail=F.col("detail")
    )


def never_stored(sends: DataFrame, events: DataFrame, rules: AuditRules) -> DataFrame:
    """Return findings of acknowledged sends without an event."""
    told = events.where("message_id is not null").select("message_id").distinct()
    at_ms = F.col("at_ms")
    lost = (
        sends.where(at_ms.isNull() | (at_ms < rules.closed_at_ms))
        .join(told, "message_id", "left_anti")
        .withColumn("at", F.timestamp_millis("at_ms"))
    )
    is_told = (
        F.lit(not rules.begins_at_ms)
        | F.coalesce(at_ms >= rules.begins_at_ms + ACK_MS, F.lit(False))
    ) & (F.lit(rules.ends_at_ms == NEVER_MS) | at_ms.isNotNull())
    missing = _finding(
        "missing",
        lost.where(is_told),
        at="at",
        detail=F.lit("its send was acknowledged, and it was not stored"),
    )
    unknown = _finding(
        "unknown",
        lost.where(~is_told),
        at="at",
        detail=F.lit(
            "its send was acknowledged, perhaps before the first event that is there, or"
            " behind the last that was read, or at a broker group that was removed since"
        ),
    )
    return missing.unionByName(unknown)


def with_journeys(found: DataFrame, placed: DataFrame) -> DataFrame:
    """Add `journey: string`, a JSON list of the events of the message, in order."""
    step = F.struct(
        F.col("event_ts").alias("at"),
        "log_position",
        "event_index",
        "event",
        "stands_on",
        "consumer_group",
        "attempt",
        "detail",
    )
    key = list(PLACE)
    theirs = found.select(*key, "timer_id").distinct()
    # Two equality joins: Spark cannot look up a join on either of two conditions.
    at_place = placed.where(~F.col("event").isin("scheduled", "recalled", "moved")).drop("timer_id")
    of_timer = placed.drop(*(name for name in key if name != "broker"))
    columns = [*key, "timer_id", step.alias("step")]
    steps = (
        at_place.join(theirs, key)
        .select(columns)
        .unionByName(of_timer.join(theirs, ["broker", "timer_id"]).select(columns))
        .groupBy(*key, "timer_id")
        .agg(
            F.to_json(F.slice(F.array_sort(F.collect_set("step")), 1, JOURNEY_MAX)).alias("journey")
        )
    )
    # Both frames derive from the same events, so only names distinguish the columns.
    of = {name: f"of_{name}" for name in (*key, "timer_id")}
    on = [F.col(name).eqNullSafe(F.col(other)) for name, other in of.items()]
    return found.join(steps.withColumnsRenamed(of), on, "left").select(*found.columns, "journey")
