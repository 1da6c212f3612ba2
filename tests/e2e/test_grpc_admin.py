"""Each call of the gRPC service Admin, with its stubs of the public protocol, against REST."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
import httpx
import pytest
from google.protobuf.timestamp_pb2 import Timestamp
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from tests.e2e.conftest import Certificates
from tests.support.clients.api import METADATA, api
from tests.support.clients.client_process import JAVA_CLASSES, JAVA_LIBRARIES, needs, staying_client
from tests.support.clients.grpcio_client import read
from tests.support.eventually import eventually
from tests.support.processes.processes import Standalone, standalone
from tests.support.worlds.access_world import signed
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2_grpc
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

CALL_S: Final = 30.0
SECRET: Final = "a-secret-of-sixteen"
HOUR_MS: Final = 3_600_000
SERVICE: Final = "apache.rocketmq.v2.Admin"
R = TypeVar("R")


def resource(name: str, namespace: str = "") -> v2.Resource:
    return v2.Resource(name=name, resource_namespace=namespace)


def at(ms: int) -> Timestamp:
    return Timestamp(seconds=ms // 1_000, nanos=ms % 1_000 * 1_000_000)


def ms_of(timestamp: Timestamp) -> int:
    return timestamp.seconds * 1_000 + timestamp.nanos // 1_000_000


def reflected(
    channel: grpc.Channel, asked: reflection_pb2.ServerReflectionRequest, headers: Any = None
) -> list[Any]:
    """Return the answers of reflection."""
    reflect = channel.stream_stream(
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    metadata = tuple((headers or {}).items())
    return list(reflect(iter([asked]), metadata=metadata, timeout=CALL_S))


class AdminClient:
    """The calls, with the stubs of the protocol."""

    def __init__(self, running: Standalone, channel: grpc.Channel) -> None:
        self.running = running
        self.stub = admin_pb2_grpc.AdminStub(channel)

    def send(self, topic: str, body: bytes = b"x", **fields: Any) -> str:
        """Send a message; return its id."""
        request = admin.AdminSendMessageRequest(topic=resource(topic), body=body, **fields)
        answer = ok(self.stub.AdminSendMessage(request, timeout=CALL_S))
        return str(answer.message_id)

    def pages(self, topic: str, **fields: Any) -> list[list[str]]:
        """Return the bodies of all pages of a query."""
        found: list[list[str]] = []
        scroll_id = ""
        while not found or scroll_id:
            request = admin.ListMessageRequest(topic=resource(topic), scroll_id=scroll_id, **fields)
            answer = ok(self.stub.QueryMessage(request, timeout=CALL_S))
            found.append([message.body.decode() for message in answer.messages])
            scroll_id = answer.scroll_id
        return found

    def rest(self, path: str) -> dict[str, Any]:
        """Return what REST answers."""
        return self.running.get(path)


def ok(answer: R) -> R:
    """Return an answer with the code OK."""
    status = answer.status  # type: ignore[attr-defined]  # Each answer has it.
    assert status.code == v2.OK, status
    return answer


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    folder = tmp_path_factory.mktemp("grpc-admin")
    with standalone(folder / "data", "--groups=2", "--admin-grpc-port=0") as started:
        yield started


@pytest.fixture
def client(running: Standalone) -> Iterator[AdminClient]:
    with grpc.insecure_channel(running.admin_grpc) as channel:
        yield AdminClient(running, channel)


def prepare(running: Standalone, name: str, **fields: object) -> None:
    running.put(f"topics/{name}", **{"queues": 2, **fields})
    running.put(f"groups/{name}")


@pytest.mark.parametrize("kind", ["NORMAL", "FIFO", "DELAY", "TRANSACTION", "PRIORITY", "MIXED"])
def test_a_topic_has_its_type_and_its_time(
    running: Standalone, client: AdminClient, kind: str
) -> None:
    name = f"admin-type-{kind}"
    before_ms = time.time_ns() // 1_000_000
    running.put(f"topics/{name}", messageType=kind)
    answer = ok(
        client.stub.DescribeTopicStatus(
            admin.DescribeTopicStatusRequest(topic=resource(name)), timeout=CALL_S
        )
    )
    shown = client.rest(f"topics/{name}")["messageType"]
    assert answer.tags["message.type"] == shown == kind
    unknown = v2.MESSAGE_TYPE_UNSPECIFIED
    expected = unknown if kind == "MIXED" else v2.MessageType.Value(kind)
    assert answer.topic_message_type == expected
    assert before_ms - 1 <= ms_of(answer.create_timestamp) <= time.time_ns() // 1_000_000 + 1
    assert not answer.HasField("description")


def test_unknown_names_get_the_codes_of_the_protocol(client: AdminClient) -> None:
    topic, group = resource("admin-unknown"), resource("admin-unknown")
    stub = client.stub
    for answer, code in (
        (stub.DescribeTopicStatus(admin.DescribeTopicStatusRequest(topic=topic)), "TOPIC"),
        (stub.GetTopicRoute(admin.GetTopicRouteRequest(topic=topic)), "TOPIC"),
        (stub.QueryMessage(admin.ListMessageRequest(topic=topic)), "TOPIC"),
        (stub.ListSubscription(admin.ListSubscriptionRequest(topic=topic)), "TOPIC"),
        (
            stub.DescribeGroupAccumulation(admin.DescribeGroupAccumulationRequest(group=group)),
            "CONSUMER_GROUP",
        ),
        (stub.QueryTimeSpan(admin.QueryTimeSpanRequest(group=group)), "CONSUMER_GROUP"),
        (
            stub.ListConsumerConnection(admin.ListConsumerConnectionRequest(group=group)),
            "CONSUMER_GROUP",
        ),
        (
            stub.ResetGroupOffset(
                admin.ResetGroupOffsetRequest(group=group, topic=topic, reset_timestamp=at(1))
            ),
            "CONSUMER_GROUP",
        ),
        (
            stub.DeleteSubscription(admin.DeleteSubscriptionRequest(group=group, topic=topic)),
            "CONSUMER_GROUP",
        ),
    ):
        assert v2.Code.Name(answer.status.code) == f"{code}_NOT_FOUND", answer


def test_the_accumulation_is_the_progress_of_rest(running: Standalone, client: AdminClient) -> None:
    prepare(running, "admin-backlog")
    running.put("topics/admin-backlog-2")
    for n in range(5):
        client.send("admin-backlog", b"%d" % n)
    topics = [resource("admin-backlog"), resource("admin-backlog-2")]
    request = admin.DescribeGroupAccumulationRequest(group=resource("admin-backlog"), topics=topics)
    answer = ok(client.stub.DescribeGroupAccumulation(request, timeout=CALL_S))
    assert answer.accumulation.accumulation == 5
    assert answer.accumulation.ready_messages == 5
    assert answer.accumulation.HasField("deliver_delay_time")
    assert answer.topic_accumulation["admin-backlog"].accumulation == 5
    assert answer.topic_accumulation["admin-backlog-2"].accumulation == 0
    total = client.rest("groups/admin-backlog/progress")["total"]
    # Topics that the group has not begun count only if the request names them.
    assert total["lag"] in {0, 5}
    request.topics.append(resource("admin-nothing"))
    unknown = client.stub.DescribeGroupAccumulation(request, timeout=CALL_S)
    assert unknown.status.code == v2.TOPIC_NOT_FOUND


def test_a_reset_moves_the_group_and_is_in_the_audit_log(
    running: Standalone, client: AdminClient
) -> None:
    prepare(running, "admin-reset")
    for _ in range(4):
        client.send("admin-reset")
    group = resource("admin-reset")

    def accumulation() -> int:
        request = admin.DescribeGroupAccumulationRequest(group=group, topics=[group])
        answer = ok(client.stub.DescribeGroupAccumulation(request, timeout=CALL_S))
        return int(answer.accumulation.accumulation)

    later = at(time.time_ns() // 1_000_000 + HOUR_MS)
    for reset_to, left in ((later, 0), (at(0), 4)):
        request = admin.ResetGroupOffsetRequest(group=group, topic=group, reset_timestamp=reset_to)
        ok(client.stub.ResetGroupOffset(request, timeout=CALL_S))
        assert eventually(lambda: accumulation() == left)  # noqa: B023  # called in this turn
        assert client.rest("groups/admin-reset/progress")["total"]["lag"] == left
    records = client.rest("audit?resource=Group:admin-reset&kind=change")["records"]
    resets = [record for record in records if record["call"] == "Admin/ResetGroupOffset"]
    assert len(resets) == 4  # at both broker groups
    assert {(each["action"], each["process"]) for each in resets} == {("Update", "admin")}
    topics = {(each["before"]["topic"], each["after"]["topic"]) for each in resets}
    assert topics == {("admin-reset", "admin-reset")}


def test_a_sent_message_is_found_as_by_rest(running: Standalone, client: AdminClient) -> None:
    prepare(running, "admin-search")
    message_id = client.send(
        "admin-search",
        b"body",
        tag="A",
        key="k1",
        user_properties={"colour": "blue"},
        system_properties=v2.SystemProperties(keys=["k2"], tag="ignored"),
        ext_info={"protocol_type": "GRPC_V2"},
    )
    topic = resource("admin-search")
    keys: list[dict[str, Any]] = [
        {"message_id": message_id},
        {"message_key": "k1"},
        {"message_key": "k2"},
    ]
    for key in keys:
        request = admin.ListMessageRequest(topic=topic, **key)
        [found] = ok(client.stub.QueryMessage(request, timeout=CALL_S)).messages
        system = found.system_properties
        assert (found.body, found.topic, dict(found.user_properties)) == (
            b"body",
            topic,
            {"colour": "blue"},
        )
        assert (system.message_id, system.tag) == (message_id, "A")
        assert sorted(system.keys) == ["k1", "k2"]
        [shown] = client.rest(f"topics/admin-search/messages/{message_id}")["messages"]
        assert ms_of(system.store_timestamp) == shown["storedAtMs"]
        assert (system.queue_id, system.queue_offset) == (shown["queueId"], shown["queueOffset"])
        late = admin.ListMessageRequest(
            topic=topic, begin_timestamp=at(shown["storedAtMs"] + 1), **key
        )
        missing = client.stub.QueryMessage(late, timeout=CALL_S)
        assert not missing.messages
    records = client.rest("audit?resource=Topic:admin-search&kind=change")["records"]
    assert "Admin/AdminSendMessage" in {record["call"] for record in records}


def test_a_delayed_a_fifo_and_a_priority_message_are_sent_as_such(
    running: Standalone, client: AdminClient
) -> None:
    for kind in ("DELAY", "FIFO", "PRIORITY"):
        running.put(f"topics/admin-send-{kind}", messageType=kind)
    due_ms = time.time_ns() // 1_000_000 + HOUR_MS
    client.send(
        "admin-send-DELAY", system_properties=v2.SystemProperties(delivery_timestamp=at(due_ms))
    )
    [timer] = client.rest("timers?topic=admin-send-DELAY")["timers"]
    assert timer["dueAtMs"] == due_ms
    client.send("admin-send-FIFO", system_properties=v2.SystemProperties(message_group="g"))
    client.send("admin-send-PRIORITY", system_properties=v2.SystemProperties(priority=3))
    refused = client.stub.AdminSendMessage(
        admin.AdminSendMessageRequest(topic=resource("admin-send-FIFO"), body=b"x")
    )
    assert refused.status.code == v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE
    unknown = client.stub.AdminSendMessage(
        admin.AdminSendMessageRequest(topic=resource("rmq_sys_x"), body=b"x")
    )
    assert unknown.status.code == v2.ILLEGAL_TOPIC


def test_a_time_range_is_read_in_pages(running: Standalone, client: AdminClient) -> None:
    prepare(running, "admin-range")
    for n in range(6):
        client.send("admin-range", b"early-%d" % n, tag="A" if n % 2 else "B")
    between_ms = time.time_ns() // 1_000_000 + 1
    eventually(lambda: time.time_ns() // 1_000_000 > between_ms)
    for n in range(6):
        client.send("admin-range", b"late-%d" % n, tag="A" if n % 2 else "B")
    early, late = ([f"{kind}-{n}" for n in range(6)] for kind in ("early", "late"))

    def bodies(**fields: Any) -> list[str]:
        pages = client.pages("admin-range", **fields)
        limit = fields.get("page_size", 32)
        assert all(len(page) <= limit for page in pages)
        return sorted(body for page in pages for body in page)

    assert bodies() == bodies(page_size=1) == bodies(page_size=5) == early + late
    assert bodies(end_timestamp=at(between_ms - 1), page_size=2) == early
    assert bodies(begin_timestamp=at(between_ms), page_size=4) == late
    odd = [body for body in early + late if int(body[-1]) % 2]
    assert bodies(subscription="A", page_size=2) == bodies(subscription=" A || C ") == odd
    assert bodies(subscription="A || B") == bodies(subscription="*") == early + late
    one_queue = [
        bodies(broker_name=broker, queue_id=queue, page_size=2)
        for broker in ("broker-0", "broker-1")
        for queue in range(2)
    ]
    assert sorted(body for found in one_queue for body in found) == early + late
    stub, topic = client.stub, resource("admin-range")
    for fields, code in (
        ({"broker_name": "broker-7"}, v2.NOT_FOUND),
        ({"queue_id": 7}, v2.NOT_FOUND),
        ({"page_num": 2}, v2.BAD_REQUEST),
    ):
        request = admin.ListMessageRequest(topic=topic, **fields)
        assert stub.QueryMessage(request, timeout=CALL_S).status.code == code


def test_questions_to_clients_leave_records_of_accesses(
    running: Standalone, client: AdminClient
) -> None:
    """The client gets the body of the message, and the caller the stack of the client."""
    prepare(running, "admin-questions")
    message_id = client.send("admin-questions")
    verification = {"topic": "admin-questions", "messageId": message_id}
    for action, body in (("verify", verification), ("stack", None)):
        url = f"{running.admin}/api/v1/clients/admin-no-client:{action}"
        answer = httpx.post(url, json=body, trust_env=False, timeout=CALL_S)
        assert answer.status_code == HTTPStatus.NOT_FOUND
    records = client.rest("audit?kind=access")["records"]
    assert {(each["call"], each["resource"], each["action"]) for each in records} >= {
        ("POST /clients/{client_id}:verify", "Topic:admin-questions", "Sub"),
        ("POST /clients/{client_id}:stack", "Client:admin-no-client", "Update"),
    }


def test_a_small_page_with_a_rare_tag_takes_few_calls(
    running: Standalone, client: AdminClient
) -> None:
    """A call reads a bounded number of times, whatever the size of the page."""
    running.put("topics/admin-rare", queues=1)
    for n in range(300):
        client.send("admin-rare", b"%d" % n, tag="often")
    client.send("admin-rare", b"rare", tag="rare")
    pages = client.pages("admin-rare", subscription="rare", page_size=1)
    assert [body for page in pages for body in page] == ["rare"]
    assert len(pages) <= 2


def test_one_address_does_not_take_all_connections(running: Standalone) -> None:
    host, port = running.admin_grpc.rsplit(":", 1)
    with contextlib.ExitStack() as held:
        for _ in range(80):
            held.enter_context(socket.create_connection((host, int(port)), timeout=CALL_S))
        other = held.enter_context(
            socket.create_connection((host, int(port)), CALL_S, source_address=("127.0.0.2", 0))
        )
        other.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
        assert other.recv(9)[3:4] == b"\x04", "the server sends its settings"


def test_large_messages_fill_pages_of_four_mebibytes(
    running: Standalone, client: AdminClient
) -> None:
    running.put("topics/admin-large", queues=1)
    for n in range(5):
        client.send("admin-large", b"%d" % n * (1 << 20), key="large")
    for fields in ({}, {"message_key": "large"}):
        pages = client.pages("admin-large", **fields)  # of a client with the default limit
        assert sorted(body[0] for page in pages for body in page) == list("01234")
        assert len(pages) > 1


def test_a_route_has_the_queues_of_all_broker_groups(
    running: Standalone, client: AdminClient
) -> None:
    prepare(running, "admin-route", queues=3)

    def brokers() -> list[dict[str, Any]]:
        request = admin.GetTopicRouteRequest(topic=resource("admin-route"))
        answer = ok(client.stub.GetTopicRoute(request, timeout=CALL_S))
        route = json.loads(answer.topic_route_data)
        assert {each["brokerName"] for each in route["brokerDatas"]} == {"broker-0", "broker-1"}
        found: list[dict[str, Any]] = route["queueDatas"]
        return found

    for queues in eventually(brokers):
        assert (queues["readQueueNums"], queues["writeQueueNums"], queues["perm"]) == (3, 3, 6)


def test_time_spans_have_the_store_times_of_the_queues(
    running: Standalone, client: AdminClient
) -> None:
    running.put("topics/admin-spans", queues=1, messageType="FIFO")
    running.put("groups/admin-spans")
    group = resource("admin-spans")
    order = v2.SystemProperties(message_group="g")
    for _ in range(3):
        client.send("admin-spans", system_properties=order)
    request = admin.QueryTimeSpanRequest(group=group, topics=[group])

    def spans() -> list[Any]:
        answer = ok(client.stub.QueryTimeSpan(request, timeout=CALL_S))
        return [each for each in answer.queue_time_span_list if each.max_timestamp]

    [span] = spans()
    broker, queue = span.message_queue.broker.name, span.message_queue.id
    stored = client.rest(f"topics/admin-spans/queues/{queue}/messages?broker={broker}")["messages"]
    first, last = stored[0]["storedAtMs"], stored[-1]["storedAtMs"]
    assert (span.min_timestamp, span.max_timestamp) == (first, last)
    assert span.message_queue.topic == group
    # Nothing is settled yet.
    assert span.consume_timestamp == first
    assert span.delay_time_ms >= time.time_ns() // 1_000_000 - first - CALL_S * 1_000
    reset = admin.ResetGroupOffsetRequest(
        group=group, topic=group, reset_timestamp=at(last + HOUR_MS)
    )
    ok(client.stub.ResetGroupOffset(reset, timeout=CALL_S))

    def settled() -> Any:
        [span] = spans()
        assert (span.consume_timestamp, span.delay_time_ms) == (last, 0)
        return span

    assert eventually(settled)


def test_clients_and_their_subscriptions_are_those_of_rest(
    tmp_path: Path, running: Standalone, client: AdminClient
) -> None:
    name = "admin-clients"
    prepare(running, name)
    stub, both = client.stub, resource(name)
    with staying_client("python", tmp_path, running.grpc, topic=name, group=name):
        listing = admin.ListConsumerConnectionRequest(group=both, topic=both)

        def connected() -> admin.ClientInfo:
            [info] = ok(stub.ListConsumerConnection(listing, timeout=CALL_S)).client_info
            return info

        info = eventually(connected)
        shown = eventually(lambda: client.rest(f"clients/{info.client_id}"))
        assert (info.language, info.version) == ("PYTHON", shown["version"])
        assert (info.hostname, info.egress_ip) == (shown["host"], "127.0.0.1")
        assert info.message_model == admin.CLUSTERING

        by_topic = admin.ListSubscriptionRequest(topic=both)
        [one] = ok(stub.ListSubscription(by_topic, timeout=CALL_S)).subscription_info
        assert (one.group, one.topic, one.online) == (both, both, True)
        assert (one.expression.type, one.expression.expression) == (v2.TAG, "*")
        assert one.subscription_consistency
        detailed = admin.DescribeSubscriptionRequest(group=both)
        [each] = ok(stub.DescribeSubscription(detailed, timeout=CALL_S)).client_subscription_info
        assert each.client_info == info
        assert each.subscription_info == one

        running_info = ok(
            stub.GetConsumerRunningInfo(
                admin.GetConsumerRunningInfoRequest(group=both, client_id=info.client_id),
                timeout=CALL_S,
            )
        ).consumer_running_info
        assert running_info.properties["clientType"] == shown["kind"] == "pushConsumer"
        assert running_info.subscriptions[name].expression == "*"
        assert not running_info.message_queue_table
        for answer in (
            stub.GetConsumerRunningInfo(
                admin.GetConsumerRunningInfoRequest(
                    group=resource("admin-other"), client_id=info.client_id
                )
            ),
            stub.PrintThreadStackTrace(
                admin.PrintThreadStackTraceRequest(
                    group=resource("admin-other"), client_id=info.client_id
                )
            ),
        ):
            assert answer.status.code == v2.BAD_REQUEST, answer
        # The Python client answers no questions.
        stack = stub.PrintThreadStackTrace(
            admin.PrintThreadStackTraceRequest(group=both, client_id=info.client_id)
        )
        assert stack.status.code == v2.PROXY_TIMEOUT

        stats = ok(stub.GetProxyRuntimeStats(admin.GetProxyRuntimeStatsRequest(), timeout=CALL_S))
        known = client.rest("clients")["clients"]
        producers = sum(each["kind"] == "producer" for each in known)
        assert (stats.producers, stats.consumers) == (producers, len(known) - producers)
        assert stats.proxy_name == "admin"

        client.send(name)
        eventually(lambda: client.rest(f"groups/{name}/progress")["topics"])
    # The group keeps its position without a consumer.
    unseen = "admin-clients-2"
    prepare(running, unseen)
    client.send(unseen)
    other = resource(unseen)
    reset = admin.ResetGroupOffsetRequest(group=other, topic=other, reset_timestamp=at(0))
    ok(stub.ResetGroupOffset(reset, timeout=CALL_S))

    def offline() -> admin.SubscriptionInfo:
        request = admin.ListSubscriptionRequest(group=other)
        [found] = ok(stub.ListSubscription(request, timeout=CALL_S)).subscription_info
        return found

    left = eventually(offline)
    assert (left.group, left.topic, left.online) == (other, other, False)
    assert not left.HasField("expression")


def test_different_filters_of_a_group_are_not_consistent(
    running: Standalone, client: AdminClient
) -> None:
    name = "admin-filters"
    prepare(running, name)
    both = resource(name)

    def settings_of(tag: str) -> service.TelemetryCommand:
        expression = v2.FilterExpression(type=v2.TAG, expression=tag)
        entry = v2.SubscriptionEntry(topic=both, expression=expression)
        subscription = v2.Subscription(group=both, subscriptions=[entry])
        settings = v2.Settings(client_type=v2.SIMPLE_CONSUMER, subscription=subscription)
        return service.TelemetryCommand(settings=settings)

    async def listed_with_streams() -> None:
        async with api(running.grpc) as messaging:
            streams = []
            for tag in ("A", "B"):
                metadata = (("x-mq-client-id", f"admin-filters-{tag}"), *METADATA[1:])
                stream = messaging.stub.Telemetry(metadata=metadata)
                await stream.write(settings_of(tag))
                await read(stream, service.TelemetryCommand)
                streams.append(stream)
            request = admin.ListSubscriptionRequest(group=both)
            listed = ok(await asyncio.to_thread(client.stub.ListSubscription, request))
            found = [
                (each.expression.expression, each.online, each.subscription_consistency)
                for each in listed.subscription_info
            ]
            assert sorted(found) == [("A", True, False), ("B", True, False)]
            detailed = admin.DescribeSubscriptionRequest(topic=both)
            described = ok(await asyncio.to_thread(client.stub.DescribeSubscription, detailed))
            clients = [
                (each.client_info.client_id, each.subscription_info.expression.expression)
                for each in described.client_subscription_info
            ]
            assert sorted(clients) == [("admin-filters-A", "A"), ("admin-filters-B", "B")]
            for stream in streams:
                stream.cancel()

    asyncio.run(listed_with_streams())


def test_proxies_do_not_serve_the_calls_of_operators(running: Standalone) -> None:
    with grpc.insecure_channel(running.grpc) as channel:
        stub = admin_pb2_grpc.AdminStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.GetProxyRuntimeStats(admin.GetProxyRuntimeStatsRequest(), timeout=CALL_S)
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED


@needs("java", JAVA_CLASSES, JAVA_LIBRARIES)
def test_a_java_consumer_prints_its_stack_and_verifies_messages(
    tmp_path: Path, running: Standalone, client: AdminClient
) -> None:
    name = "admin-java"
    prepare(running, name)
    stub, both = client.stub, resource(name)
    with staying_client("java", tmp_path, running.grpc, topic=name, group=name) as java:
        listing = admin.ListConsumerConnectionRequest(group=both)

        def connected() -> str:
            [info] = ok(stub.ListConsumerConnection(listing, timeout=CALL_S)).client_info
            return str(info.client_id)

        client_id = eventually(connected)
        stack = ok(
            stub.PrintThreadStackTrace(
                admin.PrintThreadStackTraceRequest(group=both, client_id=client_id), timeout=CALL_S
            )
        )
        assert "RocketmqClientScheduler" in stack.thread_stack_trace
        good, poison = client.send(name, b"good"), client.send(name, b"poison")
        java.wait_for("received", id=good)
        for message_id, code in (
            (good, v2.OK),
            (poison, v2.FAILED_TO_CONSUME_MESSAGE),
            ("no such id", v2.MESSAGE_NOT_FOUND),
        ):
            request = admin.VerifyMessageRequest(
                group=both, topic=both, client_id=client_id, message_id=message_id
            )
            assert stub.VerifyMessage(request, timeout=CALL_S).status.code == code
        java.wait_for("received", 2, id=good)
    records = client.rest("audit?kind=access")["records"]
    seen = {(each["call"], each["resource"]) for each in records}
    assert seen >= {
        ("Admin/PrintThreadStackTrace", f"Client:{client_id}"),
        ("Admin/VerifyMessage", f"Topic:{name}"),
    }


def test_a_subscription_is_not_deleted_alone(running: Standalone, client: AdminClient) -> None:
    prepare(running, "admin-delete")
    both = resource("admin-delete")
    answer = client.stub.DeleteSubscription(
        admin.DeleteSubscriptionRequest(group=both, topic=both), timeout=CALL_S
    )
    assert answer.status.code == v2.NOT_IMPLEMENTED
    assert "tidemill group delete" in answer.status.message


def test_names_have_the_namespace_of_the_request(running: Standalone, client: AdminClient) -> None:
    running.put("topics/admin-shop%25orders", queues=1)
    topic = resource("orders", "admin-shop")
    request = admin.AdminSendMessageRequest(topic=topic, body=b"x")
    ok(client.stub.AdminSendMessage(request, timeout=CALL_S))
    found = client.stub.QueryMessage(admin.ListMessageRequest(topic=topic), timeout=CALL_S)
    [message] = ok(found).messages
    assert message.topic == topic


def test_the_log_level_changes_and_is_in_the_audit_log(
    running: Standalone, client: AdminClient
) -> None:
    level = admin.ChangeLogLevelRequest
    for wanted, before, after in ((level.TRACE, "info", "debug"), (level.INFO, "debug", "info")):
        answer = client.stub.ChangeLogLevel(level(level=wanted), timeout=CALL_S)
        assert f"from {before} to {after}" in answer.remark
    records = client.rest("audit?resource=Process:admin&kind=change")["records"]
    assert {record["call"] for record in records} == {"Admin/ChangeLogLevel"}
    assert [each["after"]["logLevel"] for each in records if each["result"] == "ok"] == [
        "info",
        "debug",
    ]


def test_the_port_has_health_reflection_and_metrics(
    running: Standalone, client: AdminClient
) -> None:
    client.stub.GetProxyRuntimeStats(admin.GetProxyRuntimeStatsRequest(), timeout=CALL_S)
    with grpc.insecure_channel(running.admin_grpc) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        checked = check(health_pb2.HealthCheckRequest(service=SERVICE), timeout=CALL_S)
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        [listed] = reflected(channel, asked)
        names = {each.name for each in listed.list_services_response.service}
        assert SERVICE in names
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=SERVICE)
        [files] = reflected(channel, asked)
        assert files.file_descriptor_response.file_descriptor_proto
    metrics = httpx.get(running.processes["admin"].metrics, trust_env=False).text
    for name in ("rocketmq_admin_grpc_requests_total{", "rocketmq_admin_grpc_seconds_count{"):
        lines = [line for line in metrics.splitlines() if line.startswith(name)]
        assert any('method="GetProxyRuntimeStats"' in line for line in lines)


# ---------------------------------------------------------------- credentials and TLS


def rest_client(
    running: Standalone, authority: Path, auth: tuple[str, str] | None = None
) -> httpx.Client:
    tls = ssl.create_default_context(cafile=authority)
    url = f"{running.admin}/api/v1"
    return httpx.Client(base_url=url, verify=tls, trust_env=False, auth=auth, timeout=CALL_S)


@pytest.fixture(scope="module")
def guarded(
    tmp_path_factory: pytest.TempPathFactory, certificates: Certificates
) -> Iterator[tuple[Standalone, grpc.Channel]]:
    """A standalone with TLS and users, in the mode `on`."""
    folder = tmp_path_factory.mktemp("grpc-admin-users")
    served = certificates.served
    flags = (
        f"--admin-tls-certificate-file={served['tls_certificate_file']}",
        f"--admin-tls-key-file={served['tls_key_file']}",
        "--admin-grpc-port=0",
    )
    authority = Path(certificates.authority)
    with standalone(folder / "data", *flags) as running, rest_client(running, authority) as rest:

        def put(path: str, auth: tuple[str, str] = ("", ""), **body: object) -> None:
            assert rest.put(path, json=body, auth=auth).status_code == HTTPStatus.OK

        put("/users/root", type="SUPER", secret=SECRET)
        put(
            "/users/viewer",
            secret=SECRET,
            entries=[
                {"resource": "Topic:*", "actions": ["Get"]},
                {"resource": "Group:*", "actions": ["Get"]},
            ],
        )
        put("/security", mode="on")
        eventually(lambda: rest.get("/topics").status_code == HTTPStatus.UNAUTHORIZED)
        put("/topics/admin-guarded", ("root", SECRET))
        put("/groups/admin-guarded", ("root", SECRET))
        credentials = grpc.ssl_channel_credentials(authority.read_bytes())
        with grpc.secure_channel(running.admin_grpc, credentials) as channel:
            yield running, channel


def test_calls_need_a_user_with_the_right(guarded: tuple[Standalone, grpc.Channel]) -> None:
    stub = admin_pb2_grpc.AdminStub(guarded[1])
    both = resource("admin-guarded")
    send = admin.AdminSendMessageRequest(topic=both, body=b"secret", key="hidden-key")
    describe = admin.DescribeTopicStatusRequest(topic=both)
    root, viewer = (tuple(signed(name, SECRET).items()) for name in ("root", "viewer"))
    wrong = tuple(signed("root", "not-the-secret-at-all").items())
    for metadata in ((), wrong):
        with pytest.raises(grpc.RpcError) as refused:
            stub.DescribeTopicStatus(describe, metadata=metadata, timeout=CALL_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    ok(stub.DescribeTopicStatus(describe, metadata=viewer, timeout=CALL_S))
    sent = ok(stub.AdminSendMessage(send, metadata=root, timeout=CALL_S))
    with pytest.raises(grpc.RpcError) as refused:
        stub.AdminSendMessage(send, metadata=viewer, timeout=CALL_S)
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    assert "user viewer may not Pub on Topic:admin-guarded" in (refused.value.details() or "")
    # Without Sub, the body and the keys are hidden.
    by_id = admin.ListMessageRequest(topic=both, message_id=sent.message_id)
    hidden = ok(stub.QueryMessage(by_id, metadata=viewer, timeout=CALL_S))
    [message] = hidden.messages
    assert (message.body, list(message.system_properties.keys)) == (b"", [])
    assert not message.system_properties.HasField("body_digest")
    assert "hidden" in hidden.status.message
    [message] = ok(stub.QueryMessage(by_id, metadata=root, timeout=CALL_S)).messages
    assert message.body == b"secret"


def test_refusals_and_changes_name_the_user(
    guarded: tuple[Standalone, grpc.Channel], certificates: Certificates
) -> None:
    running, channel = guarded
    stub = admin_pb2_grpc.AdminStub(channel)
    both = resource("admin-guarded")
    reset = admin.ResetGroupOffsetRequest(group=both, topic=both, reset_timestamp=at(0))
    viewer = tuple(signed("viewer", SECRET).items())
    with pytest.raises(grpc.RpcError):
        stub.ResetGroupOffset(reset, metadata=viewer, timeout=CALL_S)
    ok(stub.ResetGroupOffset(reset, metadata=tuple(signed("root", SECRET).items())))
    with rest_client(running, Path(certificates.authority), ("root", SECRET)) as rest:
        query = {"resource": "Group:admin-guarded"}
        found = rest.get("/audit", params=query).raise_for_status().json()["records"]
    resets = [each for each in found if each["call"] == "Admin/ResetGroupOffset"]
    assert {(each["user"], each["via"], each["result"]) for each in resets} >= {
        ("viewer", "signature", "refused"),
        ("root", "signature", "ok"),
    }


def test_the_names_of_topics_without_get_stay_unknown(
    guarded: tuple[Standalone, grpc.Channel], certificates: Certificates
) -> None:
    running, channel = guarded
    stub = admin_pb2_grpc.AdminStub(channel)
    with rest_client(running, Path(certificates.authority), ("root", SECRET)) as rest:
        rights = [{"resource": "Group:admin-guarded", "actions": ["Get", "Delete"]}]
        rest.put("/users/narrow", json={"secret": SECRET, "entries": rights}).raise_for_status()
    narrow = tuple(signed("narrow", SECRET).items())
    group, codes = resource("admin-guarded"), []

    def is_known() -> bool:
        request = admin.QueryTimeSpanRequest(group=group)
        return bool(ok(stub.QueryTimeSpan(request, metadata=narrow, timeout=CALL_S)))

    eventually(lambda: allowed(is_known))
    for name in ("admin-guarded", "admin-missing"):
        topic = resource(name)
        described = stub.DescribeGroupAccumulation(
            admin.DescribeGroupAccumulationRequest(group=group, topics=[topic]), metadata=narrow
        )
        spans = stub.QueryTimeSpan(
            admin.QueryTimeSpanRequest(group=group, topics=[topic]), metadata=narrow
        )
        deleted = stub.DeleteSubscription(
            admin.DeleteSubscriptionRequest(group=group, topic=topic), metadata=narrow
        )
        codes.append([one.status.code for one in (described, spans, deleted)])
    assert codes == [[v2.OK, v2.OK, v2.NOT_IMPLEMENTED]] * 2


def test_a_caller_without_get_on_clients_sees_that_consumers_are_left_out(
    guarded: tuple[Standalone, grpc.Channel],
) -> None:
    stub = admin_pb2_grpc.AdminStub(guarded[1])
    request = admin.ListSubscriptionRequest(topic=resource("admin-guarded"))
    for user, is_noted in (("viewer", True), ("root", False)):
        metadata = tuple(signed(user, SECRET).items())
        answer = ok(stub.ListSubscription(request, metadata=metadata, timeout=CALL_S))
        assert ("consumers of other users are left out" in answer.status.message) == is_noted


def allowed(call: Callable[[], object]) -> bool:
    try:
        call()
    except grpc.RpcError:
        return False
    return True


def test_reflection_needs_a_user(guarded: tuple[Standalone, grpc.Channel]) -> None:
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as refused:
        reflected(guarded[1], asked)
    assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    assert reflected(guarded[1], asked, signed("viewer", SECRET))
