"""The standard gRPC health service (`grpc.health.v1`)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from typing import Final, final

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from tidemill.transport.aio.call import RpcCall, RpcMethod, server_streaming, unary
from tidemill.transport.grpc.status import RpcCode, RpcError

SERVICE: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Response = health_pb2.HealthCheckResponse
_SERVING: Final = _Response(status=_Response.SERVING).SerializeToString()
_NOT_SERVING: Final = _Response(status=_Response.NOT_SERVING).SerializeToString()
_UNKNOWN_SERVICE: Final = _Response(status=_Response.SERVICE_UNKNOWN).SerializeToString()


@final
class HealthService:
    """The health service; it reports the state of each service, "" stands for the process."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", *services))
        self._is_serving = True
        self._is_ending = False
        self._changed = asyncio.Event()  # set at the next change

    def methods(self) -> Mapping[str, RpcMethod]:
        """Return the methods by path."""
        return {
            f"/{SERVICE}/Check": unary(self._check),
            f"/{SERVICE}/Watch": server_streaming(self._watch),
        }

    def report(self, *, is_serving: bool) -> None:
        """Report to all watchers whether the services are served."""
        if is_serving != self._is_serving:
            self._is_serving = is_serving
            self._change()

    def drain(self) -> None:
        """Report to all watchers that no service is served, and end their streams."""
        self._is_serving, self._is_ending = False, True
        self._change()

    def _change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _check(self, _call: RpcCall, request: bytes) -> bytes:
        name = _parse(request)
        if name not in self._services:
            raise RpcError(RpcCode.NOT_FOUND, f"the service {name} is unknown")
        return self._answer()

    async def _watch(self, call: RpcCall, request: bytes) -> None:
        """Send the status and each change, until the client disconnects or `drain`."""
        is_known = _parse(request) in self._services
        sent = b""
        while True:
            changed = self._changed
            answer = self._answer() if is_known else _UNKNOWN_SERVICE
            if answer != sent:
                sent = answer
                await call.send(answer)
            if self._is_ending:
                return
            await changed.wait()

    def _answer(self) -> bytes:
        return _SERVING if self._is_serving else _NOT_SERVING


def _parse(request: bytes) -> str:
    try:
        return health_pb2.HealthCheckRequest.FromString(request).service
    except DecodeError:
        raise RpcError(
            RpcCode.INVALID_ARGUMENT, "the request is not a HealthCheckRequest"
        ) from None
