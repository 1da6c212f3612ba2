"""A read of a namespace names topics and groups by bare names and sees no others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.worlds.fake_cluster import FakeCluster
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill_pipeline.client import ClusterClient
from tidemill_pipeline.cluster_state import OmittedItems
from tidemill_pipeline.options import ConnectionOptions, TopicSelection

NAMES = ("orders", "shop%orders", "mill%orders", "%DLQ%group", "%DLQ%shop%group")
EVERYTHING = TopicSelection(pattern=".*")


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster().serving() as cluster:
        for name in NAMES:
            cluster.add(name, "a", 0, 3)
        broker = cluster.brokers["a"]
        for prefix in ("", "shop%", "mill%"):
            named: dict[str, Any] = {"consumer_group": f"{prefix}group", "topic": f"{prefix}orders"}
            broker.progress.append(pb.Progress(**named, pull_offset=-1))
            broker.in_flight.append(pb.InFlight(**named))
            broker.pending.append(pb.Pending(topic=f"{prefix}orders"))
            event = pb.Event(**named)
            event.origin_topic = f"{prefix}orders"
            event.topic = f"%RETRY%{prefix}group+{prefix}orders"
            cluster.add_events("a", event)
        cluster.add_events("a", pb.Event(reason="of the whole log"))
        yield cluster


def client_of(cluster: FakeCluster, namespace: str) -> ClusterClient:
    return ClusterClient(ConnectionOptions(endpoints=(cluster.endpoint,), namespace=namespace))


def topics_of(cluster: FakeCluster, namespace: str, selection: TopicSelection) -> set[str]:
    return {queue.topic for queue in client_of(cluster, namespace).cluster(selection).queues}


def test_a_pattern_finds_the_topics_of_the_namespace_alone(cluster: FakeCluster) -> None:
    dead_letters = TopicSelection(pattern="%DLQ%.*")
    assert topics_of(cluster, "shop", EVERYTHING) == {"orders"}
    assert topics_of(cluster, "shop", dead_letters) == {"%DLQ%group"}
    assert topics_of(cluster, "shop", TopicSelection(names=("orders",))) == {"orders"}
    assert topics_of(cluster, "other", EVERYTHING) == set()
    assert topics_of(cluster, "", EVERYTHING) == {"orders", "shop%orders", "mill%orders"}
    assert topics_of(cluster, "", dead_letters) == {"%DLQ%group", "%DLQ%shop%group"}


def test_messages_come_from_the_topic_of_the_namespace(cluster: FakeCluster) -> None:
    client = client_of(cluster, "shop")
    [queue] = client.cluster(EVERYTHING).queues
    pages = client.messages(queue, start=0, end=3, timeout_ms=30_000)
    bodies = [message.body for page in pages for message in page.messages]
    assert bodies == [b"shop%%orders/a/0/%d" % n for n in range(3)]


@pytest.mark.parametrize("names", [(), ("group",)])
def test_listings_of_groups_are_those_of_the_namespace(
    cluster: FakeCluster, names: tuple[str, ...]
) -> None:
    client = client_of(cluster, "shop")
    own = [("group", "orders")]
    progress = client.progress("a", names)
    assert [(each.consumer_group, each.topic) for each in progress] == own
    in_flight = client.in_flight("a", names)
    assert [(each.consumer_group, each.topic) for each in in_flight] == own
    everything = client_of(cluster, "").progress("a", ())
    assert {each.consumer_group for each in everything} == {"group", "shop%group", "mill%group"}


def test_missing_items_have_bare_names(cluster: FakeCluster) -> None:
    client, left = client_of(cluster, "shop"), OmittedItems()
    assert client.progress("a", ["nobody"], left=left) == []
    assert list(client.pending("a", topics=["nothing"], left=left)) == []
    assert left.missing == {"nobody", "nothing"}


@pytest.mark.parametrize("names", [(), ("orders",)])
def test_pending_messages_are_those_of_the_namespace(
    cluster: FakeCluster, names: tuple[str, ...]
) -> None:
    pending = client_of(cluster, "shop").pending("a", topics=names)
    assert [each.topic for each in pending] == ["orders"]


def test_events_are_those_of_the_namespace_and_of_the_whole_log(cluster: FakeCluster) -> None:
    answers = client_of(cluster, "shop").events("a", start=0)
    events = [event for answer in answers for event in answer.events]
    assert [(each.topic, each.origin_topic, each.consumer_group) for each in events] == [
        ("%RETRY%group+orders", "orders", "group"),
        ("", "", ""),
    ]
    answers = client_of(cluster, "shop").events("a", start=0, topics=["orders"])
    assert [event.origin_topic for answer in answers for event in answer.events] == ["orders"]
