"""The telemetry stream: each client announces its settings and gets those that it should work with.

Settings answer one client at a time and are kept nowhere: ordered or not, back-off and filters come
from the stored topics and groups and from the requests themselves, because clients go on working
for minutes with a proxy that has never seen their settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import structlog
from google.protobuf.message import DecodeError

from tidemill.common.errors import RequestError, ServiceError
from tidemill.proxy.client_settings import (
    DEFAULT_GROUP,
    check_settings,
    consumer_settings,
    producer_settings,
)
from tidemill.proxy.clients import Client
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import ClientGone
from tidemill.transport.grpc.status import RpcCode, RpcError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tidemill.common.clock import Clock
    from tidemill.proxy.clients import Clients
    from tidemill.proxy.cluster import Cluster
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

log = structlog.get_logger()

# A Node.js client with several topics loses the first answer: it starts to wait for one only later.
NODE_JS_REPEAT_MS = 1000

_OK = v2.Status(code=v2.OK, message="OK")


class Telemetry:
    """Answers the settings of clients."""

    def __init__(
        self, cluster: Cluster, clients: Clients, clock: Clock, *, long_polling_max_ms: int
    ) -> None:
        self._cluster = cluster
        self._clients = clients
        self._clock = clock
        self._long_polling_max_ms = long_polling_max_ms

    async def telemetry(
        self, call: Call, requests: AsyncIterator[bytes], responses: Responses
    ) -> None:
        """Serve one stream until the client half-closes it, then end it with OK."""
        try:
            async with asyncio.TaskGroup() as tasks:
                await self._serve(call, requests, responses, tasks)
        except ExceptionGroup as failures:
            # The stream's own failure, in the shape in which the boundary knows it.
            raise failures.exceptions[0] from None

    async def _serve(
        self,
        call: Call,
        requests: AsyncIterator[bytes],
        responses: Responses,
        tasks: asyncio.TaskGroup,
    ) -> None:
        repeat: asyncio.Task[None] | None = None
        async for request in requests:
            command = _parse(request)
            # The other commands answer what an operator asked of the client; nobody does yet.
            if command.HasField("settings"):
                settings = await self._answer(call, command.settings)
                answer = service.TelemetryCommand(status=_OK, settings=settings)
                await responses.send(answer.SerializeToString())
                if repeat is None and settings.user_agent.language == v2.NODE_JS:
                    repetition = _repeat(answer.SerializeToString(), responses)
                    repeat = tasks.create_task(repetition, name="repeat settings")
        if repeat:
            repeat.cancel()

    async def _answer(self, call: Call, settings: v2.Settings) -> v2.Settings:
        """Return what the client should work with: its own settings, partly overwritten."""
        try:
            check_settings(settings)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        group_name = settings.subscription.group.name
        self._clients.seen(
            call.client_id,
            Client(
                client_type=settings.client_type,
                group=group_name,
                language=call.language,
                version=call.version,
                seen_at_ms=self._clock.monotonic_ms(),
            ),
        )
        if settings.HasField("publishing"):
            return producer_settings(settings)
        group = await self._find_group(call, group_name)
        return consumer_settings(settings, group, long_polling_max_ms=self._long_polling_max_ms)

    async def _find_group(self, call: Call, name: str) -> link_pb2.GroupConfig:
        """Return the group, or what a new one would be: no client may be left without an answer."""
        try:
            return await self._cluster.use_group(name, call)
        except ServiceError as error:
            log.info("settings of an unknown group", group=name, reason=error.message)
            return DEFAULT_GROUP


def _parse(request: bytes) -> service.TelemetryCommand:
    try:
        return service.TelemetryCommand.FromString(request)
    except DecodeError as error:
        message = "the command is not a protobuf message"
        raise RpcError(RpcCode.INVALID_ARGUMENT, message) from error


async def _repeat(answer: bytes, responses: Responses) -> None:
    await asyncio.sleep(NODE_JS_REPEAT_MS / 1000)
    # A client that has gone meanwhile is noticed by who reads from it.
    with contextlib.suppress(ClientGone):
        await responses.send(answer)
