"""Messages that consumer groups are owed and did not get, and open deliveries (ADR 0055).

Pure: events in, tables out. The progress of groups (`PROGRESS`) was queried before the events were
read, so the events contain every delivery before that progress. Missing progress never makes a
message missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

from tidemill.message.resource_names import RETRY_TOPIC_PREFIX
from tidemill_pipeline.transforms.places import PLACE, QUEUE, with_reset

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# One row per consumer group and queue. For a queue of a retry topic, `topic_id` is that of the
# original topic. Offsets are null if nothing was popped.
PROGRESS: Final = (
    "broker string, topic string, topic_id bigint, queue_id int, consumer_group string,"
    " is_retry boolean, pop_offset bigint, commit_offset bigint, in_flight_count bigint,"
    " told_at timestamp"
)
# Largest difference of the clocks of broker groups and of this process.
CLOCKS_MS: Final = 60_000
_LAST: Final = ("event", "event_ts", "due_timestamp", "stands_on", "stands_queue", "stands_at")


def last_move() -> Column:
    """Return the last event of a message and consumer group, with the position of the message.

    An aggregate over moves.
    """
    return F.max_by(F.struct(*_LAST), F.col("log_position"))


def never_given(
    available: DataFrame,
    groups: DataFrame,
    events: DataFrame,
    progress: DataFrame,
    *,
    closed_at: Column,
    filtered: Sequence[str],
) -> DataFrame:
    """(place, message_id, timer_id, at, consumer_group, is_missing, detail), undelivered messages.

    One row per message and consumer group. A message that is not missing is outstanding. `groups`
    has the first delivery of each message in its own topic.
    """
    own = progress.where("not is_retry").drop("is_retry", "commit_offset", "in_flight_count")
    owed = _owed(available, _readers(groups, filtered), events, own)
    given = groups.select(*PLACE, "consumer_group")
    lost = owed.join(given, [*PLACE, "consumer_group"], "left_anti")
    keys = (*QUEUE, "consumer_group")
    expired = events.where("event = 'expired'").select(
        *(F.col(name).alias(f"of_{name}") for name in keys),
        F.col("queue_offset").alias("gone_from"),
        F.col("end_offset").alias("gone_to"),
    )
    lost = lost.join(
        F.broadcast(expired),
        [
            *(F.col(name) == F.col(f"of_{name}") for name in keys),
            F.col("queue_offset") >= F.col("gone_from"),
            F.col("queue_offset") < F.col("gone_to"),
        ],
        "left_anti",
    )
    is_between = F.col("queue_offset") < F.col("given_to")
    # At a broker group without deliveries, the consumer group may have started later.
    is_passed = (
        F.col("began_position").isNotNull()
        & (F.col("pop_offset") > F.col("queue_offset"))
        & _is_before_query("at")
    )
    is_missing = F.col("is_owed") & (F.col("at") < closed_at) & _true(is_between | is_passed)
    told = F.when(
        _true(is_between), F.lit("later messages were delivered to the group, but not this one")
    ).otherwise(
        F.lit("the group's next pop begins after it, but it was not delivered to the group")
    )
    return lost.select(
        *PLACE,
        "message_id",
        "timer_id",
        "at",
        "consumer_group",
        is_missing.alias("is_missing"),
        told.alias("detail"),
    )


def _readers(groups: DataFrame, filtered: Sequence[str]) -> DataFrame:
    """Return the deliveries of consumer groups in topics that they read, without copies."""
    readers = groups.where("delivered_there > 0")
    return readers.where(~F.col("consumer_group").isin(*filtered)) if filtered else readers


def _owed(available: DataFrame, readers: DataFrame, events: DataFrame, own: DataFrame) -> DataFrame:
    """Return the messages that consumer groups are owed, one row per message and group.

    Includes messages before the start of a group that the broker will deliver next. They are
    outstanding, but events alone do not show that they are owed (`is_owed`).
    """
    queues = readers.groupBy(*QUEUE, "consumer_group").agg(
        F.min("queue_offset").alias("given_from"),
        F.max("queue_offset").alias("given_to"),
        F.min("first_position").alias("first_position"),
        F.min("first_delivered_at").alias("first_at"),
    )
    there = queues.groupBy("broker", "topic", "topic_id", "consumer_group").agg(
        F.min("first_position").alias("began_position"), F.min("first_at").alias("began_at")
    )
    anywhere = there.groupBy("topic", "consumer_group").agg(F.min("began_at").alias("began_at"))
    asked = (
        available.join(F.broadcast(anywhere), "topic")
        .join(
            F.broadcast(there.drop("began_at")),
            ["broker", "topic", "topic_id", "consumer_group"],
            "left",
        )
        .join(
            F.broadcast(queues.drop("first_position", "first_at")),
            [*QUEUE, "consumer_group"],
            "left",
        )
    )
    is_elsewhere = (
        F.col("began_position").isNull()
        & (_ms("at") > _ms("began_at") + CLOCKS_MS)
        & (F.col("reset").isNull() | (F.col("position") > F.col("reset")))
    )
    is_owed = (
        (F.col("queue_offset") >= F.col("given_from"))
        | (F.col("position") > F.col("began_position"))
        | is_elsewhere
    )
    is_next = F.col("pop_offset") <= F.col("queue_offset")
    return (
        with_reset(asked, events)
        .join(F.broadcast(own), [*QUEUE, "consumer_group"], "left")
        .withColumn("is_owed", _true(is_owed))
        .where(F.col("is_owed") | is_next)
    )


def unsettled(
    groups: DataFrame,
    events: DataFrame,
    progress: DataFrame,
    *,
    closed_at: Column,
    filtered: Sequence[str],
) -> DataFrame:
    """(place, message_id, consumer_group, first_at, at, state, detail), unsettled messages.

    One row per message and consumer group whose last event, at `at`, does not settle it. `state`:

        waiting    revived or replayed, and not delivered since
        in_flight  delivered
        overdue    delivered, and its invisible duration has ended
        missing    one of these, but the broker has settled or skipped it
    """
    out = _without_expired(_without_settled(groups.where("last is not null"), events), events)
    # A copy does not identify its dead-letter topic among topics of one name, so it only counts.
    retries = F.concat(F.lit(RETRY_TOPIC_PREFIX), "consumer_group", F.lit("+"), "topic")
    is_retry = F.when(F.col("stands_on") == F.col("topic"), F.lit(False)).when(
        F.col("stands_on") == retries, F.lit(True)
    )
    told = progress.withColumnRenamed("queue_id", "stands_queue")
    out = out.withColumn("is_retry", is_retry).join(
        F.broadcast(told),
        ["broker", "topic", "topic_id", "stands_queue", "consumer_group", "is_retry"],
        "left",
    )
    is_revived = F.col("event").isin("revived", "replayed")
    is_over = ~is_revived & _true(F.col("due_timestamp") < closed_at)
    # The commit offset does not include deliveries with a changed invisible duration.
    is_settled = (F.col("commit_offset") > F.col("stands_at")) & (
        (F.col("event") == "delivered") | (F.col("in_flight_count") == 0)
    )
    is_passed = F.col("is_retry") & (F.col("pop_offset") > F.col("stands_at"))
    is_lost = F.when(
        is_revived, is_passed & (F.col("event_ts") < closed_at) & _is_before_query("event_ts")
    ).otherwise(is_over & is_settled & _is_before_query("due_timestamp"))
    if filtered:
        is_lost = is_lost & ~F.col("consumer_group").isin(*filtered)
    state = (
        F.when(_true(is_lost), "missing")
        .when(is_revived, "waiting")
        .when(is_over, "overdue")
        .otherwise("in_flight")
    )
    ended = F.concat(
        F.lit("its invisible duration ended at "),
        F.col("due_timestamp").cast("string"),
        F.lit(", and it did not come back"),
    )
    passed = F.concat(
        F.lit("it was "),
        F.col("event"),
        F.lit(", and the group's next pop begins behind it on its retry topic"),
    )
    return out.select(
        *PLACE,
        "message_id",
        "consumer_group",
        "first_at",
        F.col("event_ts").alias("at"),
        state.alias("state"),
        F.when(is_revived, passed).otherwise(ended).alias("detail"),
    )


def _without_settled(out: DataFrame, events: DataFrame) -> DataFrame:
    """Drop messages that an event settles which names only the delivery.

    This happens if retention removed the record of the delivery before the event was read.
    """
    placeless = events.where(
        (F.coalesce("topic", F.lit("")) == "") & F.col("delivery").isNotNull()
    ).select("delivery")
    keys = [*PLACE, "consumer_group"]
    settled = (
        out.select(*keys, F.explode("deliveries").alias("delivery"))
        .join(placeless, "delivery", "left_semi")
        .select(*keys)
    )
    return out.join(settled, keys, "left_anti").select(
        *keys, "message_id", F.col("at").alias("first_at"), "last.*"
    )


def _without_expired(out: DataFrame, events: DataFrame) -> DataFrame:
    """Drop messages that retention removed at their last position."""
    expired = events.where("event = 'expired'").select(
        F.col("broker").alias("on_broker"),
        F.col("stands_on").alias("on_topic"),
        F.col("stands_queue").alias("on_queue"),
        F.col("stands_at").alias("gone_from"),
        F.col("end_offset").alias("gone_to"),
        F.col("consumer_group").alias("of_group"),
    )
    is_gone = (
        (F.col("broker") == F.col("on_broker"))
        & (F.col("stands_on") == F.col("on_topic"))
        & (F.col("stands_queue") == F.col("on_queue"))
        & (F.col("consumer_group") == F.col("of_group"))
        & (F.col("stands_at") >= F.col("gone_from"))
        & (F.col("stands_at") < F.col("gone_to"))
    )
    return out.join(F.broadcast(expired), is_gone, "left_anti")


def _is_before_query(at: str) -> Column:
    """Return whether an event is before the query of the progress, for any clock error."""
    return _ms(at) + CLOCKS_MS < _ms("told_at")


def _ms(at: str) -> Column:
    return F.unix_millis(at)


def _true(claim: Column) -> Column:
    """Return a condition with false instead of null."""
    return F.coalesce(claim, F.lit(False))
