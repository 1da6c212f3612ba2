"""Unary methods from a service definition and objects with methods, for services with few calls."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from google.protobuf import message_factory
from google.protobuf.message import DecodeError, Message

from tidemill.transport.aio.call import RpcCall, RpcMethod, unary
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor


def unary_methods(service: ServiceDescriptor, *implementations: object) -> Mapping[str, RpcMethod]:
    """Return all methods of a service by path; all its calls must be unary.

    For each name, one of the `implementations` has a method that takes the parsed request and
    returns the response.
    """
    return {
        f"/{service.full_name}/{method.name}": _unary(method, _find(method.name, implementations))
        for method in service.methods
    }


def _find(name: str, implementations: Sequence[object]) -> Callable[[Any], Awaitable[Message]]:
    [found] = [getattr(each, name) for each in implementations if hasattr(each, name)]
    return cast("Callable[[Any], Awaitable[Message]]", found)


def _unary(method: MethodDescriptor, answer: Callable[[Any], Awaitable[Message]]) -> RpcMethod:
    request_class = message_factory.GetMessageClass(method.input_type)

    async def handle(_call: RpcCall, request: bytes) -> bytes:
        try:
            parsed = request_class.FromString(request)
        except DecodeError:
            reason = f"the request is not a {method.input_type.name}"
            raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None
        return (await answer(parsed)).SerializeToString()

    return unary(handle)
