"""Server reflection, for grpcurl and its kin; the answers are those of grpcio's own package."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from tidemill.transport.aio.call import Method, RpcCall, bidirectional
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from grpc_reflection.v1alpha.reflection import aio

SERVICE: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name


def reflection_methods(services: Sequence[str]) -> Mapping[str, Method]:
    """Return the methods, by path, that describe `services` and themselves."""

    async def server_reflection_info(call: RpcCall) -> None:
        servicer = _servicer((*services, SERVICE))
        # Its stub says coroutine; it is a generator.
        answers: Any = servicer.ServerReflectionInfo(_parsed(call), None)
        async for answer in answers:
            await call.send(answer.SerializeToString())

    return {f"/{SERVICE}/ServerReflectionInfo": bidirectional(server_reflection_info)}


@functools.cache
def _servicer(services: Sequence[str]) -> aio.ReflectionServicer:
    # With the first question only: the package loads all of grpcio, 10 MiB and 30 ms.
    from grpc_reflection.v1alpha.reflection import aio

    return aio.ReflectionServicer(service_names=services)


async def _parsed(call: RpcCall) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for request in call:
        try:
            yield reflection_pb2.ServerReflectionRequest.FromString(request)
        except DecodeError:
            reason = "the request is no ServerReflectionRequest"
            raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None
