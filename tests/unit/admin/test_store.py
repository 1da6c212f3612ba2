"""The REST API stores a message without a message group at any broker group that is up."""

from __future__ import annotations

import asyncio
from typing import Any, NamedTuple, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.messages.store import store
from tidemill.common.errors import BrokerTimeout, BrokerUnreachable, TopicNotFound
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TOPIC = pb.TopicConfig(name="jobs", id=7, home_id=7, created_at_ms=1_000)
OLD = pb.TopicConfig(name="jobs", id=3, home_id=3, created_at_ms=500)
REQUEST = pb.StoreMessageRequest(topic="jobs", blob=b"m")


class Client(CallsByRequest):
    """A broker with its topic, its state and the error for a message."""

    def __init__(
        self,
        topic: pb.TopicConfig | None = TOPIC,
        *,
        up: bool = True,
        refusal: Exception | None = None,
    ) -> None:
        self._topic, self._up, self._refusal = topic, up, refusal

    async def is_serving(self) -> bool:
        return self._up

    async def get_topic_status(self, request: pb.GetTopicStatusRequest) -> pb.TopicStatus:
        assert self._up, "a broker that is down must not be called"
        if self._topic is None:
            raise TopicNotFound(request.name)
        return pb.TopicStatus(topic=self._topic)

    async def store_message(self, _request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        if not self._up:
            raise BrokerUnreachable("it is down")
        if self._refusal is not None:
            raise self._refusal
        return pb.StoreMessageReply()


class Member(NamedTuple):
    name: str
    is_home: bool
    is_draining: bool
    client: Client


class Cluster:
    def __init__(self, *clients: Client, draining: str = "") -> None:
        names = [f"broker-{n}" for n in range(len(clients))]
        self._members = [
            Member(name, name == "broker-0", name == draining, client)
            for name, client in zip(names, clients, strict=True)
        ]

    async def members(self) -> list[Member]:
        return self._members


def stored_at(cluster: Any, times: int = 6) -> set[str]:
    async def all_stored() -> set[str]:
        return {(await store(cast("Brokers", cluster), REQUEST, "")).broker for _ in range(times)}

    return asyncio.run(all_stored())


def test_messages_go_in_turn_to_the_active_brokers_that_are_up() -> None:
    cluster = Cluster(Client(), Client(), Client())
    assert stored_at(cluster) == {"broker-0", "broker-1", "broker-2"}
    assert stored_at(Cluster(Client(up=False), Client(), Client())) == {"broker-1", "broker-2"}
    assert stored_at(Cluster(Client(), Client(), draining="broker-1")) == {"broker-0"}


def test_a_broker_with_a_deleted_topic_receives_no_message() -> None:
    assert stored_at(Cluster(Client(), Client(OLD), Client(None))) == {"broker-0"}
    assert stored_at(Cluster(Client(None), Client(OLD))) == {"broker-0"}
    without_home = Cluster(Client(up=False), Client(OLD), Client(TOPIC))
    assert stored_at(without_home) == {"broker-2"}


def test_a_broker_that_fails_is_skipped_and_the_last_failure_is_raised() -> None:
    lost = Client(refusal=BrokerTimeout("no answer"))
    assert stored_at(Cluster(lost, Client())) == {"broker-1"}
    with pytest.raises(BrokerTimeout, match=r"broker-\d: no answer; the message may be stored"):
        stored_at(Cluster(lost, lost))
