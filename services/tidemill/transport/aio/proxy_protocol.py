"""The PROXY protocol header, version 2, with which a load balancer sends the client's address.

     0              12       13       14         16
    ┌──────────────┬────────┬────────┬──────────┬───────────┬──────┐
    │ signature 12 │ 2, cmd │ family │ size u16 │ addresses │ TLVs │   big-endian
    └──────────────┴────────┴────────┴──────────┴───────────┴──────┘

    addresses   of TCP over IPv4: source 4, target 4, source port u16, target port u16
                of TCP over IPv6: source 16, target 16, the same ports

The header comes before TLS. Command 0 (LOCAL) is a connection of the balancer itself, such as a
health check. Family 0 (UNSPEC) is an unknown client. In both cases the address of the connection
counts. Other families are rejected. The data after the addresses is ignored.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import struct
from typing import Final, NamedTuple

SIGNATURE: Final = b"\r\n\r\n\0\r\nQUIT\n"
HEAD: Final = struct.Struct(">12sBBH")
# The data after the head: addresses of up to 216 bytes, and a few TLVs. No use needs more.
BODY_BYTES_MAX: Final = 4_096
_LOCAL, _PROXY = 0x20, 0x21  # version 2 and the command
_UNSPEC, _TCP4, _TCP6 = 0x00, 0x11, 0x21
_ADDRESSES: Final = {_TCP4: struct.Struct(">4s4sHH"), _TCP6: struct.Struct(">16s16sHH")}


class BadProxyHeader(Exception):
    """The received bytes are not a complete, valid header."""


class ClientAddress(NamedTuple):
    """The original address of a connection."""

    host: str
    port: int


async def read_source(accepted: socket.socket) -> ClientAddress | None:
    """Read exactly the header; return None if the address of the connection counts.

    Raises BadProxyHeader, OSError.
    """
    command, family, body_bytes = parse_head(await _read(accepted, HEAD.size))
    body = await _read(accepted, body_bytes)
    return None if command == _LOCAL or family == _UNSPEC else parse_source(family, body)


def parse_head(head: bytes) -> tuple[int, int, int]:
    """Return command, family and the size of the remaining header. Raises BadProxyHeader."""
    signature, command, family, body_bytes = HEAD.unpack(head)
    if signature != SIGNATURE:
        raise BadProxyHeader("the connection does not begin with a PROXY protocol 2 header")
    if command not in {_LOCAL, _PROXY}:
        raise BadProxyHeader(f"version and command {command:#x} of the PROXY header are unknown")
    if body_bytes > BODY_BYTES_MAX:
        raise BadProxyHeader(
            f"the PROXY header has {body_bytes} bytes; at most {BODY_BYTES_MAX} are accepted"
        )
    return command, family, body_bytes


def parse_source(family: int, body: bytes) -> ClientAddress:
    """Return the address of the client. Raises BadProxyHeader."""
    layout = _ADDRESSES.get(family)
    if layout is None or len(body) < layout.size:
        raise BadProxyHeader(f"{len(body)} bytes of family {family:#x} are not a TCP address")
    source, _, port, _ = layout.unpack_from(body)
    return ClientAddress(str(ipaddress.ip_address(source)), port)


async def _read(accepted: socket.socket, size_bytes: int) -> bytes:
    loop = asyncio.get_running_loop()
    read = b""
    while len(read) < size_bytes:
        part = await loop.sock_recv(accepted, size_bytes - len(read))
        if not part:
            raise BadProxyHeader("the connection ended inside its PROXY header")
        read += part
    return read
