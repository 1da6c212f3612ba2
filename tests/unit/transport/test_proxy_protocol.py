"""Valid and invalid PROXY headers."""

from __future__ import annotations

import pytest

from tidemill.transport.aio.proxy_protocol import (
    BODY_BYTES_MAX,
    HEAD,
    SIGNATURE,
    BadProxyHeader,
    parse_head,
    parse_source,
)

V4 = bytes([203, 0, 113, 7, 10, 0, 0, 1]) + bytes.fromhex("1f90 1f91")
V6 = bytes.fromhex("20010db8" + "00" * 11 + "07") + bytes(16) + bytes.fromhex("1f90 1f91")


def test_an_address_of_each_family_is_read() -> None:
    assert parse_source(0x11, V4) == ("203.0.113.7", 8080)
    assert parse_source(0x21, V6) == ("2001:db8::7", 8080)
    assert parse_source(0x11, V4 + b"\x03\x00\x04abcd") == ("203.0.113.7", 8080)


@pytest.mark.parametrize(
    ("family", "rest"), [(0x11, V4[:-1]), (0x21, V4), (0x12, V4), (0x31, bytes(216)), (0x00, b"")]
)
def test_an_address_that_is_not_tcp_is_rejected(family: int, rest: bytes) -> None:
    with pytest.raises(BadProxyHeader):
        parse_source(family, rest)


def test_a_head_of_version_2_is_read() -> None:
    assert parse_head(SIGNATURE + bytes.fromhex("21 11 000c")) == (0x21, 0x11, 12)
    assert parse_head(SIGNATURE + bytes.fromhex("20 00 0000")) == (0x20, 0, 0)


@pytest.mark.parametrize(
    "head",
    [
        b"PROXY TCP4 203.0",  # version 1
        b"PRI * HTTP/2.0\r\n",
        SIGNATURE + bytes.fromhex("11 11 000c"),
        SIGNATURE + bytes.fromhex("22 11 000c"),
        HEAD.pack(SIGNATURE, 0x21, 0x11, BODY_BYTES_MAX + 1),
    ],
)
def test_an_invalid_head_is_rejected(head: bytes) -> None:
    with pytest.raises(BadProxyHeader):
        parse_head(head)
