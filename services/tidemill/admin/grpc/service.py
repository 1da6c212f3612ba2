"""The gRPC service Admin: credentials, rights, statuses and metrics around each method.

Missing credentials and rights are gRPC statuses. Other errors are codes in the response, as in
MessagingService. ChangeLogLevel has no status in its response, so all its errors are gRPC statuses.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final, final

import grpc
import structlog
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from tidemill.admin.audit.author import Author
from tidemill.admin.grpc import client_calls, group_calls, message_calls, process_calls, topic_calls
from tidemill.admin.grpc.calls import AdminCall, AdminParts, Handler
from tidemill.admin.grpc.rights import ROWS, check_rights
from tidemill.admin.http.refused_login import RefusedLogin
from tidemill.admin.http.shown_secrets import GRPC
from tidemill.common.addresses import host_of_peer
from tidemill.common.errors import Forbidden, IllegalGroup, IllegalTopic, ServiceError, codes_of
from tidemill.message.resources import ResourceName, resource_name
from tidemill.stubs.apache.rocketmq.v2 import admin_pb2 as admin
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.transport.aio.call import RpcCall, RpcMethod, unary
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from tidemill.admin.grpc.metrics import AdminGrpcMetrics
    from tidemill.admin.http.banned_callers import Identities
    from tidemill.admin.http.identities import Identity

log = structlog.get_logger()

DESCRIPTOR: Final = admin.DESCRIPTOR.services_by_name["Admin"]
SERVICE: Final = "apache.rocketmq.v2.Admin"
CALLS_MAX: Final = 64  # at the same time; each holds at most a page of messages
CALL_TIMEOUT_S: Final = 30.0
HEADERS: Final = ("authorization", "x-mq-date-time", "tidemill-user")  # that the check reads
HANDLERS: Final[Mapping[str, Handler]] = {
    "ChangeLogLevel": process_calls.change_log_level,
    "DescribeTopicStatus": topic_calls.describe_topic_status,
    "ListSubscription": client_calls.list_subscription,
    "DescribeSubscription": client_calls.describe_subscription,
    "DeleteSubscription": group_calls.delete_subscription,
    "DescribeGroupAccumulation": group_calls.describe_group_accumulation,
    "ListConsumerConnection": client_calls.list_consumer_connection,
    "ResetGroupOffset": group_calls.reset_group_offset,
    "QueryMessage": message_calls.query_message,
    "PrintThreadStackTrace": client_calls.print_thread_stack_trace,
    "VerifyMessage": client_calls.verify_message,
    "AdminSendMessage": message_calls.admin_send_message,
    "GetConsumerRunningInfo": client_calls.get_consumer_running_info,
    "GetTopicRoute": topic_calls.get_topic_route,
    "QueryTimeSpan": group_calls.query_time_span,
    "GetProxyRuntimeStats": process_calls.get_proxy_runtime_stats,
}
_CODES: Final = {
    HTTPStatus.BAD_REQUEST: RpcCode.INVALID_ARGUMENT,
    HTTPStatus.CONFLICT: RpcCode.FAILED_PRECONDITION,
    HTTPStatus.TOO_MANY_REQUESTS: RpcCode.RESOURCE_EXHAUSTED,
    HTTPStatus.NOT_IMPLEMENTED: RpcCode.UNIMPLEMENTED,
}


@final
class AdminService:
    """The methods of the service."""

    def __init__(
        self, parts: AdminParts, identities: Identities, metrics: AdminGrpcMetrics
    ) -> None:
        self._parts = parts
        self._identities = identities
        self._metrics = metrics

    def methods(self) -> Mapping[str, RpcMethod]:
        """Return the methods by path."""
        return {f"/{SERVICE}/{name}": self._unary(name) for name in HANDLERS}

    async def admit(self, call: RpcCall) -> None:
        """Check the credentials of a call without rights, such as reflection. Raises RpcError."""
        await self._identify(call, "reflection")

    def _unary(self, name: str) -> RpcMethod:
        async def handle(call: RpcCall, request: bytes) -> bytes:
            began_at_s, code = time.monotonic(), RpcCode.CANCELLED.name
            self._metrics.in_flight += 1
            try:
                response = await self._answer(name, call, request)
                code = _code_of(response)
                return response.SerializeToString()
            except RpcError as error:
                code = error.code.name
                raise
            finally:
                self._metrics.in_flight -= 1
                self._metrics.note(name, code, time.monotonic() - began_at_s)

        return unary(handle)

    async def _answer(self, name: str, call: RpcCall, request: bytes) -> Message:
        if self._metrics.in_flight > CALLS_MAX:
            text = f"{CALLS_MAX} calls run already; try again later"
            raise RpcError(RpcCode.RESOURCE_EXHAUSTED, text)
        identity = await self._identify(call, name)
        method = DESCRIPTOR.methods_by_name[name]
        parsed = _parse(GetMessageClass(method.input_type), request)
        response_class = GetMessageClass(method.output_type)
        try:
            resources = _resources_of(parsed, is_optional=ROWS[name].is_optional)
            _check_rights(identity, name, parsed, resources)
            async with asyncio.timeout(CALL_TIMEOUT_S):
                author = Author(identity.actor, self._parts.process, f"Admin/{name}")
                admitted = AdminCall(self._parts, identity.access, author, resources)
                return await HANDLERS[name](admitted, parsed)
        except ServiceError as error:
            return _failed(response_class, codes_of(error).rocketmq, error.message, error)
        except TimeoutError:
            raise RpcError(
                RpcCode.DEADLINE_EXCEEDED, f"no result within {CALL_TIMEOUT_S:g} s"
            ) from None
        except grpc.aio.AioRpcError as error:
            text = f"a broker rejected the call: {error.details()}"
            return _failed(response_class, v2.INTERNAL_SERVER_ERROR, text, None)
        except RpcError:
            raise
        except Exception as error:  # The boundary of the service.
            log.exception("call of Admin failed unexpectedly", method=name, exc_info=error)
            text = "the server failed; its log has the reason"
            return _failed(response_class, v2.INTERNAL_ERROR, text, None)

    async def _identify(self, call: RpcCall, name: str) -> Identity:
        """Return the caller. Raises RpcError."""
        try:
            return await self._identities.identify(_scope_of(call, name))
        except RefusedLogin as refused:
            raise RpcError(RpcCode.UNAUTHENTICATED, refused.reason) from None
        except ServiceError as error:
            raise RpcError(RpcCode.UNAVAILABLE, error.message) from None


def _scope_of(call: RpcCall, name: str) -> dict[str, Any]:
    """Return a call as the check of credentials reads it; `path` is the call in the audit log."""
    headers = [
        (key.encode(), value.encode("latin-1", "replace"))
        for key in HEADERS
        if (value := call.metadata.get(key)) is not None
    ]
    return {
        "type": GRPC,
        "method": "POST",
        "path": f"Admin/{name}",
        "headers": headers,
        "client": (host_of_peer(call.peer()), 0),
    }


def _parse(request_class: type[Message], request: bytes) -> Message:
    try:
        return request_class.FromString(request)
    except DecodeError:
        reason = f"the request is not a valid {request_class.DESCRIPTOR.name}"
        raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None


def _resources_of(request: Message, *, is_optional: bool) -> dict[str, ResourceName]:
    """Return the topic and the group of a request. Raises IllegalTopic, IllegalGroup, BadRequest.

    They are required if the request has such fields, unless they are `is_optional`.
    """
    found: dict[str, ResourceName] = {}
    for field, error in (("topic", IllegalTopic), ("group", IllegalGroup)):
        if field not in request.DESCRIPTOR.fields_by_name:
            continue
        resource = getattr(request, field)
        if resource.name.strip():
            found[field] = resource_name(resource)
        elif request.HasField(field) or not (is_optional or _is_optional_filter(request, field)):
            raise error(f"the name of the {field} is missing")
    return found


def _is_optional_filter(request: Message, field: str) -> bool:
    """Whether the request has the field to narrow its answer: that of ListConsumerConnection."""
    return field == "topic" and isinstance(request, admin.ListConsumerConnectionRequest)


def _check_rights(
    identity: Identity, name: str, request: Message, resources: Mapping[str, ResourceName]
) -> None:
    """Raise RpcError for a missing right."""
    names = {field: resource.full for field, resource in resources.items()}
    try:
        check_rights(identity.access, name, request, names)
    except Forbidden as error:
        raise RpcError(RpcCode.PERMISSION_DENIED, error.message) from None


def _failed(
    response_class: type[Message], code: int, text: str, error: ServiceError | None
) -> Message:
    """Return a response with the status of an error. Raises RpcError if it has no status."""
    if "status" not in response_class.DESCRIPTOR.fields_by_name:
        http = codes_of(error).http if error else HTTPStatus.INTERNAL_SERVER_ERROR
        raise RpcError(_CODES.get(http, RpcCode.UNAVAILABLE), text)
    return response_class(status=v2.Status(code=v2.Code.ValueType(code), message=text))


def _code_of(response: Message) -> str:
    """Return the code of a response in metrics."""
    if "status" not in response.DESCRIPTOR.fields_by_name:
        return RpcCode.OK.name
    code = response.status.code  # type: ignore[attr-defined]  # The descriptor has it.
    return v2.Code.Name(code) if code in v2.Code.values() else str(code)
