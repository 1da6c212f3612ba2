"""The status code of every refusal, as a client gets it from the real processes.

One row is one request that differs from a good one in one way. Every refusal says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.clients.api import (
    METADATA,
    Api,
    ack_request,
    api,
    change_request,
    message,
    receive_request,
)
from tests.support.processes.children import child
from tests.support.processes.processes import Standalone, standalone
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

Code: TypeAlias = v2.Code.ValueType

TOPIC, GROUP = "codes", "codes"
ENDPOINTS = v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host="127.0.0.1", port=8081)])
NO_HANDLE = "A" * 55


@pytest.fixture
def endpoint(running: Standalone) -> str:
    return running.grpc


@pytest.fixture(scope="module")
def strict_endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a standalone that creates no objects on first use."""
    folder = tmp_path_factory.mktemp("strict")
    with standalone(
        folder / "data", "--no-auto-create-topics", "--no-auto-create-groups"
    ) as running:
        yield running.grpc


def resource(name: str) -> v2.Resource:
    return v2.Resource(name=name)


def send(body: bytes = b"body", *, topic: str = TOPIC, **properties: Any) -> Message:
    values = {"message_id": "id", **properties}
    sent = v2.Message(
        topic=resource(topic), body=body, system_properties=v2.SystemProperties(**values)
    )
    return service.SendMessageRequest(messages=[sent])


def send_with(user_properties: dict[str, str], **properties: Any) -> Message:
    values = {"message_id": "id", **properties}
    sent = v2.Message(
        topic=resource(TOPIC),
        body=b"body",
        user_properties=user_properties,
        system_properties=v2.SystemProperties(**values),
    )
    return service.SendMessageRequest(messages=[sent])


def receive(topic: str = TOPIC, group: str = GROUP, **fields: Any) -> Message:
    request = receive_request(topic, group)
    for name, value in fields.items():
        if isinstance(value, Message):
            getattr(request, name).CopyFrom(value)
        else:
            setattr(request, name, value)
    return request


def dead_letter(topic: str = TOPIC, group: str = GROUP, handle: str = NO_HANDLE) -> Message:
    return service.ForwardMessageToDeadLetterQueueRequest(
        topic=resource(topic), group=resource(group), receipt_handle=handle, message_id="id"
    )


def recall(topic: str = TOPIC, handle: str = NO_HANDLE) -> Message:
    return service.RecallMessageRequest(topic=resource(topic), recall_handle=handle)


def in_days(days: int) -> Timestamp:
    return Timestamp(seconds=int(time.time()) + days * 24 * 3600)


def route(topic: str = TOPIC, endpoints: v2.Endpoints | None = ENDPOINTS) -> Message:
    return service.QueryRouteRequest(topic=resource(topic), endpoints=endpoints)


def assignment(topic: str = TOPIC, group: str = GROUP) -> Message:
    return service.QueryAssignmentRequest(
        topic=resource(topic), group=resource(group), endpoints=ENDPOINTS
    )


METHODS = {
    service.SendMessageRequest: "SendMessage",
    service.ReceiveMessageRequest: "ReceiveMessage",
    service.AckMessageRequest: "AckMessage",
    service.ChangeInvisibleDurationRequest: "ChangeInvisibleDuration",
    service.ForwardMessageToDeadLetterQueueRequest: "ForwardMessageToDeadLetterQueue",
    service.RecallMessageRequest: "RecallMessage",
    service.QueryRouteRequest: "QueryRoute",
    service.QueryAssignmentRequest: "QueryAssignment",
    service.HeartbeatRequest: "Heartbeat",
    service.NotifyClientTerminationRequest: "NotifyClientTermination",
}


async def statuses(
    client: Api, request: Message, *, headers: Any = METADATA, timeout_s: float | None = 30
) -> list[v2.Status]:
    """Call the request's method; return the status of the answer and of its entries."""
    method = METHODS[type(request)]
    made = getattr(client.stub, method)(request, metadata=headers, timeout=timeout_s)
    if method == "ReceiveMessage":
        items = [item async for item in made]
        assert items[-1].HasField("delivery_timestamp")
        return [item.status for item in items if item.HasField("status")]
    answer = await made
    assert answer.HasField("status")
    return [answer.status, *(entry.status for entry in getattr(answer, "entries", ()))]


def check(endpoint: str, request: Message, code: Code, **options: Any) -> None:
    async def main() -> None:
        async with api(endpoint) as client:
            found = await statuses(client, request, **options)
            assert {v2.Code.Name(status.code) for status in found} == {v2.Code.Name(code)}
            assert all(status.message for status in found)

    asyncio.run(main())


def named(rows: list[tuple[str, Message, Code]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        ("request_", "code"), [row[1:] for row in rows], ids=[row[0] for row in rows]
    )


SYSTEM_TOPICS = (
    "TBW102",
    "SCHEDULE_TOPIC_XXXX",
    "BenchmarkTest",
    "RMQ_SYS_TRANS_HALF_TOPIC",
    "RMQ_SYS_TRACE_TOPIC",
    "RMQ_SYS_TRANS_OP_HALF_TOPIC",
    "TRANS_CHECK_MAX_TIME_TOPIC",
    "SELF_TEST_TOPIC",
    "OFFSET_MOVED_EVENT",
    "CHECKPOINT_TOPIC",
    "rmq_sys_anything",
)
ILLEGAL_NAMES = ("", " ", "\t", "a b", "a.b", "a/b", "a:b", "ä", "a\n", "a\0", "🌊")


@pytest.mark.parametrize("name", [*ILLEGAL_NAMES, "t" * 128, *SYSTEM_TOPICS])
@pytest.mark.parametrize(
    "of",
    [
        lambda name: send(topic=name),
        lambda name: receive(topic=name),
        lambda name: route(topic=name),
        lambda name: assignment(topic=name),
        lambda name: ack_request(name, GROUP, [NO_HANDLE]),
        lambda name: change_request(name, GROUP, NO_HANDLE, 0),
        lambda name: dead_letter(topic=name),
    ],
    ids=["send", "receive", "route", "assignment", "ack", "change", "dead letter"],
)
def test_every_method_rejects_an_illegal_topic(
    endpoint: str, name: str, of: Callable[[str], Message]
) -> None:
    check(endpoint, of(name), v2.ILLEGAL_TOPIC)


@pytest.mark.parametrize(
    "name", [*ILLEGAL_NAMES, "g" * 121, "DEFAULT_CONSUMER", "CID_RMQ_SYS_TRANS", "rmq_sys_group"]
)
@pytest.mark.parametrize(
    "of",
    [
        lambda name: receive(group=name),
        lambda name: assignment(group=name),
        lambda name: ack_request(TOPIC, name, [NO_HANDLE]),
        lambda name: change_request(TOPIC, name, NO_HANDLE, 0),
        lambda name: dead_letter(group=name),
    ],
    ids=["receive", "assignment", "ack", "change", "dead letter"],
)
def test_every_method_rejects_an_illegal_consumer_group(
    endpoint: str, name: str, of: Callable[[str], Message]
) -> None:
    check(endpoint, send(), v2.OK)  # The other objects of the request exist.
    check(endpoint, of(name), v2.ILLEGAL_CONSUMER_GROUP)


@named(
    [
        ("longest topic", send(topic="t" * 127), v2.OK),
        ("topic of all characters", send(topic="aZ09_-%|"), v2.OK),
        ("longest message group", send(message_group="g" * 63), v2.OK),
        (
            "message group of 32 wide characters",
            send(message_group="ä" * 32),
            v2.ILLEGAL_MESSAGE_GROUP,
        ),
        ("message group of 64 bytes", send(message_group="g" * 64), v2.ILLEGAL_MESSAGE_GROUP),
        ("blank message group", send(message_group=" "), v2.ILLEGAL_MESSAGE_GROUP),
        ("empty message group", send(message_group=""), v2.ILLEGAL_MESSAGE_GROUP),
        ("message group with a line", send(message_group="a\nb"), v2.ILLEGAL_MESSAGE_GROUP),
        ("blank tag", send(tag="  "), v2.ILLEGAL_MESSAGE_TAG),
        ("tag with a blank at its end", send(tag="a "), v2.ILLEGAL_MESSAGE_TAG),
        ("tag of all messages", send(tag="*"), v2.OK),
        ("tag with a bar", send(tag="a|b"), v2.ILLEGAL_MESSAGE_TAG),
        ("tag with a control character", send(tag="a\x7fb"), v2.ILLEGAL_MESSAGE_TAG),
        ("wide tag", send(tag="Grüße 🌊"), v2.OK),
        ("empty key", send(keys=["a", ""]), v2.ILLEGAL_MESSAGE_KEY),
        ("blank key", send(keys=[" "]), v2.ILLEGAL_MESSAGE_KEY),
        ("key with a control character", send(keys=["a\x01"]), v2.ILLEGAL_MESSAGE_KEY),
        ("no message id", send(message_id=""), v2.ILLEGAL_MESSAGE_ID),
        ("blank message id", send(message_id="\t"), v2.ILLEGAL_MESSAGE_ID),
        ("reserved property", send_with({"KEYS": "1"}), v2.ILLEGAL_MESSAGE_PROPERTY_KEY),
        (
            "reserved property of delays",
            send_with({"TIMER_DELIVER_MS": "1"}),
            v2.ILLEGAL_MESSAGE_PROPERTY_KEY,
        ),
        ("property key with a line", send_with({"a\n": "1"}), v2.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ("property value with a line", send_with({"a": "\r\n"}), v2.ILLEGAL_MESSAGE_PROPERTY_KEY),
        ("reserved name in small letters", send_with({"keys": "1"}), v2.OK),
        ("128 properties", send_with({f"{n}": "" for n in range(128)}), v2.OK),
        (
            "129 properties",
            send_with({f"{n}": "" for n in range(129)}),
            v2.MESSAGE_PROPERTIES_TOO_LARGE,
        ),
        ("16384 bytes", send_with({"k": "v" * 16_381}, tag="t", keys=["y"]), v2.OK),
        (
            "16385 bytes",
            send_with({"k": "v" * 16_382}, tag="t", keys=["y"]),
            v2.MESSAGE_PROPERTIES_TOO_LARGE,
        ),
        ("bytes, not characters", send_with({"k": "ä" * 8_192}), v2.MESSAGE_PROPERTIES_TOO_LARGE),
        ("no body", send(b""), v2.MESSAGE_BODY_EMPTY),
        ("body that every client receives", send(b"x" * (4_194_304 - 4_096)), v2.OK),
        ("body of 4 MiB", send(b"x" * 4_194_304), v2.MESSAGE_BODY_TOO_LARGE),
        ("body over 4 MiB", send(b"x" * 4_194_305), v2.MESSAGE_BODY_TOO_LARGE),
        ("no message", service.SendMessageRequest(), v2.MESSAGE_CORRUPTED),
        (
            "two topics",
            service.SendMessageRequest(messages=[message("one", b"1"), message("two", b"1")]),
            v2.MESSAGE_CORRUPTED,
        ),
        (
            "type that the properties deny",
            send(message_type=v2.FIFO),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (
            "group and priority",
            send(message_group="g", priority=1),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (
            "group and delay",
            send(message_group="g", delivery_timestamp=Timestamp(seconds=1)),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        (
            "lite topic on a mixed topic",
            send(lite_topic="lite"),
            v2.MESSAGE_PROPERTY_CONFLICT_WITH_TYPE,
        ),
        ("dead-letter topic that nobody made", send(topic="%DLQ%none"), v2.TOPIC_NOT_FOUND),
        (
            "born in the year 10000",
            send(born_timestamp=Timestamp(seconds=253_402_300_800)),
            v2.BAD_REQUEST,
        ),
        ("unknown encoding", send(body_encoding=9), v2.BAD_REQUEST),
        ("delivery in the past", send(delivery_timestamp=Timestamp(seconds=1)), v2.OK),
        ("delivery in 399 days", send(delivery_timestamp=in_days(399)), v2.OK),
        ("delivery in 401 days", send(delivery_timestamp=in_days(401)), v2.ILLEGAL_DELIVERY_TIME),
        (
            "delivery before 1970",
            send(delivery_timestamp=Timestamp(seconds=-1)),
            v2.ILLEGAL_DELIVERY_TIME,
        ),
        (
            "delivery in the year 10000",
            send(delivery_timestamp=Timestamp(seconds=253_402_300_800)),
            v2.ILLEGAL_DELIVERY_TIME,
        ),
        (
            "delivery at the end of all numbers",
            send(delivery_timestamp=Timestamp(seconds=2**63 - 1)),
            v2.ILLEGAL_DELIVERY_TIME,
        ),
        (
            "delivery with negative nanoseconds",
            send(delivery_timestamp=Timestamp(seconds=1, nanos=-1)),
            v2.ILLEGAL_DELIVERY_TIME,
        ),
        (
            "property of the broker's timers",
            send_with({"TIMER_DELIVER_MS": "1"}),
            v2.ILLEGAL_MESSAGE_PROPERTY_KEY,
        ),
        ("the timers' own topic", send(topic="%SYS%TIMER"), v2.ILLEGAL_TOPIC),
    ]
)
def test_a_send_is_answered_with_its_code(endpoint: str, request_: Message, code: Code) -> None:
    check(endpoint, request_, code)


@named(
    [
        ("nothing there", receive("empty"), v2.MESSAGE_NOT_FOUND),
        (
            "no invisible duration",
            receive(invisible_duration=Duration()),
            v2.ILLEGAL_INVISIBLE_TIME,
        ),
        (
            "under a second",
            receive(invisible_duration=Duration(nanos=999_000_000)),
            v2.ILLEGAL_INVISIBLE_TIME,
        ),
        (
            "a second",
            receive("empty", invisible_duration=Duration(seconds=1)),
            v2.MESSAGE_NOT_FOUND,
        ),
        (
            "12 hours",
            receive("empty", invisible_duration=Duration(seconds=43_200)),
            v2.MESSAGE_NOT_FOUND,
        ),
        (
            "over 12 hours",
            receive(invisible_duration=Duration(seconds=43_201)),
            v2.ILLEGAL_INVISIBLE_TIME,
        ),
        ("negative", receive(invisible_duration=Duration(seconds=-1)), v2.ILLEGAL_INVISIBLE_TIME),
        (
            "renewed for us",
            receive("empty", invisible_duration=Duration(), auto_renew=True),
            v2.MESSAGE_NOT_FOUND,
        ),
        (
            "broken tags",
            receive(filter_expression=v2.FilterExpression(type=v2.TAG, expression="||")),
            v2.ILLEGAL_FILTER_EXPRESSION,
        ),
        (
            "expression without a type",
            receive("empty", filter_expression=v2.FilterExpression(expression="a")),
            v2.MESSAGE_NOT_FOUND,
        ),
        (
            "no filter",
            receive("empty", filter_expression=v2.FilterExpression()),
            v2.MESSAGE_NOT_FOUND,
        ),
        ("the timers' own topic", receive("%SYS%TIMER"), v2.ILLEGAL_TOPIC),
        ("route of the timers' own topic", route("%SYS%TIMER"), v2.ILLEGAL_TOPIC),
        ("recall of nothing we know", recall(), v2.BAD_REQUEST),
        ("recall without a handle", recall(handle=""), v2.BAD_REQUEST),
        ("recall of the timers' own topic", recall("%SYS%TIMER"), v2.ILLEGAL_TOPIC),
        ("route without endpoints", route(endpoints=None), v2.ILLEGAL_ACCESS_POINT),
        ("route of a new topic", route("new"), v2.OK),
        ("assignment of a new topic", assignment("new", "new"), v2.OK),
        ("ack without entries", ack_request(TOPIC, GROUP, []), v2.BAD_REQUEST),
        (
            "ack of nothing we know",
            ack_request(TOPIC, GROUP, [NO_HANDLE]),
            v2.INVALID_RECEIPT_HANDLE,
        ),
        ("ack without a handle", ack_request(TOPIC, GROUP, [""]), v2.INVALID_RECEIPT_HANDLE),
        (
            "change of nothing we know",
            change_request(TOPIC, GROUP, NO_HANDLE, 0),
            v2.INVALID_RECEIPT_HANDLE,
        ),
        (
            "change over 12 hours",
            change_request(TOPIC, GROUP, NO_HANDLE, 43_200_001),
            v2.ILLEGAL_INVISIBLE_TIME,
        ),
        (
            "change to before now",
            change_request(TOPIC, GROUP, NO_HANDLE, -1),
            v2.ILLEGAL_INVISIBLE_TIME,
        ),
        ("dead letter of nothing we know", dead_letter(), v2.INVALID_RECEIPT_HANDLE),
        ("heartbeat of no type", service.HeartbeatRequest(), v2.UNRECOGNIZED_CLIENT_TYPE),
        ("heartbeat", service.HeartbeatRequest(client_type=v2.PRODUCER), v2.OK),
        ("termination of a stranger", service.NotifyClientTerminationRequest(), v2.OK),
    ]
)
def test_a_call_is_answered_with_its_code(endpoint: str, request_: Message, code: Code) -> None:
    # The topic and the consumer group of the request exist.
    check(endpoint, assignment(), v2.OK)
    check(endpoint, request_, code)


@named(
    [
        ("route", route("none"), v2.TOPIC_NOT_FOUND),
        ("send", send(topic="none"), v2.TOPIC_NOT_FOUND),
        ("receive", receive("none", "none"), v2.CONSUMER_GROUP_NOT_FOUND),
        ("assignment", assignment("none", "none"), v2.CONSUMER_GROUP_NOT_FOUND),
        ("ack", ack_request("none", "none", [NO_HANDLE]), v2.TOPIC_NOT_FOUND),
        ("change", change_request("none", "none", NO_HANDLE, 0), v2.TOPIC_NOT_FOUND),
        ("dead letter", dead_letter("none", "none"), v2.TOPIC_NOT_FOUND),
        ("recall", recall("none"), v2.TOPIC_NOT_FOUND),
    ]
)
def test_missing_objects_are_not_found_without_auto_create(
    strict_endpoint: str, request_: Message, code: Code
) -> None:
    check(strict_endpoint, request_, code)


@pytest.mark.parametrize(
    "request_",
    [
        send(),
        receive(),
        route(),
        assignment(),
        dead_letter(),
        ack_request(TOPIC, GROUP, [NO_HANDLE]),
        change_request(TOPIC, GROUP, NO_HANDLE, 0),
        service.HeartbeatRequest(client_type=v2.PRODUCER),
        service.NotifyClientTerminationRequest(),
    ],
    ids=lambda request: METHODS[type(request)],
)
@pytest.mark.parametrize("headers", [(), (("x-mq-client-id", " "),)], ids=["none", "blank"])
def test_every_method_wants_to_know_its_client(
    endpoint: str, request_: Message, headers: tuple[tuple[str, str], ...]
) -> None:
    check(endpoint, request_, v2.CLIENT_ID_REQUIRED, headers=headers)


@pytest.mark.parametrize(
    "headers",
    [
        (("x-mq-client-id", "id"),),
        (*METADATA, ("x-mq-date-time", "yesterday"), ("authorization", "nonsense")),
        (("x-mq-client-id", "id"), ("x-mq-language", "KLINGON"), ("x-mq-client-version", "x")),
    ],
    ids=["id only", "wrong clock and credentials", "unknown language"],
)
def test_no_other_header_is_needed_or_examined(
    endpoint: str, headers: tuple[tuple[str, str], ...]
) -> None:
    check(endpoint, send(), v2.OK, headers=headers)


def test_a_deadline_that_is_too_short_for_a_poll_is_an_illegal_polling_time(endpoint: str) -> None:
    request = receive("empty", long_polling_timeout=Duration(seconds=20))
    check(endpoint, request, v2.ILLEGAL_POLLING_TIME, timeout_s=4)
    old = (("x-mq-client-id", "id"), ("x-mq-client-version", "5.0.2"))
    check(endpoint, request, v2.BAD_REQUEST, timeout_s=4, headers=old)


def test_a_dead_letter_topic_is_read_and_not_written(endpoint: str) -> None:
    async def scenario(client: Api) -> None:
        await client.send(message("dying", b"1"))
        [received] = await client.receive("dying", "dying")
        handle = received.system_properties.receipt_handle
        [moved] = await statuses(client, dead_letter("dying", "dying", handle))
        assert moved.code == v2.OK
        [again] = await statuses(client, dead_letter("dying", "dying", handle))
        assert (again.code, again.message[:19]) == (v2.OK, "nothing was moved: ")
        for refused in await statuses(client, send(topic="%DLQ%dying")):
            assert refused.code == v2.FORBIDDEN
        [dead] = await client.receive("%DLQ%dying", "reader")
        assert dead.body == b"1"
        origin = dead.system_properties.dead_letter_queue
        assert (origin.topic, origin.message_id) == ("dying", dead.system_properties.message_id)

    run(endpoint, scenario)


def test_a_handle_is_void_once_it_is_replaced_expired_or_used(endpoint: str) -> None:
    async def scenario(client: Api) -> None:
        await client.send(message("void", b"1"))
        [received] = await client.receive("void", "void")
        first = received.system_properties.receipt_handle
        changed = await client.change_invisible("void", "void", first, 30_000)
        second = changed.receipt_handle
        assert changed.status.code == v2.OK
        assert second != first
        replaced = await client.change_invisible("void", "void", first, 0)
        assert replaced.status.code == v2.INVALID_RECEIPT_HANDLE
        answer = await client.ack("void", "void", [first, second])
        assert answer.status.code == v2.MULTIPLE_RESULTS
        assert [(entry.receipt_handle, entry.status.code) for entry in answer.entries] == [
            (first, v2.INVALID_RECEIPT_HANDLE),
            (second, v2.OK),
        ]
        used = await client.change_invisible("void", "void", second, 0)
        assert used.status.code == v2.INVALID_RECEIPT_HANDLE

    run(endpoint, scenario)


def test_a_broker_that_does_not_answer_is_a_proxy_timeout(tmp_path: Path) -> None:
    with standalone(tmp_path / "data") as running:
        check(running.grpc, send(), v2.OK)
        with paused(running, "broker-0"):
            check(running.grpc, send(), v2.PROXY_TIMEOUT, timeout_s=None)
        check(running.grpc, send(), v2.OK)


@contextlib.contextmanager
def paused(running: Standalone, name: str) -> Iterator[None]:
    """Stop a process for the block, like a hanging machine."""
    pid = running.processes[name].pid
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_proxy_at_its_limit_says_too_many_requests(tmp_path: Path) -> None:
    async def scenario(client: Api) -> None:
        await statuses(client, assignment())
        request = receive_request(TOPIC, GROUP, poll_ms=20_000)
        poll = client.stub.ReceiveMessage(request, metadata=METADATA, timeout=30)
        code = v2.OK
        async with asyncio.timeout(10):
            # No event reports that the poll waits. The send may come before it.
            while code == v2.OK:
                if poll.done():
                    poll = client.stub.ReceiveMessage(request, metadata=METADATA, timeout=30)
                code = (await statuses(client, send(topic="other")))[0].code
        assert code == v2.TOO_MANY_REQUESTS
        poll.cancel()

    data_dir = f"--data-dir={tmp_path / 'data'}"
    with (
        child(
            tmp_path / "broker.log",
            "broker",
            data_dir,
            "--auto-create-topics",
            "--auto-create-groups",
        ) as broker,
        child(
            tmp_path / "proxy.log", "proxy", f"--brokers={broker.grpc}", "--link-pending-max=1"
        ) as proxy,
    ):
        run(proxy.grpc, scenario)


def test_a_method_that_is_not_served_answers_with_a_status(endpoint: str) -> None:
    async def scenario(client: Api) -> None:
        answer = await client.stub.SyncLiteSubscription(
            service.SyncLiteSubscriptionRequest(), metadata=METADATA
        )
        assert answer.status.code == v2.NOT_IMPLEMENTED
        assert "not served yet" in answer.status.message

    run(endpoint, scenario)


def run(endpoint: str, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def main() -> None:
        async with api(endpoint) as client:
            await scenario(client)

    asyncio.run(main())
