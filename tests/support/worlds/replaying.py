"""Helpers for tests of replays: a frame of archived messages, a replay, and an aborted replay."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.worlds.archiving import NOW_MS, ArchiveWorld
from tests.support.worlds.fake_cluster import FakeCluster
from tidemill_pipeline.jobs import replay, replay_plan
from tidemill_pipeline.schema import ddl

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

FIRST_MS = 1_700_000_000_000


def stored(spark: SparkSession, *given: dict[str, Any]) -> DataFrame:
    """Return messages in the archive's form. Omitted columns are empty."""
    rows = [
        {
            "topic": "orders",
            "broker": "a",
            "queue_id": 1,
            "queue_offset": i,
            "message_id": f"m{i}",
            "body": b"b",
            "properties": {},
            "system_properties": {},
            "stored_ms": FIRST_MS,
            **each,
        }
        for i, each in enumerate(given)
    ]
    frame = spark.createDataFrame(
        rows,
        ddl("messages").replace("store_timestamp timestamp_ltz", "stored_ms bigint"),
        verifySchema=False,
    )
    return frame.selectExpr("*", "timestamp_millis(stored_ms) as store_timestamp")


def replaying(
    cluster: FakeCluster, archive: ArchiveWorld, state: Path, **more: Any
) -> replay_plan.ReplaySettings:
    """Return a replay of the topic `orders` into `again` without retries of sends."""
    cluster.create("again")
    return replay_plan.ReplaySettings(
        archive=archive.path,
        given={"topics": "orders"},
        state=str(state),
        sink={"endpoints": cluster.endpoint, "topic": "again"},
        **{"more": {"maxRetries": "0", "retryBackoffMs": "1"}, **more},
    )


def breaks_off(
    spark: SparkSession, cluster: FakeCluster, settings: replay_plan.ReplaySettings, *, after: int
) -> None:
    """Begin a replay that fails after a number of sends."""
    cluster.passing, cluster.failing = {"SendMessage": after}, {"SendMessage": 100}
    with pytest.raises(Exception, match="a send failed"):
        replay.send(spark, settings, now_ms=lambda: NOW_MS)
    cluster.passing, cluster.failing = {}, {}
