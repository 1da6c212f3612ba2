"""The REST API stores a message without a message group at any broker group that is up."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import pytest

from tests.support.worlds.fake_calls import CallsByRequest
from tidemill.admin.cluster.brokers import Brokers
from tidemill.admin.messages.store import store
from tidemill.common.errors import (
    BrokerGroupUnreachable,
    BrokerTimeout,
    BrokerUnreachable,
    DiskFull,
    KeyOwnerChanged,
    Overloaded,
    TooFewInSync,
    TopicNotFound,
)
from tidemill.message.dedup_key import owner_of_key
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


class Lost(Client):
    """A broker that has stopped answering."""

    async def get_topic_status(self, request: pb.GetTopicStatusRequest) -> pb.TopicStatus:
        raise BrokerUnreachable("it is down")


class FailingInOrder(Client):
    """A broker that fails sends with errors that it shares with others."""

    def __init__(self, errors: Iterator[Exception]) -> None:
        super().__init__()
        self._errors = errors

    async def store_message(self, _request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        raise next(self._errors)


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

    async def member(self, name: str) -> Member:
        return next(each for each in self._members if each.name == name)


def stored_at(cluster: Any, times: int = 6, *, key: str | None = None) -> set[str]:
    async def all_stored() -> set[str]:
        return {
            (
                await store(
                    cast("Brokers", cluster), REQUEST, "", message_id=f"m-{n}", dedup_key=key
                )
            ).broker
            for n in range(times)
        }

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


@pytest.mark.parametrize(
    "refusal",
    [DiskFull("full"), TooFewInSync("1 of 2"), Overloaded("512 wait"), TopicNotFound("jobs")],
    ids=lambda error: type(error).__name__,
)
def test_a_refusal_does_not_hide_that_an_unreachable_broker_may_have_stored_it(
    refusal: Exception,
) -> None:
    errors = iter([BrokerTimeout("no answer"), refusal])
    cluster = Cluster(FailingInOrder(errors), FailingInOrder(errors))
    with pytest.raises(BrokerTimeout, match="no answer; the message may be stored there"):
        stored_at(cluster, 1)


def keyed(**policy: Any) -> pb.TopicConfig:
    """Return a topic with deduplication. Two broker groups own its keys."""
    owners = pb.KeyPlacement(broker_groups=["broker-0", "broker-1"], version=1)
    topic = pb.TopicConfig(dedup=pb.DedupPolicy(**policy), placement=owners)
    topic.MergeFrom(TOPIC)
    return topic


def key_of(owner: str) -> str:
    names = ["broker-0", "broker-1"]
    return next(f"{n}" for n in range(99) if owner_of_key(b"%d" % n, names) == owner)


@pytest.mark.parametrize("owner", ["broker-0", "broker-1"])
def test_a_message_with_a_key_goes_to_its_owner(owner: str) -> None:
    topic = keyed(key_from=pb.DEDUP_KEY_SOURCE_PROPERTY_OR_MESSAGE_ID)
    cluster = Cluster(Client(topic), Client(topic), Client(topic))
    assert stored_at(cluster, key=key_of(owner)) == {owner}


@pytest.mark.parametrize(
    ("source", "key", "brokers"),
    [
        # The owner of a message id has it, so messages without a property go to both owners.
        (pb.DEDUP_KEY_SOURCE_PROPERTY_OR_MESSAGE_ID, None, {"broker-0", "broker-1"}),
        (pb.DEDUP_KEY_SOURCE_MESSAGE_ID, "1", {"broker-0", "broker-1"}),
        # A message that is not checked goes to any broker group.
        (pb.DEDUP_KEY_SOURCE_PROPERTY, None, {"broker-0", "broker-1", "broker-2"}),
    ],
)
def test_the_setting_names_the_key(
    source: pb.DedupKeySource.ValueType, key: str | None, brokers: set[str]
) -> None:
    topic = keyed(key_from=source)
    cluster = Cluster(Client(topic), Client(topic), Client(topic))
    assert stored_at(cluster, 12, key=key) == brokers


def test_no_other_broker_group_stores_a_key_whose_owner_is_down() -> None:
    topic = keyed(key_from=pb.DEDUP_KEY_SOURCE_PROPERTY)
    lost = Client(topic, refusal=BrokerTimeout("no answer"))
    with pytest.raises(BrokerTimeout, match="broker-1: no answer"):
        stored_at(Cluster(Client(topic), lost), key=key_of("broker-1"))
    assert stored_at(Cluster(Client(topic), lost), key=key_of("broker-0")) == {"broker-0"}
    with pytest.raises(BrokerGroupUnreachable, match="broker-1, which owns the dedup key"):
        stored_at(Cluster(Client(topic), Lost(topic)), key=key_of("broker-1"))


class Changing(Client):
    """A broker with a topic that another one replaces when a message is rejected."""

    def __init__(self, topic: pb.TopicConfig, after: pb.TopicConfig) -> None:
        super().__init__(topic)
        self._after = after

    async def store_message(self, request: pb.StoreMessageRequest) -> pb.StoreMessageReply:
        if self._topic is not self._after:
            self._topic = self._after
            raise KeyOwnerChanged("another list")
        assert not request.HasField("lookup")
        return pb.StoreMessageReply()


def test_a_message_is_stored_without_its_key_when_deduplication_was_turned_off() -> None:
    topic = keyed(key_from=pb.DEDUP_KEY_SOURCE_PROPERTY)
    off = pb.TopicConfig(placement=pb.KeyPlacement(version=2, before=["broker-1"]))
    off.MergeFrom(TOPIC)
    cluster = Cluster(Changing(topic, off), Client(topic))
    assert stored_at(cluster, 1, key=key_of("broker-0")) == {"broker-0"}
    # From now on, any broker group stores it, if it knows the end of the deduplication.
    late = Client(off, refusal=KeyOwnerChanged("an old list"))
    assert stored_at(Cluster(Client(off), late), key=key_of("broker-1")) == {"broker-0"}


def test_an_owner_with_an_old_deduplication_stores_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tidemill.admin.messages.store.TOPIC_WAIT_S_MAX", 0.05)
    topic = keyed(key_from=pb.DEDUP_KEY_SOURCE_PROPERTY)
    with pytest.raises(BrokerGroupUnreachable, match="has not received topic jobs"):
        stored_at(Cluster(Client(topic), Client(TOPIC)), key=key_of("broker-1"))
