"""Fields of the public protocol: the proxy uses each one, or docs/clients.md lists it.

For each field of each served request, the test sends a valid request with and without a strange
value in this field, to two equal worlds. If answers and effects are equal, the field is not used.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
from google.protobuf import message_factory, text_format
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxied_broker import calls_of
from tests.support.worlds.proxy_world import (
    ACCESS_POINT,
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    ack_request,
    eventually,
    message,
    receive_request,
)
from tidemill.message.client_key import ClientKey
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.methods import SERVICE, UNSERVED_UNARY
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.aio.call import RpcCall
from tidemill.transport.grpc.status import RpcError

PAGE: Final = Path(__file__).parents[3] / "docs/clients.md"
METHODS: Final = service.DESCRIPTOR.services_by_name[SERVICE.rpartition(".")[2]].methods_by_name
HANDLE: Final = "HANDLE"  # stands for the handle that the broker of the request has issued
STRANGE: Final = "strange"
PROBE: Final = "probe"  # id of the message that follows the request on the link
CLIENT_ID: Final = HEADERS["x-mq-client-id"]
USED, REJECTED = "uses it", "rejects it"
ANSWERED_ONE_BY_ONE: Final = (
    "pops",
    "changes",
    "dead_letters",
    "ensures",
    "timer_cancels",
    "transaction_ends",
)
GOOD: Final = frozenset({v2.OK, v2.MESSAGE_NOT_FOUND})  # statuses of valid requests
TOPIC, GROUP = v2.Resource(name="topic"), v2.Resource(name="group")
QUEUE = v2.MessageQueue(topic=TOPIC, id=1, permission=v2.READ_WRITE)
BORN = Timestamp(seconds=1_790_000_000)
NEXT_CENTURY = Timestamp(seconds=4_102_444_800)


class Observation(NamedTuple):
    """The answers to a request, and its effects at the brokers."""

    answers: list[Any]
    effects: list[str]


class Case(NamedTuple):
    """A valid request of a method, for the fields with one of these prefixes."""

    request: Message
    prefixes: tuple[str, ...] = ("",)


def settings(**pub_sub: Message) -> v2.Settings:
    return v2.Settings(
        client_type=v2.PUSH_CONSUMER if "subscription" in pub_sub else v2.PRODUCER,
        access_point=ACCESS_POINT,
        request_timeout=Duration(seconds=3),
        user_agent=v2.UA(language=v2.PYTHON, version="5.1.2"),
        **pub_sub,  # type: ignore[arg-type]  # keywords by name
    )


SENT = message(
    message_type=v2.NORMAL,
    born_timestamp=BORN,
    body_digest=v2.Digest(type=v2.MD5, checksum="841A2D689AD86BD1611447453C22C6FC"),
)
TAGS = v2.FilterExpression(type=v2.TAG, expression="tag")
PRODUCER = settings(publishing=v2.Publishing(topics=[TOPIC]))
CONSUMER = settings(
    subscription=v2.Subscription(
        group=GROUP, subscriptions=[v2.SubscriptionEntry(topic=TOPIC, expression=TAGS)]
    )
)
CASES: Final[dict[str, list[Case]]] = {
    "QueryRoute": [Case(service.QueryRouteRequest(topic=TOPIC, endpoints=ACCESS_POINT))],
    "Heartbeat": [Case(service.HeartbeatRequest(group=GROUP, client_type=v2.PUSH_CONSUMER))],
    "SendMessage": [Case(service.SendMessageRequest(messages=[SENT]))],
    "QueryAssignment": [
        Case(service.QueryAssignmentRequest(topic=TOPIC, group=GROUP, endpoints=ACCESS_POINT))
    ],
    "ReceiveMessage": [Case(receive_request(batch_size=1))],
    "AckMessage": [Case(ack_request(HANDLE))],
    "ForwardMessageToDeadLetterQueue": [
        Case(
            service.ForwardMessageToDeadLetterQueueRequest(
                group=GROUP, topic=TOPIC, receipt_handle=HANDLE, message_id="id-1"
            )
        )
    ],
    "ChangeInvisibleDuration": [
        Case(
            service.ChangeInvisibleDurationRequest(
                group=GROUP,
                topic=TOPIC,
                receipt_handle=HANDLE,
                invisible_duration=Duration(seconds=10),
                message_id="id-1",
            )
        )
    ],
    "NotifyClientTermination": [Case(service.NotifyClientTerminationRequest(group=GROUP))],
    "RecallMessage": [Case(service.RecallMessageRequest(topic=TOPIC, recall_handle=HANDLE))],
    "EndTransaction": [
        Case(
            service.EndTransactionRequest(
                topic=TOPIC, message_id="id-1", transaction_id=HANDLE, resolution=v2.COMMIT
            )
        )
    ],
    "PullMessage": [
        Case(
            service.PullMessageRequest(
                group=GROUP, message_queue=QUEUE, batch_size=1, filter_expression=TAGS
            )
        )
    ],
    "QueryOffset": [
        Case(
            service.QueryOffsetRequest(
                message_queue=QUEUE, query_offset_policy=v2.TIMESTAMP, timestamp=BORN
            )
        )
    ],
    "GetOffset": [Case(service.GetOffsetRequest(group=GROUP, message_queue=QUEUE))],
    "UpdateOffset": [Case(service.UpdateOffsetRequest(group=GROUP, message_queue=QUEUE, offset=3))],
    "Telemetry": [
        Case(service.TelemetryCommand(settings=CONSUMER), ("settings",)),
        Case(service.TelemetryCommand(settings=PRODUCER), ("settings.publishing",)),
        Case(
            service.TelemetryCommand(
                status=v2.Status(code=v2.OK),
                thread_stack_trace=service.ThreadStackTrace(nonce="nonce", thread_stack_trace="at"),
            ),
            ("status", "thread_stack_trace"),
        ),
        Case(
            service.TelemetryCommand(
                verify_message_result=service.VerifyMessageResult(nonce="nonce")
            ),
            ("verify_message_result",),
        ),
        Case(
            service.TelemetryCommand(
                verify_message_command=service.VerifyMessageCommand(nonce="nonce")
            ),
            ("verify_message_command",),
        ),
        Case(
            service.TelemetryCommand(),
            (
                "recover_orphaned_transaction_command",
                "print_thread_stack_trace_command",
                "reconnect_endpoints_command",
                "notify_unsubscribe_lite_command",
            ),
        ),
    ],
}


# ------------------------------------------------------------ fields


def listed_fields() -> dict[str, dict[str, str]]:
    """Return the fields without effect that the page lists: by method and path."""
    listed: dict[str, dict[str, str]] = {}
    section = PAGE.read_text().partition("## Fields without effect\n")[2].partition("\n## ")[0]
    for row in re.findall(r"^\| (`.*) \| (`.*) \| (\w.*) \| .* \|$", section, re.MULTILINE):
        calls, paths, verdict = row
        for method in re.findall(r"`(\w+)`", calls):
            listed.setdefault(method, {}).update(
                dict.fromkeys(re.findall(r"`(.+?)`", paths), verdict)
            )
    return listed


def paths_of(descriptor: Any, listed: dict[str, str], prefix: str = "") -> Iterator[str]:
    """Yield the path of each field; a listed field stands for all fields in it."""
    for field in descriptor.fields:
        path = prefix + field.name
        if path in listed or not is_composite(field):
            yield path
        else:
            yield from paths_of(field.message_type, listed, path + ".")


def is_composite(field: Any) -> bool:
    """Whether a field has fields of the protocol in it."""
    inner = field.message_type
    return (
        inner is not None
        and not inner.GetOptions().map_entry
        and inner.file.package != "google.protobuf"
    )


def set_strange(request: Message, path: str) -> None:
    """Give a field another value."""
    *outer, name = path.split(".")
    for each in outer:
        inner = getattr(request, each)
        if not isinstance(inner, Message):
            inner = inner[0] if inner else inner.add()
        request = inner
    fill(request, request.DESCRIPTOR.fields_by_name[name])


def fill(request: Message, field: Any) -> None:
    """Give a field another value, or all fields in it."""
    value = getattr(request, field.name)
    if is_composite(field):
        inner = (value[0] if value else value.add()) if field.is_repeated else value
        for each in field.message_type.fields:
            fill(inner, each)
    elif field.message_type is not None and field.message_type.GetOptions().map_entry:
        value[STRANGE] = STRANGE
    elif field.message_type is not None:
        one = value.add() if field.is_repeated else value
        one.seconds += 77
    elif field.is_repeated:
        value.append(another(field, field.default_value))
    else:
        setattr(request, field.name, another(field, value))


def another(field: Any, value: Any) -> Any:
    """Return a value of the type of a field, other than `value`."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_ENUM:
            numbers = sorted(field.enum_type.values_by_number)
            return numbers[(numbers.index(value) + 1) % len(numbers)] if value in numbers else 1
        case FieldDescriptor.CPPTYPE_BOOL:
            return not value
        case FieldDescriptor.CPPTYPE_STRING:
            return STRANGE.encode() if field.type == FieldDescriptor.TYPE_BYTES else STRANGE
        case _:
            return 77


def clear(answer: Message, path: str) -> Message:
    """Return a copy without a field, if it has this field."""
    copy = type(answer)()
    copy.CopyFrom(answer)
    *outer, name = path.split(".")
    within = [copy]
    for each in outer:
        found = [getattr(one, each) for one in within if each in one.DESCRIPTOR.fields_by_name]
        within = [m for one in found for m in ([one] if isinstance(one, Message) else one)]
    for one in within:
        if name in one.DESCRIPTOR.fields_by_name:
            one.ClearField(name)
    return copy


# ------------------------------------------------------------ requests


class Reader:
    """The reads of a broker, with one empty queue. It records them."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    async def pull(self, _call: RpcCall, request: bytes) -> bytes:
        self.seen.append(f"pull {link_pb2.PullRequest.FromString(request)}")
        return link_pb2.PullReply(is_at_end=True).SerializeToString()

    async def wait(self, _call: RpcCall, request: bytes) -> bytes:
        self.seen.append(f"wait {link_pb2.AwaitMessageRequest.FromString(request)}")
        return b""

    async def query(self, _call: RpcCall, request: bytes) -> bytes:
        self.seen.append(f"query {link_pb2.QueryOffsetRequest.FromString(request)}")
        return link_pb2.OffsetReply(offset=3).SerializeToString()

    async def get(self, _call: RpcCall, request: bytes) -> bytes:
        self.seen.append(f"get {link_pb2.GetPullOffsetRequest.FromString(request)}")
        return link_pb2.OffsetReply(offset=3).SerializeToString()

    async def update(self, _call: RpcCall, request: bytes) -> bytes:
        self.seen.append(f"update {link_pb2.UpdatePullOffsetRequest.FromString(request)}")
        return b""


class Sink(ResponseCollector):
    """The responses of a stream."""

    def __init__(self, kind: type[Message]) -> None:
        super().__init__()
        self._kind = kind
        self.answers: list[Message] = []

    async def send(self, message: bytes) -> None:
        self.answers.append(self._kind.FromString(message))


def new_call() -> Call:
    return Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=30)


async def observe(method: str, request: Message) -> Observation:
    """Send a request to a new world."""
    reader = Reader()
    async with (
        asyncio.timeout(20),
        MemoryBroker(auto_create=False).serving() as broker,
        calls_of(
            Pull=reader.pull,
            AwaitMessage=reader.wait,
            QueryOffset=reader.query,
            GetPullOffset=reader.get,
            UpdatePullOffset=reader.update,
        ) as calls,
        ProxyWorld.open(broker, calls=calls, client_metrics=True) as world,
    ):
        await world.put_topic(queues=2)
        await world.put_group()
        await world.send(message(born_timestamp=BORN, tag="tag"), message(born_timestamp=BORN))
        request = await with_handle(world, method, request)
        if method == "Telemetry":
            answers = await converse(world, request, reader.seen)
        else:
            answers = await answers_to(world, method, request)
        listing = world.clients.find(ClientKey(CLIENT_ID))
        if listing is not None:
            client = listing.client
            reader.seen.append(f"client {client.client_type} {client.group}")
        return Observation(answers, reader.seen + await effects_of(world))


async def with_handle(world: ProxyWorld, method: str, request: Message) -> Message:
    """Return the request with a handle that the broker has issued."""
    if HANDLE not in str(request):
        return request
    if method == "RecallMessage":
        delayed = message(born_timestamp=BORN, delivery_timestamp=NEXT_CENTURY)
        handle = (await world.send(delayed)).entries[0].recall_handle
    elif method == "EndTransaction":
        half = message(message_type=v2.TRANSACTION, born_timestamp=BORN)
        half.system_properties.message_id = "id-1"
        handle = (await world.send(half)).entries[0].transaction_id
    else:
        [received, *_] = await world.receive_messages()
        handle = received.system_properties.receipt_handle
    text = text_format.MessageToString(request).replace(HANDLE, handle)
    return text_format.Parse(text, type(request)())


async def answers_to(world: ProxyWorld, method: str, request: Message) -> list[Message]:
    kind = message_factory.GetMessageClass(METHODS[method].output_type)
    if method in world.methods.streaming:
        sink, name = Sink(kind), request_code(method)
        served = world.methods.streaming[method]
        await world.boundary.streaming(name, served, new_call(), request.SerializeToString(), sink)
        if method == "ReceiveMessage":
            sink.answers.pop()  # the time of the server
        return sink.answers
    if method == "NotifyClientTermination":
        heartbeat = service.HeartbeatRequest(client_type=v2.PUSH_CONSUMER)
        await world.call("Heartbeat", heartbeat, service.HeartbeatResponse)
    return [await world.call(method, request, kind)]


async def converse(world: ProxyWorld, request: Message, seen: list[str]) -> list[Message]:
    """Send a command on a new stream, while a command to the client waits for its answer.

    Add this answer to `seen`.
    """

    async def commands() -> AsyncIterator[bytes]:
        yield request.SerializeToString()

    streams, sink = world.clients.streams, Sink(service.TelemetryCommand)
    waiting = service.TelemetryCommand(
        print_thread_stack_trace_command=service.PrintThreadStackTraceCommand()
    )
    with streams.open(ClientKey(CLIENT_ID), sink):
        asking = asyncio.create_task(streams.ask(ClientKey(CLIENT_ID), waiting, timeout_ms=20_000))
        await eventually(lambda: bool(sink.answers))
        stream = Sink(service.TelemetryCommand)
        try:
            await world.methods.bidirectional["Telemetry"](new_call(), commands(), stream)
        except RpcError as error:
            status = v2.Status(code=v2.BAD_REQUEST, message=f"{error.code} {error.message}")
            stream.answers.append(service.TelemetryCommand(status=status))
        for _ in range(8):  # turns for the answer to reach the question
            await asyncio.sleep(0)
        if asking.done():
            seen.append(f"answer {asking.result()}")
        asking.cancel()
        await asyncio.wait([asking])
    return stream.answers


async def effects_of(world: ProxyWorld) -> list[str]:
    """Return the requests at the broker, up to a message that is sent now."""
    await world.send(message(message_id=PROBE, born_timestamp=BORN))
    frames = world.broker.frames
    await eventually(
        lambda: any(PROBE.encode() in str(frame.appends.blobs).encode() for frame in frames)
    )
    effects = []
    for frame in frames:
        appended = frame.appends
        rows = zip(appended.topic_ids, appended.queue_ids, appended.blobs, strict=True)
        effects += [f"append {row}" for row in rows if PROBE.encode() not in row[2]]
        acked = frame.acks
        effects += [f"ack {acked}"] if acked.request_ids else []
        for name in (
            "pops",
            "changes",
            "dead_letters",
            "ensures",
            "timer_cancels",
            "transaction_ends",
        ):
            effects += [f"{name} {each}" for each in getattr(frame, name)]
        effects += [f"ended {each}" for each in frame.ended_clients]
        effects += [f"subscribed {frame.subscribed}"] if frame.subscribed.topic_ids else []
    return effects


# ------------------------------------------------------------ tests


def test_every_method_has_a_valid_request() -> None:
    assert CASES.keys() | UNSERVED_UNARY.keys() == set(METHODS)
    assert listed_fields().keys() <= CASES.keys()


@pytest.mark.parametrize("method", CASES)
def test_each_field_is_used_or_listed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _size: "nonce")
    listed = listed_fields().get(method, {})
    paths = list(paths_of(METHODS[method].input_type, listed))
    assert listed.keys() <= set(paths), "the page lists a field that does not exist"
    found = asyncio.run(verdicts(method, paths))
    wrong = {
        path: f"the page: {listed.get(path, USED)}; the proxy: {verdict}"
        for path, verdict in found.items()
        if not agrees(listed.get(path, USED), verdict)
    }
    assert not wrong, "\n".join(f"{path}: {each}" for path, each in wrong.items())


def agrees(listed: str, found: str) -> bool:
    if listed == USED:
        return found == USED or found.startswith(REJECTED)
    return found == ("ignores it" if listed == "replaces it" else listed)


async def verdicts(method: str, paths: list[str]) -> dict[str, str]:
    """Return the verdict on each field: used, ignored, returned or rejected."""
    cases = CASES[method]
    bases = [await observe(method, case.request) for case in cases]
    for base in bases:
        assert code_of(base) in GOOD, base
    found = {}
    for path in paths:
        covered = [covered_length(case, path) for case in cases]
        assert max(covered) >= 0, f"no request for {path}"
        chosen = covered.index(max(covered))
        request = type(cases[chosen].request)()
        request.CopyFrom(cases[chosen].request)
        set_strange(request, path)
        found[path] = verdict_of(path, bases[chosen], await observe(method, request))
    return found


@pytest.mark.parametrize(
    ("policy", "timestamp"), [(v2.BEGINNING, BORN), (v2.END, BORN), (v2.TIMESTAMP, None), (9, None)]
)
def test_a_query_for_an_offset_with_an_unclear_policy_is_rejected(
    policy: v2.QueryOffsetPolicy.ValueType, timestamp: Timestamp | None
) -> None:
    """BEGINNING is the default: a query with only a timestamp would get the first offset."""
    request = service.QueryOffsetRequest(
        message_queue=QUEUE, query_offset_policy=policy, timestamp=timestamp
    )
    assert code_of(asyncio.run(observe("QueryOffset", request))) == v2.BAD_REQUEST


def covered_length(case: Case, path: str) -> int:
    """Return the length of the longest prefix of a case that covers a field; -1: none."""
    lengths = [len(each) for each in case.prefixes if not each or f"{path}.".startswith(f"{each}.")]
    return max(lengths, default=-1)


def verdict_of(path: str, base: Observation, changed: Observation) -> str:
    if changed == base:
        return "ignores it"
    others = [[clear(one, path) for one in each.answers] for each in (base, changed)]
    if others[0] == others[1] and base.effects == changed.effects:
        return "returns it"
    code = code_of(changed)
    if code not in GOOD and set(changed.effects) < set(base.effects):
        return f"{REJECTED}: `{v2.Code.Name(v2.Code.ValueType(code))}`"
    return USED


def code_of(observation: Observation) -> int:
    """Return the status of the first answer."""
    first = next(iter(observation.answers), None)
    return v2.OK if first is None else first.status.code
