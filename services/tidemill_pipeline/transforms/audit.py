"""J2: compare produced and consumed messages by their lifecycle events.

Pure: events in, tables out. The first position of a message identifies it: (broker, topic,
topic_id, queue_id, queue_offset). Two messages with one id are therefore two messages, and so are
messages of two topics of one name (ADR 0054). A timer identifies a delayed message until it fires.

A consumer group is owed the messages after its first delivery in a topic and in each queue
(`owed.py`). A group that was deleted and created again is a different group. A group that received
only copies, such as dead letters, is owed the dead-letter topic, not the original topic.

A message that a group is owed and has not skipped is outstanding, which is not a finding.
`findings.py` defines the kinds of findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill.message.resource_names import DEAD_LETTER_TOPIC_PREFIX
from tidemill_pipeline.transforms import findings
from tidemill_pipeline.transforms.owed import PROGRESS, last_move, never_given, unsettled
from tidemill_pipeline.transforms.places import PLACE, at_first_place, since_reset, with_stands

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from tidemill_pipeline.transforms.findings import AuditRules

REMOVED: Final = "broker-group-removed"  # the event; the log of the broker group is not readable
_MOVES: Final = ("delivered", "acked", "renewed", "nacked", "revived", "dead-lettered", "replayed")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AuditTables:
    """The tables of an audit.

    summary:  one row per topic, consumer group and window, with counts
    findings: one row per message and kind, with `journey`, its events in order
    lag:      (window: timestamp, consumer_group: string, p99: bigint ms), from store to first
              delivery
    """

    summary: DataFrame
    findings: DataFrame
    lag: DataFrame


def audit(
    events: DataFrame,
    rules: AuditRules,
    *,
    sends: DataFrame | None = None,
    progress: DataFrame | None = None,
) -> AuditTables:
    """Compare events with each other, with acknowledged sends, and with the progress of groups.

    sends:    (message_id: string, topic: string, at_ms: bigint, null if unknown)
    progress: PROGRESS, queried before the events were read; None: not queried
    """
    if progress is None:
        progress = events.sparkSession.createDataFrame([], PROGRESS)
    limits = {"closed_at": findings.closed_at(rules), "filtered": rules.filtered_groups}
    placed = at_first_place(events)
    # Checkpoint: several tables use these frames, and Spark analyses the whole plan again in every
    # step, which took longer than a small audit. If an executor dies, its part is lost and the
    # audit fails; run it again.
    available = _available(placed, "stored", "fired").localCheckpoint(eager=False)
    timers = _timers(placed).localCheckpoint(eager=False)
    groups = _groups(placed).localCheckpoint(eager=False)
    owed = never_given(available, groups, placed, progress, **limits)
    if rules.is_whole:
        letters = _letters(events)
        owed = owed.unionByName(_owed_letters(letters, progress, limits))
    owed = owed.localCheckpoint(eager=False)
    left = unsettled(groups, placed, progress, **limits).localCheckpoint(eager=False)
    found = (
        findings.missing_timers(timers, rules)
        .unionByName(findings.untimely(timers, rules))
        .unionByName(findings.unexpected(timers))
        .unionByName(findings.fired_again(timers))
        .unionByName(findings.missing_messages(owed.where("is_missing")))
        .unionByName(findings.missing_messages(left.where("state = 'missing'")))
        .unionByName(findings.redelivered(groups, "duplicate", "after_ack"))
        .unionByName(findings.redelivered(groups, "redelivered", "again"))
        .unionByName(findings.delivered_early(groups, available))
        .unionByName(findings.orphan_acks(groups))
    )
    told = placed.unionByName(letters) if rules.is_whole else placed
    if sends is not None:
        found = found.unionByName(findings.never_stored(sends, events, rules))
    found = found.dropDuplicates(["kind", "consumer_group", "message_id", *PLACE, "timer_id"])
    found = (
        findings.with_doubts(found, events)
        .unionByName(findings.unreadable_parts(events))
        .localCheckpoint(eager=False)
    )
    return AuditTables(
        summary=_summary(placed, available, timers, groups, owed, left, found, rules),
        findings=findings.with_journeys(found, told),
        lag=_lag(groups, available, rules.window),
    )


def _letters(events: DataFrame) -> DataFrame:
    """Return the events of dead-letter topics by position, and all resets."""
    is_letter = F.col("topic").startswith(DEAD_LETTER_TOPIC_PREFIX)
    return with_stands(events.where(is_letter | (F.col("event") == "reset"))).withColumn(
        "topic_id", F.coalesce("topic_id", F.lit(0).cast("bigint"))
    )


def _available(placed: DataFrame, *by: str) -> DataFrame:
    """(place, message_id, timer_id, at: timestamp, due), one row per available message.

    `by`: the events that make a message available.
    """
    return (
        placed.where(F.col("event").isin(*by))
        .groupBy(*PLACE)
        .agg(
            F.max("message_id").alias("message_id"),
            F.max("timer_id").alias("timer_id"),
            F.min("event_ts").alias("at"),
            F.max("due_timestamp").alias("due"),
            F.min("log_position").alias("position"),
        )
    )


def _timers(placed: DataFrame) -> DataFrame:
    """(broker, timer_id, topic, ...), one row per delayed message."""
    event = F.col("event")
    return (
        placed.where(F.col("timer_id").isNotNull())
        .groupBy("broker", "timer_id")
        .agg(
            F.first("topic").alias("topic"),
            F.max("message_id").alias("message_id"),
            F.min(F.when(event == "scheduled", F.col("event_ts"))).alias("scheduled_at"),
            # The last schedule counts.
            F.max_by(
                F.when(event.isin("scheduled", "fired"), F.col("due_timestamp")),
                F.when(
                    event.isin("scheduled", "fired") & F.col("due_timestamp").isNotNull(),
                    F.col("log_position"),
                ),
            ).alias("due"),
            F.min(F.when(event == "fired", F.col("event_ts"))).alias("fired_at"),
            F.sum((event == "fired").cast("int")).alias("fired"),
            F.min(F.when(event == "delivered", F.col("event_ts"))).alias("delivered_at"),
            F.max(F.when(event == "fired", F.col("topic_id"))).alias("topic_id"),
            F.max(F.when(event == "fired", F.col("queue_id"))).alias("queue_id"),
            F.max(F.when(event == "fired", F.col("queue_offset"))).alias("queue_offset"),
            F.max((event == "recalled").cast("int")).alias("recalled"),
            F.max(
                ((event == "dead-lettered") & F.col("consumer_group").isNull()).cast("int")
            ).alias("dead_lettered"),
        )
    )


def _groups(placed: DataFrame) -> DataFrame:
    """(place, consumer_group, ...), one row a message and group that had to do with each other."""
    event, position = F.col("event"), F.col("log_position")
    moves = placed.where(
        event.isin(*_MOVES) & F.col("consumer_group").isNotNull() & (F.col("topic") != "")
    )
    is_delivered, is_acked = event == "delivered", event == "acked"
    # A renewal or nack replaces the delivery. The position of its event names the new delivery.
    goes_on = F.concat_ws(":", "broker", "log_position", F.lit(0))
    deliveries = F.collect_set(
        F.when(is_delivered, F.col("delivery")).when(event.isin("renewed", "nacked"), goes_on)
    )
    # Events before the floor were not read, so earlier deliveries are unknown.
    told_at = F.split("delivery", ":")[1].cast("bigint")
    acks = F.collect_set(F.when(is_acked & (told_at >= F.col("floor")), F.col("delivery")))
    floors = placed.groupBy("broker").agg(F.min("log_position").alias("floor"))
    is_settled = (F.col("acked") > 0) | (F.col("dead_lettered") > 0)
    return (
        since_reset(moves, placed)
        .join(F.broadcast(floors), "broker")
        .groupBy(*PLACE, "consumer_group")
        .agg(
            F.max("message_id").alias("message_id"),
            F.sum(is_delivered.cast("int")).alias("delivered"),
            # Copies do not count: readers of dead letters do not read the original topics.
            F.max((is_delivered & (F.col("stands_on") == F.col("topic"))).cast("int")).alias(
                "delivered_there"
            ),
            F.min(F.when(is_delivered & (F.col("stands_on") == F.col("topic")), position)).alias(
                "first_position"
            ),
            F.min(F.when(is_delivered, F.col("event_ts"))).alias("first_delivered_at"),
            F.max(F.when(is_delivered, F.col("event_ts"))).alias("last_delivered_at"),
            F.collect_list(F.when(is_delivered, position)).alias("delivered_positions"),
            F.min(F.when(is_acked, position)).alias("first_ack"),
            F.max(is_acked.cast("int")).alias("acked"),
            F.min(F.when(is_acked, F.col("event_ts"))).alias("acked_at"),
            # Positive: its last dead letter was not replayed.
            (_count(event == "dead-lettered") - _count(event == "replayed")).alias("dead_lettered"),
            F.size(F.array_except(acks, deliveries)).alias("orphans"),
            deliveries.alias("deliveries"),
            last_move().alias("last"),
            F.min("event_ts").alias("at"),
        )
        .withColumn(
            "after_ack",
            F.size(F.filter("delivered_positions", lambda one: one > F.col("first_ack"))),
        )
        .drop("delivered_positions", "first_ack")
        .withColumn("again", F.greatest(F.lit(0), F.col("delivered") - 1 - F.col("after_ack")))
        # Null for settled messages, which are nearly all.
        .withColumn("last", F.when(~is_settled, F.col("last")))
        .withColumn("deliveries", F.when(~is_settled, F.col("deliveries")))
    )


def _count(condition: Column) -> Column:
    return F.sum(condition.cast("int"))


def _owed_letters(letters: DataFrame, progress: DataFrame, limits: Mapping[str, Any]) -> DataFrame:
    """Return of dead letters what `never_given` returns of all others."""
    is_delivered = F.col("event") == "delivered"
    # That a message became a letter there was the doing of the group that could not take it.
    moves = letters.where(
        F.col("event").isin(*_MOVES)
        & ~F.col("event").isin("dead-lettered", "replayed")
        & F.col("consumer_group").isNotNull()
    )
    groups = (
        since_reset(moves, letters)
        .groupBy(*PLACE, "consumer_group")
        .agg(
            F.max(is_delivered.cast("int")).alias("delivered_there"),
            F.min(F.when(is_delivered, F.col("log_position"))).alias("first_position"),
            F.min(F.when(is_delivered, F.col("event_ts"))).alias("first_delivered_at"),
        )
    )
    available = _available(letters, "stored", "dead-lettered")
    return never_given(available, groups, letters, progress, **limits)


# ---------------------------------------------------------------- the summary


def _summary(
    placed: DataFrame,
    available: DataFrame,
    timers: DataFrame,
    groups: DataFrame,
    owed: DataFrame,
    left: DataFrame,
    found: DataFrame,
    rules: AuditRules,
) -> DataFrame:
    """(topic, consumer_group, window: timestamp, produced, ..., orphan_ack), all counts long.

    Rows without a consumer group or time have null in that column.
    """
    parts = [
        *_steps(placed, available, timers, groups, rules),
        *_open_deliveries(owed, left, rules),
        *_counted_findings(found, rules),
    ]
    counted = parts[0].withColumn("n", F.lit(1))
    for part in parts[1:]:
        counted = counted.unionByName(part.withColumn("n", F.lit(1)))
    expired = placed.where("event = 'expired'").select(
        "topic",
        "consumer_group",
        _window("event_ts", rules),
        F.lit("expired").alias("what"),
        (F.col("end_offset") - F.col("queue_offset")).cast("int").alias("n"),
    )
    return (
        counted.unionByName(expired)
        .groupBy("topic", "consumer_group", "window")
        .pivot("what", list(COUNTS))
        .agg(F.sum("n"))
        .na.fill(0)
    )


def _window(at: str, rules: AuditRules) -> Column:
    return F.window(at, rules.window)["start"].alias("window")


def _steps(
    placed: DataFrame, available: DataFrame, timers: DataFrame, groups: DataFrame, rules: AuditRules
) -> list[DataFrame]:
    """Return a row (topic, consumer_group, window, what) for each step of a message."""
    nobody = F.lit(None).cast("string").alias("consumer_group")
    return [
        available.select("topic", nobody, _window("at", rules), F.lit("produced").alias("what")),
        timers.where("scheduled_at is not null").select(
            "topic", nobody, _window("scheduled_at", rules), F.lit("scheduled").alias("what")
        ),
        timers.where("fired_at is not null").select(
            "topic", nobody, _window("fired_at", rules), F.lit("fired").alias("what")
        ),
        placed.where("event = 'recalled'").select(
            "topic", nobody, _window("event_ts", rules), F.lit("recalled").alias("what")
        ),
        groups.where("delivered > 0").select(
            "topic", "consumer_group", _window("at", rules), F.lit("delivered").alias("what")
        ),
        groups.where("acked > 0").select(
            "topic", "consumer_group", _window("at", rules), F.lit("acked").alias("what")
        ),
        groups.where("dead_lettered > 0").select(
            "topic", "consumer_group", _window("at", rules), F.lit("dead_lettered").alias("what")
        ),
    ]


def _open_deliveries(owed: DataFrame, left: DataFrame, rules: AuditRules) -> list[DataFrame]:
    """Return a row of the same columns for each message that a group has not settled."""
    return [
        left.where("state in ('in_flight', 'overdue')").select(
            "topic", "consumer_group", _window("first_at", rules), F.lit("in_flight").alias("what")
        ),
        left.where("state in ('waiting', 'overdue')").select(
            "topic", "consumer_group", _window("first_at", rules), F.col("state").alias("what")
        ),
        owed.where("not is_missing").select(
            "topic", "consumer_group", _window("at", rules), F.lit("waiting").alias("what")
        ),
    ]


def _counted_findings(found: DataFrame, rules: AuditRules) -> list[DataFrame]:
    """Return a row of the same columns for each finding."""
    never = F.lit(None).cast("timestamp").alias("window")
    kind = F.replace("kind", F.lit("-"), F.lit("_")).alias("what")
    return [
        found.select("topic", "consumer_group", _window("at", rules), kind),
        # Spark has no window for a null time and would drop these rows.
        found.where("at is null").select("topic", "consumer_group", never, kind),
    ]


COUNTS: Final = (
    "produced",
    "scheduled",
    "fired",
    "recalled",
    "delivered",
    "acked",
    "dead_lettered",
    "expired",
    "in_flight",
    "overdue",
    "waiting",
    "missing",
    "unexpected",
    "duplicate",
    "redelivered",
    "early",
    "late",
    "orphan_ack",
    "unknown",
    "unreadable",
)


# ---------------------------------------------------------------- curves of the page


def lateness(events: DataFrame, window: str) -> DataFrame:
    """(window: timestamp, p50, p99, max: bigint ms), lateness of delayed messages by window."""
    off_ms = F.unix_millis("event_ts") - F.unix_millis("due_timestamp")
    return (
        events.where("event = 'fired' and due_timestamp is not null and timer_id is not null")
        .withColumn("off_ms", off_ms)
        .groupBy(F.window("event_ts", window)["start"].alias("window"))
        .agg(
            F.percentile("off_ms", 0.5).cast("bigint").alias("p50"),
            F.percentile("off_ms", 0.99).cast("bigint").alias("p99"),
            F.max("off_ms").alias("max"),
        )
        .orderBy("window")
    )


def _lag(groups: DataFrame, available: DataFrame, window: str) -> DataFrame:
    first = groups.where("delivered > 0")
    waited_ms = F.unix_millis("first_delivered_at") - F.unix_millis("since")
    since = available.select(*PLACE, F.col("at").alias("since"))
    return (
        first.join(since, [*PLACE])
        .withColumn("waited_ms", waited_ms)
        .groupBy(F.window("first_delivered_at", window)["start"].alias("window"), "consumer_group")
        .agg(F.percentile("waited_ms", 0.99).cast("bigint").alias("p99"))
        .orderBy("window", "consumer_group")
    )
