"""Clients behind a load balancer that speaks PROXY protocol."""

from __future__ import annotations

import contextlib
import ssl
from ipaddress import ip_network

import pytest

from tests.e2e.conftest import Certificates
from tests.support.clients import http2_peer as peer
from tests.support.clients.http2_peer import grpc_message
from tests.support.clients.rpc_server import GREETING, RawClient, RunningServer, rpc_server
from tests.support.eventually import eventually
from tidemill.transport.aio.proxy_protocol import HEAD, SIGNATURE
from tidemill.transport.http2 import frames
from tidemill.transport.http2.limits import Limit

HERE = (ip_network("127.0.0.0/8"),)


def header(*source: int) -> bytes:
    """Return a header that names an address of a client."""
    rest = bytes([*source, 127, 0, 0, 1]) + bytes.fromhex("1f90 1f91")
    return HEAD.pack(SIGNATURE, 0x21, 0x11, len(rest)) + rest


LOCAL = HEAD.pack(SIGNATURE, 0x20, 0, 0)
UNKNOWN = HEAD.pack(SIGNATURE, 0x21, 0, 4) + bytes(4)  # a client of family UNSPEC


def peers(running: RunningServer) -> set[str]:
    return {one.peer_host for one in running.server.connections}


def test_the_address_in_the_header_is_that_of_the_client() -> None:
    with (
        rpc_server(proxy_protocol_from=HERE) as running,
        RawClient(running.port, greeting=b"") as client,
    ):
        client.send(header(203, 0, 113, 7) + GREETING)
        assert client.call(1) == grpc_message(b"hello")
        assert peers(running) == {"203.0.113.7"}


@pytest.mark.parametrize("nobody", [LOCAL, UNKNOWN])
def test_without_an_address_in_the_header_that_of_the_connection_counts(nobody: bytes) -> None:
    with (
        rpc_server(proxy_protocol_from=HERE) as running,
        RawClient(running.port, greeting=nobody + GREETING) as client,
    ):
        assert client.call(1) == grpc_message(b"hello")
        assert peers(running) == {"127.0.0.1"}


def test_a_header_may_arrive_in_pieces_and_before_tls(certificates: Certificates) -> None:
    context = ssl.create_default_context(cafile=certificates.authority)
    with (
        rpc_server(proxy_protocol_from=HERE, tls="optional", **certificates.served) as running,
        RawClient(running.port, greeting=b"") as client,
    ):
        for byte in header(203, 0, 113, 7):
            client.send(bytes([byte]))
        client.socket = context.wrap_socket(client.socket, server_hostname="localhost")
        client.send(GREETING)
        assert client.call(1) == grpc_message(b"hello")
        assert peers(running) == {"203.0.113.7"}


def test_connections_are_limited_by_the_clients_address() -> None:
    with rpc_server(proxy_protocol_from=HERE, connections_per_address_max=2) as running:
        clients = [RawClient(running.port, greeting=b"") for _ in range(4)]
        for number, client in enumerate(clients):
            client.send(header(203, 0, 113, number) + GREETING)
            assert client.call(1) == grpc_message(b"hello")
        third = [RawClient(running.port, header(203, 0, 113, 0) + GREETING) for _ in range(2)]
        assert third[0].call(1)
        third[1].to_the_end()
        assert running.hits(Limit.CONNECTIONS_PER_ADDRESS) == 1
        for client in (*clients, *third):
            client.socket.close()
        # All addresses are removed, so none is counted for ever.
        eventually(lambda: not running.server.connections)
        assert not running.server.listener._open
        assert running.server.listener._open_count == 0


@pytest.mark.parametrize(
    "sent",
    [GREETING, b"PROXY TCP4 203.0.113.7 10.0.0.1 1 2\r\n" + GREETING, header(1, 2, 3, 4)[:9]],
)
def test_a_balancer_without_a_header_is_rejected(sent: bytes) -> None:
    with rpc_server(proxy_protocol_from=HERE) as running:
        with RawClient(running.port, greeting=b"") as client:
            client.send(sent)
            with contextlib.suppress(OSError):  # The server may have closed the connection already.
                client.socket.shutdown(1)
            client.to_the_end()
            assert not peer.of(frames.SETTINGS, client.frames)
        eventually(lambda: running.server.misuse.failures["proxy_protocol"] == 1)
        eventually(lambda: running.server.listener._open_count == 0)


def test_a_header_from_another_address_is_invalid() -> None:
    with rpc_server(proxy_protocol_from=(ip_network("10.0.0.0/8"),)) as running:
        with RawClient(running.port, greeting=b"") as client:
            client.send_if_open(header(203, 0, 113, 7) + GREETING)
            client.to_the_end()
        eventually(lambda: running.server.misuse.failures["protocol_error"] == 1)
        with RawClient(running.port) as honest:
            assert honest.call(1) == grpc_message(b"hello")


def test_a_client_whose_handshake_fails_is_not_counted(certificates: Certificates) -> None:
    with rpc_server(proxy_protocol_from=HERE, tls="required", **certificates.served) as running:
        with RawClient(running.port, greeting=header(203, 0, 113, 7) + b"no TLS") as client:
            client.to_the_end()
        eventually(lambda: running.server.misuse.failures["tls_handshake"] == 1)
        eventually(lambda: not running.server.listener._open)
        assert running.server.listener._open_count == 0
