"""The lag of a consumer group before and after its first poll, at all broker groups.

The progress, the scaling of consumers, the metrics of the brokers, and the backlog of a broker
group that is to be removed show one number.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.clients.api import METADATA, api, message
from tests.support.eventually import eventually
from tests.support.processes.processes import ADMIN_S, Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

BROKERS = ("broker-0", "broker-1")
COUNT = 20
CALL_S = 30.0
# Metrics are read at most once a second, and the demand is up to two seconds old.
WITHIN_MS = 60_000


def numbers_of(running: Standalone, group: str) -> dict[str, Any]:
    """Return the lag of a group by each of its sources."""
    with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
        scaling = client.get(f"{running.admin}/api/v1/groups/{group}/scaling")
        metrics = [client.get(running.processes[name].metrics).text for name in BROKERS]
    return {
        "progress": running.lag(group),
        "scaling": scaling.json()["value"] if scaling.is_success else scaling.status_code,
        "metrics": sum(
            sample.value
            for text in metrics
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "rocketmq_consumer_lag_messages"
            and sample.labels["consumer_group"] == group
        ),
    }


def await_lag(running: Standalone, group: str, lag: int) -> None:
    """Wait until all sources show the lag."""
    wanted = {"progress": lag, "scaling": lag, "metrics": lag}
    found: dict[str, Any] = {}

    def is_shown() -> bool:
        found.update(numbers_of(running, group))
        return found == wanted

    try:
        eventually(is_shown, within_ms=WITHIN_MS)
    except AssertionError:
        pytest.fail(f"{found}, not {wanted}")


async def send_all(running: Standalone) -> None:
    """Send messages, of which each broker group stores some."""
    async with api(running.grpc, call_s=CALL_S) as client:
        for n in range(COUNT):
            answer = await client.send(message("orders", f"m{n}".encode()))
            assert answer.status.code == v2.OK


async def subscribed(running: Standalone, group: str, then: Callable[[], None]) -> None:
    """Subscribe like an official consumer that has not polled yet, and call `then`."""
    subscription = v2.Subscription(
        group=v2.Resource(name=group),
        subscriptions=[
            v2.SubscriptionEntry(
                topic=v2.Resource(name="orders"),
                expression=v2.FilterExpression(type=v2.TAG, expression="*"),
            )
        ],
    )
    settings = v2.Settings(client_type=v2.SIMPLE_CONSUMER, subscription=subscription)
    async with api(running.grpc, call_s=CALL_S) as client:
        stream = client.stub.Telemetry(metadata=METADATA)
        await stream.write(service.TelemetryCommand(settings=settings))
        await stream.read()
        await asyncio.to_thread(then)
        stream.cancel()


async def receive_one(running: Standalone, group: str) -> None:
    """Receive one message from one broker group, and keep it."""
    async with api(running.grpc, call_s=CALL_S) as client:
        found: list[v2.Message] = []
        while not found:
            found = await client.receive("orders", group, batch_size=1, invisible_ms=600_000)
        assert len(found) == 1


def test_the_lag_counts_all_broker_groups_before_and_after_the_first_poll(tmp_path: Path) -> None:
    with standalone(tmp_path / "data", "--groups=2") as running:
        running.put("topics/orders", messageType="NORMAL", queues=2)
        for group in ("subscriber", "poller"):
            running.put(f"groups/{group}")
        asyncio.run(send_all(running))
        asyncio.run(
            subscribed(running, "subscriber", lambda: await_lag(running, "subscriber", COUNT))
        )
        asyncio.run(receive_one(running, "poller"))
        await_lag(running, "poller", COUNT)
        before = {one["name"]: one for one in running.get("broker-groups")["items"]}
        assert set(before) == set(BROKERS)
        with httpx.Client(trust_env=False, timeout=ADMIN_S) as client:
            drain = client.post(f"{running.admin}/api/v1/broker-groups/broker-1:drain")
            drain.raise_for_status()
        left = running.get("broker-groups/broker-1")["left"]
        counted = {item["group"] for item in left["items"]}
        assert counted == {"subscriber", "poller"}
        assert running.stop() == 0
    # A broker that has restarted knows which topics the group reads.
    with standalone(tmp_path / "data", "--groups=2") as running:
        await_lag(running, "poller", COUNT)
