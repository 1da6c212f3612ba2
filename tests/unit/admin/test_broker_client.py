"""The connection of the admin process to a broker."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from tidemill.admin.cluster import calls
from tidemill.admin.cluster.broker_client import ERROR_KEY, BrokerClient, broker_client
from tidemill.admin.cluster.broker_health import BrokerHealth
from tidemill.admin.cluster.controllers import ControllerClients
from tidemill.admin.cluster.master_addresses import MasterAddresses
from tidemill.common.errors import BrokerUnreachable, Conflict, UnavailableError
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb
from tidemill.stubs.tidemill.controller.v1 import controller_pb2 as wire
from tidemill.stubs.tidemill.replication.v1 import replication_pb2 as replication

TIMEOUT_MS = 10_000
FOUND_WITHIN_S = 20.0
SERVICE = "tidemill.broker.v1.BrokerAdmin"


async def get_config(_request: pb.GetConfigRequest, _context: object) -> pb.ConfigUpdate:
    return pb.ConfigUpdate(broker_name="late")


GET_CONFIG = grpc.unary_unary_rpc_method_handler(
    get_config, pb.GetConfigRequest.FromString, pb.ConfigUpdate.SerializeToString
)


def reserved_port() -> socket.socket:
    """Bind a port without listening, so that a server can share it later."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def test_a_call_between_two_connection_attempts_waits_for_the_next_one() -> None:
    async def scenario(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            state = channel.get_state(try_to_connect=True)
            while state != grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            call = asyncio.create_task(
                BrokerClient(channel, timeout_ms=TIMEOUT_MS).call(
                    calls.GET_CONFIG, pb.GetConfigRequest()
                )
            )
            async with broker_at(address):
                assert (await call).broker_name == "late"

    with reserved_port() as reserved:
        host, port = reserved.getsockname()
        asyncio.run(scenario(f"{host}:{port}"))


def test_a_broker_that_does_not_start_is_unreachable() -> None:
    async def scenario(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(BrokerUnreachable):
                await BrokerClient(channel, timeout_ms=TIMEOUT_MS).call(
                    calls.GET_CONFIG, pb.GetConfigRequest()
                )

    with reserved_port() as reserved:
        host, port = reserved.getsockname()
        asyncio.run(scenario(f"{host}:{port}"))


class HealthServer:
    """A broker that answers health checks after `released`."""

    def __init__(self) -> None:
        self.asked, self.released = asyncio.Event(), asyncio.Event()
        self.answer = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        self.answer_bytes = self.answer.SerializeToString()

    async def _check(self, _request: bytes, _context: object) -> bytes:
        self.asked.set()
        await self.released.wait()
        return self.answer_bytes

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        check: Any = grpc.unary_unary_rpc_method_handler(self._check)
        handler = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_secure_port("127.0.0.1:0", grpc.local_server_credentials())
        await server.start()
        yield f"127.0.0.1:{port}"
        self.released.set()
        await server.stop(None)


class NameServer(asyncio.DatagramProtocol):
    """A DNS server: every name has one IPv4 address."""

    def __init__(self) -> None:
        self.address = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def datagram_received(self, question: bytes, peer: Any) -> None:
        end = question.index(b"\0", 12) + 5
        is_ipv4 = question[end - 4 : end - 2] == b"\0\1"
        record = b"\xc0\x0c\0\1\0\1" + bytes(4) + b"\0\4" + socket.inet_aton(self.address)
        header = question[:2] + b"\x81\x80\0\1" + (b"\0\1" if is_ipv4 else b"\0\0") + bytes(4)
        self.transport.sendto(header + question[12:end] + record * is_ipv4, peer)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        loop = asyncio.get_running_loop()
        _, _ = await loop.create_datagram_endpoint(lambda: self, local_addr=("127.0.0.1", 0))
        host, port = self.transport.get_extra_info("sockname")
        try:
            yield f"{host}:{port}"
        finally:
            self.transport.close()


@contextlib.asynccontextmanager
async def broker_at(address: str) -> AsyncIterator[int]:
    """Serve GetConfig at host:port; yield the port."""
    server = grpc.aio.server()
    handler = grpc.method_handlers_generic_handler(SERVICE, {"GetConfig": GET_CONFIG})
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port(address)
    await server.start()
    try:
        yield port
    finally:
        await server.stop(None)


def test_a_broker_with_another_address_is_found_soon() -> None:
    """A replaced pod has another address, and gRPC asks for it only every 30 s by default."""

    async def scenario() -> None:
        names = NameServer()
        async with contextlib.AsyncExitStack() as running:
            enter = running.enter_async_context
            server = await enter(names.serving())
            async with broker_at("127.0.0.2:0") as port:
                names.address = "127.0.0.2"
                address = f"dns://{server}/broker.test:{port}"
                client = await enter(broker_client(address, timeout_ms=TIMEOUT_MS))
                await client.call(calls.GET_CONFIG, pb.GetConfigRequest())
            await enter(broker_at(f"127.0.0.3:{port}"))
            names.address = "127.0.0.3"
            async with asyncio.timeout(FOUND_WITHIN_S):
                while True:
                    with contextlib.suppress(BrokerUnreachable):
                        await client.call(calls.GET_CONFIG, pb.GetConfigRequest())
                        return

    asyncio.run(scenario())


def channel_to(address: str) -> grpc.aio.Channel:
    return grpc.aio.secure_channel(address, grpc.local_channel_credentials())


def test_health_checks_continue_after_the_connection_is_closed() -> None:
    async def scenario() -> None:
        broker = HealthServer()
        async with broker.serving() as address, channel_to(address) as channel:
            client = BrokerClient(channel, timeout_ms=TIMEOUT_MS)
            health = BrokerHealth(client, address)
            asking = asyncio.create_task(health._check())
            await broker.asked.wait()
            await channel.close()
            assert await asking == "its connection was closed"
            async with channel_to(address) as renewed:
                client.use(renewed)
                broker.released.set()
                assert await health._check() == ""
                broker.answer_bytes = b"\xff\xff"
                assert "cannot be parsed" in await health._check()
                broker.released.clear()
                broker.asked.clear()
                asking = asyncio.create_task(health._check())
                await broker.asked.wait()
                asking.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await asking

    asyncio.run(scenario())


def test_a_call_on_a_closed_connection_raises_broker_unreachable() -> None:
    async def scenario() -> None:
        begun, released = asyncio.Event(), asyncio.Event()

        async def hang(_request: object, _context: object) -> pb.ConfigUpdate:
            begun.set()
            await released.wait()
            return pb.ConfigUpdate()

        server = grpc.aio.server()
        method: Any = grpc.unary_unary_rpc_method_handler(
            hang, pb.GetConfigRequest.FromString, pb.ConfigUpdate.SerializeToString
        )
        handler = grpc.method_handlers_generic_handler(SERVICE, {"GetConfig": method})
        server.add_generic_rpc_handlers((handler,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            call = asyncio.create_task(
                BrokerClient(channel, timeout_ms=TIMEOUT_MS).call(
                    calls.GET_CONFIG, pb.GetConfigRequest()
                )
            )
            await begun.wait()
            await channel.close()
            with pytest.raises(BrokerUnreachable):
                await call
        released.set()
        await server.stop(None)

    asyncio.run(scenario())


def test_a_call_that_waits_for_a_connection_when_it_is_closed_raises_broker_unreachable() -> None:
    async def scenario(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            client = BrokerClient(channel, timeout_ms=TIMEOUT_MS)
            call = asyncio.create_task(client.call(calls.GET_CONFIG, pb.GetConfigRequest()))
            await channel.wait_for_state_change(grpc.ChannelConnectivity.IDLE)
            await channel.close()
            with pytest.raises(BrokerUnreachable, match="was closed"):
                await call
            with pytest.raises(BrokerUnreachable, match="was closed"):
                await client.is_serving()

    with reserved_port() as reserved:
        host, port = reserved.getsockname()
        asyncio.run(scenario(f"{host}:{port}"))


def test_a_connection_can_be_closed_after_any_number_of_loop_turns() -> None:
    async def scenario() -> None:
        server = grpc.aio.server()
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        for turns in range(3, 12):
            for _ in range(20):
                async with broker_client(f"127.0.0.1:{port}", timeout_ms=TIMEOUT_MS):
                    for _ in range(turns):
                        await asyncio.sleep(0)
        await server.stop(None)

    asyncio.run(scenario())


class Replica:
    """A replica of a broker group that counts calls and may reject them with an error."""

    def __init__(self, *, error_name: str = "") -> None:
        self.asked = asyncio.Event()
        self.calls = 0
        self._error_name = error_name

    async def _store(self, _request: pb.StoreMessageRequest, context: Any) -> pb.StoreMessageReply:
        self.calls += 1
        self.asked.set()
        if self._error_name:
            context.set_trailing_metadata(((ERROR_KEY, self._error_name),))
            await context.abort(grpc.StatusCode.UNAVAILABLE, "not here")
        return pb.StoreMessageReply(queue_offset=7)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(
            self._store, pb.StoreMessageRequest.FromString, pb.StoreMessageReply.SerializeToString
        )
        handlers = {"StoreMessage": handler}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        yield f"127.0.0.1:{port}"
        await server.stop(None)


def group_led_by(master: int, addresses: list[str]) -> wire.BrokerGroupStatus:
    view = replication.ReplicationView(
        version=master + 1,
        master=replication.ReplicaRun(replica_id=master),
        addresses=dict(enumerate(addresses)),
    )
    return wire.BrokerGroupStatus(name="broker-0", view=view)


def test_a_call_that_an_older_broker_lacks_is_a_conflict_with_its_name() -> None:
    async def scenario() -> None:
        async with (
            Replica().serving() as address,
            broker_client(address, timeout_ms=TIMEOUT_MS) as client,
        ):
            with pytest.raises(Conflict, match=f"{address} has an older version"):
                await client.call(calls.PURGE_TOPIC, pb.PurgeTopicRequest(name="orders"))

    asyncio.run(scenario())


def test_a_rejected_send_waits_for_the_next_master() -> None:
    async def scenario() -> None:
        old, new = Replica(error_name="NotMaster"), Replica()
        async with old.serving() as one, new.serving() as other:
            masters = MasterAddresses(ControllerClients(["127.0.0.1:1"]))
            masters.learn(group_led_by(0, [one, other]))
            async with broker_client(one, timeout_ms=TIMEOUT_MS, masters=masters) as client:
                sending = asyncio.create_task(
                    client.call(calls.STORE_MESSAGE, pb.StoreMessageRequest())
                )
                await old.asked.wait()
                masters.learn(group_led_by(1, [one, other]))
                assert (await sending).queue_offset == 7
            assert new.calls == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(("refusal", "has_replicas"), [("NotMaster", False), ("DiskFull", True)])
def test_an_error_that_another_replica_cannot_avoid_is_raised_at_once(
    refusal: str, has_replicas: bool
) -> None:
    async def scenario() -> None:
        replica = Replica(error_name=refusal)
        async with replica.serving() as address:
            masters = MasterAddresses(ControllerClients(["127.0.0.1:1"] if has_replicas else []))
            async with broker_client(address, timeout_ms=TIMEOUT_MS, masters=masters) as client:
                with pytest.raises(UnavailableError, match="not here"):
                    await client.call(calls.STORE_MESSAGE, pb.StoreMessageRequest())
        assert replica.calls == 1

    asyncio.run(scenario())


@contextlib.asynccontextmanager
async def lost_once(method: str, reply: bytes) -> AsyncIterator[tuple[str, list[bytes]]]:
    """Serve a broker that loses its connection after one request; yield address and requests."""
    requests: list[bytes] = []

    async def answer(request: bytes, context: Any) -> bytes:
        requests.append(request)
        if len(requests) == 1:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "the connection was lost")
        return reply

    server = grpc.aio.server()
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}", requests
    await server.stop(None)


@pytest.mark.parametrize(
    ("call", "request_", "repeats"),
    [
        (calls.PUT_TOPIC, pb.PutTopicRequest(name="t", queues=2), True),
        (calls.PUT_GROUP, pb.PutGroupRequest(name="g"), True),
        (calls.DELETE_TOPIC, pb.DeleteTopicRequest(name="t", dry_run=True), True),
        (calls.DELETE_TOPIC, pb.DeleteTopicRequest(name="t"), False),
        (calls.GET_TOPIC_STATUS, pb.GetTopicStatusRequest(name="t"), True),
        (calls.STORE_MESSAGE, pb.StoreMessageRequest(), False),
    ],
)
def test_a_lost_call_is_repeated_if_that_changes_nothing_more(
    call: Any, request_: Any, repeats: bool
) -> None:
    """A master that hands over closes its connections, so a planned move is no error."""
    method = type(request_).__name__.removesuffix("Request")

    async def scenario() -> None:
        async with lost_once(method, b"") as (address, requests):
            masters = MasterAddresses(ControllerClients(["127.0.0.1:1"]))
            async with broker_client(address, timeout_ms=TIMEOUT_MS, masters=masters) as client:
                if repeats:
                    await client.call(call, request_)
                else:
                    with pytest.raises(BrokerUnreachable):
                        await client.call(call, request_)
            assert len(requests) == (2 if repeats else 1)

    asyncio.run(scenario())
