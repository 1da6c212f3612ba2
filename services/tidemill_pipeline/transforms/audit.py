"""J2: compare produced and consumed messages by their lifecycle events.

Pure: events in, tables out. The first position of a message identifies it: (broker, topic,
topic_id, queue_id, queue_offset). Two messages with one id are therefore two messages, and so are
messages of two topics of one name (ADR 0054). A timer identifies a delayed message until it fires.

A consumer group is owed the messages after its first delivery in a topic and in each queue
(`owed.py`). A group that was deleted and created again is a different group. A group that received
only copies, such as dead letters, is owed the dead-letter topic, not the original topic.

Kinds of findings:

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

A message that a group is owed and has not skipped is outstanding, which is not a finding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill_pipeline.rows import UNREADABLE
from tidemill_pipeline.transforms.owed import PROGRESS, last_move, never_given, unsettled
from tidemill_pipeline.transforms.places import PLACE, at_first_place, since_reset, with_stands

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
DEAD_LETTERS: Final = "%DLQ%"  # prefix of dead-letter topics
REMOVED: Final = "broker-group-removed"  # the event; the log of the broker group is not readable
JOURNEY_MAX: Final = 200  # events per finding: a message can be redelivered without end
_MOVES: Final = ("delivered", "acked", "renewed", "nacked", "revived", "dead-lettered")
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
    limits = {"closed_at": _closed(rules), "filtered": rules.filtered_groups}
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
        _missing_timers(timers, rules)
        .unionByName(_untimely(timers, rules))
        .unionByName(_unexpected(timers))
        .unionByName(_fired_again(timers))
        .unionByName(_missing(owed.where("is_missing")))
        .unionByName(_missing(left.where("state = 'missing'")))
        .unionByName(_redelivered(groups, "duplicate", "after_ack"))
        .unionByName(_redelivered(groups, "redelivered", "again"))
        .unionByName(_delivered_early(groups, available))
        .unionByName(_orphans(groups))
    )
    told = placed.unionByName(letters) if rules.is_whole else placed
    if sends is not None:
        found = found.unionByName(never_stored(sends, events, rules))
    found = found.dropDuplicates(["kind", "consumer_group", "message_id", *PLACE, "timer_id"])
    found = _doubted(found, events).unionByName(_unreadable(events)).localCheckpoint(eager=False)
    return AuditTables(
        summary=_summary(placed, available, timers, groups, owed, left, found, rules),
        findings=_with_journeys(found, told),
        lag=_lag(groups, available, rules.window),
    )


def _letters(events: DataFrame) -> DataFrame:
    """Return the events of dead-letter topics by position, and all resets."""
    is_letter = F.col("topic").startswith(DEAD_LETTERS)
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
            F.max((event == "dead-lettered").cast("int")).alias("dead_lettered"),
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


# ---------------------------------------------------------------- findings


def _finding(kind: str, frame: DataFrame, *, at: str, detail: Column) -> DataFrame:
    """Return rows of findings. Columns that the kind does not have are null."""
    types = dict(part.split() for part in FINDINGS.split(", "))
    there = set(frame.columns)
    values = {
        name: F.col(name).cast(of_type) if name in there else F.lit(None).cast(of_type)
        for name, of_type in types.items()
    } | {"kind": F.lit(kind), "at": F.col(at).cast("timestamp"), "detail": detail.cast("string")}
    return frame.select(*(value.alias(name) for name, value in values.items()))


def _closed(rules: AuditRules) -> Column:
    return F.timestamp_millis(F.lit(rules.closed_at_ms))


def _missing_timers(timers: DataFrame, rules: AuditRules) -> DataFrame:
    lost = timers.where(
        F.col("fired_at").isNull()
        & (F.col("recalled") == 0)
        & (F.col("dead_lettered") == 0)
        & (F.col("due") < _closed(rules))
    ).drop("topic_id", "queue_id", "queue_offset")
    return _finding("missing", lost, at="due", detail=F.lit("it was due, and was not fired"))


def _untimely(timers: DataFrame, rules: AuditRules) -> DataFrame:
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


def _unexpected(timers: DataFrame) -> DataFrame:
    at = F.coalesce("fired_at", "delivered_at")
    there = timers.where(F.col("recalled") > 0).withColumn("at", at).where("at is not null")
    what = F.when(F.col("fired_at").isNotNull(), F.lit("fired")).otherwise(F.lit("delivered"))
    return _finding(
        "unexpected",
        there.drop("topic_id", "queue_id", "queue_offset"),
        at="at",
        detail=F.concat(F.lit("it was recalled, and "), what, F.lit(" all the same")),
    )


def _fired_again(timers: DataFrame) -> DataFrame:
    # Several positions: the timer identifies the message.
    again = timers.where("fired > 1").drop("topic_id", "queue_id", "queue_offset")
    return _finding(
        "duplicate",
        again,
        at="fired_at",
        detail=F.concat(F.lit("fired "), F.col("fired"), F.lit(" times")),
    )


def _missing(lost: DataFrame) -> DataFrame:
    return _finding("missing", lost, at="at", detail=F.col("detail"))


def _owed_letters(letters: DataFrame, progress: DataFrame, limits: Mapping[str, Any]) -> DataFrame:
    """Return of dead letters what `never_given` returns of all others."""
    is_delivered = F.col("event") == "delivered"
    # That a message became a letter there was the doing of the group that could not take it.
    moves = letters.where(
        F.col("event").isin(*_MOVES)
        & (F.col("event") != "dead-lettered")
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


def _redelivered(groups: DataFrame, kind: str, count: str) -> DataFrame:
    what = " times after its ack" if kind == "duplicate" else " times more, without an ack before"
    return _finding(
        kind,
        groups.where(F.col(count) > 0),
        at="last_delivered_at",
        detail=F.concat(F.lit("delivered "), F.col(count), F.lit(what)),
    )


def _delivered_early(groups: DataFrame, available: DataFrame) -> DataFrame:
    due = available.where("due is not null").select(*PLACE, "due", "timer_id")
    early = groups.join(due, [*PLACE]).where(F.col("first_delivered_at") < F.col("due"))
    before_ms = F.unix_millis("due") - F.unix_millis("first_delivered_at")
    return _finding(
        "early",
        early,
        at="first_delivered_at",
        detail=F.concat(F.lit("delivered "), before_ms, F.lit(" ms before it was due")),
    )


def _orphans(groups: DataFrame) -> DataFrame:
    return _finding(
        "orphan-ack",
        groups.where("orphans > 0"),
        at="acked_at",
        detail=F.concat(F.col("orphans"), F.lit(" acks of deliveries without an event")),
    )


def _doubted(found: DataFrame, events: DataFrame) -> DataFrame:
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


def _unreadable(events: DataFrame) -> DataFrame:
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


def _with_journeys(found: DataFrame, placed: DataFrame) -> DataFrame:
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

    def window(at: str) -> Column:
        return F.window(at, rules.window)["start"].alias("window")

    nobody = F.lit(None).cast("string").alias("consumer_group")
    never = F.lit(None).cast("timestamp").alias("window")
    kind = F.replace("kind", F.lit("-"), F.lit("_")).alias("what")
    parts = [
        available.select("topic", nobody, window("at"), F.lit("produced").alias("what")),
        timers.where("scheduled_at is not null").select(
            "topic", nobody, window("scheduled_at"), F.lit("scheduled").alias("what")
        ),
        timers.where("fired_at is not null").select(
            "topic", nobody, window("fired_at"), F.lit("fired").alias("what")
        ),
        placed.where("event = 'recalled'").select(
            "topic", nobody, window("event_ts"), F.lit("recalled").alias("what")
        ),
        groups.where("delivered > 0").select(
            "topic", "consumer_group", window("at"), F.lit("delivered").alias("what")
        ),
        groups.where("acked > 0").select(
            "topic", "consumer_group", window("at"), F.lit("acked").alias("what")
        ),
        groups.where("dead_lettered > 0").select(
            "topic", "consumer_group", window("at"), F.lit("dead_lettered").alias("what")
        ),
        left.where("state in ('in_flight', 'overdue')").select(
            "topic", "consumer_group", window("first_at"), F.lit("in_flight").alias("what")
        ),
        left.where("state in ('waiting', 'overdue')").select(
            "topic", "consumer_group", window("first_at"), F.col("state").alias("what")
        ),
        owed.where("not is_missing").select(
            "topic", "consumer_group", window("at"), F.lit("waiting").alias("what")
        ),
        found.select("topic", "consumer_group", window("at"), kind),
        # Spark has no window for a null time and would drop these rows.
        found.where("at is null").select("topic", "consumer_group", never, kind),
    ]
    counted = parts[0].withColumn("n", F.lit(1))
    for part in parts[1:]:
        counted = counted.unionByName(part.withColumn("n", F.lit(1)))
    expired = placed.where("event = 'expired'").select(
        "topic",
        "consumer_group",
        window("event_ts"),
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
