"""A proxy's reports to a broker about the lives of its clients."""

from __future__ import annotations

import pytest

from tests.support.worlds.proxy_world import (
    HEADERS,
    Collected,
    ProxyWorld,
    eventually,
    message,
    receive_request,
    run,
)
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service


async def heartbeat(world: ProxyWorld, client_id: str, client_type: int = v2.PUSH_CONSUMER) -> None:
    request = service.HeartbeatRequest(client_type=v2.ClientType.ValueType(client_type))
    headers = {**HEADERS, "x-mq-client-id": client_id}
    answer = await world.call("Heartbeat", request, service.HeartbeatResponse, headers=headers)
    assert answer.status.code == v2.OK


async def end(world: ProxyWorld, client_id: str) -> None:
    await world.call(
        "NotifyClientTermination",
        service.NotifyClientTerminationRequest(group=v2.Resource(name="group")),
        service.NotifyClientTerminationResponse,
        headers={**HEADERS, "x-mq-client-id": client_id},
    )


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
        assert world.broker.engine.alive_clients == [], "it was not told, and is over"
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
        responses = Collected()
        responses.is_read = is_read
        await world.receive(request, responses=responses)
        await world.link.wait_reported()
        assert len(world.broker.engine.handed_over_ids) == is_read

    run(scenario)
