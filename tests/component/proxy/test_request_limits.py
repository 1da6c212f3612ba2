"""Limits of requests: one item above a limit gets the limit's status code."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from tests.support.worlds.proxy_world import (
    ACCESS_POINT,
    HEADERS,
    ProxyWorld,
    message,
    receive_request,
    run,
)
from tidemill.message import limits
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service

Ask = Callable[[ProxyWorld], Awaitable[int]]


def sent(*messages: v2.Message) -> Ask:
    async def ask(world: ProxyWorld) -> int:
        return (await world.send(*messages)).status.code

    return ask


def received(request: service.ReceiveMessageRequest) -> Ask:
    async def ask(world: ProxyWorld) -> int:
        return (await world.receive(request))[0].status.code

    return ask


def routed(topic: v2.Resource, endpoints: v2.Endpoints) -> Ask:
    async def ask(world: ProxyWorld) -> int:
        request = service.QueryRouteRequest(topic=topic, endpoints=endpoints)
        return (await world.call("QueryRoute", request, service.QueryRouteResponse)).status.code

    return ask


def alive(group: str, client_id: str = "client-1") -> Ask:
    async def ask(world: ProxyWorld) -> int:
        request = service.HeartbeatRequest(
            client_type=v2.PUSH_CONSUMER, group=v2.Resource(name=group)
        )
        headers = {**HEADERS, "x-mq-client-id": client_id}
        answer = await world.call("Heartbeat", request, service.HeartbeatResponse, headers=headers)
        if answer.status.code != v2.OK:
            assert len(world.clients) == 0, "nothing is remembered of who is refused"
        return answer.status.code

    return ask


def acked(handle: str) -> Ask:
    async def ask(world: ProxyWorld) -> int:
        await world.put_topic()
        await world.put_group()
        request = service.AckMessageRequest(
            group=v2.Resource(name="group"),
            topic=v2.Resource(name="topic"),
            entries=[service.AckMessageEntry(message_id="id", receipt_handle=handle)],
        )
        return (await world.call("AckMessage", request, service.AckMessageResponse)).status.code

    return ask


def polled(**fields: object) -> service.ReceiveMessageRequest:
    request = receive_request()
    for name, value in fields.items():
        field = getattr(request, name)
        if hasattr(field, "CopyFrom"):
            field.CopyFrom(value)
        else:
            setattr(request, name, value)
    return request


def filtered(count: int) -> service.ReceiveMessageRequest:
    tags = "||".join(str(n) for n in range(count))
    return polled(filter_expression=v2.FilterExpression(type=v2.TAG, expression=tags))


TOPIC = v2.Resource(name="topic")
MOST = {
    "attempt id": (received(polled(attempt_id="a" * 255)), v2.MESSAGE_NOT_FOUND),
    "tags": (received(filtered(limits.FILTER_TAGS.limit)), v2.MESSAGE_NOT_FOUND),
    "messages": (sent(*[message()] * limits.MESSAGES.limit), v2.OK),
    "keys": (sent(message(keys=["k"] * limits.KEYS.limit)), v2.OK),
    "born host": (sent(message(born_host="h" * 255)), v2.OK),
    "group": (alive("g" * 120), v2.OK),
    "client id": (alive("group", "c" * 255), v2.OK),
    "endpoints": (
        routed(TOPIC, v2.Endpoints(scheme=v2.IPv4, addresses=[ACCESS_POINT.addresses[0]] * 16)),
        v2.OK,
    ),
}
TOO_MUCH = {
    "attempt id": (received(polled(attempt_id="a" * 256)), v2.BAD_REQUEST),
    "tags": (received(filtered(limits.FILTER_TAGS.limit + 1)), v2.ILLEGAL_FILTER_EXPRESSION),
    "messages": (sent(*[message()] * (limits.MESSAGES.limit + 1)), v2.BAD_REQUEST),
    "keys": (sent(message(keys=["k"] * (limits.KEYS.limit + 1))), v2.MESSAGE_PROPERTIES_TOO_LARGE),
    "born host": (sent(message(born_host="h" * 256)), v2.BAD_REQUEST),
    "trace context": (sent(message(trace_context="t" * 5_000)), v2.MESSAGE_PROPERTIES_TOO_LARGE),
    "group": (alive("g" * 121), v2.ILLEGAL_CONSUMER_GROUP),
    "client id": (alive("group", "c" * 256), v2.BAD_REQUEST),
    "endpoints": (
        routed(TOPIC, v2.Endpoints(scheme=v2.IPv4, addresses=[ACCESS_POINT.addresses[0]] * 17)),
        v2.ILLEGAL_ACCESS_POINT,
    ),
    "host": (
        routed(TOPIC, v2.Endpoints(addresses=[v2.Address(host="h" * 256, port=1)])),
        v2.ILLEGAL_ACCESS_POINT,
    ),
    "namespace": (
        routed(v2.Resource(name="topic", resource_namespace="n" * 128), ACCESS_POINT),
        v2.BAD_REQUEST,
    ),
    "receipt handle": (acked("h" * 513), v2.INVALID_RECEIPT_HANDLE),
}


@pytest.mark.parametrize("name", MOST)
def test_requests_at_their_limits_are_served(name: str) -> None:
    ask, code = MOST[name]

    async def scenario(world: ProxyWorld) -> None:
        assert await ask(world) == code

    run(scenario)


@pytest.mark.parametrize("name", TOO_MUCH)
def test_a_request_over_its_limit_is_rejected_without_the_broker(name: str) -> None:
    ask, code = TOO_MUCH[name]

    async def scenario(world: ProxyWorld) -> None:
        assert await ask(world) == code
        assert not any(frame.pops or frame.appends.request_ids for frame in world.broker.frames)

    run(scenario)
