"""J3: lateness of delayed messages by topic and minute, and by delay."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pyspark.sql import functions as F  # noqa: N812  # The usual name among users of Spark.

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

# Bands of the requested delay: end in milliseconds, and name. Each band uses other parts of the
# timer wheel.
BANDS: Final = (
    (60_000, "< 1 min"),
    (3_600_000, "< 1 h"),
    (86_400_000, "< 1 d"),
    (2_592_000_000, "< 30 d"),
)
LONGER: Final = "longer"
UNKNOWN: Final = "unknown"  # scheduled before the first event that was read


def fired(events: DataFrame) -> DataFrame:
    """(topic, broker, timer_id, fired_at: timestamp, off_ms: bigint, band), one row per timer."""
    event = F.col("event")
    timers = (
        events.where(F.col("timer_id").isNotNull() & event.isin("scheduled", "fired"))
        .groupBy("broker", "timer_id")
        .agg(
            F.max(F.when(event == "fired", F.col("topic"))).alias("topic"),
            F.min(F.when(event == "fired", F.col("event_ts"))).alias("fired_at"),
            F.max(F.when(event == "fired", F.col("due_timestamp"))).alias("due"),
            F.min(F.when(event == "scheduled", F.col("event_ts"))).alias("scheduled_at"),
        )
        .where("fired_at is not null and due is not null")
    )
    asked_ms = F.unix_millis("due") - F.unix_millis("scheduled_at")
    return timers.select(
        "topic",
        "broker",
        "timer_id",
        "fired_at",
        (F.unix_millis("fired_at") - F.unix_millis("due")).alias("off_ms"),
        _band(asked_ms).alias("band"),
    )


def _band(asked_ms: Column) -> Column:
    band = F.when(asked_ms.isNull(), UNKNOWN)
    for end_ms, name in BANDS:
        band = band.when(asked_ms < end_ms, name)
    return band.otherwise(LONGER)


def accuracy(firings: DataFrame, *, by: Column | str) -> DataFrame:
    """(topic, by, count, early, p50, p90, p99, p999, max: bigint ms), one row per topic, `by`."""
    quantiles = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}
    return (
        firings.groupBy("topic", by)
        .agg(
            F.count("*").alias("count"),
            F.sum((F.col("off_ms") < 0).cast("bigint")).alias("early"),
            *(
                F.percentile("off_ms", quantile).cast("bigint").alias(name)
                for name, quantile in quantiles.items()
            ),
            F.max("off_ms").alias("max"),
        )
        .orderBy("topic")
    )


def by_minute(firings: DataFrame) -> DataFrame:
    """`accuracy` by `minute: timestamp`."""
    return accuracy(firings, by=F.date_trunc("minute", "fired_at").alias("minute"))


def by_band(firings: DataFrame) -> DataFrame:
    """`accuracy` by `band: string`, the range of the requested delay."""
    return accuracy(firings, by="band")
