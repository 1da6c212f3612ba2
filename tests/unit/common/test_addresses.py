"""Addresses: parsing, printing, and listening sockets."""

from __future__ import annotations

import contextlib
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidemill.common.addresses import (
    HostPort,
    bind,
    host_of_peer,
    in_brackets,
    is_unspecified,
    unmapped,
    without_brackets,
)

NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,10}(\.[a-z]{1,5}){0,2}", fullmatch=True)
HOSTS = st.one_of(st.ip_addresses().map(str), NAMES)


@given(host=HOSTS, port=st.integers(1, 65_535))
def test_a_printed_address_is_parsed_as_it_was(host: str, port: int) -> None:
    address = HostPort(host, port)
    assert HostPort.parse(str(address)) == address
    assert host_of_peer(f"kind:{address}") == host
    assert without_brackets(in_brackets(host)) == host


@pytest.mark.parametrize("text", ["::1:8081", "fd00::1", "[::1]", "[::1:8081", "[h]:1:2"])
def test_an_ipv6_address_without_brackets_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"IPv6|port|host"):
        HostPort.parse(text)


def test_a_mapped_address_is_the_ipv4_address() -> None:
    assert unmapped("::ffff:10.0.0.1") == "10.0.0.1"
    assert unmapped("::1") == "::1"


@pytest.mark.parametrize("host", ["", "0.0.0.0", "::", "[::]"])
def test_a_host_of_all_addresses_is_unspecified(host: str) -> None:
    assert is_unspecified(host)


@pytest.mark.parametrize(
    ("host", "clients"),
    [
        ("127.0.0.1", {"127.0.0.1"}),
        ("::1", {"::1"}),
        ("[::1]", {"::1"}),
        ("::", {"127.0.0.1", "::1"}),
        ("", {"127.0.0.1", "::1"}),
        ("0.0.0.0", {"127.0.0.1"}),
    ],
)
def test_a_socket_accepts_the_addresses_of_its_host(host: str, clients: set[str]) -> None:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(one) for one in bind(host, 0)]
        for one in sockets:
            one.listen()
        port = sockets[0].getsockname()[1]
        reached = set()
        for client in ("127.0.0.1", "::1"):
            with contextlib.suppress(OSError):
                socket.create_connection((client, port)).close()
                reached.add(client)
    assert reached == clients


def test_a_port_in_use_is_an_error_and_no_socket_stays_open() -> None:
    with contextlib.ExitStack() as stack:
        [first] = [stack.enter_context(one) for one in bind("::1", 0)]
        first.listen()
        with pytest.raises(OSError, match="in use"):
            bind("", first.getsockname()[1])
