"""Telemetry streams: memory of open streams, answers of clients, and settings updates."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import CoroutineType
from typing import Any, cast

import pytest
from google.protobuf.message import Message
from structlog.testing import capture_logs

from tests.support.clocks import ManualClock
from tests.support.worlds.proxy_world import HEADERS
from tidemill.common.errors import GroupNotFound
from tidemill.common.item_bytes import ITEM_BYTES_MAX
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients import settings_updates
from tidemill.proxy.clients.clients import Clients
from tidemill.proxy.clients.settings import DEFAULT_GROUP
from tidemill.proxy.clients.settings_updates import SettingsUpdates
from tidemill.proxy.clients.telemetry_streams import ClientAnswer, TelemetryStreams
from tidemill.proxy.cluster.cluster import BrokerCluster
from tidemill.proxy.server import telemetry
from tidemill.proxy.server.call import Call, Responses
from tidemill.proxy.server.telemetry import COMMANDS_BURST, Telemetry
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as link_pb2
from tidemill.transport.grpc.status import RpcCode, RpcError

TOPICS = [v2.Resource(name=f"topic-{n}") for n in range(1_000)]
PRODUCER = v2.Settings(client_type=v2.PRODUCER, publishing=v2.Publishing(topics=TOPICS))
CONSUMER = v2.Settings(
    client_type=v2.PUSH_CONSUMER,
    user_agent=v2.UA(language=v2.NODE_JS),
    subscription=v2.Subscription(
        group=v2.Resource(name="group"),
        subscriptions=[v2.SubscriptionEntry(topic=topic) for topic in TOPICS],
    ),
)


class HangingCluster:
    """A cluster. Its broker answers when `answers` is set."""

    def __init__(self) -> None:
        self.answers = asyncio.Event()
        self.asked = asyncio.Event()

        self.groups: dict[str, link_pb2.GroupConfig] = {}

    def report_alive(self, _client_id: str, _now_ms: int) -> None:
        pass

    def report_subscriptions(self, _group: str, _topics: Iterable[str]) -> None:
        pass

    def add_listener(self, on_change: Callable[[], None]) -> None:
        self.changed = on_change

    def known_group(self, name: str) -> link_pb2.GroupConfig | None:
        return self.groups.get(name)

    async def use_group(self, name: str, _call: Call) -> link_pb2.GroupConfig:
        self.asked.set()
        await self.answers.wait()
        return self.groups.get(name, DEFAULT_GROUP)


class Stream:
    """An open stream that has sent one command."""

    def __init__(
        self,
        command: v2.Settings | bytes,
        *,
        has_room: bool = True,
        count: int = 1,
        clients: Clients | None = None,
    ) -> None:
        if isinstance(command, v2.Settings):
            command = service.TelemetryCommand(settings=command).SerializeToString()
        self._commands = [command] * count
        self.repeated, self.released = asyncio.Event(), asyncio.Event()
        self._has_room = has_room
        self.held_bytes: list[int] = []
        self.cluster = HangingCluster()
        self.waits = asyncio.Event()
        clock = ManualClock()
        if clients is None:
            clients = Clients(clients_max=10, monotonic_ms=clock.monotonic_ms)
        served = Telemetry(
            cast("BrokerCluster", self.cluster),
            clients,
            clock,
            long_polling_max_ms=1_000,
            item_bytes_max=ITEM_BYTES_MAX,
        )
        call = Call(HEADERS, peer=lambda: "test", connection="test", time_remaining_s=None)
        requests, responses = cast("AsyncIterator[bytes]", self), cast("Responses", self)
        self.served = served
        self.serving = served.telemetry(call, requests, responses)
        self.answers: list[int] = []  # their sizes

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> bytes:
        if self._commands:
            return self._commands.pop()
        self.waits.set()
        await asyncio.Event().wait()
        raise AssertionError("it stays open")

    async def send(self, answer: bytes) -> None:
        self.answers.append(len(answer))
        self.last = service.TelemetryCommand.FromString(answer)
        if len(self.answers) == 2:
            self.repeated.set()

    def hold(self, size_bytes: int) -> bool:
        self.held_bytes.append(size_bytes)
        return self._has_room

    def release(self, size_bytes: int) -> None:
        self.held_bytes.remove(size_bytes)
        self.released.set()


def kept(coroutine: Any) -> Iterator[object]:
    """Yield the objects in the frames of a waiting coroutine."""
    while isinstance(coroutine, CoroutineType):
        if coroutine.cr_frame is not None:
            yield from coroutine.cr_frame.f_locals.values()
        coroutine = coroutine.cr_await


async def cancelled(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


@pytest.mark.parametrize("settings", [PRODUCER, CONSUMER], ids=["producer", "consumer"])
def test_an_open_stream_keeps_no_answered_settings(settings: v2.Settings) -> None:
    async def scenario() -> None:
        stream = Stream(settings)
        stream.cluster.answers.set()
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        assert len(stream.answers) == 1
        held = list(kept(stream.serving))
        assert held, "the frames are those of the stream"
        assert not [one for one in held if isinstance(one, (bytes, Message))]
        await cancelled(task)

    asyncio.run(scenario())


def test_a_stream_keeps_only_bytes_while_it_asks_the_broker() -> None:
    async def scenario() -> None:
        stream = Stream(CONSUMER)
        task = asyncio.create_task(stream.serving)
        await stream.cluster.asked.wait()
        held = list(kept(stream.serving))
        assert not [one for one in held if isinstance(one, Message)]
        # It is one object, and the connection holds its room.
        assert len({id(one) for one in held if isinstance(one, bytes)}) == 1
        assert stream.answers == []
        await cancelled(task)

    asyncio.run(scenario())


@pytest.mark.parametrize("has_room", [True, False])
def test_an_answer_is_kept_for_repetition_if_there_is_room(has_room: bool) -> None:
    async def scenario() -> None:
        stream = Stream(CONSUMER, has_room=has_room)
        stream.cluster.answers.set()
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        assert stream.held_bytes == stream.answers
        repeats = [one for one in asyncio.all_tasks() if one.get_name() == "repeat settings"]
        assert len(repeats) == has_room
        await cancelled(task)
        await asyncio.wait([*repeats, task])
        assert all(one.cancelled() for one in repeats), "the repetition ends with its stream"

    asyncio.run(scenario())


def test_the_room_of_a_repeated_answer_is_released_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(telemetry, "NODE_JS_REPEAT_MS", 0)

    async def scenario() -> None:
        stream = Stream(CONSUMER)
        stream.cluster.answers.set()
        task = asyncio.create_task(stream.serving)
        await stream.repeated.wait()
        await stream.released.wait()
        assert (len(stream.answers), stream.held_bytes) == (2, [])
        [repeat] = [
            one for one in kept(stream.serving) if isinstance(one, telemetry._RepeatedAnswer)
        ]
        assert repeat._task is None
        await cancelled(task)

    asyncio.run(scenario())


def test_the_command_rate_of_a_stream_is_limited() -> None:
    async def scenario() -> None:
        stream = Stream(PRODUCER, count=COMMANDS_BURST + 1)
        with pytest.raises(RpcError, match="1 command per second") as refused:
            await stream.serving
        assert refused.value.code is RpcCode.RESOURCE_EXHAUSTED
        assert len(stream.answers) == COMMANDS_BURST

    asyncio.run(scenario())


def test_an_unknown_group_is_logged_once() -> None:
    async def scenario() -> None:
        stream = Stream(CONSUMER, count=20)
        stream.cluster.use_group = unknown_group  # type: ignore[method-assign]  # The broker rejects it.
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        await cancelled(task)

    async def unknown_group(name: str, _call: Call) -> link_pb2.GroupConfig:
        raise GroupNotFound(f"group {name} is not there")

    with capture_logs() as logs:
        asyncio.run(scenario())
    [line] = logs
    assert line["reason"] == "group group is not there"


@pytest.mark.parametrize(
    "refused", [b"\xff\xff", v2.Settings(client_type=v2.PRODUCER)], ids=["not parsed", "not good"]
)
def test_a_rejected_stream_leaves_no_reference_cycle(refused: bytes | v2.Settings) -> None:
    async def served() -> None:
        with pytest.raises(RpcError):
            await Stream(refused).serving

    async def scenario() -> int:
        gc.collect()
        gc.disable()
        try:
            await asyncio.create_task(served())
            await asyncio.sleep(0)
            gc.set_debug(gc.DEBUG_SAVEALL)
            gc.collect()
            return sum(isinstance(one, (BaseException, Stream)) for one in gc.garbage)
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()

    assert asyncio.run(scenario()) == 0


@pytest.mark.parametrize(
    ("command", "answer"),
    [
        (
            service.TelemetryCommand(
                thread_stack_trace=service.ThreadStackTrace(nonce="n", thread_stack_trace="all")
            ),
            ClientAnswer(v2.OK, "", "all"),
        ),
        (
            service.TelemetryCommand(
                status=v2.Status(code=v2.FAILED_TO_CONSUME_MESSAGE, message="why"),
                verify_message_result=service.VerifyMessageResult(nonce="n"),
            ),
            ClientAnswer(v2.FAILED_TO_CONSUME_MESSAGE, "why", ""),
        ),
        (
            # Node.js clients report in this field that they do not support it.
            service.TelemetryCommand(
                status=v2.Status(code=v2.NOT_IMPLEMENTED),
                verify_message_command=service.VerifyMessageCommand(nonce="n"),
            ),
            ClientAnswer(v2.NOT_IMPLEMENTED, "", ""),
        ),
    ],
)
def test_an_answer_of_a_client_goes_to_its_question(
    command: service.TelemetryCommand, answer: ClientAnswer, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[tuple[ClientKey, str, ClientAnswer]] = []
    monkeypatch.setattr(
        TelemetryStreams, "resolve", lambda _self, *arguments: taken.append(arguments)
    )

    async def scenario() -> None:
        stream = Stream(command.SerializeToString())
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        assert stream.answers == []
        await cancelled(task)

    asyncio.run(scenario())
    assert taken == [(ClientKey(HEADERS["x-mq-client-id"]), "n", answer)]


def test_an_unrequested_large_answer_ends_the_stream() -> None:
    trace = service.ThreadStackTrace(nonce="n", thread_stack_trace="x" * (100 << 10))
    command = service.TelemetryCommand(thread_stack_trace=trace)

    async def scenario() -> None:
        await Stream(command.SerializeToString()).serving

    with pytest.raises(RpcError) as refused:
        asyncio.run(scenario())
    assert refused.value.code is RpcCode.INVALID_ARGUMENT


def test_a_stream_is_registered_while_it_is_open() -> None:
    clients = Clients(clients_max=10, monotonic_ms=ManualClock().monotonic_ms)

    async def scenario() -> None:
        stream = Stream(PRODUCER, clients=clients)
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        assert ClientKey(HEADERS["x-mq-client-id"]) in clients.streams
        await cancelled(task)
        assert ClientKey(HEADERS["x-mq-client-id"]) not in clients.streams

    asyncio.run(scenario())


def group_of(version: int, *, id_: int = 7, attempts: int = 17) -> link_pb2.GroupConfig:
    """Return a consumer group in the configuration of the home."""
    group = link_pb2.GroupConfig()
    group.CopyFrom(DEFAULT_GROUP)
    group.id, group.name, group.version, group.max_attempts = id_, "group", version, attempts
    return group


def test_a_consumer_gets_settings_when_its_group_changes() -> None:
    """A consumer gets each change once, also after the group was created or created again."""
    small = v2.Settings(
        client_type=v2.PUSH_CONSUMER,
        user_agent=v2.UA(language=v2.JAVA),
        subscription=v2.Subscription(group=v2.Resource(name="group")),
    )

    async def scenario() -> None:
        stream = Stream(small)
        stream.cluster.answers.set()
        task = asyncio.create_task(stream.serving)
        await stream.waits.wait()
        updates, groups = stream.served.updates, stream.cluster.groups
        assert len(stream.answers) == 1
        await updates.send()
        assert len(stream.answers) == 1, "nothing has changed"
        for answer_count, group in enumerate(
            (group_of(1, attempts=3), group_of(2, attempts=5), group_of(1, id_=8, attempts=9)), 2
        ):
            groups["group"] = group
            await updates.send()
            await updates.send()
            assert len(stream.answers) == answer_count
            assert stream.last.status.code == v2.OK
            assert stream.last.settings.backoff_policy.max_attempts == group.max_attempts
            assert stream.last.settings.subscription.group.name == "group"
            del groups["group"]
            await updates.send()
            assert len(stream.answers) == answer_count, "a deleted group causes no update"
        assert not stream.held_bytes
        await cancelled(task)
        assert not len(updates), "an ended stream leaves no state"

    asyncio.run(scenario())


def test_a_configuration_change_schedules_settings_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings_updates, "GATHER_S", 0)

    async def scenario() -> None:
        stream = Stream(CONSUMER)
        is_sent = asyncio.Event()
        updates = stream.served.updates

        async def send(_updates: SettingsUpdates) -> None:
            is_sent.set()

        monkeypatch.setattr(SettingsUpdates, "send", send)
        running = asyncio.create_task(updates.run())
        stream.cluster.changed()
        await is_sent.wait()
        await cancelled(running)
        stream.serving.close()

    asyncio.run(scenario())
