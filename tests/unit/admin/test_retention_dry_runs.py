"""A dry run of a topic, while the count of expired messages fails."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.app import create_app
from tidemill.admin.routes import brokers_of
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    BrokerTimeout,
    BrokerUnreachable,
    Conflict,
    Draining,
    Overloaded,
    ServiceError,
    TopicNotFound,
)
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

APP = create_app(None, None)  # type: ignore[arg-type]  # Each test has its own brokers.
DAY_MS = 86_400_000
NORMAL = pb.TOPIC_TYPE_NORMAL
KEPT_LONG, KEPT_SHORT = pb.TopicRetention(ms=2 * DAY_MS), pb.TopicRetention(ms=DAY_MS)
BEFORE = pb.TopicConfig(name="orders", type=NORMAL, retention=KEPT_LONG)
AFTER = pb.TopicConfig(name="orders", type=NORMAL, retention=KEPT_SHORT)


class UncountedBrokers(CallsByRequest):
    """Broker groups that plan a shorter retention and do not count messages."""

    def __init__(self, error: ServiceError) -> None:
        self._error = error

    async def home(self) -> UncountedBrokers:
        return self

    async def put_topic(self, request: pb.PutTopicRequest) -> pb.PutTopicReply:
        assert request.dry_run
        return pb.PutTopicReply(topic=AFTER, before=BEFORE)

    async def call_all(self, _call: object, _request: pb.PurgeTopicRequest) -> None:
        raise self._error


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnreachable("it is down"),
        BrokerTimeout("no answer"),
        Draining("it stops"),
        BrokerGroupUnreachable("two are down"),
        Overloaded("512 calls wait"),
        TopicNotFound("no topic 'orders'"),
        Conflict("an older version"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_dry_run_does_not_need_the_count_of_expired_messages(error: ServiceError) -> None:
    APP.dependency_overrides[brokers_of] = lambda: UncountedBrokers(error)

    async def request() -> httpx.Response:
        transport = httpx.ASGITransport(APP)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            body = {"retention": {"ms": DAY_MS}}
            return await client.put("/api/v1/topics/orders?dryRun=true", json=body)

    answer = asyncio.run(request())
    assert answer.status_code == 200, answer.text
    planned = answer.json()
    assert planned["before"]["retention"] == {"ms": 2 * DAY_MS}
    assert "expiredMessages" not in planned
