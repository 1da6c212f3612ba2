"""Positions that identify messages in an audit, and resets.

Pure: events in, tables out (ADR 0051, ADR 0054).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

QUEUE: Final = ("broker", "topic", "topic_id", "queue_id")
PLACE: Final = (*QUEUE, "queue_offset")
GROUP_DELETED: Final = "group_deleted"  # reason of a reset of all queues


def at_first_place(events: DataFrame) -> DataFrame:
    """Return events with the place, `PLACE`, of the first copy of their message.

    `with_stands` returns the place in the event itself. The event of a copy names the topic
    without its id. Copies are deleted with their topic, so it is the topic that had the name then.
    """
    is_copy = F.col("origin_topic").isNotNull()
    topics = (
        events.where(~is_copy & (F.col("topic_id") > 0))
        .groupBy("broker", "topic", "topic_id")
        .agg(F.min("log_position").alias("since"))
        .groupBy("broker", "topic")
        .agg(F.array_sort(F.collect_list(F.struct("since", "topic_id"))).alias("topics"))
    )
    then = F.filter("topics", lambda one: one["since"] <= F.col("log_position"))
    # Of before the first event that there is: the first topic.
    of_copy = F.coalesce(F.try_element_at(then, F.lit(-1)), F.try_element_at("topics", F.lit(1)))
    own = F.when(is_copy, of_copy["topic_id"]).otherwise(F.col("topic_id"))
    return (
        with_stands(events)
        .withColumn("topic", F.coalesce("origin_topic", "topic"))
        .join(F.broadcast(topics), ["broker", "topic"], "left")
        # Not null, because joins use it.
        .withColumn("topic_id", F.coalesce(own, F.lit(0).cast("bigint")))
        .drop("topics")
        .withColumn(
            "queue_id", F.when(is_copy, F.col("origin_queue_id")).otherwise(F.col("queue_id"))
        )
        .withColumn(
            "queue_offset",
            F.when(is_copy, F.col("origin_queue_offset")).otherwise(F.col("queue_offset")),
        )
    )


def with_stands(events: DataFrame) -> DataFrame:
    """Add `stands_on`, `stands_queue` and `stands_at`: the position in the event."""
    return (
        events.withColumn("stands_on", F.col("topic"))
        .withColumn("stands_queue", F.col("queue_id"))
        .withColumn("stands_at", F.col("queue_offset"))
    )


def with_reset(frame: DataFrame, events: DataFrame) -> DataFrame:
    """Add `reset: long`, the log position of the last reset or deletion of the consumer group.

    Null: none. There are few resets, so a join is cheaper than a sort by queue and group.
    """
    resets = events.where("event = 'reset'")

    def last(name: str, *of: str) -> DataFrame:
        return F.broadcast(resets.groupBy(*of).agg(F.max("log_position").alias(name)))

    of_queues = last("of_queue", *QUEUE, "consumer_group")
    resets = resets.where(F.col("reason") == GROUP_DELETED)
    of_groups = last("of_group", "broker", "consumer_group")
    return (
        frame.join(of_queues, [*QUEUE, "consumer_group"], "left")
        .join(of_groups, ["broker", "consumer_group"], "left")
        .withColumn("reset", F.greatest("of_queue", "of_group"))
        .drop("of_queue", "of_group")
    )


def since_reset(moves: DataFrame, events: DataFrame) -> DataFrame:
    """Drop deliveries before the last reset or deletion of the consumer group."""
    return (
        with_reset(moves, events)
        .where(F.col("reset").isNull() | (F.col("log_position") > F.col("reset")))
        .drop("reset")
    )
