"""The telemetry stream: each client announces its settings and gets those that it should work with.

It is also the one way to ask a client for anything (`telemetry_streams.py`): what it answers comes
here.

Settings answer one client at a time and are kept for people only: ordered or not, back-off and
filters come from the stored topics and groups and from the requests themselves, because clients go
on working for minutes with a proxy that has never seen their settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple, final

from google.protobuf.message import DecodeError

from tidemill.common.errors import RequestError, ServiceError
from tidemill.message import outline
from tidemill.proxy.clients.clients import Client
from tidemill.proxy.clients.settings import (
    DEFAULT_GROUP,
    check_settings,
    consumer_settings,
    producer_settings,
)
from tidemill.proxy.clients.settings_news import SettingsNews
from tidemill.proxy.clients.telemetry_streams import ClientAnswer
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import DisconnectError, RequestTooLarge
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.allowances import TokenBucket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.clients.telemetry_streams import Outlet
    from tidemill.proxy.cluster.cluster import Cluster
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# A Node.js client with several topics loses the first answer: it starts to wait for one only later.
NODE_JS_REPEAT_MS = 1000
# Of a stream. Clients send their settings when they begin, and then every few minutes; some of the
# commands that wait for a slow broker may come at once. Each costs us some fifty microseconds.
COMMANDS_BURST: Final = 32
COMMANDS_PER_S: Final = 1

_OK = v2.Status(code=v2.OK, message="OK")


class _Kind(NamedTuple):
    """What of a client's settings is needed beyond the moment."""

    group_name: str | None  # of a consumer
    is_node_js: bool


class Telemetry:
    """Answers the settings of clients."""

    def __init__(
        self,
        cluster: Cluster,
        clients: Clients,
        clock: Clock,
        *,
        long_polling_max_ms: int,
        measured: frozenset[int] = frozenset(),
    ) -> None:
        """Answer with `long_polling_max_ms`; clients of `measured` languages send metrics."""
        self._cluster = cluster
        self._clients = clients
        self._clock = clock
        self._long_polling_max_ms = long_polling_max_ms
        self._measured = measured
        self._misuse = MisuseLog()
        self.news = SettingsNews(clients.streams, cluster.known_group, self._settings_again)
        cluster.watch(self.news.changed)

    async def telemetry(
        self, call: Call, requests: AsyncIterator[bytes], responses: Responses
    ) -> None:
        """Serve one stream until the client half-closes it, then end it with OK."""
        # No task group: a failure that leaves one is in a cycle with it, and what its frames hold
        # would wait for the garbage collector.
        repeat, followed = _Repeat(responses), _Followed(self.news, call.client_id, responses)
        allowance = TokenBucket(burst=COMMANDS_BURST, per_s=COMMANDS_PER_S, now_s=self._now_s())
        streams = contextlib.ExitStack()
        try:
            streams.enter_context(self._clients.streams.open(call.client_id, responses))
            while (request := await self._next(call, requests)) is not None:
                if not allowance.take(self._now_s()):
                    sentence = f"a stream has {COMMANDS_PER_S} command a second; open another later"
                    raise RpcError(RpcCode.RESOURCE_EXHAUSTED, sentence)
                if not request:
                    continue  # It was too large; or it says nothing.
                answering = self._answer(call, request, responses, repeat, followed)
                # Another's from here on: a stream is open for hours, and keeps nothing of it.
                del request
                await answering
        finally:
            streams.close()
            repeat.cancel()
            followed.leave()

    async def _next(self, call: Call, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next command, nothing for one that was too large, None at the end."""
        try:
            return await anext(requests, None)
        except RequestTooLarge as error:
            self._clients.streams.answered_too_much(call.client_id, error.size_bytes)
            return b""

    def _now_s(self) -> float:
        return self._clock.monotonic_ms() / 1000

    async def _answer(
        self, call: Call, request: bytes, responses: Responses, repeat: _Repeat, followed: _Followed
    ) -> None:
        """Answer one command, if it is one that wants an answer.

        It is parsed twice: while the broker is asked only its bytes are kept, and those have room.
        """
        kind = self._announced(call, request)
        if kind is None:
            return
        group = None
        if kind.group_name is not None:
            group = await self._find_group(call, kind.group_name)
            followed.follow(kind.group_name)
        answer = self._settings_for(request, group)
        await responses.send(answer)
        if kind.is_node_js:
            repeat.later(answer)

    def _announced(self, call: Call, request: bytes) -> _Kind | None:
        """Check and note what a client announces; None where it announces nothing."""
        try:
            is_asked = self._clients.streams.is_asked(call.client_id)
            outline.check_telemetry(request, is_requested=is_asked)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        command = _parse(request)
        if not command.HasField("settings"):
            self._take_answer(call.client_id, command)
            return None
        settings = command.settings
        try:
            check_settings(settings)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        group_name = settings.subscription.group.name
        now_ms = self._clock.monotonic_ms()
        if not settings.HasField("publishing"):
            self._cluster.client_alive(call.client_id, now_ms)
        self._clients.seen(
            call.client_id,
            Client(
                client_type=settings.client_type,
                group=group_name,
                language=call.language,
                version=call.version,
                seen_at_ms=now_ms,
                address=call.peer(),
            ),
            settings.SerializeToString(),
        )
        return _Kind(
            group_name=None if settings.HasField("publishing") else group_name,
            is_node_js=settings.user_agent.language == v2.NODE_JS,
        )

    def _take_answer(self, client_id: str, command: service.TelemetryCommand) -> None:
        """Give what an operator has asked of a client to who waits for it."""
        match command.WhichOneof("command"):
            case "thread_stack_trace":
                nonce = command.thread_stack_trace.nonce
                stack = command.thread_stack_trace.thread_stack_trace
            case "verify_message_result":
                nonce, stack = command.verify_message_result.nonce, ""
            case "verify_message_command":
                # Node.js clients say in this field that they cannot.
                nonce, stack = command.verify_message_command.nonce, ""
            case _:
                return
        # An answer without a status is one of success.
        code = command.status.code or v2.OK
        answer = ClientAnswer(code, command.status.message, stack)
        self._clients.streams.answered(client_id, nonce, answer)

    def _settings_for(self, request: bytes, group: link_pb2.GroupConfig | None) -> bytes:
        """Return what the client should work with: its own settings, partly overwritten."""
        settings = _parse(request).settings
        if group is not None:
            return self._consumer_settings(settings, group)
        answer = producer_settings(settings, measured=self._measured)
        return service.TelemetryCommand(status=_OK, settings=answer).SerializeToString()

    def _consumer_settings(self, settings: v2.Settings, group: link_pb2.GroupConfig) -> bytes:
        answer = consumer_settings(
            settings, group, long_polling_max_ms=self._long_polling_max_ms, measured=self._measured
        )
        return service.TelemetryCommand(status=_OK, settings=answer).SerializeToString()

    def _settings_again(self, client_id: str, group: link_pb2.GroupConfig) -> bytes | None:
        """Return what a consumer should work with now; None where its settings are not kept."""
        known = self._clients.find(client_id)
        if known is None or known.client.group != group.name or not known.settings:
            return None
        return self._consumer_settings(v2.Settings.FromString(known.settings), group)

    async def _find_group(self, call: Call, name: str) -> link_pb2.GroupConfig:
        """Return the group, or what a new one would be: no client may be left without an answer."""
        try:
            return await self._cluster.use_group(name, call)
        except ServiceError as error:
            # Names are for strangers to choose, and lines of the log are not.
            self._misuse.report(
                "unknown_group",
                peer=call.peer(),
                reason=error.message,
                event="clients have settings of an unknown group",
            )
            return DEFAULT_GROUP


def _parse(request: bytes) -> service.TelemetryCommand:
    try:
        return service.TelemetryCommand.FromString(request)
    except DecodeError as error:
        message = "the command is not a protobuf message"
        raise RpcError(RpcCode.INVALID_ARGUMENT, message) from error


@final
class _Followed:
    """The consumer group whose changes the client of a stream is told of: the last it has named."""

    def __init__(self, news: SettingsNews, client_id: str, outlet: Outlet) -> None:
        self._news = news
        self._client_id = client_id
        self._outlet = outlet
        self._group = ""

    def follow(self, group: str) -> None:
        """Tell of this group from now on."""
        if group != self._group:
            self.leave()
        self._group = group
        self._news.follow(group, self._client_id, self._outlet)

    def leave(self) -> None:
        """Tell of none any more."""
        if self._group:
            self._news.leave(self._group, self._client_id, self._outlet)
            self._group = ""


@final
class _Repeat:
    """The second answer to a Node.js client: one a stream, whose room is given back after it."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._is_used = False
        self._task: asyncio.Task[None] | None = None

    def later(self, answer: bytes) -> None:
        """Repeat the first answer of the stream, where there is room to keep it."""
        if not self._is_used and self._responses.hold(len(answer)):
            self._is_used = True
            self._task = asyncio.create_task(self._send(answer), name="repeat settings")

    def cancel(self) -> None:
        """Let it be: the stream ends, and its room with it."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _send(self, answer: bytes) -> None:
        try:
            await asyncio.sleep(NODE_JS_REPEAT_MS / 1000)
            # A client that has gone meanwhile is noticed by who reads from it.
            with contextlib.suppress(DisconnectError):
                await self._responses.send(answer)
        finally:
            self._responses.release(len(answer))
            self._task = None
