"""An operator kicks a client: its polls, pulls and streams end, and its messages go to others."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    eventually,
    receive_request,
    run,
)
from tidemill.message.client_key import ClientKey
from tidemill.proxy.metrics import request_code
from tidemill.proxy.server.call import Call
from tidemill.proxy.server.kicks import Kicks
from tidemill.security.acl import parse_entry
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

CLIENT_ID = HEADERS["x-mq-client-id"]
NOTHING = pb.KickedClient()


class KickWorld:
    """A proxy with a gate, and the streams of its clients."""

    def __init__(self, world: ProxyWorld, users: AccessWorld) -> None:
        self.world = world
        self.users = users
        self._kicks = Kicks(users.gate, world.clients, world.polling, world.cluster)

    def kick(self, client_id: str = CLIENT_ID, **fields: Any) -> pb.KickedClient:
        return self._kicks.kick(pb.KickClient(client_id=client_id, **fields))

    def call(self, headers: dict[str, str]) -> Call:
        return Call(
            {**HEADERS, **headers},
            peer=lambda: "ipv4:10.1.2.3:5000",
            connection="test",
            time_remaining_s=30,
            gate=self.users.gate,
        )

    def stream(self, method: str, request: Message, headers: dict[str, str]) -> Stream:
        """Begin a receive or a pull."""
        responses = ResponseCollector()
        answering = self.world.boundary.streaming(
            request_code(method),
            self.world.methods.streaming[method],
            self.call(headers),
            request.SerializeToString(),
            responses,
        )
        return Stream(asyncio.ensure_future(answering), responses)

    def telemetry(self, headers: dict[str, str]) -> Stream:
        """Open the telemetry stream of a consumer."""
        responses = Commands()
        answering = self.world.boundary.bidirectional(
            "telemetry",
            self.world.methods.bidirectional["Telemetry"],
            self.call(headers),
            settings_then_open(),
            responses,
        )
        return Stream(asyncio.ensure_future(answering), responses)


class Commands(ResponseCollector):
    """The commands of a telemetry stream."""

    async def send(self, message: bytes) -> None:
        self.items.append(service.TelemetryCommand.FromString(message))  # type: ignore[arg-type]  # commands


class Stream:
    """A stream in progress."""

    def __init__(self, task: asyncio.Future[None], responses: ResponseCollector) -> None:
        self.task = task
        self.responses = responses

    async def code(self) -> int:
        """Wait for the end, and return the code of the first response."""
        await self.task
        return self.responses.items[0].status.code


async def settings_then_open() -> AsyncIterator[bytes]:
    entry = v2.SubscriptionEntry(
        topic=v2.Resource(name="topic"), expression=v2.FilterExpression(type=v2.TAG, expression="*")
    )
    subscription = v2.Subscription(group=v2.Resource(name="group"), subscriptions=[entry])
    settings = v2.Settings(client_type=v2.PUSH_CONSUMER, subscription=subscription)
    yield service.TelemetryCommand(settings=settings).SerializeToString()
    await asyncio.Event().wait()


def in_world(scenario: Callable[[KickWorld], Awaitable[None]], mode: Mode) -> None:
    async def with_topic(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        await scenario(KickWorld(world, AccessWorld(mode)))

    run(with_topic)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_kick_ends_polls_and_streams_and_returns_deliveries(mode: Mode) -> None:
    async def scenario(world: KickWorld) -> None:
        rights = [parse_entry(one, ["Sub"]) for one in ("Topic:topic", "Group:group")]
        world.users.put_user("orders", *rights)
        headers = signed("orders")
        poll_request = receive_request("topic", "group", poll_ms=20_000)
        poll = world.stream("ReceiveMessage", poll_request, headers)
        telemetry = world.telemetry(headers)
        await eventually(lambda: bool(telemetry.responses.items))
        engine = world.world.broker.engine
        await eventually(lambda: bool(engine.pops))
        expected = pb.KickedClient(is_known=True, polls=1, streams=1)
        assert world.kick(is_dry_run=True) == expected
        assert not poll.task.done()
        assert world.kick() == expected
        assert await poll.code() == v2.MESSAGE_NOT_FOUND
        assert await telemetry.code() == v2.OK
        assert len(telemetry.responses.items) == 1, "the stream ends without a command"
        await eventually(lambda: engine.ended_clients == [CLIENT_ID])
        assert engine.revoked == [(ClientKey(CLIENT_ID), "", "")]
        assert world.kick() == NOTHING, "the client is forgotten"
        again = world.telemetry(headers)
        await eventually(lambda: bool(again.responses.items))
        assert world.kick() == pb.KickedClient(is_known=True, streams=1), "it came back"
        await again.task

    in_world(scenario, mode)


def test_a_kick_of_one_user_leaves_the_same_client_id_of_another() -> None:
    async def scenario(world: KickWorld) -> None:
        rights = [parse_entry(one, ["Sub"]) for one in ("Topic:topic", "Group:group")]
        users = {name: world.users.put_user(name, *rights) for name in ("one", "two")}
        streams = {name: world.telemetry(signed(name)) for name in users}
        for stream in streams.values():
            await eventually(lambda stream=stream: bool(stream.responses.items))  # type: ignore[misc]  # a lambda
        assert world.kick(user="three") == NOTHING
        assert world.kick("another client", user="one") == NOTHING
        assert world.kick(user="one").streams == 1
        await streams["one"].task
        assert not streams["two"].task.done()
        kept = ClientKey(CLIENT_ID, users["two"].id)
        assert [found.key for found in world.world.clients.find_all(CLIENT_ID)] == [kept]
        assert world.kick().streams == 1, "without a user, those of all users"
        await streams["two"].task

    in_world(scenario, Mode.ON)


def test_a_kick_ends_a_waiting_pull_with_the_code_of_an_empty_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(world: KickWorld) -> None:
        async def pull_message(*_arguments: object) -> None:
            await asyncio.Event().wait()

        monkeypatch.setitem(world.world.methods.streaming, "PullMessage", pull_message)
        pull = world.stream("PullMessage", service.PullMessageRequest(), {})
        for _ in range(10):
            await asyncio.sleep(0)
        assert world.kick() == pb.KickedClient(is_known=True, polls=1)
        assert await pull.code() == v2.MESSAGE_NOT_FOUND

    in_world(scenario, Mode.OFF)


def test_a_cancelled_stream_of_a_kicked_client_stays_cancelled() -> None:
    async def scenario(world: KickWorld) -> None:
        telemetry = world.telemetry({})
        await eventually(lambda: bool(telemetry.responses.items))
        telemetry.task.cancel()
        assert world.kick().streams == 1
        with pytest.raises(asyncio.CancelledError):
            await telemetry.task

    in_world(scenario, Mode.OFF)
