"""Server reflection for grpcurl and similar tools, with the responses of grpcio's package."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message import DecodeError
from grpc_reflection.v1alpha import reflection_pb2

from tidemill.transport.aio.call import RpcCall, RpcMethod, bidirectional
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from google.protobuf.descriptor import FileDescriptor
    from grpc_reflection.v1alpha.reflection import aio

_OURS: Final = "tidemill."  # prefix of the names of public packages, see tools/generate_stubs.py
SERVICE: Final = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"].full_name


def reflection_methods(
    services: Sequence[str], admit: Callable[[RpcCall], Awaitable[None] | None] = lambda _call: None
) -> Mapping[str, RpcMethod]:
    """Return the methods, by path, that describe `services` and reflection itself.

    `admit` raises RpcError for a call that gets no answer, at once or when it is awaited.
    """

    async def server_reflection_info(call: RpcCall) -> None:
        if (admitted := admit(call)) is not None:
            await admitted
        servicer = _servicer((*services, SERVICE))
        # The stub declares a coroutine; it is a generator.
        answers: Any = servicer.ServerReflectionInfo(_parsed(call), None)
        async for answer in answers:
            await call.send(answer.SerializeToString())

    return {f"/{SERVICE}/ServerReflectionInfo": bidirectional(server_reflection_info)}


@functools.cache
def _servicer(services: Sequence[str]) -> aio.ReflectionServicer:
    # Imported at the first request, because the package loads all of grpcio: 10 MiB and 30 ms.
    from grpc_reflection.v1alpha.reflection import aio

    return aio.ReflectionServicer(service_names=services, pool=public_pool(services))


def public_pool(services: Sequence[str]) -> DescriptorPool:
    """Return the descriptors of services with the names in their .proto files."""
    pool = DescriptorPool()
    for service in services:
        _add(_file_of(service), pool, set())
    return pool


def _file_of(service: str) -> FileDescriptor:
    default = descriptor_pool.Default()
    try:
        return default.FindFileContainingSymbol(_OURS + service)
    except KeyError:
        return default.FindFileContainingSymbol(service)


def _add(file: FileDescriptor, pool: DescriptorPool, seen: set[str]) -> None:
    if file.name in seen:
        return
    seen.add(file.name)
    for needed in file.dependencies:
        _add(needed, pool, seen)
    proto = FileDescriptorProto()
    file.CopyToProto(proto)
    proto.package = proto.package.removeprefix(_OURS) if _is_ours(proto.package) else proto.package
    for message in proto.message_type:
        _rename_fields(message)
    for service in proto.service:
        for method in service.method:
            method.input_type = _public(method.input_type)
            method.output_type = _public(method.output_type)
    # If the file is already in the pool, it is the same.
    pool.AddSerializedFile(proto.SerializeToString())


def _rename_fields(message: DescriptorProto) -> None:
    for field in message.field:
        if field.type_name:
            field.type_name = _public(field.type_name)
    for nested in message.nested_type:
        _rename_fields(nested)


def _public(name: str) -> str:
    """Return the name of a type, with its leading dot, as in its .proto file."""
    return f".{name[1:].removeprefix(_OURS)}" if _is_ours(name[1:]) else name


def _is_ours(name: str) -> bool:
    return name.startswith(f"{_OURS}apache.")


async def _parsed(call: RpcCall) -> AsyncIterator[reflection_pb2.ServerReflectionRequest]:
    async for request in call:
        try:
            yield reflection_pb2.ServerReflectionRequest.FromString(request)
        except DecodeError:
            reason = "the request is not a ServerReflectionRequest"
            raise RpcError(RpcCode.INVALID_ARGUMENT, reason) from None
