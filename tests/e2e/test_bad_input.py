"""Bad input to the public port does not harm the broker or its stored messages.

10,000 inputs from a seed: random bytes, mutated requests, mutated receipt handles, and bytes that
are not gRPC.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
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
    milliseconds,
    receive_request,
)
from tests.support.clients.mutation import mutated, mutated_handle, random_bytes
from tests.support.processes.processes import Standalone, is_running, standalone
from tests.support.seeds import seed_base
from tidemill.message import limits
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

SEED = seed_base()
RANDOM, MUTATED, HANDLES = 3_000, 4_000, 3_000
AT_ONCE = 32  # Calls in flight.
CALL_S = 4.0  # Too short for a long poll: a receive without a polling time is rejected at once.
MEMORY_MIB_MAX = 150  # Growth of a process, including the buffers of large bodies.
HELD = 5  # Messages of each state: acked, delivered without an ack, not delivered.
KEPT, FUZZ = "kept", "fuzz"
HOUR_MS = 3_600_000

SERVICE = service.DESCRIPTOR.services_by_name["MessagingService"]
UNSERVED = {"SyncLiteSubscription"}
ENDPOINTS = v2.Endpoints(scheme=v2.IPv4, addresses=[v2.Address(host="127.0.0.1", port=8081)])


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a call: a status in its response or a gRPC code."""

    method: str
    request: bytes
    code: int
    text: str
    grpc_code: grpc.StatusCode = grpc.StatusCode.OK

    def __str__(self) -> str:
        return f"{self.method} {self.code} {self.grpc_code} {self.text!r} to {self.request[:200]!r}"


@dataclass(slots=True)
class StoredMessages:
    """The messages that were stored before the bad input."""

    acked: list[str]
    held: dict[str, str]  # key -> receipt handle
    waiting: list[str]


@dataclass(slots=True)
class World:
    running: Standalone
    stored: StoredMessages
    memory_mib: dict[str, float]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A standalone with some messages that must survive all tests of this file."""
    with standalone(tmp_path_factory.mktemp("bad") / "data") as running:
        stored = asyncio.run(store(running.grpc))
        memory = {name: rss_mib(child.pid) for name, child in running.processes.items()}
        yield World(running, stored, memory)
        asyncio.run(check_unharmed(running, stored))
        log = running.log.read_text()
        assert "Traceback" not in log
        assert "call failed unexpectedly" not in log
        for name, child in running.processes.items():
            assert is_running(child.pid), f"{name} died"
            grown_mib = rss_mib(child.pid) - memory[name]
            assert grown_mib < MEMORY_MIB_MAX, f"{name} grew by {grown_mib:.0f} MiB"


async def store(endpoint: str) -> StoredMessages:
    async with api(endpoint) as client:
        await client.send(message(FUZZ, b"1"))
        await client.receive(FUZZ, FUZZ, invisible_ms=HOUR_MS)
        keys = [f"key-{n}" for n in range(3 * HELD)]
        for key in keys:
            answer = await client.send(message(KEPT, key.encode()))
            assert answer.status.code == v2.OK
        # One message per delivery, so that no index of a handle names another message.
        delivered = {}
        for _ in range(2 * HELD):
            [received] = await client.receive(KEPT, KEPT, batch_size=1, invisible_ms=HOUR_MS)
            delivered[received.body.decode()] = received.system_properties.receipt_handle
        acked = list(delivered)[:HELD]
        answers = await client.ack(KEPT, KEPT, [delivered.pop(key) for key in acked])
        assert answers.status.code == v2.OK
        waiting = [key for key in keys if key not in acked and key not in delivered]
        return StoredMessages(acked=acked, held=delivered, waiting=waiting)


async def check_unharmed(running: Standalone, stored: StoredMessages) -> None:
    """Check that all handles work, that the backlog is complete, and that acks are kept."""
    async with api(running.grpc) as client:
        held = await client.ack(KEPT, KEPT, stored.held.values())
        assert held.status.code == v2.OK, held
        waiting = await client.receive(KEPT, KEPT)
        assert sorted(each.body.decode() for each in waiting) == sorted(stored.waiting)
        handles = [each.system_properties.receipt_handle for each in waiting]
        assert (await client.ack(KEPT, KEPT, handles)).status.code == v2.OK
        await check_serving(client)


async def check_serving(client: Api) -> None:
    """Check that a valid message is stored and delivered."""
    answer = await client.send(message("clean", b"clean"))
    assert answer.status.code == v2.OK
    [received] = await client.receive("clean", "clean")
    assert received.body == b"clean"
    handle = received.system_properties.receipt_handle
    assert (await client.ack("clean", "clean", [handle])).status.code == v2.OK


def rss_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / (1 << 20)


# ------------------------------------------------------------ calls


async def call(client: Api, method: str, request: bytes) -> Answer:
    """Call any method with any bytes."""
    descriptor = SERVICE.methods_by_name[method]
    path = f"/apache.rocketmq.v2.{SERVICE.name}/{method}"
    items: list[bytes] = []
    try:
        if descriptor.client_streaming:
            stream: grpc.aio.StreamStreamMultiCallable[bytes, bytes]
            stream = client.channel.stream_stream(path)
            replies = stream(one(request), metadata=METADATA, timeout=CALL_S)
            items = [item async for item in replies]
        elif descriptor.server_streaming:
            streaming: grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
            streaming = client.channel.unary_stream(path)
            parts = streaming(request, metadata=METADATA, timeout=CALL_S)
            items = [item async for item in parts]
        else:
            unary: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
            unary = client.channel.unary_unary(path)
            items = [await unary(request, metadata=METADATA, timeout=CALL_S)]
    except grpc.aio.AioRpcError as error:
        return Answer(method, request, 0, error.details() or "", error.code())
    for item in items:
        response = message_class(descriptor.output_type.name).FromString(item)
        if response.HasField("status"):
            status: v2.Status = getattr(response, "status")  # noqa: B009 - any kind of message
            return Answer(method, request, status.code, status.message)
    return Answer(method, request, 0, "", grpc.StatusCode.OK)


async def one(request: bytes) -> AsyncIterator[bytes]:
    yield request


def message_class(name: str) -> type[Message]:
    found: type[Message] = getattr(service, name)
    return found


def complaint(answer: Answer) -> str | None:
    """Return the fault of an answer to bad input."""
    if answer.method == "Telemetry" and answer.grpc_code is grpc.StatusCode.INVALID_ARGUMENT:
        return None if answer.text else f"no sentence: {answer}"
    # A command without a request is not answered.
    if answer.method == "Telemetry" and answer.grpc_code is grpc.StatusCode.OK and not answer.code:
        return None
    # The other methods have an answer for input that is too large.
    telemetry_max = limits.request_bytes_max("Telemetry")
    is_oversize = answer.method == "Telemetry" and len(answer.request) > telemetry_max
    if answer.grpc_code is grpc.StatusCode.RESOURCE_EXHAUSTED and is_oversize:
        return None if answer.text else f"no sentence: {answer}"
    if answer.grpc_code is not grpc.StatusCode.OK:
        return f"not a status of the protocol: {answer}"
    if answer.code not in v2.Code.values() or answer.code == v2.CODE_UNSPECIFIED:
        return f"no code of the protocol: {answer}"
    if answer.code >= v2.INTERNAL_ERROR and answer.code != v2.NOT_IMPLEMENTED:
        return f"a fault of the server: {answer}"
    if not answer.text or "Traceback" in answer.text or "Error(" in answer.text:
        return f"no sentence: {answer}"
    return None


def bombard(world: World, calls: Sequence[tuple[str, bytes]]) -> list[Answer]:
    """Make all calls, some in parallel, and return their results."""

    async def main() -> list[Answer]:
        permits = asyncio.Semaphore(AT_ONCE)
        async with api(world.running.grpc) as client:

            async def limited(method: str, request: bytes) -> Answer:
                async with permits:
                    return await call(client, method, request)

            async with asyncio.TaskGroup() as tasks:
                made = [tasks.create_task(limited(*each)) for each in calls]
        return [task.result() for task in made]

    return asyncio.run(main())


def valid_requests() -> dict[str, list[Message]]:
    """Return one valid request of each method, or several with different code paths."""
    fuzz = v2.Resource(name=FUZZ)
    full = v2.Message(
        topic=fuzz,
        user_properties={"key": "value"},
        body=b"body",
        system_properties=v2.SystemProperties(
            tag="tag",
            keys=["key"],
            message_id="id",
            body_encoding=v2.IDENTITY,
            message_type=v2.NORMAL,
            born_timestamp=Timestamp(seconds=1),
            born_host="host",
            trace_context="trace",
            body_digest=v2.Digest(type=v2.MD5, checksum="841A2D689AD86BD1611447453C22C6FC"),
        ),
    )
    handle = "A" * 55
    delayed = message(FUZZ, b"3")
    delayed.system_properties.delivery_timestamp.seconds = int(time.time()) + HOUR_MS // 1000
    settings = v2.Settings(
        client_type=v2.SIMPLE_CONSUMER,
        access_point=ENDPOINTS,
        request_timeout=Duration(seconds=3),
        user_agent=v2.UA(language=v2.PYTHON),
        subscription=v2.Subscription(
            group=fuzz,
            subscriptions=[
                v2.SubscriptionEntry(topic=fuzz, expression=v2.FilterExpression(type=v2.TAG))
            ],
        ),
    )
    queue = v2.MessageQueue(topic=fuzz, broker=v2.Broker(name="broker-0"))
    tags = v2.FilterExpression(type=v2.TAG, expression="tag || other")
    publishing = v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing(topics=[fuzz]))
    return {
        "QueryRoute": [service.QueryRouteRequest(topic=fuzz, endpoints=ENDPOINTS)],
        "Heartbeat": [service.HeartbeatRequest(group=fuzz, client_type=v2.PUSH_CONSUMER)],
        "SendMessage": [
            service.SendMessageRequest(messages=[full]),
            service.SendMessageRequest(messages=[full, full, message(FUZZ, b"2")]),
            service.SendMessageRequest(messages=[delayed]),
        ],
        "RecallMessage": [recall_request(FUZZ, handle)],
        "EndTransaction": [
            service.EndTransactionRequest(
                topic=fuzz, message_id="id", transaction_id=handle, resolution=v2.COMMIT
            )
        ],
        "QueryAssignment": [
            service.QueryAssignmentRequest(topic=fuzz, group=fuzz, endpoints=ENDPOINTS)
        ],
        "ReceiveMessage": [receive_request(FUZZ, FUZZ)],
        "AckMessage": [ack_request(FUZZ, FUZZ, [handle, handle])],
        "ForwardMessageToDeadLetterQueue": [dead_letter_request(FUZZ, FUZZ, handle)],
        "NotifyClientTermination": [service.NotifyClientTerminationRequest(group=fuzz)],
        "ChangeInvisibleDuration": [change_request(FUZZ, FUZZ, handle, 1000)],
        "Telemetry": [
            service.TelemetryCommand(settings=settings),
            service.TelemetryCommand(settings=publishing),
        ],
        "PullMessage": [
            service.PullMessageRequest(message_queue=queue, batch_size=32),
            service.PullMessageRequest(
                group=fuzz,
                message_queue=queue,
                offset=1,
                batch_size=4,
                filter_expression=tags,
                long_polling_timeout=Duration(nanos=1_000_000),
            ),
        ],
        "QueryOffset": [
            service.QueryOffsetRequest(message_queue=queue, query_offset_policy=v2.END),
            service.QueryOffsetRequest(
                message_queue=queue,
                query_offset_policy=v2.TIMESTAMP,
                timestamp=Timestamp(seconds=int(time.time())),
            ),
        ],
        "GetOffset": [service.GetOffsetRequest(group=fuzz, message_queue=queue)],
        "UpdateOffset": [service.UpdateOffsetRequest(group=fuzz, message_queue=queue, offset=1)],
    }


def recall_request(topic: str, handle: str) -> service.RecallMessageRequest:
    return service.RecallMessageRequest(topic=v2.Resource(name=topic), recall_handle=handle)


def dead_letter_request(
    topic: str, group: str, handle: str
) -> service.ForwardMessageToDeadLetterQueueRequest:
    return service.ForwardMessageToDeadLetterQueueRequest(
        group=v2.Resource(name=group),
        topic=v2.Resource(name=topic),
        receipt_handle=handle,
        message_id="id",
        delivery_attempt=1,
        max_delivery_attempts=2,
    )


# ------------------------------------------------------------ the tests


def test_random_bytes_to_every_method_are_answered_with_a_code_and_a_sentence(world: World) -> None:
    rng = random.Random(SEED)
    methods = list(SERVICE.methods_by_name)
    calls = [(methods[n % len(methods)], random_bytes(rng)) for n in range(RANDOM)]
    assert [found for answer in bombard(world, calls) if (found := complaint(answer))] == []


def test_mutated_requests_are_answered_with_a_code_and_a_sentence(world: World) -> None:
    rng = random.Random(SEED)
    valid = valid_requests()
    assert set(valid) | UNSERVED == set(SERVICE.methods_by_name)
    calls = []
    for n in range(MUTATED):
        method = list(valid)[n % len(valid)]
        calls.append((method, mutated(rng, rng.choice(valid[method]))))
    answers = bombard(world, calls)
    assert [found for answer in answers if (found := complaint(answer))] == []
    # The mutations reach beyond the first check.
    codes = Counter(answer.code for answer in answers)
    assert len(codes) > 15, codes


def test_the_unmutated_requests_are_valid(world: World) -> None:
    calls = [(m, r.SerializeToString()) for m, each in valid_requests().items() for r in each]
    # One after the other, because some calls need what an earlier one creates.
    answers = [answer for each in calls * 2 for answer in bombard(world, [each])]
    by_method = {answer.method: answer.code for answer in answers}
    handles = ("AckMessage", "ForwardMessageToDeadLetterQueue", "ChangeInvisibleDuration")
    expected: dict[str, int] = dict.fromkeys(valid_requests(), v2.OK)
    expected |= dict.fromkeys(handles, v2.INVALID_RECEIPT_HANDLE)
    expected |= {"RecallMessage": v2.BAD_REQUEST, "EndTransaction": v2.INVALID_TRANSACTION_ID}
    assert by_method == expected


def test_mutated_receipt_handles_are_refused_and_change_nothing(world: World) -> None:
    rng = random.Random(SEED)
    handles = list(world.stored.held.values())
    ways: list[Callable[[str, str, str], tuple[str, Message]]] = [
        lambda t, g, h: ("AckMessage", ack_request(t, g, [h])),
        lambda t, g, h: ("ChangeInvisibleDuration", change_request(t, g, h, 0)),
        lambda t, g, h: ("ForwardMessageToDeadLetterQueue", dead_letter_request(t, g, h)),
    ]
    calls = []
    for _ in range(HANDLES):
        method, request = rng.choice(ways)(KEPT, KEPT, mutated_handle(rng, rng.choice(handles)))
        calls.append((method, request.SerializeToString()))
    # The right handle from the wrong consumer group, or for the wrong topic.
    for topic, group in ((KEPT, FUZZ), (FUZZ, KEPT), (FUZZ, FUZZ)):
        for way in ways:
            method, request = way(topic, group, handles[0])
            calls.append((method, request.SerializeToString()))
    answers = bombard(world, calls)
    assert [str(a) for a in answers if a.code != v2.INVALID_RECEIPT_HANDLE] == []


def test_mutated_recall_handles_are_refused_and_cancel_nothing(world: World) -> None:
    rng = random.Random(SEED)
    handles: list[str] = []

    async def send(client: Api) -> None:
        for n in range(HELD):
            delayed = message(FUZZ, str(n).encode())
            due_s = int(time.time()) + HOUR_MS // 1000
            delayed.system_properties.delivery_timestamp.seconds = due_s
            handles.append((await client.send(delayed)).entries[0].recall_handle)

    with_client(world, send)
    calls = [recall_request(FUZZ, mutated_handle(rng, rng.choice(handles))) for _ in range(HANDLES)]
    calls += [recall_request(KEPT, handle) for handle in handles]
    answers = bombard(world, [("RecallMessage", call.SerializeToString()) for call in calls])
    assert [str(answer) for answer in answers if answer.code != v2.BAD_REQUEST] == []
    calls = [recall_request(FUZZ, handle) for handle in handles]
    answers = bombard(world, [("RecallMessage", call.SerializeToString()) for call in calls])
    assert {answer.code for answer in answers} == {v2.OK}


def test_every_entry_of_an_ack_with_bad_handles_has_its_own_status(world: World) -> None:
    async def scenario(client: Api) -> None:
        await client.send(message("entries", b"1"))
        [received] = await client.receive("entries", "entries")
        good = received.system_properties.receipt_handle
        answer = await client.ack("entries", "entries", ["bad", good, good[:-1], ""])
        assert answer.status.code == v2.MULTIPLE_RESULTS
        assert [entry.status.code for entry in answer.entries] == [
            v2.INVALID_RECEIPT_HANDLE,
            v2.OK,
            v2.INVALID_RECEIPT_HANDLE,
            v2.INVALID_RECEIPT_HANDLE,
        ]
        assert all(entry.status.message for entry in answer.entries)

    with_client(world, scenario)


def test_oversized_requests_get_their_own_codes(world: World) -> None:
    async def scenario(client: Api) -> None:
        for size in ((4 << 20) + 1, 20 << 20):
            answer = await client.send(message(FUZZ, bytes(size), message_id="large"))
            assert answer.status.code == v2.MESSAGE_BODY_TOO_LARGE
        wide = message(FUZZ, b"1")
        wide.user_properties["key"] = "x" * (12 << 20)
        assert (await client.send(wide)).status.code == v2.MESSAGE_PROPERTIES_TOO_LARGE
        long = message(FUZZ, b"1", message_id="x" * (512 << 10))
        assert (await client.send(long)).status.code == v2.ILLEGAL_MESSAGE_ID
        name = message("x" * (12 << 20), b"1")
        assert (await client.send(name)).status.code == v2.ILLEGAL_TOPIC

    with_client(world, scenario)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 10_000,
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(500),
        b"PROXY TCP4 1.1.1.1 2.2.2.2 1 2\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff" * 5_000,
        # A frame of 16 MiB that never comes; then endless headers.
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\xff\xff\xff\x00\x00\x00\x00\x00\x01",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) + b"\x00\x40\x00\x01\x00" * 1_000,
        random.Random(SEED).randbytes(100_000),
    ],
    ids=["zeros", "http1", "tls", "proxy", "preface", "huge frame", "headers", "random"],
)
def test_bytes_that_are_no_grpc_do_not_disturb_others(world: World, garbage: bytes) -> None:
    with contextlib.ExitStack() as sockets:
        for _ in range(20):
            connection = sockets.enter_context(connect(world))
            # The server may close the connection while it is written to.
            with contextlib.suppress(ConnectionError):
                connection.sendall(garbage)
        with_client(world, check_serving)


def test_half_open_connections_do_not_disturb_others(world: World) -> None:
    with contextlib.ExitStack() as sockets:
        for n in range(300):
            connection = sockets.enter_context(connect(world))
            connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[: n % 25])
            if n % 2:
                # Closed by a reset, like a machine that crashed.
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        with_client(world, check_serving)
    with_client(world, check_serving)


def test_calls_that_are_abandoned_do_not_disturb_others(world: World) -> None:
    """Cancel receives, sends and streams at random times."""

    async def scenario(client: Api) -> None:
        rng = random.Random(SEED)
        request = receive_request("abandoned", "abandoned", poll_ms=20_000)
        for _ in range(200):
            poll = client.stub.ReceiveMessage(request, metadata=METADATA, timeout=30)
            send = client.stub.SendMessage(
                service.SendMessageRequest(messages=[message(FUZZ, b"1")]), metadata=METADATA
            )
            stream = client.stub.Telemetry(metadata=METADATA)
            await asyncio.sleep(rng.choice((0, 0, 0.001)))
            for each in (poll, send, stream):
                each.cancel()
        await check_serving(client)

    with_client(world, scenario)


def test_a_negative_or_endless_duration_is_refused(world: World) -> None:
    async def scenario(client: Api) -> None:
        for invisible_ms in (-1, -HOUR_MS, 0, 12 * HOUR_MS + 1, 1 << 50):
            request = receive_request(FUZZ, FUZZ)
            request.invisible_duration.CopyFrom(milliseconds(invisible_ms))
            answer = await call(client, "ReceiveMessage", request.SerializeToString())
            assert answer.code == v2.ILLEGAL_INVISIBLE_TIME, invisible_ms

    with_client(world, scenario)


def connect(world: World) -> socket.socket:
    host, _, port = world.running.grpc.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=10)


def with_client(world: World, scenario: Callable[[Api], Awaitable[None]]) -> None:
    async def main() -> None:
        async with api(world.running.grpc) as client:
            await scenario(client)

    asyncio.run(main())


def test_a_remoting_client_is_disconnected_at_once_and_named_in_the_log(world: World) -> None:
    header = b'{"code":105,"language":"JAVA","opaque":0}'
    frame = (4 + len(header)).to_bytes(4) + b"\0" + len(header).to_bytes(3) + header
    host, _, port = world.running.grpc.rpartition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=CALL_S) as client:
            client.sendall(frame)
            while client.recv(4_096):
                pass
    lines = [line for line in world.running.log.read_text().splitlines() if "RocketMQ 4" in line]
    assert len(lines) == 1, "one line a minute for each address"
