"""The service Admin: a row per method, credentials and rights, statuses, without brokers."""

from __future__ import annotations

import asyncio
import base64
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any, Final, cast

import pytest
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from google.protobuf.timestamp_pb2 import Timestamp
from prometheus_client import CollectorRegistry, generate_latest

from tests.support.worlds.access_world import signed
from tests.unit.admin.test_rights import SECRET, Door
from tidemill.admin.grpc import service
from tidemill.admin.grpc.calls import AdminParts
from tidemill.admin.grpc.metrics import AdminGrpcMetrics
from tidemill.admin.grpc.rights import ROWS
from tidemill.admin.grpc.service import CALLS_MAX, DESCRIPTOR, HANDLERS, SERVICE, AdminService
from tidemill.admin.http.rights import NeededRight
from tidemill.admin.messages.compose import Composer
from tidemill.common.clock import SystemClock
from tidemill.common.errors import BrokerUnreachable
from tidemill.security.access_log import AccessLog
from tidemill.security.acl import AccessEntry, parse_entry
from tidemill.security.identities import UserType
from tidemill.security.table import Mode
from tidemill.security.tokens import NamedToken, make_token
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.transport.aio.call import RpcCall
from tidemill.transport.grpc.status import RpcError

TOPIC, GROUP = v2.Resource(name="orders"), v2.Resource(name="billing")
NAMES: Final = {"{topic}": "orders", "{group}": "billing"}
REQUESTS: Final[Mapping[str, Message]] = {
    "ChangeLogLevel": admin.ChangeLogLevelRequest(level=admin.ChangeLogLevelRequest.INFO),
    "DescribeTopicStatus": admin.DescribeTopicStatusRequest(topic=TOPIC),
    "ListSubscription": admin.ListSubscriptionRequest(topic=TOPIC, group=GROUP),
    "DescribeSubscription": admin.DescribeSubscriptionRequest(topic=TOPIC, group=GROUP),
    "DeleteSubscription": admin.DeleteSubscriptionRequest(topic=TOPIC, group=GROUP),
    "DescribeGroupAccumulation": admin.DescribeGroupAccumulationRequest(group=GROUP),
    "ListConsumerConnection": admin.ListConsumerConnectionRequest(group=GROUP),
    "ResetGroupOffset": admin.ResetGroupOffsetRequest(
        group=GROUP, topic=TOPIC, reset_timestamp=Timestamp(seconds=1)
    ),
    "QueryMessage": admin.ListMessageRequest(topic=TOPIC),
    "PrintThreadStackTrace": admin.PrintThreadStackTraceRequest(client_id="c", group=GROUP),
    "VerifyMessage": admin.VerifyMessageRequest(
        client_id="c", group=GROUP, topic=TOPIC, message_id="m"
    ),
    "AdminSendMessage": admin.AdminSendMessageRequest(topic=TOPIC, body=b"x"),
    "GetConsumerRunningInfo": admin.GetConsumerRunningInfoRequest(client_id="c", group=GROUP),
    "GetTopicRoute": admin.GetTopicRouteRequest(topic=TOPIC),
    "QueryTimeSpan": admin.QueryTimeSpanRequest(group=GROUP),
    "GetProxyRuntimeStats": admin.GetProxyRuntimeStatsRequest(),
}
METHODS: Final = sorted(REQUESTS)
Headers = Mapping[str, str]


class NoBrokers:
    """A cluster whose brokers are all down."""

    @contextlib.asynccontextmanager
    async def large_read(self) -> AsyncIterator[None]:
        """Run a read."""
        yield

    def __getattr__(self, name: str) -> Callable[..., Awaitable[object]]:
        async def fail(*_arguments: object, **_named: object) -> object:
            raise BrokerUnreachable("no brokers in this test")

        return fail


class GrpcWorld:
    """The service behind the door of the REST tests."""

    def __init__(self, mode: Mode = Mode.ON) -> None:
        self.door = Door(mode)
        clock = SystemClock()
        self.metrics = AdminGrpcMetrics()
        parts = AdminParts(
            brokers=cast(Any, NoBrokers()),
            composer=Composer(clock, item_bytes_max=1 << 20),
            quotas=None,
            access_log=AccessLog("admin", clock.wall_ms, clock.monotonic_ms),
            cluster="tidemill",
            process="admin",
        )
        self.service = AdminService(parts, cast(Any, self.door.identities), self.metrics)

    async def ask(
        self, method: str, headers: Headers, request: Message | bytes | None = None
    ) -> Message:
        """Call a method. Raises RpcError."""
        given = REQUESTS[method] if request is None else request
        data = given if isinstance(given, bytes) else given.SerializeToString()
        handle = self.service.methods()[f"/{SERVICE}/{method}"].handle
        unary = cast(Callable[[RpcCall, bytes], Awaitable[bytes]], handle)
        answer = await unary(cast(RpcCall, FakeCall(headers)), data)
        output = DESCRIPTOR.methods_by_name[method].output_type
        response: Message = GetMessageClass(output).FromString(answer)
        return response

    def code(self, method: str, headers: Headers, request: Message | bytes | None = None) -> str:
        """Return the name of the gRPC status of a call."""
        try:
            asyncio.run(self.ask(method, headers, request))
        except RpcError as error:
            return error.code.name
        return "OK"


class FakeCall:
    """A call from a client."""

    def __init__(self, headers: Headers) -> None:
        self.metadata = dict(headers)

    def peer(self) -> str:
        """Return the address."""
        return "ipv4:127.0.0.1:4711"


def basic(name: str = "ops", secret: str = SECRET) -> dict[str, str]:
    encoded = base64.b64encode(f"{name}:{secret}".encode()).decode()
    return {"authorization": f"Basic {encoded}"}


def entry_of(right: NeededRight, at: int = 0) -> AccessEntry:
    resource = f"{right.type.text}:{NAMES.get(right.name, right.name)}"
    return parse_entry(resource, [right.actions[at].text])


def test_each_method_of_the_protocol_has_a_handler_and_a_row() -> None:
    names = {method.name for method in DESCRIPTOR.methods}
    assert set(HANDLERS) == names
    assert set(ROWS) == names
    assert set(REQUESTS) == names


@pytest.mark.parametrize("method", METHODS)
def test_a_method_needs_credentials(method: str) -> None:
    world = GrpcWorld()
    world.door.items.put_user(kind=UserType.SUPER)
    wrong: list[Headers] = [
        {},
        {"authorization": ""},
        basic("ops", "wrong"),
        basic("nobody"),
        signed("ops", "wrong"),
        signed("nobody", SECRET),
        {"authorization": "Bearer tmk_0123456789abcdef_" + "x" * 43},
        {"authorization": "MQv2-HMAC-SHA1 nonsense"},
    ]
    for headers in wrong:
        assert world.code(method, headers) == "UNAUTHENTICATED", headers
    for headers in (basic(), signed("ops", SECRET)):
        assert world.code(method, headers) not in {"UNAUTHENTICATED", "PERMISSION_DENIED"}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_needs_each_of_its_rights_and_no_other(method: str) -> None:
    entries = [entry_of(right) for right in ROWS[method].needed]
    world = GrpcWorld()
    world.door.items.put_user(*entries)
    assert world.code(method, signed("ops", SECRET)) != "PERMISSION_DENIED"
    for missing in entries:
        world = GrpcWorld()
        others = [one for one in entries if one is not missing]
        world.door.items.put_user(*others, parse_entry("Topic:other", ["All"]))
        assert world.code(method, signed("ops", SECRET)) == "PERMISSION_DENIED"


@pytest.mark.parametrize("mode", [Mode.OFF, Mode.PERMISSIVE])
@pytest.mark.parametrize("method", METHODS)
def test_the_modes_off_and_permissive_refuse_no_call(method: str, mode: Mode) -> None:
    world = GrpcWorld(mode)
    world.door.items.put_user()
    for headers in ({}, basic("ops", "wrong"), signed("ops", SECRET)):
        assert world.code(method, headers) not in {"UNAUTHENTICATED", "PERMISSION_DENIED"}


def test_a_named_token_has_the_rights_of_its_user() -> None:
    world, made = GrpcWorld(), make_token()
    world.door.items.put_user(parse_entry("Topic:orders", ["Get"]))
    token = NamedToken(id=made.id, name="ci", user="ops", user_id=1, sha256=made.sha256)
    world.door.items.put(token.to_item())
    headers = {"authorization": f"Bearer {made.text}"}
    assert world.code("DescribeTopicStatus", headers) == "OK"
    assert world.code("AdminSendMessage", headers) == "PERMISSION_DENIED"


def test_a_search_by_key_needs_sub() -> None:
    world = GrpcWorld()
    world.door.items.put_user(parse_entry("Topic:orders", ["Get"]))
    by_key = admin.ListMessageRequest(topic=TOPIC, message_key="k")
    by_id = admin.ListMessageRequest(topic=TOPIC, message_id="m")
    assert world.code("QueryMessage", signed("ops", SECRET), by_key) == "PERMISSION_DENIED"
    assert world.code("QueryMessage", signed("ops", SECRET), by_id) == "OK"


def test_failed_logins_of_both_doors_are_counted_together() -> None:
    world = GrpcWorld()
    world.door.items.put_user(kind=UserType.SUPER)
    for _ in range(10):
        assert world.code("GetTopicRoute", signed("ops", "wrong")) == "UNAUTHENTICATED"
    assert world.door.ask("GET /topics").status_code == 429
    with pytest.raises(RpcError, match="too many failed logins"):
        asyncio.run(world.ask("GetTopicRoute", signed("ops", SECRET)))


def test_a_signature_is_no_credential_of_the_rest_api() -> None:
    door = Door()
    door.items.put_user(kind=UserType.SUPER)
    refused = door.ask("GET /topics", None, signed("ops", SECRET))
    assert refused.status_code == 401


def test_users_are_unknown_without_brokers() -> None:
    world = GrpcWorld()
    world.door.items.is_up = False
    assert world.code("GetTopicRoute", signed("ops", SECRET)) == "UNAVAILABLE"


@pytest.mark.parametrize("method", sorted({*METHODS} - {"ChangeLogLevel"}))
def test_errors_of_brokers_are_codes_in_the_response(method: str) -> None:
    world = GrpcWorld(Mode.OFF)
    status = cast(Any, asyncio.run(world.ask(method, {}))).status
    assert status.code == v2.INTERNAL_SERVER_ERROR
    assert "no brokers in this test" in status.message


@pytest.mark.parametrize(
    ("method", "request_", "code", "text"),
    [
        ("DescribeTopicStatus", admin.DescribeTopicStatusRequest(), v2.ILLEGAL_TOPIC, "missing"),
        (
            "QueryTimeSpan",
            admin.QueryTimeSpanRequest(group=v2.Resource(name=" ")),
            v2.ILLEGAL_CONSUMER_GROUP,
            "missing",
        ),
        (
            "GetTopicRoute",
            admin.GetTopicRouteRequest(topic=v2.Resource(name="t", resource_namespace="a b")),
            v2.BAD_REQUEST,
            "namespace",
        ),
        ("ListSubscription", admin.ListSubscriptionRequest(), v2.BAD_REQUEST, "neither"),
        (
            "ResetGroupOffset",
            admin.ResetGroupOffsetRequest(group=GROUP, topic=TOPIC),
            v2.BAD_REQUEST,
            "reset_timestamp",
        ),
        (
            "ResetGroupOffset",
            admin.ResetGroupOffsetRequest(
                group=GROUP, topic=TOPIC, reset_timestamp=Timestamp(seconds=-1)
            ),
            v2.BAD_REQUEST,
            "years 1970",
        ),
        (
            "DescribeGroupAccumulation",
            admin.DescribeGroupAccumulationRequest(group=GROUP, lite_topic="l"),
            v2.NOT_IMPLEMENTED,
            "lite topics",
        ),
        (
            "ListConsumerConnection",
            admin.ListConsumerConnectionRequest(group=GROUP, liteTopic="l"),
            v2.NOT_IMPLEMENTED,
            "lite topics",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(topic=TOPIC, lite_topic="l"),
            v2.NOT_IMPLEMENTED,
            "lite topics",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(topic=TOPIC, message_id=""),
            v2.BAD_REQUEST,
            "search key is empty",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(topic=TOPIC, max_message_nums=-1),
            v2.BAD_REQUEST,
            "max_message_nums",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(topic=TOPIC, scroll_id="x"),
            v2.BAD_REQUEST,
            "scroll_id",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(
                topic=TOPIC,
                scroll_id=base64.urlsafe_b64encode(b'["broker-0", 0, Infinity]').decode(),
            ),
            v2.BAD_REQUEST,
            "scroll_id",
        ),
        (
            "AdminSendMessage",
            admin.AdminSendMessageRequest(
                topic=TOPIC, body=b"x", system_properties=v2.SystemProperties(message_id="own")
            ),
            v2.BAD_REQUEST,
            "message_id",
        ),
        (
            "QueryMessage",
            admin.ListMessageRequest(
                topic=TOPIC,
                begin_timestamp=Timestamp(seconds=2),
                end_timestamp=Timestamp(seconds=1),
            ),
            v2.BAD_REQUEST,
            "after end_timestamp",
        ),
        (
            "AdminSendMessage",
            admin.AdminSendMessageRequest(topic=TOPIC),
            v2.MESSAGE_BODY_EMPTY,
            "body",
        ),
        (
            "AdminSendMessage",
            admin.AdminSendMessageRequest(
                topic=TOPIC, body=b"x", system_properties=v2.SystemProperties(lite_topic="l")
            ),
            v2.NOT_IMPLEMENTED,
            "lite topics",
        ),
        (
            "AdminSendMessage",
            admin.AdminSendMessageRequest(
                topic=TOPIC, body=b"x", system_properties=v2.SystemProperties(body_encoding=v2.GZIP)
            ),
            v2.BAD_REQUEST,
            "IDENTITY",
        ),
        (
            "AdminSendMessage",
            admin.AdminSendMessageRequest(
                topic=TOPIC,
                body=b"x",
                system_properties=v2.SystemProperties(message_type=v2.TRANSACTION),
            ),
            v2.BAD_REQUEST,
            "TRANSACTION",
        ),
        (
            "VerifyMessage",
            admin.VerifyMessageRequest(group=GROUP, topic=TOPIC, message_id="m"),
            v2.BAD_REQUEST,
            "client_id",
        ),
    ],
)
def test_an_invalid_request_gets_a_code_and_the_reason(
    method: str, request_: Message, code: v2.Code.ValueType, text: str
) -> None:
    status = cast(Any, asyncio.run(GrpcWorld(Mode.OFF).ask(method, {}, request_))).status
    assert (v2.Code.Name(status.code), text in status.message) == (v2.Code.Name(code), True), status


def test_random_bytes_are_no_request() -> None:
    assert GrpcWorld(Mode.OFF).code("QueryMessage", {}, b"\xff\xff") == "INVALID_ARGUMENT"


def test_an_unknown_log_level_is_a_status_of_grpc() -> None:
    request = admin.ChangeLogLevelRequest.FromString(b"\x08\x63")
    assert GrpcWorld(Mode.OFF).code("ChangeLogLevel", {}, request) == "INVALID_ARGUMENT"


def test_calls_at_the_same_time_are_limited() -> None:
    world = GrpcWorld(Mode.OFF)
    world.metrics.in_flight = CALLS_MAX
    assert world.code("GetTopicRoute", {}) == "RESOURCE_EXHAUSTED"
    world.metrics.in_flight = CALLS_MAX - 1
    assert world.code("GetTopicRoute", {}) == "OK"
    assert world.metrics.in_flight == CALLS_MAX - 1


def test_a_call_without_a_result_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    async def wait(*_arguments: object) -> Message:
        return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]  # no result

    monkeypatch.setattr(service, "CALL_TIMEOUT_S", 0.01)
    monkeypatch.setattr(service, "HANDLERS", {"GetTopicRoute": wait})
    assert GrpcWorld(Mode.OFF).code("GetTopicRoute", {}) == "DEADLINE_EXCEEDED"


def test_calls_are_counted_by_method_and_code() -> None:
    world = GrpcWorld()
    world.code("GetTopicRoute", {})
    world.door.items.put_user(kind=UserType.SUPER)
    world.code("GetTopicRoute", signed("ops", SECRET))
    world.code("DescribeTopicStatus", signed("ops", SECRET), admin.DescribeTopicStatusRequest())
    registry = CollectorRegistry()
    registry.register(cast(Any, world.metrics))
    text = generate_latest(registry).decode()
    for method, code in (
        ("GetTopicRoute", "UNAUTHENTICATED"),
        ("GetTopicRoute", "INTERNAL_SERVER_ERROR"),
        ("DescribeTopicStatus", "ILLEGAL_TOPIC"),
    ):
        assert f'requests_total{{code="{code}",method="{method}"}} 1.0' in text
    assert 'rocketmq_admin_grpc_seconds_count{method="GetTopicRoute"} 2.0' in text
