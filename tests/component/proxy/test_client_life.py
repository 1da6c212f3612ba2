"""A proxy's reports to a broker about the lives of its clients."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from google.protobuf.message import Message

from tests.support.worlds import several_brokers
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    ResponseCollector,
    eventually,
    message,
    receive_request,
    run,
)
from tests.support.worlds.several_brokers import SeveralBrokers
from tidemill.message.client_key import ClientKey
from tidemill.proxy.clients.clients import FORGOTTEN_A_TURN
from tidemill.proxy.server import client_lifecycle
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service


async def heartbeat(
    world: ProxyWorld, client_id: str, client_type: int = v2.PUSH_CONSUMER, *, expected: int = v2.OK
) -> None:
    request = service.HeartbeatRequest(client_type=v2.ClientType.ValueType(client_type))
    headers = {**HEADERS, "x-mq-client-id": client_id}
    answer = await world.call("Heartbeat", request, service.HeartbeatResponse, headers=headers)
    assert answer.status.code == expected


async def end(world: ProxyWorld, client_id: str, *, connection: str = "test") -> None:
    answer = await world.call(
        "NotifyClientTermination",
        service.NotifyClientTerminationRequest(group=v2.Resource(name="group")),
        service.NotifyClientTerminationResponse,
        headers={**HEADERS, "x-mq-client-id": client_id},
        connection=connection,
    )
    assert answer.status.code == v2.OK


def test_only_heartbeats_of_consumers_are_reported() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "producer", v2.PRODUCER)
        await heartbeat(world, "consumer-1")
        await heartbeat(world, "consumer-2")
        await eventually(lambda: bool(world.broker.engine.alive_clients))
        assert world.broker.engine.alive_clients == ["consumer-1", "consumer-2"], "in one frame"

    run(scenario)


def test_a_sign_of_life_travels_once_with_a_request() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        for _ in range(3):
            await heartbeat(world, "consumer")
        await world.receive_messages()
        assert world.broker.engine.alive_clients == ["consumer"]

    run(scenario)


def test_the_end_and_the_restart_of_a_client_are_reported_at_once() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "consumer")
        await end(world, "consumer")
        await eventually(lambda: world.broker.engine.ended_clients == ["consumer"])
        assert world.broker.engine.alive_clients == [], (
            "the client ended before its life was reported"
        )
        await heartbeat(world, "consumer")
        await eventually(lambda: world.broker.engine.alive_clients == ["consumer"])

    run(scenario)


@pytest.mark.parametrize("auto_renew", [True, False])
def test_a_pop_names_its_client_and_renewal(auto_renew: bool) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        request = receive_request("topic", "group")
        if auto_renew:
            request.ClearField("invisible_duration")
            request.auto_renew = True
        await world.receive(request)
        assert world.broker.engine.pops == [("client-1", auto_renew)]
        assert world.broker.engine.alive_clients == ["client-1"] * auto_renew

    run(scenario)


@pytest.mark.parametrize("is_read", [True, False])
def test_a_hand_over_is_reported_when_the_client_has_read_it(is_read: bool) -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        await world.send(message())
        request = receive_request("topic", "group")
        request.ClearField("invisible_duration")
        request.auto_renew = True
        responses = ResponseCollector()
        responses.is_read = is_read
        await world.receive(request, responses=responses)
        await world.link.wait_reported()
        assert len(world.broker.engine.handed_over_ids) == is_read

    run(scenario)


def test_a_client_is_ended_only_on_a_connection_that_presented_its_id() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "consumer")
        await end(world, "consumer", connection="of another client")
        await end(world, "another consumer")
        assert world.clients.find(ClientKey("consumer")) is not None
        await end(world, "consumer")
        assert world.clients.find(ClientKey("consumer")) is None
        await eventually(lambda: world.broker.engine.ended_clients == ["consumer"])

    run(scenario)


def test_a_new_connection_with_the_key_of_a_lost_one_ends_no_client() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "consumer")
        assert [one.clients for one in world.clients.forget_connection("test")] == [
            [ClientKey("consumer")]
        ]
        await end(world, "consumer")
        assert world.clients.find(ClientKey("consumer")) is not None

    run(scenario)


def test_the_open_poll_of_an_ended_client_ends_empty_at_one_broker() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await world.put_topic()
        await world.put_group()
        poll = asyncio.create_task(world.receive(receive_request("topic", "group", poll_ms=20_000)))
        await eventually(lambda: bool(world.broker.engine.pops))
        await end_poll(world, poll)
        await world.send(message())
        assert len(await world.receive_messages()) == 1, "no ended poll took the message"

    run(scenario)


def test_the_open_poll_of_an_ended_client_ends_empty_at_several_brokers() -> None:
    async def scenario(world: SeveralBrokers) -> None:
        poll = asyncio.create_task(world.receive(receive_request("topic", "group", poll_ms=20_000)))
        await world.until_asked()
        await end_poll(world, poll)
        world.send(1, "message")
        assert len(await world.receive_messages()) == 1, "no ended poll took the message"

    several_brokers.run(scenario)


async def end_poll(
    world: ProxyWorld, poll: asyncio.Task[list[service.ReceiveMessageResponse]]
) -> None:
    """End the client of a poll, and wait for the empty answer."""
    await heartbeat(world, HEADERS["x-mq-client-id"])
    await end(world, HEADERS["x-mq-client-id"])
    items = await poll
    assert items[0].status.code == v2.MESSAGE_NOT_FOUND


def test_a_heartbeat_without_a_type_has_the_type_of_the_known_client() -> None:
    async def scenario(world: ProxyWorld) -> None:
        untyped = v2.CLIENT_TYPE_UNSPECIFIED
        await heartbeat(world, "consumer", untyped, expected=v2.UNRECOGNIZED_CLIENT_TYPE)
        await heartbeat(world, "consumer")
        await heartbeat(world, "consumer", untyped)
        found = world.clients.find(ClientKey("consumer"))
        assert found is not None
        assert found.client.client_type == v2.PUSH_CONSUMER

    run(scenario)


@pytest.mark.parametrize(
    ("method", "request_type", "response_type"),
    [
        (
            "SyncLiteSubscription",
            service.SyncLiteSubscriptionRequest,
            service.SyncLiteSubscriptionResponse,
        )
    ],
)
def test_an_unserved_method_answers_with_a_status(
    method: str, request_type: type[Message], response_type: type[Message]
) -> None:
    async def scenario(world: ProxyWorld) -> None:
        answer: Any = await world.call(method, request_type(), response_type)
        assert answer.status.code == v2.NOT_IMPLEMENTED
        assert "not served yet" in answer.status.message

    run(scenario)


def test_a_client_without_a_connection_is_reported_unless_it_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_lifecycle, "RECONNECT_S", 0.01)

    async def scenario(world: ProxyWorld) -> None:
        for client_id in ("gone", "back"):
            await heartbeat(world, client_id)
        await heartbeat(world, "producer", v2.PRODUCER)
        world.client_life.forget_connection("test")
        await heartbeat(world, "back")
        await eventually(lambda: world.broker.engine.disconnected_clients == ["gone"])
        await end(world, "back")
        await eventually(lambda: world.broker.engine.ended_clients == ["back"])
        assert world.broker.engine.disconnected_clients == ["gone"]

    run(scenario)


def test_the_time_without_a_connection_begins_with_the_last_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_lifecycle, "RECONNECT_S", 0.01)

    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "back")
        known = world.clients.find(ClientKey("back"))
        assert known is not None
        for client_id, connection in (("back", "test"), ("gone", "second"), ("back", "third")):
            world.clients.record(ClientKey(client_id), known.client, connection=connection)
            world.client_life.forget_connection(connection)
        engine = world.broker.engine
        await eventually(lambda: len(engine.disconnected_clients) == 2)
        assert engine.disconnected_clients == ["gone", "back"], "the first loss of back is void"

    run(scenario)


def test_the_many_clients_of_a_connection_are_forgotten_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A gateway may put all its clients on one connection."""
    monkeypatch.setattr(client_lifecycle, "RECONNECT_S", 0.01)
    count = 3 * FORGOTTEN_A_TURN
    ids = [f"consumer-{n}" for n in range(count)]

    async def scenario(world: ProxyWorld) -> None:
        for client_id in ids:
            await heartbeat(world, client_id)

        def known_count() -> int:
            return sum(bool(world.clients.find_presented(ClientKey(one), "test")) for one in ids)

        before = known_count()
        world.client_life.forget_connection("test")
        left = [before, known_count()]
        while left[-1]:
            await asyncio.sleep(0)
            left.append(known_count())
        turns = [first - second for first, second in itertools.pairwise(left)]
        assert sum(turns) == count
        assert max(turns) == FORGOTTEN_A_TURN
        engine = world.broker.engine
        await eventually(lambda: set(engine.disconnected_clients) == set(ids))
        assert len(engine.disconnected_clients) == count

    run(scenario)


def test_the_many_clients_of_a_connection_are_reported_over_several_turns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_lifecycle, "RECONNECT_S", 0.01)
    count = 3 * client_lifecycle.REPORTED_A_TURN
    reported: list[str] = []

    async def scenario(world: ProxyWorld) -> None:
        monkeypatch.setattr(world.cluster, "report_disconnected", reported.append)
        for n in range(count):
            await heartbeat(world, f"consumer-{n}")
        world.client_life.forget_connection("test")
        counts = [0]
        while counts[-1] < count:
            await asyncio.sleep(0)
            counts.append(len(reported))
        turns = [second - first for first, second in itertools.pairwise(counts)]
        assert max(turns) == client_lifecycle.REPORTED_A_TURN

    run(scenario)


def test_a_client_that_calls_while_its_connection_is_forgotten_is_connected() -> None:
    async def scenario(world: ProxyWorld) -> None:
        for n in range(2 * FORGOTTEN_A_TURN):
            await heartbeat(world, f"consumer-{n}")
        slices = world.clients.forget_connection("test")
        lost = next(slices).clients
        keys = {ClientKey(f"consumer-{n}") for n in range(2 * FORGOTTEN_A_TURN)}
        (back, *_) = keys.difference(lost)
        known = world.clients.find(back)
        assert known is not None
        world.clients.record(back, known.client, connection="second")
        lost += [client for more in slices for client in more.clients]
        assert back not in lost
        assert not world.clients.find_presented(back, "test")
        assert len(lost) == 2 * FORGOTTEN_A_TURN - 1

    run(scenario)


def test_a_proxy_that_stops_reports_no_disconnected_clients() -> None:
    async def scenario(world: ProxyWorld) -> None:
        await heartbeat(world, "consumer")
        world.client_life.is_draining = True
        world.client_life.forget_connection("test")
        await end(world, "consumer")
        assert world.clients.find(ClientKey("consumer")) is not None, "its connection is forgotten"
        assert not world.broker.engine.disconnected_clients

    run(scenario)
