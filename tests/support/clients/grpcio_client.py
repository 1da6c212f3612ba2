"""Typed calls through grpcio's client, whose stubs omit the types."""

from __future__ import annotations

from typing import TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

Request = TypeVar("Request", bound=Message)
Response = TypeVar("Response", bound=Message)

REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"


async def read(
    call: grpc.aio.StreamStreamCall[Request, Response], kind: type[Response]
) -> Response:
    """Return the next message of a stream. Fail if the stream has ended."""
    message = await call.read()
    assert isinstance(message, kind), "the stream has not ended"
    return message


async def is_serving(channel: grpc.aio.Channel, service: str) -> bool:
    """Ask the health service."""
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/grpc.health.v1.Health/Check"
    )
    answer = await check(health_pb2.HealthCheckRequest(service=service).SerializeToString())
    status = health_pb2.HealthCheckResponse.FromString(answer).status
    return status == health_pb2.HealthCheckResponse.SERVING


async def reflected_services(channel: grpc.aio.Channel) -> set[str]:
    """Ask the reflection service for the names of all services."""
    info: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = channel.stream_stream(REFLECTION)
    request = reflection_pb2.ServerReflectionRequest(list_services="").SerializeToString()
    [answer] = [one async for one in info(iter([request]))]
    response = reflection_pb2.ServerReflectionResponse.FromString(answer)
    return {service.name for service in response.list_services_response.service}
