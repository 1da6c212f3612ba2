"""The admin process's connection to its broker."""

from __future__ import annotations

import asyncio
import socket

import grpc
import pytest

from tidemill.admin.broker_client import BrokerClient
from tidemill.common.errors import BrokerUnreachable
from tidemill.stubs.tidemill.broker.v1 import broker_pb2 as pb

TIMEOUT_MS = 10_000
SERVICE = "tidemill.broker.v1.BrokerAdmin"


async def get_config(_request: pb.Empty, _context: object) -> pb.ConfigUpdate:
    return pb.ConfigUpdate(broker_name="late")


GET_CONFIG = grpc.unary_unary_rpc_method_handler(
    get_config, pb.Empty.FromString, pb.ConfigUpdate.SerializeToString
)


def reserved_port() -> socket.socket:
    """Bind a port on which nobody listens yet, and that a server may share."""
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def test_a_call_between_two_attempts_to_connect_waits_for_the_next_one() -> None:
    async def scenario(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            state = channel.get_state(try_to_connect=True)
            while state != grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                await channel.wait_for_state_change(state)
                state = channel.get_state(try_to_connect=True)
            call = asyncio.create_task(BrokerClient(channel, timeout_ms=TIMEOUT_MS).config())
            server = grpc.aio.server()
            handler = grpc.method_handlers_generic_handler(SERVICE, {"GetConfig": GET_CONFIG})
            server.add_generic_rpc_handlers((handler,))
            server.add_insecure_port(address)
            await server.start()
            assert (await call).broker_name == "late"
            await server.stop(None)

    with reserved_port() as reserved:
        host, port = reserved.getsockname()
        asyncio.run(scenario(f"{host}:{port}"))


def test_a_broker_that_does_not_come_is_called_unreachable() -> None:
    async def scenario(address: str) -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(BrokerUnreachable):
                await BrokerClient(channel, timeout_ms=TIMEOUT_MS).config()

    with reserved_port() as reserved:
        host, port = reserved.getsockname()
        asyncio.run(scenario(f"{host}:{port}"))
