"""A look at a topic with Spark: how much, of what, how large, and how late it was delivered.

    make setup-pipeline
    .venv/bin/python examples/pipeline.py --endpoints 127.0.0.1:8081 --topic orders

Each step stands for a cell of a notebook.
"""

from __future__ import annotations

import argparse

from pyspark.sql import functions as F  # noqa: N812  # As all of Spark's users write it.

from tidemill_pipeline.session import build_spark


def main() -> None:
    """Read a topic, its events and what its groups have still to do."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--endpoints", default="127.0.0.1:8081")
    arguments.add_argument("--topic", default="orders")
    given = arguments.parse_args()
    spark = build_spark("example")
    spark.sparkContext.setLogLevel("ERROR")
    source = spark.read.format("rocketmq").option("endpoints", given.endpoints)

    # How much there is of each tag, and how large it is. Bodies stay where they are.
    messages = source.option("topic", given.topic).option("includeBody", "false").load()
    messages.groupBy("tag").agg(
        F.count("*").alias("messages"),
        F.round(F.avg("body_size")).alias("bytes"),
        F.max("store_timestamp").alias("last"),
    ).show(truncate=False)

    # What happened, by the minute.
    events = (
        spark.read.format("rocketmq")
        .option("endpoints", given.endpoints)
        .option("dataset", "events")
        .option("topic", given.topic)
        .load()
    )
    minutes = events.groupBy(F.date_trunc("minute", "event_ts").alias("minute"))
    minutes.pivot("event").count().orderBy("minute").show(truncate=False)

    # How far groups are behind: from the first message of a queue that is not settled to its end.
    groups = (
        spark.read.format("rocketmq")
        .option("endpoints", given.endpoints)
        .option("dataset", "groups")
        .load()
    )
    groups.groupBy("consumer_group", "topic").agg(F.sum("lag").alias("lag")).show(truncate=False)
    spark.stop()


if __name__ == "__main__":
    main()
