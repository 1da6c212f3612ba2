"""Banned users, clients and addresses at a real gRPC server of a proxy."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from typing import NamedTuple

import grpc
import pytest

from tests.support.worlds.access_world import AccessWorld, signed
from tests.support.worlds.memory_broker import MemoryBroker
from tests.support.worlds.proxy_world import (
    HEADERS,
    ProxyWorld,
    eventually,
    message,
    receive_request,
)
from tidemill.proxy.server import access
from tidemill.proxy.server.grpc_server import GrpcServer
from tidemill.proxy.settings import ProxySettings
from tidemill.security.acl import parse_entry
from tidemill.security.bans import BanKind
from tidemill.security.table import Mode
from tidemill.stubs.apache.rocketmq.v2 import definition_pb2 as v2
from tidemill.stubs.apache.rocketmq.v2 import service_pb2 as service
from tidemill.stubs.apache.rocketmq.v2 import service_pb2_grpc

CLIENT_ID = HEADERS["x-mq-client-id"]
ALL = [parse_entry(one, ["All"]) for one in ("Topic:topic", "Group:group")]


class Wire(NamedTuple):
    """A served proxy, and a channel to it."""

    users: AccessWorld
    channel: grpc.aio.Channel
    world: ProxyWorld
    server: GrpcServer
    revoked: list[str]

    @property
    def stub(self) -> service_pb2_grpc.MessagingServiceAsyncStub:
        return service_pb2_grpc.MessagingServiceStub(self.channel)

    async def send(self, user: str = "", client_id: str = CLIENT_ID) -> v2.Status:
        headers = {**HEADERS, "x-mq-client-id": client_id, **(signed(user) if user else {})}
        request = service.SendMessageRequest(messages=[message()])
        answer = await self.stub.SendMessage(request, metadata=tuple(headers.items()))
        assert isinstance(answer.status, v2.Status)
        return answer.status


def run(scenario: Callable[[Wire], Awaitable[None]], mode: Mode) -> None:
    async def main() -> None:
        async with (
            asyncio.timeout(30),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            await world.put_topic()
            await world.put_group()
            users, revoked = AccessWorld(mode), list[str]()
            users.gate.revoked.on_revoked = lambda client, _lost: revoked.append(client.client_id)
            bans = users.table.bans
            server = GrpcServer(
                world.methods,
                world.boundary,
                on_lost=world.client_life.forget_connection,
                is_banned=lambda host: bans.find_host(host, users.now_ms) is not None,
                gate=users.gate,
            )
            bans.on_addresses = lambda: server.close_banned(world.client_life.end_connection)
            async with (
                server.serving(ProxySettings(grpc_port=0)),
                grpc.aio.insecure_channel(server.address) as channel,
            ):
                await scenario(Wire(users, channel, world, server, revoked))

    asyncio.run(main())


@pytest.fixture(autouse=True)
def _short_delay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "REFUSAL_DELAY_S", 0)


@pytest.mark.parametrize("mode", [Mode.PERMISSIVE, Mode.ON])
def test_a_banned_user_is_refused_after_a_correct_signature(mode: Mode) -> None:
    async def scenario(wire: Wire) -> None:
        users = wire.users
        user = users.put_user("orders", *ALL)
        assert (await wire.send("orders")).code == v2.OK
        users.put_ban(BanKind.USER, "orders", user_id=user.id, until_ms=users.now_ms + 10)
        for _ in range(2):
            status = await wire.send("orders")
            assert status.code == v2.UNAUTHORIZED
            assert status.message == "user orders is banned until 1970-01-01T00:16:40Z"
        users.now_ms += 10
        assert (await wire.send("orders")).code == v2.OK, "the ban has ended"
        users.put_ban(BanKind.USER, "orders", user_id=user.id)
        users.put_user("orders", *ALL, secrets=("another secret ...",), is_same=True)
        status = await wire.send("orders")
        assert "banned" not in status.message, "the text is for the user alone"

    run(scenario, mode)


def test_the_mode_off_ignores_bans_of_users() -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_ban(BanKind.USER, "orders", user_id=1)
        assert not wire.users.gate.is_checking
        assert (await wire.send("orders")).code == v2.OK

    run(scenario, Mode.OFF)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_banned_client_id_is_refused_in_each_mode(mode: Mode) -> None:
    async def scenario(wire: Wire) -> None:
        users = wire.users
        users.put_user("orders", *ALL)
        users.put_ban(BanKind.CLIENT, CLIENT_ID)
        status = await wire.send("orders")
        assert status == v2.Status(code=v2.UNAUTHORIZED, message=f"client {CLIENT_ID} is banned")
        assert (await wire.send("orders", "other")).code == v2.OK
        users.delete_item("ban", f"client:{CLIENT_ID}")
        assert (await wire.send("orders")).code == v2.OK
        assert users.gate.is_checking is (mode is not Mode.OFF)

    run(scenario, mode)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_new_ban_ends_open_streams_and_returns_deliveries(mode: Mode) -> None:
    async def scenario(wire: Wire) -> None:
        wire.users.put_user("orders", *ALL)
        headers = tuple({**HEADERS, **signed("orders")}.items())
        subscription = v2.Subscription(group=v2.Resource(name="group"))
        settings = v2.Settings(client_type=v2.PUSH_CONSUMER, subscription=subscription)
        stream = wire.stub.Telemetry(metadata=headers)
        await stream.write(service.TelemetryCommand(settings=settings))
        assert isinstance(await stream.read(), service.TelemetryCommand)
        poll = wire.stub.ReceiveMessage(receive_request(poll_ms=20_000), metadata=headers)
        await wire.world.broker.wait_for_frame("pops")
        wire.users.put_ban(BanKind.CLIENT, CLIENT_ID)
        items = [item async for item in poll]
        assert items[0].status.code == v2.UNAUTHORIZED
        command = await stream.read()
        assert isinstance(command, service.TelemetryCommand)
        assert command.status.message == f"client {CLIENT_ID} is banned"
        assert await stream.code() == grpc.StatusCode.OK
        assert set(wire.revoked) == {CLIENT_ID}

    run(scenario, mode)


def test_a_new_ban_of_addresses_closes_connections_and_refuses_new_ones() -> None:
    async def scenario(wire: Wire) -> None:
        beat = service.HeartbeatRequest(
            client_type=v2.PUSH_CONSUMER, group=v2.Resource(name="group")
        )
        await wire.stub.Heartbeat(beat, metadata=tuple(HEADERS.items()))
        poll = wire.stub.ReceiveMessage(
            receive_request(poll_ms=20_000), metadata=tuple(HEADERS.items())
        )
        await wire.world.broker.wait_for_frame("pops")
        wire.users.put_ban(BanKind.ADDRESS, "127.0.0.0/8", until_ms=wire.users.now_ms + 10)
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await poll.read()
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
        engine = wire.world.broker.engine
        await eventually(lambda: engine.ended_clients == [CLIENT_ID])
        with pytest.raises(grpc.aio.AioRpcError):
            await wire.send()
        wire.users.now_ms += 10
        own = (("grpc.use_local_subchannel_pool", 1),)  # without the back-off of the other one
        async with grpc.aio.insecure_channel(wire.server.address, options=own) as channel:
            assert (await wire._replace(channel=channel).send()).code == v2.OK

    run(scenario, Mode.OFF)


def test_a_ban_of_other_addresses_leaves_a_connection_open() -> None:
    async def scenario(wire: Wire) -> None:
        assert (await wire.send()).code == v2.OK
        wire.users.put_ban(BanKind.ADDRESS, "10.0.0.0/8")
        assert (await wire.send()).code == v2.OK

    run(scenario, Mode.OFF)


def test_a_ban_is_about_the_client_behind_a_load_balancer() -> None:
    """The balancer sends the address of its client by PROXY protocol."""

    async def first_bytes(address: str, client: str) -> bytes:
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            addresses = socket.inet_aton(client) + socket.inet_aton("127.0.0.1")
            header = struct.pack("!BBH", 0x21, 0x11, 12) + addresses + struct.pack("!HH", 1, 2)
            writer.write(b"\r\n\r\n\0\r\nQUIT\n" + header)
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\x04" + bytes(5))
            return await reader.read(9)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async def main() -> None:
        async with (
            asyncio.timeout(30),
            MemoryBroker().serving() as broker,
            ProxyWorld.open(broker) as world,
        ):
            users = AccessWorld(Mode.OFF)
            bans = users.table.bans
            server = GrpcServer(
                world.methods,
                world.boundary,
                on_lost=world.client_life.forget_connection,
                is_banned=lambda host: bans.find_host(host, users.now_ms) is not None,
            )
            settings = ProxySettings(grpc_port=0, proxy_protocol_from=["127.0.0.0/8"])
            async with server.serving(settings):
                users.put_ban(BanKind.ADDRESS, "10.9.0.0/16")
                users.put_ban(BanKind.ADDRESS, "127.0.0.0/8")
                assert await first_bytes(server.address, "10.9.1.2") == b""
                assert await first_bytes(server.address, "10.8.1.2"), "not the balancer's address"

    asyncio.run(main())
