"""J2 on groups of a real broker: lagging, late, ordered, and groups that exhaust attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.clients.api import Api, api, message
from tests.support.processes.processes import standalone
from tidemill.common.clock import SystemClock
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill_pipeline.jobs.audit import AuditSettings, judge
from tidemill_pipeline.jobs.events import read_events
from tidemill_pipeline.jobs.group_progress import read_progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

BEFORE, AFTER, ORDERED = 20, 10, 6
TAKEN = 5  # Messages that a lagging group receives.
SHORT_MS = 1_000  # An invisible duration that ends in the test.
POLL_MS = 10_000
LATER_MS = 600_000  # From run to audit, by the audit's clock. Brokers answer between them.


def test_groups_behind_late_or_without_attempts_left_have_lost_nothing(
    spark: SparkSession, tmp_path: Path
) -> None:
    with standalone(tmp_path / "data") as running:
        running.put("topics/plain", queues=2)
        running.put("topics/ordered", messageType="FIFO", queues=2)
        running.put("groups/late", startFrom="latest")
        running.put("groups/ordered", deliveryOrder="FIFO")
        running.put("groups/leaver", deliveryOrder="FIFO")
        running.put("groups/strict", maxAttempts=2)
        asyncio.run(live(running.grpc))
        given = {"endpoints": running.grpc}
        # The brokers' answers are much later: passed messages without a delivery would be missing.
        progress = read_progress(spark, given)
        assert progress is not None
        progress = progress.selectExpr(
            *(name for name in progress.columns if name != "told_at"),
            f"told_at + interval {LATER_MS} milliseconds as told_at",
        )
        events = read_events(spark, given)
        verdict = judge(
            spark,
            events,
            AuditSettings(to=str(tmp_path), given=given, grace_s=0),
            now_ms=SystemClock().wall_ms() + LATER_MS,
            progress=progress,
        )
    found = {kind: count for kind, count in verdict.counts.items() if count}
    # Each message of the strict group was delivered once more and became a dead letter.
    assert set(found) == {"redelivered"}
    of = {(row["topic"], row["consumer_group"]): row for row in verdict.totals}

    def counted(name: str) -> dict[tuple[str, str], int]:
        return {key: row[name] for key, row in of.items() if row[name]}

    assert counted("dead_lettered") == {("plain", "strict"): BEFORE + AFTER}
    # Without polls, expired deliveries are overdue. The ordered group's other messages wait.
    waiting = counted("waiting")
    given_leaver = of["ordered", "leaver"]["delivered"]
    assert counted("overdue") == {("ordered", "leaver"): given_leaver}
    assert waiting == {
        ("plain", "behind"): BEFORE + AFTER - TAKEN,
        ("ordered", "leaver"): ORDERED - given_leaver,
        ("%DLQ%strict", "undertaker"): BEFORE + AFTER - TAKEN,
    }
    assert of["plain", "late"]["delivered"] == AFTER


async def live(endpoint: str) -> None:
    """Run the consumers of each group."""
    async with api(endpoint) as client:
        # The group begins at the first offset. It has no delivery yet.
        await send(client, "plain", BEFORE)
        assert not await client.receive("plain", "late")
        await take(client, "plain", "behind", TAKEN)
        await send(client, "plain", AFTER)
        for n in range(ORDERED):
            answer = await client.send(
                message("ordered", b"o%d" % n, message_id=f"o{n}", message_group="one")
            )
            assert answer.status.code == v2.OK
        await take(client, "plain", "late", AFTER)
        await take(client, "plain", "all", BEFORE + AFTER)
        await take(client, "ordered", "ordered", ORDERED)
        await give_up(client, BEFORE + AFTER)
        await take(client, "%DLQ%strict", "undertaker", TAKEN)
        got = await client.receive(
            "ordered", "leaver", poll_ms=POLL_MS, invisible_ms=SHORT_MS, batch_size=2
        )
        assert got


async def send(client: Api, topic: str, count: int) -> None:
    for n in range(count):
        answer = await client.send(message(topic, b"%d" % n, message_id=f"{topic}-{count}-{n}"))
        assert answer.status.code == v2.OK


async def take(client: Api, topic: str, group: str, count: int) -> None:
    """Receive and ack `count` messages."""
    left = count
    while left:
        got = await client.receive(topic, group, poll_ms=POLL_MS, batch_size=min(left, 32))
        assert got, f"{left} of {count} messages of {topic} do not come to {group}"
        handles = [one.system_properties.receipt_handle for one in got]
        await client.ack(topic, group, handles)
        left -= len(got)


async def give_up(client: Api, count: int) -> None:
    """Receive each message twice without an ack, to exhaust its attempts."""
    left = 2 * count
    while left:
        got = await client.receive("plain", "strict", poll_ms=POLL_MS, invisible_ms=SHORT_MS)
        assert got, f"{left} deliveries do not come"
        left -= len(got)
