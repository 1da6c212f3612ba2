"""The telemetry stream: a client announces its settings and gets the effective ones.

The answers of clients to commands (`telemetry_streams.py`) arrive here, too.

The proxy stores settings only to list clients. Order, back-off and filters come from the stored
topics and groups and from each request, because clients work for minutes with a proxy that has
never seen their settings.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, Final, NamedTuple, final

from google.protobuf.message import DecodeError

from tidemill.common.errors import RequestError, ServiceError
from tidemill.message import outline
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients.clients import Client
from tidemill.proxy.clients.settings import (
    DEFAULT_GROUP,
    check_settings,
    consumer_settings,
    producer_settings,
    set_namespaces,
)
from tidemill.proxy.clients.settings_updates import SettingsUpdates
from tidemill.proxy.clients.telemetry_streams import ClientAnswer
from tidemill.proxy.filters import check_filters
from tidemill.proxy.shares import sharer_of
from tidemill.security.acl import Action, group_resource
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.transport.aio.call import DisconnectError, RequestTooLarge
from tidemill.transport.aio.misuse_log import MisuseLog
from tidemill.transport.grpc.status import RpcCode, RpcError
from tidemill.transport.http2.allowances import RateBucket

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tidemill.common.clock import Clock
    from tidemill.proxy.clients.clients import Clients
    from tidemill.proxy.clients.telemetry_streams import TelemetrySink
    from tidemill.proxy.cluster.cluster import BrokerCluster
    from tidemill.proxy.server.call import Call, Responses
    from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2

# A Node.js client with several topics starts to wait too late for the first answer.
NODE_JS_REPEAT_MS = 1000
# Per stream. Clients send their settings when they start, and then every few minutes. Commands that
# waited for a slow broker may arrive together. Each costs about fifty microseconds.
COMMANDS_BURST: Final = 32
COMMANDS_PER_S: Final = 1

_OK = v2.Status(code=v2.OK, message="OK")


class _Announcement(NamedTuple):
    """The parts of a client's settings that the answer needs."""

    group_name: str | None  # of a consumer
    is_node_js: bool


class Telemetry:
    """The method Telemetry."""

    def __init__(
        self,
        cluster: BrokerCluster,
        clients: Clients,
        clock: Clock,
        *,
        long_polling_max_ms: int,
        item_bytes_max: int,
        measured: frozenset[int] = frozenset(),
    ) -> None:
        """Return `long_polling_max_ms` to consumers, and `item_bytes_max` to producers.

        Clients in the `measured` languages send metrics.
        """
        self._cluster = cluster
        self._clients = clients
        self._clock = clock
        self._long_polling_max_ms = long_polling_max_ms
        self._item_bytes_max = item_bytes_max
        self._measured = measured
        self._misuse = MisuseLog()
        self.updates = SettingsUpdates(clients.streams, cluster.known_group, self._settings_again)
        cluster.add_listener(self.updates.schedule)

    async def telemetry(
        self, call: Call, requests: AsyncIterator[bytes], responses: Responses
    ) -> None:
        """Serve one stream until the client half-closes it, then end it with OK."""
        # Not a task group: its error would form a reference cycle, and the garbage collector would
        # have to free the frames.
        repeat = _RepeatedAnswer(responses)
        subscription = _GroupSubscription(self.updates, call.client, responses)
        allowance = RateBucket(burst=COMMANDS_BURST, per_s=COMMANDS_PER_S, now_s=self._now_s())
        streams = contextlib.ExitStack()
        try:
            streams.enter_context(self._clients.streams.open(call.client, responses))
            streams.enter_context(
                self._clients.publishers.open(
                    call.client, responses, _publishing_check(call), sharer=_sharer(call)
                )
            )
            while (request := await self._next(call, requests)) is not None:
                if not allowance.take(self._now_s()):
                    sentence = (
                        f"more than {COMMANDS_PER_S} command per second; open a new stream later"
                    )
                    raise RpcError(RpcCode.RESOURCE_EXHAUSTED, sentence)
                if not request:
                    continue  # It was too large or empty.
                answering = self._answer(call, request, responses, repeat, subscription)
                # A stream is open for hours and must not keep the bytes.
                del request
                await answering
        finally:
            streams.close()
            repeat.cancel()
            subscription.end()

    async def _next(self, call: Call, requests: AsyncIterator[bytes]) -> bytes | None:
        """Return the next command: empty if it was too large, None at the end."""
        try:
            return await anext(requests, None)
        except RequestTooLarge as error:
            self._clients.streams.reject_large_answer(call.client, error.size_bytes)
            return b""

    def _now_s(self) -> float:
        return self._clock.monotonic_ms() / 1000

    async def _answer(
        self,
        call: Call,
        request: bytes,
        responses: Responses,
        repeat: _RepeatedAnswer,
        subscription: _GroupSubscription,
    ) -> None:
        """Answer a command with settings; process any other command.

        The command is parsed twice, because only its bytes count as memory of the connection while
        the broker is asked.
        """
        announcement = self._record(call, request, responses)
        if announcement is None:
            return
        group = None
        if announcement.group_name is not None:
            group = await self._find_group(call, announcement.group_name)
            subscription.follow(announcement.group_name)
        answer = self._settings_for(call, request, group)
        await responses.send(answer)
        if announcement.is_node_js:
            repeat.schedule(answer)

    def _record(self, call: Call, request: bytes, responses: Responses) -> _Announcement | None:
        """Check and record the settings in a command; return None if it has none."""
        try:
            is_asked = self._clients.streams.is_asked(call.client)
            outline.check_telemetry(request, is_requested=is_asked)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        command = _parse(request)
        if not command.HasField("settings"):
            self._pass_answer(call.client, command)
            return None
        settings = command.settings
        try:
            check_settings(settings, call.namespace)
            set_namespaces(settings, call.namespace)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        group_name = call.name_of(settings.subscription.group)
        call.check_while_open(_rights_check(call, settings, group_name))
        now_ms = self._clock.monotonic_ms()
        if settings.HasField("publishing"):
            topics = [call.name_of(topic) for topic in settings.publishing.topics]
            self._clients.publishers.announce(
                call.client, responses, topics, _publishing_check(call), sharer=_sharer(call)
            )
        else:
            self._clients.publishers.exclude(call.client, responses)
            self._cluster.report_alive(call.client, now_ms)
            entries = settings.subscription.subscriptions
            topics = [call.name_of(entry.topic) for entry in entries]
            self._cluster.report_subscriptions(group_name, topics)
        self._clients.record(
            call.client,
            Client(
                client_type=settings.client_type,
                group=group_name,
                language=call.language,
                version=call.version,
                seen_at_ms=now_ms,
                address=call.peer(),
                user=call.user,
            ),
            settings.SerializeToString(),
            connection=call.connection,
        )
        try:
            # After the record: the client appears in listings, with the filter that is rejected.
            check_filters(settings)
        except RequestError as error:
            raise RpcError(RpcCode.INVALID_ARGUMENT, error.message) from error
        return _Announcement(
            group_name=None if settings.HasField("publishing") else group_name,
            is_node_js=settings.user_agent.language == v2.NODE_JS,
        )

    def _pass_answer(self, client: ClientKey, command: service.TelemetryCommand) -> None:
        """Pass the answer of a client to the request that waits for it."""
        match command.WhichOneof("command"):
            case "thread_stack_trace":
                nonce = command.thread_stack_trace.nonce
                stack = command.thread_stack_trace.thread_stack_trace
            case "verify_message_result":
                nonce, stack = command.verify_message_result.nonce, ""
            case "verify_message_command":
                # Node.js clients report in this field that they do not support it.
                nonce, stack = command.verify_message_command.nonce, ""
            case _:
                return
        # An answer without a status is a success.
        code = command.status.code or v2.OK
        answer = ClientAnswer(code, command.status.message, stack)
        self._clients.streams.resolve(client, nonce, answer)

    def _settings_for(
        self, call: Call, request: bytes, group: link_pb2.GroupConfig | None
    ) -> bytes:
        """Return the effective settings: the client's own, partly overwritten."""
        settings = _parse(request).settings
        set_namespaces(settings, call.namespace)
        if group is not None:
            return self._consumer_settings(settings, group)
        answer = producer_settings(
            settings, item_bytes_max=self._item_bytes_max, measured=self._measured
        )
        return service.TelemetryCommand(status=_OK, settings=answer).SerializeToString()

    def _consumer_settings(self, settings: v2.Settings, group: link_pb2.GroupConfig) -> bytes:
        answer = consumer_settings(
            settings, group, long_polling_max_ms=self._long_polling_max_ms, measured=self._measured
        )
        return service.TelemetryCommand(status=_OK, settings=answer).SerializeToString()

    def _settings_again(self, client: ClientKey, group: link_pb2.GroupConfig) -> bytes | None:
        """Return the effective settings of a consumer; None if its own are not stored."""
        known = self._clients.find(client)
        if known is None or known.client.group != group.name or not known.settings:
            return None
        return self._consumer_settings(v2.Settings.FromString(known.settings), group)

    async def _find_group(self, call: Call, name: str) -> link_pb2.GroupConfig:
        """Return the group, or the defaults of a new one: every client gets an answer."""
        try:
            return await self._cluster.use_group(name, call)
        except ServiceError as error:
            # Unauthenticated clients choose the name, so the number of log lines is limited.
            self._misuse.report(
                "unknown_group",
                peer=call.peer(),
                reason=error.message,
                event="client settings for an unknown group",
            )
            return DEFAULT_GROUP


def _rights_check(call: Call, settings: v2.Settings, group: str) -> Callable[[], None]:
    """Return the check of the rights on all topics that a client announces.

    The stream keeps it as long as its client lives, so it has the names and not the settings.
    """
    if settings.HasField("publishing"):
        action = Action.PUB
        topics = [call.name_of(topic) for topic in settings.publishing.topics]
    else:
        action = Action.SUB
        topics = [call.name_of(entry.topic) for entry in settings.subscription.subscriptions]

    def check() -> None:
        if action is Action.SUB:
            call.require(group_resource(group), Action.SUB)
        for topic in topics:
            call.require_topic(topic, action)

    return check


def _publishing_check(call: Call) -> Callable[[str], None]:
    """Return the check of the right to publish a topic."""
    return lambda topic: call.require_topic(topic, Action.PUB)


def _sharer(call: Call) -> str:
    return sharer_of(call.user, call.peer())


def _parse(request: bytes) -> service.TelemetryCommand:
    try:
        return service.TelemetryCommand.FromString(request)
    except DecodeError as error:
        message = "the command is not a protobuf message"
        raise RpcError(RpcCode.INVALID_ARGUMENT, message) from error


@final
class _GroupSubscription:
    """The subscription of one stream to changes of a consumer group: the last one it named."""

    def __init__(self, updates: SettingsUpdates, client: ClientKey, sink: TelemetrySink) -> None:
        self._updates = updates
        self._client = client
        self._sink = sink
        self._group = ""

    def follow(self, group: str) -> None:
        """Report changes of this group from now on."""
        if group != self._group:
            self.end()
        self._group = group
        self._updates.follow(group, self._client, self._sink)

    def end(self) -> None:
        """Stop reporting changes."""
        if self._group:
            self._updates.unfollow(self._group, self._client, self._sink)
            self._group = ""


@final
class _RepeatedAnswer:
    """The second answer to a Node.js client: one per stream, with its own room."""

    def __init__(self, responses: Responses) -> None:
        self._responses = responses
        self._is_used = False
        self._task: asyncio.Task[None] | None = None

    def schedule(self, answer: bytes) -> None:
        """Repeat the first answer of the stream, if there is room to keep it."""
        if not self._is_used and self._responses.hold(len(answer)):
            self._is_used = True
            self._task = asyncio.create_task(self._send(answer), name="repeat settings")

    def cancel(self) -> None:
        """Cancel the repetition, because the stream ends."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    async def _send(self, answer: bytes) -> None:
        try:
            await asyncio.sleep(NODE_JS_REPEAT_MS / 1000)
            # The task that reads from the client notices a disconnect.
            with contextlib.suppress(DisconnectError):
                await self._responses.send(answer)
        finally:
            self._responses.release(len(answer))
            self._task = None
