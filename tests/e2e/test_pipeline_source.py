"""PipelineSource through a real proxy: the requests of a data pipeline besides reads."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.support.clients.grpcio_client import is_serving, reflected_services
from tests.support.clients.pulling import PullClient, message_of
from tests.support.processes.processes import Standalone, command, environment, standalone
from tidemill.message import stored_message
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2 as pb
from tidemill.stubs.tidemill.pipeline.v1 import pipeline_pb2_grpc

SERVICE = "tidemill.pipeline.v1.PipelineSource"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder: Path = tmp_path_factory.mktemp("pipeline")
    with standalone(folder / "data", "--groups", "2") as started:
        yield started


@pytest.fixture(scope="module")
def channel(running: Standalone) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(running.grpc) as opened:
        yield opened


@pytest.fixture(scope="module")
def client(channel: grpc.Channel) -> PullClient:
    return PullClient(channel)


@pytest.fixture(scope="module")
def stub(channel: grpc.Channel) -> pipeline_pb2_grpc.PipelineSourceStub:
    return pipeline_pb2_grpc.PipelineSourceStub(channel)


def queues_of(
    stub: pipeline_pb2_grpc.PipelineSourceStub, **fields: object
) -> dict[str, list[tuple[str, int]]]:
    """Return (topic, queue id) of the reply of GetQueues, by broker group."""
    found: dict[str, list[tuple[str, int]]] = {}
    for reply in stub.GetQueues(pb.GetQueuesRequest(**fields)):  # type: ignore[arg-type]  # as the message
        for group in reply.groups:
            assert not group.error
            places = [(queue.topic, queue.queue_id) for queue in group.queues]
            found.setdefault(group.broker, []).extend(places)
    return found


def error_name(error: grpc.RpcError) -> str:
    """Return the name of the error in the trailer of a rejected call."""
    return {each.key: str(each.value) for each in error.trailing_metadata()}["tidemill-error"]


def test_queues_of_all_broker_groups_are_listed_by_name_and_pattern(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    running.put("topics/orders", queues=2)
    running.put("topics/orders-old", queues=1)
    running.put("topics/bills", queues=1)
    orders = [("orders", 0), ("orders", 1)]
    assert queues_of(stub, topics=["orders", "none"]) == {"broker-0": orders, "broker-1": orders}
    both = [*orders, ("orders-old", 0)]
    assert queues_of(stub, topic_pattern="ord*") == {"broker-0": both, "broker-1": both}
    # GetQueues returns the broker's own topics only if they hold dead letters.
    everything = {place[0] for place in queues_of(stub, topic_pattern="*")["broker-0"]}
    assert everything == {"orders", "orders-old", "bills"}
    assert queues_of(stub, topic_pattern="*", without_queues=True) == {
        "broker-0": [],
        "broker-1": [],
    }


def test_very_many_queues_come_in_several_replies(
    running: Standalone, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    for number in range(5):
        running.put(f"topics/wide-{number}", queues=1000)
    replies = list(stub.GetQueues(pb.GetQueuesRequest(topic_pattern="wide-*")))
    assert len(replies) > 1
    wanted = {(f"wide-{number}", queue_id) for number in range(5) for queue_id in range(1000)}
    for broker, places in queues_of(stub, topic_pattern="wide-*").items():
        assert len(places) == 5000, broker
        assert set(places) == wanted


def test_an_error_has_its_name_in_a_trailer(stub: pipeline_pb2_grpc.PipelineSourceStub) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        list(stub.ListProgress(pb.ListProgressRequest(broker="broker-7")))
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert "known: broker-0, broker-1" in str(refused.value.details())
    assert error_name(refused.value) == "BrokerGroupNotFound"
    # The proxy forwards the broker's error text unchanged.
    with pytest.raises(grpc.RpcError) as unknown:
        list(stub.ListProgress(pb.ListProgressRequest(broker="broker-1", groups=["nobody"])))
    assert error_name(unknown.value) == "GroupNotFound"


def test_the_service_is_reflected_and_healthy(running: Standalone) -> None:
    async def ask() -> None:
        async with grpc.aio.insecure_channel(running.grpc) as channel:
            assert SERVICE in await reflected_services(channel)
            assert await is_serving(channel, SERVICE)

    asyncio.run(ask())


def test_delayed_messages_are_listed_in_pages_of_each_broker_group(
    running: Standalone, client: PullClient, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    running.put("topics/later", queues=2, messageType="DELAY")
    running.put("topics/much-later", queues=1, messageType="DELAY")
    now_ms = int(time.time() * 1000)
    hour_ms = 3_600_000
    sent = {f"later-{n}": now_ms + hour_ms + n for n in range(2100)}
    client.send_all(
        [
            message_of("later", b"body", message_id=message_id, due_at_ms=due_at_ms)
            for message_id, due_at_ms in sent.items()
        ]
    )
    client.send("much-later", b"body", message_id="other", due_at_ms=now_ms + 9 * hour_ms)

    def pending(**fields: object) -> list[pb.Pending]:
        replies = [
            reply
            for broker in ("broker-0", "broker-1")
            for reply in stub.ListPending(pb.ListPendingRequest(broker=broker, **fields))  # type: ignore[arg-type]  # as the message
        ]
        return [item for reply in replies for item in reply.items]

    found = pending(topics=["later"])
    assert {item.message_id: item.due_at_ms for item in found} == sent
    assert len(found) == len(sent)
    assert all(item.topic == "later" and item.log_position and not item.message for item in found)
    assert all(now_ms - 1000 <= item.scheduled_at_ms <= now_ms + 600_000 for item in found)
    [other] = pending(due_from_ms=now_ms + 2 * hour_ms, with_messages=True)
    assert other.message_id == "other"
    assert stored_message.message_id_of(other.message) == "other"
    first = pending(due_until_ms=now_ms + hour_ms + 2)
    assert {item.message_id for item in first} == {"later-0", "later-1"}


def test_deliveries_in_flight_and_group_progress_are_listed(
    running: Standalone, client: PullClient, stub: pipeline_pb2_grpc.PipelineSourceStub
) -> None:
    running.put("topics/worked", queues=1)
    running.put("topics/copied", queues=1)
    running.put("groups/workers")
    running.put("groups/copiers")
    for n in range(40):
        client.send("worked", b"w%d" % n, message_id=f"w{n}")
    for n in range(40):
        client.send("copied", b"c%d" % n)
    taken = client.receive("worked", "workers")
    assert taken

    def in_flight(*groups: str) -> list[pb.InFlight]:
        return [
            item
            for broker in ("broker-0", "broker-1")
            for reply in stub.ListInFlight(pb.ListInFlightRequest(broker=broker, groups=groups))
            for item in reply.items
        ]

    found = in_flight("workers")
    assert {item.message_id for item in found} == {
        message.system_properties.message_id for message in taken
    }
    assert in_flight() == found
    assert in_flight("copiers") == []
    one = found[0]
    assert (one.consumer_group, one.topic, one.attempt, one.client_id) == (
        "workers",
        "worked",
        1,
        "puller",
    )
    assert 0 < one.invisible_until_ms - one.popped_at_ms <= 30_000

    assert client.update_offset("copiers", "copied", 3).status.code == v2.OK
    # Both messages were sent to both broker groups. The receive asked one of them.
    holder = taken[0].system_properties.store_host
    assert client.update_offset("workers", "worked", 2, broker=holder).status.code == v2.OK
    replies = [
        reply
        for broker in ("broker-0", holder)
        for reply in stub.ListProgress(pb.ListProgressRequest(broker=broker))
    ]
    progress = {
        (item.consumer_group, item.topic): item
        for reply in replies
        for item in reply.items
        if not item.is_retry
    }
    copied = progress["copiers", "copied"]
    assert (copied.pop_offset, copied.commit_offset, copied.pull_offset) == (-1, -1, 3)
    assert copied.max_offset == client.query("copied", v2.END).offset
    worked = progress["workers", "worked"]
    assert worked.pull_offset == 2
    assert worked.in_flight_count == len(in_flight("workers"))
    # The same for the command line.
    listed = running.get("groups/copiers/progress")
    behind = copied.max_offset - 3
    assert listed["pulled"] == [{"topic": "copied", "queues": 1, "behind": behind}]
    assert listed["total"]["lag"] == 0
    shown = subprocess.run(
        command("--admin", running.admin, "group", "show", "copiers"),
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    ).stdout
    assert "Pulled (offsets that the group reported):" in shown
    assert str(behind) in shown
