"""The source against a real broker: what a producer stored is what Spark reads."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.pipeline_life import ACKED, DELAYED, GROUP, SENT, TOPIC, live
from tests.support.pipeline_load import send_some
from tests.support.processes import Standalone, standalone
from tidemill.common.clock import SystemClock
from tidemill.pipeline.jobs.audit import AuditSettings, judge, read_events

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with standalone(tmp_path_factory.mktemp("broker") / "data") as running:
        yield running


def test_what_a_producer_stored_is_read_in_every_column(
    spark: SparkSession, broker: Standalone
) -> None:
    broker.put("topics/orders", queues=4)
    sent = send_some(broker.grpc, "orders", 400)
    frame = spark.read.format("rocketmq").option("endpoints", broker.grpc).option("topic", "orders")
    rows = frame.load().collect()
    assert {(row.message_id, bytes(row.body)) for row in rows} == sent
    assert {row.queue_id for row in rows} == {0, 1, 2, 3}
    row = rows[0]
    assert row.properties == {"colour": "red"}
    assert row.tag == "t"
    assert row.keys == ["k1", "k2"]
    assert row.broker == "broker-0"
    assert row.commitlog_offset > 0
    assert row.message_type == "normal"
    assert row.body_size == len(row.body)


def test_an_audit_of_a_real_life_finds_nothing_and_counts_right(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as own:
        ids = asyncio.run(live(own.grpc))
        sends = tmp_path / "sends.jsonl"
        sends.write_text(
            "".join(json.dumps({"message_id": each, "topic": TOPIC}) + "\n" for each in ids)
        )
        settings = AuditSettings(
            to=str(tmp_path), given={"endpoints": own.grpc}, sends=str(sends), grace_s=0
        )
        events = read_events(spark, settings.given)
        verdict = judge(spark, events, settings, now_ms=SystemClock().wall_ms())
    assert sum(verdict.counts.values()) == 0, verdict.findings
    of = {(row["topic"], row["consumer_group"]): row for row in verdict.totals}
    assert of[TOPIC, None]["produced"] == SENT + DELAYED
    assert of[TOPIC, None]["fired"] == DELAYED
    readers = of[TOPIC, GROUP]
    assert (readers["delivered"], readers["acked"]) == (SENT + DELAYED, ACKED)
    assert readers["in_flight"] == SENT + DELAYED - ACKED
